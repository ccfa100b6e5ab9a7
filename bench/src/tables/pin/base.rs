//! Base pages, which are held by blocks of 512.

use uzone_pages::{ByteLen, Order, PageCount, PfnRange};
use uzone_zone::Zone;

use crate::settings::PinSettings;
use uzone_harness::ways::naive_pin::Naive;
use uzone_harness::ways::pin::{
    CALL_PAGES, Run, bare_add, bare_sub, bind, calls, check_pins, compare, role, timed_alone,
    timed_both, timed_each, words,
};
use uzone_harness::{Result, Session, Suite, timed};

pub(super) fn run(settings: &PinSettings, session: &mut Session<'_>) -> Result {
    let size = settings.size;
    let zone = Zone::with_keep_limit(ByteLen::ZERO);
    let base = bind(&zone, size, Order::BASE)?;
    check_pins(&base, "pin-4k/whole-pin")?;
    let range = base.range();
    let pages = range.pages().get();
    // All but a page at each end: the first and the last block are cut.
    let inner = range
        .start()
        .checked_add(PageCount::new(1))
        .and_then(|start| PfnRange::try_new(start, PageCount::new(pages - 2)))
        .unwrap_or(range);
    let (pieces, _) = calls(&base)?;
    let naive = Naive::new(pages, 1)?;
    let words = words(size)?;

    let cut = |range| timed_each(&[range], |range| base.pin(*range));
    let naive_pin: Run<'_> = &|| timed_alone(|| naive.hold(), || naive.give_back());
    let naive_both: Run<'_> = &|| timed_both(|| naive.hold(), || naive.give_back());
    let whole_pin: Run<'_> = &|| timed(|| Ok(base.pin(range)?));
    let (whole_both, cut_both): (Run<'_>, Run<'_>) = (&|| cut(range), &|| cut(inner));
    let call_both: Run<'_> = &|| timed_each(&pieces, |piece| base.pin(*piece));
    let one_each: Run<'_> = &|| timed_alone(|| bare_add(&words), || bare_sub(&words));
    let two_each: Run<'_> = &|| timed_both(|| bare_add(&words), || bare_sub(&words));
    let (each, one, call) = (Some(pages), Some(1), Some(pieces.len() as u64));
    let rows = [
        ("naive-pin", "naive, pin", each, naive_pin),
        ("naive-both", "naive, pin and unpin", each, naive_both),
        ("whole-pin", "whole region, pin", one, whole_pin),
        ("whole-both", "whole region, pin and unpin", one, whole_both),
        ("cut-both", "all but a page at each end, pin and unpin", one, cut_both),
        ("call-both", "512 pages a call by pfn, pin and unpin", call, call_both),
        ("limit-one", "bare atomics, one a block of 512", None, one_each),
        ("limit-both", "bare atomics, two a block of 512", None, two_each),
    ];
    let mut suite = Suite::new("pin-4k", size);
    for (row, name, calls, run) in rows {
        let spec = suite.add(role(row), row, name, move |_| run()).counts(calls, None);
        compare(spec);
        if row == "whole-pin" {
            spec.headline(format!("pin {size}: base pages, whole"));
        }
    }
    session.measure(
        suite,
        "Base pages, 8-byte descriptors",
        format!(
            "one thread; a block of {CALL_PAGES} that is held wholly is held by one word, and naive is \
             an atomic a page"
        ),
    )
}

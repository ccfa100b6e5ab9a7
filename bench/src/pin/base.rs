//! Base pages, which are held by blocks of 512.

use std::time::Duration;

use uzone_pages::{ByteLen, Order, PageCount, PfnRange};
use uzone_zone::Zone;

use super::naive::{Naive, hold_naive, hold_naive_and_give_back};
use super::shared::{
    CALL_PAGES, bind, calls, check_pins, hold_bare, hold_bare_and_give_back, timed, timed_each,
    words,
};
use crate::report::Role;
use crate::settings::PinSettings as Settings;
use crate::suite::{BenchError, Session, Suite};

pub(super) fn run(settings: &Settings, session: &mut Session<'_>) -> Result<(), BenchError> {
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

    let mut suite = Suite::new(size);
    let mut row = Rows { suite: &mut suite, pages };
    let (each, one) = (Some(pages), Some(1));
    row.add("naive-pin", "naive, pin", each, || hold_naive(&naive));
    row.add("naive-both", "naive, pin and unpin", each, || hold_naive_and_give_back(&naive));
    row.add("whole-pin", "whole region, pin", one, || timed(|| Ok(base.pin(range)?)));
    row.add("whole-both", "whole region, pin and unpin", one, || {
        timed_each(&[range], |range| base.pin(*range))
    });
    row.add("cut-both", "all but a page at each end, pin and unpin", one, || {
        timed_each(&[inner], |range| base.pin(*range))
    });
    let calls = Some(pieces.len() as u64);
    row.add("call-both", "512 pages a call by pfn, pin and unpin", calls, || {
        timed_each(&pieces, |piece| base.pin(*piece))
    });
    row.add("limit-one", "bare atomics, one a block of 512", None, || hold_bare(&words));
    row.add("limit-both", "bare atomics, two a block of 512", None, || {
        hold_bare_and_give_back(&words)
    });
    if let Some(spec) = suite.spec("pin-4k/whole-pin") {
        spec.headline(format!("pin {size}: base pages, whole"));
    }
    session.table("pin-4k", "Base pages, 8-byte descriptors", format!(
            "one thread; a block of {CALL_PAGES} that is held wholly is held by one word, and naive is \
             an atomic a page"
        ));
    session.run(suite, "base pages")
}

struct Rows<'s, 'a> {
    suite: &'s mut Suite<'a>,
    pages: u64,
}

impl<'a> Rows<'_, 'a> {
    /// Adds a row of so many calls; a limit makes none.
    fn add(
        &mut self,
        row: &str,
        name: &str,
        calls: Option<u64>,
        run: impl FnMut() -> Result<Duration, BenchError> + 'a,
    ) {
        let is_both = row.ends_with("-both");
        let (naive, limit) =
            if is_both { ("naive-both", "limit-both") } else { ("naive-pin", "limit-one") };
        let is_naive = calls == Some(self.pages);
        let role = match calls {
            None => Role::Limit,
            Some(_) if is_naive => Role::Naive,
            Some(_) => Role::Ours,
        };
        let spec = self.suite.add(role, &format!("pin-4k/{row}"), name, 0, 1, run);
        spec.calls = calls;
        if calls.is_some() {
            spec.naive(format!("pin-4k/{naive}"));
        }
        if role == Role::Ours {
            spec.limit(format!("pin-4k/{limit}"), 0);
        }
    }
}

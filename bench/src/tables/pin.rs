//! `uzone-bench pin`: the cost of holding memory for a device.
//!
//! The published experiment pinned 16 GiB of 2 MiB pages, 512 base pages a call, before and after the kernel learnt to
//! take one reference for each group of pages. Here a region of that size is reserved and described, and held in several
//! ways; its bytes are never touched.
//!
//! A row either holds alone (its guards are dropped when the clock has stopped), or holds and gives
//! back; its name states which. The naive way is an atomic step for each base page. The limit of a row is bare atomics,
//! or bare stores, on as many words.

use std::cell::RefCell;
use std::time::Duration;

use uzone_harness::ways::naive_pin::Naive;
use uzone_harness::ways::pin::{
    CALL_BYTES, CALL_ENTRIES, CALL_PAGES, bare_add, bare_sub, bind, calls, check_pins, timed_alone,
    timed_both, timed_each, words,
};
use uzone_harness::{
    Bench, BenchError, Published, Result, Role, Session, Suite, Watch, check_memory, timed,
};
use uzone_pages::{ByteLen, Order, Pfn, PfnRange};
use uzone_stream::{Pattern, Streaming};
use uzone_zone::{Pagemap, Zone};
use zerocopy::IntoBytes;

use crate::settings::{Part, PinSettings};

/// Runs the tables.
pub(crate) fn run(settings: &PinSettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let &PinSettings { size, rounds } = settings;
    check(size)?;
    let text = format!("{size} held ({} pages), {rounds} rounds", size.get() >> 12);
    let mut session = part.session(text, rounds, watch);
    session.each(&[
        ("pin-2m", &|session| folios(size, session)),
        ("pin-list", &|session| list(size, session)),
        ("pin-4k", &|session| base_pages(size, session)),
    ])?;
    session.finish()
}

/// Refuses a size that is no multiple of 1 GiB or exceeds the memory, before minutes are spent.
fn check(size: ByteLen) -> Result {
    if size.is_zero() || !size.get().is_multiple_of(1 << 30) {
        return Err(BenchError::size(size));
    }
    // The naive way's 64 bytes a page, a list of 8, and our descriptors of 8; and a fifth on top.
    check_memory(ByteLen::new((size.get() >> 12) * 80 / 5 * 6))
}

/// A row: its role, id and name, its number of calls, and its work.
type Row<'a> = (Role, &'a str, &'a str, u64, &'a dyn Fn() -> Result<Duration>);

/// Adds rows of `folios` folios. `rivals` returns the naive row and the limit of a row.
fn add<'a>(
    suite: &mut Suite<'a>,
    rows: &[Row<'a>],
    folios: u64,
    rivals: fn(&str) -> (&'static str, &'static str),
) {
    for &(role, row, name, calls, run) in rows {
        let (naive, limit) = rivals(row);
        let spec = suite.add(role, row, name, move |_| run());
        if role != Role::Limit {
            spec.counts(Some(calls), Some(folios)).naive(naive);
        }
        if role == Role::Ours {
            spec.limit(limit);
        }
    }
}

/// Returns the rivals of the same kind of hold, which the end of the id names.
fn of_kind(row: &str) -> (&'static str, &'static str) {
    match row.rsplit('-').next() {
        Some("get") => ("naive-get", "limit-one"),
        Some("both") => ("naive-both", "limit-both"),
        _ => ("naive-pin", "limit-one"),
    }
}

const MARTINS: &str = "Joao Martins, compound pagemaps v2, June 2021: 2 MiB pages of persistent \
     memory, 512 pages a call with their list, holding alone; naive before, ours after; 16 GiB, scaled to \
     as many pages as here";

/// The memory of the published times.
const PUBLISHED_SIZE: ByteLen = ByteLen::gib(16);

/// The published microseconds of 2 MiB folios.
const PUBLISHED_US: [(&str, u64); 4] =
    [("naive-get", 59_000), ("naive-pin", 87_000), ("call-get", 6_100), ("call-pin", 6_200)];

/// Measures 2 MiB folios.
fn folios(size: ByteLen, session: &mut Session<'_>) -> Result {
    let zone = &Zone::with_keep_limit(ByteLen::ZERO);
    let folios = &bind(zone, size, Order::PMD)?;
    check_pins(folios, "pin-2m/whole-pin")?;
    let (range, addresses) = (folios.range(), calls(folios)?);
    let pages = range.pages().get();
    let naive = Naive::new(pages, CALL_ENTRIES)?;
    check_naive(&naive, "pin-2m/naive-pin", folios)?;
    let (words, len) = (words(size)?, ByteLen::new(CALL_BYTES as u64));
    let referenced = RefCell::new(Vec::with_capacity(addresses.len()));
    let pinned = RefCell::new(Vec::with_capacity(addresses.len()));
    // Getting and pinning cost the same: the naive way has one sort of count.
    let hold = || timed_alone(|| naive.hold(), || naive.give_back());
    let hold_both = || timed_both(|| naive.hold(), || naive.give_back());
    let pin = || timed(|| Ok(folios.pin(range)?));
    let get_calls = || kept(&referenced, &addresses, |at| Ok(zone.get(*at, len)?));
    let pin_calls = || kept(&pinned, &addresses, |at| Ok(zone.pin(*at, len)?));
    let both_calls = || timed_each(&addresses, |at| zone.pin(*at, len));
    let bare = || timed_alone(|| bare_add(&words), || bare_sub(&words));
    let bare_both = || timed_both(|| bare_add(&words), || bare_sub(&words));
    let call = addresses.len() as u64;
    use Role::{Limit, Naive as Plain, Ours};
    let rows: [Row<'_>; 9] = [
        (Plain, "naive-get", "naive, get", pages, &hold),
        (Plain, "naive-pin", "naive, pin", pages, &hold),
        (Plain, "naive-both", "naive, pin and unpin", pages, &hold_both),
        (Ours, "whole-pin", "whole region, pin", 1, &pin),
        (Ours, "call-get", "512 pages a call by address, get", call, &get_calls),
        (Ours, "call-pin", "512 pages a call by address, pin", call, &pin_calls),
        (Ours, "call-both", "512 pages a call by address, pin and unpin", call, &both_calls),
        (Limit, "limit-one", "bare atomics, one a folio", 0, &bare),
        (Limit, "limit-both", "bare atomics, two a folio", 0, &bare_both),
    ];
    let mut suite = Suite::new("pin-2m", size);
    add(&mut suite, &rows, call, of_kind);
    for (row, us) in PUBLISHED_US {
        if let Some(spec) = suite.spec(row) {
            let (to, of) = (size.get(), PUBLISHED_SIZE.get());
            spec.row.published = Some(Published::scaled(us * 1000, to, of, MARTINS));
        }
    }
    for (row, name) in [("whole-pin", "whole"), ("call-pin", "512 pages a call")] {
        if let Some(spec) = suite.spec(row) {
            spec.headline(format!("pin {size}: 2 MiB folios, {name}"));
        }
    }
    session.measure(
        suite,
        format!("2 MiB folios, {size}, 8-byte descriptors"),
        "one thread; the guards of a row that pins alone are dropped when the clock has \
         stopped; naive is of the same kind of row; the limit is bare atomics on a word for each folio",
    )
}

/// Times `take` for each of some items; the guards are dropped when the clock has stopped.
fn kept<T, G>(
    kept: &RefCell<Vec<G>>,
    items: &[T],
    take: impl Fn(&T) -> Result<G>,
) -> Result<Duration> {
    let mut kept = kept.borrow_mut();
    let elapsed = timed(|| {
        for item in items {
            kept.push(take(item)?);
        }
        Ok(())
    });
    kept.clear();
    elapsed
}

/// Checks that the naive way holds every page once, and none afterwards.
fn check_naive(naive: &Naive, row: &str, pagemap: &Pagemap) -> Result {
    let range = pagemap.range();
    let is_right = naive.hold() as u64 == range.pages().get() && naive.is_held(CALL_PAGES);
    naive.give_back();
    if is_right && naive.is_held(0) {
        return Ok(());
    }
    Err(BenchError::wrong_page(row, range.start()))
}

/// Measures 2 MiB folios with a list of page frames, an entry for each base page, for drivers that know no ranges. The
/// list is the cost then, and the limit writes it.
fn list(size: ByteLen, session: &mut Session<'_>) -> Result {
    let zone = Zone::with_keep_limit(ByteLen::ZERO);
    let folios = bind(&zone, size, Order::PMD)?;
    let (range, pages) = (folios.range(), folios.range().pages().get());
    let naive = Naive::new(pages, CALL_ENTRIES)?;
    // One list for all, touched before: each row writes the same memory.
    let list = RefCell::new(uzone_harness::ways::pin::present::<Pfn>(pages)?);
    let Ok(progression) = Pattern::linear(&[range.start().get()], &[1]) else {
        unreachable!("one word fits a line")
    };
    folios.pin(range)?.write_pfns(&mut list.borrow_mut())?;
    check_list("pin-list/ours", range, &mut list.borrow_mut())?;
    naive.hold_listed(range.start(), &mut list.borrow_mut());
    naive.give_back();
    check_list("pin-list/naive", range, &mut list.borrow_mut())?;

    let hold = || {
        timed_alone(
            || naive.hold_listed(range.start(), &mut list.borrow_mut()),
            || naive.give_back(),
        )
    };
    let pin_whole = || {
        timed(|| {
            let pinned = folios.pin(range)?;
            pinned.write_pfns(&mut list.borrow_mut())?;
            Ok(pinned)
        })
    };
    let stream = || {
        let mut list = list.borrow_mut();
        timed(|| {
            let list = list.as_mut_bytes();
            Streaming::scope(uzone_stream::best(), |stream| stream.fill(list, &progression));
            Ok(())
        })
    };
    let rows: [Row<'_>; 3] = [
        (Role::Naive, "naive", "naive, an atomic and an entry a page", pages, &hold),
        (Role::Ours, "ours", "whole region, pin, list", 1, &pin_whole),
        (Role::Limit, "limit", "streaming the list alone", 0, &stream),
    ];
    let mut suite = Suite::new("pin-list", size).writing(pages * size_of::<Pfn>() as u64);
    add(&mut suite, &rows, pages / CALL_PAGES, |_| ("naive", "limit"));
    if let Some(spec) = suite.spec("ours") {
        spec.headline(format!("pin {size}: whole, with the list of its frames"));
    }
    session.measure(
        suite,
        "2 MiB folios, with a list of page frames",
        "pin alone, one thread; 8 bytes a base page into memory that was touched; the limit \
         streams that list and pins nothing",
    )
}

/// Checks that a list has every page, and clears it.
fn check_list(row: &str, range: PfnRange, list: &mut [Pfn]) -> Result {
    let wrong = list.iter().zip(range.iter()).find(|(entry, pfn)| *entry != pfn);
    let wrong = wrong.map(|(_, pfn)| BenchError::wrong_page(row, pfn));
    list.fill(Pfn::new(0));
    wrong.map_or(Ok(()), Err)
}

/// Measures base pages, which are held by blocks of 512.
fn base_pages(size: ByteLen, session: &mut Session<'_>) -> Result {
    let zone = Zone::with_keep_limit(ByteLen::ZERO);
    let base = bind(&zone, size, Order::BASE)?;
    check_pins(&base, "pin-4k/whole-pin")?;
    let (range, pages) = (base.range(), base.range().pages().get());
    let (naive, words) = (Naive::new(pages, 1)?, words(size)?);
    let hold = || timed_alone(|| naive.hold(), || naive.give_back());
    let pin = || timed(|| Ok(base.pin(range)?));
    let bare = || timed_alone(|| bare_add(&words), || bare_sub(&words));
    let rows: [Row<'_>; 3] = [
        (Role::Naive, "naive-pin", "naive, pin", pages, &hold),
        (Role::Ours, "whole-pin", "whole region, pin", 1, &pin),
        (Role::Limit, "limit-one", "bare atomics, one a block of 512", 0, &bare),
    ];
    let mut suite = Suite::new("pin-4k", size);
    add(&mut suite, &rows, pages / CALL_PAGES, of_kind);
    if let Some(spec) = suite.spec("whole-pin") {
        spec.headline(format!("pin {size}: base pages, whole"));
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

//! 2 MiB folios: the whole region as one guard, and the published experiment's 512 pages a call.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use uzone_pages::{ByteLen, MemoryKind, Order, PfnRange};
use uzone_zone::{
    AltmapOptions, BindOptions, Init, Pagemap, Pinned, RawGuard, Redeemed, Region, Zone,
};

use uzone_harness::ways::naive_pin::Naive;
use uzone_harness::ways::pin::{
    CALL_BYTES, CALL_ENTRIES, CALL_PAGES, Run, bare_add, bare_sub, bind, calls, check_pins,
    compare, published, role, timed_alone, timed_both, timed_each, words,
};
use uzone_harness::{BenchError, Published, Result, Session, Suite, timed};

/// One table: a way of describing the region, and what was published of it.
struct Shape {
    table: String,
    title: String,
    /// The rows that stand in the summary, and what they are called there.
    headlines: Option<[(&'static str, &'static str); 2]>,
    naive_get: Option<Published>,
    naive_pin: Option<Published>,
    get: Option<Published>,
    pin: Option<Published>,
}

const NOTE: &str = "one thread; the guards of a row that pins alone are dropped when the clock has \
     stopped; naive is of the same kind of row; the limit is bare atomics on a word for each folio";

/// Measures both tables; their ids end with `suffix`.
pub(super) fn run(size: ByteLen, suffix: &str, session: &mut Session<'_>) -> Result {
    outside(size, suffix, session)?;
    inside(size, suffix, session)
}

/// Descriptors in memory of their own.
fn outside(size: ByteLen, suffix: &str, session: &mut Session<'_>) -> Result {
    let zone = Zone::with_keep_limit(ByteLen::ZERO);
    let folios = bind(&zone, size, Order::PMD)?;
    let shape = Shape {
        table: format!("pin-2m{suffix}"),
        title: format!("2 MiB folios, {size}, 8-byte descriptors"),
        headlines: suffix.is_empty().then_some([
            ("whole-pin", "2 MiB folios, whole"),
            ("call-pin", "2 MiB folios, 512 pages a call"),
        ]),
        naive_get: published(size, 59_000, 492_000),
        naive_pin: published(size, 87_000, 493_000),
        get: published(size, 6_100, 49_000),
        pin: published(size, 6_200, 50_000),
    };
    table(&shape, size, &zone, &folios, session)
}

/// Descriptors in the region itself.
fn inside(size: ByteLen, suffix: &str, session: &mut Session<'_>) -> Result {
    let zone = Zone::with_keep_limit(ByteLen::ZERO);
    let options = BindOptions::new(MemoryKind::Generic)
        .order(Order::PMD)
        .init(Init::Eager)
        .altmap(AltmapOptions::new());
    let folios = zone.bind(Region::anonymous(size)?, options)?;
    let shape = Shape {
        table: format!("pin-2m-altmap{suffix}"),
        title: format!("2 MiB folios, {size}, 8-byte descriptors inside of the region (altmap)"),
        headlines: None,
        naive_get: published(size, 494_000, 3_910_000),
        naive_pin: published(size, 494_000, 3_970_000),
        get: published(size, 9_000, 70_000),
        pin: published(size, 10_000, 74_000),
    };
    table(&shape, size, &zone, &folios, session)
}

/// Guards that were taken while the clock ran, and will be dropped when it has stopped.
type Kept<G> = RefCell<Vec<G>>;

fn keep<G>(calls: usize) -> Kept<G> {
    RefCell::new(Vec::with_capacity(calls))
}

/// Times `take` for each of some items; the guards are dropped when the clock has stopped.
fn fill<T, G, E>(kept: &Kept<G>, items: &[T], take: impl Fn(&T) -> Result<G, E>) -> Result<Duration>
where
    BenchError: From<E>,
{
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

/// Times one guard over all, and a look at it.
fn whole<G, E>(take: impl FnOnce() -> Result<G, E>, look: impl FnOnce(&G)) -> Result<Duration>
where
    BenchError: From<E>,
{
    timed(|| Ok(take().inspect(look)?))
}

/// Times turning guards of pieces into bits, and back.
fn through_bits(
    zone: &Zone,
    folios: &Pagemap,
    pieces: &[PfnRange],
    (kept, raw): (&Kept<Pinned>, &Kept<RawGuard>),
    row: &str,
) -> Result<Duration> {
    let (mut kept, mut raw) = (kept.borrow_mut(), raw.borrow_mut());
    for &piece in pieces {
        kept.push(folios.pin(piece)?);
    }
    let elapsed = timed(|| {
        for pinned in kept.drain(..) {
            let failed = |cause| BenchError::failed("turn a guard into bits", false, cause);
            raw.push(pinned.into_raw().map_err(|refused| failed(refused.1))?);
        }
        for raw in raw.drain(..) {
            if let Redeemed::Pinned(pinned) = zone.redeem(raw)? {
                kept.push(pinned);
            }
        }
        Ok(())
    });
    let is_whole = kept.len() == pieces.len();
    kept.clear();
    if is_whole { elapsed } else { Err(BenchError::wrong_page(row, folios.range().start())) }
}

fn table(
    shape: &Shape,
    size: ByteLen,
    zone: &Zone,
    folios: &Pagemap,
    session: &mut Session<'_>,
) -> Result {
    let id = |row: &str| format!("{}/{row}", shape.table);
    check_pins(folios, &id("whole-pin"))?;
    let (range, (pieces, addresses)) = (folios.range(), calls(folios)?);
    let (pages, calls) = (range.pages().get(), pieces.len());
    let naive = Naive::new(pages, CALL_ENTRIES)?;
    check_naive(&naive, &id("naive-pin"), folios)?;
    let words = words(size)?;
    let (pinned, across, referenced, raw) = (keep(calls), keep(calls), keep(calls), keep(calls));
    let (len, segments) = (ByteLen::new(CALL_BYTES as u64), Cell::new(0));
    let (each, one, call) = (Some(pages), Some(1), Some(calls as u64));
    // Getting and pinning cost the same: the naive way has one sort of count.
    let hold: Run<'_> = &|| timed_alone(|| naive.hold(), || naive.give_back());
    let hold_both: Run<'_> = &|| timed_both(|| naive.hold(), || naive.give_back());
    let get: Run<'_> = &|| whole(|| folios.get(range), |all| segments.set(all.segments().count()));
    let pin: Run<'_> = &|| whole(|| folios.pin(range), |all| segments.set(all.segments().count()));
    let both: Run<'_> = &|| timed_each(&[range], |range| folios.pin(*range));
    let call_get: Run<'_> = &|| fill(&referenced, &addresses, |at| zone.get(*at, len));
    let call_pin: Run<'_> = &|| fill(&across, &addresses, |at| zone.pin(*at, len));
    let call_both: Run<'_> = &|| timed_each(&addresses, |at| zone.pin(*at, len));
    let pfn_pin: Run<'_> = &|| fill(&pinned, &pieces, |piece| folios.pin(*piece));
    let pfn_both: Run<'_> = &|| timed_each(&pieces, |piece| folios.pin(*piece));
    let bits: Run<'_> = &|| through_bits(zone, folios, &pieces, (&pinned, &raw), &id("call-raw"));
    let bare: Run<'_> = &|| timed_alone(|| bare_add(&words), || bare_sub(&words));
    let bare_both: Run<'_> = &|| timed_both(|| bare_add(&words), || bare_sub(&words));
    let none = &None;
    let rows = [
        ("naive-get", "naive, get", each, &shape.naive_get, hold),
        ("naive-pin", "naive, pin", each, &shape.naive_pin, hold),
        ("naive-both", "naive, pin and unpin", each, none, hold_both),
        ("whole-get", "whole region, get", one, none, get),
        ("whole-pin", "whole region, pin", one, none, pin),
        ("whole-both", "whole region, pin and unpin", one, none, both),
        ("call-get", "512 pages a call by address, get", call, &shape.get, call_get),
        ("call-pin", "512 pages a call by address, pin", call, &shape.pin, call_pin),
        ("call-both", "512 pages a call by address, pin and unpin", call, none, call_both),
        ("call-pfn-pin", "512 pages a call by pfn, pin", call, &shape.pin, pfn_pin),
        ("call-pfn-both", "512 pages a call by pfn, pin and unpin", call, none, pfn_both),
        (TOKEN, "a guard of 512 pages to 64 bits and back", call, none, bits),
        ("limit-one", "bare atomics, one a folio", None, none, bare),
        ("limit-both", "bare atomics, two a folio", None, none, bare_both),
    ];
    let mut suite = Suite::new(&shape.table, ByteLen::new(pages << 12));
    for (row, name, count, published, run) in rows {
        let spec = suite.add(role(row), row, name, move |_| run()).counts(count, call);
        spec.row.published.clone_from(published);
        // It is no hold, which others could be compared with.
        if row != TOKEN {
            compare(spec);
        }
        let headline = shape.headlines.iter().flatten().find(|(known, _)| *known == row);
        spec.row.headline = headline.map(|(_, name)| format!("pin {size}: {name}"));
    }
    session.measure(suite, &shape.title, NOTE)
}

/// The row of guards as bits.
const TOKEN: &str = "call-raw";

/// Checks that the naive way holds every page once, and none afterwards.
fn check_naive(naive: &Naive, row: &str, pagemap: &Pagemap) -> Result {
    let range = pagemap.range();
    let wrong = || BenchError::wrong_page(row, range.start());
    let held = naive.hold();
    if held as u64 != range.pages().get() || !naive.is_held(CALL_PAGES) {
        return Err(wrong());
    }
    naive.give_back();
    if naive.is_held(0) { Ok(()) } else { Err(wrong()) }
}

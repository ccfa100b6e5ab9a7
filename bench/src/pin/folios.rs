//! 2 MiB folios: the whole region as one guard, and the published experiment's 512 pages a call.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use uzone_pages::{ByteLen, MemoryKind, Order};
use uzone_zone::{
    AltmapOptions, BindOptions, Init, Pagemap, Pinned, PinnedRanges, RawGuard, Redeemed,
    Referenced, Region, Zone,
};

use super::naive::{Naive, hold_naive, hold_naive_and_give_back};
use super::shared::{
    CALL_BYTES, CALL_ENTRIES, CALL_PAGES, bind, calls, check_pins, hold_bare,
    hold_bare_and_give_back, published, timed, timed_each, words,
};
use crate::report::{Published, Role};
use crate::suite::{BenchError, Session, Suite};

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
pub(super) fn run(
    size: ByteLen,
    suffix: &str,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
    outside(size, suffix, session)?;
    inside(size, suffix, session)
}

/// Descriptors in memory of their own.
pub(super) fn outside(
    size: ByteLen,
    suffix: &str,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
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
fn inside(size: ByteLen, suffix: &str, session: &mut Session<'_>) -> Result<(), BenchError> {
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
fn fill<T, G, E>(
    kept: &Kept<G>,
    items: &[T],
    take: impl Fn(&T) -> Result<G, E>,
) -> Result<Duration, BenchError>
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

fn table(
    shape: &Shape,
    size: ByteLen,
    zone: &Zone,
    folios: &Pagemap,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
    let id = |row: &str| format!("{}/{row}", shape.table);
    check_pins(folios, &id("whole-pin"))?;
    let range = folios.range();
    let pages = range.pages().get();
    let (pieces, addresses) = calls(folios)?;
    let naive = Naive::new(pages, CALL_ENTRIES)?;
    check_naive(&naive, &id("naive-pin"), folios)?;
    let words = words(size)?;
    let pinned: Kept<Pinned> = keep(pieces.len());
    let across: Kept<PinnedRanges<Pinned>> = keep(pieces.len());
    let referenced: Kept<PinnedRanges<Referenced>> = keep(pieces.len());
    let raw: RefCell<Vec<RawGuard>> = RefCell::new(Vec::with_capacity(pieces.len()));
    let len = ByteLen::new(CALL_BYTES as u64);
    let segments = Cell::new(0);

    let mut suite = Suite::new(ByteLen::new(pages << 12));
    let mut row = Rows { suite: &mut suite, shape, calls: pieces.len() as u64 };
    // Getting and pinning cost the same: the naive way has one sort of count.
    row.add("naive-get", "naive, get", Kind::Naive(shape.naive_get.clone()), || hold_naive(&naive));
    row.add("naive-pin", "naive, pin", Kind::Naive(shape.naive_pin.clone()), || hold_naive(&naive));
    row.add("naive-both", "naive, pin and unpin", Kind::Naive(None), || {
        hold_naive_and_give_back(&naive)
    });
    row.add("whole-get", "whole region, get", Kind::Whole, || {
        timed(|| {
            let referenced = folios.get(range)?;
            segments.set(referenced.segments().count());
            Ok(referenced)
        })
    });
    row.add("whole-pin", "whole region, pin", Kind::Whole, || {
        timed(|| {
            let pinned = folios.pin(range)?;
            segments.set(pinned.segments().count());
            Ok(pinned)
        })
    });
    row.add("whole-both", "whole region, pin and unpin", Kind::Whole, || {
        timed_each(&[range], |range| folios.pin(*range))
    });
    row.add("call-get", "512 pages a call by address, get", Kind::Call(shape.get.clone()), || {
        fill(&referenced, &addresses, |address| zone.get(*address, len))
    });
    row.add("call-pin", "512 pages a call by address, pin", Kind::Call(shape.pin.clone()), || {
        fill(&across, &addresses, |address| zone.pin(*address, len))
    });
    row.add("call-both", "512 pages a call by address, pin and unpin", Kind::Call(None), || {
        timed_each(&addresses, |address| zone.pin(*address, len))
    });
    row.add("call-pfn-pin", "512 pages a call by pfn, pin", Kind::Call(shape.pin.clone()), || {
        fill(&pinned, &pieces, |piece| folios.pin(*piece))
    });
    row.add("call-pfn-both", "512 pages a call by pfn, pin and unpin", Kind::Call(None), || {
        timed_each(&pieces, |piece| folios.pin(*piece))
    });
    row.add("call-raw", "a guard of 512 pages to 64 bits and back", Kind::Token, || {
        let mut kept = pinned.borrow_mut();
        for &piece in &pieces {
            kept.push(folios.pin(piece)?);
        }
        let mut raw = raw.borrow_mut();
        let elapsed = timed(|| {
            for pinned in kept.drain(..) {
                raw.push(pinned.into_raw()?);
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
        let wrong = || BenchError::Wrong { row: id("call-raw"), pfn: range.start() };
        if is_whole { elapsed } else { Err(wrong()) }
    });
    row.add("limit-one", "bare atomics, one a folio", Kind::Limit, || hold_bare(&words));
    row.add("limit-both", "bare atomics, two a folio", Kind::Limit, || {
        hold_bare_and_give_back(&words)
    });
    session.table(&shape.table, &shape.title, NOTE);
    if let Some(headlines) = shape.headlines {
        for (row, name) in headlines {
            if let Some(spec) = suite.spec(&id(row)) {
                spec.headline(format!("pin {size}: {name}"));
            }
        }
    }
    session.run(suite, &shape.title)
}

/// What a row is compared with.
enum Kind {
    Naive(Option<Published>),
    Whole,
    Call(Option<Published>),
    Token,
    Limit,
}

struct Rows<'s, 'a> {
    suite: &'s mut Suite<'a>,
    shape: &'s Shape,
    calls: u64,
}

impl<'a> Rows<'_, 'a> {
    fn add(
        &mut self,
        row: &str,
        name: &str,
        kind: Kind,
        run: impl FnMut() -> Result<Duration, BenchError> + 'a,
    ) {
        let table = &self.shape.table;
        let is_get = row.ends_with("-get");
        let is_both = row.ends_with("-both");
        let naive = match (is_get, is_both) {
            (true, _) => "naive-get",
            (_, true) => "naive-both",
            _ => "naive-pin",
        };
        let limit = if is_both { "limit-both" } else { "limit-one" };
        let role = match kind {
            Kind::Naive(_) => Role::Naive,
            Kind::Limit => Role::Limit,
            Kind::Whole | Kind::Call(_) | Kind::Token => Role::Ours,
        };
        let spec = self.suite.add(role, &format!("{table}/{row}"), name, 0, 1, run);
        spec.folios = Some(self.calls);
        if !matches!(kind, Kind::Token | Kind::Limit) {
            spec.naive(format!("{table}/{naive}"));
        }
        if matches!(kind, Kind::Whole | Kind::Call(_)) {
            spec.limit(format!("{table}/{limit}"), 0);
        }
        match kind {
            Kind::Naive(published) => {
                spec.calls = Some(spec.pages);
                spec.published = published;
            }
            Kind::Whole => spec.calls = Some(1),
            Kind::Call(published) => {
                spec.calls = Some(self.calls);
                spec.published = published;
            }
            Kind::Token => spec.calls = Some(self.calls),
            Kind::Limit => {}
        }
    }
}

/// Checks that the naive way holds every page once, and none afterwards.
fn check_naive(naive: &Naive, row: &str, pagemap: &Pagemap) -> Result<(), BenchError> {
    let range = pagemap.range();
    let wrong = || BenchError::Wrong { row: row.to_owned(), pfn: range.start() };
    let held = naive.hold();
    if held as u64 != range.pages().get() || !naive.is_held(CALL_PAGES) {
        return Err(wrong());
    }
    naive.give_back();
    if naive.is_held(0) { Ok(()) } else { Err(wrong()) }
}

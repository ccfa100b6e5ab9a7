//! `uzone bench pin`: what it costs to hold memory for a device.
//!
//! The published experiment pinned 16 GiB and 128 GiB of 2 MiB pages, 512 base pages a call, before
//! and after the kernel learnt to take one reference for each group of pages. Here a region of that
//! size is reserved and described by 2 MiB folios, and held:
//!
//! | row | what it does |
//! |---|---|
//! | naive | an atomic step for every base page, on its folio's word |
//! | ours, whole range | one guard: an atomic step for every folio |
//! | ours, 512 pages a call | a guard for every folio |
//! | ours, base pages | one guard over a memmap of base pages: an atomic step for every page |
//! | limit | bare atomic additions to as many neighbouring words |
//!
//! Every row takes and gives back; what is shown is both together.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use uzone::{
    BindOptions, ByteLen, Init, Layout, Memmap, MemoryKind, Order, Page, PageCount, Pagemap, Pfn,
    PfnRange, Region, Tails, Zone,
};

use crate::group::Watch;
use crate::machine::Machine;
use crate::report::{Bench, Published, SCHEMA, Table};
use crate::suite::{BenchError, Suite};

const MARTINS: &str =
    "Joao Martins, compound pagemaps v2, June 2021: pin alone, 512 pages a call, pmem";

/// What `uzone bench pin` is told.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How much memory is held.
    pub size: ByteLen,
    /// How many rounds.
    pub rounds: u32,
}

/// Runs the table.
///
/// # Errors
/// [`BenchError`] if the size is none that is measured, or a hold was refused.
pub fn run(settings: Settings, watch: Watch<'_>) -> Result<Bench, BenchError> {
    let Settings { size, rounds } = settings;
    if size.is_zero() || !size.get().is_multiple_of(1 << 30) {
        return Err(BenchError::Size { size });
    }
    let pages = size.get() >> 12;
    let zone = Zone::with_keep_limit(ByteLen::ZERO);
    let bind = |order| -> Result<Pagemap, BenchError> {
        let options = BindOptions::new(MemoryKind::Generic).order(order).init(Init::Eager);
        Ok(zone.bind(Region::anonymous(size)?, options)?)
    };
    let folios = bind(Order::PMD)?;
    let base_pages = bind(Order::BASE)?;
    let naive = naive_memmap(pages);
    let words: Vec<AtomicU64> = (0..pages >> 9).map(|_| AtomicU64::new(0)).collect();
    check(&folios)?;

    let mut suite = Suite::new(size);
    suite.add("pin/naive", "naive, an atomic a base page", 0, 1, || {
        let started = Instant::now();
        for pfn in naive.layout().range().iter() {
            // Every page of the range has a folio, and nothing else holds it.
            let taken = naive.folio(pfn).is_some_and(|folio| folio.try_pin().is_ok());
            debug_assert!(taken);
        }
        for pfn in naive.layout().range().iter() {
            let given = naive.folio(pfn).is_some_and(|folio| folio.unpin().is_ok());
            debug_assert!(given);
        }
        Ok(started.elapsed())
    });
    let whole = |pagemap: &Pagemap| {
        let started = Instant::now();
        drop(pagemap.pin(pagemap.range())?);
        Ok(started.elapsed())
    };
    suite.add("pin/ours-whole", "ours, whole range", 0, 1, || whole(&folios));
    suite.add("pin/ours-512", "ours, 512 pages a call", 0, 1, || {
        let range = folios.range();
        let started = Instant::now();
        for start in (range.start().get()..range.end().get()).step_by(512) {
            let piece = PfnRange::try_new(Pfn::new(start), PageCount::new(512));
            drop(folios.pin(piece.unwrap_or(range))?);
        }
        Ok(started.elapsed())
    });
    suite.add("pin/ours-base", "ours, base pages, whole range", 0, 1, || whole(&base_pages));
    suite.add("pin/limit", "bare atomics, a word a folio", 0, 1, || {
        let started = Instant::now();
        for word in &words {
            word.fetch_add(1, Ordering::Relaxed);
        }
        for word in &words {
            word.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(started.elapsed())
    });
    let published = match size.get() >> 30 {
        16 => Some(Published { ns: 6_200_000, source: MARTINS }),
        128 => Some(Published { ns: 50_000_000, source: MARTINS }),
        _ => None,
    };
    for id in ["pin/naive", "pin/ours-whole", "pin/ours-512", "pin/ours-base"] {
        if let Some(spec) = suite.spec(id) {
            spec.naive = Some("pin/naive".to_owned());
            spec.published = published.filter(|_| id == "pin/ours-512");
        }
    }
    let mut results = Vec::new();
    suite.run("pins", rounds, watch, &mut results)?;
    Ok(Bench {
        schema: SCHEMA,
        benchmark: "pin",
        machine: Machine::here(),
        settings: format!("{size} held ({pages} pages), {rounds} rounds"),
        tables: vec![Table {
            id: "pin".to_owned(),
            title: "Pin and unpin, 2 MiB folios, 8-byte descriptors".to_owned(),
            note: "both together; one thread; the limit writes as many words as there are folios"
                .to_owned(),
        }],
        results,
        skipped: Vec::new(),
    })
}

/// A memmap of 2 MiB folios on the heap, to be held page by page.
fn naive_memmap(pages: u64) -> Memmap<(), Vec<Page>> {
    let laid_out = PfnRange::try_new(Pfn::new(1 << 20), PageCount::new(pages))
        .map_err(uzone::LayoutError::from)
        .and_then(|range| Layout::try_new(range, Order::PMD, Tails::Derived));
    let Ok(layout) = laid_out else { unreachable!("a whole number of GiB has whole folios") };
    let descriptors = (0..layout.descriptors()).map(|_| Page::new(())).collect();
    match Memmap::try_new(layout, MemoryKind::Generic, descriptors) {
        Ok(memmap) => memmap,
        Err(_) => unreachable!("there are as many descriptors as the layout has"),
    }
}

/// Checks that a guard over the whole range holds every folio once, and none afterwards.
fn check(pagemap: &Pagemap) -> Result<(), BenchError> {
    let range = pagemap.range();
    let pins = |expected: u32| {
        let wrong = (range.start().get()..range.end().get()).step_by(512).find(|pfn| {
            pagemap.page(Pfn::new(*pfn)).is_none_or(|page| page.word().pins() != expected)
        });
        match wrong {
            None => Ok(()),
            Some(pfn) => {
                Err(BenchError::Wrong { row: "pin/ours-whole".to_owned(), pfn: Pfn::new(pfn) })
            }
        }
    };
    let pinned = pagemap.pin(range)?;
    pins(1)?;
    drop(pinned);
    pins(0)
}

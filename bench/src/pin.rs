//! `uzone bench pin`: what it costs to hold memory for a device.
//!
//! The published experiment pinned 16 GiB and 128 GiB of 2 MiB pages, 512 base pages a call, before
//! and after the kernel learnt to take one reference for each group of pages. Here a region of that
//! size is reserved and described, and held in every way there is; its bytes are never touched.
//!
//! | file | table |
//! |---|---|
//! | `folios` | 2 MiB folios: the whole region as one guard, and 512 pages a call |
//! | `list` | the same with a list of page frames, as a driver wants it that knows no ranges |
//! | `base` | base pages |
//! | `threads` | two threads, on halves of the region and on all of it |
//! | `kernel` | what the kernel itself takes to pin memory that is present |
//! | `naive` | the yardstick of all: an atomic step for each base page |
//!
//! A row either holds alone (its guards are dropped when the clock has stopped), or holds and gives
//! back; its name states which. The limit of a row is bare atomics, or bare stores, on as many words.

mod base;
mod folios;
mod kernel;
mod list;
mod naive;
mod threads;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use uzone_os::{Anonymous, Exclusive, HugeAdvice, Mapped, SystemRoot, memory};
use uzone_zone::{
    BindOptions, ByteLen, Init, MemoryKind, Order, PageCount, Pagemap, Pfn, PfnRange, Region, Zone,
};
use zerocopy::FromBytes;

use crate::group::Watch;
use crate::report::{Bench, Published, Row};
use crate::settings::{Part, byte_len, check_found, wants, wants_any};
use crate::suite::BenchError;

const MARTINS: &str = "Joao Martins, compound pagemaps v2, June 2021: 2 MiB pages of persistent \
     memory, 512 pages a call with their list, holding alone; naive before, ours after; 16 and 128 GiB, \
     and scaled from 16 to other sizes";

/// The settings of `uzone bench pin`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// How much memory is held.
    #[serde(rename = "size_bytes", with = "byte_len")]
    pub size: ByteLen,
    /// How many rounds.
    pub rounds: u32,
    /// What the ids of the tables begin with that are run; none, and all are.
    pub tables: Vec<String>,
}

/// How many base pages one call holds: a 2 MiB folio's, as in the published experiment.
const CALL_PAGES: u64 = CALL_ENTRIES as u64;
/// As many, as the length of a list.
const CALL_ENTRIES: usize = 512;

/// Runs the tables.
///
/// # Errors
/// [`BenchError`] if the size is none that is measured, memory is short, or a hold was refused.
pub fn run(settings: &Settings, watch: Watch<'_>) -> Result<Bench, BenchError> {
    check(settings)?;
    let asked = &settings.tables;
    let mut bench = empty(settings);
    if wants_any(asked, &["pin-2m", "pin-2m-altmap"]) {
        folios::run(settings, watch, &mut bench)?;
    }
    if wants(asked, "pin-list") {
        list::run(settings, watch, &mut bench)?;
    }
    if wants(asked, "pin-4k") {
        base::run(settings, watch, &mut bench)?;
    }
    if wants(asked, "pin-threads") {
        threads::run(settings, watch, &mut bench)?;
    }
    if wants(asked, "pin-kernel") {
        kernel::run(settings, watch, &mut bench)?;
    }
    check_found(asked, !(bench.tables.is_empty() && bench.skipped.is_empty()))?;
    Ok(bench.summed_up())
}

fn empty(settings: &Settings) -> Bench {
    let Settings { size, rounds, .. } = settings;
    let sentence = format!("{size} held ({} pages), {rounds} rounds", size.get() >> 12);
    Bench::new(sentence, Part::Pin(settings.clone()))
}

/// Runs the table of 2 MiB folios alone.
pub(crate) fn only_folios(settings: &Settings, watch: Watch<'_>) -> Result<Vec<Row>, BenchError> {
    check(settings)?;
    let mut bench = empty(settings);
    folios::outside(settings, watch, &mut bench)?;
    Ok(bench.results)
}

/// Returns whether the tables can be run: before minutes are spent.
fn check(settings: &Settings) -> Result<(), BenchError> {
    let size = settings.size;
    if size.is_zero() || !size.get().is_multiple_of(1 << 30) {
        return Err(BenchError::Size { size });
    }
    // The naive way's 64 bytes a page, a list of 8, and our descriptors of 8; and a fifth on top.
    let needed = ByteLen::new((size.get() >> 12) * 80 / 5 * 6);
    match memory::available(&SystemRoot::host()) {
        Ok(available) if available.bytes < needed => Err(BenchError::TooLittleMemory {
            needed,
            available: available.bytes,
            limited_by: available.limited_by,
        }),
        _ => Ok(()),
    }
}

/// A region of `size`, described by folios of `order` whose descriptors are all present.
fn bind(zone: &Zone, size: ByteLen, order: Order) -> Result<Pagemap, BenchError> {
    let options = BindOptions::new(MemoryKind::Generic).order(order).init(Init::Eager);
    Ok(zone.bind(Region::anonymous(size)?, options)?)
}

/// The pages of a region, cut into what one call holds, by their numbers and by their addresses.
fn calls(pagemap: &Pagemap) -> Result<(Vec<PfnRange>, Vec<usize>), BenchError> {
    let range = pagemap.range();
    let starts = (range.start().get()..range.end().get()).step_by(CALL_ENTRIES);
    let pieces: Vec<PfnRange> = starts
        .filter_map(|start| PfnRange::try_new(Pfn::new(start), PageCount::new(CALL_PAGES)).ok())
        .collect();
    // One piece of memory, which need not begin where the region does.
    let base = pagemap.get(range)?.segments().map(|segment| segment.address).min().unwrap_or(0);
    let addresses = (0..pieces.len()).map(|call| base + call * CALL_BYTES).collect();
    Ok((pieces, addresses))
}

const CALL_BYTES: usize = CALL_ENTRIES << 12;

/// Memory for `count` values of plain data, present, in huge pages where the host has them.
fn present<T: FromBytes>(count: u64) -> Result<Mapped<T>, BenchError> {
    let bytes = count * size_of::<T>() as u64;
    let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
    let mut memory = Exclusive::anonymous(ByteLen::new(bytes), how)?;
    memory.populate(0..bytes)?;
    // The memory was made for that count, and pages are aligned to more than any value is.
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    Mapped::try_new(memory, count).map_err(|_| BenchError::Size { size: ByteLen::new(bytes) })
}

/// As many neighbouring words as there are folios, or blocks of base pages: the limit writes them.
fn words(size: ByteLen) -> Result<Mapped<AtomicU64>, BenchError> {
    present((size.get() >> 12) / CALL_PAGES)
}

fn bare_add(words: &[AtomicU64]) {
    for word in words {
        word.fetch_add(1, Ordering::Relaxed);
    }
}

fn bare_sub(words: &[AtomicU64]) {
    for word in words {
        word.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs `work`, and what it returns is dropped when the clock has stopped.
fn timed<T>(work: impl FnOnce() -> Result<T, BenchError>) -> Result<Duration, BenchError> {
    let started = Instant::now();
    let done = work()?;
    let elapsed = started.elapsed();
    drop(done);
    Ok(elapsed)
}

/// Runs `work` alone, and then what takes it back.
fn timed_alone(work: impl FnOnce(), undo: impl FnOnce()) -> Result<Duration, BenchError> {
    let started = Instant::now();
    work();
    let elapsed = started.elapsed();
    undo();
    Ok(elapsed)
}

/// A published time, of microseconds for 16 GiB and for 128: other sizes take as much for each page.
fn published(size: ByteLen, us_16: u64, us_128: u64) -> Option<Published> {
    let ns = match size.get() >> 30 {
        128 => us_128 * 1000,
        gib => us_16 * 1000 * gib / 16,
    };
    Some(Published { ns, source: MARTINS })
}

/// Checks that a guard over the whole region pins every folio once, and none afterwards.
fn check_pins(pagemap: &Pagemap, row: &str) -> Result<(), BenchError> {
    let range = pagemap.range();
    let pins = |expected: u32| {
        let wrong = range
            .iter()
            .step_by(1 << pagemap.report().order.get())
            .find(|pfn| pagemap.page(*pfn).is_none_or(|page| page.word().pins() != expected));
        match wrong {
            None => Ok(()),
            Some(pfn) => Err(BenchError::Wrong { row: row.to_owned(), pfn }),
        }
    };
    let pinned = pagemap.pin(range)?;
    pins(1)?;
    drop(pinned);
    pins(0)
}

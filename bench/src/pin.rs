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
mod shared;
mod threads;

use uzone_os::{SystemRoot, memory};
use uzone_pages::ByteLen;

use crate::group::Watch;
use crate::report::{Bench, Row, document, summed_up};
pub use crate::settings::PinSettings as Settings;
use crate::settings::{Part, wants, wants_any};
use crate::suite::{BenchError, check_found};

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
    Ok(summed_up(bench))
}

fn empty(settings: &Settings) -> Bench {
    let Settings { size, rounds, .. } = settings;
    let sentence = format!("{size} held ({} pages), {rounds} rounds", size.get() >> 12);
    document(sentence, &Part::Pin(settings.clone()))
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

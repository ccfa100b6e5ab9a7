//! Cases that hold memory: regions to hold, the bare atomics that are their limit, and times of taking and giving back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use uzone_os::Mapped;
use uzone_pages::{ByteLen, MemoryKind, Order};
use uzone_zone::{BindOptions, Init, Pagemap, Region, Zone};
use zerocopy::FromBytes;

use crate::{BenchError, Result, index, timed};

/// The number of base pages of one call: a 2 MiB folio, as in the published experiment.
pub const CALL_PAGES: u64 = CALL_ENTRIES as u64;
/// The same number as the length of a list.
pub const CALL_ENTRIES: usize = 512;

/// A region of `size`, described by folios of `order` whose descriptors are all present.
pub fn bind(zone: &Zone, size: ByteLen, order: Order) -> Result<Pagemap> {
    let options = BindOptions::new(MemoryKind::Generic).order(order).init(Init::Eager);
    Ok(zone.bind(Region::anonymous(size)?, options)?)
}

/// Returns the addresses of a region's pieces of one call each.
pub fn calls(pagemap: &Pagemap) -> Result<Vec<usize>> {
    let range = pagemap.range();
    // One piece of memory, which need not begin where the region does.
    let base = pagemap.get(range)?.segments().map(|segment| segment.address).min().unwrap_or(0);
    let calls = index(range.pages().get() / CALL_PAGES);
    Ok((0..calls).map(|call| base + call * CALL_BYTES).collect())
}

/// The same length in bytes.
pub const CALL_BYTES: usize = CALL_ENTRIES << 12;

/// Memory for `count` values of plain data, present, in huge pages where the host has them.
pub fn present<T: FromBytes>(count: u64) -> Result<Mapped<T>> {
    let bytes = count * size_of::<T>() as u64;
    let memory = crate::present(ByteLen::new(bytes))?;
    // The memory was made for that count, and pages are aligned to more than any value is.
    Mapped::try_new(memory, index(count)).map_err(|_| BenchError::size(ByteLen::new(bytes)))
}

/// A word for each folio, or block of base pages: the limit writes them.
pub fn words(size: ByteLen) -> Result<Mapped<AtomicU64>> {
    present((size.get() >> 12) / CALL_PAGES)
}

/// Adds one to each word: the limit of holding.
pub fn bare_add(words: &[AtomicU64]) {
    for word in words {
        word.fetch_add(1, Ordering::Relaxed);
    }
}

/// Subtracts one from each word: the limit of giving back.
pub fn bare_sub(words: &[AtomicU64]) {
    for word in words {
        word.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Times `take` for each of some items; each guard is dropped before the next is taken.
pub fn timed_each<T, G, E>(items: &[T], take: impl Fn(&T) -> Result<G, E>) -> Result<Duration>
where
    BenchError: From<E>,
{
    timed(|| {
        for item in items {
            drop(take(item)?);
        }
        Ok(())
    })
}

/// Times `work` alone, and then runs `undo`.
pub fn timed_alone<T>(work: impl FnOnce() -> T, undo: impl FnOnce()) -> Result<Duration> {
    let elapsed = timed(|| Ok(work()));
    undo();
    elapsed
}

/// Times `work` and `undo`.
pub fn timed_both<T>(work: impl FnOnce() -> T, undo: impl FnOnce()) -> Result<Duration> {
    timed(|| {
        work();
        undo();
        Ok(())
    })
}

/// Checks that a guard over the whole region pins every folio once, and none afterwards.
pub fn check_pins(pagemap: &Pagemap, row: &str) -> Result {
    let range = pagemap.range();
    let order = pagemap.page(range.start()).map_or(0, |page| page.order().get());
    let pins = |expected: u32| {
        let wrong = range
            .iter()
            .step_by(1 << order)
            .find(|pfn| pagemap.page(*pfn).is_none_or(|page| page.word().pins() != expected));
        wrong.map_or(Ok(()), |pfn| Err(BenchError::wrong_page(row, pfn)))
    };
    let pinned = pagemap.pin(range)?;
    pins(1)?;
    drop(pinned);
    pins(0)
}

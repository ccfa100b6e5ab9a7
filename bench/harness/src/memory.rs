//! The memory that cases work on: taking it, filling it by several threads, and reading it ([`Reads`]).

use std::time::{Duration, Instant};

use uzone_fault::{FaultStats, LazyMapping};
use uzone_os::{Anonymous, Exclusive, HugeAdvice, Mapping, SystemRoot, memory};
use uzone_pages::{ByteLen, ErrorKind};
use uzone_stream::{Pattern, Streaming};

use super::error::{BenchError, Result};
use super::found::Found;

/// Returns an error unless `needed` memory is available.
pub fn check_memory(needed: ByteLen) -> Result {
    match memory::available(&SystemRoot::host()) {
        Ok(available) if available.bytes < needed => {
            let text = format!(
                "{needed:.1} of memory are needed and {:.1} are available, limited by {}: raise that limit, or \
                 describe less with --size, at least 1G",
                available.bytes, available.limited_by
            );
            Err(BenchError::host(ErrorKind::OutOfMemory, text))
        }
        _ => Ok(()),
    }
}

/// Returns anonymous memory, present, and in huge pages where the host has them.
pub fn present(len: ByteLen) -> Result<Exclusive> {
    let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
    let mut memory = Exclusive::anonymous(len, how)?;
    memory.populate(0..len.get())?;
    Ok(memory)
}

/// Fills memory by several threads: each calls `write` with the offset of its part, a multiple of `unit`, and the
/// part.
pub fn fill(
    bytes: &mut [u8],
    threads: usize,
    unit: usize,
    write: impl Fn(usize, &mut [u8]) -> Result + Sync,
) -> Result<Duration> {
    let share = bytes.len().div_ceil(threads).next_multiple_of(unit);
    let write = &|(number, part): (usize, &mut [u8])| write(number * share, part);
    let started = Instant::now();
    let written = std::thread::scope(|scope| {
        let mut parts = bytes.chunks_mut(share).enumerate();
        let mine = parts.next();
        let start = |part| {
            let thread = std::thread::Builder::new().name("fill".to_owned());
            thread.spawn_scoped(scope, move || write(part)).ok()
        };
        let others: Vec<_> = parts.map(start).collect();
        let mine = mine.map_or(Ok(()), write);
        // A part whose thread did not start is unwritten.
        let join = |thread: Option<std::thread::ScopedJoinHandle<'_, Result>>| {
            let joined = thread.and_then(|thread| thread.join().ok());
            joined.unwrap_or_else(|| Err(BenchError::threads(threads)))
        };
        others.into_iter().map(join).fold(mine, Result::and)
    });
    let elapsed = started.elapsed();
    written.map(|()| elapsed)
}

/// Fills memory with zeroes past the cache, split among threads.
pub fn fill_zeroes(dst: &mut [u8], threads: usize) -> Result<Duration> {
    fill(dst, threads, 4096, |_, part| {
        Streaming::scope(uzone_stream::best(), |stream| stream.zero(part));
        Ok(())
    })
}

/// Fills memory with a line that has no zero word, by the best store, split among threads.
pub fn fill_lines(bytes: &mut [u8], threads: usize) -> Result<Duration> {
    let line = match Pattern::constant(&[0x0027_ffff_c000_2000; 8]) {
        Ok(line) => line,
        Err(_) => unreachable!("a line has eight words"),
    };
    fill(bytes, threads, 4096, |_, part| {
        Streaming::scope(uzone_stream::best(), |stream| stream.fill(part, &line));
        Ok(())
    })
}

/// Returns a `usize` length as a `ByteLen`.
pub fn bytes(len: usize) -> ByteLen {
    ByteLen::new(u64::try_from(len).unwrap_or(u64::MAX))
}

/// Returns a length as a `usize`. A length that does not fit cannot be mapped.
pub fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Memory that is read through its page tables.
pub trait Reads: Sync {
    /// Copies bytes out. The call waits for missing pages.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result;
}

impl Reads for Mapping {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result {
        Ok(self.read_at(offset, out)?)
    }
}

impl Reads for LazyMapping {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result {
        Ok(self.read_at(offset, out)?)
    }
}

impl Reads for Vec<u8> {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result {
        out.copy_from_slice(&self[index(offset)..][..out.len()]);
        Ok(())
    }
}

/// Memory whose page faults are counted.
pub trait Counted: Reads {
    /// Waits until no more pages are installed: neighbours come after the page that was touched.
    fn settle(&self) {}

    /// Returns the number of answered faults and of mapped bytes. `None` if the kernel answers the faults: its own
    /// count is taken then.
    fn counts(&self, row: &str) -> Result<(Option<u64>, u64)>;
}

impl Counted for Mapping {
    fn counts(&self, _: &str) -> Result<(Option<u64>, u64)> {
        Ok((None, self.resident()?.get()))
    }
}

impl Counted for LazyMapping {
    fn settle(&self) {
        let mut stats = self.stats();
        loop {
            std::thread::sleep(Duration::from_millis(2));
            let before = std::mem::replace(&mut stats, self.stats());
            if stats == before {
                return;
            }
        }
    }

    fn counts(&self, _: &str) -> Result<(Option<u64>, u64)> {
        let stats = self.stats();
        Ok((Some(stats.faults), placed(&stats) * self.page_size().bytes()))
    }
}

/// Returns the number of pages that an engine has installed: on demand, around a fault, or by populating.
pub(super) fn placed(stats: &FaultStats) -> u64 {
    stats.demand + stats.around + stats.populated
}

/// Adds the faults of memory, and its wasted pages: `touched` pages of `page_bytes` were touched.
pub fn counted(
    row: &str,
    found: Result<Found>,
    memory: &impl Counted,
    touched: u64,
    page_bytes: u64,
) -> Result<Found> {
    let (faults, mapped) = memory.counts(row)?;
    let found = found?;
    let wasted = (mapped / page_bytes).saturating_sub(touched);
    Ok(Found { faults: faults.unwrap_or(found.faults), wasted, ..found })
}

/// Reads a word, and compares it with the right one.
#[inline]
pub fn check_word(row: &str, memory: &(impl Reads + ?Sized), offset: u64, expected: u64) -> Result {
    let mut word = [0; 8];
    memory.read(offset, &mut word)?;
    let is_right = u64::from_ne_bytes(word) == expected;
    if is_right { Ok(()) } else { Err(BenchError::wrong_byte(row, offset)) }
}

/// Returns the offset of the tested word of a page of 4 KiB, in another cache line from page to page.
pub fn place(page: u64) -> u64 {
    page * 4096 + page % 512 * 8
}

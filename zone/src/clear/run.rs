//! Clearing and copying the bytes of mappings by several threads: [`zero`], [`copy`].
//!
//! All that could be refused is refused before the first byte. Memory that turns out not to be there ends the
//! work where a handler of SIGBUS is installed; the batch that met it counts as not written. The threads take
//! batches from one queue, whose lock is held for the step to the next batch alone. The neighbourhood of a
//! hint is left to the caller's own thread, whose cache it is for.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use uzone_os::{Access, AccessError, Mapping, lock, share_work};
use uzone_pages::{ByteLen, PageSize, clearing_order};
use uzone_stream::{CopyMethod, NextUse, Work as StoreWork};

use crate::clear::options::{Cleared, ZeroOptions};
use crate::clear::stores;
use crate::error::{Unclearable, WriteError};

const WORD: u64 = 8;

/// With several threads, an extent that is not cut is shared out in pieces of at least this.
const LEAST_SHARE: u64 = 1 << 20;

/// The number of pieces for each thread.
const SHARES_PER_THREAD: u64 = 8;

/// The bytes that go through a buffer at a time, where words do not fit each other.
const BUFFER_BYTES: usize = 16 << 10;

/// Clears `len` bytes from `start` on.
pub(crate) fn zero(
    dst: &Mapping,
    page: PageSize,
    start: u64,
    len: ByteLen,
    options: &ZeroOptions,
) -> Result<Cleared, WriteError> {
    run(Work { dst, src: None, start }, page, len, options)
}

/// Copies `len` bytes of `src`, its byte `src_start` and on, to byte `start` and on.
pub(crate) fn copy(
    dst: &Mapping,
    page: PageSize,
    start: u64,
    (src, src_start): (&Mapping, u64),
    len: ByteLen,
    options: &ZeroOptions,
) -> Result<Cleared, WriteError> {
    check_inside(src, src_start, len)?;
    check_inside(dst, start, len)?;
    // Both ranges are mapped, so neither address wraps. They have 64 bits: the package below
    // compiles for nothing else.
    let (to, from) = (dst.addr().get() as u64 + start, src.addr().get() as u64 + src_start);
    if to < from.saturating_add(len.get()) && from < to.saturating_add(len.get()) {
        return Err(WriteError::Overlap { from, to, len });
    }
    run(Work { dst, src: Some((src, src_start)), start }, page, len, options)
}

fn run(
    work: Work<'_>,
    page: PageSize,
    len: ByteLen,
    options: &ZeroOptions,
) -> Result<Cleared, WriteError> {
    let started = Instant::now();
    let bytes = check_inside(work.dst, work.start, len)?;
    let [right, left, near] = clearing_order(bytes.clone(), options.hint, page)?;
    let len_bytes = len.to_usize()?;
    if work.dst.access() == Access::ReadOnly {
        return Err(AccessError::ReadOnly { offset: work.start, len_bytes }.into());
    }
    let stores = work.choose(len, options, options.next);
    let near_stores = work.choose(len_of(&near), options, NextUse::Soon);

    // A thread that has nothing to do is not started.
    let most = usize::try_from(len.get().div_ceil(LEAST_SHARE)).unwrap_or(usize::MAX);
    let threads = options.threads.get().min(most);
    let batch = batch_bytes(options, threads, len, page);
    let done = AtomicU64::new(0);
    let tally = Tally { options, total: len, done: &done };
    let queue = Mutex::new([right, left].into_iter().flat_map(|part| cut(part, batch)));
    let all = share_work("uzone-clear", threads, |is_stopped| {
        let mut mine = Written::default();
        // Relaxed: nothing is published by it, and a batch later is early enough.
        while !is_stopped.load(Ordering::Relaxed) && !tally.is_cancelled() {
            let Some(batch) = lock(&queue).next() else { break };
            if !mine.write(&work, batch, stores, &tally) {
                is_stopped.store(true, Ordering::Relaxed); // as where it is read
            }
        }
        mine
    });
    let threads = all.len();
    let mut written = Written::default();
    all.into_iter().for_each(|theirs| written.join(theirs));
    let stores = if len_of(&near) == len { near_stores } else { stores };
    for batch in cut(near, batch) {
        if written.error.is_some() || tally.is_cancelled() {
            break;
        }
        written.write(&work, batch, near_stores, &tally);
    }

    let cause = written.error.map_or(Unclearable::Cancelled, Unclearable::Lost);
    let mut cleared = Cleared { stores: Some(stores), threads, ..Cleared::default() };
    written.ranges.sort_unstable_by_key(|range| range.start);
    let mut at = bytes.start;
    for range in written.ranges {
        cleared.leave(at..range.start, cause);
        at = range.end;
        cleared.add(range);
    }
    cleared.leave(at..bytes.end, cause);
    cleared.elapsed = started.elapsed();
    Ok(cleared)
}

/// The destination, and the source of a copy.
#[derive(Clone, Copy, Debug)]
struct Work<'a> {
    dst: &'a Mapping,
    /// The memory copied from, and the byte of it that goes to byte `start` of the destination.
    src: Option<(&'a Mapping, u64)>,
    start: u64,
}

impl Work<'_> {
    /// Returns the stores for `len` bytes.
    fn choose(&self, len: ByteLen, options: &ZeroOptions, next: NextUse) -> CopyMethod {
        let kind = if self.src.is_some() { StoreWork::Copy } else { StoreWork::Zero };
        let len = len.to_usize().unwrap_or(usize::MAX);
        stores::policy().choose(kind, len, options.was, next)
    }

    /// Writes a range of the destination that was checked. An error is one of the memory itself.
    fn write(&self, bytes: &Range<u64>, way: CopyMethod) -> Result<(), AccessError> {
        match self.src {
            None => self.zero(bytes, way),
            Some((src, src_start)) => {
                self.copy(bytes, src, src_start + (bytes.start - self.start), way)
            }
        }
    }

    fn zero(&self, bytes: &Range<u64>, way: CopyMethod) -> Result<(), AccessError> {
        let (head, words, tail) = cut_words(bytes);
        for edge in [head, tail].into_iter().filter(|edge| !edge.is_empty()) {
            self.dst.write_at(edge.start, zeroes(&edge))?;
        }
        self.dst.zero_by(words, way)
    }

    fn copy(
        &self,
        bytes: &Range<u64>,
        src: &Mapping,
        src_start: u64,
        way: CopyMethod,
    ) -> Result<(), AccessError> {
        let at = |part: &Range<u64>| src_start + (part.start - bytes.start);
        if !bytes.start.abs_diff(src_start).is_multiple_of(WORD) || src.access() == Access::ReadOnly
        {
            return self.copy_buffered(bytes, src, src_start);
        }
        let (head, words, tail) = cut_words(bytes);
        for edge in [head, tail].into_iter().filter(|edge| !edge.is_empty()) {
            self.copy_buffered(&edge, src, at(&edge))?;
        }
        let from = at(&words);
        self.dst.copy_by(words, src, from, way)
    }

    /// Copies through a buffer: bytes that are no whole words or do not fit word to word.
    fn copy_buffered(
        &self,
        bytes: &Range<u64>,
        src: &Mapping,
        src_start: u64,
    ) -> Result<(), AccessError> {
        let mut buffer = [0; BUFFER_BYTES];
        let mut at = bytes.start;
        while at < bytes.end {
            let len =
                usize::try_from(bytes.end - at).map_or(BUFFER_BYTES, |len| len.min(BUFFER_BYTES));
            src.read_at(src_start + (at - bytes.start), &mut buffer[..len])?;
            self.dst.write_at(at, &buffer[..len])?;
            at += len as u64;
        }
        Ok(())
    }
}

/// Cuts a range into the bytes before the first whole word, whole words, and the bytes behind them.
fn cut_words(bytes: &Range<u64>) -> (Range<u64>, Range<u64>, Range<u64>) {
    let first = bytes.start.next_multiple_of(WORD).min(bytes.end);
    let last = (bytes.end / WORD * WORD).max(first);
    (bytes.start..first, first..last, last..bytes.end)
}

/// Returns as many zeroes as a range has bytes, which are fewer than a word has.
fn zeroes(bytes: &Range<u64>) -> &'static [u8] {
    let len = usize::try_from(bytes.end - bytes.start).unwrap_or(0);
    &[0; 8][..len]
}

/// Returns the length of a batch: the whole extent, unless the options or several threads cut it.
fn batch_bytes(options: &ZeroOptions, threads: usize, total: ByteLen, page: PageSize) -> u64 {
    let asked = options.batch.map_or(u64::MAX, |batch| batch.get().max(1));
    if threads < 2 {
        return asked;
    }
    let threads = u64::try_from(threads).unwrap_or(u64::MAX);
    let shares = threads.saturating_mul(SHARES_PER_THREAD);
    let share = total.get().div_ceil(shares).max(LEAST_SHARE);
    asked.min(share.next_multiple_of(page.bytes().max(LEAST_SHARE)))
}

/// Cuts an extent into batches.
fn cut(mut extent: Range<u64>, batch: u64) -> impl Iterator<Item = Range<u64>> {
    std::iter::from_fn(move || {
        let start = extent.start;
        extent.start = extent.end.min(start.saturating_add(batch));
        (start < extent.start).then_some(start..extent.start)
    })
}

/// Returns the length of a range.
fn len_of(range: &Range<u64>) -> ByteLen {
    ByteLen::new(range.end - range.start)
}

/// The receiver of progress, and the number of bytes that all threads have written.
struct Tally<'a> {
    options: &'a ZeroOptions,
    total: ByteLen,
    done: &'a AtomicU64,
}

impl Tally<'_> {
    fn is_cancelled(&self) -> bool {
        self.options.cancel.load(Ordering::Relaxed) // a batch later is early enough
    }
}

/// The bytes that a thread has written.
#[derive(Default)]
struct Written {
    ranges: Vec<Range<u64>>,
    error: Option<AccessError>,
}

impl Written {
    /// Writes a batch, and yields. Returns whether it is written.
    fn write(
        &mut self,
        work: &Work<'_>,
        batch: Range<u64>,
        stores: CopyMethod,
        tally: &Tally<'_>,
    ) -> bool {
        if let Err(error) = work.write(&batch, stores) {
            self.error = Some(error);
            return false;
        }
        let len = batch.end - batch.start;
        // Neighbours are kept as one, so that millions of batches take no memory.
        match self.ranges.last_mut().filter(|last| last.end == batch.start) {
            Some(last) => last.end = batch.end,
            None => self.ranges.push(batch),
        }
        // Relaxed: a number to report, nothing more.
        let before = tally.done.fetch_add(len, Ordering::Relaxed);
        tally.options.progress.call(ByteLen::new(before + len), tally.total);
        true
    }

    fn join(&mut self, other: Self) {
        self.ranges.extend(other.ranges);
        self.error = self.error.or(other.error);
    }
}

/// Refuses bytes that are not inside of a mapping, before one is written.
fn check_inside(mapping: &Mapping, start: u64, len: ByteLen) -> Result<Range<u64>, WriteError> {
    let len_bytes = mapping.len().get();
    // No mapping ends at the last number, so an end that was cut is beyond.
    let end = start.saturating_add(len.get());
    if end > len_bytes {
        return Err(AccessError::Beyond { start, end, len_bytes }.into());
    }
    Ok(start..end)
}

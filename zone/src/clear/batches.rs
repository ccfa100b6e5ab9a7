//! Doing the batches of a plan, one for each call or all by several threads: [`Batched`].
//!
//! All that could be refused is refused before the first batch. What can still end the work is memory
//! that turns out not to be there, where a handler of SIGBUS is installed; the batch that met it counts
//! as not written. What several threads take from is one plan under a lock that is held for the step to the next batch
//! alone; the neighbourhood of a hint is left to the caller's own thread, whose cache it is for.

use std::iter::FusedIterator;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use uzone_os::{Access, AccessError, Mapping, lock, share_work};
use uzone_pages::{ByteLen, Pace, PageSize, Plan};
use uzone_stream::{CopyMethod, NextUse, Work as StoreWork};

use crate::clear::options::{Batching, Cleared, ZeroOptions};
use crate::clear::stores;
use crate::error::WriteError;

const WORD: u64 = 8;

/// With several threads, an extent that is not cut is shared out in pieces of at least this.
const LEAST_SHARE: u64 = 1 << 20;

/// How many pieces there are for each thread.
const SHARES_PER_THREAD: u64 = 8;

/// How much goes through a buffer at a time, where words do not fit each other.
const BUFFER_BYTES: usize = 16 << 10;

/// What is written, and where from.
#[derive(Clone, Copy, Debug)]
struct Work<'a> {
    dst: &'a Mapping,
    /// The memory copied from, and the byte of it that goes to byte `start` of the destination.
    src: Option<(&'a Mapping, u64)>,
    start: u64,
}

/// Has `threads` threads write all but the neighbourhood, and returns how many there were.
fn share_out(
    batched: &mut Batched<'_>,
    threads: usize,
    tally: &Tally<'_>,
    written: &mut Written,
) -> usize {
    let Batched { work, cut, far, .. } = *batched;
    let plan = Mutex::new(&mut batched.plan);
    let all = share_work("uzone-clear", threads, |is_stopped| {
        let (mut mine, mut cut) = (Written::default(), cut);
        // Relaxed: nothing is published by it, and a batch later is early enough.
        while !is_stopped.load(Ordering::Relaxed) && !tally.options.cancel.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let batch = {
                let mut plan = lock(&plan);
                let Some((batch, is_near)) = plan.take_batch(cut.len()) else { break };
                if is_near {
                    plan.put_back(&batch);
                    break;
                }
                batch
            };
            let taken = Instant::now();
            if let Err(error) = work.write(&batch, far) {
                mine.error = Some(error);
                is_stopped.store(true, Ordering::Relaxed); // as where it is read
                break;
            }
            cut.observe(len_of(&batch), taken.elapsed());
            mine.add(batch, begun.elapsed(), tally);
        }
        mine
    });
    let used = all.len();
    all.into_iter().for_each(|theirs| written.join(theirs));
    used
}

impl Work<'_> {
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

    /// Copies through a buffer, what is no whole words or does not fit word to word.
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

/// Cuts a range into what comes before the first whole word, whole words, and what is behind.
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

/// How long batches are.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Bytes(ByteLen),
    Paced(Pace),
}

impl Cut {
    fn new(batching: Batching, page: PageSize) -> Self {
        match batching {
            Batching::Whole => Self::Bytes(ByteLen::new(u64::MAX)),
            Batching::Bytes(len) => Self::Bytes(len),
            Batching::Pause(bound) => {
                let bound_ns = u64::try_from(bound.as_nanos()).unwrap_or(u64::MAX);
                Self::Paced(Pace::new(bound_ns, page))
            }
        }
    }

    /// Cuts extents for several threads, if nothing else does.
    fn shared_by(self, threads: usize, total: ByteLen, page: PageSize) -> Self {
        match self {
            Self::Bytes(len) if threads > 1 => {
                let threads = u64::try_from(threads).unwrap_or(u64::MAX);
                let shares = threads.saturating_mul(SHARES_PER_THREAD);
                let share = total.get().div_ceil(shares).max(LEAST_SHARE);
                let share = share.next_multiple_of(page.bytes().max(LEAST_SHARE));
                Self::Bytes(len.min(ByteLen::new(share)))
            }
            other => other,
        }
    }

    fn len(&self) -> ByteLen {
        match self {
            Self::Bytes(len) => *len,
            Self::Paced(pace) => pace.batch(),
        }
    }

    fn is_paced(&self) -> bool {
        matches!(self, Self::Paced(_))
    }

    fn observe(&mut self, len: ByteLen, elapsed: Duration) {
        if let Self::Paced(pace) = self {
            pace.observe(len, u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX));
        }
    }
}

/// Batches that were checked and are written one for each call of `next`.
///
/// What was not written yet is left alone when this is dropped.
#[derive(Debug)]
#[must_use = "batches are written when they are asked for"]
pub struct Batched<'a> {
    work: Work<'a>,
    plan: Plan,
    page: PageSize,
    cut: Cut,
    far: CopyMethod,
    near: CopyMethod,
    error: Option<AccessError>,
}

impl<'a> Batched<'a> {
    /// Checks a clearing.
    pub(crate) fn zero(
        dst: &'a Mapping,
        page: PageSize,
        start: u64,
        len: ByteLen,
        options: &ZeroOptions,
    ) -> Result<Self, WriteError> {
        Self::new(Work { dst, src: None, start }, page, len, options)
    }

    /// Checks a copy.
    pub(crate) fn copy(
        dst: &'a Mapping,
        page: PageSize,
        start: u64,
        (src, src_start): (&'a Mapping, u64),
        len: ByteLen,
        options: &ZeroOptions,
    ) -> Result<Self, WriteError> {
        check_inside(src, src_start, len)?;
        check_inside(dst, start, len)?;
        // Both ranges are mapped, so neither address wraps. They have 64 bits: the package below
        // compiles for nothing else.
        let (to, from) = (dst.addr().get() as u64 + start, src.addr().get() as u64 + src_start);
        if to < from.saturating_add(len.get()) && from < to.saturating_add(len.get()) {
            return Err(WriteError::Overlap { from, to, len });
        }
        Self::new(Work { dst, src: Some((src, src_start)), start }, page, len, options)
    }

    fn new(
        work: Work<'a>,
        page: PageSize,
        len: ByteLen,
        options: &ZeroOptions,
    ) -> Result<Self, WriteError> {
        let bytes = check_inside(work.dst, work.start, len)?;
        let plan = Plan::try_new(bytes, options.hint, page)?;
        let len_bytes = len.to_usize()?;
        if work.dst.access() == Access::ReadOnly {
            return Err(AccessError::ReadOnly { offset: work.start, len_bytes }.into());
        }
        if let Some(way) = options.way.filter(|way| !way.is_available()) {
            return Err(WriteError::Unavailable { way });
        }
        let kind = if work.src.is_some() { StoreWork::Copy } else { StoreWork::Zero };
        let near_bytes = usize::try_from(page.bytes() * (2 * uzone_pages::NEIGHBOUR_PAGES + 1));
        let choose = |len, next| {
            options.way.unwrap_or_else(|| stores::policy().choose(kind, len, options.was, next))
        };
        let near = choose(near_bytes.unwrap_or(len_bytes).min(len_bytes), NextUse::Soon);
        let far = choose(len_bytes, options.next);
        let cut = Cut::new(options.batching, page);
        Ok(Self { work, plan, page, cut, far, near, error: None })
    }

    /// Writes all of them, by as many threads as the options have.
    pub(crate) fn run(mut self, options: &ZeroOptions) -> Cleared {
        let started = Instant::now();
        let total = self.plan.left();
        // A thread that has nothing to do is not started.
        let most = usize::try_from(total.get().div_ceil(LEAST_SHARE)).unwrap_or(usize::MAX);
        let threads = options.threads.get().min(most);
        let tally = Tally { options, total, done: AtomicU64::new(0) };
        let way = if self.plan.extents().count() == 1 && options.hint.is_some() {
            self.near // the neighbourhood is all there is
        } else {
            self.far
        };
        self.cut = self.cut.shared_by(threads, total, self.page);
        let mut written = Written::default();
        let mut used = 1;
        if threads > 1 {
            used = share_out(&mut self, threads, &tally, &mut written);
        }
        // What is left is the neighbourhood, or all if there is one thread.
        self.error = written.error;
        let mut last = if used > 1 { Instant::now() } else { started };
        // The clock is read once a batch: of 64 KiB it would be a tenth of the time otherwise.
        while self.error.is_none() && !options.cancel.load(Ordering::Relaxed) {
            let Some(batch) = self.write_next() else { break };
            let now = Instant::now();
            let pause = now.duration_since(last);
            self.cut.observe(len_of(&batch), pause);
            written.add(batch, pause, &tally);
            // What is called between batches takes its own time.
            last = if options.progress.is_some() { Instant::now() } else { now };
        }
        written.error = self.error;
        let elapsed = if written.error.is_some() { started.elapsed() } else { last - started };
        written.report(total, used, way, elapsed)
    }

    /// Returns what ended the batches early: memory that turned out not to be there, as far as a handler
    /// of SIGBUS is installed. The batch that met it counts as not written, and no more come.
    #[must_use]
    pub fn error(&self) -> Option<AccessError> {
        self.error
    }

    /// Returns how many bytes are not written yet.
    #[must_use]
    pub fn left(&self) -> ByteLen {
        self.plan.left()
    }

    /// Returns how long the next batch is at most.
    #[must_use]
    pub fn next_len(&self) -> ByteLen {
        self.cut.len().min(self.plan.left())
    }

    /// Writes the next batch, and learns nothing from how long it took.
    fn write_next(&mut self) -> Option<Range<u64>> {
        let (batch, is_near) = self.plan.take_batch(self.cut.len())?;
        let way = if is_near { self.near } else { self.far };
        if let Err(error) = self.work.write(&batch, way) {
            self.plan.put_back(&batch);
            self.error = Some(error);
            return None;
        }
        Some(batch)
    }
}

impl Iterator for Batched<'_> {
    type Item = Range<u64>;

    /// Writes the next batch and returns which bytes it was.
    fn next(&mut self) -> Option<Range<u64>> {
        if self.error.is_some() {
            return None;
        }
        if !self.cut.is_paced() {
            return self.write_next();
        }
        let started = Instant::now();
        let batch = self.write_next()?;
        self.cut.observe(len_of(&batch), started.elapsed());
        Some(batch)
    }
}

impl FusedIterator for Batched<'_> {}

/// The receiver of progress, and how much all threads have done.
struct Tally<'a> {
    options: &'a ZeroOptions,
    total: ByteLen,
    done: AtomicU64,
}

/// Returns how many bytes a range has.
fn len_of(range: &Range<u64>) -> ByteLen {
    ByteLen::new(range.end - range.start)
}

/// What a thread has written.
#[derive(Default)]
struct Written {
    ranges: Vec<Range<u64>>,
    batches: u64,
    longest_pause: Duration,
    error: Option<AccessError>,
}

impl Written {
    /// Counts a batch, and yields.
    fn add(&mut self, batch: Range<u64>, pause: Duration, tally: &Tally<'_>) {
        let len = batch.end - batch.start;
        self.batches += 1;
        self.longest_pause = self.longest_pause.max(pause);
        // Those that follow each other are kept as one, so that millions of batches take no memory.
        match self.ranges.last_mut().filter(|last| last.end == batch.start) {
            Some(last) => last.end = batch.end,
            None => self.ranges.push(batch),
        }
        // Relaxed: a number to report, nothing more.
        let before = tally.done.fetch_add(len, Ordering::Relaxed);
        tally.options.progress.call(ByteLen::new(before + len), tally.total);
    }

    fn join(&mut self, other: Self) {
        self.ranges.extend(other.ranges);
        self.batches += other.batches;
        self.longest_pause = self.longest_pause.max(other.longest_pause);
        self.error = self.error.or(other.error);
    }

    fn report(self, total: ByteLen, threads: usize, way: CopyMethod, elapsed: Duration) -> Cleared {
        let Self { mut ranges, batches, longest_pause, error } = self;
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, last| {
            let follows = last.end == next.start;
            if follows {
                last.end = next.end;
            }
            follows
        });
        let done = ByteLen::new(ranges.iter().map(|range| range.end - range.start).sum());
        Cleared { ranges, done, total, batches, longest_pause, threads, way, elapsed, error }
    }
}

/// Refuses what is not inside of a mapping, before a byte is written.
fn check_inside(mapping: &Mapping, start: u64, len: ByteLen) -> Result<Range<u64>, WriteError> {
    let len_bytes = mapping.len().get();
    // No mapping ends at the last number, so an end that was cut is beyond.
    let end = start.saturating_add(len.get());
    if end > len_bytes {
        return Err(AccessError::Beyond { start, end, len_bytes }.into());
    }
    Ok(start..end)
}

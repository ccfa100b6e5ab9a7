//! Clearing and copying the plain memory of a region: [`Region::zero_range`], [`Region::copy_range`].
//!
//! Bytes are written by the largest contiguous extent, by the way that measurement prefers for its
//! length and for what the caller states about both ends ([`CacheState`], [`NextUse`]). With a hint, somebody waits
//! for the page there: its neighbourhood is written last and stays in the cache.
//!
//! A caller that has to let other threads run asks for it: batches of so many bytes, or a longest pause, with a yield
//! point after each of them. A flag cancels between two batches. What was done is in the answer, byte
//! for byte, whether it is all or not. [`Region::zero_batches`] leaves the loop to the caller, and with
//! that to any executor: one batch for each call of `next`.
//!
//! Not here: what is known about the pages. This is for memory without descriptors; a bound region is
//! cleared through its pagemap. Memory that was never touched is cleared by the kernel first, so that
//! [`Region::populate`] or nothing at all is cheaper.
//!
//! Units: bytes from the start of the region. Cost: what the stores take, and once up to 20 ms for the
//! measurement that chooses among them.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use uzone_os::{AccessError, Mapping};
use uzone_pages::ByteLen;
use uzone_stream::{CacheState, CopyMethod, NextUse};

use crate::batches::{Batched, Job};
use crate::error::WriteError;
use crate::options::{Cancel, Progress};
use crate::region::Region;

/// How often a caller that shares its thread is let run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Batching {
    /// Never in an extent: the kernel preempts this thread if somebody else has to run.
    #[default]
    Whole,
    /// After every so many bytes.
    Bytes(ByteLen),
    /// As often as it takes for two yield points to be no farther apart than this. How many bytes that
    /// is follows from what the batches before took.
    Pause(Duration),
}

impl Batching {
    /// A pause of at most one millisecond.
    pub const COOPERATIVE: Self = Self::Pause(Duration::from_nanos(uzone_pages::DEFAULT_PAUSE_NS));
}

/// The options of clearing and copying.
#[derive(Clone)]
pub struct ZeroOptions {
    pub(crate) was: CacheState,
    pub(crate) next: NextUse,
    pub(crate) hint: Option<u64>,
    pub(crate) way: Option<CopyMethod>,
    pub(crate) threads: NonZeroUsize,
    pub(crate) batching: Batching,
    pub(crate) progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
    pub(crate) cancel: Cancel,
}

/// The options of copying: the same as of clearing.
pub type CopyOptions = ZeroOptions;

impl Default for ZeroOptions {
    /// Cold memory that is not read soon, on one thread, in one extent.
    fn default() -> Self {
        Self {
            was: CacheState::Cold,
            next: NextUse::Later,
            hint: None,
            way: None,
            threads: NonZeroUsize::MIN,
            batching: Batching::Whole,
            progress: None,
            cancel: Cancel::default(),
        }
    }
}

impl ZeroOptions {
    /// Sets whether the destination is in the cache: wrong, it costs a factor of two to six.
    #[must_use]
    pub fn was(mut self, was: CacheState) -> Self {
        self.was = was;
        self
    }

    /// Sets whether the destination is read at once. Of a destination with a hint it applies
    /// about the rest: the neighbourhood of the hint is always read soon.
    #[must_use]
    pub fn next(mut self, next: NextUse) -> Self {
        self.next = next;
        self
    }

    /// Sets which byte of the region is read next: its page and two on either side are written last,
    /// and stay in the cache.
    #[must_use]
    pub fn hint(mut self, offset_bytes: u64) -> Self {
        self.hint = Some(offset_bytes);
        self
    }

    /// Sets how to store, instead of the way of the store policy.
    #[must_use]
    pub fn way(mut self, way: CopyMethod) -> Self {
        self.way = Some(way);
        self
    }

    /// Sets how many threads write; by default one, the caller's. If the system gives
    /// fewer, those do the work; the report states how many there were. The neighbourhood of a hint is
    /// written by the caller's own.
    #[must_use]
    pub fn threads(mut self, threads: NonZeroUsize) -> Self {
        self.threads = threads;
        self
    }

    /// Sets where there are yield points.
    #[must_use]
    pub fn batching(mut self, batching: Batching) -> Self {
        self.batching = batching;
        self
    }

    /// Takes what is called after every batch, by the thread that wrote it: the yield point. With
    /// several threads the calls may come out of order.
    #[must_use]
    pub fn on_batch(mut self, progress: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.progress = Some(Arc::new(progress));
        self
    }

    /// Takes a flag that stops the work after the batch under way.
    #[must_use]
    pub fn cancel(mut self, cancel: Cancel) -> Self {
        self.cancel = cancel;
        self
    }
}

impl fmt::Debug for ZeroOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZeroOptions")
            .field("was", &self.was)
            .field("next", &self.next)
            .field("hint", &self.hint)
            .field("way", &self.way)
            .field("threads", &self.threads)
            .field("batching", &self.batching)
            .finish_non_exhaustive()
    }
}

impl Region {
    /// Zeroes `len` bytes from `offset_bytes` on. Costs what the stores take, and once a process up to
    /// 20 ms for the measurement that chooses among them. Memory that was never touched is cleared by
    /// the kernel first; [`Region::populate`], or nothing at all, is cheaper there.
    ///
    /// Others see each aligned 8 bytes change at once, and the whole in any order; all of it before
    /// this returns. What a file was truncated of, or a page that is broken, raises `SIGBUS`: once
    /// [`bus::install`](crate::bus::install) was called, [`Cleared::error`] reports it, and the process
    /// dies otherwise.
    ///
    /// # Errors
    /// [`WriteError::Access`] if the bytes are not all inside or the region is read-only,
    /// [`WriteError::Addr`] if there are none or the hint is not among them, and
    /// [`WriteError::Unavailable`] if this CPU lacks the stores of the options. Nothing is written then.
    /// A cancelled call is no error: the answer states what was done.
    pub fn zero_range(
        &self,
        offset_bytes: u64,
        len: ByteLen,
        options: &ZeroOptions,
    ) -> Result<Cleared, WriteError> {
        let job = Job::zero(self.mapping(), self.page_size(), offset_bytes, len, options)?;
        Ok(job.run())
    }

    /// Zeroes `len` bytes from `offset_bytes` on, a batch for each call of `next` on what this returns.
    /// Dropping that leaves the rest as it is. Threads, the flag and what is called after a batch are
    /// the caller's own here, and those of the options are not looked at.
    ///
    /// ```
    /// use uzone_pages::ByteLen;
    /// use uzone_zone::{Batching, Region, ZeroOptions};
    ///
    /// let region = Region::anonymous(ByteLen::mib(64))?;
    /// let options = ZeroOptions::default().batching(Batching::COOPERATIVE);
    /// let mut done = 0;
    /// for batch in region.zero_batches(0, ByteLen::mib(64), &options)? {
    ///     done += batch.len().get(); // a runtime's `yield_now().await` goes here
    /// }
    /// assert_eq!(done, 64 << 20);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Region::zero_range`].
    pub fn zero_batches(
        &self,
        offset_bytes: u64,
        len: ByteLen,
        options: &ZeroOptions,
    ) -> Result<Batched<'_>, WriteError> {
        let job = Job::zero(self.mapping(), self.page_size(), offset_bytes, len, options)?;
        Ok(job.batched())
    }

    /// Copies `len` bytes from `from`, its byte `from_bytes` on, to byte `offset_bytes` of this region
    /// and on. `from` may be this region.
    ///
    /// Bytes that somebody writes meanwhile arrive as they were or as they are, in units of aligned 8
    /// bytes where both offsets are alike in their last three bits. Where they are not, or `from` is
    /// read-only, the bytes go through a buffer, at a third of the rate.
    ///
    /// # Errors
    /// As [`Region::zero_range`], and [`WriteError::Overlap`] if both share bytes by their addresses. Two
    /// regions that map the same bytes of a file are not recognised.
    pub fn copy_range(
        &self,
        offset_bytes: u64,
        from: &Self,
        from_bytes: u64,
        len: ByteLen,
        options: &CopyOptions,
    ) -> Result<Cleared, WriteError> {
        let from = (from.mapping(), from_bytes);
        Ok(Job::copy(self.mapping(), self.page_size(), offset_bytes, from, len, options)?.run())
    }

    /// Copies as [`Region::copy_range`] does, a batch for each call of `next`, as
    /// [`Region::zero_batches`] has it.
    ///
    /// # Errors
    /// As [`Region::copy_range`].
    pub fn copy_batches<'a>(
        &'a self,
        offset_bytes: u64,
        from: &'a Self,
        from_bytes: u64,
        len: ByteLen,
        options: &CopyOptions,
    ) -> Result<Batched<'a>, WriteError> {
        let from = (from.mapping(), from_bytes);
        let job = Job::copy(self.mapping(), self.page_size(), offset_bytes, from, len, options)?;
        Ok(job.batched())
    }
}

/// What clearing or copying came to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "work that was cancelled leaves bytes as they were"]
#[non_exhaustive]
pub struct Cleared {
    /// The bytes that are written, in ascending order; neighbours are one.
    pub ranges: Vec<std::ops::Range<u64>>,
    /// How many those are.
    pub done: ByteLen,
    /// How many there were to write.
    pub total: ByteLen,
    /// How many batches they were written in.
    pub batches: u64,
    /// The longest time between two yield points.
    pub longest_pause: Duration,
    /// How many threads wrote.
    pub threads: usize,
    /// How the bytes were stored, but for the neighbourhood of a hint.
    pub way: CopyMethod,
    /// How long it took.
    pub elapsed: Duration,
    /// What ended it early, if that was not the caller: memory that turned out not to be there. The
    /// batch that met it counts as not written.
    pub error: Option<AccessError>,
}

impl Cleared {
    /// Returns whether all bytes are written. If not, it was cancelled, or [`Cleared::error`] has the reason.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.done == self.total
    }
}

impl fmt::Display for Cleared {
    /// `64 MiB of 64 MiB in 4.1 ms by avx512, 1 batch, 1 thread`, without an end of line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { done, total, elapsed, way, batches, threads, .. } = self;
        write!(f, "{done} of {total} in {elapsed:.1?} by {way} stores, {batches} batches")?;
        write!(f, ", {threads} threads, longest pause {:.1?}", self.longest_pause)
    }
}

/// Refuses what is not inside of a mapping, before a byte is written.
pub(crate) fn check_inside(
    mapping: &Mapping,
    start: u64,
    len: ByteLen,
) -> Result<std::ops::Range<u64>, WriteError> {
    let len_bytes = mapping.len().get();
    // No mapping ends at the last number, so an end that was cut is beyond.
    let end = start.saturating_add(len.get());
    if end > len_bytes {
        return Err(AccessError::Beyond { start, end, len_bytes }.into());
    }
    Ok(start..end)
}

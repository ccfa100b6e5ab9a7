//! What is asked for and what is reported when bytes are cleared or copied: [`ZeroOptions`], [`Cleared`].

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use uzone_os::AccessError;
use uzone_pages::ByteLen;
use uzone_stream::{CacheState, CopyMethod, NextUse};

use crate::progress::OnProgress;

/// How often a caller that shares its thread is let run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Batching {
    /// Never in an extent: the kernel preempts this thread if another one has to run.
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
#[derive(Clone, Debug)]
pub struct ZeroOptions {
    pub(crate) was: CacheState,
    pub(crate) next: NextUse,
    pub(crate) hint: Option<u64>,
    pub(crate) way: Option<CopyMethod>,
    pub(crate) threads: NonZeroUsize,
    pub(crate) batching: Batching,
    pub(crate) progress: OnProgress,
    pub(crate) cancel: Arc<AtomicBool>,
}

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
            progress: OnProgress::default(),
            cancel: Arc::default(),
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

    /// Takes what is called after every batch, by the thread that wrote it, with how many bytes are
    /// written and how many will be: the yield point. With several threads the calls may come out of
    /// order.
    #[must_use]
    pub fn on_batch(mut self, progress: impl Fn(ByteLen, ByteLen) + Send + Sync + 'static) -> Self {
        self.progress = OnProgress::new(progress);
        self
    }

    /// Takes a flag that stops the work after the batch under way, once another thread sets it.
    #[must_use]
    pub fn cancel(mut self, cancel: Arc<AtomicBool>) -> Self {
        self.cancel = cancel;
        self
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

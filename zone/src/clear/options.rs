//! The options and the outcome of clearing and copying: [`ZeroOptions`], [`Cleared`].

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use uzone_os::AccessError;
use uzone_pages::ByteLen;
use uzone_stream::{CacheState, CopyMethod, NextUse};

use crate::error::Unclearable;
use crate::progress::OnProgress;
use crate::setters::setters;

/// The options of clearing and copying.
#[derive(Clone, Debug)]
pub struct ZeroOptions {
    pub(crate) was: CacheState,
    pub(crate) next: NextUse,
    pub(crate) hint: Option<u64>,
    pub(crate) threads: NonZeroUsize,
    pub(crate) batch: Option<ByteLen>,
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
            threads: NonZeroUsize::MIN,
            batch: None,
            progress: OnProgress::default(),
            cancel: Arc::default(),
        }
    }
}

impl ZeroOptions {
    setters! {
        /// Sets whether the destination is in the cache: wrong, it costs a factor of two to six.
        was(was: CacheState) was = was;

        /// Sets whether the destination is read at once. The neighbourhood of a hint is always taken as read at
        /// once, whatever is set for the rest.
        next(next: NextUse) next = next;

        /// Sets the byte of the region that is read next: its page and two on either side are written last,
        /// and stay in the cache.
        hint(offset_bytes: u64) hint = Some(offset_bytes);

        /// Sets how many threads write; by default one, the caller's. If the system gives
        /// fewer, those do the work; the outcome states how many there were. The neighbourhood of a hint is
        /// written by the caller's own.
        threads(threads: NonZeroUsize) threads = threads;

        /// Sets after how many bytes a thread yields: [`ZeroOptions::on_batch`] is called, and
        /// [`ZeroOptions::cancel`] is looked at. By default an extent is written whole, and the kernel preempts
        /// the thread if another one has to run. Linux clears 8 MiB between two yield points where it is not
        /// preempted.
        batch(len: ByteLen) batch = Some(len);

        /// Takes a callback for the yield point after every batch. The thread that wrote the batch calls it with
        /// the number of bytes written and the number in all. With several threads the calls may come out of
        /// order.
        on_batch(progress: impl Fn(ByteLen, ByteLen) + Send + Sync + 'static) progress = OnProgress::new(progress);

        /// Takes a flag that stops the work after the batch under way, once another thread sets it.
        cancel(cancel: Arc<AtomicBool>) cancel = cancel;
    }
}

/// The outcome of clearing, copying or giving back bytes of a region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "bytes that are pinned, bad, another thread's or cancelled are left"]
#[non_exhaustive]
pub struct Cleared {
    /// The bytes of the region that were written, in ascending order; neighbours are one range.
    pub done: Vec<Range<u64>>,
    /// The number of bytes that were known to be zero, and left alone.
    pub known: ByteLen,
    /// The bytes that were left, and why, in ascending order; neighbours that were left for the same reason
    /// are one range. The content of bytes that were lost or cancelled is not known.
    pub left: Vec<(Range<u64>, Unclearable)>,
    /// The stores that wrote the bytes, but for the neighbourhood of a hint; `None` if there were none.
    pub stores: Option<CopyMethod>,
    /// The number of threads that wrote.
    pub threads: usize,
    /// The time that it took.
    pub elapsed: Duration,
}

impl Cleared {
    /// Returns whether no byte was left.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.left.is_empty()
    }

    /// Returns how many bytes were written.
    #[must_use]
    pub fn done_bytes(&self) -> ByteLen {
        ByteLen::new(self.done.iter().map(|range| range.end - range.start).sum())
    }

    /// Returns the error of memory that turned out not to be there, if some was not.
    #[must_use]
    pub fn lost(&self) -> Option<AccessError> {
        self.left.iter().find_map(|(_, cause)| match cause {
            Unclearable::Lost(error) => Some(*error),
            _ => None,
        })
    }

    /// Adds bytes that were written.
    pub(crate) fn add(&mut self, range: Range<u64>) {
        match self.done.last_mut().filter(|last| last.end == range.start) {
            Some(last) => last.end = range.end,
            None if range.is_empty() => {}
            None => self.done.push(range),
        }
    }

    /// Adds bytes that were left.
    pub(crate) fn leave(&mut self, range: Range<u64>, cause: Unclearable) {
        match self.left.last_mut() {
            Some((last, why)) if last.end == range.start && *why == cause => last.end = range.end,
            _ if range.is_empty() => {}
            _ => self.left.push((range, cause)),
        }
    }

    /// Puts ranges that were found in several passes in ascending order.
    pub(crate) fn sort(&mut self) {
        let (mut done, mut left) = (std::mem::take(&mut self.done), std::mem::take(&mut self.left));
        done.sort_unstable_by_key(|range| range.start);
        left.sort_unstable_by_key(|(range, _)| range.start);
        done.into_iter().for_each(|range| self.add(range));
        left.into_iter().for_each(|(range, cause)| self.leave(range, cause));
    }
}

impl fmt::Display for Cleared {
    /// `64 MiB written in 4.1ms by avx512 stores, 1 threads; 4 KiB left: it is bad`, without an end of line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} written in {:.1?}", self.done_bytes(), self.elapsed)?;
        if let Some(stores) = self.stores {
            write!(f, " by {stores} stores, {} threads", self.threads)?;
        }
        if !self.known.is_zero() {
            write!(f, "; {} known to be zero", self.known)?;
        }
        if let Some((_, cause)) = self.left.first() {
            let left = self.left.iter().map(|(range, _)| range.end - range.start).sum();
            write!(f, "; {} left: {cause}", ByteLen::new(left))?;
        }
        Ok(())
    }
}

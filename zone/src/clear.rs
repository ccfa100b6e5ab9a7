//! Clearing and copying the plain memory of a region: [`Region::zero_range`], [`Region::copy_range`].
//!
//! Bytes are written by the largest contiguous extent, by the way that measurement prefers for its
//! length and for what the caller states about both ends ([`ZeroOptions`]). With a hint, a thread waits
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

pub(crate) mod batches;
pub(crate) mod copy;
pub(crate) mod options;
pub(crate) mod persist;
pub(crate) mod populate;
pub(crate) mod stores;
pub(crate) mod zero;

use uzone_pages::ByteLen;

use crate::clear::batches::Batched;
use crate::clear::options::{Cleared, ZeroOptions};
use crate::error::WriteError;
use crate::region::Region;

impl Region {
    /// Zeroes `len` bytes from `offset_bytes` on. Costs what the stores take, and once a process up to
    /// 20 ms for the measurement that chooses among them. Memory that was never touched is cleared by
    /// the kernel first; [`Region::populate`], or nothing at all, is cheaper there.
    ///
    /// Others see each aligned 8 bytes change at once, and the whole in any order; all of it before
    /// this returns. What a file was truncated of, or a page that is broken, raises `SIGBUS`: once
    /// [`sigbus::install`](uzone_os::sigbus::install) was called, [`Cleared::error`] reports it, and the process
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
        Ok(self.zero_batches(offset_bytes, len, options)?.run(options))
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
    ///     done += batch.end - batch.start; // a runtime's `yield_now().await` goes here
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
        Batched::zero(self.mapping(), self.page_size(), offset_bytes, len, options)
    }

    /// Copies `len` bytes from `from`, its byte `from_bytes` on, to byte `offset_bytes` of this region
    /// and on. `from` may be this region.
    ///
    /// Bytes that are written meanwhile arrive as they were or as they are, in units of aligned 8
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
        options: &ZeroOptions,
    ) -> Result<Cleared, WriteError> {
        Ok(self.copy_batches(offset_bytes, from, from_bytes, len, options)?.run(options))
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
        options: &ZeroOptions,
    ) -> Result<Batched<'a>, WriteError> {
        let from = (from.mapping(), from_bytes);
        Batched::copy(self.mapping(), self.page_size(), offset_bytes, from, len, options)
    }
}

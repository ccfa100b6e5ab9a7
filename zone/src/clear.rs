//! Clearing and copying the plain memory of a region: [`Region::zero_range`], [`Region::copy_range`].
//!
//! Bytes are written by the largest contiguous extent, by the stores that the policy prefers for its
//! length and for the caller's knowledge of both ends ([`ZeroOptions`]). With a hint, a thread waits
//! for the page there: its neighbourhood is written last and stays in the cache.
//!
//! A caller that has to let other threads run sets the length of a batch: after each there is a yield point,
//! where a callback is called and a flag cancels. The outcome lists the bytes that were written, whether they
//! are all or not.
//!
//! Not here: the content of pages. This is for memory without descriptors; a bound region is cleared
//! through its pagemap. Memory that was never touched is cleared by the kernel first, so that
//! [`Region::populate`] or nothing at all is cheaper.
//!
//! Units: bytes from the start of the region. Cost: the time of the stores.

pub(crate) mod options;
pub(crate) mod persist;
pub(crate) mod run;
pub(crate) mod stores;
pub(crate) mod zero;

use uzone_pages::ByteLen;

use crate::clear::options::{Cleared, ZeroOptions};
use crate::error::WriteError;
use crate::region::Region;

impl Region {
    /// Zeroes `len` bytes from `offset_bytes` on. Costs the time of the stores. Memory that was never
    /// touched is cleared by the kernel first; [`Region::populate`], or nothing at all, is cheaper there.
    ///
    /// Others see each aligned 8 bytes change at once, and the whole in any order; all of it before
    /// this returns. A page behind the end of a truncated file, or one that is broken, raises `SIGBUS`: once
    /// [`sigbus::install`](uzone_os::sigbus::install) was called, [`Cleared::left`] reports it as
    /// [`Unclearable::Lost`](crate::Unclearable::Lost), and the process dies otherwise.
    ///
    /// # Errors
    /// [`WriteError::Access`] if the bytes are not all inside or the region is read-only, and
    /// [`WriteError::Addr`] if there are none or the hint is not among them. Nothing is written then.
    /// A cancelled call is no error: the outcome lists the bytes that were written.
    pub fn zero_range(
        &self,
        offset_bytes: u64,
        len: ByteLen,
        options: &ZeroOptions,
    ) -> Result<Cleared, WriteError> {
        run::zero(self.mapping(), self.page_size(), offset_bytes, len, options)
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
        let from = (from.mapping(), from_bytes);
        run::copy(self.mapping(), self.page_size(), offset_bytes, from, len, options)
    }
}

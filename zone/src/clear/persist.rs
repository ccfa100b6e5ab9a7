//! Bytes that survive a loss of power: [`Pagemap::persist`].
//!
//! On DAX the memory is the storage, and written bytes are in the CPU's caches until their lines are written
//! back. A mapping of a DAX file (`MAP_SYNC`) and one of a DAX device need no system call for that. The
//! pages of another file are written to its device by msync(2).
//!
//! Promised: after a return, the bytes are in the persistence domain of a platform with ADR, or on
//! the device. Not promised: that a loss of power in the middle leaves all or nothing. Only aligned words of
//! 8 bytes are never torn.
//!
//! Cost: on DAX the time of memory to write the lines that changed, and a few nanoseconds for each other line.

use std::ops::Range;

use uzone_pages::{Payload, PfnRange};

use crate::error::WriteError;
use crate::pagemap::Pagemap;
use crate::pin::pin_target;
use crate::region::Region;
use crate::source::RegionSource;

impl<P: Payload> Pagemap<P> {
    /// Makes the bytes of pages survive a loss of power. Writes of other threads during the call may
    /// survive or not.
    ///
    /// # Errors
    /// [`WriteError::Poisoned`] if a page is bad, [`WriteError::Pin`] if one is not the region's,
    /// [`WriteError::NoStorage`] and [`WriteError::NoInstruction`] if the memory cannot be made to last, and
    /// [`WriteError::Sync`] or [`WriteError::Access`] if the device failed. Then none of the pages counts as
    /// persistent.
    pub fn persist(&self, range: PfnRange) -> Result<(), WriteError> {
        if let Some(&pfn) = self.bad_pages(range).first() {
            return Err(WriteError::Poisoned { pfn });
        }
        let not_here = || pin_target::not_here(&*self.inner, range);
        persist(&self.inner.region, self.bytes_of(range).ok_or_else(not_here)?)
    }
}

/// Returns whether the bytes of a region come to its storage by writing back the lines of the
/// cache; else the kernel writes pages to a device.
fn can_persist(region: &Region) -> Result<bool, WriteError> {
    match region.backing() {
        RegionSource::Devdax { .. } | RegionSource::Fsdax { .. }
            if !uzone_stream::has_write_back() =>
        {
            Err(WriteError::NoInstruction)
        }
        RegionSource::Devdax { .. } | RegionSource::Fsdax { .. } => Ok(true),
        RegionSource::File { .. } => Ok(false),
        backing => Err(WriteError::NoStorage { backing: backing.clone() }),
    }
}

fn persist(region: &Region, range: Range<u64>) -> Result<(), WriteError> {
    let by_lines = can_persist(region)?;
    if range.is_empty() {
        return Ok(());
    }
    let memory = region.memory();
    if by_lines {
        // A line has whole words, and so has a region.
        Ok(memory.flush_lines(range.start & !7..range.end.next_multiple_of(8))?)
    } else {
        memory.sync(range).map_err(WriteError::Sync)
    }
}

//! Writing what was stored in a mapped file to its storage: [`Mapping::sync`].
//!
//! Unsafe: the call of msync(2).
//! Source: msync(2).

use core::ops::Range;

use rustix::mm::MsyncFlags;

use crate::map::mapping::{Mapping, MappingError};

impl Mapping {
    /// Writes the pages of a range to the storage of the file behind the mapping, and waits for that. It
    /// lasts as long as the file system does: a memory file has no storage.
    ///
    /// Costs one msync(2), which takes what the device takes.
    ///
    /// # Errors
    /// [`MappingError::Sync`] if the device failed; [`MappingError::Access`] if the range is not inside.
    pub fn sync(&self, range: Range<u64>) -> Result<(), MappingError> {
        let part = self.widen(&range)?;
        let start = self.at(part.start).as_ptr();
        // SAFETY: msync(2) reads `part.len()` bytes from `start`, all of this mapping, and changes none.
        unsafe { rustix::mm::msync(start.cast(), part.len(), MsyncFlags::SYNC) }
            .map_err(|cause| MappingError::Sync { range, cause: cause.into() })
    }
}

//! The pages of a guest region that were written, as a bitmap of `vm_memory`: [`WrittenPages`].
//!
//! A lazy mapping that tracks writes ([`LazyOptions::track_writes`](uzone::lazy::LazyOptions::track_writes)) is asked, so
//! every writer counts: the monitor, a vCPU that KVM runs, and other threads. Of other memory, pages are noted that
//! were written through this crate; KVM's own log has the writes of vCPUs.
//!
//! Cost: noting is an atomic step for each page; asking a tracked mapping costs a scan of its page tables or of
//! its states.

use std::num::NonZeroUsize;
use std::ops::Range;

use uzone::lazy::{LazyError, LazyMapping};
use vm_memory::bitmap::{AtomicBitmap, Bitmap, RefSlice, WithBitmapSlice};

use crate::region::HostMemory;

/// The unit in which pages are noted, of memory that does not track writes itself.
const NOTED_BYTES: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// The pages of a region that were written since it was made, or since they were taken last.
#[derive(Debug)]
pub struct WrittenPages {
    memory: HostMemory,
    /// Noted pages, unless the memory tracks writes.
    noted: Option<AtomicBitmap>,
}

impl WrittenPages {
    /// Takes memory. Returns `None` if it is longer than memory can be.
    pub(crate) fn new(memory: HostMemory) -> Option<Self> {
        let len = usize::try_from(memory.len_bytes()).ok()?;
        let mut written = Self { memory, noted: None };
        let is_tracked = written.tracked().is_some_and(|mapping| {
            let first = mapping.dirty(0..mapping.page_size().bytes());
            !matches!(first, Err(LazyError::NotTracked))
        });
        if !is_tracked {
            written.noted = Some(AtomicBitmap::new(len, NOTED_BYTES));
        }
        Some(written)
    }

    pub(crate) fn memory(&self) -> &HostMemory {
        &self.memory
    }

    pub(crate) fn into_memory(self) -> HostMemory {
        self.memory
    }

    /// Returns the mapping that is asked, if it is one.
    fn tracked(&self) -> Option<&LazyMapping> {
        match &self.memory {
            HostMemory::Lazy(mapping) if self.noted.is_none() => Some(mapping),
            _ => None,
        }
    }

    /// Returns whether writes past this crate are known, such as the writes of vCPUs.
    #[must_use]
    pub fn sees_all_writers(&self) -> bool {
        self.noted.is_none()
    }

    /// Returns the ranges of bytes of the region whose pages were written, in order, and makes them clean in the same step: a
    /// write is in this answer or in the next.
    ///
    /// # Errors
    /// [`LazyError`] if the kernel refuses to list the pages of a tracked mapping; then they are written as before.
    pub fn take(&self) -> Result<Vec<Range<u64>>, LazyError> {
        if let Some(mapping) = self.tracked() {
            return mapping.take_dirty(0..mapping.len().get());
        }
        let words = self.noted.as_ref().map(AtomicBitmap::get_and_reset).unwrap_or_default();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let (unit, len) = (NOTED_BYTES.get() as u64, self.memory.len_bytes());
        for (word, bits) in (0..).step_by(64).zip(words) {
            for page in (0..64).filter(|bit| bits >> bit & 1 == 1).map(|bit| word + bit) {
                let range = page * unit..((page + 1) * unit).min(len);
                match ranges.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => ranges.push(range),
                }
            }
        }
        Ok(ranges)
    }
}

impl<'a> WithBitmapSlice<'a> for WrittenPages {
    type S = RefSlice<'a, Self>;
}

impl Bitmap for WrittenPages {
    fn mark_dirty(&self, offset: usize, len: usize) {
        // A tracked mapping knows by now.
        if let Some(noted) = &self.noted {
            noted.mark_dirty(offset, len);
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let Some(mapping) = self.tracked() else {
            return self.noted.as_ref().is_some_and(|noted| noted.dirty_at(offset));
        };
        let page = mapping.page_size().bytes();
        let start = offset as u64 / page * page; // an offset has at most 64 bits
        // A page of which nothing is known may have been written.
        start < mapping.len().get()
            && mapping.dirty(start..start + page).map_or(true, |ranges| !ranges.is_empty())
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

//! What answers faults: [`Kernel`], by offsets into one mapping.
//!
//! The engine asks through this so that a kernel that was made up can take the real one's place in
//! tests, and answer whatever a kernel may answer in any order.

use std::ops::Range;

use uzone_os::Mapping;
use uzone_os::uffd::{AnswerError, Answered, Install, Registered};
use uzone_pages::ByteLen;

use crate::transparent::Slot;

/// The answers to faults of one mapping. Offsets are bytes from its start, multiples of its pages.
pub(crate) trait Kernel: Send + Sync {
    fn copy(&self, offset: u64, bytes: &[u8]) -> Result<Answered, AnswerError>;
    /// Copies `len` bytes of another mapping. A kernel that does not answers with a hole.
    fn copy_from(
        &self,
        offset: u64,
        source: &Mapping,
        source_offset: u64,
        len: u64,
    ) -> Result<Answered, AnswerError> {
        let _ = (offset, source, source_offset, len);
        Ok(Answered::Hole)
    }
    fn zero(&self, range: Range<u64>) -> Result<Answered, AnswerError>;
    fn continue_mapping(&self, range: Range<u64>) -> Result<Answered, AnswerError>;
    /// Makes pages bad that are missing, and wakes nobody: that is done when it is noted.
    fn poison(&self, range: Range<u64>) -> Result<Answered, AnswerError>;
    fn wake(&self, range: Range<u64>);

    /// Returns whether pages are made in slots.
    fn has_slots(&self) -> bool {
        false
    }

    /// Returns memory to make one page in, which [`Kernel::place`] puts in place without a copy, if
    /// there is some.
    fn slot(&self) -> Option<Slot<'_>> {
        None
    }

    /// Puts a page in place that was made in a slot of this kernel's.
    fn place(&self, offset: u64, slot: &mut Slot<'_>) -> Result<Answered, AnswerError> {
        self.copy(offset, slot.bytes())
    }

    /// Returns how many pages were put in place as one transparent huge page each.
    fn huge_pages(&self) -> u64 {
        0
    }

    /// Takes that nobody answers any more: who waits to write to a page that is there goes on.
    fn ended(&self) {}

    /// Lets whoever waits to write to a page do so, and perhaps to pages behind it, of which
    /// `is_there` says whether they may be written. Returns whether that is done, or somebody else
    /// does it; otherwise ask again.
    fn written(&self, page: u64, is_there: &dyn Fn(u64) -> bool) -> bool {
        // Nothing is protected against writing.
        let _ = (page, is_there);
        true
    }
}

/// Nobody is woken.
pub(crate) const QUIETLY: Install = Install { wake: false, write_protect: false };

impl Kernel for Registered {
    fn copy(&self, offset: u64, bytes: &[u8]) -> Result<Answered, AnswerError> {
        Self::copy(self, offset, bytes, Install::default())
    }

    fn copy_from(
        &self,
        offset: u64,
        source: &Mapping,
        source_offset: u64,
        len: u64,
    ) -> Result<Answered, AnswerError> {
        let len = ByteLen::new(len);
        Self::copy_from(self, offset, source, source_offset, len, Install::default())
    }

    fn zero(&self, range: Range<u64>) -> Result<Answered, AnswerError> {
        Self::zero(self, range, Install::default())
    }

    fn continue_mapping(&self, range: Range<u64>) -> Result<Answered, AnswerError> {
        Self::continue_mapping(self, range, Install::default())
    }

    fn poison(&self, range: Range<u64>) -> Result<Answered, AnswerError> {
        Self::poison(self, range, QUIETLY)
    }

    fn wake(&self, range: Range<u64>) {
        // A refusal means that the range is gone, and with it whoever waited.
        let _ = Self::wake(self, range);
    }
}

//! The answers to the faults of one mapping: [`Kernel`].
//!
//! The engine answers through this trait, so that tests can put another kernel in place, which gives any
//! answer in any order.

use std::ops::Range;

use uzone_os::Mapping;
use uzone_os::uffd::{Answered, Install, Registered, UffdError};
use uzone_pages::ByteLen;

use crate::huge::slot::Slot;

/// What missing pages are filled with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fill<'a> {
    /// Bytes, as many as the pages have.
    Bytes(&'a [u8]),
    /// Bytes of another mapping, from `offset` on.
    From { source: &'a Mapping, offset: u64 },
    /// Zeroes.
    Zero,
    /// What the page cache has.
    Cached,
    /// A mark that raises `SIGBUS` when a page is touched. The caller wakes the waiters afterwards.
    Poison,
}

impl Fill<'_> {
    /// Returns what fills a part of the pages. `part` is bytes from the start of the first page.
    pub(crate) fn part(self, part: Range<u64>) -> Self {
        let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        match self {
            Self::Bytes(bytes) => {
                let (from, to) = (index(part.start), index(part.end).min(bytes.len()));
                Self::Bytes(&bytes[from.min(to)..to])
            }
            Self::From { source, offset } => Self::From { source, offset: offset + part.start },
            other => other,
        }
    }

    /// Returns how the kernel installs the pages.
    pub(crate) fn how(&self) -> Install {
        Install { wake: !matches!(self, Self::Poison), write_protect: false }
    }
}

/// The answers to faults of one mapping. Offsets are bytes from its start, multiples of its pages.
pub(crate) trait Kernel: Send + Sync {
    /// Fills the missing pages of a range. A kernel that does not take a fill answers with a hole.
    fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError>;

    /// Wakes the threads that wait for pages of a range.
    fn wake(&self, range: Range<u64>);

    /// Returns whether pages are made in slots.
    fn has_slots(&self) -> bool {
        false
    }

    /// Returns memory to make one page in, which [`Kernel::install_slot`] installs without a copy, if
    /// there is some.
    fn slot(&self) -> Option<Slot<'_>> {
        None
    }

    /// Installs a page that was made in a slot of this kernel.
    fn install_slot(&self, offset: u64, slot: &mut Slot<'_>) -> Result<Answered, UffdError> {
        let bytes = slot.bytes();
        self.install(offset..offset + bytes.len() as u64, Fill::Bytes(bytes))
    }

    /// Returns how many pages were installed as one transparent huge page each.
    fn huge_pages(&self) -> u64 {
        0
    }

    /// Lets the threads go on that wait to write to a present page: no faults are answered any more.
    fn ended(&self) {}

    /// Lets a thread write to a page, and perhaps to pages behind it, of which `is_there` returns whether
    /// they may be written. Returns whether that is done, or another thread does it; otherwise ask again.
    fn written(&self, page: u64, is_there: &dyn Fn(u64) -> bool) -> bool {
        // Nothing is protected against writing.
        let _ = (page, is_there);
        true
    }
}

/// Fills missing pages of memory of this process.
pub(crate) fn install(
    memory: &Registered,
    range: Range<u64>,
    fill: Fill<'_>,
    how: Install,
) -> Result<Answered, UffdError> {
    match fill {
        Fill::Bytes(bytes) => memory.copy(range.start, bytes, how),
        Fill::From { source, offset } => {
            let len = ByteLen::new(range.end - range.start);
            memory.copy_from(range.start, source, offset, len, how)
        }
        Fill::Zero => memory.zero(range, how),
        Fill::Cached => memory.continue_mapping(range, how),
        Fill::Poison => memory.poison(range, how),
    }
}

impl Kernel for Registered {
    fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError> {
        install(self, range, fill, fill.how())
    }

    fn wake(&self, range: Range<u64>) {
        // A refusal means that the range was unmapped, and no thread waits in it.
        let _ = Self::wake(self, range);
    }
}

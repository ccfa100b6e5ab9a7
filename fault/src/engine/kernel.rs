//! The answers to the faults of one mapping: [`Kernel`].
//!
//! The engine answers through this trait, so that tests can put another kernel in place, which gives any
//! answer in any order.

use std::ops::Range;

pub(crate) use uzone_os::uffd::Fill;
use uzone_os::uffd::{Answered, Registered, UffdError};

/// The answers to faults of one mapping. Offsets are bytes from its start, multiples of its pages.
pub(crate) trait Kernel: Send + Sync {
    /// Fills the missing pages of a range. A kernel that does not take a fill answers with a hole.
    fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError>;

    /// Wakes the threads that wait for pages of a range.
    fn wake(&self, range: Range<u64>);

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

impl Kernel for Registered {
    fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError> {
        Self::install(self, range, fill, fill.how())
    }

    fn wake(&self, range: Range<u64>) {
        // A refusal means that the range was unmapped, and no thread waits in it.
        let _ = Self::wake(self, range);
    }
}

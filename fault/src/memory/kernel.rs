//! The memory of one mapping, as the engine reads its faults ([`Faults`]) and answers them ([`Kernel`]). Tests put a made-up
//! one in place, which gives any answer in any order.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use uzone_os::Vaddr;
pub(crate) use uzone_os::uffd::Fill;
use uzone_os::uffd::{Answered, EventBuffer, UffdError};

use crate::memory::remote_region::RemoteRegion;
use crate::pages::Policy;

/// The faults of one mapping, and other events.
pub(crate) trait Faults: Send + Sync {
    /// Returns the descriptor that has something to read when there are events.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Reads pending events. Returns their number.
    fn read(&self, buffer: &mut EventBuffer) -> io::Result<usize>;

    /// Returns whether an event waits for the end of a capture. No fault can be answered before that.
    fn is_waiting(&self) -> bool {
        false
    }

    /// Returns at which byte of the backing an address is.
    fn offset_of(&self, address: Vaddr) -> Option<u64>;

    /// Returns the regions whose pages are given back without the engine: none of memory of this process.
    fn regions(&self) -> &[RemoteRegion] {
        &[]
    }
}

/// The answers to faults of one mapping. Offsets are bytes of the backing, multiples of its pages.
pub(crate) trait Kernel: Send + Sync {
    /// Returns how this memory differs from other memory.
    fn policy(&self) -> Policy {
        Policy::default()
    }

    /// Fills the missing pages of a range. A kernel that does not take a fill answers with a hole.
    fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError>;

    /// Wakes the threads that wait for pages of a range.
    fn wake(&self, range: Range<u64>);

    /// Notes why a page cannot be produced, for the line that a handler of its signal writes.
    fn note_failure(&self, _range: Range<u64>, _reason: &str) {}

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

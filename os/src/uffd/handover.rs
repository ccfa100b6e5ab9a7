//! Faults that handlers of signals hand over to the thread that reads the events of the memory: [`Handover`].
//!
//! A handler that cannot fill a page, or would have to wait for a device, asks that thread for it, rings a bell
//! that it waits for along with its descriptors, and sleeps by futex(2) until the page was filled or made bad. It
//! sleeps for a moment at most: then the access is repeated, which faults again if the page is still missing. So
//! other signals come to their turn, a wake-up that is missed costs that moment, and a mapping that ends is left.
//!
//! Source: futex(2), eventfd(2), signal-safety(7).

use core::num::NonZeroU32;
use core::ops::Range;
use core::sync::atomic::AtomicU32;
use core::time::Duration;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::thread::futex;
use uzone_pages::PageSize;

use crate::map::options::Vaddr;
use crate::uffd::message::{FaultKind, PageFault};
use crate::uffd::registered::Registered;
use crate::uffd::requests::{Request, Requests};
use crate::uffd::wait::Doorbell;

/// The number of words that their threads wait at.
const WORDS: usize = 16;
/// The longest sleep of a handler.
pub(crate) const MOMENT: Duration = Duration::from_millis(20);
/// The same where there was no room.
const RETRY: Duration = Duration::from_millis(1);

/// The faults that are handed over of one memory.
pub struct Handover {
    requests: Requests<{ Handover::MOST }, WORDS>,
    bell: Doorbell,
    start: u64,
    page: PageSize,
}

impl Handover {
    /// The most faults that are handed over and not taken yet.
    pub const MOST: usize = 64;

    /// Makes one for faults of `memory`.
    ///
    /// # Errors
    /// The error of eventfd(2): the process has as many descriptors as it may.
    pub fn new(memory: &Registered) -> io::Result<Self> {
        let (start, page) = (memory.mapping().addr().get() as u64, memory.mapping().page_size());
        Ok(Self { requests: Requests::new(), bell: Doorbell::new()?, start, page })
    }

    /// Takes the faults that were handed over since the last call.
    pub fn take(&self, mut found: impl FnMut(PageFault)) {
        // In this order: a handler that asks after this rings again. If it is not silenced, this is called again.
        let _ = self.bell.silence();
        self.requests.take(|Request { page, is_write, thread }| {
            let address = Vaddr::new(self.start + (page << self.page.shift()));
            let thread = NonZeroU32::new(thread);
            found(PageFault { address, kind: FaultKind::Missing, is_write, thread });
        });
    }

    /// Wakes the threads that wait for pages of a range, which is offsets in the memory: they repeat their access.
    pub fn wake(&self, range: Range<u64>) {
        self.wake_pages(range.start >> self.page.shift()..range.end >> self.page.shift());
    }

    pub(crate) fn wake_pages(&self, pages: Range<u64>) {
        // There are no more words than that.
        for page in pages.take(WORDS) {
            if let Some(word) = self.requests.wakes(page) {
                // It fails only for a word that is not mapped.
                let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX.cast_unsigned());
            }
        }
    }

    /// Wakes all that wait.
    pub(crate) fn wake_all(&self) {
        self.wake_pages(0..WORDS as u64);
    }

    /// Hands a fault of the calling thread over, and waits for a moment until the page is filled. Called by
    /// handlers: it allocates nothing and takes no lock.
    pub(crate) fn wait(&self, page: u64, is_write: bool) {
        let (word, seen) = self.requests.waits(page);
        let thread = crate::thread_id();
        let has_room = self.requests.ask(Request { page, is_write, thread });
        // If it cannot be rung, the fault is read with the next one that is handed over.
        let _ = self.bell.ring();
        sleep_at(word, seen, if has_room { MOMENT } else { RETRY });
    }
}

/// Sleeps until the word is another or was woken, for `most` at most.
fn sleep_at(word: &AtomicU32, seen: u32, most: Duration) {
    let timeout = futex::Timespec { tv_sec: 0, tv_nsec: most.subsec_nanos().into() };
    // Whatever ends it, the access is repeated.
    let _ = futex::wait(word, futex::Flags::PRIVATE, seen, Some(&timeout));
}

/// Sleeps for `most` at most. Called by handlers.
pub(crate) fn sleep(most: Duration) {
    sleep_at(&AtomicU32::new(0), 0, most.min(MOMENT));
}

impl AsFd for Handover {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl core::fmt::Debug for Handover {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Handover").field("start", &Vaddr::new(self.start)).finish_non_exhaustive()
    }
}

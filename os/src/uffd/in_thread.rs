//! Faults answered by the threads that take them: [`InThread`], for memory of a userfaultfd with
//! [`Features::SIGBUS`](crate::uffd::Features::SIGBUS).
//!
//! Such a userfaultfd reports nothing. The kernel raises `SIGBUS` in the thread that touches a missing page,
//! and the one handler of this process ([`sigbus`]) fills the page and its neighbours and returns; the access is
//! repeated. No other thread is woken, which is most of the cost of a fault on a virtual machine.
//!
//! The code in the handler takes no lock, allocates nothing and touches no memory that is mapped lazily:
//! bytes of a file are the source of a copy that the kernel makes. A page that is not in the page cache is
//! waited for in that copy.
//!
//! No thread can end such a wait. Where a page has a deadline ([`Answers::waits`]), the handler
//! fills ready pages alone: it reads a page of the page cache into a room that was made beforehand, and copies it from
//! there. A page that is not ready, or cannot be filled at all, is handed over ([`Handover`](crate::uffd::Handover)), if
//! there is another thread for it.
//!
//! A system call that is given a missing page fails with `EFAULT`. A thread that blocks `SIGBUS` dies of a
//! fault.
//!
//! # Which pages
//!
//! The handler maps the window of the plan ([`FaultPlanner`](uzone_pages::FaultPlanner)), which threads that answer for
//! others share, and the planner learns from it how long faults and pages take. One bit a page states whether it was
//! filled; it is a hint, and the kernel decides.
//!
//! # Writes
//!
//! Where writes are tracked ([`Answers::tracks_writes`]), pages are filled protected. If each first
//! write is an event, the thread that writes notes it and lets itself in; while another thread
//! makes the page clean, it tries again. A page that is given back may come again with other bytes,
//! those that were written back, so [`InThread::drain`] waits for the handlers that may have read
//! the old ones.
//!
//! Unsafe: the pointer that the handler follows.
//! Source: ioctl_userfaultfd(2), `UFFD_FEATURE_SIGBUS`; signal-safety(7).

pub(crate) mod answerer;
mod answers;

use core::cell::Cell;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Instant;

use crate::host::thread::pause;
use crate::sigbus;
use crate::sigbus::gate::Gate;
use crate::uffd::error::UffdError;
use crate::uffd::message::FaultKind;
use crate::uffd::pace::Paced;
use crate::uffd::registered::Registered;
use answerer::{ANSWERED, Answerer, FLAGS, INDEX, PRESENT, Share, TABLE, WRITE, place};

pub use answers::{Answers, FileSource, Source};

/// The most mappings that can be answered for in their threads at a time.
pub const SLOTS: usize = 4096;

const FULL: &str = "4096 mappings are answered for by their threads, which is the most";
const _: () = assert!(SLOTS == 4096);

/// Held over a change of the index, and never by the handler.
static CHANGING: Mutex<()> = Mutex::new(());

/// The longest wait for handlers at the end; if one is stopped inside, its memory is kept for good.
const PATIENCE: Duration = Duration::from_secs(2);

/// A fault that was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// When the handler was called.
    pub at: Instant,
    /// The page.
    pub page: u64,
    /// Whether it was a write.
    pub is_write: bool,
    /// The kind of the fault.
    pub kind: FaultKind,
    /// Whether the access was repeated.
    pub is_answered: bool,
    /// The time of the handler.
    pub latency: Duration,
}

/// A mapping whose faults are answered by the threads that take them, until this is dropped.
///
/// # Invariants
/// `slot` is this value's alone, and its pointer is the box of `answerer`.
pub struct InThread {
    slot: usize,
    answerer: *mut Answerer,
}

// SAFETY: `Send` and `Sync` want that the answerer may be used from any thread: handlers of all threads do,
// and its fields are shared types and atomics. It is freed by the one owner of this value.
unsafe impl Send for InThread {}
// SAFETY: as above.
unsafe impl Sync for InThread {}

/// A place among those that the handler looks at.
///
/// # Invariants
/// The slot is this value's alone, and not active.
#[derive(Debug)]
pub struct Place(usize);

impl Place {
    /// Takes a place, and installs the handler of `SIGBUS` if that is not done.
    ///
    /// # Errors
    /// The reason: the handler cannot be installed, or all places are taken, and the handler is installed.
    pub fn take() -> Result<Self, &'static str> {
        if !matches!(sigbus::install(), Ok(true)) {
            return Err("the process has another handler of SIGBUS");
        }
        let place = TABLE.iter().position(Gate::take).map(Self);
        place.ok_or(FULL)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        TABLE[self.0].give_back();
    }
}

impl InThread {
    /// Answers for memory, whose userfaultfd has
    /// [`Features::SIGBUS`](crate::uffd::Features::SIGBUS).
    ///
    /// # Errors
    /// [`UffdError::NoSigbus`] if it has not, and [`UffdError::NoMemory`] without memory for it, or in a child that
    /// was forked off while another thread started one.
    pub fn start(
        place: Place,
        memory: Arc<Registered>,
        answers: Answers,
    ) -> Result<Self, UffdError> {
        if !memory.uffd().features().contains(crate::uffd::Features::SIGBUS) {
            return Err(UffdError::NoSigbus);
        }
        let answerer = Answerer::new(memory, answers)?;
        let first = answerer.memory.mapping().addr().get() as u64;
        let last = first + (answerer.pages << answerer.page.shift()) - 1;
        let slot = place.0;
        let changing = changing().ok_or(UffdError::NoMemory)?;
        // The slot is this value's from here on.
        core::mem::forget(place);
        let answerer = Box::into_raw(Box::new(answerer));
        TABLE[slot].open(first, last, answerer);
        INDEX.add(first, slot);
        drop(changing);
        Ok(Self { slot, answerer })
    }

    fn answerer(&self) -> &Answerer {
        // SAFETY: `as_ref` wants a value that lives as long as the reference: it is freed when this value is
        // dropped (the invariant), and handlers change atomics alone.
        unsafe { &*self.answerer }
    }

    /// Returns the counts so far: the faults of missing pages, the pages that were filled for them, the
    /// faults of writes to pages that were there, and the waits because of [`Answers::pace`].
    #[must_use]
    pub fn counts(&self) -> [u64; 4] {
        let answerer = self.answerer();
        // Relaxed: statistics.
        let get = |count: fn(&Share) -> &AtomicU64| -> u64 {
            answerer.shares.iter().map(|share| count(share).load(Ordering::Relaxed)).sum()
        };
        let held = answerer.paced.as_ref().map_or(0, Paced::held);
        [get(|share| &share.faults), get(|share| &share.filled), get(|share| &share.writes), held]
    }

    /// Takes the records out that were made since the last call, in the order in which they were finished
    /// or nearly so. Returns the number of lost ones. One thread at a time calls it.
    pub fn take_records(&self, mut found: impl FnMut(Record)) -> u64 {
        let answerer = self.answerer();
        let Answers { source, tracks_writes, .. } = &answerer.answers;
        answerer.records.take(|[at, page, rest]| {
            let kind = match source {
                _ if *tracks_writes && rest & PRESENT != 0 && rest & WRITE != 0 => {
                    FaultKind::WriteProtect
                }
                Source::Cached => FaultKind::Minor,
                Source::File(_) | Source::Zero => FaultKind::Missing,
            };
            found(Record {
                at: answerer.started + Duration::from_nanos(at),
                page,
                is_write: rest & WRITE != 0,
                kind,
                is_answered: rest & ANSWERED != 0,
                latency: Duration::from_nanos(rest >> FLAGS),
            });
        })
    }

    /// Waits until each handler has left that may have read bytes for a page and not filled it yet: from then on pages
    /// are filled with the newest bytes of the source. Returns whether they have; a handler that waits for a device may
    /// take longer than this waits, which is two seconds. One thread at a time calls it.
    #[must_use]
    pub fn drain(&self) -> bool {
        let give_up = Instant::now() + PATIENCE;
        let round = Cell::new(0);
        TABLE[self.slot].drain(|| {
            let mut looks = round.get();
            pause(&mut looks);
            round.set(looks);
            Instant::now() < give_up
        })
    }

    /// Returns whether a page may have been filled here.
    #[must_use]
    pub fn may_have_filled(&self, page: u64) -> bool {
        page < self.answerer().pages && self.answerer().is_filled(page)
    }

    /// Notes that pages were filled elsewhere: a window leaves them out, and a writer that goes on page by
    /// page is let in there too.
    pub fn filled_elsewhere(&self, pages: Range<u64>) {
        let answerer = self.answerer();
        answerer.mark_filled(pages.start..pages.end.min(answerer.pages));
    }

    /// Notes that a page is bad: the kernel has a mark for it. A thread that touches it gets the signal, which does
    /// not always distinguish a mark from a missing page, and windows leave it out: a copy would take the place of
    /// the mark.
    pub fn made_bad(&self, page: u64) {
        let answerer = self.answerer();
        if page < answerer.pages {
            let (index, bit) = place(page);
            // Relaxed: a handler that does not see it yet hands the fault over, and sees it the next time.
            answerer.bad[index].fetch_or(bit, Ordering::Relaxed);
            answerer.mark_filled(page..page + 1);
        }
    }

    /// Wakes the threads that wait for one of some pages that they handed over.
    pub fn wake(&self, pages: Range<u64>) {
        if let Some(handover) = &self.answerer().answers.handover {
            handover.wake_pages(pages);
        }
    }

    /// Notes that pages are being given back. Called before they are.
    pub fn gives_back(&self, pages: Range<u64>) {
        let answerer = self.answerer();
        for page in pages.start..pages.end.min(answerer.pages) {
            let (index, bit) = place(page);
            // Relaxed: a hint, and a page that is given back is not bad.
            answerer.filled[index].fetch_and(!bit, Ordering::Relaxed);
            if answerer.bad[index].load(Ordering::Relaxed) & bit != 0 {
                answerer.bad[index].fetch_and(!bit, Ordering::Relaxed);
            }
        }
    }
}

/// Waits until no other thread changes the index. `None` in a child that was forked off while one did.
fn changing() -> Option<MutexGuard<'static, ()>> {
    let give_up = Instant::now() + PATIENCE;
    loop {
        match CHANGING.try_lock() {
            Ok(guard) => return Some(guard),
            // A panic leaves the index as it was before or after.
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() >= give_up => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}

impl Drop for InThread {
    fn drop(&mut self) {
        let slot = &TABLE[self.slot];
        if let Some(_changing) = changing() {
            INDEX.remove(self.slot);
        }
        slot.close();
        let (give_up, mut round) = (Instant::now() + PATIENCE, 0);
        while !slot.is_empty() {
            if let Some(handover) = &self.answerer().answers.handover {
                handover.wake_all();
            }
            if Instant::now() >= give_up {
                // A handler waits for a device, or is stopped; or this is a child of a process whose handler
                // was inside when it forked. The slot is not used again.
                return;
            }
            pause(&mut round);
        }
        // SAFETY: `from_raw` wants a pointer of `into_raw`, once: the invariant. No handler is inside, and none enters a
        // slot that is closed.
        drop(unsafe { Box::from_raw(self.answerer) });
        slot.give_back();
    }
}

impl core::fmt::Debug for InThread {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("InThread").field("counts", &self.counts()).finish_non_exhaustive()
    }
}

//! Which pages were written since they were filled or written back: [`WriteTracking`]. Every page is
//! installed write-protected, so a page that the engine filled is not dirty. There are two ways to learn of
//! the first write:
//!
//! | | asynchronous | synchronous |
//! |---|---|---|
//! | a first write | the kernel removes the protection and goes on | an event, and the reader lets the writer in |
//! | where it is recorded | the page tables, by a scan | a byte a page ([`WriteStates`]) |
//! | memory | private: anonymous, huge pages, a memory file mapped privately | all |
//! | zeroes | the zero page | copied, since the zero page cannot be protected |
//! | evicting clean pages | refused: a write could come in between | yes |
//!
//! [`WriteTracking`] has the cost of each where events are answered by a reader; a thread that answers its own
//! needs about two thirds of the time of a reader on the same CPU (`uzone-bench fault`).
//!
//! Shared memory files can lose pages from the page tables, and with them the notes there, so
//! asynchronous tracking is refused for them.
//!
//! Neither sees writes past this mapping's page tables: by a device into memory that was pinned
//! before the page was protected, which is why a pinned page stays dirty once it is; or through another
//! mapping of the same file. Locks: one for the threads that make pages clean (write-back, eviction), held
//! over calls of the kernel and of the backing. No fault waits for it, but a thread that writes to a page
//! that is being made clean waits until it is protected again.
//! Source: "Userfaultfd" in the Linux administrator's guide, ioctl_pagemap_scan(2).

use std::fs::File;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use uzone_os::signals::Held;
use uzone_os::thread::pause;
use uzone_os::uffd::write_states::{WriteStates, runs_of};
use uzone_os::uffd::{Answered, Features, Fill, Install, Modes, Registered, UffdCall, UffdError};
use uzone_os::{Anonymous, Exclusive, Mapped, Mapping, Sharing, lock, pagemap_scan};
use uzone_pages::{ByteLen, PageCount, PageSize};

use crate::error::{LazyError, MapError};
use crate::options::WriteTracking;

/// How long the kernel is asked again while the layout of the process changes.
const PATIENCE: Duration = Duration::from_secs(2);

impl WriteTracking {
    /// Returns the modes and features that tracking needs beside `modes` and `features`.
    pub(crate) fn needs(
        self,
        mapping: &Mapping,
        modes: Modes,
        features: Features,
    ) -> Result<(Modes, Features), MapError> {
        let mut features = features | Features::WRITE_PROTECT;
        let is_own = mapping.is_private();
        if !is_own || mapping.page_size() != uzone_os::probe::page_size() {
            // Installing pages of a memory file protected came with the latter.
            features |= Features::WRITE_PROTECT_SHARED | Features::WRITE_PROTECT_ABSENT;
        }
        if self == Self::Async {
            if !is_own && mapping.sharing() != Some(Sharing::Private) {
                return Err(MapError::Backing {
                    reason: "the kernel may forget that a page of a shared file was written: track writes synchronously, or map it privately",
                });
            }
            features |= Features::WRITE_PROTECT_ASYNC;
        }
        Ok((modes | Modes::WRITE_PROTECT, features))
    }
}

enum How {
    Async(File),
    Sync(Arc<WriteStates>),
}

/// The dirty pages of a mapping, whose pages are installed clean.
pub(crate) struct Tracker {
    memory: Arc<Registered>,
    page: PageSize,
    how: How,
    turn: Mutex<()>,
}

impl Tracker {
    pub(crate) fn new(
        tracking: WriteTracking,
        memory: Arc<Registered>,
        pages: PageCount,
    ) -> Result<Self, MapError> {
        if !memory.takes(UffdCall::WriteProtect) {
            return Err(MapError::Backing {
                reason: "this kernel does not protect such memory against writing",
            });
        }
        let page = memory.mapping().page_size();
        let how = match tracking {
            WriteTracking::Async => How::Async(pagemap_scan::open()?),
            WriteTracking::Sync => {
                let bytes = ByteLen::new(pages.get());
                let memory = Exclusive::anonymous(bytes, Anonymous::default())?;
                let states = Mapped::try_new(memory, bytes.to_usize()?);
                How::Sync(Arc::new(WriteStates::new(states.map_err(|refused| refused.cause)?)))
            }
        };
        Ok(Self { memory, page, how, turn: Mutex::new(()) })
    }

    /// Returns whether the kernel's zero page cannot be used: where a first write to it is not seen.
    pub(crate) fn copies_zeroes(&self) -> bool {
        match self.how {
            How::Sync(_) => true,
            // The page table of a file may keep a marker where a page was, and the zero page does not
            // replace it.
            How::Async(_) => !self.memory.mapping().is_private(),
        }
    }

    pub(crate) fn states(&self) -> Option<&Arc<WriteStates>> {
        match &self.how {
            How::Sync(states) => Some(states),
            How::Async(_) => None,
        }
    }

    /// Locks out the other threads that make pages clean.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        lock(&self.turn)
    }

    fn bytes(&self, pages: &Range<u64>) -> Range<u64> {
        pages.start << self.page.shift()..pages.end << self.page.shift()
    }

    fn pages(&self, bytes: &Range<u64>) -> Range<u64> {
        bytes.start >> self.page.shift()..bytes.end >> self.page.shift()
    }

    /// Returns the runs of pages of a range that may have been written.
    pub(crate) fn dirty(&self, pages: Range<u64>) -> Result<Vec<Range<u64>>, LazyError> {
        match &self.how {
            How::Sync(states) => Ok(states.dirty(pages)),
            How::Async(pagemap) => {
                let (mut found, bytes) = (Vec::new(), self.bytes(&pages));
                pagemap_scan::written(pagemap, &self.memory, bytes, false, &mut found)?;
                Ok(found.iter().map(|run| self.pages(run)).collect())
            }
        }
    }

    /// Takes the runs of pages of a range that may have been written, which are clean from then on. Where
    /// writes are events, pinned ones stay dirty and are not protected even for a moment: a system call may
    /// be writing to them. The caller has its turn. After an error, all are as dirty as they were.
    pub(crate) fn take(
        &self,
        pages: Range<u64>,
        is_pinned: impl Fn(u64) -> bool,
    ) -> Result<Vec<Range<u64>>, LazyError> {
        match &self.how {
            How::Async(pagemap) => {
                let (mut found, bytes) = (Vec::new(), self.bytes(&pages));
                let answer = pagemap_scan::written(pagemap, &self.memory, bytes, true, &mut found);
                let found: Vec<_> = found.iter().map(|run| self.pages(run)).collect();
                if let Err(error) = answer {
                    self.put_back(&found)?;
                    return Err(error.into());
                }
                Ok(found)
            }
            How::Sync(states) => {
                let found = states.dirty(pages);
                let free = found.iter().flat_map(|run| runs_of(run.clone(), |at| !is_pinned(at)));
                // A signal handler that writes to one of the pages would wait for this thread.
                let _held = Held::hold();
                for run in free.flat_map(|run| states.close(run, false)) {
                    let answer = self.protect(&run, true);
                    if answer.is_ok() {
                        states.closed(run.clone());
                    } else {
                        states.reopened(run.clone());
                        // The runs before it are clean by now.
                        found.iter().for_each(|run| states.mark(run.clone()));
                    }
                    // Threads that faulted on a write meanwhile wait for this thread.
                    self.wake(self.bytes(&run));
                    answer?;
                }
                Ok(found)
            }
        }
    }

    /// Makes pages dirty, as if they were written.
    pub(crate) fn put_back(&self, runs: &[Range<u64>]) -> Result<(), LazyError> {
        match &self.how {
            How::Sync(states) => {
                runs.iter().for_each(|run| states.mark(run.clone()));
                Ok(())
            }
            How::Async(_) => runs.iter().try_for_each(|run| self.protect(run, false)),
        }
    }

    /// Makes pages dirty and lets writers in, which then may write at any time. The caller has its turn.
    pub(crate) fn open(&self, runs: &[Range<u64>]) -> Result<(), LazyError> {
        self.put_back(runs)?;
        match &self.how {
            How::Sync(_) => runs.iter().try_for_each(|run| self.protect(run, false)),
            How::Async(_) => Ok(()),
        }
    }

    /// Notes that pages were given back: they are clean. A thread that answers its own faults may have filled one
    /// of them already, which is protected and stays so.
    pub(crate) fn evicted(&self, pages: &Range<u64>) {
        match &self.how {
            How::Sync(states) => states.closed(pages.clone()),
            How::Async(_) if self.leaves_markers() => {
                // Where it is left, the page cannot be made a bad one. One that came back meanwhile is dirty now.
                let _ = self.protect(pages, false);
            }
            How::Async(_) => {}
        }
    }

    /// Returns whether the page table keeps a marker where a protected page was given back: that of a file, or of
    /// huge pages. Such a page can be filled, but not be made a bad one.
    fn leaves_markers(&self) -> bool {
        let is_small = self.page == uzone_os::probe::page_size();
        !(self.memory.mapping().is_private() && is_small)
    }

    /// Removes the marker of a page that is about to be made a bad one. If there is a page in its place after all,
    /// it may be written from then on, so it is dirty. Returns the reply if the caller has to ask again.
    fn remove_marker(&self, page: u64) -> Result<Option<Answered>, UffdError> {
        let How::Sync(states) = &self.how else { return Ok(None) };
        if !self.leaves_markers() {
            return Ok(None);
        }
        let Some(run) = states.open(page, |_| false) else { return Ok(Some(Answered::Busy)) };
        let answer = self.memory.write_protect(self.bytes(&run), false);
        // The caller wakes a thread that wanted to write to it meanwhile.
        states.opened(run);
        Ok(Some(answer?).filter(|it| matches!(it, Answered::LayoutChanging | Answered::Busy)))
    }

    pub(crate) fn wake_pages(&self, pages: &Range<u64>) {
        self.wake(self.bytes(pages));
    }

    /// Protects pages against writing, or lets writers in, as soon as the kernel does so.
    pub(crate) fn protect(&self, pages: &Range<u64>, protected: bool) -> Result<(), LazyError> {
        let (give_up, mut round) = (Instant::now() + PATIENCE, 0);
        loop {
            match self.memory.write_protect(self.bytes(pages), protected)? {
                // If the memory is gone, no thread can write to it.
                Answered::All | Answered::NotRegistered | Answered::Gone => return Ok(()),
                _ if Instant::now() >= give_up => {
                    return Err(LazyError::TimedOut { offset: self.bytes(pages).start });
                }
                _ => pause(&mut round),
            }
        }
    }

    fn wake(&self, range: Range<u64>) {
        // A refusal means that the range was unmapped, and no thread waits in it.
        let _ = self.memory.wake(range);
    }

    /// Fills the missing pages of a range, which are clean then.
    pub(crate) fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError> {
        if matches!(fill, Fill::Poison)
            && let Some(later) = self.remove_marker(self.pages(&range).start)?
        {
            return Ok(later);
        }
        // The zero page is used only where the scan knows that it was not written.
        let write_protect = !matches!(fill, Fill::Zero | Fill::Poison);
        self.memory.install(range, fill, Install { write_protect, ..fill.how() })
    }

    /// Lets writers in for good: no faults are answered any more.
    pub(crate) fn ended(&self) {
        if let How::Sync(_) = &self.how {
            // A guard of a pinned page keeps the memory, and its holder may write to it. A refusal
            // means that the memory is gone.
            let len = self.memory.mapping().len().get();
            let _ = self.memory.write_protect(0..len, false);
        }
    }

    /// Lets a thread write to a page, as [`Kernel::written`](crate::memory::kernel::Kernel::written) states.
    pub(crate) fn written(&self, page: u64, is_there: &dyn Fn(u64) -> bool) -> bool {
        let How::Sync(states) = &self.how else {
            self.wake(self.bytes(&(page..page + 1)));
            return true;
        };
        let Some(run) = states.open(page, is_there) else {
            return true;
        };
        let answer = self.memory.write_protect(self.bytes(&run), false);
        // Also if the kernel deferred it: then a page is dirty and protected, and its next write faults
        // again.
        states.opened(run);
        matches!(answer, Ok(Answered::All | Answered::NotRegistered | Answered::Gone))
    }
}

//! Memory of this process that is mapped lazily: [`LazyMapping`].

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use uzone_os::uffd::Registered;
use uzone_os::{Addr, Mapping, RangeError};
use uzone_pages::{Advice, ByteLen, Content, FaultAround, PageSize};
use uzone_zone::Pinned;

use crate::collapse::{Collapser, QuietCollapser};
use crate::core::{Core, ReaderState};
use crate::dirty::Tracker;
use crate::error::{Failure, LazyError};
use crate::event_loop::Attached;
use crate::populate::{Populate, populate};
use crate::record::{FaultTrace, Latency};
use crate::stats::{Counters, FaultStats};

/// Memory of this process whose pages come from a backing when they are touched.
///
/// Dropping it unmaps it, as soon as no page of it is pinned or being produced. A thread of foreign
/// code that still waits in it then gets a signal, and never a page of zeroes.
pub struct LazyMapping {
    // Dropped first: it may touch pages, which have to be filled until it has stopped.
    _quiet_collapser: Option<QuietCollapser>,
    // Then this: no fault is answered afterwards, and waiting threads get a signal.
    _attached: Attached,
    memory: Arc<Registered>,
    core: Arc<Core>,
    room: usize,
    tracker: Option<Arc<Tracker>>,
}

impl LazyMapping {
    pub(crate) fn new(
        attached: Attached,
        memory: Arc<Registered>,
        core: Arc<Core>,
        room: usize,
        tracker: Option<Arc<Tracker>>,
    ) -> Self {
        Self { _quiet_collapser: None, _attached: attached, memory, core, room, tracker }
    }

    /// Starts a thread that collapses present pages when no page was filled for `quiet`.
    pub(crate) fn collapse_when_settled(&mut self, quiet: Duration) -> io::Result<()> {
        self._quiet_collapser = Some(QuietCollapser::start(self.collapser(), quiet)?);
        Ok(())
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// Returns how many bytes are read from a backing at once, or written to it.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    pub(crate) fn collapser(&self) -> Collapser {
        let (core, memory) = (self.core.clone(), self.memory.clone());
        Collapser { core, memory, is_tracked: self.tracker.is_some() }
    }

    pub(crate) fn tracking(&self) -> Option<&Tracker> {
        self.tracker.as_deref()
    }

    fn mapping(&self) -> &Mapping {
        self.memory.mapping()
    }

    /// Returns where it starts, for other code that reads it.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.mapping().addr()
    }

    /// Returns how long it is; never zero.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        self.mapping().len()
    }

    /// Returns whether it has no byte, which never holds.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the size of a page.
    #[must_use]
    pub fn page_size(&self) -> PageSize {
        self.core.page_size()
    }

    /// Returns whether system calls may be given missing pages of it; otherwise they fail with
    /// `EFAULT` there.
    #[must_use]
    pub fn sees_kernel_faults(&self) -> bool {
        self.memory.uffd().sees_kernel_faults()
    }

    /// Copies bytes out, from byte `offset` of the mapping on. What is missing is produced, and the call
    /// waits for it, whether or not faults of the kernel are reported; a page that is bad raises `SIGBUS`,
    /// so a caller whose backing may fail calls [`LazyMapping::populate`] first, or
    /// [`uzone_zone::bus::install`] once.
    ///
    /// # Errors
    /// [`LazyError::Access`] unless all bytes are inside, and where `SIGBUS` is an error by that.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), LazyError> {
        Ok(self.mapping().read_at(offset, out)?)
    }

    /// Copies bytes in. What is missing is produced first, as by [`LazyMapping::read_at`].
    ///
    /// # Errors
    /// [`LazyError::Access`] unless all bytes are inside.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), LazyError> {
        Ok(self.mapping().write_at(offset, bytes)?)
    }

    /// Returns how long faults took so far, by class and outcome.
    #[must_use]
    pub fn latencies(&self) -> Vec<Latency> {
        self.core.recorder().latencies()
    }

    /// Takes the faults that were recorded since the last call: the last
    /// [`LazyOptions::trace`](crate::LazyOptions::trace) of them.
    #[must_use]
    pub fn take_trace(&self) -> FaultTrace {
        self.core.recorder().take_trace()
    }

    /// Returns the last page that could not be produced for a waiting thread, and why.
    #[must_use]
    pub fn last_failure(&self) -> Option<Failure> {
        self.core.last_failure()
    }

    /// Changes how faults are answered from now on.
    pub fn advise(&self, advice: Advice, fault_around: FaultAround) {
        self.core.pattern().set(advice, fault_around);
    }

    /// Returns how much a read fault starts with now.
    #[must_use]
    pub fn fault_around(&self) -> FaultAround {
        self.core.pattern().size()
    }

    /// Returns what is known about the page that holds byte `offset`, or `None` if there is none.
    #[must_use]
    pub fn content(&self, offset: u64) -> Option<Content> {
        let page = offset >> self.page_size().shift();
        (page < self.core.contents().area().end().get()).then(|| self.core.contents().get(page))
    }

    /// Returns what happened so far.
    #[must_use]
    pub fn stats(&self) -> FaultStats {
        self.core.stats()
    }

    /// Returns the pages of a range of bytes that starts and ends at pages.
    pub(crate) fn pages(&self, range: &Range<u64>) -> Result<Range<u64>, RangeError> {
        let &Range { start, end } = range;
        let (page, len_bytes) = (self.page_size(), self.len().get());
        if start >= end {
            return Err(RangeError::Empty { start, end });
        }
        if end > len_bytes {
            return Err(RangeError::Beyond { start, end, len_bytes });
        }
        if (start | end) & (page.bytes() - 1) != 0 {
            return Err(RangeError::CutsPage { start, end, page });
        }
        Ok(start >> page.shift()..end >> page.shift())
    }

    /// Pins the pages that hold bytes of a range: what is absent is produced first, and until the guard is
    /// dropped nothing of it is given back. The memory stays mapped as long, also if this value is dropped;
    /// then missing pages are no longer produced, and a thread that touches one waits for the last guard to
    /// be dropped and gets a signal.
    ///
    /// # Errors
    /// [`LazyError::Hold`] if a page cannot be produced or is bad, [`LazyError::Range`] if one is not of
    /// the mapping.
    pub fn pin(&self, range: Range<u64>) -> Result<Pinned, LazyError> {
        let Range { start, end } = range;
        if start >= end {
            return Err(RangeError::Empty { start, end }.into());
        }
        let page = self.page_size().bytes();
        let end = end.checked_next_multiple_of(page).unwrap_or(u64::MAX);
        let whole = self.pages(&(start / page * page..end))?;
        Ok(self.core.contents().pin(whole)?)
    }

    /// Makes pages of a range of bytes present before they are touched, in the calling thread. Returns how
    /// many pages were installed. With [`Populate::Cached`] it never blocks on the backing; with
    /// [`Populate::All`] it waits at most 30 seconds for a page that another thread is producing.
    ///
    /// # Errors
    /// [`LazyError::Poisoned`] or [`LazyError::Backing`] at the first page that cannot be produced,
    /// [`LazyError::TimedOut`] at one that another thread did not produce in time; pages before it are
    /// present. [`LazyError::Range`] if the range is not inside, or cuts a page.
    pub fn populate(&self, range: Range<u64>, what: Populate) -> Result<u64, LazyError> {
        let pages = self.pages(&range)?;
        populate(&self.core, pages, what, &mut ReaderState::new(self.room))
    }

    /// Gives the pages of a range back; they are produced anew when they are touched. Pages that are pinned
    /// or being produced stay, and so may one that was touched a moment ago. Returns how many were given
    /// back.
    ///
    /// Without [`LazyOptions::track_writes`](crate::LazyOptions::track_writes), what was written to them is
    /// lost, unless it went to a memory file. With it, pages that were written stay, and
    /// [`LazyMapping::dirty`] returns them; [`LazyMapping::write_back`] makes them clean,
    /// [`LazyMapping::evict_all`] drops them.
    ///
    /// # Errors
    /// [`LazyError`] if the range is not inside, cuts a page, or the kernel refuses;
    /// [`LazyError::CannotEvict`] where writes are tracked asynchronously and a page that is written
    /// meanwhile could be lost.
    pub fn evict(&self, range: Range<u64>) -> Result<u64, LazyError> {
        let pages = self.pages(&range)?;
        match self.tracking() {
            Some(tracker) => self.evict_clean(tracker, pages),
            None => self.evict_pages(pages),
        }
    }

    /// Gives pages back, whatever is in them.
    pub(crate) fn evict_pages(&self, pages: Range<u64>) -> Result<u64, LazyError> {
        let contents = self.core.contents();
        let mut evicted = 0;
        let mut at = pages.start;
        let mut answer = Ok(());
        while at < pages.end && answer.is_ok() {
            // A run of pages that are present and not pinned: from here until they are absent again, a
            // thread that faults on one waits for the wake below.
            let start = at;
            while at < pages.end && contents.advance(at, Content::Present, Content::Removed) {
                at += 1;
            }
            if start == at {
                at += 1;
                continue;
            }
            let run = self.core.bytes(start..at);
            self.core.will_evict(&(start..at));
            answer = self.mapping().discard(run.clone());
            if let (Ok(()), Some(tracker)) = (&answer, self.tracking()) {
                tracker.evicted(&(start..at));
            }
            let next = if answer.is_ok() { Content::Absent } else { Content::Filling };
            for page in start..at {
                if contents.advance(page, Content::Removed, next) && next == Content::Filling {
                    // The kernel refused, so the pages are as they were.
                    let _ = contents.advance(page, Content::Filling, Content::Present);
                }
            }
            if answer.is_ok() {
                evicted += at - start;
            }
            let _ = self.memory.wake(run);
        }
        Counters::add(&self.core.counters().evicted, evicted);
        answer?;
        Ok(evicted)
    }
}

impl fmt::Debug for LazyMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LazyMapping")
            .field("mapping", self.mapping())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

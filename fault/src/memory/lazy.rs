//! Memory of this process that is mapped lazily.
//!
//! Writing back: a page is made clean *before* its bytes are read, so a write that comes meanwhile leaves
//! it dirty and is written back the next time; the bytes that the backing got may be torn, and will be
//! overwritten. If the backing fails, the pages are dirty again before the lock is released, so that
//! nothing is evicted that was not written back.
//!
//! Evicting: another thread may write to a page between the check that it is clean and its eviction. Where
//! writes are events, such a writer waits until the page can be filled again, so a written page is never
//! evicted by mistake. Where the kernel only records writes, no writer can be stopped, so eviction is
//! refused.
//!
//! No signal interrupts a thread while it evicts pages or makes them clean: a handler that touches one of
//! them, or a page of which the reader needs a lock that the thread holds, would wait for that thread. It
//! works in steps, so that no signal waits for long.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use uzone_os::signals::Held;
use uzone_os::uffd::in_thread::InThread;
use uzone_os::uffd::write_states::{WriteStates, runs_of};
use uzone_os::{AccessError, Addr, Mapping, sigbus};
use uzone_pages::{ByteLen, Content, FaultAround, PageSize};
use uzone_zone::{PinOptions, Pinned};

use crate::engine::core::ReaderState;
use crate::error::LazyError;
use crate::memory::collapse::{Collapsed, collapse};
use crate::memory::mapping::LazyMapping;
use crate::memory::populate::{What, populate};
use crate::pages::dirty::Tracker;
use crate::stats::Counters;

/// How many bytes are evicted at once, or one page: it takes some milliseconds.
const STEP: u64 = 64 << 20;

impl LazyMapping {
    /// Returns whether the threads that take faults answer them
    /// ([`LazyOptions::answer`](crate::LazyOptions::answer)).
    ///
    /// # Errors
    /// Why a reader answers them instead.
    pub fn answered_in_thread(&self) -> Result<(), &'static str> {
        self.memory.in_thread.as_ref().map(|_| ()).map_err(|reason| *reason)
    }

    pub(crate) fn tracking(&self) -> Option<&Tracker> {
        self.memory.kernel.tracker.as_ref()
    }

    fn mapping(&self) -> &Mapping {
        self.memory.kernel.registered.mapping()
    }

    /// Returns where it starts, for other code that reads it.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.mapping().addr()
    }

    /// Returns a pointer to the first byte, for foreign code and for `unsafe` code of the caller. It is good for all
    /// bytes, until the mapping is dropped; a touch of a page that cannot be produced raises `SIGBUS`.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping().as_ptr()
    }

    /// Returns how long it is; never zero.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        self.mapping().len()
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
        self.memory.kernel.registered.uffd().sees_kernel_faults()
    }

    /// Copies bytes out, from byte `offset` of the mapping on. Missing pages are produced, and the call
    /// waits for it, whether or not faults of the kernel are reported; a page that is bad raises `SIGBUS`,
    /// so a caller whose backing may fail calls [`LazyMapping::populate`] first, or
    /// [`uzone_os::sigbus::install`] once.
    ///
    /// # Errors
    /// [`LazyError::Access`] unless all bytes are inside or, with that handler, if the access raised `SIGBUS`.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), LazyError> {
        Ok(self.mapping().read_at(offset, out)?)
    }

    /// Copies bytes in. Missing pages are produced first, as by [`LazyMapping::read_at`].
    ///
    /// # Errors
    /// [`LazyError::Access`] unless all bytes are inside.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), LazyError> {
        Ok(self.mapping().write_at(offset, bytes)?)
    }

    /// Returns how much a read fault starts with now.
    #[must_use]
    pub fn fault_around(&self) -> FaultAround {
        self.core.planner().size()
    }

    /// Returns the pages of a range of bytes that starts and ends at pages.
    pub(crate) fn pages(&self, range: &Range<u64>) -> Result<Range<u64>, LazyError> {
        // Each call that takes a range comes here, so that none goes on whose faults may end the process.
        if self.memory.in_thread.is_ok() && !sigbus::is_in_place() {
            return Err(LazyError::HandlerReplaced);
        }
        let page = self.page_size();
        AccessError::check_pages(range, self.len().get(), page)?;
        Ok(range.start >> page.shift()..range.end >> page.shift())
    }

    /// Pins the pages that hold bytes of a range: absent pages are produced first, and until the guard is
    /// dropped nothing of it is given back. The memory stays mapped as long, also if this value is dropped;
    /// then missing pages are no longer produced, and a thread that touches one waits for the last guard to
    /// be dropped and gets a signal.
    ///
    /// # Errors
    /// [`LazyError::Hold`] if a page cannot be produced or is bad, [`LazyError::Access`] if one is not of
    /// the mapping.
    pub fn pin(&self, range: Range<u64>) -> Result<Pinned, LazyError> {
        self.pin_with(range, PinOptions::default())
    }

    /// Pins pages as [`LazyMapping::pin`] does, the way that `options` say: by the kernel too, for instance. The kernel
    /// may write to pages that it pins, so where writes are tracked, such pages count as written.
    ///
    /// # Errors
    /// As for [`LazyMapping::pin`], and for memory that cannot be pinned in this way. The kernel pins no page whose
    /// writes are tracked by [`WriteTracking::Sync`](crate::WriteTracking::Sync) unless faults of system calls are
    /// answered ([`LazyMapping::sees_kernel_faults`]).
    pub fn pin_with(&self, range: Range<u64>, options: PinOptions) -> Result<Pinned, LazyError> {
        let Range { start, end } = range;
        if start >= end {
            return Err(AccessError::Empty { start, end }.into());
        }
        let page = self.page_size().bytes();
        let end = end.checked_next_multiple_of(page).unwrap_or(u64::MAX);
        let whole = self.pages(&(start / page * page..end))?;
        Ok(self.core.contents().pin(whole, options)?)
    }

    /// Pins pages as [`LazyMapping::pin`] does, for a system call or a device that writes to them. Where
    /// writes are tracked, the pages are dirty from then on and not protected: a system call that is given a
    /// protected page fails with `EFAULT` where its faults are not answered
    /// ([`LazyMapping::sees_kernel_faults`]), and a write of a device is not seen.
    ///
    /// # Errors
    /// As for [`LazyMapping::pin`], and [`LazyError`] if the kernel refuses.
    pub fn pin_for_write(&self, range: Range<u64>) -> Result<Pinned, LazyError> {
        let page = self.page_size().bytes();
        let pinned = self.pin(range.clone())?;
        if let Some(tracker) = self.tracking() {
            let _turn = tracker.turn();
            let pages = range.start / page..range.end.div_ceil(page);
            tracker.open(std::slice::from_ref(&pages))?;
        }
        Ok(pinned)
    }

    /// Makes pages of a range of bytes present before they are touched, in the calling thread. Returns how
    /// many pages were installed. It waits at most 30 seconds for a page that another thread is producing.
    ///
    /// # Errors
    /// [`LazyError::Poisoned`] or [`LazyError::Backing`] at the first page that cannot be produced,
    /// [`LazyError::TimedOut`] at one that another thread did not produce in time; pages before it are
    /// present. [`LazyError::Access`] if the range is not inside, or cuts a page.
    pub fn populate(&self, range: Range<u64>) -> Result<u64, LazyError> {
        let pages = self.pages(&range)?;
        populate(&self.core, pages, What::All, &mut ReaderState::new(self.core.room()))
    }

    /// Makes those pages of a range of bytes present that are ready. Returns how many were installed. It never
    /// blocks on the backing.
    ///
    /// # Errors
    /// [`LazyError::Access`] if the range is not inside, or cuts a page.
    pub fn populate_cached(&self, range: Range<u64>) -> Result<u64, LazyError> {
        let pages = self.pages(&range)?;
        populate(&self.core, pages, What::Cached, &mut ReaderState::new(self.core.room()))
    }

    /// Gives the pages of a range back; they are produced anew when they are touched. Pages that are pinned
    /// or being produced stay, and so may one that was touched a moment ago. Returns how many were given
    /// back.
    ///
    /// Without [`LazyOptions::track_writes`](crate::LazyOptions::track_writes), writes to them are
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
        let Some(tracker) = self.tracking() else { return self.evict_pages(pages) };
        let _turn = tracker.turn();
        match tracker.states() {
            Some(states) => {
                self.in_steps(pages, |step| self.evict_closed(tracker, states, step, true))
            }
            None => Err(LazyError::CannotEvict {
                reason: "a page that is written meanwhile would be lost, since the kernel only records the write: track writes synchronously, or use evict_all when no thread writes any more and everything is written back",
            }),
        }
    }

    /// Adds up the answers of `each` for one part of some pages after the other. No signal interrupts it.
    fn in_steps(
        &self,
        pages: Range<u64>,
        each: impl Fn(Range<u64>) -> Result<u64, LazyError>,
    ) -> Result<u64, LazyError> {
        let step = (STEP >> self.page_size().shift()).max(1);
        let (mut sum, mut at) = (0, pages.start);
        while at < pages.end {
            let end = pages.end.min(at + step);
            let _held = Held::hold();
            sum += each(at..end)?;
            at = end;
        }
        Ok(sum)
    }

    /// Gives pages back, whatever is in them.
    pub(crate) fn evict_pages(&self, pages: Range<u64>) -> Result<u64, LazyError> {
        self.in_steps(pages, |step| self.evict_step(step))
    }

    fn evict_step(&self, pages: Range<u64>) -> Result<u64, LazyError> {
        let contents = self.core.contents();
        let in_thread = self.core.in_thread();
        if let Some(in_thread) = in_thread.as_ref().filter(|_| self.tracking().is_some())
            && !in_thread.drain()
        {
            // It may fill a page with bytes of the backing from before a write-back.
            return Err(LazyError::TimedOut { offset: self.core.bytes(pages).start });
        }
        // Each page is looked at once, so one that is filled again behind this walk is not counted twice.
        let (mut evicted, mut answer, mut at) = (0, Ok(()), pages.start);
        while at < pages.end && answer.is_ok() {
            let start = at;
            while at < pages.end && contents.advance(at, Content::Present, Content::Removed) {
                at += 1;
            }
            if start < at {
                answer = self.evict_present(in_thread.as_deref(), start..at);
            } else if let Some(in_thread) = &in_thread {
                while at < pages.end && in_thread.may_have_filled(at) && contents.claim(at) {
                    at += 1;
                }
                if start < at {
                    answer = self.evict_filled(in_thread, start..at);
                }
            }
            if answer.is_ok() {
                evicted += at - start;
            }
            at = at.max(start + 1);
        }
        Counters::add(&self.core.counters().evicted, evicted);
        answer?;
        Ok(evicted)
    }

    /// Gives back pages that were present, and are removed since: a thread that faults on one waits until
    /// it is absent again, and woken here.
    fn evict_present(
        &self,
        in_thread: Option<&InThread>,
        pages: Range<u64>,
    ) -> Result<(), LazyError> {
        let contents = self.core.contents();
        let bytes = self.core.bytes(pages.clone());
        self.core.will_evict(&pages);
        let answer = self.discard(in_thread, pages.clone());
        let next = if answer.is_ok() { Content::Absent } else { Content::Filling };
        for page in pages {
            if contents.advance(page, Content::Removed, next) && next == Content::Filling {
                // The kernel refused, so the pages are as they were.
                let _ = contents.advance(page, Content::Filling, Content::Present);
            }
        }
        self.core.kernel().wake(bytes);
        answer
    }

    /// Gives back pages that a thread filled for itself, whose words were still absent. They are claimed,
    /// so that none is pinned; a thread that touches one fills it again at once, with the same bytes.
    fn evict_filled(&self, in_thread: &InThread, pages: Range<u64>) -> Result<(), LazyError> {
        // A thread that populates may have read bytes for them of before a write-back, and not know of the page.
        self.core.will_evict(&pages);
        let answer = self.discard(Some(in_thread), pages.clone());
        pages.clone().for_each(|page| self.core.release(page));
        // A thread may wait for the one that claimed the page.
        in_thread.wake(pages);
        answer
    }

    fn discard(&self, in_thread: Option<&InThread>, pages: Range<u64>) -> Result<(), LazyError> {
        if let Some(in_thread) = in_thread {
            in_thread.gives_back(pages.clone());
        }
        self.mapping().discard(self.core.bytes(pages.clone()))?;
        if let Some(tracker) = self.tracking() {
            tracker.evicted(&pages);
        }
        Ok(())
    }

    /// Gives the pages of a range back as [`LazyMapping::evict`] does, also those that were written
    /// since they were filled or written back: writes to private memory are lost.
    ///
    /// # Errors
    /// As for [`LazyMapping::evict`].
    pub fn evict_all(&self, range: Range<u64>) -> Result<u64, LazyError> {
        let pages = self.pages(&range)?;
        let Some(tracker) = self.tracking() else { return self.evict_pages(pages) };
        let _turn = tracker.turn();
        match tracker.states() {
            Some(states) => self.in_steps(pages, |step| {
                let clean = self.evict_closed(tracker, states, step.clone(), true)?;
                Ok(clean + self.evict_closed(tracker, states, step, false)?)
            }),
            None => self.evict_pages(pages),
        }
    }

    /// Gives back pages that no writer can reach meanwhile: those that were not written, or those that may have been.
    fn evict_closed(
        &self,
        tracker: &Tracker,
        states: &WriteStates,
        pages: Range<u64>,
        are_clean: bool,
    ) -> Result<u64, LazyError> {
        let (mut evicted, mut answer) = (0, Ok(()));
        for run in states.close(pages, are_clean) {
            if answer.is_ok() {
                match self.evict_pages(run.clone()) {
                    Ok(count) => evicted += count,
                    Err(error) => answer = Err(error),
                }
            }
            // Pages that were not evicted keep their state.
            states.release(run.clone(), are_clean);
            // Threads that faulted on a write meanwhile wait for this thread.
            tracker.wake_pages(&run);
        }
        answer.map(|()| evicted)
    }

    /// Returns the ranges of bytes whose pages were written since they were filled, taken or written
    /// back, in order. Where writes are tracked by events, pages next to them may be among them.
    ///
    /// # Errors
    /// [`LazyError::NotTracked`] without [`LazyOptions::track_writes`](crate::LazyOptions), and
    /// [`LazyError`] if the range is not inside, cuts a page, or the kernel refuses.
    pub fn dirty(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, LazyError> {
        let pages = self.pages(&range)?;
        let tracker = self.tracker()?;
        let _turn = tracker.turn();
        Ok(self.offsets(&self.readable(&tracker.dirty(pages)?)))
    }

    /// Returns the pages of [`LazyMapping::dirty`], and makes those pages clean in the same step: a write is
    /// in this answer or in the next, and a page that is not written again is in one. From then on
    /// [`LazyMapping::evict`] takes them for unchanged, so the caller reads them before
    /// that. A page that is pinned stays dirty, since a device may write to it at any time.
    ///
    /// # Errors
    /// As for [`LazyMapping::dirty`]; then all are as dirty as they were.
    pub fn take_dirty(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, LazyError> {
        let pages = self.pages(&range)?;
        let tracker = self.tracker()?;
        let _turn = tracker.turn();
        Ok(self.offsets(&self.taken(tracker, pages)?))
    }

    /// Brings the writes to a range back to the backing
    /// ([`Backing::write_back`](crate::Backing::write_back)), in the calling thread and in runs of up
    /// to 256 KiB. Returns how many pages were.
    ///
    /// Writes from before the call are in the backing afterwards. Pages that are written
    /// meanwhile stay dirty, and so do those that are pinned.
    ///
    /// # Errors
    /// [`LazyError::WriteBack`] at the first run that the backing did not take: it and the runs
    /// behind it are as dirty as before. Otherwise as for [`LazyMapping::dirty`].
    pub fn write_back(&self, range: Range<u64>) -> Result<u64, LazyError> {
        let pages = self.pages(&range)?;
        let tracker = self.tracker()?;
        let found = {
            let _turn = tracker.turn();
            tracker.dirty(pages)?
        };
        let shift = self.page_size().shift();
        let step = (self.core.room() as u64 >> shift).max(1);
        let mut buffer = vec![0; self.core.room()];
        let mut written = 0;
        for run in found {
            for start in (run.start..run.end).step_by(usize::try_from(step).unwrap_or(1)) {
                let part = start..run.end.min(start + step);
                written += self.write_back_some(tracker, part, &mut buffer)?;
            }
        }
        Ok(written)
    }

    /// Brings those of some pages back that are dirty, as many as the buffer has room for.
    fn write_back_some(
        &self,
        tracker: &Tracker,
        pages: Range<u64>,
        buffer: &mut [u8],
    ) -> Result<u64, LazyError> {
        let shift = self.page_size().shift();
        // From here on no thread evicts pages that are clean already and not in the backing yet.
        let _turn = tracker.turn();
        let taken = self.taken(tracker, pages)?;
        let mut written = 0;
        for (index, run) in taken.iter().enumerate() {
            let offset = run.start << shift;
            let len = usize::try_from((run.end - run.start) << shift).unwrap_or(buffer.len());
            let bytes = &mut buffer[..len];
            let answer = catch_unwind(AssertUnwindSafe(|| {
                self.read_at(offset, bytes)?;
                let answer = self.core.backing.write_back(offset, bytes);
                answer.map_err(|cause| LazyError::WriteBack { offset, cause })
            }));
            if !matches!(answer, Ok(Ok(()))) {
                // Whatever ended the write-back, a panic of the backing among it, nothing is lost.
                let put_back = tracker.put_back(&taken[index..]);
                put_back.and(answer.unwrap_or_else(|panic| resume_unwind(panic)))?;
            }
            written += run.end - run.start;
        }
        Ok(written)
    }

    /// Takes the runs of dirty pages that can be read. Pinned pages are dirty again at once: a device may
    /// write to them without an event.
    fn taken(&self, tracker: &Tracker, pages: Range<u64>) -> Result<Vec<Range<u64>>, LazyError> {
        let is_pinned = |page| self.core.contents().maybe_pinned(page);
        let taken = self.readable(&tracker.take(pages, is_pinned)?);
        // Again after they are protected, so that the first write after a later pin raises an event; and
        // before they are read, so that the writes until an unpin are seen.
        let pinned = taken.iter().flat_map(|run| runs_of(run.clone(), is_pinned));
        if let Err(error) = tracker.open(&pinned.collect::<Vec<_>>()) {
            // Then all are as dirty as they were, as far as the kernel allows it.
            let _ = tracker.put_back(&taken);
            return Err(error);
        }
        Ok(taken)
    }

    /// Leaves the pages out of some runs that cannot be read: a bad page has no bytes.
    fn readable(&self, runs: &[Range<u64>]) -> Vec<Range<u64>> {
        let contents = self.core.contents();
        let runs = runs
            .iter()
            .map(|run| runs_of(run.clone(), |page| contents.get(page) != Content::Poisoned));
        runs.flatten().collect()
    }

    fn offsets(&self, runs: &[Range<u64>]) -> Vec<Range<u64>> {
        runs.iter().map(|run| self.core.bytes(run.clone())).collect()
    }

    pub(crate) fn tracker(&self) -> Result<&Tracker, LazyError> {
        self.tracking().ok_or(LazyError::NotTracked)
    }

    /// Makes huge pages of those parts of a range that are filled wholly, 2 MiB each on common machines. No
    /// byte changes, and no pinned page is moved. The answer has the number of blocks that are left in small pages, and why; parts
    /// at the ends that are smaller than a huge page are not counted.
    ///
    /// It takes one to four milliseconds for each huge page, and the kernel holds the layout of the process
    /// meanwhile: faulting threads wait for it. A page that is evicted from a huge page later splits it
    /// again.
    ///
    /// # Errors
    /// [`LazyError`] if the range is not inside, cuts a page, or the host's settings cannot be read.
    pub fn collapse(&self, range: Range<u64>) -> Result<Collapsed, LazyError> {
        let pages = self.pages(&range)?;
        collapse(&self.core, self.mapping(), pages)
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

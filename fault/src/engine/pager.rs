//! The pages of one size of a mapping, as its reader thread sees them: [`Pager`]. It answers faults that the
//! reader has read, retries the work that the kernel, the queue or the backing deferred, and installs pages ahead. It
//! never blocks on a backing, and allocates nothing.

use std::collections::VecDeque;
use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_os::Vaddr;
use uzone_os::uffd::{FaultKind, PageFault};
use uzone_pages::{Content, Touch};

use crate::engine::core::{Core, Outcome, ReaderState};
use crate::engine::costs::{CONTINUED_NS, COPIED_NS, CostMeter};
use crate::engine::io_pool::{IoPool, PrefetchJob, Submit};
use crate::engine::pending::Awaited;
use crate::engine::prefetch::Group;
use crate::engine::staged::Staged;
use crate::memory::fault_memory::FaultMemory;
use crate::stats::Counters;
use crate::track::record::{FaultOutcome, FaultRecord};

/// How many pages may wait for room in the queue; if there are more, all waiting threads are woken.
const PARKED: usize = 256;
/// After how long deferred work is retried.
pub(crate) const RETRY: Duration = Duration::from_millis(1);

/// The pages of one size of a mapping, and the state of their faults.
pub(crate) struct Pager {
    /// The part of the mapping that has such pages.
    fault_memory: FaultMemory,
    core: Arc<Core>,
    /// Produces the pages that are not ready.
    pool: Arc<IoPool>,
    pub(crate) state: ReaderState,
    parked: Parked,
    /// Pages that an I/O thread produced for this one and that the kernel deferred.
    late: VecDeque<(u64, Staged)>,
    late_since: Instant,
    /// Pages that are ready and will be touched.
    groups: VecDeque<Group>,
    /// How many groups are on their way or there.
    prefetching: usize,
    /// Groups that wait for the first fault.
    held: Vec<Group>,
    has_fault: bool,
    /// The page that was answered last, after all faults of the turn had been read: each thread that waited
    /// for it is awake.
    answered: Option<u64>,
    deadline: Option<Duration>,
}

impl Pager {
    pub(crate) fn new(
        fault_memory: FaultMemory,
        core: Arc<Core>,
        pool: Arc<IoPool>,
        deadline: Option<Duration>,
    ) -> Self {
        let mut state = ReaderState::new(0);
        let is_continued = core.backing.memory_file().is_ok_and(|file| file.is_some());
        let page_ns = if is_continued { CONTINUED_NS } else { COPIED_NS };
        state.meter = CostMeter::new(page_ns, true);
        Self {
            fault_memory,
            core,
            pool,
            state,
            parked: Parked::new(),
            late: VecDeque::new(),
            late_since: Instant::now(),
            groups: VecDeque::new(),
            prefetching: 0,
            held: Vec::new(),
            has_fault: false,
            answered: None,
            deadline,
        }
    }

    #[inline]
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Notes whether the thread is on the CPU of the threads whose faults it answers.
    pub(crate) fn set_shares_cpu(&mut self, shares_cpu: bool) {
        self.state.shares_cpu = shares_cpu;
        self.state.meter.set_parallel(!shares_cpu);
    }

    /// Returns which page has an address, if it is one of these.
    #[inline]
    pub(crate) fn page(&self, address: Vaddr) -> Option<u64> {
        let page = self.fault_memory.offset_of(address)? >> self.core.page_size().shift();
        (page < self.core.contents().area().end().get()).then_some(page)
    }

    /// Returns which of its pages are among the addresses from `start` up to `end`, region by region.
    pub(crate) fn pages(&self, start: Vaddr, end: Vaddr) -> impl Iterator<Item = Range<u64>> {
        let shift = self.core.page_size().shift();
        let last = self.core.contents().area().end().get();
        let offsets = self.fault_memory.offsets(start, end);
        offsets.map(move |bytes| bytes.start >> shift..(bytes.end >> shift).min(last))
    }

    /// Notes that other faults were read since the last answer.
    pub(crate) fn forget_answered(&mut self) {
        self.answered = None;
    }

    /// Installs some neighbours of a page that was faulted on. Returns whether there were any.
    #[inline]
    pub(crate) fn map_around(&mut self) -> bool {
        self.core.map_around(&mut self.state)
    }

    /// Returns whether there are pages that will be touched.
    pub(crate) fn is_prefetching(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Takes pages that are ready, to be installed between faults.
    pub(crate) fn prefetch(&mut self, group: Group) {
        if group.is_first && !self.has_fault && group.prefetch.waits_for_fault() {
            self.held.push(group);
            return;
        }
        if group.is_first {
            self.prefetching += 1;
            self.state.prefetch = Some(group.prefetch.clone());
        }
        if group.is_last {
            self.prefetching = self.prefetching.saturating_sub(1);
        } else {
            self.groups.push_back(group);
        }
        if self.prefetching == 0 {
            self.state.prefetch = None;
        }
    }

    /// Installs some pages that will be touched, and has others made ready. Returns whether there were any.
    pub(crate) fn map_prefetched(&mut self, submit: &Submit<'_>) -> bool {
        let Some(group) = self.groups.pop_front() else { return false };
        for pages in group.runs {
            let filled = self.core.map_ready(pages, &mut self.state);
            Counters::add(&self.core.counters().populated, filled);
        }
        self.pool.prefetch(PrefetchJob {
            core: self.core.clone(),
            prefetch: group.prefetch,
            filler: submit.filler.clone(),
            key: submit.key,
        });
        true
    }

    /// Returns when deferred work is due, if there is any.
    #[inline]
    pub(crate) fn due(&self) -> Option<Instant> {
        let parked = self.parked.is_waiting().then_some(self.parked.since + RETRY);
        let late = (!self.late.is_empty()).then_some(self.late_since + RETRY);
        let deadline =
            self.deadline.and_then(|after| self.core.pending.oldest()?.checked_add(after));
        [parked, late, deadline].into_iter().flatten().min()
    }

    /// Does the deferred work that is due.
    pub(crate) fn see_to_what_waits(&mut self) {
        self.parked.wake(&self.core);
        if !self.late.is_empty() && self.late_since.elapsed() >= RETRY {
            for _ in 0..self.late.len() {
                if let Some((page, staged)) = self.late.pop_front() {
                    self.install(page, staged);
                }
            }
        }
        if let Some(after) = self.deadline {
            while let Some(awaited) = self.core.pending.take_older_than(after) {
                self.core.record(&awaited, FaultOutcome::Failed);
                self.core.time_out(&awaited, after);
            }
        }
    }

    /// Wakes all waiting threads a little later: the faults of some of them are forgotten.
    pub(crate) fn forgot_faults(&mut self) {
        Counters::add(&self.core.counters().deferred, 1);
        self.parked.push_all();
    }

    /// Makes the awaited pages bad, and all pages that are touched from now on.
    pub(crate) fn fail(&mut self) {
        self.core.fail();
        self.late.clear();
        self.give_up();
        // The kernel reports unanswered faults again.
        self.parked.push_all();
        self.parked.wake_now(&self.core);
    }

    /// Makes the awaited pages bad. A backing may never return; a page that it brings later is dropped.
    pub(crate) fn give_up(&self) {
        for page in self.core.pending.pages() {
            self.core.give_up(page);
        }
    }

    /// Releases the pages that are waited for, and wakes their threads and those of `unanswered` faults: they
    /// fault again.
    pub(crate) fn release(&mut self, unanswered: &[PageFault]) {
        for page in self.core.pending.drain() {
            self.core.release(page);
            self.parked.push(page);
        }
        for (page, _) in std::mem::take(&mut self.late) {
            self.core.release(page);
            self.parked.push(page);
        }
        for fault in unanswered {
            if let Some(page) = self.page(fault.address) {
                self.parked.push(page);
            }
        }
        self.parked.wake_now(&self.core);
    }

    /// Makes the page of a fault bad.
    pub(crate) fn refuse(&self, page: u64, fault: &PageFault) {
        self.core.refuse(page, fault.kind == FaultKind::WriteProtect);
    }

    /// Installs a page that the pool produced for this thread.
    pub(crate) fn install(&mut self, page: u64, staged: Staged) {
        if let Some(staged) = self.core.install(page, staged) {
            self.late_since = Instant::now();
            self.late.push_back((page, staged));
        } else {
            self.core.came(page, &mut self.state);
        }
    }

    /// Answers a fault on a page that was read at `read_at`, which is `at` since the mapping was made. Returns
    /// its outcome, unless that is known only later.
    #[inline]
    pub(crate) fn answer(
        &mut self,
        page: u64,
        fault: &PageFault,
        submit: &Submit<'_>,
        read_at: Instant,
        at: Duration,
    ) -> Option<FaultRecord> {
        if !self.has_fault {
            self.has_fault = true;
            let held = std::mem::take(&mut self.held);
            held.into_iter().for_each(|group| self.prefetch(group));
        }
        let class = fault.kind;
        self.state.waiter = fault.thread.map_or(0, NonZero::get);
        if class == FaultKind::Minor {
            Counters::add(&self.core.counters().minor, 1);
        }
        let outcome = self.answer_page(page, class, fault.is_write, submit, read_at)?;
        Some(FaultRecord {
            at,
            offset: self.core.bytes(page..page + 1).start,
            class,
            is_write: fault.is_write,
            outcome,
            latency: read_at.elapsed(),
        })
    }

    fn answer_page(
        &mut self,
        page: u64,
        class: FaultKind,
        is_write: bool,
        submit: &Submit<'_>,
        read_at: Instant,
    ) -> Option<FaultOutcome> {
        if class == FaultKind::WriteProtect {
            if self.core.write_fault(page) {
                return Some(FaultOutcome::Ready);
            }
            return Some(self.deferred(page));
        }
        let touch = if is_write { Touch::Write } else { Touch::Read };
        // Many threads that read in step wait for the same page.
        if self.answered == Some(page) {
            Counters::add(&self.core.counters().faults, 1);
            Counters::add(&self.core.counters().retouched, 1);
            return Some(FaultOutcome::Ready);
        }
        match self.core.fault(page, touch, &mut self.state) {
            Outcome::Answered => {
                self.answered = Some(page);
                return Some(FaultOutcome::Ready);
            }
            Outcome::Coalesced if self.is_nested() => self.core.refuse_nested(page),
            Outcome::Coalesced => return Some(FaultOutcome::Coalesced),
            Outcome::Later => {}
            Outcome::Produce { ahead } => {
                Counters::add(&self.core.counters().queued, 1);
                let is_listed = self.core.pending.push(Awaited {
                    page,
                    since: read_at,
                    fault: Some((class, is_write)),
                    is_produced: false,
                });
                if self.is_nested() {
                    self.core.refuse_nested(page);
                    return None;
                }
                if is_listed {
                    if submit.demand(&self.pool, &self.core, page) {
                        if let Some(ahead) = ahead {
                            self.pool.read_ahead(&self.core, ahead);
                        }
                        return None;
                    }
                    self.core.pending.remove(page);
                }
                self.core.release(page);
            }
        }
        Some(self.deferred(page))
    }

    /// Returns whether the thread that waits is one that produces pages: a backing reads other memory of the
    /// same engine.
    fn is_nested(&self) -> bool {
        matches!(self.fault_memory, FaultMemory::Own(_)) && self.pool.is_producer(self.state.waiter)
    }

    fn deferred(&mut self, page: u64) -> FaultOutcome {
        Counters::add(&self.core.counters().deferred, 1);
        self.parked.push(page);
        FaultOutcome::Deferred
    }
}

/// Pages for which there was no room in the queue.
struct Parked {
    pages: Vec<u64>,
    /// More than there is room for: all waiting threads are woken.
    all: bool,
    since: Instant,
}

impl Parked {
    fn new() -> Self {
        Self { pages: Vec::with_capacity(PARKED), all: false, since: Instant::now() }
    }

    fn push(&mut self, page: u64) {
        if !self.is_waiting() {
            self.since = Instant::now();
        }
        if self.pages.len() == PARKED {
            self.all = true;
        } else {
            self.pages.push(page);
        }
    }

    fn push_all(&mut self) {
        if !self.is_waiting() {
            self.since = Instant::now();
        }
        self.all = true;
    }

    fn is_waiting(&self) -> bool {
        self.all || !self.pages.is_empty()
    }

    /// Wakes the threads that wait for the pages, if it is time: they fault again.
    fn wake(&mut self, core: &Core) {
        if self.is_waiting() && self.since.elapsed() >= RETRY {
            self.wake_now(core);
        }
    }

    fn wake_now(&mut self, core: &Core) {
        if self.all {
            let area = core.contents().area();
            core.kernel().wake(core.bytes(area.start().get()..area.end().get()));
        }
        for page in self.pages.drain(..) {
            if core.contents().get(page) != Content::Filling {
                core.kernel().wake(core.bytes(page..page + 1));
            }
        }
        self.all = false;
    }
}

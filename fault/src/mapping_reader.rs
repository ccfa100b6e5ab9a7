//! One mapping, as its reader thread sees it: [`MappingReader`]. A step reads the pending faults and
//! answers them; if there are none, it retries deferred work and installs neighbours. It never blocks on a
//! backing, and allocates nothing. All pending events are read before a fault is answered: the kernel
//! reports a fault before a removal that is older.

use std::collections::VecDeque;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use uzone_os::Vaddr;
use uzone_os::uffd::{Event, EventBuffer, EventLog, EventSet, FaultKind, PageFault, Remote};
use uzone_pages::{Content, Touch};

use crate::backing::Memory;
use crate::budget::{Allowance, Budget};
use crate::core::{Core, Outcome, ReaderState};
use crate::costs::{CONTINUED_NS, COPIED_NS, CostMeter};
use crate::fault_memory::FaultMemory;
use crate::follow::Waiters;
use crate::io_pool::{IoPool, Submit};
use crate::pending::Awaited;
use crate::prefetch::{Chunk, PrefetchJob};
use crate::record::{FaultClass, FaultOutcome, FaultRecord};
use crate::staged::Staged;
use crate::stats::Counters;

/// How many events are read at once.
pub(crate) const EVENTS: usize = 64;
/// How many faults are answered before more are read.
const FAULTS: usize = 1024;
/// How many times events are read before other mappings come to their turn: removals that never cease do not
/// hold them up.
const READS: u32 = 64;
/// How long faults are answered before other mappings come to their turn.
const TURN: Duration = Duration::from_micros(30);
/// How many pages may wait for room in the queue; if there are more, all waiting threads are woken.
const PARKED: usize = 256;
/// After how long deferred work is retried.
const RETRY: Duration = Duration::from_millis(1);
/// After this many unsuccessful polls the reader stops polling, until a fault arrives within the polling
/// window.
const VAIN: u8 = 4;

/// What a thread needs to answer the faults of any of its mappings.
pub(crate) struct Scratch {
    buffer: EventBuffer,
    faults: Vec<PageFault>,
    /// Their outcomes.
    records: Vec<FaultRecord>,
    /// The threads of this process that took them.
    pub(crate) waiters: Waiters,
    pub(crate) staging: Vec<u8>,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Self {
            buffer: EventBuffer::new(EVENTS),
            faults: Vec::with_capacity(FAULTS),
            records: Vec::with_capacity(FAULTS),
            waiters: Waiters::new(),
            staging: Vec::new(),
        }
    }
}

/// Decides whether polling for the next fault pays: a sleep and a wake-up cost more than most answers, and
/// polling costs a CPU.
struct AdaptiveSpin {
    /// For how long at most.
    most: Duration,
    since: Instant,
    in_vain: u8,
    is_looking: bool,
}

impl AdaptiveSpin {
    fn new(most: Duration) -> Self {
        Self { most, since: Instant::now(), in_vain: 0, is_looking: false }
    }

    /// Records that faults were found.
    fn found(&mut self, now: Instant) {
        if self.is_looking || now.saturating_duration_since(self.since) < self.most {
            self.in_vain = 0;
        }
        (self.since, self.is_looking) = (now, true);
    }

    /// Records other work. Polling starts anew from now on; the count of unsuccessful polls stays.
    fn worked(&mut self, now: Instant) {
        (self.since, self.is_looking) = (now, true);
    }

    /// Records that nothing was found. Returns whether to poll again.
    fn again(&mut self, now: Instant) -> bool {
        if self.is_looking && self.in_vain < VAIN && now.duration_since(self.since) < self.most {
            return true;
        }
        if self.is_looking {
            (self.is_looking, self.since) = (false, now);
            self.in_vain = self.in_vain.saturating_add(1);
        }
        false
    }
}

/// What came of reading the events that are pending.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Drained {
    /// There are no others.
    All,
    /// There may be more.
    Part,
    /// The descriptor cannot be read.
    Failed,
}

/// One mapping, and what is being done about its faults.
pub(crate) struct MappingReader {
    fault_memory: FaultMemory,
    core: Arc<Core>,
    /// Produces the pages that are not ready.
    pool: Arc<IoPool>,
    state: ReaderState,
    parked: Parked,
    look: AdaptiveSpin,
    /// Pages that an I/O thread produced for this one and that the kernel deferred.
    late: VecDeque<(u64, Staged)>,
    late_since: Instant,
    /// Pages that are ready and will be touched.
    chunks: VecDeque<Chunk>,
    /// How many chunks are on their way or there.
    prefetching: usize,
    children: Children,
    /// Faults that were read and are answered in the next turn.
    unanswered: Vec<PageFault>,
    /// The page that was answered last, after all faults of the turn had been read: each thread that waited
    /// for it is awake.
    answered: Option<u64>,
    /// Where its events are read to, if they must outlive this process.
    logged: Option<EventBuffer>,
    /// Whether a step panicked. Then each page that is touched is made bad.
    has_failed: bool,
    looked: Instant,
    /// Whether others were let run since the last fault was answered.
    has_yielded: bool,
    /// Whether reading the descriptor failed, so that it is not waited for.
    pub(crate) poll_failed: bool,
    /// What it may still use, if that is limited, and until when nothing is read because that is used up.
    allowance: Option<Allowance>,
    held_until: Option<Instant>,
    pub(crate) is_active: bool,
    pub(crate) is_timed: bool,
    deadline: Option<Duration>,
    room: usize,
    /// For how long it polls where it does not share the CPU of the faulting thread.
    spin: Duration,
}

/// The parts of a reader.
pub(crate) struct ReaderParts {
    pub(crate) fault_memory: FaultMemory,
    pub(crate) log: Option<EventLog>,
    pub(crate) core: Arc<Core>,
    pub(crate) pool: Arc<IoPool>,
    pub(crate) spin: Duration,
    pub(crate) deadline: Option<Duration>,
    pub(crate) budget: Budget,
    pub(crate) room: usize,
}

impl MappingReader {
    pub(crate) fn new(parts: ReaderParts) -> Self {
        let ReaderParts { fault_memory, log, core, pool, spin, deadline, budget, room } = parts;
        let mut state = ReaderState::new(0);
        state.shares_cpu = spin.is_zero();
        let memory = core.backing().memory();
        let is_continued = memory.is_ok_and(|memory| matches!(memory, Memory::File { .. }));
        let page_ns = if is_continued { CONTINUED_NS } else { COPIED_NS };
        state.meter = CostMeter::new(page_ns, !state.shares_cpu);
        Self {
            fault_memory,
            core,
            pool,
            state,
            parked: Parked::new(),
            look: AdaptiveSpin::new(spin),
            late: VecDeque::new(),
            late_since: Instant::now(),
            chunks: VecDeque::new(),
            prefetching: 0,
            children: Children::new(),
            unanswered: Vec::new(),
            answered: None,
            logged: log.map(EventBuffer::logged),
            has_failed: false,
            looked: Instant::now(),
            has_yielded: false,
            poll_failed: false,
            allowance: budget.is_limited().then(|| Allowance::new(budget, Instant::now())),
            held_until: None,
            is_active: false,
            is_timed: false,
            deadline,
            room,
            spin,
        }
    }

    /// Notes whether the thread is on the CPU of the threads whose faults it answers, as it is where it was
    /// made not to poll.
    pub(crate) fn set_shares_cpu(&mut self, shares_cpu: bool) {
        let spin = if shares_cpu { Duration::ZERO } else { self.spin };
        self.look = AdaptiveSpin::new(spin);
        self.state.shares_cpu = spin.is_zero();
        self.state.meter.set_parallel(!spin.is_zero());
    }

    /// Returns how many bytes are read from its backing at once.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    pub(crate) fn join(&self, set: &EventSet, key: u64) -> io::Result<()> {
        self.fault_memory.join(set, key)
    }

    pub(crate) fn leave(&self, set: &EventSet) {
        // It was not waited for, if its descriptor cannot be read.
        let _ = self.fault_memory.leave(set);
    }

    /// Notes whether the thread answers for other mappings too.
    pub(crate) fn set_company(&mut self, has_company: bool) {
        self.state.has_company = has_company;
    }

    /// Answers the pending faults, or else does deferred work. Returns whether there was any. Where the
    /// thread has other mappings, the faults that do not fit in its turn are answered in the next one. Pages
    /// that the pool produced come back through `submit`.
    pub(crate) fn step(&mut self, scratch: &mut Scratch, submit: &Submit<'_>) -> bool {
        if self.has_failed {
            self.looked = Instant::now();
            let is_busy = self.refuse(&mut scratch.buffer);
            // Deadlines and the children of a client go on.
            if !is_busy || self.due().is_some_and(|due| due <= self.looked) {
                self.see_to_what_waits();
            }
            return is_busy;
        }
        if self.is_held() {
            self.see_to_what_waits();
            return false;
        }
        std::mem::swap(&mut scratch.staging, &mut self.state.staging);
        scratch.faults.append(&mut self.unanswered);
        let drained = self.drain(&mut scratch.buffer, &mut scratch.faults);
        self.looked = Instant::now();
        let read_at = self.looked;
        let mut is_busy = !scratch.faults.is_empty() || drained == Drained::Part;
        if drained == Drained::Part {
            // A removal may be unread that is older than one of these faults.
            self.unanswered.append(&mut scratch.faults);
            self.look.found(read_at);
        } else if is_busy {
            let has_waited = self.state.has_neighbours();
            self.state.meter.read(scratch.faults.len(), read_at, has_waited);
            self.answer_all(scratch, submit, read_at);
            self.look.found(read_at);
        } else {
            self.poll_failed = drained == Drained::Failed;
            self.see_to_what_waits();
            // No thread waits: time for neighbours, a few at a time. If this thread does not poll, it may
            // be on the CPU of the thread that was just woken, which goes first.
            if self.look.most.is_zero()
                && self.state.has_neighbours()
                && !std::mem::replace(&mut self.has_yielded, true)
            {
                std::thread::yield_now();
                is_busy = true;
            } else {
                is_busy = self.core.map_around(&mut self.state) || self.map_prefetched(submit);
            }
            if is_busy {
                self.look.worked(read_at);
            }
        }
        std::mem::swap(&mut scratch.staging, &mut self.state.staging);
        is_busy
    }

    /// Returns whether it has used what it may, so that nothing is read for a while.
    fn is_held(&mut self) -> bool {
        let Some(allowance) = &mut self.allowance else { return false };
        self.looked = Instant::now();
        let (own, others) = (self.core.by_reader(), self.core.counters());
        // Relaxed: a statistic.
        let faults = own.faults.load(Ordering::Relaxed);
        let bytes = (own.installed() + others.installed()) << self.core.page_size().shift();
        let until = allowance.held_until([faults, bytes], self.core.pending().len(), self.looked);
        if until.is_some() && self.held_until.is_none() {
            Counters::bump(&own.held, 1);
        }
        self.held_until = until;
        until.is_some()
    }

    /// Returns whether its descriptor is not waited for, and it is looked at by the clock.
    pub(crate) fn is_by_clock(&self) -> bool {
        self.poll_failed || self.held_until.is_some()
    }

    /// Ends the answering of faults after a panic: pages that are waited for become bad, and so does
    /// every page that is touched later.
    pub(crate) fn fail(&mut self) {
        if std::mem::replace(&mut self.has_failed, true) {
            return;
        }
        self.core.fail();
        self.late.clear();
        self.unanswered.clear();
        for page in self.core.pending().pages() {
            self.core.give_up(page);
        }
        // The kernel reports unanswered faults again.
        self.parked.push_all();
        self.parked.wake_now(&self.core);
    }

    /// Answers the faults that were read.
    fn answer_all(&mut self, scratch: &mut Scratch, submit: &Submit<'_>, read_at: Instant) {
        let at = self.core.recorder().since_start(read_at);
        let mut faults = scratch.faults.drain(..);
        self.answered = None;
        let is_own = matches!(self.fault_memory, FaultMemory::Own(_));
        for fault in faults.by_ref() {
            let waiter = fault.thread.filter(|_| is_own).map_or(0, NonZero::get);
            scratch.waiters.note(waiter, read_at);
            scratch.records.extend(self.answer(&fault, submit, read_at, at));
            if self.state.has_company && read_at.elapsed() >= TURN {
                break;
            }
        }
        self.unanswered.extend(faults);
        self.has_yielded = false;
        self.core.recorder().note(&scratch.records);
        scratch.records.clear();
        // Deferred work is due even if faults never cease.
        if self.due().is_some_and(|due| due <= read_at) {
            self.see_to_what_waits();
        }
    }

    /// Answers a fault as if it had been read, and installs its neighbours.
    pub(crate) fn rehearse(
        &mut self,
        fault: PageFault,
        scratch: &mut Scratch,
        submit: &Submit<'_>,
    ) {
        std::mem::swap(&mut scratch.staging, &mut self.state.staging);
        scratch.faults.push(fault);
        self.looked = Instant::now();
        self.answer_all(scratch, submit, self.looked);
        while self.core.map_around(&mut self.state) {}
        std::mem::swap(&mut scratch.staging, &mut self.state.staging);
    }

    /// Returns whether to poll for faults again at once, after a step that found none.
    pub(crate) fn looks_again(&mut self) -> bool {
        let is_held = self.held_until.is_some();
        !is_held && !self.look.most.is_zero() && self.look.again(Instant::now())
    }

    /// Returns whether the reader can sleep right after a step that answered faults, because it does not
    /// poll and has no neighbours to install.
    pub(crate) fn rests(&self) -> bool {
        let has_work = self.state.has_neighbours() || !self.unanswered.is_empty();
        self.look.most.is_zero() && !has_work && self.chunks.is_empty()
    }

    /// Takes pages that are ready, to be installed while no fault is pending.
    pub(crate) fn prefetch(&mut self, chunk: Chunk) {
        if chunk.is_first() {
            self.prefetching += 1;
        }
        if chunk.is_last {
            self.prefetching = self.prefetching.saturating_sub(1);
        } else {
            self.chunks.push_back(chunk);
        }
        self.state.is_prefetching = self.prefetching > 0;
    }

    /// Installs some pages that will be touched. Returns whether there were any.
    fn map_prefetched(&mut self, submit: &Submit<'_>) -> bool {
        let Some(chunk) = self.chunks.front_mut() else { return false };
        if let Some(pages) = chunk.take(self.core.page_size()) {
            let filled = self.core.map_ready(pages, &mut self.state);
            Counters::bump(&self.core.by_reader().populated, filled);
        } else if let Some(chunk) = self.chunks.pop_front() {
            self.pool.prefetch(PrefetchJob {
                core: self.core.clone(),
                prefetch: chunk.prefetch,
                filler: submit.filler.clone(),
                key: submit.key,
            });
        }
        true
    }

    /// Returns when deferred work is due, if there is any.
    pub(crate) fn due(&self) -> Option<Instant> {
        let parked = self.parked.is_waiting().then_some(self.parked.since + RETRY);
        let late = (!self.late.is_empty()).then_some(self.late_since + RETRY);
        let poll_failed = self.poll_failed.then(|| self.looked + RETRY);
        let children = self.children.due();
        let deadline =
            self.deadline.and_then(|after| self.core.pending().oldest()?.checked_add(after));
        [parked, late, poll_failed, deadline, children, self.held_until].into_iter().flatten().min()
    }

    fn see_to_what_waits(&mut self) {
        self.parked.wake(&self.core);
        if self.poll_failed || self.children.due().is_some_and(|due| due <= self.looked) {
            self.children.reap(&self.fault_memory);
        }
        if !self.late.is_empty() && self.late_since.elapsed() >= RETRY {
            for _ in 0..self.late.len() {
                if let Some((page, staged)) = self.late.pop_front() {
                    self.install(page, staged);
                }
            }
        }
        if let Some(after) = self.deadline {
            while let Some(page) = self.core.pending().older_than(after) {
                let is_produced = self.late.iter().any(|(late, _)| *late == page);
                self.core.time_out(page, after, is_produced);
            }
        }
    }

    /// Installs a page that the pool produced for this thread.
    pub(crate) fn install(&mut self, page: u64, staged: Staged) {
        if let Some(staged) = self.core.install(page, staged, self.deadline.is_some()) {
            self.late_since = Instant::now();
            self.late.push_back((page, staged));
        }
    }

    /// Ends the answering. Waiting threads get a signal, not zeroes; those of another process wait for the
    /// next server.
    pub(crate) fn finish(mut self, scratch: &mut Scratch) {
        match &self.fault_memory {
            FaultMemory::Own(_) => {
                // A backing may never return; what it brings later is dropped.
                for page in self.core.pending().pages() {
                    self.core.give_up(page);
                }
                self.core.kernel().ended();
                for fault in std::mem::take(&mut self.unanswered) {
                    self.refuse_fault(&fault);
                }
                while self.refuse(&mut scratch.buffer) {}
            }
            // Unanswered faults are reported again to the next server.
            FaultMemory::Remote(_) => {
                for page in self.core.pending().drain() {
                    self.core.release(page);
                    self.parked.push(page);
                }
                for (page, _) in std::mem::take(&mut self.late) {
                    self.core.release(page);
                    self.parked.push(page);
                }
                for fault in std::mem::take(&mut self.unanswered) {
                    if let Some(page) = self.page(fault.address) {
                        self.parked.push(page);
                    }
                }
                self.parked.wake_now(&self.core);
            }
        }
    }

    /// Reads what is pending: faults into `faults`, removals at once into the pages' words.
    fn drain(&mut self, buffer: &mut EventBuffer, faults: &mut Vec<PageFault>) -> Drained {
        let mut logged = self.logged.take();
        let drained = self.drain_to(logged.as_mut().unwrap_or(buffer), faults);
        self.logged = logged;
        drained
    }

    fn drain_to(&mut self, buffer: &mut EventBuffer, faults: &mut Vec<PageFault>) -> Drained {
        for _ in 0..READS {
            let read = match self.fault_memory.read(buffer) {
                Ok(0) => return Drained::All,
                Ok(read) => read,
                Err(_) => return Drained::Failed,
            };
            while let Some(event) = buffer.next() {
                match event {
                    Event::PageFault(fault) if faults.len() < FAULTS => faults.push(fault),
                    // It is reported again after the next wake.
                    Event::PageFault(_) => {
                        Counters::bump(&self.core.by_reader().deferred, 1);
                        self.parked.push_all();
                    }
                    Event::Removed { start, end } | Event::Unmapped { start, end } => {
                        self.mark(buffer, start, end, |pages| self.core.removed(pages));
                    }
                    Event::Forked(child) => self.children.push(child, &self.fault_memory),
                    _ => {}
                }
            }
            // A buffer that is not full has taken all events, unless a removal came meanwhile.
            if read < buffer.capacity() && matches!(self.fault_memory, FaultMemory::Own(_)) {
                return Drained::All;
            }
        }
        Drained::Part
    }

    /// Marks pages in the log that were given back, if there is one. `removed` is called with them.
    fn mark(
        &self,
        buffer: &EventBuffer,
        start: Vaddr,
        end: Vaddr,
        mut removed: impl FnMut(Range<u64>),
    ) {
        for bytes in self.fault_memory.offsets(start, end) {
            let shift = self.core.page_size().shift();
            let last = self.core.contents().area().end().get();
            let pages = bytes.start >> shift..(bytes.end >> shift).min(last);
            if let Some(log) = buffer.log() {
                log.mark(pages.clone());
            }
            removed(pages);
        }
    }

    /// Makes the pages bad that a thread waits for. Returns whether there were any events.
    fn refuse(&mut self, buffer: &mut EventBuffer) -> bool {
        let mut logged = self.logged.take();
        let buffer = logged.as_mut().unwrap_or(buffer);
        let read = self.fault_memory.read(buffer);
        self.poll_failed = read.is_err();
        while let Some(event) = buffer.next() {
            match event {
                Event::PageFault(fault) => self.refuse_fault(&fault),
                Event::Removed { start, end } | Event::Unmapped { start, end } => {
                    self.mark(buffer, start, end, |_| {});
                }
                Event::Forked(child) => self.children.push(child, &self.fault_memory),
                _ => {}
            }
        }
        self.logged = logged;
        matches!(read, Ok(1..))
    }

    fn refuse_fault(&self, fault: &PageFault) {
        if let Some(page) = self.page(fault.address) {
            self.core.refuse(page, fault.kind == FaultKind::WriteProtect);
        }
    }

    fn page(&self, address: Vaddr) -> Option<u64> {
        let page = self.fault_memory.offset_of(address)? >> self.core.page_size().shift();
        (page < self.core.contents().area().end().get()).then_some(page)
    }

    /// Answers a fault that was read at `read_at`, which is `at` since the mapping was made. Returns its
    /// outcome, unless that is known only later.
    fn answer(
        &mut self,
        fault: &PageFault,
        submit: &Submit<'_>,
        read_at: Instant,
        at: Duration,
    ) -> Option<FaultRecord> {
        let page = self.page(fault.address)?;
        let class = match fault.kind {
            FaultKind::Missing => FaultClass::Missing,
            FaultKind::Minor => FaultClass::Minor,
            FaultKind::WriteProtect => FaultClass::WriteProtect,
        };
        self.state.waiter = fault.thread.map_or(0, NonZero::get);
        if class == FaultClass::Minor {
            Counters::bump(&self.core.by_reader().minor, 1);
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
        class: FaultClass,
        is_write: bool,
        submit: &Submit<'_>,
        read_at: Instant,
    ) -> Option<FaultOutcome> {
        if class == FaultClass::WriteProtect {
            if self.core.write_fault(page) {
                return Some(FaultOutcome::Ready);
            }
            return Some(self.deferred(page));
        }
        let touch = if is_write { Touch::Write } else { Touch::Read };
        // Many threads that read in step wait for the same page.
        if self.answered == Some(page) {
            Counters::bump(&self.core.by_reader().faults, 1);
            Counters::bump(&self.core.by_reader().retouched, 1);
            return Some(FaultOutcome::Ready);
        }
        match self.core.fault(page, touch, &mut self.state) {
            Outcome::Answered => {
                self.answered = Some(page);
                return Some(FaultOutcome::Ready);
            }
            Outcome::Coalesced => {
                self.see_to_nesting(page);
                return Some(FaultOutcome::Coalesced);
            }
            Outcome::Later => {}
            Outcome::Produce { ahead } => {
                Counters::bump(&self.core.by_reader().queued, 1);
                let is_listed = self.core.pending().push(Awaited {
                    page,
                    since: read_at,
                    class,
                    is_write,
                    is_fault: true,
                });
                // A page that a thread of the pool waits for needs no room in the queue.
                let is_nested = self.is_nested();
                if is_listed || is_nested {
                    if submit.demand(&self.pool, &self.core, page, self.room, is_nested) {
                        self.see_to_nesting(page);
                        if let Some(ahead) = ahead {
                            self.pool.read_ahead(&self.core, ahead);
                        }
                        return None;
                    }
                    self.core.pending().remove(page);
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

    /// Makes sure that a page is produced that a thread of the pool waits for: all threads may be waiting
    /// for each other.
    fn see_to_nesting(&self, page: u64) {
        if self.is_nested() && !self.pool.reinforce(self.state.waiter, &self.core, page) {
            self.core.refuse_nested(page);
        }
    }

    fn deferred(&mut self, page: u64) -> FaultOutcome {
        Counters::bump(&self.core.by_reader().deferred, 1);
        self.parked.push(page);
        FaultOutcome::Deferred
    }
}

/// How many children of one client are kept. More, and the missing pages of a further child are made
/// bad.
const CHILDREN: usize = 64;
/// How many events of a child are read at once.
const CHILD_EVENTS: usize = 16;
/// How often the children are probed.
const PROBE: Duration = Duration::from_secs(2);

/// The userfaultfds of processes that a client forked off. Their faults are not answered, and their
/// other events are read when they are probed, so that a child that forks is held up and goes on; closing a
/// descriptor while its process lives would give that process zeroes where pages are missing.
struct Children {
    remotes: Vec<Remote>,
    probed: Option<Instant>,
}

impl Children {
    fn new() -> Self {
        Self { remotes: Vec::with_capacity(CHILDREN), probed: None }
    }

    fn push(&mut self, child: Remote, fault_memory: &FaultMemory) {
        self.reap(fault_memory);
        self.keep(child, fault_memory);
    }

    fn keep(&mut self, child: Remote, fault_memory: &FaultMemory) {
        if self.remotes.len() < CHILDREN {
            self.remotes.push(child);
            return;
        }
        tracing::warn!(
            "a client has more than {CHILDREN} children at once; the missing pages of the next one are bad"
        );
        if let Some(child) = fault_memory.refuse_child(child) {
            self.remotes.push(child);
        }
    }

    /// Closes the descriptors of processes that have ended, and reads the events of the others: a process
    /// that forks or unmaps memory waits for that.
    fn reap(&mut self, fault_memory: &FaultMemory) {
        self.remotes.retain(|remote| !remote.is_gone());
        self.probed = Some(Instant::now());
        if self.remotes.is_empty() {
            return;
        }
        let mut buffer = EventBuffer::new(CHILD_EVENTS);
        for at in 0..self.remotes.len() {
            let Some(remote) = self.remotes.get(at) else { break };
            // An error is that of a limit of descriptors; the next probe reads again.
            let _ = remote.read(&mut buffer);
            for event in &mut buffer {
                if let Event::Forked(child) = event {
                    self.keep(child, fault_memory);
                }
            }
        }
    }

    /// Returns when to probe next, if there are any.
    fn due(&self) -> Option<Instant> {
        self.probed.filter(|_| !self.remotes.is_empty()).map(|probed| probed + PROBE)
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use uzone_os::uffd::{Features, KernelFaults, Modes, Registered, Uffd};
    use uzone_os::{Anonymous, Mapping};
    use uzone_pages::ByteLen;

    use super::*;

    #[test]
    fn neighbours_do_not_hide_that_nobody_comes() {
        let most = Duration::from_micros(20);
        let mut look = AdaptiveSpin::new(most);
        let mut now = look.since;
        // A fault now and then, with neighbours to install after it.
        for round in 0..2 * VAIN {
            now += Duration::from_millis(1);
            look.found(now);
            look.worked(now);
            assert_eq!(look.again(now), round < VAIN, "round {round}");
            now += most;
            assert!(!look.again(now));
        }
        // One comes that a look would have met, and it pays again.
        let met = now - most / 2;
        look.found(met);
        assert!(look.again(met));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it takes events")]
    fn a_child_of_a_client_goes_on_after_an_event_of_its_own() {
        let wanted = Features::EVENT_REMOVE;
        let Ok(uffd) = Uffd::open(wanted, Features::NONE, KernelFaults::IfAllowed) else {
            assert!(std::env::var("REQUIRE_ALL").as_deref() != Ok("1"), "no userfaultfd");
            return eprintln!("skipped: a_child_of_a_client_goes_on: no userfaultfd");
        };
        let len = ByteLen::new(4 * uzone_os::probe::page_size().bytes());
        let mapping = Mapping::anonymous(len, Anonymous::default()).unwrap();
        let memory = Arc::new(Registered::new(Arc::new(uffd), mapping, Modes::MISSING).unwrap());
        let mut children = Children::new();
        let fd = memory.uffd().as_fd().try_clone_to_owned().unwrap();
        let fault_memory = FaultMemory::Own(memory.clone());
        children.push(Remote::adopt(fd).unwrap(), &fault_memory);
        std::thread::scope(|scope| {
            // As a child would: the call returns when its event was read.
            let child = scope.spawn(|| memory.mapping().discard(0..len.get()).unwrap());
            let begin = Instant::now();
            while !child.is_finished() {
                if begin.elapsed() > Duration::from_secs(20) {
                    let _ = memory.uffd().read(&mut EventBuffer::new(8)); // so that the test ends
                    panic!("the child waits for ever");
                }
                children.reap(&fault_memory);
                std::thread::yield_now();
            }
        });
    }
}

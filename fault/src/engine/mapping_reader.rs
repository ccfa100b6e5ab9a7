//! One mapping, as its reader thread sees it: [`MappingReader`]. A step reads the pending faults and answers
//! them (`answers`); if there are none, it retries deferred work and installs neighbours. It
//! never blocks on a backing, and allocates nothing. All pending events are read before a fault is answered:
//! the kernel reports a fault before a removal that is older.

mod answers;
mod parked;

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use uzone_os::Vaddr;
use uzone_os::uffd::{Event, EventBuffer, EventLog, EventSet, FaultKind, Handover, PageFault};

use crate::engine::budget::Allowance;
use crate::engine::core::{Core, ReaderState};
use crate::engine::exit;
use crate::engine::follow::Waiters;
use crate::engine::io_pool::{IoPool, Submit};
use crate::engine::spin::AdaptiveSpin;
use crate::engine::staged::Staged;
use crate::memory::kernel::Faults;
use crate::memory::prefetch::Group;
use crate::memory::remote_region::offsets;
use crate::options::LazyOptions;
use crate::stats::Counters;
use crate::trace::FaultRecord;

use self::parked::Parked;

/// How many events are read at once.
pub(crate) const EVENTS: usize = 64;
/// How many faults are answered before more are read.
const FAULTS: usize = 1024;
/// How many times events are read before other mappings come to their turn: removals that never cease do not
/// hold them up.
const READS: u32 = 64;
/// How long nothing is read of another process's memory at a time while this one ends.
const ENDING: Duration = Duration::from_millis(20);
/// How long faults are answered before other mappings come to their turn.
const TURN: Duration = Duration::from_micros(30);
/// How long a reader polls for more faults before it sleeps. In a virtual machine a faulting thread wakes within 20 to
/// 50 us.
const SPIN: Duration = Duration::from_micros(60);
/// After how long deferred work is retried.
const RETRY: Duration = Duration::from_millis(1);
/// The buffers of a thread, for the faults of any of its mappings.
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
    /// Makes room for the faults of a turn, and for so many bytes.
    pub(crate) fn new(staging: usize) -> Self {
        Self {
            buffer: EventBuffer::new(EVENTS),
            faults: Vec::with_capacity(FAULTS),
            records: Vec::with_capacity(FAULTS),
            waiters: Waiters::new(),
            staging: vec![0; staging],
        }
    }
}

/// One mapping, and the state of its faults.
pub(crate) struct MappingReader {
    faults: Arc<dyn Faults>,
    core: Arc<Core>,
    /// Produces the pages that are not ready.
    pool: Arc<IoPool>,
    state: ReaderState,
    look: AdaptiveSpin,
    /// Faults that were read and are answered in the next turn.
    unanswered: Vec<PageFault>,
    /// Pages for which there was no room in the queue.
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
    /// Where threads hand faults over that they cannot answer themselves.
    handover: Option<Arc<Handover>>,
    /// Where its events are read to, if they must outlive this process.
    logged: Option<EventBuffer>,
    /// Whether a step panicked. Then each page that is touched is made bad.
    has_failed: bool,
    looked: Instant,
    /// Whether others were let run since the last fault was answered.
    has_yielded: bool,
    /// Whether reading the descriptor failed, so that it is not waited for.
    pub(crate) poll_failed: bool,
    /// The rest of its budget, if that is limited, and the time until which nothing is read because it is used up.
    allowance: Option<Allowance>,
    held_until: Option<Instant>,
    pub(crate) is_active: bool,
    pub(crate) is_timed: bool,
    /// The process whose memory it is, if the reader follows it.
    process: Option<NonZeroU32>,
}

/// The other inputs of a reader besides a descriptor, and the process that it follows.
#[derive(Default)]
pub(crate) struct Sources {
    /// Where its events are read to, if they must outlive this process.
    pub(crate) log: Option<EventLog>,
    /// Where threads hand faults over that they cannot answer themselves.
    pub(crate) handover: Option<Arc<Handover>>,
    /// The process that it follows, of memory of another one.
    pub(crate) process: Option<NonZeroU32>,
}

impl MappingReader {
    pub(crate) fn new(
        faults: Arc<dyn Faults>,
        core: Arc<Core>,
        sources: Sources,
        pool: &Arc<IoPool>,
        options: &LazyOptions,
    ) -> Self {
        let Sources { log, handover, process } = sources;
        let &LazyOptions { deadline, budget, .. } = options;
        Self {
            faults,
            core,
            pool: pool.clone(),
            state: ReaderState::new(0),
            look: AdaptiveSpin::new(SPIN),
            unanswered: Vec::with_capacity(FAULTS),
            parked: Parked::new(),
            late: VecDeque::new(),
            late_since: Instant::now(),
            groups: VecDeque::new(),
            prefetching: 0,
            held: Vec::new(),
            has_fault: false,
            answered: None,
            deadline,
            handover,
            logged: log.map(EventBuffer::logged),
            has_failed: false,
            looked: Instant::now(),
            has_yielded: false,
            poll_failed: false,
            allowance: budget.is_limited().then(|| Allowance::new(budget, Instant::now())),
            held_until: None,
            is_active: false,
            is_timed: false,
            process,
        }
    }

    /// Notes whether the thread is on the CPU of the threads whose faults it answers.
    pub(crate) fn set_shares_cpu(&mut self, shares_cpu: bool) {
        let spin = if shares_cpu { Duration::ZERO } else { SPIN };
        self.look = AdaptiveSpin::new(spin);
        self.state.shares_cpu = shares_cpu;
        // Relaxed: a statistic.
        self.core.counters().shares_cpu.store(shares_cpu, Ordering::Relaxed);
    }

    /// Returns how many bytes are read from its backing at once.
    pub(crate) fn room(&self) -> usize {
        self.core.room()
    }

    pub(crate) fn join(&self, set: &EventSet, key: u64) -> io::Result<()> {
        set.add(self.faults.fd(), key)?;
        match &self.handover {
            Some(handover) => set.add(&**handover, key),
            None => Ok(()),
        }
    }

    pub(crate) fn leave(&self, set: &EventSet) {
        // It was not waited for, if its descriptor cannot be read.
        let _ = set.remove(self.faults.fd());
        if let Some(handover) = &self.handover {
            let _ = set.remove(&**handover);
        }
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
            // Deadlines go on.
            if !is_busy || self.due().is_some_and(|due| due <= self.looked) {
                self.run_deferred();
            }
            return is_busy;
        }
        if self.is_held() {
            self.run_deferred();
            return false;
        }
        // The thread has one room for bytes, which is this mapping's for the step.
        std::mem::swap(&mut scratch.staging, &mut self.state.staging);
        scratch.faults.append(&mut self.unanswered);
        let drained = self.drain(&mut scratch.buffer, &mut scratch.faults);
        self.looked = Instant::now();
        let read_at = self.looked;
        let has_more = matches!(drained, Ok(true));
        let mut is_busy = !scratch.faults.is_empty() || has_more;
        if has_more {
            // A removal may be unread that is older than one of these faults.
            self.unanswered.append(&mut scratch.faults);
            self.look.found(read_at);
        } else if is_busy {
            let has_waited = self.state.has_later();
            self.core.faults_read(scratch.faults.len(), read_at, has_waited, &mut self.state);
            self.answer_all(scratch, submit, read_at);
            // Faults may never cease, and each page that is there before its touch is one less.
            if !exit::is_ending() {
                self.map_prefetched(submit);
            }
            self.look.found(read_at);
        } else {
            self.poll_failed = drained.is_err();
            self.run_deferred();
            // No thread waits: time for neighbours, a few at a time. If this thread does not poll, it may
            // be on the CPU of the thread that was just woken, which goes first.
            if self.look.most.is_zero()
                && self.state.has_later()
                && !std::mem::replace(&mut self.has_yielded, true)
            {
                std::thread::yield_now();
                is_busy = true;
            } else {
                is_busy = !exit::is_ending()
                    && (self.core.map_later(&mut self.state) || self.map_prefetched(submit));
            }
            if is_busy {
                self.look.worked(read_at);
            }
        }
        std::mem::swap(&mut scratch.staging, &mut self.state.staging);
        is_busy
    }

    /// Returns whether its budget is used up, or its memory is captured and an event waits for that, so that
    /// nothing is read for a while.
    fn is_held(&mut self) -> bool {
        if self.faults.is_waiting() {
            self.looked = Instant::now();
            self.held_until = Some(self.looked + RETRY);
            return true;
        }
        if exit::is_ending() && self.core.is_remote() {
            self.looked = Instant::now();
            self.held_until = Some(self.looked + ENDING);
            return true;
        }
        let Some(allowance) = &mut self.allowance else {
            self.held_until = None;
            return false;
        };
        self.looked = Instant::now();
        let counters = self.core.counters();
        // Relaxed: a statistic.
        let faults = counters.faults.load(Ordering::Relaxed);
        let bytes = counters.installed() << self.core.page_size().shift();
        let until = allowance.held_until([faults, bytes], self.core.pending.len(), self.looked);
        if until.is_some() && self.held_until.is_none() {
            Counters::add(&counters.held, 1);
        }
        self.held_until = until;
        until.is_some()
    }

    /// Returns whether its descriptor is not waited for, and it is looked at by the clock.
    pub(crate) fn is_polled_by_timer(&self) -> bool {
        self.poll_failed || self.held_until.is_some()
    }

    /// Answers the faults that were read.
    fn answer_all(&mut self, scratch: &mut Scratch, submit: &Submit<'_>, read_at: Instant) {
        let at = self.core.recorder.since_start(read_at);
        let mut faults = scratch.faults.drain(..);
        self.answered = None;
        for fault in faults.by_ref() {
            if !self.core.is_remote() && exit::leaves(fault.thread) {
                continue;
            }
            let waiter = if self.core.is_remote() { self.process } else { fault.thread };
            scratch.waiters.note(waiter.map_or(0, NonZeroU32::get), read_at);
            if let Some(page) = self.page(fault.address) {
                scratch.records.extend(self.answer(page, &fault, submit, read_at, at));
            }
            if self.state.has_company && read_at.elapsed() >= TURN {
                break;
            }
        }
        self.unanswered.extend(faults);
        self.has_yielded = false;
        self.core.recorder.note(&scratch.records);
        scratch.records.clear();
        // Deferred work is due even if faults never cease.
        if self.due().is_some_and(|due| due <= read_at) {
            self.run_deferred();
        }
    }

    /// Returns whether to poll for faults again at once, after a step that found none.
    pub(crate) fn wants_poll(&mut self) -> bool {
        let is_held = self.held_until.is_some();
        !is_held && !self.look.most.is_zero() && self.look.again(Instant::now())
    }

    /// Returns whether the reader can sleep right after a step that answered faults, because it does not
    /// poll and has no neighbours to install.
    pub(crate) fn is_idle(&self) -> bool {
        let has_work = self.state.has_later() || !self.groups.is_empty();
        self.look.most.is_zero() && !has_work && self.unanswered.is_empty()
    }

    /// Ends the answering. Waiting threads get a signal, not zeroes; those of another process wait for the
    /// next server.
    pub(crate) fn finish(&mut self, scratch: &mut Scratch) {
        if self.core.is_remote() {
            // Unanswered faults are reported again to the next server.
            return self.release();
        }
        self.give_up();
        self.core.kernel().ended();
        while let Some(fault) = self.unanswered.pop() {
            self.refuse_fault(&fault);
        }
        while self.refuse(&mut scratch.buffer) {}
    }

    /// Returns which page has an address.
    #[inline]
    fn page(&self, address: Vaddr) -> Option<u64> {
        let page = self.faults.offset_of(address)? >> self.core.page_size().shift();
        (page < self.core.contents().area().end().get()).then_some(page)
    }

    fn refuse_fault(&self, fault: &PageFault) {
        if let Some(page) = self.page(fault.address) {
            self.core.refuse(page, fault.kind == FaultKind::WriteProtect);
        }
    }

    /// Reads the pending events: faults into `faults`, removals at once into the pages' words. Returns
    /// whether there may be more.
    fn drain(&mut self, buffer: &mut EventBuffer, faults: &mut Vec<PageFault>) -> io::Result<bool> {
        if let Some(handover) = &self.handover
            && faults.len() + Handover::MOST <= FAULTS
        {
            handover.take(|fault| faults.push(fault));
        }
        let mut logged = self.logged.take();
        let drained = self.drain_to(logged.as_mut().unwrap_or(buffer), faults);
        self.logged = logged;
        drained
    }

    fn drain_to(
        &mut self,
        buffer: &mut EventBuffer,
        faults: &mut Vec<PageFault>,
    ) -> io::Result<bool> {
        for _ in 0..READS {
            let read = self.faults.read(buffer)?;
            if read == 0 {
                return Ok(false);
            }
            while let Some(event) = buffer.next() {
                match event {
                    Event::PageFault(fault) if faults.len() < FAULTS => faults.push(fault),
                    // It is reported again after the next wake.
                    Event::PageFault(_) => {
                        Counters::add(&self.core.counters().deferred, 1);
                        self.parked.push_all();
                    }
                    Event::Removed { start, end } => {
                        self.mark(buffer, start, end, Core::removed);
                    }
                    _ => {}
                }
            }
            // A buffer that is not full has taken all events, unless a removal came meanwhile.
            if read < buffer.capacity() && !self.core.is_remote() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Marks pages in the log that were given back, if there is one. `removed` is called with them.
    fn mark(
        &self,
        buffer: &EventBuffer,
        start: Vaddr,
        end: Vaddr,
        removed: impl Fn(&Core, Range<u64>),
    ) {
        let shift = self.core.page_size().shift();
        let last = self.core.contents().area().end().get();
        for bytes in offsets(self.faults.regions(), start, end) {
            let pages = bytes.start >> shift..(bytes.end >> shift).min(last);
            if let Some(log) = buffer.log() {
                log.mark(pages.clone());
            }
            removed(&self.core, pages);
        }
    }

    /// Makes the pages bad that a thread waits for. Returns whether there were any events.
    fn refuse(&mut self, buffer: &mut EventBuffer) -> bool {
        let mut logged = self.logged.take();
        let buffer = logged.as_mut().unwrap_or(buffer);
        let read = self.faults.read(buffer);
        self.poll_failed = read.is_err();
        while let Some(event) = buffer.next() {
            match event {
                Event::PageFault(fault) => self.refuse_fault(&fault),
                Event::Removed { start, end } => {
                    self.mark(buffer, start, end, |_, _| {});
                }
                _ => {}
            }
        }
        self.logged = logged;
        let mut handed_over = 0;
        if let Some(handover) = &self.handover {
            handover.take(|fault| {
                handed_over += 1;
                self.refuse_fault(&fault);
            });
        }
        handed_over > 0 || matches!(read, Ok(1..))
    }
}

//! The way of a fault: [`Core`], the decisions about the pages of a mapping.
//!
//! No thread and no descriptor is here: a fault comes in as a page number, the answers go out through a
//! [`Kernel`], and pages that take time are handed back to be queued. So the same code runs against the
//! kernel and against the one in the tests.
//!
//! | state of the page | effect of a fault |
//! |---|---|
//! | absent | own it; offer it to the backing, with its window; queue it if that had nothing |
//! | filling | nothing: its owner wakes the waiting threads |
//! | present | wake: it was filled after the fault was reported. If the same thread faults again: fill it again |
//! | removed | nothing: the evicting thread wakes the waiting threads when it is done |
//! | poisoned | mark it again, unless another thread is making it bad |

pub(crate) mod produce;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use uzone_os::uffd::FaultKind;
use uzone_os::uffd::in_thread::{InThread, Record};
use uzone_pages::{
    Advice, Content, FaultArea, FaultCosts, FaultPlan, FaultPlanner, PageCount, PageSize, Pfn,
    PfnRange, Touch,
};

use crate::backing::Backing;
use crate::backing::window::{Progress, Window};
use crate::engine::pending::Pending;
use crate::error::{BackingError, caught};
use crate::memory::kernel::{Fill, Kernel};
use crate::memory::prefetch::Prefetch;
use crate::options::{LazyOptions, OnFailure};
use crate::pages::Pages;
use crate::pages::states::PageStates;
use crate::stats::{Counters, FaultStats};
use crate::trace::{FaultOutcome, FaultRecord, Recorder};

/// How many bytes are read from a backing at once.
pub(crate) const STAGING: usize = 256 << 10;

/// How many pages that were woken lately are remembered, with the threads that waited for them.
const RECENT: usize = 64;

/// How many pages that no thread waits for are installed before faults are polled for again.
const LATER_AT_ONCE: u64 = 16;
/// The same where the answering thread may run on the CPU of the faulting threads.
const SHARED_AT_ONCE: u64 = 128;

/// How many pages are installed at once ahead of a sequential reader. A step of this size takes 10 us where
/// they are continued and 60 where they are copied, and no fault is answered meanwhile; shorter steps spend
/// more time on waking readers that caught up.
const AHEAD_AT_ONCE: u64 = 32;

/// How many bytes of a sequential reader's window are installed along with its page, but at least a page, by a
/// thread that answers for other mappings too: their faults wait meanwhile.
const COMPANY_BYTES: u64 = 256 << 10;

/// How many runs of pages may wait until there is no fault. Where more wait that have to be installed, some are
/// installed between two faults, in at most so many steps.
const WAITING: usize = 8;
const STEPS_BETWEEN: u32 = 4;
/// How many runs may wait at all; more are left out.
const MOST_WAITING: usize = 64;

/// How long a page takes that is copied, before that was measured.
const COPIED_NS: u32 = 1_700;
/// How long one takes that is mapped from the page cache.
const CONTINUED_NS: u32 = 250;
/// How long a fault takes, before that was measured.
const FAULT_NS: u32 = 8_000;

const FAILED: &str = "answering the faults of the mapping panicked, which is a bug of uzone";
const NESTED: &str = "the backing of other memory of the same engine waits for it: give one of them an engine with threads of its own";

/// The work that is left to do about a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Outcome {
    /// Nothing: the waiting threads are awake.
    Answered,
    /// Nothing: another thread produces the page, and wakes the waiting threads.
    Coalesced,
    /// The page is owned and has to be produced by [`Core::produce`], which may block.
    Produce {
        /// The pages to read ahead of it, if it is read in order.
        ahead: Option<Range<u64>>,
    },
    /// The kernel deferred it, and the page has no owner: wake its waiters a little later.
    Later,
}

/// The state of one thread that answers faults.
pub(crate) struct ReaderState {
    pub(crate) staging: Vec<u8>,
    recent: [(u64, u32); RECENT],
    oldest: usize,
    /// Which thread waits, where the kernel reports it.
    pub(crate) waiter: u32,
    /// Pages that no thread waits for, to be installed while there is no fault; the latest are last, and go first.
    later: Vec<Range<u64>>,
    /// Pages to install ahead of the last sequential reader, when none are in `later`. The next fault
    /// drops it, so that it never outlives the plan it is based on.
    ahead: Option<Range<u64>>,
    /// Whether this thread may run on the CPU of the threads whose faults it answers. Then installing pages
    /// ahead gains nothing, and none wait: the faulting thread has to wait for this CPU in any case.
    pub(crate) shares_cpu: bool,
    /// When the last fault was read, if it was the only one and nothing has delayed the next since.
    last_fault: Option<Instant>,
    /// The pages that will be touched, if they are known and on their way: then no others are guessed.
    pub(crate) prefetch: Option<Arc<Prefetch>>,
    /// Whether the thread answers for other mappings too: then no fault brings more than a bounded number of
    /// pages along.
    pub(crate) has_company: bool,
}

impl ReaderState {
    pub(crate) fn new(room: usize) -> Self {
        let later = Vec::with_capacity(MOST_WAITING);
        let (staging, recent) = (vec![0; room], [(u64::MAX, 0); RECENT]);
        Self {
            staging,
            recent,
            oldest: 0,
            waiter: 0,
            later,
            ahead: None,
            shares_cpu: false,
            last_fault: None,
            prefetch: None,
            has_company: false,
        }
    }

    /// Returns whether there are pages to be installed that no thread waits for.
    pub(crate) fn has_later(&self) -> bool {
        !self.later.is_empty() || self.ahead.is_some()
    }

    /// Remembers that the thread waited for a page. Returns whether that was remembered already.
    fn remember(&mut self, page: u64) -> bool {
        let awaited = (page, self.waiter);
        // So many waiters could push each other out for ever.
        let waiters = self.recent.iter().filter(|recent| recent.0 == page).count();
        if waiters >= RECENT / 2 || self.recent.contains(&awaited) {
            return true;
        }
        self.recent[self.oldest] = awaited;
        self.oldest = (self.oldest + 1) % RECENT;
        false
    }

    fn forget(&mut self, page: u64) {
        for recent in &mut self.recent {
            if recent.0 == page {
                *recent = (u64::MAX, 0);
            }
        }
    }
}

/// The pages of a mapping, their backing, and the kernel that installs them.
pub(crate) struct Core {
    pub(crate) pages: Pages,
    pub(crate) backing: Arc<dyn Backing>,
    /// Shared with the threads that answer their own faults.
    planner: Arc<FaultPlanner>,
    pub(crate) recorder: Recorder,
    pub(crate) pending: Pending,
    /// The turn of the last of its pages that was queued for the I/O threads.
    pub(crate) turn: AtomicU64,
    /// Whether its reader panicked.
    has_failed: AtomicBool,
    on_failure: Option<OnFailure>,
    /// Whether threads wait on for pages that cannot be produced.
    holds: AtomicBool,
    /// The filler of pages in the threads that take faults, if they do. Its pages stay absent here: they are
    /// found in the kernel when they are pinned or populated.
    in_thread: OnceLock<Weak<InThread>>,
}

impl Core {
    pub(crate) fn new(
        kernel: Arc<dyn Kernel>,
        backing: Arc<dyn Backing>,
        contents: PageStates,
        areas: &[FaultArea],
        options: &LazyOptions,
    ) -> Self {
        let LazyOptions { advice, fault_around, on_failure, trace, track_writes, .. } = options;
        let most = backing.largest_window();
        let is_continued = backing.memory_file().is_ok_and(|file| file.is_some());
        let classes: &[FaultKind] = match (is_continued, track_writes) {
            (false, None) => &[FaultKind::Missing],
            (true, None) => &[FaultKind::Missing, FaultKind::Minor],
            (_, Some(_)) => &[FaultKind::Missing, FaultKind::Minor, FaultKind::WriteProtect],
        };
        let page_ns = if is_continued { CONTINUED_NS } else { COPIED_NS };
        let costs = FaultCosts { fault_ns: FAULT_NS, page_ns };
        let page = contents.page_size();
        let planner = FaultPlanner::new(areas, page, *advice, *fault_around, most, costs);
        Self {
            pages: Pages::new(kernel, contents),
            backing,
            planner: Arc::new(planner),
            recorder: Recorder::new(classes, *trace),
            pending: Pending::new(),
            turn: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
            on_failure: on_failure.clone(),
            holds: AtomicBool::new(false),
            in_thread: OnceLock::new(),
        }
    }

    /// Notes the filler of pages in the threads that take faults.
    pub(crate) fn answered_in_thread(&self, in_thread: &Arc<InThread>) {
        let is_first = self.in_thread.set(Arc::downgrade(in_thread)).is_ok();
        debug_assert!(is_first, "a mapping is answered for once");
    }

    /// Returns the filler of pages in the threads that take faults.
    pub(crate) fn in_thread(&self) -> Option<Arc<InThread>> {
        self.in_thread.get()?.upgrade()
    }

    /// Returns the state of a page, for the user of the memory.
    pub(crate) fn content(&self, page: u64) -> Content {
        match self.pages.contents.get(page) {
            Content::Absent if self.in_thread().is_some_and(|it| it.may_have_filled(page)) => {
                Content::Present
            }
            content => content,
        }
    }

    pub(crate) fn kernel(&self) -> &dyn Kernel {
        &*self.pages.kernel
    }

    pub(crate) fn contents(&self) -> &PageStates {
        &self.pages.contents
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.pages.counters
    }

    /// Notes that the reader panicked: each page that is touched from now on is made bad.
    pub(crate) fn fail(&self) {
        // Relaxed: nothing is published by it.
        self.has_failed.store(true, Ordering::Relaxed);
        self.note_failure(0, &BackingError::Other(FAILED.into()));
        tracing::error!(
            "answering the faults of a mapping panicked, which is a bug of uzone; its missing pages are bad now"
        );
    }

    /// Returns whether the reader panicked.
    pub(crate) fn has_failed(&self) -> bool {
        // Relaxed: as above.
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Answers a fault whose page is no longer produced: makes the page bad, unless it is present.
    pub(crate) fn refuse(&self, page: u64, is_write_protect: bool) {
        if is_write_protect {
            let _ = self.write_fault(page);
            return;
        }
        loop {
            return match self.pages.contents.get(page) {
                Content::Absent if self.pages.contents.claim(page) => self.poison(page),
                // Another thread was first. A mark of a page that it fills with zeroes would be taken for
                // the page. It ends: each round another thread has changed the word.
                Content::Absent => continue,
                Content::Filling => self.give_up(page),
                Content::Poisoned => {
                    if self.pages.bad_pages.mark_again(page, &self.pages) {
                        self.note_bad(page);
                        self.pages.kernel.wake(self.bytes(page..page + 1));
                    }
                }
                _ => {
                    // If it is there, this changes nothing.
                    let _ = self.pages.kernel.install(self.bytes(page..page + 1), Fill::Poison);
                    self.note_bad(page);
                    self.pages.kernel.wake(self.bytes(page..page + 1));
                }
            };
        }
    }

    /// Makes a page bad that a backing of other memory of the same engine waits for.
    pub(crate) fn refuse_nested(&self, page: u64) {
        self.note_failure(page, &BackingError::Other(NESTED.into()));
        self.give_up(page);
    }

    /// Returns the recorder, with the faults that threads answered themselves.
    pub(crate) fn all_recorded(&self) -> &Recorder {
        if let Some(in_thread) = self.in_thread() {
            self.recorder
                .absorb(|note| in_thread.take_records(|record| note(self.record_of(&record))));
        }
        &self.recorder
    }

    fn record_of(&self, record: &Record) -> FaultRecord {
        let outcome = if record.is_answered { FaultOutcome::Ready } else { FaultOutcome::Failed };
        FaultRecord {
            at: self.recorder.since_start(record.at),
            offset: self.bytes(record.page..record.page + 1).start,
            class: record.kind,
            is_write: record.is_write,
            outcome,
            latency: record.latency,
        }
    }

    /// Returns whether the memory is another process's.
    pub(crate) fn is_remote(&self) -> bool {
        self.pages.policy.is_remote
    }

    pub(crate) fn page_size(&self) -> PageSize {
        self.pages.page
    }

    /// Returns how many bytes are read from the backing at once, or written to it.
    pub(crate) fn room(&self) -> usize {
        usize::try_from(self.pages.page.bytes()).map_or(usize::MAX, |page| page.max(STAGING))
    }

    pub(crate) fn planner(&self) -> &Arc<FaultPlanner> {
        &self.planner
    }

    pub(crate) fn bytes(&self, pages: Range<u64>) -> Range<u64> {
        self.pages.bytes(pages)
    }

    /// Handles a write to a protected page. Returns whether that is done; otherwise wake the page a little
    /// later.
    pub(crate) fn write_fault(&self, page: u64) -> bool {
        Counters::add(&self.counters().write_protect, 1);
        self.pages.kernel.written(page, &|other| self.pages.contents.get(other) == Content::Present)
    }

    /// Handles a fault on a page of the area.
    pub(crate) fn fault(&self, page: u64, touch: Touch, state: &mut ReaderState) -> Outcome {
        Counters::add(&self.counters().faults, 1);
        let one = page..page + 1;
        match self.pages.contents.get(page) {
            Content::Absent => {}
            Content::Filling | Content::Zeroing => {
                Counters::add(&self.counters().coalesced, 1);
                return Outcome::Coalesced;
            }
            // The evicting thread wakes the waiting threads when the page can be filled again.
            Content::Removed if !self.pages.policy.is_remote => return Outcome::Coalesced,
            Content::Removed | Content::Zero if self.pages.policy.is_remote => {
                return self.zero_removed(page, state);
            }
            Content::Poisoned => {
                if !self.pages.bad_pages.mark_again(page, &self.pages) {
                    return Outcome::Coalesced;
                }
                self.note_bad(page);
                self.pages.kernel.wake(self.bytes(one));
                return Outcome::Answered;
            }
            // A page of this memory is never unknown: it starts absent, and is absent again after
            // unpoisoning.
            found @ (Content::Present | Content::Zero | Content::Removed | Content::Unknown) => {
                Counters::add(&self.counters().retouched, 1);
                // Usually the page was filled between the fault and its being read, for all waiting
                // threads. If one of them faults again, the page is missing again.
                if !state.remember(page) {
                    self.pages.kernel.wake(self.bytes(one));
                    return Outcome::Answered;
                }
                state.forget(page);
                if !self.pages.contents.advance(page, found, Content::Absent)
                    && self.pages.contents.get(page) == found
                {
                    // It is pinned, and so does not become absent: it is filled as it is.
                    return Outcome::Produce { ahead: None };
                }
            }
        }
        let plan = self.planner.plan(Pfn::new(page), touch, !state.shares_cpu);
        let plan = plan.unwrap_or_else(|| unreachable!("the caller asks for pages of the area"));
        state.ahead = None;
        if plan.follows {
            return self.map_in_order(page, &plan, state);
        }
        let progress = self.offer(page..page + 1, Some(page), state);
        let outcome = self.demanded(page, &progress, None);
        if !progress.deferred && !progress.gone {
            self.plan_later(page, &plan, state);
        }
        outcome
    }

    /// Notes that faults were read at `now`, and whether they had to wait for pages that no thread waits for. The time
    /// from one fault to the next contains the work of the thread after it was woken, so it is an upper bound.
    pub(crate) fn faults_read(
        &self,
        faults: usize,
        now: Instant,
        has_waited: bool,
        state: &mut ReaderState,
    ) {
        let last = state.last_fault.take().filter(|_| !has_waited);
        if faults == 1 {
            // Threads that answer their own faults know better how long those take.
            if let Some(last) = last.filter(|_| self.in_thread.get().is_none()) {
                self.planner.fault_took(now.saturating_duration_since(last));
            }
            state.last_fault = Some(now);
        }
    }

    /// Fills a page with zeroes that the user of the memory gave back. Its word stays as it is: it states
    /// the content of the page, even if it was filled a moment before the kernel removed it.
    fn zero_removed(&self, page: u64, state: &mut ReaderState) -> Outcome {
        // The word does not change, so the page is this thread's as if it owned it: no other installs pages here.
        let mut window = Window::owned(&self.pages, page, &mut state.staging);
        let answer = window.zero(self.bytes(page..page + 1));
        Counters::add(&self.counters().demand, window.state.filled);
        if answer.is_err() || window.state.deferred { Outcome::Later } else { Outcome::Answered }
    }

    /// Handles the removal of pages by the user of the memory: they are zero from now on. Called by the
    /// reader, before it answers the faults that it read along with the removal.
    pub(crate) fn removed(&self, pages: Range<u64>) {
        for page in pages {
            let found = self.pages.contents.get(page);
            let next = match found {
                // Its producer is too late; the waiting thread faults again, and gets zeroes.
                Content::Absent | Content::Filling => Content::Zero,
                Content::Present => Content::Removed,
                // Zero already, or bad for good. No other thread installs pages here.
                _ => continue,
            };
            let _ = self.pages.contents.advance(page, found, next);
            if found == Content::Filling {
                self.finish(page, FaultOutcome::Deferred);
                self.pages.kernel.wake(self.bytes(page..page + 1));
            }
        }
    }

    /// Offers the window of a thread that reads in order, which wants the rest of the window next, and one more.
    fn map_in_order(&self, page: u64, plan: &FaultPlan, state: &mut ReaderState) -> Outcome {
        let end = plan.window.end().get();
        let next = end + (end - plan.window.start().get());
        let ahead = page + 1..next.min(plan.area.end().get());
        let offered = self.part_at_once(page, plan, state);
        let progress = self.offer(offered.clone(), Some(page), state);
        let outcome = self.demanded(page, &progress, Some(ahead));
        if outcome == Outcome::Answered && !state.shares_cpu {
            state.ahead = plan.ahead.map(|pages| offered.end..pages.end().get());
        }
        outcome
    }

    /// Queues the pages that are to be installed after a page. Where too many wait, some are installed now.
    fn plan_later(&self, page: u64, plan: &FaultPlan, state: &mut ReaderState) {
        self.queue_later(page, plan, state);
        // Where faults never cease, some of the waiting pages are installed between two of them.
        let most = if state.shares_cpu { 0 } else { WAITING };
        let is_alone = state.shares_cpu && !state.has_company;
        let mut steps = if is_alone { u32::MAX } else { STEPS_BETWEEN };
        while state.later.len() > most && steps > 0 {
            self.map_later(state);
            steps -= 1;
        }
    }

    /// Queues the pages that are known to be touched after a page, or the pages that became ready with it, or the
    /// pages of its plan.
    fn queue_later(&self, page: u64, plan: &FaultPlan, state: &mut ReaderState) {
        if let Some(known) = state.prefetch.clone() {
            let (last, mut is_known) = (self.contents().area().end().get(), false);
            for run in known.group_of(page) {
                self.queue(run.start.min(last)..run.end.min(last), state);
                is_known = true;
            }
            if is_known {
                return;
            }
        }
        let is_auto = self.planner.advice() == Advice::Auto;
        if is_auto && let Some(made) = self.made_with(page) {
            // A thread that reads in order faults next behind the pages that it finds there.
            self.planner.went_only_to(Pfn::new(made.end), plan.window);
            return self.queue_around(page, made, state);
        }
        if state.prefetch.is_some() {
            return;
        }
        let is_guess = is_auto && !plan.buys;
        if is_guess && state.later.len() >= WAITING {
            self.planner.went_only_to(Pfn::new(page + 1), plan.window);
            Counters::add(&self.counters().left_out, plan.window.pages().get() - 1);
            return;
        }
        self.queue_around(page, plan.window.start().get()..plan.window.end().get(), state);
    }

    /// Returns the part of a sequential reader's window that is offered along with its page: all of it, unless
    /// the faults of other mappings would wait for long.
    fn part_at_once(&self, page: u64, plan: &FaultPlan, state: &ReaderState) -> Range<u64> {
        let window = plan.window.start().get()..plan.window.end().get();
        let most = (COMPANY_BYTES >> self.pages.page.shift()).max(1);
        if !state.has_company || window.end - page <= most {
            return window;
        }
        self.planner().went_only_to(Pfn::new(page + most), plan.window);
        page..page + most
    }

    /// Returns the pages of the area of a page that are ready once it is, if there are such and the advice is
    /// [`Advice::Auto`].
    fn made_with(&self, page: u64) -> Option<Range<u64>> {
        let shift = self.pages.page.shift();
        // A closure of the caller's may panic; it is a hint.
        let bytes = caught(|| self.backing.made_with(page << shift)).flatten()?;
        let planner = self.planner();
        let area = planner.area(Pfn::new(page)).filter(|_| planner.advice() == Advice::Auto)?;
        let start = (bytes.start >> shift).max(area.start().get());
        let end = bytes.end.div_ceil(1 << shift).min(area.end().get());
        (start..end).contains(&page).then_some(start..end)
    }

    /// Queues the pages that are ready now that one is which a thread waited for, if it is there.
    pub(crate) fn came(&self, page: u64, state: &mut ReaderState) {
        if self.pages.contents.get(page) == Content::Present
            && let Some(made) = self.made_with(page)
        {
            self.queue_around(page, made, state);
        }
    }

    /// Maps the pages that are ready now that one is which a thread waited for.
    pub(crate) fn map_what_came(&self, page: u64, state: &mut ReaderState) {
        if let Some(made) = self.made_with(page) {
            let filled = self.map_ready(made, state);
            Counters::add(&self.pages.counters.around, filled);
        }
    }

    /// Queues the other pages of a window around `page`. Those behind the page are wanted sooner than those before it, and
    /// go first.
    fn queue_around(&self, page: u64, window: Range<u64>, state: &mut ReaderState) {
        self.queue(window.start..page, state);
        self.queue(page + 1..window.end, state);
    }

    /// Queues a run of pages, or leaves it out if too many wait: the queue never grows, because a reader allocates nothing.
    fn queue(&self, run: Range<u64>, state: &mut ReaderState) {
        if state.later.len() == MOST_WAITING {
            Counters::add(&self.counters().left_out, run.end - run.start);
        } else if !run.is_empty() {
            state.later.push(run);
        }
    }

    /// Installs some pages that no thread waits for. Returns whether there were any.
    pub(crate) fn map_later(&self, state: &mut ReaderState) -> bool {
        let Some(mut part) = state.later.pop() else { return self.map_ahead(state) };
        let most =
            if state.shares_cpu && !state.has_company { SHARED_AT_ONCE } else { LATER_AT_ONCE };
        let end = part.end.min(part.start + most);
        let now = part.start..end;
        part.start = end;
        if !part.is_empty() {
            state.later.push(part);
        }
        let begin = Instant::now();
        let progress = self.offer(now, None, state);
        self.planner.pages_took(progress.filled, begin.elapsed());
        if state.shares_cpu {
            state.last_fault = None;
        }
        Counters::add(&self.counters().around, progress.filled);
        true
    }

    /// Installs some pages ahead of a sequential reader. Returns whether there were any.
    fn map_ahead(&self, state: &mut ReaderState) -> bool {
        let Some(part) = state.ahead.take() else { return false };
        let now = part.start..part.end.min(part.start + AHEAD_AT_ONCE);
        let progress = self.offer(now.clone(), None, state);
        Counters::add(&self.counters().around, progress.filled);
        // A page that is not ready is produced when a thread touches it.
        if self.pages.contents.get(now.end - 1) != Content::Absent {
            let placed = PageCount::new(now.end - now.start);
            if let Ok(placed) = PfnRange::try_new(Pfn::new(now.start), placed) {
                self.planner().went_ahead(placed);
            }
            state.ahead = (now.end < part.end).then_some(now.end..part.end);
        }
        true
    }

    /// Returns the work that is left to do about a page that was offered. The caller owns it from here on if its
    /// backing has to be waited for.
    fn demanded(&self, page: u64, progress: &Progress, ahead: Option<Range<u64>>) -> Outcome {
        // The thread that installed the page counts it.
        let done = u64::from(progress.wanted_is_done).min(progress.filled);
        Counters::add(&self.counters().demand, done);
        Counters::add(&self.counters().around, progress.filled - done);
        if progress.wanted_is_done {
            Outcome::Answered
        } else if self.pages.contents.claim(page) {
            Outcome::Produce { ahead }
        } else {
            // Another thread was first, and wakes this waiter too.
            Counters::add(&self.counters().coalesced, 1);
            Outcome::Coalesced
        }
    }

    /// Notes that pages are about to be given back, which are still present. The caller owns them.
    pub(crate) fn will_evict(&self, pages: &Range<u64>) {
        let count = PageCount::new(pages.end - pages.start);
        if let Ok(pages) = PfnRange::try_new(Pfn::new(pages.start), count) {
            self.planner().gave_back(pages);
        }
        self.pages.note_eviction();
    }

    /// Offers pages, one of which may be waited for, to the backing.
    pub(crate) fn offer(
        &self,
        pages: Range<u64>,
        wanted: Option<u64>,
        state: &mut ReaderState,
    ) -> Progress {
        let mut window = Window::new(&self.pages, pages, wanted, &mut state.staging);
        // A closure of the caller's may panic; the state of the engine stays consistent.
        let _ = caught(|| self.backing.map_pages(&mut window));
        window.state
    }

    /// Offers pages that no thread waits for. Returns how many were installed.
    pub(crate) fn map_ready(&self, pages: Range<u64>, state: &mut ReaderState) -> u64 {
        self.offer(pages, None, state).filled
    }

    /// Lets the backing read pages ahead of the awaited ones.
    pub(crate) fn read_ahead(&self, pages: Range<u64>) {
        // A closure of the caller's may panic; it is a hint.
        let _ = caught(|| self.backing.read_ahead(self.bytes(pages)));
    }

    /// Lets the backing fetch pages that will be read ahead later.
    pub(crate) fn will_need(&self, runs: &[Range<u64>]) {
        let ranges: Vec<_> = runs.iter().map(|run| self.bytes(run.clone())).collect();
        let _ = caught(|| self.backing.will_need(&ranges));
    }

    /// Returns the page with a byte of the backing, if the memory has it.
    pub(crate) fn page_at(&self, offset: u64) -> Option<u64> {
        let page = offset >> self.page_size().shift();
        self.planner.area(Pfn::new(page)).map(|_| page)
    }

    /// Returns the counts so far.
    pub(crate) fn stats(&self) -> FaultStats {
        let mut stats = FaultStats::default();
        self.counters().add_to(&mut stats);
        stats.has_failed = self.has_failed();
        stats.pending = self.pending.len() as u64;
        let in_thread = self.in_thread();
        let [faults, filled, writes, held] = in_thread.map_or([0; 4], |it| it.counts());
        let demand = faults.min(filled);
        stats.faults += faults + writes;
        stats.demand += demand;
        stats.around += filled - demand;
        stats.write_protect += writes;
        stats.held += held;
        stats.oldest_pending = self.pending.oldest().map(|since| since.elapsed());
        stats
    }
}

//! The I/O threads, which produce pages that are not ready: [`IoPool`]. A reader never waits for a device;
//! a page that has to be waited for goes through a queue to one of these threads. The queue has a limit: a
//! page that does not fit is released, and its fault is reported again a little later. Reading ahead has a
//! queue of its own, and a range that does not fit there is dropped. There is one thread more than may produce pages at
//! once, and as many may read ahead, so that neither waits for the other.
//!
//! A backing must not wait for other memory that the same engine maps lazily: once all of these threads wait like
//! that, none is left to produce a page. So the reader checks whether a fault is of one of these threads, and makes
//! the page a bad one if that would have to be waited for.
//!
//! A thread that produces pages for memory of this process neither allocates nor frees (`inbox`), but for its backing.
//!
//! Locks: the queues', held for a push or a pop and while waiting for one, over nothing else.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use uzone_os::signals::lock_uninterrupted;
use uzone_os::thread::pause;
use uzone_os::{lock, signals};

use crate::engine::core::{Core, ReaderState};
use crate::engine::exit;
use crate::engine::inbox::{Inbox, Message};
use crate::error::{caught, discard};
use crate::memory::prefetch::{Group, Prefetch};
use crate::stats::Counters;
use crate::trace::FaultOutcome;

/// How many pages may wait to be produced.
pub(crate) const LIMIT: usize = 4096;
/// How many ranges may wait to be read ahead.
const AHEAD: usize = 64;
/// How many bytes of a backing a thread has room for from its start. A page of 1 GiB needs more, which the thread
/// allocates.
const ROOM: usize = 2 << 20;

/// A page to be produced, which is owned.
struct Job {
    core: Arc<Core>,
    page: u64,
    /// The thread that installs it, if that is not the one that produces it.
    filler: Option<(Arc<Inbox>, u64)>,
    /// When it is its turn, set by the queue.
    turn: u64,
}

impl Job {
    /// Produces the page. A panic in it is a bug of ours or a drop of the caller's: the page is bad
    /// then, and the thread goes on. Returns its mapping, which may have been dropped.
    fn run(self, state: &mut ReaderState) -> Arc<Core> {
        let (core, page) = (self.core.clone(), self.page);
        if caught(|| self.produce(state)).is_none() {
            core.give_up(page);
        }
        core
    }

    fn produce(self, state: &mut ReaderState) {
        if state.staging.len() < self.core.room() {
            state.staging.resize(self.core.room(), 0);
        }
        match self.filler {
            // It takes the page off the list of awaited pages.
            Some((filler, key)) => {
                let (page, staged) = (self.page, self.core.stage(self.page, state));
                filler.send(Message::Install { key, page, staged });
            }
            None => {
                // A failure has made the page bad and was counted; a thread that touches it gets a signal.
                let outcome = match self.core.produce(self.page, state, None) {
                    Ok(()) => FaultOutcome::Produced,
                    Err(error) => {
                        discard(error);
                        FaultOutcome::Failed
                    }
                };
                self.core.finish(self.page, outcome);
                if outcome == FaultOutcome::Produced {
                    self.core.map_what_came(self.page, state);
                }
            }
        }
    }
}

/// A group that is made ready by an I/O thread.
pub(crate) struct PrefetchJob {
    pub(crate) core: Arc<Core>,
    pub(crate) prefetch: Arc<Prefetch>,
    /// The thread that installs it.
    pub(crate) filler: Arc<Inbox>,
    pub(crate) key: u64,
}

impl PrefetchJob {
    /// Makes the next group ready of which pages are missing, and hands it over, or notes that there is none.
    pub(crate) fn run(self) {
        let end = self.core.contents().area().end().get();
        let mut open = Vec::new();
        let mut is_last = false;
        while open.is_empty() && !is_last {
            let mut announced = self.prefetch.announce();
            announced.retain_mut(|run| {
                run.end = run.end.min(end);
                !run.is_empty()
            });
            if !announced.is_empty() {
                self.core.will_need(&announced);
            }
            let runs = self.prefetch.take();
            is_last = runs.is_none();
            for run in runs.into_iter().flatten() {
                let mut rest = run.start..run.end.min(end);
                while let Some(run) = self.core.contents().open_run(rest.clone(), None) {
                    self.core.read_ahead(run.clone());
                    rest.start = run.end;
                    open.push(run);
                }
            }
        }
        let group = Group { runs: open, prefetch: self.prefetch, is_first: false, is_last };
        self.filler.send(Message::Prefetch { key: self.key, group });
        discard(self.core);
    }
}

#[derive(Default)]
struct Queues {
    /// In the order of their turns: the pages of one mapping have one turn each.
    demand: VecDeque<Job>,
    /// The turn of the page that was taken last.
    turn: u64,
    ahead: VecDeque<(Arc<Core>, Range<u64>)>,
    /// Groups to be made ready, a few for each mapping.
    prefetch: VecDeque<PrefetchJob>,
    /// The number of threads that produce pages.
    producing: usize,
    /// How many threads are reading ahead.
    reading_ahead: usize,
    /// The threads, by the numbers that the kernel gives them.
    threads: Vec<u32>,
    is_closed: bool,
}

/// Work for the time in which no thread waits for a page.
enum Ahead {
    Sequential(Arc<Core>, Range<u64>),
    Prefetch(PrefetchJob),
}

impl Queues {
    /// Queues a page behind those of its mapping, and before the pages of mappings that have more. Returns
    /// whether there was room; there is for the first of a mapping.
    fn push(&mut self, mut job: Job) -> bool {
        // Relaxed: it is changed under the lock of the queues alone.
        let last = job.core.turn.load(Ordering::Relaxed);
        job.turn = last.max(self.turn) + 1;
        if self.demand.len() >= LIMIT && last > self.turn {
            return false;
        }
        job.core.turn.store(job.turn, Ordering::Relaxed);
        let at = self.demand.partition_point(|other| other.turn <= job.turn);
        self.demand.insert(at, job);
        true
    }

    /// Takes the page whose turn it is.
    fn pop(&mut self) -> Option<Job> {
        let job = self.demand.pop_front()?;
        self.turn = job.turn;
        Some(job)
    }

    fn next_ahead(&mut self) -> Option<Ahead> {
        if exit::is_ending() {
            return None;
        }
        let ahead = self.ahead.pop_front().map(|(core, pages)| Ahead::Sequential(core, pages));
        ahead.or_else(|| self.prefetch.pop_front().map(Ahead::Prefetch))
    }

    /// Returns whether no page is being produced or read, or by that thread alone.
    fn is_quiet(&self, thread: u32) -> bool {
        let own = usize::from(self.threads.contains(&thread));
        self.demand.is_empty() && self.producing + self.reading_ahead <= own
    }
}

#[derive(Default)]
struct Shared {
    queues: Mutex<Queues>,
    ready: Condvar,
    /// How many threads may produce pages at once, and how many may read ahead. There is one thread more, so that
    /// neither keeps the other waiting.
    producers: usize,
}

/// Threads that produce pages, and the queues to them.
pub(crate) struct IoPool {
    shared: Arc<Shared>,
    process: u32,
}

/// How the pages of a mapping are submitted.
#[derive(Clone, Copy)]
pub(crate) struct Submit<'a> {
    /// The thread that answers its faults, and the key of the mapping there.
    pub(crate) filler: &'a Arc<Inbox>,
    pub(crate) key: u64,
}

impl Submit<'_> {
    /// Queues a page that the caller owns. Returns whether there was room; if not, the caller owns
    /// it still.
    pub(crate) fn demand(&self, pool: &IoPool, core: &Arc<Core>, page: u64) -> bool {
        let filler = core.is_remote().then(|| (self.filler.clone(), self.key));
        pool.submit(Job { core: core.clone(), page, filler, turn: 0 })
    }
}

impl IoPool {
    /// Starts so many threads and one more.
    pub(crate) fn start(threads: NonZeroUsize) -> io::Result<Self> {
        let producers = threads.get();
        let shared = Arc::new(Shared { producers, ..Shared::default() });
        {
            let mut queues = lock_uninterrupted(&shared.queues);
            queues.demand.reserve_exact(LIMIT);
            queues.ahead.reserve_exact(AHEAD);
            queues.threads.reserve_exact(producers + 1);
        }
        let watched = Arc::downgrade(&shared);
        exit::waits_for(move |thread| Some(lock(&watched.upgrade()?.queues).is_quiet(thread)));
        let pool = Self { shared, process: std::process::id() };
        for index in 0..=producers {
            let shared = pool.shared.clone();
            // If a later one is refused, dropping the pool ends the running threads.
            signals::spawn(&format!("uzone-io-{index}"), move || work(&shared))?;
        }
        // A thread that starts allocates.
        let mut round = 0;
        while lock_uninterrupted(&pool.shared.queues).threads.len() <= producers {
            pause(&mut round);
        }
        Ok(pool)
    }

    /// Returns whether a thread, by the number that the kernel gives it, is one of the pool's.
    pub(crate) fn is_producer(&self, thread: u32) -> bool {
        // A thread is in the list before it can fault in a backing.
        thread != 0 && lock_uninterrupted(&self.shared.queues).threads.contains(&thread)
    }

    fn submit(&self, job: Job) -> bool {
        if !lock_uninterrupted(&self.shared.queues).push(job) {
            return false;
        }
        self.shared.ready.notify_one();
        true
    }

    /// Queues a group to be made ready.
    pub(crate) fn prefetch(&self, job: PrefetchJob) {
        lock_uninterrupted(&self.shared.queues).prefetch.push_back(job);
        self.shared.ready.notify_one();
    }

    /// Queues pages to be read ahead, unless too many are.
    pub(crate) fn read_ahead(&self, core: &Arc<Core>, pages: Range<u64>) {
        let count = pages.end.saturating_sub(pages.start);
        if count == 0 {
            return;
        }
        let mut queues = lock_uninterrupted(&self.shared.queues);
        if queues.ahead.len() == AHEAD {
            drop(queues);
            return Counters::add(&core.counters().left_out, count);
        }
        queues.ahead.push_back((core.clone(), pages));
        drop(queues);
        Counters::add(&core.counters().read_ahead, count);
        self.shared.ready.notify_one();
    }
}

/// Produces pages and reads ahead.
fn work(shared: &Shared) {
    let mut state = ReaderState::new(ROOM);
    let mut queues = lock(&shared.queues);
    queues.threads.push(uzone_os::thread_id());
    loop {
        if queues.producing < shared.producers
            && let Some(job) = queues.pop()
        {
            queues.producing += 1;
            drop(queues);
            let core = job.run(&mut state);
            lock(&shared.queues).producing -= 1;
            // A drop of the last owner may wait for the allocator, while another thread produces pages.
            discard(core);
            queues = lock(&shared.queues);
        } else if queues.reading_ahead < shared.producers
            && let Some(ahead) = queues.next_ahead()
        {
            queues.reading_ahead += 1;
            drop(queues);
            match ahead {
                Ahead::Sequential(core, pages) => {
                    core.read_ahead(pages);
                    discard(core);
                }
                Ahead::Prefetch(job) => {
                    job.run();
                    // The threads that fault and the one that answers may wait for this CPU.
                    std::thread::yield_now();
                }
            }
            queues = lock(&shared.queues);
            queues.reading_ahead -= 1;
        } else if queues.is_closed {
            return;
        } else {
            queues = shared.ready.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for IoPool {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        // The threads produce the queued pages first, because other threads wait for them. They are not
        // joined: one may be in a backing that never returns.
        lock_uninterrupted(&self.shared.queues).is_closed = true;
        self.shared.ready.notify_all();
    }
}

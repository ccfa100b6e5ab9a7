//! Threads that produce pages which are not at hand: [`Pool`].
//!
//! Whoever answers faults never waits for a device; a page that has to be waited for goes through
//! a queue to one of these threads. The queue has a limit: what does not fit is given up by its
//! owner and told again by the kernel a little later. What is read ahead goes through a queue of its
//! own, which is looked at only when nobody waits for a page, and what does not fit there is
//! forgotten.
//!
//! Locks: the queues', held for a push or a pop and while waiting for one, over nothing else.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use crate::core::{Core, Hands};
use crate::event_loop::LoopHandle;
use crate::record::FaultOutcome;
use crate::stats::Counters;

/// How many pages may wait to be produced.
pub(crate) const LIMIT: usize = 4096;
/// How many ranges may wait to be read ahead.
const AHEAD: usize = 64;

/// A page to be produced, which is owned.
struct Job {
    core: Arc<Core>,
    page: u64,
    room: usize,
    /// Who puts it in place, if that is not the thread that produces it.
    filler: Option<(LoopHandle, u64)>,
}

impl Job {
    fn run(self, hands: &mut Hands) {
        if hands.staging.len() < self.room {
            hands.staging.resize(self.room, 0);
        }
        match self.filler {
            // It takes the page off the list of those that are waited for.
            Some((filler, key)) => {
                filler.put_in_place(key, self.page, self.core.stage(self.page, hands));
            }
            None => {
                // A failure has made the page bad and was counted; whoever touches it hears of it.
                let outcome = match self.core.produce(self.page, hands) {
                    Ok(()) => FaultOutcome::Produced,
                    Err(_) => FaultOutcome::Failed,
                };
                self.core.finish(self.page, outcome);
            }
        }
    }
}

#[derive(Default)]
struct Queues {
    demand: VecDeque<Job>,
    ahead: VecDeque<(Arc<Core>, Range<u64>)>,
    /// How many threads are reading ahead.
    reading_ahead: usize,
    is_closed: bool,
}

#[derive(Default)]
struct Shared {
    queues: Mutex<Queues>,
    ready: Condvar,
    /// How many threads may read ahead at once: one fewer than there are, so that one is left for
    /// pages that somebody waits for. Where there is one, it does both.
    most_ahead: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Threads that produce pages, and the queues to them.
pub(crate) struct Pool {
    shared: Arc<Shared>,
}

/// By which way the pages of one source are produced.
pub(crate) struct Submit<'a> {
    /// The thread that answers its faults, and its key there.
    pub(crate) filler: &'a LoopHandle,
    pub(crate) key: u64,
}

impl Submit<'_> {
    /// Queues a page that the caller owns. Returns whether there was room; if not, the caller owns
    /// it still.
    pub(crate) fn demand(&self, pool: &Pool, core: &Arc<Core>, page: u64, room: usize) -> bool {
        let filler = core.has_one_filler().then(|| (self.filler.clone(), self.key));
        pool.submit(Job { core: core.clone(), page, room, filler })
    }
}

impl Pool {
    pub(crate) fn start(threads: NonZeroUsize) -> io::Result<Self> {
        let most_ahead = (threads.get() - 1).max(1);
        let shared = Arc::new(Shared { most_ahead, ..Shared::default() });
        {
            let mut queues = shared.lock();
            queues.demand.reserve_exact(LIMIT);
            queues.ahead.reserve_exact(AHEAD);
        }
        let pool = Self { shared };
        for index in 0..threads.get() {
            let shared = pool.shared.clone();
            // If a later one is refused, dropping the pool ends those that run.
            Builder::new().name(format!("uzone-io-{index}")).spawn(move || work(&shared))?;
        }
        Ok(pool)
    }

    fn submit(&self, job: Job) -> bool {
        let mut queues = self.shared.lock();
        if queues.demand.len() == LIMIT {
            return false;
        }
        queues.demand.push_back(job);
        drop(queues);
        self.shared.ready.notify_one();
        true
    }

    /// Queues pages to be read ahead, unless too many are.
    pub(crate) fn read_ahead(&self, core: &Arc<Core>, pages: Range<u64>) {
        let count = pages.end.saturating_sub(pages.start);
        if count == 0 {
            return;
        }
        let mut queues = self.shared.lock();
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

fn work(shared: &Shared) {
    let mut hands = Hands::new(0);
    let mut queues = shared.lock();
    loop {
        if let Some(job) = queues.demand.pop_front() {
            drop(queues);
            job.run(&mut hands);
            queues = shared.lock();
        } else if queues.reading_ahead < shared.most_ahead
            && let Some((core, pages)) = queues.ahead.pop_front()
        {
            queues.reading_ahead += 1;
            drop(queues);
            core.read_ahead(pages);
            drop(core);
            queues = shared.lock();
            queues.reading_ahead -= 1;
        } else if queues.is_closed {
            return;
        } else {
            queues = shared.ready.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // What is queued is produced first: somebody waits for it. Nobody waits for the threads: one
        // may be in a backing that never returns.
        self.shared.lock().is_closed = true;
        self.shared.ready.notify_all();
    }
}

//! Threads that produce pages which are not at hand: [`Pool`].
//!
//! Whoever answers faults never waits for a device; a page that has to be waited for goes through
//! a queue to one of these threads. The queue has a limit: what does not fit is given up by its
//! owner and told again by the kernel a little later.
//!
//! Locks: the queue's, held for a push or a pop and while waiting for one, over nothing else.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use crate::core::{Core, Hands};

/// How many pages may wait to be produced.
pub(crate) const LIMIT: usize = 4096;

/// A page to be produced, which is owned.
struct Job {
    core: Arc<Core>,
    page: u64,
    room: usize,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    is_closed: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    ready: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Threads that produce pages, and the queue to them.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    pub(crate) fn start(threads: NonZeroUsize) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        shared.lock().jobs.reserve_exact(LIMIT);
        let mut pool = Self { shared, threads: Vec::new() };
        for index in 0..threads.get() {
            let shared = pool.shared.clone();
            let thread =
                Builder::new().name(format!("uzone-io-{index}")).spawn(move || work(&shared))?;
            // If a later one is refused, dropping the pool stops those that run.
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Queues a page that the caller owns. Returns whether there was room; if not, the caller owns
    /// it still.
    pub(crate) fn submit(&self, core: &Arc<Core>, page: u64, room: usize) -> bool {
        let mut queue = self.shared.lock();
        if queue.jobs.len() == LIMIT {
            return false;
        }
        queue.jobs.push_back(Job { core: core.clone(), page, room });
        drop(queue);
        self.shared.ready.notify_one();
        true
    }
}

fn work(shared: &Shared) {
    let mut hands = Hands::new(0);
    loop {
        let mut queue = shared.lock();
        let job = loop {
            if let Some(job) = queue.jobs.pop_front() {
                break job;
            }
            if queue.is_closed {
                return;
            }
            queue = shared.ready.wait(queue).unwrap_or_else(PoisonError::into_inner);
        };
        drop(queue);
        if hands.staging.len() < job.room {
            hands.staging.resize(job.room, 0);
        }
        // A failure has made the page bad and was counted; whoever touches it hears of it.
        let _ = job.core.produce(job.page, &mut hands);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // What is queued is produced first: somebody waits for it.
        self.shared.lock().is_closed = true;
        self.shared.ready.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of a backing was caught; one of ours was printed when it happened.
            let _ = thread.join();
        }
    }
}

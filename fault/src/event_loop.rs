//! The threads that answer faults: [`EventLoop`], one thread for any number of mappings.
//!
//! A mapping belongs to one loop as long as it lives, so its userfaultfd has one reader, which knows
//! in which order removals and faults came. Several threads that wait for the same descriptors
//! (`EPOLLEXCLUSIVE`) would share the work more evenly, and each fault would wake a second thread
//! while the first is still looking: the wake-up is the dearest part of a fault, and the faulting
//! thread pays it. So mappings are shared out when they are made.
//!
//! A thread that found a fault keeps looking for more for a moment (`source`), at the sources that
//! had some; between rounds it asks about the others without waiting.
//!
//! Locks: one, for the list of what the loop is told, held for a push or to take all.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use uzone_os::numa;
use uzone_os::uffd::{Doorbell, EventSet, ReadyKeys};

use crate::pool::Submit;
use crate::source::{Scratch, Source};
use crate::staged::Staged;

/// The key of the bell.
const BELL: u64 = u64::MAX;
/// After how many rounds over the sources that have faults the others are asked.
const ROUNDS: u32 = 8;
/// How long to wait where waiting failed.
const RETRY: Duration = Duration::from_millis(1);

/// What a loop is told.
enum Message {
    Join { key: u64, source: Box<Source> },
    Leave { key: u64, done: SyncSender<()> },
    PutInPlace { key: u64, page: u64, staged: Staged },
    Stop,
}

/// How a loop is reached.
struct Inbox {
    told: Mutex<Vec<Message>>,
    /// Whether there is something in it, or was a moment ago.
    called: AtomicBool,
    bell: Doorbell,
    set: EventSet,
    next_key: AtomicU64,
    sources: AtomicUsize,
}

impl Inbox {
    /// Tells the loop something. Returns whether it was reached.
    fn tell(&self, message: Message) -> bool {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).push(message);
        // Release pairs with the Acquire of the loop: it sees what was pushed.
        if self.called.swap(true, Ordering::Release) {
            return true; // it was rung for, and not silenced since
        }
        self.bell.ring().is_ok()
    }
}

/// A way to a loop, for the threads that produce pages.
#[derive(Clone)]
pub(crate) struct LoopHandle(Arc<Inbox>);

impl LoopHandle {
    /// Hands a page over to the thread that puts it in place.
    pub(crate) fn put_in_place(&self, key: u64, page: u64, staged: Staged) {
        // If it is not reached now, it is when it is told the next thing.
        let _ = self.0.tell(Message::PutInPlace { key, page, staged });
    }
}

/// A thread that answers the faults of its mappings.
pub(crate) struct EventLoop {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
    id: ThreadId,
}

impl EventLoop {
    /// Starts a thread, on `cpus` if there are any.
    pub(crate) fn start(name: &str, cpus: &[u32]) -> io::Result<Self> {
        let (bell, set) = (Doorbell::new()?, EventSet::new()?);
        set.add(&bell, BELL)?;
        let inbox = Arc::new(Inbox {
            told: Mutex::default(),
            called: AtomicBool::new(false),
            bell,
            set,
            next_key: AtomicU64::new(0),
            sources: AtomicUsize::new(0),
        });
        let shared = inbox.clone();
        let (cpus, (answer, placed)) = (cpus.to_vec(), sync_channel(1));
        let thread = Builder::new().name(name.to_owned()).spawn(move || {
            let kept = if cpus.is_empty() { Ok(()) } else { numa::keep_thread_to(&cpus) };
            let is_kept = kept.is_ok();
            let _ = answer.send(kept);
            if is_kept {
                Runner::new(shared).run();
            }
        })?;
        let id = thread.thread().id();
        let event_loop = Self { inbox, thread: Some(thread), id };
        match placed.recv() {
            Ok(Ok(())) => Ok(event_loop),
            Ok(Err(refused)) => Err(io::Error::other(refused)),
            Err(_) => Err(io::Error::other("the thread ended before it ran")),
        }
    }

    /// Returns a way to it.
    pub(crate) fn handle(&self) -> LoopHandle {
        LoopHandle(self.inbox.clone())
    }

    /// Returns how many mappings it has.
    pub(crate) fn sources(&self) -> usize {
        // Relaxed: a guess at who has the least to do.
        self.inbox.sources.load(Ordering::Relaxed)
    }

    /// Answers the faults of `source` from now on, until what this returns is dropped.
    pub(crate) fn join(self: &Arc<Self>, source: Source) -> io::Result<Attached> {
        // Relaxed: only the number counts.
        let key = self.inbox.next_key.fetch_add(1, Ordering::Relaxed);
        // Waited for before the loop knows it: it asks once more then.
        source.join(&self.inbox.set, key)?;
        self.inbox.sources.fetch_add(1, Ordering::Relaxed);
        self.inbox.tell(Message::Join { key, source: Box::new(source) });
        Ok(Attached { event_loop: self.clone(), key })
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        let is_told = self.inbox.tell(Message::Stop);
        if let Some(thread) = self.thread.take()
            && is_told
            && self.id != std::thread::current().id()
        {
            // A panic of it was printed when it happened.
            let _ = thread.join();
        }
    }
}

/// A mapping whose faults are answered until this is dropped.
pub(crate) struct Attached {
    event_loop: Arc<EventLoop>,
    key: u64,
}

impl Drop for Attached {
    /// Returns when the mapping is not read any more.
    fn drop(&mut self) {
        let (done, is_done) = sync_channel(1);
        let is_told = self.event_loop.inbox.tell(Message::Leave { key: self.key, done });
        // The loop itself may drop a mapping, in a closure of the caller's: it sees to it then.
        if is_told && self.event_loop.id != std::thread::current().id() {
            let _ = is_done.recv(); // it ends with an error if the loop has ended
        }
    }
}

/// What the thread has.
struct Runner {
    inbox: Arc<Inbox>,
    sources: HashMap<u64, Box<Source>>,
    /// The sources that had faults a moment ago, or have neighbours to be put in place.
    active: Vec<u64>,
    /// The sources of which something was put off.
    timed: Vec<u64>,
    scratch: Scratch,
    ready: ReadyKeys,
    /// The way to this thread, for those who produce pages.
    filler: LoopHandle,
}

impl Runner {
    fn new(inbox: Arc<Inbox>) -> Self {
        Self {
            filler: LoopHandle(inbox.clone()),
            inbox,
            sources: HashMap::new(),
            active: Vec::new(),
            timed: Vec::new(),
            scratch: Scratch::new(),
            ready: ReadyKeys::new(),
        }
    }

    fn run(mut self) {
        let mut round = 0_u32;
        loop {
            // Acquire pairs with the Release of `tell`.
            if self.inbox.called.load(Ordering::Acquire) && self.take_told() {
                return;
            }
            let is_busy = self.step_active();
            if self.active.is_empty() {
                let timeout =
                    self.next_due().map(|due| due.saturating_duration_since(Instant::now()));
                self.wait(timeout);
                continue;
            }
            round = round.wrapping_add(1);
            let has_others = self.sources.len() > self.active.len();
            if has_others && (!is_busy || round.is_multiple_of(ROUNDS)) {
                self.wait(Some(Duration::ZERO));
            } else if !is_busy {
                std::hint::spin_loop();
            }
        }
    }

    /// Does what the loop was told. Returns whether that is to stop.
    fn take_told(&mut self) -> bool {
        // In this order: who tells something after the swap rings again.
        let _ = self.inbox.bell.silence();
        self.inbox.called.swap(false, Ordering::AcqRel);
        let told =
            std::mem::take(&mut *self.inbox.told.lock().unwrap_or_else(PoisonError::into_inner));
        for message in told {
            match message {
                Message::Join { key, source } => {
                    if self.scratch.staging.len() < source.room() {
                        self.scratch.staging.resize(source.room(), 0);
                    }
                    self.active.reserve(self.sources.len() + 1);
                    self.timed.reserve(self.sources.len() + 1);
                    self.sources.insert(key, source);
                    self.activate(key);
                }
                Message::Leave { key, done } => {
                    self.leave(key);
                    let _ = done.send(()); // nobody waits if the loop itself drops the mapping
                }
                Message::PutInPlace { key, page, staged } => {
                    if let Some(source) = self.sources.get_mut(&key) {
                        source.put_in_place(page, staged);
                        self.note_timer(key);
                    }
                }
                Message::Stop => {
                    let keys: Vec<u64> = self.sources.keys().copied().collect();
                    keys.into_iter().for_each(|key| self.leave(key));
                    return true;
                }
            }
        }
        false
    }

    fn leave(&mut self, key: u64) {
        if let Some(source) = self.sources.remove(&key) {
            source.leave(&self.inbox.set);
            self.active.retain(|&active| active != key);
            self.timed.retain(|&timed| timed != key);
            source.finish(&mut self.scratch);
            self.inbox.sources.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn activate(&mut self, key: u64) {
        if let Some(source) = self.sources.get_mut(&key)
            && !std::mem::replace(&mut source.is_active, true)
        {
            self.active.push(key);
        }
    }

    fn note_timer(&mut self, key: u64) {
        if let Some(source) = self.sources.get_mut(&key)
            && source.due().is_some()
            && !std::mem::replace(&mut source.is_timed, true)
        {
            self.timed.push(key);
        }
    }

    /// Steps the active sources once. Returns whether any had something to do.
    fn step_active(&mut self) -> bool {
        let mut is_busy = false;
        let mut at = 0;
        while let Some(&key) = self.active.get(at) {
            let Some(source) = self.sources.get_mut(&key) else {
                self.active.swap_remove(at);
                continue;
            };
            let was_deaf = source.is_deaf;
            if source.step(&mut self.scratch, &Submit { filler: &self.filler, key }) {
                is_busy = true;
                if source.rests() {
                    source.is_active = false;
                    self.active.swap_remove(at);
                } else {
                    at += 1;
                }
            } else if source.looks_again() {
                at += 1;
            } else {
                source.is_active = false;
                self.active.swap_remove(at);
            }
            if source.is_deaf && !was_deaf {
                // It would be returned by every wait.
                source.leave(&self.inbox.set);
            } else if was_deaf && !source.is_deaf {
                // If it cannot be waited for, it is looked at by the clock.
                source.is_deaf = source.join(&self.inbox.set, key).is_err();
            }
            self.note_timer(key);
        }
        is_busy
    }

    /// Returns when to look at what was put off, and forgets those of which nothing is.
    fn next_due(&mut self) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        let sources = &mut self.sources;
        self.timed.retain(|key| {
            let Some(source) = sources.get_mut(key) else { return false };
            let due = source.due();
            source.is_timed = due.is_some();
            next = [next, due].into_iter().flatten().min();
            due.is_some()
        });
        next
    }

    /// Waits for any source, and makes those active that have something to read or are due.
    fn wait(&mut self, timeout: Option<Duration>) {
        if self.inbox.set.wait(&mut self.ready, timeout).is_err() {
            std::thread::sleep(RETRY);
        }
        for at in 0..self.ready.keys().len() {
            let key = self.ready.keys()[at];
            if key != BELL {
                self.activate(key);
            }
        }
        if self.timed.is_empty() {
            return;
        }
        let now = Instant::now();
        for at in 0..self.timed.len() {
            let key = self.timed[at];
            let due = self.sources.get(&key).and_then(|source| source.due());
            if due.is_some_and(|due| due <= now) {
                self.activate(key);
            }
        }
    }
}

//! The threads that answer faults: [`EventLoop`], one thread for any number of mappings.
//!
//! A mapping belongs to one loop as long as it lives, so its userfaultfd has one reader, which knows in
//! which order removals and faults came, and mappings are shared out when they are made. A fault wakes no second
//! thread while the first polls: the wake-up is the most expensive part of a fault of one page, and the faulting
//! thread pays it.
//!
//! A thread that found a fault keeps looking for more for a moment (`source`), at the readers that
//! had some; between rounds it asks about the others without waiting.
//!
//! A panic in a reader is a bug of ours, and is caught: the reader fails, which means that every page that
//! is touched from then on is bad, and the thread goes on with the others. If the thread ended instead,
//! each thread that touches its mappings would wait for ever.
//!
//! The thread neither allocates nor frees (`inbox`): a reader brings the room that the loop needs for it, and is
//! dropped by the thread that drops its mapping.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use uzone_os::thread::pause;
use uzone_os::uffd::EventSet;
use uzone_os::{numa, signals};

use crate::engine::core::STAGING;
use crate::engine::exit;
use crate::engine::follow::Follower;
use crate::engine::inbox::{Inbox, Mailbox, Message};
use crate::engine::io_pool::Submit;
use crate::engine::mapping_reader::{MappingReader, Scratch};
use crate::error::{caught, discard};
use crate::memory::prefetch::{Group, Prefetch};

/// The key of the bell.
const BELL: u64 = u64::MAX;
/// After how many rounds over the mappings that have faults the others are checked.
const ROUNDS: u32 = 8;
/// After how long they are checked at the latest.
const OTHERS: Duration = Duration::from_micros(20);
/// How long to wait where waiting failed.
const RETRY: Duration = Duration::from_millis(1);

/// The state that a loop and its owners share.
struct Shared {
    inbox: Arc<Inbox>,
    /// The descriptors that its thread waits for.
    set: EventSet,
    joining: Mailbox<Member>,
    /// The readers that left it, until the threads that wait for them take them.
    left: Mailbox<Member>,
    next_key: AtomicU64,
    /// The number of readers that joined it and were not taken.
    readers: AtomicUsize,
}

/// A reader of a loop.
struct Member {
    key: u64,
    reader: Box<MappingReader>,
    /// The room that the reader brings, and then the room that the loop had before.
    room: Box<Room>,
}

/// The memory that a loop has for its readers.
struct Room {
    /// In the order of their keys.
    members: Vec<Member>,
    /// The mappings that had faults a moment ago, or have neighbours to be installed.
    active: Vec<u64>,
    /// The mappings with deferred work.
    timed: Vec<u64>,
    /// The bytes of the pages that a reader copies. Empty if the reader needs no more than each loop has.
    staging: Vec<u8>,
}

impl Room {
    /// Makes room for so many readers, of which one copies so many bytes at once.
    fn new(readers: usize, bytes: usize) -> Self {
        let staging = if bytes > STAGING { vec![0; bytes] } else { Vec::new() };
        let (active, timed) = (Vec::with_capacity(readers), Vec::with_capacity(readers));
        Self { members: Vec::with_capacity(readers), active, timed, staging }
    }

    /// Exchanges the lists for those of another room, if that has more room.
    fn grow(&mut self, other: &mut Self) {
        if other.members.capacity() > self.members.capacity() {
            other.members.append(&mut self.members);
            other.active.append(&mut self.active);
            other.timed.append(&mut self.timed);
            std::mem::swap(&mut self.members, &mut other.members);
            std::mem::swap(&mut self.active, &mut other.active);
            std::mem::swap(&mut self.timed, &mut other.timed);
        }
    }

    fn find(&self, key: u64) -> Result<usize, usize> {
        self.members.binary_search_by_key(&key, |member| member.key)
    }

    fn reader(&mut self, key: u64) -> Option<&mut MappingReader> {
        let at = self.find(key).ok()?;
        Some(&mut self.members[at].reader)
    }

    fn activate(&mut self, key: u64) {
        if let Some(reader) = self.reader(key)
            && !std::mem::replace(&mut reader.is_active, true)
        {
            self.active.push(key);
        }
    }

    fn note_timer(&mut self, key: u64) {
        if let Some(reader) = self.reader(key)
            && reader.due().is_some()
            && !std::mem::replace(&mut reader.is_timed, true)
        {
            self.timed.push(key);
        }
    }
}

/// A thread that answers the faults of its mappings.
pub(crate) struct EventLoop {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    id: ThreadId,
    process: u32,
}

impl EventLoop {
    /// Starts a thread.
    pub(crate) fn start(name: &str) -> io::Result<Self> {
        let (inbox, set) = (Arc::new(Inbox::new()?), EventSet::new()?);
        set.add(&inbox.bell, BELL)?;
        let watched = Arc::downgrade(&inbox);
        exit::waits_for(move |thread| Some(watched.upgrade()?.is_quiet(thread)));
        let (next_key, readers) = (AtomicU64::new(0), AtomicUsize::new(0));
        let (joining, left) = (Mailbox::new(), Mailbox::new());
        let shared = Arc::new(Shared { inbox, set, joining, left, next_key, readers });
        let theirs = shared.clone();
        let thread = signals::spawn(name, move || {
            let mut runner = Runner::new(theirs);
            // A panic of a reader is caught there; nothing else may end this thread either.
            while caught(|| runner.run()).is_none() {
                tracing::error!("a thread that answers faults panicked and goes on");
            }
        })?;
        let id = thread.thread().id();
        // A thread that starts allocates.
        let mut round = 0;
        while !shared.inbox.is_running() {
            pause(&mut round);
        }
        Ok(Self { shared, thread: Some(thread), id, process: std::process::id() })
    }

    /// Returns the way to it.
    pub(crate) fn inbox(&self) -> &Arc<Inbox> {
        &self.shared.inbox
    }

    /// Returns how many mappings it has.
    pub(crate) fn readers(&self) -> usize {
        // Relaxed: a guess at the load.
        self.shared.readers.load(Ordering::Relaxed)
    }

    /// Answers the faults of `reader` from now on, until the returned value is dropped.
    pub(crate) fn join(self: &Arc<Self>, reader: MappingReader) -> io::Result<Attached> {
        // Relaxed: only the number counts.
        let key = self.shared.next_key.fetch_add(1, Ordering::Relaxed);
        // Waited for before the loop knows it: it asks once more then.
        reader.join(&self.shared.set, key)?;
        // Of the readers that are in the loop at once, the last one to be counted brought room for all. Relaxed: the
        // messages order it.
        let readers = 1 + self.shared.readers.fetch_add(1, Ordering::Relaxed);
        let room = Box::new(Room::new(readers, reader.room()));
        self.shared.left.reserve(readers);
        self.shared.joining.push(Member { key, reader: Box::new(reader), room });
        self.inbox().send(Message::Join);
        Ok(Attached { event_loop: self.clone(), key })
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The C library has taken the stack of the thread.
            std::mem::forget(self.thread.take());
            return;
        }
        let is_sent = self.inbox().send(Message::Stop);
        if let Some(thread) = self.thread.take()
            && is_sent
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

impl Attached {
    /// Has pages installed before they are touched.
    pub(crate) fn prefetch(&self, prefetch: &Arc<Prefetch>) {
        for _ in 0..prefetch.underway() {
            let group = Group::before_the_first(prefetch.clone());
            self.event_loop.inbox().send(Message::Prefetch { key: self.key, group });
        }
    }
}

impl Drop for Attached {
    /// Returns when the mapping is not read any more.
    fn drop(&mut self) {
        if self.event_loop.process != std::process::id() {
            return;
        }
        let EventLoop { shared, id, .. } = &*self.event_loop;
        // The loop itself may drop a mapping, in a closure of the caller: it handles the message later.
        let is_awaited = *id != std::thread::current().id();
        let is_sent = shared.inbox.send(Message::Leave { key: self.key, is_awaited });
        if !(is_sent && is_awaited) {
            return;
        }
        let mut round = 0;
        let left = loop {
            match shared.left.take_first(|left| left.key == self.key) {
                Some(left) => break left,
                None => pause(&mut round),
            }
        };
        drop(left);
        // Relaxed: as for `join`.
        shared.readers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The state of the thread.
struct Runner {
    inbox: Arc<Inbox>,
    shared: Arc<Shared>,
    room: Room,
    scratch: Scratch,
    follower: Follower,
    /// Whether this thread is on the CPU of a thread whose faults it answers.
    shares_cpu: bool,
    /// The keys that the last wait returned.
    ready: Vec<u64>,
    /// Empty lists, to exchange for full ones.
    messages: Vec<Message>,
    joining: Vec<Member>,
}

impl Runner {
    fn new(shared: Arc<Shared>) -> Self {
        Self {
            inbox: shared.inbox.clone(),
            shared,
            room: Room::new(0, 0),
            scratch: Scratch::new(STAGING),
            follower: Follower::new(),
            // On the only CPU, polling would keep the thread from running that was just woken.
            shares_cpu: numa::current_cpu_count().is_ok_and(|cpus| cpus == 1),
            ready: Vec::with_capacity(EventSet::MOST),
            messages: Vec::new(),
            joining: Vec::new(),
        }
    }

    fn run(&mut self) {
        self.inbox.belongs_here();
        let mut round = 0_u32;
        let mut checked = Instant::now();
        loop {
            if self.inbox.is_called() && self.take_messages() {
                return;
            }
            let is_busy = self.step_active();
            if is_busy {
                self.follow();
            }
            if self.room.active.is_empty() {
                let timeout =
                    self.next_due().map(|due| due.saturating_duration_since(Instant::now()));
                self.wait(timeout);
                continue;
            }
            round = round.wrapping_add(1);
            let has_others = self.room.members.len() > self.room.active.len();
            let is_time = || round.is_multiple_of(ROUNDS) || checked.elapsed() >= OTHERS;
            if has_others && (!is_busy || is_time()) {
                self.wait(Some(Duration::ZERO));
                checked = Instant::now();
            } else if !is_busy {
                std::hint::spin_loop();
            }
        }
    }

    /// Moves this thread to the CPU of the thread whose faults it answers, or back, if that is due.
    fn follow(&mut self) {
        if let Some(shares_cpu) = self.follower.follow(&mut self.scratch.waiters) {
            self.shares_cpu = shares_cpu;
            let members = &mut self.room.members;
            members.iter_mut().for_each(|member| member.reader.set_shares_cpu(shares_cpu));
        }
    }

    /// Handles the messages. Returns whether one of them stops the loop.
    fn take_messages(&mut self) -> bool {
        let mut messages = std::mem::take(&mut self.messages);
        self.inbox.take(&mut messages);
        let is_stopped = messages.drain(..).any(|message| self.handle(message));
        self.messages = messages;
        is_stopped
    }

    /// Handles a message. Returns whether it stops the loop.
    fn handle(&mut self, message: Message) -> bool {
        match message {
            Message::Join => self.join(),
            Message::Leave { key, is_awaited } => {
                // Its message comes behind that by which it joined.
                if let Some(left) = self.leave(key) {
                    if is_awaited {
                        self.shared.left.push(left);
                    } else {
                        self.shared.readers.fetch_sub(1, Ordering::Relaxed);
                    }
                }
            }
            Message::Install { key, page, staged } => {
                if let Some(reader) = self.room.reader(key) {
                    if caught(|| reader.install(page, staged)).is_none() {
                        reader.fail();
                    }
                    self.room.note_timer(key);
                    self.room.activate(key);
                }
            }
            Message::Prefetch { key, group } => {
                if let Some(reader) = self.room.reader(key) {
                    reader.prefetch(group);
                    self.room.activate(key);
                }
            }
            Message::Stop => {
                while let Some(member) = self.room.members.last() {
                    drop(self.leave(member.key));
                }
                return true;
            }
        }
        false
    }

    /// Takes in the readers that join.
    fn join(&mut self) {
        let mut joining = std::mem::take(&mut self.joining);
        self.shared.joining.take(&mut joining);
        for mut member in joining.drain(..) {
            if self.shares_cpu {
                member.reader.set_shares_cpu(true);
            }
            self.room.grow(&mut member.room);
            if self.scratch.staging.len() < member.room.staging.len() {
                std::mem::swap(&mut self.scratch.staging, &mut member.room.staging);
            }
            let key = member.key;
            // Keys are used once.
            if let Err(at) = self.room.find(key) {
                self.room.members.insert(at, member);
                self.room.activate(key);
            }
        }
        self.joining = joining;
    }

    fn leave(&mut self, key: u64) -> Option<Member> {
        let at = self.room.find(key).ok()?;
        let mut left = self.room.members.remove(at);
        left.reader.leave(&self.shared.set);
        self.room.active.retain(|&active| active != key);
        self.room.timed.retain(|&timed| timed != key);
        if caught(|| left.reader.finish(&mut self.scratch)).is_none() {
            self.renew_scratch();
        }
        Some(left)
    }

    /// Makes new room for answers, after a panic that may have left the old one with a reader.
    fn renew_scratch(&mut self) {
        let rooms = self.room.members.iter().map(|member| member.reader.room());
        let staging = rooms.max().unwrap_or(0).max(STAGING);
        discard(std::mem::replace(&mut self.scratch, Scratch::new(staging)));
    }

    /// Steps the active readers once. Returns whether any had something to do.
    fn step_active(&mut self) -> bool {
        let mut is_busy = false;
        let mut at = 0;
        let has_company = self.room.members.len() > 1;
        while let Some(&key) = self.room.active.get(at) {
            let Ok(member) = self.room.find(key) else {
                self.room.active.swap_remove(at);
                continue;
            };
            let reader = &mut self.room.members[member].reader;
            let was_polled_by_timer = reader.is_polled_by_timer();
            reader.set_company(has_company);
            let submit = Submit { filler: &self.inbox, key };
            let Some(was_busy) = caught(|| reader.step(&mut self.scratch, &submit)) else {
                reader.fail();
                self.renew_scratch();
                is_busy = true;
                // The other readers first, should it panic again.
                at += 1;
                continue;
            };
            if was_busy {
                is_busy = true;
                if reader.is_idle() {
                    reader.is_active = false;
                    self.room.active.swap_remove(at);
                } else {
                    at += 1;
                }
            } else if reader.wants_poll() {
                at += 1;
            } else {
                reader.is_active = false;
                self.room.active.swap_remove(at);
            }
            if reader.is_polled_by_timer() && !was_polled_by_timer {
                // It would be returned by every wait.
                reader.leave(&self.shared.set);
            } else if was_polled_by_timer && !reader.is_polled_by_timer() {
                // If it cannot be waited for, it is looked at by the clock.
                reader.poll_failed = reader.join(&self.shared.set, key).is_err();
            }
            self.room.note_timer(key);
        }
        is_busy
    }

    /// Returns when deferred work is due, and forgets the mappings without any.
    fn next_due(&mut self) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        let members = &mut self.room.members;
        self.room.timed.retain(|key| {
            let Ok(at) = members.binary_search_by_key(key, |member| member.key) else {
                return false;
            };
            let reader = &mut members[at].reader;
            let due = reader.due();
            reader.is_timed = due.is_some();
            next = [next, due].into_iter().flatten().min();
            due.is_some()
        });
        next
    }

    /// Waits for any reader, and makes those active that have something to read or are due.
    fn wait(&mut self, timeout: Option<Duration>) {
        let sleeps = timeout != Some(Duration::ZERO);
        if sleeps {
            self.inbox.sleeps(true);
        }
        if self.shared.set.wait(&mut self.ready, timeout).is_err() {
            std::thread::sleep(RETRY);
        }
        if sleeps {
            self.inbox.sleeps(false);
        }
        for at in 0..self.ready.len() {
            let key = self.ready[at];
            if key == BELL {
                self.inbox.rang();
            } else {
                self.room.activate(key);
            }
        }
        if self.room.timed.is_empty() {
            return;
        }
        let now = Instant::now();
        for at in 0..self.room.timed.len() {
            let key = self.room.timed[at];
            let due = self.room.reader(key).and_then(|reader| reader.due());
            if due.is_some_and(|due| due <= now) {
                self.room.activate(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::ops::Range;
    use std::sync::atomic::AtomicBool;

    use uzone_os::uffd::{Answered, Features, KernelFaults, Modes, Registered, Uffd, UffdError};
    use uzone_os::{Anonymous, Mapping, sigbus};
    use uzone_pages::{ByteLen, Content};
    use uzone_zone::{PagemapOps, Zone};

    use super::*;
    use crate::backing::ZeroBacking;
    use crate::engine::core::Core;
    use crate::engine::io_pool::IoPool;
    use crate::engine::mapping_reader::Sources;
    use crate::engine::pending::Awaited;
    use crate::memory::kernel::{Fill, Kernel};
    use crate::memory::own::OwnMemory;
    use crate::options::LazyOptions;
    use crate::pages::states::PageStates;
    use crate::tests::{skip, userfaultfd};

    /// A kernel that panics when it is to wake a thread, once.
    struct Panicking(Arc<OwnMemory>, AtomicBool);

    impl Kernel for Panicking {
        fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError> {
            self.0.install(range, fill)
        }

        fn wake(&self, range: Range<u64>) {
            if self.1.swap(false, Ordering::Relaxed) {
                // Without the hook that prints where.
                std::panic::resume_unwind(Box::new("as the test wants"));
            }
            self.0.wake(range);
        }
    }

    /// Returns whether faults can be answered and the signal of a bad page is an error, or prints that they cannot.
    fn recovers(name: &str) -> bool {
        let can = sigbus::recovers_copies() && sigbus::install().is_ok();
        if !can {
            skip(name, "no recovery from SIGBUS");
        }
        can && userfaultfd(name, Features::POISON, KernelFaults::IfAllowed).is_some()
    }

    /// A page that no window of a page near the start of the memory reaches.
    const FAR: u64 = 900;

    /// Lets `event_loop` answer the faults of new memory of zeroes.
    fn map(
        event_loop: &Arc<EventLoop>,
        panics: bool,
        deadline: Option<Duration>,
    ) -> (Arc<Registered>, Arc<Core>, Attached) {
        let page = uzone_os::probe::page_size();
        let mapping = Mapping::anonymous(ByteLen::mib(4), Anonymous::default()).unwrap();
        let uffd = Uffd::open(Features::POISON, Features::NONE, KernelFaults::IfAllowed).unwrap();
        let memory = Arc::new(Registered::new(Arc::new(uffd), mapping, Modes::MISSING).unwrap());
        let lent = Mapping::lent(memory.clone());
        let contents = PageStates::bind(&Zone::new(), lent, page, PagemapOps::default()).unwrap();
        let areas = [contents.fault_area(memory.mapping().addr().get() as u64)];
        let own = OwnMemory { registered: memory.clone(), tracker: None, handover: None };
        let own = Arc::new(own);
        let kernel = Arc::new(Panicking(own.clone(), AtomicBool::new(panics)));
        let options = LazyOptions::default().deadline(deadline);
        let core = Arc::new(Core::new(kernel, Arc::new(ZeroBacking), contents, &areas, &options));
        let (sources, pool) = (Sources::default(), IoPool::start(NonZeroUsize::MIN).unwrap());
        let reader = MappingReader::new(own, core.clone(), sources, &Arc::new(pool), &options);
        let attached = event_loop.join(reader).unwrap();
        (memory, core, attached)
    }

    #[test]
    fn a_reader_that_panics_fails_its_mapping_and_answers_the_others() {
        let name = "a_reader_that_panics_fails_its_mapping_and_answers_the_others";
        if !recovers(name) {
            return;
        }
        let event_loop = Arc::new(EventLoop::start("uzone-fault-test").unwrap());
        let (memory, core, attached) = map(&event_loop, true, None);
        let (other, other_core, other_attached) = map(&event_loop, false, None);
        let page = core.page_size().bytes();
        memory.mapping().read_at(page, &mut [1]).unwrap();
        // The page counts as present and is not, so its waiter is woken. It is no neighbour of page 1.
        assert!(core.contents().claim(FAR));
        assert!(core.contents().advance(FAR, Content::Filling, Content::Present));
        assert!(!core.has_failed());
        memory.mapping().read_at(FAR * page, &mut [1]).unwrap_err();
        assert!(core.has_failed());
        assert!(core.recorder.last_failure().unwrap().reason.contains("panicked"));
        // Present pages stay, and missing pages are bad.
        memory.mapping().read_at(page, &mut [1]).unwrap();
        memory.mapping().read_at((FAR + 20) * page, &mut [1]).unwrap_err();
        for at in 0..16 {
            let mut seen = [1];
            other.mapping().read_at(at * page, &mut seen).unwrap();
            assert_eq!(seen, [0]);
        }
        assert!(!other_core.has_failed());
        drop((attached, other_attached));
    }

    #[test]
    fn a_bell_that_rings_after_its_message_was_taken_is_silenced() {
        let event_loop = EventLoop::start("uzone-fault-test").unwrap();
        let (set, mut ready) = (EventSet::new().unwrap(), Vec::new());
        set.add(&event_loop.inbox().bell, BELL).unwrap();
        event_loop.inbox().bell.ring().unwrap();
        let since = Instant::now();
        loop {
            set.wait(&mut ready, Some(Duration::ZERO)).unwrap();
            if ready.is_empty() {
                break;
            }
            assert!(since.elapsed() < Duration::from_secs(30), "the loop never sleeps again");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_failed_mapping_still_gives_up_pages_at_their_deadline_and_its_reader_sleeps() {
        let name = "a_failed_mapping_still_gives_up_pages_at_their_deadline";
        if !recovers(name) {
            return;
        }
        let event_loop = Arc::new(EventLoop::start("uzone-fault-test").unwrap());
        let (memory, core, attached) = map(&event_loop, true, Some(Duration::from_millis(5)));
        let page = core.page_size().bytes();
        assert!(core.contents().claim(3));
        assert!(core.contents().advance(3, Content::Filling, Content::Present));
        memory.mapping().read_at(3 * page, &mut [1]).unwrap_err();
        assert!(core.has_failed());
        // A thread that pins page 9 produces it, and its backing never returns.
        assert!(core.contents().claim(9));
        let since = Instant::now();
        assert!(core.pending.push(Awaited { page: 9, since, fault: None, is_produced: false }));
        // A fault, after which the reader looks at the deadlines.
        memory.mapping().read_at(5 * page, &mut [1]).unwrap_err();
        while core.contents().get(9) != Content::Poisoned {
            assert!(since.elapsed() < Duration::from_secs(30), "page 9 was not given up");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(core.pending.oldest(), None, "the reader has nothing to wake up for");
        drop(attached);
    }
}

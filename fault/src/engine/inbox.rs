//! How other threads reach a thread that answers faults: [`Inbox`], and the list in which it takes values from them,
//! [`Mailbox`].
//!
//! A thread that a signal handler interrupted inside the allocator may wait for a page. So a thread that answers faults
//! neither allocates nor frees, and no lock that it takes is held while memory is allocated.
//!
//! Locks: one for each list, held for a push or to take all.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use uzone_os::signals::lock_uninterrupted;
use uzone_os::uffd::Doorbell;

use crate::engine::staged::Staged;
use crate::memory::prefetch::Group;

/// How long to wait where ringing failed.
const RETRY: Duration = Duration::from_millis(1);
/// How often a failing ring of the bell is repeated before the message waits for the next one.
const RINGS: u32 = 1000;

/// The room of a list that had none.
const SMALLEST: usize = 16;

/// A list that any thread pushes to and one thread takes whole. The pushing threads allocate its memory.
pub(crate) struct Mailbox<T>(Mutex<Vec<T>>);

impl<T> Mailbox<T> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Vec::with_capacity(SMALLEST)))
    }

    /// Makes room for so many values. Pushes up to there allocate nothing.
    pub(crate) fn reserve(&self, values: usize) {
        let mut list = lock_uninterrupted(&self.0);
        while list.capacity() < values {
            drop(list);
            let mut larger = Vec::with_capacity(values.next_power_of_two());
            list = lock_uninterrupted(&self.0);
            if list.capacity() < larger.capacity() {
                larger.append(&mut list);
                std::mem::swap(&mut larger, &mut list);
            }
            drop(list);
            // Freed without the lock.
            drop(larger);
            list = lock_uninterrupted(&self.0);
        }
    }

    pub(crate) fn push(&self, value: T) {
        loop {
            let mut list = lock_uninterrupted(&self.0);
            let room = list.capacity();
            if list.len() < room {
                return list.push(value);
            }
            drop(list);
            self.reserve(2 * room.max(SMALLEST));
        }
    }

    /// Exchanges the list for an empty one.
    pub(crate) fn take(&self, empty: &mut Vec<T>) {
        std::mem::swap(&mut *lock_uninterrupted(&self.0), empty);
    }

    /// Takes the first value that `is_wanted`.
    pub(crate) fn take_first(&self, is_wanted: impl FnMut(&T) -> bool) -> Option<T> {
        let mut list = lock_uninterrupted(&self.0);
        let at = list.iter().position(is_wanted)?;
        Some(list.swap_remove(at))
    }
}

/// A message to a loop, about the mapping with a key.
pub(crate) enum Message {
    /// There are joining readers.
    Join,
    /// `is_awaited` is whether the sender waits for the reader, to drop it.
    Leave {
        key: u64,
        is_awaited: bool,
    },
    Install {
        key: u64,
        page: u64,
        staged: Staged,
    },
    Prefetch {
        key: u64,
        group: Group,
    },
    Stop,
}

/// How a loop is reached.
pub(crate) struct Inbox {
    messages: Mailbox<Message>,
    /// Whether there is something in it, or was a moment ago.
    called: AtomicBool,
    /// Whether the loop waits, and there is no message for it.
    sleeps: AtomicBool,
    /// The thread of the loop, by the number that the kernel gives it.
    thread: AtomicU32,
    pub(crate) bell: Doorbell,
}

impl Inbox {
    pub(crate) fn new() -> io::Result<Self> {
        let (messages, called) = (Mailbox::new(), AtomicBool::new(false));
        let (sleeps, thread) = (AtomicBool::new(false), AtomicU32::new(0));
        Ok(Self { messages, called, sleeps, thread, bell: Doorbell::new()? })
    }

    /// Notes that the calling thread is that of the loop.
    pub(crate) fn belongs_here(&self) {
        // Release pairs with the Acquire of `is_running`.
        self.thread.store(uzone_os::thread_id(), Ordering::Release);
    }

    /// Notes whether the loop is about to wait, or has waited.
    pub(crate) fn sleeps(&self, sleeps: bool) {
        // SeqCst, with those of `exit`.
        self.sleeps.store(sleeps, Ordering::SeqCst);
        if sleeps && self.is_called() {
            self.sleeps.store(false, Ordering::SeqCst);
        }
    }

    /// Returns whether the thread of the loop runs.
    pub(crate) fn is_running(&self) -> bool {
        self.thread.load(Ordering::Acquire) != 0
    }

    /// Returns whether the loop has nothing to do, or is that thread.
    pub(crate) fn is_quiet(&self, thread: u32) -> bool {
        self.sleeps.load(Ordering::SeqCst) || self.thread.load(Ordering::Relaxed) == thread
    }

    /// Returns whether there may be messages.
    pub(crate) fn is_called(&self) -> bool {
        // Acquire pairs with the Release of `send`.
        self.called.load(Ordering::Acquire)
    }

    /// Notes that the bell rang. A message can be taken before its sender rings: the bell is silenced even so.
    pub(crate) fn rang(&self) {
        // Relaxed: this thread reads it next.
        self.called.store(true, Ordering::Relaxed);
    }

    /// Exchanges the messages for an empty list.
    pub(crate) fn take(&self, empty: &mut Vec<Message>) {
        // In this order: a thread that sends after the swap rings again.
        let _ = self.bell.silence();
        self.called.swap(false, Ordering::AcqRel);
        self.messages.take(empty);
    }

    /// Sends a message to the loop. Returns whether the loop was woken; if not, the next message wakes it.
    pub(crate) fn send(&self, message: Message) -> bool {
        self.messages.push(message);
        // Release pairs with the Acquire of the loop: it sees the message.
        let was_called = self.called.swap(true, Ordering::Release);
        // After that: a loop that notes its sleep meanwhile looks at the message afterwards.
        self.sleeps.store(false, Ordering::SeqCst);
        if was_called {
            return true; // it was rung for, and not silenced since
        }
        for _ in 0..RINGS {
            match self.bell.ring() {
                Ok(()) => return true,
                Err(_) => std::thread::sleep(RETRY),
            }
        }
        tracing::error!(
            "a thread that answers faults cannot be reached: its eventfd takes no write"
        );
        // The next message rings again. Relaxed: that thread pushes under the lock, as this one did.
        self.called.store(false, Ordering::Relaxed);
        false
    }
}

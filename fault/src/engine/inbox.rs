//! How the threads that produce pages reach the thread that installs them: [`Inbox`].
//!
//! Locks: one, for the messages, held for a push or to take all.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use uzone_os::signals::lock_uninterrupted;
use uzone_os::uffd::Doorbell;

use crate::engine::staged::Staged;
use crate::memory::prefetch::Group;

/// How long to wait where ringing failed.
const RETRY: Duration = Duration::from_millis(1);
/// How often a failing ring of the bell is repeated before the message waits for the next one.
const RINGS: u32 = 1000;

/// A message to a loop, about the mapping with a key. A reader that joins is in the list of joining readers.
pub(crate) enum Message {
    Join { key: u64 },
    Leave { key: u64, done: SyncSender<()> },
    Install { key: u64, page: u64, staged: Staged },
    Prefetch { key: u64, group: Group },
    Stop,
}

/// How a loop is reached.
pub(crate) struct Inbox {
    messages: Mutex<Vec<Message>>,
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
        let (messages, called) = (Mutex::default(), AtomicBool::new(false));
        let (sleeps, thread) = (AtomicBool::new(false), AtomicU32::new(0));
        Ok(Self { messages, called, sleeps, thread, bell: Doorbell::new()? })
    }

    /// Notes that the calling thread is that of the loop.
    pub(crate) fn belongs_here(&self) {
        self.thread.store(uzone_os::thread_id(), Ordering::Relaxed);
    }

    /// Notes whether the loop is about to wait, or has waited.
    pub(crate) fn sleeps(&self, sleeps: bool) {
        // SeqCst, with those of `exit`.
        self.sleeps.store(sleeps, Ordering::SeqCst);
        if sleeps && self.is_called() {
            self.sleeps.store(false, Ordering::SeqCst);
        }
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

    /// Takes the messages.
    pub(crate) fn take(&self) -> Vec<Message> {
        // In this order: a thread that sends after the swap rings again.
        let _ = self.bell.silence();
        self.called.swap(false, Ordering::AcqRel);
        std::mem::take(&mut *lock_uninterrupted(&self.messages))
    }

    /// Sends a message to the loop. Returns whether the loop was woken; if not, the next message wakes it.
    pub(crate) fn send(&self, message: Message) -> bool {
        lock_uninterrupted(&self.messages).push(message);
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

//! Reading the messages of a userfaultfd: [`EventBuffer`].
//!
//! Messages are read many at a time into a buffer that is made once; taking them apart allocates nothing.
//! The kernel gives pending faults out before other events, so a fault can be read before a removal that is
//! older than it. A server that must not show removed pages reads until
//! [`Uffd::read`](crate::uffd::Uffd::read) returns that nothing is pending, applies the removals, and only
//! then answers. A thread that reads the events of its own process allocates nothing until it has answered:
//! a thread that forks or gives memory back may hold the allocator's locks while it waits for its event to
//! be read.
//!
//! Unsafe: read(2) into words, which another process may read too ([`EventLog`]).
//! Source: ioctl_userfaultfd(2), `struct uffd_msg`.

use core::sync::atomic::{AtomicU64, Ordering};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;

use crate::uffd::log::EventLog;
use crate::uffd::message::{Event, MESSAGE, PAGEFAULT, WORDS, parse};
use crate::uffd::remote::Remote;

/// The memory that messages are read into.
#[derive(Debug)]
enum Room {
    Own(Box<[AtomicU64]>),
    Log(EventLog),
}

/// Room for messages, made once and used for every read.
///
/// # Invariants
/// The messages from `next` up to `filled` were written by the kernel, which was read from a
/// userfaultfd, and none of them has been taken. Only this buffer writes to its room (by the invariant of
/// [`EventLog`], where that is one).
#[derive(Debug)]
pub struct EventBuffer {
    room: Room,
    next: usize,
    filled: usize,
}

impl EventBuffer {
    /// Makes room for `messages`, at least one.
    #[must_use]
    pub fn new(messages: usize) -> Self {
        let words = (0..messages.max(1) * WORDS).map(|_| AtomicU64::new(0)).collect();
        Self { room: Room::Own(words), next: 0, filled: 0 }
    }

    /// Reads into a log, which keeps the messages of a read until the next. Their effects must have been marked by then.
    #[must_use]
    pub fn logged(log: EventLog) -> Self {
        Self { room: Room::Log(log), next: 0, filled: 0 }
    }

    /// Returns the log, if it reads into one.
    #[must_use]
    pub fn log(&self) -> Option<&EventLog> {
        match &self.room {
            Room::Own(_) => None,
            Room::Log(log) => Some(log),
        }
    }

    /// Returns whether one of the messages that were not taken is no page fault.
    #[must_use]
    pub fn has_other_than_faults(&self) -> bool {
        let left = self.words().chunks_exact(WORDS).take(self.filled).skip(self.next);
        // Relaxed: only this buffer writes to its room.
        left.into_iter()
            .any(|message| message[0].load(Ordering::Relaxed).to_ne_bytes()[0] != PAGEFAULT)
    }

    fn words(&self) -> &[AtomicU64] {
        match &self.room {
            Room::Own(words) => words,
            Room::Log(log) => log.slots(),
        }
    }

    /// Returns the most messages that a read takes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.words().len() / WORDS
    }

    /// Reads pending messages, at most `most` of them. The untaken messages of the read before are dropped. `fd` is a
    /// userfaultfd. Returns the number of messages in the buffer.
    pub(crate) fn fill(&mut self, fd: BorrowedFd<'_>, most: usize) -> io::Result<usize> {
        for message in self.words().chunks_exact(WORDS).take(self.filled) {
            // No successor takes an event for one of the next read.
            message[0].store(0, Ordering::Relaxed);
        }
        (self.next, self.filled) = (0, 0);
        let words = self.words();
        let words = &words[..most.saturating_mul(WORDS).min(words.len())];
        if words.is_empty() {
            return Ok(0);
        }
        let read = loop {
            // SAFETY: read(2) writes at most the length of the words to where they start; they live over the
            // call, and as atomics they may be written through a shared reference.
            let read = unsafe {
                libc::read(fd.as_raw_fd(), words.as_ptr().cast_mut().cast(), size_of_val(words))
            };
            let cause = match usize::try_from(read) {
                Ok(read) => break read,
                Err(_) => io::Error::last_os_error(),
            };
            match Errno::from_io_error(&cause) {
                Some(Errno::AGAIN) => break 0,
                Some(Errno::INTR) => {}
                _ => return Err(cause),
            }
        };
        self.filled = read / MESSAGE;
        Ok(self.filled)
    }
}

impl Remote {
    /// Reads pending events into `buffer`, as many as there is room for. Returns their number;
    /// zero means that nothing was pending.
    ///
    /// # Errors
    /// The error of read(2).
    pub fn read(&self, buffer: &mut EventBuffer) -> io::Result<usize> {
        self.read_most(buffer, usize::MAX)
    }

    /// Reads as [`Remote::read`] does, and `most` events at most. The kernel gives page faults out before
    /// other events: of as many as there are pending faults
    /// ([`pending_faults`](fn@crate::uffd::pending_faults)), none is of another kind.
    ///
    /// # Errors
    /// The error of read(2).
    pub fn read_most(&self, buffer: &mut EventBuffer, most: usize) -> io::Result<usize> {
        buffer.fill(self.as_fd(), most)
    }
}

impl Iterator for EventBuffer {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        if self.next == self.filled {
            return None;
        }
        let words = self.words().get(self.next * WORDS..)?.get(..WORDS)?;
        let mut message = [0; MESSAGE];
        for (bytes, word) in message.chunks_exact_mut(size_of::<u64>()).zip(words) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        self.next += 1;
        Some(parse(&message))
    }
}

//! Reading what a userfaultfd tells: [`EventBuffer`], [`Event`], [`PageFault`].
//!
//! Messages are read many at a time into a buffer that is made once; taking them apart allocates nothing.
//! The kernel gives pending faults out before other events, so a fault can be read before a removal that is
//! older than it. A server that must not show removed pages reads until
//! [`Uffd::read`](crate::uffd::Uffd::read) returns that nothing is pending, applies the removals, and only
//! then answers. A thread that reads the events of its own process allocates nothing until it has answered:
//! a thread that forks or gives memory back may hold the allocator's locks while it waits for its event to
//! be read.
//!
//! Unsafe: read(2) into words, which another process may read too ([`EventLog`]); and an event of a fork
//! brings a new descriptor, of which an owner is made.
//! Source: ioctl_userfaultfd(2), `struct uffd_msg`.

use core::num::NonZeroU32;
use core::sync::atomic::{AtomicU64, Ordering};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::errno;
use crate::options::Vaddr;
use crate::uffd::log::{EventLog, WORDS};
use crate::uffd::remote::Remote;

/// The length of a message.
pub(crate) const MESSAGE: usize = 32;
const _: () = assert!(MESSAGE == size_of::<linux_raw_sys::general::uffd_msg>());

/// `UFFD_EVENT_*`.
const PAGEFAULT: u8 = 0x12;
const FORK: u8 = 0x13;
const REMAP: u8 = 0x14;
const REMOVE: u8 = 0x15;
const UNMAP: u8 = 0x16;
const _: () = assert!(PAGEFAULT as u32 == linux_raw_sys::general::UFFD_EVENT_PAGEFAULT);
const _: () = assert!(FORK as u32 == linux_raw_sys::general::UFFD_EVENT_FORK);
const _: () = assert!(REMAP as u32 == linux_raw_sys::general::UFFD_EVENT_REMAP);
const _: () = assert!(REMOVE as u32 == linux_raw_sys::general::UFFD_EVENT_REMOVE);
const _: () = assert!(UNMAP as u32 == linux_raw_sys::general::UFFD_EVENT_UNMAP);

/// `UFFD_PAGEFAULT_FLAG_*`.
const FLAG_WRITE: u64 = 1;
const FLAG_WP: u64 = 1 << 1;
const FLAG_MINOR: u64 = 1 << 2;

/// The kinds of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// There is no page.
    Missing,
    /// The page cache has the page, and it is not mapped.
    Minor,
    /// The page is protected against the write.
    WriteProtect,
}

/// A thread that waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// What it touched: the start of the page, or the byte with
    /// [`Features::EXACT_ADDRESS`](crate::uffd::Features::EXACT_ADDRESS).
    pub address: Vaddr,
    /// What is missing.
    pub kind: FaultKind,
    /// Whether it writes.
    pub is_write: bool,
    /// Which thread, where [`Features::THREAD_ID`](crate::uffd::Features::THREAD_ID) was asked for.
    pub thread: Option<NonZeroU32>,
}

/// What a userfaultfd tells.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A thread waits for a page.
    PageFault(PageFault),
    /// The pages from `start` up to `end` are being given back. The thread that does so goes on
    /// when this event has been read.
    Removed {
        /// The first address.
        start: Vaddr,
        /// The address behind the last.
        end: Vaddr,
    },
    /// The addresses from `start` up to `end` are unmapped.
    Unmapped {
        /// The first address.
        start: Vaddr,
        /// The address behind the last.
        end: Vaddr,
    },
    /// The memory at `from` has moved.
    Moved {
        /// Where it was.
        from: Vaddr,
        /// Where it is.
        to: Vaddr,
        /// How long it is.
        len_bytes: u64,
    },
    /// The process forked: this is the userfaultfd of the child.
    Forked(Remote),
    /// Something that a newer kernel tells.
    Unknown {
        /// The number of the event.
        number: u8,
    },
}

/// Where messages are read to.
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

    /// Reads into a log, which keeps the messages of a read until the next. What they mean must have been
    /// marked by then.
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

    /// Returns how many messages a read takes at most.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.words().len() / WORDS
    }

    /// Reads what is pending, `most` messages of it, in place of what was read before, of which the untaken is
    /// dropped. `fd` is a userfaultfd. Returns how many messages there are now.
    pub(crate) fn fill(&mut self, fd: BorrowedFd<'_>, most: usize) -> io::Result<usize> {
        // Unread events of children have descriptors, which would stay open.
        self.by_ref().for_each(drop);
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
            match rustix::io::Errno::from_io_error(&cause) {
                Some(errno) if errno::would_wait(errno) => break 0,
                Some(errno) if errno::is_interrupted(errno) => {}
                _ => return Err(cause),
            }
        };
        self.filled = read / MESSAGE;
        Ok(self.filled)
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
        Some(match parse(&message) {
            Parsed::Event(event) => event,
            Parsed::Child(fd) => {
                // SAFETY: `from_raw_fd` wants an open descriptor that nothing else closes. The kernel
                // opened it in this process when the message was read (the invariant of the buffer, which
                // only `fill` fills, from a userfaultfd), and each message is taken once.
                Event::Forked(Remote::of_child(unsafe { OwnedFd::from_raw_fd(fd) }))
            }
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.filled - self.next;
        (left, Some(left))
    }
}

impl ExactSizeIterator for EventBuffer {}

impl Drop for EventBuffer {
    fn drop(&mut self) {
        self.by_ref().for_each(drop);
    }
}

/// A message taken apart, before an owner is made of a descriptor.
#[derive(Debug)]
pub(crate) enum Parsed {
    Event(Event),
    Child(RawFd),
}

/// Takes a message apart: the event in its first byte, and three numbers from byte 8 on.
pub(crate) fn parse(message: &[u8; MESSAGE]) -> Parsed {
    let (words, _) = message.as_chunks::<8>();
    let word = |index: usize| u64::from_ne_bytes(words[index]);
    let half = |at: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&message[at..at + 4]);
        u32::from_ne_bytes(bytes)
    };
    Parsed::Event(match message[0] {
        PAGEFAULT => {
            let flags = word(1);
            Event::PageFault(PageFault {
                address: Vaddr::new(word(2)),
                kind: match (flags & FLAG_WP != 0, flags & FLAG_MINOR != 0) {
                    (true, _) => FaultKind::WriteProtect,
                    (false, true) => FaultKind::Minor,
                    (false, false) => FaultKind::Missing,
                },
                is_write: flags & FLAG_WRITE != 0,
                thread: NonZeroU32::new(half(24)),
            })
        }
        FORK => return Parsed::Child(half(8).cast_signed()),
        REMAP => {
            Event::Moved { from: Vaddr::new(word(1)), to: Vaddr::new(word(2)), len_bytes: word(3) }
        }
        REMOVE => Event::Removed { start: Vaddr::new(word(1)), end: Vaddr::new(word(2)) },
        UNMAP => Event::Unmapped { start: Vaddr::new(word(1)), end: Vaddr::new(word(2)) },
        number => Event::Unknown { number },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(event: u8, words: [u64; 3]) -> [u8; MESSAGE] {
        let mut bytes = [0; MESSAGE];
        bytes[0] = event;
        for (at, word) in words.into_iter().enumerate() {
            bytes[8 + at * 8..16 + at * 8].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    #[test]
    fn every_message_has_its_event() {
        for (flags, kind, is_write) in [
            (0, FaultKind::Missing, false),
            (1, FaultKind::Missing, true),
            (3, FaultKind::WriteProtect, true),
            (4, FaultKind::Minor, false),
            (5, FaultKind::Minor, true),
        ] {
            let bytes = message(PAGEFAULT, [flags, 0x7000, 77]);
            let Parsed::Event(Event::PageFault(fault)) = parse(&bytes) else {
                panic!("no fault");
            };
            let thread = NonZeroU32::new(77);
            assert_eq!(fault, PageFault { address: Vaddr::new(0x7000), kind, is_write, thread });
        }
        assert!(matches!(
            parse(&message(REMOVE, [1, 2, 0])),
            Parsed::Event(Event::Removed { start, end }) if (start.get(), end.get()) == (1, 2)
        ));
        assert!(matches!(
            parse(&message(UNMAP, [1, 2, 0])),
            Parsed::Event(Event::Unmapped { start, end }) if (start.get(), end.get()) == (1, 2)
        ));
        assert!(matches!(
            parse(&message(REMAP, [1, 2, 3])),
            Parsed::Event(Event::Moved { from, to, len_bytes: 3 }) if (from.get(), to.get()) == (1, 2)
        ));
        assert!(matches!(parse(&message(FORK, [9, 0, 0])), Parsed::Child(9)));
        assert!(matches!(
            parse(&message(0x55, [0; 3])),
            Parsed::Event(Event::Unknown { number: 0x55 })
        ));
    }
}

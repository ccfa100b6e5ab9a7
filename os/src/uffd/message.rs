//! What a userfaultfd tells: [`Event`], [`PageFault`], and the messages that they come in.
//!
//! Source: ioctl_userfaultfd(2), `struct uffd_msg`.

use core::num::NonZeroU32;
use std::os::fd::RawFd;

use crate::map::options::Vaddr;
use crate::uffd::remote::Remote;

/// The length of a message.
pub(crate) const MESSAGE: usize = 32;
/// How many words it has.
pub(crate) const WORDS: usize = MESSAGE / size_of::<u64>();
const _: () = assert!(MESSAGE == size_of::<linux_raw_sys::general::uffd_msg>());

/// `UFFD_EVENT_*`.
pub(crate) const PAGEFAULT: u8 = 0x12;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
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
    /// What it touched: the start of the page, or the byte with `UFFD_FEATURE_EXACT_ADDRESS`.
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

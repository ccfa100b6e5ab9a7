//! The messages of a userfaultfd: [`Event`], [`PageFault`], and their form.
//!
//! Source: ioctl_userfaultfd(2), `struct uffd_msg`.

use core::num::NonZeroU32;

use crate::map::options::Vaddr;

/// The length of a message.
pub(crate) const MESSAGE: usize = 32;
/// The number of words that it has.
pub(crate) const WORDS: usize = MESSAGE / size_of::<u64>();
const _: () = assert!(MESSAGE == size_of::<linux_raw_sys::general::uffd_msg>());

/// `UFFD_EVENT_*`.
pub(crate) const PAGEFAULT: u8 = 0x12;
const REMOVE: u8 = 0x15;
const UNMAP: u8 = 0x16;
const _: () = assert!(PAGEFAULT as u32 == linux_raw_sys::general::UFFD_EVENT_PAGEFAULT);
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
    /// The touched address: the start of the page, or the byte with `UFFD_FEATURE_EXACT_ADDRESS`.
    pub address: Vaddr,
    /// The kind of the fault.
    pub kind: FaultKind,
    /// Whether it writes.
    pub is_write: bool,
    /// The thread, where [`Features::THREAD_ID`](crate::uffd::Features::THREAD_ID) was asked for.
    pub thread: Option<NonZeroU32>,
}

/// A message of a userfaultfd.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A thread waits for a page.
    PageFault(PageFault),
    /// The pages from `start` up to `end` are being given back or unmapped. The thread that does so
    /// goes on when this event has been read.
    Removed {
        /// The first address.
        start: Vaddr,
        /// The address behind the last.
        end: Vaddr,
    },
    /// Memory that has moved, or an event of a newer kernel.
    Unknown {
        /// The number of the event.
        number: u8,
    },
}

/// Takes a message apart: the event in its first byte, and three numbers from byte 8 on.
pub(crate) fn parse(message: &[u8; MESSAGE]) -> Event {
    let (words, _) = message.as_chunks::<8>();
    let word = |index: usize| u64::from_ne_bytes(words[index]);
    let half = |at: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&message[at..at + 4]);
        u32::from_ne_bytes(bytes)
    };
    match message[0] {
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
        REMOVE | UNMAP => Event::Removed { start: Vaddr::new(word(1)), end: Vaddr::new(word(2)) },
        number => Event::Unknown { number },
    }
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
            let Event::PageFault(fault) = parse(&bytes) else {
                panic!("no fault");
            };
            let thread = NonZeroU32::new(77);
            assert_eq!(fault, PageFault { address: Vaddr::new(0x7000), kind, is_write, thread });
        }
        for event in [REMOVE, UNMAP] {
            assert!(matches!(
                parse(&message(event, [1, 2, 0])),
                Event::Removed { start, end } if (start.get(), end.get()) == (1, 2)
            ));
        }
        for number in [0x13, 0x14, 0x55] {
            let event = parse(&message(number, [1, 2, 3]));
            assert!(matches!(event, Event::Unknown { number: unknown } if unknown == number));
        }
    }
}

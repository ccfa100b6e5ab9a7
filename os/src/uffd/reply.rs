//! The meaning of the kernel's replies to the answers: one pure function, [`decode`].
//!
//! An answer to a fault (copy, zero, continue, poison) has two replies: the result of the
//! ioctl, and a signed field in its structure. The field is the number of bytes done, or a negated
//! errno, or was not written at all:
//!
//! | result | field | meaning |
//! |---|---|---|
//! | 0 | as many bytes as asked | all done |
//! | `EAGAIN` | some bytes | so many are done, and something stopped the rest |
//! | `EAGAIN` | 0 | nothing done: the layout changes. Before about Linux 6.15 |
//! | `EAGAIN` | `-EAGAIN` | the same, since; and from inside of the copy on any kernel |
//! | an errno | the same, negated, or 0 | nothing done, for that reason |
//!
//! Whatever else comes is a contradiction and counts as a failure, never as progress.
//! Source: ioctl_userfaultfd(2); the table was checked against Linux 6.18.

use std::io;

use rustix::io::Errno;
use uzone_pages::ErrorKind;

/// An ioctl of a userfaultfd, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum UffdCall {
    /// `UFFDIO_REGISTER`.
    Register,
    /// `UFFDIO_UNREGISTER`.
    Unregister,
    /// `UFFDIO_WAKE`.
    Wake,
    /// `UFFDIO_COPY`.
    Copy,
    /// `UFFDIO_ZEROPAGE`.
    ZeroPage,
    /// `UFFDIO_WRITEPROTECT`.
    WriteProtect = 6,
    /// `UFFDIO_CONTINUE`.
    Continue,
    /// `UFFDIO_POISON`.
    Poison,
}

/// The names of the calls, by their numbers, without `UFFDIO_`.
pub(crate) const CALLS: [&str; 9] = [
    "REGISTER",
    "UNREGISTER",
    "WAKE",
    "COPY",
    "ZEROPAGE",
    "MOVE",
    "WRITEPROTECT",
    "CONTINUE",
    "POISON",
];
const _: () = assert!(UffdCall::Poison as u32 == linux_raw_sys::general::_UFFDIO_POISON);

impl UffdCall {
    /// Returns the name, without `UFFDIO_`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        CALLS[self as usize]
    }
}

/// The effect of an answer that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "unfinished work must be done, or a thread waits for ever"]
pub enum Answered {
    /// Every page is installed, and its waiters are awake unless waking was left out.
    All,
    /// The first `bytes` are in place, and something stopped the rest: ask for it again, and the reply names the reason.
    Part {
        /// Their number; more than none, fewer than all.
        bytes: u64,
    },
    /// Nothing was done, and nothing is wrong: the layout of the process changes. Read the pending
    /// events, then ask again.
    LayoutChanging,
    /// The first page exists already. No thread was woken: wake the threads that wait for it.
    Present,
    /// The page cache does not have the first page (continue).
    Hole,
    /// The page is in use now: ask again.
    Busy,
    /// The memory at the address has stopped being registered with this userfaultfd.
    NotRegistered,
    /// The process whose memory it is has ended.
    Gone,
}

/// Returns the kind of failure of a refused answer, and the remedy.
pub(crate) fn explain(cause: &io::Error) -> (ErrorKind, &'static str) {
    let Some(errno) = Errno::from_io_error(cause) else {
        return (ErrorKind::Other, "the reply contradicts itself");
    };
    match errno {
        Errno::INVAL => (
            ErrorKind::InvalidInput,
            "the range cuts a page, or this memory does not take the request",
        ),
        Errno::FAULT => {
            (ErrorKind::Io, "the bytes cannot be read, or the page is behind the end of its file")
        }
        Errno::NOMEM => (ErrorKind::OutOfMemory, "the host or the cgroup is out of memory"),
        Errno::NOSPC => (ErrorKind::OutOfMemory, "the file system or the hugetlb pool is full"),
        Errno::IO | Errno::HWPOISON => {
            (ErrorKind::Poisoned, "the page in the page cache is broken")
        }
        Errno::PERM | Errno::ACCESS => {
            (ErrorKind::PermissionDenied, "the memory file is sealed or not open for writing")
        }
        Errno::NOTTY => (ErrorKind::NotSupported, "this kernel is too old for it"),
        _ => (ErrorKind::Other, "the kernel gave an unexpected reason"),
    }
}

/// Decodes a reply: the result of the ioctl `call`, its signed field where it has one, and the number of bytes that were
/// asked for. The error is the kernel's, or `None` if the reply contradicts itself, so that nothing is known about its
/// effect.
pub(crate) fn decode(
    call: UffdCall,
    result: Result<(), Errno>,
    count: Option<i64>,
    asked: u64,
) -> Result<Answered, Option<Errno>> {
    let Err(errno) = result else {
        return match count {
            None => Ok(Answered::All),
            Some(count) if u64::try_from(count) == Ok(asked) => Ok(Answered::All),
            Some(_) => Err(None),
        };
    };
    if let Some(count) = count
        && let Ok(bytes @ 1..) = u64::try_from(count)
    {
        // Only one result goes with progress, and it is never all of it.
        return match errno {
            Errno::AGAIN if bytes < asked => Ok(Answered::Part { bytes }),
            _ => Err(None),
        };
    }
    match (errno, call) {
        (Errno::AGAIN, _) => Ok(Answered::LayoutChanging),
        (Errno::EXIST, _) => Ok(Answered::Present),
        (Errno::SRCH, _) => Ok(Answered::Gone),
        (Errno::NOENT, _) => Ok(Answered::NotRegistered),
        (Errno::FAULT, UffdCall::Continue) => Ok(Answered::Hole),
        (Errno::BUSY, _) => Ok(Answered::Busy),
        _ => Err(Some(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTED: [UffdCall; 4] =
        [UffdCall::Copy, UffdCall::ZeroPage, UffdCall::Continue, UffdCall::Poison];

    #[test]
    fn a_count_is_progress_only_where_it_can_be() {
        for call in COUNTED {
            for (result, count, expected) in [
                (Ok(()), 8192, Ok(Answered::All)),
                (Ok(()), 4096, Err(None)),
                (Ok(()), 0, Err(None)),
                (Ok(()), -11, Err(None)),
                (Ok(()), 12288, Err(None)),
                (Err(Errno::AGAIN), 4096, Ok(Answered::Part { bytes: 4096 })),
                (Err(Errno::AGAIN), 8191, Ok(Answered::Part { bytes: 8191 })),
                (Err(Errno::AGAIN), 8192, Err(None)),
                (Err(Errno::AGAIN), i64::MAX, Err(None)),
                (Err(Errno::EXIST), 4096, Err(None)),
                (Err(Errno::FAULT), 1, Err(None)),
            ] {
                assert_eq!(
                    decode(call, result, Some(count), 8192),
                    expected,
                    "{call:?} {result:?} {count}"
                );
            }
        }
    }

    #[test]
    fn a_copy_that_moved_nothing_is_never_counted_as_progress() {
        for call in COUNTED {
            // The values of the field: before Linux 6.15, since then, and others that a kernel might leave.
            for count in [0, -11, -17, i64::MIN] {
                assert_eq!(
                    decode(call, Err(Errno::AGAIN), Some(count), 8192),
                    Ok(Answered::LayoutChanging),
                    "{call:?} {count}"
                );
            }
        }
    }

    #[test]
    fn every_errno_has_its_meaning_with_the_field_and_without() {
        use UffdCall::{Continue, Copy, Poison, WriteProtect, ZeroPage};
        for (call, errno, expected) in [
            (Copy, Errno::EXIST, Ok(Answered::Present)),
            (ZeroPage, Errno::EXIST, Ok(Answered::Present)),
            (Continue, Errno::EXIST, Ok(Answered::Present)),
            (Poison, Errno::EXIST, Ok(Answered::Present)),
            (Copy, Errno::NOENT, Ok(Answered::NotRegistered)),
            (WriteProtect, Errno::NOENT, Ok(Answered::NotRegistered)),
            (Copy, Errno::SRCH, Ok(Answered::Gone)),
            (Continue, Errno::SRCH, Ok(Answered::Gone)),
            (Copy, Errno::FAULT, Err(Some(Errno::FAULT))),
            (Continue, Errno::FAULT, Ok(Answered::Hole)),
            (Copy, Errno::BUSY, Ok(Answered::Busy)),
            (Copy, Errno::INVAL, Err(Some(Errno::INVAL))),
            (Copy, Errno::NOMEM, Err(Some(Errno::NOMEM))),
            (Copy, Errno::NOSPC, Err(Some(Errno::NOSPC))),
            (Continue, Errno::IO, Err(Some(Errno::IO))),
            (Continue, Errno::HWPOISON, Err(Some(Errno::HWPOISON))),
            (ZeroPage, Errno::PERM, Err(Some(Errno::PERM))),
            (Poison, Errno::NOTTY, Err(Some(Errno::NOTTY))),
            (Copy, Errno::PIPE, Err(Some(Errno::PIPE))),
        ] {
            let negated = -i64::from(errno.raw_os_error());
            for count in [Some(negated), Some(0), None] {
                assert_eq!(
                    decode(call, Err(errno), count, 4096),
                    expected,
                    "{call:?} {errno:?} {count:?}"
                );
            }
        }
    }

    #[test]
    fn a_refusal_has_a_kind_and_a_fix() {
        for (errno, kind, fix) in [
            (Errno::FAULT, ErrorKind::Io, "cannot be read"),
            (Errno::INVAL, ErrorKind::InvalidInput, "cuts a page"),
            (Errno::NOMEM, ErrorKind::OutOfMemory, "out of memory"),
            (Errno::NOSPC, ErrorKind::OutOfMemory, "is full"),
            (Errno::IO, ErrorKind::Poisoned, "is broken"),
            (Errno::HWPOISON, ErrorKind::Poisoned, "is broken"),
            (Errno::PERM, ErrorKind::PermissionDenied, "is sealed"),
            (Errno::ACCESS, ErrorKind::PermissionDenied, "is sealed"),
            (Errno::NOTTY, ErrorKind::NotSupported, "too old"),
            (Errno::PIPE, ErrorKind::Other, "unexpected reason"),
        ] {
            let (found, text) = explain(&errno.into());
            assert!(found == kind && text.contains(fix), "{errno:?}: {found:?}, {text}");
        }
        let (kind, text) = explain(&io::ErrorKind::InvalidData.into());
        assert_eq!((kind, text), (ErrorKind::Other, "the reply contradicts itself"));
    }

    #[test]
    fn a_request_without_a_count_is_done_or_not() {
        for call in [UffdCall::WriteProtect, UffdCall::Wake, UffdCall::Unregister] {
            assert_eq!(decode(call, Ok(()), None, 4096), Ok(Answered::All));
            assert_eq!(decode(call, Err(Errno::AGAIN), None, 4096), Ok(Answered::LayoutChanging));
            assert!(!call.name().is_empty());
        }
    }
}

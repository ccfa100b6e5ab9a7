//! What the kernel's replies to the answers mean: one pure function, [`decode`].
//!
//! An answer to a fault (copy, zero, continue, poison, move) has two replies: the result of the
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

use rustix::io::Errno;

/// An ioctl of a userfaultfd that answers faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UffdCall {
    /// `UFFDIO_COPY`.
    Copy,
    /// `UFFDIO_ZEROPAGE`.
    ZeroPage,
    /// `UFFDIO_CONTINUE`.
    Continue,
    /// `UFFDIO_POISON`.
    Poison,
    /// `UFFDIO_MOVE`.
    Move,
    /// `UFFDIO_WRITEPROTECT`.
    WriteProtect,
    /// `UFFDIO_WAKE`.
    Wake,
    /// `UFFDIO_REGISTER`.
    Register,
    /// `UFFDIO_UNREGISTER`.
    Unregister,
}

impl UffdCall {
    /// Returns the name, without `UFFDIO_`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Copy => "COPY",
            Self::ZeroPage => "ZEROPAGE",
            Self::Continue => "CONTINUE",
            Self::Poison => "POISON",
            Self::Move => "MOVE",
            Self::WriteProtect => "WRITEPROTECT",
            Self::Wake => "WAKE",
            Self::Register => "REGISTER",
            Self::Unregister => "UNREGISTER",
        }
    }
}

/// What the kernel did with an answer that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "what is not done has to be done, or a thread waits for ever"]
pub enum Answered {
    /// Every page is installed, and its waiters are awake unless waking was left out.
    All,
    /// The first `bytes` are in place, and something stopped the rest: ask for it again, and the
    /// reply will say what.
    Part {
        /// How many; more than none, fewer than all.
        bytes: u64,
    },
    /// Nothing was done, and nothing is wrong: the layout of the process changes. Read the pending
    /// events, then ask again.
    LayoutChanging,
    /// The first page exists already. No thread was woken: wake the threads that wait for it.
    Present,
    /// The page cache does not have the first page (continue), or the range to take pages from has
    /// none there (move).
    Hole,
    /// The page cannot be taken from where it is now: it is pinned or shared (move).
    Busy,
    /// No memory at the address is registered with this userfaultfd any more.
    NotRegistered,
    /// The process whose memory it is has ended.
    Gone,
}

/// Why an answer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refusal {
    /// The request cuts a page or a huge page, or this memory does not take the ioctl.
    Invalid,
    /// The bytes to copy cannot be read, or the page is behind the end of its file.
    Unreadable,
    /// There is no memory for the page.
    NoMemory,
    /// The file system or hugetlb pool behind the page is full.
    NoSpace,
    /// The page in the page cache is broken.
    BadPage,
    /// The memory may not be changed: its file is sealed, or open for reading alone.
    NotPermitted,
    /// This kernel does not know the ioctl.
    Unknown,
    /// The reply contradicts itself, so nothing is known about what was done.
    Contradiction {
        /// The signed field of the reply.
        count: i64,
    },
    /// Something else.
    Other,
}

impl Refusal {
    /// Returns what would help, for a message.
    pub(crate) const fn fix(self) -> &'static str {
        match self {
            Self::Invalid => "the range cuts a page, or this memory does not take the request",
            Self::Unreadable => {
                "the bytes cannot be read, or the page is behind the end of its file"
            }
            Self::NoMemory => "the host or the cgroup is out of memory",
            Self::NoSpace => "the file system or the hugetlb pool is full",
            Self::BadPage => "the page in the page cache is broken",
            Self::NotPermitted => "the memory file is sealed or not open for writing",
            Self::Unknown => "this kernel is too old for it",
            Self::Contradiction { .. } => "the reply contradicts itself",
            Self::Other => "the kernel gave no reason that is known here",
        }
    }
}

/// Decodes a reply: what the ioctl `call` returned, its signed field where it has one, and how many
/// bytes were asked for.
pub(crate) fn decode(
    call: UffdCall,
    result: Result<(), Errno>,
    count: Option<i64>,
    asked: u64,
) -> Result<Answered, Refusal> {
    let Err(errno) = result else {
        return match count {
            None => Ok(Answered::All),
            Some(count) if u64::try_from(count) == Ok(asked) => Ok(Answered::All),
            Some(count) => Err(Refusal::Contradiction { count }),
        };
    };
    if let Some(count) = count
        && let Ok(bytes @ 1..) = u64::try_from(count)
    {
        // Only one result goes with progress, and it is never all of it.
        return match errno {
            Errno::AGAIN if bytes < asked => Ok(Answered::Part { bytes }),
            _ => Err(Refusal::Contradiction { count }),
        };
    }
    match (errno, call) {
        (Errno::AGAIN, _) => Ok(Answered::LayoutChanging),
        (Errno::EXIST, _) => Ok(Answered::Present),
        (Errno::SRCH, _) => Ok(Answered::Gone),
        (Errno::NOENT, UffdCall::Move) => Ok(Answered::Hole),
        (Errno::NOENT, _) => Ok(Answered::NotRegistered),
        (Errno::FAULT, UffdCall::Continue) => Ok(Answered::Hole),
        (Errno::BUSY, _) => Ok(Answered::Busy),
        (Errno::FAULT, _) => Err(Refusal::Unreadable),
        (Errno::INVAL, _) => Err(Refusal::Invalid),
        (Errno::NOMEM, _) => Err(Refusal::NoMemory),
        (Errno::NOSPC, _) => Err(Refusal::NoSpace),
        (Errno::IO | Errno::HWPOISON, _) => Err(Refusal::BadPage),
        (Errno::PERM | Errno::ACCESS, _) => Err(Refusal::NotPermitted),
        (Errno::NOTTY, _) => Err(Refusal::Unknown),
        _ => Err(Refusal::Other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTED: [UffdCall; 5] =
        [UffdCall::Copy, UffdCall::ZeroPage, UffdCall::Continue, UffdCall::Poison, UffdCall::Move];

    #[test]
    fn a_count_is_progress_only_where_it_can_be() {
        for call in COUNTED {
            for (result, count, expected) in [
                (Ok(()), 8192, Ok(Answered::All)),
                (Ok(()), 4096, Err(Refusal::Contradiction { count: 4096 })),
                (Ok(()), 0, Err(Refusal::Contradiction { count: 0 })),
                (Ok(()), -11, Err(Refusal::Contradiction { count: -11 })),
                (Ok(()), 12288, Err(Refusal::Contradiction { count: 12288 })),
                (Err(Errno::AGAIN), 4096, Ok(Answered::Part { bytes: 4096 })),
                (Err(Errno::AGAIN), 8191, Ok(Answered::Part { bytes: 8191 })),
                (Err(Errno::AGAIN), 8192, Err(Refusal::Contradiction { count: 8192 })),
                (Err(Errno::AGAIN), i64::MAX, Err(Refusal::Contradiction { count: i64::MAX })),
                (Err(Errno::EXIST), 4096, Err(Refusal::Contradiction { count: 4096 })),
                (Err(Errno::FAULT), 1, Err(Refusal::Contradiction { count: 1 })),
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
            // The field as before Linux 6.15, as since, and as a kernel might leave it.
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
        use UffdCall::{Continue, Copy, Move, Poison, WriteProtect, ZeroPage};
        for (call, errno, expected) in [
            (Copy, Errno::EXIST, Ok(Answered::Present)),
            (ZeroPage, Errno::EXIST, Ok(Answered::Present)),
            (Continue, Errno::EXIST, Ok(Answered::Present)),
            (Poison, Errno::EXIST, Ok(Answered::Present)),
            (Move, Errno::EXIST, Ok(Answered::Present)),
            (Copy, Errno::NOENT, Ok(Answered::NotRegistered)),
            (WriteProtect, Errno::NOENT, Ok(Answered::NotRegistered)),
            (Move, Errno::NOENT, Ok(Answered::Hole)),
            (Copy, Errno::SRCH, Ok(Answered::Gone)),
            (Continue, Errno::SRCH, Ok(Answered::Gone)),
            (Copy, Errno::FAULT, Err(Refusal::Unreadable)),
            (Continue, Errno::FAULT, Ok(Answered::Hole)),
            (Move, Errno::BUSY, Ok(Answered::Busy)),
            (Copy, Errno::INVAL, Err(Refusal::Invalid)),
            (Copy, Errno::NOMEM, Err(Refusal::NoMemory)),
            (Copy, Errno::NOSPC, Err(Refusal::NoSpace)),
            (Continue, Errno::IO, Err(Refusal::BadPage)),
            (Continue, Errno::HWPOISON, Err(Refusal::BadPage)),
            (ZeroPage, Errno::PERM, Err(Refusal::NotPermitted)),
            (Poison, Errno::NOTTY, Err(Refusal::Unknown)),
            (Copy, Errno::PIPE, Err(Refusal::Other)),
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
    fn a_request_without_a_count_is_done_or_not() {
        for call in [UffdCall::WriteProtect, UffdCall::Wake, UffdCall::Unregister] {
            assert_eq!(decode(call, Ok(()), None, 4096), Ok(Answered::All));
            assert_eq!(decode(call, Err(Errno::AGAIN), None, 4096), Ok(Answered::LayoutChanging));
            assert!(!call.name().is_empty());
        }
    }
}

//! The one place that matches errno: what the kernel's answers mean to the calls of this package.
//!
//! Every function is pure: it takes a result of a system call and returns what to do about it.
//! Source: mmap(2), madvise(2), memfd_create(2), ioctl_pagemap_scan(2), userfaultfd(2),
//! io_uring_setup(2), io_uring_register(2).

use rustix::io::Errno;

/// Why a mapping was refused, as far as errno distinguishes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MmapRefusal {
    /// Not enough of something; `shortage` finds out of what.
    Memory,
    /// The process locks all that it maps, and may not lock as much.
    Locked,
    /// The descriptor is not open for this kind of access.
    Access,
    /// The file cannot be mapped at all.
    NotMappable,
    /// The kernel has no huge pages of that size.
    HugeSize,
    /// Something else.
    Other,
}

/// Takes what mmap(2) or memfd_create(2) answered; `huge` when huge pages were asked for.
pub(crate) fn mmap_refusal(errno: Errno, huge: bool) -> MmapRefusal {
    match errno {
        Errno::NOMEM => MmapRefusal::Memory,
        Errno::AGAIN => MmapRefusal::Locked,
        Errno::ACCESS => MmapRefusal::Access,
        Errno::NODEV | Errno::INVAL if huge => MmapRefusal::HugeSize,
        Errno::NODEV => MmapRefusal::NotMappable,
        _ => MmapRefusal::Other,
    }
}

/// What to do after a MADV_POPULATE_READ or MADV_POPULATE_WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PopulateStep {
    /// The range is present.
    Done,
    /// Nothing is wrong; ask again.
    Again,
    /// The range was given back a wrong or impossible access: see the enum.
    Failed(PopulateRefusal),
}

/// Why a range could not be made present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PopulateRefusal {
    /// There is no memory for it, or the range is not mapped.
    Memory,
    /// Touching it would have raised a signal: the file is shorter, or the hugetlb pool is empty.
    Signal,
    /// A page in it is broken.
    Poisoned,
    /// The mapping does not allow this access.
    Incompatible,
    /// Something else.
    Other,
}

/// Decodes the answer to a populate.
pub(crate) fn populate_step(answer: Result<(), Errno>) -> PopulateStep {
    match answer {
        Ok(()) => PopulateStep::Done,
        Err(Errno::AGAIN | Errno::INTR) => PopulateStep::Again,
        Err(Errno::NOMEM) => PopulateStep::Failed(PopulateRefusal::Memory),
        Err(Errno::FAULT) => PopulateStep::Failed(PopulateRefusal::Signal),
        Err(Errno::HWPOISON) => PopulateStep::Failed(PopulateRefusal::Poisoned),
        Err(Errno::INVAL) => PopulateStep::Failed(PopulateRefusal::Incompatible),
        Err(_) => PopulateStep::Failed(PopulateRefusal::Other),
    }
}

/// What MADV_COLLAPSE did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CollapseStep {
    /// Every huge page of the range is one now.
    Done,
    /// Some are not, for a reason that may pass: no free huge page, or pages in use.
    NotNow,
    /// It cannot work on this mapping or kernel.
    Refused,
}

/// Decodes the answer to MADV_COLLAPSE.
pub(crate) fn collapse_step(answer: Result<(), Errno>) -> CollapseStep {
    match answer {
        Ok(()) => CollapseStep::Done,
        Err(Errno::AGAIN | Errno::BUSY | Errno::NOMEM | Errno::INTR) => CollapseStep::NotNow,
        Err(_) => CollapseStep::Refused,
    }
}

/// Returns whether an ioctl was refused because this kernel does not know it.
pub(crate) fn ioctl_is_unknown(errno: Errno) -> bool {
    matches!(errno, Errno::NOTTY | Errno::INVAL)
}

/// Returns whether memfd_create(2) was refused because it does not know a flag.
pub(crate) fn flag_is_unknown(errno: Errno) -> bool {
    errno == Errno::INVAL
}

/// Returns whether mmap(2) was refused because the file, or the kernel, has no `MAP_SYNC`. One
/// before Linux 4.15 does not know `MAP_SHARED_VALIDATE` either, and calls the request invalid.
pub(crate) fn sync_is_unsupported(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::INVAL)
}

/// Why a userfaultfd was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UffdRefusal {
    /// This process may not have one that sees faults of the kernel.
    Permission,
    /// The kernel was built without it, or a filter hides it.
    Absent,
    /// Something else.
    Other,
}

/// Decodes why userfaultfd(2), or opening its device, failed.
pub(crate) fn uffd_refusal(errno: Errno) -> UffdRefusal {
    match errno {
        Errno::PERM | Errno::ACCESS => UffdRefusal::Permission,
        Errno::NOSYS | Errno::NOENT | Errno::NODEV | Errno::NXIO => UffdRefusal::Absent,
        _ => UffdRefusal::Other,
    }
}

/// Why an io_uring was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingRefusal {
    /// A setting of the host or a filter forbids it.
    Disabled,
    /// The kernel was built without it.
    Absent,
    /// Something else.
    Other,
}

/// Decodes why io_uring_setup(2) failed.
pub(crate) fn ring_refusal(errno: Errno) -> RingRefusal {
    match errno {
        Errno::PERM | Errno::ACCESS => RingRefusal::Disabled,
        Errno::NOSYS => RingRefusal::Absent,
        _ => RingRefusal::Other,
    }
}

/// Why buffers were not registered with an io_uring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BufferRefusal {
    /// More than the limit on locked memory; or there is none left for the list of pages.
    Memory,
    /// A page cannot be written, or not be made present.
    NotWritable,
    /// Something else.
    Other,
}

/// Decodes why io_uring_register(2) did not take buffers.
pub(crate) fn buffer_refusal(errno: Errno) -> BufferRefusal {
    match errno {
        Errno::NOMEM => BufferRefusal::Memory,
        Errno::FAULT => BufferRefusal::NotWritable,
        _ => BufferRefusal::Other,
    }
}

/// Why a range was not registered with a userfaultfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegisterRefusal {
    /// This memory does not have such faults, or the modes do not go together.
    Unsupported,
    /// Another userfaultfd has it.
    Taken,
    /// It is shared memory that this process may not write.
    NotPermitted,
    /// Something else.
    Other,
}

/// Decodes why `UFFDIO_REGISTER` failed.
pub(crate) fn register_refusal(errno: Errno) -> RegisterRefusal {
    match errno {
        Errno::INVAL => RegisterRefusal::Unsupported,
        Errno::BUSY => RegisterRefusal::Taken,
        Errno::PERM => RegisterRefusal::NotPermitted,
        _ => RegisterRefusal::Other,
    }
}

/// The errno of an answer to a fault; its meaning depends on the ioctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UffdErrno {
    Again,
    Exists,
    NoEntry,
    NoProcess,
    Fault,
    Busy,
    Invalid,
    NoMemory,
    NoSpace,
    BadPage,
    NotPermitted,
    Unknown,
    Other,
}

/// Sorts the errno of an answer to a fault.
pub(crate) fn uffd_errno(errno: Errno) -> UffdErrno {
    match errno {
        Errno::AGAIN => UffdErrno::Again,
        Errno::EXIST => UffdErrno::Exists,
        Errno::NOENT => UffdErrno::NoEntry,
        Errno::SRCH => UffdErrno::NoProcess,
        Errno::FAULT => UffdErrno::Fault,
        Errno::BUSY => UffdErrno::Busy,
        Errno::INVAL => UffdErrno::Invalid,
        Errno::NOMEM => UffdErrno::NoMemory,
        Errno::NOSPC => UffdErrno::NoSpace,
        Errno::IO | Errno::HWPOISON => UffdErrno::BadPage,
        Errno::PERM | Errno::ACCESS => UffdErrno::NotPermitted,
        Errno::NOTTY => UffdErrno::Unknown,
        _ => UffdErrno::Other,
    }
}

/// Returns whether a call on a descriptor that never waits would have had to.
pub(crate) fn would_wait(errno: Errno) -> bool {
    errno == Errno::AGAIN
}

/// Returns whether a file system has no files without a name: it refuses them, or it or the kernel ignores
/// the flag and opens the directory.
pub(crate) fn has_no_nameless_files(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL)
}

/// Returns whether the other end of a socket was closed before it had received everything: an error that is
/// reported once.
pub(crate) fn is_reset(errno: Errno) -> bool {
    errno == Errno::CONNRESET
}

/// Returns whether the arguments of a call were refused.
pub(crate) fn is_invalid(errno: Errno) -> bool {
    errno == Errno::INVAL
}

/// Returns whether a call was interrupted by a signal.
pub(crate) fn is_interrupted(errno: Errno) -> bool {
    errno == Errno::INTR
}

/// Returns whether a request was refused for want of a privilege.
pub(crate) fn is_unprivileged(errno: Errno) -> bool {
    errno == Errno::PERM
}

/// Returns whether a system call is not there, or not for this file or with these flags.
pub(crate) fn call_is_unsupported(errno: Errno) -> bool {
    matches!(errno, Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_documented_answer_has_its_meaning() {
        for (errno, huge, meaning) in [
            (Errno::NOMEM, false, MmapRefusal::Memory),
            (Errno::NOMEM, true, MmapRefusal::Memory),
            (Errno::AGAIN, false, MmapRefusal::Locked),
            (Errno::ACCESS, false, MmapRefusal::Access),
            (Errno::NODEV, false, MmapRefusal::NotMappable),
            (Errno::NODEV, true, MmapRefusal::HugeSize),
            (Errno::INVAL, true, MmapRefusal::HugeSize),
            (Errno::INVAL, false, MmapRefusal::Other),
            (Errno::PERM, false, MmapRefusal::Other),
        ] {
            assert_eq!(mmap_refusal(errno, huge), meaning, "{errno:?}");
        }
        for (answer, step) in [
            (Ok(()), PopulateStep::Done),
            (Err(Errno::AGAIN), PopulateStep::Again),
            (Err(Errno::INTR), PopulateStep::Again),
            (Err(Errno::NOMEM), PopulateStep::Failed(PopulateRefusal::Memory)),
            (Err(Errno::FAULT), PopulateStep::Failed(PopulateRefusal::Signal)),
            (Err(Errno::HWPOISON), PopulateStep::Failed(PopulateRefusal::Poisoned)),
            (Err(Errno::INVAL), PopulateStep::Failed(PopulateRefusal::Incompatible)),
            (Err(Errno::IO), PopulateStep::Failed(PopulateRefusal::Other)),
        ] {
            assert_eq!(populate_step(answer), step, "{answer:?}");
        }
        for (answer, step) in [
            (Ok(()), CollapseStep::Done),
            (Err(Errno::AGAIN), CollapseStep::NotNow),
            (Err(Errno::BUSY), CollapseStep::NotNow),
            (Err(Errno::NOMEM), CollapseStep::NotNow),
            (Err(Errno::INVAL), CollapseStep::Refused),
        ] {
            assert_eq!(collapse_step(answer), step, "{answer:?}");
        }
        for (errno, refusal) in [
            (Errno::PERM, UffdRefusal::Permission),
            (Errno::ACCESS, UffdRefusal::Permission),
            (Errno::NOSYS, UffdRefusal::Absent),
            (Errno::NOENT, UffdRefusal::Absent),
            (Errno::MFILE, UffdRefusal::Other),
        ] {
            assert_eq!(uffd_refusal(errno), refusal, "{errno:?}");
        }
        for (errno, refusal) in [
            (Errno::PERM, RingRefusal::Disabled),
            (Errno::ACCESS, RingRefusal::Disabled),
            (Errno::NOSYS, RingRefusal::Absent),
            (Errno::MFILE, RingRefusal::Other),
        ] {
            assert_eq!(ring_refusal(errno), refusal, "{errno:?}");
        }
        for (errno, refusal) in [
            (Errno::NOMEM, BufferRefusal::Memory),
            (Errno::FAULT, BufferRefusal::NotWritable),
            (Errno::OPNOTSUPP, BufferRefusal::Other),
        ] {
            assert_eq!(buffer_refusal(errno), refusal, "{errno:?}");
        }
        for (errno, refusal) in [
            (Errno::INVAL, RegisterRefusal::Unsupported),
            (Errno::BUSY, RegisterRefusal::Taken),
            (Errno::PERM, RegisterRefusal::NotPermitted),
            (Errno::NOMEM, RegisterRefusal::Other),
        ] {
            assert_eq!(register_refusal(errno), refusal, "{errno:?}");
        }
        assert!(would_wait(Errno::AGAIN) && !would_wait(Errno::INTR));
        assert!(is_interrupted(Errno::INTR) && !is_interrupted(Errno::AGAIN));
        assert!(is_unprivileged(Errno::PERM) && !is_unprivileged(Errno::INVAL));
        assert!(call_is_unsupported(Errno::NOSYS) && !call_is_unsupported(Errno::AGAIN));
        assert!(ioctl_is_unknown(Errno::NOTTY));
        assert!(!ioctl_is_unknown(Errno::PERM));
        assert!(sync_is_unsupported(Errno::OPNOTSUPP));
        assert!(sync_is_unsupported(Errno::INVAL));
        assert!(!sync_is_unsupported(Errno::ACCESS));
        assert!(flag_is_unknown(Errno::INVAL));
        assert!(!flag_is_unknown(Errno::MFILE));
    }
}

//! The meaning of an errno that several calls of this package share, as pure functions.
//!
//! Source: mmap(2), memfd_create(2), ioctl_pagemap_scan(2), userfaultfd(2).

use rustix::io::Errno;

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

/// Returns whether a call on a descriptor that never waits would have had to.
pub(crate) fn would_wait(errno: Errno) -> bool {
    errno == Errno::AGAIN
}

/// Returns whether lseek(2) found no data behind an offset, or that is behind the end of the file.
pub(crate) fn is_behind_data(errno: Errno) -> bool {
    errno == Errno::NXIO
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
        for (errno, refusal) in [
            (Errno::PERM, UffdRefusal::Permission),
            (Errno::ACCESS, UffdRefusal::Permission),
            (Errno::NOSYS, UffdRefusal::Absent),
            (Errno::NOENT, UffdRefusal::Absent),
            (Errno::MFILE, UffdRefusal::Other),
        ] {
            assert_eq!(uffd_refusal(errno), refusal, "{errno:?}");
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

//! The limit of this process's descriptors, and the descriptors that it was started with: [`limit`], [`raise_limit`],
//! [`close_inherited`].
//!
//! Unsafe: closing a descriptor by its number.
//! Source: getrlimit(2) "RLIMIT_NOFILE", open(2) "O_CLOEXEC", close_range(2), proc_pid_fd(5).

use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::FdFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The first number behind standard input, output and error.
const FIRST: RawFd = 3;
/// Up to which number descriptors are looked for one by one.
const MOST: RawFd = 1 << 16;

/// Returns the number of descriptors that this process may have.
#[must_use]
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Lets this process, and processes that it starts, have as many descriptors as the hard limit admits.
///
/// # Errors
/// The error of setrlimit(2).
pub fn raise_limit() -> io::Result<()> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

/// Returns whether an error states that the system, or this process, has used up a resource: descriptors, memory,
/// processes. It may pass, and says nothing about the other side of a connection.
#[must_use]
pub fn is_shortage(cause: &io::Error) -> bool {
    let of_system = [
        libc::EMFILE,
        libc::ENFILE,
        libc::ENOMEM,
        libc::ENOBUFS,
        libc::EAGAIN,
        libc::ETOOMANYREFS,
        libc::ENOSPC,
    ];
    cause.raw_os_error().is_some_and(|error| of_system.contains(&error))
}

/// Closes the descriptors that the program which started this one has left open for it, but for standard input, output
/// and error. To be called before this process prepares descriptors for its own children: one that execve(2) does not
/// close counts as inherited.
pub fn close_inherited() {
    for number in open_numbers().into_iter().filter(|number| *number >= FIRST) {
        // SAFETY: a descriptor of this number that is not open, as that of the folder which was just read, is only asked
        // for its flags, which fails.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        if rustix::io::fcntl_getfd(fd).is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC)) {
            // SAFETY: execve(2) closes each descriptor with that flag, so this process was started with this one, or has
            // cleared the flag for a child, which the caller excludes. std and this crate open all of theirs with the
            // flag, so nothing in this process owns it.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
}

/// Returns the numbers of the descriptors that are open, and others of descriptors that are not.
fn open_numbers() -> Vec<RawFd> {
    match fs::read_dir("/proc/self/fd") {
        Ok(entries) => {
            entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
        }
        // A process that is confined to some files, or a system without it.
        Err(_) => (FIRST..RawFd::try_from(limit()).unwrap_or(MOST).min(MOST)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_no_end_of_the_other_side() {
        let of = |error| is_shortage(&io::Error::from_raw_os_error(error));
        assert!(of(libc::EMFILE) && of(libc::ENFILE) && of(libc::ENOMEM) && of(libc::EAGAIN));
        assert!(!of(libc::EPIPE) && !of(libc::ECONNRESET) && !of(libc::EBADF));
        assert!(!is_shortage(&io::ErrorKind::UnexpectedEof.into()));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it asks for limits")]
    fn the_limit_is_the_hard_one_once_it_was_raised() {
        raise_limit().unwrap();
        assert_eq!(limit(), getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX));
    }
}

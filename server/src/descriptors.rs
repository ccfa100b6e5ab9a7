//! The limit of this process's descriptors: [`limit`], [`raise_limit`]; and errors of a limit: [`is_shortage`].
//!
//! Source: getrlimit(2) "RLIMIT_NOFILE".

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

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

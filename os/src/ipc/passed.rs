//! Descriptors that a service manager passes to a program at its start: [`passed_descriptors`], and a file
//! in memory that it can keep with them: [`memory_file`].
//!
//! Unsafe: taking a descriptor by its number.
//! Source: sd_listen_fds(3), memfd_create(2).

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::MemfdFlags;
use rustix::io::FdFlags;

use crate::map::create;

/// The number of the first one.
const FIRST: RawFd = 3;
/// The most descriptors.
const MOST: RawFd = 1 << 16;

/// Takes the descriptors that the service manager has passed to this process, each with its name: none at
/// the second call. A program that is started later inherits none of them.
#[must_use]
pub fn passed_descriptors() -> Vec<(String, OwnedFd)> {
    static ARE_TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name| std::env::var(name).ok()?.parse::<RawFd>().ok();
    let is_ours = number("LISTEN_PID") == i32::try_from(std::process::id()).ok();
    let count = number("LISTEN_FDS").filter(|_| is_ours).unwrap_or(0).clamp(0, MOST);
    // Relaxed: the one that finds it unset takes them.
    if count == 0 || ARE_TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.split(':').map(str::to_owned).chain(std::iter::repeat(String::new()));
    let passed = names.zip(FIRST..FIRST + count).filter_map(|(name, number)| {
        // SAFETY: the manager opened the descriptors of these numbers for this process, which owns
        // them from its start on, as the variables state; they are taken once. One that is not open is
        // only asked for its flags, which fails.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC).ok()?;
        // SAFETY: as above, and it is open.
        Some((name, unsafe { OwnedFd::from_raw_fd(number) }))
    });
    passed.collect()
}

/// Makes a file in memory with these bytes, which lives as long as a descriptor of it does.
///
/// # Errors
/// The error of the system: no memory, or as many descriptors as the process may have.
pub fn memory_file(name: &str, bytes: &[u8]) -> io::Result<File> {
    let mut file = File::from(create::memfd(name, MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file)
}

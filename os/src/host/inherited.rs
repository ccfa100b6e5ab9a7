//! The descriptors that this process was started with: those that a service manager passes to it by name
//! ([`passed_descriptors`]), and those that another program has left open ([`close_inherited`]).
//!
//! Unsafe: taking a descriptor by its number.
//! Source: sd_listen_fds(3), open(2) "O_CLOEXEC", proc_pid_fd(5).

use std::fs;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::FdFlags;
use rustix::process::{Resource, getrlimit};

/// The first number behind standard input, output and error.
const FIRST: RawFd = 3;
/// The most descriptors that are looked for one by one.
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
        Err(_) => {
            let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
            (FIRST..RawFd::try_from(limit).unwrap_or(MOST).min(MOST)).collect()
        }
    }
}

//! Facts about a userfaultfd in its file of `/proc/self/fdinfo`: its features, and the number of its pending faults, without
//! reading them ([`pending_faults`]).
//!
//! Reading an event that is no fault lets the thread go on that caused it: the pages that it gives back are gone then.
//! The kernel gives pending faults out first, so a reader that wants faults alone reads as many as there are
//! ([`Remote::read_most`](crate::uffd::Remote::read_most)).
//!
//! The count is a file of the process that opened it, and is read for as long as that process keeps its
//! descriptor of the userfaultfd. Opening it takes the rights over that process which reading its memory takes,
//! so a process that is confined is handed the file.
//! Source: proc_pid_fdinfo(5).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;

use crate::uffd::features::Features;

/// The most bytes of the file that are read.
const TEXT: usize = 512;

/// Opens the count of the pending faults of a userfaultfd that this process has, and keeps for as
/// long as the count is read.
///
/// # Errors
/// The error of open(2): `/proc` is not mounted, or this process may not open its own files there.
pub fn open_pending_faults(uffd: impl AsFd) -> io::Result<File> {
    File::open(format!("/proc/self/fdinfo/{}", uffd.as_fd().as_raw_fd()))
}

/// Returns the number of pending faults, by a file of [`open_pending_faults`], opened here or in
/// another process.
///
/// # Errors
/// The error of read(2): the process that opened it has ended, or has closed its descriptor; and
/// [`io::ErrorKind::InvalidData`] if it is of no userfaultfd.
pub fn pending_faults(count: &File) -> io::Result<usize> {
    field(count, "pending:", |count| count.parse().ok())
}

/// Returns the features of a userfaultfd, and bits of the kernel's own; none before UFFDIO_API.
///
/// # Errors
/// As for [`open_pending_faults`] and [`pending_faults`].
pub(crate) fn features(uffd: impl AsFd) -> io::Result<Features> {
    // Three numbers of 16: of the interface, of the features that were asked for, and of all that there are.
    field(&open_pending_faults(uffd)?, "API:", |api| {
        let bits = u64::from_str_radix(api.split(':').nth(1)?, 16).ok()?;
        Some(Features::from_bits_retain(bits))
    })
}

/// Returns a field of such a file.
fn field<T>(file: &File, name: &str, parse: impl Fn(&str) -> Option<T>) -> io::Result<T> {
    let mut text = [0; TEXT];
    let len = file.read_at(&mut text, 0)?;
    let text = str::from_utf8(&text[..len]).ok();
    let value = text.and_then(|text| text.lines().find_map(|line| line.strip_prefix(name)));
    value.and_then(|value| parse(value.trim())).ok_or(io::ErrorKind::InvalidData.into())
}

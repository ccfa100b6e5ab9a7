//! The number of pending faults of a userfaultfd, without reading them: [`pending_faults`].
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
    let mut text = [0; TEXT];
    let len = count.read_at(&mut text, 0)?;
    let text = str::from_utf8(&text[..len]).ok();
    let line = text.and_then(|text| text.lines().find_map(|line| line.strip_prefix("pending:")));
    line.and_then(|count| count.trim().parse().ok()).ok_or(io::ErrorKind::InvalidData.into())
}

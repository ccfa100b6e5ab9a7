//! How many faults of a userfaultfd are pending, without reading them: [`PendingFaults`].
//!
//! Reading an event that is no fault lets the thread go on that caused it: what it gives back is gone then.
//! The kernel gives pending faults out first, so a reader that wants faults alone reads as many as there are
//! ([`Remote::read_most`](crate::uffd::Remote::read_most)).
//!
//! The count is a file of the process that opened it, and is read for as long as that process keeps its
//! descriptor of the userfaultfd. Opening it takes the rights over that process which reading its memory takes,
//! so a process that is confined is handed the file.
//! Source: proc_pid_fdinfo(5).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// How long the file is at most that is read.
const TEXT: usize = 512;

/// The number of pending faults of a userfaultfd.
#[derive(Debug)]
pub struct PendingFaults(File);

impl PendingFaults {
    /// Opens the count of a userfaultfd that this process has, and keeps for as long as the count is read.
    ///
    /// # Errors
    /// The error of open(2): `/proc` is not mounted, or this process may not open its own files there.
    pub fn open(uffd: impl AsFd) -> io::Result<Self> {
        let number = uffd.as_fd().as_raw_fd();
        File::open(format!("/proc/self/fdinfo/{number}")).map(Self)
    }

    /// Returns how many faults are pending.
    ///
    /// # Errors
    /// The error of read(2): the process that opened it has ended, or has closed its descriptor; and
    /// [`io::ErrorKind::InvalidData`] if it is of no userfaultfd.
    pub fn count(&self) -> io::Result<usize> {
        let mut text = [0; TEXT];
        let len = self.0.read_at(&mut text, 0)?;
        let text = str::from_utf8(&text[..len]).ok();
        let line =
            text.and_then(|text| text.lines().find_map(|line| line.strip_prefix("pending:")));
        line.and_then(|count| count.trim().parse().ok()).ok_or(io::ErrorKind::InvalidData.into())
    }
}

/// Takes the file that another process opened.
impl From<OwnedFd> for PendingFaults {
    fn from(fd: OwnedFd) -> Self {
        Self(File::from(fd))
    }
}

impl AsFd for PendingFaults {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

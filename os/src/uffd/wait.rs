//! Waiting for events without missing a call to stop: [`wait`], [`Doorbell`].
//!
//! Source: poll(2), eventfd(2).

use core::time::Duration;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// Something that another thread rings to be noticed by [`wait`].
#[derive(Debug)]
pub struct Doorbell(OwnedFd);

impl Doorbell {
    /// Makes one that is silent.
    ///
    /// # Errors
    /// The error of eventfd(2): the process has as many descriptors as it may.
    pub fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Rings, until [`Doorbell::silence`] is called.
    ///
    /// # Errors
    /// The error of write(2).
    pub fn ring(&self) -> io::Result<()> {
        // The counter of an eventfd is full after 2^64 - 2 rings that no thread silenced.
        Ok(rustix::io::write(&self.0, &1_u64.to_ne_bytes()).map(drop)?)
    }

    /// Silences it.
    ///
    /// # Errors
    /// The error of read(2).
    pub fn silence(&self) -> io::Result<()> {
        match rustix::io::read(&self.0, &mut [0_u8; 8]) {
            Err(Errno::AGAIN) => Ok(()),
            answer => Ok(answer.map(drop)?),
        }
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until `uffd` has events, `bell` rings, or `timeout` is over; without one, for as long as
/// it takes. Returns whether `uffd` has events, or has become useless, and whether `bell` rang.
///
/// # Errors
/// The error of poll(2).
pub fn wait(
    uffd: impl AsFd,
    bell: &Doorbell,
    timeout: Option<Duration>,
) -> io::Result<(bool, bool)> {
    // A time that is too long is as good as none.
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    let mut fds = [PollFd::new(&uffd, PollFlags::IN), PollFd::new(&bell.0, PollFlags::IN)];
    match rustix::event::poll(&mut fds, timeout.as_ref()) {
        // Errors and hang-ups are reported unasked.
        Ok(_) => Ok((!fds[0].revents().is_empty(), fds[1].revents().contains(PollFlags::IN))),
        // The caller looks around and waits again.
        Err(Errno::INTR) => Ok((false, false)),
        Err(cause) => Err(cause.into()),
    }
}

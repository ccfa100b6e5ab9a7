//! A userfaultfd of another process' memory: [`Remote`]. The process that maps the memory registers it and
//! hands the descriptor over; a `Remote` answers the faults, and at most has more of them reported. That
//! is safe: the kernel fills pages of registered memory alone, and memory of this process is
//! registered only through [`Registered`](crate::uffd::Registered), whose bytes may change at any time
//! anyhow. So even a `Remote` that turns out to be of this process reaches nothing that must not change.
//!
//! Units: addresses are those of the process that the memory belongs to.
//! Unsafe: the answers.
//! Source: ioctl_userfaultfd(2), proc_pid_fd(5).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::io::Errno;
use uzone_pages::ByteLen;

use crate::host::kernel;
use crate::map::options::Vaddr;
use crate::uffd::abi;
use crate::uffd::error::UffdError;
use crate::uffd::features::Features;
use crate::uffd::install::{Fill, Install, answered};
use crate::uffd::modes::Modes;
use crate::uffd::pending_faults;
use crate::uffd::reply::{Answered, UffdCall};

/// The probed addresses: a little below the limits of addresses of 47 bits (x86-64, and less than
/// those of AArch64 with 48), of 39 bits (AArch64 and RISC-V), and of 32 bits (a process of a 32-bit
/// program). The kernel refuses an address above the limit of the process before it checks whether the
/// process exists.
const LIMITS: [u64; 3] = [1 << 47, 1 << 39, (1 << 32) - (1 << 16)];

/// The name of a userfaultfd among the descriptors of a process.
const LINK: &str = "anon_inode:[userfaultfd]";

/// A userfaultfd that another process made and registered memory with.
#[derive(Debug)]
pub struct Remote {
    fd: OwnedFd,
}

impl Remote {
    /// Returns the same userfaultfd by another descriptor.
    ///
    /// # Errors
    /// The error of the system, for instance that the process has as many descriptors as it may.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()? })
    }

    /// Takes a descriptor that another process made, and makes it one that never waits.
    ///
    /// # Errors
    /// [`UffdError::NotUffd`] if it is something else, its maker has not initialised it, or `/proc`
    /// is not mounted; [`UffdError::Forks`] if it has [`Features::EVENT_FORK`].
    pub fn adopt(fd: OwnedFd) -> Result<Self, UffdError> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        match link {
            Ok(link) if link.as_os_str() == LINK => {}
            Ok(link) => return Err(UffdError::NotUffd(link.display().to_string())),
            Err(cause) => return Err(UffdError::NotUffd(format!("unknown ({cause})"))),
        }
        // A userfaultfd that waits cannot be polled. The flag is the descriptor's, also for its maker,
        // which needs it as well.
        let flags = rustix::fs::fcntl_getfl(&fd)
            .and_then(|flags| rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK));
        if let Err(cause) = flags {
            return Err(UffdError::NotUffd(format!("stuck ({cause})")));
        }
        let features = pending_faults::features(&fd)
            .map_err(|cause| UffdError::NotUffd(format!("unknown ({cause})")))?;
        if features.is_empty() {
            // No process would ever be seen to end by such a descriptor.
            return Err(UffdError::NotUffd("a userfaultfd without UFFDIO_API".to_owned()));
        }
        if features.contains(Features::EVENT_FORK) {
            return Err(UffdError::Forks);
        }
        Ok(Self { fd })
    }

    /// Returns whether an event is pending. It is not read.
    ///
    /// # Errors
    /// The error of poll(2).
    pub fn has_events(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&Timespec::default())) {
            Ok(_) => Ok(fds[0].revents().contains(PollFlags::IN)),
            // The caller looks again.
            Err(Errno::INTR) => Ok(false),
            Err(cause) => Err(cause.into()),
        }
    }

    /// Has writes reported beside the faults of memory that is registered: missing pages, and with `minor`
    /// those of the page cache that are not mapped. Nothing is protected yet ([`Remote::write_protect`]).
    ///
    /// # Errors
    /// [`UffdError`] if the kernel refuses: the memory is not as it was registered.
    pub fn report_writes(
        &self,
        start: Vaddr,
        len: ByteLen,
        minor: bool,
    ) -> Result<Answered, UffdError> {
        let (start, len) = (start.get(), len.get());
        let mut modes = Modes::MISSING | Modes::WRITE_PROTECT;
        modes.set(Modes::MINOR, minor);
        // SAFETY: `register` wants, of memory of this process, that no code relies on missing pages. The descriptor
        // of a `Remote` comes from outside of this process, as an open /proc/PID/mem does: of
        // memory of this process it can be only if the program hands its own userfaultfd to itself, and
        // then it is of memory that is registered for these faults already (`Registered`).
        let reply = unsafe { abi::register(self.fd.as_fd(), start, len, modes.bits().into()) };
        answered(UffdCall::Register, start, len, reply.map(drop), None)
    }

    /// Fills the missing pages of `len` bytes from `start` on.
    ///
    /// # Errors
    /// [`UffdError`] if there are not as many bytes to fill them with, or the kernel refuses.
    pub fn install(
        &self,
        start: Vaddr,
        len: ByteLen,
        fill: Fill<'_>,
        how: Install,
    ) -> Result<Answered, UffdError> {
        // SAFETY: `install` wants memory that may be written as atomics write it, if it is of this process: the
        // kernel fills registered pages alone, and those are, by the contract of `Registered`.
        unsafe { fill.install(self.fd.as_fd(), start.get(), len.get(), how) }
    }

    /// Starts (`protected`) or stops reporting writes.
    ///
    /// # Errors
    /// [`UffdError`] if the kernel refuses.
    pub fn write_protect(
        &self,
        start: Vaddr,
        len: ByteLen,
        protected: bool,
    ) -> Result<Answered, UffdError> {
        let (start, len) = (start.get(), len.get());
        let mode = if protected { abi::PROTECT } else { 0 };
        let result = abi::write_protect(self.fd.as_fd(), start, len, mode);
        answered(UffdCall::WriteProtect, start, len, result, None)
    }

    /// Wakes the threads that wait for pages of a range. They retry, and if there is still no page, they
    /// fault again: also those whose faults another reader had read and never answered.
    ///
    /// # Errors
    /// [`UffdError`] if the kernel refuses.
    pub fn wake(&self, start: Vaddr, len: ByteLen) -> Result<Answered, UffdError> {
        let (start, len) = (start.get(), len.get());
        let result = abi::wake(self.fd.as_fd(), start, len);
        answered(UffdCall::Wake, start, len, result, None)
    }

    /// Returns whether the process whose memory it is has ended. A process that forked off another one and
    /// ended may have the other's userfaultfd still.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        // The kernel looks for the process before it looks for the memory. At most the process has its
        // stack there, and the kernel refuses memory that is not registered for write-protection, so
        // nothing changes.
        let page = kernel::page_size().bytes();
        for limit in LIMITS {
            let start = limit - 2 * page;
            let asked = abi::write_protect(self.fd.as_fd(), start, page, 0);
            if asked == Err(Errno::INVAL) {
                continue;
            }
            let answer = answered(UffdCall::WriteProtect, start, page, asked, None);
            return matches!(answer, Ok(Answered::Gone));
        }
        false
    }
}

impl AsFd for Remote {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

//! Opening a userfaultfd: [`Uffd`], with the features that are asked for.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use uzone_pages::ByteLen;

use crate::errno;
use crate::options::Addr;
use crate::uffd::abi;
use crate::uffd::event::EventBuffer;
use crate::uffd::features::Features;
use crate::uffd::registered::Modes;
use crate::uffd::{in_thread, open, probe};

/// Whether faults of the kernel have to be reported, as of a system call that is given a missing page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelFaults {
    /// They have to be, or there is no userfaultfd. That takes a privilege or the device.
    Required,
    /// They are reported if this process may have that.
    IfAllowed,
    /// They are not: such a system call fails with `EFAULT`.
    Never,
}

/// Why there is no userfaultfd, or memory is not registered with one or answered for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UffdError {
    /// No userfaultfd could be had.
    #[error(
        "no userfaultfd to be had: run as root, give access to {device}, or set vm.unprivileged_userfaultfd to 1; in a container, a seccomp profile may forbid it (see `uzone doctor`)",
        device = open::DEVICE
    )]
    NoUserfaultfd {
        /// What userfaultfd(2) answered.
        #[source]
        cause: io::Error,
    },
    /// The kernel did not answer what it offers.
    #[error("the kernel refused UFFDIO_API: {cause}")]
    Probe {
        /// What it answered.
        #[source]
        cause: io::Error,
    },
    /// Features that are required are not there.
    #[error("this kernel's userfaultfd lacks {missing}: {} has it", Since(*missing))]
    Missing {
        /// Which.
        missing: Features,
    },
    /// There is none for faults of the kernel.
    #[error(
        "no userfaultfd for faults of the kernel: run as root, give access to {device}, or set vm.unprivileged_userfaultfd to 1",
        device = open::DEVICE
    )]
    NotForKernel {
        /// What the kernel answered.
        #[source]
        cause: io::Error,
    },
    /// The kernel refused the features although it offers them.
    #[error("the kernel refused a userfaultfd with {features}: EVENT_FORK takes CAP_SYS_PTRACE")]
    Handshake {
        /// What was asked for.
        features: Features,
        /// What it answered.
        #[source]
        cause: io::Error,
    },
    /// The memory cannot be registered.
    #[error("{len} at {addr} cannot be registered for {modes} faults: {fix}")]
    Register {
        /// Where the memory starts.
        addr: Addr,
        /// How long it is.
        len: ByteLen,
        /// Which faults were asked for.
        modes: Modes,
        /// What would help.
        fix: &'static str,
        /// What the kernel answered.
        #[source]
        cause: io::Error,
    },
    /// The memory is registered still.
    #[error("{len} at {addr} cannot be taken from its userfaultfd: {cause}")]
    Unregister {
        /// Where the memory starts.
        addr: Addr,
        /// How long it is.
        len: ByteLen,
        /// What the kernel answered.
        #[source]
        cause: io::Error,
    },
    /// The handler of `SIGBUS` is not the one of this package, or cannot be.
    #[error("the process has another handler of SIGBUS")]
    AnotherHandler,
    /// The userfaultfd reports faults, which were to be answered in their threads.
    #[error("the userfaultfd was opened without the feature SIGBUS")]
    NoSigbus,
    /// As many mappings as possible are answered for in their threads.
    #[error("{} mappings are answered for in their threads already", in_thread::SLOTS)]
    TooMany,
    /// There is no memory to answer faults in their threads.
    #[error("the kernel has no memory for the handler")]
    NoMemory,
}

/// The kernel that has some features, for people.
struct Since(Features);

impl fmt::Display for Since {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.since() {
            Some((major, minor)) => write!(f, "Linux {major}.{minor} or newer"),
            None => f.write_str("a newer kernel"),
        }
    }
}

/// A userfaultfd for memory of this process.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
    features: Features,
    sees_kernel_faults: bool,
}

impl Uffd {
    /// Makes a userfaultfd with all of `required` and as many of `optional` as there are.
    ///
    /// # Errors
    /// [`UffdError::NoUserfaultfd`] or [`UffdError::NotForKernel`] without the permission,
    /// [`UffdError::Missing`] without the features, and [`UffdError::Probe`] or [`UffdError::Handshake`] if
    /// the kernel refuses.
    pub fn open(
        required: Features,
        optional: Features,
        kernel_faults: KernelFaults,
    ) -> Result<Self, UffdError> {
        // A descriptor that was asked what there is cannot be asked for it any more.
        let offered = probe::uffd_features()?.features();
        let missing = required.without(offered);
        if !missing.is_empty() {
            return Err(UffdError::Missing { missing });
        }
        let (fd, sees_kernel_faults) = match kernel_faults {
            KernelFaults::Never => (open::user_mode_only(), false),
            KernelFaults::Required => {
                let fd = open::full();
                (Ok(fd.map_err(|cause| UffdError::NotForKernel { cause: cause.into() })?), true)
            }
            KernelFaults::IfAllowed => match open::full() {
                Ok(fd) => (Ok(fd), true),
                Err(_) => (open::user_mode_only(), false),
            },
        };
        let fd = fd.map_err(|cause| UffdError::NoUserfaultfd { cause: cause.into() })?;
        let mut features = required.with(Features::from_bits(optional.bits() & offered.bits()));
        let mut answer = abi::handshake(fd.as_fd(), features.bits());
        let fork = Features::EVENT_FORK;
        if answer.is_err_and(errno::is_unprivileged) && !required.contains(fork) {
            // A refused handshake leaves the descriptor as it was.
            features = features.without(fork);
            answer = abi::handshake(fd.as_fd(), features.bits());
        }
        match answer {
            Ok(_) => Ok(Self { fd, features, sees_kernel_faults }),
            Err(cause) => Err(UffdError::Handshake { features, cause: cause.into() }),
        }
    }

    /// Returns the features that it has, of those that were asked for.
    #[must_use]
    pub fn features(&self) -> Features {
        self.features
    }

    /// Returns whether faults of the kernel are reported, as of a system call that is given a missing page;
    /// otherwise such a call fails with `EFAULT`.
    #[must_use]
    pub fn sees_kernel_faults(&self) -> bool {
        self.sees_kernel_faults
    }

    /// Reads pending events into `buffer`, as many as there is room for. Returns how many there
    /// are; none means that nothing was pending.
    ///
    /// # Errors
    /// The error of read(2).
    pub fn read(&self, buffer: &mut EventBuffer) -> io::Result<usize> {
        buffer.fill(self.fd.as_fd(), usize::MAX)
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

//! Errors of getting a userfaultfd, of registering memory with one, and of answers: [`UffdError`].

use std::fmt;
use std::io;

use rustix::io::Errno;
use uzone_pages::{ByteLen, ErrorKind};

use crate::map::bytes::AccessError;
use crate::map::options::{Addr, Vaddr};
use crate::uffd::features::Features;
use crate::uffd::modes::Modes;
use crate::uffd::open;
use crate::uffd::reply::{UffdCall, explain};

/// There is no userfaultfd, memory is not registered with one or answered for, or an answer failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UffdError {
    /// No userfaultfd could be had.
    #[error(
        "no userfaultfd: run as root, give access to {device}, or set vm.unprivileged_userfaultfd to 1; in a container, a seccomp profile may forbid it (see `uzone doctor`)",
        device = open::DEVICE
    )]
    NoUserfaultfd(#[source] io::Error),
    /// The process or the host has as many descriptors as it may, or no memory for one.
    #[error("no descriptor for a userfaultfd: close unused descriptors, or raise `ulimit -n`")]
    NoDescriptor(#[source] io::Error),
    /// The kernel did not answer with its features.
    #[error("the kernel refused UFFDIO_API")]
    Probe(#[source] io::Error),
    /// Features that are required are not there.
    #[error("this kernel's userfaultfd lacks {missing}: {} has it", Since(*missing))]
    Missing {
        /// The features.
        missing: Features,
    },
    /// There is none for faults of the kernel.
    #[error(
        "no userfaultfd for faults of the kernel: run as root, give access to {device}, or set vm.unprivileged_userfaultfd to 1",
        device = open::DEVICE
    )]
    NotForKernel(#[source] io::Error),
    /// The kernel refused the features although it offers them.
    #[error("the kernel refused a userfaultfd with {features}")]
    Handshake {
        /// The features that were asked for.
        features: Features,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The memory cannot be registered.
    #[error("{len} at {addr} cannot be registered for {modes} faults: {fix}")]
    Register {
        /// The start of the memory.
        addr: Addr,
        /// The length.
        len: ByteLen,
        /// The faults that were asked for.
        modes: Modes,
        /// The remedy.
        fix: &'static str,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The userfaultfd reports faults, which were to be answered in their threads.
    #[error("the userfaultfd was opened without the feature SIGBUS")]
    NoSigbus,
    /// There is no memory to answer faults in their threads.
    #[error("the kernel has no memory for the handler")]
    NoMemory,
    /// A descriptor is no userfaultfd: its name in `/proc/self/fd`, or why that is unknown.
    #[error("a descriptor is {0}, where a userfaultfd was expected")]
    NotUffd(String),
    /// A userfaultfd reports forks, and the pages of a child would never come.
    #[error(
        "the userfaultfd has EVENT_FORK, and the faults of children are not answered: make it without that feature"
    )]
    Forks,
    /// The range of an answer is not inside the mapping, or cuts a page.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The kernel refused an answer.
    #[error("UFFDIO_{} of {len_bytes} bytes at {start} was refused: {}", call.name(), explain(cause).1)]
    Refused {
        /// The answer.
        call: UffdCall,
        /// The start.
        start: Vaddr,
        /// The length.
        len_bytes: u64,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The kernel's reply to an answer contradicts itself, so that nothing is known about its effect.
    // Made by handlers of signals: of numbers alone, and without a string.
    #[error(
        "UFFDIO_{} of {len_bytes} bytes at {start} has a reply that contradicts itself: error {errno}, with {count} bytes",
        call.name()
    )]
    Contradiction {
        /// The answer.
        call: UffdCall,
        /// The start.
        start: Vaddr,
        /// The length.
        len_bytes: u64,
        /// The number of the error, or 0.
        errno: i32,
        /// The bytes that the reply names, or a negative number of an error.
        count: i64,
    },
}

impl UffdError {
    /// Returns the reason why no userfaultfd was had, for faults of the kernel or of any kind.
    pub(crate) fn not_opened(cause: Errno, for_kernel: bool) -> Self {
        let is_short = matches!(cause, Errno::MFILE | Errno::NFILE | Errno::NOMEM);
        let cause = cause.into();
        match (is_short, for_kernel) {
            (true, _) => Self::NoDescriptor(cause),
            (false, true) => Self::NotForKernel(cause),
            (false, false) => Self::NoUserfaultfd(cause),
        }
    }

    /// Returns the kind of failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoUserfaultfd { .. } | Self::NotForKernel { .. } => ErrorKind::PermissionDenied,
            Self::Missing { .. } => ErrorKind::NotSupported,
            Self::Probe { .. } | Self::Handshake { .. } | Self::Contradiction { .. } => {
                ErrorKind::Other
            }
            Self::NoMemory | Self::NoDescriptor { .. } => ErrorKind::OutOfMemory,
            Self::Register { .. } | Self::NoSigbus | Self::NotUffd(_) | Self::Forks => {
                ErrorKind::InvalidInput
            }
            Self::Access(error) => error.kind(),
            Self::Refused { cause, .. } => explain(cause).0,
        }
    }

    /// Returns whether an answer was refused because the host or the control group has no memory for a page.
    #[must_use]
    pub fn is_no_memory(&self) -> bool {
        matches!(self, Self::Refused { cause, .. } if cause.kind() == io::ErrorKind::OutOfMemory)
    }

    /// Returns whether the bytes to copy cannot be read, or the page is behind the end of its file.
    pub(crate) fn is_unreadable(&self) -> bool {
        matches!(self, Self::Refused { cause, .. } if Errno::from_io_error(cause) == Some(Errno::FAULT))
    }
}

// It is returned by each answer to a fault, so it stays small.
const _: () = assert!(size_of::<UffdError>() <= 48);

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

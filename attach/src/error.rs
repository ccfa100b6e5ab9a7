//! Why memory is not attached: [`AttachError`].

use std::io;
use std::path::PathBuf;

use uzone_os::uffd::UffdError;
use uzone_os::{MapError, Mapping, Rejected};
use uzone_pages::{AddrError, ErrorKind};

/// Memory that was not attached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// There is no server, or its stream ended.
    #[error("cannot reach a page server at {}", path.display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// The error of the system.
        #[source]
        cause: io::Error,
    },
    /// The server refuses this program.
    #[error("the page server at {} refused: {reason}", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// Its reason.
        reason: String,
    },
    /// The process at the socket is no page server of this version.
    #[error("the process at {} is not a page server of version {}", path.display(), crate::protocol::VERSION)]
    NotAServer {
        /// The socket.
        path: PathBuf,
    },
    /// Page faults cannot be handed over.
    #[error("cannot open a userfaultfd")]
    Open(#[from] UffdError),
    /// The memory cannot be registered.
    #[error("cannot register the memory with the userfaultfd")]
    Register(#[from] Rejected<Mapping, UffdError>),
    /// The memory cannot be mapped.
    #[error("cannot map the memory")]
    Map(#[from] MapError),
    /// The image is longer than an address space.
    #[error("cannot map an image of this length")]
    Length(#[from] AddrError),
    /// The thread that follows the server was not started, or the memory is not kept from forked processes.
    #[error("cannot follow the server")]
    Follow(#[source] io::Error),
}

impl AttachError {
    /// Returns the kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Unreachable { cause, .. } => match cause.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ErrorKind::NotFound,
                io::ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
                io::ErrorKind::WouldBlock => ErrorKind::TimedOut,
                _ => ErrorKind::Io,
            },
            Self::Refused { .. } => ErrorKind::PermissionDenied,
            Self::NotAServer { .. } => ErrorKind::InvalidData,
            Self::Open(_) | Self::Register(_) => ErrorKind::NotSupported,
            Self::Map(_) => ErrorKind::OutOfMemory,
            Self::Length(_) => ErrorKind::InvalidInput,
            Self::Follow(_) => ErrorKind::Other,
        }
    }
}

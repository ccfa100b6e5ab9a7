//! What keeps a server from running: [`ServeError`].

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;

use uzone_fault::MapError;
use uzone_pages::ErrorKind;
use uzone_snapshot::SnapshotError;

/// A server that cannot be started, or cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The image cannot be opened.
    #[error(transparent)]
    Image(#[from] SnapshotError),
    /// The user of the worker may not read the image.
    #[error(
        "user {user} cannot read {} without capabilities: let that user read it, or name its owner (--user)",
        path.display()
    )]
    Unreadable {
        /// The image.
        path: PathBuf,
        /// The user.
        user: u32,
        /// What the system answered.
        #[source]
        cause: SnapshotError,
    },
    /// The capabilities cannot be given up.
    #[error("cannot give up the capabilities of this process: {0}")]
    Capabilities(#[source] io::Error),
    /// The socket cannot be made.
    #[error("cannot listen on {}: {cause}", path.display())]
    Listen {
        /// Where.
        path: PathBuf,
        /// What the system answered.
        #[source]
        cause: io::Error,
    },
    /// The socket cannot be given to a group.
    #[error(
        "cannot give the socket {} to group {group}: {cause}; start the server as root or as a member of that \
         group, or name one of the groups of its user (--group)",
        path.display()
    )]
    Group {
        /// Where.
        path: PathBuf,
        /// The number of the group.
        group: u32,
        /// What the system answered.
        #[source]
        cause: io::Error,
    },
    /// The folder for recovery cannot be used.
    #[error("cannot keep what recovery takes in {}: {cause}", path.display())]
    Recovery {
        /// The folder.
        path: PathBuf,
        /// What the system answered.
        #[source]
        cause: io::Error,
    },
    /// Another server listens there.
    #[error("another server listens on {}: stop it, or name another socket", path.display())]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// There is something else than a socket.
    #[error("{} is no socket: remove it, or name another socket", path.display())]
    NotASocket {
        /// Where.
        path: PathBuf,
    },
    /// The threads that answer faults cannot be started.
    #[error(transparent)]
    Engine(#[from] MapError),
    /// The list of pages that machines touched cannot be read or written.
    #[error("cannot use the working set {}: {cause}", path.display())]
    WorkingSet {
        /// The file.
        path: PathBuf,
        /// What the system answered.
        #[source]
        cause: io::Error,
    },
    /// The worker process cannot be started.
    #[error("cannot start the process that answers faults: {0}")]
    Start(#[source] io::Error),
    /// The worker process ended before it could serve, and has stated why.
    #[error("the process that answers faults has ended at once: {status}")]
    Worker {
        /// How it ended.
        status: ExitStatus,
    },
    /// The server cannot be asked.
    #[error("cannot ask the server at {}: {cause}", path.display())]
    Ask {
        /// Where.
        path: PathBuf,
        /// What the system, or the server, answered.
        #[source]
        cause: io::Error,
    },
    /// There can be no metrics at an address.
    #[error("cannot listen for metrics on {address}: {cause}")]
    Metrics {
        /// Where.
        address: SocketAddr,
        /// What the system answered.
        #[source]
        cause: io::Error,
    },
    /// Events cannot be waited for.
    #[error("cannot wait for events: {0}")]
    Wait(#[source] io::Error),
}

impl ServeError {
    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        let of_io = |cause: &io::Error| match cause.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ErrorKind::NotFound,
            io::ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
            io::ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
            _ => ErrorKind::Io,
        };
        match self {
            Self::Image(error) | Self::Unreadable { cause: error, .. } => error.kind(),
            Self::Recovery { cause, .. }
            | Self::Listen { cause, .. }
            | Self::Group { cause, .. }
            | Self::WorkingSet { cause, .. }
            | Self::Ask { cause, .. }
            | Self::Metrics { cause, .. }
            | Self::Start(cause)
            | Self::Capabilities(cause)
            | Self::Wait(cause) => of_io(cause),
            Self::InUse { .. } => ErrorKind::Busy,
            Self::NotASocket { .. } => ErrorKind::InvalidInput,
            Self::Engine(_) | Self::Worker { .. } => ErrorKind::Io,
        }
    }
}

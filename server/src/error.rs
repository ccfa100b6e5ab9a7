//! Reasons why a server does not run, a client is not served, and a VM is not restored: [`ServeError`].

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use uzone_fault::MapError;
use uzone_pages::ErrorKind;
use uzone_snapshot::SnapshotError;

/// A server that cannot be started or go on, a message that hands no memory over, or a VM that is not restored.
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
        /// The error of opening it.
        #[source]
        cause: SnapshotError,
    },
    /// The capabilities cannot be given up.
    #[error("cannot give up the capabilities of this process")]
    Capabilities(#[source] io::Error),
    /// The socket, the folder for recovery or the working set cannot be used.
    #[error("cannot {what} {}", path.display())]
    At {
        /// The attempt, as a verb.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// The error of the system.
        #[source]
        cause: io::Error,
    },
    /// The socket cannot be given to a group.
    #[error(
        "cannot give the socket {} to group {group}: start the server as root or as a member of that group, or name \
         one of the groups of its user (--group)",
        path.display()
    )]
    Group {
        /// The path.
        path: PathBuf,
        /// The number of the group.
        group: u32,
        /// The error of the system.
        #[source]
        cause: io::Error,
    },
    /// Another server listens there.
    #[error("another server listens on {}: stop it, or name another socket", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// There is something else than a socket.
    #[error("{} is no socket: remove it, or name another socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The threads that answer faults cannot be started.
    #[error(transparent)]
    Engine(#[from] MapError),
    /// The worker process cannot be started.
    #[error("cannot start the process that answers faults")]
    Start(#[source] io::Error),
    /// The worker process ended before it could serve, and has stated why.
    #[error("the process that answers faults has ended at once: {status}")]
    Worker {
        /// The exit status.
        status: ExitStatus,
    },
    /// The server cannot be asked.
    #[error("cannot ask the server at {}", path.display())]
    Ask {
        /// The path of its control socket.
        path: PathBuf,
        /// The error of the system, or the answer of the server.
        #[source]
        cause: io::Error,
    },
    /// There can be no metrics at an address.
    #[error("cannot listen for metrics on {address}")]
    Metrics {
        /// The address.
        address: SocketAddr,
        /// The error of the system.
        #[source]
        cause: io::Error,
    },
    /// Events cannot be waited for.
    #[error("cannot wait for events")]
    Wait(#[source] io::Error),
    /// The message of a client cannot be used; the text states why.
    #[error("{0}")]
    Message(String),
    /// The configuration of a VM has no memory, or impossible memory.
    #[error("cannot use the configuration of the VM: {why}")]
    MachineConfig {
        /// The reason.
        why: String,
    },
    /// The memory of a VM is larger than the image.
    #[error(
        "the VM has {asked_bytes} bytes of memory, and the image has {has_bytes}: it is the image of another VM"
    )]
    OtherMachine {
        /// The bytes of the VM's memory.
        asked_bytes: u64,
        /// The bytes of the image.
        has_bytes: u64,
    },
    /// Cloud Hypervisor cannot be reached.
    #[error(
        "cannot connect to {}: have Cloud Hypervisor receive there (receive-migration)", path.display()
    )]
    Connect {
        /// The path that Cloud Hypervisor should listen on.
        path: PathBuf,
        /// The error of the system.
        #[source]
        cause: io::Error,
    },
    /// Cloud Hypervisor refused a part of the VM; its own log has the reason.
    #[error("Cloud Hypervisor refuses {what}: its log has the reason")]
    Refused {
        /// The part that was sent.
        what: &'static str,
    },
    /// Cloud Hypervisor ended the connection, or broke the protocol.
    #[error("cannot send or receive {what}")]
    Broken {
        /// The part that was being sent or received.
        what: &'static str,
        /// The error of the system.
        #[source]
        cause: io::Error,
    },
    /// This process cannot be confined ([`Offload::sandbox`](crate::Offload::sandbox)).
    #[error("cannot confine the process that answers page faults")]
    Sandbox(#[source] io::Error),
    /// There is no memory for a file.
    #[error(transparent)]
    Memory(#[from] uzone_os::MapError),
    /// A page cannot be read from the image, or written to the file.
    #[error("cannot restore the page at guest address {address:#x}")]
    Page {
        /// The guest address.
        address: u64,
        /// The error of the image or of the file.
        #[source]
        cause: SnapshotError,
    },
}

impl ServeError {
    /// Returns a function that turns an error of the system into the error of doing `what` to `path`.
    pub(crate) fn at(what: &'static str, path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |cause| Self::At { what, path: path.to_owned(), cause }
    }

    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        let of_io = |cause: &io::Error| match cause.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ErrorKind::NotFound,
            io::ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
            io::ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
            // Processes and descriptors are resources of the system as well.
            _ if matches!(
                cause.raw_os_error(),
                Some(libc::EMFILE | libc::ENFILE | libc::EAGAIN)
            ) =>
            {
                ErrorKind::OutOfMemory
            }
            _ => ErrorKind::Io,
        };
        match self {
            Self::Image(error) | Self::Unreadable { cause: error, .. } => error.kind(),
            Self::At { cause, .. }
            | Self::Group { cause, .. }
            | Self::Ask { cause, .. }
            | Self::Metrics { cause, .. }
            | Self::Start(cause)
            | Self::Capabilities(cause)
            | Self::Wait(cause) => of_io(cause),
            Self::InUse { .. } => ErrorKind::Busy,
            Self::NotASocket { .. } => ErrorKind::InvalidInput,
            Self::Message(_) | Self::MachineConfig { .. } | Self::OtherMachine { .. } => {
                ErrorKind::InvalidData
            }
            Self::Connect { cause, .. } if cause.kind() == io::ErrorKind::PermissionDenied => {
                ErrorKind::PermissionDenied
            }
            Self::Connect { .. } => ErrorKind::NotFound,
            Self::Memory(_) => ErrorKind::OutOfMemory,
            Self::Page { cause, .. } => cause.kind(),
            Self::Refused { .. }
            | Self::Broken { .. }
            | Self::Sandbox(_)
            | Self::Engine(_)
            | Self::Worker { .. } => ErrorKind::Io,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_lacks_its_cause_and_the_chain_has_each_once() {
        let cause = || io::Error::from(io::ErrorKind::NotFound);
        let path = || PathBuf::from("/run/s");
        let (socket, address) = (path(), SocketAddr::from(([127, 0, 0, 1], 1)));
        for error in [
            ServeError::Capabilities(cause()),
            ServeError::at("listen on", &path())(cause()),
            ServeError::Group { path: path(), group: 7, cause: cause() },
            ServeError::Start(cause()),
            ServeError::Ask { path: socket, cause: cause() },
            ServeError::Metrics { address, cause: cause() },
            ServeError::Wait(cause()),
            ServeError::Connect { path: path(), cause: cause() },
            ServeError::Broken { what: "its state", cause: cause() },
            ServeError::Sandbox(cause()),
        ] {
            let (message, cause) = (error.to_string(), cause().to_string());
            assert!(!message.contains(&cause), "{message}");
            assert_eq!(uzone_os::with_causes(&error), format!("{message}: {cause}"));
        }
        assert_eq!(uzone_os::with_causes(&cause()), cause().to_string());
    }
}

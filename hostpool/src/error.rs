//! Why a pool was not opened, or hands out no block: [`HostPoolError`].

use std::error::Error;
use std::io;
use std::sync::Arc;

use uzone_os::{AccessError, DriverError, MappingError, SysError};
use uzone_pages::{ByteLen, ErrorKind};
use uzone_zone::{BindError, WriteError};

/// A pool that was not opened, or that hands out no block.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostPoolError {
    /// The block is not whole pages, the pool is smaller than a block, or a piece of one block is more than the kernel
    /// and the driver take.
    #[error("blocks of {block} in a pool of {size}: {why}")]
    Geometry {
        /// The length of the pool.
        size: ByteLen,
        /// The length of a block.
        block: ByteLen,
        /// The defect.
        why: String,
    },
    /// The memory cannot be mapped.
    #[error("cannot map the pool")]
    Map(#[source] Arc<BindError>),
    /// The memory cannot be used as the options want.
    #[error("cannot prepare the pool")]
    Prepare(#[source] Arc<MappingError>),
    /// The node does not exist, or the kernel does not let this process choose it.
    #[error("cannot take memory from {place}")]
    Place {
        /// The nodes.
        place: String,
        /// The answer of the kernel.
        #[source]
        cause: Arc<io::Error>,
    },
    /// The host does not say which nodes it has.
    #[error("cannot look up the nodes of the host")]
    Host(#[source] Arc<SysError>),
    /// The driver cannot be loaded, or has no context.
    #[error(transparent)]
    Driver(Arc<DriverError>),
    /// Memory cannot be made present.
    #[error("cannot populate the pool")]
    Populate(#[source] Arc<WriteError>),
    /// Memory cannot be registered.
    #[error("cannot register {len} at {address:#x}, byte {offset_bytes:#x} of the pool")]
    Register {
        /// Where the piece starts.
        address: usize,
        /// The same, from the start of the pool.
        offset_bytes: u64,
        /// How long the piece is.
        len: ByteLen,
        /// The answer of the driver.
        #[source]
        cause: Arc<dyn Error + Send + Sync>,
    },
    /// A thread of the pool cannot be started.
    #[error("cannot start a thread of the pool")]
    Thread(#[source] Arc<io::Error>),
    /// The time is up, and there is no ready block yet.
    #[error("no block is ready: {ready} of {of} are, and the others are handed out")]
    NotReady {
        /// How many bytes are ready, handed out or not.
        ready: ByteLen,
        /// How many will be.
        of: ByteLen,
    },
    /// There are not as many free blocks in a row, and none is about to become ready.
    #[error(
        "{wanted} blocks in a row are wanted, and {free} of {all} are free: give back blocks, or make the pool larger"
    )]
    Exhausted {
        /// How many were asked for.
        wanted: usize,
        /// How many are free at all.
        free: usize,
        /// How many the pool has.
        all: usize,
    },
    /// The numbers are not of blocks that were handed out as numbers ([`Block::into_numbers`](crate::Block::into_numbers)).
    #[error("blocks {start} to {end} are not all handed out by number")]
    NotHandedOut {
        /// The first.
        start: usize,
        /// The one behind the last.
        end: usize,
    },
    /// The bytes are not all inside.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// This is a process that was forked off: it has neither the memory nor the threads of the pool.
    #[error(
        "the pool belongs to the process that opened it: open one in this process, or attach to a shared one"
    )]
    Forked,
    /// The pool is being closed.
    #[error("the pool is being closed")]
    Closed,
    /// The memory file is no pool, or its owner is gone.
    #[error("cannot attach to the pool: {why}")]
    Attach {
        /// The defect.
        why: String,
    },
}

impl HostPoolError {
    /// Returns the kind of this failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Geometry { .. } | Self::NotHandedOut { .. } | Self::Access(_) => {
                ErrorKind::InvalidInput
            }
            Self::Map(_) | Self::Exhausted { .. } => ErrorKind::OutOfMemory,
            Self::Populate(error) => error.kind(),
            Self::NotReady { .. } => ErrorKind::TimedOut,
            Self::Closed => ErrorKind::Gone,
            Self::Driver(_) | Self::Forked | Self::Place { .. } => ErrorKind::NotSupported,
            _ => ErrorKind::Other,
        }
    }
}

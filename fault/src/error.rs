//! Errors of lazily mapped memory.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use uzone_os::uffd::{Answered, UffdError};
use uzone_os::{AccessError, MappingError, SysError, Vaddr};
use uzone_pages::{AddrError, ByteLen, ErrorKind, PageSize};
use uzone_zone::{BindError, PinError};

/// Memory that was not mapped lazily.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// There is no userfaultfd, it lacks a feature, or the memory could not be registered with it.
    #[error("cannot receive page faults")]
    Open(#[from] UffdError),
    /// No memory was mapped, for the caller's pages or for their descriptors.
    #[error("cannot map the memory")]
    Map(#[from] uzone_os::MapError),
    /// The states of pages whose writes are events have no room.
    #[error("cannot map the states of the pages")]
    Mapped(#[from] MappingError),
    /// The length has no such number of pages, or the window size was refused.
    #[error(transparent)]
    Addr(#[from] AddrError),
    /// The pages cannot be described.
    #[error("the pages cannot be described")]
    Bind(#[from] BindError),
    /// The backing is shorter than the length that was asked for.
    #[error("cannot map {asked} of a backing that has {has}")]
    TooShort {
        /// The length that was asked for.
        asked: ByteLen,
        /// How long the backing is.
        has: ByteLen,
    },
    /// The length cuts a page.
    #[error("{len} cannot be mapped in pages of {page}: the length has to be a multiple of that")]
    CutsPage {
        /// The length that was asked for.
        len: ByteLen,
        /// The size of a page.
        page: ByteLen,
    },
    /// Two regions of another process have pages of two sizes.
    #[error(
        "the region at {start} has pages of {page}, and the first region has pages of {first}: hand over a descriptor for each size, or use one size"
    )]
    PageSizes {
        /// Where the region starts.
        start: Vaddr,
        /// The size of its pages.
        page: PageSize,
        /// The size of the pages of the first region.
        first: PageSize,
    },
    /// The pages that the kernel put in place when the memory was mapped, in a process that locks all that it maps,
    /// would never be missing.
    #[error("the pages that the kernel has put in place already cannot be given back")]
    Present(#[source] MappingError),
    /// The engine is of the process that this one was forked off, which has its threads.
    #[error("the engine has no threads in this process, which was forked off: make an engine here")]
    Forked,
    /// Processes that are forked off would read zeroes where pages are missing.
    #[error("the mapping cannot be kept from forked processes")]
    Children(#[source] MappingError),
    /// The memory file of a log or of shared pages cannot be made, or an earlier log cannot be read.
    #[error("the memory file of the log of events, or of shared pages, cannot be used")]
    MemoryFile(#[source] io::Error),
    /// Facts or settings of the host cannot be read, its page tables cannot be scanned for writes,
    /// or a thread cannot be kept to a CPU.
    #[error(transparent)]
    Host(#[from] SysError),
    /// The backing cannot be used in this way.
    #[error("the backing cannot be mapped: {reason}")]
    Backing {
        /// Why not.
        reason: &'static str,
    },
    /// The backing did not return the kind of its memory.
    #[error("the backing does not return its memory")]
    Unknown(#[source] io::Error),
    /// An option is larger than it may be.
    #[error("{option} is {asked}: at most {most} are possible")]
    TooMany {
        /// Which option.
        option: &'static str,
        /// Its value.
        asked: usize,
        /// The largest value.
        most: usize,
    },
    /// A thread was not started, or its doorbell was not made.
    #[error("cannot start the threads of the mapping")]
    Thread(#[source] io::Error),
}

impl MapError {
    /// Returns the kind of this failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Open(error) => error.kind(),
            Self::Map(error) => error.kind(),
            Self::Mapped(error) | Self::Children(error) | Self::Present(error) => error.kind(),
            Self::Host(error) => error.kind(),
            Self::Bind(error) => error.kind(),
            Self::Thread(_) => ErrorKind::OutOfMemory,
            Self::MemoryFile(_) | Self::Unknown(_) => ErrorKind::Io,
            _ => ErrorKind::InvalidInput,
        }
    }
}

/// A page that a backing could not produce. A thread that touches it gets `SIGBUS`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackingError {
    /// Reading or writing it failed.
    #[error("cannot {call} {len_bytes} bytes at {offset:#x}")]
    Io {
        /// `read` or `write`.
        call: &'static str,
        /// Where in the backing.
        offset: u64,
        /// How many.
        len_bytes: u64,
        /// The system's answer.
        #[source]
        cause: io::Error,
    },
    /// A page of a file that has a name.
    #[error("cannot read or write {}", path.display())]
    File {
        /// Its name.
        path: PathBuf,
        /// The failure.
        #[source]
        cause: Box<BackingError>,
    },
    /// The backing ends before it.
    #[error("the backing ends at {end:#x}, before the {len_bytes} bytes at {offset:#x} do")]
    Short {
        /// Where in the backing.
        offset: u64,
        /// How many.
        len_bytes: u64,
        /// Where it ends.
        end: u64,
    },
    /// It takes no bytes.
    #[error("cannot write {len_bytes} bytes at {offset:#x}: {reason}")]
    ReadOnly {
        /// Where in the backing.
        offset: u64,
        /// How many.
        len_bytes: u64,
        /// The reason, and the fix.
        reason: &'static str,
    },
    /// The kernel refused the page.
    #[error("the kernel refused the page")]
    Answer(#[from] UffdError),
    /// Another error of a backing.
    #[error(transparent)]
    Other(#[from] Box<dyn std::error::Error + Send + Sync>),
}

impl BackingError {
    /// Returns the kind of this failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { .. } => ErrorKind::Io,
            Self::File { cause, .. } => cause.kind(),
            Self::Short { .. } => ErrorKind::InvalidData,
            Self::ReadOnly { .. } => ErrorKind::NotSupported,
            Self::Answer(error) => error.kind(),
            // An error without a form of its own has the kind of the system's error that it is.
            Self::Other(error) => match error.downcast_ref::<io::Error>().map(io::Error::kind) {
                Some(io::ErrorKind::InvalidData) => ErrorKind::InvalidData,
                Some(io::ErrorKind::TimedOut) => ErrorKind::TimedOut,
                Some(_) => ErrorKind::Io,
                None => ErrorKind::Other,
            },
        }
    }
}

/// A page that is bad, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// Where it is in the backing.
    pub offset: u64,
    /// The kind of the error.
    pub kind: ErrorKind,
    /// The error of the backing, with its causes.
    pub reason: String,
}

/// Refuses an option that is larger than `most`.
pub(crate) fn at_most(option: &'static str, asked: usize, most: usize) -> Result<(), MapError> {
    if asked > most { Err(MapError::TooMany { option, asked, most }) } else { Ok(()) }
}

/// Calls code of the caller's. Returns `None` if it panicked.
pub(crate) fn caught<R>(call: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => Some(result),
        Err(payload) => {
            discard(payload);
            None
        }
    }
}

/// Drops a value of the caller's, whose drop may panic.
pub(crate) fn discard<T>(value: T) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
        // The payload may panic as well.
        std::mem::forget(payload);
    }
}

/// A request that failed on memory that is mapped lazily.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyError {
    /// The range is not inside the mapping or cuts a page, or its bytes cannot be copied.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The pages cannot be given back, or which of them were written is not known.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// A page is bad: its backing failed.
    #[error("the page at {offset:#x} is bad: its backing failed")]
    Poisoned {
        /// Where it is in the mapping.
        offset: u64,
    },
    /// A page could not be produced.
    #[error("the page at {offset:#x} cannot be produced")]
    Backing {
        /// Where it is in the mapping.
        offset: u64,
        /// Why.
        #[source]
        cause: BackingError,
    },
    /// Pages cannot be pinned.
    #[error(transparent)]
    Hold(#[from] PinError),
    /// A page was not ready in time: for 30 seconds another thread had it and did not produce it, where it
    /// was to be present; or the kernel, whose layout of the process kept changing, did not protect it
    /// against writing, or let writers in, for two; or a thread that answers its own fault was filling pages
    /// for two, and none could be given back.
    #[error("the page at {offset:#x} was not produced in time")]
    TimedOut {
        /// Where it is in the mapping.
        offset: u64,
    },
    /// Another library has set its own handler of SIGBUS, in front of the one by which threads answer the faults of this
    /// mapping. The next touch of a missing page may end the process.
    #[error(
        "another handler of SIGBUS was installed after this mapping, whose faults need the one of uzone: install the other before, or map with LazyOptions::answer(Answer::Reader)"
    )]
    HandlerReplaced,
    /// Writes are not tracked.
    #[error("writes to this mapping are not tracked: map it with LazyOptions::track_writes")]
    NotTracked,
    /// Whether a page was written cannot be known while it is given back.
    #[error("cannot give pages back whose writes are tracked: {reason}")]
    CannotEvict {
        /// The reason, and the fix.
        reason: &'static str,
    },
    /// The kernel refused to protect pages against writing.
    #[error(transparent)]
    Answer(#[from] UffdError),
    /// The backing did not take the writes.
    #[error("the writes at {offset:#x} cannot be brought back")]
    WriteBack {
        /// Where it is in the mapping.
        offset: u64,
        /// Why.
        #[source]
        cause: BackingError,
    },
    /// Its pages are kept for another reader already.
    #[error("the memory is being captured already: wait until that has ended")]
    Captured,
    /// The bytes that a capture read may not be those of one moment.
    #[error("{reason}")]
    CaptureLost {
        /// Why not.
        reason: String,
    },
    /// The descriptor of the memory of another process cannot be handed on.
    #[error("the descriptor of the memory cannot be handed on: this process may have too few")]
    NotStopped(#[source] io::Error),
    /// The kernel notes writes to the memory, and reports none.
    #[error(
        "writes to the memory are noted by the kernel, and not reported: copy the pages that were written to"
    )]
    NotReported,
    /// The memory of another process cannot be protected: that has ended, or the layout changes all the time.
    #[error("the memory cannot be protected against writing: {}", match answer {
        Answered::Gone => "its process has ended",
        Answered::LayoutChanging => "its layout changes all the time",
        Answered::Busy => "another userfaultfd has a part of it",
        _ => "it is not as it was registered",
    })]
    NotProtected {
        /// The kernel's answer.
        answer: Answered,
    },
}

impl LazyError {
    /// Returns the kind of this failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Access(error) => error.kind(),
            Self::Mapping(error) => error.kind(),
            Self::Poisoned { .. } => ErrorKind::Poisoned,
            Self::Backing { cause, .. } | Self::WriteBack { cause, .. } => cause.kind(),
            Self::Hold(error) => error.kind(),
            Self::TimedOut { .. } => ErrorKind::TimedOut,
            Self::NotTracked | Self::CannotEvict { .. } => ErrorKind::InvalidInput,
            Self::NotProtected { answer: Answered::Gone } => ErrorKind::Gone,
            Self::Captured | Self::NotProtected { .. } => ErrorKind::Busy,
            Self::NotReported | Self::HandlerReplaced => ErrorKind::NotSupported,
            Self::CaptureLost { .. } | Self::NotStopped(_) => ErrorKind::Io,
            Self::Answer(error) => error.kind(),
        }
    }
}

//! Failures of operations on mapped memory: [`MappingError`], and [`Rejected`], which gives back the value that the
//! operation would have consumed.

use core::ops::Range;
use std::{fmt, io};

use rustix::io::Errno;
use uzone_pages::{ByteLen, ErrorKind};

use crate::host::root::SysError;
use crate::map::bytes::AccessError;
use crate::map::options::Addr;

/// An operation on mapped memory that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MappingError {
    /// The range is not inside the mapping, or cuts a page.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// A setting or a fact of the host could not be read, or a thread could not be placed.
    #[error(transparent)]
    Sys(#[from] SysError),
    /// A range was not made present, for a reason that is the [`MappingError::kind`]: there is no memory, a touch
    /// would have raised `SIGBUS`, the hardware lost a page, or the call was interrupted too often.
    #[error("{}", not_present(range, *done, cause))]
    Populate {
        /// The part that failed.
        range: Range<u64>,
        /// The part of the request that is present.
        done: ByteLen,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The kernel does not know an advice, or does not give it to this kind of memory.
    #[error(
        "the kernel refused {advice} for bytes {range:#x?}: it has no transparent huge pages, or not for this kind of memory"
    )]
    Advice {
        /// The kernel's name of the advice.
        advice: &'static str,
        /// The range.
        range: Range<u64>,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// Pages were not given back.
    #[error("the kernel did not take bytes {range:#x?} back, all of which must still be mapped")]
    GiveBack {
        /// The range that was to be given back.
        range: Range<u64>,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// Giving the pages back would not make the bytes zero.
    #[error("cannot punch bytes {range:#x?}: {why}; clear them in place instead")]
    NotPunchable {
        /// The range that was to be punched.
        range: Range<u64>,
        /// The reason, by the kind of memory.
        why: &'static str,
    },
    /// The file system did not punch a hole.
    #[error(
        "cannot punch bytes {range:#x?} out of the file behind the mapping: its file system has no holes, or the file is sealed; clear them in place instead"
    )]
    Punch {
        /// The range that was to be punched.
        range: Range<u64>,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The page tables could not be scanned.
    #[error("cannot scan the page tables for bytes {range:#x?}")]
    Scan {
        /// The range that was to be scanned.
        range: Range<u64>,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The storage of the file behind the mapping did not take its pages.
    #[error("cannot write bytes {range:#x?} to the storage of their file")]
    Sync {
        /// The range that was to be written.
        range: Range<u64>,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The memory is of a file, or adopted.
    #[error("it is of a file that others may have: its bytes can be copied, and not lent")]
    Shared,
    /// The promise that the memory is exclusive was made for another mapping.
    #[error("the promise was made for another mapping than this one")]
    AnotherMapping,
    /// Nothing can be written to the mapping.
    #[error("the mapping is read-only")]
    ReadOnly,
    /// Memory of this length does not hold so many values, or none were asked for.
    #[error("memory of {len} at {addr} does not hold {count} values of {size_bytes} bytes")]
    NotSoMany {
        /// The start of the memory.
        addr: Addr,
        /// The number of values that were asked for.
        count: usize,
        /// The length of each.
        size_bytes: usize,
        /// The length of the memory.
        len: ByteLen,
    },
    /// The values need more alignment than the memory has.
    #[error("memory at {addr} is not a multiple of {align_bytes}, the alignment of the values")]
    Unaligned {
        /// The start of the memory.
        addr: Addr,
        /// The alignment that the values need.
        align_bytes: usize,
    },
    /// Two mappings are not neighbours that were cut from one.
    #[error(
        "cannot join the mapping of {len} at {front} with the one at {behind}: only neighbours that were cut from one mapping can be joined"
    )]
    NotNeighbours {
        /// The start of the first.
        front: Addr,
        /// The length of the first.
        len: ByteLen,
        /// The start of the second.
        behind: Addr,
    },
}

impl MappingError {
    /// Returns the kind of failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Access(error) => error.kind(),
            Self::Sys(error) => error.kind(),
            Self::Populate { cause, .. } => match Errno::from_io_error(cause) {
                Some(Errno::NOMEM) => ErrorKind::OutOfMemory,
                Some(Errno::HWPOISON) => ErrorKind::Poisoned,
                _ => ErrorKind::Io,
            },
            Self::Scan { .. } | Self::Sync { .. } => ErrorKind::Io,
            Self::Advice { .. }
            | Self::GiveBack { .. }
            | Self::NotPunchable { .. }
            | Self::Punch { .. } => ErrorKind::NotSupported,
            _ => ErrorKind::InvalidInput,
        }
    }
}

/// Returns the reason why a range was not made present, and a remedy.
fn not_present(range: &Range<u64>, done: ByteLen, cause: &io::Error) -> String {
    match Errno::from_io_error(cause) {
        Some(Errno::NOMEM) => format!(
            "no memory for bytes {range:#x?}, after {done} were present: free memory, or raise the limit of the control group"
        ),
        Some(Errno::FAULT) => format!(
            "no memory is behind bytes {range:#x?}: the file was truncated, or the pool of huge pages or its control group is exhausted"
        ),
        Some(Errno::HWPOISON) => {
            format!("a page of bytes {range:#x?} is broken: map other memory in its place")
        }
        _ => format!("the kernel did not make bytes {range:#x?} present"),
    }
}

/// The value that a call did not take, given back unchanged.
#[derive(Debug)]
pub struct Rejected<T, E = MappingError> {
    /// The value. Boxed: a failure travels through many returns.
    pub value: Box<T>,
    /// The reason why it was not taken.
    pub cause: E,
}

impl<T, E: fmt::Display> fmt::Display for Rejected<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)
    }
}

impl<T: fmt::Debug, E: std::error::Error> std::error::Error for Rejected<T, E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.source()
    }
}

impl<T, E> Rejected<T, E> {
    pub(crate) fn new(value: T, cause: impl Into<E>) -> Self {
        Self { value: Box::new(value), cause: cause.into() }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    #[test]
    fn no_error_repeats_the_message_of_its_cause() {
        let (cause, range) = (|| io::Error::from_raw_os_error(libc::ENOLCK), || 0..4096);
        for error in [
            MappingError::Populate { range: range(), done: ByteLen::ZERO, cause: cause() },
            MappingError::Advice { advice: "MADV_HUGEPAGE", range: range(), cause: cause() },
            MappingError::GiveBack { range: range(), cause: cause() },
            MappingError::Punch { range: range(), cause: cause() },
            MappingError::Scan { range: range(), cause: cause() },
            MappingError::Sync { range: range(), cause: cause() },
        ] {
            let source = error.source().map(ToString::to_string);
            assert_eq!(source, Some(cause().to_string()));
            assert!(!error.to_string().contains(&cause().to_string()), "{error}");
        }
    }
}

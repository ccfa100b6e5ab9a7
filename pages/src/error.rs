//! The kinds of errors, by which a caller acts on an error, whichever mechanism returned it.
//!
//! Each error enum of the packages has a method `kind` that returns one. The command maps kinds to
//! exit codes and the C library maps them to errno ([`ErrorKind::errno`]).

use crate::addr::AddrError;
use crate::content::Content;
use crate::folio::{AdvanceError, HoldError};

/// The kind of an error.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument, a range or a combination of options is invalid.
    InvalidInput,
    /// Memory, or a resource with a limit, is exhausted.
    OutOfMemory,
    /// Something is in use: pins, references, a registration or another thread.
    Busy,
    /// This host or this kind of memory does not offer the request.
    NotSupported,
    /// The kernel refused for want of a permission.
    PermissionDenied,
    /// The page, or the memory below it, is poisoned.
    Poisoned,
    /// Reading or writing a file or a device failed.
    Io,
    /// There is no such region, page, file or process.
    NotFound,
    /// It exists already.
    AlreadyExists,
    /// The deadline passed.
    TimedOut,
    /// The operation was cancelled.
    Cancelled,
    /// Data does not have the form that it must have.
    InvalidData,
    /// The pagemap, engine or process that this needs has ended.
    Gone,
    /// A system call failed for a reason without a kind of its own.
    Other,
}

impl ErrorKind {
    /// Returns the Linux error number of this kind, as a positive number.
    #[must_use]
    pub const fn errno(self) -> i32 {
        match self {
            Self::InvalidInput => 22,
            Self::OutOfMemory => 12,
            Self::Busy => 16,
            Self::NotSupported => 95,
            Self::PermissionDenied => 1,
            Self::Poisoned => 133,
            Self::Io | Self::Other => 5,
            Self::NotFound => 2,
            Self::AlreadyExists => 17,
            Self::TimedOut => 110,
            Self::Cancelled => 125,
            Self::InvalidData => 74,
            Self::Gone => 19,
        }
    }
}

/// Gives each error type of this package its `kind`.
macro_rules! kinds {
    ($($error:ty { $($pattern:pat => $kind:ident),+ $(,)? })+) => {$(
        impl $error {
            /// Returns the kind of the error.
            #[must_use]
            pub const fn kind(&self) -> ErrorKind {
                match self {
                    $($pattern => ErrorKind::$kind,)+
                }
            }
        }
    )+};
}

kinds! {
    AddrError { _ => InvalidInput }
    HoldError {
        Self::Free => InvalidInput,
        Self::Overflow | Self::Full => OutOfMemory,
        Self::Content(Content::Poisoned) => Poisoned,
        Self::Content(_) | Self::Busy | Self::Closing => Busy,
        Self::Gone => Gone,
    }
    AdvanceError {
        Self::Found { found: Content::Poisoned, .. } => Poisoned,
        Self::Found { .. } | Self::Pinned { .. } => Busy,
        Self::Illegal { .. } | Self::NotHeld { .. } => InvalidInput,
        Self::NotHere { .. } => NotFound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poisoned_page_is_poisoned_for_whatever_was_refused() {
        assert_eq!(HoldError::Content(Content::Poisoned).kind(), ErrorKind::Poisoned);
        assert_eq!(HoldError::Content(Content::Zeroing).kind(), ErrorKind::Busy);
        let found = |found| AdvanceError::Found { expected: Content::Zeroing, found }.kind();
        assert_eq!(found(Content::Poisoned), ErrorKind::Poisoned);
        assert_eq!(found(Content::Zero), ErrorKind::Busy);
        assert_eq!(HoldError::Gone.kind().errno(), 19);
    }
}

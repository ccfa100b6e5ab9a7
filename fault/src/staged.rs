//! Pages that one thread produces and another puts in place: [`Staged`].
//!
//! What another process gives back is zero from then on, and only the thread that reads the removals
//! knows what may still be filled: a copy that another thread began earlier would bring old bytes
//! back. So a thread that waits for a device fills this instead of the memory, by a kernel that only
//! takes notes, and the thread that answers puts it in place if the page is still wanted.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use uzone_os::uffd::{AnswerError, Answered};

use crate::error::BackingError;
use crate::kernel::Kernel;

/// What was produced for a page.
#[derive(Debug)]
pub(crate) enum Staged {
    /// Its bytes.
    Bytes(Vec<u8>),
    /// That it is zero.
    Zero,
    /// That the page cache has it.
    Cached,
    /// That it cannot be had.
    Failed(BackingError),
}

/// A kernel that takes note of what it is given for one page.
#[derive(Debug, Default)]
pub(crate) struct NoteTaker(Mutex<Option<Staged>>);

impl NoteTaker {
    fn note(&self, staged: Staged) -> Result<Answered, AnswerError> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(staged);
        Ok(Answered::All)
    }

    /// Returns what it was given.
    pub(crate) fn into_note(self) -> Option<Staged> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kernel for NoteTaker {
    fn copy(&self, _: u64, bytes: &[u8]) -> Result<Answered, AnswerError> {
        self.note(Staged::Bytes(bytes.to_vec()))
    }

    fn zero(&self, _: Range<u64>) -> Result<Answered, AnswerError> {
        self.note(Staged::Zero)
    }

    fn continue_mapping(&self, _: Range<u64>) -> Result<Answered, AnswerError> {
        self.note(Staged::Cached)
    }

    fn poison(&self, _: Range<u64>) -> Result<Answered, AnswerError> {
        Ok(Answered::All)
    }

    fn wake(&self, _: Range<u64>) {}
}

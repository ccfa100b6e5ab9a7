//! Pages that one thread produces and another installs: [`Staged`].
//!
//! Memory that another process gives back is zero from then on, and only the thread that reads the removals knows
//! which pages may still be filled: a copy that another thread began earlier would bring old bytes back. So an I/O
//! thread fills a [`Staged`] instead of the memory, and the reader installs it if the page is still wanted.

use std::sync::{Mutex, PoisonError};

use uzone_os::lock;
use uzone_os::uffd::{Answered, Fill};

use crate::error::BackingError;

pub(crate) const LEFT_OUT: &str = "the backing left the page out";

/// The product of an attempt to fill a page.
#[derive(Debug)]
pub(crate) enum Staged {
    /// Its bytes.
    Bytes(Vec<u8>),
    /// That it is zero.
    Zero,
    /// That the page cache may have it, and the alternative.
    Cached {
        /// The product where the page is a hole.
        otherwise: Box<Staged>,
    },
    /// That it cannot be produced.
    Failed(BackingError),
}

/// The place of a kernel that keeps the bytes of one page.
///
/// It cannot know whether the page cache has a page, so it answers the first continue with a hole, and
/// keeps the backing's next step for the case that it is one.
#[derive(Debug, Default)]
pub(crate) struct StagingFiller(Mutex<Notes>);

#[derive(Debug, Default)]
struct Notes {
    staged: Option<Staged>,
    has_continued: bool,
}

impl StagingFiller {
    fn keep(&self, staged: Staged) -> Answered {
        lock(&self.0).staged = Some(staged);
        Answered::All
    }

    /// Takes a fill, and answers as a kernel would.
    pub(crate) fn note(&self, fill: Fill<'_>) -> Answered {
        match fill {
            Fill::Bytes(bytes) => self.keep(Staged::Bytes(bytes.to_vec())),
            Fill::Zero => self.keep(Staged::Zero),
            Fill::Cached if std::mem::replace(&mut lock(&self.0).has_continued, true) => {
                // The backing has filled the file meanwhile.
                let otherwise = Box::new(Staged::Failed(BackingError::Other(LEFT_OUT.into())));
                self.keep(Staged::Cached { otherwise })
            }
            Fill::Cached | Fill::From { .. } => Answered::Hole,
            Fill::Poison => Answered::All,
        }
    }

    /// Returns the bytes of the page, or `failure`.
    pub(crate) fn into_staged(self, failure: Option<BackingError>) -> Staged {
        let notes = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        let left_out = || Staged::Failed(BackingError::Other(LEFT_OUT.into()));
        let staged = match failure {
            Some(error) => Staged::Failed(error),
            None => notes.staged.unwrap_or_else(left_out),
        };
        if notes.has_continued { Staged::Cached { otherwise: Box::new(staged) } } else { staged }
    }
}

//! Why a store, a pattern or a policy of stores cannot be had: [`StreamError`].

use std::error::Error;
use std::fmt;

use crate::path::Path;
use crate::work::{STORE_POLICY, Work};

/// The longest element of a pattern, in words.
pub(crate) const MAX_ELEMENT_WORDS: usize = 12;

/// A store that cannot be taken, a pattern that cannot be prepared, or a value of [`STORE_POLICY`] that
/// cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StreamError {
    /// No path has this name.
    UnknownPath {
        /// The name as it was given; bytes that are not UTF-8 are replaced.
        name: String,
    },
    /// This build, CPU or operating system does not offer the path.
    Unavailable {
        /// The path asked for.
        path: Path,
    },
    /// An element of a pattern has 1 to 12 words; this one had `words`.
    ElementWords {
        /// How many words were given.
        words: usize,
    },
    /// A pattern must have a step for each word.
    StepWords {
        /// How many words were given.
        words: usize,
        /// How many steps were given.
        steps: usize,
    },
    /// A part of a policy is not `fill=`, `zero=` or `copy=` and a store.
    Malformed {
        /// The part.
        part: String,
        /// The default of this CPU, as it would be written.
        default: String,
    },
    /// A policy names a work twice.
    Twice {
        /// The work.
        work: Work,
    },
    /// A store of a policy has no such name, or this CPU does not have it.
    Store {
        /// The part.
        part: String,
        /// The defect of the store.
        cause: Box<StreamError>,
    },
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, admits: fn(&Path) -> bool| {
            for (index, path) in Path::ALL.into_iter().filter(admits).enumerate() {
                write!(f, "{} {path}", if index == 0 { "" } else { "," })?;
            }
            Ok(())
        };
        match self {
            Self::UnknownPath { name } => {
                write!(f, "no stream path is called {name:?}; there are")?;
                list(f, |_| true)
            }
            Self::Unavailable { path } => {
                write!(f, "stream path {path} is not available here; there are")?;
                list(f, |path| path.is_available())
            }
            Self::ElementWords { words } => {
                write!(f, "a pattern of {words} words: an element has 1 to {MAX_ELEMENT_WORDS}")
            }
            Self::StepWords { words, steps } => {
                write!(f, "a pattern of {words} words with {steps} steps")
            }
            Self::Malformed { part, default } => write!(
                f,
                "{part:?} is not fill=STORE, zero=STORE or copy=STORE; write it as {STORE_POLICY}={default}"
            ),
            Self::Twice { work } => {
                write!(f, "{} has two stores; write it once in {STORE_POLICY}", work.name())
            }
            Self::Store { part, cause } => write!(f, "in {part:?} of {STORE_POLICY}: {cause}"),
        }
    }
}

impl Error for StreamError {}

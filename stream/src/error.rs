//! Why a store, a pattern or a policy of stores cannot be had: [`StreamError`].

use crate::path::Path;
use crate::work::{STORE_POLICY, Work};

/// The longest element of a pattern, in words.
pub(crate) const MAX_ELEMENT_WORDS: usize = 12;

/// A store that cannot be taken, a pattern that cannot be prepared, or a value of [`STORE_POLICY`] that
/// cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// No path has this name.
    #[error("no stream path is called {name:?}; there are {}", list(|_| true))]
    UnknownPath {
        /// The name as it was given; bytes that are not UTF-8 are replaced.
        name: String,
    },
    /// This build, CPU or operating system does not offer the path.
    #[error("stream path {path} is not available here; there are {}", list(|path| path.is_available()))]
    Unavailable {
        /// The path asked for.
        path: Path,
    },
    /// An element of a pattern has 1 to 12 words; this one had `words`.
    #[error("a pattern of {words} words: an element has 1 to {MAX_ELEMENT_WORDS}")]
    ElementWords {
        /// How many words were given.
        words: usize,
    },
    /// A pattern must have a step for each word.
    #[error("a pattern of {words} words with {steps} steps")]
    StepWords {
        /// How many words were given.
        words: usize,
        /// How many steps were given.
        steps: usize,
    },
    /// A part of a policy is not `fill=`, `zero=` or `copy=` and a store.
    #[error(
        "{part:?} is not fill=STORE, zero=STORE or copy=STORE; write it as {STORE_POLICY}={default}"
    )]
    Malformed {
        /// The part.
        part: String,
        /// The default of this CPU, as it would be written.
        default: String,
    },
    /// A policy names a work twice.
    #[error("{} has two stores; write it once in {STORE_POLICY}", work.name())]
    Twice {
        /// The work.
        work: Work,
    },
    /// A store of a policy has no such name, or this CPU does not have it.
    #[error("in {part:?} of {STORE_POLICY}: {cause}")]
    Store {
        /// The part.
        part: String,
        /// The defect of the store.
        cause: Box<StreamError>,
    },
}

/// Returns the names of some paths.
fn list(admits: fn(&Path) -> bool) -> String {
    let names: Vec<String> =
        Path::ALL.iter().filter(|path| admits(path)).map(ToString::to_string).collect();
    names.join(", ")
}

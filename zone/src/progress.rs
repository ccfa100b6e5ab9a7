//! How far a long operation is, and how another thread stops it: [`Progress`], [`Cancel`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uzone_pages::ByteLen;

/// How far a long operation is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Progress {
    /// Bytes that are done: of descriptors for a bind, else of the region.
    pub done: ByteLen,
    /// Bytes that will be.
    pub total: ByteLen,
}

/// What is called with the progress of an operation, if anything is.
#[derive(Clone, Default)]
pub(crate) struct OnProgress(Option<Arc<dyn Fn(Progress) + Send + Sync>>);

impl OnProgress {
    pub(crate) fn new(call: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(call)))
    }

    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    pub(crate) fn call(&self, done: ByteLen, total: ByteLen) {
        if let Some(call) = &self.0 {
            call(Progress { done, total });
        }
    }
}

impl fmt::Debug for OnProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OnProgress").field(&self.is_some()).finish()
    }
}

/// A flag that stops a long operation from another thread: a bind at its next section of 2 MiB, what
/// clears or copies after the batch under way.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Stops the operations that were given a clone of this flag.
    pub fn cancel(&self) {
        // Relaxed: nothing is published by it, and a section later is early enough.
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether [`Cancel::cancel`] was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed) // as in `cancel`
    }

    /// Returns the flag itself, for the packages below.
    pub(crate) fn flag(&self) -> &AtomicBool {
        &self.0
    }
}

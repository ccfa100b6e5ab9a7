//! How far a long operation is, and how another thread stops it: [`Cancel`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uzone_pages::ByteLen;

/// What is called with how many bytes of an operation are done and how many will be, if anything is.
#[derive(Clone, Default)]
pub(crate) struct OnProgress(Option<Arc<dyn Fn(ByteLen, ByteLen) + Send + Sync>>);

impl OnProgress {
    pub(crate) fn new(call: impl Fn(ByteLen, ByteLen) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(call)))
    }

    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    pub(crate) fn call(&self, done: ByteLen, total: ByteLen) {
        if let Some(call) = &self.0 {
            call(done, total);
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

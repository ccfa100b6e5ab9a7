//! The callback for the progress of a long operation: [`OnProgress`].

use std::fmt;
use std::sync::Arc;

use uzone_pages::ByteLen;

/// A callback for how many bytes of an operation are done and how many will be, if there is one.
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

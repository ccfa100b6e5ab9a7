//! Panics of a program's callbacks, kept until the interrupted work is done: [`FirstPanic`].

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The first panic of several calls of a callback. The calls after it are made all the same.
#[derive(Default)]
pub(crate) struct FirstPanic(Option<Box<dyn Any + Send>>);

impl FirstPanic {
    /// Calls `callback`, and keeps its panic if it is the first. `None` if it panicked.
    pub(crate) fn call<T>(&mut self, callback: impl FnOnce() -> T) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(callback)) {
            Ok(value) => Some(value),
            Err(panic) => {
                if self.0.is_none() {
                    self.0 = Some(panic);
                } else {
                    // Its drop may panic as well.
                    std::mem::forget(panic);
                }
                None
            }
        }
    }

    /// Goes on with the panic that was kept. On a thread that is unwinding already, where a second
    /// panic would end the process, it is logged and forgotten.
    pub(crate) fn resume(self) {
        let Some(panic) = self.0 else { return };
        if std::thread::panicking() {
            tracing::error!("a callback panicked while a guard was dropped by another panic");
            std::mem::forget(panic);
        } else {
            resume_unwind(panic);
        }
    }
}

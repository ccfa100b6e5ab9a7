//! A value whose memory is lent to buffers of Python, and is given back when none has it: [`Lent`].

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A value, and how many buffers have its memory.
///
/// # Invariants
/// The value is taken out only while `loans` is 0, under the lock. The lock is never held while the lock of the
/// interpreter is acquired or released.
#[derive(Debug)]
pub(crate) struct Lent<T>(Mutex<State<T>>);

#[derive(Debug)]
struct State<T> {
    value: Option<T>,
    loans: usize,
}

impl<T> Lent<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(State { value: Some(value), loans: 0 }))
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what `look` finds; `None` if the value was taken out.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&T) -> R) -> Option<R> {
        self.lock().value.as_ref().map(look)
    }

    /// Lends the memory until [`Lent::put_back`] is called, and returns what `look` finds; `None` if the value was taken
    /// out.
    pub(crate) fn lend<R>(&self, look: impl FnOnce(&T) -> R) -> Option<R> {
        let mut state = self.lock();
        let found = state.value.as_ref().map(look)?;
        state.loans += 1;
        Some(found)
    }

    /// Ends a loan.
    pub(crate) fn put_back(&self) {
        self.lock().loans -= 1;
    }

    /// Takes the value out, if it is there still.
    ///
    /// # Errors
    /// [`InUse`] if a buffer has the memory.
    pub(crate) fn take(&self) -> Result<Option<T>, InUse> {
        let mut state = self.lock();
        if state.loans == 0 { Ok(state.value.take()) } else { Err(InUse) }
    }
}

/// A buffer has the memory.
#[derive(Debug)]
pub(crate) struct InUse;

impl From<InUse> for pyo3::PyErr {
    fn from(_: InUse) -> Self {
        pyo3::exceptions::PyBufferError::new_err("an array or another buffer still has the memory")
    }
}

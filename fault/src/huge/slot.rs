//! Memory to make one huge page in, before it is installed: [`Slot`].

use std::sync::{Mutex, PoisonError};

use uzone_os::Exclusive;

/// Memory to make one page in.
pub(crate) struct Slot<'a> {
    // `None` when it has gone home.
    pub(crate) memory: Option<Exclusive>,
    pub(crate) home: &'a Mutex<Vec<Exclusive>>,
}

impl Slot<'_> {
    pub(crate) fn memory(&mut self) -> &mut Exclusive {
        match &mut self.memory {
            Some(memory) => memory,
            None => unreachable!("only dropping it takes the memory out"),
        }
    }

    /// Returns its bytes, which hold anything.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        self.memory().as_bytes_mut()
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.home.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        }
    }
}

//! Memory that a function fills: [`FunctionBacking`].

use std::fmt;

use crate::backing::hooks::Backing;
use crate::backing::window::Window;
use crate::error::BackingError;

/// Pages that a closure of the caller's fills: it is given an offset and whole pages to write to.
///
/// The bytes it is given hold anything; it writes every one of them.
///
/// Another thread calls it while the faulting one waits. A closure that takes a lock which the faulting thread may
/// hold, such as that of the allocator, waits for ever then, unless there is a
/// [deadline](crate::LazyOptions::deadline).
pub struct FunctionBacking<F> {
    fill: F,
    is_quick: bool,
}

impl<F> FunctionBacking<F>
where
    F: Fn(u64, &mut [u8]) -> Result<(), BackingError> + Send + Sync,
{
    /// Takes a closure that never blocks: it fills whole windows, in the thread that answers
    /// faults.
    #[must_use]
    pub fn quick(fill: F) -> Self {
        Self { fill, is_quick: true }
    }

    /// Takes a closure that may block: it fills the pages that threads wait for, in an I/O thread.
    #[must_use]
    pub fn slow(fill: F) -> Self {
        Self { fill, is_quick: false }
    }
}

impl<F> Backing for FunctionBacking<F>
where
    F: Fn(u64, &mut [u8]) -> Result<(), BackingError> + Send + Sync,
{
    fn map_pages(&self, window: &mut Window<'_>) {
        if !self.is_quick {
            return;
        }
        while let Some(run) = window.next_run() {
            let mut at = run.start;
            while at < run.end {
                let end = run.end.min(at + window.room());
                let filled =
                    window.copy_with(at..end, |bytes| (self.fill)(at, bytes).map(|()| bytes.len()));
                // If a thread waits for a page that fails, it fails again in `fault`, and is counted.
                if filled.is_err() {
                    return;
                }
                at = end;
            }
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        let range = window.range();
        let start = range.start;
        let _ = window.copy_with(range, |bytes| (self.fill)(start, bytes).map(|()| bytes.len()))?;
        Ok(())
    }
}

impl<F> fmt::Debug for FunctionBacking<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionBacking").field("is_quick", &self.is_quick).finish_non_exhaustive()
    }
}

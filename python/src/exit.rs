//! The end of the interpreter: memory that nothing refers to is given back before, and nothing is opened afterwards.
//!
//! A buffer that a module still holds stays mapped: its destructor may read it. The library answers the faults of the
//! exiting thread until the process ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;

use crate::error::Failure;

/// Set before memory is given back: nothing is opened any more.
static IS_ENDING: AtomicBool = AtomicBool::new(false);
/// Set afterwards: no thread of this package enters the interpreter any more.
static HAS_ENDED: AtomicBool = AtomicBool::new(false);
static LIVE: Mutex<Vec<Weak<dyn Ends>>> = Mutex::new(Vec::new());

/// Memory that ends with the interpreter.
pub(crate) trait Ends: Send + Sync {
    /// Ends the threads of the memory, and gives it back unless it is in use.
    fn end(&self);
}

/// Has `memory` end with the interpreter.
pub(crate) fn add(memory: &Arc<impl Ends + 'static>) {
    let memory: Arc<dyn Ends> = memory.clone();
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    live.retain(|other| other.strong_count() != 0);
    live.push(Arc::downgrade(&memory));
}

/// Refuses to open something once the interpreter is ending.
pub(crate) fn check_open() -> Result<(), Failure> {
    // Relaxed: the thread that ends the interpreter sees its own store, and any other one ends with it.
    check(!IS_ENDING.load(Ordering::Relaxed))
}

/// Refuses to call a function of Python once the interpreter has ended.
pub(crate) fn check_call() -> Result<(), Failure> {
    // SeqCst: a call that started before was waited for when the memory was given back.
    check(!HAS_ENDED.load(Ordering::SeqCst))
}

fn check(is_so: bool) -> Result<(), Failure> {
    if is_so { Ok(()) } else { Err(Failure::input("the interpreter is ending")) }
}

/// Has the interpreter call [`end`] before it ends.
pub(crate) fn register(py: Python<'_>) -> PyResult<()> {
    let end = wrap_pyfunction!(end, py)?;
    py.import("atexit")?.call_method1("register", (end,)).map(drop)
}

/// Ends the threads of all memory.
#[pyfunction]
fn end(py: Python<'_>) {
    IS_ENDING.store(true, Ordering::Relaxed); // as in `check_open`
    py.detach(|| {
        let live = std::mem::take(&mut *LIVE.lock().unwrap_or_else(PoisonError::into_inner));
        live.iter().filter_map(Weak::upgrade).for_each(|memory| memory.end());
    });
    HAS_ENDED.store(true, Ordering::SeqCst); // as in `check_call`
}

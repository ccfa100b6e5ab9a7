//! Work that takes long, off the lock of the interpreter: [`watched`].

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;

/// How often signals are handled and progress is reported.
const LOOK: Duration = Duration::from_millis(50);
/// The most threads of one call.
const MOST_THREADS: usize = 16;

/// The state of the work: how far it is, and whether it is to stop.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    done: AtomicU64,
    is_cancelled: AtomicBool,
}

impl Watch {
    /// Adds to the bytes that are done. Returns whether to go on.
    pub(crate) fn add(&self, bytes: u64) -> bool {
        // Relaxed: a statistic, and a flag by which nothing is published.
        self.done.fetch_add(bytes, Ordering::Relaxed);
        !self.is_cancelled.load(Ordering::Relaxed)
    }

    /// Sets how many bytes are done. Returns whether to go on.
    pub(crate) fn set(&self, bytes: u64) -> bool {
        // Relaxed: as above.
        self.done.fetch_max(bytes, Ordering::Relaxed);
        self.add(0)
    }
}

/// Runs `work` on a thread without the lock of the interpreter. The calling thread handles signals and calls
/// `progress` with the bytes that are done and `total`; an exception of either cancels the work and is returned.
pub(crate) fn watched<T: Send, E: Send + Into<PyErr>>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    total: u64,
    work: impl FnOnce(&Watch) -> Result<T, E> + Send,
) -> PyResult<T> {
    let watch = Watch::default();
    let report = |py: Python<'_>, done: u64| match &progress {
        Some(progress) => progress.call1(py, (done, total)).map(drop),
        None => Ok(()),
    };
    let (outcome, stopped) = py.detach(|| {
        thread::scope(|scope| {
            let (end, is_over) = sync_channel::<()>(1);
            let (watch, mut stopped) = (&watch, None);
            let worker = scope.spawn(move || {
                // Dropped when the work ends, however it does.
                let _end = end;
                work(watch)
            });
            while is_over.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if stopped.is_some() {
                    continue;
                }
                let done = watch.done.load(Ordering::Relaxed); // a statistic
                let looked =
                    Python::attach(|py| py.check_signals().and_then(|()| report(py, done)));
                if let Err(exception) = looked {
                    watch.is_cancelled.store(true, Ordering::Relaxed);
                    stopped = Some(exception);
                }
            }
            (worker.join().unwrap_or_else(|panic| resume_unwind(panic)), stopped)
        })
    });
    match (outcome, stopped) {
        (_, Some(exception)) => Err(exception),
        (Err(error), None) => Err(error.into()),
        (Ok(value), None) => report(py, total).map(|()| value),
    }
}

/// Drops a value whose drop may wait, without the lock of the interpreter.
pub(crate) fn drop_detached<T: Send>(value: T) {
    let mut value = Some(value);
    // Once the interpreter ends, there is no lock.
    if Python::try_attach(|py| py.detach(|| drop(value.take()))).is_none() {
        drop(value);
    }
}

/// Calls `each` for parts of a range of `step` bytes, on several threads, until one fails or the work is cancelled.
pub(crate) fn share<E: Send>(
    watch: &Watch,
    range: &Range<u64>,
    step: u64,
    each: impl Fn(Range<u64>) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let goes_on = || watch.add(0);
    uzone_os::share_range("uzone-work", threads(), range, step, goes_on, |part| {
        let bytes = part.end - part.start;
        each(part)?;
        watch.add(bytes);
        Ok(())
    })
}

/// Returns how many threads share work.
pub(crate) fn threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS)
}

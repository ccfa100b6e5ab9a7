//! Work that takes long, with calls of the caller's function meanwhile: [`watched`], [`share`].

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use crate::error::{CallerError, Failure};

/// How often progress is reported.
const LOOK: Duration = Duration::from_millis(50);
/// The most threads of one call.
const MOST_THREADS: usize = 16;

/// A function that receives how many of `total_bytes` are done. The thread that made the call runs it, about 20 times a
/// second and once at the end. It returns 0 to go on; a negative errno ends the call, which returns it.
pub type uzone_progress_function =
    Option<unsafe extern "C" fn(user: *mut c_void, done_bytes: u64, total_bytes: u64) -> c_int>;

/// A function of the caller's, and the pointer that it wants.
#[derive(Clone, Copy)]
pub(crate) struct Progress {
    pub(crate) function: uzone_progress_function,
    pub(crate) user: *mut c_void,
}

/// How far the work is, and whether it is to stop.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    done: AtomicU64,
    is_cancelled: Arc<AtomicBool>,
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

    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed); // as above
    }

    /// Returns the flag that stops the work.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        self.is_cancelled.clone()
    }
}

impl Progress {
    fn report(self, done: u64, total: u64) -> Result<(), CallerError> {
        let Some(function) = self.function else { return Ok(()) };
        // SAFETY: The caller vouches for its function and its pointer until the call returns, and this is its thread.
        CallerError::check(unsafe { function(self.user, done, total) })
    }

    /// Runs `work`, on a thread beside this one if there is a function to call meanwhile. An error of that function
    /// cancels the work and is returned.
    pub(crate) fn watched<T: Send>(
        self,
        total: u64,
        work: impl FnOnce(&Arc<Watch>) -> Result<T, Failure> + Send,
    ) -> Result<T, Failure> {
        let watch = &Arc::<Watch>::default();
        if self.function.is_none() {
            return work(watch);
        }
        let (outcome, stopped) = thread::scope(|scope| {
            let (end, is_over) = sync_channel::<()>(1);
            let mut stopped = None;
            let worker = thread::Builder::new().name("uzone-work".to_owned());
            let worker = worker.spawn_scoped(scope, move || {
                // Dropped when the work ends, however it does.
                let _end = end;
                work(watch)
            })?;
            while is_over.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                let done = watch.done.load(Ordering::Relaxed); // a statistic
                if stopped.is_none()
                    && let Err(error) = self.report(done, total)
                {
                    watch.cancel();
                    stopped = Some(error);
                }
            }
            let outcome = worker.join().unwrap_or_else(|panic| resume_unwind(panic));
            Ok::<_, std::io::Error>((outcome, stopped))
        })?;
        match (outcome, stopped) {
            (_, Some(error)) => Err(error.into()),
            (Err(error), None) => Err(error),
            (Ok(value), None) => Ok(self.report(total, total).map(|()| value)?),
        }
    }
}

/// Calls `each` for parts of a range of `step` bytes, on several threads, until one fails or the work is cancelled.
pub(crate) fn share(
    watch: &Watch,
    range: &Range<u64>,
    step: u64,
    each: impl Fn(Range<u64>) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
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

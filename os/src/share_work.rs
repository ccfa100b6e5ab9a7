//! Work that several threads share: [`share_work`], and [`share_range`] for a range in parts.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

/// Calls `work` on this thread and on others of that name, `threads` in all, and returns the results of the calls. If the
/// system starts fewer threads, `work` is called fewer times. It takes its pieces from a
/// queue, so the threads that did start do all of it.
///
/// The flag that `work` is called with is set when one of the calls panics; that panic goes on here when
/// all threads have ended.
pub fn share_work<T: Send>(
    name: &str,
    threads: usize,
    work: impl Fn(&AtomicBool) -> T + Sync,
) -> Vec<T> {
    let is_stopped = AtomicBool::new(false);
    let call = || {
        let _guard = StopOthers(&is_stopped);
        work(&is_stopped)
    };
    thread::scope(|scope| {
        let mut others = Vec::with_capacity(threads.saturating_sub(1));
        for _ in 1..threads {
            match thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, call) {
                Ok(other) => others.push(other),
                // The system refused it, for a limit on threads or on memory. The others do its work.
                Err(_) => break,
            }
        }
        let mut all = vec![call()];
        for other in others {
            all.push(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        all
    })
}

/// Calls `each` for the parts of a range that end at multiples of `step` bytes, on up to `threads` threads of that name,
/// until a call fails or `goes_on` returns `false`. The start of the range is a multiple too, or its first part is shorter.
///
/// # Errors
/// The first error of `each`.
pub fn share_range<E: Send>(
    name: &str,
    threads: usize,
    range: &Range<u64>,
    step: u64,
    goes_on: impl Fn() -> bool + Sync,
    each: impl Fn(Range<u64>) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let (next, has_failed) = (AtomicU64::new(range.start / step), AtomicBool::new(false));
    let parts = usize::try_from(range.end.saturating_sub(range.start).div_ceil(step));
    let threads = threads.min(parts.unwrap_or(usize::MAX));
    let results = share_work(name, threads, |is_stopped| {
        // Relaxed: flags by which nothing is published, and a counter that hands out numbers.
        while !is_stopped.load(Ordering::Relaxed) && !has_failed.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let part = range.start.max(number * step)..range.end.min((number + 1) * step);
            if part.start >= part.end || !goes_on() {
                break;
            }
            each(part).inspect_err(|_| has_failed.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    });
    results.into_iter().collect()
}

/// Stops the other threads if this one unwinds.
struct StopOthers<'a>(&'a AtomicBool);

impl Drop for StopOthers<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            // Relaxed: nothing is published by it, and a piece of the work later is early enough.
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn a_range_is_shared_in_parts_until_one_fails_or_the_work_is_cancelled() {
        for threads in [1, 4] {
            let seen = Mutex::new(Vec::new());
            let each = |part: Range<u64>| {
                crate::lock(&seen).push(part.clone());
                if part.contains(&35) { Err(part.start) } else { Ok(()) }
            };
            assert_eq!(share_range("test", threads, &(5..32), 10, || true, each), Ok(()));
            let mut parts = std::mem::take(&mut *crate::lock(&seen));
            parts.sort_by_key(|part| part.start);
            assert_eq!(parts, [5..10, 10..20, 20..30, 30..32]);
            assert_eq!(share_range("test", threads, &(0..1000), 10, || true, each), Err(30));
            let begun = std::mem::take(&mut *crate::lock(&seen)).len();
            assert!(threads > 1 || begun == 4, "{begun} parts were begun");
            assert_eq!(share_range("test", threads, &(0..1000), 10, || false, each), Ok(()));
            assert_eq!(*crate::lock(&seen), []);
            assert_eq!(share_range("test", threads, &(7..7), 10, || true, each), Ok(()));
        }
    }
}

//! Work that several threads share: [`share_work`].

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
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

//! The end of the process: threads of engines call no backing any more once it has begun.
//!
//! exit(3) calls the functions of programs and libraries, which take things apart that a backing may use, and
//! the other threads run meanwhile. So it waits, before anything that was registered before the first engine, until
//! the threads of all engines have nothing to do. From then on they answer the faults of the exiting thread alone: a
//! handler of the exit may touch memory. Other threads that touch a missing page wait, and end with the process.
//!
//! A backing that hangs does not keep a process: it waits for a second at most.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use uzone_os::{at_exit, lock, thread_id};

/// How long the end of the process waits.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long it sleeps between two looks.
const LOOK: Duration = Duration::from_micros(200);

/// Whether the process is ending, and the thread that ends it.
static IS_ENDING: AtomicBool = AtomicBool::new(false);
static ENDING_THREAD: AtomicU32 = AtomicU32::new(0);
/// The process that has the threads. A child that was forked off has none of them.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Returns whether threads have nothing to do, but for the one of that number; `None` once they have ended.
type IsQuiet = Box<dyn Fn(u32) -> Option<bool> + Send>;

/// Held for a push, and at the end of the process.
static WATCHED: Mutex<Vec<IsQuiet>> = Mutex::new(Vec::new());

/// Has the end of the process wait until some threads have nothing to do.
pub(crate) fn waits_for(is_quiet: impl Fn(u32) -> Option<bool> + Send + 'static) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Err(cause) = at_exit(ends) {
            tracing::warn!(%cause, "backings may be called while the process ends");
        }
    });
    let process = std::process::id();
    let mut watched = lock(&WATCHED);
    if PROCESS.swap(process, Ordering::Relaxed) != process {
        watched.clear();
    }
    watched.retain(|is_quiet| is_quiet(0).is_some());
    watched.push(Box::new(is_quiet));
}

extern "C" fn ends() {
    if PROCESS.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let thread = thread_id();
    ENDING_THREAD.store(thread, Ordering::Relaxed);
    // SeqCst, with that of the threads: one that was found asleep sees this when it wakes up.
    IS_ENDING.store(true, Ordering::SeqCst);
    let give_up = Instant::now() + PATIENCE;
    loop {
        let is_quiet = lock(&WATCHED).iter().all(|is_quiet| is_quiet(thread) != Some(false));
        if is_quiet || Instant::now() >= give_up {
            return;
        }
        std::thread::sleep(LOOK);
    }
}

/// Returns whether the process is ending.
pub(crate) fn is_ending() -> bool {
    IS_ENDING.load(Ordering::SeqCst)
}

/// Returns whether the process is ending, so that a fault of that thread is left alone.
pub(crate) fn leaves(thread: Option<NonZeroU32>) -> bool {
    is_ending()
        && thread.is_some_and(|thread| thread.get() != ENDING_THREAD.load(Ordering::Relaxed))
}

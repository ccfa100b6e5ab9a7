//! Settings of the host that a benchmark changes for a while and restores: [`change`].
//!
//! [`Changed`] restores a setting on drop, and a thread restores all of them when a user or a service manager ends the
//! process by SIGHUP, SIGINT, SIGQUIT or SIGTERM. The thread takes these signals from the first change on, and lets the
//! process die of the same signal.
//! Signals that the process ignores (`nohup`) or handles keep their disposition.
//! After a SIGKILL the change stays: no process can catch that signal.

use std::io;
use std::os::raw::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// The signals that ask a process to end.
const ENDING: [c_int; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// Undoes a change.
type Undo = Box<dyn FnOnce() + Send>;

/// The changes in effect. The lock is held over each change and each undoing of one, so that a signal
/// that comes in the middle waits for it, and over the end of the process, so that nothing is changed
/// after all was put back.
struct Changes {
    has_watcher: bool,
    next: u64,
    undo: Vec<(u64, Undo)>,
}

static CHANGES: Mutex<Changes> =
    Mutex::new(Changes { has_watcher: false, next: 0, undo: Vec::new() });

fn changes() -> MutexGuard<'static, Changes> {
    CHANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A change that is undone on drop.
#[derive(Debug)]
pub struct Changed(u64);

/// Makes a change that `undo` takes back. Returns the error of `make`, or of starting the thread that takes signals:
/// nothing is changed then, if a `make` that fails changes nothing.
pub fn change(
    make: impl FnOnce() -> io::Result<()>,
    undo: impl FnOnce() + Send + 'static,
) -> io::Result<Changed> {
    let mut changes = changes();
    if !changes.has_watcher {
        watch()?;
        changes.has_watcher = true;
    }
    make()?;
    let number = changes.next;
    changes.next += 1;
    changes.undo.push((number, Box::new(undo)));
    Ok(Changed(number))
}

impl Drop for Changed {
    fn drop(&mut self) {
        let mut changes = changes();
        if let Some(place) = changes.undo.iter().position(|(number, _)| *number == self.0) {
            let (_, undo) = changes.undo.remove(place);
            undo();
        }
    }
}

/// Starts the thread that takes the signals.
fn watch() -> io::Result<()> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mut signals =
        Signals::new(ENDING.into_iter().filter(|signal| is_default(&status, *signal)))?;
    let thread = std::thread::Builder::new().name("put back".to_owned());
    thread.spawn(move || {
        for signal in signals.forever() {
            let mut changes = changes();
            // The latest first, as when they are dropped.
            while let Some((_, undo)) = changes.undo.pop() {
                undo();
            }
            // For these signals that is the end. If it is refused, there is nothing better to do than
            // to wait for the next one.
            let _ = emulate_default_handler(signal);
        }
    })?;
    Ok(())
}

/// Returns whether a signal is neither ignored nor caught, by the text of `/proc/self/status`; true for a signal that
/// the text does not name.
fn is_default(status: &str, signal: c_int) -> bool {
    let is_in = |field: &str| {
        let set = status.lines().find_map(|line| line.strip_prefix(field));
        let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
        // Signals are counted from 1.
        set.is_some_and(|set| set >> (signal - 1) & 1 == 1)
    };
    !is_in("SigIgn:") && !is_in("SigCgt:")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_change_is_taken_back_once_and_one_that_failed_never() {
        let undone = Arc::new(AtomicU32::new(0));
        let undo = || {
            let undone = undone.clone();
            move || {
                undone.fetch_add(1, Ordering::Relaxed);
            }
        };
        let changed = change(|| Ok(()), undo()).expect("a thread can be started");
        let other = change(|| Ok(()), undo()).expect("it is there");
        assert_eq!(undone.load(Ordering::Relaxed), 0);
        drop(changed);
        assert_eq!(undone.load(Ordering::Relaxed), 1);
        drop(other);
        assert_eq!(undone.load(Ordering::Relaxed), 2);
        let refused = change(|| Err(io::ErrorKind::PermissionDenied.into()), undo());
        assert!(refused.is_err());
        assert_eq!(undone.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn signals_that_are_ignored_or_caught_are_left_alone() {
        let status = "Name:\tuzone\nSigBlk:\t0000000000004003\nSigIgn:\t0000000000001001\nSigCgt:\t0000000180004000\n";
        assert!(!is_default(status, SIGHUP), "ignored, as by nohup");
        assert!(is_default(status, SIGINT), "blocked is neither");
        assert!(is_default(status, SIGQUIT));
        assert!(!is_default(status, SIGTERM), "caught");
        assert!(is_default("", SIGINT) && is_default("SigIgn:\tx\n", SIGINT));
    }
}

//! Signals that end this process, held back for a moment ([`Held`]).
//!
//! Unsafe: this is the file that calls pthread_sigmask(3), which rustix does not wrap.
//! Source: pthread_sigmask(3), signal(7).

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// What a user or the system ends a command by: Ctrl-C, kill(1), a terminal that is closed, and
/// Ctrl-\.
const ENDING: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// While it lives, signals that end the process do not interrupt this thread; they come when it is
/// dropped. Other threads still get them, so it is of use where there are none, and threads that are
/// started meanwhile hold them back for good. SIGKILL cannot be held.
#[derive(Debug)]
#[must_use = "signals come again when it is dropped"]
pub struct Held {
    before: libc::sigset_t,
    // What it changed is of the thread that made it.
    _of_this_thread: PhantomData<*mut ()>,
}

impl Held {
    /// Holds the signals back from now on.
    ///
    /// # Errors
    /// What the kernel answered.
    pub fn hold() -> io::Result<Self> {
        let mut ending = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset(3) writes a whole set to where it is pointed at, which lives here.
        unsafe { libc::sigemptyset(ending.as_mut_ptr()) };
        // SAFETY: the call above has written it.
        let mut ending = unsafe { ending.assume_init() };
        for signal in ENDING {
            // SAFETY: sigaddset(3) changes a set that is initialised, for a signal that there is.
            unsafe { libc::sigaddset(&raw mut ending, signal) };
        }
        let mut before = ending;
        // SAFETY: pthread_sigmask(3) reads the first set and writes the second; both live over the
        // call. Blocking a signal changes nothing that memory safety rests on.
        let error =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const ending, &raw mut before) };
        match error {
            0 => Ok(Self { before, _of_this_thread: PhantomData }),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let before = &raw const self.before;
        // SAFETY: pthread_sigmask(3) reads the set, which it wrote itself when this was made, and
        // writes nothing where it is given no place.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_blocked(signal: libc::c_int) -> bool {
        let mut now = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: without a new set, pthread_sigmask(3) only writes the present one.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), now.as_mut_ptr());
        }
        // SAFETY: the call above has written it, and the signal is one that there is.
        unsafe { libc::sigismember(now.as_ptr(), signal) == 1 }
    }

    #[test]
    fn signals_are_held_while_it_lives_and_as_before_afterwards() {
        // A thread of its own: the parent of the tests may have blocked some already.
        std::thread::spawn(|| {
            let before = ENDING.map(is_blocked);
            let held = Held::hold().unwrap();
            assert!(ENDING.iter().all(|signal| is_blocked(*signal)));
            {
                let _twice = Held::hold().unwrap();
            }
            assert!(ENDING.iter().all(|signal| is_blocked(*signal)));
            drop(held);
            assert_eq!(ENDING.map(is_blocked), before);
        })
        .join()
        .expect("the thread's own assertions");
    }
}

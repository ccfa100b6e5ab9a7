//! Signals that end this process, held back for a moment ([`Held`]), and the masks and the actions
//! of signals.
//!
//! Unsafe: this is the file that calls pthread_sigmask(3) and sigaction(2), which rustix does not
//! wrap.
//! Source: pthread_sigmask(3), sigaction(2), signal(7).

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
        let before = set_mask(libc::SIG_BLOCK, &set_of(&ENDING))?;
        Ok(Self { before, _of_this_thread: PhantomData })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // It fails for no mask that this thread had.
        let _ = set_mask(libc::SIG_SETMASK, &self.before);
    }
}

/// Returns the set of some signals.
pub(crate) fn set_of(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset(3) writes a whole set to where it is pointed at, which lives here.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the call above has written it.
    let mut set = unsafe { set.assume_init() };
    for signal in signals {
        // SAFETY: sigaddset(3) changes a set that is initialised, and refuses what is no signal, or
        // one of the C library's own.
        unsafe { libc::sigaddset(&raw mut set, *signal) };
    }
    set
}

/// Changes which signals this thread blocks, and returns those that it blocked.
pub(crate) fn set_mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    let mut before = *set;
    // SAFETY: pthread_sigmask(3) reads the first set and writes the second; both live over the
    // call. Blocking a signal changes nothing that memory safety rests on.
    match unsafe { libc::pthread_sigmask(how, set, &raw mut before) } {
        0 => Ok(before),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Returns the action `SIG_DFL`, which is zero, with an empty mask and no flags.
pub(crate) fn default_action() -> libc::sigaction {
    // SAFETY: `zeroed` wants all bits zero to be a value: numbers, a set of signals that is an
    // array of numbers, and an optional function pointer, which is then `None`.
    unsafe { core::mem::zeroed() }
}

/// Sets the action of a signal if there is one to set, and returns the one before. A handler that is
/// set may run on any thread at any time, and does what handlers may do.
pub(crate) fn exchange(
    signal: libc::c_int,
    new: Option<&libc::sigaction>,
) -> io::Result<libc::sigaction> {
    let mut old = default_action();
    let new = new.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: sigaction(2) reads an action, or none where the pointer is null, and writes the old
    // one; both live over the call. The action is the default one, one that this function returned,
    // or one of `sigbus::handler`, `uffd::bare` and `privilege`: their functions take what
    // `SA_SIGINFO` has the kernel hand them, and do only what signal-safety(7) allows.
    let answer = unsafe { libc::sigaction(signal, new, &mut old) };
    if answer == 0 { Ok(old) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_blocked(signal: libc::c_int) -> bool {
        let now = set_mask(libc::SIG_BLOCK, &set_of(&[])).unwrap();
        // SAFETY: sigismember(3) reads a set, and the signal is one that there is.
        unsafe { libc::sigismember(&raw const now, signal) == 1 }
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

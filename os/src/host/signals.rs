//! Signals held back from this thread for a moment ([`Held`]) or from a thread for good ([`spawn`]), and the
//! masks and the actions of signals.
//!
//! A thread that holds a lock, or owns a page, for which a thread that answers faults would wait must not be
//! interrupted: a signal handler that touches lazily mapped memory would wait for that answer, and so for the
//! thread that it interrupted.
//!
//! Unsafe: this is the file that calls pthread_sigmask(3) and sigaction(2), which rustix does not
//! wrap.
//! Source: pthread_sigmask(3), sigaction(2), signal(7).

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};

use crate::lock;

/// Signals that an instruction of the thread itself raises. They end the process where they are blocked.
const SYNCHRONOUS: [libc::c_int; 7] = [
    libc::SIGBUS,
    libc::SIGSEGV,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGABRT,
];

thread_local! {
    /// The number of values that hold signals back from this thread, and the mask from before the first.
    static HOLDING: Cell<(u32, Option<libc::sigset_t>)> = const { Cell::new((0, None)) };
}

/// While it lives, no signal interrupts this thread, but for those that its own instructions raise; the others
/// come when it is dropped. Other threads still get them. SIGKILL cannot be held.
///
/// The first that a thread has costs a system call, and its drop another; more of them cost none.
#[derive(Debug)]
#[must_use = "signals come again when it is dropped"]
pub struct Held {
    // Its change is to the thread that made it.
    _of_this_thread: PhantomData<*mut ()>,
}

impl Held {
    /// Holds signals back.
    #[inline]
    pub fn hold() -> Self {
        let (count, before) = HOLDING.get();
        // Miri knows no masks of signals, and sends none.
        let is_first = count == 0 && !cfg!(miri);
        let before = if is_first { set_mask(libc::SIG_BLOCK, &others()).ok() } else { before };
        HOLDING.set((count + 1, before));
        Self { _of_this_thread: PhantomData }
    }
}

impl Drop for Held {
    #[inline]
    fn drop(&mut self) {
        let (count, before) = HOLDING.get();
        HOLDING.set((count - 1, before));
        if count == 1
            && let Some(before) = before
        {
            // It fails for no mask that this thread had.
            let _ = set_mask(libc::SIG_SETMASK, &before);
        }
    }
}

/// A lock of a mutex whose holder no signal interrupts.
struct Uninterrupted<'a, T> {
    // Released before signals come.
    guard: MutexGuard<'a, T>,
    _held: Held,
}

impl<T> Deref for Uninterrupted<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Uninterrupted<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Locks a mutex that a thread which answers faults locks as well. No signal interrupts the holder.
pub fn lock_uninterrupted<T>(mutex: &Mutex<T>) -> impl DerefMut<Target = T> {
    let _held = Held::hold();
    Uninterrupted { guard: lock(mutex), _held }
}

/// Starts a thread that no signal interrupts, but for those that its own instructions raise: other threads of
/// the process get them.
///
/// # Errors
/// The system refuses a thread.
pub fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // The thread has the mask of this one from its first instruction on.
    let _held = Held::hold();
    Builder::new().name(name.to_owned()).spawn(move || {
        std::mem::forget(Held::hold());
        run()
    })
}

/// Returns all signals that may be held back.
fn others() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset(3) writes a whole set to where it is pointed at, which lives here.
    unsafe { libc::sigfillset(set.as_mut_ptr()) };
    // SAFETY: the call above has written it.
    let mut set = unsafe { set.assume_init() };
    for signal in SYNCHRONOUS {
        // SAFETY: sigdelset(3) changes a set that is initialised, and these are signals.
        unsafe { libc::sigdelset(&raw mut set, signal) };
    }
    set
}

/// Returns the set of some signals.
pub(crate) fn set_of(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset(3) writes a whole set to where it is pointed at, which lives here.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the call above has written it.
    let mut set = unsafe { set.assume_init() };
    for signal in signals {
        // SAFETY: sigaddset(3) changes a set that is initialised, and refuses a number that is no signal, or one of the
        // C library's own.
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

/// Sets the action of a signal if there is one to set, and returns the one before. A handler that is set may run on any
/// thread at any time, and obeys signal-safety(7).
pub(crate) fn exchange(
    signal: libc::c_int,
    new: Option<&libc::sigaction>,
) -> io::Result<libc::sigaction> {
    let mut old = default_action();
    let new = new.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: sigaction(2) reads an action, or none where the pointer is null, and writes the old
    // one; both live over the call. The action is the default one, one that this function returned,
    // or one of `sigbus::handler`, `uffd::bare` and `host::denied_calls`: their functions take the arguments of `SA_SIGINFO`, and
    // do only what signal-safety(7) allows.
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

    const SOME: [libc::c_int; 4] = [libc::SIGINT, libc::SIGUSR1, libc::SIGPROF, libc::SIGCHLD];

    #[test]
    fn signals_are_held_while_it_lives_and_as_before_afterwards() {
        // A thread of its own: the parent of the tests may have blocked some already.
        std::thread::spawn(|| {
            let before = SOME.map(is_blocked);
            let held = Held::hold();
            assert!(SOME.into_iter().all(is_blocked));
            assert!(!SYNCHRONOUS.into_iter().any(is_blocked));
            let twice = Held::hold();
            // Whichever goes first.
            drop(held);
            assert!(SOME.into_iter().all(is_blocked));
            drop(twice);
            assert_eq!(SOME.map(is_blocked), before);
        })
        .join()
        .expect("the thread's own assertions");
    }

    #[test]
    fn no_signal_interrupts_a_thread_that_was_started_without_them() {
        let before = SOME.map(is_blocked);
        let thread = spawn("quiet", || {
            drop(lock_uninterrupted(&Mutex::new(())));
            SOME.into_iter().all(is_blocked)
        });
        assert!(thread.unwrap().join().unwrap());
        assert_eq!(SOME.map(is_blocked), before);
    }
}

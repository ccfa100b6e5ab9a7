//! Work at the end of a process: [`at_exit`].
//!
//! Unsafe: this is the file that calls atexit(3).
//! Source: atexit(3).

use std::io;

/// Has `hook` called when the process ends by exit(3) or by a return from `main`, before hooks that were registered
/// earlier.
/// It must not panic, which would abort the process.
///
/// # Errors
/// If there is no memory to note it.
pub fn at_exit(hook: extern "C" fn()) -> io::Result<()> {
    // SAFETY: atexit(3) wants a function that may be called at that time, which takes nothing: a function of safe code.
    match unsafe { libc::atexit(hook) } {
        0 => Ok(()),
        _ => Err(io::ErrorKind::OutOfMemory.into()),
    }
}

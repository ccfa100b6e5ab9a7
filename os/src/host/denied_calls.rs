//! A last line for a process that makes a system call which a filter denies: [`report_denied_calls`].
//!
//! Unsafe: the handler of SIGSYS.
//! Source: seccomp(2), signal-safety(7).

use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

use crate::host::signals::{default_action, exchange};

/// The head of the structure that the kernel hands a handler of SIGSYS: asm-generic/siginfo.h.
#[repr(C)]
struct DeniedCall {
    signal: libc::c_int,
    errno: libc::c_int,
    code: libc::c_int,
    _padding: libc::c_int,
    instruction: usize,
    number: libc::c_int,
    architecture: libc::c_uint,
}

const _: () = assert!(size_of::<DeniedCall>() == 32);
const _: () = assert!(size_of::<DeniedCall>() <= size_of::<libc::siginfo_t>());

/// The end of the line.
static REMEDY: OnceLock<&'static str> = OnceLock::new();

/// Has a thread whose system call a filter traps (`SECCOMP_RET_TRAP`) write a line to standard error with the
/// number of the call and `remedy`, and then end the process by SIGSYS, as the default action does.
///
/// # Errors
/// The error of sigaction(2).
pub fn report_denied_calls(remedy: &'static str) -> io::Result<()> {
    // The first remedy stays: a process has one filter.
    let _ = REMEDY.set(remedy);
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_denied;
    let action = libc::sigaction {
        sa_sigaction: handler as libc::sighandler_t,
        // The default action is back when it runs, so that it can raise the signal again.
        sa_flags: libc::SA_SIGINFO | libc::SA_RESETHAND | libc::SA_NODEFER | libc::SA_ONSTACK,
        ..default_action()
    };
    exchange(libc::SIGSYS, Some(&action)).map(drop)
}

/// Writes the line. It allocates nothing and takes no lock, since it runs between any two instructions; the
/// calls that it makes are on the list of signal-safety(7), or plain system calls.
extern "C" fn on_denied(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel hands a handler with `SA_SIGINFO` a whole `siginfo_t`, alive for the call, of which
    // `DeniedCall` is the head for this signal. It has no greater alignment.
    let number = unsafe { (*info.cast::<DeniedCall>()).number };
    let mut name = [0_u8; 16];
    // SAFETY: this prctl(2) writes 16 bytes at most, with a zero behind the last, to the array of that size.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default().escape_ascii();
    // On the stack; text beyond its room is left out.
    let mut line = io::Cursor::new([0_u8; 160]);
    let remedy = REMEDY.get().copied().unwrap_or_default();
    let _ = writeln!(
        line,
        "uzone: thread {name} made system call {number}, which its sandbox denies{remedy}"
    );
    let len = usize::try_from(line.position()).unwrap_or(0);
    // SAFETY: descriptor 2 is open for as long as a process has a standard error, and a write to one that is
    // not fails.
    let stderr = unsafe { BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(stderr, &line.get_ref()[..len]);
    // SAFETY: raise(3) takes a number, and the default action of this signal ends the process.
    unsafe { libc::raise(signal) };
}

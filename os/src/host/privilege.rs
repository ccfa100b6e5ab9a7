//! The rights of this process beyond its user's, and giving them up: [`capabilities`], [`give_up_capabilities`],
//! [`keep_capabilities`]; and a last line for a process that makes a system call which a filter denies
//! ([`report_denied_calls`]).
//!
//! Unsafe: the handler of SIGSYS.
//! Source: capabilities(7), prctl(2), seccomp(2), signal-safety(7).

use std::io::{self, Write};
use std::os::fd::BorrowedFd;

pub use rustix::thread::CapabilitySet;

use crate::host::signals::{default_action, exchange};

/// The number of capabilities that there can be.
const CAPABILITIES: u32 = 64;

/// Returns the user of this process.
#[must_use]
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns the capabilities that this thread has, could take, or would leave to a program, one bit
/// each, and whether no program that it starts gets more.
///
/// # Errors
/// The error of capget(2) or prctl(2).
pub fn capabilities() -> io::Result<(u64, bool)> {
    let sets = rustix::thread::capabilities(None)?;
    let bits = (sets.effective | sets.permitted | sets.inheritable).bits();
    Ok((bits, rustix::thread::no_new_privs()?))
}

/// Gives up all capabilities of this thread, and of the threads that it starts, for good: also a program of root's has
/// none. The user stays the same.
///
/// # Errors
/// The error of prctl(2) or capset(2).
pub fn give_up_capabilities() -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    keep_capabilities(CapabilitySet::empty())
}

/// Gives up all capabilities of this thread, and of the threads that it starts, but for its own of `kept`: a program of
/// root's has no other, and a program of another user has none. The user stays the same.
///
/// # Errors
/// The error of capget(2), prctl(2) or capset(2).
pub fn keep_capabilities(kept: CapabilitySet) -> io::Result<()> {
    for number in 0..CAPABILITIES {
        let one = CapabilitySet::from_bits_retain(1 << number);
        // The first error is that of a number behind the last.
        let Ok(is_left) = rustix::thread::capability_is_in_bounding_set(one) else { break };
        if is_left && !kept.contains(one) {
            // Without the right to, it stays, and means nothing to a thread that gets no more.
            let _ = rustix::thread::remove_capability_from_bounding_set(one);
        }
    }
    rustix::thread::clear_ambient_capability_set()?;
    let has = rustix::thread::capabilities(None)?;
    let (effective, permitted) = (has.effective & kept, has.permitted & kept);
    let inheritable = CapabilitySet::empty();
    let left = rustix::thread::CapabilitySets { effective, permitted, inheritable };
    Ok(rustix::thread::set_capabilities(None, left)?)
}

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

/// Has a thread whose system call a filter traps (`SECCOMP_RET_TRAP`) write a line to standard error with the
/// number of the call, and then end the process by SIGSYS, as the default action does.
///
/// # Errors
/// The error of sigaction(2).
pub fn report_denied_calls() -> io::Result<()> {
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
    let _ = writeln!(
        line,
        "uzone: thread {name} made system call {number}, which its sandbox denies; --no-sandbox turns that off"
    );
    let len = usize::try_from(line.position()).unwrap_or(0);
    // SAFETY: descriptor 2 is open for as long as a process has a standard error, and a write to one that is
    // not fails.
    let stderr = unsafe { BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(stderr, &line.get_ref()[..len]);
    // SAFETY: raise(3) takes a number, and the default action of this signal ends the process.
    unsafe { libc::raise(signal) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_without_capabilities_gets_none_back() {
        std::thread::spawn(|| {
            let ids = || (user(), rustix::process::getegid());
            let before = ids();
            give_up_capabilities().unwrap();
            assert_eq!(capabilities().unwrap(), (0, true));
            assert_eq!(ids(), before);
            let all = CapabilitySet::from_bits_retain(1);
            let sets =
                rustix::thread::CapabilitySets { effective: all, permitted: all, inheritable: all };
            assert!(rustix::thread::set_capabilities(None, sets).is_err());
            // A second time changes nothing.
            give_up_capabilities().unwrap();
        })
        .join()
        .expect("the thread's own assertions");
    }

    #[test]
    fn what_is_kept_stays_and_the_rest_goes() {
        std::thread::spawn(|| {
            let before = (capabilities().unwrap().0, user());
            let kept = CapabilitySet::KILL | CapabilitySet::SYS_PTRACE;
            keep_capabilities(kept).unwrap();
            let after = (capabilities().unwrap().0, user());
            // The capabilities that it had: a test may run as any user.
            let sets = rustix::thread::capabilities(None).unwrap();
            assert_eq!(after, (before.0 & kept.bits(), before.1));
            assert!(sets.inheritable.is_empty());
        })
        .join()
        .expect("the thread's own assertions");
    }
}

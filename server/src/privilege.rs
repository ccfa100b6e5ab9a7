//! The rights of this process beyond its user's, and giving them up: [`capabilities`], [`give_up_capabilities`],
//! [`keep_capabilities`].
//!
//! Source: capabilities(7), prctl(2).

use std::io;

pub use rustix::thread::CapabilitySet;

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

//! The number of a thread, its page faults, and its priority: [`thread_id`], [`thread_faults`],
//! [`idle`], [`low`]; and a wait for another thread ([`pause`]).
//!
//! Unsafe: this is the file that calls sched_setscheduler(2), sched_setattr(2) and getrusage(2), which rustix does
//! not wrap.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

use rustix::thread::Timespec;

/// Returns the number of this thread, as the kernel names it in events of a userfaultfd.
#[must_use]
pub fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_pid().unsigned_abs()
}

/// Gives this thread a name, which the kernel cuts after 15 bytes. That of the first thread is the name of its process, as
/// tools show it.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for a name with a zero byte, and the error of prctl(2).
pub fn set_name(name: &str) -> io::Result<()> {
    Ok(rustix::thread::set_name(&CString::new(name)?)?)
}

/// Returns the number of page faults of this thread, minor and major ones, by the kernel's count.
///
/// A fault that a userfaultfd waits for counts once, when its page is there.
#[must_use]
pub fn thread_faults() -> u64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // It fails for a bad address or a bad number alone.
    // SAFETY: the kernel writes one `rusage` there, which is as large.
    let _ = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    // SAFETY: it is integers, of which the kernel has written all, or all are zero.
    let usage = unsafe { usage.assume_init() };
    u64::try_from(usage.ru_minflt.saturating_add(usage.ru_majflt)).unwrap_or(0)
}

/// Lets this thread run only when no other one wants to, on any CPU it may use: `SCHED_IDLE`. It needs
/// no privilege. Threads that it starts run the same way.
///
/// # Errors
/// The kernel's error; a seccomp filter may forbid it. Then the thread runs as before.
pub fn idle() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure lives over the call, and 0 names this thread.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// How long a thread of [`low`] priority keeps a CPU that another thread wants: the least that the kernel takes.
const SLICE_NS: u64 = 100_000;
/// The size of the first version of the kernel's structure.
const ATTRIBUTES: u32 = 48;
const _: () = assert!(size_of::<libc::sched_attr>() == 48);
/// `SCHED_FLAG_KEEP_POLICY` of sched_setattr(2).
const KEEP_POLICY: u64 = 8;

/// Gives this thread the lowest of the ordinary priorities (a nice value of 19), and the shortest slice: it yields to others
/// and still gets on, as a thread must that holds a lock which others wait for. It needs no privilege.
/// Threads that it starts run the same way.
///
/// A nice value alone lets a thread that wakes up wait for the slice of the running one, some milliseconds: a thread
/// that woke every 50 us while two others of nice 19 filled both CPUs of a machine waited for up to 9 to 44 ms, and for 0.4
/// to 4 ms with short slices. Linux before 6.12 has one length of slices for all.
///
/// # Errors
/// The kernel's error; a seccomp filter may forbid it. Then the thread runs as before.
pub fn low() -> io::Result<()> {
    // On Linux a nice value is a thread's, and no number stands for the one that calls.
    rustix::process::setpriority_process(None, 19)?;
    let attributes = libc::sched_attr {
        size: ATTRIBUTES,
        sched_policy: 0,
        sched_flags: KEEP_POLICY,
        sched_nice: 19,
        sched_priority: 0,
        sched_runtime: SLICE_NS,
        sched_deadline: 0,
        sched_period: 0,
    };
    // A filter of system calls may know the first call alone. The priority matters more than the slice.
    // SAFETY: sched_setattr(2) reads as many bytes as `size` states, all of the structure, and 0 names this thread.
    let _ = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    Ok(())
}

/// The rounds in which [`pause`] lets threads of the same priority run.
const YIELDS: u32 = 8;
/// The sleep of later rounds.
pub(crate) const PAUSE: Duration = Duration::from_micros(50);

/// Lets the thread run that the calling one waits for, before it looks again: `round` counts those looks. After a few
/// it sleeps, because a thread of lower priority on the same CPU runs only then.
///
/// A signal ends the sleep: a thread that slept for the rest of its time would sleep for ever where each of its handlers
/// is followed by the next signal, since the time in a handler counts for nothing.
pub fn pause(round: &mut u32) {
    if *round < YIELDS {
        *round += 1;
        std::thread::yield_now();
    } else {
        let time = Timespec { tv_sec: 0, tv_nsec: PAUSE.subsec_nanos().into() };
        let _ = rustix::thread::nanosleep(&time);
    }
}

#[cfg(test)]
mod tests {
    use uzone_pages::ByteLen;

    use super::*;
    use crate::{Anonymous, Exclusive};

    #[test]
    fn the_faults_of_this_thread_are_counted() {
        // Not of the heap, which may have had the pages before.
        let memory = Exclusive::anonymous(ByteLen::mib(1), Anonymous::default());
        let mut memory = memory.expect("memory");
        let before = thread_faults();
        memory.as_bytes_mut().fill(1);
        assert!(std::hint::black_box(&memory).as_bytes()[5] == 1 && thread_faults() > before);
    }

    #[test]
    fn a_low_priority_is_of_one_thread() {
        let ours = || rustix::process::getpriority_process(None).unwrap();
        let before = ours();
        let nice = std::thread::spawn(move || low().map(|()| ours())).join();
        match nice.expect("the thread does not panic") {
            Ok(nice) => assert_eq!((nice, ours()), (19, before)),
            Err(error) => {
                assert!(std::env::var_os("REQUIRE_ALL").is_none(), "{error}");
                println!("skipped: a low priority: the kernel refuses ({error})");
            }
        }
    }

    #[test]
    fn a_thread_that_is_idle_says_so() {
        std::thread::spawn(|| {
            if let Err(error) = idle() {
                assert!(std::env::var_os("REQUIRE_ALL").is_none(), "{error}");
                println!("skipped: a thread that is idle: the kernel refuses ({error})");
                return;
            }
            // SAFETY: 0 names this thread, and nothing is passed.
            let policy = unsafe { libc::sched_getscheduler(0) };
            assert_eq!(policy, libc::SCHED_IDLE);
        })
        .join()
        .expect("the thread's own assertions");
    }
}

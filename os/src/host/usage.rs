//! What the kernel counts of a thread: [`thread_faults`].
//!
//! Unsafe: this is the file that calls getrusage(2), which rustix does not wrap.

use std::mem::MaybeUninit;

/// Returns how many page faults the kernel has counted of this thread, minor and major ones.
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
}

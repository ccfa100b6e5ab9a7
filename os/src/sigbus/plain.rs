//! Copies by ordinary atomic loads and stores: the definition of a copy, and the way where nothing recovers. They never
//! return an error: memory that is not there kills the process.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::sigbus::copier::{Copier, Fault, WORD};

pub(crate) struct Plain;

// Relaxed is enough throughout: nothing else is published by these words, and messages through shared
// memory need synchronisation of their own.
impl Copier for Plain {
    #[inline]
    fn load(word: &AtomicU64) -> Result<u64, Fault> {
        Ok(word.load(Ordering::Relaxed))
    }

    #[inline]
    fn copy_out(words: &[AtomicU64], out: &mut [[u8; WORD]]) -> Result<(), Fault> {
        for (chunk, word) in out.iter_mut().zip(words) {
            *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        Ok(())
    }

    #[inline]
    fn copy_in(words: &[AtomicU64], bytes: &[[u8; WORD]]) -> Result<(), Fault> {
        for (chunk, word) in bytes.iter().zip(words) {
            word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
        }
        Ok(())
    }

    #[inline]
    fn merge(word: &AtomicU64, keep: u64, bits: u64) -> Result<(), Fault> {
        let mut old = word.load(Ordering::Relaxed);
        loop {
            let new = old & keep | bits;
            // It ends: an exchange fails only because another thread's write succeeded.
            match word.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(seen) => old = seen,
            }
        }
    }
}

/// Calls `work`, which nothing ends.
///
/// # Safety
/// This one wants nothing; the one of `scope` does.
#[cfg(not(uzone_asm))]
pub(crate) unsafe fn guarded_call(
    _: impl FnOnce(),
    work: impl Fn() + Copy,
    _: [&[AtomicU64]; 2],
) -> Result<(), Fault> {
    work();
    Ok(())
}

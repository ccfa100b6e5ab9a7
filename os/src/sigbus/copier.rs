//! Touching the words of memory that may not be there: [`Copier`], [`Fault`], and the stores
//! of `uzone-stream`, which the handler may end.
//!
//! Unsafe: calls that may be abandoned.

use core::sync::atomic::AtomicU64;

use uzone_stream::CopyMethod;

use crate::sigbus::guarded_call;

pub(crate) const WORD: usize = size_of::<AtomicU64>();

/// A word that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The problem, as [`sigbus::BusError`](crate::sigbus::BusError) packs it.
    pub(crate) info: u64,
    /// The address of a byte of the first word that was not copied.
    pub(crate) bad: u64,
}

/// The way in which the words of a mapping are touched: one whole, aligned word after the other, from the first
/// on.
pub(crate) trait Copier {
    /// Returns a word.
    fn load(word: &AtomicU64) -> Result<u64, Fault>;

    /// Copies as many words as there are chunks.
    fn copy_out(words: &[AtomicU64], out: &mut [[u8; WORD]]) -> Result<(), Fault>;

    /// Copies as many chunks as there are words.
    fn copy_in(words: &[AtomicU64], bytes: &[[u8; WORD]]) -> Result<(), Fault>;

    /// Replaces the bits of a word that are not in `keep` by `bits`. Concurrent writes to the others are
    /// kept.
    fn merge(word: &AtomicU64, keep: u64, bits: u64) -> Result<(), Fault>;
}

/// Writes the lines of words back as [`uzone_stream::flush_words`] does.
///
/// # Errors
/// [`Fault`] if some are not there. Others may be written back then.
pub(crate) fn flush_words(words: &[AtomicU64]) -> Result<(), Fault> {
    // The first call asks for the features of the CPU, by a lock that must not be abandoned.
    let check = || {
        let _ = uzone_stream::has_write_back();
    };
    // SAFETY: as in `zero_words`; `flush_words` panics for nothing.
    unsafe { guarded_call(check, move || uzone_stream::flush_words(words), [words, &[]]) }
}

/// Zeroes words as [`uzone_stream::zero_words`] does.
///
/// # Errors
/// [`Fault`] if some are not there. Others may be written then.
///
/// # Panics
/// If the way is not available; nothing is written then.
pub(crate) fn zero_words(way: CopyMethod, dst: &[AtomicU64]) -> Result<(), Fault> {
    let check = || assert!(way.is_available(), "stores of the kind '{way}' are not available");
    // SAFETY: `guarded_call` wants work that does not unwind and may be abandoned.
    // 1. No unwinding: `zero_words` panics for a way that is not available alone.
    // 2. Abandoned: it is a loop over stores and a fence, with nothing to drop in its frames; the
    //    words are atomics, which may have any value, and the fence is done where it lands.
    unsafe { guarded_call(check, move || uzone_stream::zero_words(way, dst), [dst, &[]]) }
}

/// Copies words as [`uzone_stream::copy_words`] does.
///
/// # Errors
/// [`Fault`] if some of either are not there. Others may be copied then.
///
/// # Panics
/// If there are not as many of either, or the way is not available; nothing is written then.
pub(crate) fn copy_words(
    way: CopyMethod,
    dst: &[AtomicU64],
    src: &[AtomicU64],
) -> Result<(), Fault> {
    let check = || {
        assert!(way.is_available(), "stores of the kind '{way}' are not available");
        assert_eq!(dst.len(), src.len(), "as many words to copy as there is room for");
    };
    // SAFETY: as in `zero_words`; `copy_words` panics for lengths that differ as well, which they
    // do not.
    unsafe { guarded_call(check, move || uzone_stream::copy_words(way, dst, src), [dst, src]) }
}

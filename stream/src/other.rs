//! The substitute for an architecture file where there are no streaming stores: another CPU, Miri,
//! or a build with a sanitizer, whose instrumentation does not see such stores.
//!
//! Every function has the signature of its namesake in `x86_64.rs` and takes the portable way.
//! Cost: that of `portable.rs`; there is never anything to drain.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::path::{Path, Ready};
use crate::pattern::Pattern;
use crate::policy::Processor;
use crate::portable;

/// Returns whether this build and CPU can take `path`: only the portable one.
pub(crate) fn is_available(path: Path) -> bool {
    path == Path::Portable
}

/// Returns the facts about the CPU that the policy depends on: none, because no store streams.
pub(crate) fn processor() -> Option<Processor> {
    None
}

#[inline]
pub(crate) fn copy(_: Ready, dst: &mut [u8], src: &[u8]) {
    dst.copy_from_slice(src);
}

#[inline]
pub(crate) fn zero(_: Ready, dst: &mut [u8]) {
    dst.fill(0);
}

#[inline]
pub(crate) fn fill(_: Ready, dst: &mut [u8], pattern: &Pattern) {
    portable::fill(dst, pattern);
}

/// Nothing streams here, so nothing is in flight.
#[inline]
pub(crate) fn drain() {}

/// Returns whether there is a write-back instruction: there is none.
pub(crate) fn has_write_back() -> bool {
    false
}

/// Writes lines back to memory: there is no instruction for it.
pub(crate) fn write_back_lines(_: &mut [u8]) {}

/// Writes the line of a word back to memory: there is no instruction for it.
pub(crate) fn write_back_word(_: &AtomicU64) {}

/// Drops lines from the cache: there is no instruction for it, so they stay as warm as they are.
pub(crate) fn evict_lines(_: &mut [u8]) {}

/// Copies 4, 8, 16, 32 or 64 naturally aligned bytes past the cache. Returns whether it did.
#[inline]
pub(crate) fn copy_small(_: &mut [u8], _: &[u8]) -> bool {
    false
}

/// Zeroes words that others may touch meanwhile.
pub(crate) fn zero_words(_: Ready, dst: &[AtomicU64]) {
    for word in dst {
        word.store(0, Ordering::Relaxed); // nothing is published by it
    }
}

/// Copies words that others may touch meanwhile.
///
/// # Panics
///
/// If there are not as many of either.
pub(crate) fn copy_words_shared(_: Ready, _: bool, dst: &[AtomicU64], src: &[AtomicU64]) {
    assert!(dst.len() == src.len(), "a copy of {} words to {}", src.len(), dst.len());
    for (dst, src) in dst.iter().zip(src) {
        dst.store(src.load(Ordering::Relaxed), Ordering::Relaxed); // as above
    }
}

/// Zeroes a slice.
pub(crate) fn zero_bytes(_: Ready, dst: &mut [u8]) {
    dst.fill(0);
}

/// Copies between slices of equal length.
pub(crate) fn copy_bytes(_: Ready, _: bool, dst: &mut [u8], src: &[u8]) {
    dst.copy_from_slice(src);
}

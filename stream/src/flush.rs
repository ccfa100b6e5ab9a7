//! A copy for persistent memory: past the cache where it can be, written back where it cannot.
//!
//! What [`copy_flush`] has copied is on its way out of the CPU's caches when it returns, in the
//! order the platform's persistence domain asks for. What it does *not* promise: that a power
//! failure in the middle leaves all or nothing (only aligned 8-byte words are never torn), that a
//! line it shares with neighbours stays cached, or anything where [`write_back`] is `None`.
//!
//! Cost: as [`crate::copy`], plus at most two line write-backs for ragged ends.

use crate::path::{Path, Ready};
use crate::policy::best;
use crate::{LINE_BYTES, arch};

/// An instruction that writes a line back to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WriteBack {
    /// CLWB: writes the line back and may keep it in the cache, clean.
    Clwb,
    /// CLFLUSHOPT: writes the line back and drops it.
    Clflushopt,
    /// CLFLUSH: as CLFLUSHOPT, one line after the other.
    Clflush,
}

/// Returns the instruction by which [`copy_flush`] writes ragged ends back, or `None` where there is
/// none: on other architectures than x86-64, under Miri and in builds with a sanitizer.
#[must_use]
pub fn write_back() -> Option<WriteBack> {
    arch::write_back()
}

/// Copies `src` to `dst` and leaves no changed byte of `dst` in the cache.
///
/// Whole 8-byte words stream, in ascending order; 4, 8, 16, 32 and 64 naturally aligned bytes do so
/// without any further ado. Bytes before the first and after the last word go by plain stores and
/// their lines are written back ([`write_back`] tells how). A store fence comes last, so everything
/// has left for memory before any later store becomes visible.
///
/// For persistent memory: after the return the bytes are in the persistence domain of a platform
/// with ADR. There is no atomicity over a power failure beyond single aligned words, and no order
/// among the bytes of one call. With CLWB the lines of ragged ends may stay in the cache, clean.
/// Where [`write_back`] is `None` this is a plain copy.
///
/// # Panics
///
/// If the lengths differ; nothing is written then.
#[inline]
pub fn copy_flush(dst: &mut [u8], src: &[u8]) {
    assert!(dst.len() == src.len(), "a copy of {} bytes to {}", src.len(), dst.len());
    if arch::copy_small(dst, src) {
        arch::drain();
    } else if !dst.is_empty() {
        copy_flush_any(Ready::new(best()), dst, src);
    }
}

/// [`copy_flush`] of any non-zero length.
#[inline(never)]
fn copy_flush_any(path: Ready, dst: &mut [u8], src: &[u8]) {
    arch::copy(path, dst, src);
    let start = dst.as_ptr().addr();
    let is_head_ragged = !start.is_multiple_of(8);
    let is_tail_ragged = !(start + dst.len()).is_multiple_of(8);
    if path.path() == Path::Portable {
        arch::write_back_lines(dst);
    } else {
        // Plain stores are fewer than 8 bytes at either end and within one line each, because lines
        // start at multiples of 8.
        if is_head_ragged {
            arch::write_back_lines(&mut dst[..1]);
        }
        let last = dst.len() - 1;
        if is_tail_ragged && !(is_head_ragged && start / LINE_BYTES == (start + last) / LINE_BYTES)
        {
            arch::write_back_lines(&mut dst[last..]);
        }
    }
    arch::drain();
}

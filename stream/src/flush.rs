//! A copy for persistent memory: past the cache where it can be, written back where it cannot.
//!
//! The bytes that [`copy_flush`] has copied are on their way out of the CPU's caches when it returns, in the
//! order the platform's persistence domain asks for. It does *not* promise that a power
//! failure in the middle leaves all or nothing (only aligned 8-byte words are never torn), that a
//! line it shares with neighbours stays cached, or anything without [`has_write_back`].
//!
//! [`flush_words`] does the same for bytes that were written before, by any stores. [`evict`] makes lines cold, for
//! measurements.
//!
//! Cost: as [`crate::copy`], plus at most two line write-backs for ragged ends. A line of [`flush_words`]
//! takes the time of a write to memory, or a few nanoseconds if it is clean.

use std::sync::atomic::AtomicU64;

use crate::path::{Path, Ready};
use crate::policy::best;
use crate::{LINE_BYTES, arch};

/// Returns whether there is an instruction that writes lines back, as [`copy_flush`] does with ragged
/// ends: not on other architectures than x86-64, under Miri and in builds with a sanitizer.
#[must_use]
pub fn has_write_back() -> bool {
    arch::has_write_back()
}

/// Writes back and drops every line of the cache that holds a byte of `bytes`, where the CPU can, and waits for it.
pub fn evict(bytes: &mut [u8]) {
    arch::evict_lines(bytes);
    arch::drain();
}

/// Copies `src` to `dst` and leaves no changed byte of `dst` in the cache.
///
/// Whole 8-byte words stream, in ascending order; 4, 8, 16, 32 and 64 naturally aligned bytes do so
/// without any further ado. Bytes before the first and after the last word go by plain stores and
/// their lines are written back. A store fence comes last, so everything
/// has left for memory before any later store becomes visible.
///
/// For persistent memory: after the return the bytes are in the persistence domain of a platform
/// with ADR. There is no atomicity over a power failure beyond single aligned words, and no order
/// among the bytes of one call. With CLWB the lines of ragged ends may stay in the cache, clean.
/// Without [`has_write_back`] this is a plain copy.
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

/// Writes every cache line that holds one of `words` back to memory, and waits until all of them are in the
/// persistence domain of a platform with ADR: a store fence comes last. Clean lines are left as they are.
///
/// Without [`has_write_back`], nothing is written back.
pub fn flush_words(words: &[AtomicU64]) {
    flush_by(words, arch::write_back_word, arch::drain);
}

/// Writes back each line that holds one of `words`, by any one of its words, and fences afterwards.
fn flush_by(words: &[AtomicU64], mut write_back: impl FnMut(&AtomicU64), fence: impl FnOnce()) {
    let word_bytes = size_of::<AtomicU64>();
    let until_line = words.as_ptr().addr().next_multiple_of(LINE_BYTES) - words.as_ptr().addr();
    let (first, rest) = words.split_at((until_line / word_bytes).min(words.len()));
    let lines = first.first().into_iter().chain(rest.iter().step_by(LINE_BYTES / word_bytes));
    lines.for_each(&mut write_back);
    fence();
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_line_of_the_words_is_written_back_once_and_the_fence_comes_after_all_of_them() {
        let memory: Vec<AtomicU64> = (0..64).map(AtomicU64::new).collect();
        for start in 0..20 {
            for len in 0..=40 {
                let words = &memory[start..start + len];
                let line_of = |word: &AtomicU64| std::ptr::from_ref(word).addr() / LINE_BYTES;
                let flushed = RefCell::new(Vec::new());
                let expected: BTreeSet<usize> = words.iter().map(line_of).collect();
                let mut fences = 0;
                flush_by(
                    words,
                    |word| flushed.borrow_mut().push(line_of(word)),
                    || {
                        fences += 1;
                        let flushed = flushed.borrow();
                        assert!(flushed.iter().eq(&expected), "{start} {len}: {flushed:?}");
                    },
                );
                assert_eq!(fences, 1, "one fence, at the end");
                flush_words(words);
            }
        }
        assert!(
            memory
                .iter()
                .zip(0..)
                .all(|(word, value)| word.load(std::sync::atomic::Ordering::Relaxed) == value)
        );
    }
}

//! Filling by plain stores: the fallback, and the oracle of the other paths. Copies and
//! zeroes are those of slices.
//!
//! Not streaming: these stores go through the cache, which is also why this is the
//! "cached" side of every measurement. Safe code only, and nothing that depends on the machine
//! except its byte order.
//!
//! Cost: the code that the compiler makes of `copy_from_slice` and `fill`, which is `memcpy` and `memset`;
//! a patterned fill is one word store (vectorised) per word.

use crate::LINE_BYTES;
use crate::pattern::{BLOCK_WORDS, Pattern};

/// Fills `dst` with the elements of `pattern`, from element 0; the last may be cut.
#[inline]
pub(crate) fn fill(dst: &mut [u8], pattern: &Pattern) {
    // A block of one line is by far the most common (elements of 8, 16, 32 and 64 bytes), and
    // with its length known the compiler keeps it in registers.
    if pattern.block_lines() == 1 {
        let mut words = [0; LINE_BYTES / 8];
        words.copy_from_slice(&pattern.words()[..LINE_BYTES / 8]);
        fill_blocks(dst, &mut words, pattern);
    } else {
        let mut words = [0; BLOCK_WORDS];
        let words = &mut words[..pattern.block_lines() * (LINE_BYTES / 8)];
        words.copy_from_slice(&pattern.words()[..words.len()]);
        fill_blocks(dst, words, pattern);
    }
}

/// Writes `words` over and over, adding the pattern's steps after each time.
#[inline(always)]
fn fill_blocks(dst: &mut [u8], words: &mut [u64], pattern: &Pattern) {
    let steps = &pattern.steps()[..words.len()];
    let mut blocks = dst.chunks_exact_mut(words.len() * 8);
    for block in &mut blocks {
        for (bytes, word) in block.as_chunks_mut::<8>().0.iter_mut().zip(&*words) {
            *bytes = word.to_ne_bytes();
        }
        for (word, step) in words.iter_mut().zip(steps) {
            *word = word.wrapping_add(*step);
        }
    }
    for (bytes, word) in blocks.into_remainder().chunks_mut(8).zip(&*words) {
        bytes.copy_from_slice(&word.to_ne_bytes()[..bytes.len()]);
    }
}

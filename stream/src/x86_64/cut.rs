//! The one way in which every path cuts a destination into lines, and the loops over them.
//!
//! A destination is written in ascending order: bytes up to an 8-byte boundary by plain stores,
//! words up to a line by MOVNTI, whole lines by the widest store of the path, then words, then
//! bytes. Consecutive short copies therefore meet in one write-combining buffer.
//!
//! Everything is generic over the [`Line`] of a path and inlined into a function that is compiled
//! for the path's features; nothing here is called from elsewhere than `x86_64.rs`.
//!
//! Why this file holds `unsafe`: stores that other threads see late. A `&mut [u8]` that stays
//! borrowed until the drain excludes early reads, and `&mut [[u8; 64]]` proves the length
//! of a line; only alignment is argued in words.

use std::arch::x86_64::_mm_stream_si64;

use super::line::{Line, read_each};
use crate::LINE_BYTES;
use crate::pattern::{BLOCK_LINES, Pattern};

/// Streams `src` to `dst` by words, and the rest of the last word by plain stores.
///
/// # Safety
///
/// `dst` is not accessed before a fence. `src` is at least as long as `dst`.
#[inline(always)]
pub(super) unsafe fn copy_words(dst: &mut [u8], src: &[u8]) {
    let (dst_words, dst_rest) = dst.as_chunks_mut::<8>();
    let (src_words, src_rest) = src[..dst_words.len() * 8 + dst_rest.len()].as_chunks::<8>();
    for (dst, src) in dst_words.iter_mut().zip(src_words) {
        // SAFETY: `_mm_stream_si64` wants 8 writable bytes that are not accessed before a fence:
        // `dst` is exactly 8 of the caller's.
        unsafe { _mm_stream_si64(dst.as_mut_ptr().cast(), i64::from_ne_bytes(*src)) };
    }
    copy_bytes(dst_rest, src_rest);
}

/// Streams words of `src` to `dst`, and the rest of the last word by plain stores.
///
/// # Safety
///
/// `dst` is not accessed before a fence. `src` is at least as long as `dst`.
#[inline(always)]
unsafe fn put_words(dst: &mut [u8], src: &[u64]) {
    let (dst_words, dst_rest) = dst.as_chunks_mut::<8>();
    for (dst, src) in dst_words.iter_mut().zip(src) {
        // SAFETY: `_mm_stream_si64` wants 8 writable bytes that are not accessed before a fence:
        // `dst` is exactly 8 of the caller's.
        unsafe { _mm_stream_si64(dst.as_mut_ptr().cast(), src.cast_signed()) };
    }
    if !dst_rest.is_empty() {
        copy_bytes(dst_rest, &src[dst_words.len()].to_ne_bytes());
    }
}

/// Copies fewer than 8 bytes by plain stores; `src` may be longer.
#[inline(always)]
fn copy_bytes(dst: &mut [u8], src: &[u8]) {
    for (dst, src) in dst.iter_mut().zip(src) {
        *dst = *src;
    }
}

/// Cuts `dst` at the first multiple of `align` (a power of two) in memory; all of it comes before
/// the cut if it ends earlier.
#[inline(always)]
pub(super) fn split_at_boundary(dst: &mut [u8], align: usize) -> (&mut [u8], &mut [u8]) {
    let before = dst.as_ptr().addr().wrapping_neg() & (align - 1);
    dst.split_at_mut(before.min(dst.len()))
}

/// Returns whether `dst` is whole lines: the case that is called often for a line or two, and that is
/// therefore kept free of all others.
#[inline(always)]
pub(super) fn is_whole_lines(dst: &[u8]) -> bool {
    (dst.as_ptr().addr() | dst.len()).is_multiple_of(LINE_BYTES)
}

/// Copies lines. There are as many of either.
///
/// # Safety
///
/// The CPU has the features of `L`, `dst` is aligned to 64, and it is not accessed before a fence.
#[inline(always)]
pub(super) unsafe fn copy_lines<L: Line>(dst: &mut [[u8; LINE_BYTES]], src: &[[u8; LINE_BYTES]]) {
    for (dst, src) in dst.iter_mut().zip(src) {
        // SAFETY: `Line::load` wants the features, which the caller promises, and 64 readable bytes.
        let line = unsafe { L::load(src.as_ptr()) };
        // SAFETY: `Line::stream` wants the features and 64 writable bytes, aligned, untouched: all
        // of it is the caller's promise, and lines follow each other at multiples of 64.
        unsafe { line.stream(dst.as_mut_ptr()) };
    }
}

/// Zeroes lines.
///
/// # Safety
///
/// The CPU has the features of `L`, `dst` is aligned to 64, and it is not accessed before a fence.
#[inline(always)]
pub(super) unsafe fn zero_lines<L: Line>(dst: &mut [[u8; LINE_BYTES]]) {
    // SAFETY: `Line::zero` wants the features, which the caller promises.
    let zero = unsafe { L::zero() };
    for line in dst {
        // SAFETY: as in `copy_lines`.
        unsafe { zero.stream(line.as_mut_ptr()) };
    }
}

/// Copies by lines of `L`. The lengths are equal.
///
/// # Safety
///
/// The CPU has the features of `L`, and `dst` is not accessed before a fence.
#[inline(always)]
pub(super) unsafe fn copy_with<L: Line>(dst: &mut [u8], src: &[u8]) {
    let (bytes, rest) = split_at_boundary(dst, 8);
    let (bytes_src, src) = src.split_at(bytes.len());
    copy_bytes(bytes, bytes_src);
    let (head, rest) = split_at_boundary(rest, LINE_BYTES);
    let (head_src, src) = src.split_at(head.len());
    // SAFETY: `copy_words` wants `head` untouched before a fence, which the caller promises, and as
    // many bytes of source.
    unsafe { copy_words(head, head_src) };
    let (lines, tail) = rest.as_chunks_mut::<LINE_BYTES>();
    let (lines_src, tail_src) = src.as_chunks::<LINE_BYTES>();
    // SAFETY: `copy_lines` wants the features and untouched destinations, which the caller promises,
    // that are aligned: `rest` starts at a multiple of 64 or is empty.
    unsafe { copy_lines::<L>(lines, lines_src) };
    // SAFETY: as for `head`.
    unsafe { copy_words(tail, tail_src) };
}

/// Zeroes by lines of `L`.
///
/// A loop of its own because some CPUs stream zeroes faster than other data.
///
/// # Safety
///
/// The CPU has the features of `L`, and `dst` is not accessed before a fence.
#[inline(always)]
pub(super) unsafe fn zero_with<L: Line>(dst: &mut [u8]) {
    let (bytes, rest) = split_at_boundary(dst, 8);
    copy_bytes(bytes, &[0; 8]);
    let (head, rest) = split_at_boundary(rest, LINE_BYTES);
    // SAFETY: `put_words` wants `head` untouched before a fence, which the caller promises, and a
    // source that is as long: it ends before the next line, so it has fewer than 64 bytes.
    unsafe { put_words(head, &[0; 8]) };
    let (lines, tail) = rest.as_chunks_mut::<LINE_BYTES>();
    // SAFETY: `zero_lines` wants the features and an untouched destination, which the caller
    // promises, that is aligned: `rest` starts at a multiple of 64 or is empty.
    unsafe { zero_lines::<L>(lines) };
    // SAFETY: as for `head`; the rest has fewer than 64 bytes.
    unsafe { put_words(tail, &[0; 8]) };
}

/// Lines of our own for the block of an element that does not divide a line: aligned, and small
/// enough to stay in the first-level cache.
#[repr(align(64))]
struct Block([[u64; 8]; BLOCK_LINES]);

/// Fills whole aligned lines with a pattern whose block is one line. Returns `false` if either is
/// something else, and has written nothing then.
///
/// # Safety
///
/// The CPU has the features of `L`, and `dst` is not accessed before a fence.
#[inline(always)]
pub(super) unsafe fn fill_lines_with<L: Line>(dst: &mut [u8], pattern: &Pattern) -> bool {
    if !is_whole_lines(dst) || pattern.block_lines() != 1 {
        return false;
    }
    let (lines, _) = dst.as_chunks_mut::<LINE_BYTES>();
    let (Some(words), Some(steps)) =
        (pattern.words().first_chunk(), pattern.steps().first_chunk::<8>())
    else {
        return false; // never: both are longer than that
    };
    let step = pattern.is_linear().then_some(steps);
    // SAFETY: `fill_lines` has the requirements that the caller meets, and takes lines that start at a multiple of 64, as whole lines do.
    unsafe { fill_lines::<L>(lines, &mut [], words, step) };
    true
}

/// Fills each line of `lines`, and `tail`, with the words of one. With a `step`, each line is the line before it
/// plus `step`.
///
/// # Safety
///
/// The CPU has the features of `L`, and `lines` and `tail` are not accessed before a fence. The first line starts
/// at a multiple of 64, and `tail` is shorter than a line.
#[inline(always)]
unsafe fn fill_lines<L: Line>(
    lines: &mut [[u8; LINE_BYTES]],
    tail: &mut [u8],
    words: &[u64; 8],
    step: Option<&[u64; 8]>,
) {
    // SAFETY: `Line::new` wants the features, which the caller promises.
    let mut line = unsafe { L::new(read_each(words)) };
    let Some(step) = step else {
        for dst in lines {
            // SAFETY: `Line::stream` wants the features and 64 writable bytes, aligned, untouched: the caller
            // promises that.
            unsafe { line.stream(dst.as_mut_ptr()) };
        }
        // SAFETY: `put_words` wants `tail` untouched before a fence, which the caller promises, and a source as
        // long: a line is longer.
        unsafe { put_words(tail, words) };
        return;
    };
    // SAFETY: `Line::load` wants the features and 64 readable bytes: `step` is 8 words.
    let step = unsafe { L::load(step.as_ptr().cast()) };
    for dst in lines {
        // SAFETY: as in the constant loop.
        unsafe { line.stream(dst.as_mut_ptr()) };
        // SAFETY: `Line::plus` wants the features, which the caller promises.
        line = unsafe { line.plus(step) };
    }
    if !tail.is_empty() {
        let mut next = Block([[0; 8]; BLOCK_LINES]);
        // SAFETY: `Line::keep` wants 64 writable bytes aligned to 64: the first line of a `Block` is that.
        unsafe { line.keep(next.0[0].as_mut_ptr().cast()) };
        // SAFETY: as in the constant case.
        unsafe { put_words(tail, &next.0[0]) };
    }
}

/// Fills by lines of `L`. `dst` starts at a multiple of 8.
///
/// # Safety
///
/// The CPU has the features of `L`, and `dst` is not accessed before a fence.
#[inline(always)]
pub(super) unsafe fn fill_with<L: Line>(dst: &mut [u8], pattern: &Pattern) {
    let (head, rest) = split_at_boundary(dst, LINE_BYTES);
    // Where in the block the first whole line begins, in words: at most 7. The pattern's arrays
    // go on for 8 words after the block, so a block can be read from there.
    let phase = head.len() / 8;
    // SAFETY: `put_words` wants `head` untouched before a fence, which the caller promises, and a
    // source as long: a block has at least 64 bytes and `head` fewer.
    unsafe { put_words(head, pattern.words()) };
    if rest.is_empty() {
        return;
    }
    let (words, _) = pattern.words()[phase..].as_chunks::<8>();
    let (steps, _) = pattern.steps()[phase..].as_chunks::<8>();
    let (lines, tail) = rest.as_chunks_mut::<LINE_BYTES>();

    if pattern.block_lines() == 1 {
        let step = pattern.is_linear().then_some(&steps[0]);
        // SAFETY: `fill_lines` has the requirements that the caller meets, and takes lines that start at a multiple of 64, as
        // `rest` does; `tail` has fewer than 64 bytes.
        return unsafe { fill_lines::<L>(lines, tail, &words[0], step) };
    }

    // The block, rotated so that its first word is the one the first whole line begins with.
    let mut block = Block([[0; 8]; BLOCK_LINES]);
    let block = &mut block.0[..pattern.block_lines()];
    for (ours, theirs) in block.iter_mut().zip(words) {
        // SAFETY: `Line::load` wants the features and 64 readable bytes: `theirs` is 8 words.
        let line = unsafe { L::load(theirs.as_ptr().cast()) };
        // SAFETY: `Line::keep` wants 64 writable bytes aligned to 64: a `Block` is aligned and each
        // of its lines is 64 bytes long.
        unsafe { line.keep(ours.as_mut_ptr().cast()) };
    }
    let done_lines = lines.len();
    for group in lines.chunks_mut(block.len()) {
        for ((dst, ours), step) in group.iter_mut().zip(&mut *block).zip(steps) {
            // SAFETY: `Line::load_kept` wants the features, which the caller promises.
            let line = unsafe { L::load_kept(ours) };
            // SAFETY: `Line::stream` wants the features and 64 writable bytes, aligned, untouched:
            // `rest` starts at a multiple of 64, and the caller promises the others.
            unsafe { line.stream(dst.as_mut_ptr()) };
            if pattern.is_linear() {
                // SAFETY: `Line::load` wants the features and 64 readable bytes: `step` is 8 words.
                let step = unsafe { L::load(step.as_ptr().cast()) };
                // SAFETY: `Line::plus` wants the features, which the caller promises.
                let next = unsafe { line.plus(step) };
                // SAFETY: as for the first `Line::keep`.
                unsafe { next.keep(ours.as_mut_ptr().cast()) };
            }
        }
    }
    // SAFETY: as for `head`; the rest has fewer than 64 bytes, and the next line of the block
    // holds the next words.
    unsafe { put_words(tail, &block[done_lines % block.len()]) };
}

//! Clearing and copying memory that others may touch meanwhile, by every [`CopyMethod`](crate::CopyMethod) there is.
//!
//! The destination is a row of atomic words and every store is one that the compiler does not look
//! into (`line.rs`), so a thread, a process or a device that reads or writes the same words races
//! with nothing that is undefined: it sees each aligned word old or new. A plain slice is such a row
//! as well, one that happens to be ours alone.
//!
//! Where lines do not start at the row's start or end at its end, the words beside them are stored
//! one by one.
//!
//! Why this file holds `unsafe`: the instructions, and pointers in place of the source's slice, whose
//! bytes another thread may write. The drain is the caller's, as everywhere below `x86_64.rs`.
//!
//! Source: Intel SDM volume 2 for REP STOS and REP MOVS; for several pages side by side, measurement:
//! the prefetcher follows each page by itself.

use std::arch::asm;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};

use super::line::Line;
use crate::LINE_BYTES;

/// How many pages a copy has under way at a time, if it takes several.
const PAGES: usize = 8;
/// The reach of a prefetcher: the smallest page there is.
const PAGE_BYTES: usize = 4096;
const WORD_BYTES: usize = size_of::<AtomicU64>();
const LINE_WORDS: usize = LINE_BYTES / WORD_BYTES;

/// Cuts a row of words into those before the first whole line, whole lines, and those behind.
#[inline]
fn cut(words: &[AtomicU64]) -> (&[AtomicU64], &[AtomicU64], &[AtomicU64]) {
    let before = (words.as_ptr().addr().wrapping_neg() & (LINE_BYTES - 1)) / WORD_BYTES;
    let (head, rest) = words.split_at(before.min(words.len()));
    let (lines, tail) = rest.split_at(rest.len() / LINE_WORDS * LINE_WORDS);
    (head, lines, tail)
}

/// Zeroes words one by one.
#[inline]
fn zero_each(words: &[AtomicU64]) {
    for word in words {
        word.store(0, Ordering::Relaxed); // ordered by the caller's fence, if at all
    }
}

/// Copies words one by one.
///
/// # Safety
///
/// `src` has as many readable bytes, which change meanwhile by whole aligned words at most.
unsafe fn copy_each(dst: &[AtomicU64], src: *const u8) {
    for (index, word) in dst.iter().enumerate() {
        let src = src.wrapping_add(index * WORD_BYTES);
        let value: u64;
        // SAFETY: MOV wants 8 readable bytes, which the caller promises. It changes no byte, no flags
        // and no stack.
        unsafe {
            asm!("mov {}, [{}]", lateout(reg) value, in(reg) src, options(nostack, preserves_flags, readonly));
        }
        word.store(value, Ordering::Relaxed); // as in `zero_each`
    }
}

/// Zeroes by the CPU's own loop.
#[inline]
pub(super) fn zero_string(dst: &[AtomicU64]) {
    // SAFETY: REP STOSQ wants as many writable words at RDI as RCX counts and a clear direction flag,
    // which it has in every Rust function. `dst` is these words; they may change through a shared
    // reference, being atomic, and each changes at once. It changes no flags and no stack.
    unsafe {
        asm!(
            "rep stosq",
            inout("rcx") dst.len() => _,
            inout("rdi") dst.as_ptr() => _,
            in("rax") 0_u64,
            options(nostack, preserves_flags),
        );
    }
}

/// Copies by the CPU's own loop.
///
/// # Safety
///
/// `src` has as many readable bytes, which change meanwhile by whole aligned words at most.
#[inline]
pub(super) unsafe fn copy_string(dst: &[AtomicU64], src: *const u8) {
    // SAFETY: REP MOVSQ wants as many writable words at RDI and readable ones at RSI as RCX counts, and a
    // clear direction flag. `dst` is the former, as in `zero_string`, and the caller promises the
    // latter. It changes no flags and no stack.
    unsafe {
        asm!(
            "rep movsq",
            inout("rcx") dst.len() => _,
            inout("rdi") dst.as_ptr() => _,
            inout("rsi") src => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Zeroes by lines of `L`.
///
/// # Safety
///
/// The CPU has the features of `L`.
#[inline(always)]
pub(super) unsafe fn zero_shared<L: Line>(dst: &[AtomicU64]) {
    let (head, lines, tail) = cut(dst);
    zero_each(head);
    // SAFETY: `Line::zero` wants the features, which the caller promises.
    let zero = unsafe { L::zero() };
    for line in lines.chunks_exact(LINE_WORDS) {
        let line = line.as_ptr().cast_mut().cast();
        // SAFETY: `Line::stream` wants the features, and 64 bytes, aligned, that may be written
        // through a shared reference: `cut` begins at a multiple of 64, a chunk is 8 words, and
        // words are atomic.
        unsafe { zero.stream(line) };
    }
    zero_each(tail);
}

/// Copies by lines of `L`, one after the other.
///
/// # Safety
///
/// The CPU has the features of `L`. `src` has as many readable bytes, which change meanwhile by whole
/// aligned words at most.
#[inline(always)]
pub(super) unsafe fn copy_shared<L: Line>(dst: &[AtomicU64], src: *const u8) {
    let (head, lines, tail) = cut(dst);
    // SAFETY: `copy_each` wants readable bytes, which the caller promises.
    unsafe { copy_each(head, src) };
    let src = src.wrapping_add(size_of_val(head));
    // SAFETY: `copy_lines` wants the features and readable bytes, which the caller promises, and
    // aligned lines, which `cut` gives.
    unsafe { copy_lines::<L>(lines, src) };
    // SAFETY: as for `head`.
    unsafe { copy_each(tail, src.wrapping_add(size_of_val(lines))) };
}

/// Copies whole lines, one after the other.
///
/// # Safety
///
/// As [`copy_shared`], and `lines` starts at a multiple of 64 and is whole lines.
#[inline(always)]
unsafe fn copy_lines<L: Line>(lines: &[AtomicU64], src: *const u8) {
    for (index, line) in lines.chunks_exact(LINE_WORDS).enumerate() {
        // SAFETY: `copy_line` has the requirements that the caller meets, for one of the lines.
        unsafe { copy_line::<L>(line, src.wrapping_add(index * LINE_BYTES)) };
    }
}

/// Copies a line.
///
/// # Safety
///
/// As [`copy_shared`], and `line` starts at a multiple of 64 and has 64 bytes.
#[inline(always)]
unsafe fn copy_line<L: Line>(line: &[AtomicU64], src: *const u8) {
    // SAFETY: `load_shared` wants the features and 64 readable bytes, which the caller promises.
    let bytes = unsafe { L::load_shared(src) };
    // SAFETY: `Line::stream` wants the features, and 64 bytes, aligned, that may be written through a
    // shared reference: the caller promises the first two, and words are atomic.
    unsafe { bytes.stream(line.as_ptr().cast_mut().cast()) };
}

/// Copies by lines of `L`, a line of each of several pages in turn.
///
/// # Safety
///
/// As [`copy_shared`].
#[inline(always)]
pub(super) unsafe fn copy_side_by_side<L: Line>(dst: &[AtomicU64], src: *const u8) {
    const PAGE_WORDS: usize = PAGE_BYTES / WORD_BYTES;
    let (head, lines, tail) = cut(dst);
    // SAFETY: `copy_each` wants readable bytes, which the caller promises.
    unsafe { copy_each(head, src) };
    let mut src = src.wrapping_add(size_of_val(head));
    let (pages, rest) = lines.split_at(lines.len() / PAGE_WORDS * PAGE_WORDS);
    let (groups, few) = pages.as_chunks::<{ PAGES * PAGE_WORDS }>();
    for group in groups {
        // SAFETY: `copy_group` has the requirements that the caller meets, and takes aligned lines.
        unsafe { copy_group::<L>(group, PAGES, src) };
        src = src.wrapping_add(size_of_val(group));
    }
    // SAFETY: as above.
    unsafe { copy_group::<L>(few, few.len() / PAGE_WORDS, src) };
    src = src.wrapping_add(size_of_val(few));
    // SAFETY: `copy_lines` has the requirements that the caller meets, and takes aligned lines.
    unsafe { copy_lines::<L>(rest, src) };
    // SAFETY: as for `head`.
    unsafe { copy_each(tail, src.wrapping_add(size_of_val(rest))) };
}

/// Copies `pages` pages, a line of each in turn. Inlined, so that the loop over a full group has a
/// constant length.
///
/// # Safety
///
/// As [`copy_shared`], and `group` starts at a multiple of 64 and has that many pages.
#[inline(always)]
unsafe fn copy_group<L: Line>(group: &[AtomicU64], pages: usize, src: *const u8) {
    for line in (0..PAGE_BYTES).step_by(LINE_BYTES) {
        for page in 0..pages {
            let at = page * PAGE_BYTES + line;
            let dst = &group[at / WORD_BYTES..][..LINE_WORDS];
            // SAFETY: `copy_line` wants the features, readable bytes and an aligned line, which the
            // caller promises: `at` is a multiple of 64 inside of the group.
            unsafe { copy_line::<L>(dst, src.wrapping_add(at)) };
        }
    }
}

/// Cuts a plain slice into bytes before the first aligned word, words, and bytes behind.
#[inline]
pub(super) fn words_of(bytes: &mut [u8]) -> (&mut [u8], &[AtomicU64], &mut [u8]) {
    let before = (bytes.as_ptr().addr().wrapping_neg() & (WORD_BYTES - 1)).min(bytes.len());
    let (head, rest) = bytes.split_at_mut(before);
    let (words, tail) = rest.split_at_mut(rest.len() / WORD_BYTES * WORD_BYTES);
    let count = words.len() / WORD_BYTES;
    if count == 0 {
        return (head, &[], tail); // its pointer may not be aligned
    }
    // SAFETY: `from_raw_parts` wants `count` initialised words, aligned, in one allocation, that
    // change during the borrow only through the atomics.
    // 1. In bounds and aligned: `words` has `count` times 8 bytes and starts at a multiple of 8.
    // 2. Initialised, and alone: they are bytes of a `&mut` that is given up for the words.
    let words = unsafe { slice::from_raw_parts(words.as_mut_ptr().cast::<AtomicU64>(), count) };
    (head, words, tail)
}

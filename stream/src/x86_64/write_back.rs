//! Writing lines back to memory and dropping them from the cache: CLWB, CLFLUSHOPT and CLFLUSH.
//!
//! No byte changes here, only which copy of it is the current one. The fence that
//! completes it is the caller's.
//!
//! Why this file holds `unsafe`: the instructions. They want a mapped address, which the address of
//! a byte of a slice is.
//!
//! Cost: an instruction for each line; those of CLFLUSH wait for each other, the others do not.
//! Source: Intel SDM volume 2.

use std::arch::asm;
use std::arch::x86_64::_mm_clflush;
use std::sync::atomic::AtomicU64;

use super::cpu;
use super::cut::split_at_boundary;
use crate::LINE_BYTES;

/// Returns whether there is a write-back instruction, after finding out which: CLFLUSH came with SSE2.
pub(crate) fn has_write_back() -> bool {
    cpu();
    true
}

/// Starts writing back every line that holds a byte of `bytes`. A fence completes it.
pub(crate) fn write_back_lines(bytes: &mut [u8]) {
    if cpu().clwb {
        each_line(bytes, |line| {
            // SAFETY: CLWB wants the CPU feature, asked for above, and a mapped address. It changes
            // no byte, no flags and no stack.
            unsafe { asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)) };
        });
    } else {
        evict_lines(bytes);
    }
}

/// Starts writing back the line of a word, which others may touch meanwhile. A fence completes it.
#[inline]
pub(crate) fn write_back_word(word: &AtomicU64) {
    let line = word.as_ptr();
    if cpu().clwb {
        // SAFETY: as in `write_back_lines`.
        unsafe { asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)) };
    } else {
        evict_line(line.cast());
    }
}

/// Writes the line of an address back and drops it. A fence completes it.
#[inline]
fn evict_line(line: *const u8) {
    if cpu().clflushopt {
        // SAFETY: CLFLUSHOPT wants the CPU feature, asked for above, and a mapped address, which every
        // caller has. It changes no byte, no flags and no stack.
        unsafe { asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)) };
    } else {
        // SAFETY: `_mm_clflush` wants a mapped address; it changes no byte.
        unsafe { _mm_clflush(line) };
    }
}

/// Writes back and drops every line that holds a byte of `bytes`. A fence completes it.
pub(crate) fn evict_lines(bytes: &mut [u8]) {
    each_line(bytes, evict_line);
}

/// Calls `act` with the address of one byte in each line that holds a byte of `bytes`: all of them
/// lie within `bytes`, so they are mapped.
#[inline(always)]
fn each_line(bytes: &mut [u8], act: impl Fn(*const u8)) {
    let (first, rest) = split_at_boundary(bytes, LINE_BYTES);
    if !first.is_empty() {
        act(first.as_ptr());
    }
    for line in rest.chunks(LINE_BYTES) {
        act(line.as_ptr());
    }
}

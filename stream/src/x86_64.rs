//! Streaming stores of x86-64: the instructions, and the one way in which all of them cut a
//! destination into lines.
//!
//! A destination is written in ascending order: bytes up to an 8-byte boundary by plain stores,
//! words up to a line by MOVNTI, whole lines by the widest store of the path, then words, then
//! bytes. Consecutive short copies therefore meet in one write-combining buffer. A path supplies a
//! [`Line`]: how to load, stream and add 64 bytes; the rest is written once and generic over it.
//!
//! Not here: fences after each call (the caller of this module drains, see `streaming.rs`), and the
//! choice of a path.
//!
//! Why this file holds `unsafe`: instructions beyond the baseline, stores that other threads see
//! late, and cache control. The rules are kept by types: a [`Ready`] proves the CPU features, a
//! `&mut [u8]` that stays borrowed until the drain proves that nobody reads early, and `&mut [[u8;
//! 64]]` proves the length of a line; only alignment is argued in words.
//!
//! Cost: a call is a match on the path, one call of a function compiled for it, and the stores.
//! Source: AMD64 Architecture Programmer's Manual volumes 1 (section 5.6.4, streaming stores) and 3;
//! Intel SDM volume 2 for CPUID leaf 7, CLWB and MOVDIR64B.

use std::arch::asm;
use std::arch::x86_64::{
    __cpuid, __cpuid_count, __m128i, __m256i, __m512i, _mm_add_epi64, _mm_clflush, _mm_loadu_si128,
    _mm_set_epi64x, _mm_setzero_si128, _mm_sfence, _mm_store_si128, _mm_stream_si32,
    _mm_stream_si64, _mm_stream_si128, _mm256_add_epi64, _mm256_loadu_si256, _mm256_set_epi64x,
    _mm256_setzero_si256, _mm256_store_si256, _mm256_stream_si256, _mm512_add_epi64,
    _mm512_loadu_si512, _mm512_set_epi64, _mm512_setzero_si512, _mm512_store_si512,
    _mm512_stream_si512,
};
use std::sync::OnceLock;

use crate::LINE_BYTES;
use crate::flush::WriteBack;
use crate::path::{Path, Ready};
use crate::pattern::{BLOCK_LINES, Pattern};
use crate::portable;

/// What the CPU offers beyond the baseline, asked once.
struct Cpu {
    avx2: bool,
    avx512f: bool,
    movdir64b: bool,
    clflushopt: bool,
    clwb: bool,
}

/// Returns what the CPU (and, for vector registers, the operating system) offers.
#[inline]
fn cpu() -> &'static Cpu {
    static CPU: OnceLock<Cpu> = OnceLock::new();
    CPU.get_or_init(|| {
        let leaf_7 = if __cpuid(0).eax >= 7 { Some(__cpuid_count(7, 0)) } else { None };
        let (ebx, ecx) = leaf_7.map_or((0, 0), |leaf| (leaf.ebx, leaf.ecx));
        Cpu {
            avx2: is_x86_feature_detected!("avx2"),
            avx512f: is_x86_feature_detected!("avx512f"),
            movdir64b: ecx & (1 << 28) != 0,
            clflushopt: ebx & (1 << 23) != 0,
            clwb: ebx & (1 << 24) != 0,
        }
    })
}

/// Returns whether this CPU can take `path`.
#[inline]
pub(crate) fn is_available(path: Path) -> bool {
    match path {
        Path::Portable | Path::Movnti | Path::Sse2 => true,
        Path::Avx2 => cpu().avx2,
        Path::Avx512 => cpu().avx512f,
        Path::Movdir64b => cpu().movdir64b,
    }
}

/// 64 bytes in the registers of one path.
///
/// # Safety
///
/// Every method is to be called only where the CPU has the path's features; what it says about its
/// pointer comes on top. All of them are inlined into a function compiled for those features.
trait Line: Copy {
    /// Loads 64 bytes.
    ///
    /// # Safety
    ///
    /// `src` has 64 readable bytes, at any alignment.
    unsafe fn load(src: *const u8) -> Self;

    /// Makes a line of eight words.
    ///
    /// # Safety
    ///
    /// The path's features alone.
    unsafe fn new(words: [u64; 8]) -> Self;

    /// Stores 64 bytes past the cache, in ascending order.
    ///
    /// # Safety
    ///
    /// `dst` has 64 writable bytes, aligned to 64, that nobody touches before a fence.
    unsafe fn stream(self, dst: *mut u8);

    /// Stores 64 bytes the plain way.
    ///
    /// # Safety
    ///
    /// `dst` has 64 writable bytes, aligned to 64.
    unsafe fn keep(self, dst: *mut u8);

    /// Loads what [`Line::keep`] has stored, in a way that does not wait for it to leave the store
    /// queue (see [`read_each`]): by loads that are no wider than its stores.
    ///
    /// # Safety
    ///
    /// The path's features alone.
    #[inline(always)]
    unsafe fn load_kept(kept: &[u64; 8]) -> Self {
        // SAFETY: `load` wants the features, which the caller promises, and 64 readable bytes.
        unsafe { Self::load(kept.as_ptr().cast()) }
    }

    /// Adds the eight words of the two lines pairwise, wrapping.
    ///
    /// # Safety
    ///
    /// The path's features alone.
    unsafe fn plus(self, other: Self) -> Self;

    /// 64 bytes of zero.
    ///
    /// # Safety
    ///
    /// The path's features alone.
    unsafe fn zero() -> Self;
}

/// A line in general registers, streamed by eight 8-byte stores.
#[derive(Clone, Copy)]
struct Words([u64; 8]);

impl Line for Words {
    #[inline(always)]
    unsafe fn load(src: *const u8) -> Self {
        // SAFETY: the caller promises 64 readable bytes; every bit pattern is a valid word and
        // `read_unaligned` asks for no alignment.
        Self(unsafe { src.cast::<[u64; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn new(words: [u64; 8]) -> Self {
        Self(words)
    }

    #[inline(always)]
    unsafe fn load_kept(kept: &[u64; 8]) -> Self {
        Self(read_each(kept))
    }

    #[inline(always)]
    unsafe fn stream(self, dst: *mut u8) {
        for (index, word) in self.0.into_iter().enumerate() {
            let dst = dst.wrapping_add(index * 8).cast::<i64>();
            // SAFETY: `_mm_stream_si64` wants 8 writable bytes that nobody touches before a fence.
            // `index` is at most 7, so the store ends within the 64 bytes that the caller promises.
            unsafe { _mm_stream_si64(dst, word.cast_signed()) };
        }
    }

    #[inline(always)]
    unsafe fn keep(self, dst: *mut u8) {
        // SAFETY: the caller promises 64 writable bytes aligned to 64, more than the 8 asked for.
        unsafe { dst.cast::<[u64; 8]>().write(self.0) };
    }

    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        let mut sum = self.0;
        for (word, more) in sum.iter_mut().zip(other.0) {
            *word = word.wrapping_add(more);
        }
        Self(sum)
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0; 8])
    }
}

/// A line in four XMM registers.
#[derive(Clone, Copy)]
struct Xmm([__m128i; 4]);

impl Line for Xmm {
    #[inline(always)]
    unsafe fn load(src: *const u8) -> Self {
        let quarter = |index: usize| {
            let src = src.wrapping_add(index * 16).cast();
            // SAFETY: `_mm_loadu_si128` wants 16 readable bytes at any alignment. `index` is at
            // most 3, so they lie within the 64 that the caller promises.
            unsafe { _mm_loadu_si128(src) }
        };
        Self([quarter(0), quarter(1), quarter(2), quarter(3)])
    }

    #[inline(always)]
    unsafe fn new(words: [u64; 8]) -> Self {
        let [a, b, c, d, e, f, g, h] = words.map(u64::cast_signed);
        let quarter = |low, high| {
            // SAFETY: `_mm_set_epi64x` wants SSE2, which every x86-64 CPU has.
            unsafe { _mm_set_epi64x(high, low) }
        };
        Self([quarter(a, b), quarter(c, d), quarter(e, f), quarter(g, h)])
    }

    #[inline(always)]
    unsafe fn stream(self, dst: *mut u8) {
        for (index, quarter) in self.0.into_iter().enumerate() {
            let dst = dst.wrapping_add(index * 16).cast();
            // SAFETY: `_mm_stream_si128` wants 16 writable bytes, aligned to 16, that nobody touches
            // before a fence.
            // 1. In bounds: `index` is at most 3, so the store ends within the caller's 64 bytes.
            // 2. Aligned: the caller's line starts at a multiple of 64 and `dst` steps by 16.
            // 3. Untouched: the caller's promise.
            unsafe { _mm_stream_si128(dst, quarter) };
        }
    }

    #[inline(always)]
    unsafe fn keep(self, dst: *mut u8) {
        for (index, quarter) in self.0.into_iter().enumerate() {
            let dst = dst.wrapping_add(index * 16).cast();
            // SAFETY: `_mm_store_si128` wants 16 writable bytes aligned to 16; `index` is at most 3
            // and the caller's 64 bytes start at a multiple of 64.
            unsafe { _mm_store_si128(dst, quarter) };
        }
    }

    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        let mut sum = self.0;
        for (quarter, more) in sum.iter_mut().zip(other.0) {
            // SAFETY: `_mm_add_epi64` wants SSE2, which every x86-64 CPU has.
            *quarter = unsafe { _mm_add_epi64(*quarter, more) };
        }
        Self(sum)
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: `_mm_setzero_si128` wants SSE2, which every x86-64 CPU has.
        Self([unsafe { _mm_setzero_si128() }; 4])
    }
}

/// A line in two YMM registers.
#[derive(Clone, Copy)]
struct Ymm(__m256i, __m256i);

impl Line for Ymm {
    #[inline(always)]
    unsafe fn load(src: *const u8) -> Self {
        // SAFETY: `_mm256_loadu_si256` wants AVX and 32 readable bytes at any alignment: the caller
        // promises AVX2 and 64 bytes, of which these are the first half.
        let low = unsafe { _mm256_loadu_si256(src.cast()) };
        // SAFETY: as above, for the second half.
        let high = unsafe { _mm256_loadu_si256(src.wrapping_add(32).cast()) };
        Self(low, high)
    }

    #[inline(always)]
    unsafe fn new(words: [u64; 8]) -> Self {
        let [a, b, c, d, e, f, g, h] = words.map(u64::cast_signed);
        // SAFETY: `_mm256_set_epi64x` wants AVX, which comes with the AVX2 the caller promises.
        let low = unsafe { _mm256_set_epi64x(d, c, b, a) };
        // SAFETY: as above.
        let high = unsafe { _mm256_set_epi64x(h, g, f, e) };
        Self(low, high)
    }

    #[inline(always)]
    unsafe fn stream(self, dst: *mut u8) {
        // SAFETY: `_mm256_stream_si256` wants AVX and 32 writable bytes, aligned to 32, that nobody
        // touches before a fence: the caller promises AVX2 and 64 such bytes, aligned to 64.
        unsafe { _mm256_stream_si256(dst.cast(), self.0) };
        // SAFETY: as above, for the second half, which starts at a multiple of 32.
        unsafe { _mm256_stream_si256(dst.wrapping_add(32).cast(), self.1) };
    }

    #[inline(always)]
    unsafe fn keep(self, dst: *mut u8) {
        // SAFETY: `_mm256_store_si256` wants AVX and 32 writable bytes aligned to 32: the caller
        // promises AVX2 and 64 bytes aligned to 64.
        unsafe { _mm256_store_si256(dst.cast(), self.0) };
        // SAFETY: as above, for the second half, which starts at a multiple of 32.
        unsafe { _mm256_store_si256(dst.wrapping_add(32).cast(), self.1) };
    }

    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        // SAFETY: `_mm256_add_epi64` wants AVX2, which the caller promises.
        let low = unsafe { _mm256_add_epi64(self.0, other.0) };
        // SAFETY: as above.
        let high = unsafe { _mm256_add_epi64(self.1, other.1) };
        Self(low, high)
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: `_mm256_setzero_si256` wants AVX, which comes with the AVX2 the caller promises.
        let zero = unsafe { _mm256_setzero_si256() };
        Self(zero, zero)
    }
}

/// A line in one ZMM register.
#[derive(Clone, Copy)]
struct Zmm(__m512i);

impl Line for Zmm {
    #[inline(always)]
    unsafe fn load(src: *const u8) -> Self {
        // SAFETY: `_mm512_loadu_si512` wants AVX-512F and 64 readable bytes at any alignment: the
        // caller promises both.
        Self(unsafe { _mm512_loadu_si512(src.cast()) })
    }

    #[inline(always)]
    unsafe fn new(words: [u64; 8]) -> Self {
        let [a, b, c, d, e, f, g, h] = words.map(u64::cast_signed);
        // SAFETY: `_mm512_set_epi64` wants AVX-512F, which the caller promises.
        Self(unsafe { _mm512_set_epi64(h, g, f, e, d, c, b, a) })
    }

    #[inline(always)]
    unsafe fn stream(self, dst: *mut u8) {
        // SAFETY: `_mm512_stream_si512` wants AVX-512F and 64 writable bytes, aligned to 64, that
        // nobody touches before a fence: the caller promises all of it.
        unsafe { _mm512_stream_si512(dst.cast(), self.0) };
    }

    #[inline(always)]
    unsafe fn keep(self, dst: *mut u8) {
        // SAFETY: `_mm512_store_si512` wants AVX-512F and 64 writable bytes aligned to 64: the
        // caller promises both.
        unsafe { _mm512_store_si512(dst.cast(), self.0) };
    }

    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        // SAFETY: `_mm512_add_epi64` wants AVX-512F, which the caller promises.
        Self(unsafe { _mm512_add_epi64(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: `_mm512_setzero_si512` wants AVX-512F, which the caller promises.
        Self(unsafe { _mm512_setzero_si512() })
    }
}

/// A line in memory, streamed by one MOVDIR64B.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Direct(Words);

impl Line for Direct {
    #[inline(always)]
    unsafe fn load(src: *const u8) -> Self {
        // SAFETY: `Words::load` wants 64 readable bytes, which the caller promises.
        Self(unsafe { Words::load(src) })
    }

    #[inline(always)]
    unsafe fn new(words: [u64; 8]) -> Self {
        Self(Words(words))
    }

    #[inline(always)]
    unsafe fn stream(self, dst: *mut u8) {
        // SAFETY: MOVDIR64B wants the CPU feature, 64 readable bytes at its memory operand (any
        // alignment) and 64 writable bytes at the address in its register, aligned to 64.
        // 1. The feature and the destination: the caller's promise.
        // 2. The source is `self`, alive across the instruction.
        // 3. It changes no flags and no stack; the compiler is not told that memory stays as it is,
        //    so it keeps the order of this and other accesses.
        unsafe {
            asm!(
                "movdir64b {dst}, [{src}]",
                dst = in(reg) dst,
                src = in(reg) &raw const self,
                options(nostack, preserves_flags),
            );
        }
    }

    #[inline(always)]
    unsafe fn keep(self, dst: *mut u8) {
        // SAFETY: `Words::keep` wants 64 writable bytes aligned to 64, which the caller promises.
        unsafe { self.0.keep(dst) };
    }

    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        // SAFETY: `Words::plus` wants nothing of the CPU.
        Self(unsafe { self.0.plus(other.0) })
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: `Words::zero` wants nothing of the CPU.
        Self(unsafe { Words::zero() })
    }
}

/// Reads eight words one by one, whatever the compiler would rather do.
///
/// They may have been changed a moment ago ([`Pattern::add`]). A load that spans several stores
/// which are still on their way waits until these have left the store queue, and here that is full
/// of streaming stores: some 100 ns. A load within one store does not wait.
#[inline(always)]
fn read_each(words: &[u64; 8]) -> [u64; 8] {
    words.each_ref().map(|word| {
        // SAFETY: `read_volatile` wants an aligned, initialised word: `word` is a reference to one.
        unsafe { std::ptr::read_volatile(word) }
    })
}

/// Streams `src` to `dst` by words, and what is left of the last word by plain stores.
///
/// # Safety
///
/// Nobody touches `dst` before a fence. `src` is at least as long as `dst`.
#[inline(always)]
unsafe fn copy_words(dst: &mut [u8], src: &[u8]) {
    let (dst_words, dst_rest) = dst.as_chunks_mut::<8>();
    let (src_words, src_rest) = src[..dst_words.len() * 8 + dst_rest.len()].as_chunks::<8>();
    for (dst, src) in dst_words.iter_mut().zip(src_words) {
        // SAFETY: `_mm_stream_si64` wants 8 writable bytes that nobody touches before a fence: `dst`
        // is exactly 8 of the caller's.
        unsafe { _mm_stream_si64(dst.as_mut_ptr().cast(), i64::from_ne_bytes(*src)) };
    }
    copy_bytes(dst_rest, src_rest);
}

/// Streams words of `src` to `dst`, and what is left of the last word by plain stores.
///
/// # Safety
///
/// Nobody touches `dst` before a fence. `src` is at least as long as `dst`.
#[inline(always)]
unsafe fn put_words(dst: &mut [u8], src: &[u64]) {
    let (dst_words, dst_rest) = dst.as_chunks_mut::<8>();
    for (dst, src) in dst_words.iter_mut().zip(src) {
        // SAFETY: `_mm_stream_si64` wants 8 writable bytes that nobody touches before a fence: `dst`
        // is exactly 8 of the caller's.
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
fn split_at_boundary(dst: &mut [u8], align: usize) -> (&mut [u8], &mut [u8]) {
    let before = dst.as_ptr().addr().wrapping_neg() & (align - 1);
    dst.split_at_mut(before.min(dst.len()))
}

/// Returns whether `dst` is whole lines: the case that is called often for a line or two, and that is
/// therefore kept free of all others.
#[inline(always)]
fn is_whole_lines(dst: &[u8]) -> bool {
    (dst.as_ptr().addr() | dst.len()).is_multiple_of(LINE_BYTES)
}

/// Copies lines. There are as many of either.
///
/// # Safety
///
/// The CPU has the features of `L`, `dst` is aligned to 64, and nobody touches it before a fence.
#[inline(always)]
unsafe fn copy_lines<L: Line>(dst: &mut [[u8; LINE_BYTES]], src: &[[u8; LINE_BYTES]]) {
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
/// The CPU has the features of `L`, `dst` is aligned to 64, and nobody touches it before a fence.
#[inline(always)]
unsafe fn zero_lines<L: Line>(dst: &mut [[u8; LINE_BYTES]]) {
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
/// The CPU has the features of `L`, and nobody touches `dst` before a fence.
#[inline(always)]
unsafe fn copy_with<L: Line>(dst: &mut [u8], src: &[u8]) {
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
/// The CPU has the features of `L`, and nobody touches `dst` before a fence.
#[inline(always)]
unsafe fn zero_with<L: Line>(dst: &mut [u8]) {
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
    // SAFETY: as for `head`; what is left has fewer than 64 bytes.
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
/// The CPU has the features of `L`, and nobody touches `dst` before a fence.
#[inline(always)]
unsafe fn fill_lines_with<L: Line>(dst: &mut [u8], pattern: &Pattern) -> bool {
    if !is_whole_lines(dst) || pattern.block_lines() != 1 {
        return false;
    }
    let (lines, _) = dst.as_chunks_mut::<LINE_BYTES>();
    let (Some(words), Some(steps)) =
        (pattern.words().first_chunk(), pattern.steps().first_chunk::<8>())
    else {
        return false; // never: both are longer than that
    };
    // SAFETY: `Line::new` wants the features, which the caller promises.
    let mut line = unsafe { L::new(read_each(words)) };
    if pattern.is_linear() {
        // SAFETY: `Line::load` wants the features, which the caller promises, and 64 readable
        // bytes: `steps` is 8 words.
        let step = unsafe { L::load(steps.as_ptr().cast()) };
        for dst in lines {
            // SAFETY: `Line::stream` wants the features and 64 writable bytes, aligned, untouched:
            // `dst` starts at a multiple of 64, and the caller promises the others.
            unsafe { line.stream(dst.as_mut_ptr()) };
            // SAFETY: `Line::plus` wants the features, which the caller promises.
            line = unsafe { line.plus(step) };
        }
    } else {
        for dst in lines {
            // SAFETY: as in the other loop.
            unsafe { line.stream(dst.as_mut_ptr()) };
        }
    }
    true
}

/// Fills by lines of `L`. `dst` starts at a multiple of 8.
///
/// # Safety
///
/// The CPU has the features of `L`, and nobody touches `dst` before a fence.
#[inline(always)]
unsafe fn fill_with<L: Line>(dst: &mut [u8], pattern: &Pattern) {
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
        // SAFETY: `Line::new` wants the features, which the caller promises.
        let mut line = unsafe { L::new(read_each(&words[0])) };
        if !pattern.is_linear() {
            for dst in lines {
                // SAFETY: `Line::stream` wants the features and 64 writable bytes, aligned,
                // untouched: `rest` starts at a multiple of 64, and the caller promises the others.
                unsafe { line.stream(dst.as_mut_ptr()) };
            }
            // SAFETY: as for `head`; what is left has fewer than 64 bytes.
            unsafe { put_words(tail, &words[0]) };
            return;
        }
        // SAFETY: as for `words[0]`.
        let step = unsafe { L::load(steps[0].as_ptr().cast()) };
        for dst in lines {
            // SAFETY: as in the constant loop.
            unsafe { line.stream(dst.as_mut_ptr()) };
            // SAFETY: `Line::plus` wants the features, which the caller promises.
            line = unsafe { line.plus(step) };
        }
        if !tail.is_empty() {
            let mut next = Block([[0; 8]; BLOCK_LINES]);
            // SAFETY: `Line::keep` wants 64 writable bytes aligned to 64: the first line of a
            // `Block` is that.
            unsafe { line.keep(next.0[0].as_mut_ptr().cast()) };
            // SAFETY: as for `head`; what is left has fewer than 64 bytes.
            unsafe { put_words(tail, &next.0[0]) };
        }
        return;
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
    // SAFETY: as for `head`; what is left has fewer than 64 bytes, and the next line of the block
    // holds what comes next.
    unsafe { put_words(tail, &block[done_lines % block.len()]) };
}

/// Makes the functions of a path: the generic ones, compiled for its CPU features. Each operation has
/// one for whole lines and, out of its way, one for everything else.
macro_rules! path {
    ($line:ty, $name:ident $(, $feature:literal)?) => {
        mod $name {
            use super::*;

            /// Copies between slices of equal length.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features, and nobody touches `dst` before a fence.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn copy(dst: &mut [u8], src: &[u8]) {
                if is_whole_lines(dst) {
                    let (lines, src) = (dst.as_chunks_mut().0, src.as_chunks().0);
                    // SAFETY: `copy_lines` asks for what this function asks for, and for lines that
                    // are aligned, which was just tested.
                    unsafe { copy_lines::<$line>(lines, src) };
                } else {
                    // SAFETY: `copy_any` asks for what this function asks for.
                    unsafe { copy_any(dst, src) };
                }
            }

            /// [`copy_with`] on this path.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features, and nobody touches `dst` before a fence.
            $(#[target_feature(enable = $feature)])?
            #[inline(never)]
            unsafe fn copy_any(dst: &mut [u8], src: &[u8]) {
                // SAFETY: `copy_with` asks for what this function asks for.
                unsafe { copy_with::<$line>(dst, src) };
            }

            /// Fills `dst`, which starts at a multiple of 8.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features, and nobody touches `dst` before a fence.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn fill(dst: &mut [u8], pattern: &Pattern) {
                // SAFETY: `fill_lines_with` asks for what this function asks for.
                if !unsafe { fill_lines_with::<$line>(dst, pattern) } {
                    // SAFETY: `fill_any` asks for what this function asks for.
                    unsafe { fill_any(dst, pattern) };
                }
            }

            /// [`fill_with`] on this path.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features, and nobody touches `dst` before a fence.
            $(#[target_feature(enable = $feature)])?
            #[inline(never)]
            unsafe fn fill_any(dst: &mut [u8], pattern: &Pattern) {
                // SAFETY: `fill_with` asks for what this function asks for.
                unsafe { fill_with::<$line>(dst, pattern) };
            }

            /// Zeroes `dst`.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features, and nobody touches `dst` before a fence.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn zero(dst: &mut [u8]) {
                if is_whole_lines(dst) {
                    // SAFETY: `zero_lines` asks for what this function asks for, and for lines that
                    // are aligned, which was just tested.
                    unsafe { zero_lines::<$line>(dst.as_chunks_mut().0) };
                } else {
                    // SAFETY: `zero_any` asks for what this function asks for.
                    unsafe { zero_any(dst) };
                }
            }

            /// [`zero_with`] on this path.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features, and nobody touches `dst` before a fence.
            $(#[target_feature(enable = $feature)])?
            #[inline(never)]
            unsafe fn zero_any(dst: &mut [u8]) {
                // SAFETY: `zero_with` asks for what this function asks for.
                unsafe { zero_with::<$line>(dst) };
            }
        }
    };
}

path!(Words, movnti);
path!(Xmm, sse2);
path!(Ymm, avx2, "avx2");
path!(Zmm, avx512, "avx512f");
path!(Direct, movdir64b);

/// Copies `src` to `dst`, which are of equal length.
///
/// The caller keeps `dst` borrowed until it has called [`drain`] on this thread: that is what
/// `streaming.rs` is for, and the reason why this is not public.
#[inline]
pub(crate) fn copy(ready: Ready, dst: &mut [u8], src: &[u8]) {
    // A lone 4-byte field has its own instruction; as part of something longer it would be a
    // ragged end.
    if dst.len() == 4 && ready.path() != Path::Portable && copy_small(dst, src) {
        return;
    }
    match ready.path() {
        Path::Portable => portable::copy(dst, src),
        // SAFETY: the features are the baseline's; `dst` is untouched until the caller drains.
        Path::Movnti => unsafe { movnti::copy(dst, src) },
        // SAFETY: as above.
        Path::Sse2 => unsafe { sse2::copy(dst, src) },
        // SAFETY: `ready` proves AVX2; `dst` as above.
        Path::Avx2 => unsafe { avx2::copy(dst, src) },
        // SAFETY: `ready` proves AVX-512F; `dst` as above.
        Path::Avx512 => unsafe { avx512::copy(dst, src) },
        // SAFETY: `ready` proves MOVDIR64B; `dst` as above.
        Path::Movdir64b => unsafe { movdir64b::copy(dst, src) },
    }
}

/// Zeroes `dst`; the caller drains, as for [`copy`].
#[inline]
pub(crate) fn zero(ready: Ready, dst: &mut [u8]) {
    match ready.path() {
        Path::Portable => portable::zero(dst),
        // SAFETY: the features are the baseline's; `dst` is untouched until the caller drains.
        Path::Movnti => unsafe { movnti::zero(dst) },
        // SAFETY: as above.
        Path::Sse2 => unsafe { sse2::zero(dst) },
        // SAFETY: `ready` proves AVX2; `dst` as above.
        Path::Avx2 => unsafe { avx2::zero(dst) },
        // SAFETY: `ready` proves AVX-512F; `dst` as above.
        Path::Avx512 => unsafe { avx512::zero(dst) },
        // SAFETY: `ready` proves MOVDIR64B; `dst` as above.
        Path::Movdir64b => unsafe { movdir64b::zero(dst) },
    }
}

/// Fills `dst` from element 0 of `pattern`; the caller drains, as for [`copy`].
#[inline]
pub(crate) fn fill(ready: Ready, dst: &mut [u8], pattern: &Pattern) {
    if ready.path() == Path::Portable {
        return portable::fill(dst, pattern);
    }
    if !dst.as_ptr().addr().is_multiple_of(8) {
        return fill_misaligned(ready, dst, pattern);
    }
    match ready.path() {
        Path::Portable => {} // has returned above
        // SAFETY: the features are the baseline's; `dst` is untouched until the caller drains.
        Path::Movnti => unsafe { movnti::fill(dst, pattern) },
        // SAFETY: as above.
        Path::Sse2 => unsafe { sse2::fill(dst, pattern) },
        // SAFETY: `ready` proves AVX2; `dst` as above.
        Path::Avx2 => unsafe { avx2::fill(dst, pattern) },
        // SAFETY: `ready` proves AVX-512F; `dst` as above.
        Path::Avx512 => unsafe { avx512::fill(dst, pattern) },
        // SAFETY: `ready` proves MOVDIR64B; `dst` as above.
        Path::Movdir64b => unsafe { movdir64b::fill(dst, pattern) },
    }
}

/// Fills a destination that does not start at a multiple of 8, where a word of the destination
/// holds parts of two words of the pattern: writes the pattern out and copies it, piece by piece.
#[cold]
#[inline(never)]
fn fill_misaligned(ready: Ready, dst: &mut [u8], pattern: &Pattern) {
    /// Bytes of a piece: many lines, yet a small part of the first-level cache.
    const PIECE_BYTES: usize = 2048;
    if dst.is_empty() {
        return; // before the room is made: an empty slice may well point anywhere
    }
    let mut words = [[0; 8]; PIECE_BYTES / 8 + 2];
    let (mut rest, mut done) = (dst, 0);
    while !rest.is_empty() {
        // Pieces end at lines, so that every line but the first and the last is written whole.
        let into_line = rest.as_ptr().addr() % LINE_BYTES;
        let (piece, after) = rest.split_at_mut((PIECE_BYTES - into_line).min(rest.len()));
        let used = &mut words[..piece.len() / 8 + 2];
        pattern.write_words(done / 8, used);
        copy(ready, piece, &used.as_flattened()[done % 8..][..piece.len()]);
        done += piece.len();
        rest = after;
    }
}

/// Waits until every streaming store of this thread is visible to all threads.
#[inline]
pub(crate) fn drain() {
    // SAFETY: `_mm_sfence` wants SSE, which every x86-64 CPU has.
    unsafe { _mm_sfence() };
}

/// Returns the best write-back instruction of this CPU.
pub(crate) fn write_back() -> Option<WriteBack> {
    Some(match cpu() {
        Cpu { clwb: true, .. } => WriteBack::Clwb,
        Cpu { clflushopt: true, .. } => WriteBack::Clflushopt,
        _ => WriteBack::Clflush, // came with SSE2
    })
}

/// Starts writing back every line that holds a byte of `bytes`. A fence completes it.
pub(crate) fn write_back_lines(bytes: &mut [u8]) {
    match write_back() {
        Some(WriteBack::Clwb) => each_line(bytes, |line| {
            // SAFETY: CLWB wants the CPU feature, asked for above, and a mapped address. It changes
            // no byte, no flags and no stack.
            unsafe { asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)) };
        }),
        Some(WriteBack::Clflushopt) => evict_lines(bytes),
        Some(WriteBack::Clflush) | None => each_line(bytes, |line| {
            // SAFETY: `_mm_clflush` wants a mapped address; it changes no byte.
            unsafe { _mm_clflush(line) };
        }),
    }
}

/// Writes back and drops every line that holds a byte of `bytes`. A fence completes it.
pub(crate) fn evict_lines(bytes: &mut [u8]) {
    if cpu().clflushopt {
        each_line(bytes, |line| {
            // SAFETY: CLFLUSHOPT wants the CPU feature, asked for above, and a mapped address. It
            // changes no byte, no flags and no stack.
            unsafe { asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)) };
        });
    } else {
        each_line(bytes, |line| {
            // SAFETY: `_mm_clflush` wants a mapped address; it changes no byte.
            unsafe { _mm_clflush(line) };
        });
    }
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

/// Copies 4, 8, 16, 32 or 64 naturally aligned bytes by MOVNTI in ascending order. Returns whether
/// it did; any other length or alignment is left alone. The caller drains, as for [`copy`].
#[inline]
pub(crate) fn copy_small(dst: &mut [u8], src: &[u8]) -> bool {
    if !matches!(dst.len(), 4 | 8 | 16 | 32 | 64)
        || dst.as_ptr().addr() & (dst.len() - 1) != 0
        || src.len() != dst.len()
    {
        return false;
    }
    if let (4, Ok(word)) = (dst.len(), src.try_into()) {
        // SAFETY: `_mm_stream_si32` wants 4 writable bytes that nobody touches before a fence: `dst`
        // is that long, and the caller keeps it borrowed until it drains.
        unsafe { _mm_stream_si32(dst.as_mut_ptr().cast(), i32::from_ne_bytes(word)) };
    } else {
        // SAFETY: `copy_words` wants as many bytes of source, compared above, and `dst` untouched
        // before a fence: the caller keeps it borrowed until it drains.
        unsafe { copy_words(dst, src) };
    }
    true
}

//! A line in the registers of one path: how 64 bytes are loaded, streamed and added.
//!
//! One type for each width of store, and [`Line`], which is what the loops of `cut.rs` know of them.
//! Not here: where a destination has lines (`cut.rs`), and whether the CPU has the instructions
//! (`x86_64.rs`).
//!
//! Memory that others may touch meanwhile is reached by instructions that the compiler does not look
//! into, as a device would reach it: to the language, an access in assembly that reads or writes whole
//! aligned words is a row of relaxed atomic ones. The CPU splits no aligned 8 bytes of a vector.
//!
//! These methods name the feature that the compiler wants before it lets a register of that width
//! into assembly; so they are not always inlined, but are where it counts.
//!
//! Why this file holds `unsafe`: the instructions. Bounds and alignment are argued from the 64
//! bytes that the caller of each method promises.
//!
//! Source: AMD64 Architecture Programmer's Manual volume 1 (section 5.6.4, streaming stores); Intel
//! SDM volume 2 for MOVDIR64B, volume 3 (section 10.1.1, guaranteed atomic operations).

use std::arch::asm;
use std::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_add_epi64, _mm_loadu_si128, _mm_set_epi64x, _mm_setzero_si128,
    _mm_store_si128, _mm_stream_si64, _mm_stream_si128, _mm256_add_epi64, _mm256_loadu_si256,
    _mm256_set_epi64x, _mm256_setzero_si256, _mm256_store_si256, _mm256_stream_si256,
    _mm512_add_epi64, _mm512_loadu_si512, _mm512_set_epi64, _mm512_setzero_si512,
    _mm512_store_si512, _mm512_stream_si512,
};

/// 64 bytes in the registers of one path.
///
/// # Safety
///
/// Every method is to be called only where the CPU has the path's features; what it says about its
/// pointer comes on top. All of them are inlined into a function compiled for those features.
pub(super) trait Line: Copy {
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

    /// Loads 64 bytes that somebody else may write meanwhile, in words of 8 aligned bytes. Of each
    /// such word it sees an old or a new value, as a relaxed atomic load does.
    ///
    /// # Safety
    ///
    /// `src` has 64 readable bytes, at any alignment.
    unsafe fn load_shared(src: *const u8) -> Self;

    /// [`Line::stream`] to bytes that somebody else may read or write meanwhile: each 8 aligned bytes
    /// change at once, as by a relaxed atomic store that a fence makes visible.
    ///
    /// # Safety
    ///
    /// `dst` has 64 bytes, aligned to 64, that may be written through a shared reference.
    unsafe fn stream_shared(self, dst: *mut u8);

    /// [`Line::keep`] to bytes that somebody else may read or write meanwhile: each 8 aligned bytes
    /// change at once, as by a relaxed atomic store.
    ///
    /// # Safety
    ///
    /// `dst` has 64 bytes, aligned to 64, that may be written through a shared reference.
    unsafe fn keep_shared(self, dst: *mut u8);
}

/// A line in general registers, streamed by eight 8-byte stores.
#[derive(Clone, Copy)]
pub(super) struct Words([u64; 8]);

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

    #[inline(always)]
    unsafe fn load_shared(src: *const u8) -> Self {
        let mut words = [0_u64; 8];
        for (index, word) in words.iter_mut().enumerate() {
            let src = src.wrapping_add(index * 8);
            // SAFETY: MOV wants 8 readable bytes: `index` is at most 7, and the caller promises 64. It
            // changes no byte, no flags and no stack.
            unsafe {
                asm!("mov {}, [{}]", lateout(reg) *word, in(reg) src, options(nostack, preserves_flags, readonly));
            }
        }
        Self(words)
    }

    #[inline(always)]
    unsafe fn stream_shared(self, dst: *mut u8) {
        for (index, word) in self.0.into_iter().enumerate() {
            let dst = dst.wrapping_add(index * 8);
            // SAFETY: MOVNTI wants 8 writable bytes: `index` is at most 7, and the caller promises 64.
            // It changes no flags and no stack.
            unsafe {
                asm!("movnti [{}], {}", in(reg) dst, in(reg) word, options(nostack, preserves_flags));
            }
        }
    }

    #[inline(always)]
    unsafe fn keep_shared(self, dst: *mut u8) {
        for (index, word) in self.0.into_iter().enumerate() {
            let dst = dst.wrapping_add(index * 8);
            // SAFETY: as in `stream_shared`, for MOV.
            unsafe {
                asm!("mov [{}], {}", in(reg) dst, in(reg) word, options(nostack, preserves_flags));
            }
        }
    }
}

/// A line in four XMM registers.
#[derive(Clone, Copy)]
pub(super) struct Xmm([__m128i; 4]);

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

    #[inline(always)]
    unsafe fn load_shared(src: *const u8) -> Self {
        let a;
        // SAFETY: MOVDQU wants SSE2 and 16 readable bytes at any alignment: the caller promises
        // both, for 64 bytes. It changes no byte, no flags and no stack.
        unsafe {
            asm!("movdqu {}, [{}]", lateout(xmm_reg) a, in(reg) src, options(nostack, preserves_flags, readonly));
        }
        let b;
        // SAFETY: as above, for the next bytes of the 64.
        unsafe {
            asm!("movdqu {}, [{}]", lateout(xmm_reg) b, in(reg) src.wrapping_add(16), options(nostack, preserves_flags, readonly));
        }
        let c;
        // SAFETY: as above, for the next bytes of the 64.
        unsafe {
            asm!("movdqu {}, [{}]", lateout(xmm_reg) c, in(reg) src.wrapping_add(32), options(nostack, preserves_flags, readonly));
        }
        let d;
        // SAFETY: as above, for the next bytes of the 64.
        unsafe {
            asm!("movdqu {}, [{}]", lateout(xmm_reg) d, in(reg) src.wrapping_add(48), options(nostack, preserves_flags, readonly));
        }
        Self([a, b, c, d])
    }

    #[inline(always)]
    unsafe fn stream_shared(self, dst: *mut u8) {
        // SAFETY: MOVNTDQ wants SSE2 and 16 writable bytes, aligned to as many: the caller
        // promises both, for 64 bytes. It changes no flags and no stack.
        unsafe {
            asm!("movntdq [{}], {}", in(reg) dst, in(xmm_reg) self.0[0], options(nostack, preserves_flags));
        }
        // SAFETY: as above, for the next bytes of the 64.
        unsafe {
            asm!("movntdq [{}], {}", in(reg) dst.wrapping_add(16), in(xmm_reg) self.0[1], options(nostack, preserves_flags));
        }
        // SAFETY: as above, for the next bytes of the 64.
        unsafe {
            asm!("movntdq [{}], {}", in(reg) dst.wrapping_add(32), in(xmm_reg) self.0[2], options(nostack, preserves_flags));
        }
        // SAFETY: as above, for the next bytes of the 64.
        unsafe {
            asm!("movntdq [{}], {}", in(reg) dst.wrapping_add(48), in(xmm_reg) self.0[3], options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn keep_shared(self, dst: *mut u8) {
        // SAFETY: MOVDQA wants SSE2 and 16 writable bytes, aligned to as many: the caller
        // promises both, for 64 bytes. It changes no flags and no stack.
        unsafe {
            asm!("movdqa [{}], {}", in(reg) dst, in(xmm_reg) self.0[0], options(nostack, preserves_flags));
        }
        // SAFETY: as above, for the next bytes of the 64.
        unsafe {
            asm!("movdqa [{}], {}", in(reg) dst.wrapping_add(16), in(xmm_reg) self.0[1], options(nostack, preserves_flags));
        }
        // SAFETY: as above, for the next bytes of the 64.
        unsafe {
            asm!("movdqa [{}], {}", in(reg) dst.wrapping_add(32), in(xmm_reg) self.0[2], options(nostack, preserves_flags));
        }
        // SAFETY: as above, for the next bytes of the 64.
        unsafe {
            asm!("movdqa [{}], {}", in(reg) dst.wrapping_add(48), in(xmm_reg) self.0[3], options(nostack, preserves_flags));
        }
    }
}

/// A line in two YMM registers.
#[derive(Clone, Copy)]
pub(super) struct Ymm(__m256i, __m256i);

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

    #[inline]
    #[target_feature(enable = "avx")]
    unsafe fn load_shared(src: *const u8) -> Self {
        let a;
        // SAFETY: VMOVDQU wants AVX and 32 readable bytes at any alignment: the caller promises
        // both, for 64 bytes. It changes no byte, no flags and no stack.
        unsafe {
            asm!("vmovdqu {}, [{}]", lateout(ymm_reg) a, in(reg) src, options(nostack, preserves_flags, readonly));
        }
        let b;
        // SAFETY: as above, for the next bytes of the 64.
        unsafe {
            asm!("vmovdqu {}, [{}]", lateout(ymm_reg) b, in(reg) src.wrapping_add(32), options(nostack, preserves_flags, readonly));
        }
        Self(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx")]
    unsafe fn stream_shared(self, dst: *mut u8) {
        // SAFETY: VMOVNTDQ wants AVX and 32 writable bytes, aligned to as many: the caller
        // promises both, for 64 bytes. It changes no flags and no stack.
        unsafe {
            asm!("vmovntdq [{}], {}", in(reg) dst, in(ymm_reg) self.0, options(nostack, preserves_flags));
        }
        // SAFETY: as above, for the next bytes of the 64.
        unsafe {
            asm!("vmovntdq [{}], {}", in(reg) dst.wrapping_add(32), in(ymm_reg) self.1, options(nostack, preserves_flags));
        }
    }

    #[inline]
    #[target_feature(enable = "avx")]
    unsafe fn keep_shared(self, dst: *mut u8) {
        // SAFETY: VMOVDQA wants AVX and 32 writable bytes, aligned to as many: the caller
        // promises both, for 64 bytes. It changes no flags and no stack.
        unsafe {
            asm!("vmovdqa [{}], {}", in(reg) dst, in(ymm_reg) self.0, options(nostack, preserves_flags));
        }
        // SAFETY: as above, for the next bytes of the 64.
        unsafe {
            asm!("vmovdqa [{}], {}", in(reg) dst.wrapping_add(32), in(ymm_reg) self.1, options(nostack, preserves_flags));
        }
    }
}

/// A line in one ZMM register.
#[derive(Clone, Copy)]
pub(super) struct Zmm(__m512i);

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

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_shared(src: *const u8) -> Self {
        let a;
        // SAFETY: VMOVDQU64 wants AVX-512F and 64 readable bytes at any alignment: the caller promises
        // both, for 64 bytes. It changes no byte, no flags and no stack.
        unsafe {
            asm!("vmovdqu64 {}, [{}]", lateout(zmm_reg) a, in(reg) src, options(nostack, preserves_flags, readonly));
        }
        Self(a)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn stream_shared(self, dst: *mut u8) {
        // SAFETY: VMOVNTDQ wants AVX-512F and 64 writable bytes, aligned to as many: the caller
        // promises both, for 64 bytes. It changes no flags and no stack.
        unsafe {
            asm!("vmovntdq [{}], {}", in(reg) dst, in(zmm_reg) self.0, options(nostack, preserves_flags));
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn keep_shared(self, dst: *mut u8) {
        // SAFETY: VMOVDQA64 wants AVX-512F and 64 writable bytes, aligned to as many: the caller
        // promises both, for 64 bytes. It changes no flags and no stack.
        unsafe {
            asm!("vmovdqa64 [{}], {}", in(reg) dst, in(zmm_reg) self.0, options(nostack, preserves_flags));
        }
    }
}

/// A line in memory, streamed by one MOVDIR64B.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Direct(Words);

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

    #[inline(always)]
    unsafe fn load_shared(src: *const u8) -> Self {
        // SAFETY: `Words::load_shared` wants 64 readable bytes, which the caller promises.
        Self(unsafe { Words::load_shared(src) })
    }

    #[inline(always)]
    unsafe fn stream_shared(self, dst: *mut u8) {
        // SAFETY: `stream` wants the features and 64 writable bytes, aligned, that nobody touches
        // before a fence. The first two are the caller's promise. The last is for accesses that the
        // compiler knows of; the store is an instruction that it does not look into.
        unsafe { self.stream(dst) };
    }

    #[inline(always)]
    unsafe fn keep_shared(self, dst: *mut u8) {
        // SAFETY: `Words::keep_shared` wants what the caller promises.
        unsafe { self.0.keep_shared(dst) };
    }
}

/// Reads eight words one by one, whatever the compiler would rather do.
///
/// They may have been changed a moment ago ([`Pattern::add`](crate::Pattern::add)). A load that spans several stores
/// which are still on their way waits until these have left the store queue, and here that is full
/// of streaming stores: some 100 ns. A load within one store does not wait.
#[inline(always)]
pub(super) fn read_each(words: &[u64; 8]) -> [u64; 8] {
    words.each_ref().map(|word| {
        // SAFETY: `read_volatile` wants an aligned, initialised word: `word` is a reference to one.
        unsafe { std::ptr::read_volatile(word) }
    })
}

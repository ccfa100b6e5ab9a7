//! A line in the registers of one path: how 64 bytes are loaded, streamed and added.
//!
//! One type for each width of store, and [`Line`], by which the loops of `cut.rs` use them.
//! Not here: where a destination has lines (`cut.rs`), and whether the CPU has the instructions
//! (`x86_64.rs`).
//!
//! Stores past the cache, and loads of memory that other threads may write, are assembly: to the
//! language, an access in assembly that reads or writes whole aligned words is a row of relaxed atomic
//! ones. The CPU splits no aligned 8 bytes of a vector. So one store serves slices and atomic words.
//!
//! These methods name the feature that the compiler wants before it lets a register of that width
//! into assembly; so they are not always inlined, but are where it counts.
//!
//! Why this file holds `unsafe`: the instructions. Bounds and alignment are argued from the 64
//! bytes that the caller of each method promises.
//!
//! Source: AMD64 Architecture Programmer's Manual volume 1 (section 5.6.4, streaming stores); Intel
//! SDM volume 3 (section 10.1.1, guaranteed atomic operations).

use std::arch::asm;
use std::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_add_epi64, _mm_loadu_si128, _mm_set_epi64x, _mm_setzero_si128,
    _mm_store_si128, _mm256_add_epi64, _mm256_loadu_si256, _mm256_set_epi64x, _mm256_setzero_si256,
    _mm256_store_si256, _mm512_add_epi64, _mm512_loadu_si512, _mm512_set_epi64,
    _mm512_setzero_si512, _mm512_store_si512,
};

/// 64 bytes in the registers of one path.
///
/// # Safety
///
/// The CPU must have the path's features for every method, in addition to the requirements of the method for
/// its pointer. All of them are inlined into a function compiled for those features.
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

    /// Stores 64 bytes past the cache, in ascending order. Another thread may access them: each 8
    /// aligned bytes change at once, as by a relaxed atomic store that a fence makes visible.
    ///
    /// # Safety
    ///
    /// `dst` has 64 bytes, aligned to 64, that may be written: through a shared reference, or
    /// borrowed mutably until the fence.
    unsafe fn stream(self, dst: *mut u8);

    /// Stores 64 bytes the plain way.
    ///
    /// # Safety
    ///
    /// `dst` has 64 writable bytes, aligned to 64.
    unsafe fn keep(self, dst: *mut u8);

    /// Loads the bytes that [`Line::keep`] has stored, in a way that does not wait for it to leave the store
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

    /// Loads 64 bytes that another thread may write meanwhile, in words of 8 aligned bytes. Of each
    /// such word it sees an old or a new value, as a relaxed atomic load does.
    ///
    /// # Safety
    ///
    /// `src` has 64 readable bytes, at any alignment.
    unsafe fn load_shared(src: *const u8) -> Self;
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
    unsafe fn stream(self, dst: *mut u8) {
        for (index, word) in self.0.into_iter().enumerate() {
            let dst = dst.wrapping_add(index * 8);
            // SAFETY: MOVNTI wants 8 writable bytes: `index` is at most 7, and the caller promises 64.
            // It changes no flags and no stack.
            unsafe {
                asm!("movnti [{}], {}", in(reg) dst, in(reg) word, options(nostack, preserves_flags));
            }
        }
    }
}

/// Makes the line of a path of vector registers. Paths differ in the type and number of registers, the CPU
/// feature, and the names of the instructions.
macro_rules! vector_line {
    (
        $(#[$doc:meta])* $name:ident([$register:ty; $count:literal]), $feature:literal, $class:ident,
        load: $load:ident $load_shared:literal, stream: $stream:literal, keep: $keep:ident,
        plus: $plus:ident, zero: $zero:ident,
        new: [$($word:ident)*] $set:ident $(($($part:ident)*))*
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name([$register; $count]);

        impl Line for $name {
            #[inline(always)]
            unsafe fn load(src: *const u8) -> Self {
                // SAFETY: `zero` wants the features, which the caller promises.
                let mut line = unsafe { Self::zero() };
                for (index, part) in line.0.iter_mut().enumerate() {
                    let src = src.wrapping_add(index * size_of::<$register>()).cast();
                    // SAFETY: the load wants the feature and a register's readable bytes at any
                    // alignment: together the registers are the 64 bytes that the caller promises.
                    *part = unsafe { $load(src) };
                }
                line
            }

            #[inline(always)]
            unsafe fn new(words: [u64; 8]) -> Self {
                let [$($word),*] = words.map(u64::cast_signed);
                // SAFETY: it wants the feature, which the caller promises.
                Self([$(unsafe { $set($($part),*) }),*])
            }

            #[inline(always)]
            unsafe fn keep(self, dst: *mut u8) {
                for (index, part) in self.0.into_iter().enumerate() {
                    let dst = dst.wrapping_add(index * size_of::<$register>()).cast();
                    // SAFETY: the store wants the feature and a register's writable bytes, aligned to
                    // as many: the caller promises 64, aligned to 64.
                    unsafe { $keep(dst, part) };
                }
            }

            #[inline(always)]
            unsafe fn plus(self, other: Self) -> Self {
                let mut sum = self.0;
                for (part, more) in sum.iter_mut().zip(other.0) {
                    // SAFETY: it wants the feature, which the caller promises.
                    *part = unsafe { $plus(*part, more) };
                }
                Self(sum)
            }

            #[inline(always)]
            unsafe fn zero() -> Self {
                // SAFETY: it wants the feature, which the caller promises.
                Self([unsafe { $zero() }; $count])
            }

            #[inline]
            #[target_feature(enable = $feature)]
            unsafe fn load_shared(src: *const u8) -> Self {
                // SAFETY: `zero` wants the features, which the caller promises.
                let mut line = unsafe { Self::zero() };
                for (index, part) in line.0.iter_mut().enumerate() {
                    let src = src.wrapping_add(index * size_of::<$register>());
                    // SAFETY: as in `load`. The instruction changes no byte, no flags and no stack.
                    unsafe {
                        asm!(
                            concat!($load_shared, " {}, [{}]"),
                            lateout($class) *part,
                            in(reg) src,
                            options(nostack, preserves_flags, readonly),
                        );
                    }
                }
                line
            }

            #[inline]
            #[target_feature(enable = $feature)]
            unsafe fn stream(self, dst: *mut u8) {
                for (index, part) in self.0.into_iter().enumerate() {
                    let dst = dst.wrapping_add(index * size_of::<$register>());
                    // SAFETY: as in `keep`. The instruction changes no flags and no stack.
                    unsafe {
                        asm!(
                            concat!($stream, " [{}], {}"),
                            in(reg) dst,
                            in($class) part,
                            options(nostack, preserves_flags),
                        );
                    }
                }
            }
        }
    };
}

vector_line! {
    /// A line in four XMM registers.
    Xmm([__m128i; 4]), "sse2", xmm_reg,
    load: _mm_loadu_si128 "movdqu", stream: "movntdq", keep: _mm_store_si128,
    plus: _mm_add_epi64, zero: _mm_setzero_si128,
    new: [a b c d e f g h] _mm_set_epi64x (b a) (d c) (f e) (h g)
}

vector_line! {
    /// A line in two YMM registers.
    Ymm([__m256i; 2]), "avx2", ymm_reg,
    load: _mm256_loadu_si256 "vmovdqu", stream: "vmovntdq", keep: _mm256_store_si256,
    plus: _mm256_add_epi64, zero: _mm256_setzero_si256,
    new: [a b c d e f g h] _mm256_set_epi64x (d c b a) (h g f e)
}

vector_line! {
    /// A line in one ZMM register.
    Zmm([__m512i; 1]), "avx512f", zmm_reg,
    load: _mm512_loadu_si512 "vmovdqu64", stream: "vmovntdq", keep: _mm512_store_si512,
    plus: _mm512_add_epi64, zero: _mm512_setzero_si512,
    new: [a b c d e f g h] _mm512_set_epi64 (h g f e d c b a)
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

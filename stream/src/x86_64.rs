//! Streaming stores of x86-64: which of them the CPU has, and a function of each kind for each path.
//!
//! A path supplies a [`Line`](line::Line): how to load, stream and add 64 bytes. How a destination
//! is cut into lines is written once and generic over it; here that is compiled for the features of
//! each path, and a call is sent to the path it asks for.
//!
//! | file | idea |
//! |---|---|
//! | `line` | 64 bytes in the registers of one path |
//! | `cut` | a destination as bytes, words and lines, and the loops over them |
//! | `shared` | clearing and copying memory that others may touch meanwhile |
//! | `write_back` | sending lines to memory, and out of the cache |
//!
//! Not here: fences after each call (the caller of this module drains, see `streaming.rs`), and the
//! choice of a path.
//!
//! Why this file holds `unsafe`: instructions beyond the baseline, and stores that other threads see
//! late. Types keep the rules: a [`Ready`] proves the CPU features, and a `&mut [u8]` that stays
//! borrowed until the drain excludes early reads.
//!
//! Cost: a call is a match on the path, one call of a function compiled for it, and the stores.
//! Source: AMD64 Architecture Programmer's Manual volumes 1 (section 5.6.4, streaming stores) and 3;
//! Intel SDM volume 2 for CPUID leaf 7.

mod cut;
mod line;
mod shared;
mod write_back;

use std::arch::x86_64::{__cpuid, __cpuid_count, _mm_sfence, _mm_stream_si32};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

pub(crate) use self::write_back::{evict_lines, has_write_back, write_back_lines, write_back_word};

use self::cut::{
    copy_lines, copy_with, copy_words, fill_lines_with, fill_with, is_whole_lines, zero_lines,
    zero_with,
};
use self::line::{Words, Xmm, Ymm, Zmm};
use self::shared::{copy_shared, copy_side_by_side, words_of, zero_shared};
use crate::LINE_BYTES;
use crate::path::{Path, Ready};
use crate::pattern::Pattern;
use crate::policy::Processor;
use crate::portable;

/// The features of the CPU beyond the baseline, found once.
struct Cpu {
    avx2: bool,
    avx512f: bool,
    clflushopt: bool,
    clwb: bool,
}

/// Returns the features of the CPU that the operating system allows too.
#[inline]
fn cpu() -> &'static Cpu {
    static CPU: OnceLock<Cpu> = OnceLock::new();
    CPU.get_or_init(|| {
        let leaf_7 = if __cpuid(0).eax >= 7 { Some(__cpuid_count(7, 0)) } else { None };
        let ebx = leaf_7.map_or(0, |leaf| leaf.ebx);
        Cpu {
            avx2: is_x86_feature_detected!("avx2"),
            avx512f: is_x86_feature_detected!("avx512f"),
            clflushopt: ebx & (1 << 23) != 0,
            clwb: ebx & (1 << 24) != 0,
        }
    })
}

/// Returns the facts about this CPU that the policy depends on.
///
/// Source: CPUID leaves 0, 1 and 4; AMD describes its caches in leaf 0x8000_001D, in the format of
/// leaf 4.
pub(crate) fn processor() -> Option<Processor> {
    /// The most caches that are asked for: common CPUs have four.
    const MOST_CACHES: u32 = 8;
    let leaf_0 = __cpuid(0);
    let mut vendor = [0; 12];
    for (part, register) in vendor.chunks_exact_mut(4).zip([leaf_0.ebx, leaf_0.edx, leaf_0.ecx]) {
        part.copy_from_slice(&register.to_le_bytes());
    }
    let signature = __cpuid(1).eax;
    let family = match (signature >> 8) & 0xf {
        0xf => 0xf + ((signature >> 20) & 0xff),
        family => family,
    };
    let leaf = if vendor == *b"AuthenticAMD" && __cpuid(0x8000_0000).eax >= 0x8000_001d {
        0x8000_001d
    } else {
        4
    };
    let has_caches = leaf != 4 || leaf_0.eax >= 4;
    let mut found = Processor { vendor, family, l2_bytes: 0, l3_bytes: 0 };
    for cache in (0..MOST_CACHES).take_while(|_| has_caches) {
        let cache = __cpuid_count(leaf, cache);
        if cache.eax & 0x1f == 0 {
            break; // there are no more
        }
        let line_bytes = (cache.ebx & 0xfff) + 1;
        let partitions = ((cache.ebx >> 12) & 0x3ff) + 1;
        let ways = (cache.ebx >> 22) + 1;
        let bytes = [line_bytes, partitions, ways, cache.ecx.wrapping_add(1)]
            .into_iter()
            .try_fold(1_usize, |product, factor| product.checked_mul(usize::try_from(factor).ok()?))
            .unwrap_or(0);
        match (cache.eax >> 5) & 0x7 {
            2 => found.l2_bytes = bytes,
            3 => found.l3_bytes = bytes,
            _ => {}
        }
    }
    Some(found)
}

/// Returns whether this CPU can take `path`.
#[inline]
pub(crate) fn is_available(path: Path) -> bool {
    match path {
        Path::Portable | Path::Movnti | Path::Sse2 => true,
        Path::Avx2 => cpu().avx2,
        Path::Avx512 => cpu().avx512f,
    }
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
            /// The CPU has the path's features, and `dst` is not accessed before a fence.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn copy(dst: &mut [u8], src: &[u8]) {
                if is_whole_lines(dst) {
                    let (lines, src) = (dst.as_chunks_mut().0, src.as_chunks().0);
                    // SAFETY: `copy_lines` has the requirements of this function, and takes lines that
                    // are aligned, which was just tested.
                    unsafe { copy_lines::<$line>(lines, src) };
                } else {
                    // SAFETY: `copy_any` has the requirements of this function.
                    unsafe { copy_any(dst, src) };
                }
            }

            /// [`copy_with`] on this path.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features, and `dst` is not accessed before a fence.
            $(#[target_feature(enable = $feature)])?
            #[inline(never)]
            unsafe fn copy_any(dst: &mut [u8], src: &[u8]) {
                // SAFETY: `copy_with` has the requirements of this function.
                unsafe { copy_with::<$line>(dst, src) };
            }

            /// Fills `dst`, which starts at a multiple of 8.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features, and `dst` is not accessed before a fence.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn fill(dst: &mut [u8], pattern: &Pattern) {
                // SAFETY: `fill_lines_with` has the requirements of this function.
                if !unsafe { fill_lines_with::<$line>(dst, pattern) } {
                    // SAFETY: `fill_any` has the requirements of this function.
                    unsafe { fill_any(dst, pattern) };
                }
            }

            /// [`fill_with`] on this path.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features, and `dst` is not accessed before a fence.
            $(#[target_feature(enable = $feature)])?
            #[inline(never)]
            unsafe fn fill_any(dst: &mut [u8], pattern: &Pattern) {
                // SAFETY: `fill_with` has the requirements of this function.
                unsafe { fill_with::<$line>(dst, pattern) };
            }

            /// Zeroes `dst`.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features, and `dst` is not accessed before a fence.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn zero(dst: &mut [u8]) {
                if is_whole_lines(dst) {
                    // SAFETY: `zero_lines` has the requirements of this function, and takes lines that
                    // are aligned, which was just tested.
                    unsafe { zero_lines::<$line>(dst.as_chunks_mut().0) };
                } else {
                    // SAFETY: `zero_any` has the requirements of this function.
                    unsafe { zero_any(dst) };
                }
            }

            /// [`zero_with`] on this path.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features, and `dst` is not accessed before a fence.
            $(#[target_feature(enable = $feature)])?
            #[inline(never)]
            unsafe fn zero_any(dst: &mut [u8]) {
                // SAFETY: `zero_with` has the requirements of this function.
                unsafe { zero_with::<$line>(dst) };
            }

            /// [`zero_shared`] on this path.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn zero_past(dst: &[AtomicU64]) {
                // SAFETY: `zero_shared` has the requirements of this function.
                unsafe { zero_shared::<$line>(dst) };
            }

            /// [`copy_shared`] on this path.
            ///
            /// # Safety
            ///
            /// The CPU has the path's features, and `src` has as many readable bytes, which change
            /// meanwhile by whole aligned words at most.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn copy_past(dst: &[AtomicU64], src: *const u8) {
                // SAFETY: `copy_shared` has the requirements of this function.
                unsafe { copy_shared::<$line>(dst, src) };
            }

            /// [`copy_side_by_side`] on this path.
            ///
            /// # Safety
            ///
            /// As `copy_past`.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn copy_aside(dst: &[AtomicU64], src: *const u8) {
                // SAFETY: `copy_side_by_side` has the requirements of this function.
                unsafe { copy_side_by_side::<$line>(dst, src) };
            }
        }
    };
}

/// Calls the function of a path by its name, with arguments that satisfy it.
macro_rules! on_path {
    ($ready:expr, $name:ident($($argument:expr),*), $portable:expr) => {
        match $ready.path() {
            Path::Portable => $portable,
            // SAFETY: the features are the baseline's; the rest is argued where this is used.
            Path::Movnti => unsafe { movnti::$name($($argument),*) },
            // SAFETY: as above.
            Path::Sse2 => unsafe { sse2::$name($($argument),*) },
            // SAFETY: the path proves AVX2; the rest is argued where this is used.
            Path::Avx2 => unsafe { avx2::$name($($argument),*) },
            // SAFETY: the path proves AVX-512F; the rest is argued where this is used.
            Path::Avx512 => unsafe { avx512::$name($($argument),*) },
        }
    };
}

/// Zeroes words that others may touch meanwhile; the caller drains, as for [`copy`].
#[inline]
pub(crate) fn zero_words(ready: Ready, dst: &[AtomicU64]) {
    on_path!(ready, zero_past(dst), shared::zero_string(dst));
}

/// Copies words that others may touch meanwhile, several pages side by side if `is_aside` is set;
/// the caller drains, as for [`copy`].
///
/// # Panics
///
/// If there are not as many of either.
#[inline]
pub(crate) fn copy_words_shared(
    ready: Ready,
    is_aside: bool,
    dst: &[AtomicU64],
    src: &[AtomicU64],
) {
    assert!(dst.len() == src.len(), "a copy of {} words to {}", src.len(), dst.len());
    // SAFETY: `copy_from` wants as many readable bytes: `src` is that many words, compared above, and
    // atomic words change as a whole.
    unsafe { copy_from(ready, is_aside, dst, src.as_ptr().cast()) };
}

/// Copies to words from wherever the bytes are.
///
/// # Safety
///
/// `src` has as many readable bytes, which change meanwhile by whole aligned words at most.
#[inline]
unsafe fn copy_from(ready: Ready, is_aside: bool, dst: &[AtomicU64], src: *const u8) {
    // SAFETY: the caller promises it.
    let by_string = || unsafe { shared::copy_string(dst, src) };
    if is_aside {
        on_path!(ready, copy_aside(dst, src), by_string());
    } else {
        on_path!(ready, copy_past(dst, src), by_string());
    }
}

/// Zeroes a slice; the caller drains, as for [`copy`].
#[inline]
pub(crate) fn zero_bytes(ready: Ready, dst: &mut [u8]) {
    let (head, words, tail) = words_of(dst);
    head.fill(0);
    zero_words(ready, words);
    tail.fill(0);
}

/// Copies between slices of equal length; the caller drains, as for [`copy`].
#[inline]
pub(crate) fn copy_bytes(ready: Ready, is_aside: bool, dst: &mut [u8], src: &[u8]) {
    assert!(dst.len() == src.len(), "a copy of {} bytes to {}", src.len(), dst.len());
    let (head, words, tail) = words_of(dst);
    let (head_src, rest) = src.split_at(head.len());
    let (words_src, tail_src) = rest.split_at(size_of_val(words));
    head.copy_from_slice(head_src);
    // SAFETY: `copy_from` wants as many readable bytes, which do not change while they are borrowed.
    unsafe { copy_from(ready, is_aside, words, words_src.as_ptr()) };
    tail.copy_from_slice(tail_src);
}

path!(Words, movnti);
path!(Xmm, sse2);
path!(Ymm, avx2, "avx2");
path!(Zmm, avx512, "avx512f");

/// Copies `src` to `dst`, which are of equal length.
///
/// The caller keeps `dst` borrowed until it has called [`drain`] on this thread: `streaming.rs`
/// sees to that, so this is not public.
#[inline]
pub(crate) fn copy(ready: Ready, dst: &mut [u8], src: &[u8]) {
    // A lone 4-byte field has its own instruction; as part of something longer it would be a
    // ragged end.
    if dst.len() == 4 && ready.path() != Path::Portable && copy_small(dst, src) {
        return;
    }
    // The destination is not accessed until the caller drains, here and below.
    on_path!(ready, copy(dst, src), dst.copy_from_slice(src));
}

/// Zeroes `dst`; the caller drains, as for [`copy`].
#[inline]
pub(crate) fn zero(ready: Ready, dst: &mut [u8]) {
    on_path!(ready, zero(dst), dst.fill(0));
}

/// Fills `dst` from element 0 of `pattern`; the caller drains, as for [`copy`].
#[inline]
pub(crate) fn fill(ready: Ready, dst: &mut [u8], pattern: &Pattern) {
    if ready.path() != Path::Portable && !dst.as_ptr().addr().is_multiple_of(8) {
        return fill_misaligned(ready, dst, pattern);
    }
    on_path!(ready, fill(dst, pattern), portable::fill(dst, pattern));
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
        // SAFETY: `_mm_stream_si32` wants 4 writable bytes that are not accessed before a fence:
        // `dst` is that long, and the caller keeps it borrowed until it drains.
        unsafe { _mm_stream_si32(dst.as_mut_ptr().cast(), i32::from_ne_bytes(word)) };
    } else {
        // SAFETY: `copy_words` wants as many bytes of source, compared above, and `dst` untouched
        // before a fence: the caller keeps it borrowed until it drains.
        unsafe { copy_words(dst, src) };
    }
    true
}

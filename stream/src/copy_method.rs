//! The ways of clearing and copying much memory at once: [`CopyMethod`], [`zero_words`], [`copy_words`].
//!
//! A [`Path`] is a kind of streaming store; a method is through the cache by the CPU's own loop,
//! past it, or past it with several pages under way at a time.
//! Which is fastest depends on the length, on whether the memory was in the cache, and on when it is
//! read next: [`StorePolicy::choose`](crate::StorePolicy::choose).
//!
//! Memory that another may read or write meanwhile (another thread, a process that maps the
//! same file, a device) is a row of atomic words, and each word changes at once. The stores are
//! instructions that the compiler does not look into, so a race is one with a device: old or
//! new, word by word. Every function here drains before it returns.
//!
//! Cost: a call costs a few nanoseconds and a fence beside the stores; a fence for each page halves
//! the rate, so a call is for an extent.

use std::fmt;
use std::sync::atomic::AtomicU64;

use crate::arch;
use crate::path::{Path, Ready};

/// A way of clearing or copying memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyMethod {
    /// Through the cache, by the CPU's own loop (`REP STOS`, `REP MOVS`).
    String,
    /// Past the cache, from the first line to the last.
    Streaming(Path),
    /// Past the cache, a line of each of eight pages in turn: the prefetchers that read the source
    /// follow each page by itself. Clearing reads nothing, and does as [`CopyMethod::Streaming`].
    Interleaved(Path),
}

impl CopyMethod {
    /// Every way that this build and CPU can take.
    pub fn all() -> impl Iterator<Item = Self> {
        let streaming =
            || Path::ALL.into_iter().filter(|path| *path != Path::Portable && path.is_available());
        std::iter::once(Self::String)
            .chain(streaming().map(Self::Streaming))
            .chain(streaming().map(Self::Interleaved))
    }

    /// Returns the store past the cache; [`Path::Portable`] if there is none.
    #[inline]
    #[must_use]
    pub fn path(self) -> Path {
        match self {
            Self::String => Path::Portable,
            Self::Streaming(path) | Self::Interleaved(path) => path,
        }
    }

    /// Returns whether the destination is left in the cache.
    #[inline]
    #[must_use]
    pub fn is_cached(self) -> bool {
        self.path() == Path::Portable
    }

    /// Returns whether this build, CPU and operating system offer the way.
    #[must_use]
    pub fn is_available(self) -> bool {
        self.path().is_available()
    }

    #[inline]
    fn is_aside(self) -> bool {
        matches!(self, Self::Interleaved(_))
    }
}

impl fmt::Display for CopyMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::String => f.write_str("string"),
            Self::Streaming(path) => write!(f, "{path}"),
            Self::Interleaved(path) => write!(f, "{path}, side by side"),
        }
    }
}

/// Zeroes words that others may touch meanwhile. Each changes at once, the whole in any order; all of
/// them are visible to every thread that learns of the return.
///
/// # Panics
///
/// If the way is not available; nothing is written then.
#[inline]
pub fn zero_words(way: CopyMethod, dst: &[AtomicU64]) {
    arch::zero_words(Ready::new(way.path()), dst);
    drain(way);
}

/// Copies words that others may touch meanwhile. Each is read at once and changes at once, the whole
/// in any order; all of them are visible to every thread that learns of the return.
///
/// Where the two overlap, words may arrive that were copied a moment before.
///
/// # Panics
///
/// If there are not as many of either, or the way is not available; nothing is written then.
#[inline]
pub fn copy_words(way: CopyMethod, dst: &[AtomicU64], src: &[AtomicU64]) {
    arch::copy_words_shared(Ready::new(way.path()), way.is_aside(), dst, src);
    drain(way);
}

/// Zeroes a slice of any alignment.
///
/// # Panics
///
/// If the way is not available; nothing is written then.
#[inline]
pub fn zero_bytes(way: CopyMethod, dst: &mut [u8]) {
    arch::zero_bytes(Ready::new(way.path()), dst);
    drain(way);
}

/// Copies between slices of any alignment.
///
/// # Panics
///
/// If the lengths differ, or the way is not available; nothing is written then.
#[inline]
pub fn copy_bytes(way: CopyMethod, dst: &mut [u8], src: &[u8]) {
    arch::copy_bytes(Ready::new(way.path()), way.is_aside(), dst, src);
    drain(way);
}

/// Waits for streaming stores; stores through the cache need no fence.
#[inline]
fn drain(way: CopyMethod) {
    if !way.is_cached() {
        arch::drain();
    }
}

//! The scope of streaming stores: the bytes written in it are out of reach until a fence has run.
//!
//! A streaming store becomes visible to other threads late: not even a Release store after it waits
//! for it, only a fence does. Reading the bytes before that is a mistake that tests seldom show, so
//! here it does not compile: a destination is borrowed mutably for a lifetime that the scope does
//! not end inside of, and the fence runs before the scope returns.
//!
//! Not here: the stores (`x86_64.rs`, `portable.rs`) and the choice between cached and streaming
//! (`policy.rs`).
//!
//! Cost: a call is a match on the path and one call of a function compiled for it, a few
//! nanoseconds. A fence after a long fill waits for the stores in flight; one after each
//! 64 bytes costs far more than the bytes. So: one scope around many calls.

use std::marker::PhantomData;

use crate::arch;
use crate::path::{Path, Ready};
use crate::pattern::Pattern;
use crate::policy::best;

/// A guard over streaming stores: drains when its scope ends, also when unwinding.
///
/// There is no constructor: [`Streaming::scope`] lends a `&mut Streaming`. A value that the caller
/// owned could be passed to `mem::forget`, and the borrows would end without a fence; a value that is only
/// lent cannot be; two of them can at most be swapped, which their equal lifetimes make harmless.
/// It cannot be sent to another thread, because a fence is for the stores of the
/// thread that issues it.
///
/// Destinations stay mutably borrowed until the scope has returned, by when the drain has run:
///
/// ```
/// use uzone_stream::{Pattern, Streaming, best};
///
/// let pattern = Pattern::constant(&[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
/// let mut memory = vec![0xff; 4096];
/// let (head, tails) = memory.split_at_mut(64);
/// Streaming::scope(best(), |stream| {
///     stream.zero(head);
///     stream.fill(tails, &pattern);
/// });
/// assert_eq!((memory[0], memory[64]), (0, u8::from(cfg!(target_endian = "little"))));
/// ```
///
/// Reading one before that does not compile, not even after [`Streaming::drain`]:
///
/// ```compile_fail,E0503
/// use uzone_stream::{Streaming, best};
///
/// let mut memory = vec![0xff_u8; 64];
/// let bytes: &mut [u8] = &mut memory;
/// Streaming::scope(best(), |stream| {
///     stream.zero(bytes);
///     assert_eq!(bytes[0], 0); // still borrowed by the scope
/// });
/// ```
#[derive(Debug)]
pub struct Streaming<'dst> {
    path: Ready,
    /// Whether streaming stores were made since the last fence.
    is_in_flight: bool,
    drains: u64,
    /// The destinations. The pointer keeps the guard on its thread.
    borrows: PhantomData<(&'dst mut [u8], *const ())>,
}

impl<'dst> Streaming<'dst> {
    /// Calls `f` with a guard whose stores take `path`. They are visible to every thread that
    /// learns of the return, by whatever means.
    ///
    /// # Panics
    ///
    /// If `path` is not available, before `f` is called. When `f` panics, its stores are drained
    /// while unwinding.
    #[inline]
    pub fn scope<R>(path: Path, f: impl FnOnce(&mut Streaming<'dst>) -> R) -> R {
        Self::counted_scope(path, f).0
    }

    /// As [`Streaming::scope`], and also returns how many fences were issued, the last included.
    ///
    /// # Panics
    ///
    /// As [`Streaming::scope`].
    #[inline]
    pub fn counted_scope<R>(path: Path, f: impl FnOnce(&mut Streaming<'dst>) -> R) -> (R, u64) {
        let mut stream = Streaming {
            path: Ready::new(path),
            is_in_flight: false,
            drains: 0,
            borrows: PhantomData,
        };
        let result = f(&mut stream);
        stream.drain();
        (result, stream.drains)
    }

    /// Returns the path of this scope.
    #[inline]
    #[must_use]
    pub fn path(&self) -> Path {
        self.path.path()
    }

    /// Copies `src` to `dst`. Both may have any alignment; an 8-byte aligned `dst` is the one that
    /// streams whole.
    ///
    /// In ascending order: bytes of `dst` up to a multiple of 8 by plain stores, 8-byte words up to
    /// a line, whole lines by the path's store, and the same in reverse at the end. An aligned copy
    /// of 4 bytes streams too.
    ///
    /// # Panics
    ///
    /// If the lengths differ; nothing is written then.
    #[inline]
    pub fn copy(&mut self, dst: &'dst mut [u8], src: &[u8]) {
        assert!(dst.len() == src.len(), "a copy of {} bytes to {}", src.len(), dst.len());
        self.note_stores_to(dst);
        arch::copy(self.path, dst, src);
    }

    /// Fills `dst` with elements of `pattern`, the first of which starts at its first byte. The
    /// last one is cut where `dst` ends.
    ///
    /// Any alignment is right; one that is not a multiple of 8 is slow, because every word then
    /// holds parts of two words of the pattern.
    #[inline]
    pub fn fill(&mut self, dst: &'dst mut [u8], pattern: &Pattern) {
        self.note_stores_to(dst);
        arch::fill(self.path, dst, pattern);
    }

    /// Zeroes `dst`, of any alignment. Not slower than a fill with zeroes, on some CPUs twice as
    /// fast.
    #[inline]
    pub fn zero(&mut self, dst: &'dst mut [u8]) {
        self.note_stores_to(dst);
        arch::zero(self.path, dst);
    }

    /// Waits until everything written so far is visible to other threads. Without streaming stores
    /// since the last drain there is nothing to wait for, and no fence is issued.
    ///
    /// Destinations stay borrowed all the same. Only needed to publish a part of the scope's work
    /// to a thread or device that reaches the memory by other means.
    #[inline]
    pub fn drain(&mut self) {
        if self.is_in_flight {
            self.is_in_flight = false;
            self.drains += 1;
            arch::drain();
            #[cfg(test)]
            tests::FENCES.with(|fences| fences.set(fences.get() + 1));
        }
    }

    /// Returns how many fences were issued so far. Always 0 on [`Path::Portable`], whose stores need
    /// none.
    #[inline]
    #[must_use]
    pub fn drains(&self) -> u64 {
        self.drains
    }

    /// Records that bytes are about to be streamed, before they are: a fence too many is harmless.
    #[inline]
    fn note_stores_to(&mut self, dst: &[u8]) {
        self.is_in_flight |= !dst.is_empty() && self.path.path() != Path::Portable;
    }
}

impl Drop for Streaming<'_> {
    #[inline]
    fn drop(&mut self) {
        self.drain();
    }
}

/// Copies `src` to `dst` on the [`best`] path and drains before it returns.
///
/// # Panics
///
/// If the lengths differ.
#[inline]
pub fn copy(dst: &mut [u8], src: &[u8]) {
    copy_by(best(), dst, src);
}

/// Fills `dst` with elements of `pattern` on the [`best`] path and drains before it returns.
#[inline]
pub fn fill(dst: &mut [u8], pattern: &Pattern) {
    fill_by(best(), dst, pattern);
}

/// Zeroes `dst` on the [`best`] path and drains before it returns.
#[inline]
pub fn zero(dst: &mut [u8]) {
    zero_by(best(), dst);
}

/// Copies `src` to `dst` on `path` and drains before it returns.
///
/// # Panics
///
/// If the lengths differ or `path` is not available.
#[inline]
pub fn copy_by(path: Path, dst: &mut [u8], src: &[u8]) {
    Streaming::scope(path, |stream| stream.copy(dst, src));
}

/// Fills `dst` with elements of `pattern` on `path` and drains before it returns.
///
/// # Panics
///
/// If `path` is not available.
#[inline]
pub fn fill_by(path: Path, dst: &mut [u8], pattern: &Pattern) {
    Streaming::scope(path, |stream| stream.fill(dst, pattern));
}

/// Zeroes `dst` on `path` and drains before it returns.
///
/// # Panics
///
/// If `path` is not available.
#[inline]
pub fn zero_by(path: Path, dst: &mut [u8]) {
    Streaming::scope(path, |stream| stream.zero(dst));
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    thread_local! {
        /// Fences of this thread, counted where they are issued.
        pub(super) static FENCES: Cell<u64> = const { Cell::new(0) };
    }

    fn streaming_paths() -> impl Iterator<Item = Path> {
        Path::ALL.into_iter().filter(|path| *path != Path::Portable && path.is_available())
    }

    #[test]
    fn what_a_panicking_scope_wrote_is_drained_while_unwinding() {
        for path in streaming_paths() {
            let mut bytes = [1; 256];
            let before = FENCES.get();
            let result = catch_unwind(AssertUnwindSafe(|| {
                Streaming::scope(path, |stream| {
                    stream.zero(&mut bytes);
                    panic!("on purpose");
                })
            }));
            let (): () = result.err().map(drop).expect("the panic came through");
            assert_eq!(FENCES.get() - before, 1, "{path}");
            assert_eq!(bytes, [0; 256]);
        }
    }

    #[test]
    fn a_scope_issues_the_fences_it_counts_and_no_others() {
        for path in streaming_paths() {
            let mut bytes = [1; 256];
            let before = FENCES.get();
            let ((), counted) = Streaming::counted_scope(path, |stream| {
                let (low, high) = bytes.split_at_mut(128);
                stream.zero(low);
                stream.drain();
                stream.drain();
                stream.zero(high);
            });
            assert_eq!(counted, 2);
            assert_eq!(FENCES.get() - before, 2, "{path}");
        }
    }
}

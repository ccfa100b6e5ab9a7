//! The descriptor of a page: [`Page`], one 64-bit word and the caller's part.
//!
//! The stored number is not the word of `word.rs` but its difference to a *template*, which is one
//! number for a whole memmap: `decoded = stored + template`, wrapping. A descriptor that was never
//! written is zero, and so it *is* the template: an initialised descriptor. Counting needs no
//! decoding, because adding to the difference adds to the word.
//!
//! This file is not about where descriptors lie: see `memmap.rs`.

use crate::sync::AtomicU64;

/// The descriptor of one page: the caller's part, then the word.
///
/// The word comes last because Linux's 64-byte descriptor has room there: with
/// [`LinuxPage`](crate::LinuxPage) as the payload, a fresh descriptor is byte for byte Linux's.
///
/// # Invariants
/// Its size is the payload's plus eight bytes, without padding; [`Payload`](crate::Payload) asks
/// for that, and [`Layout`](crate::Layout) refuses a payload that does not fit.
#[cfg_attr(not(loom), derive(zerocopy::FromBytes))]
#[repr(C)]
pub struct Page<P = ()> {
    payload: P,
    pub(crate) stored: AtomicU64,
}

impl<P> Page<P> {
    /// Takes the caller's part of an unused descriptor.
    #[must_use]
    pub fn new(payload: P) -> Self {
        Self { payload, stored: AtomicU64::new(0) }
    }

    /// Returns the caller's part.
    #[must_use]
    pub fn payload(&self) -> &P {
        &self.payload
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Page>() == 8);

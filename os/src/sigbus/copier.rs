//! How the words of memory that may not be there are touched: [`Copier`], [`Fault`].

use core::sync::atomic::AtomicU64;

pub(crate) const WORD: usize = size_of::<AtomicU64>();

/// A word that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// What is wrong, as [`sigbus::BusError`](crate::sigbus::BusError) packs it.
    pub(crate) info: u64,
    /// The address of a byte of the first word that was not copied.
    pub(crate) bad: u64,
}

/// How the words of a mapping are touched: one whole, aligned word after the other, from the first
/// on.
pub(crate) trait Copier {
    /// Returns a word.
    fn load(word: &AtomicU64) -> Result<u64, Fault>;

    /// Copies as many words as there are chunks.
    fn copy_out(words: &[AtomicU64], out: &mut [[u8; WORD]]) -> Result<(), Fault>;

    /// Copies as many chunks as there are words.
    fn copy_in(words: &[AtomicU64], bytes: &[[u8; WORD]]) -> Result<(), Fault>;

    /// Replaces the bits of a word that are not in `keep` by `bits`. Concurrent writes to the others are
    /// kept.
    fn merge(word: &AtomicU64, keep: u64, bits: u64) -> Result<(), Fault>;
}

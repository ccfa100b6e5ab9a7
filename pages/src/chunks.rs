//! Cutting a range where a driver or a device wants it cut: [`chunks`].
//!
//! Registration with an RDMA or GPU driver takes so many bytes a call and no more, and wants the cuts
//! at huge pages. So a range is cut at multiples of an alignment into pieces as long as the limit
//! allows; only the first may start, and only the last may end, elsewhere.
//!
//! Units: bytes. Cost: a few instructions a chunk; nothing allocates.

use core::ops::Range;
use core::{iter, mem};

use crate::addr::AddrError;
use crate::byte_len::ByteLen;

/// Returns the pieces of a range of bytes, in ascending order: none is longer than `most`, and they meet at
/// multiples of `align`.
///
/// ```
/// use uzone_pages::{ByteLen, chunks};
///
/// // 100 GiB for a driver that takes 64 GiB a call, cut at 1 GiB pages.
/// let region = 0..ByteLen::gib(100).get();
/// let parts: Vec<_> = chunks(region, ByteLen::gib(64), ByteLen::gib(1))?.collect();
/// assert_eq!(parts, [0..64 << 30, 64 << 30..100 << 30]);
/// # Ok::<(), uzone_pages::AddrError>(())
/// ```
///
/// A range without a byte has no piece.
///
/// # Errors
/// [`AddrError::BadAlign`] if the alignment is no power of two, [`AddrError::ChunkTooShort`] if it is
/// longer than the limit, and [`AddrError::Backwards`] if the range ends before it starts.
pub fn chunks(
    bytes: Range<u64>,
    most: ByteLen,
    align: ByteLen,
) -> Result<impl Iterator<Item = Range<u64>>, AddrError> {
    if !align.get().is_power_of_two() {
        return Err(AddrError::BadAlign { align_bytes: align.get() });
    }
    if most.get() < align.get() {
        return Err(AddrError::ChunkTooShort { most, align });
    }
    let Range { mut start, end } = bytes;
    if end < start {
        return Err(AddrError::Backwards { start, end });
    }
    let below = align.get() - 1;
    Ok(iter::from_fn(move || {
        // From a start between two multiples the first piece is shorter, so that it ends at one.
        let next = (start & !below).saturating_add(most.get() & !below).min(end);
        (start < next).then(|| mem::replace(&mut start, next)..next)
    }))
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::vec::Vec;

    #[test]
    fn the_first_piece_reaches_an_alignment_and_the_others_keep_to_it() {
        let cut = |bytes, most, align| -> Vec<Range<u64>> {
            chunks(bytes, ByteLen::new(most), ByteLen::new(align)).unwrap().collect()
        };
        assert_eq!(cut(0..10, 4, 4), [0..4, 4..8, 8..10]);
        assert_eq!(cut(1..10, 4, 4), [1..4, 4..8, 8..10]);
        assert_eq!(cut(3..10, 7, 4), [3..4, 4..8, 8..10], "a limit between two multiples");
        assert_eq!(cut(5..5, 4, 4), []);
        // At the end of all numbers.
        assert_eq!(
            cut(u64::MAX - 5..u64::MAX, 1 << 63, 1 << 63).pop(),
            Some(u64::MAX - 5..u64::MAX)
        );
    }

    #[test]
    fn what_cannot_be_cut_is_refused() {
        let refused = |bytes, most, align| {
            chunks(bytes, ByteLen::new(most), ByteLen::new(align)).err().unwrap()
        };
        assert_eq!(refused(0..1, 4, 0), AddrError::BadAlign { align_bytes: 0 });
        assert_eq!(refused(0..1, 4, 3), AddrError::BadAlign { align_bytes: 3 });
        assert_eq!(
            refused(0..1, 3, 4),
            AddrError::ChunkTooShort { most: ByteLen::new(3), align: ByteLen::new(4) }
        );
        #[expect(clippy::reversed_empty_ranges, reason = "that is the point")]
        let backwards = refused(2..1, 4, 4);
        assert_eq!(backwards, AddrError::Backwards { start: 2, end: 1 });
    }
}

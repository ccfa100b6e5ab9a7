//! The order in which the bytes of a range are cleared or copied: [`clearing_order`].
//!
//! A thread that waits for one page of a folio reads that page next, so it is written last, by stores that
//! leave it in the cache: first the bytes right of the neighbourhood of the hinted page, then the bytes
//! left of it, then the neighbourhood, which is the page and two on either side.
//!
//! Not here: stores, a clock, and the content of the bytes.
//!
//! Units: bytes, from the same zero that the pages are counted from.
//! Source: the order is that of Linux 7.0 for huge pages, described by its commits and reviews.

use core::ops::Range;

use crate::addr::{AddrError, PageSize};

/// The number of pages on either side of the hinted one that belong to its neighbourhood.
const NEIGHBOUR_PAGES: u64 = 2;

/// Returns the extents of a range in the order in which to write them. The third is the neighbourhood of
/// `hint`, a byte that is read next; without a hint, the first extent is the whole range. An extent may be
/// empty.
///
/// # Errors
/// [`AddrError::NoBytes`] without a byte, [`AddrError::HintOutside`] if the hint is none of them.
pub const fn clearing_order(
    bytes: Range<u64>,
    hint: Option<u64>,
    page: PageSize,
) -> Result<[Range<u64>; 3], AddrError> {
    let (start, end) = (bytes.start, bytes.end);
    if start >= end {
        return Err(AddrError::NoBytes { start, end });
    }
    let Some(hint) = hint else {
        return Ok([start..end, end..end, end..end]);
    };
    if hint < start || end <= hint {
        return Err(AddrError::HintOutside { hint, start, end });
    }
    // Clamped on either side, also where the hint is at an end of all 64-bit numbers.
    let first = hint & !(page.bytes() - 1);
    let reach = NEIGHBOUR_PAGES.saturating_mul(page.bytes());
    let mut left = first.saturating_sub(reach);
    if left < start {
        left = start;
    }
    let mut right = first.saturating_add(reach).saturating_add(page.bytes());
    if right > end {
        right = end;
    }
    Ok([right..end, start..left, left..right])
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;
    const FOLIO: u64 = 512 * PAGE;

    fn order(bytes: Range<u64>, hint: Option<u64>) -> [Range<u64>; 3] {
        clearing_order(bytes, hint, PageSize::KIB_4).unwrap()
    }

    #[test]
    fn the_neighbourhood_of_the_hint_comes_last_right_comes_before_left() {
        for (page, expected) in [
            (0, [3..512, 0..0, 0..3]),
            (1, [4..512, 0..0, 0..4]),
            (2, [5..512, 0..0, 0..5]),
            (3, [6..512, 0..1, 1..6]),
            (256, [259..512, 0..254, 254..259]),
            (508, [511..512, 0..506, 506..511]),
            (509, [512..512, 0..507, 507..512]),
            (511, [512..512, 0..509, 509..512]),
        ] {
            let expected = expected.map(|pages| pages.start * PAGE..pages.end * PAGE);
            assert_eq!(order(0..FOLIO, Some(page * PAGE)), expected, "first byte of page {page}");
            assert_eq!(order(0..FOLIO, Some(page * PAGE + PAGE - 1)), expected, "last of {page}");
        }
        assert_eq!(order(0..FOLIO, None), [0..FOLIO, FOLIO..FOLIO, FOLIO..FOLIO]);
    }

    #[test]
    fn a_range_of_nothing_and_a_hint_outside_are_refused() {
        let (start, end) = (PAGE, PAGE);
        let page = PageSize::KIB_4;
        assert_eq!(clearing_order(start..end, None, page), Err(AddrError::NoBytes { start, end }));
        let end = 2 * PAGE;
        for hint in [0, PAGE - 1, end, u64::MAX] {
            assert_eq!(
                clearing_order(start..end, Some(hint), page),
                Err(AddrError::HintOutside { hint, start, end })
            );
        }
    }

    #[test]
    fn the_last_64_bit_numbers_are_covered_like_others() {
        let start = u64::MAX - 3 * PAGE;
        let extents = order(start..u64::MAX, Some(u64::MAX - 1));
        assert_eq!(extents.iter().map(|part| part.end - part.start).sum::<u64>(), 3 * PAGE);
    }
}

//! Extents and chunks cover a range exactly, whatever it is and however it is cut.
#![cfg(not(loom))]

use std::ops::Range;

use proptest::prelude::*;
use uzone_pages::{ByteLen, PageSize, chunks, clearing_order};

const CASES: u32 = if cfg!(miri) { 8 } else { 512 };

/// Sorts ranges and asserts that they are `whole`, each byte once.
fn cover(mut parts: Vec<Range<u64>>, whole: &Range<u64>) {
    parts.sort_by_key(|part| part.start);
    let mut at = whole.start;
    for part in parts {
        assert!(part.start < part.end, "an empty part at {at:#x}");
        assert_eq!(part.start, at, "a gap or an overlap");
        at = part.end;
    }
    assert_eq!(at, whole.end);
}

/// A range of up to 600 pages that may start and end inside of one, its hint, and its page size.
fn range() -> impl Strategy<Value = (Range<u64>, Option<u64>, PageSize)> {
    let start = prop_oneof![0..1_u64 << 20, u64::MAX - (1 << 33)..u64::MAX - (1 << 32)];
    (start, 1..600_u64 * 4096, any::<u64>(), 12..17_u32).prop_map(|(start, len, at, shift)| {
        let hint = (at % 3 != 0).then_some(start + at % len);
        (start..start + len, hint, PageSize::try_from_bytes(1 << shift).expect("a power of two"))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_extents_cover_the_range_and_the_hinted_page_is_last_with_two_pages_on_either_side(
        (bytes, hint, page) in range(),
    ) {
        let extents = clearing_order(bytes.clone(), hint, page).unwrap();
        cover(extents.iter().filter(|part| !part.is_empty()).cloned().collect(), &bytes);
        let [right, left, near] = extents;
        let Some(hint) = hint else {
            prop_assert!(left.is_empty() && near.is_empty());
            return Ok(());
        };
        prop_assert!(left.end == near.start && near.end == right.start);
        let pages = |byte: u64| byte / page.bytes();
        prop_assert!(near.contains(&hint));
        let (before, behind) = (pages(hint) - pages(near.start), pages(near.end - 1) - pages(hint));
        prop_assert!(before <= 2 && behind <= 2);
        // Clamped by the range, and by nothing else.
        prop_assert!(near.start == bytes.start || before == 2);
        prop_assert!(near.end == bytes.end || behind == 2);
    }

    #[test]
    fn chunks_cover_the_range_meet_at_the_alignment_and_keep_to_the_limit(
        start in 0..u64::MAX / 2,
        len in 1..1_u64 << 40,
        shift in 0..31_u32,
        limit in 1..9_u64,
        more in any::<u64>(),
    ) {
        let align = 1_u64 << shift;
        let most = limit * align + more % align;
        // Not more than a few thousand pieces.
        let len = len.min(most.saturating_mul(if cfg!(miri) { 50 } else { 2000 }));
        let bytes = start..start + len;
        let chunks = chunks(bytes.clone(), ByteLen::new(most), ByteLen::new(align));
        let chunks: Vec<_> = chunks.unwrap().collect();
        for chunk in &chunks {
            prop_assert!(chunk.end - chunk.start <= most);
            prop_assert!(chunk.start == start || chunk.start.is_multiple_of(align));
            prop_assert!(chunk.end == bytes.end || chunk.end.is_multiple_of(align));
        }
        // No more of them than there have to be.
        let fewest = (len + start % align).div_ceil(limit * align);
        prop_assert_eq!(chunks.len() as u64, fewest);
        cover(chunks, &bytes);
    }
}

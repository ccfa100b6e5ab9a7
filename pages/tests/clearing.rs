//! Plans and chunks cover a range exactly, whatever it is and however it is cut.
#![cfg(not(loom))]

use std::ops::Range;

use proptest::prelude::*;
use uzone_pages::{ByteLen, NEIGHBOUR_PAGES, PageSize, Plan, chunks};

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

/// Returns the batches of at most `len` bytes that a plan has left, and whether each is near the hint.
fn in_batches(mut plan: Plan, len: ByteLen) -> Vec<(Range<u64>, bool)> {
    std::iter::from_fn(|| plan.take_batch(len)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn batches_cover_the_range_exactly_and_in_the_order_of_the_extents(
        (bytes, hint, page) in range(),
        batch in 1..3_000_000_u64,
    ) {
        let plan = Plan::try_new(bytes.clone(), hint, page).unwrap();
        let batch = ByteLen::new(batch.max(bytes.end.abs_diff(bytes.start) / 3000));
        let extents: Vec<_> = plan.extents().collect();
        prop_assert_eq!(in_batches(plan.clone(), ByteLen::new(u64::MAX)).len(), extents.len());
        let lengths = extents.iter().map(|extent| extent.end - extent.start);
        let count: u64 = lengths.map(|len| len.div_ceil(batch.get())).sum();
        let batches: Vec<_> = in_batches(plan, batch).into_iter().map(|(bytes, _)| bytes).collect();
        prop_assert_eq!(batches.len() as u64, count);
        prop_assert!(batches.iter().all(|part| part.end - part.start <= batch.get()));
        cover(batches.clone(), &bytes);
        // In order: the extents' own bytes, one after the other.
        let mut at = extents.iter().flat_map(|extent| [extent.start, extent.end]);
        let mut expected = at.next();
        for part in &batches {
            if Some(part.start) != expected {
                prop_assert_eq!(at.next(), expected, "the extent before it was finished");
                expected = at.next();
                prop_assert_eq!(Some(part.start), expected);
            }
            expected = Some(part.end);
        }
    }

    #[test]
    fn the_hinted_page_is_in_the_last_extent_with_at_most_two_pages_on_either_side(
        (bytes, hint, page) in range(),
    ) {
        let plan = Plan::try_new(bytes.clone(), hint, page).unwrap();
        let batches = in_batches(plan, ByteLen::new(u64::MAX));
        let near: Vec<_> =
            batches.iter().filter(|(_, is_near)| *is_near).collect();
        let Some(hint) = hint else {
            prop_assert!(near.is_empty() && batches.len() == 1);
            return Ok(());
        };
        prop_assert_eq!(&near, &[batches.last().unwrap()]);
        let near = &near[0].0;
        let pages = |byte: u64| byte / page.bytes();
        prop_assert!(near.contains(&hint));
        prop_assert!(pages(hint) - pages(near.start) <= NEIGHBOUR_PAGES);
        prop_assert!(pages(near.end - 1) - pages(hint) <= NEIGHBOUR_PAGES);
        // Clamped by the range, and by nothing else.
        prop_assert!(near.start == bytes.start || pages(hint) - pages(near.start) == NEIGHBOUR_PAGES);
        prop_assert!(near.end == bytes.end || pages(near.end - 1) - pages(hint) == NEIGHBOUR_PAGES);
    }

    #[test]
    fn batches_of_changing_lengths_and_batches_put_back_lose_no_byte(
        (bytes, hint, page) in range(),
        lengths in prop::collection::vec((1..2_000_000_u64, any::<bool>()), 1..20),
    ) {
        let mut plan = Plan::try_new(bytes.clone(), hint, page).unwrap();
        let mut parts = Vec::new();
        let mut done = 0;
        for (len, is_put_back) in lengths.into_iter().chain(std::iter::repeat((1 << 20, false))) {
            let before = plan.left();
            let Some((batch, is_near)) = plan.take_batch(ByteLen::new(len)) else { break };
            let len = batch.end - batch.start;
            prop_assert_eq!(before.get() - plan.left().get(), len);
            if is_put_back {
                plan.put_back(&batch);
                prop_assert_eq!(plan.left(), before);
                let again = plan.clone().take_batch(ByteLen::new(len));
                prop_assert_eq!(again, Some((batch, is_near)));
                continue;
            }
            done += len;
            parts.push(batch);
            prop_assert_eq!(done + plan.left().get(), bytes.end - bytes.start);
        }
        prop_assert!(plan.left().is_zero());
        cover(parts, &bytes);
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

//! Random faults, areas and sizes: what holds for every window, and the formula that Linux uses as
//! the oracle.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::collections::HashSet;

use proptest::prelude::*;
use uzone_pages::{
    Advice, ByteLen, FaultAround, FaultPattern, PageCount, PageSize, Pfn, PfnRange, Sampled, Touch,
};

fn range(start: u64, end: u64) -> PfnRange {
    PfnRange::try_new(Pfn::new(start), PageCount::new(end - start)).unwrap()
}

/// The kernel's way to say it: entries of a page table, first and last, from the index of the
/// faulting page in its table, its distance from the area's start, and the area's length.
fn by_entries(fault: u64, start: u64, end: u64, nr: u64) -> (u64, u64) {
    let (pte, voff, n) = (fault % 512, fault - start, end - start);
    let from = (pte / nr * nr).max(pte - pte.min(voff));
    let to = (from + nr).min(512).min(pte + n - voff) - 1;
    (fault - pte + from, fault - pte + to)
}

/// An area, a fault in it, and log2 of a window.
fn cases() -> impl Strategy<Value = (u64, u64, u64, u32)> {
    (0_u64..1 << 40, 1_u64..5000, 0_u32..=9).prop_flat_map(|(start, len, order)| {
        (Just(start), Just(start + len), start..start + len, Just(order))
    })
}

fn sized(order: u32) -> FaultAround {
    FaultAround::try_new(ByteLen::new(4096 << order)).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 20 } else { 20_000 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_window_never_crosses_its_area_or_a_page_table((start, end, fault, order) in cases()) {
        let area = range(start, end);
        let window = sized(order).window(Pfn::new(fault), area, PageSize::KIB_4).unwrap();
        prop_assert!(window.contains(Pfn::new(fault)));
        prop_assert!(window.pages().get() <= 1 << order);
        prop_assert!(area.contains_range(window));
        prop_assert_eq!(window.start().get() / 512, (window.end().get() - 1) / 512);
        // It is aligned, unless the area starts in it.
        prop_assert!(window.start().get().is_multiple_of(1 << order) || window.start() == area.start());
        let expected = by_entries(fault, start, end, 1 << order);
        prop_assert_eq!((window.start().get(), window.end().get() - 1), expected);
    }

    #[test]
    fn whatever_was_seen_a_plan_is_a_window_of_the_area(
        (start, end, _, order) in cases(),
        faults in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), 0_u64..40), 1..60),
        advice in prop::sample::select(vec![Advice::Normal, Advice::Random, Advice::Sequential, Advice::Auto]),
        most in 0_u32..=9,
    ) {
        let area = range(start, end);
        let len = usize::try_from(end - start).unwrap();
        let mut pattern = FaultPattern::new(area, advice, sized(order), sized(most));
        let mut next = Pfn::new(start);
        for (index, is_write, used) in faults {
            // Half of the faults go on where the last window ended.
            let at = if used % 2 == 0 && area.contains(next) { next } else {
                Pfn::new(start + index.index(len) as u64)
            };
            let touch = if is_write { Touch::Write } else { Touch::Read };
            let plan = pattern.plan(at, touch, area, PageSize::KIB_4).unwrap();
            prop_assert!(plan.window.contains(at));
            prop_assert!(area.contains_range(plan.window));
            prop_assert!(!(is_write || advice == Advice::Random) || plan.window.pages().get() == 1);
            prop_assert!(advice != Advice::Normal || plan.window.pages() <= sized(order).pages(PageSize::KIB_4));
            prop_assert!(!is_write || !plan.follows);
            if let Some(ahead) = plan.ahead {
                prop_assert!(plan.follows && matches!(advice, Advice::Sequential | Advice::Auto));
                prop_assert!(ahead.start() == plan.window.end() && area.contains_range(ahead));
                prop_assert!(ahead.pages().get() <= 512);
            }
            next = plan.window.end();
            // Some of what comes next is put in place.
            if let Some(ahead) = plan.ahead
                && let Ok(part) = PfnRange::try_new(next, PageCount::new(1 + used % ahead.pages().get()))
            {
                pattern.went_ahead(part);
                next = part.end();
            }
            pattern.measured(PageCount::new(40), PageCount::new(used));
            prop_assert!(pattern.size() <= sized(order));
        }
    }
}

/// Touches pages at random for some seconds, of which `in_window` of each window of 16 are used.
fn touch_scattered(pattern: &mut FaultPattern, area: PfnRange, in_window: u64) {
    let mut mapped = HashSet::new();
    let mut state = 88_172_645_463_325_252_u64;
    for now_ms in 0..8000 {
        pattern.tick(now_ms);
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let window = state % (area.pages().get() / 16) * 16;
        for at in 0..in_window {
            // Neither in order nor next to each other.
            let fault = Pfn::new(window + (at * 7 + 3) % 16);
            if mapped.contains(&fault) {
                continue;
            }
            let plan = pattern.plan(fault, Touch::Read, area, PageSize::KIB_4).unwrap();
            assert!(plan.window.contains(fault));
            mapped.extend(plan.window.iter());
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "arithmetic, and long")]
fn a_window_shrinks_where_samples_show_that_nobody_wants_its_neighbours() {
    let area = range(0, 1 << 20);
    for (in_window, shrinks) in [(1, true), (12, false)] {
        let mut pattern = FaultPattern::new(area, Advice::Auto, sized(4), FaultAround::MAX);
        touch_scattered(&mut pattern, area, in_window);
        let sampled = pattern.sampled();
        assert!(sampled.around.get() >= 60, "{sampled:?}");
        let is_small = pattern.size() < sized(4);
        assert_eq!(is_small, shrinks, "{in_window} of 16 used: {sampled:?}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "arithmetic, and long")]
fn only_auto_has_samples_and_who_reads_in_order_is_none() {
    let area = range(0, 1 << 20);
    let mut pattern = FaultPattern::new(area, Advice::Normal, sized(4), FaultAround::MAX);
    touch_scattered(&mut pattern, area, 1);
    assert_eq!(pattern.sampled(), Sampled::default());
    assert_eq!(pattern.size(), sized(4));
    let mut pattern = FaultPattern::new(area, Advice::Auto, sized(4), FaultAround::MAX);
    let (mut faults, mut at) = (0, area.start());
    while area.contains(at) {
        at = pattern.plan(at, Touch::Read, area, PageSize::KIB_4).unwrap().window.end();
        faults += 1;
    }
    pattern.tick(10_000);
    assert_eq!(pattern.sampled(), Sampled::default());
    assert!(faults < 1 << 12);
}

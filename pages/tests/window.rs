//! Random faults, areas and sizes: what holds for every window, and the formula that Linux uses as
//! the oracle.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use proptest::prelude::*;
use uzone_pages::{
    Advice, ByteLen, FaultArea, FaultAround, FaultCosts, FaultPlanner, PageCount, PageSize, Pfn,
    PfnRange, Touch,
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
        address in 0_u64..1 << 40,
        (fault_ns, page_ns, is_parallel) in any::<(u32, u32, bool)>(),
    ) {
        let costs = FaultCosts { fault_ns, page_ns };
        let area = range(start, end);
        let len = usize::try_from(end - start).unwrap();
        let areas = [FaultArea { pages: area, address }];
        let page = PageSize::KIB_4;
        let planner = FaultPlanner::new(&areas, page, advice, sized(order), sized(most), costs);
        let mut next = Pfn::new(start);
        for (index, is_write, used) in faults {
            // Half of the faults go on where the last window ended.
            let at = if used % 2 == 0 && area.contains(next) { next } else {
                Pfn::new(start + index.index(len) as u64)
            };
            let touch = if is_write { Touch::Write } else { Touch::Read };
            let plan = planner.plan(at, touch, is_parallel).unwrap();
            prop_assert!(plan.window.contains(at));
            prop_assert!(area.contains_range(plan.window));
            // The kernel's window, by addresses.
            let moved = at.get() - start + address;
            let size = plan.window.pages().get().next_power_of_two();
            if !plan.follows && advice == Advice::Normal && !is_write {
                let (first, last) = by_entries(moved, address, address + (end - start), 1 << order);
                prop_assert_eq!(plan.window.start().get() - start + address, first);
                prop_assert_eq!(plan.window.end().get() - start + address, last + 1);
            }
            prop_assert!(size <= 512);
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
                planner.went_ahead(part);
                next = part.end();
            }
            if used == 13 {
                planner.gave_back(plan.window);
            }
            prop_assert!(planner.size() <= sized(order));
        }
    }
}

/// The blocks that are touched.
const BLOCKS: u64 = 64;

/// Touches a share of the pages of some blocks in random order. Returns what that costs in
/// nanoseconds, with windows of one size or with those of [`Advice::Auto`].
fn touch_at_random(permille: u64, fixed: Option<u32>, costs: FaultCosts) -> u64 {
    let area = range(0, BLOCKS * 512);
    let mut order: Vec<u64> = (0..area.pages().get()).collect();
    let mut state = 88_172_645_463_325_252_u64;
    for at in (1..order.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        order.swap(at, usize::try_from(state % (at as u64 + 1)).unwrap());
    }
    let mut mapped = vec![false; order.len()];
    let areas = [FaultArea { pages: area, address: 0 }];
    let (size, most) = (sized(4), FaultAround::MAX);
    let planner = FaultPlanner::new(&areas, PageSize::KIB_4, Advice::Auto, size, most, costs);
    let mut spent = 0;
    let touches = usize::try_from(area.pages().get() * permille / 1000).unwrap();
    for &fault in &order[..touches] {
        if mapped[usize::try_from(fault).unwrap()] {
            continue;
        }
        let fault = Pfn::new(fault);
        let window = match fixed {
            Some(order) => sized(order).window(fault, area, PageSize::KIB_4).unwrap(),
            None => planner.plan(fault, Touch::Read, false).unwrap().window,
        };
        let mut new = 0;
        for page in window.iter() {
            let was = &mut mapped[usize::try_from(page.get()).unwrap()];
            new += u64::from(!std::mem::replace(was, true));
        }
        spent += u64::from(costs.fault_ns) + (new - 1) * u64::from(costs.page_ns);
    }
    spent
}

#[test]
#[cfg_attr(miri, ignore = "arithmetic, and long")]
fn windows_that_are_found_out_cost_little_more_than_the_best_of_one_size() {
    for (fault_ns, page_ns) in [
        (5_200, 1_400),
        (25_000, 1_350),
        (5_200, 90),
        (30_000, 90),
        (3_300, 600),
        (3_750, 1_560),
        (2_500, 125),
    ] {
        let costs = FaultCosts { fault_ns, page_ns };
        for permille in [2, 5, 10, 20, 50, 100, 150, 180, 200, 300, 500, 1000] {
            let best = (0..=9).map(|order| touch_at_random(permille, Some(order), costs)).min();
            let best = best.unwrap();
            let found_out = touch_at_random(permille, None, costs);
            assert!(
                found_out * 100 <= best * 170,
                "{permille} of 1000 pages at {costs:?}: {found_out} ns, and {best} ns at best"
            );
        }
    }
}

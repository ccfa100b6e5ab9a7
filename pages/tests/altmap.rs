//! Altmaps and placements agree with an owner who keeps a list of pages and tries every start.
#![cfg(not(loom))]

use proptest::prelude::*;
use proptest::sample::select;
use uzone_pages::{
    Altmap, ByteLen, LayoutError, Order, PageCount, PageSize, Pfn, PfnRange, Placement,
    PlacementSpec, Tails,
};

#[derive(Clone, Debug)]
enum Step {
    Take { pages: u64, bytes: u64 },
    Blocks { pages: u64, count: u64 },
    GiveBack { pages: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..80_u64, prop_oneof![9 => Just(0), 1 => 1..4096_u64])
            .prop_map(|(pages, bytes)| Step::Take { pages, bytes }),
        2 => (1..20_u64, 1..9_u64).prop_map(|(pages, count)| Step::Blocks { pages, count }),
        1 => (0..60_u64).prop_map(|pages| Step::GiveBack { pages }),
    ]
}

/// An altmap as somebody would keep it who writes down what became of every page.
struct Plain {
    /// The first page that was never handed out nor skipped, as long as nothing is given back.
    next: u64,
    end: u64,
    taken: u64,
    skipped: u64,
}

impl Plain {
    fn take(&mut self, pages: u64) -> Option<u64> {
        let mut multiple = 1;
        while pages.is_multiple_of(multiple * 2) {
            multiple *= 2;
        }
        let mut start = self.next;
        while !start.is_multiple_of(multiple) {
            start += 1;
        }
        if start + pages > self.end {
            return None;
        }
        self.skipped += start - self.next;
        self.taken += pages;
        self.next = start + pages;
        Some(start)
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 5 } else { 2000 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn an_altmap_hands_out_what_a_list_of_pages_would(
        base in 0..5000_u64,
        reserve in 0..40_u64,
        free in 0..600_u64,
        steps in prop::collection::vec(step(), 0..30),
    ) {
        let mut altmap =
            Altmap::try_new(Pfn::new(base), PageCount::new(reserve), PageCount::new(free)).unwrap();
        let mut plain = Plain { next: base + reserve, end: base + reserve + free, taken: 0, skipped: 0 };
        for step in steps {
            let before = altmap;
            match step {
                Step::Take { pages, bytes } => {
                    let len = ByteLen::new(pages * 4096 + bytes);
                    let found = altmap.take(len, PageSize::KIB_4);
                    if bytes != 0 || pages == 0 {
                        let is_refused = matches!(found, Err(LayoutError::NotWholePages { .. }));
                        prop_assert!(is_refused);
                        prop_assert_eq!(altmap, before);
                        continue;
                    }
                    let expected = plain.take(pages);
                    prop_assert_eq!(found.ok().map(|range| range.start().get()), expected);
                    if let Ok(range) = found {
                        prop_assert_eq!(range.pages().get(), pages);
                        prop_assert!(range.start().get() >= base + reserve, "the reserve is not room");
                        prop_assert!(range.end().get() <= base + reserve + free);
                    } else {
                        prop_assert_eq!(altmap, before);
                    }
                }
                Step::Blocks { pages, count } => {
                    let found = altmap.take_blocks(PageCount::new(pages), count);
                    let mut one_by_one = before;
                    let all: Option<Vec<_>> = (0..count)
                        .map(|_| one_by_one.take(ByteLen::new(pages * 4096), PageSize::KIB_4).ok())
                        .collect();
                    match (found, all) {
                        (Ok(range), Some(parts)) => {
                            prop_assert_eq!(range.start(), parts[0].start());
                            prop_assert_eq!(range.end(), parts[parts.len() - 1].end());
                            prop_assert_eq!(altmap, one_by_one);
                            for _ in 0..count {
                                plain.take(pages);
                            }
                        }
                        (Err(_), None) => prop_assert_eq!(altmap, before),
                        (found, all) => prop_assert!(false, "{:?} and {:?}", found, all),
                    }
                }
                Step::GiveBack { pages } => {
                    let found = altmap.give_back(PageCount::new(pages));
                    prop_assert_eq!(found.is_ok(), pages <= plain.taken);
                    if found.is_ok() {
                        plain.taken -= pages;
                        plain.next -= pages;
                    }
                }
            }
            prop_assert_eq!(altmap.alloc().get(), plain.taken);
            prop_assert_eq!(altmap.align().get(), plain.skipped);
            prop_assert_eq!(altmap.next().get(), plain.next);
            prop_assert_eq!(altmap.left().get(), free - plain.taken - plain.skipped);
        }
    }

    #[test]
    fn a_placement_is_the_lowest_that_holds_every_descriptor(
        start in prop_oneof![Just(1 << 20), 0..200_u64],
        pages in 1..3000_u64,
        order in 0..8_u8,
        backing in prop_oneof![3 => Just(0), 1 => 0..8_u8],
        align in prop_oneof![2 => Just(0), 1 => 0..10_u8],
        reserve in prop_oneof![2 => Just(0), 1 => 0..70_u64],
        stored in any::<bool>(),
        descriptor_bytes in select(vec![8, 16, 56, 64, 96, 128, 4104]),
    ) {
        // Ends where a folio does, starts and reserves where a page of the backing does.
        let start = start >> backing << backing;
        let reserve = reserve >> backing << backing;
        let end = (start + pages).next_multiple_of(1 << order);
        let spec = PlacementSpec {
            align: Order::new(align),
            range: PfnRange::try_new(Pfn::new(start), PageCount::new(end - start)).unwrap(),
            reserve: PageCount::new(reserve),
            backing: Order::new(backing),
            block: Order::new(4),
            page: PageSize::KIB_4,
            order: Order::new(order),
            tails: if stored { Tails::Stored } else { Tails::Derived },
            descriptor_bytes,
        };
        // Every start from the first page behind the reserve on, every place for the descriptors.
        let expected = (start + reserve + 1..end).find_map(|data| {
            if data % (1 << order) != 0 || data % (1 << align) != 0 || data % (1 << backing) != 0 || end - data < 1 << backing {
                return None;
            }
            let descriptors = if stored { end - data } else { (end - data) >> order };
            let needed = (descriptors * descriptor_bytes).div_ceil(4096).next_multiple_of(1 << backing);
            let multiple = if needed >= 16.max(1 << backing) { 16.max(1 << backing) } else { 1 << backing };
            let first = (start + reserve).next_multiple_of(multiple);
            (first + needed <= data).then_some((first, needed, data))
        });
        match (Placement::try_new(&spec), expected) {
            (Ok(placement), Some((first, needed, data))) => {
                prop_assert_eq!(placement.descriptors().start().get(), first);
                prop_assert_eq!(placement.descriptors().pages().get(), needed);
                prop_assert_eq!(placement.layout().range().start().get(), data);
                prop_assert_eq!(placement.layout().range().end().get(), end);
                prop_assert_eq!(placement.altmap().offset().get(), data - start);
                prop_assert_eq!(placement.lost().get(), data - start - reserve - needed);
            }
            (Err(LayoutError::NoFolioLeft { .. }), None) => {}
            (found, expected) => prop_assert!(false, "{:?}, not {:?}", found, expected),
        }
    }
}

//! Placements agree with an owner who tries every start.
#![cfg(not(loom))]

use proptest::prelude::*;
use proptest::sample::select;
use uzone_pages::{
    AddrError, Order, PageCount, PageSize, Pfn, PfnRange, Placement, PlacementSpec, Tails,
};

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 5 } else { 2000 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

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
                prop_assert_eq!(placement.reserve().get(), reserve);
                prop_assert_eq!(placement.data_at().get(), data - start);
                prop_assert_eq!(placement.lost().get(), data - start - reserve - needed);
            }
            (Err(AddrError::NoFolioLeft { .. }), None) => {}
            (found, expected) => prop_assert!(false, "{:?}, not {:?}", found, expected),
        }
    }
}

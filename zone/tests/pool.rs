//! Descriptors in pages of a hugetlb pool. Alone in its binary: another bind while the pool is
//! raised takes pages of it.
//! Needs: root, and 32 MiB that can be had in huge pages.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use common::{anonymous, linux, needs::Pool};
use uzone_os::{Mapping, SystemRoot, hugepages};
use uzone_pages::{ByteLen, PageSize};
use uzone_zone::{MemmapPages, Zone};

/// Reserves the pages of the pool that the host has beside `left`, and touches none of them.
fn reserve_all_but(left: u64) -> Option<Mapping> {
    let pool = hugepages::pool(&SystemRoot::host(), PageSize::MIB_2).unwrap().unwrap();
    let available = pool.free - pool.reserved + pool.overcommit.saturating_sub(pool.surplus);
    let others = available.checked_sub(left).filter(|others| *others > 0)?;
    Some(Mapping::hugetlb(ByteLen::mib(2 * others), PageSize::MIB_2).unwrap())
}

#[test]
fn descriptors_lie_in_the_hugetlb_pool_where_it_has_room_and_may() {
    let name = "descriptors_lie_in_the_hugetlb_pool";
    let Some(_pool) = Pool::grow(name, PageSize::MIB_2, 16) else { return };
    let _rest = reserve_all_but(16);
    let pool = MemmapPages::Hugetlb(PageSize::MIB_2);
    let zone = Zone::with_keep_limit(ByteLen::mib(64));
    for is_kept in [false, true] {
        let pagemap = zone.bind(anonymous(1 << 30), linux()).unwrap();
        assert_eq!((pagemap.report().memmap_pages, pagemap.report().is_kept), (pool, is_kept));
        let fresh = pagemap.fresh_payload(pagemap.range().start()).unwrap();
        assert!(pagemap.pages().all(|page| page.payload() == Some(&fresh)));
        assert_eq!(pagemap.metadata_resident().unwrap(), ByteLen::mib(16));
    }
    let without = zone.bind(anonymous(1 << 30), linux().uses_hugetlb_pool(false)).unwrap();
    assert_ne!(without.report().memmap_pages, pool);
    drop(without);
    zone.trim();
    let too_large = zone.bind(anonymous(4 << 30), linux()).unwrap();
    assert_ne!(too_large.report().memmap_pages, pool, "16 pages are too few for 64 MiB");
}

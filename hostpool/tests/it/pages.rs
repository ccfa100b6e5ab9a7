//! The pages of a pool: their nodes, and pages of the host's hugetlb pool.

use std::collections::BTreeMap;
use std::time::Duration;

use uzone_hostpool::{
    AttachedPool, Budget, HostPool, HostPoolError, HostPoolOptions, Pages, Place,
};
use uzone_os::{Addr, SystemRoot, numa};
use uzone_pages::{ByteLen, PageSize};

use crate::needs::{Pool, skip_dax};

const LONG: Duration = Duration::from_secs(60);
const LEN: ByteLen = ByteLen::mib(32);

/// Returns how many pages of the mapping at an address lie on each node, and the policy that it has.
fn nodes_of(start: Addr) -> (String, BTreeMap<u32, u64>) {
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
    let start = format!("{:08x} ", start.get());
    let line = maps.lines().find_map(|line| line.strip_prefix(&start)).expect("a mapping");
    let pages = line.split(' ').filter_map(|word| {
        let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
        Some((node.parse().unwrap(), pages.parse().unwrap()))
    });
    (line.split(' ').next().unwrap().to_owned(), pages.collect())
}

#[test]
fn a_pool_lies_on_its_node_or_on_all_nodes_in_turn() {
    let name = "a_pool_lies_on_its_node_or_on_all_nodes_in_turn";
    let nodes = numa::nodes(&SystemRoot::host()).unwrap_or_default();
    let numbers: Vec<u32> =
        nodes.iter().filter(|node| node.free > ByteLen::mib(64)).map(|node| node.number).collect();
    if numbers.len() < 2 {
        return skip_dax(name, "there is no second node with memory");
    }
    let options = HostPoolOptions::default().pages(Pages::Small).budget(Budget::Eager);
    for shared in [false, true] {
        let options = || if shared { options.clone().shared() } else { options.clone() };
        let pages = LEN.get() / uzone_os::probe::page_size().bytes();
        for &number in &numbers {
            let pool = HostPool::open(LEN, options().place(Place::Node(number))).unwrap();
            let (policy, found) = nodes_of(pool.addr());
            assert_eq!(policy, format!("prefer:{number}"));
            assert_eq!(found, BTreeMap::from([(number, pages)]), "node {number}");
            assert_eq!(pool.report().node, Some(number));
            println!("{LEN} on node {number}, {policy}");
        }
        let pool = HostPool::open(LEN, options().place(Place::Interleaved)).unwrap();
        let (policy, found) = nodes_of(pool.addr());
        assert!(policy.starts_with("interleave:"), "{policy}");
        let (least, most) = (found.values().min().unwrap(), found.values().max().unwrap());
        assert!(found.len() == numbers.len() && most - least <= pages / 8, "{found:?}");
        println!("{LEN} on all nodes, {policy}: {found:?}");
    }
}

#[test]
fn a_node_that_is_not_there_is_refused() {
    let options = HostPoolOptions::default().place(Place::Node(1022));
    let error = HostPool::open(LEN, options).unwrap_err();
    assert!(matches!(error, HostPoolError::Place { .. }), "{error}");
}

#[test]
fn pages_of_the_hugetlb_pool_are_taken_and_given_back() {
    let name = "pages_of_the_hugetlb_pool_are_taken_and_given_back";
    let size = PageSize::try_from_bytes(2 << 20).unwrap();
    let Some(_host) = Pool::grow(name, size, 16) else { return };
    let free = || uzone_os::hugepages::pool(&SystemRoot::host(), size).unwrap().unwrap().free;
    let before = free();
    let options = || HostPoolOptions::default().pages(Pages::Hugetlb(size)).budget(Budget::Eager);
    let pool = HostPool::open(LEN, options()).unwrap();
    let report = pool.report();
    assert_eq!((report.huge, report.small), (Some(LEN), Some(ByteLen::ZERO)), "{report}");
    assert_eq!(free(), before - 16);
    let refused = HostPool::open(ByteLen::tib(1), options()).unwrap_err();
    assert!(matches!(refused, HostPoolError::Map(_)), "{refused}");
    drop(pool);
    assert_eq!(free(), before);

    let pool = HostPool::open(LEN, options().shared()).unwrap();
    let block = pool.take(LONG).unwrap();
    block.write_at(0, b"huge").unwrap();
    let view =
        AttachedPool::open(&pool.shared_name().unwrap(), HostPoolOptions::default()).unwrap();
    assert_eq!(view.wait_ready(LEN, LONG).unwrap(), LEN);
    let mut bytes = [0; 4];
    view.read_at(block.number() as u64 * (2 << 20), &mut bytes).unwrap();
    assert_eq!((&bytes, free()), (b"huge", before - 16));
    drop((view, block, pool));
    assert_eq!(free(), before);
}

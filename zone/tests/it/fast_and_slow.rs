//! The fast path writes, bit for bit, what the slow path writes: for every kind of memory, folio
//! size, descriptor size and store, with and without fields that depend on the pfn. Random payloads, among them such as
//! follow no rule, are in `shapes.rs`.

use std::num::NonZeroUsize;

use crate::common::assert_fresh;
use uzone_pages::{ByteLen, LinuxPage, LinuxSeed, MemoryKind, Order, PageCount, Payload, Tails};
use uzone_stream::Path as StorePath;
use uzone_zone::{AltmapOptions, BindOptions, Init, Region, Zone};
use zerocopy::Immutable;

fn options<P: Payload>(kind: MemoryKind, seed: P::Seed) -> BindOptions<P> {
    BindOptions::with_payload(kind, seed).init(Init::Eager)
}

fn linux_seed(is_refreshed: bool) -> LinuxSeed {
    LinuxSeed {
        pagemap_address: 0xffff_8881_0abc_d000,
        section: is_refreshed,
        virtual_base: is_refreshed.then_some(0xffff_8880_0000_0000),
        ..LinuxSeed::default()
    }
}

/// Binds twice, so that fresh and kept memory are both written, and checks every descriptor.
fn check<P: Payload + Immutable>(zone: &Zone, pages: u64, options: &BindOptions<P>, case: &str) {
    let mut region = Region::anonymous(ByteLen::new(pages * 4096)).expect("reserved memory");
    for round in 0..2 {
        let pagemap = zone.bind(region, options.clone()).expect("a bind");
        assert_fresh(&pagemap, &format!("{case}, round {round}"));
        region = pagemap.unbind().expect("no page is held");
    }
}

/// Binds with the descriptors in the region itself, over old bytes and over memory that was never
/// touched, and checks every descriptor. `pages` of folios of `order` and one more leave room.
fn check_altmap<P: Payload + Immutable>(
    zone: &Zone,
    pages: u64,
    order: Order,
    options: &BindOptions<P>,
    case: &str,
) {
    let pages = pages + order.pages().get();
    for is_dirty in [false, true] {
        let region = Region::anonymous(ByteLen::new(pages * 4096)).expect("reserved memory");
        if is_dirty {
            for offset in 0..4 {
                region.write_at(offset << 20, &[0xff; 1 << 20]).expect("writable memory");
            }
        }
        let altmap = AltmapOptions::new().reserve(PageCount::new(3));
        let pagemap = zone.bind(region, options.clone().altmap(altmap)).expect("a bind");
        assert_fresh(&pagemap, &format!("{case}, altmap, dirty: {is_dirty}"));
    }
}

fn available_stamps() -> Vec<Option<StorePath>> {
    let mut stamps = vec![None];
    for path in StorePath::ALL {
        if path.is_available() {
            stamps.push(Some(path));
        } else {
            eprintln!("skipped: {path}: this CPU does not offer it");
        }
    }
    stamps
}

fn every_size<const WORDS: usize>() {
    let zone = Zone::with_keep_limit(ByteLen::gib(1));
    for order in [Order::BASE, Order::PMD, Order::PUD] {
        for kind in MemoryKind::ALL {
            for is_refreshed in [false, true] {
                let options = options::<LinuxPage<WORDS>>(kind, linux_seed(is_refreshed))
                    .order(order)
                    .tails(Tails::Stored);
                // More than two sections of 2^15 pages, or one folio where that is more.
                let pages = order.pages().get().max((1 << 16) + 1024);
                let case =
                    format!("{} bytes, order {order}, {kind}, {is_refreshed}", WORDS * 8 + 8);
                check(&zone, pages, &options, &case);
                if kind == MemoryKind::Generic {
                    check_altmap(&zone, pages, order, &options, &case);
                }
            }
        }
    }
}

#[test]
fn descriptors_of_56_to_96_bytes_are_those_of_the_slow_path() {
    std::thread::scope(|scope| {
        scope.spawn(every_size::<6>);
        scope.spawn(every_size::<7>);
        scope.spawn(every_size::<8>);
        scope.spawn(every_size::<9>);
        scope.spawn(every_size::<10>);
        scope.spawn(every_size::<11>);
    });
}

#[test]
fn every_store_writes_what_the_slow_path_writes() {
    let zone = Zone::with_keep_limit(ByteLen::gib(1));
    for stamp in available_stamps() {
        for threads in [1, 3] {
            for order in [Order::BASE, Order::new(1), Order::new(2), Order::PMD] {
                let options = options::<LinuxPage<8>>(MemoryKind::Generic, linux_seed(true))
                    .order(order)
                    .tails(Tails::Stored)
                    .threads(NonZeroUsize::new(threads).unwrap())
                    .stamp(stamp);
                let case = format!("{stamp:?}, order {order}, {threads}");
                check(&zone, 3 << 15, &options, &case);
                check_altmap(&zone, 3 << 15, order, &options, &case);
            }
        }
    }
}

#[test]
fn heads_with_derived_tails_are_those_of_the_slow_path() {
    let zone = Zone::with_keep_limit(ByteLen::gib(1));
    for order in [Order::new(1), Order::PMD, Order::PUD] {
        for is_refreshed in [false, true] {
            let options =
                options::<LinuxPage<9>>(MemoryKind::FsDax, linux_seed(is_refreshed)).order(order);
            let case = format!("derived, order {order}, {is_refreshed}");
            check(&zone, 1 << 19, &options, &case);
            check_altmap(&zone, 1 << 19, order, &options, &case);
        }
    }
}

/// Memory that a memmap of one shape left behind serves one of any other shape: nothing of the old
/// one shows through (the defect of CVE-2026-72172 was tails without initialisation).
#[test]
fn kept_memory_of_another_shape_leaves_nothing_behind() {
    let zone = Zone::with_keep_limit(ByteLen::gib(1));
    let shapes = [
        (Order::BASE, Tails::Derived),
        (Order::PMD, Tails::Stored),
        (Order::PMD, Tails::Derived),
        (Order::new(4), Tails::Stored),
        (Order::BASE, Tails::Stored),
    ];
    for before in shapes {
        for after in shapes {
            for (order, tails) in [before, after] {
                let seed = linux_seed(true);
                let options =
                    options::<LinuxPage<8>>(MemoryKind::Generic, seed).order(order).tails(tails);
                check(&zone, 1 << 15, &options, &format!("{before:?} then {after:?}"));
            }
        }
    }
}

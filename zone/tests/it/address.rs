//! Pins and references by address, across the regions of a zone, and as 64 bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{neighbours, range};
use uzone_pages::{ByteLen, HoldError, LinuxPage, LinuxSeed, MemoryKind, Order, Pfn};
use uzone_zone::{BindOptions, Pagemap, PinError, PinOptions, RawGuard, Redeemed, Region, Zone};

const MIB: u64 = 1 << 20;

fn bind(zone: &Zone, len: u64, base: u64, order: u8) -> Pagemap {
    bind_at(zone, Region::anonymous(ByteLen::new(len)).unwrap(), base, order)
}

fn bind_at(zone: &Zone, region: Region, base: u64, order: u8) -> Pagemap {
    let options =
        BindOptions::new(MemoryKind::Generic).base(Pfn::new(base)).order(Order::new(order));
    zone.bind(region, options).unwrap()
}

fn address(pagemap: &Pagemap, offset: u64) -> usize {
    pagemap.region().addr().get() + usize::try_from(offset).unwrap()
}

#[test]
fn a_range_of_addresses_pins_every_page_that_it_touches_and_no_other() {
    let zone = Zone::new();
    let pagemap = bind(&zone, MIB, 0x1000, 0);
    for (offset, len, first, pages) in [
        (0, 1, 0, 1),
        (4095, 1, 0, 1),
        (4095, 2, 0, 2),
        (4096, 4096, 1, 1),
        (5000, MIB - 5000, 1, 255),
    ] {
        let pinned = zone.pin(address(&pagemap, offset), ByteLen::new(len)).unwrap();
        let pinned = pinned.into_single().unwrap();
        assert_eq!(pinned.range(), range(0x1000 + first, pages), "{offset} {len}");
        let segment = pinned.segments().next().unwrap();
        assert_eq!(segment.address, address(&pagemap, first * 4096));
        let held = pagemap.pages().filter(|page| page.word().pins() == 1).count() as u64;
        assert_eq!(held, pages);
        drop(pinned);
        assert!(pagemap.pages().all(|page| page.word().pins() == 0));
    }
}

#[test]
fn addresses_that_no_region_has_are_named() {
    let zone = Zone::new();
    let pagemap = bind(&zone, MIB, 0x1000, 0);
    let end = address(&pagemap, MIB);
    let one = ByteLen::new(1);
    // What lies behind the region belongs to no region: a guard page of the process, or another mapping.
    assert_eq!(
        zone.pin(end - 1, ByteLen::new(2)).unwrap_err(),
        PinError::NoAddress { address: end }
    );
    assert_eq!(zone.get(16, one).unwrap_err(), PinError::NoAddress { address: 16 });
    for (start, len) in [(end, 0), (usize::MAX, 2), (address(&pagemap, 0), u64::MAX)] {
        let failure = zone.try_pin(start, ByteLen::new(len)).unwrap_err();
        assert_eq!(failure, PinError::NoRange { address: start, len_bytes: len });
    }
    assert!(pagemap.pages().all(|page| page.word().pins() == 0 && page.word().references() == 1));
    let region = pagemap.unbind().unwrap();
    let gone = region.mapping().addr().get();
    assert_eq!(zone.pin(gone, one).unwrap_err(), PinError::NoAddress { address: gone });
}

#[test]
fn a_range_over_several_regions_is_held_in_each_or_in_none() {
    let zone = Zone::new();
    let regions: Vec<Pagemap> = neighbours(3)
        .into_iter()
        .zip([(0x1000, 0), (0x1100, 3), (0x1200, 0)])
        .map(|(region, (base, order))| bind_at(&zone, region, base, order))
        .collect();
    let (start, len) = (address(&regions[0], 0xf0 * 4096), ByteLen::new(0x120 * 4096));
    let pinned = zone.pin(start, len).unwrap();
    let ranges: Vec<_> = pinned.guards().map(uzone_zone::Pinned::range).collect();
    assert_eq!(ranges, [range(0x10f0, 0x10), range(0x1100, 0x100), range(0x1200, 0x10)]);
    assert_eq!(pinned.segments().count(), 3);
    let pinned = pinned.into_single().unwrap_err();
    let pages: u64 = pinned.guards().map(|guard| guard.range().pages().get()).sum();
    assert_eq!(pages, 0x120);
    drop(pinned);
    // The last region refuses: what the first two gave is given back.
    regions[2].poison(Pfn::new(0x1207)).unwrap();
    assert!(matches!(
        zone.pin(start, len),
        Err(PinError::Poisoned { pfn, .. }) if pfn == Pfn::new(0x1207)
    ));
    for pagemap in &regions {
        assert!(pagemap.pages().all(|page| page.word().pins() == 0));
    }
    let referenced = zone.get(start, len).unwrap();
    assert_eq!(referenced.segments().count(), 3, "references do not care about bytes");
}

#[test]
fn regions_of_every_payload_are_found() {
    let zone = Zone::new();
    let mut regions = neighbours(2);
    let region = regions.pop().unwrap();
    let plain = bind_at(&zone, regions.pop().unwrap(), 0x1000, 0);
    let options = BindOptions::<LinuxPage>::with_payload(MemoryKind::Generic, LinuxSeed::default());
    let linux = zone.bind(region, options.base(Pfn::new(0x1100))).unwrap();
    let pinned = zone.pin(address(&plain, 0), ByteLen::mib(2)).unwrap();
    let guards: Vec<_> = pinned.guards().collect();
    assert!(guards[0].page::<()>(Pfn::new(0x1001)).is_some());
    assert!(guards[0].page::<LinuxPage>(Pfn::new(0x1001)).is_none());
    assert!(guards[1].page::<LinuxPage>(Pfn::new(0x1101)).is_some());
    assert_eq!(guards[1].word(Pfn::new(0x1101)).pins(), 1);
    drop(pinned);
    drop((plain, linux));
}

#[test]
fn memory_whose_owner_takes_pages_away_is_not_pinned_for_long() {
    let zone = Zone::new();
    let region = Region::anonymous(ByteLen::mib(1)).unwrap();
    let options = BindOptions::new(MemoryKind::FsDax);
    let pagemap = zone.bind(region, options).unwrap();
    let first = pagemap.range().start();
    let handed = pagemap.hand_out(first).unwrap();
    let long = PinOptions::default().long_term();
    assert!(matches!(
        pagemap.pin_with(handed.range(), long),
        Err(PinError::NotForLong { what: "a file on a DAX mount" })
    ));
    assert!(pagemap.pin(handed.range()).is_ok());
    let region = Region::anonymous(ByteLen::mib(1)).unwrap();
    let options = BindOptions::new(MemoryKind::Coherent);
    let coherent = zone.bind(region, options).unwrap();
    let failure = coherent.pin_with(coherent.range(), long).unwrap_err();
    assert!(failure.to_string().contains("for the time of one request"), "{failure}");
    let generic = bind(&zone, MIB, 0x9000, 0);
    assert!(zone.pin_with(address(&generic, 0), ByteLen::mib(1), long).is_ok());
}

#[test]
fn a_guard_survives_the_way_through_64_bits_once() {
    let zone = Zone::new();
    let pagemap = bind(&zone, MIB, 0x1000, 0);
    let raw = pagemap.pin(range(0x1010, 3)).unwrap().into_raw().unwrap();
    let reference = pagemap.get(range(0x1020, 1)).unwrap().into_raw().unwrap();
    assert_ne!(raw.to_bits(), 0);
    assert_eq!(pagemap.page(Pfn::new(0x1011)).unwrap().word().pins(), 1);
    let pagemap = *pagemap.unbind().unwrap_err().pagemap;
    let Ok(Redeemed::Pinned(pinned)) = zone.redeem(RawGuard::from_bits(raw.to_bits())) else {
        panic!("it was a pin");
    };
    assert_eq!(pinned.range(), range(0x1010, 3));
    drop(pinned);
    // Redeemed twice, made up, or of another zone: no hold is given back.
    let again = pagemap.pin(range(0x1010, 3)).unwrap().into_raw().unwrap();
    let refused = zone.redeem(raw).unwrap_err();
    assert_eq!(refused, PinError::NotAGuard { bits: raw.to_bits() });
    assert!(Zone::new().redeem(again).is_err());
    for bits in [0, 1, u64::MAX, again.to_bits() ^ 1 << 40, again.to_bits() ^ 1] {
        let is_reference = bits == reference.to_bits();
        assert!(is_reference || zone.redeem(RawGuard::from_bits(bits)).is_err(), "{bits:#x}");
    }
    assert_eq!(pagemap.page(Pfn::new(0x1011)).unwrap().word().pins(), 1);
    assert!(matches!(zone.redeem(again), Ok(Redeemed::Pinned(_))));
    assert!(matches!(zone.redeem(reference), Ok(Redeemed::Referenced(_))));
    assert!(pagemap.unbind().is_ok());
}

#[test]
fn raw_guards_of_many_threads_are_redeemed_by_others() {
    let zone = Zone::new();
    let pagemap = bind(&zone, MIB, 0x1000, 0);
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (sender, pagemap) = (sender.clone(), &pagemap);
            scope.spawn(move || {
                for step in 0..2000 {
                    let pinned =
                        pagemap.pin(range(0x1000 + (thread * 50 + step) % 200, 20)).unwrap();
                    sender.send(pinned.into_raw().unwrap()).unwrap();
                }
            });
        }
        drop(sender);
        let redeemed = receiver.iter().map(|raw| zone.redeem(raw).map(drop));
        assert_eq!(redeemed.filter(Result::is_ok).count(), 8000);
    });
    assert!(pagemap.pages().all(|page| page.word().pins() == 0));
    assert!(pagemap.unbind().is_ok());
}

#[test]
fn a_list_of_frames_names_each_page_in_order() {
    let zone = Zone::new();
    let pagemap = bind(&zone, 64 * MIB, 0x8000, 9);
    let pinned = pagemap.pin(range(0x8005, 12_000)).unwrap();
    let mut list = vec![Pfn::new(0); 12_000];
    assert_eq!(pinned.write_pfns(&mut list), Ok(12_000));
    assert!(pinned.pfns().eq(list.iter().copied()));
    let short = pinned.write_pfns(&mut list[..11_999]).unwrap_err();
    assert_eq!(short, PinError::ListTooShort { needed: 12_000, given: 11_999 });
    assert_eq!(pinned.order(), Order::PMD);
}

/// Threads pin by address while regions come and go: a guard is on a region that is
/// mapped, and bytes written through it are read back; a thread that finds none is refused with the reason.
#[test]
fn lookups_beside_binds_and_unbinds_find_a_live_region_or_none() {
    let zone = Zone::new();
    let stop = Arc::new(AtomicBool::new(false));
    let pins = Arc::new(AtomicU64::new(0));
    let mut pagemap = bind(&zone, MIB, 0x1000, 2);
    let start = address(&pagemap, 0);
    let neighbours: Vec<_> =
        (0..6).map(|at| bind(&zone, MIB, 0x10_0000 + at * 0x1000, 0)).collect();
    let pagemap = std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let (zone, stop, pins) = (&zone, stop.clone(), pins.clone());
            scope.spawn(move || {
                let mut step = thread;
                while !stop.load(Ordering::Relaxed) {
                    step += 1;
                    let at = start + usize::try_from(step * 7919 % (MIB - 9000)).unwrap();
                    match zone.pin(at, ByteLen::new(9000)) {
                        Ok(pinned) => {
                            for guard in pinned.guards() {
                                assert!(guard.word(guard.range().start()).pins() > 0);
                            }
                            pins.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(
                            PinError::NoAddress { .. } | PinError::NotAdmitted(HoldError::Closing),
                        ) => std::thread::yield_now(),
                        Err(other) => panic!("{other}"),
                    }
                }
            });
        }
        let until = Instant::now() + Duration::from_millis(1500);
        let mut rounds = 0;
        while Instant::now() < until || pins.load(Ordering::Relaxed) == 0 {
            let region = loop {
                match pagemap.unbind_by(Instant::now() + Duration::from_millis(50)) {
                    Ok(region) => break region,
                    Err(busy) => pagemap = *busy.pagemap,
                }
            };
            let options = BindOptions::new(MemoryKind::Generic).base(Pfn::new(0x1000));
            pagemap = zone.bind(region, options.order(Order::new(2))).unwrap();
            rounds += 1;
            std::thread::sleep(Duration::from_micros(200));
        }
        stop.store(true, Ordering::Relaxed);
        assert!(rounds > 10);
        pagemap
    });
    assert!(pagemap.pages().all(|page| page.word().pins() == 0));
    assert!(pagemap.unbind().is_ok());
    drop(neighbours);
    assert!(zone.bound().is_empty());
}

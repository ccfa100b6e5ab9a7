//! Real bus errors become bad pages: of a file that was truncated under its mapping.
//!
//! The handler is of the whole process, so this is a program of its own.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use std::sync::{Arc, Mutex};

use common::{Temporary, needs::skip};
use uzone_os::AccessError;
use uzone_os::sigbus::{self, BusKind, HandlerError};
use uzone_pages::{ByteLen, MemoryKind, Order, PageCount, Pfn, PfnRange};
use uzone_zone::{BindOptions, Pagemap, PagemapOps, PinError, Region, Zone};

const BASE: u64 = 0x1000;
const PAGES: u64 = 1024;
const LEN: usize = 1024 * 4096;

fn range(start: u64, pages: u64) -> PfnRange {
    PfnRange::try_new(Pfn::new(BASE + start), PageCount::new(pages)).unwrap()
}

fn bind(zone: &Zone, file: &Temporary, order: u8, ops: PagemapOps) -> Pagemap {
    let region = Region::file(&file.0, 0, ByteLen::new(PAGES * 4096)).unwrap();
    let options = BindOptions::new(MemoryKind::Generic).order(Order::new(order)).ops(ops);
    zone.bind(region, options.base(Pfn::new(BASE))).unwrap()
}

#[test]
fn what_raises_a_bus_error_is_bad_for_everybody_from_then_on() {
    if !sigbus::recovers_copies() {
        return skip("bus errors of a region", "copies of this build do not recover");
    }
    let zone = Zone::new();
    let file = Temporary::new("bus", &[7; LEN]);
    let early = bind(&zone, &file, 0, PagemapOps::default());
    assert!(matches!(early.watch_bus_errors(), Err(HandlerError::NotInstalled)));
    assert_eq!((early.collect_bus_errors(), early.lost_bus_errors()), (0, 0));
    drop(early);
    sigbus::install().unwrap();
    for order in [0, 9] {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let ops = {
            let seen = seen.clone();
            PagemapOps::default().on_poison(move |poisoned| seen.lock().unwrap().push(poisoned.pfn))
        };
        file.truncate(PAGES * 4096);
        let pagemap = bind(&zone, &file, order, ops);
        pagemap.watch_bus_errors().unwrap();
        pagemap.watch_bus_errors().unwrap();
        let before = pagemap.pin(pagemap.range()).unwrap();
        file.truncate(600 * 4096);
        let mut bytes = [0; 64];
        pagemap.region().read_at(599 * 4096, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 64], "what is left of the file is good");
        let error = pagemap.region().read_at(700 * 4096 + 5, &mut bytes).unwrap_err();
        assert!(matches!(error, AccessError::Bus { kind: BusKind::BeyondEnd, .. }), "{error}");
        assert!(pagemap.pin_and_write(1023 * 4096, &[1]).is_err());
        // Known before the next pin is given, and notified.
        let failure = pagemap.pin(range(690, 20)).unwrap_err();
        let PinError::Poisoned { pfn, good } = failure else { panic!("{failure}") };
        assert_eq!((pfn.get() - BASE, good), (700, vec![range(690, 10), range(701, 9)]));
        assert_eq!(*seen.lock().unwrap(), [700, 1023].map(|page| Pfn::new(BASE + page)));
        assert_eq!(before.bad_pages(), [700, 1023].map(|page| Pfn::new(BASE + page)));
        assert!(pagemap.pin(range(0, 600)).is_ok());
        drop(before);
        // On request, one that is not pinned.
        assert!(pagemap.region().read_at(800 * 4096, &mut bytes).is_err());
        assert!(pagemap.is_poisoned(Pfn::new(BASE + 800)));
        assert!(pagemap.region().read_at(801 * 4096, &mut bytes).is_err());
        assert_eq!(pagemap.collect_bus_errors(), 1);
        assert_eq!(pagemap.lost_bus_errors(), 0);
        // And one that is found out only when the region is given back.
        assert!(pagemap.region().read_at(900 * 4096, &mut bytes).is_err());
        let region = pagemap.unbind().unwrap();
        let bad: Vec<u64> = region.bad_pages().iter().map(|page| page.get()).collect();
        assert_eq!(bad, [700, 800, 801, 900, 1023]);
    }
}

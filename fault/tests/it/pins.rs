//! A page that is pinned is there, whichever thread answers faults and whatever is evicted meanwhile; and
//! it stays there until its last guard goes, also when its mapping is dropped.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::common::{
    check_page, engine, file_of, function, is_present, map, mapped, memfd_of, page, scattered,
    scattered_until, skip, usize_of, words_at,
};
use uzone_fault::{
    Answer, Backing, FileBacking, LazyError, LazyMapping, LazyOptions, MapError, MemoryBacking,
    WriteTracking,
};
use uzone_os::{KernelPinError, Sharing};
use uzone_pages::ByteLen;
use uzone_zone::{PinError, PinOptions};

const PAGES: u64 = 256;
/// How many pages are pinned in each case while others are evicted; 3,000 by default.
const PINS: &str = "UZONE_FAULT_TEST_PINS";

/// Returns a backing of each kind, with its name.
fn backings() -> [(&'static str, Arc<dyn Backing>); 4] {
    let len = PAGES * page();
    let memory = |sharing| Arc::new(MemoryBacking::new(memfd_of(len), sharing).unwrap());
    [
        ("function", Arc::new(function())),
        ("file", Arc::new(FileBacking::new(file_of(len)).unwrap())),
        ("memory file", memory(Sharing::Shared)),
        ("private copy", memory(Sharing::Private)),
    ]
}

/// Returns the mappings of each way of answering, with their names.
fn every_way(name: &str) -> Vec<(String, LazyMapping)> {
    let mut ways = Vec::new();
    for answer in [Answer::Reader, Answer::InThread] {
        for tracking in [None, Some(WriteTracking::Sync), Some(WriteTracking::Async)] {
            for (kind, backing) in backings() {
                let way = format!("{kind}, {answer:?}, {tracking:?}");
                let options = LazyOptions::default().answer(answer).track_writes(tracking);
                match engine().map(ByteLen::new(PAGES * page()), backing, &options) {
                    // A closure is not called in a thread that faults, and the kernel may forget which page
                    // of a shared file was written.
                    Err(MapError::Backing { .. }) => {}
                    answer => {
                        let memory = mapped(&format!("{name}: {way}"), answer);
                        ways.extend(memory.map(|memory| (way, memory)));
                    }
                }
            }
        }
    }
    ways
}

#[test]
fn a_pinned_page_is_there_while_its_neighbours_are_evicted() {
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let pins = std::env::var(PINS).map_or(3_000, |pins| pins.parse().unwrap());
    for (way, memory) in every_way("a_pinned_page_is_there") {
        let stop = AtomicBool::new(false);
        let (memory, stop) = (&memory, &stop);
        let absent = thread::scope(|scope| {
            for seed in 1..3 {
                scope.spawn(move || {
                    for at in scattered_until(stop, seed, PAGES / 8) {
                        // Of pages whose writes are only recorded, clean ones cannot be told apart.
                        let _ = memory.evict_all(at * 8 * page()..(at + 1) * 8 * page());
                    }
                });
                scope.spawn(move || {
                    for at in scattered_until(stop, seed + 7, PAGES / 8) {
                        let range = at * 8 * page()..(at + 1) * 8 * page();
                        let _ = memory.populate_cached(range.clone());
                        check_page(memory, range.start);
                        memory.populate(range).unwrap();
                    }
                });
            }
            let mut absent = 0;
            for at in scattered(11, PAGES).take(pins) {
                let pinned = memory.pin(at * page()..(at + 1) * page()).unwrap();
                let address = memory.addr().get() as u64 + at * page();
                absent += u32::from(!is_present(&pagemap, address));
                drop(pinned);
            }
            stop.store(true, Ordering::Relaxed);
            absent
        });
        assert_eq!(absent, 0, "{way}: pages are absent that are pinned, of {pins} pins");
    }
}

#[test]
fn a_pin_that_outlives_its_mapping_has_the_bytes() {
    for (way, memory) in every_way("a_pin_that_outlives_its_mapping") {
        let (first, len) = (7 * page(), 9 * page());
        let pinned = memory.pin(first..first + len).unwrap();
        drop(memory);
        let mut seen = vec![0; usize_of(len)];
        pinned.read_at(0, &mut seen).unwrap();
        assert!(seen == words_at(first, len), "{way}: other bytes");
        pinned.write_at(0, &[0xa5; 16]).unwrap();
        pinned.read_at(0, &mut seen).unwrap();
        assert_eq!(&seen[..16], [0xa5; 16], "{way}");
    }
}

#[test]
fn pages_that_the_kernel_pins_too_are_produced_first_and_stay() {
    let name = "pages_that_the_kernel_pins_too_are_produced_first_and_stay";
    for answer in [Answer::Reader, Answer::InThread] {
        let options = LazyOptions::default().answer(answer);
        let len = PAGES * page();
        let backing = FileBacking::new(file_of(len)).unwrap();
        let Some(memory) = map(name, &engine(), len, backing, &options) else { return };
        let pinned = match memory.pin_with(page()..9 * page(), PinOptions::default().kernel()) {
            Ok(pinned) => pinned,
            Err(LazyError::Hold(PinError::Kernel(error)))
                if matches!(
                    *error,
                    KernelPinError::NoRing { .. } | KernelPinError::Limit { .. }
                ) =>
            {
                return skip(name, &error.to_string());
            }
            Err(error) => panic!("{error:?}"),
        };
        assert_eq!(memory.evict(0..len).unwrap(), 0, "{answer:?}");
        match pinned.physical() {
            Ok(places) => {
                assert_eq!(
                    places.iter().map(|place| place.end - place.start).sum::<u64>(),
                    8 * page()
                );
            }
            // The numbers of frames take a privilege.
            Err(error) => assert!(matches!(error, PinError::Kernel(_)), "{error:?}"),
        }
        let mut seen = vec![0; usize_of(8 * page())];
        pinned.read_at(0, &mut seen).unwrap();
        assert!(seen == words_at(page(), 8 * page()), "{answer:?}: other bytes");
    }
}

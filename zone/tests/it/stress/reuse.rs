//! Threads that map, bind, pin by address and drop memory of their own, for as long as `UZONE_TEST_SECONDS`
//! sets (2 seconds by default). The kernel hands the addresses of dropped memory out again at once, so
//! a region has to be unknown to its zone before its addresses are free.
//!
//! No thread uses memory of another one, so no bind is refused and no pin misses its region.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use uzone_os::uffd::{Features, KernelFaults, Modes, Registered, Uffd};
use uzone_os::{Anonymous, Mapping};
use uzone_pages::{ByteLen, MemoryKind};
use uzone_zone::{AltmapOptions, BindError, BindOptions, PinOptions, Region, Zone};

const PAGES: u64 = 64;

/// What became of the rounds of all threads.
#[derive(Default)]
struct Counts {
    rounds: AtomicU64,
    refused: AtomicU64,
    lost: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// How long the threads run.
fn time() -> Duration {
    let seconds = std::env::var("UZONE_TEST_SECONDS")
        .map_or(2, |secs| secs.parse().expect("UZONE_TEST_SECONDS"));
    Duration::from_secs(seconds)
}

/// Runs three threads that bind what `map` makes, pin it by its address, and drop it.
fn run(map: impl Fn() -> Region + Sync, options: impl Fn() -> BindOptions + Sync) -> Counts {
    let (zone, counts) = (Zone::new(), Counts::default());
    let until = Instant::now() + time();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while Instant::now() < until {
                    count(&counts.rounds);
                    let pagemap = match zone.bind(map(), options()) {
                        Ok(pagemap) => pagemap,
                        Err(refused) if matches!(refused.cause, BindError::SameBytes { .. }) => {
                            count(&counts.refused);
                            continue;
                        }
                        Err(other) => panic!("{other:?}"),
                    };
                    let address = pagemap.region().addr().get();
                    let len = pagemap.region().len();
                    match zone.pin_with(address, len, PinOptions::default()) {
                        Ok(pinned) => drop(pinned),
                        Err(_) => count(&counts.lost),
                    }
                    drop(pagemap);
                }
            });
        }
    });
    counts
}

fn assert_nothing_was_lost(counts: &Counts) {
    let [rounds, refused, lost] =
        [&counts.rounds, &counts.refused, &counts.lost].map(|count| count.load(Ordering::Relaxed));
    println!("{rounds} rounds, {refused} binds refused, {lost} pins lost");
    assert!(rounds > 100, "{rounds} rounds");
    assert_eq!((refused, lost), (0, 0), "of {rounds} rounds");
}

fn options() -> BindOptions {
    BindOptions::new(MemoryKind::Generic)
}

#[test]
fn a_pin_by_address_finds_a_region_that_lies_where_another_was_dropped() {
    let map = || Region::anonymous(ByteLen::new(PAGES * 4096)).unwrap();
    assert_nothing_was_lost(&run(map, options));
}

#[test]
fn a_region_with_its_descriptors_in_it_is_found_where_another_was_dropped() {
    let map = || Region::anonymous(ByteLen::new(PAGES * 4096)).unwrap();
    assert_nothing_was_lost(&run(map, || options().altmap(AltmapOptions::new())));
}

#[test]
fn memory_is_bound_where_adopted_memory_of_another_thread_was_dropped() {
    let uffd = match Uffd::open(Features::NONE, Features::NONE, KernelFaults::IfAllowed) {
        Ok(uffd) => Arc::new(uffd),
        Err(error) => return println!("skipped: no userfaultfd: {error}"),
    };
    let map = || {
        let len = ByteLen::new(PAGES * 4096);
        let mapping = Mapping::anonymous(len, Anonymous::default()).unwrap();
        let registered = Registered::new(uffd.clone(), mapping, Modes::MISSING).unwrap();
        Region::adopt(Mapping::lent(Arc::new(registered))).unwrap()
    };
    assert_nothing_was_lost(&run(map, options));
}

//! Several threads that answer the faults of one mapping: the same bytes, counts, pins, evictions, writes and
//! deadlines as with one.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::{
    PATIENCE, Stalling, anonymous, check_page, engine, file_of, map, page, region_at, registered,
    remote, scattered, scattered_until, settles, userfaultfd, wait_for, word_in,
};
use uzone_fault::{
    Answer, Engine, EngineOptions, FileBacking, LazyMapping, LazyOptions, MapError, Refusal,
    WriteTracking,
};
use uzone_os::sigbus;
use uzone_os::uffd::{Features, KernelFaults};
use uzone_pages::{Advice, ByteLen, Content};

const PAGES: u64 = 4096;
/// For how many seconds the stress test runs: 2 by default.
const STRESS: &str = "UZONE_FAULT_TEST_STRESS_S";

fn options(readers: usize) -> LazyOptions {
    let readers = NonZeroUsize::new(readers).unwrap();
    LazyOptions::default().answer(Answer::Reader).own_reader(Vec::new()).readers(readers)
}

fn len() -> u64 {
    PAGES * page()
}

/// Has eight threads touch all pages, in an order of their own each.
fn touch_all(memory: &LazyMapping) {
    thread::scope(|scope| {
        for seed in 0..8 {
            scope.spawn(move || {
                // An odd step meets each page once.
                for at in 0..PAGES {
                    check_page(memory, (at * (2 * seed + 37) + seed * 509) % PAGES * page());
                }
            });
        }
    });
}

#[test]
fn eight_threads_see_every_byte_and_each_page_is_counted_once() {
    let name = "eight_threads_see_every_byte_and_each_page_is_counted_once";
    let engine = engine();
    let backing = FileBacking::new(file_of(len())).unwrap();
    let backing = Arc::new(backing);
    for readers in [2, 4] {
        for advice in [Advice::Random, Advice::Normal, Advice::Sequential, Advice::Auto] {
            let options = options(readers).advice(advice);
            let Some(memory) = map(name, &engine, len(), common::function(), &options) else {
                return;
            };
            touch_all(&memory);
            settles(&memory, |stats| stats.demand + stats.around >= PAGES);
            drop(memory);
            let memory = engine.map(ByteLen::new(len()), backing.clone(), &options).unwrap();
            touch_all(&memory);
            // Each page is installed once, by whichever reader.
            settles(&memory, |stats| stats.demand + stats.around + stats.queued >= PAGES);
            let stats = memory.stats();
            assert_eq!(stats.demand + stats.around + stats.queued, PAGES, "{readers} {stats:?}");
            assert!(stats.faults >= stats.demand + stats.queued, "{stats:?}");
            let pinned = memory.pin(10 * page()..20 * page()).unwrap();
            wait_for("every word", || {
                (0..PAGES).all(|at| memory.content(at * page()) == Some(Content::Present))
            });
            assert_eq!(memory.evict(0..len()).unwrap(), PAGES - 10);
            drop(pinned);
            touch_all(&memory);
            let latencies: u64 = memory.latencies().iter().map(|latency| latency.count).sum();
            assert!(latencies > 0);
        }
    }
}

#[test]
fn a_mapping_has_no_more_readers_than_are_possible_and_shares_those_of_its_engine() {
    let name = "a_mapping_has_no_more_readers_than_are_possible_and_shares_those_of_its_engine";
    let two = NonZeroUsize::new(2).unwrap();
    let engine = Engine::with(EngineOptions::default().readers(two)).unwrap();
    let shared = options(7).own_reader(None);
    let Some(memory) = map(name, &engine, len(), common::function(), &shared) else { return };
    touch_all(&memory);
    let many = options(LazyOptions::MOST_READERS + 1);
    let backing = Arc::new(common::function());
    let refused = engine.map(ByteLen::new(len()), backing, &many).unwrap_err();
    assert!(matches!(refused, MapError::TooMany { most: LazyOptions::MOST_READERS, .. }));
    // Memory that is answered for as if it were another process's.
    let wanted = Features::EVENT_REMOVE | Features::POISON;
    let uffd = userfaultfd(name, wanted, KernelFaults::IfAllowed).unwrap();
    let memory = registered(&uffd, anonymous(len() / page()));
    let (regions, backing) = (vec![region_at(0, &memory)], Arc::new(common::function()));
    let refused = engine.adopt(remote(&memory), regions, backing, &options(2), None).unwrap_err();
    assert!(refused.to_string().contains("another process's memory is 2"), "{refused}");
}

#[test]
fn a_deadline_of_a_mapping_with_several_readers_is_kept_once() {
    let name = "a_deadline_of_a_mapping_with_several_readers_is_kept_once";
    sigbus::install().unwrap();
    let engine = engine();
    let (backing, gate, _) = Stalling::new(5 * page());
    let failures = Arc::new(Mutex::new(0));
    let noted = failures.clone();
    let options = options(3).advice(Advice::Random).deadline(Duration::from_millis(30));
    let options = options.on_failure(move |_| {
        *noted.lock().unwrap() += 1;
        Refusal::Poison
    });
    let Some(memory) = map(name, &engine, len(), backing, &options) else { return };
    thread::scope(|scope| {
        for seed in 0..4 {
            let memory = &memory;
            scope.spawn(move || {
                memory.read_at(5 * page(), &mut [0; 8]).unwrap_err();
                scattered(seed, PAGES).take(500).filter(|&at| at != 5).for_each(|at| {
                    check_page(memory, at * page());
                });
            });
        }
    });
    assert_eq!((*failures.lock().unwrap(), memory.stats().poisoned), (1, 1));
    assert_eq!(memory.content(5 * page()), Some(Content::Poisoned));
    gate.open();
}

#[test]
fn threads_write_pin_and_evict_under_several_readers_and_nothing_is_lost() {
    let name = "threads_write_pin_and_evict_under_several_readers_and_nothing_is_lost";
    let seconds = std::env::var(STRESS).map_or(2, |seconds| seconds.parse().unwrap());
    let engine = engine();
    let source = common::file_with(&vec![0; usize::try_from(len()).unwrap()]);
    let backing = FileBacking::writable(source.try_clone().unwrap()).unwrap();
    let options = options(2).track_writes(WriteTracking::Sync);
    let Some(memory) = map(name, &engine, len(), backing, &options) else { return };
    let read = FileBacking::new(file_of(len())).unwrap();
    let other = engine.map(ByteLen::new(len()), Arc::new(read), &self::options(4)).unwrap();
    let (memory, other, is_over) = (&memory, &other, &AtomicBool::new(false));
    let end = Instant::now() + Duration::from_secs(seconds);
    let lasts: Vec<Vec<u64>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8_u64)
            .map(|seed| {
                scope.spawn(move || {
                    let mut last = vec![0_u64; usize::try_from(PAGES).unwrap()];
                    for (count, at) in (1_u64..).zip(scattered_until(is_over, seed + 1, PAGES)) {
                        check_page(other, at * page());
                        let range = at * page()..(at + 1) * page();
                        let pinned = (seed % 4 == 0).then(|| memory.pin(range).unwrap());
                        let word = at * page() + 8 * seed;
                        let last = &mut last[usize::try_from(at).unwrap()];
                        assert_eq!(word_in(memory, word), *last, "page {at}");
                        memory.write_at(word, &count.to_ne_bytes()).unwrap();
                        *last = count;
                        drop(pinned);
                    }
                    last
                })
            })
            .collect();
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                other.evict(0..len()).unwrap();
                other.populate(0..64 * page()).unwrap();
                for at in (0..PAGES).step_by(64) {
                    let some = at * page()..(at + 64) * page();
                    memory.write_back(some.clone()).unwrap();
                    memory.evict(some).unwrap();
                }
            }
        });
        let late = end + PATIENCE;
        let is_busy = || memory.stats().evicted > 100 && other.stats().evicted > 100;
        while Instant::now() < end || !is_busy() && Instant::now() < late {
            thread::sleep(Duration::from_millis(10));
        }
        is_over.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for at in 0..PAGES {
        for (seed, last) in (0..).zip(&lasts) {
            let word = word_in(memory, at * page() + 8 * seed);
            assert_eq!(word, last[usize::try_from(at).unwrap()], "page {at}");
        }
    }
    let (seen, read) = (memory.stats(), other.stats());
    eprintln!("{} and {} faults, {} evicted", seen.faults, read.faults, seen.evicted);
    assert!(seen.evicted > 100 && read.evicted > 100, "{seen:?} {read:?}");
}

//! Clearing, copying and handing out memory of which a part is not there: a file that was truncated.
//!
//! The handler is of the whole process, so this is a program of its own.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use common::{Temporary, bytes_in, needs::skip, range};
use uzone_os::AccessError;
use uzone_os::sigbus;
use uzone_pages::{ByteLen, Content, MemoryKind, Order, Pfn, PfnRange};
use uzone_zone::{
    BindOptions, Cleared, Pagemap, PagemapOps, Pool, PoolError, PoolOptions, Pooled, Region,
    Unclearable, WriteError, ZeroOptions, Zone,
};

const PAGES: u64 = 256;
const PAGE: u64 = 4096;

/// Binds a file that ends after `pages` of its pages.
fn truncated(file: &Temporary, order: u8, pages: u64) -> Pagemap {
    file.truncate(0);
    file.truncate(PAGES * PAGE);
    let region = Region::file(&file.0, 0, ByteLen::new(PAGES * PAGE)).unwrap();
    region.write_at(0, &vec![7; usize::try_from(PAGES * PAGE).unwrap()]).unwrap();
    file.truncate(pages * PAGE);
    let options = BindOptions::new(MemoryKind::Generic).order(Order::new(order)).base(Pfn::new(0));
    Zone::new().bind(region, options).unwrap()
}

fn recovers(name: &str) -> bool {
    if sigbus::recovers_copies() {
        sigbus::install().unwrap();
        return true;
    }
    skip(name, "copies of this build do not recover");
    false
}

#[test]
fn folios_whose_memory_is_not_there_are_left_with_the_reason_and_all_others_are_zero() {
    if !recovers("folios_whose_memory_is_not_there") {
        return;
    }
    let file = Temporary::sparse("bus-zero", PAGES * PAGE);
    for watches in [false, true] {
        for order in [0, 2] {
            {
                let pagemap = truncated(&file, order, 202);
                if watches {
                    pagemap.watch_bus_errors().unwrap();
                }
                let folio = 1 << order;
                for threads in [1, 2] {
                    let threads = NonZeroUsize::new(threads).unwrap();
                    let options = ZeroOptions::default().threads(threads);
                    // The end of the file is in the middle of a folio, where folios have several pages.
                    let zeroed = pagemap.zero(pagemap.range(), &options).unwrap();
                    let good = 202 / folio * folio;
                    let lost = PAGES - good;
                    assert!(!zeroed.is_whole());
                    let cleared = zeroed.done_bytes().get() + zeroed.known.get();
                    assert_eq!(cleared, good * PAGE, "{zeroed}");
                    let is_first = zeroed.known.is_zero();
                    let mut left = 0;
                    for (range, cause) in &zeroed.left {
                        assert!(range.start >= good * PAGE);
                        left += range.end - range.start;
                        match cause {
                            Unclearable::Lost(AccessError::Bus { offset, .. }) => {
                                assert!(*offset >= 202 * PAGE);
                            }
                            Unclearable::Poisoned if watches && !is_first => {}
                            _ => panic!("{cause}"),
                        }
                    }
                    assert_eq!(left, lost * PAGE, "{zeroed}");
                    let mut bytes = vec![1; usize::try_from(good * PAGE).unwrap()];
                    pagemap.region().read_at(0, &mut bytes).unwrap();
                    assert!(bytes.iter().all(|byte| *byte == 0));
                    let contents = |pages: PfnRange| {
                        pages
                            .iter()
                            .step_by(1 << order)
                            .map(|pfn| pagemap.page(pfn).unwrap().word().content())
                    };
                    assert!(contents(range(0, good)).all(|content| content == Content::Zero));
                    assert!(!contents(range(good, lost)).any(|content| content == Content::Zero));
                }
                if watches {
                    assert!(pagemap.collect_bus_errors() > 0 || pagemap.is_poisoned(Pfn::new(203)));
                }
                // Plain memory reports what ended it.
                let region = pagemap.unbind().unwrap();
                let options = ZeroOptions::default();
                let is_lost = |cleared: Cleared| {
                    matches!(cleared.left[..], [(_, Unclearable::Lost(AccessError::Bus { .. }))])
                };
                assert!(is_lost(region.zero_range(0, region.len(), &options).unwrap()));
                let other = Region::anonymous(region.len()).unwrap();
                for (to, from) in [(&region, &other), (&other, &region)] {
                    assert!(is_lost(to.copy_range(0, from, 0, region.len(), &options).unwrap()));
                }
            }
        }
    }
}

#[test]
fn memory_that_is_not_there_ends_a_copy_with_what_was_copied_before() {
    if !recovers("memory_that_is_not_there_ends_a_copy") {
        return;
    }
    let file = Temporary::new("bus-copy", &[7; 16 * 4096]);
    let from = Region::file(&file.0, 0, ByteLen::new(16 * PAGE)).unwrap();
    file.truncate(8 * PAGE);
    for threads in [1, 2] {
        let region = Region::anonymous(ByteLen::new(32 * PAGE)).unwrap();
        // Words that do not fit each other go through a buffer, whose copies are recovered.
        let options = ZeroOptions::default()
            .threads(NonZeroUsize::new(threads).unwrap())
            .batch(ByteLen::new(PAGE));
        let len = ByteLen::new(16 * PAGE);
        let copied = region.copy_range(3, &from, 0, len, &options).unwrap();
        assert_eq!(copied.done.iter().map(|range| range.end).collect::<Vec<_>>(), [3 + 8 * PAGE]);
        let [(range, Unclearable::Lost(AccessError::Bus { .. }))] = &copied.left[..] else {
            panic!("{copied}")
        };
        assert_eq!(*range, 3 + 8 * PAGE..3 + 16 * PAGE);
        assert!(bytes_in(&region, 3..3 + 8 * PAGE).iter().all(|byte| *byte == 7));
    }
}

#[test]
fn a_pool_hands_out_what_is_there_and_says_why_the_rest_is_not() {
    if !recovers("a_pool_hands_out_what_is_there") {
        return;
    }
    let file = Temporary::sparse("bus-pool", PAGES * PAGE);
    for order in [0, 2] {
        for options in [PoolOptions::default().without_worker(), PoolOptions::default()] {
            // Where the program watches, what is not there is bad, and the others are handed out.
            let pagemap = truncated(&file, order, 200);
            pagemap.watch_bus_errors().unwrap();
            let pool = Pool::new(pagemap, options).unwrap();
            let all: Vec<Pooled> = std::iter::from_fn(|| pool.take().ok()).collect();
            assert_eq!(all.len(), 200 >> order);
            assert!(all.iter().all(|pooled| pooled.range().end().get() <= 200));
            drop(all);
            drop(pool);
            // Where no thread does, the taker gets an error.
            let pool = Pool::new(truncated(&file, order, 200), options).unwrap();
            let mut all = Vec::new();
            let failure = loop {
                match pool.take() {
                    Ok(pooled) => all.push(pooled),
                    Err(failure) => break failure,
                }
            };
            assert!(
                matches!(failure, PoolError::Clear(WriteError::Access(AccessError::Bus { .. }))),
                "{failure}"
            );
            assert!(all.len() <= 200 >> order);
            assert!(all.iter().all(|pooled| pooled.range().end().get() <= 200));
        }
    }
}

/// The worker finds the page that is not there and calls the owner, who drops the pool on that thread.
#[test]
fn a_pool_that_its_owner_drops_on_its_worker_does_not_wait_for_itself() {
    if !recovers("a pool dropped by its owner") {
        return;
    }
    let file = Temporary::sparse("own-drop", PAGES * PAGE);
    let pool: Arc<Mutex<Option<Pool>>> = Arc::default();
    let (send, receive) = mpsc::channel();
    let ops = {
        let pool = pool.clone();
        PagemapOps::default().on_poison(move |_| {
            // The test puts it there as soon as it has it; the worker may be faster.
            while pool.lock().unwrap().is_none() {
                std::thread::yield_now();
            }
            let mine = pool.lock().unwrap().take().unwrap();
            let mine = mine.into_pagemap().expect_err("a worker has it");
            drop(mine);
            send.send(()).unwrap();
        })
    };
    let region = Region::file(&file.0, 0, ByteLen::new(PAGES * PAGE)).unwrap();
    file.truncate((PAGES - 1) * PAGE);
    let options = BindOptions::new(MemoryKind::Generic).ops(ops);
    let pagemap = Zone::new().bind(region, options).unwrap();
    pagemap.watch_bus_errors().unwrap();
    *pool.lock().unwrap() = Some(Pool::new(pagemap, PoolOptions::default()).unwrap());
    receive.recv_timeout(Duration::from_secs(60)).expect("the drop returns");
}

//! Pools of memory that no driver has, and properties of all.

use std::collections::HashSet;
use std::num::NonZeroU8;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use uzone_hostpool::{Block, Budget, HostPool, HostPoolError, HostPoolOptions, Pages, Zeroing};
use uzone_pages::ByteLen;

const LONG: Duration = Duration::from_secs(60);

fn options() -> HostPoolOptions {
    HostPoolOptions::default()
}

fn is_zero(block: &Block) -> bool {
    let mut bytes = vec![1; block.len().to_usize().unwrap()];
    block.read_at(0, &mut bytes).unwrap();
    bytes.iter().all(|byte| *byte == 0)
}

#[test]
fn a_block_is_zero_present_and_nobody_elses_while_it_is_handed_out() {
    let ahead = Zeroing::Ahead(NonZeroU8::new(100).unwrap());
    for zeroing in [ahead, Zeroing::OnTake, Zeroing::OnRelease] {
        for budget in [Budget::Background, Budget::Eager, Budget::OnDemand] {
            let block = ByteLen::kib(12);
            let options = options().block(block).zeroing(zeroing).budget(budget);
            let pool = HostPool::open(ByteLen::mib(2), options).unwrap();
            let owned = Mutex::new(HashSet::new());
            std::thread::scope(|scope| {
                for seed in 0..4 {
                    let (pool, owned) = (&pool, &owned);
                    scope.spawn(move || {
                        let mut random = fastrand::Rng::with_seed(seed);
                        let mut mine: Vec<Block> = Vec::new();
                        for _ in 0..300 {
                            if mine.len() > 20 || (!mine.is_empty() && random.bool()) {
                                let block = mine.swap_remove(random.usize(..mine.len()));
                                let mut owned = owned.lock().unwrap();
                                assert!(block.numbers().all(|number| owned.remove(&number)));
                                drop(owned);
                                drop(block);
                                continue;
                            }
                            let block = pool.take_run(random.usize(1..3), LONG).unwrap();
                            let mut owned = owned.lock().unwrap();
                            assert!(block.numbers().all(|number| owned.insert(number)));
                            drop(owned);
                            assert!(is_zero(&block), "{block:?} {zeroing:?} {budget:?}");
                            let secret = vec![0xa5; block.len().to_usize().unwrap()];
                            block.write_at(0, &secret).unwrap();
                            mine.push(block);
                        }
                        for block in mine {
                            owned
                                .lock()
                                .unwrap()
                                .retain(|number| !block.numbers().contains(number));
                        }
                    });
                }
            });
            let stats = pool.stats();
            assert_eq!((stats.used, stats.bad, stats.blocks), (0, 0, 170), "{stats:?}");
        }
    }
}

#[test]
fn all_blocks_are_one_range_and_come_back_by_number() {
    let pool = HostPool::open(ByteLen::mib(9), options()).unwrap();
    let all = pool.take_run(pool.blocks(), LONG).unwrap();
    assert_eq!((all.addr(), all.len(), all.number()), (pool.addr(), ByteLen::mib(8), 0));
    assert!(matches!(pool.take(LONG), Err(HostPoolError::Exhausted { .. })));
    assert!(pool.try_take().unwrap().is_none());
    assert!(matches!(pool.give_back(0..1), Err(HostPoolError::NotHandedOut { .. })));
    assert_eq!(all.into_numbers(), 0..4);
    pool.give_back(1..3).unwrap();
    assert!(pool.give_back(2..4).is_err() && pool.give_back(3..5).is_err());
    let block = pool.take(LONG).unwrap();
    assert_eq!((block.number(), block.addr().get()), (1, pool.addr().get() + (2 << 20)));
    assert!(block.write_at((2 << 20) - 1, &[1, 2]).is_err());
}

#[test]
fn the_report_of_a_pool_that_is_ready_has_its_pages() {
    for options in [options(), options().shared(), options().pages(Pages::Small)] {
        let pool = HostPool::open(ByteLen::mib(64), options).unwrap();
        pool.wait_ready(pool.len(), LONG).unwrap();
        let report = pool.report();
        let counted = report.huge.unwrap().get() + report.small.unwrap().get();
        assert!(counted == pool.len().get() && !report.populating.is_zero(), "{report}");
    }
}

#[test]
fn a_block_points_to_its_own_bytes() {
    let pool = HostPool::open(ByteLen::mib(8), options().block(ByteLen::mib(2))).unwrap();
    let blocks = [(); 3].map(|()| pool.take(LONG).unwrap());
    assert!(blocks.iter().all(|block| block.as_ptr().addr() == block.addr().get()));
}

#[test]
fn a_pool_that_never_clears_hands_out_the_bytes_of_the_last_owner() {
    let options = options().zeroing(Zeroing::Never);
    let pool = HostPool::open(ByteLen::mib(2), options).unwrap();
    let block = pool.take(LONG).unwrap();
    assert!(is_zero(&block));
    block.write_at(5, b"kept").unwrap();
    drop(block);
    let mut bytes = [0; 4];
    pool.take(LONG).unwrap().read_at(5, &mut bytes).unwrap();
    assert_eq!(&bytes, b"kept");
}

#[test]
fn a_block_outlives_its_pool_and_the_memory_is_there_until_it_is_dropped() {
    let pool = HostPool::open(ByteLen::mib(64), options()).unwrap();
    let block = pool.take(LONG).unwrap();
    drop(pool);
    block.write_at(0, b"still there").unwrap();
}

#[test]
fn sizes_that_fit_no_block_and_blocks_that_cut_a_page_are_refused() {
    for (size, block) in [
        (ByteLen::mib(1), ByteLen::mib(2)),
        (ByteLen::mib(1), ByteLen::new(5000)),
        (ByteLen::mib(1), ByteLen::ZERO),
        (ByteLen::ZERO, ByteLen::kib(4)),
    ] {
        let error = HostPool::open(size, options().block(block)).unwrap_err();
        assert!(matches!(error, HostPoolError::Geometry { .. }), "{error}");
    }
    let error = HostPool::open(ByteLen::tib(64), options()).unwrap_err();
    assert!(matches!(error, HostPoolError::Populate(_) | HostPoolError::Map(_)), "{error}");
}

#[test]
fn progress_is_told_in_order_up_to_the_end() {
    static LAST: AtomicUsize = AtomicUsize::new(0);
    let options = options().on_progress(|ready, of| {
        let ready = ready.to_usize().unwrap();
        assert!(LAST.swap(ready, Ordering::Relaxed) < ready);
        assert_eq!(of, ByteLen::mib(100));
    });
    let pool = HostPool::open(ByteLen::mib(100), options.budget(Budget::Eager)).unwrap();
    drop(pool); // its threads have ended then
    assert_eq!(LAST.load(Ordering::Relaxed), 100 << 20);
}

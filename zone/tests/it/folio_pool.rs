//! A pool hands out zeroes and nothing else, whatever the memory held before, and refuses what is not
//! its own.
#![allow(clippy::cast_possible_truncation, reason = "the ranges of the tests are small")]

use std::num::NonZeroU8;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uzone_pages::{ByteLen, Content, MemoryKind, Order, PageCount, Pfn, PfnRange};
use uzone_zone::{
    BindError, BindOptions, Pagemap, Pool, PoolError, PoolOptions, Pooled, PopulateOptions, Region,
    Zone,
};

const BASE: u64 = 0x1000;
const PAGES: u64 = 1024;
const PAGE: u64 = 4096;

fn options(order: u8) -> BindOptions {
    BindOptions::new(MemoryKind::Generic).order(Order::new(order)).base(Pfn::new(BASE))
}

/// A region that an earlier owner left bytes in.
fn used(order: u8) -> Pagemap {
    let region = Region::anonymous(ByteLen::new(PAGES * PAGE)).unwrap();
    region.write_at(0, &vec![0xa5; (PAGES * PAGE) as usize]).unwrap();
    Zone::new().bind(region, options(order)).unwrap()
}

fn range(start: u64, pages: u64) -> PfnRange {
    PfnRange::try_new(Pfn::new(BASE + start), PageCount::new(pages)).unwrap()
}

/// Reads every byte that was handed out, and writes a secret over it.
fn assert_zero_and_use(pool: &Pool, pooled: &Pooled, secret: u8) {
    let offset = (pooled.range().start().get() - BASE) * PAGE;
    let mut bytes = vec![1; (pooled.range().pages().get() * PAGE) as usize];
    pool.pagemap().region().read_at(offset, &mut bytes).unwrap();
    let leak = bytes.iter().position(|byte| *byte != 0);
    assert_eq!(leak, None, "{pooled:?} has bytes of an earlier owner");
    pooled.write_at(0, &vec![secret; bytes.len()]).unwrap();
}

fn every_kind() -> [PoolOptions; 3] {
    let fast = NonZeroU8::new(100).unwrap();
    [
        PoolOptions::default().worker(fast),
        PoolOptions::default().without_worker(),
        PoolOptions::default().without_worker().clear_on_release(),
    ]
}

#[test]
fn a_block_is_read_and_written_in_place_and_nothing_beside_it() {
    let pool = Pool::new(used(2), PoolOptions::default().without_worker()).unwrap();
    let (first, second) = (pool.take().unwrap(), pool.take().unwrap());
    let len = first.segment().len_bytes;
    for block in [&first, &second] {
        assert_eq!(block.as_ptr().addr(), block.segment().address);
        let words = block.as_words(0..len).unwrap();
        assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
        words[words.len() - 1].store(u64::from_ne_bytes(*b"in place"), Ordering::Relaxed);
        let mut seen = [0; 8];
        block.read_at(len - 8, &mut seen).unwrap();
        assert_eq!(&seen, b"in place");
    }
    for range in [4..8, len - 8..len + 8, len..len - 8, u64::MAX - 8..u64::MAX] {
        assert!(first.as_words(range).is_err());
    }
}

#[test]
fn nothing_of_one_owner_reaches_the_next() {
    for order in [0, 2, 9] {
        for options in every_kind() {
            let pool = Pool::new(used(order), options).unwrap();
            let folios = PAGES as usize >> order;
            let mut handed = Vec::new();
            for round in 0..6_u8 {
                while let Ok(pooled) = pool.take() {
                    assert_zero_and_use(&pool, &pooled, round + 1);
                    handed.push(pooled);
                }
                assert_eq!(handed.len(), folios);
                // Some in a row, some here and there.
                let keep = handed.len() / 3;
                if round % 2 == 0 {
                    handed.truncate(keep);
                } else {
                    let mut index = 0;
                    handed.retain(|_| {
                        index += 1;
                        index % 3 == 0
                    });
                }
            }
            let stats = pool.stats();
            assert_eq!(stats.used, handed.len());
            let text = format!("{} folios: {} used, ", stats.folios, stats.used);
            assert!(stats.to_string().starts_with(&text), "{stats}");
            assert!(stats.cleared_ahead + stats.cleared_on_demand > 0 || options_clear(&stats));
            drop(handed);
            assert!(pool.into_pagemap().unwrap().unbind().is_ok());
        }
    }
}

/// Clearing on release has no other counter.
fn options_clear(stats: &uzone_zone::PoolStats) -> bool {
    stats.cleared_ahead == 0 && stats.cleared_on_demand < stats.folios as u64
}

#[test]
fn runs_are_in_a_row_and_zero_and_found_between_others() {
    for order in [0_u8, 2] {
        let pool = Pool::new(used(order), PoolOptions::default().without_worker()).unwrap();
        let folios = PAGES as usize >> order;
        let all: Vec<Pooled> = (0..folios).map(|_| pool.take().unwrap()).collect();
        // Every fourth stays out but for a gap of twenty.
        let mut kept = Vec::new();
        for (index, pooled) in all.into_iter().enumerate() {
            assert_zero_and_use(&pool, &pooled, 7);
            if index % 4 == 0 && !(100..120).contains(&index) {
                kept.push(pooled);
            }
        }
        assert!(matches!(pool.take_run(0), Err(PoolError::Nothing)));
        let run = pool.take_run(20).unwrap();
        assert_eq!(run.range().pages().get(), 20 << order);
        assert_eq!(run.range().start().get() - BASE, 97 << order, "the only place");
        assert_zero_and_use(&pool, &run, 9);
        let failure = pool.take_run(20).unwrap_err();
        assert!(matches!(failure, PoolError::Exhausted { folios: 20, .. }), "{failure}");
        let three = pool.take_run(3).unwrap();
        assert_zero_and_use(&pool, &three, 9);
        assert_eq!(three.segment().len_bytes, (3 << order) * PAGE);
        drop((run, three, kept));
        assert!(pool.take_run(folios).is_ok(), "all of it");
        for more in [folios + 1, usize::MAX - 1, usize::MAX] {
            let refused = pool.take_run(more).unwrap_err();
            let is_named =
                matches!(refused, PoolError::Exhausted { folios: asked, .. } if asked == more);
            assert!(is_named, "{refused}");
        }
    }
}

/// Returns the folio that keeps a range from being taken back because it is free already.
fn refused_as_free(pool: &Pool, given: PfnRange) -> Pfn {
    match pool.free(given) {
        Err(PoolError::Free { pfn }) => pfn,
        other => panic!("{given} is free: {other:?}"),
    }
}

#[test]
fn what_is_not_handed_out_is_not_taken_back() {
    let pool = Pool::new(used(2), PoolOptions::default().without_worker()).unwrap();
    let whole = pool.pagemap().range();
    for given in [range(1, 4), range(0, 3), range(PAGES, 4), range(PAGES - 4, 8)] {
        assert!(matches!(
            pool.free(given),
            Err(PoolError::Foreign { given: asked, pool }) if asked == given && pool == whole
        ));
    }
    assert_eq!(refused_as_free(&pool, range(8, 4)), Pfn::new(BASE + 8));
    let run = pool.take_run(4).unwrap().into_range();
    assert_eq!(pool.stats().used, 4);
    let pool = pool.into_pagemap().unwrap_err();
    let second = PfnRange::try_new(Pfn::new(run.start().get() + 4), PageCount::new(4)).unwrap();
    pool.free(second).unwrap();
    assert_eq!(refused_as_free(&pool, second), second.start(), "twice");
    assert_eq!(refused_as_free(&pool, run), second.start(), "in part");
    assert_eq!(pool.stats().used, 3, "and then nothing was taken back");
    let rest = PfnRange::try_new(Pfn::new(run.start().get() + 8), PageCount::new(8)).unwrap();
    pool.free(rest).unwrap();
    pool.free(PfnRange::try_new(run.start(), PageCount::new(4)).unwrap()).unwrap();
    assert!(pool.into_pagemap().is_ok());
}

#[test]
fn a_pinned_folio_comes_back_when_its_pins_are_given_back() {
    for options in every_kind() {
        let pool = Pool::new(used(2), options).unwrap();
        let pooled = pool.take().unwrap();
        let pinned = pool.pagemap().pin(pooled.range()).unwrap();
        let (pooled, failure) = pooled.free().unwrap_err();
        let first = pooled.range().start();
        assert!(matches!(failure, PoolError::Pinned { pfn, pins: 1 } if pfn == first), "{failure}");
        assert_zero_and_use(&pool, &pooled, 3);
        let range = pooled.range();
        // Dropped, it is set aside: the others are handed out, this one is not.
        drop(pooled);
        let others: Vec<Pooled> = std::iter::from_fn(|| pool.take().ok()).collect();
        assert_eq!(others.len(), PAGES as usize / 4 - 1);
        assert!(others.iter().all(|other| !other.range().overlaps(range)));
        assert!(matches!(pool.take(), Err(PoolError::Exhausted { free: 1, pinned: 1, .. })));
        drop(pinned);
        let again = pool.take().unwrap();
        assert_eq!(again.range(), range);
        assert_zero_and_use(&pool, &again, 4);
    }
}

#[test]
fn pages_that_have_come_are_handed_out_once_they_were_looked_at_again() {
    for order in [0_u8, 2] {
        for kind in every_kind() {
            let region = Region::anonymous(ByteLen::new(PAGES * PAGE)).unwrap();
            let pagemap = Zone::new().bind(region, options(order).absent()).unwrap();
            let pool = Pool::new(pagemap, kind).unwrap();
            let folios = PAGES as usize >> order;
            assert_eq!(pool.stats().pinned, folios, "none of them is there");
            // The kernel supplies zeroes for some.
            let come = range(64, 96);
            assert!(pool.populate(come, &PopulateOptions::default()).unwrap().is_whole());
            pool.look_again(range(PAGES + 64, 8));
            pool.look_again(PfnRange::try_new(Pfn::new(0), PageCount::new(8)).unwrap());
            // What it names is more than the pool has, and more than has come.
            let wide = PfnRange::try_new(Pfn::new(BASE - 1), PageCount::new(PAGES + 2)).unwrap();
            pool.look_again(wide);
            let (stats, there) = (pool.stats(), 96 >> order);
            assert_eq!((stats.zero, stats.pinned, stats.dirty), (there, folios - there, 0));
            for _ in 0..there {
                let pooled = pool.take().unwrap();
                assert!(come.contains_range(pooled.range()));
                assert_zero_and_use(&pool, &pooled, 5);
                let _ = pooled.into_range();
            }
            pool.look_again(wide);
            assert_eq!((pool.stats().used, pool.stats().zero), (there, 0), "what is out stays out");
            assert!(matches!(pool.take(), Err(PoolError::Exhausted { .. })));
        }
    }
}

#[test]
fn a_free_page_that_is_pinned_past_the_pool_is_cleared_again() {
    let options = PoolOptions::default().without_worker().clear_on_release();
    let pool = Pool::new(used(0), options).unwrap();
    let pooled = pool.take().unwrap();
    let first = pooled.range();
    drop(pooled);
    // It is free and zero, then written to under a pin.
    assert_eq!(pool.pagemap().content(first.start()), Some(Content::Zero));
    let pinned = pool.pagemap().pin(first).unwrap();
    pinned.write_at(0, &[0x77; PAGE as usize]).unwrap();
    drop(pinned);
    let all: Vec<Pooled> = std::iter::from_fn(|| pool.take().ok()).collect();
    assert_eq!(all.len(), PAGES as usize);
    for pooled in &all {
        assert_zero_and_use(&pool, pooled, 1);
    }
}

#[test]
fn a_bad_page_is_never_handed_out_and_an_unpoisoned_one_is() {
    for order in [0_u8, 2] {
        for options in every_kind() {
            let pagemap = used(order);
            let bad = Pfn::new(BASE + 13);
            pagemap.poison(bad).unwrap();
            let pool = Pool::new(pagemap, options).unwrap();
            let mut all: Vec<Pooled> = std::iter::from_fn(|| pool.take().ok()).collect();
            assert_eq!(all.len(), (PAGES as usize >> order) - 1);
            assert!(all.iter().all(|pooled| !pooled.range().contains(bad)));
            assert_eq!(pool.stats().bad, 1);
            // One that goes bad while it is out does not come back either.
            let second = all[5].range().start();
            pool.pagemap().poison(second).unwrap();
            drop(all.remove(5));
            assert!(pool.take().is_err());
            assert_eq!(pool.stats().bad, 2);
            pool.pagemap().unpoison(bad).unwrap();
            let unpoisoned = pool.take().unwrap();
            assert!(unpoisoned.range().contains(bad));
            assert_zero_and_use(&pool, &unpoisoned, 1);
        }
    }
}

#[test]
fn memory_that_the_kernel_has_cleared_is_not_cleared_again() {
    let zone = Zone::new();
    let region = Region::anonymous(ByteLen::new(PAGES * PAGE)).unwrap();
    assert!(region.is_untouched());
    let pagemap = zone.bind(region, options(0).known_zero()).unwrap();
    let pool = Pool::new(pagemap, PoolOptions::default().without_worker()).unwrap();
    assert_eq!(pool.stats().zero, PAGES as usize);
    let all: Vec<Pooled> = std::iter::from_fn(|| pool.take().ok()).collect();
    for pooled in &all {
        assert_zero_and_use(&pool, pooled, 1);
    }
    assert_eq!((all.len(), pool.stats().cleared_on_demand), (PAGES as usize, 0));
    drop(all);
    assert_eq!(pool.stats().dirty, PAGES as usize);
    assert!(pool.take_run(PAGES as usize).is_ok());
    let region = pool.into_pagemap().unwrap().unbind().unwrap();
    assert!(!region.is_untouched());
    let failure = zone.bind(region, options(0).known_zero()).unwrap_err();
    assert!(matches!(failure.cause, BindError::NotZeroMemory), "{failure}");
    for touch in [(|region: &Region| region.write_at(0, &[1]).unwrap()) as fn(&Region), |region| {
        let _ = region.mapping();
    }] {
        let region = Region::anonymous(ByteLen::new(PAGES * PAGE)).unwrap();
        touch(&region);
        assert!(!region.is_untouched());
        assert!(zone.bind(region, options(0).known_zero()).is_err());
    }
    // Long ranges are pinned by the block, which starts inhibited and must not stay so.
    let region = Region::anonymous(ByteLen::new(PAGES * PAGE)).unwrap();
    let pagemap = zone.bind(region, options(0).known_zero()).unwrap();
    drop(pagemap.pin(range(3, 700)).unwrap());
    drop(pagemap.pin(pagemap.range()).unwrap());
    assert!(pagemap.pages().all(|page| page.word().pins() == 0));
    assert!(!pagemap.pages().any(|page| page.word().content() == Content::Zero));
}

#[test]
fn the_worker_clears_ahead_of_need() {
    let pool = Pool::new(used(2), PoolOptions::default().worker(NonZeroU8::MAX)).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while pool.stats().zero < PAGES as usize / 4 {
        assert!(Instant::now() < until, "{pool:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    let stats = pool.stats();
    assert_eq!((stats.cleared_ahead, stats.cleared_on_demand), (PAGES / 4, 0));
    assert_eq!(stats.cleared, ByteLen::new(PAGES * PAGE));
    assert_zero_and_use(&pool, &pool.take().unwrap(), 1);
}

/// Tenants take and give back at once while the worker clears, is stopped in the middle, and comes
/// again: each reads every byte that it is given.
#[test]
fn tenants_at_once_beside_a_worker_that_is_stopped_never_see_each_others_bytes() {
    let mut pagemap = used(1);
    for round in 0..8_u8 {
        let percent = NonZeroU8::new(20 + 10 * round).unwrap();
        let pool = Pool::new(pagemap, PoolOptions::default().worker(percent)).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for tenant in 0..3_u8 {
                let (pool, stop) = (&pool, &stop);
                scope.spawn(move || {
                    let mut held = Vec::new();
                    let mut step = usize::from(tenant);
                    while !stop.load(Ordering::Relaxed) {
                        step += 1;
                        let taken =
                            if step % 5 == 0 { pool.take_run(1 + step % 7) } else { pool.take() };
                        if let Ok(pooled) = taken {
                            assert_zero_and_use(pool, &pooled, 0x10 + tenant);
                            held.push(pooled);
                        }
                        if held.len() > 100 || step % 3 == 0 && !held.is_empty() {
                            drop(held.swap_remove(step % held.len()));
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(60));
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(pool.stats().used, 0);
        pagemap = pool.into_pagemap().unwrap();
    }
    assert!(pagemap.unbind().is_ok());
}

/// Of several who want the last folio while it is being cleared, one gets it and the others get an
/// error: no taker waits for a folio that does not come.
#[test]
fn a_thread_that_waits_for_the_last_folio_learns_that_another_has_it() {
    for round in 0..200_u32 {
        let region = Region::anonymous(ByteLen::new(4 * PAGE)).unwrap();
        region.write_at(0, &vec![0xa5; 4 * PAGE as usize]).unwrap();
        let pagemap = Zone::new().bind(region, options(2)).unwrap();
        let kind = match round % 2 {
            0 => PoolOptions::default().without_worker(),
            _ => PoolOptions::default(),
        };
        let pool = Pool::new(pagemap, kind).unwrap();
        let taken: Vec<Result<Pooled, PoolError>> = std::thread::scope(|scope| {
            let takers: Vec<_> = (0..3).map(|_| scope.spawn(|| pool.take())).collect();
            takers.into_iter().map(|taker| taker.join().unwrap()).collect()
        });
        assert_eq!(taken.iter().filter(|taken| taken.is_ok()).count(), 1, "{taken:?}");
    }
}

/// What a process leaves in shared memory when it is killed, in the middle of clearing too, is what the
/// next one finds there: nothing of it is believed to be zero.
#[test]
fn what_a_killed_process_left_half_cleared_is_cleared_by_the_next() {
    const CHILD: &str = "UZONE_TEST_POOL_CHILD";
    const LEN: u64 = 16 << 20;
    let bind = |path: &std::path::Path| {
        let region = Region::file(path, 0, ByteLen::new(LEN)).unwrap();
        Zone::new().bind(region, options(2)).unwrap()
    };
    if let Some(path) = std::env::var_os(CHILD) {
        // A tenant that fills and gives back for ever, beside a worker that clears.
        let pool = Pool::new(
            bind(path.as_ref()),
            PoolOptions::default().worker(NonZeroU8::new(100).unwrap()),
        )
        .unwrap();
        println!("ready");
        loop {
            let held: Vec<Pooled> = (0..64).map_while(|_| pool.take().ok()).collect();
            for pooled in &held {
                assert_zero_and_use(&pool, pooled, 0x5a);
            }
        }
    }
    let path = std::env::temp_dir().join(format!("uzone-pool-{}", std::process::id()));
    std::fs::write(&path, vec![0x5a; LEN as usize]).unwrap();
    for round in 0..6_u64 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "folio_pool::what_a_killed_process_left_half_cleared_is_cleared_by_the_next",
                "--exact",
            ])
            .arg("--nocapture")
            .env(CHILD, &path)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = std::io::BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("ready") {
            line.clear();
            assert_ne!(std::io::BufRead::read_line(&mut said, &mut line).unwrap(), 0, "it died");
        }
        // Anywhere in what it does next: the time decides, and differs from round to round.
        std::thread::sleep(Duration::from_micros(300 + 1700 * round));
        child.kill().unwrap();
        assert!(!child.wait().unwrap().success(), "it ended by itself");
        let kind = every_kind()[round as usize % 3];
        let pool = Pool::new(bind(&path), kind).unwrap();
        // The worker of the first kind may have cleared some of it by now.
        if round % 3 != 0 {
            assert_eq!(pool.stats().zero, 0, "nothing is known of what is there");
        }
        let all: Vec<Pooled> = std::iter::from_fn(|| pool.take().ok()).collect();
        assert_eq!(all.len() as u64, LEN / PAGE / 4);
        for pooled in &all {
            assert_zero_and_use(&pool, pooled, 0x5a);
        }
    }
    std::fs::remove_file(path).unwrap();
}

/// A clearing that is cancelled at any moment leaves the states true: what is *zero* is, and the pool
/// clears the rest before it hands it out.
#[test]
fn what_was_cancelled_at_any_moment_is_zero_or_not_called_so() {
    for order in [0_u8, 2] {
        let mut pagemap = used(order);
        for stop_after in (0..40_u64).chain([u64::MAX]) {
            let cancel = Arc::<AtomicBool>::default();
            let zero = {
                let cancel = cancel.clone();
                let batches = std::sync::atomic::AtomicU64::new(0);
                uzone_zone::ZeroOptions::default()
                    .batch(ByteLen::new(5 * PAGE))
                    .cancel(cancel.clone())
                    .hint((stop_after % 37 * 7 % PAGES) * PAGE)
                    .on_batch(move |_, _| {
                        if batches.fetch_add(1, Ordering::Relaxed) >= stop_after {
                            cancel.store(true, Ordering::Relaxed);
                        }
                    })
            };
            let zeroed = pagemap.zero(pagemap.range(), &zero).unwrap();
            let left: u64 = zeroed.left.iter().map(|(range, _)| range.end - range.start).sum();
            assert_eq!(zeroed.done_bytes().get() + left, PAGES * PAGE, "{zeroed}");
            let mut bytes = vec![1; PAGE as usize];
            for pfn in pagemap.range().iter() {
                let content =
                    pagemap.page(pfn.align_down(Order::new(order))).unwrap().word().content();
                if content == Content::Zero {
                    pagemap.region().read_at((pfn.get() - BASE) * PAGE, &mut bytes).unwrap();
                    assert!(bytes.iter().all(|byte| *byte == 0), "{pfn} after {stop_after}");
                }
            }
            let pool = Pool::new(pagemap, PoolOptions::default().without_worker()).unwrap();
            let all: Vec<Pooled> = std::iter::from_fn(|| pool.take().ok()).collect();
            assert_eq!(all.len() as u64, PAGES >> order);
            for pooled in &all {
                assert_zero_and_use(&pool, pooled, 0xa5);
            }
            drop(all);
            pagemap = pool.into_pagemap().unwrap();
        }
    }
}

/// Every way in which a program reaches a folio that is free, or whose owner is another tenant.
#[test]
fn a_free_folio_is_written_by_no_safe_call_that_leaves_it_zero() {
    for order in [0_u8, 2] {
        for kind in every_kind() {
            let pool = Pool::new(used(order), kind).unwrap();
            let (first, second) = (pool.take().unwrap(), pool.take().unwrap());
            // A folio is given back by its guard, and not by its number while there is the guard: the
            // next tenant would share it.
            let range = first.range();
            let failure = pool.free(range).unwrap_err();
            assert!(
                matches!(failure, PoolError::Guarded { pfn } if pfn == range.start()),
                "{failure}"
            );
            first.write_at(0, b"secret").unwrap();
            assert_zero_and_use(&pool, &second, 7);
            // No byte beside the folio is reached by its guard.
            let len = first.segment().len_bytes;
            assert!(first.write_at(len - 3, b"secret").is_err());
            assert!(first.write_at(u64::MAX, b"secret").is_err());
            assert!(first.read_at(len, &mut [0]).is_err());
            let free = first.into_range();
            pool.free(free).unwrap();
            // Written under a pin while it is free.
            if let Ok(pinned) = pool.pagemap().pin(free) {
                pinned.write_at(0, b"secret").unwrap();
                assert!(pinned.write_at(len, b"secret").is_err(), "the folio beside it");
            }
            for _ in 1..PAGES >> order {
                let pooled = pool.take().unwrap();
                assert_zero_and_use(&pool, &pooled, 9);
                let _ = pooled.into_range();
            }
            assert!(matches!(pool.take(), Err(PoolError::Exhausted { .. })));
        }
    }
}

#[test]
fn absent_folios_with_old_bytes_are_handed_out_as_zeroes() {
    let region = Region::anonymous(ByteLen::new(PAGES * PAGE)).unwrap();
    region.write_at(0, &vec![0x5e; (PAGES * PAGE) as usize]).unwrap();
    let pagemap = Zone::new().bind(region, options(0).absent()).unwrap();
    let pool = Pool::new(pagemap, PoolOptions::default().without_worker()).unwrap();
    assert!(pool.take().is_err(), "nothing is there");
    assert!(pool.populate(range(3, 5), &PopulateOptions::default()).unwrap().is_whole());
    assert_eq!((pool.stats().zero, pool.stats().pinned), (5, PAGES as usize - 5));
    for _ in 0..5 {
        let pooled = pool.take().unwrap();
        assert_zero_and_use(&pool, &pooled, 1);
        let _ = pooled.into_range();
    }
    let elsewhere = PfnRange::try_new(Pfn::new(1), PageCount::new(1)).unwrap();
    assert!(pool.populate(elsewhere, &PopulateOptions::default()).is_err());
}

/// A take that is refused leaves the counts as they were: what is pinned is counted as pinned.
#[test]
fn the_counts_of_a_pool_are_right_after_a_take_that_was_refused() {
    let pool = Pool::new(used(0), PoolOptions::default().without_worker()).unwrap();
    let (first, last) = (range(0, 1), range(PAGES - 1, 1));
    let pinned = [pool.pagemap().pin(first).unwrap(), pool.pagemap().pin(last).unwrap()];
    pool.pagemap().poison(Pfn::new(BASE + 9)).unwrap();
    // The pool finds out when it meets them.
    let before: Vec<Pooled> = std::iter::from_fn(|| pool.take().ok()).collect();
    drop(before);
    let stats = pool.stats();
    assert_eq!((stats.pinned, stats.bad, stats.dirty), (2, 1, PAGES as usize - 3));
    assert!(pool.take_run(PAGES as usize).is_err());
    assert_eq!(pool.stats(), stats);
    drop(pinned);
}

//! Clearing and giving back pages of a bound region: cleared pages are zero, the others are listed, and
//! content is true at any time.
#![allow(clippy::cast_possible_truncation, reason = "the ranges of the tests are small")]

use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uzone_pages::{AddrError, ByteLen, Content, MemoryKind, Order, PageCount, Pfn, PfnRange};
use uzone_zone::{
    BindOptions, Cleared, Pagemap, PinError, Region, Unclearable, WriteError, ZeroOptions, Zone,
};

const BASE: u64 = 0x1000;
const PAGES: u64 = 2048;
const PAGE: u64 = 4096;

fn range(start: u64, pages: u64) -> PfnRange {
    PfnRange::try_new(Pfn::new(BASE + start), PageCount::new(pages)).unwrap()
}

fn pfn(page: u64) -> Pfn {
    Pfn::new(BASE + page)
}

/// The bytes of pages of the region.
fn bytes_of(start: u64, pages: u64) -> Range<u64> {
    start * PAGE..(start + pages) * PAGE
}

fn pages_of(bytes: u64) -> u64 {
    bytes / PAGE
}

fn done(cleared: &Cleared) -> u64 {
    pages_of(cleared.done_bytes().get())
}

fn known(cleared: &Cleared) -> u64 {
    pages_of(cleared.known.get())
}

/// A region full of bytes of an earlier owner.
fn used(order: u8) -> Pagemap {
    let region = Region::anonymous(ByteLen::new(PAGES * PAGE)).unwrap();
    region.write_at(0, &vec![0xa5; (PAGES * PAGE) as usize]).unwrap();
    let options =
        BindOptions::new(MemoryKind::Generic).order(Order::new(order)).base(Pfn::new(BASE));
    Zone::new().bind(region, options).unwrap()
}

/// Whether the page has old bytes, and whether it has zeroes.
fn bytes(pagemap: &Pagemap, page: u64) -> (bool, bool) {
    let mut bytes = vec![1; PAGE as usize];
    pagemap.region().read_at(page * PAGE, &mut bytes).unwrap();
    (bytes.contains(&0xa5), bytes.contains(&0))
}

fn is_zero(pagemap: &Pagemap, page: u64) -> bool {
    bytes(pagemap, page) == (false, true)
}

fn is_old(pagemap: &Pagemap, page: u64) -> bool {
    bytes(pagemap, page) == (true, false)
}

fn content(pagemap: &Pagemap, page: u64) -> Content {
    pagemap.page(pfn(page)).unwrap().word().content()
}

#[test]
fn what_is_cleared_is_zero_and_nothing_else_is_touched() {
    for order in [0, 2, 9] {
        let pagemap = used(order);
        let middle = range(512, 512);
        let zeroed = pagemap.zero(middle, &ZeroOptions::default()).unwrap();
        assert!(zeroed.is_whole() && zeroed.done == [bytes_of(512, 512)], "{zeroed}");
        assert_eq!(known(&zeroed), 0);
        for page in 0..PAGES {
            let is_inside = (512..1024).contains(&page);
            assert_eq!(is_zero(&pagemap, page), is_inside, "page {page} of order {order}");
            assert_eq!(is_old(&pagemap, page), !is_inside);
            let expected = if is_inside { Content::Zero } else { Content::Unknown };
            assert_eq!(content(&pagemap, page), expected);
        }
        // What is zero is not cleared again.
        let again = pagemap.zero(pagemap.range(), &ZeroOptions::default()).unwrap();
        assert!(again.is_whole());
        assert_eq!(again.done, [bytes_of(0, 512), bytes_of(1024, 1024)]);
        assert_eq!(known(&again), 512);
        assert!(again.to_string().contains("2 MiB known to be zero"), "{again}");
    }
}

#[test]
fn a_page_that_was_pinned_is_not_taken_for_zero_any_more() {
    for order in [0, 9] {
        let pagemap = used(order);
        assert!(pagemap.zero(pagemap.range(), &ZeroOptions::default()).unwrap().is_whole());
        let pinned = pagemap.pin(range(0, 600)).unwrap();
        assert_eq!(content(&pagemap, 0), Content::Present);
        pagemap.pin_and_write(PAGE * 599, &[0xa5; PAGE as usize]).unwrap();
        drop(pinned);
        let again = pagemap.zero(pagemap.range(), &ZeroOptions::default()).unwrap();
        let held = if order == 0 { 600 } else { 1024 };
        assert_eq!((done(&again), known(&again)), (held, PAGES - held));
        assert!(is_zero(&pagemap, 599));
        // The same for one that asks by try_pin, and for a split whole.
        assert!(pagemap.try_pin(pagemap.range()).is_ok());
        assert_eq!(content(&pagemap, 2047), Content::Present);
    }
}

#[test]
fn pinned_pages_are_refused_and_bad_ones_left_out() {
    for order in [0_u8, 3] {
        let pagemap = used(order);
        let pinned = pagemap.pin(range(800, 8)).unwrap();
        let whole = pagemap.pin(range(512 * 3, 512)).unwrap();
        pagemap.poison(pfn(21)).unwrap();
        let zeroed = pagemap.zero(pagemap.range(), &ZeroOptions::default()).unwrap();
        assert!(!zeroed.is_whole());
        // A range for each reason and place, however many folios it has.
        let why = Unclearable::Pinned { pins: 1 };
        let folio = |start: u64, pages: u64| {
            let (start, end) =
                (start >> order << order, (start + pages).next_multiple_of(1 << order));
            bytes_of(start, end - start)
        };
        let bad = (bytes_of(21, 1), Unclearable::Poisoned);
        assert_eq!(zeroed.left, [bad, (folio(800, 8), why), (folio(1536, 512), why)]);
        for page in 0..PAGES {
            let is_kept = page == 21 || (800..808).contains(&page) || page >= 1536;
            assert_eq!(is_old(&pagemap, page), is_kept, "page {page}");
            assert_eq!(is_zero(&pagemap, page), !is_kept, "page {page}");
        }
        drop((pinned, whole));
        pagemap.unpoison(pfn(21)).unwrap();
        if order != 0 {
            // The folio was called zero with a bad page in it; what replaced the page is unknown.
            assert_eq!(content(&pagemap, 21), Content::Unknown);
        }
        assert!(pagemap.zero(pagemap.range(), &ZeroOptions::default()).unwrap().is_whole());
        assert!((0..PAGES).all(|page| is_zero(&pagemap, page)));
    }
}

#[test]
fn a_cancelled_clearing_leaves_the_truth_behind() {
    for (order, threads) in [(0, 1), (2, 1), (2, 2)] {
        let pagemap = used(order);
        let cancel = Arc::<AtomicBool>::default();
        let flag = cancel.clone();
        let options = ZeroOptions::default()
            .batch(ByteLen::new(3 * PAGE))
            .threads(NonZeroUsize::new(threads).unwrap())
            .on_batch(move |done, _| {
                if done.get() > 100 * PAGE {
                    flag.store(true, Ordering::Relaxed);
                }
            })
            .cancel(cancel);
        let zeroed = pagemap.zero(pagemap.range(), &options).unwrap();
        assert!(!zeroed.is_whole());
        let cancelled: u64 = zeroed
            .left
            .iter()
            .map(|(range, why)| {
                assert_eq!(*why, Unclearable::Cancelled);
                pages_of(range.end - range.start)
            })
            .sum();
        assert_eq!(done(&zeroed) + cancelled, PAGES);
        assert!(done(&zeroed) > 0 || threads > 1);
        for page in 0..PAGES {
            match content(&pagemap, page) {
                Content::Zero => assert!(is_zero(&pagemap, page)),
                Content::Unknown => {}
                other => panic!("page {page} is {other}"),
            }
        }
        assert!(!pagemap.zero(pagemap.range(), &options).unwrap().is_whole(), "still set");
        let rest = pagemap.zero(pagemap.range(), &ZeroOptions::default()).unwrap();
        assert!(rest.is_whole() && (0..PAGES).all(|page| is_zero(&pagemap, page)));
        assert!(pagemap.pin(pagemap.range()).is_ok());
    }
}

#[test]
fn a_hint_is_cleared_last_and_has_to_be_among_the_pages() {
    for order in [0, 9] {
        let pagemap = used(order);
        let hint = 700 * PAGE + 5;
        let zeroed = pagemap.zero(pagemap.range(), &ZeroOptions::default().hint(hint)).unwrap();
        assert!(zeroed.is_whole() && zeroed.done == [bytes_of(0, PAGES)], "{zeroed}");
        assert!((0..PAGES).all(|page| is_zero(&pagemap, page)));
        let failure = pagemap.zero(range(0, 512), &ZeroOptions::default().hint(hint)).unwrap_err();
        assert!(
            matches!(failure, WriteError::Addr(AddrError::HintOutside { hint: at, .. }) if at == hint),
            "{failure}"
        );
    }
}

#[test]
fn ranges_that_cut_a_folio_or_leave_the_region_are_refused() {
    let pagemap = used(9);
    let options = ZeroOptions::default();
    for asked in [range(0, 511), range(1, 511), range(100, 512)] {
        for failure in
            [pagemap.zero(asked, &options).unwrap_err(), pagemap.punch(asked).unwrap_err()]
        {
            assert!(matches!(failure, WriteError::CutsFolio { .. }), "{failure}");
        }
    }
    let outside = PfnRange::try_new(Pfn::new(BASE + 1536), PageCount::new(1024)).unwrap();
    for failure in
        [pagemap.zero(outside, &options).unwrap_err(), pagemap.punch(outside).unwrap_err()]
    {
        assert!(matches!(failure, WriteError::Pin(PinError::NotHere { .. })), "{failure}");
    }
    assert!((0..PAGES).step_by(100).all(|page| is_old(&pagemap, page)));
}

#[test]
fn pages_that_are_given_back_are_zero_and_take_no_memory() {
    for order in [0_u8, 9] {
        let pagemap = used(order);
        let pinned = pagemap.pin(range(0, 1)).unwrap();
        let resident = || pagemap.region().resident().unwrap().get();
        assert_eq!(resident(), PAGES * PAGE);
        let zeroed = pagemap.punch(pagemap.range()).unwrap();
        let kept = 1_u64 << order;
        assert_eq!((done(&zeroed), zeroed.left.len()), (PAGES - kept, 1));
        assert_eq!(resident(), kept * PAGE);
        assert!(is_old(&pagemap, 0) && (kept..PAGES).all(|page| is_zero(&pagemap, page)));
        assert_eq!(content(&pagemap, 2047), Content::Zero);
        drop(pinned);
        let zeroed = pagemap.zero(pagemap.range(), &ZeroOptions::default()).unwrap();
        assert_eq!((done(&zeroed), known(&zeroed)), (kept, PAGES - kept));
    }
}

/// Threads clear, pin and write at once: who pinned a page finds in it what it wrote, until it lets
/// go, and what is called zero is zero.
#[test]
fn no_thread_clears_a_page_under_its_pin() {
    for order in [0_u8, 3] {
        let pagemap = used(order);
        std::thread::scope(|scope| {
            for thread in 0..2_u64 {
                let pagemap = &pagemap;
                scope.spawn(move || {
                    for step in 0..400_u64 {
                        let page = (step * 131 + thread * 1024) % (PAGES - 8);
                        let pinned = match pagemap.pin(range(page, 8)) {
                            Ok(pinned) => pinned,
                            Err(PinError::Refused { .. }) => continue,
                            Err(other) => panic!("{other}"),
                        };
                        let stamp = [thread as u8 + 1; 64];
                        // The middle of the page, which the other thread does not write.
                        let at = page * PAGE + 64 * thread;
                        pinned.write_at(64 * thread, &stamp).unwrap();
                        std::thread::yield_now();
                        let mut found = [0; 64];
                        pagemap.region().read_at(at, &mut found).unwrap();
                        assert_eq!(found, stamp);
                        drop(pinned);
                    }
                });
            }
            for _ in 0..60 {
                let zeroed = pagemap.zero(pagemap.range(), &ZeroOptions::default()).unwrap();
                let is_bad = |(_, why): &(_, Unclearable)| *why == Unclearable::Poisoned;
                assert!(!zeroed.left.iter().any(is_bad));
            }
        });
        assert!(pagemap.zero(pagemap.range(), &ZeroOptions::default()).unwrap().is_whole());
        assert!((0..PAGES).all(|page| is_zero(&pagemap, page)));
    }
}

/// Memory that is mapped read-only can be bound and pinned, and not cleared or given back.
#[test]
fn memory_that_cannot_be_written_is_refused_and_its_content_stays_true() {
    use uzone_os::{Access, Mapping, Sharing};
    use uzone_zone::{Pool, PoolError, PoolOptions};

    let path = std::env::temp_dir().join(format!("uzone-read-only-{}", std::process::id()));
    std::fs::write(&path, vec![0xa5; (PAGES * PAGE) as usize]).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let len = ByteLen::new(PAGES * PAGE);
    let mapping = Mapping::file(file, 0, len, Access::ReadOnly, Sharing::Shared).unwrap();
    let region = Region::adopt(mapping).unwrap();
    let options = BindOptions::new(MemoryKind::Generic).base(Pfn::new(BASE));
    let pagemap = Zone::new().bind(region, options).unwrap();
    let options = ZeroOptions::default();
    let failure = pagemap.zero(range(0, 600), &options).unwrap_err();
    assert!(matches!(failure, WriteError::Access(_)), "{failure}");
    assert!(matches!(pagemap.punch(range(0, 600)), Err(WriteError::Punch(_))));
    assert!(pagemap.pages().all(|page| page.word().content() == Content::Unknown));
    assert!(pagemap.pin(pagemap.range()).is_ok());
    let pool = Pool::new(pagemap, PoolOptions::default().without_worker()).unwrap();
    assert!(matches!(pool.take(), Err(PoolError::Clear(_))));
    assert_eq!(pool.stats().used, 0);
    assert!(pool.into_pagemap().is_ok());
}

/// A panic of the caller's callback leaves no folio in a state that only the call could have ended.
#[test]
fn folios_are_free_to_others_after_a_callback_panicked() {
    let target = used(2);
    for threads in [1, 2] {
        let options = ZeroOptions::default()
            .threads(NonZeroUsize::new(threads).unwrap())
            .batch(ByteLen::kib(64))
            .on_batch(|_, _| panic!("the caller's own"));
        let clears = || target.zero(target.range(), &options).map(|_| ());
        assert!(catch_unwind(AssertUnwindSafe(clears)).is_err());
        drop(target.pin(target.range()).expect("no folio is still being cleared"));
    }
    assert!(target.zero(target.range(), &ZeroOptions::default()).unwrap().is_whole());
}

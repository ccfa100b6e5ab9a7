//! References and pins on real regions: what they cover, what they refuse, and what they keep.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{anonymous, is_mapped, pages_in, read};
use uzone_pages::{
    ByteLen, Content, HoldError, HoldKind, MemoryKind, Order, PageCount, Pfn, Tails,
};
use uzone_zone::{BindOptions, Pagemap, PinError, Region, WriteError, ZeroOptions, Zone};

fn bound(order: u8, tails: Tails) -> Pagemap {
    let options = BindOptions::new(MemoryKind::Generic).order(Order::new(order)).tails(tails);
    Zone::new().bind(anonymous(1 << 20), options).expect("a bind")
}

/// Returns the pins of every folio of the region, in order.
fn pins(pagemap: &Pagemap) -> Vec<u32> {
    let heads = pagemap.pages().filter(|page| !page.is_tail());
    heads.map(|page| page.word().pins()).collect()
}

#[test]
fn a_pin_holds_each_folio_of_its_range_once_and_no_other() {
    for tails in [Tails::Derived, Tails::Stored] {
        for order in [0, 1, 3, 8] {
            let pagemap = bound(order, tails);
            for (offset, pages) in [(0, 1), (0, 256), (5, 1), (5, 20), (7, 2), (8, 8), (255, 1)] {
                let pinned = pagemap.pin(pages_in(&pagemap, offset, pages)).unwrap();
                let (first, last) = (offset >> order, (offset + pages - 1) >> order);
                let expected: Vec<u32> = (0..256_u64 >> order)
                    .map(|folio| u32::from((first..=last).contains(&folio)))
                    .collect();
                assert_eq!(pins(&pagemap), expected, "order {order}, {offset} + {pages}");
                assert!(pagemap.maybe_pinned(Pfn::new(pagemap.range().start().get() + offset)));
                drop(pinned);
                assert!(pins(&pagemap).iter().all(|pins| *pins == 0));
            }
        }
    }
}

#[test]
fn segments_are_the_bytes_of_the_range() {
    let pagemap = bound(3, Tails::Derived);
    let address = pagemap.region().addr().get();
    let pinned = pagemap.pin(pages_in(&pagemap, 5, 20)).unwrap();
    let segments: Vec<_> = pinned.segments().collect();
    assert_eq!(segments.len(), 1);
    assert_eq!(segments[0].address, address + 5 * 4096);
    assert_eq!(segments[0].len_bytes, 20 * 4096);
    assert_eq!(segments[0].pfn, pinned.range().start());
    assert_eq!(pinned.pfns().count(), 20);
}

#[test]
fn bytes_are_in_the_pages_that_they_have_a_part_of() {
    let pagemap = bound(0, Tails::Derived);
    let at = |offset, len| pagemap.range_at(offset, ByteLen::new(len)).unwrap();
    assert_eq!(at(0, 1), pages_in(&pagemap, 0, 1));
    assert_eq!(at(4095, 2), pages_in(&pagemap, 0, 2));
    assert_eq!(at(4096, 4096), pages_in(&pagemap, 1, 1));
    assert_eq!(at(4095, 4098), pages_in(&pagemap, 0, 3));
    assert!(pagemap.range_at(0, ByteLen::ZERO).is_err());
    // And back, but for what is not of the region.
    for bytes in [0..4096, 4096..3 * 4096, 0..pagemap.region().len().get()] {
        let pages = at(bytes.start, bytes.end - bytes.start);
        assert_eq!(pagemap.bytes_of(pages), Some(bytes));
    }
    assert_eq!(pagemap.bytes_of(at(0, pagemap.region().len().get() + 1)), None);
    assert!(pagemap.range_at(u64::MAX, ByteLen::new(2)).is_err());
    assert!(pagemap.pin(at(1 << 20, 1)).is_err(), "one byte past the region");
}

#[test]
fn a_range_that_leaves_the_region_is_refused_whole() {
    let pagemap = bound(2, Tails::Derived);
    for (offset, pages) in [(0, 257), (255, 2), (256, 1)] {
        let asked = pages_in(&pagemap, offset, pages);
        assert_eq!(
            pagemap.pin(asked).err(),
            Some(PinError::NotHere { asked, region: pagemap.range() })
        );
    }
    assert!(pins(&pagemap).iter().all(|pins| *pins == 0));
}

#[test]
fn a_refused_folio_leaves_none_held_and_says_how_many_were_good() {
    let options = BindOptions::new(MemoryKind::Private).order(Order::new(2));
    let pagemap = Zone::new().bind(anonymous(1 << 20), options).unwrap();
    // Only the first five folios are handed out.
    let handed: Vec<_> = (0..5)
        .map(|folio| pagemap.hand_out(pages_in(&pagemap, folio * 4, 1).start()).unwrap())
        .collect();
    let failure = pagemap.pin(pages_in(&pagemap, 6, 40)).unwrap_err();
    let refused = pages_in(&pagemap, 20, 1).start();
    assert_eq!(
        failure,
        PinError::Refused { pfn: refused, good: PageCount::new(14), cause: HoldError::Free }
    );
    assert!(pins(&pagemap).iter().all(|pins| *pins == 0));
    let good = pagemap.pin(pages_in(&pagemap, 6, 14)).unwrap();
    drop(handed);
    // A pin keeps the folios from being free, though no reference is left.
    assert!(!pagemap.page(good.range().start()).unwrap().word().is_free());
    drop(good);
    assert!(pagemap.pages().all(|page| page.word().is_free()));
    assert!(pagemap.unbind().is_ok());
}

#[test]
fn a_split_guard_is_two_that_hold_as_much() {
    let pagemap = bound(3, Tails::Derived);
    for at in 1..20 {
        let pinned = pagemap.pin(pages_in(&pagemap, 5, 20)).unwrap();
        let before = pins(&pagemap);
        let (first, second) = pinned.split(PageCount::new(at)).unwrap();
        assert_eq!(first.range(), pages_in(&pagemap, 5, at));
        assert_eq!(second.range(), pages_in(&pagemap, 5 + at, 20 - at));
        let shared = usize::from((5 + at) % 8 != 0);
        assert_eq!(
            pins(&pagemap).iter().sum::<u32>(),
            before.iter().sum::<u32>() + u32::try_from(shared).unwrap()
        );
        drop(first);
        let rest = pins(&pagemap);
        for (folio, pins) in rest.iter().enumerate() {
            let is_held = folio as u64 >= (5 + at) / 8 && folio as u64 <= 24 / 8;
            assert_eq!(*pins, u32::from(is_held), "split at {at}, folio {folio}");
        }
        drop(second);
        assert!(pins(&pagemap).iter().all(|pins| *pins == 0));
    }
    for at in [0, 20, 21, u64::MAX] {
        let pinned = pagemap.pin(pages_in(&pagemap, 5, 20)).unwrap();
        let (pinned, _) = pinned.split(PageCount::new(at)).unwrap_err();
        assert_eq!(pinned.range(), pages_in(&pagemap, 5, 20));
    }
    assert!(pagemap.unbind().is_ok());
}

#[test]
fn unbind_names_the_holders_of_the_region_and_gives_it_back_in_use() {
    let pagemap = bound(2, Tails::Derived);
    let pinned = pagemap.pin(pages_in(&pagemap, 40, 2)).unwrap();
    let again = pinned.try_clone().unwrap();
    let referenced = pagemap.get(pages_in(&pagemap, 3, 1)).unwrap();
    let busy = pagemap.unbind().unwrap_err();
    assert_eq!((busy.pins, busy.references), (2, 1));
    if cfg!(debug_assertions) {
        assert_eq!(busy.holders.len(), 3);
        assert_eq!(busy.holders[0].sort, HoldKind::Reference);
        assert!(busy.holders[0].caller.file().ends_with("hold.rs"));
        assert!(busy.to_string().contains("hold.rs"), "{busy}");
    }
    assert!(busy.to_string().contains("2 pins and 1 references"), "{busy}");
    let pagemap = *busy.pagemap;
    let more = pagemap.pin(pages_in(&pagemap, 0, 256)).expect("it is in use as before");
    drop((pinned, again, referenced, more));
    assert_eq!(pagemap.unbind().unwrap().len(), ByteLen::mib(1));
}

#[test]
fn unbind_waits_for_the_last_guard_and_admits_none_meanwhile() {
    let pagemap = bound(2, Tails::Derived);
    let pinned = pagemap.pin(pages_in(&pagemap, 40, 2)).unwrap();
    let is_waiting = Arc::new(AtomicBool::new(false));
    let holder = {
        let is_waiting = is_waiting.clone();
        std::thread::spawn(move || {
            while !is_waiting.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            // Until the pagemap closes, another guard is admitted; from then on none is.
            while pinned.try_clone().is_ok() {
                std::thread::yield_now();
            }
            assert!(matches!(pinned.try_clone(), Err(PinError::NotAdmitted(_))));
            drop(pinned);
        })
    };
    is_waiting.store(true, Ordering::Release);
    let region = pagemap.unbind_by(Instant::now() + Duration::from_secs(60)).unwrap();
    assert_eq!(region.len(), ByteLen::mib(1));
    holder.join().unwrap();
}

#[test]
fn an_unbind_that_gives_up_leaves_the_pagemap_in_use() {
    let pagemap = bound(0, Tails::Derived);
    let pinned = pagemap.pin(pages_in(&pagemap, 0, 1)).unwrap();
    let busy = pagemap.unbind_by(Instant::now() + Duration::from_millis(5)).unwrap_err();
    assert!(pinned.try_clone().is_ok());
    assert!(busy.pagemap.pin(pinned.range()).is_ok());
    // A deadline that has passed is no wait.
    let busy = busy.pagemap.unbind_by(Instant::now()).unwrap_err();
    assert_eq!(busy.pins, 1);
    drop(pinned);
    assert!(busy.pagemap.unbind().is_ok());
}

#[test]
fn memory_under_a_pin_outlives_a_pagemap_that_is_dropped() {
    let zone = Zone::new();
    let pagemap = zone.bind(anonymous(1 << 20), BindOptions::new(MemoryKind::Generic)).unwrap();
    pagemap.pin_and_write(5000, b"still here").unwrap();
    let pinned = pagemap.pin(pages_in(&pagemap, 1, 1)).unwrap();
    let segment = pinned.segments().next().unwrap();
    drop(pagemap);
    assert_eq!(zone.bound().len(), 1, "its frame numbers are taken");
    assert!(is_mapped(segment.address), "{:#x} is not mapped any more", segment.address);
    assert_eq!(pinned.page::<()>(segment.pfn).unwrap().word().pins(), 1);
    assert!(pinned.page::<uzone_pages::LinuxPage>(segment.pfn).is_none(), "another payload");
    drop(pinned);
    assert!(zone.bound().is_empty());
}

#[test]
fn a_forgotten_guard_keeps_the_region_for_good() {
    let pagemap = bound(0, Tails::Derived);
    std::mem::forget(pagemap.pin(pages_in(&pagemap, 0, 1)).unwrap());
    assert_eq!(pagemap.unbind().unwrap_err().pins, 1);
}

/// Threads pin and give back at random while others try to unbind: no pin is ever lost, and a region
/// is given back only when no page of it is held.
#[test]
fn threads_that_pin_and_unbind_never_lose_a_pin() {
    let zone = Zone::new();
    let pinned_total = Arc::new(AtomicU64::new(0));
    let mut region = anonymous(1 << 20);
    for round in 0..200_u64 {
        let options = BindOptions::new(MemoryKind::Generic).order(Order::new(2));
        let mut pagemap = zone.bind(region, options).unwrap();
        let in_use = Arc::new(AtomicU64::new(0));
        let pinned_before = pinned_total.load(Ordering::Relaxed);
        let workers: Vec<_> = (0..3_u64)
            .map(|worker| {
                let first = pagemap.pin(pages_in(&pagemap, worker * 60, 70)).unwrap();
                in_use.fetch_add(1, Ordering::SeqCst);
                let (in_use, total) = (in_use.clone(), pinned_total.clone());
                std::thread::spawn(move || {
                    let mut guards = vec![first];
                    for step in 0..20 {
                        let pages = PageCount::new(1 + (round + step) % 60);
                        if let Ok(more) = guards[0].try_clone() {
                            in_use.fetch_add(1, Ordering::SeqCst);
                            match more.split(pages) {
                                Ok((front, back)) => {
                                    drop(front);
                                    guards.push(back);
                                }
                                Err((whole, _)) => guards.push(whole),
                            }
                            total.fetch_add(1, Ordering::Relaxed);
                        }
                        if step % 3 == 0 && guards.len() > 1 {
                            in_use.fetch_sub(1, Ordering::SeqCst);
                            drop(guards.pop());
                        }
                    }
                    // Counted out before they go, so that zero means that none is left.
                    in_use.fetch_sub(guards.len() as u64, Ordering::SeqCst);
                })
            })
            .collect();
        // Half of the rounds wait until a thread has pinned: where threads take turns on one CPU, the
        // others may close the region before one can.
        let deadline = Instant::now() + Duration::from_secs(60);
        while round % 2 == 0 && pinned_total.load(Ordering::Relaxed) == pinned_before {
            assert!(Instant::now() < deadline, "no pin of a region that is open");
            std::thread::yield_now();
        }
        region = loop {
            match pagemap.unbind_by(Instant::now() + Duration::from_micros(50)) {
                Ok(region) => break region,
                Err(busy) => pagemap = *busy.pagemap,
            }
        };
        assert_eq!(in_use.load(Ordering::SeqCst), 0, "unbound while a thread held a page");
        for worker in workers {
            worker.join().unwrap();
        }
    }
    assert!(pinned_total.load(Ordering::Relaxed) > 0);
}

#[test]
fn bytes_are_written_under_a_pin_by_calls_that_say_so() {
    let region = Region::anonymous(ByteLen::mib(2)).unwrap();
    let pagemap = Zone::new().bind(region, BindOptions::new(MemoryKind::Generic)).unwrap();
    let page = pagemap.region().page_size().bytes();
    let pinned = pagemap.pin(pagemap.range_at(page, ByteLen::new(2 * page)).unwrap()).unwrap();
    pinned.write_at(5, b"five").unwrap();
    assert_eq!(&read(|out| pagemap.region().read_at(page + 5, out)), b"five");
    assert_eq!(&read(|out| pinned.read_at(5, out)), b"five");
    let words = pinned.as_words(8..16).unwrap();
    words[0].store(u64::from_le_bytes(*b"in place"), Ordering::Relaxed);
    assert_eq!(&read(|out| pagemap.region().read_at(page + 8, out)), b"in place");
    for range in [0..4, 2 * page - 8..2 * page + 8, u64::MAX - 8..u64::MAX] {
        assert!(pinned.as_words(range).is_err());
    }
    assert_eq!(pinned.as_ptr().addr(), pinned.segments().next().unwrap().address);
    assert_eq!(pinned.as_ptr().addr(), pagemap.region().as_ptr().addr() + 4096);
    pinned.write_at(5, b"five").unwrap();
    // Not past the pages of the guard.
    assert!(pinned.write_at(2 * page - 3, b"five").is_err());
    assert!(pinned.read_at(u64::MAX, &mut [0; 4]).is_err());
    // Clearing and discarding are refused.
    assert!(pagemap.punch(pinned.range()).unwrap().done.is_empty());
    assert!(pagemap.zero(pinned.range(), &ZeroOptions::default()).unwrap().done.is_empty());
    assert_eq!(&read(|out| pinned.read_at(5, out)), b"five");
    drop(pinned);
    // A page is filled by the thread that has made it so, and written by no other call meanwhile.
    let first = pagemap.range().start();
    assert!(
        matches!(pagemap.fill_at(0, b"data"), Err(WriteError::NotFilling { pfn, .. }) if pfn == first)
    );
    pagemap.advance(first, Content::Unknown, Content::Absent).unwrap();
    pagemap.advance(first, Content::Absent, Content::Filling).unwrap();
    assert!(matches!(pagemap.pin_and_write(0, b"data"), Err(WriteError::Pin(_))));
    pagemap.fill_at(0, b"data").unwrap();
    assert!(matches!(pagemap.fill_at(page - 2, b"data"), Err(WriteError::NotFilling { .. })));
    pagemap.advance(first, Content::Filling, Content::Present).unwrap();
    assert_eq!(&read(|out| pagemap.region().read_at(0, out)), b"data");
    assert!(pagemap.pin_and_write(ByteLen::mib(2).get() - 1, b"data").is_err());
    assert!(pagemap.fill_at(u64::MAX, b"data").is_err());
    assert!(pagemap.advance(Pfn::new(0), Content::Unknown, Content::Absent).is_err());
}

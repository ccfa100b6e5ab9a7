//! Bad pages: one page and no other, reported to its holders, and remembered on request.

use std::sync::{Arc, Mutex};

use crate::common::range;
use uzone_pages::{
    ByteLen, Content, HoldError, MemoryKind, Order, PageCount, Pfn, PfnRange, Tails,
};
use uzone_zone::{BindOptions, Pagemap, PagemapOps, PinError, Poisoned, Region, Zone};

fn bind(order: u8, tails: Tails) -> Pagemap {
    let region = Region::anonymous(ByteLen::mib(8)).unwrap();
    let options = BindOptions::new(MemoryKind::Generic).order(Order::new(order)).tails(tails);
    Zone::new().bind(region, options.base(Pfn::new(0x1000))).unwrap()
}

#[test]
fn a_bad_page_is_refused_and_its_neighbours_are_not() {
    for (order, tails) in
        [(0, Tails::Derived), (9, Tails::Derived), (9, Tails::Stored), (2, Tails::Derived)]
    {
        let pagemap = bind(order, tails);
        // A head, a tail in the middle, and the last page of all.
        for bad in [0x1000, 0x1203, 0x17ff] {
            pagemap.poison(Pfn::new(bad)).unwrap();
            assert!(pagemap.is_poisoned(Pfn::new(bad)));
        }
        for pfn in pagemap.range().iter() {
            let pinned = pagemap.pin(PfnRange::try_single(pfn).unwrap());
            match pinned {
                Ok(_) => assert!(!pagemap.is_poisoned(pfn), "{pfn}"),
                Err(PinError::Poisoned { pfn: bad, good }) => {
                    assert_eq!((bad, good), (pfn, Vec::new()));
                    assert!(pagemap.is_poisoned(pfn), "{pfn}");
                }
                Err(other) => panic!("{other}"),
            }
        }
        let failure = pagemap.pin(range(0x1001, 0x7ff)).unwrap_err();
        let PinError::Poisoned { pfn, good } = failure else { panic!("{failure}") };
        assert_eq!(pfn, Pfn::new(0x1203));
        assert_eq!(good, [range(0x1001, 0x202), range(0x1204, 0x5fb)]);
        let guards: Vec<_> = good.into_iter().map(|good| pagemap.pin(good).unwrap()).collect();
        assert!(guards.iter().all(|guard| guard.bad_pages().is_empty()));
        drop(guards);
        assert_eq!(pagemap.bad_pages(pagemap.range()).len(), 3);
        // References keep a descriptor's meaning, and that has none of the bytes.
        assert!(pagemap.get(pagemap.range()).is_ok());
        assert!(pagemap.pages().all(|page| page.word().pins() == 0));
    }
}

#[test]
fn a_bad_page_that_is_unpoisoned_is_as_good_as_any() {
    for order in [0, 3] {
        let pagemap = bind(order, Tails::Derived);
        let before: Vec<_> = pagemap.pages().map(uzone_pages::PageView::word).collect();
        let bad = [0x1008, 0x1009, 0x100f].map(Pfn::new);
        for pfn in bad {
            pagemap.poison(pfn).unwrap();
        }
        for (unpoisoned, pfn) in bad.into_iter().enumerate() {
            pagemap.unpoison(pfn).unwrap();
            assert!(pagemap.pin(PfnRange::try_single(pfn).unwrap()).is_ok());
            assert_eq!(pagemap.pin(range(0x1008, 8)).is_ok(), unpoisoned == 2);
        }
        let after: Vec<_> = pagemap.pages().map(uzone_pages::PageView::word).collect();
        assert_eq!(before, after);
    }
}

#[test]
fn what_cannot_be_poisoned_or_unpoisoned_is_named() {
    for order in [0, 9] {
        let pagemap = bind(order, Tails::Derived);
        let (inside, outside) = (Pfn::new(0x1234), Pfn::new(0x1800));
        let (region, asked) = (pagemap.range(), PfnRange::try_single(outside).unwrap());
        assert_eq!(pagemap.poison(outside).unwrap_err(), PinError::NotHere { asked, region });
        assert_eq!(pagemap.unpoison(outside).unwrap_err(), PinError::NotHere { asked, region });
        assert_eq!(pagemap.unpoison(inside).unwrap_err(), PinError::NotPoisoned { pfn: inside });
        let last = Pfn::new(u64::MAX);
        assert_eq!(pagemap.poison(last).unwrap_err(), PinError::NoPage { pfn: last });
        pagemap.poison(inside).unwrap();
        assert_eq!(pagemap.poison(inside).unwrap_err(), PinError::AlreadyPoisoned { pfn: inside });
        assert!(!pagemap.is_poisoned(outside));
    }
}

#[test]
fn the_holders_of_a_page_that_goes_bad_are_counted_for_its_owner() {
    for order in [0, 9] {
        let seen: Arc<Mutex<Vec<Poisoned>>> = Arc::default();
        let ops = {
            let seen = seen.clone();
            PagemapOps::default().on_poison(move |poisoned| seen.lock().unwrap().push(poisoned))
        };
        let region = Region::anonymous(ByteLen::mib(8)).unwrap();
        let options = BindOptions::new(MemoryKind::Generic).order(Order::new(order)).ops(ops);
        let pagemap = Zone::new().bind(region, options.base(Pfn::new(0x1000))).unwrap();
        // One by the block, one by the page, one that has another page of the folio only.
        let whole = pagemap.pin(range(0x1000, 0x800)).unwrap();
        let single = pagemap.pin(range(0x1203, 1)).unwrap();
        let other = pagemap.pin(range(0x1300, 1)).unwrap();
        let poisoned = pagemap.poison(Pfn::new(0x1203)).unwrap();
        assert_eq!(poisoned.pins, if order == 0 { 2 } else { 3 });
        assert_eq!(poisoned.references, 1);
        assert_eq!(*seen.lock().unwrap(), [poisoned]);
        assert_eq!(whole.bad_pages(), [Pfn::new(0x1203)]);
        assert_eq!(single.bad_pages(), [Pfn::new(0x1203)]);
        assert!(other.bad_pages().is_empty());
        // Holders keep what they have and may split it; the page gives no new pin.
        assert!(matches!(whole.try_clone(), Err(PinError::Poisoned { .. })));
        let (first, second) = whole.split(PageCount::new(0x203)).unwrap();
        assert!(first.bad_pages().is_empty());
        assert_eq!(second.bad_pages(), [Pfn::new(0x1203)]);
        drop((first, second, single, other));
        assert!(pagemap.pages().all(|page| page.word().pins() == 0));
    }
}

#[test]
fn a_page_that_goes_bad_while_it_is_cleared_is_unpoisoned_only_afterwards() {
    let pagemap = bind(0, Tails::Derived);
    let pfn = Pfn::new(0x1234);
    let page = pagemap.page(pfn).unwrap();
    pagemap.advance(pfn, Content::Unknown, Content::Zeroing).unwrap();
    pagemap.poison(pfn).unwrap();
    assert_eq!(pagemap.unpoison(pfn), Err(PinError::Owned { pfn }));
    assert!(pagemap.is_poisoned(pfn));
    assert!(pagemap.advance(pfn, Content::Zeroing, Content::Zero).is_err());
    assert_eq!(pagemap.unpoison(pfn), Ok(()));
    assert_eq!(page.word().content(), Content::Unknown);
    assert!(pagemap.pin(pagemap.range()).is_ok());
}

#[test]
fn a_bad_page_is_not_handed_out() {
    let region = Region::anonymous(ByteLen::mib(1)).unwrap();
    let options = BindOptions::new(MemoryKind::Private);
    let pagemap = Zone::new().bind(region, options).unwrap();
    let pfn = pagemap.range().start();
    pagemap.poison(pfn).unwrap();
    assert!(
        matches!(pagemap.hand_out(pfn), Err(PinError::Poisoned { pfn: bad, .. }) if bad == pfn)
    );
    pagemap.unpoison(pfn).unwrap();
    assert!(pagemap.hand_out(pfn).is_ok());
}

#[test]
fn poison_survives_a_rebind_when_asked_and_leaves_no_trace_otherwise() {
    for order in [0_u8, 9] {
        let zone = Zone::new();
        let options = || {
            BindOptions::new(MemoryKind::Generic).order(Order::new(order)).base(Pfn::new(0x1000))
        };
        let region = Region::anonymous(ByteLen::mib(8)).unwrap();
        assert!(region.bad_pages().is_empty());
        let pagemap = zone.bind(region, options()).unwrap();
        let fresh: Vec<_> = pagemap.pages().map(uzone_pages::PageView::word).collect();
        pagemap.poison(Pfn::new(0x1005)).unwrap();
        pagemap.poison(Pfn::new(0x17fe)).unwrap();
        let region = pagemap.unbind().unwrap();
        assert_eq!(region.bad_pages(), [5, 0x7fe].map(PageCount::new));
        // With other numbers: what is bad is the memory, not its name.
        let pagemap = zone.bind(region, options().base(Pfn::new(0x8000)).keep_poison()).unwrap();
        assert_eq!(pagemap.bad_pages(pagemap.range()), [0x8005, 0x87fe].map(Pfn::new));
        assert!(matches!(pagemap.pin(pagemap.range()), Err(PinError::Poisoned { .. })));
        pagemap.unpoison(Pfn::new(0x8005)).unwrap();
        let region = pagemap.unbind().unwrap();
        assert_eq!(region.bad_pages(), [PageCount::new(0x7fe)]);
        let pagemap = zone.bind(region, options()).unwrap();
        let again: Vec<_> = pagemap.pages().map(uzone_pages::PageView::word).collect();
        assert_eq!(fresh, again);
        assert!(pagemap.pin(pagemap.range()).is_ok());
        assert!(pagemap.unbind().unwrap().bad_pages().is_empty());
    }
}

#[test]
fn a_page_of_base_pages_says_that_it_is_bad() {
    let pagemap = bind(0, Tails::Derived);
    let pfn = Pfn::new(0x1234);
    pagemap.poison(pfn).unwrap();
    assert_eq!(pagemap.page(pfn).unwrap().word().content(), Content::Poisoned);
    let folios = bind(9, Tails::Derived);
    folios.poison(pfn).unwrap();
    let word = folios.page(pfn).unwrap().word();
    assert!(word.is_partly_poisoned() && word.content() == Content::Unknown);
    assert_eq!(HoldError::Content(Content::Poisoned).to_string(), "the page's content is poisoned");
}

/// Threads mark and unpoison pages of the same folios while others pin: at the end list and words agree.
#[test]
fn threads_that_poison_and_unpoison_leave_list_and_words_in_agreement() {
    for order in [0, 3] {
        let pagemap = bind(order, Tails::Derived);
        std::thread::scope(|scope| {
            for thread in 0..3_u64 {
                let pagemap = &pagemap;
                scope.spawn(move || {
                    for step in 0..3000_u64 {
                        let pfn = Pfn::new(0x1000 + (step * 7 + thread * 3) % 24);
                        if thread == 2 {
                            if let Ok(pinned) = pagemap.pin(range(0x1000, 0x400)) {
                                drop(pinned.split(PageCount::new(1 + step % 600)));
                            }
                        } else if pagemap.poison(pfn).is_err() {
                            let _ = pagemap.unpoison(pfn);
                        }
                    }
                });
            }
        });
        for pfn in pagemap.range().iter() {
            let is_bad = pagemap.pin(PfnRange::try_single(pfn).unwrap()).is_err();
            assert_eq!(is_bad, pagemap.is_poisoned(pfn), "{pfn}");
            let _ = pagemap.unpoison(pfn);
        }
        drop(pagemap.pin(pagemap.range()).unwrap());
        assert!(pagemap.unbind().is_ok());
    }
}

//! Every interleaving of two or three threads on one page's word, and on a pool's (`loom/pool.rs`),
//! searched by loom.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p uzone-pages --test loom --release`.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;
use uzone_pages::{
    BLOCK_ORDER, Block, Content, Folio, HoldError, HoldKind, Layout, Memmap, MemoryKind, Order,
    Page, Pfn, PfnRange, Span, Tails, Word,
};

#[path = "loom/pool.rs"]
mod pool;
#[path = "loom/seen.rs"]
mod seen;

use seen::{Seen, beside, search};

fn folio(page: &Page, kind: MemoryKind) -> Folio<'_> {
    Folio::new(page, Word::initial(kind))
}

const GENERIC: MemoryKind = MemoryKind::Generic;
const PRIVATE: MemoryKind = MemoryKind::Private;

#[test]
fn of_two_owners_that_hand_a_page_out_one_succeeds() {
    loom::model(|| {
        let page = Arc::new(Page::new(()));
        let other = beside(&page, |page| folio(page, PRIVATE).take_first());
        let mine = folio(&page, PRIVATE).take_first();
        assert_ne!(mine, other.join().unwrap());
        assert_eq!(folio(&page, PRIVATE).word().references(), 1);
    });
}

/// A taker comes while the owner hands the page out and takes it back: it is refused, or it holds
/// the page; and when all is given back the page is free, which exactly one thread learns.
#[test]
fn a_taker_beside_a_short_life_is_refused_or_holds_the_page() {
    search(2, |marks| {
        let page = Arc::new(Page::new(()));
        let last_seen = Arc::new(AtomicUsize::new(0));
        let taker = {
            let (page, last_seen) = (page.clone(), last_seen.clone());
            let marks = marks.clone();
            thread::spawn(move || {
                let folio = folio(&page, PRIVATE);
                match folio.try_hold(HoldKind::Reference).map(drop) {
                    Ok(()) => {
                        marks.mark(0);
                        if folio.release(HoldKind::Reference).unwrap() {
                            last_seen.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    Err(error) => {
                        assert_eq!(error, HoldError::Free);
                        marks.mark(1);
                    }
                }
            })
        };
        let owner = folio(&page, PRIVATE);
        assert!(owner.take_first());
        if owner.release(HoldKind::Reference).unwrap() {
            last_seen.fetch_add(1, Ordering::Relaxed);
        }
        taker.join().unwrap();
        assert_eq!(folio(&page, PRIVATE).word(), Word::initial(PRIVATE));
        assert_eq!(last_seen.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn two_takers_on_a_free_page_do_not_mistake_each_other_for_holders() {
    loom::model(|| {
        let page = Arc::new(Page::new(()));
        let other = beside(&page, |page| folio(page, PRIVATE).try_hold(HoldKind::Pin).map(drop));
        assert_eq!(
            folio(&page, PRIVATE).try_hold(HoldKind::Reference).map(drop),
            Err(HoldError::Free)
        );
        assert_eq!(other.join().unwrap(), Err(HoldError::Free));
        assert_eq!(folio(&page, PRIVATE).word(), Word::initial(PRIVATE));
    });
}

/// A generic page is never free: giving the base reference back leaves it with that, and no
/// thread that takes meanwhile sees it without.
#[test]
fn a_generic_page_is_never_seen_without_a_reference() {
    loom::model(|| {
        let page = Arc::new(Page::new(()));
        let other = beside(&page, |page| {
            let folio = folio(page, GENERIC);
            assert!(!folio.word().is_free());
            assert_eq!(folio.try_hold(HoldKind::Reference).map(drop), Ok(()));
            folio.release(HoldKind::Reference).unwrap()
        });
        let mine = folio(&page, GENERIC).release(HoldKind::Reference);
        let theirs = other.join().unwrap();
        assert_eq!(folio(&page, GENERIC).word(), Word::initial(GENERIC));
        // Each gave one back that was there: the base reference, and its own.
        assert!(mine == Ok(true) || theirs);
    });
}

#[test]
fn a_new_holder_sees_what_the_holder_before_wrote() {
    loom::model(|| {
        let page = Arc::new(Page::new(()));
        let prepared = Arc::new(AtomicBool::new(false));
        let owner = {
            let (page, prepared) = (page.clone(), prepared.clone());
            thread::spawn(move || {
                // Relaxed on purpose: only the page's word orders it.
                prepared.store(true, Ordering::Relaxed);
                assert!(folio(&page, PRIVATE).take_first());
            })
        };
        if folio(&page, PRIVATE).try_hold(HoldKind::Reference).is_ok() {
            assert!(prepared.load(Ordering::Relaxed));
        }
        owner.join().unwrap();
    });
}

#[test]
fn a_content_step_has_one_owner_whatever_the_counts_do() {
    loom::model(|| {
        let page = Arc::new(Page::new(()));
        let steps: Vec<_> = (0..2)
            .map(|_| {
                beside(&page, |page| {
                    let folio = folio(page, GENERIC);
                    folio.advance(Content::Unknown, Content::Zeroing).is_ok()
                })
            })
            .collect();
        assert_eq!(folio(&page, GENERIC).try_hold(HoldKind::Reference).map(drop), Ok(()));
        let owners = steps.into_iter().map(|step| step.join().unwrap());
        assert_eq!(owners.filter(|owns| *owns).count(), 1);
        let word = folio(&page, GENERIC).word();
        assert_eq!((word.references(), word.content()), (2, Content::Zeroing));
    });
}

/// One block of base pages, two under the model checker.
struct Blocked {
    memmap: Memmap<(), Vec<Page>, Vec<Block>>,
    /// What holders write and who takes the bytes away reads; only the words order it.
    bytes: AtomicBool,
}

impl Blocked {
    fn new() -> Arc<Self> {
        let range = PfnRange::try_new(Pfn::new(8), BLOCK_ORDER.pages()).unwrap();
        let layout = Layout::try_new(range, Order::BASE, Tails::Derived).unwrap();
        let descriptors: Vec<Page> = range.iter().map(|_| Page::new(())).collect();
        let memmap = Memmap::try_new(layout, GENERIC, descriptors).unwrap();
        let memmap = memmap.with_blocks(vec![Block::default()]).unwrap();
        Arc::new(Self { memmap, bytes: AtomicBool::new(false) })
    }

    fn page(&self, index: u64) -> Folio<'_> {
        self.memmap.folio(Pfn::new(8 + index)).unwrap()
    }

    fn hold(&self, sort: HoldKind) -> Result<Span, (Pfn, HoldError)> {
        self.memmap.hold(self.memmap.layout().range(), sort, |_| None)
    }

    fn release(&self, span: Span, sort: HoldKind) {
        self.memmap.release(span, sort);
    }

    /// Whether every count is as it was and no inhibitor is left.
    fn assert_fresh(&self) {
        for index in 0..BLOCK_ORDER.pages().get() {
            assert_eq!(self.page(index).word(), Word::initial(GENERIC));
        }
        for sort in [HoldKind::Reference, HoldKind::Pin] {
            let span = self.hold(sort).expect("no inhibitor is left");
            self.release(span, sort);
        }
    }
}

/// A page of a block that is pinned as a whole is cleared or pinned, never both; and the clearing
/// thread sees what the pin's holder wrote.
#[test]
fn a_page_is_cleared_or_its_block_pinned_never_both() {
    search(3, |marks| {
        let blocked = Blocked::new();
        let pinner = {
            let blocked = blocked.clone();
            let marks = marks.clone();
            thread::spawn(move || match blocked.hold(HoldKind::Pin) {
                Ok(span) => {
                    assert!(blocked.page(1).word().content().is_pinnable());
                    blocked.bytes.store(true, Ordering::Relaxed);
                    blocked.release(span, HoldKind::Pin);
                    marks.mark(0);
                    true
                }
                Err((_, cause)) => {
                    assert!(matches!(
                        cause,
                        HoldError::Content(Content::Zeroing) | HoldError::Busy
                    ));
                    marks.mark(1);
                    false
                }
            })
        };
        let page = blocked.page(1);
        let is_cleared = page.advance(Content::Unknown, Content::Zeroing).is_ok();
        if is_cleared {
            let saw = blocked.bytes.load(Ordering::Relaxed);
            assert_eq!(page.advance(Content::Zeroing, Content::Unknown), Ok(()));
            let pinned = pinner.join().unwrap();
            // A pin before the clearing is seen; a pin after it is not.
            assert!(pinned || !saw);
        } else {
            marks.mark(2);
            assert!(pinner.join().unwrap());
        }
        blocked.assert_fresh();
    });
}

/// The same with a pin of one page beside one of the block: three threads.
#[test]
fn beside_pins_of_a_page_and_of_its_block_clearing_comes_before_or_after() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let blocked = Blocked::new();
        let pinners = [false, true].map(|is_whole| {
            beside(&blocked, move |blocked| {
                if is_whole {
                    if let Ok(span) = blocked.hold(HoldKind::Pin) {
                        assert!(blocked.page(0).word().content().is_pinnable());
                        blocked.release(span, HoldKind::Pin);
                    }
                } else if blocked.page(0).try_hold(HoldKind::Pin).is_ok() {
                    assert!(blocked.page(0).word().content().is_pinnable());
                    let _ = blocked.page(0).release(HoldKind::Pin).unwrap();
                }
            })
        });
        let page = blocked.page(0);
        if page.advance(Content::Unknown, Content::Zeroing).is_ok() {
            assert_eq!(page.advance(Content::Zeroing, Content::Unknown), Ok(()));
        }
        for pinner in pinners {
            pinner.join().unwrap();
        }
        blocked.assert_fresh();
    });
}

/// A page goes bad while its block is being pinned: the pin is refused, or the
/// poisoning thread sees that there is a holder to warn.
#[test]
fn a_pin_of_a_bad_page_is_refused_or_its_holder_learns_of_it() {
    let seen = Seen::new(2);
    for is_whole in [false, true] {
        let marks = seen.clone();
        loom::model(move || {
            let blocked = Blocked::new();
            let pinner = beside(&blocked, move |blocked| {
                if is_whole {
                    blocked.hold(HoldKind::Pin).is_ok()
                } else {
                    blocked.page(1).try_hold(HoldKind::Pin).is_ok()
                }
            });
            let word = blocked.page(1).poison().expect("it was good");
            let is_pinned = pinner.join().unwrap();
            // A taker that is about to be refused may be counted for a moment, and is warned for nothing.
            assert!(!is_pinned || word.pins() == 1 || blocked.page(1).word().pins() == 0);
            marks.mark(usize::from(is_pinned));
        });
    }
    seen.assert_all();
}

/// The same for a folio of which one page goes bad: who lists the page before the flag is set is
/// seen by every later pin, and every earlier pin is seen by it.
#[test]
fn a_pin_of_a_folio_with_a_bad_page_is_warned_or_its_holder_learns_of_it() {
    search(2, |marks| {
        let shared = Arc::new((Page::new(()), AtomicBool::new(false)));
        let pinner = {
            let shared = shared.clone();
            let marks = marks.clone();
            thread::spawn(move || {
                let (page, is_listed) = &*shared;
                let before = folio(page, GENERIC).try_hold(HoldKind::Pin).unwrap();
                if before.is_partly_poisoned() {
                    assert!(is_listed.load(Ordering::Relaxed));
                    let _ = folio(page, GENERIC).release(HoldKind::Pin).unwrap();
                }
                marks.mark(usize::from(before.is_partly_poisoned()));
                !before.is_partly_poisoned()
            })
        };
        let (page, is_listed) = &*shared;
        is_listed.store(true, Ordering::Relaxed);
        let before = folio(page, GENERIC).set_partly_poisoned(true);
        let is_held = pinner.join().unwrap();
        assert!(!is_held || before.pins() == 1);
    });
}

/// A guard over a block is split and one half dropped while another thread wants to clear a page of it:
/// not before the other half is dropped as well.
#[test]
fn a_block_whose_guard_is_split_is_held_until_both_parts_are_gone() {
    search(2, |marks| {
        let blocked = Blocked::new();
        let whole = blocked.hold(HoldKind::Pin).unwrap();
        let holder = beside(&blocked, move |blocked| {
            let one = Order::BASE.pages();
            let (first, second) = blocked.memmap.split(whole, HoldKind::Pin, one).unwrap();
            blocked.release(first, HoldKind::Pin);
            assert!(blocked.page(1).word().content().is_pinnable());
            blocked.bytes.store(true, Ordering::Relaxed);
            blocked.release(second, HoldKind::Pin);
        });
        let page = blocked.page(1);
        let mut is_cleared = page.advance(Content::Unknown, Content::Zeroing).is_ok();
        if !is_cleared {
            // A refused step has only read, and the search does not branch where nothing is written.
            thread::yield_now();
            is_cleared = page.advance(Content::Unknown, Content::Zeroing).is_ok();
        }
        if is_cleared {
            assert!(blocked.bytes.load(Ordering::Relaxed), "before the last part was dropped");
            assert_eq!(page.advance(Content::Zeroing, Content::Unknown), Ok(()));
        }
        marks.mark(usize::from(is_cleared));
        holder.join().unwrap();
        blocked.assert_fresh();
    });
}

/// A run of pages is cleared beside a pin of the block: the inhibitors of the run keep the pin off from
/// before its first page to after its last.
#[test]
fn a_run_of_pages_is_cleared_or_its_block_pinned_never_both() {
    search(2, |marks| {
        let blocked = Blocked::new();
        let range = blocked.memmap.layout().range();
        let pinner = {
            let blocked = blocked.clone();
            let marks = marks.clone();
            thread::spawn(move || {
                if let Ok(span) = blocked.hold(HoldKind::Pin) {
                    for index in 0..BLOCK_ORDER.pages().get() {
                        assert!(blocked.page(index).word().content().is_pinnable());
                    }
                    blocked.release(span, HoldKind::Pin);
                    marks.mark(0);
                } else {
                    marks.mark(1);
                }
            })
        };
        let mut claimed = 0;
        let from = [Content::Unknown];
        blocked.memmap.advance_run(range, &from, Content::Zeroing, |_, advanced| {
            claimed += u64::from(advanced.is_ok());
        });
        blocked.memmap.advance_run(range, &[Content::Zeroing], Content::Unknown, |_, back| {
            claimed -= u64::from(back.is_ok());
        });
        assert_eq!(claimed, 0);
        pinner.join().unwrap();
        blocked.assert_fresh();
    });
}

/// Pages are taken away, and a fault brings one back while the run still goes on: that page's inhibitor goes,
/// and the block is not pinned before the others are back as well.
#[test]
fn a_page_that_comes_back_during_a_run_leaves_the_inhibitors_of_the_others() {
    search(2, |marks| {
        let blocked = Blocked::new();
        let range = blocked.memmap.layout().range();
        let faulter = {
            let blocked = blocked.clone();
            let marks = marks.clone();
            thread::spawn(move || {
                if blocked.page(0).advance(Content::Absent, Content::Present).is_err() {
                    return marks.mark(0);
                }
                if let Ok(span) = blocked.hold(HoldKind::Pin) {
                    for index in 0..BLOCK_ORDER.pages().get() {
                        assert!(blocked.page(index).word().content().is_pinnable());
                    }
                    blocked.release(span, HoldKind::Pin);
                } else {
                    marks.mark(1);
                }
            })
        };
        blocked.memmap.advance_run(range, &[Content::Unknown], Content::Absent, |_, gone| {
            assert!(gone.is_ok());
        });
        faulter.join().unwrap();
        for from in [Content::Absent, Content::Present] {
            let to = if from == Content::Absent { Content::Present } else { Content::Unknown };
            blocked.memmap.advance_run(range, &[from], to, |_, _| ());
        }
        blocked.assert_fresh();
    });
}

/// What clearing would be if it looked for pins of the block and of the page without an inhibitor: the
/// search must find a page that is cleared under a pin.
#[test]
#[should_panic(expected = "cleared under a pin")]
fn clearing_that_does_not_inhibit_the_block_clears_under_a_pin() {
    use loom::sync::atomic::AtomicU64;
    loom::model(|| {
        // The pins of the block, and whether the page is being cleared.
        let words = Arc::new((AtomicU64::new(0), AtomicBool::new(false)));
        let pinner = beside(&words, |words| {
            let (pins, is_zeroing) = words;
            if is_zeroing.load(Ordering::Acquire) {
                return;
            }
            pins.fetch_add(1, Ordering::AcqRel);
            assert!(!is_zeroing.load(Ordering::Acquire), "cleared under a pin");
            pins.fetch_sub(1, Ordering::AcqRel);
        });
        let (pins, is_zeroing) = &*words;
        if pins.load(Ordering::Acquire) == 0 {
            is_zeroing.store(true, Ordering::Release);
        }
        pinner.join().unwrap();
    });
}

/// What `Folio::try_hold` would be if a refused taker took its addition back without looking: the
/// search must find the page that has no holds and can never be handed out again.
#[test]
#[should_panic(expected = "the page has no holds and is not free")]
fn a_taker_that_does_not_look_again_loses_the_page() {
    use loom::sync::atomic::AtomicU64;
    const FREE: u64 = 1 << 62;
    loom::model(|| {
        let word = Arc::new(AtomicU64::new(FREE));
        let taker = beside(&word, |word| {
            if word.fetch_add(1, Ordering::Acquire) & FREE != 0 {
                word.fetch_sub(1, Ordering::Relaxed);
            } else {
                put(word);
            }
        });
        word.fetch_add(1_u64.wrapping_sub(FREE), Ordering::AcqRel);
        put(&word);
        taker.join().unwrap();
        assert_eq!(word.load(Ordering::Relaxed), FREE, "the page has no holds and is not free");
    });

    fn put(word: &AtomicU64) {
        let _ = word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |before| {
            Some(if before == 1 { FREE } else { before - 1 })
        });
    }
}

/// A bad page was left out when its folio was cleared, and is unpoisoned while another thread takes the
/// folio: a folio that is taken as zero has no page that was left out.
#[test]
fn a_folio_with_a_page_that_was_left_out_is_never_taken_for_zero() {
    search(2, |marks| {
        let page = Arc::new(Page::new(()));
        let head = folio(&page, GENERIC);
        head.set_partly_poisoned(true);
        head.advance(Content::Unknown, Content::Zeroing).unwrap();
        head.advance(Content::Zeroing, Content::Zero).unwrap();
        // A taker that is refused only reads, and loom tries the orders of reads sparingly; of exchanges
        // it tries all.
        let turn = Arc::new(AtomicUsize::new(0));
        let mender = {
            let (page, turn) = (page.clone(), turn.clone());
            thread::spawn(move || {
                let folio = folio(&page, GENERIC);
                // As the list of bad pages is emptied.
                let unpoisoned = folio.advance(Content::Zero, Content::Present).and_then(|()| {
                    turn.fetch_add(1, Ordering::Relaxed);
                    folio.advance(Content::Present, Content::Unknown)
                });
                turn.fetch_add(1, Ordering::Relaxed);
                folio.set_partly_poisoned(false);
                turn.fetch_add(1, Ordering::Relaxed);
                unpoisoned.is_ok()
            })
        };
        turn.fetch_add(1, Ordering::Relaxed);
        assert!(!head.take_zero(), "a page was left out");
        turn.fetch_add(1, Ordering::Relaxed);
        marks.mark(usize::from(head.word().is_partly_poisoned()));
        assert!(mender.join().unwrap());
    });
}

//! Every interleaving of two or three threads on one page's word, searched by loom.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p uzone-pages --test loom --release`.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;
use uzone_pages::{Content, Folio, GuardSort, HoldError, Ledger, MemoryKind, Page, Released, Word};

/// The outcomes a model was seen to have, collected over all its interleavings.
struct Seen(Vec<Mark>);

/// A flag outside the model: it survives from one interleaving to the next.
type Mark = std::sync::Arc<std::sync::atomic::AtomicBool>;

impl Seen {
    fn new(count: usize) -> Self {
        Self((0..count).map(|_| std::sync::Arc::default()).collect())
    }

    fn marks(&self) -> Vec<Mark> {
        self.0.clone()
    }

    fn assert_all(&self) {
        for (outcome, seen) in self.0.iter().enumerate() {
            assert!(
                seen.load(Ordering::Relaxed),
                "outcome {outcome} was never reached: the model does not test what it says"
            );
        }
    }
}

fn mark(marks: &[Mark], outcome: usize) {
    marks[outcome].store(true, Ordering::Relaxed);
}

fn folio(page: &Page, kind: MemoryKind) -> Folio<'_> {
    Folio::new(page, Word::initial(kind))
}

const GENERIC: MemoryKind = MemoryKind::Generic;
const PRIVATE: MemoryKind = MemoryKind::Private;

#[test]
fn a_page_is_held_or_frozen_never_both() {
    let seen = Seen::new(2);
    for is_pin in [false, true] {
        let marks = seen.marks();
        loom::model(move || {
            let page = Arc::new(Page::new(()));
            let taker = {
                let page = page.clone();
                thread::spawn(move || {
                    let folio = folio(&page, GENERIC);
                    if is_pin { folio.try_pin() } else { folio.try_get() }
                })
            };
            let frozen = folio(&page, GENERIC).freeze(1);
            let taken = taker.join().unwrap();
            assert_ne!(frozen, taken.is_ok());
            if frozen {
                assert_eq!(taken, Err(HoldError::Frozen));
                mark(&marks, 0);
            } else {
                mark(&marks, 1);
            }
            let word = folio(&page, GENERIC).word();
            assert_eq!(word.references() + word.pins(), 1 + u32::from(taken.is_ok()));
        });
    }
    seen.assert_all();
}

#[test]
fn of_two_owners_who_hand_a_page_out_one_succeeds() {
    loom::model(|| {
        let page = Arc::new(Page::new(()));
        let other = {
            let page = page.clone();
            thread::spawn(move || folio(&page, PRIVATE).take_first())
        };
        let mine = folio(&page, PRIVATE).take_first();
        assert_ne!(mine, other.join().unwrap());
        assert_eq!(folio(&page, PRIVATE).word().references(), 1);
    });
}

/// A taker comes while the owner hands the page out and takes it back: it is refused, or it holds
/// the page; and when all is given back the page is free, which exactly one thread was told.
#[test]
fn a_taker_beside_a_short_life_is_refused_or_holds_the_page() {
    let seen = Seen::new(2);
    let marks = seen.marks();
    loom::model(move || {
        let page = Arc::new(Page::new(()));
        let last_seen = Arc::new(AtomicUsize::new(0));
        let taker = {
            let (page, last_seen) = (page.clone(), last_seen.clone());
            let marks = marks.clone();
            thread::spawn(move || {
                let folio = folio(&page, PRIVATE);
                match folio.try_get() {
                    Ok(()) => {
                        mark(&marks, 0);
                        if folio.put().unwrap() == Released::Last {
                            last_seen.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    Err(error) => {
                        assert_eq!(error, HoldError::Free);
                        mark(&marks, 1);
                    }
                }
            })
        };
        let owner = folio(&page, PRIVATE);
        assert!(owner.take_first());
        if owner.put().unwrap() == Released::Last {
            last_seen.fetch_add(1, Ordering::Relaxed);
        }
        taker.join().unwrap();
        assert_eq!(folio(&page, PRIVATE).word(), Word::initial(PRIVATE));
        assert_eq!(last_seen.load(Ordering::Relaxed), 1);
    });
    seen.assert_all();
}

#[test]
fn two_takers_on_a_free_page_do_not_mistake_each_other_for_holders() {
    loom::model(|| {
        let page = Arc::new(Page::new(()));
        let other = {
            let page = page.clone();
            thread::spawn(move || folio(&page, PRIVATE).try_pin())
        };
        assert_eq!(folio(&page, PRIVATE).try_get(), Err(HoldError::Free));
        assert_eq!(other.join().unwrap(), Err(HoldError::Free));
        assert_eq!(folio(&page, PRIVATE).word(), Word::initial(PRIVATE));
    });
}

#[test]
fn a_refused_taker_beside_a_thaw_leaves_no_trace() {
    let seen = Seen::new(2);
    let marks = seen.marks();
    loom::model(move || {
        let page = Arc::new(Page::new(()));
        assert!(folio(&page, GENERIC).freeze(1));
        let taker = {
            let page = page.clone();
            thread::spawn(move || folio(&page, GENERIC).try_pin().is_ok())
        };
        assert!(folio(&page, GENERIC).thaw());
        let taken = taker.join().unwrap();
        mark(&marks, usize::from(taken));
        let word = folio(&page, GENERIC).word();
        assert_eq!((word.references(), word.pins()), (1, u32::from(taken)));
        assert!(!word.is_frozen());
    });
    seen.assert_all();
}

/// A generic page is never free: who gives the base reference back leaves it with that, and nobody
/// who freezes or takes meanwhile sees it without.
#[test]
fn a_generic_page_is_never_seen_without_a_reference() {
    loom::model(|| {
        let page = Arc::new(Page::new(()));
        let other = {
            let page = page.clone();
            thread::spawn(move || {
                let folio = folio(&page, GENERIC);
                assert!(!folio.word().is_free());
                if folio.freeze(0) {
                    assert!(folio.thaw());
                }
                assert_eq!(folio.try_get(), Ok(()));
                folio.put().unwrap()
            })
        };
        let mine = folio(&page, GENERIC).put();
        let theirs = other.join().unwrap();
        assert_eq!(folio(&page, GENERIC).word(), Word::initial(GENERIC));
        // Each gave one back that was there: the base reference, and its own.
        assert!(mine == Ok(Released::Last) || theirs == Released::Last);
    });
}

#[test]
fn who_takes_a_hold_sees_what_the_one_before_wrote() {
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
        if folio(&page, PRIVATE).try_get().is_ok() {
            assert!(prepared.load(Ordering::Relaxed));
        }
        owner.join().unwrap();
    });
}

#[test]
fn who_freezes_a_page_sees_what_its_holders_wrote() {
    loom::model(|| {
        let page = Arc::new(Page::new(()));
        let written = Arc::new(AtomicBool::new(false));
        assert_eq!(folio(&page, GENERIC).try_pin(), Ok(()));
        let holder = {
            let (page, written) = (page.clone(), written.clone());
            thread::spawn(move || {
                written.store(true, Ordering::Relaxed);
                assert_eq!(folio(&page, GENERIC).unpin(), Ok(Released::Held));
            })
        };
        if folio(&page, GENERIC).freeze(1) {
            assert!(written.load(Ordering::Relaxed));
        }
        holder.join().unwrap();
    });
}

#[test]
fn a_content_step_has_one_owner_whatever_the_counts_do() {
    loom::model(|| {
        let page = Arc::new(Page::new(()));
        let steps: Vec<_> = (0..2)
            .map(|_| {
                let page = page.clone();
                thread::spawn(move || {
                    let folio = folio(&page, GENERIC);
                    folio.advance(Content::Unknown, Content::Zeroing).is_ok()
                })
            })
            .collect();
        assert_eq!(folio(&page, GENERIC).try_get(), Ok(()));
        let owners = steps.into_iter().map(|step| step.join().unwrap());
        assert_eq!(owners.filter(|owns| *owns).count(), 1);
        let word = folio(&page, GENERIC).word();
        assert_eq!((word.references(), word.content()), (2, Content::Zeroing));
    });
}

/// A pagemap is unbound or held, never both: whoever finds its ledger closed and empty finds no
/// hold on its folios, now and later, and sees what every guard wrote.
#[test]
fn a_pagemap_is_unbound_or_held_never_both() {
    let seen = Seen::new(2);
    let marks = seen.marks();
    loom::model(move || {
        let pagemap = Arc::new((Ledger::new(), Page::new(()), AtomicBool::new(false)));
        let holder = {
            let pagemap = pagemap.clone();
            thread::spawn(move || {
                let (ledger, page, written) = &*pagemap;
                if ledger.enter(GuardSort::Pin).is_err() {
                    return false;
                }
                assert_eq!(folio(page, GENERIC).try_pin(), Ok(()));
                // Relaxed on purpose: only the ledger orders it.
                written.store(true, Ordering::Relaxed);
                assert_eq!(folio(page, GENERIC).unpin(), Ok(Released::Held));
                let _ = ledger.leave(GuardSort::Pin);
                true
            })
        };
        let (ledger, page, written) = &*pagemap;
        let is_closed = ledger.close().is_empty();
        let pins = folio(page, GENERIC).word().pins();
        let was_written = written.load(Ordering::Relaxed);
        let held = holder.join().unwrap();
        if is_closed {
            assert_eq!(pins, 0);
            assert_eq!(was_written, held, "a guard that came came before");
            mark(&marks, 0);
        } else {
            ledger.reopen();
            assert_eq!(ledger.enter(GuardSort::Reference), Ok(()));
            mark(&marks, 1);
        }
    });
    seen.assert_all();
}

/// Exactly one guard that leaves a closing ledger is told that it was the last, or whoever closes
/// finds none: nobody waits for ever.
#[test]
fn who_waits_for_the_last_guard_is_told() {
    loom::model(|| {
        let ledger = Arc::new(Ledger::new());
        assert_eq!(ledger.enter(GuardSort::Pin), Ok(()));
        assert_eq!(ledger.enter(GuardSort::Reference), Ok(()));
        let leavers: Vec<_> = [GuardSort::Pin, GuardSort::Reference]
            .into_iter()
            .map(|sort| {
                let ledger = ledger.clone();
                thread::spawn(move || ledger.leave(sort))
            })
            .collect();
        let is_empty = ledger.close().is_empty();
        let told = leavers.into_iter().map(|leaver| leaver.join().unwrap());
        let told = told.filter(|is_last| *is_last).count();
        assert_eq!(told, usize::from(!is_empty));
    });
}

/// What `Folio::try_get` would be if a refused taker took its addition back without looking: the
/// search must find the page that nobody holds and nobody may ever hand out again.
#[test]
#[should_panic(expected = "nobody holds the page and it is not free")]
fn a_taker_that_does_not_look_again_loses_the_page() {
    use loom::sync::atomic::AtomicU64;
    const FREE: u64 = 1 << 62;
    loom::model(|| {
        let word = Arc::new(AtomicU64::new(FREE));
        let taker = {
            let word = word.clone();
            thread::spawn(move || {
                if word.fetch_add(1, Ordering::Acquire) & FREE != 0 {
                    word.fetch_sub(1, Ordering::Relaxed);
                } else {
                    put(&word);
                }
            })
        };
        word.fetch_add(1_u64.wrapping_sub(FREE), Ordering::AcqRel);
        put(&word);
        taker.join().unwrap();
        assert_eq!(word.load(Ordering::Relaxed), FREE, "nobody holds the page and it is not free");
    });

    fn put(word: &AtomicU64) {
        let _ = word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |before| {
            Some(if before == 1 { FREE } else { before - 1 })
        });
    }
}

//! Every interleaving of the threads that may be at one page, searched by loom. At a page which is given up:
//! the thread that gives it up, a reader that is asked for it by a second waiter, and a producer that comes
//! too late. At an absent page: two threads that install it, one that evicts it and one that pins it.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p uzone-fault --test loom --release`.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod sync {
    pub(crate) use loom::sync::Mutex;
    pub(crate) use std::sync::PoisonError;
}
#[path = "../src/pages/bad.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is the whole file of the library")]
mod bad_pages;
#[path = "../src/pages/claimed.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is the whole file of the library")]
mod claimed;
#[path = "../../pages/tests/loom/seen.rs"]
mod seen;

use std::ops::Range;

use bad_pages::{BadPages, Marked, PageTable};
use claimed::{Claimed, Words};
use loom::sync::{Arc, Mutex};
use seen::{Seen, beside, search};
use uzone_pages::{Content, Folio, HoldKind, MemoryKind, Page, Word};

/// What the kernel has for the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    None,
    Page,
    Mark,
}

/// One page, its word, and the kernel's entry for it.
struct One {
    word: Page,
    entry: Mutex<Entry>,
    /// Whether a thread that faulted on the page waits in the kernel.
    is_awaited: Mutex<bool>,
}

impl One {
    fn absent() -> Self {
        let word: Page = Page::new(());
        let folio = Folio::new(&word, Word::initial(MemoryKind::Generic));
        folio.advance(Content::Unknown, Content::Absent).unwrap();
        Self { word, entry: Mutex::new(Entry::None), is_awaited: Mutex::new(false) }
    }

    /// A page that a producer owns.
    fn filling() -> Self {
        let one = Self::absent();
        one.folio().advance(Content::Absent, Content::Filling).unwrap();
        one
    }

    fn folio(&self) -> Folio<'_, ()> {
        Folio::new(&self.word, Word::initial(MemoryKind::Generic))
    }

    /// A copy, which replaces a mark. Returns whether it put the page in place.
    fn copy(&self) -> bool {
        let mut entry = self.entry.lock().unwrap();
        let is_placed = *entry != Entry::Page;
        *entry = Entry::Page;
        is_placed
    }
}

impl PageTable for One {
    fn content(&self, _: u64) -> Content {
        self.folio().content()
    }

    fn poison_word(&self, _: u64) -> bool {
        self.folio().advance(Content::Filling, Content::Poisoned).is_ok()
    }

    fn unpoison_word(&self, _: u64) {
        let _ = self.folio().advance(Content::Poisoned, Content::Absent);
        let _ = self.folio().advance(Content::Absent, Content::Present);
    }

    fn set_present(&self, _: u64) -> bool {
        self.folio().advance(Content::Filling, Content::Present).is_ok()
    }

    fn mark(&self, _: u64) -> Marked {
        let mut entry = self.entry.lock().unwrap();
        if *entry != Entry::None {
            return Marked::Exists;
        }
        *entry = Entry::Mark;
        Marked::Yes
    }
}

impl Words for One {
    fn claim(&self, pages: Range<u64>) -> (u64, u64) {
        let is_claimed = self.folio().advance(Content::Absent, Content::Filling).is_ok();
        let end = pages.start + u64::from(is_claimed);
        (end, end)
    }

    fn release(&self, _: u64) {
        let _ = self.folio().advance(Content::Filling, Content::Absent);
    }

    fn note_filled(&self, _: Range<u64>, _: bool) {
        assert!(self.set_present(7), "an owned page has another owner");
    }

    fn wake(&self, _: Range<u64>) {
        *self.is_awaited.lock().unwrap() = false;
    }
}

/// A thread that installs the page if it is absent.
fn fill(page: &One) {
    let mut claimed = Claimed::claim(page, 7..8);
    if claimed.left() == (7..8) {
        let is_placed = page.copy();
        claimed.filled(1, is_placed);
    }
}

/// The same as it was before pages were claimed: the page may be evicted between the two steps.
fn fill_unclaimed(page: &One) {
    if page.content(7) == Content::Absent {
        page.copy();
        let _ = page.folio().advance(Content::Absent, Content::Present);
    }
}

fn evict(page: &One) -> bool {
    if page.folio().advance(Content::Present, Content::Removed).is_err() {
        return false;
    }
    *page.entry.lock().unwrap() = Entry::None;
    page.folio().advance(Content::Removed, Content::Absent).unwrap();
    true
}

/// Pins the page if it is present. Returns whether it was.
fn pin(page: &One) -> bool {
    if page.folio().try_hold(HoldKind::Pin).is_err() {
        return false;
    }
    assert_eq!(*page.entry.lock().unwrap(), Entry::Page, "a pinned page is absent");
    page.folio().release(HoldKind::Pin).unwrap();
    true
}

/// Two threads that install a page, one that evicts it and one that pins it.
fn install_evict_and_pin(fill: fn(&One), seen: &Seen) {
    let page = Arc::new(One::absent());
    let fillers = [(); 2].map(|()| beside(&page, fill));
    let evicting = beside(&page, evict);
    if pin(&page) {
        seen.mark(0);
    }
    fillers.into_iter().for_each(|filler| filler.join().unwrap());
    if evicting.join().unwrap() {
        seen.mark(1);
    }
    let is_there = *page.entry.lock().unwrap() == Entry::Page;
    assert_eq!(page.content(7) == Content::Present, is_there, "a pinned page is absent");
}

/// A reader that learns of a waiter while another thread owns the page and gives it up.
fn give_up_an_awaited_page(seen: &Seen) {
    let page = Arc::new(One::absent());
    *page.is_awaited.lock().unwrap() = true;
    let owner = beside(&page, |page| {
        let claimed = Claimed::claim(page, 7..8);
        // The kernel's answer is that it fills nothing.
        drop(page.entry.lock().unwrap());
        drop(claimed);
    });
    // The kernel reports the waiter to the reader, which leaves it to the owner or answers it itself.
    drop(page.entry.lock().unwrap());
    if page.content(7) == Content::Filling {
        seen.mark(0);
    } else {
        *page.is_awaited.lock().unwrap() = false;
        seen.mark(1);
    }
    owner.join().unwrap();
    assert!(!*page.is_awaited.lock().unwrap(), "a waiter is left behind");
}

#[test]
fn a_page_that_is_pinned_is_there_whichever_threads_install_and_evict_it() {
    search(2, |seen| install_evict_and_pin(fill, seen));
}

/// The search must find the eviction between the two steps.
#[test]
#[should_panic(expected = "a pinned page is absent")]
fn a_page_that_is_installed_without_a_claim_is_pinned_and_absent() {
    loom::model(|| install_evict_and_pin(fill_unclaimed, &Seen::new(2)));
}

#[test]
fn the_waiter_of_a_page_that_its_owner_gives_up_is_woken() {
    search(2, give_up_an_awaited_page);
}

/// Runs the three threads; `second` is what the reader does for a second waiter.
fn give_up(second: fn(&BadPages, &One)) {
    let shared = Arc::new((BadPages::default(), One::filling()));
    let reader = beside(&shared, move |(bad, page)| second(bad, page));
    let producer = beside(&shared, |(bad, page)| {
        let is_placed = page.copy();
        bad.note_filled(7, is_placed, page)
    });
    let (bad, page) = &*shared;
    bad.make(7, page, || false);
    reader.join().unwrap();
    producer.join().unwrap();
    let (content, entry) = (page.content(7), *page.entry.lock().unwrap());
    assert_eq!(entry, Entry::Page, "a copy replaces a mark");
    assert_eq!(content, Content::Present, "a page that is there is taken for a bad one");
}

/// The same without the producer: the page is bad in the end, whatever the second waiter did.
fn fail(second: fn(&BadPages, &One)) {
    let shared = Arc::new((BadPages::default(), One::filling()));
    let reader = beside(&shared, move |(bad, page)| second(bad, page));
    let (bad, page) = &*shared;
    assert!(bad.make(7, page, || false), "a mark is taken for a page");
    reader.join().unwrap();
    let (content, entry) = (page.content(7), *page.entry.lock().unwrap());
    assert_eq!(
        (content, entry),
        (Content::Poisoned, Entry::Mark),
        "a bad page is taken for present"
    );
}

/// Two readers that are asked for a bad page by a second and a third waiter, while it is made bad.
fn fail_with_two_readers() {
    let shared = Arc::new((BadPages::default(), One::filling()));
    let readers = [(); 2].map(|()| beside(&shared, |(bad, page)| mark_again(bad, page)));
    let (bad, page) = &*shared;
    assert!(bad.make(7, page, || false), "a mark is taken for a page");
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    let found = (page.content(7), *page.entry.lock().unwrap());
    assert_eq!(found, (Content::Poisoned, Entry::Mark), "a bad page is taken for present");
}

fn mark_again(bad: &BadPages, page: &One) {
    let _ = bad.mark_again(7, page);
}

/// What the reader did before: it marks whatever its word calls bad.
fn mark_without_looking(_: &BadPages, page: &One) {
    if page.content(7) == Content::Poisoned {
        let _ = page.mark(7);
    }
}

#[test]
fn a_page_that_is_given_up_while_it_is_produced_is_good() {
    loom::model(|| give_up(mark_again));
}

#[test]
fn a_bad_page_stays_bad_whichever_thread_marks_it() {
    loom::model(|| fail(mark_again));
}

#[test]
fn a_bad_page_stays_bad_whichever_of_two_readers_marks_it() {
    loom::model(fail_with_two_readers);
}

/// The search must find the mark of the second waiter that is taken for a page.
#[test]
#[should_panic(expected = "a mark is taken for a page")]
fn a_mark_of_a_second_waiter_without_the_list_is_taken_for_a_page() {
    loom::model(|| fail(mark_without_looking));
}

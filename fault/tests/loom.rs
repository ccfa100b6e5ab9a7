//! Every interleaving of the threads that may be at a page which is given up, searched by loom: the one
//! that gives it up, a reader that is asked for it by a second waiter, and a producer that comes too
//! late.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p uzone-fault --test loom --release`.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod sync {
    pub(crate) use loom::sync::Mutex;
    pub(crate) use std::sync::PoisonError;
}
#[path = "../src/track/bad_pages.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is the whole file of the library")]
mod bad_pages;
#[path = "../../pages/tests/loom/seen.rs"]
mod seen;

use bad_pages::{BadPages, Marked, PageTable};
use loom::sync::{Arc, Mutex};
use seen::beside;
use uzone_pages::{Content, Folio, MemoryKind, Page, Word};

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
}

impl One {
    /// A page that a producer owns.
    fn filling() -> Self {
        let word: Page = Page::new(());
        for (from, to) in [(Content::Unknown, Content::Absent), (Content::Absent, Content::Filling)]
        {
            Folio::new(&word, Word::initial(MemoryKind::Generic)).advance(from, to).unwrap();
        }
        Self { word, entry: Mutex::new(Entry::None) }
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

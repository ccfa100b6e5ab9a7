//! Making a page a bad one: [`BadPages`], the steps by which a page's word and the kernel's mark agree.
//!
//! A page that cannot be produced is poisoned twice: in its word, so that pins and populates are refused,
//! and in the page table, so that a touch raises `SIGBUS`. Three threads may be at one page: the one that
//! gives it up (a failed producer, or the reader at a deadline), the reader when a second thread touches
//! the page, and a producer that is late and copies the page after all.
//!
//! The kernel answers `EEXIST` to a mark where there is a page, and also where there is a mark. The two
//! have to be distinguished, or a bad page is taken for a present one. So for each page only one thread
//! marks it at a time: the thread that gives it up lists the page before it asks the kernel, and a reader
//! marks again only pages that are not listed, under the lock of the list. Then `EEXIST` means a page to the
//! first, and nothing to the second.
//!
//! Locks: one, held by a reader for an ioctl and by others for a push or a removal.
//! `tests/loom.rs` searches the interleavings.

use uzone_pages::Content;

use crate::sync::{Mutex, PoisonError};

/// The kernel's answer to a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marked {
    /// A touch of the page raises a signal now, or there is no memory that could be touched.
    Yes,
    /// A page or a mark was there already.
    Exists,
    /// The kernel defers its answer.
    Later,
}

/// The words and the page table of one mapping.
pub(crate) trait PageTable {
    /// Returns the content state in the word of a page.
    fn content(&self, page: u64) -> Content;
    /// Moves a word from `Filling` to `Poisoned`. Returns whether it was in the first.
    fn poison_word(&self, page: u64) -> bool;
    /// Moves a word from `Poisoned` to `Present`.
    fn unpoison_word(&self, page: u64);
    /// Moves a word from `Filling` to `Present`. Returns whether it was in the first.
    fn set_present(&self, page: u64) -> bool;
    /// Has the kernel raise a signal where the page is touched, if there is none.
    fn mark(&self, page: u64) -> Marked;
}

/// How many pages of a mapping threads make bad at once without allocating.
const AT_ONCE: usize = 16;

/// The pages of a mapping that are being made bad.
pub(crate) struct BadPages {
    listed: Mutex<Vec<u64>>,
}

impl Default for BadPages {
    fn default() -> Self {
        Self { listed: Mutex::new(Vec::with_capacity(AT_ONCE)) }
    }
}

impl BadPages {
    /// Makes a page bad that is being filled. Where the kernel defers its answer, `again` returns whether
    /// to ask once more. Returns whether the page is bad by this call.
    pub(crate) fn make(&self, page: u64, table: &impl PageTable, again: impl Fn() -> bool) -> bool {
        {
            let mut listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
            // The word first: a producer that comes after that learns that the page was given up.
            if !table.poison_word(page) {
                return false;
            }
            listed.push(page);
        }
        let marked = loop {
            match table.mark(page) {
                Marked::Later if again() => {}
                marked => break marked,
            }
        };
        if marked == Marked::Exists {
            // No other thread marks a listed page, so this is a page: its producer was not too late.
            table.unpoison_word(page);
        }
        let mut listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = listed.iter().position(|&other| other == page) {
            listed.swap_remove(at);
        }
        marked != Marked::Exists
    }

    /// Marks a bad page once more, for a thread that waits for it. Returns whether that is done; if not,
    /// another thread is making the page bad and wakes all that wait for it.
    pub(crate) fn mark_again(&self, page: u64, table: &impl PageTable) -> bool {
        let listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
        if listed.contains(&page) {
            return false;
        }
        if table.content(page) == Content::Poisoned {
            let _ = table.mark(page);
        }
        true
    }

    /// Notes that the kernel has a page that another thread may have given up. `is_placed` is whether this
    /// caller installed it, and it was not present before. Returns whether the page is good.
    pub(crate) fn note_filled(&self, page: u64, is_placed: bool, table: &impl PageTable) -> bool {
        if table.set_present(page) || table.content(page) != Content::Poisoned {
            return true;
        }
        // It was given up meanwhile. A copy replaces a mark, and the page before may be one.
        if is_placed {
            // The thread that gives it up may be half way through `poison_word`.
            let _listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
            table.unpoison_word(page);
        }
        is_placed
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicU8, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// A page whose word is poisoned in two steps, as in a pagemap, which lists its bad pages.
    #[derive(Default)]
    struct Slow(AtomicU8);

    const FILLING: u8 = 0;
    const POISONED: u8 = 1;
    const LISTED: u8 = 2;
    const PRESENT: u8 = 3;

    impl PageTable for Slow {
        fn content(&self, _: u64) -> Content {
            match self.0.load(Ordering::SeqCst) {
                FILLING => Content::Filling,
                PRESENT => Content::Present,
                _ => Content::Poisoned,
            }
        }

        fn poison_word(&self, _: u64) -> bool {
            self.0.store(POISONED, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(50));
            self.0.store(LISTED, Ordering::SeqCst);
            true
        }

        fn unpoison_word(&self, _: u64) {
            let _ = self.0.compare_exchange(LISTED, PRESENT, Ordering::SeqCst, Ordering::SeqCst);
        }

        fn set_present(&self, _: u64) -> bool {
            false
        }

        fn mark(&self, _: u64) -> Marked {
            Marked::Yes
        }
    }

    #[test]
    fn a_page_that_is_copied_while_it_is_given_up_is_good_however_long_that_takes() {
        let (bad, page) = (BadPages::default(), Slow::default());
        thread::scope(|scope| {
            scope.spawn(|| bad.make(7, &page, || true));
            while page.content(7) != Content::Poisoned {
                thread::yield_now();
            }
            assert!(bad.note_filled(7, true, &page));
        });
        assert_eq!(page.content(7), Content::Present);
    }
}

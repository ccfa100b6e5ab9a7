//! The pages that were written, where each first write is an event: [`WriteStates`], a byte a page.
//!
//! ```text
//!          a write faults                 the kernel lets writers in
//!   CLEAN ─────────────────► OPENING ──────────────────────────────► DIRTY
//!     ▲ protected               ▲  may be written           may be     │
//!     │                         └─────── faults again ──────written────┤
//!     └──────────────────────────── CLOSING ◄──────────────────────────┘
//!            it is protected again       it is taken, or the page is evicted
//! ```
//!
//! A page is in `OPENING` before a writer can get at it and leaves `CLOSING` after none can, so a page that
//! is not `CLEAN` may have been written, and a page that is `CLEAN` was not. One thread owns a page in
//! either of the two states; a write fault that arrives meanwhile is left to that thread, which wakes all
//! waiters.
//!
//! The states publish nothing but themselves: the written bytes are published by the page tables, which
//! the kernel changes in between. Cost: a byte a page, of addresses; memory only where pages are written
//! or evicted.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::host::thread::pause;
use crate::map::exclusive::Mapped;

const CLEAN: u8 = 0;
const OPENING: u8 = 1;
const DIRTY: u8 = 2;
const CLOSING: u8 = 3;

/// The number of pages that are opened at once for a writer that goes on page by page.
const RUN: u64 = 16;
/// The pages in a row that a writer opens one by one before more are opened.
const ALONE: u64 = 3;

/// The longest wait for a page whose owner is in a call to the kernel.
const PATIENCE: Duration = Duration::from_secs(2);

/// The states of the pages of one mapping.
#[derive(Debug)]
pub struct WriteStates {
    states: Mapped<AtomicU8>,
    /// The page behind the last that was opened, and the number of times in a row that it was expected.
    expected: AtomicU64,
    streak: AtomicU64,
}

impl WriteStates {
    /// Takes a byte for each page, all zero: none was written.
    #[must_use]
    pub fn new(states: Mapped<AtomicU8>) -> Self {
        Self { states, expected: AtomicU64::new(u64::MAX), streak: AtomicU64::new(0) }
    }

    fn state(&self, page: u64) -> Option<&AtomicU8> {
        self.states.get(usize::try_from(page).ok()?)
    }

    fn step(&self, page: u64, from: u8, to: u8) -> bool {
        // Acquire and Release: an owner calls the kernel after the last owner did.
        self.state(page).is_some_and(|state| {
            state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })
    }

    fn set(&self, pages: Range<u64>, to: u8) {
        for page in pages {
            if let Some(state) = self.state(page) {
                // Release pairs with the Acquire of the next owner.
                state.store(to, Ordering::Release);
            }
        }
    }

    /// Returns whether a thread lets writers into a page now, or makes it clean.
    pub(crate) fn is_owned(&self, page: u64) -> bool {
        matches!(self.get(page), OPENING | CLOSING)
    }

    fn get(&self, page: u64) -> u8 {
        // Acquire pairs with the Release of the last owner.
        self.state(page).map_or(CLEAN, |state| state.load(Ordering::Acquire))
    }

    /// Handles a write fault on a page. Returns the pages that the caller now owns and lets writers into:
    /// this one, and more behind it if the last ones were just before it. `None` if another thread owns it,
    /// which wakes this writer.
    ///
    /// Pages behind it count as written from then on, also if they never are. `may_open` returns whether
    /// one of them is present.
    pub fn open(&self, page: u64, may_open: impl Fn(u64) -> bool) -> Option<Range<u64>> {
        // A page can be protected although it is dirty: it was, when it was filled again.
        if !self.step(page, CLEAN, OPENING) && !self.step(page, DIRTY, OPENING) {
            return None;
        }
        // Relaxed: only the number of pages that go at once depends on it.
        let streak = if self.expected.load(Ordering::Relaxed) == page {
            self.streak.load(Ordering::Relaxed).saturating_add(1)
        } else {
            0
        };
        let run = match streak.checked_sub(ALONE - 1) {
            None => 1,
            Some(more) => 1_u64.checked_shl(u32::try_from(more).unwrap_or(u32::MAX)).unwrap_or(RUN),
        };
        let run = run.clamp(1, RUN);
        let mut end = page + 1;
        while end < page + run && may_open(end) && self.step(end, CLEAN, OPENING) {
            end += 1;
        }
        self.expected.store(end, Ordering::Relaxed);
        self.streak.store(streak, Ordering::Relaxed);
        Some(page..end)
    }

    /// Notes that pages that the caller opened may be written.
    pub fn opened(&self, pages: Range<u64>) {
        self.set(pages, DIRTY);
    }

    /// Makes the caller the owner of those pages of a range that were not written (`are_clean`), or of those that
    /// may have been. Returns them in runs, each of which the caller owns from when it is returned. A page whose owner
    /// is at work for too long is left out. Allocates nothing: an interrupted thread may hold the allocator until the
    /// caller has given a page up.
    pub fn close(
        &self,
        pages: Range<u64>,
        are_clean: bool,
    ) -> impl Iterator<Item = Range<u64>> + use<'_> {
        let give_up = Instant::now() + PATIENCE;
        let mut round = 0;
        runs_of(pages, move |page| {
            let from = if are_clean { CLEAN } else { DIRTY };
            loop {
                match self.get(page) {
                    found if found == from => {
                        if self.step(page, from, CLOSING) {
                            return true;
                        }
                    }
                    // It will be dirty in a moment.
                    OPENING if !are_clean && Instant::now() < give_up => {
                        pause(&mut round);
                    }
                    _ => return false,
                }
            }
        })
    }

    /// Notes that no writer can get at pages that the caller closed.
    pub fn closed(&self, pages: Range<u64>) {
        self.set(pages, CLEAN);
    }

    /// Notes that pages that the caller closed may be written, or are protected and fault again.
    pub fn reopened(&self, pages: Range<u64>) {
        self.set(pages, DIRTY);
    }

    /// Gives up those of some pages that the caller closed and still owns.
    pub fn release(&self, pages: Range<u64>, are_clean: bool) {
        for page in pages {
            let _ = self.step(page, CLOSING, if are_clean { CLEAN } else { DIRTY });
        }
    }

    /// Makes clean pages dirty, as if they were written.
    pub fn mark(&self, pages: Range<u64>) {
        for page in pages {
            // A page that another thread opens becomes dirty by that.
            let _ = self.step(page, CLEAN, DIRTY);
        }
    }

    /// Returns the runs of pages of a range that may have been written.
    pub fn dirty(&self, pages: Range<u64>) -> Vec<Range<u64>> {
        runs_of(pages, |page| self.get(page) != CLEAN).collect()
    }
}

/// Returns the runs of pages for which `is_one` holds, which is called once for each.
pub fn runs_of(
    mut pages: Range<u64>,
    mut is_one: impl FnMut(u64) -> bool,
) -> impl Iterator<Item = Range<u64>> {
    std::iter::from_fn(move || {
        let start = pages.find(|&page| is_one(page))?;
        let end = pages.find(|&page| !is_one(page)).unwrap_or(pages.end);
        Some(start..end)
    })
}

#[cfg(test)]
mod tests {
    #![expect(clippy::single_range_in_vec_init, reason = "a list of one run of pages")]

    use uzone_pages::ByteLen;

    use super::*;
    use crate::{Anonymous, Exclusive};

    fn states() -> WriteStates {
        let memory = Exclusive::anonymous(ByteLen::kib(4), Anonymous::default()).unwrap();
        WriteStates::new(Mapped::try_new(memory, 64).unwrap())
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps memory")]
    fn a_page_is_dirty_from_before_it_can_be_written_until_it_is_protected_again() {
        let states = states();
        assert_eq!(states.dirty(0..64), []);
        assert_eq!(states.open(5, |_| true), Some(5..6));
        assert_eq!(states.dirty(0..64), [5..6]);
        assert_eq!(states.open(5, |_| true), None, "it has an owner");
        states.opened(5..6);
        assert!(states.close(0..64, true).eq([0..5, 6..64]));
        for run in [0..5, 6..64] {
            states.closed(run);
        }
        assert!(states.close(0..64, false).eq([5..6]));
        assert_eq!(states.open(5, |_| true), None, "it has an owner");
        assert_eq!(states.dirty(0..64), [5..6]);
        states.closed(5..6);
        assert_eq!(states.dirty(0..64), []);
        states.mark(7..9);
        assert_eq!(states.dirty(0..64), [7..9]);
        assert!(states.close(7..10, false).eq([7..9]));
        states.reopened(7..9);
        // A page that is dirty and protected is opened again.
        assert_eq!(states.open(7, |_| true), Some(7..8));
        assert_eq!(states.close(64..70, false).next(), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps memory")]
    fn a_page_that_becomes_dirty_while_it_is_looked_at_is_not_left_out() {
        let states = states();
        let turns = if cfg!(miri) { 20 } else { 20_000 };
        let (turn, mut left_out) = (AtomicU64::new(0), 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for now in 1..=turns {
                    while turn.load(Ordering::Acquire) != now {
                        std::thread::yield_now();
                    }
                    states.opened(5..6);
                }
            });
            for now in 1..=turns {
                // Its writer waits until it may write, and is let in before that is noted.
                while states.open(5, |_| false).is_none() {}
                turn.store(now, Ordering::Release);
                left_out += u64::from(!states.close(0..64, false).eq([5..6]));
                // A failure is asserted at the end: the other thread waits for its turns.
                states.closed(0..64);
            }
        });
        assert_eq!(left_out, 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps memory")]
    fn a_writer_that_goes_on_gets_more_pages_at_once_and_no_other_does() {
        let states = states();
        let mut opened = Vec::new();
        let mut page = 3;
        while page < 48 {
            let run = states.open(page, |page| page != 37 && page < 48).unwrap();
            states.opened(run.clone());
            page = run.end;
            opened.push(run.end - run.start);
        }
        assert_eq!(opened, [1, 1, 1, 2, 4, 8, 16, 1, 11]);
        assert_eq!(states.open(60, |_| true), Some(60..61));
        assert_eq!(states.open(58, |_| true), Some(58..59));
        // The next one is not clean.
        assert_eq!(states.open(59, |_| true), Some(59..60));
    }
}

//! Absent pages that one thread installs: [`Claimed`].
//!
//! The kernel gets a page in one step, and its word learns of that in another. In between, another thread
//! could install the same page, mark it present and evict it, and the late second step would mark an absent
//! page present. So the thread that installs pages owns them from before the first step to after the second:
//! no other thread fills, evicts or pins them meanwhile.
//!
//! A thread that faults on such a page waits in the kernel. Installing the page wakes it; an owner that gives a
//! page up makes it absent first and wakes its waiters then, so that they fault again.
//! `tests/loom.rs` searches the interleavings with a thread that evicts and one that pins.

use std::ops::Range;

/// The words of some pages, and the threads that wait for them.
pub(crate) trait Words {
    /// Makes the caller the owner of the first pages of a range, up to one that is not absent. Returns the end of
    /// these, and the end of pages behind them that the caller owned for a moment: a page between them was
    /// absent when they were counted.
    fn claim(&self, pages: Range<u64>) -> (u64, u64);
    /// Makes a page absent again that the caller owns. One that was made bad meanwhile stays bad.
    fn release(&self, page: u64);
    /// Notes that the kernel has pages that the caller owned. `is_placed` is whether the caller installed them.
    fn note_filled(&self, pages: Range<u64>, is_placed: bool);
    /// Wakes the threads that wait for pages.
    fn wake(&self, pages: Range<u64>);
}

/// Pages that the thread that has this owns, in order. Those that are left when it is dropped become absent
/// again.
pub(crate) struct Claimed<'a, W: Words> {
    words: &'a W,
    left: Range<u64>,
    /// The pages that were given up lie between the first and the last of them; empty if there are none.
    given_up: Range<u64>,
}

impl<'a, W: Words> Claimed<'a, W> {
    /// Claims the first pages of `pages`, up to one that is not absent; none if that is the first.
    pub(crate) fn claim(words: &'a W, pages: Range<u64>) -> Self {
        let (end, last) = words.claim(pages.clone());
        Self { words, left: pages.start..end, given_up: end..last }
    }

    /// Returns the pages that are neither installed nor given up yet.
    pub(crate) fn left(&self) -> Range<u64> {
        self.left.clone()
    }

    /// Notes that the kernel has the first `count` pages of those that are left.
    pub(crate) fn filled(&mut self, count: u64, is_placed: bool) {
        let end = self.left.end.min(self.left.start + count);
        self.words.note_filled(self.left.start..end, is_placed);
        self.left.start = end;
    }

    /// Makes the first `count` pages of those that are left absent again. Their waiters are woken when this is
    /// dropped.
    pub(crate) fn give_up(&mut self, count: u64) {
        let end = self.left.end.min(self.left.start + count);
        (self.left.start..end).for_each(|page| self.words.release(page));
        if self.given_up.is_empty() {
            self.given_up = self.left.start..end;
        } else {
            self.given_up.start = self.given_up.start.min(self.left.start);
            self.given_up.end = self.given_up.end.max(end);
        }
        self.left.start = end;
    }
}

impl<W: Words> Drop for Claimed<'_, W> {
    fn drop(&mut self) {
        if !self.left.is_empty() {
            self.give_up(self.left.end - self.left.start);
        }
        if !self.given_up.is_empty() {
            self.words.wake(self.given_up.clone());
        }
    }
}

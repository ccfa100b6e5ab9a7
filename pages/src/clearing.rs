//! In which order memory is cleared or copied, and in which pieces: [`Plan`], [`Pace`].
//!
//! A thread that waits for one page of a folio reads that page next, so it is written last, by stores that
//! leave it in the cache: first what lies right of the neighbourhood of the hinted page, then what
//! lies left of it, then the neighbourhood, which is the page and two on either side. Without a hint
//! there is one extent. A caller that has to let others run takes the extents in batches and decides
//! after each of them whether to go on; one that need not takes each extent whole.
//!
//! Not here: stores, a clock, and what is known about the bytes. A batch names the bytes that come next;
//! the caller counts what was taken and written.
//!
//! Units: bytes, from the same zero that the pages are counted from. Times are nanoseconds.
//! Cost: a few instructions a batch; nothing allocates.
//! Source: the order is that of Linux 7.0 for huge pages, described by its commits and reviews.

use core::ops::Range;

use crate::addr::{AddrError, PageSize};
use crate::byte_len::ByteLen;

/// How many pages on either side of the hinted one belong to its neighbourhood.
pub const NEIGHBOUR_PAGES: u64 = 2;

/// What is left to be written, in the order in which to write it.
///
/// There is one extent, or with a hint up to three. [`Plan::take_batch`] cuts what comes next from the
/// extent under way, and a batch never spans two.
///
/// # Invariants
/// The parts before `next` are empty, and so may others be. The bytes of all parts together are those
/// that were not taken yet, each once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    parts: [Range<u64>; 3],
    next: usize,
}

/// Which part of a [`Plan`] is the neighbourhood of the hint.
const NEAR: usize = 2;

impl Plan {
    /// Takes a range of bytes and a byte that is read next, if that is known.
    ///
    /// # Errors
    /// [`AddrError::NoBytes`] without a byte, [`AddrError::HintOutside`] if the hint is none of them.
    pub const fn try_new(
        bytes: Range<u64>,
        hint: Option<u64>,
        page: PageSize,
    ) -> Result<Self, AddrError> {
        let (start, end) = (bytes.start, bytes.end);
        if start >= end {
            return Err(AddrError::NoBytes { start, end });
        }
        let Some(hint) = hint else {
            return Ok(Self { parts: [start..end, end..end, end..end], next: 0 });
        };
        if hint < start || end <= hint {
            return Err(AddrError::HintOutside { hint, start, end });
        }
        // Clamped on either side, also where the hint is at an end of all 64-bit numbers.
        let first = hint & !(page.bytes() - 1);
        let reach = NEIGHBOUR_PAGES.saturating_mul(page.bytes());
        let mut left = first.saturating_sub(reach);
        if left < start {
            left = start;
        }
        let mut right = first.saturating_add(reach).saturating_add(page.bytes());
        if right > end {
            right = end;
        }
        Ok(Self { parts: [right..end, start..left, left..right], next: 0 })
    }

    /// Takes at most `len` bytes of the extent that comes next, or of the smallest thing there is, one
    /// byte, for a length of zero. Returns the bytes, at least one, and whether they surround the
    /// hinted page and are read next. `None` when all are taken.
    pub fn take_batch(&mut self, len: ByteLen) -> Option<(Range<u64>, bool)> {
        while let Some(part) = self.parts.get_mut(self.next) {
            if part.start >= part.end {
                self.next += 1;
                continue;
            }
            let start = part.start;
            let end = part.end.min(start.saturating_add(len.get().max(1)));
            part.start = end;
            return Some((start..end, self.next == NEAR));
        }
        None
    }

    /// Returns how many bytes are not taken yet.
    #[must_use]
    pub fn left(&self) -> ByteLen {
        // Disjoint parts of one range: their sum is at most its length.
        ByteLen::new(self.parts.iter().map(|part| part.end - part.start).sum())
    }

    /// Puts a batch back that was taken last and not written.
    ///
    /// # Panics
    /// If it is not the one that was taken last.
    pub fn put_back(&mut self, batch: &Range<u64>) {
        let part = self.parts.get_mut(self.next).filter(|part| part.start == batch.end);
        let Some(part) = part else { panic!("a batch that was not the last to be taken") };
        part.start = batch.start;
    }

    /// Returns the extents that are left, in order, without taking them.
    pub fn extents(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.parts.iter().filter(|part| part.start < part.end).cloned()
    }
}

/// How long batches may be, so that the pause between two yield points stays under a bound.
///
/// It assumes a slow machine first and learns from what each batch took: a batch that was slower than
/// expected makes the next one shorter at once, a faster one doubles it at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pace {
    bound_ns: u64,
    page: PageSize,
    /// How long the next batch may be: whole pages, at least one.
    batch_bytes: u64,
}

/// The bound that [`Pace`] has unless the caller sets one.
pub const DEFAULT_PAUSE_NS: u64 = 1_000_000;

/// A batch is to take this part of the bound. What a machine does to a process now and then (an
/// interrupt, a neighbour) comes on top of it, and is to fit as well.
const PAUSE_PARTS: u64 = 8;

/// Bytes a microsecond, before anything was measured: less than the machines of today clear.
const SLOW_BYTES_PER_US: u64 = 4096;

/// No batch is longer, whatever the bound: what comes after it is not measured any better.
const LONGEST_BATCH_BYTES: u64 = 64 << 20;

impl Pace {
    /// Takes the longest pause that is fine, in nanoseconds, and the size of a page.
    #[must_use]
    pub const fn new(bound_ns: u64, page: PageSize) -> Self {
        let pace = Self { bound_ns, page, batch_bytes: page.bytes() };
        let first = pace.target_ns() / 1000 * SLOW_BYTES_PER_US;
        Self { batch_bytes: pace.whole_pages(first), ..pace }
    }

    /// Returns how long the next batch may be: whole pages, at least one.
    #[must_use]
    pub const fn batch(&self) -> ByteLen {
        ByteLen::new(self.batch_bytes)
    }

    /// Learns that a batch of `len` bytes took `elapsed_ns`.
    pub fn observe(&mut self, len: ByteLen, elapsed_ns: u64) {
        let (len, elapsed_ns) = (u128::from(len.get()), u128::from(elapsed_ns.max(1)));
        // Of shorter batches than one that was asked for little is learnt: the fixed cost of a batch
        // hides the rate.
        if len * 2 < u128::from(self.batch_bytes) && elapsed_ns < u128::from(self.target_ns()) {
            return;
        }
        let fitting = len * u128::from(self.target_ns()) / elapsed_ns;
        let fitting = u64::try_from(fitting).unwrap_or(u64::MAX);
        self.batch_bytes = self.whole_pages(fitting.min(self.batch_bytes.saturating_mul(2)));
    }

    const fn target_ns(&self) -> u64 {
        self.bound_ns / PAUSE_PARTS
    }

    const fn whole_pages(&self, bytes: u64) -> u64 {
        let bytes = if bytes > LONGEST_BATCH_BYTES { LONGEST_BATCH_BYTES } else { bytes };
        let whole = bytes & !(self.page.bytes() - 1);
        if whole == 0 { self.page.bytes() } else { whole }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::vec::Vec;

    const PAGE: u64 = 4096;
    const FOLIO: u64 = 512 * PAGE;
    /// A batch as long as there is any.
    const ALL: ByteLen = ByteLen::new(u64::MAX);

    fn plan(bytes: Range<u64>, hint: Option<u64>) -> Plan {
        Plan::try_new(bytes, hint, PageSize::KIB_4).unwrap()
    }

    /// The extents in pages, and whether the last is the neighbourhood.
    fn extents(hint: Option<u64>) -> Vec<(Range<u64>, bool)> {
        in_batches(plan(0..FOLIO, hint), ALL)
            .map(|(bytes, is_near)| (bytes.start / PAGE..bytes.end / PAGE, is_near))
            .collect()
    }

    #[test]
    fn the_neighbourhood_of_the_hint_comes_last_right_comes_before_left() {
        let (far, near) = (false, true);
        for (page, expected) in [
            (0, std::vec![(3..512, far), (0..3, near)]),
            (1, std::vec![(4..512, far), (0..4, near)]),
            (2, std::vec![(5..512, far), (0..5, near)]),
            (3, std::vec![(6..512, far), (0..1, far), (1..6, near)]),
            (256, std::vec![(259..512, far), (0..254, far), (254..259, near)]),
            (508, std::vec![(511..512, far), (0..506, far), (506..511, near)]),
            (509, std::vec![(0..507, far), (507..512, near)]),
            (511, std::vec![(0..509, far), (509..512, near)]),
        ] {
            assert_eq!(extents(Some(page * PAGE)), expected, "first byte of page {page}");
            assert_eq!(extents(Some(page * PAGE + PAGE - 1)), expected, "last byte of {page}");
        }
        assert_eq!(extents(None), [(0..512, far)]);
    }

    #[test]
    fn a_folio_that_is_all_neighbourhood_is_one_extent() {
        for pages in 1..=3 {
            let mut plan = plan(0..pages * PAGE, Some((pages - 1) * PAGE));
            let all = (0..pages * PAGE, true);
            assert_eq!(plan.take_batch(ALL), Some(all));
            assert_eq!(plan.take_batch(ALL), None);
            assert_eq!(plan.take_batch(ALL), None);
        }
    }

    /// Returns the batches of `len` bytes, each as it is taken.
    fn in_batches(mut plan: Plan, len: ByteLen) -> impl Iterator<Item = (Range<u64>, bool)> {
        std::iter::from_fn(move || plan.take_batch(len))
    }

    #[test]
    fn a_batch_of_nothing_is_a_byte_and_never_an_endless_loop() {
        assert_eq!(in_batches(plan(5..9, None), ByteLen::ZERO).count(), 4);
    }

    #[test]
    fn a_range_of_nothing_and_a_hint_outside_are_refused() {
        let (start, end) = (PAGE, PAGE);
        let page = PageSize::KIB_4;
        assert_eq!(Plan::try_new(start..end, None, page), Err(AddrError::NoBytes { start, end }));
        let end = 2 * PAGE;
        for hint in [0, PAGE - 1, end, u64::MAX] {
            assert_eq!(
                Plan::try_new(start..end, Some(hint), page),
                Err(AddrError::HintOutside { hint, start, end })
            );
        }
    }

    #[test]
    fn the_last_64_bit_numbers_are_covered_like_others() {
        let start = u64::MAX - 3 * PAGE;
        let plan = plan(start..u64::MAX, Some(u64::MAX - 1));
        let total: u64 =
            in_batches(plan, ByteLen::new(PAGE)).map(|(bytes, _)| bytes.end - bytes.start).sum();
        assert_eq!(total, 3 * PAGE);
    }

    #[test]
    fn the_pace_begins_low_grows_by_half_steps_and_shrinks_at_once() {
        let mut pace = Pace::new(DEFAULT_PAUSE_NS, PageSize::KIB_4);
        assert_eq!(pace.batch(), ByteLen::kib(500));
        // 20 bytes a nanosecond: 125 us are 2.5 MB.
        for _ in 0..20 {
            let before = pace.batch().get();
            pace.observe(pace.batch(), before / 20);
            assert!(pace.batch().get() <= before * 2);
        }
        let settled = pace.batch().get();
        assert!((2_490_000..=2_500_000).contains(&settled), "{settled}");
        // A thousand times slower, in one step.
        pace.observe(pace.batch(), settled * 50);
        assert_eq!(pace.batch(), ByteLen::new(PAGE));
        // A part shorter than a batch has little weight, unless it was slow.
        let mut pace = Pace::new(DEFAULT_PAUSE_NS, PageSize::KIB_4);
        pace.observe(ByteLen::new(PAGE), 100);
        assert_eq!(pace.batch(), ByteLen::kib(500));
        pace.observe(ByteLen::new(PAGE), 1_000_000);
        assert_eq!(pace.batch(), ByteLen::new(PAGE));
    }

    #[test]
    fn whatever_the_bound_a_batch_is_at_least_a_page_and_at_most_64_mib() {
        for bound_ns in [0, 1, 999, 8000, u64::MAX] {
            let mut pace = Pace::new(bound_ns, PageSize::KIB_4);
            for _ in 0..40 {
                assert!((PAGE..=64 << 20).contains(&pace.batch().get()));
                pace.observe(pace.batch(), 1);
            }
        }
    }
}

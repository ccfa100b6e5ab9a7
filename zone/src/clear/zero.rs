//! Clearing, copying and giving back pages of a bound region, with their content kept true:
//! [`Pagemap::zero`], [`Pagemap::copy_folio`], [`Pagemap::punch`].
//!
//! A page that is cleared belongs to the clearing thread from before its first byte changes until after
//! its last one has: its content is *zeroing* meanwhile, no pin is given, and no other thread clears it.
//! Afterwards it is *zero*, and stays that until it is pinned or handed out, and may be written to. What is zero
//! already, because the kernel or an earlier call has cleared it, is left alone: clearing twice costs as much as
//! clearing once.
//!
//! What cannot be cleared is no error of the call: pages that are pinned, bad, not there, or in the hands of
//! another thread are in the answer with the reason, and all others are done. Cancelling is no error
//! either; a page of which a byte is left is *unknown* afterwards.
//!
//! Units: pages. Cost: what the stores take ([`Region::zero_range`](crate::Region::zero_range)), and
//! two atomic steps a folio.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use uzone_os::AccessError;
use uzone_pages::{
    AddrError, AdvanceError, ByteLen, Content, Order, PageCount, Payload, Pfn, PfnRange,
};

use crate::clear::batches::Batched;
use crate::clear::options::ZeroOptions;
use crate::error::{Unclearable, WriteError};
use crate::inner::Inner;
use crate::pagemap::Pagemap;
use crate::pin::pin_target::PinTarget;

/// How many folios of a call are tried whose memory turns out not to be there, before all others that
/// are left are taken for such: each costs a signal, and a file that was truncated has millions.
const MOST_LOST: usize = 64;

/// How much is claimed at a time: others find the rest as it is, and batches need not be larger.
const CLAIM: ByteLen = ByteLen::gib(1);

/// What clearing pages came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "pages that are pinned, bad or another thread's are left as they were"]
#[non_exhaustive]
pub struct Zeroed {
    /// The pages that were cleared, in ascending order; neighbours are one range. A folio with bad
    /// pages is among them, and those pages of it are not cleared.
    pub ranges: Vec<PfnRange>,
    /// How many pages were cleared.
    pub pages: PageCount,
    /// How many were zero already, and left alone.
    pub known: PageCount,
    /// The pages of folios that were left as they were, and why, in ascending order; neighbours that were
    /// left for the same reason are one range.
    pub left: Vec<(PfnRange, Unclearable)>,
    /// The bad pages that were left out, in ascending order.
    pub bad: Vec<Pfn>,
    /// How many pages were not begun, or not finished, because it was cancelled; of the latter nothing
    /// is known.
    pub cancelled: PageCount,
    /// The longest time between two yield points.
    pub longest_pause: Duration,
    /// How long it took.
    pub elapsed: Duration,
}

impl Zeroed {
    /// Returns whether every page of the range is zero now.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.left.is_empty() && self.bad.is_empty() && self.cancelled == PageCount::default()
    }

    /// Returns the errors of folios whose memory turned out not to be there.
    pub(crate) fn lost(&self) -> impl Iterator<Item = AccessError> {
        self.left.iter().filter_map(|(_, cause)| match cause {
            Unclearable::Lost(error) => Some(*error),
            _ => None,
        })
    }

    /// Notes pages that are left as they were.
    fn leave(&mut self, range: PfnRange, cause: Unclearable) {
        if let Some((last, why)) = self.left.last_mut()
            && *why == cause
            && last.end() == range.start()
            && let Some(joined) = between(last.start(), range.end())
        {
            *last = joined;
        } else {
            self.left.push((range, cause));
        }
    }

    fn add(&mut self, range: PfnRange) {
        self.pages = PageCount::new(self.pages.get() + range.pages().get());
        push(&mut self.ranges, range);
    }
}

impl fmt::Display for Zeroed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages cleared in {:.1?}", self.pages, self.elapsed)?;
        for (count, what) in [
            (self.known.get(), "known to be zero"),
            (self.left.iter().map(|(range, _)| range.pages().get()).sum(), "left"),
            (self.bad.len() as u64, "bad"),
            (self.cancelled.get(), "cancelled"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        Ok(())
    }
}

/// Returns the pages from `start` up to `end`, if there are any.
fn between(start: Pfn, end: Pfn) -> Option<PfnRange> {
    end.checked_since(start).and_then(|pages| PfnRange::try_new(start, pages).ok())
}

/// Adds a range to a list in ascending order.
fn push(ranges: &mut Vec<PfnRange>, range: PfnRange) {
    let joined = ranges.last().filter(|last| last.end() == range.start()).and_then(|last| {
        let pages = PageCount::new(last.pages().get() + range.pages().get());
        PfnRange::try_new(last.start(), pages).ok()
    });
    match (joined, ranges.last_mut()) {
        (Some(joined), Some(last)) => *last = joined,
        _ => ranges.push(range),
    }
}

/// Folios whose bytes this thread replaces. Those that are left when this is dropped, because of an error or
/// a panic, are let go in the state `to`.
pub(crate) struct Owned<'a, P: Payload> {
    inner: &'a Inner<P>,
    /// In ascending order at first; neighbours are one range.
    pub(crate) ranges: Vec<PfnRange>,
    /// The state in which they are owned.
    state: Content,
    pub(crate) to: Content,
}

impl<'a, P: Payload> Owned<'a, P> {
    /// Puts the folios of a range that are in one of the states `from` in `state`, and calls `refused` with
    /// the others.
    pub(crate) fn take(
        inner: &'a Inner<P>,
        range: PfnRange,
        from: &[Content],
        (state, to): (Content, Content),
        mut refused: impl FnMut(PfnRange, AdvanceError),
    ) -> Self {
        let (pages, mut ranges) = (inner.order().pages(), Vec::new());
        inner.memmap.advance_run(range, from, state, |head, advanced| {
            let Ok(folio) = PfnRange::try_new(head, pages) else { return };
            match advanced {
                Ok(_) => push(&mut ranges, folio),
                Err(error) => refused(folio, error),
            }
        });
        Self { inner, ranges, state, to }
    }
}

impl<P: Payload> Drop for Owned<'_, P> {
    fn drop(&mut self) {
        for range in &self.ranges {
            // One that went bad meanwhile is poisoned by this step.
            self.inner.memmap.advance_run(*range, &[self.state], self.to, |_, _| ());
        }
    }
}

impl<P: Payload> Inner<P> {
    /// Refuses ranges that are not of whole folios of this region.
    fn check_folios(&self, asked: PfnRange) -> Result<(), WriteError> {
        let (region, order) = (self.range(), self.order());
        if !region.contains_range(asked) {
            return Err(crate::pin::pin_target::not_here(self, asked).into());
        }
        if !asked.start().is_aligned(order) || !asked.end().is_aligned(order) {
            return Err(WriteError::CutsFolio { asked, order });
        }
        Ok(())
    }

    /// Takes those folios of a range for clearing that can be taken. They are in descending order, so that
    /// the lowest is popped first.
    fn claim(&self, range: PfnRange, zeroed: &mut Zeroed) -> Owned<'_, P> {
        let states = (Content::Zeroing, Content::Unknown);
        let mut owned = Owned::take(self, range, &CLEARABLE, states, |folio, error| match error {
            AdvanceError::Found { found: Content::Zero, .. } => {
                zeroed.known = PageCount::new(zeroed.known.get() + folio.pages().get());
            }
            AdvanceError::Found { found: Content::Poisoned, .. } => zeroed.bad.push(folio.start()),
            error => zeroed.leave(folio, Unclearable::of(error)),
        });
        owned.ranges.reverse();
        owned
    }

    /// Lets folios that were taken for clearing go, as zero or as unknown.
    pub(crate) fn finish(&self, range: PfnRange, to: Content, zeroed: &mut Zeroed) {
        let folio_pages = self.order().pages();
        self.memmap.advance_run(range, &[Content::Zeroing], to, |head, advanced| {
            let Ok(folio) = PfnRange::try_new(head, folio_pages) else { return };
            match (advanced, to) {
                (Ok(_), Content::Zero) => zeroed.add(folio),
                (Ok(_), _) => {
                    let pages = zeroed.cancelled.get() + folio_pages.get();
                    zeroed.cancelled = PageCount::new(pages);
                }
                // It went bad meanwhile, and is poisoned now.
                (Err(_), _) => zeroed.bad.push(head),
            }
        });
    }

    /// Clears what was claimed, except bad pages and folios whose memory is not there, and lets go of all of
    /// it. A folio stays in `owned` while it is cleared, so that dropping `owned` lets go of it if a callback
    /// panics.
    fn clear(
        &self,
        mut owned: Owned<'_, P>,
        options: &ZeroOptions,
        zeroed: &mut Zeroed,
    ) -> Result<(), WriteError> {
        let shift = self.region.page_size().shift();
        while let Some(&part) = owned.ranges.last() {
            let cleared = self.clear_range(part, options, zeroed);
            let start = self.bytes_of(part).start;
            match cleared {
                Ok(None) => self.finish(part, Content::Zero, zeroed),
                Ok(Some(until)) => {
                    // Whole folios up to the first byte that is left.
                    let pages = PageCount::new((until - start) >> shift);
                    let (done, rest) = split_at(part, pages, self.order());
                    done.into_iter().for_each(|done| self.finish(done, Content::Zero, zeroed));
                    rest.into_iter().for_each(|rest| self.finish(rest, Content::Unknown, zeroed));
                }
                Err(WriteError::Access(error @ AccessError::Bus { offset, .. })) => {
                    // Stores are in any order, so of the other folios nothing is known, and they are
                    // cleared again; those before the one that is lost come next.
                    let pages = PageCount::new(offset.saturating_sub(start) >> shift);
                    let (before, rest) = split_at(part, pages, self.order());
                    let rest = rest.unwrap_or(part);
                    let (lost, behind) = match zeroed.lost().count() {
                        tried if tried < MOST_LOST => {
                            split_at(rest, self.order().pages(), self.order())
                        }
                        _ => (Some(rest), None),
                    };
                    self.lose(lost.unwrap_or(rest), error, zeroed);
                    owned.ranges.pop();
                    owned.ranges.extend(behind);
                    owned.ranges.extend(before);
                    continue;
                }
                Err(error) => return Err(error),
            }
            owned.ranges.pop();
        }
        Ok(())
    }

    /// Lets folios go whose memory is not there.
    fn lose(&self, range: PfnRange, error: AccessError, zeroed: &mut Zeroed) {
        let cancelled = zeroed.cancelled;
        self.finish(range, Content::Unknown, zeroed);
        zeroed.cancelled = cancelled; // false here
        // Of base pages those that went bad meanwhile, and of folios their heads: none of those is left
        // for this reason. The list may have several passes behind it, so it is in no order.
        let pages = self.order().pages();
        let mut known: Vec<Pfn> =
            zeroed.bad.iter().copied().filter(|head| range.contains(*head)).collect();
        known.sort_unstable();
        let mut start = range.start();
        for head in known {
            if let Some(before) = between(start, head) {
                zeroed.leave(before, Unclearable::Lost(error));
            }
            start = head.checked_add(pages).unwrap_or(range.end());
        }
        if let Some(rest) = between(start, range.end()) {
            zeroed.leave(rest, Unclearable::Lost(error));
        }
    }

    /// Clears a range that was claimed. Returns the first byte that is left if it was cancelled.
    fn clear_range(
        &self,
        range: PfnRange,
        options: &ZeroOptions,
        zeroed: &mut Zeroed,
    ) -> Result<Option<u64>, WriteError> {
        let bad = if self.order() == Order::BASE { Vec::new() } else { self.bad.in_range(range) };
        for piece in crate::pin::pin_target::good_pieces(range, &bad) {
            let bytes = self.bytes_of(piece);
            let hint = options.hint.filter(|hint| bytes.contains(hint));
            let options = ZeroOptions { hint, ..options.clone() };
            let len = ByteLen::new(bytes.end - bytes.start);
            let (mapping, page) = (self.region.memory(), self.region.page_size());
            let cleared = Batched::zero(mapping, page, bytes.start, len, &options)?.run(&options);
            zeroed.longest_pause = zeroed.longest_pause.max(cleared.longest_pause);
            if let Some(error) = cleared.error {
                return Err(error.into());
            }
            if !cleared.is_whole() {
                // With a hint or several threads the bytes that are done may be in several pieces:
                // what counts is the first that follows from the start.
                let first = cleared.ranges.first().filter(|first| first.start == bytes.start);
                return Ok(Some(first.map_or(bytes.start, |first| first.end)));
            }
        }
        zeroed.bad.extend(bad);
        Ok(None)
    }
}

/// Cuts a range behind the whole folios among its first `pages`.
fn split_at(
    range: PfnRange,
    pages: PageCount,
    order: Order,
) -> (Option<PfnRange>, Option<PfnRange>) {
    let whole = PageCount::new(pages.get() & !order.offset_mask());
    let done = PfnRange::try_new(range.start(), whole).ok();
    let rest = range
        .start()
        .checked_add(whole)
        .ok()
        .and_then(|start| PfnRange::try_new(start, range.end().checked_since(start)?).ok());
    (done, rest)
}

/// The states whose bytes may be cleared: of an earlier owner, and of none.
pub(crate) const CLEARABLE: [Content; 2] = [Content::Unknown, Content::Present];

impl<P: Payload> Pagemap<P> {
    /// Clears the folios of `range`, but for those that are zero already. Those that are pinned, bad,
    /// absent or in the hands of another thread are left as they were, and the answer lists them. Costs what
    /// the stores take ([`Region::zero_range`](crate::Region::zero_range)), and two atomic steps a folio.
    ///
    /// A hint of the options is a byte of the region, as of
    /// [`Region::zero_range`](crate::Region::zero_range): its folio is cleared last, and the page that
    /// is read next at the end of that.
    ///
    /// # Errors
    /// [`WriteError::Pin`] if a page is not the region's, [`WriteError::CutsFolio`] if the range is not of
    /// whole folios, and else as [`Region::zero_range`](crate::Region::zero_range); then what was cleared
    /// before is zero, and of what was begun nothing is known.
    pub fn zero(&self, range: PfnRange, options: &ZeroOptions) -> Result<Zeroed, WriteError> {
        let started = Instant::now();
        self.inner.check_folios(range)?;
        self.inner.collect_bus_errors();
        let mut zeroed = Zeroed::default();
        let hinted = match options.hint {
            None => None,
            Some(hint) => Some(self.hinted_folio(range, hint)?),
        };
        for piece in self.claims(range) {
            for piece in without(piece, hinted) {
                self.zero_piece(piece, options, &mut zeroed)?;
            }
        }
        if let Some(folio) = hinted {
            self.zero_piece(folio, options, &mut zeroed)?;
        }
        if hinted.is_some() || zeroed.lost().next().is_some() {
            sort(&mut zeroed);
        }
        zeroed.elapsed = started.elapsed();
        tracing::debug!(%range, elapsed = ?zeroed.elapsed, "clear");
        Ok(zeroed)
    }

    fn zero_piece(
        &self,
        piece: PfnRange,
        options: &ZeroOptions,
        zeroed: &mut Zeroed,
    ) -> Result<(), WriteError> {
        if options.cancel.load(Ordering::Relaxed) {
            zeroed.cancelled = PageCount::new(zeroed.cancelled.get() + piece.pages().get());
            return Ok(());
        }
        let owned = self.inner.claim(piece, zeroed);
        self.inner.clear(owned, options, zeroed)
    }

    /// Returns the folio that the hint is in.
    fn hinted_folio(&self, asked: PfnRange, hint: u64) -> Result<PfnRange, WriteError> {
        let page = hint >> self.region().page_size().shift();
        let order = self.inner.order();
        let pfn = self.range().start().checked_add(PageCount::new(page)).ok();
        pfn.filter(|pfn| asked.contains(*pfn))
            .and_then(|pfn| PfnRange::try_new(pfn.align_down(order), order.pages()).ok())
            .ok_or_else(|| {
                let Range { start, end } = self.inner.bytes_of(asked);
                AddrError::HintOutside { hint, start, end }.into()
            })
    }

    /// Cuts a range of whole folios in pieces that are claimed at once.
    fn claims(&self, range: PfnRange) -> impl Iterator<Item = PfnRange> + use<P> {
        let shift = self.region().page_size().shift();
        let step = (CLAIM.get() >> shift).max(self.inner.order().pages().get());
        let (start, end) = (range.start().get(), range.end().get());
        // A region need not start at a multiple of the step.
        (0..(end - start).div_ceil(step)).filter_map(move |piece| {
            let first = start + piece * step;
            PfnRange::try_new(Pfn::new(first), PageCount::new(step.min(end - first))).ok()
        })
    }

    /// Gives the pages of `range` back to the kernel, which answers the next touch with zeroes: their
    /// content is zero afterwards. Folios that are pinned, bad, absent or in the hands of another
    /// thread are left as they were, and the answer lists them.
    ///
    /// The next touch of such a page takes longer than clearing it in place would have:
    /// it is for memory that is not needed for a while.
    ///
    /// # Errors
    /// [`WriteError::Pin`] if a page is not the region's, [`WriteError::CutsFolio`] if the range is not of
    /// whole folios, and [`WriteError::Punch`] if it cuts a page of what is behind it, or the memory is of
    /// a kind that is not given back. Of what was begun nothing is known then.
    pub fn punch(&self, range: PfnRange) -> Result<Zeroed, WriteError> {
        let started = Instant::now();
        self.inner.check_folios(range)?;
        self.inner.collect_bus_errors();
        let mut zeroed = Zeroed::default();
        // Zero pages are given back as well: that is what is asked for.
        self.inner.memmap.advance_run(range, &[Content::Zero], Content::Present, |_, _| ());
        let mut owned = self.inner.claim(range, &mut zeroed);
        while let Some(&range) = owned.ranges.last() {
            self.inner.region.punch(self.inner.bytes_of(range)).map_err(WriteError::Punch)?;
            owned.ranges.pop();
            self.inner.finish(range, Content::Zero, &mut zeroed);
            // The kernel has taken bad pages with the others; whether it gives good ones is its
            // business, and `unpoison` the caller's.
            if self.inner.order() != Order::BASE {
                zeroed.bad.extend(self.inner.bad.in_range(range));
            }
        }
        zeroed.elapsed = started.elapsed();
        Ok(zeroed)
    }
}

/// Returns what is left of `range` without `hole`, which is inside or beside it.
fn without(range: PfnRange, hole: Option<PfnRange>) -> impl Iterator<Item = PfnRange> {
    let pieces = match hole.filter(|hole| range.overlaps(*hole)) {
        None => [Some(range), None],
        Some(hole) => [between(range.start(), hole.start()), between(hole.end(), range.end())],
    };
    pieces.into_iter().flatten()
}

/// Puts what was found in two passes in ascending order.
fn sort(zeroed: &mut Zeroed) {
    let mut ranges = std::mem::take(&mut zeroed.ranges);
    ranges.sort_unstable_by_key(|range| range.start());
    for range in ranges {
        push(&mut zeroed.ranges, range);
    }
    let mut left = std::mem::take(&mut zeroed.left);
    left.sort_unstable_by_key(|(range, _)| range.start());
    for (range, cause) in left {
        zeroed.leave(range, cause);
    }
    zeroed.bad.sort_unstable();
}

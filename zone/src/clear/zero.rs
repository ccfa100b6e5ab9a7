//! Clearing and giving back pages of a bound region, with their content kept true: [`Pagemap::zero`],
//! [`Pagemap::punch`].
//!
//! A page that is cleared belongs to the clearing thread from before its first byte changes until after
//! its last one has: its content is *zeroing* meanwhile, no pin is given, and no other thread clears it.
//! Afterwards it is *zero*, and stays that until it is pinned or handed out, and may be written to. A page that is zero
//! already, because the kernel or an earlier call has cleared it, is left alone: clearing twice costs as much as
//! clearing once.
//!
//! Pages that are pinned, bad, not there, or in the hands of another thread are no error of the call: the
//! outcome lists them with the reason, and all others are done. Cancelling is no error either; a page of
//! which a byte is left is *unknown* afterwards.
//!
//! Units: pages; the outcome has bytes of the region. Cost: the time of the stores
//! ([`Region::zero_range`](crate::Region::zero_range)), and two atomic steps a folio.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use uzone_os::AccessError;
use uzone_pages::{
    AddrError, AdvanceError, ByteLen, Content, Order, PageCount, Payload, Pfn, PfnRange,
};

use crate::clear::options::{Cleared, ZeroOptions};
use crate::clear::run;
use crate::error::{Unclearable, WriteError};
use crate::pagemap::Pagemap;
use crate::pagemap::shared::PagemapShared;
use crate::pin::pin_target::{PinTarget, good_pieces, not_here};

/// How many folios of a call are tried whose memory turns out not to be there, before all others that
/// are left are taken for such: each costs a signal, and a file that was truncated has millions.
const MOST_LOST: usize = 64;

/// How much is claimed at a time: others find the rest as it is, and batches need not be larger.
const CLAIM: ByteLen = ByteLen::gib(1);

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
    inner: &'a PagemapShared<P>,
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
        inner: &'a PagemapShared<P>,
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

impl<P: Payload> PagemapShared<P> {
    /// Refuses ranges that are not of whole folios of this region.
    fn check_folios(&self, asked: PfnRange) -> Result<(), WriteError> {
        let (region, order) = (self.range(), self.order());
        if !region.contains_range(asked) {
            return Err(not_here(self, asked).into());
        }
        if !asked.start().is_aligned(order) || !asked.end().is_aligned(order) {
            return Err(WriteError::CutsFolio { asked, order });
        }
        Ok(())
    }

    /// Takes the folios of a range for clearing that can be taken. They are in descending order, so that
    /// the lowest is popped first.
    fn claim(&self, range: PfnRange, cleared: &mut Cleared) -> Owned<'_, P> {
        let states = (Content::Zeroing, Content::Unknown);
        let mut owned = Owned::take(self, range, &CLEARABLE, states, |folio, error| {
            let bytes = self.bytes_of(folio);
            if let AdvanceError::Found { found: Content::Zero, .. } = error {
                cleared.known = ByteLen::new(cleared.known.get() + (bytes.end - bytes.start));
            } else {
                cleared.leave(bytes, Unclearable::of(error));
            }
        });
        owned.ranges.reverse();
        owned
    }

    /// Lets folios that were taken for clearing go: as zero, or for a reason as unknown.
    fn finish(&self, range: PfnRange, why: Option<Unclearable>, cleared: &mut Cleared) {
        let (pages, mut zero) = (self.order().pages(), Vec::new());
        let to = if why.is_none() { Content::Zero } else { Content::Unknown };
        self.memmap.advance_run(range, &[Content::Zeroing], to, |head, advanced| {
            let Ok(folio) = PfnRange::try_new(head, pages) else { return };
            match (advanced, why) {
                (Ok(_), None) => push(&mut zero, folio),
                (Ok(_), Some(why)) => cleared.leave(self.bytes_of(folio), why),
                // It went bad meanwhile, and is poisoned by the step.
                (Err(_), _) => cleared.leave(self.bytes_of(folio), Unclearable::Poisoned),
            }
        });
        for range in zero {
            let bad = self.bad_in_folios(range);
            for pfn in bad.iter().filter_map(|pfn| PfnRange::try_single(*pfn).ok()) {
                cleared.leave(self.bytes_of(pfn), Unclearable::Poisoned);
            }
            for piece in good_pieces(range, &bad) {
                cleared.add(self.bytes_of(piece));
            }
        }
    }

    /// Returns the bad pages of folios of several pages. Of base pages, the word itself states it.
    fn bad_in_folios(&self, range: PfnRange) -> Vec<Pfn> {
        if self.order() == Order::BASE { Vec::new() } else { self.bad.in_range(range) }
    }

    /// Clears claimed folios, except bad pages and folios whose memory is not there, and lets go of all of
    /// them. A folio stays in `owned` while it is cleared, so that dropping `owned` lets go of it if a callback
    /// panics.
    fn clear(
        &self,
        mut owned: Owned<'_, P>,
        options: &ZeroOptions,
        cleared: &mut Cleared,
    ) -> Result<(), WriteError> {
        let (shift, order) = (self.region.page_size().shift(), self.order());
        let mut lost_folios = 0;
        while let Some(&part) = owned.ranges.last() {
            let start = self.bytes_of(part).start;
            // Whole folios up to a byte, and the others.
            let split = |byte: u64| {
                split_at(part, PageCount::new(byte.saturating_sub(start) >> shift), order)
            };
            match self.clear_range(part, options, cleared)? {
                None => self.finish(part, None, cleared),
                Some((_, Unclearable::Lost(error @ AccessError::Bus { offset, .. }))) => {
                    // Stores are in any order, so of the other folios nothing is known, and they are
                    // cleared again; those before the one that is lost come next.
                    let (before, rest) = split(offset);
                    let rest = rest.unwrap_or(part);
                    let (lost, behind) = match lost_folios {
                        tried if tried < MOST_LOST => split_at(rest, order.pages(), order),
                        _ => (Some(rest), None),
                    };
                    lost_folios += 1;
                    self.finish(lost.unwrap_or(rest), Some(Unclearable::Lost(error)), cleared);
                    owned.ranges.pop();
                    owned.ranges.extend(behind);
                    owned.ranges.extend(before);
                    continue;
                }
                Some((left, why)) => {
                    let (done, rest) = split(left.start);
                    done.into_iter().for_each(|done| self.finish(done, None, cleared));
                    rest.into_iter().for_each(|rest| self.finish(rest, Some(why), cleared));
                }
            }
            owned.ranges.pop();
        }
        Ok(())
    }

    /// Clears a claimed range. Returns the first bytes that are left and why, if there are any.
    fn clear_range(
        &self,
        range: PfnRange,
        options: &ZeroOptions,
        cleared: &mut Cleared,
    ) -> Result<Option<(Range<u64>, Unclearable)>, WriteError> {
        for piece in good_pieces(range, &self.bad_in_folios(range)) {
            let bytes = self.bytes_of(piece);
            let hint = options.hint.filter(|hint| bytes.contains(hint));
            let options = ZeroOptions { hint, ..options.clone() };
            let len = ByteLen::new(bytes.end - bytes.start);
            let (mapping, page) = (self.region.memory(), self.region.page_size());
            let piece = run::zero(mapping, page, bytes.start, len, &options)?;
            cleared.stores = piece.stores;
            cleared.threads = cleared.threads.max(piece.threads);
            if let Some(first) = piece.left.into_iter().next() {
                return Ok(Some(first));
            }
        }
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
    /// Clears the folios of `range`, but for those that are zero already. Folios that are pinned, bad,
    /// absent or in the hands of another thread are left as they were, and the outcome lists them, as bytes
    /// of [`Pagemap::region`](crate::PagemapView::region). A bad page of a folio is left, and its neighbours
    /// are cleared. Costs the time of the stores ([`Region::zero_range`](crate::Region::zero_range)), and two
    /// atomic steps a folio.
    ///
    /// A hint of the options is a byte of the region, as of
    /// [`Region::zero_range`](crate::Region::zero_range): its folio is cleared last, and the page that
    /// is read next at the end of that.
    ///
    /// # Errors
    /// [`WriteError::Pin`] if a page is not the region's, [`WriteError::CutsFolio`] if the range is not of
    /// whole folios, and else as [`Region::zero_range`](crate::Region::zero_range); then folios that were
    /// cleared before are zero, and the content of those that were begun is not known.
    pub fn zero(&self, range: PfnRange, options: &ZeroOptions) -> Result<Cleared, WriteError> {
        let started = Instant::now();
        self.inner.check_folios(range)?;
        self.inner.collect_bus_errors();
        let mut cleared = Cleared::default();
        let hinted = match options.hint {
            None => None,
            Some(hint) => Some(self.hinted_folio(range, hint)?),
        };
        for piece in self.claims(range).flat_map(|piece| without(piece, hinted)).chain(hinted) {
            if options.cancel.load(Ordering::Relaxed) {
                cleared.leave(self.inner.bytes_of(piece), Unclearable::Cancelled);
                continue;
            }
            let owned = self.inner.claim(piece, &mut cleared);
            self.inner.clear(owned, options, &mut cleared)?;
        }
        cleared.sort();
        cleared.elapsed = started.elapsed();
        tracing::debug!(%range, elapsed = ?cleared.elapsed, "clear");
        Ok(cleared)
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
    /// thread are left as they were, and the outcome lists them.
    ///
    /// The next touch of such a page takes longer than clearing it in place would have:
    /// it is for memory that is not needed for a while.
    ///
    /// # Errors
    /// [`WriteError::Pin`] if a page is not the region's, [`WriteError::CutsFolio`] if the range is not of
    /// whole folios, and [`WriteError::Punch`] if it cuts a page of the region's source, or the memory is of
    /// a kind that is not given back. The content of pages that were begun is not known then.
    pub fn punch(&self, range: PfnRange) -> Result<Cleared, WriteError> {
        let started = Instant::now();
        self.inner.check_folios(range)?;
        self.inner.collect_bus_errors();
        let mut cleared = Cleared::default();
        // Zero pages are given back as well: the caller asks for their memory.
        self.inner.memmap.advance_run(range, &[Content::Zero], Content::Present, |_, _| ());
        let mut owned = self.inner.claim(range, &mut cleared);
        while let Some(&range) = owned.ranges.last() {
            self.inner.region.punch(self.inner.bytes_of(range)).map_err(WriteError::Punch)?;
            owned.ranges.pop();
            // The kernel has taken the bad pages of a folio with the others; whether it gives good ones is
            // its business, and `unpoison` the caller's.
            self.inner.finish(range, None, &mut cleared);
        }
        cleared.sort();
        cleared.elapsed = started.elapsed();
        Ok(cleared)
    }
}

/// Returns the pages from `start` up to `end`, if there are any.
fn between(start: Pfn, end: Pfn) -> Option<PfnRange> {
    end.checked_since(start).and_then(|pages| PfnRange::try_new(start, pages).ok())
}

/// Returns the parts of `range` without `hole`, which is inside or beside it.
fn without(range: PfnRange, hole: Option<PfnRange>) -> impl Iterator<Item = PfnRange> {
    let pieces = match hole.filter(|hole| range.overlaps(*hole)) {
        None => [Some(range), None],
        Some(hole) => [between(range.start(), hole.start()), between(hole.end(), range.end())],
    };
    pieces.into_iter().flatten()
}

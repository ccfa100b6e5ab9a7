//! Holds on a range of pages: [`Span`], and how it is taken, split and given back.
//!
//! One atomic step for each folio, or for each block of base pages that the range covers wholly, and
//! one for each page that it cuts off at its ends (`block.rs`). Taking is all or nothing: if a folio
//! refuses, those before it are given back.
//!
//! When a range is split inside a folio or a block, both halves hold that once; so a span remembers
//! at which end it holds a block that it does not cover.

use core::ops::Deref;

use crate::addr::{PageCount, Pfn, PfnRange};
use crate::block::{BLOCK_ORDER, Block, BlockRef};
use crate::content::Content;
use crate::folio::{Folio, HoldError, obstacle};
use crate::memmap::Memmap;
use crate::page::Page;
use crate::word::HoldKind;

/// How often an inhibited block is looked at before it is called busy: longer than a thread takes from
/// its inhibitor to its page, if it runs.
const PATIENCE: u32 = if cfg!(loom) { 1 } else { 256 };

/// A range of pages whose folios are held.
///
/// It is a note and not a guard: dropping it gives nothing back. [`Memmap::release`] does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Span {
    range: PfnRange,
    /// [`FRONT_BLOCK`] and [`BACK_BLOCK`]. A whole word like the others, so that a guard is moved in
    /// words: a load that spans several narrower stores waits until they have left the store buffer.
    ends: u64,
}

/// The block in which the range begins is held although the range begins inside it.
const FRONT_BLOCK: u64 = 1;
/// The same where it ends.
const BACK_BLOCK: u64 = 2;

impl Span {
    /// Takes a range whose folios the caller holds, each for itself.
    #[must_use]
    pub const fn of_folios(range: PfnRange) -> Self {
        Self { range, ends: 0 }
    }

    /// Returns the pages.
    #[must_use]
    pub const fn range(self) -> PfnRange {
        self.range
    }

    /// Returns where the blocks begin and end that are held as such; the same where there are none.
    #[inline]
    fn blocks(self) -> (Pfn, Pfn) {
        let (start, end) = (self.range.start(), self.range.end());
        // The numbers of a range are at most 2^64 - 1, and the block at that end is not whole.
        let up = |pfn: Pfn| pfn.align_up(BLOCK_ORDER).unwrap_or(end);
        let first =
            if self.ends & FRONT_BLOCK != 0 { start.align_down(BLOCK_ORDER) } else { up(start) };
        let last = if self.ends & BACK_BLOCK != 0 { up(end) } else { end.align_down(BLOCK_ORDER) };
        if first < last { (first, last) } else { (start, start) }
    }
}

impl<P, S, B> Memmap<P, S, B>
where
    S: Deref<Target = [Page<P>]>,
    B: Deref<Target = [Block]>,
{
    /// Holds the folios of `range`, which has to be of this memmap. `bad` is asked for the first bad
    /// page among those of a folio of which some are; a pin for one of those is refused.
    ///
    /// # Errors
    /// The first page in the way, and why; then nothing is held.
    #[inline(always)]
    pub fn hold(
        &self,
        range: PfnRange,
        sort: HoldKind,
        bad: impl Fn(PfnRange) -> Option<Pfn>,
    ) -> Result<Span, (Pfn, HoldError)> {
        if !self.has_blocks()
            && let Some((head, folio)) = self.only_folio(range)
        {
            let (start, end) = (range.start(), range.end());
            self.hold_folio((head, folio), start, end, sort, &bad)?;
            return Ok(Span::of_folios(range));
        }
        self.hold_long(range, sort, &bad)
    }

    /// Holds the folios of a range that may have several, or blocks.
    fn hold_long(
        &self,
        range: PfnRange,
        sort: HoldKind,
        bad: &impl Fn(PfnRange) -> Option<Pfn>,
    ) -> Result<Span, (Pfn, HoldError)> {
        let span = Span::of_folios(range);
        let (first, last) =
            if self.has_blocks() { span.blocks() } else { (range.start(), range.start()) };
        if first == last {
            self.hold_folios(range.start(), range.end(), sort, bad)?;
            return Ok(span);
        }
        self.hold_folios(range.start(), first, sort, bad)?;
        if let Err(refused) = self.hold_blocks(first, last, sort) {
            self.release_folios(range.start(), first, sort);
            return Err(refused);
        }
        if let Err(refused) = self.hold_folios(last, range.end(), sort, bad) {
            self.release_blocks(first, last, sort);
            self.release_folios(range.start(), first, sort);
            return Err(refused);
        }
        Ok(span)
    }

    /// Gives the holds of a span back.
    #[inline(always)]
    pub fn release(&self, span: Span, sort: HoldKind) {
        if !self.has_blocks()
            && let Some((_, folio)) = self.only_folio(span.range)
        {
            return release(folio, sort);
        }
        self.release_long(span, sort);
    }

    /// Gives the holds of [`Memmap::hold_long`] back, or a part of them.
    fn release_long(&self, span: Span, sort: HoldKind) {
        let range = span.range;
        let (first, last) =
            if self.has_blocks() { span.blocks() } else { (range.start(), range.start()) };
        if first == last {
            return self.release_folios(range.start(), range.end(), sort);
        }
        if range.start() < first {
            self.release_folios(range.start(), first, sort);
        }
        self.release_blocks(first, last, sort);
        if last < range.end() {
            self.release_folios(last, range.end(), sort);
        }
    }

    /// Cuts a span before the page that is `pages` behind its first. A folio or block that lies in
    /// both parts is held once more.
    ///
    /// # Errors
    /// `None` if a part would be empty, or the page in the middle if its folio or block has as many
    /// holders as can be counted; then the span holds as much as before.
    pub fn split(
        &self,
        span: Span,
        sort: HoldKind,
        pages: PageCount,
    ) -> Result<(Span, Span), Option<(Pfn, HoldError)>> {
        let start = span.range.start();
        let middle = start.checked_add(pages).map_err(|_| None)?;
        let rest = span.range.pages().get().saturating_sub(pages.get());
        let front = PfnRange::try_new(start, pages).map_err(|_| None)?;
        let back = PfnRange::try_new(middle, PageCount::new(rest)).map_err(|_| None)?;
        let mut first = Span { range: front, ends: span.ends & FRONT_BLOCK };
        let mut second = Span { range: back, ends: span.ends & BACK_BLOCK };
        let refused = |cause| Some((middle, cause));
        if !self.has_blocks() {
            if !middle.is_aligned(self.layout().order())
                && let Some(folio) = self.folio(middle)
            {
                folio.hold_again(sort).map_err(refused)?;
            }
            return Ok((first, second));
        }
        let (first_block, last_block) = span.blocks();
        if first_block < middle && middle < last_block && !middle.is_aligned(BLOCK_ORDER) {
            if let Some(block) = self.block(middle) {
                block.hold_again(sort).map_err(refused)?;
            }
            first.ends |= BACK_BLOCK;
            second.ends |= FRONT_BLOCK;
        }
        Ok((first, second))
    }

    /// Holds the folio at a head, which has pages from `start` up to `end`.
    // Always, as all that a pin of one folio goes through: a value that is returned through memory is waited
    // for, behind an atomic step even longer.
    #[inline(always)]
    fn hold_folio(
        &self,
        (head, folio): (Pfn, Folio<'_, P>),
        start: Pfn,
        end: Pfn,
        sort: HoldKind,
        bad: &impl Fn(PfnRange) -> Option<Pfn>,
    ) -> Result<(), (Pfn, HoldError)> {
        match folio.try_hold(sort) {
            Ok(before) => {
                if sort == HoldKind::Reference || !before.is_partly_poisoned() {
                    return Ok(());
                }
                self.check_parts((head, folio), start, end, sort, bad)
            }
            Err(cause) => Err((head.max(start), cause)),
        }
    }

    /// Gives the folio back that was just held if one of its pages from `start` up to `end` is bad.
    #[cold]
    fn check_parts(
        &self,
        (head, folio): (Pfn, Folio<'_, P>),
        start: Pfn,
        end: Pfn,
        sort: HoldKind,
        bad: &impl Fn(PfnRange) -> Option<Pfn>,
    ) -> Result<(), (Pfn, HoldError)> {
        let Some(pfn) = self.part(head, start, end).and_then(bad) else { return Ok(()) };
        release(folio, sort);
        Err((pfn, HoldError::Content(Content::Poisoned)))
    }

    #[inline]
    fn hold_folios(
        &self,
        start: Pfn,
        end: Pfn,
        sort: HoldKind,
        bad: &impl Fn(PfnRange) -> Option<Pfn>,
    ) -> Result<(), (Pfn, HoldError)> {
        for (head, folio) in self.bare_folios(start, end) {
            if let Err(refused) = self.hold_folio((head, folio), start, end, sort, bad) {
                self.undo_folios(start, head, sort);
                return Err(refused);
            }
        }
        Ok(())
    }

    #[cold]
    fn undo_folios(&self, start: Pfn, head: Pfn, sort: HoldKind) {
        if start < head {
            self.release_folios(start, head, sort);
        }
    }

    /// Returns the pages from `start` up to `end` of the folio at `head`.
    #[cold]
    fn part(&self, head: Pfn, start: Pfn, end: Pfn) -> Option<PfnRange> {
        let first = head.max(start);
        let last = head.checked_add(self.layout().order().pages()).unwrap_or(end).min(end);
        PfnRange::try_new(first, last.checked_since(first)?).ok()
    }

    #[inline]
    fn release_folios(&self, start: Pfn, end: Pfn, sort: HoldKind) {
        for (_, folio) in self.bare_folios(start, end) {
            release(folio, sort);
        }
    }

    #[inline]
    fn hold_blocks(&self, first: Pfn, last: Pfn, sort: HoldKind) -> Result<(), (Pfn, HoldError)> {
        for (start, block) in self.blocks(first, last) {
            if let Err(refusal) = block.hold(sort)
                && let Err(refused) = self.hold_inhibited(start, block, sort, refusal)
            {
                self.release_blocks(first, start, sort);
                return Err(refused);
            }
        }
        Ok(())
    }

    /// Finds the page for which a block is inhibited; holds the block if the inhibitor has gone meanwhile.
    #[cold]
    fn hold_inhibited(
        &self,
        start: Pfn,
        block: BlockRef<'_>,
        sort: HoldKind,
        mut refusal: HoldError,
    ) -> Result<(), (Pfn, HoldError)> {
        for _ in 0..PATIENCE {
            if refusal == HoldError::Overflow {
                return Err((start, HoldError::Overflow));
            }
            let end = start.checked_add(BLOCK_ORDER.pages()).unwrap_or(start);
            for (pfn, folio) in self.folios(start, end) {
                if let Some(cause) = obstacle(folio.own_word(), sort) {
                    return Err((pfn, cause));
                }
            }
            // The thread that inhibited it is between the steps on the block and on the page.
            spin();
            match block.hold(sort) {
                Ok(()) => return Ok(()),
                Err(again) => refusal = again,
            }
        }
        Err((start, HoldError::Busy))
    }

    #[inline]
    fn release_blocks(&self, first: Pfn, last: Pfn, sort: HoldKind) {
        for (_, block) in self.blocks(first, last) {
            let given = block.give_back(sort);
            debug_assert!(given, "a span gives back the holds that it took");
        }
    }
}

#[inline]
fn release<P>(folio: Folio<'_, P>, sort: HoldKind) {
    let released = folio.release(sort);
    debug_assert!(released.is_ok(), "a span gives back the holds that it took");
}

fn spin() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    core::hint::spin_loop();
}

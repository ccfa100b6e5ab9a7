//! Steps of the content of many pages: [`Memmap::advance_run`].
//!
//! Page by page, a step of a base page is two atomics: the inhibitor of its block, and its word. A run inhibits
//! the block for itself, before its first page and until after its last, and takes and gives back the
//! inhibitors of pages a few at a time; so little more than one atomic a page is left. The order makes
//! that right: a page that becomes unpinnable has an inhibitor of its own from before that step
//! on, for others may make it pinnable again while the run goes on, and then take that inhibitor back.

use core::ops::Deref;

use crate::addr::{Pfn, PfnRange};
use crate::block::{BLOCK_ORDER, Block, BlockRef};
use crate::content::Content;
use crate::folio::{AdvanceError, Folio};
use crate::memmap::Memmap;
use crate::page::Page;

impl<P, S, B> Memmap<P, S, B>
where
    S: Deref<Target = [Page<P>]>,
    B: Deref<Target = [Block]>,
{
    /// Puts the content of every folio that has a page in `range` to state `to`, from whichever of
    /// the states `from` it is in, and tells `each` how that went, in ascending order of the heads.
    /// Pages that are not described are left out. One atomic step a folio, and for base pages one more
    /// for about eight.
    ///
    /// # Panics
    /// If a step from one of `from` to `to` is none, or would poison: that is for one page. If `each`
    /// does, the pages that it was called with have been advanced, and no others.
    pub fn advance_run(
        &self,
        range: PfnRange,
        from: &[Content],
        to: Content,
        mut each: impl FnMut(Pfn, Result<Content, AdvanceError>),
    ) {
        assert!(
            to != Content::Poisoned && from.iter().all(|from| from.may_become(to)),
            "a run of pages from one of {from:?} to {to:?}"
        );
        // The pages of the caller's range that there are.
        let own = self.layout().range();
        let mut start = range.start().max(own.start());
        let last = range.end().min(own.end());
        while self.has_blocks() && start < last {
            let block_end = start.align_down(BLOCK_ORDER).checked_add(BLOCK_ORDER.pages());
            let end = block_end.unwrap_or(last).min(last);
            self.advance_in_block(start, end, from, to, &mut each);
            start = end;
        }
        if start < last {
            for (head, folio) in self.folios(start, last) {
                each(head, advance(folio, from, to));
            }
        }
    }

    fn advance_in_block(
        &self,
        start: Pfn,
        end: Pfn,
        from: &[Content],
        to: Content,
        each: &mut impl FnMut(Pfn, Result<Content, AdvanceError>),
    ) {
        let Some(block) = self.block(start) else { return };
        let is_leaving = !to.is_pinnable() && from.iter().any(|from| from.is_pinnable());
        if is_leaving && let Err(pins) = block.inhibit() {
            for (pfn, folio) in self.folios(start, end) {
                // A page that would have been refused for another reason is refused for that.
                let found = folio.own_word().content();
                let cause = match from.contains(&found) {
                    true => AdvanceError::Pinned { pins },
                    false => AdvanceError::Found { expected: to_expect(from), found },
                };
                each(pfn, Err(cause));
            }
            return;
        }
        let mut spare = Spare { block, inhibitors: u64::from(is_leaving) };
        // Without their blocks: those are inhibited here for all of them.
        for (pfn, folio) in self.bare_folios(start, end) {
            if is_leaving && spare.inhibitors == 1 {
                block.inhibit_more(SPARE_INHIBITORS);
                spare.inhibitors += SPARE_INHIBITORS;
            }
            let advanced = advance(folio, from, to);
            if let Ok(from) = advanced {
                spare.inhibitors -= u64::from(from.is_pinnable() && !to.is_pinnable());
                spare.inhibitors += u64::from(!from.is_pinnable() && to.is_pinnable());
            }
            if spare.inhibitors > 2 * SPARE_INHIBITORS {
                spare.inhibitors -= SPARE_INHIBITORS;
                block.uninhibit(SPARE_INHIBITORS);
            }
            each(pfn, advanced);
        }
    }
}

/// How many inhibitors a run takes or gives back at a time. A block that has an inhibitor for every page has room
/// for those of a dozen runs.
const SPARE_INHIBITORS: u64 = 16;

/// The inhibitors of a run that are no page's: while it takes pages away, always one, which keeps pins off.
/// Dropping it takes them back, also if the caller panics.
struct Spare<'a> {
    block: BlockRef<'a>,
    inhibitors: u64,
}

impl Drop for Spare<'_> {
    fn drop(&mut self) {
        if self.inhibitors > 0 {
            self.block.uninhibit(self.inhibitors);
        }
    }
}

/// The state that a refusal names as the one expected.
fn to_expect(from: &[Content]) -> Content {
    from.first().copied().unwrap_or(Content::Unknown)
}

/// Advances a folio from whichever state of `from` it is in; returns which that was.
fn advance<P>(folio: Folio<'_, P>, from: &[Content], to: Content) -> Result<Content, AdvanceError> {
    loop {
        let found = folio.own_word().content();
        if !from.contains(&found) {
            return Err(AdvanceError::Found { expected: to_expect(from), found });
        }
        match folio.advance_inhibited(found, to) {
            Ok(()) => return Ok(found),
            // Another state of those that are right: it ends, for another thread's step succeeded.
            Err(AdvanceError::Found { found: now, .. }) if from.contains(&now) => {}
            Err(error) => return Err(error),
        }
    }
}

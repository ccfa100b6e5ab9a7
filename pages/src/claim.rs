//! Steps of the content of many pages: [`Memmap::advance_run`].
//!
//! Page by page, a step of a base page is two atomics: the bar of its block, and its word. Of a run
//! the block is barred once, before its first page and until after its last, and the bars that stay
//! for pages that have become unpinnable are added together at the end; so what is left is one
//! atomic a page. What makes that right is the order: pins are kept off by the first bar from before
//! the first page changes, and the last bar goes only after the last page has become pinnable.

use core::ops::Deref;

use crate::addr::{Pfn, PfnRange};
use crate::block::{BLOCK_ORDER, Bar, Block};
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
    /// One atomic step a folio, and for base pages two for each block of 512.
    ///
    /// # Panics
    /// If a step from one of `from` to `to` is none, or would poison: that is for one page.
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
        let mut start = range.start();
        while self.has_blocks() && start < range.end() {
            let block_end = start
                .align_down(BLOCK_ORDER)
                .checked_add(BLOCK_ORDER.pages())
                .unwrap_or(range.end());
            let end = block_end.min(range.end());
            self.advance_in_block(start, end, from, to, &mut each);
            start = end;
        }
        if start < range.end() {
            for (head, folio) in self.folios(start, range.end()) {
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
        if is_leaving && let Err((_, pins)) = block.bar(Bar::Pins) {
            for (pfn, folio) in self.folios(start, end) {
                // What would have been refused for another reason is refused for that.
                let found = folio.own_word().content();
                let cause = match from.contains(&found) {
                    true => AdvanceError::Pinned { pins },
                    false => AdvanceError::Found { expected: to_expect(from), found },
                };
                each(pfn, Err(cause));
            }
            return;
        }
        let (mut left, mut arrived) = (0_u64, 0_u64);
        // Without their blocks: those are barred here for all of them.
        for (pfn, folio) in self.bare_folios(start, end) {
            let advanced = advance(folio, from, to);
            if let Ok(from) = advanced {
                left += u64::from(from.is_pinnable() && !to.is_pinnable());
                arrived += u64::from(!from.is_pinnable() && to.is_pinnable());
            }
            each(pfn, advanced);
        }
        match left {
            _ if !is_leaving => {}
            0 => block.unbar(Bar::Pins),
            1 => {} // the bar is this page's
            more => block.bar_more(Bar::Pins, more - 1),
        }
        if arrived > 0 {
            block.unbar_many(Bar::Pins, arrived);
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
        match folio.advance_barred(found, to) {
            Ok(()) => return Ok(found),
            // Another state of those that are right: it ends, for another thread's step succeeded.
            Err(AdvanceError::Found { found: now, .. }) if from.contains(&now) => {}
            Err(error) => return Err(error),
        }
    }
}

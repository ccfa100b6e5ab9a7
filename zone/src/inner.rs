//! What a pagemap and its guards share, and what its descriptors lie in.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use uzone_os::bus::Watch;
use uzone_os::{Exclusive, Mapped};
use uzone_pages::{
    AdvanceError, Content, Folio, HoldSort, Memmap, MemoryKind, Order, Page, PageCount, Payload,
    Pfn, PfnRange, Span, SpanRefused, Template, Word,
};

use crate::altmap::{self, Front};
use crate::blocks::Blocks;
use crate::guards::GuardBook;
use crate::hold::{HoldFailure, Holdable, Segment};
use crate::keep::{MemmapMemory, MemmapPages, Source};
use crate::options::{Owner, PagemapOps};
use crate::poison::{BadPages, Poisoned};
use crate::produce::{is_missing, produce};
use crate::region::{Backing, Region};
use crate::report::BindReport;
use crate::view::PageView;
use crate::zone::{Claim, Shared};

/// A memmap whose memory goes back to its zone when it is dropped, if that should keep it.
pub(crate) struct Leased<P: Payload> {
    memmap: Option<Memmap<P, Mapped<Page<P>>, Blocks>>,
    keeper: Option<Arc<Shared>>,
    pages: MemmapPages,
}

impl<P: Payload> Leased<P> {
    /// Takes a memmap and, if every page of its memory is present, the zone that keeps it.
    pub(crate) fn new(
        memmap: Memmap<P, Mapped<Page<P>>, Blocks>,
        keeper: Option<Arc<Shared>>,
        pages: MemmapPages,
    ) -> Self {
        Self { memmap: Some(memmap), keeper, pages }
    }
}

impl<P: Payload> Deref for Leased<P> {
    type Target = Memmap<P, Mapped<Page<P>>, Blocks>;

    fn deref(&self) -> &Self::Target {
        match &self.memmap {
            Some(memmap) => memmap,
            None => unreachable!("only drop and `into_exclusive` take the memmap out"),
        }
    }
}

impl<P: Payload> Leased<P> {
    /// Returns the memory of the descriptors, which does not go back to the zone, and how many bytes
    /// of it they have.
    pub(crate) fn into_exclusive(mut self) -> (Exclusive, usize) {
        match self.memmap.take() {
            Some(memmap) => {
                let len = size_of_val(memmap.descriptors());
                (memmap.into_descriptors().into_exclusive(), len)
            }
            None => unreachable!("only this and drop take the memmap out"),
        }
    }
}

impl<P: Payload> Drop for Leased<P> {
    fn drop(&mut self) {
        let Some(memmap) = self.memmap.take() else { return };
        if self.pages == MemmapPages::Region {
            let len = size_of_val(memmap.descriptors());
            let mut memory = memmap.into_descriptors().into_exclusive();
            // Private memory is unmapped in a moment; what others may have outlives us.
            if !memory.is_private() {
                altmap::clear(&mut memory, len);
            }
            return;
        }
        let (descriptors, blocks) = memmap.into_parts();
        let memory = descriptors.into_exclusive();
        match (blocks, &self.keeper) {
            (Blocks::Behind(blocks), _) => {
                // So that one call unmaps both; apart, each unmaps itself.
                drop(memory.join(blocks.into_exclusive()));
            }
            (_, Some(keeper)) => {
                let (pages, source) = (self.pages, Source::Kept);
                keeper.keep.give(MemmapMemory { memory, pages, source, behind: None });
            }
            _ => {}
        }
    }
}

/// All of a pagemap but its region.
pub(crate) struct Parts<P: Payload> {
    pub(crate) memmap: Leased<P>,
    pub(crate) template: Template<P>,
    pub(crate) owner: Option<Owner>,
    pub(crate) ops: PagemapOps,
    pub(crate) report: BindReport,
    /// The parts of the region before its descriptors, if those lie in it.
    pub(crate) front: Option<Front>,
    // Dropped last: the frame numbers are free again when the descriptors are gone.
    pub(crate) claim: Claim,
}

impl<P: Payload> Parts<P> {
    /// Ends the description and returns the whole region.
    pub(crate) fn into_region(self, data: Region) -> Region {
        match self.front {
            Some(front) => {
                let (memory, len) = self.memmap.into_exclusive();
                front.join_cleared(memory, len, data)
            }
            None => data,
        }
    }

    pub(crate) fn page(&self, pfn: Pfn) -> Option<PageView<'_, P>> {
        Some(PageView { page: self.memmap.page(pfn)?, template: &self.template })
    }
}

/// What a pagemap and its guards share. The region comes first, so that it is unmapped before its
/// frame numbers are free again.
pub(crate) struct Inner<P: Payload> {
    /// Who notes the bus errors of the region, if anybody asked. First, so that nothing is noted of
    /// what is mapped there afterwards.
    pub(crate) watch: OnceLock<Watch>,
    pub(crate) region: Region,
    pub(crate) parts: Parts<P>,
    pub(crate) guards: GuardBook,
    pub(crate) bad: BadPages,
}

impl<P: Payload> Inner<P> {
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    pub(crate) fn page(&self, pfn: Pfn) -> Option<PageView<'_, P>> {
        self.parts.page(pfn)
    }

    pub(crate) fn folio(&self, pfn: Pfn) -> Option<Folio<'_, P>> {
        self.parts.memmap.folio(pfn)
    }

    /// Returns the folios that have pages from `start` up to `end`, with their heads.
    pub(crate) fn folios(&self, start: Pfn, end: Pfn) -> impl Iterator<Item = (Pfn, Folio<'_, P>)> {
        self.parts.memmap.folios(start, end)
    }

    /// Returns where all pages lie that are claimed, those of the descriptors in front included.
    pub(crate) fn whole_segment(&self) -> Option<Segment> {
        let data = self.segment(self.range())?;
        let Some(metadata) = self.metadata_range() else { return Some(data) };
        let front = metadata.pages().to_bytes(self.region.page_size()).ok()?;
        Some(Segment {
            address: data.address.checked_sub(front.to_usize().ok()?)?,
            len_bytes: data.len_bytes + front.get(),
            pfn: metadata.start(),
        })
    }

    /// Returns the content of the folios of `range`, one after the other.
    #[inline]
    pub(crate) fn contents(&self, range: PfnRange) -> impl Iterator<Item = Content> {
        self.parts.memmap.contents(range)
    }

    /// Advances the content of the folios of `range`: see [`Memmap::advance_run`].
    pub(crate) fn advance_run(
        &self,
        range: PfnRange,
        from: &[Content],
        to: Content,
        each: impl FnMut(Pfn, Result<Content, AdvanceError>),
    ) {
        self.parts.memmap.advance_run(range, from, to, each);
    }

    /// Returns what a page is when it is good again.
    pub(crate) fn mended_as(&self) -> Content {
        match self.parts.memmap.started_as() {
            Content::Absent => Content::Absent,
            _ => Content::Unknown,
        }
    }

    /// Tells the owner that nobody holds the folio at `head` any more.
    pub(crate) fn freed(&self, head: Pfn) {
        if let Some(free) = &self.parts.ops.free {
            free(head);
        }
    }

    /// Tells the owner that a page went bad.
    pub(crate) fn tell(&self, poisoned: Poisoned) {
        if let Some(tell) = &self.parts.ops.poison {
            tell(poisoned);
        }
    }
}

impl<P: Payload> Holdable for Inner<P> {
    fn range(&self) -> PfnRange {
        self.parts.memmap.layout().range()
    }

    fn metadata_range(&self) -> Option<PfnRange> {
        let whole = self.parts.claim.range();
        let before = self.range().start().checked_since(whole.start())?;
        // No page, no range: without an altmap every page is described.
        PfnRange::try_new(whole.start(), before).ok()
    }

    fn order(&self) -> Order {
        self.parts.memmap.layout().order()
    }

    #[cfg(debug_assertions)]
    fn guards(&self) -> &GuardBook {
        &self.guards
    }

    fn zone(&self) -> Arc<Shared> {
        self.parts.claim.shared().clone()
    }

    fn segment(&self, range: PfnRange) -> Option<Segment> {
        let page = self.region.page_size();
        let before = range.start().checked_since(self.range().start())?.to_bytes(page).ok()?;
        Some(Segment {
            address: self.region.mapping().addr().get() + before.to_usize().ok()?,
            len_bytes: range.pages().to_bytes(page).ok()?.get(),
            pfn: range.start(),
        })
    }

    #[inline(always)]
    fn hold(&self, range: PfnRange, sort: HoldSort) -> Result<Span, SpanRefused> {
        if sort == HoldSort::Pin {
            self.collect_bus_errors();
        }
        let bad = |part| self.bad.first_in(part);
        self.parts.memmap.hold(range, sort, bad, |head| self.freed(head))
    }

    fn release(&self, span: Span, sort: HoldSort) {
        self.parts.memmap.release(span, sort, |head| self.freed(head));
    }

    fn split(
        &self,
        span: Span,
        sort: HoldSort,
        pages: PageCount,
    ) -> Result<(Span, Span), Option<SpanRefused>> {
        self.parts.memmap.split(span, sort, pages)
    }

    fn take_zero(&self, range: PfnRange) {
        self.advance_run(range, &[Content::Zero], Content::Present, |_, _| ());
    }

    fn produce(&self, range: PfnRange, refused: Content) -> Result<bool, HoldFailure> {
        match &self.parts.ops.populate {
            // What was missing and is not any more, another thread has produced.
            Some(populate) => {
                produce(self, &**populate, range).map(|any| any || is_missing(refused))
            }
            None => Ok(false),
        }
    }

    fn not_for_long(&self) -> Option<&'static str> {
        if self.parts.memmap.kind() == MemoryKind::Coherent {
            return Some("coherent memory");
        }
        let is_fsdax = self.parts.memmap.kind() == MemoryKind::FsDax
            || matches!(self.region.backing(), Backing::Fsdax { .. });
        is_fsdax.then_some("a file on a DAX mount")
    }

    fn bad_pages(&self, range: PfnRange) -> Vec<Pfn> {
        self.collect_bus_errors();
        self.bad.in_range(range)
    }

    fn word(&self, pfn: Pfn) -> Word {
        self.folio(pfn).map_or_else(Word::tail, Folio::word)
    }
}

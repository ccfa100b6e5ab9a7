//! The state that a pagemap and its guards share, and the memory of its descriptors.

use std::ops::{Deref, Range};
use std::sync::{Arc, OnceLock};

use uzone_os::sigbus::Watch;
use uzone_os::{AccessError, KernelPin, KernelPinError, Mapped};
use uzone_pages::{
    Content, Folio, HoldError, HoldKind, Memmap, MemoryKind, Order, Page, PageCount, Payload, Pfn,
    PfnRange, Span, Template, Word,
};

use crate::bind::altmap::{self, Front};
use crate::bind::blocks::Blocks;
use crate::bind::memmap_cache::{MemmapMemory, MemmapPages};
use crate::bind::registry::{Claim, Shared};
use crate::bind::report::BindReport;
use crate::error::PinError;
use crate::ops::{PagemapOps, Poisoned};
use crate::pin::guards::GuardBook;
use crate::pin::pin_target::{PinTarget, Segment, is_missing};
use crate::pin::token::Tokens;
use crate::poison::bad_pages::BadPages;
use crate::region::Region;
use crate::source::RegionSource;

/// The descriptors of a region, and the claim of its pages. Dropped, it ends the claim and gives the memory of the
/// descriptors back: to its zone if that should keep it.
///
/// Descriptors that lie in the region are cleared first, because the region that claims the same bytes
/// next may be written to. Then the claim ends, and only then does an address become free: the kernel hands free
/// addresses out at once, and another thread may bind the memory that it mapped there.
pub(crate) struct Descriptors<P: Payload> {
    /// Taken by the drop, which moves the memory on, and by [`Parts::into_region`].
    memmap: Option<Memmap<P, Mapped<Page<P>>, Blocks>>,
    claim: Claim,
    keeper: Option<Arc<Shared>>,
    pages: MemmapPages,
    /// The node that its memory was asked of.
    node: Option<u32>,
}

impl<P: Payload> Descriptors<P> {
    /// Takes a memmap and, if every page of its memory is present, the zone that keeps it.
    pub(crate) fn new(
        memmap: Memmap<P, Mapped<Page<P>>, Blocks>,
        claim: Claim,
        keeper: Option<Arc<Shared>>,
        pages: MemmapPages,
        node: Option<u32>,
    ) -> Self {
        Self { memmap: Some(memmap), claim, keeper, pages, node }
    }

    /// Returns the claim of the region.
    pub(crate) fn claim(&self) -> &Claim {
        &self.claim
    }
}

impl<P: Payload> Deref for Descriptors<P> {
    type Target = Memmap<P, Mapped<Page<P>>, Blocks>;

    fn deref(&self) -> &Self::Target {
        match &self.memmap {
            Some(memmap) => memmap,
            None => unreachable!("only calls that end the descriptors take the memmap out"),
        }
    }
}

impl<P: Payload> Drop for Descriptors<P> {
    fn drop(&mut self) {
        let Some(memmap) = self.memmap.take() else { return };
        let len = size_of_val(memmap.descriptors());
        let (descriptors, blocks) = memmap.into_parts();
        let mut memory = descriptors.into_exclusive();
        // Private memory is unmapped in a moment; memory that others may have outlives us.
        if self.pages == MemmapPages::Region && !memory.is_private() {
            altmap::clear(&mut memory, len, 0);
        }
        self.claim.end();
        match (blocks, &self.keeper) {
            (Blocks::Behind(blocks), _) => {
                // So that one call unmaps both; apart, each unmaps itself.
                drop(memory.join(blocks.into_exclusive()));
            }
            (_, Some(keeper)) => {
                let (pages, node) = (self.pages, self.node);
                let kept = MemmapMemory { memory, pages, is_kept: true, node, behind: None };
                keeper.memmap_cache.give(kept);
            }
            _ => {}
        }
    }
}

/// All of a pagemap but its region and its memmap.
pub(crate) struct Parts<P: Payload> {
    pub(crate) template: Template<P>,
    pub(crate) ops: PagemapOps,
    pub(crate) report: BindReport,
    /// The parts of the region before its descriptors, if those lie in it.
    pub(crate) front: Option<Front>,
}

impl<P: Payload> Parts<P> {
    /// Ends the description and returns the whole region.
    pub(crate) fn into_region(self, mut descriptors: Descriptors<P>, data: Region) -> Region {
        let Some(front) = self.front else { return data };
        match descriptors.memmap.take() {
            Some(memmap) => {
                let len = size_of_val(memmap.descriptors());
                let memory = memmap.into_descriptors().into_exclusive();
                front.join_cleared(memory, len, self.report.threads, data)
            }
            None => data,
        }
    }
}

/// The state that a pagemap and its guards share. Fields are dropped in this order, and `memmap` ends the
/// claim: the zone must not know the region's addresses any more when the region, or its front, is
/// unmapped.
pub(crate) struct PagemapShared<P: Payload> {
    /// Notes the bus errors of the region, if the program asked for that. First, so that nothing is noted of
    /// memory that is mapped there afterwards.
    pub(crate) watch: OnceLock<Watch>,
    pub(crate) memmap: Descriptors<P>,
    pub(crate) parts: Parts<P>,
    pub(crate) region: Region,
    pub(crate) guards: GuardBook,
    pub(crate) bad: BadPages,
}

impl<P: Payload> PagemapShared<P> {
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

    /// Returns the content of a page that is good again.
    pub(crate) fn unpoisoned_as(&self) -> Content {
        match self.memmap.started_as() {
            Content::Absent => Content::Absent,
            _ => Content::Unknown,
        }
    }

    /// Tells the owner that a page went bad.
    pub(crate) fn tell(&self, poisoned: Poisoned) {
        if let Some(tell) = &self.parts.ops.poison {
            tell(poisoned);
        }
    }
}

impl<P: Payload> PinTarget for PagemapShared<P> {
    fn range(&self) -> PfnRange {
        self.memmap.layout().range()
    }

    fn metadata_range(&self) -> Option<PfnRange> {
        let whole = self.memmap.claim().range();
        let before = self.range().start().checked_since(whole.start())?;
        // No page, no range: without an altmap every page is described.
        PfnRange::try_new(whole.start(), before).ok()
    }

    fn order(&self) -> Order {
        self.memmap.layout().order()
    }

    #[cfg(debug_assertions)]
    fn guards(&self) -> &GuardBook {
        &self.guards
    }

    fn tokens(&self) -> Arc<Tokens> {
        self.memmap.claim().shared().tokens.clone()
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
    fn hold(&self, range: PfnRange, sort: HoldKind) -> Result<Span, (Pfn, HoldError)> {
        if sort == HoldKind::Pin {
            self.collect_bus_errors();
        }
        self.memmap.hold(range, sort, |part| self.bad.first_in(part))
    }

    #[inline]
    fn release(&self, span: Span, sort: HoldKind) {
        self.memmap.release(span, sort);
    }

    fn split(
        &self,
        span: Span,
        sort: HoldKind,
        pages: PageCount,
    ) -> Result<(Span, Span), Option<(Pfn, HoldError)>> {
        self.memmap.split(span, sort, pages)
    }

    fn take_zero(&self, range: PfnRange) {
        self.memmap.advance_run(range, &[Content::Zero], Content::Present, |_, _| ());
    }

    fn produce(&self, range: PfnRange, refused: Content) -> Result<bool, PinError> {
        let ops = &self.parts.ops;
        let (Some(map_pages), Some(fault)) = (&ops.map_pages, &ops.fault) else { return Ok(false) };
        let missing = || {
            self.memmap
                .folios(range.start(), range.end())
                .filter(|(_, folio)| is_missing(folio.word().content()))
                .map(|(head, _)| head.max(range.start()))
        };
        if missing().next().is_none() {
            // Another thread has produced the missing pages.
            return Ok(is_missing(refused));
        }
        // Pages that are ready are mapped for the whole range, and the rest is produced page by page.
        map_pages(range);
        for pfn in missing() {
            fault(pfn).map_err(|cause| PinError::Fault { pfn, cause })?;
        }
        Ok(true)
    }

    fn not_for_long(&self) -> Option<&'static str> {
        if self.memmap.kind() == MemoryKind::Coherent {
            return Some("coherent memory");
        }
        let is_fsdax = self.memmap.kind() == MemoryKind::FsDax
            || matches!(self.region.backing(), RegionSource::Fsdax { .. });
        is_fsdax.then_some("a file on a DAX mount")
    }

    fn pin_in_kernel(&self, range: PfnRange) -> Result<KernelPin, KernelPinError> {
        let pins = &self.memmap.claim().shared().kernel_pins;
        pins.pin(self.region.memory(), self.bytes_of(range))
    }

    fn bad_pages(&self, range: PfnRange) -> Vec<Pfn> {
        self.collect_bus_errors();
        self.bad.in_range(range)
    }

    fn region(&self) -> &Region {
        &self.region
    }

    fn bytes_of(&self, range: PfnRange) -> Range<u64> {
        let shift = self.region.page_size().shift();
        let at = |pfn: Pfn| {
            pfn.checked_since(self.range().start()).map_or(0, |pages| pages.get() << shift)
        };
        at(range.start())..at(range.end())
    }

    fn write(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.region.memory().write_at(offset_bytes, bytes)
    }

    fn word(&self, pfn: Pfn) -> Word {
        self.memmap.folio(pfn).map_or_else(Word::tail, Folio::word)
    }
}

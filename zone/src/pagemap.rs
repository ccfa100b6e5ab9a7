//! A bound region: [`Pagemap`], and its pages as [`PageView`].
//!
//! A pagemap owns the region and its descriptors until unbind, which refuses while a guard on any of
//! its pages exists (see `hold.rs`), or waits for it until a deadline.

use std::fmt;
use std::ops::Deref;
use std::panic::Location;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use uzone_os::bus::Watch;
use uzone_os::{
    Counted, Entered, Exclusive, Mapped, Mapping, Owned, References, ResidentError, Sort,
};
use uzone_pages::{
    AddrError, AdvanceError, ByteLen, Class, Content, Folio, Guards, HoldSort, Memmap, MemoryKind,
    Order, Page, PageCount, PageRef, Payload, Pfn, PfnRange, Span, SpanRefused, Template, Word,
};

use crate::altmap::{self, Front};
use crate::blocks::Blocks;
use crate::guards::{GuardBook, Holder};
use crate::hold::{Hold, HoldFailure, Holdable, PinOptions, Pinned, Place, Referenced, Segment};
use crate::keep::{MemmapMemory, MemmapPages, Source};
use crate::options::{Owner, PagemapOps};
use crate::poison::{BadPages, Poisoned};
use crate::produce::{is_missing, produce};
use crate::region::{Backing, Region};
use crate::report::BindReport;
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
    fn into_region(self, data: Region) -> Region {
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
    region: Region,
    parts: Parts<P>,
    guards: GuardBook,
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
    fn whole_segment(&self) -> Option<Segment> {
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
    fn freed(&self, head: Pfn) {
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

/// A region that is still in use, given back bound as it was.
#[derive(thiserror::Error)]
#[error(
    "the region at {range} is in use: {pins} pins and {references} references are not given back{who}",
    who = first_holder(holders)
)]
pub struct Busy<P: Payload> {
    /// The pagemap, in use as before.
    // Boxed: a failure travels through many returns.
    pub pagemap: Box<Pagemap<P>>,
    /// The frame numbers of the region.
    pub range: PfnRange,
    /// How many guards of pins there are.
    pub pins: u32,
    /// How many guards of references there are.
    pub references: u32,
    /// Who has them, in debug builds, in ascending order of their pages; empty in others.
    pub holders: Vec<Holder>,
}

// Derived, it would ask for a payload that is `Debug`.
impl<P: Payload> fmt::Debug for Busy<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Busy")
            .field("range", &self.range)
            .field("pins", &self.pins)
            .field("references", &self.references)
            .field("holders", &self.holders)
            .finish_non_exhaustive()
    }
}

fn first_holder(holders: &[Holder]) -> String {
    holders.first().map(|holder| format!(", the first {holder}")).unwrap_or_default()
}

/// A region every page of which is described.
///
/// Dropping it unbinds and unmaps the region, when the last guard on its pages has gone: if there are
/// any, that is logged as an error (`tracing`), with their number and in debug builds who has the
/// first. [`Pagemap::unbind`] gives the region back.
pub struct Pagemap<P: Payload = ()> {
    // Dropped first.
    door: Door,
    pub(crate) inner: Owned<Inner<P>>,
}

/// Where guards enter a pagemap, whatever its payload. Whoever drops a pagemap drops this first, which
/// says so if there are guards: the memory that was to go stays until the last of them does.
struct Door(Arc<Place>);

impl Drop for Door {
    fn drop(&mut self) {
        // Of a pagemap that was unbound there are none, and nobody enters it.
        if self.0.guards().is_empty() {
            return;
        }
        let Ok(pagemap) = Counted::enter::<References>(&self.0) else { return };
        // But for this one.
        let Guards { pins, references } = self.0.guards();
        let references = references.saturating_sub(1);
        if pins == 0 && references == 0 {
            return;
        }
        #[cfg(debug_assertions)]
        let holders = pagemap.guards().holders();
        #[cfg(not(debug_assertions))]
        let holders: [Holder; 0] = [];
        tracing::error!(
            pins,
            references,
            first_pfn = pagemap.range().start().get(),
            pages = pagemap.range().pages().get(),
            // Left out where nobody knows.
            who = holders.first().map(tracing::field::display),
            "a pagemap was dropped while its pages are held: its memory stays mapped until the last \
             guard is dropped; drop the guards first, or use Pagemap::unbind_by"
        );
    }
}

impl<P: Payload> Pagemap<P> {
    pub(crate) fn new(region: Region, parts: Parts<P>, keeps_poison: bool) -> Self {
        let (guards, bad) = (GuardBook::default(), BadPages::default());
        let inner = Owned::new(Inner { watch: OnceLock::new(), region, parts, guards, bad });
        let range = inner.range();
        if keeps_poison {
            for pages in inner.region.bad_pages() {
                // A page of a region that has become shorter is not there any more.
                let _ = range.start().checked_add(*pages).map(|pfn| inner.poison(pfn));
            }
        }
        inner.region.touch();
        // From here on others find its pages.
        let place: Arc<Place> = inner.place().clone();
        if let Some(segment) = inner.whole_segment() {
            inner.parts.claim.publish(segment, inner.region.page_size(), place.clone());
        }
        Self { door: Door(place), inner }
    }

    #[inline(always)]
    fn enter<S: Sort>(&self) -> Result<Entered<dyn Holdable, S>, HoldFailure> {
        Counted::enter(&self.door.0).map_err(HoldFailure::NotAdmitted)
    }

    /// Returns the memory that is described: with an altmap, what is behind the descriptors.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.inner.region
    }

    /// Returns what the bind did and what it cost.
    #[must_use]
    pub fn report(&self) -> &BindReport {
        &self.inner.parts.report
    }

    /// Returns the kind of the memory.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.inner.parts.memmap.kind()
    }

    /// Returns whose the memory is.
    #[must_use]
    pub fn owner(&self) -> Option<Owner> {
        self.inner.parts.owner
    }

    /// Returns the frame numbers of the region: with an altmap, of what is behind the descriptors.
    #[must_use]
    pub fn range(&self) -> PfnRange {
        self.inner.range()
    }

    /// Returns the frame numbers before those, of the pages that the owner keeps, that hold
    /// descriptors and that were skipped; `None` if the descriptors lie elsewhere. They are the
    /// region's, and nobody can hold them.
    #[must_use]
    pub fn metadata_range(&self) -> Option<PfnRange> {
        self.inner.metadata_range()
    }

    /// Returns the pages that an altmap keeps for the region's owner; `None` if there are none.
    #[must_use]
    pub fn reserve(&self) -> Option<&Mapping> {
        self.inner.parts.front.as_ref()?.reserve()
    }

    /// Returns the page `pfn`, or `None` if it does not belong to the region.
    #[must_use]
    pub fn page(&self, pfn: Pfn) -> Option<PageView<'_, P>> {
        self.inner.page(pfn)
    }

    /// Returns what is known about the bytes of page `pfn`, or `None` if it does not belong to the
    /// region. Costs one load.
    #[must_use]
    #[inline]
    pub fn content(&self, pfn: Pfn) -> Option<Content> {
        Some(self.inner.folio(pfn)?.content())
    }

    /// Returns what is known about the bytes of the folios that have pages in `range`, each once, in
    /// ascending order; pages that do not belong to the region have none. Costs a load each.
    #[inline]
    pub fn contents(&self, range: PfnRange) -> impl Iterator<Item = Content> {
        self.inner.contents(range)
    }

    /// Puts the content of every folio with a page in `range` to state `to`, from whichever of the
    /// states `from` it is in, and tells `each` its head and how that went, in ascending order. Pages
    /// that do not belong to the region are left out. One atomic step a folio, and of base pages one
    /// more for about eight: see [`PageView::advance`].
    ///
    /// # Panics
    /// If a step from one of `from` to `to` is none, or would poison: that is for one page. If `each`
    /// does, the pages that it was told of have been advanced, and no others.
    pub fn advance_range(
        &self,
        range: PfnRange,
        from: &[Content],
        to: Content,
        each: impl FnMut(Pfn, Result<Content, AdvanceError>),
    ) {
        self.inner.advance_run(range, from, to, each);
    }

    /// Returns the pages of the region, in ascending order.
    pub fn pages(&self) -> impl Iterator<Item = PageView<'_, P>> {
        self.range().iter().filter_map(|pfn| self.page(pfn))
    }

    /// Returns the page that the byte `offset_bytes` of [`Pagemap::region`] belongs to.
    #[must_use]
    pub fn page_at(&self, offset_bytes: u64) -> Option<PageView<'_, P>> {
        let pages = PageCount::new(offset_bytes >> self.region().page_size().shift());
        self.page(self.range().start().checked_add(pages).ok()?)
    }

    /// Returns the pages that `len` bytes from byte `offset_bytes` of [`Pagemap::region`] on have a part
    /// of.
    ///
    /// # Errors
    /// [`AddrError`] if there is no byte, or no such number; pages past the region are found out by
    /// whoever is asked to hold them.
    pub fn range_at(&self, offset_bytes: u64, len: ByteLen) -> Result<PfnRange, AddrError> {
        let shift = self.region().page_size().shift();
        let first = self.range().start().checked_add(PageCount::new(offset_bytes >> shift))?;
        let end = ByteLen::new(offset_bytes).checked_add(len)?;
        if len.is_zero() {
            return Err(AddrError::Empty { start: first.get() });
        }
        let last = (end.get() - 1) >> shift;
        PfnRange::try_new(first, PageCount::new(last - (offset_bytes >> shift) + 1))
    }

    /// Returns the bytes of [`Pagemap::region`] that the pages of `range` are, or `None` if not all of
    /// them belong to it. The way back from [`Pagemap::range_at`], for
    /// [`Region::read_at`](crate::Region::read_at) and the like.
    #[must_use]
    pub fn bytes_of(&self, range: PfnRange) -> Option<std::ops::Range<u64>> {
        self.range().contains_range(range).then(|| self.inner.bytes_of(range))
    }

    /// Takes the first reference of a free folio, as the memory's owner does who hands it out.
    /// Generic memory always has a reference, so there is no first one to take.
    ///
    /// This says nothing about the bytes: whoever hands memory to another tenant clears it first.
    ///
    /// # Errors
    /// [`HoldFailure`] if the page is not the region's, or has references.
    #[track_caller]
    pub fn hand_out(&self, pfn: Pfn) -> Result<Referenced, HoldFailure> {
        let region = self.range();
        let (Ok(range), Some(folio)) = (PfnRange::try_single(pfn), self.inner.folio(pfn)) else {
            let asked = PfnRange::try_single(pfn).unwrap_or(region);
            return Err(altmap::not_here(&*self.inner, asked));
        };
        let entered = self.enter::<References>()?;
        if !folio.take_first() {
            let word = folio.word();
            if word.content() == Content::Poisoned {
                return Err(HoldFailure::Poisoned { pfn, good: Vec::new() });
            }
            return Err(HoldFailure::NotFree { pfn, references: word.references() });
        }
        Ok(Referenced(Hold::admitted(entered, Span::of_folios(range), Location::caller())))
    }

    /// Takes references to the folios of `range`: one atomic step a folio, and of base pages one for
    /// each 512 that the range covers together.
    ///
    /// # Errors
    /// [`HoldFailure`] if a page is not the region's, or a folio is free or has the most references
    /// that it may have; then none is taken.
    #[inline(always)]
    #[track_caller]
    pub fn get(&self, range: PfnRange) -> Result<Referenced, HoldFailure> {
        match Hold::take(self.enter()?, range, Location::caller()) {
            Ok(hold) => Ok(Referenced(hold)),
            Err(failure) => Err(*failure),
        }
    }

    /// Pins the folios of `range`: one atomic step a folio, and of base pages one for each 512 that
    /// the range covers together. Pages that are not there are produced first, if the region can
    /// ([`PagemapOps::populate`]); the call may block for them. Entering the pagemap and leaving it are an
    /// atomic step each; nothing is allocated.
    ///
    /// # Errors
    /// [`HoldFailure`] if a page is not the region's, is bad, is being cleared, or cannot be
    /// produced, or a folio is free or has the most pins that it may have; then none is pinned.
    #[inline(always)]
    #[track_caller]
    pub fn pin(&self, range: PfnRange) -> Result<Pinned, HoldFailure> {
        self.pin_with(range, PinOptions::default())
    }

    /// As [`Pagemap::pin`], of what is there: a page that would have to be produced first is
    /// refused, and nothing blocks.
    ///
    /// # Errors
    /// As [`Pagemap::pin`].
    #[track_caller]
    pub fn try_pin(&self, range: PfnRange) -> Result<Pinned, HoldFailure> {
        self.pin_with(range, PinOptions::default().without_faults())
    }

    /// As [`Pagemap::pin`], the way that `options` say.
    ///
    /// # Errors
    /// As [`Pagemap::pin`], and for memory that cannot be pinned for long if that is asked for.
    #[inline(always)]
    #[track_caller]
    pub fn pin_with(&self, range: PfnRange, options: PinOptions) -> Result<Pinned, HoldFailure> {
        match Hold::pin(self.enter()?, range, options, Location::caller()) {
            Ok(hold) => Ok(Pinned(hold)),
            Err(failure) => Err(*failure),
        }
    }

    /// Returns whether the page `pfn` may be pinned by somebody. It is never `false` for a page that
    /// was pinned before the call and still is; it may be `true` for one that is not, because a pin
    /// on any page of a folio counts for all of them.
    #[must_use]
    pub fn maybe_pinned(&self, pfn: Pfn) -> bool {
        self.page(pfn).is_some_and(|page| page.word().pins() > 0)
    }

    /// Tells the owner of private memory that the CPU touched `pfn`. Returns whether there was
    /// anything to tell: the page is the region's, and the memory private.
    #[must_use = "a page that nobody migrates stays out of reach"]
    pub fn migrate_to_ram(&self, pfn: Pfn) -> bool {
        match &self.inner.parts.ops.migrate_to_ram {
            Some(migrate) if self.kind() == MemoryKind::Private && self.range().contains(pfn) => {
                migrate(pfn);
                true
            }
            _ => false,
        }
    }

    /// Returns how much memory the descriptors have from the kernel now, by the kernel's own
    /// accounting. It costs a walk over that memory's page tables.
    ///
    /// # Errors
    /// [`ResidentError`] if the kernel does not say.
    pub fn metadata_resident(&self) -> Result<ByteLen, ResidentError> {
        self.inner.parts.memmap.memory().resident_in(0..self.report().metadata.get())
    }

    /// Ends the description and gives the region back, if nobody holds a page of it. The
    /// descriptors' memory is kept for the next bind of the zone if they were written eagerly. With an
    /// altmap the region is whole again and the descriptors in it are cleared: private memory of base
    /// pages is given back to the kernel, other memory is overwritten.
    ///
    /// # Errors
    /// [`Busy`] gives the pagemap back, in use as before, with the number of holders.
    pub fn unbind(self) -> Result<Region, Busy<P>> {
        self.unbind_within(Duration::ZERO)
    }

    /// Ends the description and gives the region back, waiting at most until `deadline` for those
    /// who hold pages of it. Meanwhile nobody can take more.
    ///
    /// # Errors
    /// [`Busy`] at the deadline: the pagemap, in use as before, and holds can be taken again.
    pub fn unbind_by(self, deadline: Instant) -> Result<Region, Busy<P>> {
        self.unbind_within(deadline.saturating_duration_since(Instant::now()))
    }

    fn unbind_within(self, patience: Duration) -> Result<Region, Busy<P>> {
        let Self { door, inner } = self;
        match inner.try_into_inner(patience) {
            Ok(inner) => {
                inner.collect_bus_errors();
                let Inner { mut region, parts, bad, .. } = inner;
                let range = parts.memmap.layout().range();
                region.remember_bad(&bad.in_range(range), range);
                Ok(parts.into_region(region))
            }
            Err((inner, guards)) => Err(Busy {
                range: inner.range(),
                pins: guards.pins,
                references: guards.references,
                holders: inner.guards.holders(),
                pagemap: Box::new(Self { door, inner }),
            }),
        }
    }
}

impl<P: Payload> fmt::Debug for Pagemap<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pagemap")
            .field("region", self.region())
            .field("report", self.report())
            .finish_non_exhaustive()
    }
}

/// One page of a bound region, to look at.
pub struct PageView<'a, P: Payload = ()> {
    page: PageRef<'a, P>,
    template: &'a Template<P>,
}

impl<P: Payload> Clone for PageView<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Payload> Copy for PageView<'_, P> {}

impl<'a, P: Payload> PageView<'a, P> {
    /// Returns the page's frame number.
    #[must_use]
    pub fn pfn(self) -> Pfn {
        self.page.pfn()
    }

    /// Returns what the page is to its folio.
    #[must_use]
    pub fn class(self) -> Class {
        self.page.class()
    }

    /// Returns whether the page is a tail.
    #[must_use]
    pub fn is_tail(self) -> bool {
        self.page.is_tail()
    }

    /// Returns the first page of the folio; the page itself if it is that.
    #[must_use]
    pub fn head(self) -> Pfn {
        self.page.head()
    }

    /// Returns how many pages the head is away.
    #[must_use]
    pub fn distance(self) -> PageCount {
        self.page.distance()
    }

    /// Returns the order of the folio.
    #[must_use]
    pub fn order(self) -> Order {
        self.page.order()
    }

    /// Returns the word of the folio as it is now: its holds and its content.
    #[must_use]
    pub fn word(self) -> Word {
        self.page.folio().word()
    }

    /// Puts the content of the folio from state `from` to state `to`. Of several who try, one
    /// succeeds. It says what the caller knows about the bytes, and does nothing to them.
    ///
    /// # Errors
    /// [`AdvanceError`] if the folio is in another state, is pinned and the step would take its bytes
    /// away, or there is no such step; then nothing has changed.
    pub fn advance(self, from: Content, to: Content) -> Result<(), AdvanceError> {
        self.page.folio().advance(from, to)
    }

    /// Returns what the caller added to the page, or `None` for a derived tail, which has no
    /// descriptor.
    #[must_use]
    pub fn payload(self) -> Option<&'a P> {
        self.page.payload()
    }

    /// Returns the payload that the page started with, or that its descriptor would have started
    /// with if it had one: for a derived tail, all that is known about it.
    #[must_use]
    pub fn fresh_payload(self) -> Option<P> {
        self.template.fresh(self.pfn())
    }
}

impl<P: Payload> fmt::Debug for PageView<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.page.fmt(f)
    }
}

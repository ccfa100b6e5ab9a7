//! A bound region: [`Pagemap`], and [`PagemapView`] to look at it and to pin its pages.
//!
//! A pagemap owns the region and its descriptors until unbind, which refuses while a guard on any of
//! its pages exists (see `pin.rs`), or waits for it until a deadline.

pub(crate) mod shared;

use std::fmt;
use std::ops::Deref;
use std::panic::Location;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use uzone_os::{Guards, LiveArc, LiveGuard, LiveOwner, Mapping, MappingError, REFERENCES};
use uzone_pages::{
    AddrError, AdvanceError, ByteLen, Content, MemoryKind, PageCount, PageView, Payload, Pfn,
    PfnRange, Span,
};

use crate::bind::report::BindReport;
use crate::error::{PinError, WriteError};
use crate::pagemap::shared::{Descriptors, PagemapShared, Parts};
use crate::pin::guards::{GuardBook, Holder};
use crate::pin::pin_target::{PinTarget, Place};
use crate::pin::{Guard, PinOptions, Pinned, Referenced};
use crate::poison::bad_pages::BadPages;
use crate::populate::{PopulateOptions, PopulateReport};
use crate::region::{Region, RegionView};

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
    /// Their holders, in debug builds, in ascending order of their pages; empty in others.
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
/// any, that is logged as an error (`tracing`), with their number and in debug builds the holder of
/// the first. [`Pagemap::unbind`] gives the region back.
///
/// The methods that look at pages, pin them and mark them as bad or good are those of [`PagemapView`], to which
/// this dereferences.
pub struct Pagemap<P: Payload = ()>(PagemapView<P>);

impl<P: Payload> Deref for Pagemap<P> {
    type Target = PagemapView<P>;

    fn deref(&self) -> &PagemapView<P> {
        &self.0
    }
}

/// A pagemap as it is lent: it reads, pins and marks pages as bad or good, and has no method that writes
/// bytes, gives pages back to the kernel or changes their content state. Those are the methods of
/// [`Pagemap`], and of the guards on its pages.
///
/// A [`Pool`](crate::Pool) lends one, so that a program cannot write to a free folio. The region of a
/// pagemap is lent likewise ([`RegionView`]):
///
/// ```compile_fail
/// # use uzone_pages::{ByteLen, MemoryKind};
/// # use uzone_zone::{BindOptions, Region, Zone};
/// # let region = Region::anonymous(ByteLen::mib(2)).unwrap();
/// let pagemap = Zone::new().bind(region, BindOptions::new(MemoryKind::Generic)).unwrap();
/// let _pinned = pagemap.pin(pagemap.range()).unwrap();
/// pagemap.region().punch(0..2 << 20).unwrap(); // a view has no such method
/// ```
///
/// A view has no file descriptor either: a program that shares a memory file with another process takes
/// the descriptor from [`Region::mapping`](crate::Region::mapping) before the bind.
pub struct PagemapView<P: Payload = ()> {
    // Dropped first.
    door: Door,
    pub(crate) inner: LiveOwner<PagemapShared<P>>,
}

/// Where guards enter a pagemap, whatever its payload. Dropping a pagemap drops this first, which
/// logs an error if there are guards: the memory that was to go stays until the last of them does.
struct Door(Arc<Place>);

impl Drop for Door {
    fn drop(&mut self) {
        // A pagemap that was unbound has none, and no thread enters it.
        if self.0.guards().is_empty() {
            return;
        }
        let Ok(pagemap) = LiveArc::enter::<REFERENCES>(&self.0) else { return };
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
            // Left out where it is unknown.
            who = holders.first().map(tracing::field::display),
            "a pagemap was dropped while its pages are held: its memory stays mapped until the last \
             guard is dropped; drop the guards first, or use Pagemap::unbind_by"
        );
    }
}

impl<P: Payload> PagemapView<P> {
    #[inline(always)]
    fn enter<const IS_PIN: bool>(&self) -> Result<LiveGuard<dyn PinTarget, IS_PIN>, PinError> {
        LiveArc::enter(&self.door.0).map_err(PinError::NotAdmitted)
    }

    /// Returns the memory that is described, to look at and to read: with an altmap, the pages behind the
    /// descriptors. Its bytes change by calls of the pagemap and of guards, which respect pins and
    /// content: [`Pinned::write_at`], [`Pagemap::pin_and_write`], [`Pagemap::fill_at`],
    /// [`Pagemap::zero`] and [`Pagemap::punch`].
    #[must_use]
    pub fn region(&self) -> &RegionView {
        &self.inner.region
    }

    /// Returns the outcome and the cost of the bind.
    #[must_use]
    pub fn report(&self) -> &BindReport {
        &self.inner.parts.report
    }

    /// Returns the kind of the memory.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.inner.memmap.kind()
    }

    /// Returns the frame numbers of the region: with an altmap, of the pages behind the descriptors.
    #[must_use]
    pub fn range(&self) -> PfnRange {
        self.inner.range()
    }

    /// Returns the frame numbers before those, of the pages that the owner keeps, that hold
    /// descriptors and that were skipped; `None` if the descriptors lie elsewhere. They are the
    /// region's, and they cannot be held.
    #[must_use]
    pub fn metadata_range(&self) -> Option<PfnRange> {
        self.inner.metadata_range()
    }

    /// Returns the page `pfn`, or `None` if it does not belong to the region.
    #[must_use]
    pub fn page(&self, pfn: Pfn) -> Option<PageView<'_, P>> {
        self.inner.memmap.page(pfn)
    }

    /// Returns the payload that the page `pfn` started with, or that its descriptor would have started with
    /// if it had one: for a derived tail, all that is known about it. `None` if the page does not belong to
    /// the region.
    #[must_use]
    pub fn fresh_payload(&self, pfn: Pfn) -> Option<P> {
        self.inner.parts.template.fresh(pfn)
    }

    /// Returns the content of page `pfn`, or `None` if it does not belong to the
    /// region. Costs one load.
    #[must_use]
    #[inline]
    pub fn content(&self, pfn: Pfn) -> Option<Content> {
        Some(self.inner.memmap.folio(pfn)?.content())
    }

    /// Returns the content of the folios that have pages in `range`, each once, in
    /// ascending order; pages that do not belong to the region have none. Costs a load each.
    #[inline]
    pub fn contents(&self, range: PfnRange) -> impl Iterator<Item = Content> {
        self.inner.memmap.contents(range)
    }

    /// Returns the pages of the region, in ascending order.
    pub fn pages(&self) -> impl Iterator<Item = PageView<'_, P>> {
        self.range().iter().filter_map(|pfn| self.page(pfn))
    }

    /// Returns the page that the byte `offset_bytes` of [`Pagemap::region`](crate::PagemapView::region) belongs to.
    #[must_use]
    pub fn page_at(&self, offset_bytes: u64) -> Option<PageView<'_, P>> {
        let pages = PageCount::new(offset_bytes >> self.region().page_size().shift());
        self.page(self.range().start().checked_add(pages).ok()?)
    }

    /// Returns the pages that `len` bytes from byte `offset_bytes` of [`Pagemap::region`](crate::PagemapView::region) on have a part
    /// of.
    ///
    /// # Errors
    /// [`AddrError`] if there is no byte, or no such number; pages past the region are found out by
    /// the caller that holds them.
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

    /// Returns the bytes of [`Pagemap::region`](crate::PagemapView::region) that the pages of `range` are, or `None` if not all of
    /// them belong to it. The way back from [`Pagemap::range_at`](crate::PagemapView::range_at), for
    /// [`RegionView::read_at`] and the like.
    #[must_use]
    pub fn bytes_of(&self, range: PfnRange) -> Option<std::ops::Range<u64>> {
        self.range().contains_range(range).then(|| self.inner.bytes_of(range))
    }

    /// Takes references to the folios of `range`: one atomic step a folio, and of base pages one for
    /// each 512 that the range covers together.
    ///
    /// # Errors
    /// [`PinError`] if a page is not the region's, or a folio is free or has the most references
    /// that it may have; then none is taken.
    #[inline(always)]
    #[track_caller]
    pub fn get(&self, range: PfnRange) -> Result<Referenced, PinError> {
        Guard::take(self.enter()?, range, Location::caller()).map_err(|failure| *failure)
    }

    /// Pins the folios of `range`: one atomic step a folio, and of base pages one for each 512 that
    /// the range covers together. Pages that are not there are produced first, if the region can
    /// ([`PagemapOps::populate`](crate::PagemapOps::populate)); the call may block for them. A pin holds
    /// off uzone's own unbind and changes; the kernel may still migrate or swap the page.
    ///
    /// Entering the pagemap and leaving it are an atomic step each; nothing is allocated.
    ///
    /// # Errors
    /// [`PinError`] if a page is not the region's, is bad, is being cleared, or cannot be
    /// produced, or a folio is free or has the most pins that it may have; then none is pinned.
    #[inline(always)]
    #[track_caller]
    pub fn pin(&self, range: PfnRange) -> Result<Pinned, PinError> {
        self.pin_with(range, PinOptions::default())
    }

    /// As [`Pagemap::pin`](crate::PagemapView::pin), of present pages: a page that would have to be produced first is
    /// refused, and nothing blocks.
    ///
    /// # Errors
    /// As [`Pagemap::pin`](crate::PagemapView::pin).
    #[track_caller]
    pub fn try_pin(&self, range: PfnRange) -> Result<Pinned, PinError> {
        self.pin_with(range, PinOptions::default().without_faults())
    }

    /// As [`Pagemap::pin`](crate::PagemapView::pin), the way that `options` say.
    ///
    /// # Errors
    /// As [`Pagemap::pin`](crate::PagemapView::pin), and for memory that cannot be pinned for long if that is asked for.
    #[inline(always)]
    #[track_caller]
    pub fn pin_with(&self, range: PfnRange, options: PinOptions) -> Result<Pinned, PinError> {
        Pinned::pin(self.enter()?, range, options, Location::caller()).map_err(|failure| *failure)
    }

    /// Returns whether the page `pfn` may be pinned. It is never `false` for a page that
    /// was pinned before the call and still is; it may be `true` for one that is not, because a pin
    /// on any page of a folio counts for all of them.
    #[must_use]
    pub fn maybe_pinned(&self, pfn: Pfn) -> bool {
        self.page(pfn).is_some_and(|page| page.word().pins() > 0)
    }
}

impl<P: Payload> Pagemap<P> {
    pub(crate) fn new(
        region: Region,
        (memmap, parts): (Descriptors<P>, Parts<P>),
        keeps_poison: bool,
    ) -> Self {
        let (guards, bad) = (GuardBook::default(), BadPages::default());
        let watch = OnceLock::new();
        let inner = LiveOwner::new(PagemapShared { watch, memmap, parts, region, guards, bad });
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
            inner.memmap.claim().publish(segment, inner.region.page_size(), place.clone());
        }
        Self(PagemapView { door: Door(place), inner })
    }

    /// Makes the memory of the pages of `range` present: see [`Region::populate`]. No byte changes, and
    /// neither does their content.
    ///
    /// # Errors
    /// [`WriteError`] as [`Region::populate`], and if not all pages belong to the region.
    pub fn populate(
        &self,
        range: PfnRange,
        options: &PopulateOptions,
    ) -> Result<PopulateReport, WriteError> {
        let bytes = self.bytes_of(range).ok_or_else(|| {
            let region = self.range();
            PinError::NotHere { asked: range, region }
        })?;
        self.inner.region.populate(bytes, options)
    }

    /// Puts the content of the folio of page `pfn` from state `from` to state `to`. Of several threads
    /// that try, one succeeds. It records the caller's knowledge of the bytes, and does not change them.
    ///
    /// # Errors
    /// [`AdvanceError`] if the page is not the region's, its folio is in another state, is pinned and
    /// the step would take its bytes away, or there is no such step; then nothing has changed.
    pub fn advance(&self, pfn: Pfn, from: Content, to: Content) -> Result<(), AdvanceError> {
        self.inner.memmap.folio(pfn).ok_or(AdvanceError::NotHere { pfn })?.advance(from, to)
    }

    /// Returns the pages that an altmap keeps for the region's owner; `None` if there are none.
    #[must_use]
    pub fn reserve(&self) -> Option<&Mapping> {
        self.inner.parts.front.as_ref()?.reserve()
    }

    /// Puts the content of every folio with a page in `range` to state `to`, from whichever of the
    /// states `from` it is in, and calls `each` with its head and how that went, in ascending order. Pages
    /// that do not belong to the region are left out. One atomic step a folio, and of base pages one
    /// more for about eight: see [`Pagemap::advance`].
    ///
    /// # Panics
    /// If a step from one of `from` to `to` is none, or would poison: that is for one page. If `each`
    /// does, the pages that it was called for have been advanced, and no others.
    pub fn advance_range(
        &self,
        range: PfnRange,
        from: &[Content],
        to: Content,
        each: impl FnMut(Pfn, Result<Content, AdvanceError>),
    ) {
        self.inner.memmap.advance_run(range, from, to, each);
    }

    /// Takes the first reference of a free folio, as its owner does to hand it out.
    /// Generic memory always has a reference, so there is no first one to take.
    ///
    /// This does not concern the bytes: clear memory before it goes to another tenant.
    ///
    /// # Errors
    /// [`PinError`] if the page is not the region's, or has references.
    #[track_caller]
    pub fn hand_out(&self, pfn: Pfn) -> Result<Referenced, PinError> {
        let region = self.range();
        let (Ok(range), Some(folio)) = (PfnRange::try_single(pfn), self.inner.memmap.folio(pfn))
        else {
            let asked = PfnRange::try_single(pfn).unwrap_or(region);
            return Err(crate::pin::pin_target::not_here(&*self.inner, asked));
        };
        let entered = self.enter::<REFERENCES>()?;
        if !folio.take_first() {
            let word = folio.word();
            if word.content() == Content::Poisoned {
                return Err(PinError::Poisoned { pfn, good: Vec::new() });
            }
            return Err(PinError::NotFree { pfn, references: word.references() });
        }
        Ok(Guard::admitted(entered, Span::of_folios(range), Location::caller()))
    }

    /// Returns how much memory the descriptors have from the kernel now, by the kernel's own
    /// accounting. It costs a walk over that memory's page tables.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn metadata_resident(&self) -> Result<ByteLen, MappingError> {
        self.inner.memmap.memory().resident_in(0..self.report().bytes.get())
    }

    /// Ends the description and gives the region back, if no page of it is held. The
    /// descriptors' memory is kept for the next bind of the zone if they were written eagerly. With an
    /// altmap the region is whole again and the descriptors in it are cleared: descriptors that were written eagerly are
    /// overwritten by as many threads, and stays present for the next bind; private memory of base pages whose
    /// descriptors were initialised on touch is given back to the kernel.
    ///
    /// # Errors
    /// [`Busy`] gives the pagemap back, in use as before, with the number of holders.
    pub fn unbind(self) -> Result<Region, Busy<P>> {
        self.unbind_within(Duration::ZERO)
    }

    /// Ends the description and gives the region back, waiting at most until `deadline` for those
    /// who hold pages of it. Meanwhile no new guard is given.
    ///
    /// # Errors
    /// [`Busy`] at the deadline: the pagemap, in use as before, and holds can be taken again.
    pub fn unbind_by(self, deadline: Instant) -> Result<Region, Busy<P>> {
        self.unbind_within(deadline.saturating_duration_since(Instant::now()))
    }

    fn unbind_within(self, patience: Duration) -> Result<Region, Busy<P>> {
        let PagemapView { door, inner } = self.0;
        match inner.try_into_inner(patience) {
            Ok(inner) => {
                inner.collect_bus_errors();
                // Bindings are dropped from the last to the first: the claim ends before anything is unmapped.
                let PagemapShared { mut region, parts, memmap, bad, .. } = inner;
                let range = memmap.layout().range();
                tracing::debug!(%range, "unbind");
                region.remember_bad(&bad.in_range(range), range);
                Ok(parts.into_region(memmap, region))
            }
            Err((inner, guards)) => Err(Busy {
                range: inner.range(),
                pins: guards.pins,
                references: guards.references,
                holders: inner.guards.holders(),
                pagemap: Box::new(Self(PagemapView { door, inner })),
            }),
        }
    }
}

impl<P: Payload> fmt::Debug for Pagemap<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<P: Payload> fmt::Debug for PagemapView<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pagemap")
            .field("region", &self.region())
            .field("report", self.report())
            .finish_non_exhaustive()
    }
}

impl<const IS_PIN: bool> Guard<IS_PIN> {
    /// Returns a page of the region, held or not, to look at. `P` is the payload of the region's descriptors;
    /// there is no page for another.
    #[must_use]
    pub fn page<P: Payload>(&self, pfn: Pfn) -> Option<PageView<'_, P>> {
        self.target().downcast_ref::<PagemapShared<P>>()?.memmap.page(pfn)
    }
}

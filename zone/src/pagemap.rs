//! A bound region: [`Pagemap`], and its pages as [`PageView`].
//!
//! A pagemap owns the region and its descriptors until unbind. A [`Reference`] borrows the
//! pagemap, so unbinding while one is held does not compile. (`mem::forget` of a reference ends the
//! borrow: whoever forgets one has given the protection up.)

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use uzone_os::{Mapped, ResidentError};
use uzone_pages::{
    ByteLen, Class, Memmap, MemoryKind, Order, Page, PageCount, PageRef, Payload, Pfn, Template,
    Word,
};

use crate::keep::{MemmapMemory, MemmapPages, Source};
use crate::options::{Owner, PagemapOps};
use crate::reference::{Reference, ReferenceError};
use crate::region::Region;
use crate::report::BindReport;
use crate::zone::{Claim, Shared};

/// A memmap whose memory goes back to its zone when it is dropped, if that should keep it.
pub(crate) struct Leased<P: Payload> {
    memmap: Option<Memmap<P, Mapped<Page<P>>>>,
    keeper: Option<Arc<Shared>>,
    pages: MemmapPages,
}

impl<P: Payload> Leased<P> {
    /// Takes a memmap and, if every page of its memory is present, the zone that keeps it.
    pub(crate) fn new(
        memmap: Memmap<P, Mapped<Page<P>>>,
        keeper: Option<Arc<Shared>>,
        pages: MemmapPages,
    ) -> Self {
        Self { memmap: Some(memmap), keeper, pages }
    }
}

impl<P: Payload> Deref for Leased<P> {
    type Target = Memmap<P, Mapped<Page<P>>>;

    fn deref(&self) -> &Self::Target {
        match &self.memmap {
            Some(memmap) => memmap,
            None => unreachable!("only drop takes the memmap out"),
        }
    }
}

impl<P: Payload> Drop for Leased<P> {
    fn drop(&mut self) {
        if let (Some(memmap), Some(keeper)) = (self.memmap.take(), &self.keeper) {
            keeper.keep.give(MemmapMemory {
                memory: memmap.into_descriptors().into_exclusive(),
                pages: self.pages,
                source: Source::Kept,
            });
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
    // Dropped last: the frame numbers are free again when the descriptors are gone.
    pub(crate) claim: Claim,
}

impl<P: Payload> Parts<P> {
    pub(crate) fn page(&self, pfn: Pfn) -> Option<PageView<'_, P>> {
        Some(PageView { page: self.memmap.page(pfn)?, template: &self.template })
    }
}

/// A region every page of which is described.
///
/// Dropping it unbinds and unmaps the region; [`Pagemap::unbind`] gives the region back.
pub struct Pagemap<P: Payload = ()> {
    region: Region,
    parts: Parts<P>,
}

impl<P: Payload> Pagemap<P> {
    pub(crate) fn new(region: Region, parts: Parts<P>) -> Self {
        Self { region, parts }
    }

    /// Returns the memory that is described.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns what the bind did and what it cost.
    #[must_use]
    pub fn report(&self) -> &BindReport {
        &self.parts.report
    }

    /// Returns the kind of the memory.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.parts.memmap.kind()
    }

    /// Returns whose the memory is.
    #[must_use]
    pub fn owner(&self) -> Option<Owner> {
        self.parts.owner
    }

    /// Returns the frame numbers of the region.
    #[must_use]
    pub fn range(&self) -> uzone_pages::PfnRange {
        self.parts.claim.range()
    }

    /// Returns the page `pfn`, or `None` if it does not belong to the region.
    #[must_use]
    pub fn page(&self, pfn: Pfn) -> Option<PageView<'_, P>> {
        self.parts.page(pfn)
    }

    /// Returns the pages of the region, in ascending order.
    pub fn pages(&self) -> impl Iterator<Item = PageView<'_, P>> {
        self.range().iter().filter_map(|pfn| self.page(pfn))
    }

    /// Returns the page that the byte `offset_bytes` of the region belongs to.
    #[must_use]
    pub fn page_at(&self, offset_bytes: u64) -> Option<PageView<'_, P>> {
        let pages = PageCount::new(offset_bytes >> self.region.page_size().shift());
        self.page(self.range().start().checked_add(pages).ok()?)
    }

    /// Takes the first reference of a free folio, as the memory's owner does who hands it out.
    /// Generic memory always has a reference, so there is no first one to take.
    ///
    /// This says nothing about the bytes: whoever hands memory to another tenant clears it first.
    ///
    /// # Errors
    /// [`ReferenceError`] if the page is not the region's, or has references.
    pub fn hand_out(&self, pfn: Pfn) -> Result<Reference<'_, P>, ReferenceError> {
        Reference::hand_out(self, pfn)
    }

    /// Takes a reference to the folio that `pfn` belongs to.
    ///
    /// # Errors
    /// [`ReferenceError`] if the page is not the region's, is free, or has the most references
    /// that it may have.
    pub fn get(&self, pfn: Pfn) -> Result<Reference<'_, P>, ReferenceError> {
        Reference::get(self, pfn)
    }

    /// Tells the owner of private memory that the CPU touched `pfn`. Returns whether there was
    /// anything to tell: the page is the region's, and the memory private.
    #[must_use = "a page that nobody migrates stays out of reach"]
    pub fn migrate_to_ram(&self, pfn: Pfn) -> bool {
        match &self.parts.ops.migrate_to_ram {
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
        self.parts.memmap.memory().resident()
    }

    /// Ends the description and gives the region back. The descriptors' memory is kept for the
    /// next bind of the zone if they were written eagerly.
    #[must_use = "dropping the region unmaps it"]
    pub fn unbind(self) -> Region {
        let Self { region, parts } = self;
        drop(parts);
        region
    }

    pub(crate) fn parts(&self) -> &Parts<P> {
        &self.parts
    }
}

impl<P: Payload> fmt::Debug for Pagemap<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pagemap")
            .field("region", &self.region)
            .field("report", &self.parts.report)
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

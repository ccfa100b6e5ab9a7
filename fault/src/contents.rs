//! The content state of every page: [`Contents`], a descriptor word a page.
//!
//! A word is the only truth about a page here; what the kernel says about it (it was there
//! already) confirms it. A page that nobody has asked for is `Unknown` or `Absent`, and its word is
//! memory that was never touched. Who puts it to `Filling` is its owner, and the only one who says
//! how that ended.
//!
//! Cost: 8 bytes a page, and a locked exchange a step.

use uzone_os::{Anonymous, Exclusive, HugeAdvice, Mapped};
use uzone_pages::{
    Content, Folio, Layout, Memmap, MemoryKind, Order, Page, PageCount, Pfn, PfnRange, Tails, Word,
};

use crate::error::MapError;

/// What the words start as: no kind says more about bytes that nobody has asked for.
const KIND: MemoryKind = MemoryKind::Generic;

/// The states of the pages of one mapping, numbered from its start.
pub(crate) struct Contents {
    memmap: Memmap<(), Mapped<Page>>,
    area: PfnRange,
}

impl Contents {
    /// Takes the number of pages; none of them has been asked for.
    pub(crate) fn new(pages: PageCount) -> Result<Self, MapError> {
        let area = PfnRange::try_new(Pfn::new(0), pages)?;
        let layout = Layout::try_new(area, Order::BASE, Tails::Derived)?;
        let count = PageCount::new(layout.descriptors());
        let bytes = uzone_pages::ByteLen::new(count.get() * size_of::<Page>() as u64);
        // In huge pages the words of a window of any size are in one translation.
        let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
        let memory = Exclusive::anonymous(bytes, how)?;
        let count = bytes.to_usize()? / size_of::<Page>();
        let words = Mapped::try_new(memory, count).map_err(|refused| refused.reason)?;
        let memmap = Memmap::try_new(layout, KIND, words)?;
        Ok(Self { memmap, area })
    }

    /// Returns the numbers of the pages.
    pub(crate) fn area(&self) -> PfnRange {
        self.area
    }

    /// Returns the word of a page. A page is its own folio, and the first has the number 0, so the
    /// way to its descriptor is one index: this is done for every page of every window.
    fn folio(&self, page: u64) -> Option<Folio<'_>> {
        let descriptor = self.memmap.descriptors().get(usize::try_from(page).ok()?)?;
        Some(Folio::new(descriptor, Word::initial(KIND)))
    }

    /// Returns the state of a page of the area.
    pub(crate) fn get(&self, page: u64) -> Content {
        // A page that is not described is nobody's to fill.
        self.folio(page).map_or(Content::Poisoned, |folio| folio.word().content())
    }

    /// Puts a page from one state to another. Returns whether it was in the first, and could be.
    pub(crate) fn advance(&self, page: u64, from: Content, to: Content) -> bool {
        self.folio(page).is_some_and(|folio| folio.advance(from, to).is_ok())
    }

    /// Makes the caller the owner of a page that nobody has filled. Returns whether it is.
    pub(crate) fn claim(&self, page: u64) -> bool {
        if self.get(page) == Content::Unknown {
            // Nothing is known about a page that nobody has asked for: it is absent.
            let _ = self.advance(page, Content::Unknown, Content::Absent);
        }
        self.advance(page, Content::Absent, Content::Filling)
    }

    /// Notes that the kernel has a page now, which nobody owned when it was offered.
    pub(crate) fn settle(&self, page: u64) {
        if self.advance(page, Content::Unknown, Content::Present) {
            return;
        }
        if self.advance(page, Content::Absent, Content::Filling) {
            let _ = self.advance(page, Content::Filling, Content::Present);
        }
        // Otherwise it has an owner, who will be told that it is there.
    }

    /// Returns whether a page may be offered to a backing: nobody has filled it or is at it.
    pub(crate) fn is_open(&self, page: u64) -> bool {
        matches!(self.get(page), Content::Unknown | Content::Absent)
    }
}

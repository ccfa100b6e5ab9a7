//! The states of pages without a pagemap, for Miri, which knows no system call that maps memory. The
//! words and their steps are those of the model; pins are the pagemap's, and there are none here.

use std::ops::Range;

use uzone_os::Mapping;
use uzone_pages::{
    Content, FaultArea, Folio, MemoryKind, Page, PageCount, PageSize, Pfn, PfnRange, Word,
};
use uzone_zone::{PagemapOps, PinError, Pinned, Zone};

use crate::error::MapError;

/// The states of the pages of one mapping, numbered from its start.
pub(crate) struct PageStates {
    pages: Vec<Page>,
    page: PageSize,
    area: PfnRange,
}

impl PageStates {
    pub(crate) fn bind(_: &Zone, _: Mapping, _: PageSize, _: PagemapOps) -> Result<Self, MapError> {
        Err(MapError::Unknown(std::io::ErrorKind::Unsupported.into()))
    }

    pub(crate) fn reserve(pages: PageCount, page: PageSize) -> Result<Self, MapError> {
        let words = (0..pages.get()).map(|_| Page::new(())).collect();
        let contents = Self { pages: words, page, area: PfnRange::try_new(Pfn::new(0), pages)? };
        for page in 0..pages.get() {
            assert!(contents.advance(page, Content::Unknown, Content::Absent));
        }
        Ok(contents)
    }

    pub(crate) fn area(&self) -> PfnRange {
        self.area
    }

    pub(crate) fn fault_area(&self, address: u64) -> FaultArea {
        FaultArea { pages: self.area, address: address >> self.page.shift() }
    }

    pub(crate) fn page_size(&self) -> PageSize {
        self.page
    }

    fn folio(&self, page: u64) -> Option<Folio<'_, ()>> {
        let page = self.pages.get(usize::try_from(page).ok()?)?;
        Some(Folio::new(page, Word::initial(MemoryKind::Generic)))
    }

    pub(crate) fn pin(&self, _: Range<u64>) -> Result<Pinned, PinError> {
        unreachable!("pins are the pagemap's")
    }

    pub(crate) fn pages_of(&self, range: PfnRange) -> Range<u64> {
        range.start().get()..range.end().get()
    }

    pub(crate) fn get(&self, page: u64) -> Content {
        self.folio(page).map_or(Content::Poisoned, Folio::content)
    }

    pub(crate) fn advance(&self, page: u64, from: Content, to: Content) -> bool {
        self.folio(page).is_some_and(|folio| folio.advance(from, to).is_ok())
    }

    pub(crate) fn claim(&self, page: u64) -> bool {
        self.advance(page, Content::Absent, Content::Filling)
    }

    pub(crate) fn claim_run(&self, pages: Range<u64>) -> (u64, u64) {
        let claimed = pages.clone().take_while(|&page| self.claim(page)).count() as u64;
        (pages.start + claimed, pages.start + claimed)
    }

    pub(crate) fn set_present(&self, pages: Range<u64>) -> bool {
        let mut all = true;
        for page in pages {
            all &= self.advance(page, Content::Filling, Content::Present);
        }
        all
    }

    pub(crate) fn maybe_pinned(&self, _: u64) -> bool {
        false
    }

    pub(crate) fn unpoison(&self, page: u64) {
        let _ = self.advance(page, Content::Poisoned, Content::Absent);
        let _ = self.advance(page, Content::Absent, Content::Present);
    }

    pub(crate) fn poison(&self, page: u64) -> bool {
        self.advance(page, Content::Filling, Content::Poisoned)
    }

    pub(crate) fn open_run(&self, mut pages: Range<u64>, owned: Option<u64>) -> Option<Range<u64>> {
        let is_open = |page: u64| owned == Some(page) || self.get(page) == Content::Absent;
        let start = pages.find(|&page| is_open(page))?;
        let end = pages.find(|&page| !is_open(page));
        Some(start..end.unwrap_or(pages.end))
    }
}

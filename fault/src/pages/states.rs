//! The content state of every page: [`PageStates`], the words of a [`Pagemap`]. The word is the only truth
//! about a page here; the kernel's replies (the page exists already) confirm it. A page that was never
//! touched is `Absent`, and so is the memory of its word. The thread that moves it to `Filling` is its
//! owner, and the only one that ends that state. Because pins are in the same words, a pinned page is not
//! given back, and a missing page cannot be pinned.
//!
//! Pages have the numbers of the mapping here, from 0 on; a huge page is one of them, and one folio
//! of the pagemap.
//!
//! Cost: 8 bytes a page, and a locked exchange a step.

use std::ops::Range;

use uzone_os::{Anonymous, Mapping};
use uzone_pages::Page;
use uzone_pages::{
    ByteLen, Content, FaultArea, MemoryKind, Order, PageCount, PageSize, Pfn, PfnRange,
};
use uzone_zone::{
    BindOptions, Init, Pagemap, PagemapOps, PinError, PinOptions, Pinned, Region, Zone,
};

use crate::error::MapError;

/// Up to how many bytes of words are there from the start: those of 1 GiB in pages of 4 KiB.
const AT_ONCE: u64 = 2 << 20;

/// How often a page that was given up is looked at until it is listed.
const MOMENT: u32 = 1000;

/// The states of the pages of one mapping, numbered from its start.
pub(crate) struct PageStates {
    pagemap: Pagemap,
    page: PageSize,
    order: Order,
    area: PfnRange,
}

impl PageStates {
    /// Describes `memory` in `zone`, in pages of `page`, all absent. `ops` produce the pages that are
    /// pinned.
    pub(crate) fn bind(
        zone: &Zone,
        memory: Mapping,
        page: PageSize,
        ops: PagemapOps,
    ) -> Result<Self, MapError> {
        let region = Region::adopt(memory).map_err(|refused| refused.cause)?;
        let order = region.page_size().order_of(page.bytes())?;
        let folios = region.pages().get() >> order.get();
        let area = PfnRange::try_new(Pfn::new(0), PageCount::new(folios))?;
        // Fewer are written at once: each page of them would be a fault in the way of another.
        let descriptors = folios.saturating_mul(size_of::<Page>() as u64);
        let init = if descriptors <= AT_ONCE { Init::Eager } else { Init::OnTouch };
        let options = BindOptions::new(MemoryKind::Generic).order(order).ops(ops).absent();
        let options = options.init(init).uses_hugetlb_pool(false);
        let pagemap = zone.bind(region, options).map_err(|refused| refused.cause)?;
        Ok(Self { pagemap, page, order, area })
    }

    /// Describes pages of another process, by reserved address space.
    pub(crate) fn reserve(pages: PageCount, page: PageSize) -> Result<Self, MapError> {
        let zone = Zone::with_keep_limit(ByteLen::ZERO);
        let place = Mapping::anonymous(pages.to_bytes(page)?, Anonymous::default())?;
        // No page of it is ever present; a dump would look for each.
        let _ = place.leave_out_of_dumps();
        Self::bind(&zone, place, page, PagemapOps::default())
    }

    /// Returns the pages as one area of faults, whose first page is at `address`.
    pub(crate) fn fault_area(&self, address: u64) -> FaultArea {
        FaultArea { pages: self.area, address: address >> self.page.shift() }
    }

    pub(crate) fn page_size(&self) -> PageSize {
        self.page
    }

    /// Returns the numbers of the pages.
    pub(crate) fn area(&self) -> PfnRange {
        self.area
    }

    fn pfn(&self, page: u64) -> Pfn {
        // No overflow for pages of the area, which the pagemap has; others are no page of it.
        Pfn::new(self.pagemap.range().start().get().wrapping_add(page << self.order.get()))
    }

    fn range(&self, pages: &Range<u64>) -> Option<PfnRange> {
        let count = pages.end.checked_sub(pages.start)?.checked_shl(self.order.get().into())?;
        PfnRange::try_new(self.pfn(pages.start), PageCount::new(count)).ok()
    }

    /// Pins pages of the area, of which there is one.
    pub(crate) fn pin(&self, pages: Range<u64>, options: PinOptions) -> Result<Pinned, PinError> {
        let range = self.range(&pages);
        let range = range.unwrap_or_else(|| unreachable!("the caller names pages of the area"));
        self.pagemap.pin_with(range, options)
    }

    /// Returns the pages that have a part of `range`, which is of the pagemap.
    pub(crate) fn pages_of(&self, range: PfnRange) -> Range<u64> {
        let first = self.pagemap.range().start().get();
        let page = |pfn: Pfn| (pfn.get() - first) >> self.order.get();
        let last = Pfn::new(range.end().get() - 1); // a range has a page
        page(range.start())..page(last) + 1
    }

    /// Returns the state of a page of the area.
    #[inline]
    pub(crate) fn get(&self, page: u64) -> Content {
        // A page without a descriptor is not filled.
        self.pagemap.content(self.pfn(page)).unwrap_or(Content::Poisoned)
    }

    /// Puts a page from one state to another. Returns whether it was in the first, and could be.
    pub(crate) fn advance(&self, page: u64, from: Content, to: Content) -> bool {
        self.pagemap.advance(self.pfn(page), from, to).is_ok()
    }

    /// Makes the caller the owner of an absent page. Returns whether it is.
    pub(crate) fn claim(&self, page: u64) -> bool {
        self.advance(page, Content::Absent, Content::Filling)
    }

    /// Makes the caller the owner of the first pages of a range, up to one that is not absent. Returns the end of
    /// these, and the end of pages behind them that the caller owned for a moment.
    pub(crate) fn claim_run(&self, pages: Range<u64>) -> (u64, u64) {
        let Some(open) = self.open_run(pages.clone(), None).filter(|run| run.start == pages.start)
        else {
            return (pages.start, pages.start);
        };
        if open.end - open.start == 1 {
            // As for `set_present`.
            let end = open.start + u64::from(self.claim(open.start));
            return (end, end);
        }
        let Some(range) = self.range(&open) else { return (open.start, open.start) };
        let (mut page, mut end, mut last) = (open.start, open.start, open.start);
        self.pagemap.advance_range(range, &[Content::Absent], Content::Filling, |_, step| {
            if step.is_ok() {
                last = page + 1;
                if end == page {
                    end = last;
                } else {
                    // Another thread has changed a page before it since the pages were looked at.
                    let _ = self.advance(page, Content::Filling, Content::Absent);
                }
            }
            page += 1;
        });
        (end, last)
    }

    /// Notes that the kernel has pages that the caller owns. Returns whether each was still being filled.
    pub(crate) fn set_present(&self, pages: Range<u64>) -> bool {
        match pages.end - pages.start {
            0 => true,
            // Most faults end here, and a range of one costs more.
            1 => self.advance(pages.start, Content::Filling, Content::Present),
            _ => {
                let Some(range) = self.range(&pages) else { return false };
                let mut all = true;
                let from = &[Content::Filling];
                self.pagemap.advance_range(range, from, Content::Present, |_, step| {
                    all &= step.is_ok();
                });
                all
            }
        }
    }

    /// Returns whether a page of the area may be pinned.
    pub(crate) fn maybe_pinned(&self, page: u64) -> bool {
        self.pagemap.maybe_pinned(self.pfn(page))
    }

    /// Makes a page good that was given up and that its late owner has installed.
    pub(crate) fn unpoison(&self, page: u64) {
        if self.order == Order::BASE {
            // The thread that gave it up may be about to list it.
            for _ in 0..MOMENT {
                if self.get(page) != Content::Poisoned
                    || self.pagemap.unpoison(self.pfn(page)).is_ok()
                {
                    break;
                }
                std::thread::yield_now();
            }
        } else {
            let _ = self.advance(page, Content::Poisoned, Content::Absent);
        }
        let _ = self.advance(page, Content::Absent, Content::Present);
    }

    /// Poisons a page that is being filled. Returns whether this call did it.
    pub(crate) fn poison(&self, page: u64) -> bool {
        let is_spoiled = self.advance(page, Content::Filling, Content::Poisoned);
        if is_spoiled && self.order == Order::BASE {
            // It is listed, and the hook of its owner is called. A huge page is bad as a whole, and not by
            // the list.
            let _ = self.pagemap.poison(self.pfn(page));
        }
        is_spoiled
    }

    /// Returns the first pages of `pages`, one after the other, that may be offered to a backing: they are
    /// absent, or the page `owned`.
    #[inline]
    pub(crate) fn open_run(&self, pages: Range<u64>, owned: Option<u64>) -> Option<Range<u64>> {
        if pages.end.checked_sub(pages.start) == Some(1) {
            // As for `set_present`.
            let is_open = owned == Some(pages.start) || self.get(pages.start) == Content::Absent;
            return is_open.then_some(pages);
        }
        let mut contents = self.pagemap.contents(self.range(&pages)?).zip(pages.clone());
        let is_open = |content, page| content == Content::Absent || owned == Some(page);
        let (_, start) = contents.find(|&(content, page)| is_open(content, page))?;
        let end = contents.find(|&(content, page)| !is_open(content, page));
        Some(start..end.map_or(pages.end, |(_, end)| end))
    }
}

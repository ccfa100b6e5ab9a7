//! Where the descriptors of a region lie in the region itself: [`Placement`].
//!
//! ```text
//! base          metadata                      data
//!  │ reserve │ skip │ descriptors │ skip │ folio │ folio │ ... │
//!  └───────────── data_at() ─────────────┘
//! ```
//!
//! Only the pages behind the room are described, so the room depends on how many they are, and they
//! on the room. The first page to describe is the lowest at which a folio may start and before which
//! the descriptors of all that follow fit: moving it up shrinks the need and grows the room, so it is
//! found by halving.
//!
//! Descriptors lie in one run behind the reserve. If they fill at least one block of a huge page,
//! the run starts at a multiple of one, and the pages before it are lost; fewer need no such start. A
//! block never shares a huge page with the reserve, and the loss is less than one block. Linux
//! populates a vmemmap section by section in ascending order: a whole section (128 MiB of 4 KiB
//! pages, whose 64-byte descriptors are one huge page) from a huge page, and a section that the
//! range covers in part, at its start or its end, in base pages. So where a range starts inside a
//! section, Linux takes base pages before the first huge page. Here all blocks come first; no
//! section is populated by itself.
//!
//! The data starts at a multiple of `align`. Linux decides that before it knows the descriptors: it
//! leaves 64 bytes for each page of the whole namespace, the data's pages and the others, and rounds up
//! to the namespace's alignment, which is 2 MiB unless its owner asked for 4 KiB or 1 GiB. Without
//! such an alignment the data of base pages starts nearly always off a boundary of 2 MiB, and huge
//! mappings of it are lost. Here only the space of the descriptors is left.
//!
//! Where the region is backed by huge pages, everything starts at a multiple of those: a part of one
//! cannot be given to another owner.
//!
//! Cost: a few dozen divisions, whatever the size.
//! Source: the Linux documentation and the behaviour of its `vmem_altmap`.

use core::fmt;

use crate::addr::{AddrError, Order, PageCount, PageSize, Pfn, PfnRange};
use crate::layout::{Layout, Tails};

/// The layout of a region whose descriptors lie in itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlacementSpec {
    /// All pages of the region.
    pub range: PfnRange,
    /// How many of them, from the first on, the owner keeps.
    pub reserve: PageCount,
    /// The order of the pages behind the region: [`Order::BASE`] unless it is made of huge pages.
    pub backing: Order,
    /// The order of the pages at a multiple of which the data starts; [`Order::BASE`] where it may start
    /// at any folio.
    pub align: Order,
    /// The order of a block of descriptors: the reach of one entry of a page middle directory.
    pub block: Order,
    /// The size of a base page.
    pub page: PageSize,
    /// The order of the folios.
    pub order: Order,
    /// Whether tails have descriptors.
    pub tails: Tails,
    /// Bytes in one descriptor.
    pub descriptor_bytes: u64,
}

/// Which pages of a region hold its descriptors, and which are described.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placement {
    base: Pfn,
    reserve: PageCount,
    descriptors: PfnRange,
    layout: Layout,
}

impl Placement {
    /// Finds the lowest page of a region from which on all can be described by descriptors that lie
    /// before it.
    ///
    /// # Errors
    /// [`AddrError::StartInsidePage`], [`AddrError::ReserveInsidePage`] or
    /// [`AddrError::EndInsideFolio`] for a region that is cut, [`AddrError::NoFolioLeft`] if it is too
    /// short, and [`AddrError::Overflow`] for numbers beyond 64 bits.
    pub fn try_new(spec: &PlacementSpec) -> Result<Self, AddrError> {
        let &PlacementSpec { range, reserve, backing, order, .. } = spec;
        let align = backing.pages();
        if !range.start().is_aligned(backing) {
            return Err(AddrError::StartInsidePage { range, align });
        }
        if !reserve.get().is_multiple_of(align.get()) {
            return Err(AddrError::ReserveInsidePage { reserve, align });
        }
        if !range.end().is_aligned(order) {
            return Err(AddrError::EndInsideFolio { range, align: order.pages() });
        }
        let folio = order.max(backing);
        let step = folio.max(spec.align);
        let first = range.start().checked_add(reserve)?.align_up(folio)?;
        // Where the numbers end before the next multiple, there is no room.
        let first = first.align_up(step).unwrap_or(range.end());
        // The last start that leaves a folio and cuts no page; none if that is before the first.
        let last = range
            .end()
            .get()
            .checked_sub(folio.pages().get())
            .map(|start| Pfn::new(start).align_down(step));
        let starts = last
            .and_then(|last| last.checked_since(first))
            .map_or(0, |pages| (pages.get() >> step.get()) + 1);
        let start = |index: u64| Pfn::new(first.get() + (index << step.get()));
        // The lowest index that works is in `low..=high`, and `starts` stands for none.
        let (mut low, mut high) = (0, starts);
        while low < high {
            let middle = low + (high - low) / 2;
            match Self::with_data_at(spec, start(middle))? {
                Some(_) => high = middle,
                None => low = middle + 1,
            }
        }
        if low < starts
            && let Some(placement) = Self::with_data_at(spec, start(low))?
        {
            return Ok(placement);
        }
        Err(AddrError::NoFolioLeft {
            pages: range.pages(),
            reserve,
            metadata: spec.metadata(folio.pages())?,
            folio: folio.pages(),
            align: step.pages(),
        })
    }

    /// Lays the region out with `data` as its first described page, if there is room before it.
    fn with_data_at(spec: &PlacementSpec, data: Pfn) -> Result<Option<Self>, AddrError> {
        let &PlacementSpec { range, reserve, backing, block, order, tails, .. } = spec;
        let pages = PageCount::new(range.end().get() - data.get());
        let metadata = spec.metadata(pages)?;
        let block = block.max(backing);
        let start = range.start().checked_add(reserve)?;
        let start = if metadata < block.pages() { Ok(start) } else { start.align_up(block) };
        // Where the numbers end before the next multiple, there is no room.
        let descriptors = start.and_then(|start| PfnRange::try_new(start, metadata));
        let Some(descriptors) = descriptors.ok().filter(|found| found.end() <= data) else {
            return Ok(None);
        };
        let layout = Layout::try_new(PfnRange::try_new(data, pages)?, order, tails)?;
        Ok(Some(Self { base: range.start(), reserve, descriptors, layout }))
    }

    /// Returns how many pages the region's owner keeps.
    #[must_use]
    pub const fn reserve(&self) -> PageCount {
        self.reserve
    }

    /// Returns how many pages lie before the first that is described.
    #[must_use]
    pub const fn data_at(&self) -> PageCount {
        PageCount::new(self.layout.range().start().get() - self.base.get())
    }

    /// Returns the pages that the descriptors lie in.
    #[must_use]
    pub const fn descriptors(&self) -> PfnRange {
        self.descriptors
    }

    /// Returns which descriptor belongs to which of the pages that are described.
    #[must_use]
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns how many pages are neither reserved nor described, nor hold descriptors: those that were
    /// skipped before these and before the first folio.
    #[must_use]
    pub const fn lost(&self) -> PageCount {
        let kept = self.reserve.get() + self.descriptors.pages().get();
        PageCount::new(self.data_at().get() - kept)
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} pages of the region hold descriptors, {} are reserved and {} are lost to alignment",
            self.descriptors.pages(),
            self.reserve(),
            self.lost()
        )
    }
}

impl PlacementSpec {
    /// Returns how many pages the descriptors of `pages` take, in whole pages of the backing.
    fn metadata(&self, pages: PageCount) -> Result<PageCount, AddrError> {
        let per_descriptor = match self.tails {
            Tails::Derived => self.order,
            Tails::Stored => Order::BASE,
        };
        let count = pages.get() >> per_descriptor.get();
        let overflow =
            AddrError::Overflow { value: count, operation: "*", operand: self.descriptor_bytes };
        let bytes = count.checked_mul(self.descriptor_bytes).ok_or(overflow)?;
        let base_pages = bytes.div_ceil(self.page.bytes());
        let unit = self.backing.pages().get();
        let whole = base_pages.checked_next_multiple_of(unit).ok_or(overflow)?;
        Ok(PageCount::new(whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(start: u64, pages: u64, order: u8) -> PlacementSpec {
        PlacementSpec {
            range: PfnRange::try_new(Pfn::new(start), PageCount::new(pages)).unwrap(),
            reserve: PageCount::ZERO,
            backing: Order::BASE,
            align: Order::BASE,
            block: Order::PMD,
            page: PageSize::KIB_4,
            order: Order::new(order),
            tails: Tails::Derived,
            descriptor_bytes: 8,
        }
    }

    #[test]
    fn the_pages_of_known_regions_lie_where_they_were_calculated_by_hand() {
        // Pages, order, reserve, descriptor bytes, tails; first descriptor page, how many, first data
        // page, lost; all from the region's first page on.
        for (pages, order, reserve, bytes, tails, expected) in [
            // 1 GiB of base pages: 261632 need 511 pages; one more would need a 512th.
            (1 << 18, 0, 0, 8, Tails::Derived, (0, 511, 512, 1)),
            (1 << 18, 0, 2, 8, Tails::Derived, (2, 511, 513, 0)),
            // 64 bytes a page: 64 pages in each page of descriptors.
            (1 << 18, 0, 0, 64, Tails::Derived, (0, 4033, 4033, 0)),
            // The reserve moves the first block to the next huge page.
            (1 << 18, 0, 1, 64, Tails::Derived, (512, 4026, 4538, 511)),
            // 1 TiB of 1 GiB folios: 1023 of them in two pages, the rest of the first GiB is lost.
            (1 << 28, 18, 0, 8, Tails::Derived, (0, 2, 1 << 18, (1 << 18) - 2)),
            // 2 MiB folios, tails stored: 64 bytes a page are 8 pages a folio.
            (512 * 64, 9, 0, 64, Tails::Stored, (0, 504, 512, 8)),
            (512 * 65, 9, 0, 64, Tails::Stored, (0, 512, 512, 0)),
            (512 * 66, 9, 0, 64, Tails::Stored, (0, 512, 1024, 512)),
            (2, 0, 0, 8, Tails::Derived, (0, 1, 1, 0)),
        ] {
            let spec = PlacementSpec {
                reserve: PageCount::new(reserve),
                descriptor_bytes: bytes,
                tails,
                ..spec(1 << 20, pages, order)
            };
            let placement = Placement::try_new(&spec).unwrap();
            let found = (
                placement.descriptors().start().get() - (1 << 20),
                placement.descriptors().pages().get(),
                placement.layout().range().start().get() - (1 << 20),
                placement.lost().get(),
            );
            assert_eq!(found, expected, "{spec:?}");
            assert_eq!(placement.reserve().get(), reserve);
            assert_eq!(placement.layout().range().end(), spec.range.end());
        }
    }

    #[test]
    fn a_region_without_room_for_a_folio_is_refused_with_its_numbers() {
        for (pages, order, reserve, metadata) in [
            (1, 0, 0, 1),
            (2, 0, 1, 1),
            (2, 0, 1 << 60, 1),
            (512, 9, 0, 1),
            (1024, 9, 512, 1),
            (1 << 18, 18, 0, 1),
        ] {
            let spec =
                PlacementSpec { reserve: PageCount::new(reserve), ..spec(1 << 20, pages, order) };
            assert_eq!(
                Placement::try_new(&spec),
                Err(AddrError::NoFolioLeft {
                    pages: PageCount::new(pages),
                    reserve: PageCount::new(reserve),
                    metadata: PageCount::new(metadata),
                    folio: PageCount::new(1 << order),
                    align: PageCount::new(1 << order),
                })
            );
        }
    }

    #[test]
    fn data_starts_at_a_multiple_of_its_alignment_or_the_region_is_refused() {
        // 1 GiB, and a region in which no such multiple is left.
        let gib = PlacementSpec { align: Order::new(18), ..spec(1 << 20, 5 << 17, 0) };
        let placement = Placement::try_new(&gib).unwrap();
        assert_eq!(placement.layout().range().start(), Pfn::new((1 << 20) + (1 << 18)));
        let small = PlacementSpec { align: Order::new(18), ..spec(1 << 20, 1 << 18, 0) };
        assert!(matches!(
            Placement::try_new(&small),
            Err(AddrError::NoFolioLeft { align, .. }) if align == Order::new(18).pages()
        ));
        let last = PlacementSpec { align: Order::new(30), ..spec(u64::MAX - 4096, 4000, 0) };
        assert!(matches!(Placement::try_new(&last), Err(AddrError::NoFolioLeft { .. })));
    }

    #[test]
    fn what_cuts_a_page_of_the_backing_or_a_folio_is_refused() {
        let huge = |start, pages, reserve| PlacementSpec {
            backing: Order::PMD,
            reserve: PageCount::new(reserve),
            ..spec(start, pages, 0)
        };
        let align = Order::PMD.pages();
        assert!(matches!(
            Placement::try_new(&huge(7, 4096, 0)),
            Err(AddrError::StartInsidePage { align: found, .. }) if found == align
        ));
        assert_eq!(
            Placement::try_new(&huge(0, 4096, 2)),
            Err(AddrError::ReserveInsidePage { reserve: PageCount::new(2), align })
        );
        assert!(matches!(
            Placement::try_new(&spec(0, 1000, 9)),
            Err(AddrError::EndInsideFolio { .. })
        ));
        let long = PlacementSpec { reserve: PageCount::new(u64::MAX), ..spec(1, 8, 0) };
        assert!(matches!(Placement::try_new(&long), Err(AddrError::Overflow { .. })));
        // Base pages over huge ones: the descriptors have a huge page of their own.
        let placement = Placement::try_new(&huge(512, 4096, 512)).unwrap();
        assert_eq!(placement.descriptors().start(), Pfn::new(1024));
        assert_eq!(placement.layout().range().start(), Pfn::new(1536));
    }
}

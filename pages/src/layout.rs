//! Which descriptor belongs to which page: [`Layout`], one formula.
//!
//! `index = (pfn - base) >> shift`, where the shift is the folio's order if tails are derived and
//! zero if they are stored. A derived tail has no descriptor: all that could stand in one follows
//! from its pfn (its head is the pfn with the low bits cleared). So a memmap of 1 GiB folios has one
//! descriptor per GiB, and nothing is aliased and no page table is needed for that.
//!
//! A range that starts or ends inside a folio is refused as a whole: half a folio would have
//! descriptors that no initialiser is responsible for.
//!
//! Cost: a subtraction and a shift.

use crate::addr::{AddrError, Order, PageCount, Pfn, PfnRange};
use crate::kind::MemoryKind;

/// Whether the tails of a folio have descriptors of their own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Tails {
    /// They have none; everything about them follows from their pfn.
    #[default]
    Derived,
    /// They have one each, for callers who keep something per base page.
    Stored,
}

/// The place of a page in its folio.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Class {
    /// A base page: a folio of order 0.
    Base,
    /// The first page of a larger folio.
    Head,
    /// The page after the head, where Linux keeps the fields of the whole folio.
    FirstTail,
    /// Any other page of a larger folio.
    Tail,
}

/// One descriptor's place: all that its initial value may depend on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slot {
    /// The page it describes.
    pub pfn: Pfn,
    /// Whether the page is the head or a tail of its folio.
    pub class: Class,
    /// The order of its folio.
    pub order: Order,
    /// The kind of the memory.
    pub kind: MemoryKind,
    /// The address of the head's descriptor in memory of this process; its own for a head.
    pub head_address: u64,
}

/// The arithmetic of one memmap.
///
/// # Invariants
/// The range starts and ends at multiples of the folio size.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    range: PfnRange,
    order: Order,
    tails: Tails,
}

impl Layout {
    /// Takes the pages to describe, the order of their folios, and whether tails are stored.
    ///
    /// # Errors
    /// [`AddrError::StartInsideFolio`] or [`AddrError::EndInsideFolio`].
    pub const fn try_new(range: PfnRange, order: Order, tails: Tails) -> Result<Self, AddrError> {
        let align = order.pages();
        if !range.start().is_aligned(order) {
            return Err(AddrError::StartInsideFolio { range, align });
        }
        if !range.end().is_aligned(order) {
            return Err(AddrError::EndInsideFolio { range, align });
        }
        Ok(Self { range, order, tails })
    }

    /// Returns the pages that are described.
    #[must_use]
    pub const fn range(&self) -> PfnRange {
        self.range
    }

    /// Returns the order of the folios.
    #[must_use]
    pub const fn order(&self) -> Order {
        self.order
    }

    /// Returns whether tails have descriptors.
    #[must_use]
    pub const fn tails(&self) -> Tails {
        self.tails
    }

    /// Returns log2 of how many pages share one descriptor.
    const fn shift(&self) -> u32 {
        match self.tails {
            Tails::Derived => self.order.get() as u32,
            Tails::Stored => 0,
        }
    }

    /// Returns how many pages share one descriptor.
    #[must_use]
    pub const fn pages_per_descriptor(&self) -> PageCount {
        PageCount::new(1 << self.shift())
    }

    /// Returns how many descriptors there are.
    #[must_use]
    pub const fn descriptors(&self) -> u64 {
        self.range.pages().get() >> self.shift()
    }

    /// Returns how many consecutive descriptors belong to one folio.
    #[must_use]
    pub const fn descriptors_per_folio(&self) -> u64 {
        self.order.pages().get() >> self.shift()
    }

    /// Returns the index of the descriptor of `pfn`, which is its head's where tails are derived,
    /// or `None` if the page is not described.
    #[must_use]
    pub const fn index(&self, pfn: Pfn) -> Option<u64> {
        if !self.range.contains(pfn) {
            return None;
        }
        Some((pfn.get() - self.range.start().get()) >> self.shift())
    }

    /// Returns the index of the descriptor of the head of the folio that `pfn` belongs to.
    #[must_use]
    pub const fn head_index(&self, pfn: Pfn) -> Option<u64> {
        self.index(pfn.align_down(self.order))
    }

    /// Returns the class of `pfn`, whether or not it has a descriptor.
    #[must_use]
    pub const fn class(&self, pfn: Pfn) -> Class {
        if self.order.get() == 0 {
            return Class::Base;
        }
        match pfn.get() & self.order.offset_mask() {
            0 => Class::Head,
            1 => Class::FirstTail,
            _ => Class::Tail,
        }
    }

    /// Returns the page that the descriptor at `index` describes.
    ///
    /// # Panics
    /// If `index` is not below [`Layout::descriptors`].
    #[must_use]
    pub const fn pfn(&self, index: u64) -> Pfn {
        assert!(index < self.descriptors(), "a descriptor beyond the last");
        // No overflow: the page lies inside the range.
        Pfn::new(self.range.start().get() + (index << self.shift()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(start: u64, pages: u64, order: u8, tails: Tails) -> Result<Layout, AddrError> {
        let range = PfnRange::try_new(Pfn::new(start), PageCount::new(pages)).unwrap();
        Layout::try_new(range, Order::new(order), tails)
    }

    #[test]
    fn a_range_that_cuts_a_folio_is_refused_with_its_numbers() {
        for tails in [Tails::Derived, Tails::Stored] {
            assert!(matches!(
                layout(511, 512, 9, tails),
                Err(AddrError::StartInsideFolio { align, .. }) if align.get() == 512
            ));
            assert!(matches!(
                layout(512, 513, 9, tails),
                Err(AddrError::EndInsideFolio { align, .. }) if align.get() == 512
            ));
            assert!(layout(512, 512, 9, tails).is_ok());
            assert!(layout(511, 1, 0, tails).is_ok());
        }
    }

    #[test]
    fn every_page_finds_the_descriptor_of_its_head() {
        for order in [0, 1, 2, 9] {
            for tails in [Tails::Derived, Tails::Stored] {
                let base = 3 << order;
                let layout = layout(base, 4 << order, order, tails).unwrap();
                for offset in 0..4_u64 << order {
                    let pfn = Pfn::new(base + offset);
                    let head = offset >> order;
                    let (index, head_index) = match tails {
                        Tails::Derived => (head, head),
                        Tails::Stored => (offset, head << order),
                    };
                    assert_eq!(layout.index(pfn), Some(index));
                    assert_eq!(layout.head_index(pfn), Some(head_index));
                    assert_eq!(layout.index(layout.pfn(index)), Some(index));
                }
                assert_eq!(layout.index(Pfn::new(base - 1)), None);
                assert_eq!(layout.index(Pfn::new(base + (4 << order))), None);
            }
        }
    }

    #[test]
    fn the_number_of_descriptors_shrinks_with_the_folio() {
        // 100 GiB and 1 TiB of 4 KiB pages, by order 0, 9 and 18.
        for (pages, order, derived) in [
            (26_214_400, 0, 26_214_400),
            (26_214_400, 9, 51_200),
            (26_214_400, 18, 100),
            (1 << 28, 18, 1024),
        ] {
            let all = layout(0, pages, order, Tails::Stored).unwrap();
            assert_eq!(all.descriptors(), pages);
            assert_eq!(all.descriptors_per_folio(), 1 << order);
            let few = layout(0, pages, order, Tails::Derived).unwrap();
            assert_eq!(few.descriptors(), derived);
            assert_eq!(few.descriptors_per_folio(), 1);
        }
    }
}

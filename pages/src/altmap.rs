//! Room for descriptors taken from the region that they describe: [`Altmap`], pure arithmetic.
//!
//! The pages before the ones that are described are a *reserve*, which the owner keeps (a label, a
//! superblock), and behind it room of `free` pages, from which requests are served in ascending
//! order: `next = base + reserve + alloc + align`. A request of `n` pages starts at a multiple of the
//! lowest set bit of `n`; what that skips is lost, and counted in `align`. Where in a region the room
//! ends and the described pages begin is decided by [`Placement`](crate::Placement).
//!
//! Nothing here touches memory, and nothing is shared: the allocating caller owns the value.
//!
//! Units: base pages. Cost: a few instructions.
//! Source: the Linux documentation and the behaviour of its `vmem_altmap`.

use crate::addr::{AddrError, PageCount, PageSize, Pfn, PfnRange};
use crate::byte_len::ByteLen;
use crate::layout::LayoutError;

/// Room for descriptors at the start of a region.
///
/// # Invariants
/// `align + alloc <= free`, and `base + reserve + free` is a 64-bit number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Altmap {
    base: Pfn,
    reserve: PageCount,
    free: PageCount,
    align: PageCount,
    alloc: PageCount,
}

impl Altmap {
    /// Takes the first page of a region, how many pages from there on are never handed out, and how
    /// many behind those are room for descriptors.
    ///
    /// # Errors
    /// [`AddrError::Overflow`] if the room ends past the last 64-bit frame number.
    pub const fn try_new(
        base: Pfn,
        reserve: PageCount,
        free: PageCount,
    ) -> Result<Self, AddrError> {
        let room = match base.checked_add(reserve) {
            Ok(room) => room,
            Err(error) => return Err(error),
        };
        if let Err(error) = room.checked_add(free) {
            return Err(error);
        }
        Ok(Self { base, reserve, free, align: PageCount::ZERO, alloc: PageCount::ZERO })
    }

    /// Returns how many pages are never handed out.
    #[must_use]
    pub const fn reserve(&self) -> PageCount {
        self.reserve
    }

    /// Returns how many pages there are for descriptors and what their alignment skips.
    #[must_use]
    pub const fn free(&self) -> PageCount {
        self.free
    }

    /// Returns how many pages were skipped to align what was handed out.
    #[must_use]
    pub const fn align(&self) -> PageCount {
        self.align
    }

    /// Returns how many pages are handed out.
    #[must_use]
    pub const fn alloc(&self) -> PageCount {
        self.alloc
    }

    /// Returns how many pages lie before the first that is described: the reserve and the room.
    #[must_use]
    pub const fn offset(&self) -> PageCount {
        // No overflow, here and below: the sum from `base` on is a number.
        PageCount::new(self.reserve.get() + self.free.get())
    }

    /// Returns how many pages are neither handed out nor skipped.
    #[must_use]
    pub const fn left(&self) -> PageCount {
        PageCount::new(self.free.get() - self.align.get() - self.alloc.get())
    }

    /// Returns where the next request starts, before it is aligned.
    #[must_use]
    pub const fn next(&self) -> Pfn {
        let before = self.reserve.get() + self.alloc.get() + self.align.get();
        Pfn::new(self.base.get() + before)
    }

    /// Takes `len` bytes, at a multiple of the lowest set bit of how many pages that is. Where it
    /// fails nothing has changed.
    ///
    /// # Errors
    /// [`LayoutError::NotWholePages`], or [`LayoutError::NoRoom`] with the numbers.
    pub fn take(&mut self, len: ByteLen, page: PageSize) -> Result<PfnRange, LayoutError> {
        match page.pages_in(len) {
            Ok(pages) if !pages.is_zero() => self.take_blocks(pages, 1),
            _ => Err(LayoutError::NotWholePages { len, page }),
        }
    }

    /// Takes `count` blocks of `block` pages each, one behind the other. It is what as many calls of
    /// [`Altmap::take`] come to: behind a block the next one is aligned already.
    ///
    /// # Errors
    /// [`LayoutError::NoRoom`] if they do not all fit, [`LayoutError::Addr`] if there are none.
    pub fn take_blocks(&mut self, block: PageCount, count: u64) -> Result<PfnRange, LayoutError> {
        let overflow = AddrError::Overflow { value: block.get(), operation: "*", operand: count };
        let asked = block.get().checked_mul(count).ok_or(overflow)?;
        let next = self.next();
        // The lowest set bit: 1 for an odd number of pages.
        let multiple = 1_u64 << block.get().trailing_zeros().min(63);
        let align = next.get().wrapping_neg() & (multiple - 1);
        let left = self.left();
        if asked.checked_add(align).is_none_or(|needed| needed > left.get()) {
            let (asked, align) = (PageCount::new(asked), PageCount::new(align));
            return Err(LayoutError::NoRoom { asked, align, left });
        }
        let start = next.checked_add(PageCount::new(align))?;
        let range = PfnRange::try_new(start, PageCount::new(asked))?;
        self.align = PageCount::new(self.align.get() + align);
        self.alloc = PageCount::new(self.alloc.get() + asked);
        Ok(range)
    }

    /// Gives `pages` back. They count as room again; what was skipped to align them stays lost.
    ///
    /// # Errors
    /// [`LayoutError::NotTaken`] if so many were not out; then nothing has changed.
    pub fn give_back(&mut self, pages: PageCount) -> Result<(), LayoutError> {
        match self.alloc.get().checked_sub(pages.get()) {
            Some(alloc) => {
                self.alloc = PageCount::new(alloc);
                Ok(())
            }
            None => Err(LayoutError::NotTaken { given: pages, alloc: self.alloc }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn altmap(base: u64, reserve: u64, free: u64) -> Altmap {
        Altmap::try_new(Pfn::new(base), PageCount::new(reserve), PageCount::new(free)).unwrap()
    }

    fn take(altmap: &mut Altmap, pages: u64) -> Result<(u64, u64), LayoutError> {
        let range = altmap.take(ByteLen::new(pages * 4096), PageSize::KIB_4)?;
        Ok((range.start().get(), range.pages().get()))
    }

    #[test]
    fn a_request_starts_at_a_multiple_of_its_lowest_set_bit_and_the_loss_is_counted() {
        // Base, reserve, pages asked for; where it starts, and what was skipped.
        for (base, reserve, asked, start, lost) in [
            (0x10_0000, 0, 512, 0x10_0000, 0),
            (0x10_0000, 2, 512, 0x10_0200, 510),
            (0x10_0000, 2, 1, 0x10_0002, 0),
            (0x10_0000, 1, 6, 0x10_0002, 1),
            (0x10_0000, 1, 100, 0x10_0004, 3),
            (0x10_0000, 3, 7, 0x10_0003, 0),
            (7, 0, 512, 512, 505),
            (7, 1, 1, 8, 0),
        ] {
            let mut altmap = altmap(base, reserve, 4096);
            assert_eq!(altmap.next().get(), base + reserve);
            assert_eq!(take(&mut altmap, asked), Ok((start, asked)), "{base:#x} {reserve} {asked}");
            assert_eq!((altmap.align().get(), altmap.alloc().get()), (lost, asked));
            assert_eq!(altmap.next().get(), base + reserve + altmap.align().get() + asked);
            assert_eq!(altmap.left().get(), 4096 - lost - asked);
            assert_eq!(altmap.offset().get(), reserve + 4096);
        }
    }

    #[test]
    fn a_request_that_does_not_fit_with_its_alignment_changes_nothing() {
        let mut altmap = altmap(0x10_0000, 2, 600);
        let before = altmap;
        // 512 pages and 510 to align them.
        let refused = take(&mut altmap, 512);
        let counts = |asked, align, left| LayoutError::NoRoom {
            asked: PageCount::new(asked),
            align: PageCount::new(align),
            left: PageCount::new(left),
        };
        assert_eq!(refused, Err(counts(512, 510, 600)));
        assert_eq!(altmap, before);
        assert_eq!(take(&mut altmap, 599), Ok((0x10_0002, 599)));
        assert_eq!(take(&mut altmap, 2), Err(counts(2, 1, 1)));
        assert_eq!(take(&mut altmap, 1), Ok((0x10_0259, 1)));
        assert_eq!(take(&mut altmap, 1), Err(counts(1, 0, 0)));
        assert_eq!(altmap.left(), PageCount::ZERO);
        // What is given back can be taken again, and no more than that.
        assert_eq!(altmap.give_back(PageCount::new(1)), Ok(()));
        assert_eq!(take(&mut altmap, 1), Ok((0x10_0259, 1)));
        assert_eq!(
            altmap.give_back(PageCount::new(601)),
            Err(LayoutError::NotTaken { given: PageCount::new(601), alloc: PageCount::new(600) })
        );
        assert_eq!(altmap.give_back(PageCount::new(600)), Ok(()));
        assert_eq!(altmap.left(), PageCount::new(600));
    }

    #[test]
    fn half_a_page_and_no_page_are_no_request() {
        let mut altmap = altmap(0, 0, 16);
        for bytes in [0, 1, 4095, 4097, u64::MAX] {
            let len = ByteLen::new(bytes);
            assert_eq!(
                altmap.take(len, PageSize::KIB_4),
                Err(LayoutError::NotWholePages { len, page: PageSize::KIB_4 })
            );
        }
        let too_many = altmap.take_blocks(PageCount::new(1 << 40), 1 << 40);
        assert!(matches!(too_many, Err(LayoutError::Addr(AddrError::Overflow { .. }))));
        let huge = altmap.take_blocks(PageCount::new(u64::MAX), 1);
        assert!(matches!(huge, Err(LayoutError::NoRoom { .. })));
        for (block, count) in [(0, 1), (1, 0), (0, 0)] {
            let none = altmap.take_blocks(PageCount::new(block), count);
            assert!(matches!(none, Err(LayoutError::Addr(AddrError::Empty { .. }))), "{none:?}");
        }
        assert_eq!(altmap.left(), PageCount::new(16));
    }

    #[test]
    fn an_altmap_past_the_last_page_is_refused() {
        for (base, reserve, free) in [(u64::MAX, 1, 0), (u64::MAX - 5, 3, 3), (1, u64::MAX, 0)] {
            let refused =
                Altmap::try_new(Pfn::new(base), PageCount::new(reserve), PageCount::new(free));
            assert!(matches!(refused, Err(AddrError::Overflow { .. })), "{base:#x}");
        }
        let last = altmap(u64::MAX - 5, 3, 2);
        assert_eq!(last.next().get(), u64::MAX - 2);
    }
}

//! Room for descriptors taken from the region that they describe: [`Altmap`], pure arithmetic.
//!
//! The pages before the ones that are described are a *reserve*, which the owner keeps (a label, a
//! superblock), and behind it room of `free` pages, from which requests are served in ascending
//! order: `next = base + reserve + alloc + align`. A block of `n` pages starts at a multiple of the
//! lowest set bit of `n`; what that skips is lost, and counted in `align`. Where in a region the room
//! ends and the described pages begin is decided by [`Placement`](crate::Placement).
//!
//! Nothing here touches memory, and nothing is shared: the allocating caller owns the value.
//!
//! Units: base pages. Cost: a few instructions.
//! Source: the Linux documentation and the behaviour of its `vmem_altmap`.

use crate::addr::{AddrError, PageCount, Pfn, PfnRange};

/// Room for descriptors at the start of a region.
///
/// # Invariants
/// `align + alloc <= free`, and `base + reserve + free` is a 64-bit number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Altmap {
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
    pub(crate) const fn try_new(
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
    pub(crate) const fn reserve(&self) -> PageCount {
        self.reserve
    }

    /// Returns how many pages were skipped to align what was handed out.
    #[must_use]
    pub(crate) const fn align(&self) -> PageCount {
        self.align
    }

    /// Returns how many pages lie before the first that is described: the reserve and the room.
    #[must_use]
    pub(crate) const fn offset(&self) -> PageCount {
        // No overflow, here and below: the sum from `base` on is a number.
        PageCount::new(self.reserve.get() + self.free.get())
    }

    /// Returns how many pages are neither handed out nor skipped.
    #[must_use]
    pub(crate) const fn left(&self) -> PageCount {
        PageCount::new(self.free.get() - self.align.get() - self.alloc.get())
    }

    /// Returns where the next request starts, before it is aligned.
    #[must_use]
    pub(crate) const fn next(&self) -> Pfn {
        let before = self.reserve.get() + self.alloc.get() + self.align.get();
        Pfn::new(self.base.get() + before)
    }

    /// Takes `count` blocks of `block` pages each, one behind the other. The first starts at a multiple of
    /// the lowest set bit of `block`; behind a block the next one is aligned already. `None` if they do not
    /// all fit; then nothing has changed.
    ///
    /// # Errors
    /// [`AddrError::Empty`] for no page, and [`AddrError::Overflow`] for more than there are numbers.
    pub(crate) fn take_blocks(
        &mut self,
        block: PageCount,
        count: u64,
    ) -> Result<Option<PfnRange>, AddrError> {
        let overflow = AddrError::Overflow { value: block.get(), operation: "*", operand: count };
        let asked = block.get().checked_mul(count).ok_or(overflow)?;
        let next = self.next();
        // The lowest set bit: 1 for an odd number of pages.
        let multiple = 1_u64 << block.get().trailing_zeros().min(63);
        let align = next.get().wrapping_neg() & (multiple - 1);
        let left = self.left();
        if asked.checked_add(align).is_none_or(|needed| needed > left.get()) {
            return Ok(None);
        }
        let start = next.checked_add(PageCount::new(align))?;
        let range = PfnRange::try_new(start, PageCount::new(asked))?;
        self.align = PageCount::new(self.align.get() + align);
        self.alloc = PageCount::new(self.alloc.get() + asked);
        Ok(Some(range))
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    fn altmap(base: u64, reserve: u64, free: u64) -> Altmap {
        Altmap::try_new(Pfn::new(base), PageCount::new(reserve), PageCount::new(free)).unwrap()
    }

    fn take(altmap: &mut Altmap, pages: u64) -> Option<(u64, u64)> {
        let range = altmap.take_blocks(PageCount::new(pages), 1).unwrap()?;
        Some((range.start().get(), range.pages().get()))
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
            assert_eq!(
                take(&mut altmap, asked),
                Some((start, asked)),
                "{base:#x} {reserve} {asked}"
            );
            assert_eq!((altmap.align().get(), altmap.alloc.get()), (lost, asked));
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
        assert_eq!(take(&mut altmap, 512), None);
        assert_eq!(altmap, before);
        assert_eq!(take(&mut altmap, 599), Some((0x10_0002, 599)));
        assert_eq!(take(&mut altmap, 2), None);
        assert_eq!(take(&mut altmap, 1), Some((0x10_0259, 1)));
        assert_eq!(take(&mut altmap, 1), None);
        assert_eq!(altmap.left(), PageCount::ZERO);
    }

    #[test]
    fn no_page_and_more_than_there_are_numbers_are_no_request() {
        let mut altmap = altmap(0, 0, 16);
        let too_many = altmap.take_blocks(PageCount::new(1 << 40), 1 << 40);
        assert!(matches!(too_many, Err(AddrError::Overflow { .. })));
        let huge = altmap.take_blocks(PageCount::new(u64::MAX), 1);
        assert!(matches!(huge, Ok(None)));
        for (block, count) in [(0, 1), (1, 0), (0, 0)] {
            let none = altmap.take_blocks(PageCount::new(block), count);
            assert!(matches!(none, Err(AddrError::Empty { .. })), "{none:?}");
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

    /// The pages of an altmap, of which each is looked at in turn.
    struct Plain {
        next: u64,
        end: u64,
        taken: u64,
        skipped: u64,
    }

    impl Plain {
        fn take(&mut self, pages: u64) -> Option<u64> {
            let mut multiple = 1;
            while pages.is_multiple_of(multiple * 2) {
                multiple *= 2;
            }
            let mut start = self.next;
            while !start.is_multiple_of(multiple) {
                start += 1;
            }
            if start + pages > self.end {
                return None;
            }
            self.skipped += start - self.next;
            self.taken += pages;
            self.next = start + pages;
            Some(start)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 5 } else { 2000 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn an_altmap_hands_out_what_a_list_of_pages_would(
            base in 0..5000_u64,
            reserve in 0..40_u64,
            free in 0..600_u64,
            blocks in prop::collection::vec(
                (1..80_u64, prop_oneof![3 => Just(1), 1 => 1..9_u64]),
                0..30,
            ),
        ) {
            let mut altmap = altmap(base, reserve, free);
            let end = base + reserve + free;
            let mut plain = Plain { next: base + reserve, end, taken: 0, skipped: 0 };
            for (pages, count) in blocks {
                let before = altmap;
                let mut one_by_one = before;
                let found = altmap.take_blocks(PageCount::new(pages), count).unwrap();
                let all: Option<Vec<_>> =
                    (0..count).map(|_| take(&mut one_by_one, pages)).collect();
                match (found, all) {
                    (Some(range), Some(parts)) => {
                        prop_assert_eq!(altmap, one_by_one);
                        prop_assert!(range.start().get() >= base + reserve, "the reserve is not room");
                        prop_assert!(range.end().get() <= end);
                        prop_assert_eq!(range.pages().get(), pages * count);
                        for (start, _) in parts {
                            prop_assert_eq!(plain.take(pages), Some(start));
                        }
                    }
                    (None, None) => {
                        prop_assert_eq!(altmap, before);
                        if count == 1 {
                            prop_assert_eq!(plain.take(pages), None);
                        }
                    }
                    (found, all) => prop_assert!(false, "{:?} and {:?}", found, all),
                }
                prop_assert_eq!(altmap.alloc.get(), plain.taken);
                prop_assert_eq!(altmap.align().get(), plain.skipped);
                prop_assert_eq!(altmap.next().get(), plain.next);
                prop_assert_eq!(altmap.left().get(), free - plain.taken - plain.skipped);
            }
        }
    }
}

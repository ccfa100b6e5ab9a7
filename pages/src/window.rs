//! Which pages a fault maps: the window around the faulting page.
//!
//! [`FaultAround`] is a size and the arithmetic that places a window of it: naturally aligned,
//! inside of its area, inside of one page table. A page of a window may be skipped; that is not
//! decided here.
//!
//! Units: pages are base pages of the area's [`PageSize`]; a [`FaultAround`] is bytes.
//! Cost: a window is about ten instructions.
//! Source: "Fault-around" of Linux since 3.15, whose default, limits and clamping are reproduced.

use core::fmt;

use crate::addr::{AddrError, MOST_AROUND, PageCount, PageSize, Pfn, PfnRange};
use crate::byte_len::ByteLen;

/// How much a read fault maps: a power of two from 4 KiB, which is the faulting page alone, to
/// 2 MiB.
///
/// It is a length, so that it means the same on hosts with pages of 4 KiB and of 64 KiB; a window
/// never has less than a page.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct FaultAround(u8);

const _: () = assert!(FaultAround::MAX.len().get() == MOST_AROUND.get());

impl FaultAround {
    /// One page of 4 KiB: nothing is mapped around a fault.
    pub const MIN: Self = Self(12);
    /// 64 KiB, the default of Linux.
    pub const DEFAULT: Self = Self(16);
    /// 2 MiB, the reach of a page table of 4 KiB pages.
    pub const MAX: Self = Self(21);

    /// Takes a length, rounded down to a power of two, and up to 4 KiB.
    ///
    /// # Errors
    /// [`AddrError::FaultAround`] for 2 MiB and a page or more. Linux counts in whole pages too, so it
    /// takes 2 MiB and a part of a page for 2 MiB.
    pub const fn try_new(len: ByteLen) -> Result<Self, AddrError> {
        let page = PageSize::KIB_4;
        if len.get() >> page.shift() > 1 << (Self::MAX.0 as u32 - page.shift()) {
            return Err(AddrError::FaultAround { asked: len });
        }
        if len.get() < page.bytes() {
            return Ok(Self::MIN);
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most 21 after the check above")]
        Ok(Self(len.get().ilog2() as u8))
    }

    /// Returns the length.
    #[must_use]
    pub const fn len(self) -> ByteLen {
        ByteLen::new(1 << self.0)
    }

    /// Returns how many pages of `page` that is: at least one, a power of two.
    #[must_use]
    pub const fn pages(self, page: PageSize) -> PageCount {
        PageCount::new(1 << (self.0 as u32).saturating_sub(page.shift()))
    }

    /// Returns twice the length, or `most` if that is less.
    #[must_use]
    pub fn doubled(self, most: Self) -> Self {
        Self((self.0 + 1).min(most.0.max(Self::MIN.0)))
    }

    /// Returns the pages to offer for a fault on the page `fault` of `area`, or `None` if it is none
    /// of its pages.
    ///
    /// The window holds the faulting page, lies in the area and in one page table, and has at most
    /// [`FaultAround::pages`] pages. It is naturally aligned, unless the area starts in it: then it
    /// starts where the area does and ends as much later.
    #[must_use]
    pub fn window(self, fault: Pfn, area: PfnRange, page: PageSize) -> Option<PfnRange> {
        if !area.contains(fault) {
            return None;
        }
        let (fault, pages) = (fault.get(), self.pages(page).get());
        // A page table has an entry of 8 bytes for each of its pages, and is a page itself.
        let table = (page.bytes() / 8).max(pages);
        // `table` and `pages` are powers of two, so clearing low bits is aligning.
        let start = (fault & !(pages - 1)).max(area.start().get());
        let table_end = (fault & !(table - 1)).saturating_add(table);
        let end = start.saturating_add(pages).min(table_end).min(area.end().get());
        PfnRange::try_new(Pfn::new(start), PageCount::new(end - start)).ok()
    }

    /// Returns the size of `1 << order` pages of `page`, or 2 MiB if that is less.
    pub(crate) fn of_pages(order: u32, page: PageSize) -> Self {
        let shift = order.saturating_add(page.shift()).min(u32::from(Self::MAX.0));
        #[expect(clippy::cast_possible_truncation, reason = "at most 21")]
        Self(shift as u8)
    }
}

impl Default for FaultAround {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl fmt::Debug for FaultAround {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultAround({})", self.len())
    }
}

impl fmt::Display for FaultAround {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.len().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area(start: u64, end: u64) -> PfnRange {
        PfnRange::try_new(Pfn::new(start), PageCount::new(end - start)).unwrap()
    }

    fn pages(pages: u64) -> FaultAround {
        FaultAround::try_new(ByteLen::new(pages * 4096)).unwrap()
    }

    #[test]
    fn windows_are_those_of_the_kernel() {
        // Fault, area, pages of a window; first and last entry of the page table, first and last
        // page of the area.
        for (fault, start, end, nr, from, to, first, last) in [
            (1000, 0, 4096, 16, 480, 495, 992, 1007),
            (1003, 1000, 4096, 16, 488, 503, 0, 15),
            (1003, 1001, 1005, 16, 489, 492, 0, 3),
            (1023, 1000, 4096, 16, 496, 511, 8, 23),
            (511, 0, 4096, 16, 496, 511, 496, 511),
            (510, 505, 600, 16, 505, 511, 0, 6),
            (512, 505, 600, 16, 0, 15, 7, 22),
            (520, 515, 528, 16, 3, 15, 0, 12),
            (5, 5, 6, 16, 5, 5, 0, 0),
            (700, 690, 4096, 512, 178, 511, 0, 333),
            (1003, 1000, 4096, 1, 491, 491, 3, 3),
        ] {
            let window =
                pages(nr).window(Pfn::new(fault), area(start, end), PageSize::KIB_4).unwrap();
            let (begin, stop) = (window.start().get(), window.end().get() - 1);
            assert_eq!((begin % 512, stop % 512), (from, to), "entries for {fault} of {nr}");
            assert_eq!((begin - start, stop - start), (first, last), "pages for {fault} of {nr}");
        }
    }

    #[test]
    fn a_page_that_is_not_in_the_area_has_no_window() {
        let area = area(100, 200);
        for fault in [0, 99, 200, u64::MAX] {
            assert_eq!(pages(16).window(Pfn::new(fault), area, PageSize::KIB_4), None, "{fault}");
        }
    }

    #[test]
    fn a_window_at_the_last_frames_there_are_does_not_wrap() {
        let area = area(u64::MAX - 10, u64::MAX);
        for size in [FaultAround::MIN, FaultAround::DEFAULT, FaultAround::MAX] {
            let window = size.window(Pfn::new(u64::MAX - 1), area, PageSize::KIB_4).unwrap();
            assert!(area.contains_range(window), "{window}");
            assert!(window.contains(Pfn::new(u64::MAX - 1)));
        }
    }

    #[test]
    fn a_size_is_rounded_down_and_refused_where_the_kernel_refuses_it() {
        for (bytes, size) in [
            (0, Some(4096)),
            (1, Some(4096)),
            (4096, Some(4096)),
            (8191, Some(4096)),
            (8192, Some(8192)),
            (65535, Some(32768)),
            (65536, Some(65536)),
            (100_000, Some(65536)),
            (2 << 20, Some(2 << 20)),
            ((2 << 20) + 4095, Some(2 << 20)),
            ((2 << 20) + 4096, None),
            (u64::MAX, None),
        ] {
            let asked = ByteLen::new(bytes);
            match size {
                Some(size) => {
                    assert_eq!(FaultAround::try_new(asked).unwrap().len(), ByteLen::new(size));
                }
                None => {
                    let error = FaultAround::try_new(asked).unwrap_err();
                    assert_eq!(error, AddrError::FaultAround { asked });
                }
            }
        }
        assert_eq!(FaultAround::default().len(), ByteLen::kib(64));
        assert_eq!(FaultAround::MAX.doubled(FaultAround::MAX), FaultAround::MAX);
    }

    #[test]
    fn a_window_has_at_least_one_page_of_whatever_size() {
        for (page_bytes, size, count) in [
            (4096, FaultAround::DEFAULT, 16),
            (16 << 10, FaultAround::DEFAULT, 4),
            (64 << 10, FaultAround::DEFAULT, 1),
            (64 << 10, FaultAround::MIN, 1),
            (64 << 10, FaultAround::MAX, 32),
            (2 << 20, FaultAround::MAX, 1),
            (1 << 30, FaultAround::MAX, 1),
        ] {
            let page = PageSize::try_from_bytes(page_bytes).unwrap();
            assert_eq!(size.pages(page).get(), count, "{size} of {page}");
            let window = size.window(Pfn::new(77), area(0, 1000), page).unwrap();
            assert!(window.pages().get() <= count && window.contains(Pfn::new(77)));
        }
    }
}

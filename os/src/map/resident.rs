//! The part of a mapping that is present, and in huge pages: [`Mapping::resident`],
//! [`Mapping::huge_backed`].
//!
//! The kernel is asked for the contents of its page tables of this process. It answers in runs of pages
//! (`PAGEMAP_SCAN`, Linux 6.7) and walks only tables that exist, so a mapping of terabytes with
//! nothing in it takes microseconds.
//!
//! mincore(2) is not used: for files and memory files it answers for the page cache, which is a
//! different question, and for anonymous memory it counts the zero page as memory.
//!
//! Source: ioctl_pagemap_scan(2), "Examining Process Page Tables" in the Linux administrator's guide.

use core::ops::Range;

use uzone_pages::ByteLen;

use crate::map::mapping::Mapping;
use crate::map::mapping::MappingError;
use crate::map::pagemap_scan::{self, HUGE, PRESENT, Request, SWAPPED, ZERO_PAGE};

/// Returns the choice of pages: pages with all properties of `all`, and with any of `any` if
/// that names some. The zero page is never counted.
const fn with(all: u64, any: u64) -> Request {
    Request { all, none: ZERO_PAGE, any, protect: false }
}

impl Mapping {
    /// Returns the number of bytes of the mapping that are present in this process, in whole pages. The
    /// kernel's zero page, which a read of untouched memory sees, does not count.
    ///
    /// # Errors
    /// [`MappingError`] if `/proc` is not there or the kernel refuses.
    pub fn resident(&self) -> Result<ByteLen, MappingError> {
        self.resident_in(self.whole())
    }

    /// Returns the number of bytes of a range, widened to whole pages, that are present in this process.
    ///
    /// # Errors
    /// [`MappingError`] if the range is not inside, `/proc` is not there or the kernel refuses.
    pub fn resident_in(&self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        self.count(&range, with(PRESENT, 0))
    }

    /// Returns whether no page of a range, widened to whole pages, was ever given memory by this
    /// mapping, or all of it was given back: none is present, nor swapped out. Private memory of no
    /// file reads as zero where that holds. A page server that fills such pages is not asked.
    ///
    /// # Errors
    /// [`MappingError`] if the range is not inside, `/proc` is not there or the kernel refuses.
    pub fn is_untouched(&self, range: Range<u64>) -> Result<bool, MappingError> {
        // One look at each page, for a page that is being moved is in one of the two states.
        let wanted = with(0, PRESENT | SWAPPED);
        Ok(self.count(&range, wanted)?.is_zero())
    }

    /// Returns the number of bytes of a range that are `wanted`.
    fn count(&self, range: &Range<u64>, wanted: Request) -> Result<ByteLen, MappingError> {
        let part = self.widen(range)?;
        let pagemap = pagemap_scan::open()?;
        let base = self.addr().get();
        let addresses = (base + part.start) as u64..(base + part.end) as u64;
        let mut bytes = 0;
        pagemap_scan::scan(&pagemap, addresses, wanted, |run| bytes += run.end - run.start)
            .map_err(|cause| MappingError::Scan { range: range.clone(), cause: cause.into() })?;
        Ok(ByteLen::new(bytes))
    }

    /// Returns the number of bytes of the mapping that are mapped by huge pages, transparent or of a pool.
    ///
    /// # Errors
    /// [`MappingError`] if `/proc` is not there or the kernel refuses.
    pub fn huge_backed(&self) -> Result<ByteLen, MappingError> {
        self.huge_backed_in(self.whole())
    }

    /// Returns the number of bytes of a range, widened to whole pages, that are mapped by huge pages, as
    /// [`Mapping::huge_backed`] does. Of a huge page that begins or ends outside, the part inside counts.
    ///
    /// # Errors
    /// [`MappingError`] if the range is not inside, `/proc` is not there or the kernel refuses.
    pub fn huge_backed_in(&self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        self.count(&range, with(PRESENT | HUGE, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::kernel;
    use crate::map::options::{Anonymous, HugeAdvice};

    #[test]
    fn pages_are_counted_one_by_one() {
        let page = kernel::page_size().bytes();
        let mapping = Mapping::anonymous(
            ByteLen::new(300 * page),
            Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() },
        )
        .unwrap();
        // Every other page: more runs than pages in a row.
        for index in (0..300).step_by(2) {
            mapping.write_at(index * page, &[1]).unwrap();
        }
        assert_eq!(mapping.resident().unwrap().get(), 150 * page);
        assert_eq!(mapping.huge_backed().unwrap(), ByteLen::ZERO);
    }

    #[test]
    fn memory_is_untouched_until_a_byte_is_written_and_again_when_it_is_given_back() {
        let page = kernel::page_size().bytes();
        let how = Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() };
        let mapping = Mapping::anonymous(ByteLen::new(8 * page), how).unwrap();
        assert!(mapping.is_untouched(0..8 * page).unwrap());
        // A read gets the zero page, which is no memory.
        mapping.read_at(5 * page, &mut [0; 8]).unwrap();
        assert!(mapping.is_untouched(0..8 * page).unwrap());
        mapping.write_at(5 * page, &[0]).unwrap();
        assert!(!mapping.is_untouched(0..8 * page).unwrap());
        assert!(mapping.is_untouched(0..5 * page).unwrap());
        assert!(!mapping.is_untouched(5 * page + 7..5 * page + 8).unwrap());
        mapping.discard(0..8 * page).unwrap();
        assert!(mapping.is_untouched(0..8 * page).unwrap());
        assert!(mapping.is_untouched(0..8 * page + 1).is_err());
    }

    #[test]
    fn more_runs_than_the_buffer_holds_are_all_counted() {
        use crate::map::pagemap_scan::RUNS;
        let page = kernel::page_size().bytes();
        let pages = 2 * RUNS as u64 * 2 + 6;
        let mapping = Mapping::anonymous(
            ByteLen::new(pages * page),
            Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() },
        )
        .unwrap();
        for index in (0..pages).step_by(2) {
            mapping.write_at(index * page, &[1]).unwrap();
        }
        assert_eq!(mapping.resident().unwrap().get(), pages / 2 * page);
    }
}

//! How much of a mapping is present, and in huge pages: [`Mapping::resident`],
//! [`Mapping::huge_backed`].
//!
//! The kernel is asked what its page tables of this process hold. It answers in runs of pages
//! (`PAGEMAP_SCAN`, Linux 6.7) and walks only tables that exist, so a mapping of terabytes with
//! nothing in it takes microseconds. An older kernel is read page by page, 8 bytes each, from
//! the procfs pagemap; for huge pages its `smaps` is asked.
//!
//! mincore(2) is not used: for files and memory files it answers for the page cache, which is a
//! different question, and for anonymous memory it counts the zero page as memory.
//!
//! Source: ioctl_pagemap_scan(2), "Examining Process Page Tables" in the Linux administrator's guide.

use core::ops::Range;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::FileExt;

use uzone_pages::ByteLen;

use crate::host::kernel;
use crate::host::root::{SysError, kib_field};
use crate::map::mapping::Mapping;
use crate::map::mapping::MappingError;
use crate::map::pagemap_scan::{self, HUGE, PAGEMAP, PRESENT, Request, SWAPPED, ZERO_PAGE};

const SMAPS: &str = "/proc/self/smaps";

/// Bits 63 and 62 of an entry of the procfs pagemap: the page is present, or in swap.
const ENTRY_PRESENT: u64 = 1 << 63;
const ENTRY_SWAPPED: u64 = 1 << 62;

/// How many bytes of the procfs pagemap are read at once.
const ENTRIES: usize = 64 << 10;

/// Returns which pages are counted: those with all properties of `all`, and with any of `any` if
/// that names some. The zero page is never counted.
const fn with(all: u64, any: u64) -> Request {
    Request { all, none: ZERO_PAGE, any, protect: false }
}

/// Returns how many bytes of the page-aligned addresses `start..end` are `wanted`, or `None` if this
/// kernel has no such scan.
fn scan(pagemap: &File, start: u64, end: u64, wanted: Request) -> rustix::io::Result<Option<u64>> {
    let mut bytes = 0;
    let known =
        pagemap_scan::scan(pagemap, start..end, wanted, |run| bytes += run.end - run.start)?;
    Ok(known.then_some(bytes))
}

/// Returns whether this kernel has the scan, by scanning nothing but one page of our own.
pub(crate) fn scan_is_known() -> Result<bool, SysError> {
    let pagemap = pagemap_scan::open()?;
    let page = kernel::page_size().bytes();
    let here = (&raw const pagemap).addr() as u64 & !(page - 1);
    scan(&pagemap, here, here + page, with(PRESENT, 0))
        .map(|found| found.is_some())
        .map_err(|cause| SysError::Read { path: PAGEMAP.into(), cause: cause.into() })
}

/// Returns how many of the pages from `first` on, `pages` of them, an older kernel gives any of the
/// bits `wanted`.
fn count_entries(pagemap: &File, first: u64, pages: u64, wanted: u64) -> io::Result<u64> {
    let mut buffer = vec![0; ENTRIES];
    let mut present = 0;
    let mut at = first * 8;
    let end = (first + pages) * 8;
    while at < end {
        let len = usize::try_from(end - at).map_or(ENTRIES, |rest| rest.min(ENTRIES));
        let (entries, _) = buffer.as_chunks_mut::<8>();
        let part = entries[..len / 8].as_flattened_mut();
        pagemap.read_exact_at(part, at)?;
        let (entries, _) = part.as_chunks::<8>();
        present += entries
            .iter()
            .map(|entry| u64::from(u64::from_ne_bytes(*entry) & wanted != 0))
            .sum::<u64>();
        at += len as u64;
    }
    Ok(present)
}

/// Returns how many bytes of huge pages the text of an `smaps` has in mappings that meet `range`.
fn parse_smaps(text: impl BufRead, range: &Range<u64>) -> io::Result<u64> {
    const FIELDS: [&str; 5] =
        ["AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb"];
    let mut bytes: u64 = 0;
    // How much of the mapping that the lines are about lies in the range, and its huge bytes.
    let mut overlap: u64 = 0;
    let mut huge: u64 = 0;
    for line in text.lines() {
        let line = line?;
        if let Some(addresses) = parse_addresses(&line) {
            bytes += huge.min(overlap);
            huge = 0;
            overlap = addresses.end.min(range.end).saturating_sub(addresses.start.max(range.start));
        } else if overlap != 0 {
            huge += FIELDS.iter().filter_map(|name| kib_field(&line, name)).sum::<u64>();
        }
    }
    Ok(bytes + huge.min(overlap))
}

/// Returns the addresses of a line such as `7f00-7f10 rw-p 00000000 00:00 0 [heap]`.
fn parse_addresses(line: &str) -> Option<Range<u64>> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    Some(number(start)?..number(end)?)
}

impl Mapping {
    /// Returns how many bytes of the mapping are present in this process, in whole pages. The
    /// kernel's zero page, which a read of untouched memory sees, does not count.
    ///
    /// # Errors
    /// [`MappingError`] if `/proc` is not there or the kernel refuses.
    pub fn resident(&self) -> Result<ByteLen, MappingError> {
        self.resident_in(self.whole())
    }

    /// Returns how many bytes of a range, widened to whole pages, are present in this process.
    ///
    /// On a kernel before 6.7 a read of untouched memory counts, and a sparse terabyte takes
    /// seconds.
    ///
    /// # Errors
    /// [`MappingError`] if the range is not inside, `/proc` is not there or the kernel refuses.
    pub fn resident_in(&self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        self.count(&range, with(PRESENT, 0), ENTRY_PRESENT)
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
        let touched = self.count(&range, wanted, ENTRY_PRESENT | ENTRY_SWAPPED)?;
        Ok(touched.is_zero())
    }

    /// Returns how many bytes of a range are `wanted`, or on an older kernel have one of `entries`.
    fn count(
        &self,
        range: &Range<u64>,
        wanted: Request,
        entries: u64,
    ) -> Result<ByteLen, MappingError> {
        self.count_or(range, wanted, |pagemap, addresses| {
            let page = kernel::page_size().bytes();
            let pages = (addresses.end - addresses.start) / page;
            count_entries(pagemap, addresses.start / page, pages, entries)
                .map(|count| count * page)
                .map_err(|cause| MappingError::Scan { range: range.clone(), cause })
        })
    }

    /// Returns how many bytes of a range are `wanted`, or what `older` returns for its addresses on a kernel that
    /// cannot scan.
    fn count_or(
        &self,
        range: &Range<u64>,
        wanted: Request,
        older: impl FnOnce(&File, Range<u64>) -> Result<u64, MappingError>,
    ) -> Result<ByteLen, MappingError> {
        let part = self.widen(range)?;
        let pagemap = pagemap_scan::open()?;
        let base = self.addr().get();
        let addresses = (base + part.start) as u64..(base + part.end) as u64;
        let scanned = scan(&pagemap, addresses.start, addresses.end, wanted)
            .map_err(|cause| MappingError::Scan { range: range.clone(), cause: cause.into() })?;
        scanned.map_or_else(|| older(&pagemap, addresses), Ok).map(ByteLen::new)
    }

    /// Returns how many bytes of the mapping are mapped by huge pages, transparent or of a pool.
    ///
    /// On a kernel before 6.7, `smaps` answers for whole kernel mappings; where ours was merged with
    /// a neighbour, the answer is then an upper bound.
    ///
    /// # Errors
    /// [`MappingError`] if `/proc` is not there or the kernel refuses.
    pub fn huge_backed(&self) -> Result<ByteLen, MappingError> {
        self.huge_backed_in(self.whole())
    }

    /// Returns how many bytes of a range, widened to whole pages, are mapped by huge pages, as
    /// [`Mapping::huge_backed`] does. Of a huge page that begins or ends outside, the part inside counts.
    ///
    /// # Errors
    /// [`MappingError`] if the range is not inside, `/proc` is not there or the kernel refuses.
    pub fn huge_backed_in(&self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        let wanted = with(PRESENT | HUGE, 0);
        self.count_or(&range, wanted, |_, addresses| Ok(huge_backed_by_smaps(&addresses)?))
    }
}

/// Counts by `smaps`, for kernels that cannot scan. `range` is addresses.
fn huge_backed_by_smaps(range: &Range<u64>) -> Result<u64, SysError> {
    let read = || parse_smaps(BufReader::new(File::open(SMAPS)?), range);
    read().map_err(|cause| SysError::Read { path: SMAPS.into(), cause })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::options::{Anonymous, HugeAdvice};

    #[test]
    fn smaps_counts_huge_bytes_of_mappings_that_meet_the_range() {
        let text = "\
00400000-00600000 rw-p 00000000 00:00 0 \nSize:               2048 kB\nAnonHugePages:      2048 kB
7f0000000000-7f0000800000 rw-p 00000000 00:00 0 [anon]\nRss: 8192 kB\nAnonHugePages:      4096 kB\nShmemPmdMapped: 0 kB\nPrivate_Hugetlb: 0 kB\nVmFlags: rd wr
7f0000800000-7f0000a00000 rw-s 00000000 00:0f 12 /memfd:x (deleted)\nShared_Hugetlb:     2048 kB\n";
        for (range, bytes) in [
            (0x7f00_0000_0000..0x7f00_0080_0000, 4 << 20),
            (0x7f00_0000_0000..0x7f00_00a0_0000, 6 << 20),
            // A part of a mapping: at most as much as the part.
            (0x7f00_0000_0000..0x7f00_0020_0000, 2 << 20),
            (0x7f00_0080_0000..0x7f00_00a0_0000, 2 << 20),
            (0x1000..0x2000, 0),
            (0x40_0000..0x60_0000, 2 << 20),
        ] {
            assert_eq!(parse_smaps(text.as_bytes(), &range).unwrap(), bytes, "{range:x?}");
        }
    }

    #[test]
    fn a_line_of_smaps_is_addresses_or_a_field() {
        assert_eq!(parse_addresses("10-20 rw-p 0 0:0 0"), Some(0x10..0x20));
        for line in ["AnonHugePages:      2048 kB", "VmFlags: rd wr", "", "x-y rw-p"] {
            assert_eq!(parse_addresses(line), None, "{line}");
        }
    }

    #[test]
    fn every_way_to_count_gives_the_same_number() {
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
        let pagemap = pagemap_scan::open().unwrap();
        let first = mapping.addr().get() as u64 / page;
        assert_eq!(count_entries(&pagemap, first, 300, ENTRY_PRESENT).unwrap(), 150);
        assert_eq!(mapping.huge_backed().unwrap(), ByteLen::ZERO);
        let addresses = first * page..(first + 300) * page;
        assert_eq!(huge_backed_by_smaps(&addresses).unwrap(), 0);
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
        let (pagemap, first) = (pagemap_scan::open().unwrap(), mapping.addr().get() as u64 / page);
        let entries = ENTRY_PRESENT | ENTRY_SWAPPED;
        assert_eq!(count_entries(&pagemap, first + 5, 3, entries).unwrap(), 1);
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

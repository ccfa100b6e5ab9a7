//! The place of a mapping's pages in the memory of the machine: [`Mapping::physical`].
//!
//! The kernel moves pages while it compacts memory, and swaps them out. So an address of this kind is of use only
//! while the kernel has the page pinned ([`KernelPins`](crate::KernelPins)). It is none that a device behind an IOMMU
//! may use: the driver of the device maps it first.
//!
//! Cost: 8 bytes of `/proc/self/pagemap` for each base page.
//! Source: "Examining Process Page Tables" in the Linux administrator's guide.

use core::ops::Range;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::io::Errno;

use crate::host::kernel::page_size;
use crate::map::kernel_pins::KernelPinError;
use crate::map::mapping::Mapping;
use crate::map::pagemap_scan::PAGEMAP;

/// The number of the page frame, of an entry whose page is present.
const FRAME: u64 = (1 << 55) - 1;
const PRESENT: u64 = 1 << 63;
const ENTRY: usize = 8;
/// How many entries one read asks for.
const ENTRIES: usize = 8192;

impl Mapping {
    /// Returns where the pages of a range, widened to whole pages, lie in the memory of the machine now, in the
    /// order of the range; neighbours in both are one piece.
    ///
    /// # Errors
    /// [`KernelPinError::Hidden`] without `CAP_SYS_ADMIN`, [`KernelPinError::NotPresent`] if a page is not present, and
    /// others if the range is not inside or the file cannot be read.
    pub fn physical(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, KernelPinError> {
        let part = self.widen(&range)?;
        let shift = page_size().shift();
        let first = (self.addr().get() + part.start) as u64 >> shift; // an address has 64 bits
        let pages = part.len() >> shift;
        let unreadable = |cause: io::Error| KernelPinError::Unreadable {
            errno: cause.raw_os_error().unwrap_or_else(|| Errno::IO.raw_os_error()),
        };
        let pagemap = File::open(PAGEMAP).map_err(unreadable)?;
        let mut entries = vec![0; ENTRIES.min(pages) * ENTRY];
        let mut segments = Vec::new();
        for start in (0..pages).step_by(ENTRIES) {
            let entries = &mut entries[..ENTRIES.min(pages - start) * ENTRY];
            let at = (first + start as u64) * ENTRY as u64;
            pagemap.read_exact_at(entries, at).map_err(unreadable)?;
            for (page, entry) in (start..).zip(entries.as_chunks::<ENTRY>().0) {
                let offset = part.start as u64 + ((page as u64) << shift);
                let frame = frame(u64::from_ne_bytes(*entry), offset)?;
                push(&mut segments, frame << shift, 1 << shift);
            }
        }
        Ok(segments)
    }
}

/// Returns the number of the page frame in an entry of the procfs pagemap.
fn frame(entry: u64, offset: u64) -> Result<u64, KernelPinError> {
    match (entry & PRESENT != 0, entry & FRAME) {
        (false, _) => Err(KernelPinError::NotPresent { offset }),
        // No process has the first frame of the machine.
        (true, 0) => Err(KernelPinError::Hidden),
        (true, frame) => Ok(frame),
    }
}

/// Adds a page to the segments, of which the last may end where it starts.
fn push(segments: &mut Vec<Range<u64>>, address: u64, len_bytes: u64) {
    match segments.last_mut() {
        Some(last) if last.end == address => last.end += len_bytes,
        _ => segments.push(address..address + len_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_has_a_frame_or_the_reason_why_there_is_none() {
        assert_eq!(frame(PRESENT | 1 << 56 | 0x1234, 0), Ok(0x1234));
        assert_eq!(frame(PRESENT | FRAME, 0), Ok(FRAME));
        assert_eq!(frame(PRESENT | 1 << 61, 0), Err(KernelPinError::Hidden));
        // It is swapped out, and the number is its place in the swap file.
        let swapped = frame(1 << 62 | 77, 8192);
        assert_eq!(swapped, Err(KernelPinError::NotPresent { offset: 8192 }));
    }

    #[test]
    fn pages_that_follow_each_other_are_one_segment() {
        let mut segments = Vec::new();
        for address in [0x1000, 0x2000, 0x3000, 0x9000, 0x2000, 0x3000] {
            push(&mut segments, address, 0x1000);
        }
        assert_eq!(segments, [0x1000..0x4000, 0x9000..0xa000, 0x2000..0x4000]);
    }
}

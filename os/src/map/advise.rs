//! Huge pages for mapped memory, giving pages back, and bringing writes to the file of a
//! mapping: [`Mapping::advise_huge`], [`Mapping::collapse`], [`Mapping::discard`],
//! [`Mapping::punch`], [`Mapping::sync`].
//!
//! Unsafe: calls of madvise(2), one of which drops pages, and of msync(2).
//! Source: madvise(2), fallocate(2), msync(2).

use core::ops::Range;
use std::io;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mm::{Advice, MsyncFlags};

use crate::host::hugepages;
use crate::host::kernel::{self, MADV_COLLAPSE};
use crate::host::root::SystemRoot;
use crate::map::bytes::AccessError;
use crate::map::mapping::{Mapping, MappingError};
use crate::map::options::{Access, Sharing};

impl Mapping {
    /// Asks for transparent huge pages, wherever they fit (`MADV_HUGEPAGE`). Whether that has
    /// an effect is a setting of the host, which [`hugepages::thp`] returns; on memory of a hugetlb pool it
    /// has none.
    ///
    /// # Errors
    /// [`MappingError::Advice`] if the kernel has no transparent huge pages.
    pub fn advise_huge(&self) -> Result<(), MappingError> {
        self.advise(0..self.mapped_len(), Advice::LinuxHugepage, "MADV_HUGEPAGE")
    }

    /// Asks for no transparent huge pages (`MADV_NOHUGEPAGE`). Those that are there stay.
    ///
    /// # Errors
    /// [`MappingError::Advice`] if the kernel has no transparent huge pages.
    pub fn advise_no_huge(&self) -> Result<(), MappingError> {
        self.advise(0..self.mapped_len(), Advice::LinuxNoHugepage, "MADV_NOHUGEPAGE")
    }

    /// Keeps the mapping from processes that this one forks off afterwards (`MADV_DONTFORK`): a thread that
    /// touches it there gets `SIGSEGV`. Without that, a missing page of memory that is registered with a
    /// userfaultfd would be zero there.
    ///
    /// # Errors
    /// [`MappingError::Advice`] if the memory is a device's.
    pub fn keep_from_children(&self) -> Result<(), MappingError> {
        self.advise(0..self.mapped_len(), Advice::LinuxDontFork, "MADV_DONTFORK")
    }

    /// Leaves the mapping out of core dumps (`MADV_DONTDUMP`). With a crash, the kernel looks at every page of
    /// the others, whether it is present or not: half a minute for 64 GiB.
    ///
    /// # Errors
    /// [`MappingError::Advice`] if the kernel refuses.
    pub fn leave_out_of_dumps(&self) -> Result<(), MappingError> {
        self.advise(0..self.mapped_len(), Advice::LinuxDontDump, "MADV_DONTDUMP")
    }

    /// Has core dumps include a range, widened to whole pages, of a mapping that is left out of them (`MADV_DODUMP`).
    /// The kernel has a mapping of its own for each part that differs from its neighbours.
    ///
    /// # Errors
    /// [`MappingError`] if the range is not inside, the memory is a device's, or the process has as many mappings as it may.
    pub fn include_in_dumps(&self, range: Range<u64>) -> Result<(), MappingError> {
        self.advise(self.widen(&range)?, Advice::LinuxDoDump, "MADV_DODUMP")
    }

    /// Makes huge pages of a range (`MADV_COLLAPSE`), whatever the host is set to. No byte changes;
    /// pages that were not present become so. Returns `None` if every huge page that fits in the
    /// range is one. Otherwise some are not, and it may work later, and the result is the kernel's error: there was no
    /// free huge page, or pages were in use. [`Mapping::huge_backed`]
    /// returns the number of bytes that are.
    ///
    /// # Errors
    /// [`MappingError`] if the range is not inside, or the kernel cannot do that with this memory.
    pub fn collapse(&self, range: Range<u64>) -> Result<Option<io::Error>, MappingError> {
        let part = self.widen(&range)?;
        let refused =
            |cause| MappingError::Advice { advice: "MADV_COLLAPSE", range: range.clone(), cause };
        let Some(thp) = hugepages::thp(&SystemRoot::host())? else {
            return Err(refused(Errno::NOTSUP.into()));
        };
        if kernel::thp_is_switched_off() {
            let text = "huge pages are switched off for this process (PR_SET_THP_DISABLE)";
            return Err(refused(io::Error::new(io::ErrorKind::Unsupported, text)));
        }
        let huge = usize::try_from(thp.pmd_size.get()).unwrap_or(usize::MAX);
        let Some(inside) = whole_huge(self.addr().get(), &part, huge) else {
            return Ok(None);
        };
        // The kernel refuses a huge page of which nothing was ever present (EINVAL, as for memory
        // that cannot be huge at all), so the first small page of each is made present.
        let page = self.page_size().bytes();
        if page != kernel::page_size().bytes() {
            return Err(refused(Errno::INVAL.into()));
        }
        for first in inside.clone().step_by(huge) {
            let first = first as u64;
            self.populate(first..first + page)?;
        }
        let start = self.at(inside.start).as_ptr();
        // SAFETY: madvise(2) acts on `inside.len()` bytes from `start`, all of this mapping: they are
        // inside of `part`, which `widen` checked. This advice moves bytes and changes none.
        let answer = unsafe { libc::madvise(start.cast(), inside.len(), MADV_COLLAPSE) };
        collapsed(answer == 0).map_err(refused)
    }

    /// Gives the pages of a range back to the kernel (`MADV_DONTNEED`).
    ///
    /// Private anonymous bytes read as zero afterwards. Pages of a file or memory file stay in it
    /// and only leave this mapping; private changes to them are lost. So do pages that are locked (mlock(2)).
    /// The range must start and end at pages, or at the end of the mapping, because giving back
    /// half a page is not possible.
    ///
    /// # Errors
    /// [`AccessError::CutsPage`] if it does not; then nothing is given back.
    /// [`MappingError::GiveBack`] if the kernel refuses.
    pub fn discard(&self, range: Range<u64>) -> Result<(), MappingError> {
        let part = self.whole_pages(&range)?;
        self.give_back(part)
    }

    fn give_back(&self, part: Range<usize>) -> Result<(), MappingError> {
        let answer = match self.ask(&part, Advice::LinuxDontNeed) {
            // Some of it is locked, perhaps because the process locks all that it maps.
            Err(Errno::INVAL) => self.ask(&part, Advice::LinuxDontneedLocked),
            answer => answer,
        };
        answer.map_err(|cause| MappingError::GiveBack {
            range: part.start as u64..part.end as u64,
            cause: cause.into(),
        })
    }

    /// Gives the pages of a range back to the kernel, in such a way that its bytes read as zero afterwards,
    /// in every mapping: private anonymous memory as [`Mapping::discard`] does, and shared memory by a hole in the file.
    /// The range must start and end at pages, as there. Other mappings of the same bytes of the file see zeroes at once.
    ///
    /// # Errors
    /// [`AccessError::CutsPage`], [`MappingError::NotPunchable`] for memory that has other bytes behind it
    /// (a private mapping of a file), that the caller owns (adopted) or may not write, and
    /// [`MappingError::Punch`] if the file cannot have holes. Nothing is given back then.
    pub fn punch(&self, range: Range<u64>) -> Result<(), MappingError> {
        let part = self.whole_pages(&range)?;
        let (start, end) = (range.start, range.end);
        let refused = |why| MappingError::NotPunchable { range: start..end, why };
        if self.is_private() {
            return self.give_back(part);
        }
        let (Some(fd), Some(offset), Some(sharing)) =
            (self.fd(), self.file_offset(), self.sharing())
        else {
            return Err(refused("it was adopted, and only the caller knows the memory behind it"));
        };
        if sharing == Sharing::Private {
            return Err(refused("the bytes of the file would show in a private mapping"));
        }
        if self.access() == Access::ReadOnly {
            return Err(refused("it is read-only"));
        }
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Both fit: the range is mapped from there on.
        rustix::fs::fallocate(fd, hole, offset + part.start as u64, part.len() as u64)
            .map_err(|cause| MappingError::Punch { range: start..end, cause: cause.into() })
    }

    /// Writes the pages of a range to the storage of the file behind the mapping, and waits for
    /// that. It lasts as long as the file system does: a memory file has no storage.
    ///
    /// Costs one msync(2), and the time of the device.
    ///
    /// # Errors
    /// [`MappingError::Sync`] if the device failed; [`MappingError::Access`] if the range is not
    /// inside.
    pub fn sync(&self, range: Range<u64>) -> Result<(), MappingError> {
        let part = self.widen(&range)?;
        let start = self.at(part.start).as_ptr();
        // SAFETY: msync(2) reads `part.len()` bytes from `start`, all of this mapping, and changes
        // none.
        unsafe { rustix::mm::msync(start.cast(), part.len(), MsyncFlags::SYNC) }
            .map_err(|cause| MappingError::Sync { range, cause: cause.into() })
    }

    /// Returns a range as indices if it is whole pages, or ends with the mapping.
    fn whole_pages(&self, range: &Range<u64>) -> Result<Range<usize>, AccessError> {
        let part = self.widen(range)?;
        let ends_mapping = range.end == self.len().get();
        if part.start as u64 != range.start || (part.end as u64 != range.end && !ends_mapping) {
            return Err(AccessError::CutsPage {
                start: range.start,
                end: range.end,
                page: self.page_size(),
            });
        }
        Ok(part)
    }

    /// `part` is inside the mapped pages; `advice` is one of those above.
    fn advise(
        &self,
        part: Range<usize>,
        advice: Advice,
        name: &'static str,
    ) -> Result<(), MappingError> {
        self.ask(&part, advice).map_err(|cause| MappingError::Advice {
            advice: name,
            range: part.start as u64..part.end as u64,
            cause: cause.into(),
        })
    }

    /// Gives an advice for a part that is inside the mapped pages. `advice` is one of those in this
    /// file: one that replaces bytes is given only as `discard` and `punch` do.
    pub(crate) fn ask(&self, part: &Range<usize>, advice: Advice) -> Result<(), Errno> {
        let start = self.at(part.start).as_ptr();
        // SAFETY: madvise(2) acts on `part.len()` bytes from `start`, all of this mapping. Three advices
        // set a policy. The other two replace bytes: none of them is borrowed, because a type that lends
        // slices of a mapping owns it and calls this from `&mut self`; atomic readers see the old word or
        // the new.
        unsafe { rustix::mm::madvise(start.cast(), part.len(), advice) }
    }
}

/// Returns the reason why a call with `MADV_COLLAPSE` did not do all, whose error is the last one of this
/// thread if it failed.
pub(crate) fn collapsed(is_done: bool) -> io::Result<Option<io::Error>> {
    if is_done {
        return Ok(None);
    }
    let cause = io::Error::last_os_error();
    match Errno::from_io_error(&cause) {
        // No free huge page, or pages in use: it may work later.
        Some(Errno::AGAIN | Errno::BUSY | Errno::NOMEM | Errno::INTR) => Ok(Some(cause)),
        _ => Err(cause),
    }
}

/// Returns the largest part of `part` that is whole huge pages by address, if any.
fn whole_huge(base: usize, part: &Range<usize>, huge: usize) -> Option<Range<usize>> {
    let start = (base + part.start).checked_next_multiple_of(huge)?;
    let end = (base + part.end) / huge * huge;
    (start < end).then(|| start - base..end - base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_huge_pages_inside_the_range_are_collapsed() {
        for (base, part, inside) in [
            (0x20_0000, 0..0x20_0000, Some(0..0x20_0000)),
            (0x20_0000, 0..0x1f_f000, None),
            (0x20_1000, 0..0x20_0000, None),
            (0x20_1000, 0..0x3f_f000, Some(0x1f_f000..0x3f_f000)),
            (0x20_0000, 0x1000..0x60_0000, Some(0x20_0000..0x60_0000)),
        ] {
            assert_eq!(whole_huge(base, &part, 0x20_0000), inside, "{base:#x} {part:?}");
        }
        assert_eq!(whole_huge(4096, &(0..4096), usize::MAX), None);
    }
}

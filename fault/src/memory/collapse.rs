//! Huge pages of 2 MiB, made of small ones that are filled wholly: [`LazyMapping::collapse`](crate::LazyMapping::collapse)
//! for memory of this process, and [`Blocks`] for memory of another one, of which a process with the right to makes
//! them.
//!
//! A page that is missing there has to raise an event when it is touched, so the kernel makes no huge page over
//! one. Zeroes that take no memory are given some first. No byte changes, and threads may use the memory meanwhile:
//! a thread that touches those 2 MiB waits for a moment.
//!
//! | memory | |
//! |---|---|
//! | anonymous | made huge |
//! | of a pool | huge from the start |
//! | a memory file | not: its bytes would have to start at a multiple of a huge page, in the file and in memory alike, which mappings of it do not; one that is made of huge pages has them |
//! | whose writes are tracked | not: a huge page is protected as a whole |
//!
//! In memory of another process a block counts as filled when each of its pages is present here, and it is returned
//! once. Later events of the block change no byte either. A page that was given back meanwhile is an empty entry of the
//! page table, and where missing pages raise events the kernel makes no huge page over one, nor over an entry that is
//! its page of zeroes. It looks at the entries again under the locks that keep others from changing them. A page that is
//! given back after that splits the huge page. Zero pages are copied there (`adopted.rs`), since the page of zeroes would
//! keep its block in small pages. A page that was given back is never present again by its word, so its block is not
//! returned.
//!
//! Cost: one to four milliseconds for each huge page, for which the kernel holds the layout of the process; of another
//! process 32 bytes a block, and a look at one page of each block that is not filled, or at all pages before the
//! first that is missing.
//! Source: madvise(2) `MADV_COLLAPSE`, Linux 6.1; `Documentation/admin-guide/mm/userfaultfd.rst`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use uzone_os::signals::Held;
use uzone_os::{Mapping, SystemRoot, Vaddr, hugepages, lock};
use uzone_pages::{Content, FaultAround};

use crate::engine::core::Core;
use crate::error::LazyError;
use crate::memory::remote_region::RemoteRegion;
use crate::stats::Counters;

/// Why a part of a range is not a huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Uncollapsed {
    /// Not all of it is filled.
    NotFilled,
    /// Writes to it are tracked.
    WritesTracked,
    /// It is of a memory file.
    MemoryFile,
    /// There was no free huge page, or pages are pinned or in use. It may work later.
    NotNow,
    /// The kernel does not do that with this memory.
    Refused,
}

/// The outcome of collapsing the whole huge pages in a range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Collapsed {
    /// How many are huge now.
    pub huge_pages: u64,
    /// How many of them were made so.
    pub made: u64,
    /// How many are not.
    pub skipped: u64,
    /// Why those are not, and how many for each reason.
    pub reasons: BTreeMap<Uncollapsed, u64>,
}

/// Returns whether all pages of a range are present.
fn is_filled(core: &Core, pages: Range<u64>) -> bool {
    let contents = core.contents();
    pages.into_iter().all(|page| contents.get(page) == Content::Present)
}

/// Makes huge pages of the parts of a range of pages that are filled wholly.
pub(crate) fn collapse(
    core: &Core,
    mapping: &Mapping,
    pages: Range<u64>,
) -> Result<Collapsed, LazyError> {
    let mut done = Collapsed::default();
    let shift = core.page_size().shift();
    if mapping.page_size() != uzone_os::probe::page_size() {
        done.huge_pages = pages.filter(|&page| is_filled(core, page..page + 1)).count() as u64;
        return Ok(done);
    }
    // Without transparent huge pages nothing fits.
    let thp = hugepages::thp(&SystemRoot::host()).map_err(uzone_os::MappingError::from)?;
    let Some(huge) = thp.map(|thp| thp.pmd_size.get()) else { return Ok(done) };
    let (start, bytes) = (mapping.addr().get() as u64, core.bytes(pages));
    for at in whole(&(start + bytes.start..start + bytes.end), huge) {
        let block = at - start..at - start + huge;
        let reason = if !is_filled(core, block.start >> shift..block.end >> shift) {
            Uncollapsed::NotFilled
        } else if mapping.huge_backed_in(block.clone())?.get() == huge {
            done.huge_pages += 1;
            continue;
        } else if core.pages.policy.is_tracked {
            Uncollapsed::WritesTracked
        } else if !mapping.is_private() {
            Uncollapsed::MemoryFile
        } else {
            match make(core, mapping, block) {
                Ok(()) => {
                    done.huge_pages += 1;
                    done.made += 1;
                    continue;
                }
                Err(reason) => reason,
            }
        };
        done.skipped += 1;
        *done.reasons.entry(reason).or_default() += 1;
    }
    Counters::add(&core.counters().collapsed, done.made);
    Ok(done)
}

/// Makes one huge page.
fn make(core: &Core, mapping: &Mapping, bytes: Range<u64>) -> Result<(), Uncollapsed> {
    // Where missing pages raise events, the kernel takes the zero page for a missing one.
    if mapping.populate(bytes.clone()).is_err() {
        return Err(Uncollapsed::NotNow);
    }
    let shift = core.page_size().shift();
    let Some(_closed) = Closed::new(core, bytes.start >> shift..bytes.end >> shift) else {
        return Err(Uncollapsed::NotNow);
    };
    match mapping.collapse(bytes) {
        Ok(None) => Ok(()),
        Ok(Some(_)) => Err(Uncollapsed::NotNow),
        Err(_) => Err(Uncollapsed::Refused),
    }
}

/// Pages that no thread can pin until this is dropped: they are moved meanwhile. Their bytes stay where a
/// touch finds them.
struct Closed<'a> {
    core: &'a Core,
    pages: Range<u64>,
    // A signal handler that touches one of the pages would wait for this thread.
    _held: Held,
}

impl<'a> Closed<'a> {
    /// Returns `None` if one of the pages is pinned, or not there any more.
    fn new(core: &'a Core, pages: Range<u64>) -> Option<Self> {
        let _held = Held::hold();
        let mut closed = Self { core, pages: pages.start..pages.start, _held };
        for page in pages {
            if !core.contents().advance(page, Content::Present, Content::Removed) {
                return None;
            }
            closed.pages.end = page + 1;
        }
        Some(closed)
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let contents = self.core.contents();
        for page in self.pages.clone() {
            // A page that went bad meanwhile stays bad.
            if contents.advance(page, Content::Removed, Content::Filling) {
                let _ = contents.advance(page, Content::Filling, Content::Present);
            }
        }
        // A thread that faulted meanwhile was left waiting.
        if !self.pages.is_empty() {
            self.core.kernel().wake(self.core.bytes(self.pages.clone()));
        }
    }
}

/// A block of another process's memory that was not returned yet.
struct Block {
    address: Vaddr,
    /// Its pages, of the pages of that core.
    pages: Range<u64>,
    core: Arc<Core>,
}

/// The blocks of another process's memory that were not returned yet.
#[derive(Default)]
pub(crate) struct Blocks {
    // Held for a look at the pages, by the one thread that asks.
    left: Mutex<Vec<Block>>,
}

impl Blocks {
    /// Adds the whole blocks of regions that have the pages of `core`.
    pub(crate) fn add(&mut self, regions: &[RemoteRegion], core: &Arc<Core>) {
        let (len, page) = (FaultAround::MAX.len().get(), core.page_size());
        if page.bytes() >= len {
            return;
        }
        let left = self.left.get_mut().unwrap_or_else(PoisonError::into_inner);
        for region in regions {
            for at in whole(&region.addresses(), len) {
                let first = (region.offset + (at - region.start.get())) >> page.shift();
                let pages = first..first + (len >> page.shift());
                left.push(Block { address: Vaddr::new(at), pages, core: core.clone() });
            }
        }
    }

    /// Returns the addresses of blocks that are filled, and forgets these.
    pub(crate) fn take(&self, most: usize) -> Vec<Vaddr> {
        let mut left = lock(&self.left);
        let is_filled = |block: &mut Block| is_filled(&block.core, block.pages.clone());
        let taken = left.extract_if(.., is_filled).take(most);
        taken.map(|block| block.address).collect()
    }

    /// Returns the number of blocks that are left.
    pub(crate) fn left(&self) -> usize {
        lock(&self.left).len()
    }
}

/// Returns where the whole blocks of `len` bytes start that are in some addresses.
fn whole(addresses: &Range<u64>, len: u64) -> impl Iterator<Item = u64> {
    let first = addresses.start.checked_next_multiple_of(len).unwrap_or(u64::MAX);
    let count = addresses.end.saturating_sub(first) / len;
    (0..count).map(move |block| first + block * len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_blocks_by_address_count() {
        for (addresses, starts) in [
            (0..4, &[0][..]),
            (0..3, &[]),
            (1..8, &[4]),
            (1..7, &[]),
            (4..12, &[4, 8]),
            (3..13, &[4, 8]),
            (u64::MAX - 2..u64::MAX, &[]),
        ] {
            assert!(whole(&addresses, 4).eq(starts.iter().copied()), "{addresses:?}");
        }
    }
}

//! The blocks of another process's memory that a huge page can be made of: [`Blocks`], of 2 MiB each.
//!
//! A block counts as filled when each of its pages is present here, and it is returned once. What becomes of it
//! afterwards does not matter for the bytes. Collapsing moves pages and changes none. A page that was given back
//! meanwhile is an empty entry of the page table, and where missing pages raise events the kernel makes no
//! huge page over one, nor over an entry that is its page of zeroes: it fills them only in memory that no
//! userfaultfd has, where a missing page reads as zero anyway. It looks at the entries again under the locks that
//! keep others from changing them. A page that is given back after that splits the huge page.
//!
//! Zero pages are copied here (`adopted.rs`), since the page of zeroes would keep its block in small pages. A page
//! that was given back is never present again by its word, so its block is not returned: it may be filled with zeroes,
//! and is left as it is.
//!
//! Cost: 32 bytes a block, and a look at one page of each block that is not filled, or at all pages before the first
//! that is missing.
//! Source: madvise(2) `MADV_COLLAPSE`; `Documentation/admin-guide/mm/userfaultfd.rst`.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use uzone_os::{Vaddr, lock};
use uzone_pages::{Content, FaultAround};

use crate::engine::core::Core;
use crate::memory::remote_region::RemoteRegion;

/// A block that was not returned yet.
struct Block {
    address: Vaddr,
    /// Its pages, of the pages of that core.
    pages: Range<u64>,
    core: Arc<Core>,
}

impl Block {
    fn is_filled(&mut self) -> bool {
        let contents = self.core.contents();
        self.pages.clone().all(|page| contents.get(page) == Content::Present)
    }
}

/// The blocks of some memory that were not returned yet.
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
        let taken = left.extract_if(.., Block::is_filled).take(most);
        taken.map(|block| block.address).collect()
    }

    /// Returns how many are left.
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

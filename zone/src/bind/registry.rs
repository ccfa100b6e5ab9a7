//! The state that the pagemaps of a zone share: claims of frame numbers, the index of regions, kept memory, raw
//! guards, and the kernel's pins.

use std::sync::{Arc, Mutex};

use uzone_os::{KernelPins, lock};
use uzone_pages::{AddrError, ByteLen, Order, PageCount, PageSize, Pfn, PfnRange};

use crate::bind::memmap_cache::MemmapCache;
use crate::error::BindError;
use crate::pin::pin_target::{Place, Segment};
use crate::pin::region_index::RegionIndex;
use crate::pin::token::Tokens;
use crate::region::FileExtent;

/// The first frame number that is given to a region that asks for none: the one at 4 GiB of 4 KiB
/// pages, so that no pfn is mistaken for a small index.
const FIRST_PFN: Pfn = Pfn::new(1 << 20);

/// Regions start at a multiple of this many pages at least, so that sections do not straddle them.
const SECTION_ORDER: Order = Order::new(15);

#[derive(Debug)]
pub(crate) struct Shared {
    claims: Mutex<Claims>,
    pub(crate) memmap_cache: MemmapCache,
    pub(crate) directory: RegionIndex,
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) kernel_pins: KernelPins,
}

#[derive(Debug, Default)]
struct Claims {
    next_id: u64,
    /// In ascending order of their ranges, which do not overlap.
    list: Vec<ClaimEntry>,
}

#[derive(Debug)]
struct ClaimEntry {
    id: u64,
    range: PfnRange,
    extent: Option<FileExtent>,
}

/// A range of frame numbers that belongs to one region until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    shared: Arc<Shared>,
    id: u64,
    range: PfnRange,
    is_ended: bool,
}

impl Claim {
    pub(crate) fn range(&self) -> PfnRange {
        self.range
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Lets others find the pages of this claim, which lie at `segment`.
    pub(crate) fn publish(&self, segment: Segment, page: PageSize, place: Arc<Place>) {
        self.shared.directory.insert(self.id, segment, self.range, page, place);
    }

    /// Gives the frame numbers back.
    pub(crate) fn end(&mut self) {
        if !std::mem::replace(&mut self.is_ended, true) {
            self.shared.directory.remove(self.id);
            lock(&self.shared.claims).list.retain(|entry| entry.id != self.id);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    /// Takes up to how much descriptor memory is kept.
    pub(crate) fn new(limit: ByteLen) -> Self {
        Self {
            claims: Mutex::default(),
            memmap_cache: MemmapCache::new(limit),
            directory: RegionIndex::default(),
            tokens: Arc::default(),
            kernel_pins: KernelPins::default(),
        }
    }

    /// Returns the ranges that are claimed, in ascending order.
    pub(crate) fn claimed(&self) -> Vec<PfnRange> {
        lock(&self.claims).list.iter().map(|entry| entry.range).collect()
    }

    /// Claims `pages` frame numbers that start at `base`, or at the first free multiple of `order`.
    pub(crate) fn claim(
        self: &Arc<Self>,
        pages: PageCount,
        order: Order,
        base: Option<Pfn>,
        extent: Option<FileExtent>,
    ) -> Result<Claim, BindError> {
        let mut claims = lock(&self.claims);
        let same_bytes = claims.list.iter().find(|entry| {
            extent.is_some_and(|ours| entry.extent.is_some_and(|theirs| ours.overlaps(&theirs)))
        });
        if let Some(entry) = same_bytes {
            return Err(BindError::SameBytes { bound: entry.range });
        }
        let range = match base {
            Some(base) => PfnRange::try_new(base, pages)?,
            None => claims.first_free(pages, order.max(SECTION_ORDER))?,
        };
        if let Some(entry) = claims.list.iter().find(|entry| entry.range.overlaps(range)) {
            return Err(BindError::Overlaps { range, bound: entry.range });
        }
        let id = claims.next_id;
        claims.next_id += 1;
        let at = claims.list.partition_point(|entry| entry.range.start() < range.start());
        claims.list.insert(at, ClaimEntry { id, range, extent });
        Ok(Claim { shared: self.clone(), id, range, is_ended: false })
    }
}

impl Claims {
    fn first_free(&self, pages: PageCount, order: Order) -> Result<PfnRange, AddrError> {
        let mut start = FIRST_PFN.align_up(order)?;
        for entry in &self.list {
            let candidate = PfnRange::try_new(start, pages)?;
            if candidate.end() <= entry.range.start() {
                return Ok(candidate);
            }
            start = start.max(entry.range.end().align_up(order)?);
        }
        PfnRange::try_new(start, pages)
    }
}

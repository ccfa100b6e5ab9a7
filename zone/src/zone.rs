//! The regions that belong together: [`Zone`].
//!
//! A zone gives every bound region its own range of page frame numbers, refuses to describe the
//! same bytes twice, and keeps descriptor memory from an unbind to the next bind. It is cheap to
//! clone and shared by the pagemaps that were bound in it.
//!
//! Locks: the list of claims, the list of kept memory, the directory's newest table and each list of
//! raw guards have one; none is held while another is taken, nor over a system call.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uzone_os::{SystemRoot, memory};
use uzone_pages::{AddrError, ByteLen, Order, PageCount, PageSize, Payload, Pfn, PfnRange};

use crate::bind::{self, BindError, BindFailure};
use crate::hold::{Place, Segment};
use crate::keep::Keep;
use crate::options::BindOptions;
use crate::pagemap::Pagemap;
use crate::region::{FileExtent, Region};
use crate::region_index::RegionIndex;
use crate::token::Tokens;

/// The first frame number that is given to a region that asks for none: the one at 4 GiB of 4 KiB
/// pages, so that no pfn is mistaken for a small index.
const FIRST_PFN: Pfn = Pfn::new(1 << 20);

/// Regions start at a multiple of this many pages at least, so that sections do not straddle them.
const SECTION_ORDER: Order = Order::new(15);

/// Of the memory that this process may have, the part that a zone keeps at most unless set
/// otherwise.
const KEEP_SHARE: u64 = 8;

/// A set of bound regions.
#[derive(Clone, Debug)]
pub struct Zone {
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    claims: Mutex<Claims>,
    pub(crate) keep: Keep,
    pub(crate) directory: RegionIndex,
    pub(crate) tokens: Tokens,
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
}

impl Claim {
    pub(crate) fn range(&self) -> PfnRange {
        self.range
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Claim {
    /// Lets others find the pages of this claim, which lie at `segment`.
    pub(crate) fn publish(&self, segment: Segment, page: PageSize, place: Arc<Place>) {
        self.shared.directory.insert(self.id, segment, self.range, page, place);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.shared.directory.remove(self.id);
        self.shared.lock().list.retain(|entry| entry.id != self.id);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Claims> {
        // A panic elsewhere cannot leave the list half changed: each change is one call.
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims `pages` frame numbers that start at `base`, or at the first free multiple of `order`.
    pub(crate) fn claim(
        self: &Arc<Self>,
        pages: PageCount,
        order: Order,
        base: Option<Pfn>,
        extent: Option<FileExtent>,
    ) -> Result<Claim, BindError> {
        let mut claims = self.lock();
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
        Ok(Claim { shared: self.clone(), id, range })
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

impl Default for Zone {
    fn default() -> Self {
        Self::new()
    }
}

impl Zone {
    /// Makes an empty zone that keeps descriptor memory up to an eighth of what this process may
    /// have now.
    #[must_use]
    pub fn new() -> Self {
        // Where the kernel does not say, nothing is kept: slower, and never too much.
        let available = memory::available(&SystemRoot::host())
            .map_or(ByteLen::ZERO, |available| available.bytes);
        Self::with_keep_limit(ByteLen::new(available.get() / KEEP_SHARE))
    }

    /// Makes an empty zone that keeps descriptor memory up to `limit`.
    #[must_use]
    pub fn with_keep_limit(limit: ByteLen) -> Self {
        Self {
            shared: Arc::new(Shared {
                claims: Mutex::default(),
                keep: Keep::new(limit),
                directory: RegionIndex::default(),
                tokens: Tokens::default(),
            }),
        }
    }

    /// Describes every page of `region`, at once.
    ///
    /// On touch it costs a few microseconds whatever the size; eager, it writes every descriptor
    /// at the rate at which this machine streams. A region whose bytes, or whose frame numbers,
    /// are described already is refused.
    ///
    /// # Errors
    /// [`BindFailure`] gives the region back with the reason; nothing else is left of the attempt.
    ///
    /// # Panics
    /// If a callback or the payload's `init` does. Then the region is unmapped and the frame numbers
    /// are free again.
    pub fn bind<P: Payload>(
        &self,
        region: Region,
        options: BindOptions<P>,
    ) -> Result<Pagemap<P>, BindFailure> {
        bind::bind(&self.shared, region, options)
    }

    /// Returns how much descriptor memory is kept for the next bind.
    #[must_use]
    pub fn kept(&self) -> ByteLen {
        self.shared.keep.kept()
    }

    /// Gives kept descriptor memory back to the kernel. Returns how much.
    #[expect(clippy::must_use_candidate, reason = "it is called for its effect")]
    pub fn trim(&self) -> ByteLen {
        self.trim_to(ByteLen::ZERO)
    }

    /// Gives kept descriptor memory back to the kernel until at most `limit` is left. Returns how
    /// much went.
    #[expect(clippy::must_use_candidate, reason = "it is called for its effect")]
    pub fn trim_to(&self, limit: ByteLen) -> ByteLen {
        self.shared.keep.trim(limit)
    }

    /// Returns the frame numbers of the regions that are bound now, in ascending order.
    #[must_use]
    pub fn bound(&self) -> Vec<PfnRange> {
        self.shared.lock().list.iter().map(|entry| entry.range).collect()
    }
}

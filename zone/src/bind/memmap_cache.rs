//! The memory that descriptors lie in: where it comes from, and the part of it that is kept.
//!
//! Memory fresh from the kernel is cleared page by page before it is shown, and in a virtual
//! machine the host may first have to find it: a first bind pays many times the cost of writing
//! the descriptors. So a zone keeps the memory of an unbound region for the next bind, up to a
//! limit, and never gives it to the kernel in between. Fresh memory is taken from a hugetlb pool
//! that has room, else as transparent huge pages, else as base pages; which one it was is part of
//! the report.
//!
//! Descriptors that are initialised on touch are not kept: their memory has to read as zero, and
//! the kernel's has that property for nothing.

use std::fmt;
use std::sync::Mutex;

use uzone_os::hugepages;
use uzone_os::{Anonymous, Exclusive, HugeAdvice, MapError, SystemRoot, lock, mempolicy, numa};
use uzone_pages::{ByteLen, PageSize};

/// The pages of the descriptors' memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum MemmapPages {
    /// Pages of a hugetlb pool.
    Hugetlb(PageSize),
    /// Transparent huge pages; base pages in between where the kernel had no huge one.
    Transparent,
    /// The first pages of the region itself, whatever is behind them.
    Region,
    /// Base pages: the host made no transparent huge page, or huge ones would waste memory because
    /// only few descriptors will be touched.
    Base,
}

impl fmt::Display for MemmapPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hugetlb(size) => write!(f, "hugetlb pages of {size}"),
            Self::Transparent => f.write_str("transparent huge pages"),
            Self::Region => f.write_str("pages of the region"),
            Self::Base => f.write_str("base pages"),
        }
    }
}

/// Memory for the descriptors of one region.
#[derive(Debug)]
pub(crate) struct MemmapMemory {
    pub(crate) memory: Exclusive,
    pub(crate) pages: MemmapPages,
    /// Whether it is of an earlier bind of the same zone, present and with old descriptors in it.
    pub(crate) is_kept: bool,
    /// The NUMA node that its pages were asked of, or lie on once it is kept.
    pub(crate) node: Option<u32>,
    /// Memory that was mapped together with it, for the blocks; such memory is fresh and not kept.
    pub(crate) behind: Option<Exclusive>,
}

impl MemmapMemory {
    fn fresh(memory: Exclusive, pages: MemmapPages) -> Self {
        Self { memory, pages, is_kept: false, node: None, behind: None }
    }

    /// Asks that pages of fresh memory come from a node. Where that is not possible, they come from
    /// wherever the threads run that write them.
    pub(crate) fn prefer_node(&mut self, node: u32) {
        let parts = [Some(&self.memory), self.behind.as_ref()];
        let asked = parts.into_iter().flatten().try_for_each(|memory| memory.prefer_node(node));
        match asked {
            Ok(()) => self.node = Some(node),
            Err(cause) => tracing::debug!(node, %cause, "descriptors are not asked of the node"),
        }
    }

    /// Finds out whether present memory that was to be in huge pages is.
    pub(crate) fn settle(&mut self) {
        if self.pages == MemmapPages::Transparent
            && self.memory.huge_backed().is_ok_and(ByteLen::is_zero)
        {
            self.pages = MemmapPages::Base;
        }
    }

    /// Returns how much it takes from the kernel once all of it is present.
    pub(crate) fn held(&self) -> ByteLen {
        let page = self.memory.page_size().bytes();
        // It was mapped in whole pages, so there is such a number.
        self.memory.len().align_up(page).unwrap_or(self.memory.len())
    }
}

/// Memory of unbound regions, for the next bind.
#[derive(Debug)]
pub(crate) struct MemmapCache {
    limit: ByteLen,
    kept: Mutex<Vec<MemmapMemory>>,
}

/// Less memory than this is not kept: fresh pages for it cost little.
pub(crate) const CACHED_FROM: ByteLen = ByteLen::mib(2);

/// The most pieces of memory that are kept: each is a mapping, and those are limited as well.
const MAX_PIECES: usize = 64;

impl MemmapCache {
    pub(crate) fn new(limit: ByteLen) -> Self {
        Self { limit, kept: Mutex::default() }
    }

    /// Returns the smallest kept memory of a node that is long enough, unless more than half of it and
    /// of a huge page would be wasted. Without a node it is that of this thread, which fresh memory would come
    /// from.
    pub(crate) fn take(
        &self,
        len: ByteLen,
        node: Option<u32>,
        may_be_of_pool: bool,
    ) -> Option<MemmapMemory> {
        let most = len.get().saturating_mul(2).saturating_add(CACHED_FROM.get());
        let here = || numa::has_several_nodes().then(mempolicy::current_node)?;
        let node = node.or_else(here);
        let mut kept = lock(&self.kept);
        let (index, _) = kept
            .iter()
            .enumerate()
            .filter(|(_, memory)| memory.node == node)
            .filter(|(_, memory)| (len.get()..=most).contains(&memory.memory.len().get()))
            .filter(|(_, memory)| {
                may_be_of_pool || !matches!(memory.pages, MemmapPages::Hugetlb(_))
            })
            .min_by_key(|(_, memory)| memory.memory.len())?;
        Some(kept.swap_remove(index))
    }

    /// Keeps memory whose every page is present, unless that would exceed the limit: then it goes
    /// back to the kernel, the smallest first.
    pub(crate) fn give(&self, memory: MemmapMemory) {
        if memory.held() < CACHED_FROM || memory.held() > self.limit {
            return; // too little to be worth keeping, or alone above the limit
        }
        let lies_on = || numa::has_several_nodes().then(|| memory.memory.node_of_most())?;
        let node = memory.node.or_else(lies_on);
        let mut kept = lock(&self.kept);
        kept.push(MemmapMemory { is_kept: true, node, ..memory });
        let freed = take_until(&mut kept, self.limit);
        drop(kept);
        drop(freed); // unmapped outside of the lock
    }

    /// Gives kept memory back to the kernel until at most `limit` is left. Returns how much went.
    pub(crate) fn trim(&self, limit: ByteLen) -> ByteLen {
        let freed = take_until(&mut lock(&self.kept), limit);
        ByteLen::new(total(&freed)) // unmapped outside of the lock
    }

    pub(crate) fn kept(&self) -> ByteLen {
        ByteLen::new(total(&lock(&self.kept)))
    }
}

/// Takes pieces out, the smallest first because the largest costs most to replace, until at most
/// `limit` bytes in at most [`MAX_PIECES`] pieces are left.
fn take_until(kept: &mut Vec<MemmapMemory>, limit: ByteLen) -> Vec<MemmapMemory> {
    let mut taken = Vec::new();
    while total(kept) > limit.get() || kept.len() > MAX_PIECES {
        let sizes = kept.iter().map(|memory| memory.memory.len()).enumerate();
        let Some((index, _)) = sizes.min_by_key(|(_, len)| *len) else { break };
        taken.push(kept.swap_remove(index));
    }
    taken
}

fn total(kept: &[MemmapMemory]) -> u64 {
    kept.iter().map(|memory| memory.held().get()).sum()
}

/// Returns fresh memory in base pages, for few descriptors, or for many of which few will be touched.
pub(crate) fn fresh_sparse(len: ByteLen) -> Result<MemmapMemory, MapError> {
    let how = Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() };
    Ok(MemmapMemory::fresh(Exclusive::anonymous(len, how)?, MemmapPages::Base))
}

/// As [`fresh_sparse`], of `len` bytes and `behind` more, if any, which begin at a page of their own.
pub(crate) fn fresh_sparse_with(len: ByteLen, behind: ByteLen) -> Result<MemmapMemory, MapError> {
    let whole = len.align_up(uzone_os::probe::page_size().bytes());
    let Some((front, whole)) = whole.ok().and_then(|front| {
        let whole = front.checked_add(behind).ok()?;
        (!behind.is_zero()).then_some((front, whole))
    }) else {
        return fresh_sparse(len);
    };
    let both = fresh_sparse(whole)?;
    match both.memory.cut(front) {
        Ok((memory, behind)) => Ok(MemmapMemory { memory, behind: Some(behind), ..both }),
        Err(_) => unreachable!("both parts have a byte, and the first has whole pages"),
    }
}

/// Returns fresh memory of the pool of 2 MiB pages, if that has room for it now.
pub(crate) fn fresh_from_pool(len: ByteLen) -> Option<MemmapMemory> {
    let size = PageSize::MIB_2;
    let pool = hugepages::pool(&SystemRoot::host(), size).ok()??;
    let wanted = len.get().div_ceil(size.bytes());
    if pool.free.saturating_sub(pool.reserved) < wanted {
        return None;
    }
    // Another process may be faster; then transparent huge pages serve.
    let memory = Exclusive::hugetlb(len, size).ok()?;
    Some(MemmapMemory::fresh(memory, MemmapPages::Hugetlb(size)))
}

/// Returns fresh memory, in transparent huge pages where the host makes any.
pub(crate) fn fresh_huge(len: ByteLen) -> Result<MemmapMemory, MapError> {
    // A host whose setting cannot be read gets the advice: it does no harm where it has no effect.
    let thp = hugepages::thp(&SystemRoot::host()).ok().flatten();
    let (huge, pages) = match thp {
        Some(thp) if thp.enabled == "never" => (HugeAdvice::Default, MemmapPages::Base),
        // Whether the advice had an effect is found out when the memory is present.
        _ => (HugeAdvice::Advise, MemmapPages::Transparent),
    };
    let how = Anonymous { huge, ..Anonymous::default() };
    Ok(MemmapMemory::fresh(Exclusive::anonymous(len, how)?, pages))
}

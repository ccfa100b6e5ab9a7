//! The memory that descriptors lie in: where it comes from, and what is kept of it.
//!
//! Memory fresh from the kernel is cleared page by page before it is shown, and in a virtual
//! machine the host may first have to find it: a first bind pays many times what it pays to write
//! the descriptors. So a zone keeps the memory of an unbound region for the next bind, up to a
//! limit, and never gives it to the kernel in between. Fresh memory is taken from a hugetlb pool
//! that has room, else as transparent huge pages, else as base pages; which one it was is part of
//! the report.
//!
//! Descriptors that are initialised on touch are not kept: their memory has to read as zero, and
//! the kernel's has that property for nothing.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use uzone_os::hugepages::{self, HugeSize, ThpEnabled};
use uzone_os::{Anonymous, Exclusive, HugeAdvice, MapError, SystemRoot};
use uzone_pages::ByteLen;

/// What the descriptors' memory is made of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum MemmapPages {
    /// Pages of a hugetlb pool.
    Hugetlb(HugeSize),
    /// Base pages that the kernel was asked to make huge ones of, and may.
    Transparent,
    /// Base pages: the host has transparent huge pages switched off, or huge ones would waste
    /// memory because only few descriptors will be touched.
    Base,
}

impl fmt::Display for MemmapPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hugetlb(size) => write!(f, "hugetlb pages of {size}"),
            Self::Transparent => f.write_str("transparent huge pages"),
            Self::Base => f.write_str("base pages"),
        }
    }
}

/// Where the memory of one bind came from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// From the kernel, never touched.
    Fresh,
    /// From an earlier bind of the same zone, present and with old descriptors in it.
    Kept,
}

/// Memory for the descriptors of one region.
#[derive(Debug)]
pub(crate) struct MemmapMemory {
    pub(crate) memory: Exclusive,
    pub(crate) pages: MemmapPages,
    pub(crate) source: Source,
}

/// Memory of unbound regions, for the next bind.
#[derive(Debug)]
pub(crate) struct Keep {
    limit_bytes: AtomicU64,
    kept: Mutex<Vec<MemmapMemory>>,
}

impl Keep {
    pub(crate) fn new(limit: ByteLen) -> Self {
        Self { limit_bytes: AtomicU64::new(limit.get()), kept: Mutex::new(Vec::new()) }
    }

    /// Returns `len` bytes that hold old descriptors, or fresh ones that are huge where that can
    /// be had.
    pub(crate) fn take(&self, len: ByteLen) -> Result<MemmapMemory, MapError> {
        match self.take_kept(len) {
            Some(memory) => Ok(memory),
            None => fresh_huge(len),
        }
    }

    /// Returns the smallest kept memory that is long enough.
    fn take_kept(&self, len: ByteLen) -> Option<MemmapMemory> {
        let mut kept = self.lock();
        let (index, _) = kept
            .iter()
            .enumerate()
            .filter(|(_, memory)| memory.memory.len() >= len)
            .min_by_key(|(_, memory)| memory.memory.len())?;
        Some(kept.swap_remove(index))
    }

    /// Keeps memory whose every page is present, unless that would exceed the limit: then it goes
    /// back to the kernel, the smallest first, for the largest is the dearest to replace.
    pub(crate) fn give(&self, memory: MemmapMemory) {
        let limit = self.limit_bytes.load(Ordering::Relaxed); // a setting, nothing hangs on it
        if memory.memory.len().get() > limit {
            return; // it alone is too much
        }
        let mut freed = Vec::new();
        {
            let mut kept = self.lock();
            kept.push(MemmapMemory { source: Source::Kept, ..memory });
            while total(&kept) > limit {
                let smallest = kept
                    .iter()
                    .enumerate()
                    .min_by_key(|(_, memory)| memory.memory.len())
                    .map(|(index, _)| index);
                match smallest {
                    Some(index) => freed.push(kept.swap_remove(index)),
                    None => break,
                }
            }
        }
        drop(freed); // unmapped outside of the lock
    }

    /// Gives kept memory back to the kernel until at most `limit` is left. Returns how much went.
    pub(crate) fn trim(&self, limit: ByteLen) -> ByteLen {
        let mut freed = Vec::new();
        let mut bytes = 0;
        {
            let mut kept = self.lock();
            while total(&kept) > limit.get() {
                match kept.pop() {
                    Some(memory) => {
                        bytes += memory.memory.len().get();
                        freed.push(memory);
                    }
                    None => break,
                }
            }
        }
        drop(freed); // unmapped outside of the lock
        ByteLen::new(bytes)
    }

    pub(crate) fn kept(&self) -> ByteLen {
        ByteLen::new(total(&self.lock()))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<MemmapMemory>> {
        // A panic elsewhere cannot leave the list half changed: each change is one call.
        self.kept.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn total(kept: &[MemmapMemory]) -> u64 {
    kept.iter().map(|memory| memory.memory.len().get()).sum()
}

/// Returns memory for descriptors of which few will be touched.
pub(crate) fn fresh_sparse(len: ByteLen) -> Result<MemmapMemory, MapError> {
    let how = Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() };
    Ok(MemmapMemory {
        memory: Exclusive::anonymous(len, how)?,
        pages: MemmapPages::Base,
        source: Source::Fresh,
    })
}

/// Returns memory for descriptors that will all be written.
fn fresh_huge(len: ByteLen) -> Result<MemmapMemory, MapError> {
    let source = Source::Fresh;
    if let Some(memory) = from_pool(len) {
        return Ok(MemmapMemory { memory, pages: MemmapPages::Hugetlb(HugeSize::MIB_2), source });
    }
    // A host whose setting cannot be read gets the advice: it does no harm where it has no effect.
    let thp = hugepages::thp(&SystemRoot::host()).ok().flatten();
    let is_never = thp.is_some_and(|thp| thp.enabled == ThpEnabled::Never);
    let huge = if is_never { HugeAdvice::Default } else { HugeAdvice::Advise };
    Ok(MemmapMemory {
        memory: Exclusive::anonymous(len, Anonymous { huge, ..Anonymous::default() })?,
        pages: if is_never || len < ByteLen::mib(2) {
            MemmapPages::Base
        } else {
            MemmapPages::Transparent
        },
        source,
    })
}

/// Returns memory of the pool of 2 MiB pages if that has room for it now.
fn from_pool(len: ByteLen) -> Option<Exclusive> {
    if len < ByteLen::mib(2) {
        return None;
    }
    let pool = hugepages::pool(&SystemRoot::host(), HugeSize::MIB_2).ok()??;
    let wanted = len.get().div_ceil(HugeSize::MIB_2.page_size().bytes());
    if pool.free.saturating_sub(pool.reserved) < wanted {
        return None;
    }
    // Another process may be faster; then transparent huge pages serve.
    Exclusive::hugetlb(len, HugeSize::MIB_2).ok()
}

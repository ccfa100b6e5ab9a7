//! From an address to the region that has it: [`RegionIndex`].
//!
//! Readers search a sorted table; a bind or an unbind makes a new one.
//! A table may be out of date by the time it has been searched, so it has no regions but their places
//! ([`LiveArc`]): a thread that finds one enters its `LiveRef`, and trusts nothing before. A region that has
//! been unbound meanwhile is then refused.
//!
//! Each thread keeps the table that it used last, with the version by which it sees that there is a
//! newer one; to protect the load of a shared pointer would cost two atomic steps more, a third of a
//! pin. What a thread keeps that looks no more is a table and the empty places of its regions, never
//! their memory.
//!
//! Locks: the newest table has one, held while a pointer is copied or replaced: by who changes the
//! table, and by a thread's first lookup after that.
//! Cost: a lookup is a load of the version, a binary search, and the atomic step by which a guard enters
//! anyway. A bind or unbind copies the table.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use uzone_os::{LiveArc, LiveGuard, lock};
use uzone_pages::{ByteLen, HoldError, PageCount, PageSize, PfnRange};

use crate::error::PinError;
use crate::pin::pin_target::{PinTarget, Place, Segment};

#[derive(Debug)]
pub(crate) struct RegionIndex {
    /// The newest table.
    table: Mutex<Arc<Table>>,
    /// Its number, which no other table of any directory has; changed with it, under the lock.
    version: AtomicU64,
}

/// The table that a thread used last.
struct Kept {
    version: u64,
    table: Arc<Table>,
}

fn next_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Relaxed: a number of its own is all that is asked for.
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Default for RegionIndex {
    fn default() -> Self {
        Self { table: Mutex::default(), version: AtomicU64::new(next_version()) }
    }
}

thread_local! {
    static KEPT: RefCell<Option<Kept>> = const { RefCell::new(None) };
}

/// Regions in ascending order of their addresses.
#[derive(Default)]
struct Table(Vec<Entry>);

// Derived, it would ask for regions that are `Debug`.
impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table").field("regions", &self.0.len()).finish()
    }
}

#[derive(Clone)]
struct Entry {
    /// The claim of the region.
    id: u64,
    /// The first address, and the one after the last.
    start: u64,
    end: u64,
    range: PfnRange,
    page: PageSize,
    place: Arc<Place>,
}

impl Table {
    /// Returns the entry that has an address.
    #[inline]
    fn find(&self, at: u64) -> Option<&Entry> {
        let after = self.0.partition_point(|entry| entry.start <= at);
        self.0.get(after.checked_sub(1)?).filter(|entry| at < entry.end)
    }

    /// Enters the region that has the bytes from address `start` up to `end`, if one has them all, and
    /// returns in `pages` which pages they have a part of.
    #[inline(always)]
    fn one_at_address<const IS_PIN: bool>(
        &self,
        start: u64,
        end: u64,
        pages: &mut Option<PfnRange>,
    ) -> Option<LiveGuard<dyn PinTarget, IS_PIN>> {
        let entry = self.find(start)?;
        if end > entry.end {
            return None;
        }
        *pages = Some(entry.pages(start, end)?);
        LiveArc::enter(&entry.place).ok()
    }
}

impl Entry {
    /// Enters the region; `None` if it is gone, which a newer table knows.
    fn enter<const IS_PIN: bool>(
        &self,
    ) -> Result<Option<LiveGuard<dyn PinTarget, IS_PIN>>, Box<PinError>> {
        match LiveArc::enter(&self.place) {
            Ok(pagemap) => Ok(Some(pagemap)),
            Err(HoldError::Gone) => Ok(None),
            Err(error) => Err(Box::new(PinError::NotAdmitted(error))),
        }
    }

    /// Returns the pages that the bytes from address `start` up to `end` have a part of, both in the
    /// region and not the same.
    #[inline]
    fn pages(&self, start: u64, end: u64) -> Option<PfnRange> {
        let shift = self.page.shift();
        let first = (start - self.start) >> shift;
        let last = (end - 1 - self.start) >> shift;
        let first_pfn = self.range.start().checked_add(PageCount::new(first)).ok()?;
        PfnRange::try_new(first_pfn, PageCount::new(last - first + 1)).ok()
    }
}

/// Pages of one region, which the caller has entered.
pub(crate) struct Found<const IS_PIN: bool> {
    pub(crate) pagemap: LiveGuard<dyn PinTarget, IS_PIN>,
    pub(crate) range: PfnRange,
}

impl RegionIndex {
    /// Enters a region that lies at `segment`.
    pub(crate) fn insert(
        &self,
        id: u64,
        segment: Segment,
        range: PfnRange,
        page: PageSize,
        place: Arc<Place>,
    ) {
        let start = segment.address as u64; // an address is at most 64 bits
        let entry = Entry { id, start, end: start + segment.len_bytes, range, page, place };
        self.change(|table| {
            let mut all = table.0.clone();
            all.insert(all.partition_point(|other| other.start < start), entry.clone());
            Some(Table(all))
        });
    }

    /// Forgets the region of a claim, if it was entered.
    pub(crate) fn remove(&self, id: u64) {
        self.change(|table| {
            // A bind that failed entered none, and must not have every thread look for a newer table.
            let has = table.0.iter().any(|entry| entry.id == id);
            has.then(|| Table(table.0.iter().filter(|entry| entry.id != id).cloned().collect()))
        });
    }

    /// Replaces the table by the one that `next` makes of it, if it makes one.
    fn change(&self, next: impl Fn(&Table) -> Option<Table>) {
        // It ends: each round fails only because another thread's change succeeded.
        loop {
            let before = lock(&self.table).clone();
            // Without the lock, for it may be long.
            let Some(table) = next(&before) else { return };
            let mut newest = lock(&self.table);
            if Arc::ptr_eq(&newest, &before) {
                *newest = Arc::new(table);
                // Release pairs with the Acquire in `one_at_address`: a thread that sees the
                // number finds this table, or a newer one.
                self.version.store(next_version(), Ordering::Release);
                drop(newest);
                return; // and drops `before`, without the lock
            }
        }
    }

    /// Returns the newest table: the one that this thread keeps, if it is that.
    fn current(&self) -> Arc<Table> {
        let version = self.version.load(Ordering::Acquire); // as in `one_at_address`
        let current = KEPT.try_with(|kept| match &*kept.borrow() {
            Some(kept) if kept.version == version => Some(kept.table.clone()),
            _ => None,
        });
        match current {
            Ok(Some(table)) => table,
            Ok(None) => KEPT.with(|kept| self.keep(kept)),
            // The thread is ending.
            Err(_) => lock(&self.table).clone(),
        }
    }

    /// Returns the pages from address `address` on that `len` bytes have a part of, if one region has
    /// them all. If none is returned, [`RegionIndex::at_address`] returns the reason.
    #[inline(always)]
    pub(crate) fn one_at_address<const IS_PIN: bool>(
        &self,
        address: usize,
        len: ByteLen,
    ) -> Option<Found<IS_PIN>> {
        let start = address as u64; // an address is at most 64 bits
        let end = start.checked_add(len.get()).filter(|end| start < *end)?;
        let version = self.version.load(Ordering::Acquire);
        // Beside what is returned, which fits in registers so. Something larger would be put together in
        // memory, behind the locked instruction, and waited for.
        let mut pages = None;
        // Nothing is called while the table is borrowed. A thread that is ending has none any more.
        let pagemap = KEPT.try_with(|kept| {
            if let Some(kept) = &*kept.borrow()
                && kept.version == version
            {
                return kept.table.one_at_address(start, end, &mut pages);
            }
            self.keep(kept).one_at_address(start, end, &mut pages)
        });
        Some(Found { pagemap: pagemap.ok()??, range: pages? })
    }

    /// Makes the newest table the one that the thread keeps.
    #[cold]
    fn keep(&self, kept: &RefCell<Option<Kept>>) -> Arc<Table> {
        let newest = lock(&self.table);
        // Relaxed: it changes under the lock alone.
        let version = self.version.load(Ordering::Relaxed);
        let table = newest.clone();
        drop(newest);
        // Dropped when the borrow has ended: it may be the last that keeps its entries.
        let _before = kept.replace(Some(Kept { version, table: table.clone() }));
        table
    }

    /// Calls `take` for the pages from address `address` on that `len` bytes have a part of, once for
    /// each region that they lie in, in ascending order. Returns what it returned.
    pub(crate) fn at_address<G, const IS_PIN: bool>(
        &self,
        address: usize,
        len: ByteLen,
        take: impl Fn(Found<IS_PIN>) -> Result<G, Box<PinError>>,
    ) -> Result<Vec<G>, Box<PinError>> {
        let start = address as u64; // as above
        let no_range = || Box::new(PinError::NoRange { address, len_bytes: len.get() });
        let Some(end) = start.checked_add(len.get()).filter(|end| start < *end) else {
            return Err(no_range());
        };
        let table = self.current();
        let (mut at, mut guards) = (start, Vec::new());
        while at < end {
            // An address that is part of the range, so it is one.
            let address = usize::try_from(at).unwrap_or(address);
            let nowhere = || Box::new(PinError::NoAddress { address });
            let entry = table.find(at).ok_or_else(nowhere)?;
            let until = end.min(entry.end);
            let range = entry.pages(at, until).ok_or_else(nowhere)?;
            let pagemap = entry.enter()?.ok_or_else(nowhere)?;
            guards.push(take(Found { pagemap, range })?);
            at = until;
        }
        Ok(guards)
    }
}

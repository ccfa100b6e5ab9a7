//! The list of the bad pages of a pagemap.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Bound;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use uzone_pages::{Pfn, PfnRange};

/// The bad pages of a pagemap.
#[derive(Default)]
pub(crate) struct BadPages(RwLock<BTreeSet<Pfn>>);

impl BadPages {
    fn read(&self) -> RwLockReadGuard<'_, BTreeSet<Pfn>> {
        // A panic elsewhere cannot leave the list half changed: each change is one call.
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, BTreeSet<Pfn>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner) // as above
    }

    /// Returns the first bad page of `range`.
    pub(crate) fn first_in(&self, range: PfnRange) -> Option<Pfn> {
        pages_in(&self.read(), range).next()
    }

    /// Returns the bad pages of `range`, in ascending order.
    pub(crate) fn in_range(&self, range: PfnRange) -> Vec<Pfn> {
        pages_in(&self.read(), range).collect()
    }
}

impl fmt::Debug for BadPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.read().iter()).finish()
    }
}

pub(crate) fn pages_in(list: &BTreeSet<Pfn>, range: PfnRange) -> impl Iterator<Item = Pfn> {
    list.range((Bound::Included(range.start()), Bound::Excluded(range.end()))).copied()
}

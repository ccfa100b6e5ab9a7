//! The holders of guards on a pagemap: [`GuardBook`], a list that debug builds keep. How many there are, every
//! build knows from the pagemap's live reference (`uzone_os::LiveArc`).
//!
//! Locks: the list has one, and nothing is called while it is held.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::Location;
use std::sync::Mutex;

use uzone_os::lock;
use uzone_pages::{HoldKind, PfnRange};

/// A holder of pages, and where in the program the guard was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The pages that are held.
    pub range: PfnRange,
    /// Whether they are pinned or referenced.
    pub sort: HoldKind,
    /// Where the guard was taken.
    pub caller: &'static Location<'static>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sort = match self.sort {
            HoldKind::Reference => "a reference",
            HoldKind::Pin => "a pin",
        };
        write!(f, "{sort} on {} taken at {}", self.range, self.caller)
    }
}

#[derive(Debug, Default)]
pub(crate) struct GuardBook {
    list: Mutex<List>,
}

/// The holders of a debug build, by ticket.
#[derive(Debug, Default)]
struct List {
    #[cfg(debug_assertions)]
    next: u64,
    holders: BTreeMap<u64, Holder>,
}

impl GuardBook {
    /// Enters a holder into the list of a debug build. Returns its ticket.
    #[cfg(debug_assertions)]
    pub(crate) fn register(
        &self,
        range: PfnRange,
        sort: HoldKind,
        caller: &'static Location<'static>,
    ) -> u64 {
        let holder = Holder { range, sort, caller };
        let mut list = lock(&self.list);
        let ticket = list.next;
        list.next += 1;
        list.holders.insert(ticket, holder);
        ticket
    }

    #[cfg(debug_assertions)]
    pub(crate) fn unregister(&self, ticket: u64) {
        lock(&self.list).holders.remove(&ticket);
    }

    /// Returns the holders that a debug build knows, in ascending order of their pages.
    pub(crate) fn holders(&self) -> Vec<Holder> {
        let mut holders: Vec<Holder> = lock(&self.list).holders.values().copied().collect();
        holders.sort_by_key(|holder| holder.range.start());
        holders
    }
}

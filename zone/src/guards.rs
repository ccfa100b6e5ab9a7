//! Who has guards on a pagemap: [`GuardBook`], the ledger with those who wait for it, and in debug
//! builds a list of the holders.
//!
//! Locks: `closing` is held while a thread waits for the last guard, and by whoever wakes it; the
//! list has a lock of its own. Neither is held while the other is taken.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::Location;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uzone_pages::{EnterError, Guards, HoldSort, Ledger, PfnRange};

/// Somebody who holds pages, and where in the program the guard was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The pages that are held.
    pub range: PfnRange,
    /// Whether they are pinned or referenced.
    pub sort: HoldSort,
    /// Where the guard was taken.
    pub caller: &'static Location<'static>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sort = match self.sort {
            HoldSort::Reference => "a reference",
            HoldSort::Pin => "a pin",
        };
        write!(f, "{sort} on {} taken at {}", self.range, self.caller)
    }
}

#[derive(Debug, Default)]
pub(crate) struct GuardBook {
    ledger: Ledger,
    closing: Mutex<()>,
    left: Condvar,
    list: Mutex<List>,
}

/// The holders of a debug build, by ticket.
#[derive(Debug, Default)]
struct List {
    #[cfg(debug_assertions)]
    next: u64,
    holders: BTreeMap<u64, Holder>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere cannot leave these half changed: each change is one call.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl GuardBook {
    #[inline]
    pub(crate) fn enter(&self, sort: HoldSort) -> Result<(), EnterError> {
        let entered = self.ledger.enter(sort);
        if entered == Err(EnterError::Closing) {
            self.wake();
        }
        entered
    }

    #[inline]
    pub(crate) fn leave(&self, sort: HoldSort) {
        if self.ledger.leave(sort) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        // Under the lock, or the wake-up could fall between the last look and the wait.
        let _closing = lock(&self.closing);
        self.left.notify_all();
    }

    /// Admits no guard from now on, and waits at most `patience` until there is none.
    ///
    /// # Errors
    /// The guards that there are after that time; then guards are admitted again.
    pub(crate) fn close_within(&self, patience: Duration) -> Result<(), Guards> {
        let started = Instant::now();
        let mut closing = lock(&self.closing);
        let mut guards = self.ledger.close();
        while !guards.is_empty() {
            let Some(rest) = patience.checked_sub(started.elapsed()).filter(|rest| !rest.is_zero())
            else {
                self.ledger.reopen();
                return Err(guards);
            };
            closing = self
                .left
                .wait_timeout(closing, rest)
                .map_or_else(|error| error.into_inner().0, |(closing, _)| closing);
            guards = self.ledger.guards();
        }
        Ok(())
    }

    /// Enters a holder into the list of a debug build. Returns its ticket.
    #[cfg(debug_assertions)]
    pub(crate) fn register(
        &self,
        range: PfnRange,
        sort: HoldSort,
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

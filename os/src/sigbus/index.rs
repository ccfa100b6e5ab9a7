//! The gate of an address, among many, for handlers of signals: [`Index`].
//!
//! The gates lie in two tables, sorted by their first address; handlers search one of them while a writer changes the
//! other, and then the tables change places. So a handler makes a dozen steps, and waits for no writer that it may have
//! interrupted. A handler that finds nothing looks again if the tables have changed places meanwhile: the one that it
//! searched may have been changed under it. A gate that it finds is asked whether it has the address.
//!
//! `tests/loom.rs` searches the interleavings.

use crate::sync::{AtomicU64, Ordering};

/// The most searches of a table that changes meanwhile.
const TRIES: u32 = 64;

/// The gates of one table, by the first address of each.
struct Table<const SLOTS: usize> {
    count: AtomicU64,
    firsts: [AtomicU64; SLOTS],
    slots: [AtomicU64; SLOTS],
}

/// Up to `SLOTS` gates by their addresses.
pub(crate) struct Index<const SLOTS: usize> {
    /// The number of exchanges of the tables: the lowest bit is the one that is searched.
    turn: AtomicU64,
    tables: [Table<SLOTS>; 2],
}

impl<const SLOTS: usize> Index<SLOTS> {
    /// Returns an index of no gate: zero memory, so that a static of it costs none before it is used.
    #[cfg(not(loom))]
    pub(crate) const fn new() -> Self {
        Self {
            turn: AtomicU64::new(0),
            tables: [const {
                Table {
                    count: AtomicU64::new(0),
                    firsts: [const { AtomicU64::new(0) }; SLOTS],
                    slots: [const { AtomicU64::new(0) }; SLOTS],
                }
            }; 2],
        }
    }

    #[cfg(loom)]
    pub(crate) fn new() -> Self {
        let zeroes = || core::array::from_fn(|_| AtomicU64::new(0));
        let table = |_| Table { count: AtomicU64::new(0), firsts: zeroes(), slots: zeroes() };
        Self { turn: AtomicU64::new(0), tables: core::array::from_fn(table) }
    }

    fn table(&self, turn: u64) -> &Table<SLOTS> {
        &self.tables[usize::from(turn & 1 != 0)]
    }

    /// Calls `ask` with the gate that has an address, if there is one. Returns its result, and `false` without a gate.
    /// For handlers.
    pub(crate) fn ask(&self, address: u64, ask: impl Fn(usize) -> bool) -> bool {
        for _ in 0..TRIES {
            // Acquire pairs with the Release of `change`: the table is seen as it was written.
            let turn = self.turn.load(Ordering::Acquire);
            if self.table(turn).find(address).is_some_and(&ask) {
                return true;
            }
            // Relaxed: a word that was changed under this search was read by Acquire, so its writer's turn is seen.
            if self.turn.load(Ordering::Relaxed) == turn {
                return false;
            }
        }
        // Gates come and go all the time.
        (0..SLOTS).any(ask)
    }

    /// Adds a gate by its first address. One thread at a time changes the index.
    pub(crate) fn add(&self, first: u64, slot: usize) {
        self.change(|at, seen| match seen {
            Some((other, _)) if other < first => Step::Keep,
            _ if at == 0 => Step::Insert((first, slot as u64)),
            _ => Step::Keep,
        });
    }

    /// Takes a gate out. One thread at a time changes the index.
    pub(crate) fn remove(&self, slot: usize) {
        self.change(|_, seen| match seen {
            Some((_, other)) if other == slot as u64 => Step::Skip,
            _ => Step::Keep,
        });
    }

    /// Writes the other table, entry by entry, and lets handlers search that one. `step` is called with the number of
    /// entries that it inserted and each entry, and with none behind the last.
    fn change(&self, step: impl Fn(usize, Option<(u64, u64)>) -> Step) {
        // Relaxed: only this thread changes it.
        let turn = self.turn.load(Ordering::Relaxed);
        let (from, to) = (self.table(turn), self.table(turn + 1));
        let count = usize::try_from(from.count.load(Ordering::Relaxed)).unwrap_or(SLOTS).min(SLOTS);
        let (mut written, mut inserted) = (0, 0);
        let entries = (0..count).map(|at| Some(from.entry(at))).chain([None]);
        for seen in entries {
            let step = step(inserted, seen);
            if let Step::Insert(new) = step {
                to.set(&mut written, new);
                inserted += 1;
            }
            if let Some(seen) = seen.filter(|_| !matches!(step, Step::Skip)) {
                to.set(&mut written, seen);
            }
        }
        to.count.store(written as u64, Ordering::Release);
        // Release pairs with the Acquire of `ask`.
        self.turn.store(turn + 1, Ordering::Release);
    }
}

/// The next state of an entry.
enum Step {
    Keep,
    Skip,
    /// This one goes before it.
    Insert((u64, u64)),
}

impl<const SLOTS: usize> Table<SLOTS> {
    fn entry(&self, at: usize) -> (u64, u64) {
        // Acquire pairs with the Release of `set`, see `Index::ask`.
        (self.firsts[at].load(Ordering::Acquire), self.slots[at].load(Ordering::Acquire))
    }

    fn set(&self, written: &mut usize, (first, slot): (u64, u64)) {
        if let (Some(place), Some(number)) = (self.firsts.get(*written), self.slots.get(*written)) {
            // Release: a handler that reads one of them sees that the tables have changed places.
            place.store(first, Ordering::Release);
            number.store(slot, Ordering::Release);
            *written += 1;
        }
    }

    /// Returns the last gate that starts at or before an address.
    fn find(&self, address: u64) -> Option<usize> {
        let count = usize::try_from(self.count.load(Ordering::Acquire)).unwrap_or(0).min(SLOTS);
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.firsts[middle].load(Ordering::Acquire) <= address {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let slot = self.slots[low.checked_sub(1)?].load(Ordering::Acquire);
        usize::try_from(slot).ok().filter(|slot| *slot < SLOTS)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_found_by_the_last_gate_that_starts_before_it() {
        let index = Index::<8>::new();
        let found = |address| {
            let found = core::cell::Cell::new(None);
            index.ask(address, |slot| {
                found.set(Some(slot));
                true
            });
            found.get()
        };
        assert_eq!(found(77), None);
        for (first, slot) in [(300, 5), (100, 7), (200, 0), (400, 1)] {
            index.add(first, slot);
        }
        let all = [99, 100, 199, 200, 300, 399, 400, u64::MAX].map(found);
        assert_eq!(all, [None, Some(7), Some(7), Some(0), Some(5), Some(5), Some(1), Some(1)]);
        index.remove(0);
        index.remove(6);
        assert_eq!([199, 200, 300].map(found), [Some(7), Some(7), Some(5)]);
        for slot in [5, 7, 1] {
            index.remove(slot);
        }
        assert_eq!(found(u64::MAX), None);
    }
}

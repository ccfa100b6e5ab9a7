//! The watched ranges of addresses, and the events of each: a fixed table that a signal handler
//! reads and writes without a lock.
//!
//! A handler interrupts any thread at any instruction, perhaps one that is in the middle of a call
//! of this file. So nothing here locks, allocates or frees: slots and rings are there from the
//! start and for good, and a handler can never look at memory that is gone.
//!
//! A slot has a [`Gate`], open for the addresses of its watch, and a handler pushes inside of it.
//! The gate is taken again only when no handler is inside, so no event of one watch lands in the
//! ring of the next one that has its slot. A handler that pushes into a slot that was let go
//! meanwhile pushes into a ring that is no longer read, and the next owner of the slot empties it
//! first. Letting go never waits: a handler that is stopped inside (by a debugger, say) keeps one
//! slot from being used again, and that is all. A child of a process that forks while another
//! thread is inside does not use that slot again.
//!
//! # A ring
//!
//! Both ends are one word, so the number of events is one load. A handler takes the next cell by
//! moving the tail, fills it, and marks it with its turn; a reader takes a cell that has its turn by moving
//! the head. A handler that is stopped between the two holds back the cells behind it and blocks no other.
//! The loops end: an exchange fails only because another thread's succeeded, and a ring that is not read is
//! full after that many.
//!
//! Cost: nothing until there is a fault. Then two loads for each slot that was ever used, and four
//! atomic steps for each watch that has the address.

use super::gate::Gate;
use crate::sync::{AtomicU64, Ordering};

/// An event in the ring: two words, of which this file reads none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) address: u64,
    pub(crate) info: u64,
}

/// A range of addresses by its first and its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

/// `SLOTS` ranges with up to `EVENTS` events each, which is a power of two.
pub(crate) struct Table<const SLOTS: usize, const EVENTS: usize> {
    /// The number of slots, from the first on, that were ever taken. Relaxed is enough: a thread that faults after `take`
    /// returned sees its stores, and no other has to.
    used: AtomicU64,
    slots: [Slot<EVENTS>; SLOTS],
}

// A line of its own, so that counting in and out does not slow the neighbours.
#[repr(align(64))]
struct Slot<const EVENTS: usize> {
    gate: Gate<()>,
    ring: Ring<EVENTS>,
}

struct Ring<const EVENTS: usize> {
    /// The turn of the oldest event in the upper half, and of the next one in the lower.
    ends: AtomicU64,
    /// The number of events that found the ring full.
    lost: AtomicU64,
    cells: [Cell; EVENTS],
}

/// A place for an event.
struct Cell {
    /// One more than the turn whose event stands here, or zero before the first.
    filled: AtomicU64,
    address: AtomicU64,
    info: AtomicU64,
}

#[cfg(not(loom))]
impl<const SLOTS: usize, const EVENTS: usize> Table<SLOTS, EVENTS> {
    /// Returns an empty table: zero memory, so that a static of it costs none before it is used.
    pub(crate) const fn new() -> Self {
        const { assert!(EVENTS.is_power_of_two() && EVENTS > 1 && EVENTS <= 1 << 16) };
        Self {
            used: AtomicU64::new(0),
            slots: [const {
                Slot {
                    gate: Gate::new(),
                    ring: Ring {
                        ends: AtomicU64::new(0),
                        lost: AtomicU64::new(0),
                        cells: [const {
                            Cell {
                                filled: AtomicU64::new(0),
                                address: AtomicU64::new(0),
                                info: AtomicU64::new(0),
                            }
                        }; EVENTS],
                    },
                }
            }; SLOTS],
        }
    }
}

impl<const SLOTS: usize, const EVENTS: usize> Table<SLOTS, EVENTS> {
    /// Takes a free slot for `extent` and returns its index, or `None` if there is none.
    ///
    /// Not to be called by a handler, though it would do no harm.
    pub(crate) fn take(&self, extent: Extent) -> Option<usize> {
        self.take_by(extent, Gate::take)
    }

    fn take_by(&self, extent: Extent, take: fn(&Gate<()>) -> bool) -> Option<usize> {
        let index = self.slots.iter().position(|slot| take(&slot.gate))?;
        let slot = &self.slots[index];
        slot.ring.reset();
        self.used.fetch_max(index as u64 + 1, Ordering::Relaxed);
        // A handler that finds the gate open sees the empty ring.
        slot.gate.open(extent.first, extent.last, core::ptr::null_mut());
        Some(index)
    }

    /// Lets a slot go that `take` returned. It never waits.
    pub(crate) fn let_go(&self, index: usize) {
        self.slots[index].gate.close();
        self.slots[index].gate.give_back();
    }

    /// Gives an event to every watch that has an address of `extent`, and returns the number of these watches.
    ///
    /// For handlers: it takes no lock, allocates nothing and does not panic.
    pub(crate) fn record(&self, extent: Extent, entry: Entry) -> usize {
        let used = usize::try_from(self.used.load(Ordering::Relaxed)).unwrap_or(SLOTS);
        let pushes = |slot: &&Slot<EVENTS>| {
            slot.gate.answer(extent.first, extent.last, |_| {
                slot.ring.push(entry);
                true
            })
        };
        self.slots.iter().take(used).filter(pushes).count()
    }

    /// Returns the number of events that wait in a slot.
    pub(crate) fn pending(&self, index: usize) -> usize {
        self.slots[index].ring.pending()
    }

    /// Returns the number of events that found the ring of a slot full.
    pub(crate) fn lost(&self, index: usize) -> u64 {
        // Relaxed: a number for people.
        self.slots[index].ring.lost.load(Ordering::Relaxed)
    }

    /// Takes the oldest event of a slot, or `None` if there is none that is whole.
    pub(crate) fn pop(&self, index: usize) -> Option<Entry> {
        self.slots[index].ring.pop()
    }
}

impl<const EVENTS: usize> Ring<EVENTS> {
    /// Forgets the unread events. No handler is inside.
    fn reset(&self) {
        // Relaxed: the gate publishes it when it is opened.
        let (_, tail) = halves(self.ends.load(Ordering::Relaxed));
        self.ends.store(word(tail, tail), Ordering::Relaxed);
        self.lost.store(0, Ordering::Relaxed);
    }

    fn pending(&self) -> usize {
        // Relaxed: the question is whether there is an event. `pop` acquires its contents.
        let (head, tail) = halves(self.ends.load(Ordering::Relaxed));
        tail.wrapping_sub(head) as usize
    }

    fn push(&self, entry: Entry) {
        let mut seen = self.ends.load(Ordering::Relaxed);
        let turn = loop {
            let (head, tail) = halves(seen);
            if tail.wrapping_sub(head) as usize >= EVENTS {
                self.lost.fetch_add(1, Ordering::Relaxed);
                return;
            }
            // Acquire pairs with the Release of `pop`: the last event of the cell has been read.
            match self.ends.compare_exchange_weak(
                seen,
                word(head, tail.wrapping_add(1)),
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => break tail,
                Err(now) => seen = now,
            }
        };
        let cell = self.cell(turn);
        // Relaxed: the next store publishes the two.
        cell.address.store(entry.address, Ordering::Relaxed);
        cell.info.store(entry.info, Ordering::Relaxed);
        // Release pairs with the Acquire of `pop`.
        cell.filled.store(u64::from(turn) + 1, Ordering::Release);
    }

    fn pop(&self) -> Option<Entry> {
        let mut seen = self.ends.load(Ordering::Relaxed);
        loop {
            let (head, tail) = halves(seen);
            if head == tail {
                return None;
            }
            let cell = self.cell(head);
            // Acquire pairs with the Release of `push`: the event is whole.
            if cell.filled.load(Ordering::Acquire) != u64::from(head) + 1 {
                // Its handler is still writing, or another reader was faster.
                return None;
            }
            let entry = Entry {
                address: cell.address.load(Ordering::Relaxed),
                info: cell.info.load(Ordering::Relaxed),
            };
            // Release pairs with the Acquire of `push`: we have read before the cell is reused. If
            // another reader took the event, the head has moved and our reading counts for nothing. The same word can
            // only come back after 2^32 events.
            match self.ends.compare_exchange(
                seen,
                word(head.wrapping_add(1), tail),
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(entry),
                Err(now) => seen = now,
            }
        }
    }

    fn cell(&self, turn: u32) -> &Cell {
        // In bounds, and `EVENTS` divides 2^32, so that turns go round without a jump.
        &self.cells[turn as usize % EVENTS]
    }
}

/// Returns the turns of the oldest event and of the next one.
#[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
fn halves(ends: u64) -> (u32, u32) {
    ((ends >> 32) as u32, ends as u32)
}

fn word(head: u32, tail: u32) -> u64 {
    u64::from(head) << 32 | u64::from(tail)
}

/// Functions for the model checker alone.
#[cfg(loom)]
#[allow(dead_code, reason = "the library is compiled with it, and has no use for all of it")]
impl<const SLOTS: usize, const EVENTS: usize> Table<SLOTS, EVENTS> {
    /// Returns an empty table; loom's atomics are not made by constants.
    pub(crate) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            used: zero(),
            slots: std::array::from_fn(|_| Slot {
                gate: Gate::new(),
                ring: Ring {
                    ends: zero(),
                    lost: zero(),
                    cells: std::array::from_fn(|_| Cell {
                        filled: zero(),
                        address: zero(),
                        info: zero(),
                    }),
                },
            }),
        }
    }

    /// Takes a slot whether or not a handler is inside: the mistake that a model must find.
    pub(crate) fn take_without_looking(&self, extent: Extent) -> Option<usize> {
        self.take_by(extent, Gate::take_without_looking)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn extent(first: u64, last: u64) -> Extent {
        Extent { first, last }
    }

    fn entry(address: u64) -> Entry {
        Entry { address, info: !address }
    }

    #[test]
    fn an_event_goes_to_every_watch_that_has_its_address_and_to_no_other() {
        let table = Table::<4, 4>::new();
        let low = table.take(extent(100, 199)).unwrap();
        let high = table.take(extent(200, 299)).unwrap();
        let both = table.take(extent(150, u64::MAX)).unwrap();
        for (at, watches, expected) in [
            (extent(99, 99), 0, [false, false, false]),
            (extent(100, 100), 1, [true, false, false]),
            (extent(199, 199), 2, [true, false, true]),
            (extent(200, 200), 2, [false, true, true]),
            (extent(0, 149), 1, [true, false, false]),
            (extent(199, 200), 3, [true, true, true]),
            (extent(300, u64::MAX), 1, [false, false, true]),
        ] {
            assert_eq!(table.record(at, entry(at.first)), watches, "{at:?}");
            let got = [low, high, both].map(|slot| {
                let event = table.pop(slot);
                assert!(event.is_none_or(|event| event == entry(at.first)));
                event.is_some()
            });
            assert_eq!(got, expected, "{at:?}");
        }
    }

    #[test]
    fn a_full_ring_keeps_the_oldest_events_and_counts_the_others() {
        let table = Table::<1, 4>::new();
        let slot = table.take(extent(0, 9)).unwrap();
        for round in 0..5_u64 {
            for number in 0..7 {
                table.record(extent(1, 1), entry(number));
            }
            assert_eq!(table.pending(slot), 4);
            assert_eq!(table.lost(slot), 3 * (round + 1));
            for number in 0..4 {
                assert_eq!(table.pop(slot), Some(entry(number)));
            }
            assert_eq!(table.pop(slot), None);
            assert_eq!(table.pending(slot), 0);
        }
    }

    #[test]
    fn turns_go_round_without_losing_an_event() {
        let table = Table::<1, 2>::new();
        let slot = table.take(extent(0, 9)).unwrap();
        let ring = &table.slots[slot].ring;
        // As after 2^32 - 3 events that were all read.
        ring.ends.store(word(u32::MAX - 2, u32::MAX - 2), Ordering::Relaxed);
        for number in 0..8 {
            table.record(extent(1, 1), entry(number));
            assert_eq!(table.pending(slot), 1);
            assert_eq!(table.pop(slot), Some(entry(number)));
        }
        assert_eq!(table.lost(slot), 0);
    }

    #[test]
    fn a_slot_is_used_again_empty_and_a_full_table_says_so() {
        let table = Table::<2, 2>::new();
        let one = table.take(extent(0, 9)).unwrap();
        let two = table.take(extent(10, 19)).unwrap();
        assert_ne!(one, two);
        assert_eq!(table.take(extent(20, 29)), None);
        for _ in 0..3 {
            table.record(extent(5, 5), entry(5));
        }
        assert_eq!((table.pending(one), table.lost(one)), (2, 1));
        table.let_go(one);
        assert_eq!(table.record(extent(5, 5), entry(5)), 0);
        let again = table.take(extent(20, 29)).unwrap();
        assert_eq!(again, one);
        assert_eq!((table.pending(again), table.lost(again)), (0, 0));
        assert_eq!(table.pop(again), None);
        assert_eq!(table.record(extent(5, 5), entry(5)), 0);
        assert_eq!(table.record(extent(25, 25), entry(25)), 1);
        assert_eq!(table.pop(again), Some(entry(25)));
    }
}

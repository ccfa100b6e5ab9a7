//! Guards as 64 bits: [`RawGuard`], for the `user_data` of an I/O request and for C.
//!
//! A raw guard is a place in a list and the number of that place's turn, so one that was redeemed
//! already, or made up, is refused and cannot give back what somebody else holds.
//!
//! ```text
//!  63                                32 31    28 27                         0
//! ┌────────────────────────────────────┬────────┬────────────────────────────┐
//! │        turn, at least 1            │  list  │      place in the list     │
//! └────────────────────────────────────┴────────┴────────────────────────────┘
//! ```
//!
//! Locks: one for each of sixteen lists; a thread uses the same list each time, and whoever redeems
//! goes to the list that the guard names. Nothing is called while one is held.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::hold::{Pinned, Referenced};
use crate::zone::Zone;

const LISTS: usize = 16;
const PLACE_BITS: u32 = 28;
const MAX_PLACES: usize = 1 << PLACE_BITS;

/// A guard that was turned into 64 bits; never zero. What it holds stays held until it is redeemed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawGuard(u64);

impl RawGuard {
    /// Takes bits that [`RawGuard::to_bits`] returned.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the bits.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        self.0
    }
}

/// A guard that was had again from its bits.
#[derive(Debug)]
#[must_use = "dropping it gives the pages back"]
pub enum Redeemed {
    /// It was a pin.
    Pinned(Pinned),
    /// It was a reference.
    Referenced(Referenced),
}

/// Bits that are no guard of the zone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{bits:#x} is no guard of this zone: it was redeemed already, or belongs to another, or was \
     never one"
)]
pub struct NotAGuard {
    /// What was given.
    pub bits: u64,
}

#[derive(Default)]
struct List {
    places: Vec<Place>,
    /// Places that are empty.
    empty: Vec<usize>,
}

struct Place {
    turn: u32,
    guard: Option<Redeemed>,
}

/// The raw guards of a zone.
#[derive(Default)]
pub(crate) struct Tokens {
    lists: [Mutex<List>; LISTS],
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens").finish_non_exhaustive()
    }
}

/// Returns the list that this thread uses.
fn own_list() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static LIST: Cell<Option<usize>> = const { Cell::new(None) };
    }
    LIST.with(|list| {
        let own = list.get().unwrap_or_else(|| NEXT.fetch_add(1, Ordering::Relaxed) % LISTS);
        list.set(Some(own));
        own
    })
}

impl Tokens {
    fn list(&self, list: usize) -> MutexGuard<'_, List> {
        // A panic elsewhere cannot leave a list half changed: nothing in between can panic.
        self.lists[list].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn park(&self, guard: Redeemed) -> RawGuard {
        let number = own_list();
        let mut list = self.list(number);
        let place = list.empty.pop().unwrap_or_else(|| {
            let place = list.places.len();
            assert!(place < MAX_PLACES, "more than {MAX_PLACES} raw guards in one list");
            list.places.push(Place { turn: 0, guard: None });
            place
        });
        let slot = &mut list.places[place];
        // Zero is no turn, so that no guard is zero.
        slot.turn = slot.turn.checked_add(1).unwrap_or(1);
        slot.guard = Some(guard);
        let (turn, number, place) = (u64::from(slot.turn), number as u64, place as u64);
        RawGuard(turn << 32 | number << PLACE_BITS | place)
    }

    fn redeem(&self, raw: RawGuard) -> Option<Redeemed> {
        let turn = raw.0 >> 32;
        let low = usize::try_from(raw.0 & u64::from(u32::MAX)).ok()?;
        let place = low % MAX_PLACES;
        let mut list = self.list(low / MAX_PLACES % LISTS);
        let slot = list.places.get_mut(place).filter(|slot| u64::from(slot.turn) == turn)?;
        let guard = slot.guard.take()?;
        list.empty.push(place);
        Some(guard)
    }
}

impl Zone {
    /// Returns the guard that [`Pinned::into_raw`] or [`Referenced::into_raw`] made these bits of.
    ///
    /// # Errors
    /// [`NotAGuard`] if it was redeemed before, or never was a guard of this zone.
    pub fn redeem(&self, raw: RawGuard) -> Result<Redeemed, NotAGuard> {
        self.shared.tokens.redeem(raw).ok_or(NotAGuard { bits: raw.0 })
    }
}

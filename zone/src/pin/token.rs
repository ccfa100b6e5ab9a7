//! Guards as 64 bits: [`RawGuard`], for the `user_data` of an I/O request and for C.
//!
//! A raw guard is a place in a list and the number of that place's turn, so one that was redeemed
//! already, or made up, is refused and cannot give the hold of another holder back.
//!
//! ```text
//!  63                                32 31    28 27                         0
//! ┌────────────────────────────────────┬────────┬────────────────────────────┐
//! │        turn, at least 1            │  list  │      place in the list     │
//! └────────────────────────────────────┴────────┴────────────────────────────┘
//! ```
//!
//! Locks: one for each of sixteen lists; a thread uses the same list each time, as long as that has
//! room, and redeeming goes to the list that the guard names. Nothing is called while one is held.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use uzone_os::lock;

use crate::pin::{Pinned, Referenced};

const LISTS: usize = 16;
const PLACE_BITS: u32 = 28;
const MAX_PLACES: usize = 1 << PLACE_BITS;

const _: () = assert!(LISTS << PLACE_BITS == 1 << u32::BITS);

/// A guard that was turned into 64 bits; never zero. Its pages stay held until it is redeemed.
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

impl From<Pinned> for Redeemed {
    fn from(guard: Pinned) -> Self {
        Self::Pinned(guard)
    }
}

impl From<Referenced> for Redeemed {
    fn from(guard: Referenced) -> Self {
        Self::Referenced(guard)
    }
}

#[derive(Default)]
struct List {
    places: Vec<Place>,
    /// Places that are empty and have turns left.
    empty: Vec<usize>,
}

impl List {
    /// Returns an empty place, a new one if there are fewer than `most`.
    fn vacancy(&mut self, most: usize) -> Option<usize> {
        self.empty.pop().or_else(|| {
            let place = self.places.len();
            if place >= most {
                return None;
            }
            self.places.push(Place { turn: 0, guard: None });
            Some(place)
        })
    }
}

struct Place {
    turn: u32,
    guard: Option<Redeemed>,
}

/// The raw guards of a zone.
pub(crate) struct Tokens {
    lists: [Mutex<List>; LISTS],
    /// How many places a list has at most.
    most: usize,
}

impl Default for Tokens {
    fn default() -> Self {
        Self { lists: Default::default(), most: MAX_PLACES }
    }
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
    /// Takes a guard in; gives it back if no list has room.
    pub(crate) fn park<G: Into<Redeemed>>(&self, guard: G) -> Result<RawGuard, G> {
        let own = own_list();
        for number in (own..LISTS).chain(0..own) {
            let mut list = lock(&self.lists[number]);
            let Some(place) = list.vacancy(self.most) else { continue };
            let slot = &mut list.places[place];
            // Zero is no turn, so that no guard is zero. A place whose last turn is over is not empty.
            slot.turn += 1;
            slot.guard = Some(guard.into());
            let (turn, number, place) = (u64::from(slot.turn), number as u64, place as u64);
            return Ok(RawGuard(turn << 32 | number << PLACE_BITS | place));
        }
        Err(guard)
    }

    /// Gives the guard back that these bits were made of.
    pub(crate) fn redeem(&self, raw: RawGuard) -> Option<Redeemed> {
        let turn = raw.0 >> 32;
        let low = usize::try_from(raw.0 & u64::from(u32::MAX)).ok()?;
        let place = low % MAX_PLACES;
        let mut list = lock(&self.lists[low / MAX_PLACES % LISTS]);
        let slot = list.places.get_mut(place).filter(|slot| u64::from(slot.turn) == turn)?;
        let guard = slot.guard.take()?;
        // After its last turn a place stays unused, so that no number is ever given out twice.
        if slot.turn != u32::MAX {
            list.empty.push(place);
        }
        Some(guard)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]
    use uzone_pages::{ByteLen, MemoryKind, PfnRange};

    use super::*;
    use crate::{BindOptions, Pagemap, Region, Zone};

    fn pagemap() -> Pagemap {
        let region = Region::anonymous(ByteLen::mib(2)).unwrap();
        Zone::new().bind(region, BindOptions::new(MemoryKind::Generic)).unwrap()
    }

    fn pin(pagemap: &Pagemap) -> Pinned {
        pagemap.pin(PfnRange::try_single(pagemap.range().start()).unwrap()).unwrap()
    }

    #[test]
    fn a_guard_that_no_list_has_room_for_is_given_back() {
        let pagemap = pagemap();
        let tokens = Tokens { most: 1, ..Tokens::default() };
        let mut raw = Vec::new();
        for _ in 0..LISTS {
            raw.push(tokens.park(pin(&pagemap)).unwrap());
        }
        let guard = tokens.park(pin(&pagemap)).unwrap_err();
        drop(tokens.redeem(raw.pop().unwrap()).unwrap());
        raw.push(tokens.park(guard).unwrap());
        assert!(raw.into_iter().all(|raw| tokens.redeem(raw).is_some()));
        assert!(pagemap.unbind().is_ok());
    }

    #[test]
    fn no_number_is_given_out_twice() {
        let pagemap = pagemap();
        let tokens = Tokens::default();
        let first = tokens.park(pin(&pagemap)).unwrap();
        drop(tokens.redeem(first).unwrap());
        let own = own_list();
        tokens.lists[own].lock().unwrap().places[0].turn = u32::MAX - 1;
        let last = tokens.park(pin(&pagemap)).unwrap();
        assert_eq!(last.to_bits() >> 32, u64::from(u32::MAX));
        drop(tokens.redeem(last).unwrap());
        let other = tokens.park(pin(&pagemap)).unwrap();
        assert_ne!(other.to_bits() & u64::from(u32::MAX), last.to_bits() & u64::from(u32::MAX));
        assert!(tokens.redeem(first).is_none() && tokens.redeem(last).is_none());
        assert!(tokens.redeem(other).is_some());
    }
}

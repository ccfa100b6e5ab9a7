//! How many guards there are on a whole pagemap: [`LiveRef`], which decides whether it may go.
//!
//! A folio's word counts the holds on that folio. Whether any folio of a pagemap is held would take a
//! read of every word, gigabytes for terabytes of memory; so each guard, however many folios it
//! covers, is counted once more here, in one word for the pagemap:
//!
//! ```text
//!  63       62       61                    31 30                      0
//! ┌────────┬────────┬────────────────────────┬─────────────────────────┐
//! │closing │orphaned│    guards of pins      │  guards of references   │
//! └────────┴────────┴────────────────────────┴─────────────────────────┘
//! ```
//!
//! A guard enters *before* it takes its first hold and leaves *after* it gave the last one back. So
//! if the count is killed while it is empty, no folio is held, and none will be, because entering a
//! killed count is refused.
//!
//! The same count keeps the pagemap alive, so that a guard needs no other. It starts with an owner. An
//! owner that goes while there are guards leaves it *orphaned*, and the last guard ends it; an orphan
//! without guards has ended and is never entered again.
//!
//! Every step compares first, because more than a number depends on the result: a guard must not be
//! counted, not even for a moment, after the pagemap has ended; and a leaving guard must know *before*
//! it leaves whether a thread waits for that, since afterwards the pagemap may be gone.

use uzone_pages::{HoldError, HoldKind};

use crate::sync::{AtomicU64, Ordering};

const COUNT_BITS: u32 = 31;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
const CLOSING: u64 = 1 << 63;
const ORPHANED: u64 = 1 << 62;

const _: () = assert!(2 * COUNT_BITS == ORPHANED.trailing_zeros());

/// Returns one guard of this sort, as it is added to the word.
const fn one(sort: HoldKind) -> u64 {
    match sort {
        HoldKind::Reference => 1,
        HoldKind::Pin => 1 << COUNT_BITS,
    }
}

/// The guards of one pagemap at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Guards {
    /// Guards of references.
    pub references: u32,
    /// Guards of pins.
    pub pins: u32,
}

impl Guards {
    const fn of(word: u64) -> Self {
        Self {
            references: (word & COUNT_MASK) as u32,
            pins: ((word >> COUNT_BITS) & COUNT_MASK) as u32,
        }
    }

    /// Returns whether there is none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.references == 0 && self.pins == 0
    }
}

/// The role of the guard that left, for a live reference that is closing or orphaned.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub(crate) enum Left {
    /// One of several, or no thread waits any more.
    Others,
    /// The last one: the closing thread can go on.
    LastOfClosing,
    /// The last one of a pagemap without an owner: the thread that left, and no other, ends it.
    LastOfOrphan,
}

/// The count of guards on a pagemap, whether it still admits any, and whether it has an owner. By
/// default it is open, without guards, and has an owner.
#[derive(Debug, Default)]
pub(crate) struct LiveRef(AtomicU64);

impl LiveRef {
    /// Admits a guard.
    ///
    /// # Errors
    /// [`HoldError::Closing`] if the pagemap is being unbound, [`HoldError::Gone`] if it has been, and
    /// [`HoldError::Full`] if it has too many guards; then nothing has changed.
    #[inline]
    pub(crate) fn enter(&self, sort: HoldKind) -> Result<(), HoldError> {
        // Relaxed: a guess that the exchange confirms.
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            if let Some(refusal) = refusal(word, sort) {
                return Err(refusal);
            }
            // Acquire pairs with the Release in `resurrect`: a thread that enters afterwards sees the
            // state before it.
            let after = word + one(sort);
            match self.0.compare_exchange_weak(word, after, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                // It ends: each round fails only because another thread's step succeeded.
                Err(found) => word = found,
            }
        }
    }

    /// Lets an admitted guard go if no other thread is affected: the live reference is open, and the
    /// pagemap has an owner. Returns whether it did; if so, the caller has nothing to do with the
    /// live reference any more, which may be gone by then. If not, the guard still counts, and leaves by
    /// [`LiveRef::leave`].
    #[inline]
    #[must_use = "the guard may not have left"]
    pub(crate) fn try_leave(&self, sort: HoldKind) -> bool {
        // Relaxed: a guess that the exchange confirms.
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            if word & (CLOSING | ORPHANED) != 0 {
                return false;
            }
            // Release pairs with the Acquire in `kill` and `orphan`: the thread that unbinds
            // sees the writes of every guard.
            let after = word - one(sort);
            match self.0.compare_exchange_weak(word, after, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return true,
                // It ends, as in `enter`.
                Err(found) => word = found,
            }
        }
    }

    /// Lets a guard go that was admitted, of a live reference that may be closing or orphaned. The caller sees
    /// to it that the live reference outlives the call.
    pub(crate) fn leave(&self, sort: HoldKind) -> Left {
        // Release as in `try_leave`. Acquire: the last one of an orphan ends the pagemap, which
        // the others used and its owner left.
        let before = self.0.fetch_sub(one(sort), Ordering::AcqRel);
        if !Guards::of(before - one(sort)).is_empty() {
            Left::Others
        } else if before & ORPHANED != 0 {
            Left::LastOfOrphan
        } else if before & CLOSING != 0 {
            Left::LastOfClosing
        } else {
            Left::Others // opened again meanwhile
        }
    }

    /// Admits no guard from now on. Returns those that there are; if there are none, none will be.
    #[must_use = "a live reference with guards is not killed, only closing"]
    pub(crate) fn kill(&self) -> Guards {
        Guards::of(self.0.fetch_or(CLOSING, Ordering::Acquire))
    }

    /// Admits guards again.
    pub(crate) fn resurrect(&self) {
        self.0.fetch_and(!CLOSING, Ordering::Release);
    }

    /// Records that the pagemap's owner goes. Returns the guards that there are: if there are none, the
    /// caller ends the pagemap, and no guard will enter; otherwise the last of them ends it.
    #[must_use = "without guards it is the caller who ends the pagemap"]
    pub(crate) fn orphan(&self) -> Guards {
        // Acquire pairs with the Release of those who left, for the case that the caller ends the
        // pagemap that they used; Release with the Acquire in `leave`, for the case that the last of them does.
        Guards::of(self.0.fetch_or(ORPHANED, Ordering::AcqRel))
    }

    /// Returns the guards that there are.
    #[must_use]
    pub(crate) fn guards(&self) -> Guards {
        // Acquire as in `kill`, since a thread that waits for none goes on as if it had killed it.
        Guards::of(self.0.load(Ordering::Acquire))
    }
}

/// Returns why a guard is not admitted to a live reference of which `word` is the word, if it is not.
#[inline]
fn refusal(word: u64, sort: HoldKind) -> Option<HoldError> {
    if word & (CLOSING | ORPHANED) == 0 {
        // The usual case, in one test.
    } else if word & ORPHANED != 0 && Guards::of(word).is_empty() {
        return Some(HoldError::Gone);
    } else if word & CLOSING != 0 {
        return Some(HoldError::Closing);
    }
    let is_full = (word / one(sort)) & COUNT_MASK == COUNT_MASK;
    is_full.then_some(HoldError::Full)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_killed_region_admits_no_guard_until_it_is_resurrected() {
        let live = LiveRef::default();
        assert_eq!(live.enter(HoldKind::Pin), Ok(()));
        assert_eq!(live.enter(HoldKind::Reference), Ok(()));
        assert_eq!(live.enter(HoldKind::Reference), Ok(()));
        assert!(live.try_leave(HoldKind::Reference), "no thread waits");
        assert_eq!(live.kill(), Guards { references: 1, pins: 1 });
        assert_eq!(live.enter(HoldKind::Pin), Err(HoldError::Closing));
        assert!(!live.try_leave(HoldKind::Pin), "a thread waits");
        assert_eq!(live.leave(HoldKind::Pin), Left::Others);
        assert_eq!(live.leave(HoldKind::Reference), Left::LastOfClosing);
        assert!(live.kill().is_empty());
        live.resurrect();
        assert_eq!(live.enter(HoldKind::Pin), Ok(()));
        assert_eq!(live.leave(HoldKind::Pin), Left::Others, "no thread closes it");
    }

    #[test]
    fn guards_beyond_the_most_are_refused_and_change_nothing() {
        for sort in [HoldKind::Reference, HoldKind::Pin] {
            let live = LiveRef(AtomicU64::new(one(sort) * COUNT_MASK));
            let before = live.guards();
            assert_eq!(live.enter(sort), Err(HoldError::Full));
            assert_eq!(live.guards(), before);
            assert!(live.try_leave(sort));
            assert_eq!(live.enter(sort), Ok(()));
        }
    }
}

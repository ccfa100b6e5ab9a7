//! How many guards there are on a whole pagemap: [`Ledger`], which decides whether it may go.
//!
//! A folio's word says who holds *it*. Whether anybody holds any folio of a pagemap would take a
//! look at every word, which is gigabytes for terabytes; so each guard, however many folios it
//! covers, is counted once more here, in one word for the pagemap:
//!
//! ```text
//!  63       62                    31 30                      0
//! ┌────────┬────────────────────────┬─────────────────────────┐
//! │closing │    guards of pins      │  guards of references   │
//! └────────┴────────────────────────┴─────────────────────────┘
//! ```
//!
//! A guard enters *before* it takes its first hold and leaves *after* it gave the last one back. So
//! a ledger that was closed while it was empty stands for folios that nobody holds, and that nobody
//! will hold, because entering a closed ledger is refused.
//!
//! Takers add first and look afterwards, as in `page.rs`; with at most 2^22 threads on Linux the
//! counts stay below [`MAX_GUARDS`] by checking for half of what the fields hold.

use crate::sync::{AtomicU64, Ordering};
use crate::word::HoldSort;

const COUNT_BITS: u32 = 31;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
const CLOSING: u64 = 1 << 63;

/// The most guards of one sort that a pagemap may have.
pub const MAX_GUARDS: u32 = 1 << (COUNT_BITS - 1);

/// Returns one guard of `sort`, as it is added to the ledger.
const fn one(sort: HoldSort) -> u64 {
    match sort {
        HoldSort::Reference => 1,
        HoldSort::Pin => 1 << COUNT_BITS,
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

/// Why a guard was not admitted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnterError {
    /// The pagemap is being unbound.
    #[error("the pagemap is being unbound")]
    Closing,
    /// There are [`MAX_GUARDS`] already.
    #[error("the pagemap has {MAX_GUARDS} guards of that sort already")]
    Full,
}

/// The count of guards on a pagemap, and whether it still admits any.
#[derive(Debug)]
pub struct Ledger(AtomicU64);

impl Default for Ledger {
    fn default() -> Self {
        Self::new()
    }
}

impl Ledger {
    /// Makes an open ledger without guards.
    #[must_use]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Admits a guard.
    ///
    /// # Errors
    /// [`EnterError`] if the pagemap is being unbound or has too many; then nothing has changed. On
    /// [`EnterError::Closing`] the caller wakes whoever waits for the last guard: the refused
    /// addition may have hidden from that one that it was the last.
    #[inline]
    pub fn enter(&self, sort: HoldSort) -> Result<(), EnterError> {
        // Acquire pairs with the Release in `reopen`: who enters afterwards sees what was undone.
        let before = self.0.fetch_add(one(sort), Ordering::Acquire);
        let refusal = if before & CLOSING != 0 {
            EnterError::Closing
        } else if (before / one(sort)) & COUNT_MASK >= u64::from(MAX_GUARDS) {
            EnterError::Full
        } else {
            return Ok(());
        };
        self.take_back(sort);
        Err(refusal)
    }

    #[cold]
    fn take_back(&self, sort: HoldSort) {
        // Relaxed: nothing was learnt or published by an addition that is taken back. Whoever
        // closes meanwhile counts it as a guard and finds it gone the next time it looks.
        self.0.fetch_sub(one(sort), Ordering::Relaxed);
    }

    /// Lets a guard go that was admitted. Returns whether it was the last one of a ledger that is
    /// being closed: then whoever closes it can go on.
    #[inline]
    #[must_use = "somebody may wait for it"]
    pub fn leave(&self, sort: HoldSort) -> bool {
        // Release pairs with the Acquire in `close`: who unbinds sees what every guard did.
        let before = self.0.fetch_sub(one(sort), Ordering::Release);
        before & CLOSING != 0 && Guards::of(before - one(sort)).is_empty()
    }

    /// Admits no guard from now on. Returns those that there are, of whom some may be about to be
    /// refused; if there are none, none will be.
    #[must_use = "a ledger with guards is not closed, only closing"]
    pub fn close(&self) -> Guards {
        Guards::of(self.0.fetch_or(CLOSING, Ordering::Acquire))
    }

    /// Admits guards again.
    pub fn reopen(&self) {
        self.0.fetch_and(!CLOSING, Ordering::Release);
    }

    /// Returns the guards that there are.
    #[must_use]
    pub fn guards(&self) -> Guards {
        // Acquire as in `close`, since whoever waits for none goes on as if it had closed.
        Guards::of(self.0.load(Ordering::Acquire))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_closed_ledger_admits_nobody_until_it_is_opened_again() {
        let ledger = Ledger::new();
        assert_eq!(ledger.enter(HoldSort::Pin), Ok(()));
        assert_eq!(ledger.enter(HoldSort::Reference), Ok(()));
        assert_eq!(ledger.enter(HoldSort::Reference), Ok(()));
        assert_eq!(ledger.close(), Guards { references: 2, pins: 1 });
        assert_eq!(ledger.enter(HoldSort::Pin), Err(EnterError::Closing));
        assert!(!ledger.leave(HoldSort::Reference));
        assert!(!ledger.leave(HoldSort::Pin));
        assert!(ledger.leave(HoldSort::Reference), "the last one of a closing ledger");
        assert!(ledger.close().is_empty());
        ledger.reopen();
        assert_eq!(ledger.enter(HoldSort::Pin), Ok(()));
        assert!(!ledger.leave(HoldSort::Pin), "nobody closes it");
    }

    #[test]
    fn guards_beyond_the_most_are_refused_and_change_nothing() {
        for sort in [HoldSort::Reference, HoldSort::Pin] {
            let ledger = Ledger(AtomicU64::new(one(sort) * u64::from(MAX_GUARDS)));
            let before = ledger.guards();
            assert_eq!(ledger.enter(sort), Err(EnterError::Full));
            assert_eq!(ledger.guards(), before);
        }
    }
}

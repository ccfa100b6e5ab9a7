//! A range of addresses whose errors are answered by handlers of signals, and the number of handlers inside:
//! [`Gate`].
//!
//! A handler may come at any time and waits for nothing, so its data is freed only when none is inside.
//!
//! ```text
//!    63     62      61              31 30               0
//!  ┌──────┬───────┬──────────────────┬──────────────────┐
//!  │ open │ upper │ handlers (upper) │ handlers (lower) │
//!  └──────┴───────┴──────────────────┴──────────────────┘
//! ```
//!
//! The one that has taken a gate which is not open counts in the lower place. A count cannot overflow:
//! Linux has at most 2^22 threads.
//!
//! `tests/loom.rs` searches the interleavings.

use crate::sync::{AtomicPtr, AtomicU64, Ordering};

/// The bit of a gate that is open.
const OPEN: u64 = 1 << 63;
/// The bit that decides which of two counts a handler is in that comes: the lower one, with the one that has
/// taken the gate, or the upper one.
const UPPER: u64 = 1 << 62;
/// One handler in either count.
const ONE: [u64; 2] = [1, 1 << 31];
/// The bits of a count, in the lower place.
const COUNT: u64 = (1 << 31) - 1;

/// A range of addresses, and the value that answers for it while it is open.
pub(crate) struct Gate<T> {
    state: AtomicU64,
    first: AtomicU64,
    last: AtomicU64,
    /// Read only by handlers that found the gate open as they were counted in.
    answerer: AtomicPtr<T>,
}

impl<T> Gate<T> {
    /// Returns a gate that is free: zero memory, so that a static of it costs none before it is
    /// used.
    #[cfg(not(loom))]
    pub(crate) const fn new() -> Self {
        let [state, first, last] = [const { AtomicU64::new(0) }; 3];
        Self { state, first, last, answerer: AtomicPtr::new(core::ptr::null_mut()) }
    }

    #[cfg(loom)]
    pub(crate) fn new() -> Self {
        let [state, first, last] = core::array::from_fn(|_| AtomicU64::new(0));
        Self { state, first, last, answerer: AtomicPtr::new(core::ptr::null_mut()) }
    }

    /// Takes the gate, unless it is in use or a handler of its last user is still inside.
    pub(crate) fn take(&self) -> bool {
        // Acquire pairs with the Release of those that leave: no handler of an earlier user is inside.
        self.state.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Takes the gate whether or not a handler is inside: the mistake that a model must find.
    #[cfg(loom)]
    pub(crate) fn take_without_looking(&self) -> bool {
        self.state.fetch_add(1, Ordering::Acquire);
        true
    }

    /// Gives back a gate that the caller has taken and that is not open: others may take it.
    pub(crate) fn give_back(&self) {
        // Release pairs with the Acquire of `take`.
        self.state.fetch_sub(1, Ordering::Release);
    }

    /// Opens a gate that the caller has taken.
    pub(crate) fn open(&self, first: u64, last: u64, answerer: *mut T) {
        self.answerer.store(answerer, Ordering::Relaxed);
        self.last.store(last, Ordering::Relaxed);
        self.first.store(first, Ordering::Relaxed);
        // From here on handlers enter. Release pairs with their Acquire. The one that took the gate leaves.
        self.state.fetch_add(OPEN - 1, Ordering::Release);
    }

    /// Calls `answer` with the value that answers for one of some addresses, which is not freed before it returns.
    /// Returns whether it did, and `false` if the gate is open for none of them.
    pub(crate) fn answer(
        &self,
        first: u64,
        last: u64,
        answer: impl FnOnce(*mut T) -> bool,
    ) -> bool {
        // A hint, which spares most gates a write. It may see halves of two ranges, and then misses
        // a gate only if that is being opened or closed, where missing it is one of the two right
        // answers. A thread that faults after `open` returned sees its stores, by the order of the program.
        if !self.covers(first, last) {
            return false;
        }
        // Relaxed: in either count a handler is waited for.
        let one = ONE[usize::from(self.state.load(Ordering::Relaxed) & UPPER != 0)];
        // Acquire pairs with the Release of `open`: the value behind the pointer is seen. And with the Release of
        // `drain`: a handler that comes after it sees the earlier stores of its caller.
        let state = self.state.fetch_add(one, Ordering::Acquire);
        // The addresses again: the gate may have become another mapping's meanwhile.
        let is_answered = state & OPEN != 0
            && self.covers(first, last)
            && answer(self.answerer.load(Ordering::Relaxed));
        // Release pairs with the Acquire of `is_empty` and `drain`.
        self.state.fetch_sub(one, Ordering::Release);
        is_answered
    }

    /// Waits until all handlers have left that are inside an open gate: each that comes later sees the caller's stores.
    /// Others come and go meanwhile, also in the calling thread, and are not waited for.
    /// Calls `goes_on` between looks; if that returns `false` it gives up. Returns whether they have left.
    /// One thread at a time calls it.
    pub(crate) fn drain(&self, goes_on: impl Fn() -> bool) -> bool {
        // New handlers are counted in the one place while the other is waited for, and then the other way
        // round: a handler that looked for its count long ago may be in either.
        for one in ONE {
            // Release pairs with the Acquire of the handlers that come.
            self.state.fetch_xor(UPPER, Ordering::Release);
            // Acquire pairs with the Release of the handlers that leave.
            while self.state.load(Ordering::Acquire) & (COUNT * one) != 0 {
                if !goes_on() {
                    self.state.fetch_and(!UPPER, Ordering::Relaxed);
                    return false;
                }
            }
        }
        true
    }

    /// Returns whether the gate has one of some addresses.
    fn covers(&self, first: u64, last: u64) -> bool {
        // Relaxed: a handler that found the gate open sees the stores of `open`. The last address of
        // a gate that is not open is zero, so it decides in one load.
        first <= self.last.load(Ordering::Relaxed) && self.first.load(Ordering::Relaxed) <= last
    }

    /// Closes the gate to handlers. The gate stays the caller's.
    pub(crate) fn close(&self) {
        self.first.store(u64::MAX, Ordering::Relaxed);
        self.last.store(0, Ordering::Relaxed);
        // The caller is counted again, so that no other takes the gate as soon as the last handler has left.
        // Relaxed: the caller has seen all that it frees, and stores of others are seen by `is_empty`.
        self.state.fetch_sub(OPEN - 1, Ordering::Relaxed);
    }

    /// Returns whether no handler is inside of a gate that the caller has closed.
    pub(crate) fn is_empty(&self) -> bool {
        // Acquire pairs with the Release of the handlers that leave.
        self.state.load(Ordering::Acquire) == 1
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_gate_with_a_handler_inside_is_not_taken_again() {
        let gate = Gate::<()>::new();
        assert!(gate.take());
        gate.open(0, 9, core::ptr::null_mut());
        assert!(gate.answer(9, 10, |_| {
            gate.close();
            gate.give_back();
            assert!(!gate.take(), "a handler is inside");
            true
        }));
        assert!(gate.take());
    }
}

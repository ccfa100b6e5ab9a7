//! How the loom tests search: outcomes that a model must reach, and threads that share a value. The
//! tests of `os` and `fault` use it as well.

#![allow(dead_code, reason = "each test program uses its part")]

use std::sync::atomic::{AtomicBool, Ordering};

use loom::sync::Arc;
use loom::thread::{self, JoinHandle};

/// The outcomes a model was seen to have, collected over all its interleavings. They are flags
/// outside of the model, and survive from one interleaving to the next.
#[derive(Clone)]
pub(crate) struct Seen(pub(crate) std::sync::Arc<[AtomicBool]>);

impl Seen {
    pub(crate) fn new(count: usize) -> Self {
        Self((0..count).map(|_| AtomicBool::default()).collect())
    }

    pub(crate) fn mark(&self, outcome: usize) {
        self.0[outcome].store(true, Ordering::Relaxed);
    }

    pub(crate) fn assert_all(&self) {
        for (outcome, seen) in self.0.iter().enumerate() {
            assert!(
                seen.load(Ordering::Relaxed),
                "outcome {outcome} was never reached: the model does not test what its name claims"
            );
        }
    }
}

/// Searches the interleavings of a model, and asserts that each of so many outcomes was reached.
pub(crate) fn search(outcomes: usize, model: impl Fn(&Seen) + Send + Sync + 'static) {
    let seen = Seen::new(outcomes);
    let marks = seen.clone();
    loom::model(move || model(&marks));
    seen.assert_all();
}

/// Starts a thread that has a share of a value.
pub(crate) fn beside<T: 'static, R: 'static>(
    shared: &Arc<T>,
    run: impl FnOnce(&T) -> R + 'static,
) -> JoinHandle<R> {
    let shared = shared.clone();
    thread::spawn(move || run(&shared))
}

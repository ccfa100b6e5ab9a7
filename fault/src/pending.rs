//! Pages that somebody waits for and that are being produced: [`Pending`].
//!
//! Locks: one, held for a push, a removal or a look, over nothing else.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How many pages of one mapping may be waited for.
const LIMIT: usize = 1024;

/// The pages of one mapping that are being produced, the oldest first.
pub(crate) struct Pending(Mutex<VecDeque<(Instant, u64)>>);

impl Pending {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(VecDeque::with_capacity(LIMIT)))
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Instant, u64)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a page that somebody waits for since `since`. Returns whether there was room.
    pub(crate) fn push(&self, since: Instant, page: u64) -> bool {
        let mut list = self.lock();
        let has_room = list.len() < LIMIT;
        if has_room {
            list.push_back((since, page));
        }
        has_room
    }

    /// Takes that a page is produced, or given up. Returns since when it was waited for.
    pub(crate) fn remove(&self, page: u64) -> Option<Instant> {
        let mut list = self.lock();
        let at = list.iter().position(|&(_, pending)| pending == page)?;
        list.remove(at).map(|(since, _)| since)
    }

    /// Returns since when the oldest is waited for.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.lock().front().map(|&(since, _)| since)
    }

    /// Returns how many there are.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Takes a page out that is waited for since longer than `age`, if there is one.
    pub(crate) fn take_older_than(&self, age: Duration) -> Option<u64> {
        let mut list = self.lock();
        let is_old = list.front().is_some_and(|(since, _)| since.elapsed() >= age);
        if is_old { list.pop_front().map(|(_, page)| page) } else { None }
    }

    /// Takes all out.
    pub(crate) fn drain(&self) -> Vec<u64> {
        self.lock().drain(..).map(|(_, page)| page).collect()
    }
}

//! Pages that are being produced while threads wait for them: [`Pending`].
//!
//! Locks: one, held for a push, a removal or a look, over nothing else.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use uzone_os::signals::lock_uninterrupted;
use uzone_os::uffd::FaultKind;

/// How many pages of one mapping may be waited for.
const LIMIT: usize = 1024;

/// A page that is being produced, and its fault or call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awaited {
    pub(crate) page: u64,
    pub(crate) since: Instant,
    /// The kind of the fault that asked for it, and whether it was a write; none if a thread populates.
    pub(crate) fault: Option<(FaultKind, bool)>,
    /// Whether its bytes are there, and the kernel has yet to take them.
    pub(crate) is_produced: bool,
}

/// The pages of one mapping that are being produced, the oldest first.
pub(crate) struct Pending(Mutex<VecDeque<Awaited>>);

impl Pending {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(VecDeque::with_capacity(LIMIT)))
    }

    /// Adds a page. Returns whether there was room.
    pub(crate) fn push(&self, awaited: Awaited) -> bool {
        let mut list = lock_uninterrupted(&self.0);
        let has_room = list.len() < LIMIT;
        if has_room {
            list.push_back(awaited);
        }
        has_room
    }

    /// Removes a page that was produced or given up. Returns the facts about the fault.
    pub(crate) fn remove(&self, page: u64) -> Option<Awaited> {
        let mut list = lock_uninterrupted(&self.0);
        let at = list.iter().position(|awaited| awaited.page == page)?;
        list.remove(at)
    }

    /// Notes that the bytes of a page are there, and the kernel has not taken them.
    pub(crate) fn note_produced(&self, page: u64) {
        if let Some(awaited) =
            lock_uninterrupted(&self.0).iter_mut().find(|awaited| awaited.page == page)
        {
            awaited.is_produced = true;
        }
    }

    /// Returns since when the oldest is waited for.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        lock_uninterrupted(&self.0).front().map(|awaited| awaited.since)
    }

    /// Returns how many there are.
    pub(crate) fn len(&self) -> usize {
        lock_uninterrupted(&self.0).len()
    }

    /// Takes the oldest page out, if it is waited for since longer than `age`: each is given up by one thread.
    pub(crate) fn take_older_than(&self, age: Duration) -> Option<Awaited> {
        let mut list = lock_uninterrupted(&self.0);
        list.pop_front_if(|awaited| awaited.since.elapsed() >= age)
    }

    /// Returns the oldest.
    pub(crate) fn first(&self) -> Option<u64> {
        lock_uninterrupted(&self.0).front().map(|awaited| awaited.page)
    }

    /// Takes all out.
    pub(crate) fn drain(&self) -> Vec<u64> {
        lock_uninterrupted(&self.0).drain(..).map(|awaited| awaited.page).collect()
    }
}

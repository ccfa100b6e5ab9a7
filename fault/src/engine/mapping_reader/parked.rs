//! Pages whose faults are reported again a little later, since there was no room for them: [`Parked`].

use std::time::Instant;

use uzone_pages::Content;

use super::RETRY;
use crate::engine::core::Core;

/// How many pages may wait for room in the queue; if there are more, all waiting threads are woken.
const PARKED: usize = 256;

/// Pages for which there was no room in the queue.
pub(super) struct Parked {
    pages: Vec<u64>,
    /// More than there is room for: all waiting threads are woken.
    all: bool,
    pub(super) since: Instant,
}

impl Parked {
    pub(super) fn new() -> Self {
        Self { pages: Vec::with_capacity(PARKED), all: false, since: Instant::now() }
    }

    pub(super) fn push(&mut self, page: u64) {
        if !self.is_waiting() {
            self.since = Instant::now();
        }
        if self.pages.len() == PARKED {
            self.all = true;
        } else {
            self.pages.push(page);
        }
    }

    pub(super) fn push_all(&mut self) {
        if !self.is_waiting() {
            self.since = Instant::now();
        }
        self.all = true;
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.all || !self.pages.is_empty()
    }

    /// Wakes the threads that wait for the pages, if it is time: they fault again.
    pub(super) fn wake(&mut self, core: &Core) {
        if self.is_waiting() && self.since.elapsed() >= RETRY {
            self.wake_now(core);
        }
    }

    pub(super) fn wake_now(&mut self, core: &Core) {
        if self.all {
            let area = core.contents().area();
            core.kernel().wake(core.bytes(area.start().get()..area.end().get()));
        }
        for page in self.pages.drain(..) {
            if core.contents().get(page) != Content::Filling {
                core.kernel().wake(core.bytes(page..page + 1));
            }
        }
        self.all = false;
    }
}

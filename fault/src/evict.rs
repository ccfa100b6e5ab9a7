//! Giving pages back whose writes are tracked: [`LazyMapping::evict`] takes clean pages alone,
//! [`LazyMapping::evict_all`] the others too.
//!
//! Between the look at a page and its being given back somebody may write to it. Where writes are
//! events, such a writer waits until the page can be had again, so a page that was written is never
//! given back by mistake. Where the kernel only notes them, nobody can be kept from writing, and
//! clean pages are not told from others in time: that is refused.

use std::ops::Range;

use crate::dirty::Tracker;
use crate::dirty::states::{States, Which};
use crate::error::LazyError;
use crate::lazy::LazyMapping;

impl LazyMapping {
    /// Gives the pages of a range back as [`LazyMapping::evict`] does, also those that were written
    /// since they were filled or written back: what was written to private memory is lost.
    ///
    /// # Errors
    /// As for [`LazyMapping::evict`].
    pub fn evict_all(&self, range: Range<u64>) -> Result<u64, LazyError> {
        let pages = self.pages(&range)?;
        let Some(tracker) = self.tracking() else { return self.evict_pages(pages) };
        let _turn = tracker.turn();
        match tracker.states() {
            Some(states) => {
                let clean = self.evict_closed(tracker, states, pages.clone(), Which::Clean)?;
                Ok(clean + self.evict_closed(tracker, states, pages, Which::Dirty)?)
            }
            None => self.evict_pages(pages),
        }
    }

    /// Gives those pages back that are clean.
    pub(crate) fn evict_clean(
        &self,
        tracker: &Tracker,
        pages: Range<u64>,
    ) -> Result<u64, LazyError> {
        let _turn = tracker.turn();
        match tracker.states() {
            Some(states) => self.evict_closed(tracker, states, pages, Which::Clean),
            None => Err(LazyError::CannotEvict {
                reason: "a page that is written meanwhile would be lost, since the kernel only notes it: track writes synchronously, or, when nobody writes any more and what was written is brought back, use evict_all",
            }),
        }
    }

    /// Gives pages back of which no writer can get hold meanwhile.
    fn evict_closed(
        &self,
        tracker: &Tracker,
        states: &States,
        pages: Range<u64>,
        which: Which,
    ) -> Result<u64, LazyError> {
        let (mut evicted, mut answer) = (0, Ok(()));
        for run in states.close(pages, which) {
            if answer.is_ok() {
                match self.evict_pages(run.clone()) {
                    Ok(count) => evicted += count,
                    Err(error) => answer = Err(error),
                }
            }
            // Those that stayed are what they were.
            states.release(run.clone(), which == Which::Clean);
            // Whoever wanted to write meanwhile was left to us.
            tracker.wake_pages(&run);
        }
        answer.map(|()| evicted)
    }
}

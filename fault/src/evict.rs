//! Giving pages back whose writes are tracked: [`LazyMapping::evict`] takes clean pages alone,
//! [`LazyMapping::evict_all`] the others too. Another thread may write to a page between the check that it
//! is clean and its eviction. Where writes are events, such a writer waits until the page can be filled
//! again, so a written page is never evicted by mistake. Where the kernel only records writes, no writer
//! can be stopped, so eviction is refused.

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

    /// Gives the clean pages back.
    pub(crate) fn evict_clean(
        &self,
        tracker: &Tracker,
        pages: Range<u64>,
    ) -> Result<u64, LazyError> {
        let _turn = tracker.turn();
        match tracker.states() {
            Some(states) => self.evict_closed(tracker, states, pages, Which::Clean),
            None => Err(LazyError::CannotEvict {
                reason: "a page that is written meanwhile would be lost, since the kernel only records the write: track writes synchronously, or use evict_all when no thread writes any more and everything is written back",
            }),
        }
    }

    /// Gives back pages that no writer can reach meanwhile.
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
            // Threads that faulted on a write meanwhile wait for this thread.
            tracker.wake_pages(&run);
        }
        answer.map(|()| evicted)
    }
}

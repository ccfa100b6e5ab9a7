//! Pages whose bytes are lost: marking them, listing them, and notifying their holders.
//!
//! A page that goes bad takes nothing else with it. Of base pages it is the page's own word that
//! states it; of a larger folio the word states that some page is bad, and the list here names it, so
//! the other 511 or 262,143 are pinned and used as before. Linux gives up the whole folio.
//!
//! A pin that comes later is refused if its range has a bad page. The holder of an earlier one is notified:
//! the list is written before the word, so a pin that was not warned is counted in the
//! word that [`Pagemap::poison`](crate::PagemapView::poison) returns, and the owner's callback hears of it
//! (`pages/tests/loom.rs` searches that order).
//!
//! Locks: one for the list, held over the change of the word so that two threads that mark and unpoison
//! pages of the same folio leave list and word in agreement. Readers ask the list only when a word
//! states that it is not empty.

pub(crate) mod bad_pages;
pub(crate) mod watch;

use uzone_pages::{Content, Order, Payload, Pfn, PfnRange};

use crate::error::PinError;
use crate::ops::Poisoned;
use crate::pagemap::PagemapView;
use crate::pagemap::shared::PagemapShared;
use crate::pin::pin_target::{PinTarget, not_here};
use crate::poison::bad_pages::pages_in;

impl<P: Payload> PagemapShared<P> {
    pub(crate) fn poison(&self, pfn: Pfn) -> Result<Poisoned, PinError> {
        let folio = self.described(pfn)?;
        let poisoned = {
            let mut list = self.bad.write();
            if !list.insert(pfn) {
                return Err(PinError::AlreadyPoisoned { pfn });
            }
            let word = if self.order() == Order::BASE {
                folio.poison().unwrap_or_else(|| folio.word())
            } else {
                folio.set_partly_poisoned(true)
            };
            Poisoned { pfn, pins: word.pins(), references: word.references() }
        };
        self.tell(poisoned); // without the lock, so that it may ask
        Ok(poisoned)
    }

    fn unpoison(&self, pfn: Pfn) -> Result<(), PinError> {
        let folio = self.described(pfn)?;
        let mut list = self.bad.write();
        if !list.contains(&pfn) {
            return Err(PinError::NotPoisoned { pfn });
        }
        let word = folio.word();
        if word.is_poison_pending() || self.order() != Order::BASE && word.content().is_owned() {
            return Err(PinError::Owned { pfn });
        }
        list.remove(&pfn);
        if self.order() == Order::BASE {
            let unpoisoned = folio.advance(Content::Poisoned, self.unpoisoned_as());
            debug_assert!(
                unpoisoned.is_ok(),
                "what is listed is poisoned, and only here is it unpoisoned"
            );
        } else {
            let head = pfn.align_down(self.order());
            let folio_range = PfnRange::try_new(head, self.order().pages());
            let is_rest_good =
                folio_range.is_ok_and(|range| pages_in(&list, range).next().is_none());
            // The page that was left out when the folio was cleared is not zero. While the flag
            // stands, no thread pins it; a pin of its neighbours has made the folio present before.
            let _ = folio
                .advance(Content::Zero, Content::Present)
                .and_then(|()| folio.advance(Content::Present, Content::Unknown));
            if is_rest_good {
                folio.set_partly_poisoned(false);
            }
        }
        Ok(())
    }

    fn described(&self, pfn: Pfn) -> Result<uzone_pages::Folio<'_, P>, PinError> {
        self.memmap.folio(pfn).ok_or_else(|| {
            // The last number of all is of no range, and of no region.
            let page = PfnRange::try_single(pfn);
            page.map_or(PinError::NoPage { pfn }, |page| not_here(self, page))
        })
    }
}

impl<P: Payload> PagemapView<P> {
    /// Records that the bytes of page `pfn` are lost: the page and no other. From now on it cannot be
    /// pinned, handed out or cleared. The owner's
    /// [`on_poison`](crate::PagemapOps::on_poison) is called, and the result states how many
    /// had the page pinned already; their guards answer [`Pinned::bad_pages`](crate::Pinned::bad_pages).
    ///
    /// # Errors
    /// [`PinError::NotHere`] or [`PinError::Metadata`] if the region has no descriptor of the page, and
    /// [`PinError::AlreadyPoisoned`].
    pub fn poison(&self, pfn: Pfn) -> Result<Poisoned, PinError> {
        let poisoned = self.inner.poison(pfn)?;
        tracing::debug!(%pfn, "poison");
        Ok(poisoned)
    }

    /// Records that page `pfn` is good again, as after its block was written or replaced. What is in it
    /// is unknown; where pages were absent to begin with
    /// ([`BindOptions::absent`](crate::BindOptions::absent)), it is that again.
    ///
    /// # Errors
    /// [`PinError::NotHere`] or [`PinError::Metadata`] if the region has no descriptor of the page;
    /// [`PinError::NotPoisoned`]; and [`PinError::Owned`] while a thread still clears or fills it, whose
    /// bytes must not be taken for those of the new page.
    pub fn unpoison(&self, pfn: Pfn) -> Result<(), PinError> {
        self.inner.unpoison(pfn)
    }

    /// Returns the pages of `range` that are known to be bad, in ascending order.
    #[must_use]
    pub fn bad_pages(&self, range: PfnRange) -> Vec<Pfn> {
        self.inner.collect_bus_errors();
        self.inner.bad.in_range(range)
    }
}

//! Bus errors of a region as bad pages: the kernel reports an error to the first access to a page, and the
//! pagemap then knows it for all its users.
//!
//! Opt-in twice: the program installs the handler ([`sigbus::install`]), and asks
//! for each pagemap. The handler only notes; here the notes become poison, before the next pin is
//! given, or when the caller asks. Without a bus error a pin pays one load for that.

use uzone_os::sigbus::{self, BusError, BusKind, HandlerError, Watch};
use uzone_pages::{PageCount, Payload, Pfn, PfnRange};

use crate::pagemap::PagemapView;
use crate::pagemap::shared::PagemapShared;
use crate::panics::FirstPanic;
use crate::pin::pin_target::PinTarget;

/// Returns the pages of a region that a bus error is about. The region starts at `start` with the
/// first page of `range`, and `shift` is log2 of the bytes of a page.
fn pages_of(error: BusError, start: u64, range: PfnRange, shift: u32) -> Option<PfnRange> {
    match error.kind {
        BusKind::ActionRequired | BusKind::ActionOptional | BusKind::BeyondEnd => {}
        // The access is wrong, not the memory.
        _ => return None,
    }
    let below = 1_u64.checked_shl(error.lsb.into()).map_or(u64::MAX, |bytes| bytes - 1);
    let address = error.address.get() as u64; // an address is at most 64 bits
    // The broken memory may begin before the region and end behind it.
    let first = (address & !below).saturating_sub(start) >> shift;
    let last = (address | below).checked_sub(start)? >> shift;
    let first = range.start().checked_add(PageCount::new(first)).ok()?;
    let end = range.start().checked_add(PageCount::new(last.checked_add(1)?)).ok()?;
    let end = end.min(range.end());
    PfnRange::try_new(first, end.checked_since(first)?).ok()
}

impl<P: Payload> PagemapShared<P> {
    /// Makes the bus errors that were noted since the last time bad pages. Returns how many pages
    /// were not known to be bad.
    pub(crate) fn collect_bus_errors(&self) -> u64 {
        let Some(watch) = self.watch.get() else { return 0 };
        if watch.pending() == 0 {
            return 0;
        }
        self.drain(watch)
    }

    #[cold]
    fn drain(&self, watch: &Watch) -> u64 {
        let (start, shift) = (watch.addr().get() as u64, self.region.page_size().shift());
        let mut found = 0;
        // An error that was taken from the watch is not found again, so all its pages are made bad, also
        // if the owner panics who is called for each.
        let mut panic = FirstPanic::default();
        watch.drain(|error| {
            let pages = pages_of(error, start, self.range(), shift);
            for pfn in pages.into_iter().flat_map(PfnRange::iter) {
                found += u64::from(panic.call(|| self.poison(pfn).is_ok()).unwrap_or(true));
            }
        });
        panic.resume();
        found
    }
}

impl<P: Payload> PagemapView<P> {
    /// Makes every page bad that raises `SIGBUS` from now on: memory that the hardware found broken,
    /// holes of a file that was truncated, pages that a page server poisoned. Pins are refused from
    /// then on, and [`PagemapOps::on_poison`](crate::PagemapOps::on_poison) hears of the page, on the
    /// thread that pins or collects next and not in the signal handler.
    ///
    /// An access to such a page still raises the signal; only copies by
    /// [`Pinned::read_at`](crate::Pinned::read_at), `write_at` and the like get an error instead. Asking twice
    /// is no error.
    ///
    /// # Errors
    /// [`HandlerError`] if the handler is not installed ([`sigbus::install`]), or
    /// there are too many watches.
    pub fn watch_bus_errors(&self) -> Result<(), HandlerError> {
        if self.inner.watch.get().is_none() {
            let mapping = self.inner.region.memory();
            // Of two who ask at once, the later one's watch is dropped.
            let _ = self.inner.watch.set(sigbus::watch(mapping.addr(), mapping.len())?);
        }
        Ok(())
    }

    /// Makes the bus errors that were noted so far bad pages, as the next pin would. Returns how many
    /// pages were not known to be bad.
    #[expect(clippy::must_use_candidate, reason = "it is called for its effect")]
    pub fn collect_bus_errors(&self) -> u64 {
        self.inner.collect_bus_errors()
    }

    /// Returns how many bus errors were lost because too many came before they were collected: then
    /// unknown pages may be bad. Zero without a watch.
    #[must_use]
    pub fn lost_bus_errors(&self) -> u64 {
        self.inner.watch.get().map_or(0, Watch::lost)
    }

    /// Returns whether page `pfn` is known to be bad.
    #[must_use]
    pub fn is_poisoned(&self, pfn: Pfn) -> bool {
        self.inner.collect_bus_errors();
        PfnRange::try_single(pfn).is_ok_and(|range| self.inner.bad.first_in(range).is_some())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]
    use uzone_os::Addr;

    use super::*;

    #[test]
    fn an_error_is_about_the_pages_that_it_names_and_the_region_has() {
        let range = PfnRange::try_new(Pfn::new(100), PageCount::new(1024)).unwrap();
        let start = 0x4000_0000_u64;
        let pages = |address: u64, lsb, kind| {
            let address = Addr::new(usize::try_from(address).unwrap());
            pages_of(BusError::new(address, lsb, kind), start, range, 12)
                .map(|pages| (pages.start().get(), pages.pages().get()))
        };
        assert_eq!(pages(start, 0, BusKind::BeyondEnd), Some((100, 1)));
        assert_eq!(pages(start + 0x5fff, 12, BusKind::ActionRequired), Some((105, 1)));
        assert_eq!(pages(start + 0x21_0000, 21, BusKind::ActionOptional), Some((612, 512)));
        assert_eq!(pages(start + 0x21_0000, 30, BusKind::ActionRequired), Some((100, 1024)));
        assert_eq!(pages(start + 1024 * 4096, 12, BusKind::ActionRequired), None);
        assert_eq!(pages(start - 1, 0, BusKind::BeyondEnd), None);
        assert_eq!(pages(start - 0x1000, 63, BusKind::ActionRequired), Some((100, 1024)));
        assert_eq!(pages(start, 0, BusKind::Alignment), None);
    }
}

//! Copying whole folios: [`Pagemap::copy_folio`].

use uzone_pages::{ByteLen, Content, Order, Payload, Pfn, PfnRange};

use crate::clear::batches::Batched;
use crate::clear::options::{Cleared, ZeroOptions};
use crate::clear::zero::{CLEARABLE, Owned, Zeroed};
use crate::error::{PinError, Unclearable, WriteError};
use crate::pagemap::Pagemap;
use crate::pin::pin_target::PinTarget;

impl<P: Payload> Pagemap<P> {
    /// Copies the folio at `from` to the one at `to`, by the largest extent and past the cache where
    /// that is faster, instead of page by page. Both may be of different regions. The source is held
    /// for the time, and the destination this thread's alone; it is *present* afterwards.
    ///
    /// # Errors
    /// [`WriteError::Pin`] if a page is not the region's, [`WriteError::CutsFolio`] if it is no head or the
    /// folios are not of the same order, [`WriteError::Copy`] if the source's bytes are not there or have bad
    /// ones among them, or the destination is pinned, bad or taken by another thread, and else as
    /// [`Region::copy_range`](crate::Region::copy_range). If it was cancelled, the destination's content is
    /// unknown, and the answer states how much was copied.
    pub fn copy_folio<Q: Payload>(
        &self,
        to: Pfn,
        source: &Pagemap<Q>,
        from: Pfn,
        options: &ZeroOptions,
    ) -> Result<Cleared, WriteError> {
        let (order, other) = (self.inner.order(), source.inner.order());
        let to = folio_at(to, order, self.range())?;
        let from = folio_at(from, other, source.range())?;
        if order != other {
            return Err(WriteError::CutsFolio { asked: from, order });
        }
        // A pin: while it lasts, the bytes are there and stay.
        let held = source.try_pin(from).map_err(|failure| WriteError::Copy {
            pfn: from.start(),
            cause: match failure {
                PinError::Refused { cause: uzone_pages::HoldError::Content(content), .. } => {
                    Unclearable::Content(content)
                }
                _ => Unclearable::Poisoned,
            },
        })?;
        let mut owned =
            self.take_for_copy(to).map_err(|cause| WriteError::Copy { pfn: to.start(), cause })?;
        let bytes = self.inner.bytes_of(to);
        let source_bytes = (source.inner.region.memory(), source.inner.bytes_of(from).start);
        let len = ByteLen::new(bytes.end - bytes.start);
        let (mapping, page) = (self.inner.region.memory(), self.region().page_size());
        let copied =
            Batched::copy(mapping, page, bytes.start, source_bytes, len, options)?.run(options);
        drop(held);
        let mut zeroed = Zeroed::default();
        owned.ranges.clear();
        self.inner.finish(to, Content::Unknown, &mut zeroed);
        if !zeroed.bad.is_empty() {
            let cause = Unclearable::Poisoned;
            return Err(WriteError::Copy { pfn: to.start(), cause });
        }
        if copied.is_whole() {
            // A faster thread has taken it over as it is.
            self.inner.memmap.advance_run(to, &[Content::Unknown], Content::Present, |_, _| ());
        }
        Ok(copied)
    }

    /// Takes a folio whose bytes are about to be replaced, or returns why it is not to be had.
    fn take_for_copy(&self, folio: PfnRange) -> Result<Owned<'_, P>, Unclearable> {
        if self.inner.bad.first_in(folio).is_some() {
            return Err(Unclearable::Poisoned);
        }
        // A zero page has no owner; the thread that replaces its bytes owns it.
        self.inner.memmap.advance_run(folio, &[Content::Zero], Content::Present, |_, _| ());
        let states = (Content::Zeroing, Content::Unknown);
        let mut cause = Unclearable::Poisoned;
        let owned = Owned::take(&self.inner, folio, &CLEARABLE, states, |_, error| {
            cause = Unclearable::of(error);
        });
        if owned.ranges.is_empty() { Err(cause) } else { Ok(owned) }
    }
}

/// Returns the folio that starts at page `pfn` of the pages `region`.
fn folio_at(pfn: Pfn, order: Order, region: PfnRange) -> Result<PfnRange, WriteError> {
    let asked = PfnRange::try_new(pfn, order.pages()).unwrap_or(region);
    if !region.contains_range(asked) {
        return Err(PinError::NotHere { asked, region }.into());
    }
    if !pfn.is_aligned(order) {
        return Err(WriteError::CutsFolio { asked, order });
    }
    Ok(asked)
}

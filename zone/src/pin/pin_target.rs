//! A pagemap as its guards see it: [`PinTarget`].

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use uzone_os::{AccessError, KernelPin, KernelPinError, LiveArc};
use uzone_pages::{Content, HoldError, HoldKind, Order, PageCount, Pfn, PfnRange, Span, Word};

use crate::error::PinError;
#[cfg(debug_assertions)]
use crate::pin::guards::GuardBook;
use crate::pin::token::Tokens;
use crate::region::Region;

/// One contiguous piece of held memory, for a DMA engine or an I/O call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Where it starts in memory of this process.
    pub address: usize,
    /// Its length.
    pub len_bytes: u64,
    /// Its first page.
    pub pfn: Pfn,
}

/// Where the guards of a pagemap enter it.
pub(crate) type Place = LiveArc<dyn PinTarget>;

/// A pagemap as its guards see it, whatever its payload.
pub(crate) trait PinTarget: Any + Send + Sync {
    fn range(&self) -> PfnRange;
    /// Returns the pages of the region that are not described, if its descriptors lie in it.
    fn metadata_range(&self) -> Option<PfnRange>;
    fn order(&self) -> Order;
    #[cfg(debug_assertions)]
    fn guards(&self) -> &GuardBook;
    /// Returns the raw guards of the zone that the pagemap is of.
    fn tokens(&self) -> Arc<Tokens>;
    /// Returns where a range of pages of the region lies in memory.
    fn segment(&self, range: PfnRange) -> Option<Segment>;
    fn hold(&self, range: PfnRange, sort: HoldKind) -> Result<Span, (Pfn, HoldError)>;
    fn release(&self, span: Span, sort: HoldKind);
    fn split(
        &self,
        span: Span,
        sort: HoldKind,
        pages: PageCount,
    ) -> Result<(Span, Span), Option<(Pfn, HoldError)>>;
    /// Makes the pages of a range present that are known to be zero: their holder may write to them.
    fn take_zero(&self, range: PfnRange);
    /// Makes the pages of a range that are not there be there, for a pin that was refused by the content
    /// of one. Returns whether it is worth trying again.
    fn produce(&self, range: PfnRange, refused: Content) -> Result<bool, PinError>;
    /// Returns the kind of the memory if it cannot be pinned for long.
    fn not_for_long(&self) -> Option<&'static str>;
    /// Has the kernel pin the pages of a range, which the caller has pinned.
    fn pin_in_kernel(&self, range: PfnRange) -> Result<KernelPin, KernelPinError>;
    fn bad_pages(&self, range: PfnRange) -> Vec<Pfn>;
    fn word(&self, pfn: Pfn) -> Word;
    fn region(&self) -> &Region;
    /// Returns the bytes of the region that pages of it are.
    fn bytes_of(&self, range: PfnRange) -> Range<u64>;
    /// Writes to the region for a caller who may.
    fn write(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), AccessError>;

    // Two methods in one, so that a guard costs one call of a table and not two.

    /// Holds the folios of `range` for a caller that has entered, so that what is held is
    /// [`Span::of_folios`] of it. The failure is boxed so that its absence is a register.
    fn admit(&self, range: PfnRange, sort: HoldKind) -> Result<(), Box<PinError>> {
        if !self.range().contains_range(range) {
            return Err(Box::new(not_here(self, range)));
        }
        match self.hold(range, sort) {
            Ok(span) => {
                debug_assert_eq!(span, Span::of_folios(range), "nothing was split yet");
                Ok(())
            }
            Err(refused) => Err(Box::new(failure(self, range, refused))),
        }
    }
}

/// Returns the pieces of `range` between bad pages, which are in ascending order.
pub(crate) fn good_pieces(range: PfnRange, bad: &[Pfn]) -> Vec<PfnRange> {
    let mut start = range.start();
    let mut pieces = Vec::new();
    let ends = bad.iter().map(|pfn| (*pfn, pfn.checked_add(PageCount::new(1))));
    for (end, next) in ends.chain([(range.end(), Ok(range.end()))]) {
        let piece = end.checked_since(start).and_then(|pages| PfnRange::try_new(start, pages).ok());
        pieces.extend(piece);
        start = next.unwrap_or(range.end());
    }
    pieces
}

/// Returns the caller's error for a refused range.
#[cold]
pub(crate) fn failure(
    inner: &(impl PinTarget + ?Sized),
    range: PfnRange,
    (pfn, cause): (Pfn, HoldError),
) -> PinError {
    // A folio whose head lies before the range is in the way from its first page on.
    let good = pfn.checked_since(range.start()).unwrap_or_default();
    if cause != HoldError::Content(Content::Poisoned) {
        return PinError::Refused { pfn, good, cause };
    }
    let mut bad = inner.bad_pages(range);
    if bad.is_empty() {
        bad.push(pfn); // unpoisoned by now
    }
    PinError::Poisoned { pfn, good: good_pieces(range, &bad) }
}

/// Returns whether `pfn` is a page of the region that is not described: it holds descriptors, or is
/// reserved, or skipped.
pub(crate) fn is_metadata(inner: &(impl PinTarget + ?Sized), pfn: Pfn) -> bool {
    inner.metadata_range().is_some_and(|metadata| metadata.contains(pfn))
}

/// Returns why pages that are not all described cannot be held.
#[cold]
pub(crate) fn not_here(inner: &(impl PinTarget + ?Sized), asked: PfnRange) -> PinError {
    if let Some(metadata) = inner.metadata_range() {
        // The first of those that were asked for, if there is one.
        let pfn = asked.start().max(metadata.start());
        if is_metadata(inner, pfn) && asked.contains(pfn) {
            return PinError::Metadata { pfn, metadata };
        }
    }
    PinError::NotHere { asked, region: inner.range() }
}

/// Whether a page has to be produced before it can be pinned, or a thread is producing it.
pub(crate) fn is_missing(content: Content) -> bool {
    matches!(content, Content::Absent | Content::Filling | Content::Removed)
}

/// Returns the byte of the region that byte `offset_bytes` of the pages `held` is. Refuses bytes
/// that are not all in these.
pub(crate) fn start_inside(
    inner: &(impl PinTarget + ?Sized),
    held: PfnRange,
    offset_bytes: u64,
    len_bytes: usize,
) -> Result<u64, AccessError> {
    let held = inner.bytes_of(held);
    let end = offset_bytes.checked_add(len_bytes as u64); // a length in memory is at most 64 bits
    match end {
        Some(end) if end <= held.end - held.start => Ok(held.start + offset_bytes),
        _ => Err(AccessError::Beyond {
            start: offset_bytes,
            end: end.unwrap_or(u64::MAX),
            len_bytes: held.end - held.start,
        }),
    }
}

/// Returns a pointer to the first byte of the pages `held`.
pub(crate) fn as_ptr(inner: &(impl PinTarget + ?Sized), held: PfnRange) -> *mut u8 {
    let start = usize::try_from(inner.bytes_of(held).start).unwrap_or(usize::MAX); // of memory of this process
    inner.region().memory().as_ptr().wrapping_add(start)
}

/// Returns the words of a range of bytes, counted from the first of the pages `held`.
pub(crate) fn as_words(
    inner: &(impl PinTarget + ?Sized),
    held: PfnRange,
    range: Range<u64>,
) -> Result<&[AtomicU64], AccessError> {
    let Range { start, end } = range;
    let none = AccessError::Empty { start, end };
    let len_bytes = end.checked_sub(start).ok_or(none)?;
    let len = usize::try_from(len_bytes).map_err(|_| none)?;
    let start = start_inside(inner, held, start, len)?;
    inner.region().memory().as_words(start..start + len_bytes)
}

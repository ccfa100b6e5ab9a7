//! Guards on pages: [`Pinned`] and [`Referenced`], given back when they are dropped.
//!
//! A pin holds off uzone's own unbind and changes; the kernel may still migrate or swap the page.
//!
//! A guard covers a range of pages and holds each of their folios once, by one atomic step a folio;
//! of base pages, 512 at once where it covers them all. It shares ownership of the pagemap, so it
//! can be sent to another thread and outlive every borrow; while one exists,
//! [`Pagemap::unbind`](crate::Pagemap::unbind) answers `Busy`, and a pagemap that is dropped lives
//! on until the last guard goes. A guard that is forgotten (`mem::forget`) pins the pages for
//! good; an I/O request that carries 64 bits carries a [`RawGuard`] instead.
//!
//! Taking a guard is all or nothing: if a folio refuses, those before it are given back, and the
//! error states how many pages from the start would have succeeded.
//!
//! The order of things: the guard is entered in the pagemap's ledger, then the folios are held, and
//! nothing of a descriptor is trusted before that. A `LiveRef` that was killed admits no guard, so a
//! guard that exists is on pages that belong to the pagemap, and they do until it is dropped.
//!
//! Cost: an atomic step to enter and one to leave, and as many for each folio; no allocation.

pub(crate) mod bytes;
pub(crate) mod guards;
pub(crate) mod pin_target;
pub(crate) mod pinned_ranges;
pub(crate) mod produce;
pub(crate) mod region_index;
pub(crate) mod token;

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::AtomicU64;

use uzone_os::{AccessError, LiveGuard, PINS, REFERENCES};
use uzone_pages::{
    ByteLen, Content, HoldError, HoldKind, Order, PageCount, Pfn, PfnRange, Span, Word,
};
use uzone_stream::{CacheState, NextUse, Pattern, Streaming, Work, best};
use zerocopy::IntoBytes;

use crate::clear::stores;
use crate::error::PinError;
use crate::pin::pin_target::{PinTarget, Segment, check_inside, is_missing};
use crate::pin::token::{RawGuard, Redeemed, TooManyRawGuards};

/// How pages are pinned.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct PinOptions {
    pub(crate) is_long_term: bool,
    pub(crate) never_faults: bool,
}

impl PinOptions {
    /// Pins for as long as it takes, as a device driver does that registers memory once. Memory
    /// whose owner must be able to take pages away soon refuses: files on a DAX mount, and coherent
    /// memory.
    #[must_use]
    pub fn long_term(mut self) -> Self {
        self.is_long_term = true;
        self
    }

    /// Takes only what is there: a page that would have to be produced first is refused.
    #[must_use]
    pub fn without_faults(mut self) -> Self {
        self.never_faults = true;
        self
    }
}

/// What both sorts of guard are.
///
/// Failures travel in boxes up to the public calls: a result that fits in registers is not put together
/// in memory, where the next locked instruction would wait for it, and is never copied in other pieces
/// than it was written in.
pub(crate) struct Hold<const IS_PIN: bool> {
    inner: LiveGuard<dyn PinTarget, IS_PIN>,
    span: Span,
    /// What the registry of a debug build knows this guard by.
    #[cfg(debug_assertions)]
    ticket: u64,
}

/// How often a range is tried again whose pages are taken away while others of it are produced, before its parts are
/// pinned one after the other.
const ATTEMPTS: usize = 16;
/// The same of a part, which ends at one page.
const PART_ATTEMPTS: usize = 64;
/// How often a range is tried again of which another thread is changing a page.
const BUSY_ATTEMPTS: usize = 1000;

impl<const IS_PIN: bool> Hold<IS_PIN> {
    const KIND: HoldKind = LiveGuard::<dyn PinTarget, IS_PIN>::KIND;

    /// Returns the pagemap that the guard is of.
    pub(crate) fn target(&self) -> &dyn Any {
        &*self.inner
    }

    /// Holds a range of pages of the region that the caller has entered.
    #[inline(always)]
    pub(crate) fn take(
        inner: LiveGuard<dyn PinTarget, IS_PIN>,
        range: PfnRange,
        caller: &'static Location<'static>,
    ) -> Result<Self, Box<PinError>> {
        inner.admit(range, Self::KIND)?;
        Ok(Self::admitted(inner, Span::of_folios(range), caller))
    }

    /// Makes the guard of a span that is held.
    #[inline(always)]
    pub(crate) fn admitted(
        inner: LiveGuard<dyn PinTarget, IS_PIN>,
        span: Span,
        caller: &'static Location<'static>,
    ) -> Self {
        #[cfg(debug_assertions)]
        let ticket = inner.guards().register(span.range(), Self::KIND, caller);
        #[cfg(not(debug_assertions))]
        let _ = caller;
        Self {
            inner,
            span,
            #[cfg(debug_assertions)]
            ticket,
        }
    }

    /// Splits the guard before the page that is `pages` behind its first.
    fn split(
        mut self,
        pages: PageCount,
        caller: &'static Location<'static>,
    ) -> Result<(Self, Self), (Self, PinError)> {
        let again = match self.inner.enter_again() {
            Ok(again) => again,
            Err(error) => return Err((self, PinError::NotAdmitted(error))),
        };
        match self.inner.split(self.span, Self::KIND, pages) {
            Ok((first, second)) => {
                let other = Self::admitted(again, second, caller);
                self.span = first;
                #[cfg(debug_assertions)]
                {
                    self.inner.guards().unregister(self.ticket);
                    self.ticket = self.inner.guards().register(first.range(), Self::KIND, caller);
                }
                Ok((self, other))
            }
            Err(refused) => {
                let failure = match refused {
                    Some((pfn, cause)) => PinError::Refused { pfn, good: pages, cause },
                    None => {
                        PinError::NotHere { asked: self.span.range(), region: self.inner.range() }
                    }
                };
                Err((self, failure))
            }
        }
    }

    pub(crate) fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), AccessError> {
        check_inside(offset_bytes, out.len(), self.len())?;
        self.inner.read_at(self.span.range().start(), offset_bytes, out)
    }

    pub(crate) fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), AccessError> {
        check_inside(offset_bytes, bytes.len(), self.len())?;
        self.inner.write_at(self.span.range().start(), offset_bytes, bytes)
    }

    pub(crate) fn words(&self, range: Range<u64>) -> Result<&[AtomicU64], AccessError> {
        let Range { start, end } = range;
        let none = AccessError::Empty { start, end };
        let len_bytes = end.checked_sub(start).ok_or(none)?;
        check_inside(start, usize::try_from(len_bytes).map_err(|_| none)?, self.len())?;
        self.inner.words(self.span.range().start(), start, len_bytes)
    }

    /// Returns how many bytes are held.
    fn len(&self) -> ByteLen {
        let segment = self.inner.segment(self.span.range());
        ByteLen::new(segment.map_or(0, |segment| segment.len_bytes))
    }

    fn segments(&self) -> std::option::IntoIter<Segment> {
        // A region is one mapping, so what is held is one piece.
        self.inner.segment(self.span.range()).into_iter()
    }
}

impl Hold<PINS> {
    /// Pins a range, after producing what of it is not there if the options allow it.
    #[inline(always)]
    pub(crate) fn pin(
        inner: LiveGuard<dyn PinTarget, PINS>,
        range: PfnRange,
        options: PinOptions,
        caller: &'static Location<'static>,
    ) -> Result<Self, Box<PinError>> {
        let admitted = if options.is_long_term {
            pin_long(&*inner, range)
        } else {
            inner.admit(range, HoldKind::Pin)
        };
        if let Err(failure) = admitted {
            pin_again(&*inner, range, options, failure, ATTEMPTS)?;
        }
        Ok(Self::admitted(inner, Span::of_folios(range), caller))
    }
}

/// Pins for long, if the memory allows that.
fn pin_long(inner: &dyn PinTarget, range: PfnRange) -> Result<(), Box<PinError>> {
    match inner.not_for_long() {
        Some(what) => Err(Box::new(PinError::NotForLong { what })),
        None => inner.admit(range, HoldKind::Pin),
    }
}

/// Tries a pin again that was refused, as long as there is something to wait for or to produce.
#[cold]
fn pin_again(
    inner: &dyn PinTarget,
    range: PfnRange,
    options: PinOptions,
    mut refused: Box<PinError>,
    attempts: usize,
) -> Result<(), Box<PinError>> {
    let (mut faults, mut waits) = (0, 0);
    loop {
        match &*refused {
            PinError::Refused { cause: HoldError::Busy, .. } if waits < BUSY_ATTEMPTS => {
                waits += 1;
                std::thread::yield_now();
            }
            PinError::Refused { cause: HoldError::Content(Content::Zero), .. }
                if waits < BUSY_ATTEMPTS =>
            {
                waits += 1;
                inner.take_zero(range);
            }
            PinError::Refused { cause: HoldError::Content(content), .. }
                if !options.never_faults && faults < attempts =>
            {
                faults += 1;
                if !inner.produce(range, *content).map_err(Box::new)? {
                    return Err(refused);
                }
            }
            PinError::Refused { cause: HoldError::Content(content), .. }
                if !options.never_faults && attempts == ATTEMPTS && is_missing(*content) =>
            {
                return pin_in_parts(inner, range, options);
            }
            _ => return Err(refused),
        }
        match inner.admit(range, HoldKind::Pin) {
            Ok(()) => return Ok(()),
            Err(again) => refused = again,
        }
    }
}

/// Pins a range whose pages are taken away as fast as they are produced: what of it is pinned stays there while the rest
/// is produced.
fn pin_in_parts(
    inner: &dyn PinTarget,
    range: PfnRange,
    options: PinOptions,
) -> Result<(), Box<PinError>> {
    let mut held = Parts { inner, parts: Vec::new() };
    let mut left = vec![range];
    while let Some(part) = left.pop() {
        if let Err(refused) = inner.admit(part, HoldKind::Pin) {
            if let Some(halves) = halves(part) {
                left.extend(halves);
                continue;
            }
            pin_again(inner, part, options, refused, PART_ATTEMPTS)?;
        }
        held.parts.push(part);
    }
    inner
        .admit(range, HoldKind::Pin)
        .or_else(|refused| pin_again(inner, range, options, refused, PART_ATTEMPTS))
}

/// Returns the second half of a range and the first, unless it is one page.
fn halves(range: PfnRange) -> Option<[PfnRange; 2]> {
    let (start, pages) = (range.start().get(), range.pages().get());
    let half = PageCount::new(pages / 2);
    let first = PfnRange::try_new(range.start(), half).ok()?;
    let rest = PageCount::new(pages - half.get());
    Some([PfnRange::try_new(Pfn::new(start + half.get()), rest).ok()?, first])
}

/// Parts of a range that are pinned, until the range is as a whole.
struct Parts<'a> {
    inner: &'a dyn PinTarget,
    parts: Vec<PfnRange>,
}

impl Drop for Parts<'_> {
    fn drop(&mut self) {
        for &part in &self.parts {
            self.inner.release(Span::of_folios(part), HoldKind::Pin);
        }
    }
}

impl<const IS_PIN: bool> Drop for Hold<IS_PIN> {
    #[inline]
    fn drop(&mut self) {
        #[cfg(debug_assertions)]
        self.inner.guards().unregister(self.ticket);
        // Then `inner` leaves.
        self.inner.release(self.span, Self::KIND);
    }
}

/// Writes the numbers of `range` to a list, past the cache if it is long.
fn write_pfns(range: PfnRange, list: &mut [Pfn]) -> Result<usize, PinError> {
    let needed = range.pages().get();
    let given = list.len();
    let too_short = || PinError::ListTooShort { needed, given };
    let count = usize::try_from(needed).map_err(|_| too_short())?;
    let list = list.get_mut(..count).ok_or_else(too_short)?;
    let len_bytes = size_of_val(list);
    let way = stores::policy().choose(Work::Fill, len_bytes, CacheState::Cold, NextUse::Soon);
    match (way.is_cached(), Pattern::linear(&[range.start().get()], &[1])) {
        (false, Ok(pattern)) => {
            Streaming::scope(best(), |stream| stream.fill(list.as_mut_bytes(), &pattern));
        }
        _ => {
            for (entry, pfn) in list.iter_mut().zip(range.iter()) {
                *entry = pfn;
            }
        }
    }
    Ok(count)
}

macro_rules! guard {
    ($(#[$doc:meta])* $name:ident, $kind:ident) => {
        $(#[$doc])*
        pub struct $name(pub(crate) Hold<$kind>);

        impl $name {
            /// Returns the pages that are held.
            #[must_use]
            pub fn range(&self) -> PfnRange {
                self.0.span.range()
            }

            /// Returns the order of the folios that are held.
            #[must_use]
            pub fn order(&self) -> Order {
                self.0.inner.order()
            }

            /// Returns the contiguous pieces of memory that are held, in ascending order.
            pub fn segments(&self) -> impl Iterator<Item = Segment> + use<> {
                self.0.segments()
            }

            /// Returns the page frames that are held, in ascending order.
            pub fn pfns(&self) -> impl DoubleEndedIterator<Item = Pfn> + use<> {
                self.range().iter()
            }

            /// Writes the numbers of the page frames that are held to the start of `list`, for a
            /// device or a call that wants each page by itself. Returns how many there are. A long
            /// list is streamed past the cache: it costs 8 bytes a page at the rate of memory.
            ///
            /// # Errors
            /// [`PinError::ListTooShort`] if there is no room for all; then nothing is written.
            pub fn write_pfns(&self, list: &mut [Pfn]) -> Result<usize, PinError> {
                write_pfns(self.range(), list)
            }

            /// Returns the word of the folio of page `pfn` as it is now, or of a tail, which no thread
            /// holds, for a page of another region.
            #[must_use]
            pub fn word(&self, pfn: Pfn) -> Word {
                self.0.inner.word(pfn)
            }

            /// Returns the pages that are held and have gone bad, in ascending order: a holder that reads
            /// or writes them gets no data, or a signal.
            #[must_use]
            pub fn bad_pages(&self) -> Vec<Pfn> {
                self.0.inner.bad_pages(self.range())
            }

            /// Takes the same pages once more, for another holder.
            ///
            /// # Errors
            /// [`PinError`] if a folio has the most holds it may have, a page that is to be
            /// pinned has gone bad, or the pagemap is being unbound.
            #[track_caller]
            pub fn try_clone(&self) -> Result<Self, PinError> {
                // What is held is not zero, absent or being replaced, so there is nothing to wait for.
                let inner = self.0.inner.enter_again().map_err(PinError::NotAdmitted)?;
                let hold = Hold::take(inner, self.range(), Location::caller());
                hold.map(Self).map_err(|failure| *failure)
            }

            /// Splits the guard: the first `pages` pages, and the rest. A folio that both have a
            /// part of is held once more, and so is a block of 512 base pages.
            ///
            /// # Errors
            /// The guard as it was, with the reason: one half would be empty, a folio has the most
            /// holds it may have, or the pagemap is being unbound.
            #[track_caller]
            pub fn split(self, pages: PageCount) -> Result<(Self, Self), (Self, PinError)> {
                match self.0.split(pages, Location::caller()) {
                    Ok((first, second)) => Ok((Self(first), Self(second))),
                    Err((hold, failure)) => Err((Self(hold), failure)),
                }
            }

            /// Turns the guard into 64 bits that a completion or a C program carries. The pages stay
            /// held until the guard is had again from [`Zone::redeem`](crate::Zone::redeem).
            ///
            /// Costs a lock of one of sixteen lists that no other thread needs at the moment, as a
            /// rule.
            ///
            /// The zone has the guard meanwhile, and the guard what it is a guard of, which has the
            /// zone: if it is never redeemed, all of them stay for as long as the process, also when
            /// the last [`Zone`](crate::Zone) and pagemap were dropped.
            ///
            /// # Errors
            /// [`TooManyRawGuards`] with the guard, if the zone has 2^32 already.
            // The failure is boxed so that its absence is a register.
            pub fn into_raw(self) -> Result<RawGuard, Box<TooManyRawGuards<Self>>> {
                // Of the zone, since the guard may be redeemed, and the pagemap gone, before this ends.
                let tokens = self.0.inner.tokens();
                let parked = tokens.park(self, Redeemed::$name);
                parked.map_err(|guard| Box::new(TooManyRawGuards { guard }))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).field("range", &self.range()).finish()
            }
        }
    };
}

guard! {
    /// References to the folios of a range of pages: their descriptors keep their meaning until this
    /// is dropped. Who drops the last reference of a folio calls the owner's `on_free`.
    Referenced, REFERENCES
}

guard! {
    /// Pins on the folios of a range of pages: until this is dropped, uzone does not unbind, clear,
    /// discard, replace or hand out the pages.
    ///
    /// A pin holds off uzone's own calls. The kernel may still migrate a page or swap it out, so a device
    /// that uses physical addresses needs the kernel's own pin besides (`FixedBuffers` of `uzone-os`,
    /// VFIO, RDMA).
    Pinned, PINS
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]
    use super::*;
    use crate::pin::pin_target::good_pieces;

    fn range(start: u64, pages: u64) -> PfnRange {
        PfnRange::try_new(Pfn::new(start), PageCount::new(pages)).unwrap()
    }

    #[test]
    fn good_pieces_are_what_lies_between_bad_pages() {
        let pieces = |bad: &[u64]| {
            let bad: Vec<Pfn> = bad.iter().copied().map(Pfn::new).collect();
            good_pieces(range(10, 5), &bad)
        };
        assert_eq!(pieces(&[]), [range(10, 5)]);
        assert_eq!(pieces(&[10]), [range(11, 4)]);
        assert_eq!(pieces(&[14]), [range(10, 4)]);
        assert_eq!(pieces(&[11, 12]), [range(10, 1), range(13, 2)]);
        assert_eq!(pieces(&[10, 11, 12, 13, 14]), []);
    }

    #[test]
    fn a_list_of_frames_is_the_same_however_it_is_written() {
        for pages in [1_u64, 2, 511, 5000, 3 << 20] {
            let range = range(77, pages);
            let count = usize::try_from(pages).unwrap();
            let mut list = vec![Pfn::new(0); count + 1];
            assert_eq!(write_pfns(range, &mut list), Ok(count));
            assert!(range.iter().eq(list[..count].iter().copied()));
            assert_eq!(list[count], Pfn::new(0));
            let short = write_pfns(range, &mut list[..count - 1]).unwrap_err();
            let expected = PinError::ListTooShort { needed: pages, given: count - 1 };
            assert_eq!(short, expected);
        }
    }
}

//! Guards on pages: [`Pinned`] and [`Referenced`], given back when they are dropped.
//!
//! A pin holds off uzone's own unbind and changes; the kernel may still migrate or swap the page. With
//! [`PinOptions::kernel`], the kernel has pinned it too.
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
//! The order of things: the guard is entered in the pagemap's live reference, then the folios are held, and
//! nothing of a descriptor is trusted before that. A `LiveRef` that was killed admits no guard, so a
//! guard that exists is on pages that belong to the pagemap, and they do until it is dropped.
//!
//! Cost: an atomic step to enter and one to leave, and as many for each folio; no allocation.

pub(crate) mod bytes;
pub(crate) mod guards;
pub(crate) mod pin_target;
pub(crate) mod pinned_ranges;
pub(crate) mod region_index;
pub(crate) mod token;

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use uzone_os::{AccessError, KernelPin, LiveGuard, PINS, REFERENCES};
use uzone_pages::{Content, HoldError, HoldKind, Order, PageCount, Pfn, PfnRange, Span, Word};
use uzone_stream::{CacheState, NextUse, Pattern, Streaming, Work, best};
use zerocopy::IntoBytes;

use crate::clear::stores;
use crate::error::PinError;
use crate::pin::pin_target::{PinTarget, Segment, as_ptr, as_words, is_missing, start_inside};
use crate::pin::token::{RawGuard, Redeemed};
use crate::setters::setters;

/// How pages are pinned.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct PinOptions {
    pub(crate) is_long_term: bool,
    pub(crate) is_kernel: bool,
    pub(crate) never_faults: bool,
}

impl PinOptions {
    setters! {
        /// Pins for as long as it takes, as a device driver does that registers memory once. Memory
        /// whose owner must be able to take pages away soon refuses: files on a DAX mount, and coherent
        /// memory.
        long_term() is_long_term = true;
    }

    /// Pins by the kernel too: until the guard is dropped, the kernel neither moves the pages nor swaps them
    /// out, and a fork leaves them with this process. So a device may use their physical addresses
    /// ([`Pinned::physical`]). Such a pin is for long ([`PinOptions::long_term`]), and makes the memory of the pages present.
    ///
    /// The kernel pins them as fixed buffers of io_urings that the zone keeps, one for each 64 pins of up to 1 GiB. That
    /// takes no privilege. It counts against `RLIMIT_MEMLOCK` unless the process has `CAP_IPC_LOCK`. Files of most file
    /// systems refuse it.
    ///
    /// Costs one system call for each GiB, and in the kernel a reference for each page or, in large folios, for each run
    /// of them.
    #[must_use]
    pub fn kernel(mut self) -> Self {
        self.is_kernel = true;
        self.long_term()
    }

    setters! {
        /// Takes only present pages: a page that would have to be produced first is refused.
        without_faults() never_faults = true;
    }
}

/// Holds on the folios of a range of pages, given back when this is dropped: a [`Pinned`] or a
/// [`Referenced`].
//
// Failures travel in boxes up to the public calls: a result that fits in registers is not put together
// in memory, where the next locked instruction would wait for it, and is never copied in other pieces
// than it was written in.
pub struct Guard<const IS_PIN: bool> {
    inner: LiveGuard<dyn PinTarget, IS_PIN>,
    span: Span,
    /// The kernel's own pin, which guards that were split or cloned share.
    kernel: Option<Arc<KernelPin>>,
    /// The number of this guard in the registry of a debug build.
    #[cfg(debug_assertions)]
    ticket: u64,
}

/// References to the folios of a range of pages: their descriptors keep their meaning until this
/// is dropped.
pub type Referenced = Guard<REFERENCES>;

/// Pins on the folios of a range of pages: until this is dropped, uzone does not unbind, clear,
/// discard, replace or hand out the pages.
///
/// A pin holds off uzone's own calls. The kernel may still migrate a page or swap it out, unless it was pinned with
/// [`PinOptions::kernel`]: a device that uses physical addresses needs that, or the pin of its own driver (VFIO, RDMA).
pub type Pinned = Guard<PINS>;

/// How often a range is tried again whose pages are taken away while others of it are produced, before its parts are
/// pinned one after the other.
const ATTEMPTS: usize = 16;
/// The same of a part, which ends at one page.
const PART_ATTEMPTS: usize = 64;
/// How often a range is tried again of which another thread is changing a page.
const BUSY_ATTEMPTS: usize = 1000;

impl<const IS_PIN: bool> Guard<IS_PIN> {
    const KIND: HoldKind = LiveGuard::<dyn PinTarget, IS_PIN>::KIND;

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
            kernel: None,
            #[cfg(debug_assertions)]
            ticket,
        }
    }

    /// Returns the pages that are held.
    #[must_use]
    pub fn range(&self) -> PfnRange {
        self.span.range()
    }

    /// Returns the order of the folios that are held.
    #[must_use]
    pub fn order(&self) -> Order {
        self.inner.order()
    }

    /// Returns the contiguous pieces of memory that are held, in ascending order.
    pub fn segments(&self) -> impl Iterator<Item = Segment> + use<IS_PIN> {
        // A region is one mapping, so held pages are one piece.
        self.inner.segment(self.range()).into_iter()
    }

    /// Returns the page frames that are held, in ascending order.
    #[must_use]
    pub fn pfns(&self) -> impl DoubleEndedIterator<Item = Pfn> + use<IS_PIN> {
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
        self.inner.word(pfn)
    }

    /// Returns the pages that are held and have gone bad, in ascending order: a holder that reads
    /// or writes them gets no data, or a signal.
    #[must_use]
    pub fn bad_pages(&self) -> Vec<Pfn> {
        self.inner.bad_pages(self.range())
    }

    /// Takes the same pages once more, for another holder. Both share the kernel's pin, if there is one.
    ///
    /// # Errors
    /// [`PinError`] if a folio has the most holds it may have, a page that is to be
    /// pinned has gone bad, or the pagemap is being unbound.
    #[track_caller]
    pub fn try_clone(&self) -> Result<Self, PinError> {
        // A held page is not zero, absent or being replaced, so there is nothing to wait for.
        let inner = self.inner.enter_again().map_err(PinError::NotAdmitted)?;
        let taken = Self::take(inner, self.range(), Location::caller());
        let mut guard = taken.map_err(|failure| *failure)?;
        guard.kernel.clone_from(&self.kernel);
        Ok(guard)
    }

    /// Splits the guard: the first `pages` pages, and the rest. A folio that both have a
    /// part of is held once more, and so is a block of 512 base pages. The kernel's pin, if there is one,
    /// ends with the last part.
    ///
    /// # Errors
    /// The guard as it was, with the reason: one half would be empty, a folio has the most
    /// holds it may have, or the pagemap is being unbound.
    #[track_caller]
    pub fn split(mut self, pages: PageCount) -> Result<(Self, Self), (Self, PinError)> {
        let again = match self.inner.enter_again() {
            Ok(again) => again,
            Err(error) => return Err((self, PinError::NotAdmitted(error))),
        };
        match self.inner.split(self.span, Self::KIND, pages) {
            Ok((first, second)) => {
                let mut other = Self::admitted(again, second, Location::caller());
                other.kernel.clone_from(&self.kernel);
                self.span = first;
                #[cfg(debug_assertions)]
                {
                    let caller = Location::caller();
                    self.inner.guards().unregister(self.ticket);
                    self.ticket = self.inner.guards().register(first.range(), Self::KIND, caller);
                }
                Ok((self, other))
            }
            Err(refused) => {
                let failure = match refused {
                    Some((pfn, cause)) => PinError::Refused { pfn, good: pages, cause },
                    None => PinError::NotHere { asked: self.range(), region: self.inner.range() },
                };
                Err((self, failure))
            }
        }
    }

    /// Returns the pagemap that the guard is of.
    pub(crate) fn target(&self) -> &dyn Any {
        &*self.inner
    }

    /// Turns the guard into 64 bits that a completion or a C program carries. The pages stay
    /// held until the guard is had again from [`Zone::redeem`](crate::Zone::redeem).
    ///
    /// Costs a lock of one of sixteen lists that no other thread needs at the moment, as a
    /// rule.
    ///
    /// The zone has the guard meanwhile, the guard has its pagemap, and that has the
    /// zone: if it is never redeemed, all of them stay for as long as the process, also when
    /// the last [`Zone`](crate::Zone) and pagemap were dropped.
    ///
    /// # Errors
    /// The guard as it was, with [`PinError::TooManyRawGuards`].
    // The failure is boxed so that its absence is a register.
    pub fn into_raw(self) -> Result<RawGuard, Box<(Self, PinError)>>
    where
        Self: Into<Redeemed>,
    {
        // Of the zone, since the guard may be redeemed, and the pagemap gone, before this ends.
        let tokens = self.inner.tokens();
        tokens.park(self).map_err(|guard| Box::new((guard, PinError::TooManyRawGuards)))
    }
}

impl Pinned {
    /// Pins a range, after producing its missing pages if the options allow it.
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
        let mut pinned = Self::admitted(inner, Span::of_folios(range), caller);
        if options.is_kernel {
            pinned.pin_in_kernel()?;
        }
        Ok(pinned)
    }

    #[cold]
    fn pin_in_kernel(&mut self) -> Result<(), Box<PinError>> {
        let pinned = self.inner.pin_in_kernel(self.range());
        let pinned = pinned.map_err(|failure| PinError::Kernel(Box::new(failure)))?;
        self.kernel = Some(Arc::new(pinned));
        Ok(())
    }

    /// Returns where the pages lie in the memory of the machine, in the order of their numbers; pages that are neighbours in
    /// both are one piece. They stay there until the guard is dropped. A device behind an IOMMU needs other
    /// addresses, which its driver has.
    ///
    /// # Errors
    /// [`PinError::NotKept`] unless the pages were pinned with [`PinOptions::kernel`], and [`PinError::Kernel`] if
    /// the kernel does not show their place, which takes `CAP_SYS_ADMIN`.
    pub fn physical(&self) -> Result<Vec<Range<u64>>, PinError> {
        let range = self.range();
        if self.kernel.is_none() {
            return Err(PinError::NotKept { range });
        }
        let places = self.inner.region().memory().physical(self.inner.bytes_of(range));
        places.map_err(|failure| PinError::Kernel(Box::new(failure)))
    }

    /// Copies bytes out of the pages that are pinned, from byte `offset_bytes` of the first of them on.
    ///
    /// # Errors
    /// [`AccessError`] unless all bytes are pinned by this guard; then none is copied. Offsets in the
    /// error are those of the region where the memory itself is at fault.
    pub fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let start = start_inside(&*self.inner, self.range(), offset_bytes, out.len())?;
        self.inner.region().read_at(start, out)
    }

    /// Copies bytes into the pages that are pinned, from byte `offset_bytes` of the first of them on.
    ///
    /// Other threads and devices may have pinned the same pages. They see each aligned 8 bytes change
    /// at once, and the whole in any order.
    ///
    /// # Errors
    /// As [`Pinned::read_at`].
    pub fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let start = start_inside(&*self.inner, self.range(), offset_bytes, bytes.len())?;
        self.inner.write(start, bytes)
    }

    /// Returns a pointer to the first byte that is pinned, for foreign code and for `unsafe` code of the caller. It is
    /// good for all bytes that are pinned, until the guard is dropped. Others may have pinned the same pages and write to
    /// them, so they are the caller's to share, and no slice of plain bytes is lent.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        as_ptr(&*self.inner, self.range())
    }

    /// Returns the words of a range of the bytes that are pinned, counted from the first, to be read and
    /// written in place. Other threads and devices may do so meanwhile. A touch behind the end of a file
    /// that was truncated raises `SIGBUS`.
    ///
    /// # Errors
    /// [`AccessError`] unless all bytes are pinned by this guard, start and end at multiples of 8, and
    /// may be written.
    pub fn as_words(&self, range: Range<u64>) -> Result<&[AtomicU64], AccessError> {
        as_words(&*self.inner, self.range(), range)
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

/// Pins a range whose pages are taken away as fast as they are produced: its pinned pages stay there while the rest
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

impl<const IS_PIN: bool> fmt::Debug for Guard<IS_PIN> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if Self::KIND == HoldKind::Pin { "Pinned" } else { "Referenced" };
        f.debug_struct(name).field("range", &self.range()).finish()
    }
}

impl<const IS_PIN: bool> Drop for Guard<IS_PIN> {
    #[inline]
    fn drop(&mut self) {
        #[cfg(debug_assertions)]
        self.inner.guards().unregister(self.ticket);
        if self.kernel.is_some() {
            unpin_in_kernel(&mut self.kernel);
        }
        // Then `inner` leaves.
        self.inner.release(self.span, Self::KIND);
    }
}

/// Ends the kernel's pin, before the pages may be cleared or unbound.
#[cold]
fn unpin_in_kernel(pinned: &mut Option<Arc<KernelPin>>) {
    *pinned = None;
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

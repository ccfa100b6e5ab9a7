//! Guards over pages of a bound region: [`Pinned`] and [`Referenced`], given back when dropped.
//!
//! A guard covers a range of pages and holds each of their folios once, by one atomic step a folio.
//! It shares ownership of the pagemap, so it can be sent to another thread and outlive every
//! borrow; while one exists, [`Pagemap::unbind`](crate::Pagemap::unbind) answers `Busy`, and a pagemap that is dropped lives
//! on until the last guard goes. Whoever forgets a guard (`mem::forget`) has pinned the pages for
//! good.
//!
//! Taking a guard is all or nothing: if a folio refuses, those before it are given back, and the
//! error says how many pages from the start could have been had.
//!
//! Cost: two atomic steps for the guard, one for each folio it covers; no allocation.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use uzone_pages::{
    EnterError, Folio, GuardSort, HoldError, PageCount, Payload, Pfn, PfnRange, Released, Word,
};

use crate::pagemap::{Inner, PageView};

/// Why pages were not held.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HoldFailure {
    /// Not every page belongs to the region.
    #[error("{asked} do not all belong to the region, which has {region}")]
    NotHere {
        /// The pages that were asked for.
        asked: PfnRange,
        /// The pages of the region.
        region: PfnRange,
    },
    /// A folio gives no hold. None is held.
    #[error("cannot hold the folio of page {pfn}; the {good} pages before it could be held")]
    Refused {
        /// The first page that could not be held.
        pfn: Pfn,
        /// How many pages from the start of the range could have been.
        good: PageCount,
        /// Why not.
        #[source]
        cause: HoldError,
    },
    /// The folio cannot be handed out: it has been, or is frozen, or its memory is generic.
    #[error(
        "the folio of page {pfn} cannot be handed out: it is not free (references: {references})"
    )]
    NotFree {
        /// The page that was asked for.
        pfn: Pfn,
        /// How many references there were.
        references: u32,
    },
    /// The pagemap admits no guard.
    #[error("cannot hold pages of this region")]
    NotAdmitted(#[source] EnterError),
}

/// One contiguous piece of what a guard holds, for a DMA engine or an I/O call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Where it starts in memory of this process.
    pub address: usize,
    /// How long it is.
    pub len_bytes: u64,
    /// Its first page.
    pub pfn: Pfn,
}

/// What both sorts of guard are.
struct Hold<P: Payload> {
    inner: Arc<Inner<P>>,
    range: PfnRange,
    sort: GuardSort,
    /// What the registry of a debug build knows this guard by.
    ticket: u64,
}

fn take<P: Payload>(folio: Folio<'_, P>, sort: GuardSort) -> Result<(), HoldError> {
    match sort {
        GuardSort::Reference => folio.try_get(),
        GuardSort::Pin => folio.try_pin(),
    }
}

/// Gives the folios of pages from `start` up to `end` back.
fn give_back<P: Payload>(inner: &Inner<P>, sort: GuardSort, start: Pfn, end: Pfn) {
    for (head, folio) in inner.folios(start, end) {
        let released = match sort {
            GuardSort::Reference => folio.put(),
            GuardSort::Pin => folio.unpin(),
        };
        debug_assert!(released.is_ok(), "a guard gives back what it took");
        if released == Ok(Released::Last) {
            inner.freed(head);
        }
    }
}

impl<P: Payload> Hold<P> {
    fn take(
        inner: &Arc<Inner<P>>,
        range: PfnRange,
        sort: GuardSort,
        caller: &'static Location<'static>,
    ) -> Result<Self, HoldFailure> {
        let region = inner.range();
        if !region.contains_range(range) {
            return Err(HoldFailure::NotHere { asked: range, region });
        }
        inner.enter(sort)?;
        for (head, folio) in inner.folios(range.start(), range.end()) {
            if let Err(cause) = take(folio, sort) {
                let pfn = head.max(range.start());
                give_back(inner, sort, range.start(), pfn);
                inner.leave(sort);
                // It is in the range, so it is at or after its start.
                let good = pfn.checked_since(range.start()).unwrap_or_default();
                return Err(HoldFailure::Refused { pfn, good, cause });
            }
        }
        Ok(Self::admitted(inner, range, sort, caller))
    }

    fn admitted(
        inner: &Arc<Inner<P>>,
        range: PfnRange,
        sort: GuardSort,
        caller: &'static Location<'static>,
    ) -> Self {
        let ticket = inner.register(range, sort, caller);
        Self { inner: inner.clone(), range, sort, ticket }
    }

    /// Splits the guard before the page that is `pages` behind its first.
    fn split(
        mut self,
        pages: PageCount,
        caller: &'static Location<'static>,
    ) -> Result<(Self, Self), (Self, HoldFailure)> {
        let (first, second) = match self.range.start().checked_add(pages).and_then(|middle| {
            let rest = self.range.pages().get().saturating_sub(pages.get());
            Ok((
                PfnRange::try_new(self.range.start(), pages)?,
                PfnRange::try_new(middle, PageCount::new(rest))?,
            ))
        }) {
            Ok(halves) => halves,
            Err(_) => {
                let (asked, region) = (self.range, self.inner.range());
                return Err((self, HoldFailure::NotHere { asked, region }));
            }
        };
        if let Err(failure) = self.inner.enter(self.sort) {
            return Err((self, failure));
        }
        // A folio that lies in both halves is held by both; its hold was one until now.
        let middle = second.start();
        if !middle.is_aligned(self.inner.order()) {
            let again = match self.inner.folio(middle) {
                Some(folio) => take(folio, self.sort),
                None => Ok(()),
            };
            if let Err(cause) = again {
                self.inner.leave(self.sort);
                let failure = HoldFailure::Refused { pfn: middle, good: first.pages(), cause };
                return Err((self, failure));
            }
        }
        let other = Self::admitted(&self.inner, second, self.sort, caller);
        self.inner.unregister(self.ticket);
        self.range = first;
        self.ticket = self.inner.register(first, self.sort, caller);
        Ok((self, other))
    }

    fn segments(&self) -> impl Iterator<Item = Segment> {
        // A region is one mapping, so what is held is one piece.
        self.inner.segment(self.range).into_iter()
    }
}

impl<P: Payload> Drop for Hold<P> {
    fn drop(&mut self) {
        self.inner.unregister(self.ticket);
        give_back(&self.inner, self.sort, self.range.start(), self.range.end());
        self.inner.leave(self.sort);
    }
}

macro_rules! guard {
    ($(#[$doc:meta])* $name:ident, $sort:expr) => {
        $(#[$doc])*
        pub struct $name<P: Payload = ()>(Hold<P>);

        impl<P: Payload> $name<P> {
            #[track_caller]
            pub(crate) fn take(
                inner: &Arc<Inner<P>>,
                range: PfnRange,
            ) -> Result<Self, HoldFailure> {
                Hold::take(inner, range, $sort, Location::caller()).map(Self)
            }

            /// Returns the pages that are held.
            #[must_use]
            pub fn range(&self) -> PfnRange {
                self.0.range
            }

            /// Returns the contiguous pieces of memory that are held, in ascending order.
            pub fn segments(&self) -> impl Iterator<Item = Segment> {
                self.0.segments()
            }

            /// Returns the page frames that are held, in ascending order.
            pub fn pfns(&self) -> impl DoubleEndedIterator<Item = Pfn> {
                self.0.range.iter()
            }

            /// Returns a page of the region, held or not, to look at.
            #[must_use]
            pub fn page(&self, pfn: Pfn) -> Option<PageView<'_, P>> {
                self.0.inner.page(pfn)
            }

            /// Takes the same pages once more, for another holder.
            ///
            /// # Errors
            /// [`HoldFailure`] if a folio has the most holds it may have, or the pagemap is being
            /// unbound.
            #[track_caller]
            pub fn try_clone(&self) -> Result<Self, HoldFailure> {
                Self::take(&self.0.inner, self.0.range)
            }

            /// Splits the guard: the first `pages` pages, and the rest. A folio that both have a
            /// part of is held once more.
            ///
            /// # Errors
            /// The guard as it was, with the reason: one half would be empty, a folio has the most
            /// holds it may have, or the pagemap is being unbound.
            #[track_caller]
            pub fn split(self, pages: PageCount) -> Result<(Self, Self), (Self, HoldFailure)> {
                match self.0.split(pages, Location::caller()) {
                    Ok((first, second)) => Ok((Self(first), Self(second))),
                    Err((hold, failure)) => Err((Self(hold), failure)),
                }
            }
        }

        impl<P: Payload> fmt::Debug for $name<P> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).field("range", &self.0.range).finish()
            }
        }
    };
}

guard! {
    /// References to the folios of a range of pages: their descriptors keep their meaning until this
    /// is dropped. Who drops the last reference of a folio calls the owner's `on_free`.
    Referenced, GuardSort::Reference
}

guard! {
    /// Pins on the folios of a range of pages: until this is dropped, nobody moves the pages or takes
    /// them away, so that a device may read and write their bytes.
    Pinned, GuardSort::Pin
}

impl<P: Payload> Referenced<P> {
    /// Takes the first reference of a free folio.
    #[track_caller]
    pub(crate) fn hand_out(inner: &Arc<Inner<P>>, pfn: Pfn) -> Result<Self, HoldFailure> {
        let region = inner.range();
        let (Ok(range), Some(folio)) = (PfnRange::try_single(pfn), inner.folio(pfn)) else {
            let asked = PfnRange::try_single(pfn).unwrap_or(region);
            return Err(HoldFailure::NotHere { asked, region });
        };
        inner.enter(GuardSort::Reference)?;
        if !folio.take_first() {
            inner.leave(GuardSort::Reference);
            return Err(HoldFailure::NotFree { pfn, references: folio.word().references() });
        }
        Ok(Self(Hold::admitted(inner, range, GuardSort::Reference, Location::caller())))
    }

    /// Returns the word of the first folio that is held, as it is now.
    #[must_use]
    pub fn word(&self) -> Word {
        self.0.inner.folio(self.0.range.start()).map_or_else(Word::tail, Folio::word)
    }
}

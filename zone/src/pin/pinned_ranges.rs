//! Holds on a range of addresses, whatever regions it lies in: [`PinnedRanges`], and the methods
//! of [`Zone`] that take one.

use std::panic::Location;

use uzone_pages::ByteLen;

use crate::error::PinError;
use crate::pin::pin_target::Segment;
use crate::pin::region_index::Found;
use crate::pin::{Guard, PinOptions, Pinned, Referenced};
use crate::zone::Zone;

/// Guards on neighbouring pages, one for each region that they lie in; never none.
#[derive(Debug)]
#[must_use = "dropping it gives the pages back"]
pub struct PinnedRanges<G>(Parts<G>);

#[derive(Debug)]
enum Parts<G> {
    /// The rule. No larger than the guard.
    One(G),
    /// Two or more.
    Several(Vec<G>),
}

const _: () = assert!(size_of::<PinnedRanges<Pinned>>() == size_of::<Pinned>());

impl<G> PinnedRanges<G> {
    /// Returns the guards, in ascending order of their pages.
    pub fn guards(&self) -> impl Iterator<Item = &G> {
        match &self.0 {
            Parts::One(guard) => std::slice::from_ref(guard),
            Parts::Several(guards) => guards,
        }
        .iter()
    }

    /// Returns the guard if there is one only, as of a range that lies in one region.
    ///
    /// # Errors
    /// All of them, if there are more.
    pub fn into_single(self) -> Result<G, Self> {
        match self.0 {
            Parts::One(guard) => Ok(guard),
            several @ Parts::Several(_) => Err(Self(several)),
        }
    }
}

impl<const IS_PIN: bool> PinnedRanges<Guard<IS_PIN>> {
    /// Returns the contiguous pieces of memory that are held, in ascending order.
    pub fn segments(&self) -> impl Iterator<Item = Segment> {
        self.guards().flat_map(Guard::segments)
    }
}

/// Makes the caller's value of the guards that were taken.
fn across<G>(mut guards: Vec<G>) -> PinnedRanges<G> {
    let last = guards.pop();
    match last {
        Some(only) if guards.is_empty() => PinnedRanges(Parts::One(only)),
        Some(last) => {
            guards.push(last);
            PinnedRanges(Parts::Several(guards))
        }
        None => unreachable!("a range has a page, and a region has each of its pages"),
    }
}

impl Zone {
    /// Pins the pages that `len` bytes from `address` on have a part of, in whatever regions of the
    /// zone they lie; pages that are not there are produced first if their region can
    /// ([`PagemapOps::populate`](crate::PagemapOps::populate)). A pin holds off uzone's own unbind and
    /// changes; the kernel may still migrate or swap the page.
    ///
    /// Costs a lookup without a lock, an atomic step to enter the region and one to leave it, and two
    /// for each folio.
    ///
    /// # Errors
    /// [`PinError`] if no region has an address, or a folio refuses; then nothing is pinned.
    #[inline(always)]
    #[track_caller]
    pub fn pin(&self, address: usize, len: ByteLen) -> Result<PinnedRanges<Pinned>, PinError> {
        self.pin_with(address, len, PinOptions::default())
    }

    /// As [`Zone::pin`], of present pages: a page that would have to be produced first is refused.
    ///
    /// # Errors
    /// As [`Zone::pin`].
    #[inline]
    #[track_caller]
    pub fn try_pin(&self, address: usize, len: ByteLen) -> Result<PinnedRanges<Pinned>, PinError> {
        self.pin_with(address, len, PinOptions::default().without_faults())
    }

    /// As [`Zone::pin`], the way that `options` say.
    ///
    /// # Errors
    /// As [`Zone::pin`], and for memory that cannot be pinned for long if that is asked for.
    #[inline(always)]
    #[track_caller]
    pub fn pin_with(
        &self,
        address: usize,
        len: ByteLen,
        options: PinOptions,
    ) -> Result<PinnedRanges<Pinned>, PinError> {
        let caller = Location::caller();
        // Called here by itself: with a second caller the whole pin would not be inlined.
        if let Some(Found { pagemap, range }) = self.shared.directory.one_at_address(address, len) {
            return one(Pinned::pin(pagemap, range, options, caller));
        }
        self.at_each(address, len, |Found { pagemap, range }| {
            Pinned::pin(pagemap, range, options, caller)
        })
    }

    /// Takes references to the pages that `len` bytes from `address` on have a part of, in whatever
    /// regions of the zone they lie.
    ///
    /// # Errors
    /// [`PinError`] if no region has an address, or a folio refuses; then none is taken.
    #[inline(always)]
    #[track_caller]
    pub fn get(&self, address: usize, len: ByteLen) -> Result<PinnedRanges<Referenced>, PinError> {
        let caller = Location::caller();
        if let Some(Found { pagemap, range }) = self.shared.directory.one_at_address(address, len) {
            return one(Referenced::take(pagemap, range, caller));
        }
        self.at_each(address, len, |Found { pagemap, range }| {
            Referenced::take(pagemap, range, caller)
        })
    }

    /// Makes guards by `take` of a range that lies in several regions, or partly in none.
    #[cold]
    fn at_each<const IS_PIN: bool>(
        &self,
        address: usize,
        len: ByteLen,
        take: impl Fn(Found<IS_PIN>) -> Result<Guard<IS_PIN>, Box<PinError>>,
    ) -> Result<PinnedRanges<Guard<IS_PIN>>, PinError> {
        self.shared.directory.at_address(address, len, take).map(across).map_err(|failure| *failure)
    }
}

/// Returns the guard of a range that lies in one region.
#[inline(always)]
fn one<const IS_PIN: bool>(
    taken: Result<Guard<IS_PIN>, Box<PinError>>,
) -> Result<PinnedRanges<Guard<IS_PIN>>, PinError> {
    match taken {
        Ok(guard) => Ok(PinnedRanges(Parts::One(guard))),
        Err(failure) => Err(*failure),
    }
}

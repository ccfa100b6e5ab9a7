//! Holds on a range of addresses or pages, whatever regions it lies in: [`Across`], and the methods
//! of [`Zone`] that take one.

use std::panic::Location;

use uzone_pages::{ByteLen, HoldSort, PfnRange};

use crate::directory::Found;
use crate::hold::{Hold, HoldFailure, PinOptions, Pinned, Referenced, Segment};
use crate::zone::Zone;

/// Guards on neighbouring pages, one for each region that they lie in; never none.
#[derive(Debug)]
#[must_use = "dropping it gives the pages back"]
pub struct Across<G> {
    first: G,
    // Empty as a rule, and then it allocates nothing.
    rest: Vec<G>,
}

impl<G> Across<G> {
    /// Returns the guards, in ascending order of what they hold.
    pub fn guards(&self) -> impl Iterator<Item = &G> {
        std::iter::once(&self.first).chain(&self.rest)
    }

    /// Returns the guards, each for itself, in ascending order of what they hold.
    pub fn into_guards(self) -> impl Iterator<Item = G> {
        std::iter::once(self.first).chain(self.rest)
    }

    /// Returns the guard if there is one only, as of a range that lies in one region.
    ///
    /// # Errors
    /// All of them, if there are more.
    pub fn into_single(self) -> Result<G, Self> {
        if self.rest.is_empty() { Ok(self.first) } else { Err(self) }
    }
}

impl Across<Pinned> {
    /// Returns the contiguous pieces of memory that are pinned, in ascending order.
    pub fn segments(&self) -> impl Iterator<Item = Segment> {
        self.guards().flat_map(Pinned::segments)
    }
}

impl Across<Referenced> {
    /// Returns the contiguous pieces of memory that are referenced, in ascending order.
    pub fn segments(&self) -> impl Iterator<Item = Segment> {
        self.guards().flat_map(Referenced::segments)
    }
}

/// Collects guards; drops those that it has if it is dropped itself.
struct Collector<G> {
    guards: Option<Across<G>>,
}

impl<G> Collector<G> {
    const EMPTY: Self = Self { guards: None };

    /// What a range in one region gives.
    #[inline]
    const fn single(first: G) -> Across<G> {
        Across { first, rest: Vec::new() }
    }

    fn add(&mut self, guard: G) {
        match &mut self.guards {
            None => self.guards = Some(Self::single(guard)),
            Some(guards) => guards.rest.push(guard),
        }
    }

    fn finish(self) -> Across<G> {
        match self.guards {
            Some(guards) => guards,
            None => unreachable!("a range has a page, and a region has each of its pages"),
        }
    }
}

impl Zone {
    /// Pins the pages that `len` bytes from `address` on have a part of, in whatever regions of the
    /// zone they lie; pages that are not there are produced first if their region can
    /// ([`PagemapOps::populate`](crate::PagemapOps::populate)).
    ///
    /// Costs a lookup without a lock, three atomic steps, and one for each folio.
    ///
    /// # Errors
    /// [`HoldFailure`] if no region has an address, or a folio refuses; then nothing is pinned.
    #[inline]
    #[track_caller]
    pub fn pin(&self, address: usize, len: ByteLen) -> Result<Across<Pinned>, HoldFailure> {
        self.pin_with(address, len, PinOptions::default())
    }

    /// As [`Zone::pin`], of what is there: a page that would have to be produced first is refused.
    ///
    /// # Errors
    /// As [`Zone::pin`].
    #[inline]
    #[track_caller]
    pub fn try_pin(&self, address: usize, len: ByteLen) -> Result<Across<Pinned>, HoldFailure> {
        self.pin_with(address, len, PinOptions::default().without_faults())
    }

    /// As [`Zone::pin`], the way that `options` say.
    ///
    /// # Errors
    /// As [`Zone::pin`], and for memory that cannot be pinned for long if that is asked for.
    #[track_caller]
    pub fn pin_with(
        &self,
        address: usize,
        len: ByteLen,
        options: PinOptions,
    ) -> Result<Across<Pinned>, HoldFailure> {
        let caller = Location::caller();
        if let Some(Found { pagemap, range }) = self.shared.directory.one_at_address(address, len) {
            return Ok(Collector::single(Pinned(Hold::pin(pagemap, range, options, caller)?)));
        }
        let mut guards = Collector::EMPTY;
        self.shared.directory.at_address(address, len, |Found { pagemap, range }| {
            guards.add(Pinned(Hold::pin(pagemap, range, options, caller)?));
            Ok(())
        })?;
        Ok(guards.finish())
    }

    /// As [`Zone::pin_with`], for pages by their frame numbers.
    ///
    /// # Errors
    /// As [`Zone::pin_with`].
    #[track_caller]
    pub fn pin_range(
        &self,
        range: PfnRange,
        options: PinOptions,
    ) -> Result<Across<Pinned>, HoldFailure> {
        let caller = Location::caller();
        let mut guards = Collector::EMPTY;
        self.shared.directory.at_pfn(range, |Found { pagemap, range }| {
            guards.add(Pinned(Hold::pin(pagemap, range, options, caller)?));
            Ok(())
        })?;
        Ok(guards.finish())
    }

    /// Takes references to the pages that `len` bytes from `address` on have a part of, in whatever
    /// regions of the zone they lie.
    ///
    /// # Errors
    /// [`HoldFailure`] if no region has an address, or a folio refuses; then none is taken.
    #[track_caller]
    pub fn get(&self, address: usize, len: ByteLen) -> Result<Across<Referenced>, HoldFailure> {
        let caller = Location::caller();
        if let Some(Found { pagemap, range }) = self.shared.directory.one_at_address(address, len) {
            let hold = Hold::take(pagemap, range, HoldSort::Reference, caller)?;
            return Ok(Collector::single(Referenced(hold)));
        }
        let mut guards = Collector::EMPTY;
        self.shared.directory.at_address(address, len, |Found { pagemap, range }| {
            guards.add(Referenced(Hold::take(pagemap, range, HoldSort::Reference, caller)?));
            Ok(())
        })?;
        Ok(guards.finish())
    }

    /// As [`Zone::get`], for pages by their frame numbers.
    ///
    /// # Errors
    /// As [`Zone::get`].
    #[track_caller]
    pub fn get_range(&self, range: PfnRange) -> Result<Across<Referenced>, HoldFailure> {
        let caller = Location::caller();
        let mut guards = Collector::EMPTY;
        self.shared.directory.at_pfn(range, |Found { pagemap, range }| {
            guards.add(Referenced(Hold::take(pagemap, range, HoldSort::Reference, caller)?));
            Ok(())
        })?;
        Ok(guards.finish())
    }
}

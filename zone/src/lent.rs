//! What a pagemap lends of itself and of its region, to read: [`RegionView`] and [`PagemapView`].
//!
//! The bytes of a bound region change only by calls that respect pins and content: those of
//! [`Pagemap`], and those of the guards on its pages. So neither view writes bytes, gives pages back to
//! the kernel or changes what is known about them. A [`Pool`](crate::Pool) lends a `PagemapView`, so
//! that a program cannot write to a free folio.
//!
//! ```compile_fail
//! # use uzone_pages::{ByteLen, MemoryKind};
//! # use uzone_zone::{BindOptions, Region, Zone};
//! # let region = Region::anonymous(ByteLen::mib(2)).unwrap();
//! let pagemap = Zone::new().bind(region, BindOptions::new(MemoryKind::Generic)).unwrap();
//! let _pinned = pagemap.pin(pagemap.range()).unwrap();
//! pagemap.region().punch(0..2 << 20).unwrap(); // a view has no such method
//! ```
//!
//! A view has no file descriptor either: a program that shares a memory file with another process takes
//! the descriptor from [`Region::mapping`](crate::Region::mapping) before the bind.

use std::fmt;
use std::ops::Range;

use uzone_os::sigbus::HandlerError;
use uzone_pages::{AddrError, ByteLen, Content, MemoryKind, Payload, Pfn, PfnRange};

use crate::bind::report::BindReport;
use crate::error::PinError;
use crate::ops::Poisoned;
use crate::pagemap::Pagemap;
use crate::pin::{PinOptions, Pinned, Referenced};
use crate::region_view::RegionView;
use crate::view::PageView;

/// A pagemap that a [`Pool`](crate::Pool) owns. It has what reads, pins and marks
/// pages as bad or good, and nothing that writes bytes or changes their content state.
pub struct PagemapView<'a, P: Payload = ()>(pub(crate) &'a Pagemap<P>);

impl<P: Payload> Clone for PagemapView<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Payload> Copy for PagemapView<'_, P> {}

impl<'a, P: Payload> PagemapView<'a, P> {
    /// As [`Pagemap::region`].
    #[must_use]
    pub fn region(self) -> RegionView<'a> {
        self.0.region()
    }

    /// As [`Pagemap::report`].
    #[must_use]
    pub fn report(self) -> &'a BindReport {
        self.0.report()
    }

    /// As [`Pagemap::kind`].
    #[must_use]
    pub fn kind(self) -> MemoryKind {
        self.0.kind()
    }

    /// As [`Pagemap::owner`].
    #[must_use]
    pub fn owner(self) -> Option<u64> {
        self.0.owner()
    }

    /// As [`Pagemap::range`].
    #[must_use]
    pub fn range(self) -> PfnRange {
        self.0.range()
    }

    /// As [`Pagemap::metadata_range`].
    #[must_use]
    pub fn metadata_range(self) -> Option<PfnRange> {
        self.0.metadata_range()
    }

    /// As [`Pagemap::page`].
    #[must_use]
    pub fn page(self, pfn: Pfn) -> Option<PageView<'a, P>> {
        self.0.page(pfn)
    }

    /// As [`Pagemap::page_at`].
    #[must_use]
    pub fn page_at(self, offset_bytes: u64) -> Option<PageView<'a, P>> {
        self.0.page_at(offset_bytes)
    }

    /// As [`Pagemap::pages`].
    pub fn pages(self) -> impl Iterator<Item = PageView<'a, P>> {
        self.0.pages()
    }

    /// As [`Pagemap::content`].
    #[must_use]
    pub fn content(self, pfn: Pfn) -> Option<Content> {
        self.0.content(pfn)
    }

    /// As [`Pagemap::contents`].
    pub fn contents(self, range: PfnRange) -> impl Iterator<Item = Content> {
        self.0.contents(range)
    }

    /// As [`Pagemap::range_at`].
    ///
    /// # Errors
    /// As [`Pagemap::range_at`].
    pub fn range_at(self, offset_bytes: u64, len: ByteLen) -> Result<PfnRange, AddrError> {
        self.0.range_at(offset_bytes, len)
    }

    /// As [`Pagemap::bytes_of`].
    #[must_use]
    pub fn bytes_of(self, range: PfnRange) -> Option<Range<u64>> {
        self.0.bytes_of(range)
    }

    /// As [`Pagemap::get`].
    ///
    /// # Errors
    /// As [`Pagemap::get`].
    #[track_caller]
    pub fn get(self, range: PfnRange) -> Result<Referenced, PinError> {
        self.0.get(range)
    }

    /// As [`Pagemap::pin`]. A free folio of a pool that is pinned becomes present, and the pool clears
    /// it again before it hands it out.
    ///
    /// # Errors
    /// As [`Pagemap::pin`].
    #[track_caller]
    pub fn pin(self, range: PfnRange) -> Result<Pinned, PinError> {
        self.0.pin(range)
    }

    /// As [`Pagemap::try_pin`].
    ///
    /// # Errors
    /// As [`Pagemap::try_pin`].
    #[track_caller]
    pub fn try_pin(self, range: PfnRange) -> Result<Pinned, PinError> {
        self.0.try_pin(range)
    }

    /// As [`Pagemap::pin_with`].
    ///
    /// # Errors
    /// As [`Pagemap::pin_with`].
    #[track_caller]
    pub fn pin_with(self, range: PfnRange, options: PinOptions) -> Result<Pinned, PinError> {
        self.0.pin_with(range, options)
    }

    /// As [`Pagemap::maybe_pinned`].
    #[must_use]
    pub fn maybe_pinned(self, pfn: Pfn) -> bool {
        self.0.maybe_pinned(pfn)
    }

    /// As [`Pagemap::poison`].
    ///
    /// # Errors
    /// As [`Pagemap::poison`].
    pub fn poison(self, pfn: Pfn) -> Result<Poisoned, PinError> {
        self.0.poison(pfn)
    }

    /// As [`Pagemap::unpoison`].
    ///
    /// # Errors
    /// As [`Pagemap::unpoison`].
    pub fn unpoison(self, pfn: Pfn) -> Result<(), PinError> {
        self.0.unpoison(pfn)
    }

    /// As [`Pagemap::is_poisoned`].
    #[must_use]
    pub fn is_poisoned(self, pfn: Pfn) -> bool {
        self.0.is_poisoned(pfn)
    }

    /// As [`Pagemap::bad_pages`].
    #[must_use]
    pub fn bad_pages(self, range: PfnRange) -> Vec<Pfn> {
        self.0.bad_pages(range)
    }

    /// As [`Pagemap::good_ranges`].
    #[must_use]
    pub fn good_ranges(self, range: PfnRange) -> Vec<PfnRange> {
        self.0.good_ranges(range)
    }

    /// As [`Pagemap::watch_bus_errors`].
    ///
    /// # Errors
    /// As [`Pagemap::watch_bus_errors`].
    pub fn watch_bus_errors(self) -> Result<(), HandlerError> {
        self.0.watch_bus_errors()
    }

    /// As [`Pagemap::collect_bus_errors`].
    #[expect(clippy::must_use_candidate, reason = "it is called for its effect")]
    pub fn collect_bus_errors(self) -> u64 {
        self.0.collect_bus_errors()
    }

    /// As [`Pagemap::lost_bus_errors`].
    #[must_use]
    pub fn lost_bus_errors(self) -> u64 {
        self.0.lost_bus_errors()
    }
}

impl<P: Payload> fmt::Debug for PagemapView<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

//! The memory of a bound region, to read only.

use std::fmt;
use std::ops::Range;

use uzone_os::{AccessError, Addr, Mapping, MappingError};
use uzone_pages::{ByteLen, Order, PageCount, PageSize};

use crate::backing::Backing;
use crate::region::Region;

/// The memory of a bound region, read-only: where it is, how long it is, and its bytes.
#[derive(Clone, Copy)]
pub struct RegionView<'a>(pub(crate) &'a Region);

impl<'a> RegionView<'a> {
    /// Returns the address of the first byte.
    #[must_use]
    pub fn addr(self) -> Addr {
        self.memory().addr()
    }

    /// Returns how long the region is; never zero.
    #[must_use]
    pub fn len(self) -> ByteLen {
        self.0.len()
    }

    /// Returns the size of a base page.
    #[must_use]
    pub fn page_size(self) -> PageSize {
        self.0.page_size()
    }

    /// Returns how many base pages the region has; never zero.
    #[must_use]
    pub fn pages(self) -> PageCount {
        self.0.pages()
    }

    /// Returns what is behind the region.
    #[must_use]
    pub fn backing(self) -> &'a Backing {
        self.0.backing()
    }

    /// Returns the order of the folios that the backing suggests: see [`Region::folio_order`].
    #[must_use]
    pub fn folio_order(self) -> Order {
        self.0.folio_order()
    }

    /// Copies bytes out of the region, from byte `offset_bytes` on: see [`Region::read_at`].
    ///
    /// # Errors
    /// [`AccessError`] unless all bytes are inside; then none is copied.
    pub fn read_at(self, offset_bytes: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.0.read_at(offset_bytes, out)
    }

    /// Returns how much memory the region has from the kernel now. It costs a walk over the region's
    /// page tables.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn resident(self) -> Result<ByteLen, MappingError> {
        self.memory().resident()
    }

    /// As [`RegionView::resident`], of a range of bytes.
    ///
    /// # Errors
    /// [`MappingError`] if the range is not inside, or the kernel does not say.
    pub fn resident_in(self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        self.memory().resident_in(range)
    }

    /// Returns how many bytes of the region are in huge pages now.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn huge_backed(self) -> Result<ByteLen, MappingError> {
        self.memory().huge_backed()
    }

    fn memory(self) -> &'a Mapping {
        self.0.memory()
    }
}

impl fmt::Debug for RegionView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

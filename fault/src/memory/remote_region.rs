//! Where memory of another process is, and which bytes of the backing it holds: [`RemoteRegion`].

use std::ops::Range;

use uzone_os::Vaddr;
use uzone_pages::{AddrError, ByteLen, FaultArea, PageSize, Pfn, PfnRange};

/// Some memory of another process, and which bytes of the backing it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Where it starts, as the other process sees it.
    pub start: Vaddr,
    /// How long it is.
    pub len: ByteLen,
    /// Which byte of the backing it starts with.
    pub offset: u64,
    /// The size of its pages: that of huge pages where the memory has those.
    pub page: PageSize,
}

impl RemoteRegion {
    /// Returns its addresses.
    pub(crate) fn addresses(&self) -> Range<u64> {
        self.start.get()..self.start.get().saturating_add(self.len.get())
    }

    /// Returns it as an area of faults, which are numbered by their offsets in the backing.
    pub(crate) fn fault_area(&self) -> Result<FaultArea, AddrError> {
        let shift = self.page.shift();
        let first = Pfn::new(self.offset >> shift);
        let pages = PfnRange::try_new(first, self.page.pages_in(self.len)?)?;
        Ok(FaultArea { pages, address: self.start.get() >> shift })
    }

    /// Returns which bytes of the backing it holds.
    pub(crate) fn offsets(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.len.get())
    }
}

/// Returns the addresses that bytes of the backing have, region by region, and how many bytes those are.
pub(crate) fn places(
    regions: &[RemoteRegion],
    bytes: &Range<u64>,
) -> impl Iterator<Item = (Vaddr, ByteLen)> {
    let Range { start, end } = *bytes;
    regions.iter().filter_map(move |region| {
        let held = region.offsets();
        let (from, to) = (start.max(held.start), end.min(held.end));
        let place =
            || (Vaddr::new(region.start.get() + (from - held.start)), ByteLen::new(to - from));
        (from < to).then(place)
    })
}

/// Returns which pages of the backing the addresses from `start` up to `end` are, region by region.
pub(crate) fn offsets(
    regions: &[RemoteRegion],
    start: Vaddr,
    end: Vaddr,
) -> impl Iterator<Item = Range<u64>> {
    regions.iter().filter_map(move |region| {
        let from = start.get().max(region.start.get()) - region.start.get();
        let to = end.get().min(region.start.get() + region.len.get());
        let to = to.checked_sub(region.start.get())?;
        (from < to).then(|| region.offset + from..region.offset + to)
    })
}

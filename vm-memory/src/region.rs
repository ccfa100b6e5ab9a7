//! Memory of uzone at a guest address: [`GuestRegion`].
//!
//! A page of a lazy mapping that cannot be produced raises `SIGBUS` when it is touched, as it does for each reader of
//! such memory; `uzone::lazy::LazyMapping::populate` returns an error instead.
//!
//! Unsafe: this is the file that makes a [`VolatileSlice`] of an address and a length.

use std::fs::File;

use uzone::hostpool::Block;
use uzone::lazy::LazyMapping;
use uzone::{Pagemap, Region, Sharing};
use vm_memory::bitmap::{BS, Bitmap};
use vm_memory::guest_memory::{Error, Result};
use vm_memory::{
    Address, FileOffset, GuestAddress, GuestMemoryRegion, GuestMemoryRegionBytes,
    GuestRegionCollection, GuestUsize, MemoryRegionAddress, VolatileSlice,
};

use crate::written::WrittenPages;

/// The memory of a guest: regions in ascending order that do not overlap.
pub type GuestMemory = GuestRegionCollection<GuestRegion>;

/// Memory of this process that a guest may have.
#[derive(Debug)]
#[non_exhaustive]
pub enum HostMemory {
    /// A region that is not bound.
    Region(Region),
    /// A region that is bound, so that its pages can be pinned.
    Pagemap(Pagemap),
    /// Memory whose pages are put in place when they are touched.
    Lazy(LazyMapping),
    /// Blocks of a host pool.
    Block(Block),
}

impl HostMemory {
    /// Returns a pointer to the first byte.
    fn as_ptr(&self) -> *mut u8 {
        match self {
            Self::Region(region) => region.as_ptr(),
            Self::Pagemap(pagemap) => pagemap.region().as_ptr(),
            Self::Lazy(mapping) => mapping.as_ptr(),
            Self::Block(block) => block.as_ptr(),
        }
    }

    /// Returns how long it is; never zero.
    pub(crate) fn len_bytes(&self) -> u64 {
        match self {
            Self::Region(region) => region.len(),
            Self::Pagemap(pagemap) => pagemap.region().len(),
            Self::Lazy(mapping) => mapping.len(),
            Self::Block(block) => block.len(),
        }
        .get()
    }

    /// Returns the memory file behind the memory, for a device in another process.
    fn file(&self) -> Option<FileOffset> {
        let Self::Region(region) = self else { return None };
        let mapping = region.mapping();
        let fd = mapping.fd().filter(|_| mapping.sharing() == Some(Sharing::Shared))?;
        let file = File::from(fd.try_clone_to_owned().ok()?);
        Some(FileOffset::new(file, mapping.file_offset()?))
    }
}

impl From<Region> for HostMemory {
    fn from(region: Region) -> Self {
        Self::Region(region)
    }
}

impl From<Pagemap> for HostMemory {
    fn from(pagemap: Pagemap) -> Self {
        Self::Pagemap(pagemap)
    }
}

impl From<LazyMapping> for HostMemory {
    fn from(mapping: LazyMapping) -> Self {
        Self::Lazy(mapping)
    }
}

impl From<Block> for HostMemory {
    fn from(block: Block) -> Self {
        Self::Block(block)
    }
}

/// A contiguous part of a guest's memory.
#[derive(Debug)]
pub struct GuestRegion {
    start: GuestAddress,
    file: Option<FileOffset>,
    written: WrittenPages,
}

impl GuestRegion {
    /// Takes memory that the guest has from address `start` on. Returns `None` if it ends beyond the last guest address.
    #[must_use]
    pub fn new(start: GuestAddress, memory: impl Into<HostMemory>) -> Option<Self> {
        let memory = memory.into();
        start.checked_add(memory.len_bytes() - 1)?;
        Some(Self { start, file: memory.file(), written: WrittenPages::new(memory)? })
    }

    /// Returns the memory, to populate, to pin or to write it back.
    #[must_use]
    pub fn memory(&self) -> &HostMemory {
        self.written.memory()
    }

    /// Returns the pages that were written.
    #[must_use]
    pub fn written(&self) -> &WrittenPages {
        &self.written
    }

    /// Returns the memory again, if it is wanted for something else. The pages that were written are forgotten.
    #[must_use]
    pub fn into_memory(self) -> HostMemory {
        self.written.into_memory()
    }

    /// Returns a pointer to `count` bytes from `offset` on, all of which are inside.
    fn inside(&self, offset: MemoryRegionAddress, count: usize) -> Result<(*mut u8, usize)> {
        let end = offset.checked_add(count as u64); // a length has at most 64 bits
        if end.is_none_or(|end| end.raw_value() > self.len()) {
            return Err(Error::InvalidBackendAddress);
        }
        // It is inside of memory of this process, or right behind it.
        let offset =
            usize::try_from(offset.raw_value()).map_err(|_| Error::InvalidBackendAddress)?;
        Ok((self.memory().as_ptr().wrapping_add(offset), offset))
    }
}

impl GuestMemoryRegion for GuestRegion {
    type B = WrittenPages;

    fn len(&self) -> GuestUsize {
        self.memory().len_bytes()
    }

    fn start_addr(&self) -> GuestAddress {
        self.start
    }

    fn bitmap(&self) -> BS<'_, WrittenPages> {
        self.written.slice_at(0)
    }

    fn get_host_address(&self, addr: MemoryRegionAddress) -> Result<*mut u8> {
        Ok(self.inside(addr, 1)?.0)
    }

    fn file_offset(&self) -> Option<&FileOffset> {
        self.file.as_ref()
    }

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_, BS<'_, WrittenPages>>> {
        let (start, offset) = self.inside(offset, count)?;
        let written = self.written.slice_at(offset);
        // SAFETY: `with_bitmap` wants `count` bytes at `start` that are there while the slice is, and whose other
        // users access them as if they were volatile.
        // 1. In bounds: `inside` compared the bytes with the length of the memory, and the pointer is of its mapping.
        // 2. There: the slice borrows `self`, which owns the memory. Each kind of it stays mapped until it is dropped, and
        //    none is moved by a call that takes `&self`. A store to memory that was mapped read-only is a signal.
        // 3. Others: uzone lends no plain reference to such memory, and copies by atomics, assembly and system calls.
        //    Slices of this kind are volatile. Code that makes a reference of a pointer vouches for it.
        Ok(unsafe { VolatileSlice::with_bitmap(start, count, written, None) })
    }
}

impl GuestMemoryRegionBytes for GuestRegion {}

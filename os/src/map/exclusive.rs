//! A mapping that has no other writer, so that it can be lent as slices: [`Exclusive`].
//!
//! Whether memory is ours alone is a fact of where it comes from: private anonymous pages are, of the
//! host's size or of a hugetlb pool. A file is not, and neither is a memory file that [`Mapping::memfd`]
//! made, for its descriptor is for handing out. Of those the caller may know more: that no other process
//! has mapped the file, or that all of them keep away from some of its bytes. It asserts that with an
//! [`Exclusivity`], which is `unsafe` to make and names one mapping. What could go wrong without it is a
//! data race, also where every word would be atomic on our side: an initialiser needs a slice, and a slice
//! must not change under it.
//!
//! What changes bytes takes `&mut self` here, where [`Mapping`] takes `&self`: a slice is lent by
//! borrowing, and nothing may move under it.
//! Unsafe: this is the file that makes a slice of bytes out of a mapping.

use core::ops::Range;
use core::sync::atomic::AtomicBool;
use std::io;
use std::num::NonZeroUsize;

use uzone_pages::{ByteLen, PageSize};

use crate::host::hugepages::HugeSize;
use crate::map::advise::Collapsed;
use crate::map::mapping::{Mapping, MappingError, Rejected};
use crate::map::options::{Access, Addr, Anonymous};
use crate::map::populate::Populated;
use crate::map::shortage::MapError;

/// Memory of this process that no other process and no other owner in this one can change.
///
/// # Invariants
/// `0.is_private()`, or the caller vouched for its bytes with an [`Exclusivity`]; and the mapping is
/// readable and writable.
#[derive(Debug)]
pub struct Exclusive(Mapping);

/// A promise about one mapping and the parts that are cut from it: an [`Exclusive`] that is made of them is
/// the only user of its bytes.
///
/// It is good for that mapping alone, whatever is mapped at the same addresses later, so that it
/// can be copied and passed on without care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exclusivity {
    origin: u64,
}

impl Exclusivity {
    /// Promises that `mapping` can be taken as exclusive memory, or those parts of it that will be.
    ///
    /// # Safety
    /// As long as an [`Exclusive`] exists that was made of `mapping`, or of a part that was cut from
    /// it, by means of this value or a copy, all of the following holds for the bytes that this
    /// `Exclusive` has:
    /// 1. Nothing else changes them: no other process, no device, no page server, and nothing in this
    ///    process, be it through another mapping, a file descriptor or a raw pointer.
    /// 2. Nothing else in this process reads them but by system calls.
    /// 3. What is behind them stays: a file is not truncated below them, and no hole is punched.
    #[must_use]
    pub unsafe fn assert(mapping: &Mapping) -> Self {
        Self { origin: mapping.origin() }
    }
}

impl Exclusive {
    /// Maps private pages of no file, all zero, as [`Mapping::anonymous`] does.
    ///
    /// # Errors
    /// [`MapError`] names the limit that forbids it.
    pub fn anonymous(len: ByteLen, how: Anonymous) -> Result<Self, MapError> {
        Mapping::anonymous(len, how).map(Self)
    }

    /// Maps private huge pages of the pool of `size`, all zero, as [`Mapping::hugetlb`] does.
    ///
    /// # Errors
    /// [`MapError::HugePool`] with the numbers of the pool if it is too small.
    pub fn hugetlb(len: ByteLen, size: HugeSize) -> Result<Self, MapError> {
        Mapping::hugetlb(len, size).map(Self)
    }

    /// Takes a mapping if its memory is ours alone.
    ///
    /// # Errors
    /// [`Rejected`] gives the mapping back.
    pub fn try_from_mapping(mapping: Mapping) -> Result<Self, Rejected<Mapping>> {
        if mapping.is_private() {
            return Ok(Self(mapping));
        }
        Err(Rejected::new(mapping, MappingError::Shared))
    }

    /// Takes a mapping that was promised to be exclusive.
    ///
    /// # Errors
    /// [`Rejected`] gives the mapping back: the promise is about another one, or nothing can be
    /// written to it.
    pub fn try_from_promised(
        mapping: Mapping,
        promise: Exclusivity,
    ) -> Result<Self, Rejected<Mapping>> {
        let cause = if promise.origin != mapping.origin() {
            MappingError::AnotherMapping
        } else if mapping.access() == Access::ReadOnly {
            MappingError::ReadOnly
        } else {
            // The invariant: the promise vouches for the bytes.
            return Ok(Self(mapping));
        };
        Err(Rejected::new(mapping, cause))
    }

    /// Cuts the memory in two, as [`Mapping::cut`] does. Each part is exclusive.
    ///
    /// # Errors
    /// [`Rejected`] with the mapping, which is exclusive again by what made it so before.
    pub fn cut(self, front: ByteLen) -> Result<(Self, Self), Rejected<Mapping>> {
        // The invariant: parts of private memory are private, and a promise covers parts.
        self.0.cut(front).map(|(front, behind)| (Self(front), Self(behind)))
    }

    /// Joins two parts that [`Exclusive::cut`] made of one, of which `behind` starts where this one
    /// ends: then one munmap(2) ends both.
    ///
    /// # Errors
    /// [`Rejected`] with both mappings.
    pub fn join(self, behind: Self) -> Result<Self, Rejected<(Mapping, Mapping)>> {
        self.0.join(behind.0).map(Self)
    }

    /// Returns the mapping, whose bytes are then copied and not lent.
    #[must_use]
    pub fn into_mapping(self) -> Mapping {
        self.0
    }

    /// Returns the bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        let len = self.len_usize();
        // SAFETY: `from_raw_parts` wants `len` initialised bytes in one allocation of at most `isize::MAX`
        // bytes that do not change for the time of the borrow.
        // 1. In bounds: invariants 2 and 3 of `Mapping`.
        // 2. Initialised: the kernel fills a page before it shows it, and after values were written
        //    through `Mapped`, whose padding has no bytes, `init_padding` was called.
        // 3. Unchanged: nothing else has these pages, or changes them (the invariant of `Exclusive`), and
        //    in this process every method that changes them takes `&mut self`, which the borrow forbids.
        unsafe { core::slice::from_raw_parts(self.0.start().as_ptr(), len) }
    }

    /// Returns the bytes, to be changed.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len_usize();
        // SAFETY: `from_raw_parts_mut` wants what `from_raw_parts` does above, and that the bytes are
        // writable and not accessed otherwise for the time of the borrow: `&mut self` is the only way to
        // the only owner of the pages, and the mapping is writable by the invariant.
        unsafe { core::slice::from_raw_parts_mut(self.0.start().as_ptr(), len) }
    }

    /// Makes bytes of whatever stands in the memory, also of padding that a value left there. In the
    /// language padding has no bytes; in memory it has. An opaque instruction that may have written any of
    /// it ends that: what stands there from now on is bytes, whichever they are. It costs nothing.
    pub(crate) fn init_padding(&mut self) {
        let start = self.0.start().as_ptr();
        // SAFETY: no instruction is executed, so every demand of `asm` on registers, stack and flags is
        // met. To the compiler it may write any memory that `start` leads to, which `&mut self` allows:
        // nothing else reaches it, and any bytes are valid for the next reader, as bytes and as `FromBytes`
        // values. Pages here never lose their bytes on their own (`MADV_FREE` is not used), so what is read
        // later is what stands there now.
        unsafe {
            core::arch::asm!("/* {0} */", in(reg) start, options(nostack, preserves_flags));
        }
    }

    fn len_usize(&self) -> usize {
        // It was a `usize` when it was mapped.
        usize::try_from(self.0.len().get()).unwrap_or(self.0.mapped_len())
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.0
    }

    /// Returns whether the memory is private and of no file, so that what is given back to the
    /// kernel reads as zero afterwards.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.0.is_private()
    }

    /// As [`Mapping::prefer_node`].
    ///
    /// # Errors
    /// As there.
    pub fn prefer_node(&self, node: u32) -> io::Result<()> {
        self.0.prefer_node(node)
    }

    /// As [`Mapping::node_of_most`].
    #[must_use]
    pub fn node_of_most(&self) -> Option<u32> {
        self.0.node_of_most()
    }

    /// Returns how long the memory is, as it was asked for; never zero.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        self.0.len()
    }

    /// Returns whether the memory has no byte, which never holds.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns where the memory starts.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.0.addr()
    }

    /// Returns the size of the pages behind it, as [`Mapping::page_size`] does.
    #[must_use]
    pub fn page_size(&self) -> PageSize {
        self.0.page_size()
    }

    /// Makes a range present, as [`Mapping::populate`] does.
    ///
    /// # Errors
    /// [`MappingError`] names what was exhausted.
    pub fn populate(&mut self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        self.0.populate(range)
    }

    /// Makes a range present by several threads, as [`Mapping::populate_by`] does.
    ///
    /// # Errors
    /// [`MappingError`] names what was exhausted, and how much is present.
    pub fn populate_by(
        &mut self,
        range: Range<u64>,
        threads: NonZeroUsize,
        progress: impl FnMut(ByteLen, ByteLen),
        cancel: &AtomicBool,
    ) -> Result<Populated, MappingError> {
        self.0.populate_by(range, threads, progress, cancel)
    }

    /// Makes huge pages of what is present, as [`Mapping::collapse`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel cannot.
    pub fn collapse(&mut self, range: Range<u64>) -> Result<Collapsed, MappingError> {
        self.0.collapse(range)
    }

    /// Gives the pages of a range back, as [`Mapping::discard`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the range cuts a page.
    pub fn discard(&mut self, range: Range<u64>) -> Result<(), MappingError> {
        self.0.discard(range)
    }

    /// Returns how many bytes are present, as [`Mapping::resident`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn resident(&self) -> Result<ByteLen, MappingError> {
        self.0.resident()
    }

    /// Returns how many bytes of a range are present, as [`Mapping::resident_in`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn resident_in(&self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        self.0.resident_in(range)
    }

    /// Returns whether no page of a range has memory, as [`Mapping::is_untouched`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn is_untouched(&self, range: Range<u64>) -> Result<bool, MappingError> {
        self.0.is_untouched(range)
    }

    /// Returns how many bytes are in huge pages, as [`Mapping::huge_backed`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn huge_backed(&self) -> Result<ByteLen, MappingError> {
        self.0.huge_backed()
    }
}

//! Memory that has no other writer, so that it can be lent as slices: [`Mapped`], and [`Exclusive`], which is one of
//! bytes.
//!
//! Whether memory is ours alone is a fact of where it comes from: private anonymous pages are, of the
//! host's size or of a hugetlb pool. A file is not, and neither is a memory file that [`Mapping::memfd`]
//! made, for its descriptor is for handing out. Of those the caller may know more: that no other process
//! has mapped the file, or that all of them keep away from some of its bytes. It asserts that with an
//! [`Exclusivity`], which is `unsafe` to make and names one mapping. The danger without it is a
//! data race, also where every word would be atomic on our side: an initialiser needs a slice, and a slice
//! must not change under it.
//!
//! Values are plain data of which every pattern of bits is one. Memory that was never touched reads as values of
//! zero bits, and costs nothing until it is. A method that changes bytes takes `&mut self` here, where [`Mapping`] takes
//! `&self`: a slice is lent by borrowing, and nothing may move under it.
//! Unsafe: this is the file that makes slices out of a mapping.

use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut, Range};
use std::io;

use uzone_pages::{ByteLen, PageSize};
use zerocopy::FromBytes;

use crate::map::mapping::{Mapping, MappingError, Rejected};
use crate::map::options::{Access, Addr, Anonymous};
use crate::map::shortage::MapError;

/// `count` values of `T` at the start of memory of this process that no other process and no other owner in this
/// one can change.
///
/// `T` is plain data: any bytes are a value (`FromBytes`). Atomics qualify. Values are not dropped,
/// only their memory is unmapped. Where `T` has padding, its bytes afterwards are not specified.
///
/// # Invariants
/// 1. `mapping` is private, or the caller vouched for its bytes with an [`Exclusivity`]; and it is readable and
///    writable.
/// 2. `count * size_of::<T>()` is not zero and at most the length of the memory, and the memory starts
///    at a multiple of `align_of::<T>()`. Any bytes are a `T`.
pub struct Mapped<T = u8> {
    mapping: Mapping,
    count: usize,
    // Owning values of `T`: this makes `Mapped<T>` `Send` and `Sync` exactly when `[T]` is.
    values: PhantomData<T>,
}

/// Memory of this process that no other process and no other owner in this one can change, as bytes.
pub type Exclusive = Mapped<u8>;

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
    /// 3. The memory behind them stays: a file is not truncated below them, and no hole is punched.
    #[must_use]
    pub unsafe fn assert(mapping: &Mapping) -> Self {
        Self { origin: mapping.origin() }
    }
}

/// Returns the number of bytes that a mapping has.
fn len_of(mapping: &Mapping) -> usize {
    // It was a `usize` when it was mapped.
    mapping.len().to_usize().unwrap_or(mapping.mapped_len())
}

impl Exclusive {
    /// Takes memory that is exclusive.
    fn of(mapping: Mapping) -> Self {
        Self { count: len_of(&mapping), mapping, values: PhantomData }
    }

    /// Maps private pages of no file, all zero, as [`Mapping::anonymous`] does.
    ///
    /// # Errors
    /// [`MapError`] names the limit that forbids it.
    pub fn anonymous(len: ByteLen, how: Anonymous) -> Result<Self, MapError> {
        Mapping::anonymous(len, how).map(Self::of)
    }

    /// Maps private huge pages of the pool of `size`, all zero, as [`Mapping::hugetlb`] does.
    ///
    /// # Errors
    /// [`MapError::HugePool`] with the numbers of the pool if it is too small.
    pub fn hugetlb(len: ByteLen, size: PageSize) -> Result<Self, MapError> {
        Mapping::hugetlb(len, size).map(Self::of)
    }

    /// Takes a mapping if its memory is ours alone.
    ///
    /// # Errors
    /// [`Rejected`] gives the mapping back.
    pub fn try_from_mapping(mapping: Mapping) -> Result<Self, Rejected<Mapping>> {
        if mapping.is_private() {
            return Ok(Self::of(mapping));
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
            return Ok(Self::of(mapping));
        };
        Err(Rejected::new(mapping, cause))
    }

    /// Cuts the memory in two, as [`Mapping::cut`] does. Each part is exclusive.
    ///
    /// # Errors
    /// [`Rejected`] with the mapping, which is exclusive again by the same reason as before.
    pub fn cut(self, front: ByteLen) -> Result<(Self, Self), Rejected<Mapping>> {
        // The invariant: parts of private memory are private, and a promise covers parts.
        self.mapping.cut(front).map(|(front, behind)| (Self::of(front), Self::of(behind)))
    }

    /// Joins two parts that [`Exclusive::cut`] made of one, of which `behind` starts where this one
    /// ends: then one munmap(2) ends both.
    ///
    /// # Errors
    /// [`Rejected`] with both mappings.
    pub fn join(self, behind: Self) -> Result<Self, Rejected<(Mapping, Mapping)>> {
        self.mapping.join(behind.mapping).map(Self::of)
    }

    /// Returns the mapping, whose bytes are then copied and not lent.
    #[must_use]
    pub fn into_mapping(self) -> Mapping {
        self.mapping
    }

    /// Returns the bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self
    }

    /// Returns the length of the memory, as it was asked for; never zero.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        self.mapping.len()
    }

    /// Makes a range present, as [`Mapping::populate`] does.
    ///
    /// # Errors
    /// [`MappingError`] names the exhausted resource.
    pub fn populate(&mut self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        self.mapping.populate(range)
    }

    /// Gives the pages of a range back, as [`Mapping::discard`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the range cuts a page.
    pub fn discard(&mut self, range: Range<u64>) -> Result<(), MappingError> {
        self.mapping.discard(range)
    }
}

impl<T: FromBytes> Mapped<T> {
    const SIZE: usize = {
        assert!(size_of::<T>() != 0, "values without a size need no memory");
        size_of::<T>()
    };

    /// Takes memory, as `count` values from its start on.
    ///
    /// # Errors
    /// [`Rejected`] gives the memory back: it is too short, or not aligned for `T`.
    pub fn try_new(memory: Exclusive, count: usize) -> Result<Self, Rejected<Exclusive>> {
        let (addr, len) = (memory.addr(), memory.len());
        let bytes = count.checked_mul(Self::SIZE);
        let cause = if count == 0 || bytes.is_none_or(|bytes| bytes as u64 > len.get()) {
            MappingError::NotSoMany { addr, count, size_bytes: Self::SIZE, len }
        } else if !addr.get().is_multiple_of(align_of::<T>()) {
            MappingError::Unaligned { addr, align_bytes: align_of::<T>() }
        } else {
            return Ok(Self { mapping: memory.mapping, count, values: PhantomData });
        };
        Err(Rejected::new(memory, cause))
    }

    /// Returns all bytes of the memory, to be changed or to be initialised by streaming stores. It includes the bytes
    /// behind the last value.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.init_padding();
        let len = len_of(&self.mapping);
        // SAFETY: `from_raw_parts_mut` wants `len` initialised and writable bytes in one allocation, not accessed
        // otherwise for the time of the borrow.
        // 1. In bounds, and writable: invariants 2 and 3 of `Mapping`, and 1 of `Mapped`.
        // 2. Initialised: the kernel fills a page before it shows it, and padding has bytes since just now.
        // 3. Alone: `&mut self` is the only way to the only owner of the pages, and any bytes are a `T`.
        unsafe { core::slice::from_raw_parts_mut(self.mapping.start().as_ptr(), len) }
    }
}

impl<T> Mapped<T> {
    /// Returns the memory, with the bytes that the values have.
    #[must_use]
    pub fn into_exclusive(mut self) -> Exclusive {
        self.init_padding();
        Exclusive::of(self.mapping)
    }

    /// Makes bytes of whatever stands in the memory, also of padding that a value left there. In the
    /// language padding has no bytes; in memory it has. An opaque instruction that may have written any of
    /// the padding ends that: afterwards it has bytes, whichever they are. It costs nothing.
    fn init_padding(&mut self) {
        let start = self.mapping.start().as_ptr();
        // SAFETY: no instruction is executed, so every demand of `asm` on registers, stack and flags is
        // met. To the compiler it may write any memory that `start` leads to, which `&mut self` allows:
        // nothing else reaches it, and any bytes are valid for the next reader, as bytes and as `FromBytes`
        // values. Pages here never lose their bytes on their own (`MADV_FREE` is not used), so later reads see the same
        // bytes.
        unsafe {
            core::arch::asm!("/* {0} */", in(reg) start, options(nostack, preserves_flags));
        }
    }

    /// Returns the start of the memory.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.mapping.addr()
    }

    /// Returns the size of the pages behind it, as [`Mapping::page_size`] does.
    #[must_use]
    pub fn page_size(&self) -> PageSize {
        self.mapping.page_size()
    }

    /// Returns whether the memory is private and of no file, so that pages which are given back to the kernel read as
    /// zero afterwards.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.mapping.is_private()
    }

    /// Like [`Mapping::prefer_node`].
    ///
    /// # Errors
    /// The error of [`Mapping::prefer_node`].
    pub fn prefer_node(&self, node: u32) -> io::Result<()> {
        self.mapping.prefer_node(node)
    }

    /// Like [`Mapping::node_of_most`].
    #[must_use]
    pub fn node_of_most(&self) -> Option<u32> {
        self.mapping.node_of_most()
    }

    /// Returns the number of bytes that are present, as [`Mapping::resident`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn resident(&self) -> Result<ByteLen, MappingError> {
        self.mapping.resident()
    }

    /// Returns the number of bytes of a range that are present, as [`Mapping::resident_in`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn resident_in(&self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        self.mapping.resident_in(range)
    }

    /// Returns whether no page of a range has memory, as [`Mapping::is_untouched`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn is_untouched(&self, range: Range<u64>) -> Result<bool, MappingError> {
        self.mapping.is_untouched(range)
    }

    /// Returns the number of bytes that are in huge pages, as [`Mapping::huge_backed`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn huge_backed(&self) -> Result<ByteLen, MappingError> {
        self.mapping.huge_backed()
    }
}

impl<T> Deref for Mapped<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        let start = self.mapping.start().cast::<T>();
        // SAFETY: `from_raw_parts` wants `count` initialised values, aligned, in one allocation of at most
        // `isize::MAX` bytes, that do not change for the time of the borrow, except inside of an `UnsafeCell`.
        // 1. In bounds and aligned: invariant 2, and invariants 2 and 3 of `Mapping`.
        // 2. Initialised: any bytes are a `T`, and the kernel fills a page before it shows it. Padding of values
        //    that were written before has bytes since `init_padding`, which `into_exclusive` and `as_bytes_mut`
        //    call, the only ways from values to bytes.
        // 3. Unchanged: nothing else has these pages, or changes them (invariant 1), and in this process every
        //    method that changes them takes `&mut self`, which the borrow forbids.
        unsafe { core::slice::from_raw_parts(start.as_ptr(), self.count) }
    }
}

impl<T> DerefMut for Mapped<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        let start = self.mapping.start().cast::<T>();
        // SAFETY: as in `deref`, and `from_raw_parts_mut` wants that the values are writable and not
        // accessed otherwise: the memory is writable (invariant 1), and `&mut self` is the only way to its only
        // owner.
        unsafe { core::slice::from_raw_parts_mut(start.as_ptr(), self.count) }
    }
}

impl<T> fmt::Debug for Mapped<T> {
    /// Writes the memory and the number of values; the values may be millions.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped")
            .field("mapping", &self.mapping)
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

//! An owned row of values in mapped memory: [`Mapped`].
//!
//! It is to an [`Exclusive`] what a boxed slice is to the heap, and for the same values: plain data
//! of which every pattern of bits is a value. Memory that was never touched reads as values of zero
//! bits, and costs nothing until it is.
//! Unsafe: this is the file that makes a slice of values out of exclusive memory.

use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut, Range};

use uzone_pages::{ByteLen, PageSize};
use zerocopy::FromBytes;

use crate::map::exclusive::Exclusive;
use crate::map::mapping::{MappingError, Rejected};
use crate::map::options::Addr;

/// `count` values of `T` at the start of memory that is ours alone.
///
/// `T` is plain data: any bytes are a value (`FromBytes`). Atomics qualify. Values are not dropped,
/// only their memory is unmapped. Where `T` has padding, what stands there afterwards is not
/// specified.
///
/// # Invariants
/// `count * size_of::<T>()` is not zero and at most the length of the memory, and the memory starts
/// at a multiple of `align_of::<T>()`.
pub struct Mapped<T> {
    memory: Exclusive,
    count: usize,
    // Owning values of `T`: this makes `Mapped<T>` `Send` and `Sync` exactly when `[T]` is.
    values: PhantomData<T>,
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
        match Self::check(&memory, count) {
            Ok(()) => Ok(Self { memory, count, values: PhantomData }),
            Err(cause) => Err(Rejected::new(memory, cause)),
        }
    }

    fn check(memory: &Exclusive, count: usize) -> Result<(), MappingError> {
        let (addr, len) = (memory.addr(), memory.len());
        let bytes = count.checked_mul(Self::SIZE);
        if count == 0 || bytes.is_none_or(|bytes| bytes as u64 > len.get()) {
            return Err(MappingError::NotSoMany { addr, count, size_bytes: Self::SIZE, len });
        }
        if !memory.addr().get().is_multiple_of(align_of::<T>()) {
            return Err(MappingError::Unaligned { addr, align_bytes: align_of::<T>() });
        }
        Ok(())
    }

    /// Returns all bytes of the memory, to be initialised by streaming stores. It includes what is
    /// behind the last value.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.memory.init_padding();
        self.memory.as_bytes_mut()
    }
}

impl<T> Mapped<T> {
    /// Returns the memory, with the bytes that the values have.
    #[must_use]
    pub fn into_exclusive(self) -> Exclusive {
        let mut memory = self.memory;
        memory.init_padding();
        memory
    }

    /// Returns how long the memory is, which may be more than the values need.
    #[must_use]
    pub fn byte_len(&self) -> ByteLen {
        self.memory.len()
    }

    /// Returns where the memory starts.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.memory.addr()
    }

    /// Returns the size of the pages behind it, as [`Exclusive::page_size`] does.
    #[must_use]
    pub fn page_size(&self) -> PageSize {
        self.memory.page_size()
    }

    /// Returns how many bytes are present, as [`Exclusive::resident`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn resident(&self) -> Result<ByteLen, MappingError> {
        self.memory.resident()
    }

    /// Returns how many bytes of a range are present, as [`Exclusive::resident_in`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn resident_in(&self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        self.memory.resident_in(range)
    }

    /// Returns how many bytes are in huge pages, as [`Exclusive::huge_backed`] does.
    ///
    /// # Errors
    /// [`MappingError`] if the kernel does not say.
    pub fn huge_backed(&self) -> Result<ByteLen, MappingError> {
        self.memory.huge_backed()
    }
}

impl<T> Deref for Mapped<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let start = self.memory.mapping().start().cast::<T>();
        // SAFETY: `from_raw_parts` wants `count` initialised values, aligned, in one allocation, that do
        // not change for the time of the borrow, except inside of an `UnsafeCell`.
        // 1. In bounds and aligned: the invariants of `Mapped`, checked when it was made.
        // 2. Initialised: any bytes are a `T` (`FromBytes`, demanded by every constructor), and
        //    bytes of mapped memory are never uninitialised (see `Exclusive::as_bytes`).
        // 3. Unchanged: the memory is ours alone, `self` owns it, and no method with `&self` lends
        //    bytes of it or changes them: those take `&mut self`, which the borrow forbids.
        unsafe { core::slice::from_raw_parts(start.as_ptr(), self.count) }
    }
}

impl<T> DerefMut for Mapped<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let start = self.memory.mapping().start().cast::<T>();
        // SAFETY: as in `deref`, and `from_raw_parts_mut` wants that the values are writable and not
        // accessed otherwise: exclusive memory is writable, and `&mut self` is the only way to its only
        // owner. Padding of what is written is not seen as bytes before `Exclusive::init_padding`, which
        // every method of this file calls that leads to bytes.
        unsafe { core::slice::from_raw_parts_mut(start.as_ptr(), self.count) }
    }
}

impl<T> fmt::Debug for Mapped<T> {
    /// Writes the memory and the number of values; the values may be millions.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped")
            .field("memory", &self.memory)
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

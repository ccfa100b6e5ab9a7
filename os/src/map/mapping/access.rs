//! Copies in and out of a mapping, and its words: bytes that others may change meanwhile.
//!
//! Nothing here lends a slice of plain bytes. Memory that cannot be touched (a file was truncated, a page is broken) is
//! an error where the handler of SIGBUS is installed.
//!
//! Cost: a check of the range, and the copy.

use core::ops::Range;
use core::sync::atomic::AtomicU64;

use uzone_pages::Touch;
use uzone_stream::CopyMethod;

use super::Mapping;
use crate::map::bytes::{self, AccessError};
use crate::map::options::{Access, Addr};
use crate::sigbus::copier::Fault;
use crate::sigbus::{self, BusError};

impl Mapping {
    /// Copies `out.len()` bytes from `offset` on out of the mapping.
    ///
    /// Bytes that are written meanwhile are seen as they were or as they are, in units of
    /// aligned 8 bytes. Reading behind the end of a file that was truncated, or a broken page, raises
    /// SIGBUS, of which the process dies unless [`sigbus::install`] was called.
    ///
    /// # Errors
    /// [`AccessError::Beyond`] unless all bytes are inside; then none is copied. After
    /// `sigbus::install`, [`AccessError::Bus`] if the memory is not there, with the number of copied bytes; the bytes
    /// behind them in `out` are not specified.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let Some(start) = self.check_copy(offset, out.len())? else {
            return Ok(());
        };
        let len_bytes = out.len();
        bytes::read::<sigbus::Best>(self.words(), start, out)
            .map_err(|fault| self.bus_error(Touch::Read, start, len_bytes, fault))
    }

    /// Copies `bytes` into the mapping, from `offset` on.
    ///
    /// Others see each aligned 8 bytes change at once, and the whole in any order. Writing behind
    /// the end of a file that was truncated, or to a broken page, raises SIGBUS, of which the process
    /// dies unless [`sigbus::install`] was called.
    ///
    /// # Errors
    /// [`AccessError::Beyond`] unless all bytes fit, [`AccessError::ReadOnly`] if the mapping is;
    /// then none is copied. After `sigbus::install`, [`AccessError::Bus`] if the memory is not there,
    /// with the number of copied bytes.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        if self.access == Access::ReadOnly {
            return Err(AccessError::ReadOnly { offset, len_bytes: bytes.len() });
        }
        let Some(start) = self.check_copy(offset, bytes.len())? else {
            return Ok(());
        };
        bytes::write::<sigbus::Best>(self.words(), start, bytes)
            .map_err(|fault| self.bus_error(Touch::Write, start, bytes.len(), fault))
    }

    /// Returns the error for a copy of `len_bytes` from the index `start` on that met `fault`.
    #[cold]
    fn bus_error(
        &self,
        direction: Touch,
        start: usize,
        len_bytes: usize,
        fault: Fault,
    ) -> AccessError {
        let error = BusError::of_info(fault.bad, fault.info);
        // The word that is not there may start before the first byte that was asked for.
        let offset = error.address.get().wrapping_sub(self.addr().get()).max(start);
        AccessError::Bus {
            direction,
            address: Addr::new(self.addr().get() + offset),
            offset: offset as u64,
            copied_bytes: offset - start,
            len_bytes,
            kind: error.kind,
            lsb: error.lsb,
        }
    }

    /// Returns the words of a range, which other threads and processes may read and write meanwhile: each
    /// of them changes at once, and the row of them in any order. A touch behind the end of a file that was
    /// truncated raises `SIGBUS`.
    ///
    /// # Errors
    /// [`AccessError::Beyond`] unless all bytes are inside, [`AccessError::CutsWord`] unless they start
    /// and end at multiples of 8, [`AccessError::ReadOnly`] if the mapping is: a store to it would be a
    /// crash.
    pub fn as_words(&self, range: Range<u64>) -> Result<&[AtomicU64], AccessError> {
        let Range { start, end } = range;
        if end < start {
            return Err(AccessError::Empty { start, end });
        }
        let beyond = AccessError::Beyond { start, end, len_bytes: self.len as u64 };
        let len_bytes = usize::try_from(end - start).map_err(|_| beyond)?;
        if self.access == Access::ReadOnly {
            return Err(AccessError::ReadOnly { offset: start, len_bytes });
        }
        let Some(first) = self.check_copy(start, len_bytes)? else { return Ok(&[]) };
        let word = size_of::<AtomicU64>();
        if !first.is_multiple_of(word) || !len_bytes.is_multiple_of(word) {
            return Err(AccessError::CutsWord { start, end });
        }
        Ok(&self.words()[first / word..][..len_bytes / word])
    }

    /// Zeroes a range of words by `way`, past the cache or through it, as
    /// [`uzone_stream::zero_words`] does: each aligned 8 bytes change at once, the whole in any order.
    ///
    /// # Errors
    /// As [`Mapping::as_words`]; then nothing is written. After `sigbus::install`, [`AccessError::Bus`]
    /// if the memory is not there: any of the words may be zero then, so none counts as written.
    ///
    /// # Panics
    /// If the way is not available; nothing is written then.
    pub fn zero_by(&self, range: Range<u64>, way: CopyMethod) -> Result<(), AccessError> {
        let words = self.as_words(range)?;
        sigbus::zero_words(way, words)
            .map_err(|fault| self.stores_error(Touch::Write, words, fault))
    }

    /// Copies a range of words from `src`, its byte `src_start` on, by `way`, as
    /// [`uzone_stream::copy_words`] does.
    ///
    /// # Errors
    /// As [`Mapping::as_words`] of either; then nothing is written. After `sigbus::install`,
    /// [`AccessError::Bus`] if some of either is not there: any of the words may be copied then, so
    /// none counts.
    ///
    /// # Panics
    /// If the way is not available; nothing is written then.
    pub fn copy_by(
        &self,
        range: Range<u64>,
        src: &Self,
        src_start: u64,
        way: CopyMethod,
    ) -> Result<(), AccessError> {
        let len_bytes = range.end.saturating_sub(range.start);
        let dst_words = self.as_words(range)?;
        let src_words = src.as_words(src_start..src_start.saturating_add(len_bytes))?;
        sigbus::copy_words(way, dst_words, src_words).map_err(|fault| {
            let is_dst = dst_words.as_ptr_range().contains(&core::ptr::without_provenance(
                // An address of this process, as the kernel gave it.
                usize::try_from(fault.bad).unwrap_or(usize::MAX),
            ));
            if is_dst {
                self.stores_error(Touch::Write, dst_words, fault)
            } else {
                src.stores_error(Touch::Read, src_words, fault)
            }
        })
    }

    /// Writes the cache lines of a range of words back to memory, and waits for them, as
    /// [`uzone_stream::flush_words`] does: on DAX, their bytes last from then on.
    ///
    /// # Errors
    /// As [`Mapping::as_words`]. After `sigbus::install`, [`AccessError::Bus`] if some of the memory is not
    /// there: any of the lines may be written back then, so none counts.
    pub fn flush_lines(&self, range: Range<u64>) -> Result<(), AccessError> {
        let words = self.as_words(range)?;
        sigbus::flush_words(words).map_err(|fault| self.stores_error(Touch::Write, words, fault))
    }

    /// Returns the error for stores to some words, or loads of them, in any order that met `fault`.
    #[cold]
    fn stores_error(&self, direction: Touch, words: &[AtomicU64], fault: Fault) -> AccessError {
        let start = words.as_ptr().addr().wrapping_sub(self.addr().get());
        let mut error = self.bus_error(direction, start, size_of_val(words), fault);
        if let AccessError::Bus { copied_bytes, .. } = &mut error {
            *copied_bytes = 0;
        }
        error
    }

    /// Returns `offset` as an index if a copy of `len_bytes` from there is all inside, and `None`
    /// if it is a copy of nothing at a place that exists.
    fn check_copy(&self, offset: u64, len_bytes: usize) -> Result<Option<usize>, AccessError> {
        let beyond = |end| AccessError::Beyond { start: offset, end, len_bytes: self.len as u64 };
        let end = offset.checked_add(len_bytes as u64).ok_or_else(|| beyond(u64::MAX))?;
        if end > self.len as u64 {
            return Err(beyond(end));
        }
        let start = usize::try_from(offset).map_err(|_| beyond(end))?;
        Ok((len_bytes != 0).then_some(start))
    }
}

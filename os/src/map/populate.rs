//! Making memory present before it is touched: [`Mapping::populate`], [`populate_slice`].
//!
//! A first touch of a small page costs an exception and 1.5 us; asking for a range costs half of
//! that. The kernel is asked for 64 MiB at a time, at multiples of that address, so that no huge page is
//! asked for twice.
//!
//! Units: ranges are bytes from the start of the mapping, widened to whole pages.
//! Unsafe: one call of madvise(2), for the advice that changes no byte.
//! Source: madvise(2), MADV_POPULATE_READ and MADV_POPULATE_WRITE.

use core::ops::Range;
use core::ptr::NonNull;
use std::thread;

use rustix::io::Errno;
use rustix::mm::Advice;
use uzone_pages::ByteLen;

use crate::host::kernel;
use crate::map::bytes::AccessError;
use crate::map::mapping::Mapping;
use crate::map::mapping::MappingError;
use crate::map::options::Access;

/// The bytes of one call of the kernel.
const CHUNK: usize = 64 << 20;

/// The most attempts for a chunk that the kernel interrupted.
const TRIES: u32 = 1000;

/// Returns the error for a range that was not made present.
fn failed(range: Range<usize>, cause: Errno) -> MappingError {
    let range = range.start as u64..range.end as u64;
    MappingError::Populate { range, done: ByteLen::ZERO, cause: cause.into() }
}

/// Returns the error with the number of bytes that are present after all.
fn after(mut error: MappingError, all: ByteLen) -> MappingError {
    if let MappingError::Populate { done, .. } = &mut error {
        *done = all;
    }
    error
}

/// Returns the part of `range` between the `index`-th and the next multiple of `size`, counted from
/// the one at or before its start, or `None` behind the end. `base` is the address of byte 0.
///
/// `size` is a power of two.
fn chunk(base: usize, range: &Range<usize>, size: usize, index: usize) -> Option<Range<usize>> {
    let first = (base + range.start) & !(size - 1);
    let start = first.checked_add(index.checked_mul(size)?)?;
    let end = start.checked_add(size)?;
    let part = start.saturating_sub(base).max(range.start)..(end - base).min(range.end);
    (!part.is_empty()).then_some(part)
}

impl Mapping {
    /// Makes a range present, on this thread, and returns the number of bytes, in whole pages.
    /// No byte changes. A writable mapping gets pages that can be written without another fault.
    ///
    /// # Errors
    /// [`MappingError`] names the exhausted resource, and the bytes that are present.
    pub fn populate(&self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        let range = self.widen(&range)?;
        let mut done = 0;
        for index in 0.. {
            let size = self.chunk_size(CHUNK);
            let Some(part) = chunk(self.addr().get(), &range, size, index) else {
                break;
            };
            let bytes = part.len() as u64;
            self.populate_chunk(part).map_err(|error| after(error, ByteLen::new(done)))?;
            done += bytes;
        }
        Ok(ByteLen::new(done))
    }

    /// Returns the bytes that are populated at once: the chunk, or one page where pages are larger.
    fn chunk_size(&self, chunk: usize) -> usize {
        usize::try_from(self.page_size().bytes()).map_or(chunk, |page| page.max(chunk))
    }

    /// Makes whole pages present. `part` is inside the mapping and starts and ends at pages.
    fn populate_chunk(&self, part: Range<usize>) -> Result<(), MappingError> {
        let is_writable = self.access() == Access::ReadWrite;
        let advice =
            if is_writable { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
        let start = self.at(part.start);
        ask(start, part.len(), advice).map_err(|cause| failed(part, cause))
    }
}

/// Asks for the pages of `len` bytes from `start`, which starts a page.
fn ask(start: NonNull<u8>, len: usize, advice: Advice) -> Result<(), Errno> {
    let mut last = Errno::AGAIN;
    for _ in 0..TRIES {
        // SAFETY: madvise(2) acts on `len` bytes from `start`. Both advices given here, populating
        // for reading and for writing, make pages present and change no byte that could have been
        // read; where nothing is mapped they answer ENOMEM. So any address is sound.
        let answer = unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, advice) };
        match answer {
            Err(cause @ (Errno::AGAIN | Errno::INTR)) => last = cause,
            answer => return answer,
        }
        thread::yield_now();
    }
    Err(last)
}

/// Makes the pages present that `bytes` lie in, to be written without a fault. No byte changes.
///
/// It is for a part of memory that several threads were given to initialise, each its own: asking
/// for a part and writing it while it is in the cache is faster than asking for all first.
///
/// # Errors
/// [`MappingError`] names the exhausted resource; its offsets count from the start of `bytes`.
pub fn populate_slice(bytes: &mut [u8]) -> Result<(), MappingError> {
    let len = bytes.len();
    let page = usize::try_from(kernel::page_size().bytes()).unwrap_or(4096);
    let Some(first) = bytes.first_mut() else {
        return Err(AccessError::Empty { start: 0, end: 0 }.into());
    };
    let first = NonNull::from(first);
    let skipped = first.addr().get() % page;
    // Wrapping down to the start of a page: the kernel gets the address, and nothing is read by it.
    let start = first.as_ptr().wrapping_sub(skipped);
    let Some(start) = NonNull::new(start) else {
        return Err(AccessError::Empty { start: 0, end: 0 }.into());
    };
    ask(start, skipped + len, Advice::LinuxPopulateWrite).map_err(|cause| failed(0..len, cause))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_range_once_and_meet_at_multiples_of_their_size() {
        const MIB: usize = 1 << 20;
        for (base, start, end) in [
            (0x7f00_0000_0000, 0, 64 * MIB),
            (0x7f00_0000_0000, 0, 1),
            (0x7f00_0000_1000, 0, 200 * MIB),
            (0x7f00_0000_1000, 4096, 8192),
            (0x7f00_03ff_f000, 0, 4096),
            (0x7f00_03ff_f000, 0, 8192),
            (0x7f00_03ff_f000, 4096, 8192),
            (0x7f00_0020_0000, 63 * MIB, 129 * MIB),
        ] {
            let mut at = start;
            let mut index = 0;
            while let Some(part) = chunk(base, &(start..end), CHUNK, index) {
                assert_eq!(part.start, at, "no gap and no overlap");
                assert!(part.len() <= CHUNK);
                assert!(part.start == start || (base + part.start) % CHUNK == 0);
                at = part.end;
                index += 1;
            }
            assert_eq!(at, end, "{base:#x} {start:#x}..{end:#x}");
            assert_eq!(chunk(base, &(start..end), CHUNK, index + 1), None);
            assert_eq!(chunk(base, &(start..end), CHUNK, usize::MAX), None);
        }
    }
}

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
use uzone_pages::{ByteLen, chunks};

use crate::host::kernel;
use crate::map::bytes::AccessError;
use crate::map::mapping::Mapping;
use crate::map::mapping::MappingError;
use crate::map::options::Access;

/// The bytes of one call of the kernel.
const CHUNK: u64 = 64 << 20;

/// The most attempts for a chunk that the kernel interrupted.
const TRIES: u32 = 1000;

/// Returns the error for a range that was not made present, after so many bytes that are.
fn failed(range: Range<usize>, done: usize, cause: Errno) -> MappingError {
    let range = range.start as u64..range.end as u64;
    MappingError::Populate { range, done: ByteLen::new(done as u64), cause: cause.into() }
}

impl Mapping {
    /// Makes a range present, on this thread, and returns the number of bytes, in whole pages.
    /// No byte changes. A writable mapping gets pages that can be written without another fault.
    ///
    /// # Errors
    /// [`MappingError`] names the exhausted resource, and the bytes that are present.
    pub fn populate(&self, range: Range<u64>) -> Result<ByteLen, MappingError> {
        let range = self.widen(&range)?;
        let base = self.addr().get();
        // A page may be larger.
        let size = ByteLen::new(CHUNK.max(self.page_size().bytes()));
        let Ok(parts) = chunks((base + range.start) as u64..(base + range.end) as u64, size, size)
        else {
            unreachable!("both sizes are powers of two, and the range is not empty")
        };
        let is_writable = self.access() == Access::ReadWrite;
        let advice =
            if is_writable { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
        // Addresses of this process.
        let offset = |address: u64| usize::try_from(address).unwrap_or(usize::MAX) - base;
        for part in parts {
            let part = offset(part.start)..offset(part.end);
            ask(self.at(part.start), part.len(), advice).map_err(|cause| {
                let done = part.start - range.start;
                failed(part, done, cause)
            })?;
        }
        Ok(ByteLen::new(range.len() as u64))
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
    ask(start, skipped + len, Advice::LinuxPopulateWrite).map_err(|cause| failed(0..len, 0, cause))
}

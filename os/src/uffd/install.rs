//! Filling missing pages, in this process and in another: [`Fill`], [`Install`].
//!
//! Unsafe: the calls by which the kernel writes pages. [`Registered`](crate::uffd::Registered) and
//! [`Remote`](crate::uffd::Remote) argue whose those are.
//! Source: ioctl_userfaultfd(2).

use core::ops::Range;
use std::os::fd::BorrowedFd;

use linux_raw_sys::general::{
    uffdio_continue, uffdio_copy, uffdio_poison, uffdio_range, uffdio_zeropage,
};
use rustix::io::Errno;

use crate::map::bytes::AccessError;
use crate::map::mapping::Mapping;
use crate::map::options::Vaddr;
use crate::uffd::abi;
use crate::uffd::error::UffdError;
use crate::uffd::reply::{self, Answered, UffdCall};

/// The bytes of missing pages.
#[derive(Clone, Copy, Debug)]
pub enum Fill<'a> {
    /// Bytes, at least as many as the pages have.
    Bytes(&'a [u8]),
    /// Bytes of another mapping, which are not read here. If they are not present they are made so first, which
    /// may block; a source behind the end of its file is refused.
    From {
        /// The mapping.
        source: &'a Mapping,
        /// Its first byte.
        offset: u64,
    },
    /// Zeroes. Huge pages of a pool do not take it.
    Zero,
    /// The pages of the page cache: the answer to a minor fault.
    Cached,
    /// A mark that raises `SIGBUS` when a page is touched, until it is filled after all. In a virtual machine the
    /// signal may be an input or output of the guest instead, which its monitor answers with zeroes: for those,
    /// end the process.
    Poison,
}

impl Fill<'_> {
    /// Returns the bytes of a part of the pages. `part` is bytes from the start of the first page.
    #[inline]
    #[must_use]
    pub fn part(self, part: Range<u64>) -> Self {
        let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        match self {
            Self::Bytes(bytes) => {
                let (from, to) = (index(part.start), index(part.end).min(bytes.len()));
                Self::Bytes(&bytes[from.min(to)..to])
            }
            Self::From { source, offset } => Self::From { source, offset: offset + part.start },
            other => other,
        }
    }

    /// Returns the way in which such pages are installed unless the caller knows better: the threads that wait for a page are
    /// woken, but for a mark, which is noted elsewhere first.
    #[inline]
    #[must_use]
    pub fn how(&self) -> Install {
        Install { wake: !matches!(self, Self::Poison), write_protect: false }
    }

    /// Returns the address of the `len` bytes to copy, or 0 for a fill that copies none.
    fn source(&self, len: u64) -> Result<u64, AccessError> {
        let (address, start, len_bytes) = match self {
            Self::Bytes(bytes) => {
                (bytes.as_ptr().expose_provenance() as u64, 0, bytes.len() as u64)
            }
            Self::From { source, offset } => {
                (source.addr().get() as u64, *offset, source.mapped_len() as u64)
            }
            Self::Zero | Self::Cached | Self::Poison => (0, 0, u64::MAX),
        };
        let end = start.saturating_add(len);
        if end > len_bytes {
            return Err(AccessError::Beyond { start, end, len_bytes });
        }
        Ok(address + start)
    }

    /// Fills the missing pages of `len` bytes from the address `start` on.
    ///
    /// # Errors
    /// [`UffdError`] if there are not as many bytes to fill them with, or the kernel refuses.
    ///
    /// # Safety
    /// If the descriptor is of this process, those bytes are memory that may be written as atomics write it.
    pub(crate) unsafe fn install(
        self,
        fd: BorrowedFd<'_>,
        start: u64,
        len: u64,
        how: Install,
    ) -> Result<Answered, UffdError> {
        let src = self.source(len)?;
        let (range, wake) = (uffdio_range { start, len }, how.bits() & abi::DONTWAKE);
        let (call, result, count) = match self {
            Self::Bytes(_) | Self::From { .. } => {
                let mode = how.bits();
                let mut value = uffdio_copy { dst: start, src, len, mode, copy: 0 };
                // SAFETY: `call` wants `len` bytes at `src` to read: they are those of a slice, or of a mapping,
                // which is borrowed for the call, and whose bytes the kernel reads as any thread may. The pages
                // are the caller's to give, here and below.
                let result = unsafe { abi::call::<{ abi::COPY }, _>(fd, &mut value) };
                (UffdCall::Copy, result, value.copy)
            }
            Self::Zero => {
                let mut value = uffdio_zeropage { range, mode: wake, zeropage: 0 };
                // SAFETY: as above.
                let result = unsafe { abi::call::<{ abi::ZEROPAGE }, _>(fd, &mut value) };
                (UffdCall::ZeroPage, result, value.zeropage)
            }
            Self::Cached => {
                let mut value = uffdio_continue { range, mode: how.bits(), mapped: 0 };
                // SAFETY: as above.
                let result = unsafe { abi::call::<{ abi::CONTINUE }, _>(fd, &mut value) };
                (UffdCall::Continue, result, value.mapped)
            }
            Self::Poison => {
                let mut value = uffdio_poison { range, mode: wake, updated: 0 };
                // SAFETY: pages that are there stay, and the others have no bytes.
                let result = unsafe { abi::call::<{ abi::POISON }, _>(fd, &mut value) };
                (UffdCall::Poison, result, value.updated)
            }
        };
        answered(call, start, len, result, Some(count))
    }
}

/// The way in which pages are installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Install {
    /// Whether the threads that wait for the pages are woken; otherwise call [`Registered::wake`](crate::uffd::Registered::wake).
    pub wake: bool,
    /// Whether the first write to the pages is reported, where that was registered. Zeroes and marks are not
    /// protected.
    pub write_protect: bool,
}

impl Default for Install {
    fn default() -> Self {
        Self { wake: true, write_protect: false }
    }
}

impl Install {
    pub(crate) const fn bits(self) -> u64 {
        let mut bits = 0;
        if !self.wake {
            bits |= abi::DONTWAKE;
        }
        if self.write_protect {
            bits |= abi::INSTALL_WP;
        }
        bits
    }
}

/// Decodes a reply, and keeps the arguments of the call if it failed.
pub(crate) fn answered(
    call: UffdCall,
    start: u64,
    len_bytes: u64,
    result: Result<(), Errno>,
    count: Option<i64>,
) -> Result<Answered, UffdError> {
    reply::decode(call, result, count, len_bytes).map_err(|cause| {
        let start = Vaddr::new(start);
        match cause {
            Some(cause) => UffdError::Refused { call, start, len_bytes, cause: cause.into() },
            None => {
                let errno = result.err().map_or(0, Errno::raw_os_error);
                let count = count.unwrap_or(0);
                UffdError::Contradiction { call, start, len_bytes, errno, count }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    #[test]
    fn a_reply_that_contradicts_itself_is_an_error_of_numbers_alone() {
        for (result, count) in [(Ok(()), 4096), (Err(Errno::EXIST), 4096), (Ok(()), -11)] {
            let error = answered(UffdCall::Copy, 0x1000, 8192, result, Some(count)).unwrap_err();
            assert!(matches!(error, UffdError::Contradiction { .. }), "{error:?}");
            // An error of the library's own would have taken memory, and be named as the source.
            assert!(error.source().is_none());
            assert!(error.to_string().contains(&format!("with {count} bytes")), "{error}");
        }
    }
}

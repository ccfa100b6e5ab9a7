//! The pages of a file in the page cache, and reading them without waiting for a device.
//!
//! [`cached`] asks and changes nothing; [`read_cached`] reads the pages in the cache, and has the device read the others
//! without waiting, so it is no cheap way to ask. A page in the cache may be gone a moment later.
//!
//! Cost: [`cached`] is a fraction of a microsecond for a window of pages.
//! Unsafe: cachestat(2), which rustix lacks, and preadv2(2) into memory that is no slice.
//! Source: cachestat(2), preadv2(2), posix_fadvise(2).

use core::ops::Range;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd};

use linux_raw_sys::general::{__NR_cachestat, cachestat, cachestat_range};
use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags};

use crate::map::mapping::Mapping;
use crate::map::options::Access;

/// Returns whether a system call is not there, or not for this file or with these flags.
fn is_unsupported(errno: Errno) -> bool {
    matches!(errno, Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL)
}

/// Returns the number of host pages of `len_bytes` from byte `start` of a file on that the page cache has, also
/// those that it has asked the device for and that cannot be read yet, or
/// `None` if this kernel or file does not tell (cachestat(2), Linux 6.5; not for hugetlb files), or not this user: the
/// kernel tells the owner of a file and users that may write to it.
///
/// # Errors
/// The error of cachestat(2).
pub fn cached(file: impl AsFd, start: u64, len_bytes: NonZeroU64) -> io::Result<Option<u64>> {
    let range = cachestat_range { off: start, len: len_bytes.get() };
    let mut counts = cachestat {
        nr_cache: 0,
        nr_dirty: 0,
        nr_writeback: 0,
        nr_evicted: 0,
        nr_recently_evicted: 0,
    };
    let number = libc::c_long::from(__NR_cachestat.cast_signed());
    // SAFETY: cachestat(2) takes a descriptor, which is borrowed for the call, reads a
    // range at its second argument and writes counts at its third, both ours.
    let answer = unsafe {
        libc::syscall(number, file.as_fd().as_raw_fd(), &raw const range, &raw mut counts, 0_u32)
    };
    if answer == 0 {
        return Ok(Some(counts.nr_cache));
    }
    let cause = io::Error::last_os_error();
    match Errno::from_io_error(&cause) {
        Some(errno) if errno == Errno::PERM || is_unsupported(errno) => Ok(None),
        _ => Err(cause),
    }
}

/// Reads bytes of a file from `offset` on as far as the page cache has them (`RWF_NOWAIT`), and returns how
/// many: the file ends there, or the cache has no more. `None` if the cache does not have the first byte,
/// for which the device has been asked, or if this file cannot be read in this way.
///
/// # Errors
/// The error of preadv2(2).
pub fn read_cached(file: impl AsFd, offset: u64, out: &mut [u8]) -> io::Result<Option<usize>> {
    let mut slices = [IoSliceMut::new(out)];
    loop {
        return match rustix::io::preadv2(&file, &mut slices, offset, ReadWriteFlags::NOWAIT) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Ok(None),
            Err(cause) if is_unsupported(cause) => Ok(None),
            Err(cause) => Err(cause.into()),
        };
    }
}

/// Reads bytes of a file into a mapping, from its byte `to` on, as [`read_cached`] does, or with
/// `waits` also those that the device has to bring. It allocates nothing.
///
/// # Errors
/// The error of preadv2(2), and [`io::ErrorKind::InvalidInput`] unless all of the bytes are inside the mapping and may
/// be written.
pub(crate) fn read_into(
    file: impl AsFd,
    offset: u64,
    mapping: &Mapping,
    to: Range<usize>,
    waits: bool,
) -> io::Result<Option<usize>> {
    let flags = if waits { 0 } else { libc::RWF_NOWAIT };
    let is_inside = to.start < to.end && to.end <= mapping.mapped_len();
    if !is_inside || mapping.access() != Access::ReadWrite {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (fd, start) = (file.as_fd().as_raw_fd(), mapping.at(to.start).as_ptr());
    let part = libc::iovec { iov_base: start.cast(), iov_len: to.end - to.start };
    // Without the C library's function, at which a thread may be cancelled.
    let high = 0_usize;
    loop {
        // SAFETY: preadv2(2) takes a descriptor, which is borrowed for the call, an offset in two words of which the
        // second counts for nothing where a word has 64 bits, reads one `iovec`, and writes to the bytes that it names: those are of a mapping that is borrowed and may be written (looked at above),
        // whose bytes change as those of any memory that others share; no slice of it is lent.
        let answer = unsafe {
            libc::syscall(libc::SYS_preadv2, fd, &raw const part, 1_usize, offset, high, flags)
        };
        if let Ok(bytes) = usize::try_from(answer) {
            return Ok(Some(bytes));
        }
        let cause = io::Error::last_os_error();
        return match Errno::from_io_error(&cause) {
            Some(Errno::INTR) => continue,
            Some(Errno::AGAIN) => Ok(None),
            Some(errno) if is_unsupported(errno) => Ok(None),
            _ => Err(cause),
        };
    }
}

/// Asks the device for bytes of a file, and does not wait for them (`POSIX_FADV_WILLNEED`).
///
/// # Errors
/// The error of posix_fadvise(2).
pub fn read_ahead(file: impl AsFd, start: u64, len_bytes: NonZeroU64) -> io::Result<()> {
    Ok(rustix::fs::fadvise(file, start, Some(len_bytes), Advice::WillNeed)?)
}

/// Asks the kernel to drop the clean pages of a range from the page cache (`POSIX_FADV_DONTNEED`). Pages
/// that are mapped or dirty stay.
///
/// # Errors
/// The error of posix_fadvise(2).
pub fn forget(file: impl AsFd, start: u64, len_bytes: NonZeroU64) -> io::Result<()> {
    Ok(rustix::fs::fadvise(file, start, Some(len_bytes), Advice::DontNeed)?)
}

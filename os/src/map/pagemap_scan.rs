//! The state of ranges of pages in the page tables of this process, and which pages were written:
//! `PAGEMAP_SCAN`, [`written`], [`written_at`], [`present_at`].
//!
//! Memory that is registered for writes with
//! [`Features::WRITE_PROTECT_ASYNC`](crate::uffd::Features::WRITE_PROTECT_ASYNC) has a marker in the page
//! table for each page that is protected, which the first write removes. A scan finds the pages without
//! one, and can set it again in the same step, page by page: a write comes before that and is reported, or
//! after and is reported next time. The zero page was never written, whether it has the marker or not.
//! Writes past the page tables are not recorded: by a device into memory that was pinned before, or through
//! another mapping.
//!
//! Cost: a scan walks tables that exist and answers in runs; 18 us for 512 pages of which a fifth was
//! written here and there, in a virtual machine.
//! Unsafe: the ioctl on the procfs pagemap, which fills a buffer of ours.
//! Source: ioctl_pagemap_scan(2), Linux 6.7.

use core::ops::Range;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use linux_raw_sys::general::{self as kernel, page_region, pm_scan_arg};
use rustix::ioctl::{Opcode, opcode};

use crate::host::kernel::ioctl;
use crate::host::root::SysError;
use crate::map::mapping::MappingError;
use crate::uffd::registered::Registered;

pub(crate) const PAGEMAP: &str = "/proc/self/pagemap";

/// The page has no marker that it is protected.
pub(crate) const WRITTEN: u64 = kernel::PAGE_IS_WRITTEN as u64;
pub(crate) const PRESENT: u64 = kernel::PAGE_IS_PRESENT as u64;
/// A page that is being moved counts as swapped.
pub(crate) const SWAPPED: u64 = kernel::PAGE_IS_SWAPPED as u64;
pub(crate) const ZERO_PAGE: u64 = kernel::PAGE_IS_PFNZERO as u64;
pub(crate) const HUGE: u64 = kernel::PAGE_IS_HUGE as u64;

/// Pages that are found are protected, but only where a write to such a page does not wait; elsewhere the scan
/// fails.
const PROTECT: u64 = (kernel::PM_SCAN_WP_MATCHING | kernel::PM_SCAN_CHECK_WPASYNC) as u64;

/// The number of runs that one scan may return.
pub(crate) const RUNS: usize = 1024;

/// `PAGEMAP_SCAN`.
const SCAN: Opcode = opcode::read_write::<pm_scan_arg>(b'f', 16);
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const _: () = assert!(SCAN == 0xc060_6610);

/// A choice of pages to find, and the change to them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Properties that a page has to have.
    pub(crate) all: u64,
    /// Properties that it must not have.
    pub(crate) none: u64,
    /// Properties of which it has to have one, if there are any.
    pub(crate) any: u64,
    /// Whether pages that are found are protected in the same step.
    pub(crate) protect: bool,
}

/// Gives `found` the runs of pages that are asked for, of page-aligned addresses. After an error
/// it has the runs that were found before.
pub(crate) fn scan(
    pagemap: &File,
    addresses: Range<u64>,
    request: Request,
    mut found: impl FnMut(&page_region),
) -> rustix::io::Result<()> {
    let mut runs = vec![page_region { start: 0, end: 0, categories: 0 }; RUNS];
    let mut at = addresses.start;
    while at < addresses.end {
        let mut scan = pm_scan_arg {
            size: size_of::<pm_scan_arg>() as u64,
            flags: if request.protect { PROTECT } else { 0 },
            start: at,
            end: addresses.end,
            walk_end: 0,
            vec: runs.as_mut_ptr().expose_provenance() as u64,
            vec_len: runs.len() as u64,
            max_pages: 0,
            category_inverted: request.none,
            category_mask: request.all | request.none,
            category_anyof_mask: request.any,
            return_mask: request.all | request.any,
        };
        // SAFETY: the memory that the kernel touches is ours. On a file that is no procfs pagemap, the number is
        // unknown.
        // 1. It reads and writes 96 bytes at the argument, which is a `pm_scan_arg` of that size.
        // 2. It writes up to `vec_len` runs of 24 bytes to `vec`: both are of `runs`, which is not used meanwhile.
        // 3. `PM_SCAN_WP_MATCHING` makes it record the next write to a page, and changes no byte. The flag
        //    goes with `PM_SCAN_CHECK_WPASYNC`, so that such a write never waits.
        let filled = unsafe { ioctl(pagemap.as_fd(), SCAN, (&raw mut scan).cast()) }?;
        // Not negative after a call that did not fail.
        let filled = usize::try_from(filled).unwrap_or(0);
        runs.iter().take(filled).for_each(&mut found);
        // Each scan goes on where the last one stopped; one that stands still has said all.
        if scan.walk_end <= at {
            break;
        }
        at = scan.walk_end;
    }
    Ok(())
}

/// Opens the procfs pagemap of this process.
///
/// # Errors
/// [`SysError`] if `/proc` is not there, or may not be read.
pub fn open() -> Result<File, SysError> {
    File::open(PAGEMAP).map_err(|cause| SysError::Read { path: PAGEMAP.into(), cause })
}

/// Adds the runs of pages at some addresses of the process that `pagemap` is of to `found` that
/// were written since they were protected, in order, by their addresses. Missing pages are not
/// among them, and without protection each page counts as written.
///
/// # Errors
/// The error of ioctl_pagemap_scan(2).
pub fn written_at(
    pagemap: &File,
    addresses: Range<u64>,
    found: &mut Vec<Range<u64>>,
) -> io::Result<()> {
    collect(pagemap, addresses, 0, written_pages(false), found)
}

/// Adds the runs of pages at some addresses of the process that `pagemap` is of to `found` that are in memory or in swap,
/// in order, by their addresses; with `no_files`, without the pages of a file.
///
/// # Errors
/// The error of ioctl_pagemap_scan(2).
pub fn present_at(
    pagemap: &File,
    addresses: Range<u64>,
    no_files: bool,
    found: &mut Vec<Range<u64>>,
) -> io::Result<()> {
    let none = if no_files { kernel::PAGE_IS_FILE.into() } else { 0 };
    let request = Request { all: 0, none, any: PRESENT | SWAPPED, protect: false };
    collect(pagemap, addresses, 0, request, found)
}

/// Adds the runs of pages of `range` to `found` that were written since they were protected, in
/// order. Pages that are missing are not among them. With `protect` they are protected again in the
/// same step: a write is in this answer or the next, and in none twice.
///
/// # Errors
/// [`MappingError`] if the range is not inside or the kernel refuses, for `protect` also if a write
/// to a protected page is an event here and not a note. Pages that were added until then are protected and
/// will not be found again.
pub fn written(
    pagemap: &File,
    memory: &Registered,
    range: Range<u64>,
    protect: bool,
    found: &mut Vec<Range<u64>>,
) -> Result<(), MappingError> {
    let part = memory.mapping().widen(&range)?;
    let base = memory.mapping().addr().get();
    let addresses = (base + part.start) as u64..(base + part.end) as u64;
    collect(pagemap, addresses, base as u64, written_pages(protect), found)
        .map_err(|cause| MappingError::Scan { range, cause })
}

/// Returns the request for pages that were written.
fn written_pages(protect: bool) -> Request {
    Request { all: WRITTEN, none: ZERO_PAGE, any: PRESENT | SWAPPED, protect }
}

/// Adds the runs that are asked for, less `base`.
fn collect(
    pagemap: &File,
    addresses: Range<u64>,
    base: u64,
    request: Request,
    found: &mut Vec<Range<u64>>,
) -> io::Result<()> {
    scan(pagemap, addresses, request, |run| {
        let run = run.start - base..run.end - base;
        match found.last_mut() {
            // Scans end where the buffer is full.
            Some(last) if last.end == run.start => last.end = run.end,
            _ => found.push(run),
        }
    })?;
    Ok(())
}

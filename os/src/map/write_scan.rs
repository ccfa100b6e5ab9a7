//! Which pages of registered memory were written: [`WriteScan`].
//!
//! `pagemap_scan` describes the markers that this reads and sets.

use core::ops::Range;
use std::fs::File;
use std::io;

use crate::host::root::SysError;
use crate::map::mapping::MappingError;
use crate::map::pagemap_scan::{PRESENT, Request, SWAPPED, WRITTEN, ZERO_PAGE, open_pagemap, scan};
use crate::uffd::registered::Registered;

/// What finds the pages that were written, of memory that is registered so that writes are noted.
#[derive(Debug)]
pub struct WriteScan(File);

impl WriteScan {
    /// Opens the procfs pagemap of this process.
    ///
    /// # Errors
    /// [`SysError`] if `/proc` is not there, or may not be read.
    pub fn open() -> Result<Self, SysError> {
        Ok(Self(open_pagemap()?))
    }

    /// Takes the procfs pagemap of another process, for [`WriteScan::written_at`].
    #[must_use]
    pub fn of(pagemap: File) -> Self {
        Self(pagemap)
    }

    /// Adds the runs of pages at some addresses of the process to `found` that were written since they were
    /// protected, in order, by their addresses. Missing pages are not among them, and without protection each
    /// page counts as written.
    ///
    /// # Errors
    /// The error of ioctl_pagemap_scan(2): [`io::ErrorKind::Unsupported`] before Linux 6.7.
    pub fn written_at(&self, addresses: Range<u64>, found: &mut Vec<Range<u64>>) -> io::Result<()> {
        let is_there = scan(&self.0, addresses, request(false), |run| {
            add(found, run.start..run.end);
        })?;
        is_there.then_some(()).ok_or(io::ErrorKind::Unsupported.into())
    }

    /// Adds the runs of pages of `range` to `found` that were written since they were protected, in
    /// order. Pages that are missing are not among them.
    ///
    /// # Errors
    /// [`MappingError`] if the range is not inside or the kernel refuses.
    pub fn written(
        &self,
        memory: &Registered,
        range: Range<u64>,
        found: &mut Vec<Range<u64>>,
    ) -> Result<(), MappingError> {
        self.scan(memory, range, false, found)
    }

    /// Adds the runs of pages of `range` to `found` that were written since they were protected, and
    /// protects them again: a write is in this answer or the next, and in none twice.
    ///
    /// # Errors
    /// As for [`WriteScan::written`], also if a write to a protected page is an event here and not a
    /// note. What was added until then is protected and will not be found again.
    pub fn take_written(
        &self,
        memory: &Registered,
        range: Range<u64>,
        found: &mut Vec<Range<u64>>,
    ) -> Result<(), MappingError> {
        self.scan(memory, range, true, found)
    }

    fn scan(
        &self,
        memory: &Registered,
        range: Range<u64>,
        protect: bool,
        found: &mut Vec<Range<u64>>,
    ) -> Result<(), MappingError> {
        let part = memory.mapping().widen(&range)?;
        let base = memory.mapping().addr().get();
        let addresses = (base + part.start) as u64..(base + part.end) as u64;
        let answer = scan(&self.0, addresses, request(protect), |run| {
            add(found, run.start - base as u64..run.end - base as u64);
        });
        let failed = |cause| MappingError::Scan { range: range.clone(), cause };
        match answer {
            Ok(true) => Ok(()),
            Ok(false) => Err(failed(io::ErrorKind::Unsupported.into())),
            Err(cause) => Err(failed(cause.into())),
        }
    }
}

/// Returns which pages were written to.
fn request(protect: bool) -> Request {
    Request { all: WRITTEN, none: ZERO_PAGE, any: PRESENT | SWAPPED, protect }
}

fn add(found: &mut Vec<Range<u64>>, run: Range<u64>) {
    match found.last_mut() {
        // Scans end where the buffer is full.
        Some(last) if last.end == run.start => last.end = run.end,
        _ => found.push(run),
    }
}

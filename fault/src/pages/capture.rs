//! Reading the memory of another process as it was at one moment, while that process goes on:
//! [`WriteCapture`]. From that moment on all of it is protected against writing, and the reader copies a page
//! to [`KeptPages`] before it lets the first write to it go on. A second process reads the memory meanwhile:
//! of each page first the memory, then the kept page if there is one by then, which is older than the write.
//!
//! The kernel takes pages away without a write, too: a page that is given back is gone as soon as the
//! event is read. So the reader reads page faults alone while it captures ([`pending_faults`]), and
//! if another event is pending, none at all: [`WriteCapture`] calls `hurry`, and the machine goes
//! on when the capture is over. If an event is read all the same, since a pending fault was
//! withdrawn meanwhile, the capture is lost, which its end states.
//!
//! Units: bytes of the backing and pages of the host, also where the memory has huge pages.
//! Locks: one that is held over a read of events or the copy of a page, and one for the capture itself, a leaf.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use uzone_os::signals::lock_uninterrupted;
use uzone_os::uffd::{EventBuffer, Remote, pending_faults};
use uzone_pages::PageSize;

use crate::error::LazyError;
use crate::memory::remote_region::RemoteRegion;

/// The states of pages in the file: the page is wanted as it is now, and it was kept.
const WANTED: u8 = 1;
const KEPT: u8 = 2;
/// How many states are read at once.
const STATES: usize = 512;
/// How many bytes are copied at once.
const PIECE: usize = 64 << 10;

/// Pages as they were before they changed, in a file in memory of two processes: a byte of state for each page,
/// then the pages, each at its place. Only those take memory that were kept.
#[derive(Debug)]
pub struct KeptPages {
    file: File,
    page: PageSize,
    pages: u64,
}

impl KeptPages {
    /// Makes room for the pages of memory of these regions.
    ///
    /// # Errors
    /// The error of memfd_create(2) or ftruncate(2).
    pub fn new(regions: &[RemoteRegion]) -> io::Result<Self> {
        let kept = Self::of(uzone_os::memory_file("uzone-kept", &[])?, regions);
        kept.file.set_len(kept.place(kept.pages))?;
        Ok(kept)
    }

    /// Takes the file of another process, which made it for the same regions.
    #[must_use]
    pub fn from_fd(fd: OwnedFd, regions: &[RemoteRegion]) -> Self {
        Self::of(File::from(fd), regions)
    }

    fn of(file: File, regions: &[RemoteRegion]) -> Self {
        let page = uzone_os::probe::page_size();
        let end = regions.iter().map(|region| region.offsets().end).max().unwrap_or(0);
        Self { file, page, pages: end.div_ceil(page.bytes()) }
    }

    /// Returns where a page is in the file.
    fn place(&self, page: u64) -> u64 {
        (self.pages.next_multiple_of(self.page.bytes())).saturating_add(page << self.page.shift())
    }

    fn pages_of(&self, bytes: &Range<u64>) -> Range<u64> {
        let shift = self.page.shift();
        (bytes.start >> shift).min(self.pages)
            ..bytes.end.div_ceil(self.page.bytes()).min(self.pages)
    }

    /// Notes that the pages of these bytes are wanted as they are.
    ///
    /// # Errors
    /// The error of pwrite(2).
    pub fn want(&self, bytes: Range<u64>) -> io::Result<()> {
        let Range { mut start, end } = self.pages_of(&bytes);
        while start < end {
            let count = (end - start).min(STATES as u64);
            self.mark(start, count, WANTED)?;
            start += count;
        }
        Ok(())
    }

    fn mark(&self, page: u64, count: u64, state: u8) -> io::Result<()> {
        let states = [state; STATES];
        self.file.write_all_at(&states[..usize::try_from(count).unwrap_or(STATES)], page)
    }

    /// Calls `found` with the pages of these bytes that have a state, neighbours of one state as one range.
    fn each(
        &self,
        bytes: &Range<u64>,
        state: u8,
        mut found: impl FnMut(Range<u64>) -> io::Result<()>,
    ) -> io::Result<()> {
        let Range { mut start, end } = self.pages_of(bytes);
        let mut states = [0; STATES];
        while start < end {
            let count = usize::try_from(end - start).unwrap_or(STATES).min(STATES);
            let states = &mut states[..count];
            self.file.read_exact_at(states, start)?;
            let mut page = start;
            for same in states.chunk_by(|one, other| one == other) {
                let next = page + same.len() as u64;
                if same.first() == Some(&state) {
                    found(page..next)?;
                }
                page = next;
            }
            start = page;
        }
        Ok(())
    }

    /// Keeps the wanted pages of some bytes, the first of which are at `address` of `memory`. Returns how many.
    fn keep(
        &self,
        bytes: &Range<u64>,
        memory: &File,
        address: u64,
        piece: &mut [u8],
    ) -> io::Result<u64> {
        let shift = self.page.shift();
        let mut kept = 0;
        self.each(bytes, WANTED, |pages| {
            let mut first = pages.start;
            while first < pages.end {
                let count = (pages.end - first).min(piece.len() as u64 >> shift).max(1);
                let len = usize::try_from(count << shift).unwrap_or(piece.len()).min(piece.len());
                let piece = &mut piece[..len];
                memory.read_exact_at(piece, address + ((first << shift) - bytes.start))?;
                self.file.write_all_at(piece, self.place(first))?;
                // The other process reads the memory first and the state then, by system calls, as these
                // are: if it has seen a byte of the write that comes next, it finds this state.
                self.mark(first, count, KEPT)?;
                (first, kept) = (first + count, kept + count);
            }
            Ok(())
        })?;
        Ok(kept)
    }

    /// Replaces the bytes that were read from the memory at `offset` of the backing by the pages that were kept of it.
    ///
    /// # Errors
    /// The error of pread(2).
    pub fn read_over(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let bytes = offset..offset + out.len() as u64;
        let shift = self.page.shift();
        self.each(&bytes, KEPT, |pages| {
            let from = (pages.start << shift).max(bytes.start);
            let to = (pages.end << shift).min(bytes.end);
            let index = |at: u64| usize::try_from(at - bytes.start).unwrap_or(usize::MAX);
            let place = self.place(pages.start) + (from - (pages.start << shift));
            self.file.read_exact_at(&mut out[index(from)..index(to)], place)
        })
    }
}

impl AsFd for KeptPages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The keeper of a process's pages before they change.
pub(crate) struct WriteCapture {
    memory: File,
    kept: KeptPages,
    /// The count of the pending faults.
    pending: File,
    hurry: Box<dyn Fn() + Send + Sync>,
    /// Since when an event has been waiting that is no fault.
    waits: OnceLock<Instant>,
    /// The bytes of the backing before this one have been read.
    until: AtomicU64,
    count: AtomicU64,
    lost: OnceLock<String>,
    /// Room for a copy. It is locked from before a read of events until it is known which they are.
    piece: Mutex<Vec<u8>>,
}

impl WriteCapture {
    /// Takes the arguments of [`AdoptedMemory::capture`](crate::AdoptedMemory::capture).
    pub(crate) fn new(
        memory: File,
        kept: KeptPages,
        pending: File,
        hurry: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        Self {
            memory,
            kept,
            pending,
            hurry: Box::new(hurry),
            waits: OnceLock::new(),
            until: AtomicU64::new(0),
            count: AtomicU64::new(0),
            lost: OnceLock::new(),
            piece: Mutex::new(vec![0; PIECE]),
        }
    }

    fn lose(&self, reason: String) {
        // The first reason stays.
        let _ = self.lost.set(reason);
    }

    /// Notes that all before a byte of the backing has been read. Returns the bytes that are new in that.
    pub(crate) fn has_read(&self, until: u64) -> Range<u64> {
        // Relaxed: a page that is kept although it has been read is no error.
        self.until.fetch_max(until, Ordering::Relaxed).min(until)..until
    }

    /// Keeps a page, of which these are the bytes of the backing, before it changes.
    pub(crate) fn before_write(&self, bytes: &Range<u64>, address: u64) {
        // Relaxed: as above.
        if bytes.end <= self.until.load(Ordering::Relaxed) {
            return;
        }
        match self.kept.keep(bytes, &self.memory, address, &mut lock_uninterrupted(&self.piece)) {
            // Relaxed: a statistic.
            Ok(pages) => drop(self.count.fetch_add(pages, Ordering::Relaxed)),
            Err(cause) => self.lose(format!(
                "the page at {address:#x} cannot be kept before it is written to: {cause}"
            )),
        }
    }

    /// Reads the pending faults, unless another event is pending: then none.
    pub(crate) fn read(&self, remote: &Remote, buffer: &mut EventBuffer) -> io::Result<usize> {
        // Held until `lose` was called, so that the end of the capture finds that.
        let _piece = lock_uninterrupted(&self.piece);
        if self.waits.get().is_some() || !remote.has_events()? {
            return Ok(0);
        }
        // In this order: a fault that was pending by then is counted, so a pending event is not one.
        match pending_faults(&self.pending) {
            Ok(0) => {
                self.waits.get_or_init(Instant::now);
                (self.hurry)();
                Ok(0)
            }
            Ok(faults) => {
                let read = remote.read_most(buffer, faults)?;
                if buffer.has_other_than_faults() {
                    self.lose("the machine gave memory back before that was read".into());
                }
                Ok(read)
            }
            Err(cause) => {
                self.lose(format!("the pending faults of the machine cannot be counted: {cause}"));
                remote.read(buffer)
            }
        }
    }

    /// Returns how many pages were kept, or that the capture is lost.
    fn end(&self) -> Result<u64, LazyError> {
        drop(lock_uninterrupted(&self.piece));
        match self.lost.get() {
            // Relaxed: a statistic.
            None => Ok(self.count.load(Ordering::Relaxed)),
            Some(reason) => Err(LazyError::CaptureLost { reason: reason.clone() }),
        }
    }
}

/// The capture of some memory, if there is one.
#[derive(Default)]
pub(crate) struct CaptureSlot {
    /// Whether there is one, for the threads that look at each fault.
    is_there: AtomicBool,
    capture: Mutex<Option<Arc<WriteCapture>>>,
}

impl CaptureSlot {
    /// Returns the capture.
    pub(crate) fn get(&self) -> Option<Arc<WriteCapture>> {
        // Acquire pairs with the Release of `set`. A fault on a page that was protected for the capture is
        // read after that, because the kernel protected it later.
        self.is_there
            .load(Ordering::Acquire)
            .then(|| lock_uninterrupted(&self.capture).clone())
            .flatten()
    }

    /// Puts a capture in. Returns whether that was done: there may be one.
    pub(crate) fn set(&self, capture: WriteCapture) -> bool {
        let mut slot = lock_uninterrupted(&self.capture);
        if slot.is_some() {
            return false;
        }
        *slot = Some(Arc::new(capture));
        // Release pairs with the Acquire of `get`.
        self.is_there.store(true, Ordering::Release);
        true
    }

    /// Takes the capture out: all events are read again. Returns how it went.
    pub(crate) fn end(&self) -> Option<Result<u64, LazyError>> {
        let capture = lock_uninterrupted(&self.capture).take()?;
        // Relaxed: `get` looks under the lock.
        self.is_there.store(false, Ordering::Relaxed);
        Some(capture.end())
    }

    /// Returns since when an event has been waiting for the end of the capture.
    pub(crate) fn waits(&self) -> Option<Instant> {
        self.get()?.waits.get().copied()
    }
}

#[cfg(test)]
mod tests {
    use uzone_os::Vaddr;
    use uzone_pages::ByteLen;

    use super::*;

    #[test]
    fn what_was_kept_lies_over_what_is_read_and_only_what_was_wanted_is_kept() {
        let page = uzone_os::probe::page_size().bytes();
        let len = usize::try_from(8 * page).unwrap();
        let before: Vec<u8> = (0..=250).cycle().take(len).collect();
        // The memory of the process is a file, in which the image starts at byte 3 * page.
        let memory = uzone_os::memory_file("memory", &vec![7; len + len]).unwrap();
        memory.write_all_at(&before, 3 * page).unwrap();
        let regions = [RemoteRegion {
            start: Vaddr::new(3 * page),
            len: ByteLen::new(8 * page),
            offset: 0,
            page: uzone_os::probe::page_size(),
        }];
        let kept = KeptPages::new(&regions).unwrap();
        let theirs = KeptPages::from_fd(kept.as_fd().try_clone_to_owned().unwrap(), &regions);
        kept.want(page..3 * page).unwrap();
        kept.want(5 * page..6 * page).unwrap();
        let mut piece = vec![0; usize::try_from(page).unwrap()];
        let bytes = 0..8 * page;
        assert_eq!(theirs.keep(&bytes, &memory, 3 * page, &mut piece).unwrap(), 3);
        assert_eq!(theirs.keep(&bytes, &memory, 3 * page, &mut piece).unwrap(), 0, "once");
        for (start, end) in [(0, len), (1, len - 1), (5000, 5001), (len - 5, len)] {
            let mut seen = vec![9; end - start];
            kept.read_over(start as u64, &mut seen).unwrap();
            for (at, byte) in (start..end).zip(seen) {
                let is_kept = matches!(at as u64 / page, 1 | 2 | 5);
                assert_eq!(byte, if is_kept { before[at] } else { 9 }, "{start}..{end}: {at}");
            }
        }
    }
}

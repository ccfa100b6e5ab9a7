//! Memory of another process that is answered for: [`AdoptedMemory`].
//!
//! The other process made the userfaultfd, registered its memory and handed the descriptor over. Memory that it
//! gives back ([`Event::Removed`](uzone_os::uffd::Event::Removed)) is zero from then on, as it would be
//! without us. Only the thread that reads the removals knows which pages may be filled, so that thread installs
//! all pages, including those that an I/O thread produced.

use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_os::thread::pause;
use uzone_os::uffd::{Answered, EventLog, LoggedEvents, Remote};
use uzone_os::{Rejected, Vaddr};
use uzone_pages::{AddrError, Advice, ByteLen, PageCount, PageSize};

use crate::backing::Backing;
use crate::engine::core::Core;
use crate::engine::mapping_reader::{EVENTS, Sources};
use crate::engine::{Engine, TRACED, check_backing};
use crate::error::{LazyError, MapError, at_most};
use crate::memory::collapse::Blocks;
use crate::memory::kernel::Kernel;
use crate::memory::mapping::LazyMapping;
use crate::memory::prefetch::Prefetch;
use crate::memory::remote::RemoteMemory;
use crate::memory::remote_region::{RemoteRegion, offsets};
use crate::options::{LazyOptions, WriteTracking};
use crate::pages::capture::{CaptureSlot, KeptPages, WriteCapture};
use crate::pages::states::PageStates;

/// How long the layout of a process may change before its memory is protected.
const PROTECT_WITHIN: Duration = Duration::from_secs(1);

impl Engine {
    /// Answers the faults of memory of another process from now on, by `backing`. Each region is whole
    /// pages, and all have pages of one size: a process that has two hands a descriptor over for each.
    ///
    /// Of the options, `huge` and `kernel_faults` are the other side's and mean nothing here. With `track_writes`,
    /// which is [`WriteTracking::Async`] here, pages are installed so that the kernel notes the first write to each:
    /// the other side registered its memory for that. With [`Advice::Blocks`], zero pages are copied, so that they take
    /// memory of their own, and [`AdoptedMemory::take_filled_blocks`] returns the blocks of which a process with the
    /// right to can make huge pages.
    ///
    /// With a `log` ([`AdoptedMemory::log`], of the same regions), it keeps there which pages were given back. A
    /// process that holds the log's descriptor and that of the memory can so let another one answer if this
    /// one is killed: pages that are marked in the log are zero, and faults that an earlier process left are
    /// reported again.
    ///
    /// # Errors
    /// [`MapError`]: there is no region, one cuts a page or has pages of another size, two hold the same bytes of the
    /// backing, or they want more than it has. `remote` is closed then: if it may be the last descriptor of its kind, keep
    /// another ([`Remote::try_clone`]).
    pub fn adopt(
        &self,
        remote: Remote,
        regions: Vec<RemoteRegion>,
        backing: Arc<dyn Backing>,
        options: &LazyOptions,
        log: Option<EventLog>,
    ) -> Result<AdoptedMemory, MapError> {
        self.check_process()?;
        let pages = check(&regions, log.as_ref(), options)?;
        let is_tracked = options.track_writes.is_some();
        let (page, capture) = (page_size(&regions), CaptureSlot::default());
        // The kernel makes no huge page of a block that contains its page of zeroes.
        let zeroes_by_copy =
            page > uzone_os::probe::page_size() || options.advice == Advice::Blocks;
        check_backing(&*backing, pages.to_bytes(page)?, page)?;
        let contents = PageStates::reserve(pages, page)?;
        let areas: Result<Vec<_>, AddrError> =
            regions.iter().map(RemoteRegion::fault_area).collect();
        let memory = RemoteMemory { remote, regions, capture, zeroes_by_copy, is_tracked };
        let memory = Arc::new(memory);
        let core = Arc::new(Core::new(memory.clone(), backing, contents, &areas?, options));
        let is_logged = log.is_some();
        for marked in log.iter().flat_map(EventLog::marked) {
            core.removed(marked..marked + 1);
        }
        let sources = Sources { log, handover: None, process: options.process };
        let attached = self.attach(memory.clone(), core.clone(), sources, options)?;
        if is_logged {
            // Faults that another process read and did not answer are reported again.
            memory.wake(core.bytes(0..pages.get()));
        }
        let mut blocks = Blocks::default();
        if options.advice == Advice::Blocks {
            blocks.add(&memory.regions, &core);
        }
        let memory = Other { kernel: memory, blocks };
        Ok(AdoptedMemory { attached: Some(attached), memory, core })
    }
}

/// Returns how many pages some regions have in all, which `log` and `options` fit.
fn check(
    regions: &[RemoteRegion],
    log: Option<&EventLog>,
    options: &LazyOptions,
) -> Result<PageCount, MapError> {
    at_most("LazyOptions::trace", options.trace, TRACED)?;
    let pages = count_pages(regions)?;
    let reason = if overlap(regions.iter().map(RemoteRegion::offsets)) {
        "two regions hold the same bytes of it, and a page has one address"
    } else if overlap(regions.iter().map(RemoteRegion::addresses)) {
        "two regions have the same addresses, and an address has one page"
    } else if regions.is_empty() {
        "no region holds a byte of it"
    } else if log.is_some_and(|log| log.marks() != pages.get()) {
        "the log of events is of other memory"
    } else if matches!(options.track_writes, Some(WriteTracking::Sync)) {
        "writes to memory of another process are tracked by its kernel alone: set WriteTracking::Async, or \
         capture it"
    } else {
        return Ok(pages);
    };
    Err(MapError::Backing { reason })
}

/// Returns whether two of the ranges have a number in common.
fn overlap(ranges: impl Iterator<Item = Range<u64>>) -> bool {
    let mut ranges: Vec<_> = ranges.collect();
    ranges.sort_by_key(|range| range.start);
    ranges.windows(2).any(|two| two[0].end > two[1].start)
}

/// Returns the size of the pages of regions, which all have the same.
fn page_size(regions: &[RemoteRegion]) -> PageSize {
    regions.first().map_or_else(uzone_os::probe::page_size, |region| region.page)
}

/// Returns where the last byte of the backing ends that regions hold.
fn end_of(regions: &[RemoteRegion]) -> Result<ByteLen, AddrError> {
    let mut end = ByteLen::ZERO;
    for region in regions {
        end = end.max(ByteLen::new(region.offset).checked_add(region.len)?);
    }
    Ok(end)
}

/// Returns how many pages of the backing the regions reach over, from its start on.
fn count_pages(regions: &[RemoteRegion]) -> Result<PageCount, MapError> {
    let page = page_size(regions);
    for region in regions {
        let (start, len) = (region.start, region.len);
        if region.page != page {
            return Err(MapError::PageSizes { start, page: region.page, first: page });
        }
        let is_cut = (start.get() | len.get() | region.offset) & (page.bytes() - 1) != 0;
        if is_cut || len.is_zero() {
            return Err(MapError::CutsPage { len, page: ByteLen::new(page.bytes()) });
        }
        ByteLen::new(start.get()).checked_add(len)?;
    }
    Ok(page.pages_in(end_of(regions)?)?)
}

/// Memory of another process whose faults are answered, until this is dropped or stopped. Dropping it
/// closes one descriptor. After the last one is closed, missing pages of the other process read as zero, so
/// a server that ends before that process hands the descriptor on ([`AdoptedMemory::stop`]).
pub type AdoptedMemory = LazyMapping<Other>;

/// The parameter of [`LazyMapping`] for memory of another process.
pub struct Other {
    kernel: Arc<RemoteMemory>,
    blocks: Blocks,
}

impl AdoptedMemory {
    /// Makes the log for [`Engine::adopt`] of memory of these regions. It starts with the contents of `before`,
    /// the log of a process that answered for them and has ended. It is a memory file, or made in
    /// `file`, which is empty or the one that `before` was read from.
    ///
    /// # Errors
    /// [`MapError`] as for [`Engine::adopt`], or that there is no room for it, or `before` is of other memory.
    pub fn log(
        regions: &[RemoteRegion],
        before: Option<&LoggedEvents>,
        file: Option<OwnedFd>,
    ) -> Result<EventLog, MapError> {
        let pages = count_pages(regions)?;
        if before.is_some_and(|before| before.marks() != pages.get()) {
            return Err(MapError::Backing { reason: "the log of events is of other memory" });
        }
        let log = match file {
            Some(file) => EventLog::in_file(file, EVENTS, pages.get()),
            None => EventLog::new(EVENTS, pages.get()),
        };
        let log = log.map_err(MapError::MemoryFile)?;
        let Some(before) = before else { return Ok(log) };
        let shift = page_size(regions).shift();
        before.marked().for_each(|page| log.mark(page..page + 1));
        for removed in &before.removed {
            for bytes in offsets(regions, removed.start, removed.end) {
                log.mark(bytes.start >> shift..bytes.end >> shift);
            }
        }
        log.forget_events();
        Ok(log)
    }

    /// Returns how many marks the log of memory of these regions has.
    ///
    /// # Errors
    /// [`MapError`]: the regions have more pages than there can be.
    pub fn marks(regions: &[RemoteRegion]) -> Result<u64, MapError> {
        Ok(count_pages(regions)?.get())
    }

    /// Returns the bytes of the backing that memory of these regions gave back, as the log of a process has
    /// them that answered for it and has ended: in ascending order, neighbours as one range.
    ///
    /// # Errors
    /// As for [`AdoptedMemory::log`].
    pub fn given_back(
        regions: &[RemoteRegion],
        before: &LoggedEvents,
    ) -> Result<Vec<Range<u64>>, MapError> {
        let shift = page_size(regions).shift();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for mark in Self::log(regions, Some(before), None)?.marked() {
            let bytes = mark << shift..(mark + 1) << shift;
            match ranges.last_mut() {
                Some(last) if last.end == bytes.start => last.end = bytes.end,
                _ => ranges.push(bytes),
            }
        }
        Ok(ranges)
    }

    /// Has the pages with these bytes of the backing installed before they are touched, in this order: those that
    /// an earlier run touched, for instance. That is done between faults, and a fault brings those of the pages that
    /// are stored with its own. Pages that are there already and bytes that there are not are passed over. It
    /// returns at once.
    pub fn prefetch(&self, offsets: &[u64]) {
        self.prefetch_pages(offsets, false);
    }

    /// Has pages installed as [`AdoptedMemory::prefetch`] does, from the first fault on: until then the process may
    /// still be made ready, for which it needs the CPUs.
    pub fn prefetch_from_first_fault(&self, offsets: &[u64]) {
        self.prefetch_pages(offsets, true);
    }

    fn prefetch_pages(&self, offsets: &[u64], waits_for_fault: bool) {
        let Some(attached) = &self.attached else { return };
        let core = &self.core;
        let offsets = offsets.iter().copied().filter(|at| core.page_at(*at).is_some());
        let offsets: Vec<_> = offsets.collect();
        if !offsets.is_empty() {
            let stored_at = |offset| core.backing.stored_at(offset);
            attached.prefetch(&Prefetch::new(
                &offsets,
                core.page_size(),
                waits_for_fault,
                stored_at,
            ));
        }
    }

    /// Returns the regions of the memory.
    #[must_use]
    pub fn regions(&self) -> &[RemoteRegion] {
        &self.memory.kernel.regions
    }

    /// Protects all of the memory against writing, and has pages kept before they are written to from now on,
    /// until [`AdoptedMemory::end_capture`]. No write to a page before it was kept is lost:
    /// see [`KeptPages`]. The process does not run meanwhile, or its writes until this returns may be part
    /// of the capture.
    ///
    /// It takes the memory of the process (`/proc/PID/mem`), the file that its wanted pages are
    /// noted in and kept, and the count of its pending faults
    /// ([`open_pending_faults`](uzone_os::uffd::open_pending_faults)). `minor` is whether the
    /// memory is registered for pages of the page cache that are not mapped. `hurry` is called
    /// once, by the thread that answers faults, if the process waits for the end of the capture; it
    /// must return at once.
    ///
    /// # Errors
    /// [`LazyError`]: there is a capture, or the kernel refuses. Nothing is protected then.
    pub fn capture(
        &self,
        memory: File,
        kept: KeptPages,
        pending: File,
        minor: bool,
        hurry: impl Fn() + Send + Sync + 'static,
    ) -> Result<(), LazyError> {
        if self.memory.kernel.is_tracked {
            return Err(LazyError::NotReported);
        }
        if !self.memory.kernel.capture.set(WriteCapture::new(memory, kept, pending, hurry)) {
            return Err(LazyError::Captured);
        }
        let since = Instant::now();
        let protect = || {
            for region in &self.memory.kernel.regions {
                match self.memory.kernel.remote.report_writes(region.start, region.len, minor)? {
                    Answered::All => {}
                    answer => return Ok(answer),
                }
            }
            self.memory.kernel.write_protect(&(0..u64::MAX), true)
        };
        let mut round = 0;
        let error = loop {
            match protect() {
                Ok(Answered::All) => return Ok(()),
                Ok(Answered::LayoutChanging) if since.elapsed() < PROTECT_WITHIN => {
                    pause(&mut round);
                }
                Ok(answer) => break LazyError::NotProtected { answer },
                Err(error) => break error.into(),
            }
        };
        let _ = self.end_capture();
        Err(error)
    }

    /// Lets writes go on before `until` of the backing: that part has been read.
    pub fn captured_until(&self, until: u64) {
        if let Some(capture) = self.memory.kernel.capture.get() {
            // A page that stays protected is let go by a write.
            let _ = self.memory.kernel.write_protect(&capture.has_read(until), false);
        }
    }

    /// Returns since when the process has been waiting for the end of a capture, because it gives memory back
    /// or changes its layout.
    #[must_use]
    pub fn capture_waits(&self) -> Option<Instant> {
        self.memory.kernel.capture.waits()
    }

    /// Ends a capture and lets all writes go on. Returns how many pages of the host were kept, since the process
    /// wrote to them; `None` if there is no capture.
    ///
    /// # Errors
    /// [`LazyError::CaptureLost`] if the bytes that were read may not be those of one moment.
    pub fn end_capture(&self) -> Option<Result<u64, LazyError>> {
        let captured = self.memory.kernel.capture.end()?;
        // A page that stays protected, since the layout changes for instance, is let go by a write.
        let _ = self.memory.kernel.write_protect(&(0..u64::MAX), false);
        Some(captured)
    }

    /// Returns the addresses of blocks of 2 MiB, at multiples of that, all of whose pages were filled and none was
    /// given back: at most so many, each once. There are none without [`Advice::Blocks`].
    ///
    /// A block may be given back or unmapped before the caller makes a huge page of it. No byte changes then
    /// either: `collapse.rs` states why.
    #[must_use]
    pub fn take_filled_blocks(&self, most: usize) -> Vec<Vaddr> {
        self.memory.blocks.take(most)
    }

    /// Returns how many blocks are left that [`AdoptedMemory::take_filled_blocks`] may return.
    #[must_use]
    pub fn blocks_left(&self) -> usize {
        self.memory.blocks.left()
    }

    /// Stops answering and returns the descriptor for the next server. Threads that wait for a page go on
    /// waiting.
    ///
    /// # Errors
    /// [`LazyError::NotStopped`] gives the memory back, answered as before: closing its descriptor could be
    /// the end of the last one.
    pub fn stop(mut self) -> Result<Remote, Rejected<Self, LazyError>> {
        match self.memory.kernel.remote.try_clone() {
            Ok(remote) => {
                self.attached = None;
                Ok(remote)
            }
            Err(cause) => {
                let (value, cause) = (Box::new(self), LazyError::NotStopped(cause));
                Err(Rejected { value, cause })
            }
        }
    }
}

impl fmt::Debug for AdoptedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdoptedMemory")
            .field("regions", &self.memory.kernel.regions)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

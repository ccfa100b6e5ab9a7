//! Memory of another process that is answered for: [`AdoptedMemory`].
//!
//! The other process made the userfaultfd, registered its memory and handed the descriptor over.
//! What it gives back ([`Event::Removed`](uzone_os::uffd::Event::Removed)) is zero from then on, as
//! it would be without us. Since only the thread that reads the removals knows what may be filled,
//! that thread fills everything, and a backing that blocks holds up the other faults of the memory.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

use uzone_os::uffd::{Doorbell, Remote};
use uzone_pages::{Advice, ByteLen, Content, FaultAround, FaultPattern, PageSize};

use crate::backing::Backing;
use crate::contents::Contents;
use crate::core::{Core, Policy};
use crate::error::MapError;
use crate::lazy::{Engine, FaultStats, LazyOptions, STAGING};
use crate::reader::{Control, Reader};
use crate::told::{RemoteMemory, RemoteRegion, Told};

impl Engine {
    /// Answers the faults of memory of another process from now on, by `backing`. The regions are
    /// whole pages of `page`, which is the size of huge pages where the memory has those.
    ///
    /// Of the options, `huge` and `kernel_faults` are the other side's and mean nothing here.
    ///
    /// # Errors
    /// [`MapError`]: there is no region, one cuts a page, or they want more than the backing has.
    pub fn adopt(
        &self,
        remote: Remote,
        regions: Vec<RemoteRegion>,
        page: PageSize,
        backing: Arc<dyn Backing>,
        options: &LazyOptions,
    ) -> Result<AdoptedMemory, MapError> {
        let mut end = 0;
        for region in &regions {
            let (start, len) = (region.start.get(), region.len);
            let is_cut = (start | len.get() | region.offset) & (page.bytes() - 1) != 0;
            if is_cut || len.is_zero() {
                return Err(MapError::CutsPage { len, page: ByteLen::new(page.bytes()) });
            }
            end = end.max(ByteLen::new(region.offset).checked_add(len)?.get());
            ByteLen::new(start).checked_add(len)?;
        }
        let asked = ByteLen::new(end);
        if let Some(has) = backing.byte_len()
            && asked > has.align_up(page.bytes())?
        {
            return Err(MapError::TooShort { asked, has });
        }
        if !backing.takes_pages_of(page) {
            return Err(MapError::Backing {
                reason: "its parts start or end inside of such a page",
            });
        }
        let contents = Contents::new(page.pages_in(asked)?)?;
        let pattern = FaultPattern::new(
            contents.area(),
            options.advice,
            options.fault_around,
            backing.largest_window(),
        );
        let zeroes_by_copy = page > uzone_os::probe::page_size();
        let memory = Arc::new(RemoteMemory { remote, regions });
        let policy = Policy { zeroes_by_copy, removed_is_zero: true };
        let core = Arc::new(Core::new(memory.clone(), backing, contents, page, policy, pattern));
        let bell = Doorbell::new().map_err(MapError::Thread)?;
        let control = Arc::new(Control { bell, stop: AtomicBool::new(false) });
        let reader = Reader {
            told: Told::Remote(memory.clone()),
            core: core.clone(),
            pool: None,
            control: control.clone(),
            spin: options.spin,
            room: ByteLen::new(STAGING.max(page.bytes())).to_usize()?,
        };
        let thread = Builder::new()
            .name("uzone-fault".to_owned())
            .spawn(move || reader.run())
            .map_err(MapError::Thread)?;
        Ok(AdoptedMemory { memory, core, control, thread: Some(thread) })
    }
}

/// Memory of another process whose faults are answered, until this is dropped or stopped.
///
/// Whoever drops it closes one descriptor. If that is the last one, what is missing over there
/// reads as zero from then on, so a server that goes while the other process lives hands the
/// descriptor on ([`AdoptedMemory::stop`]).
pub struct AdoptedMemory {
    memory: Arc<RemoteMemory>,
    core: Arc<Core>,
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

impl AdoptedMemory {
    /// Returns what happened so far.
    #[must_use]
    pub fn stats(&self) -> FaultStats {
        FaultStats::of(&self.core)
    }

    /// Changes how faults are answered from now on.
    pub fn advise(&self, advice: Advice, fault_around: FaultAround) {
        self.core.pattern().set(advice, fault_around);
    }

    /// Returns what is known about the page with byte `offset` of the backing, or `None` if there
    /// is none.
    #[must_use]
    pub fn content(&self, offset: u64) -> Option<Content> {
        let page = offset >> self.core.page_size().shift();
        (page < self.core.contents().area().end().get()).then(|| self.core.contents().get(page))
    }

    fn stop_reader(&mut self) {
        // Release pairs with the Acquire of the reader.
        self.control.stop.store(true, Ordering::Release);
        if self.control.bell.ring().is_ok()
            && let Some(thread) = self.thread.take()
        {
            // A panic of it was printed when it happened.
            let _ = thread.join();
        }
    }

    /// Stops answering and returns the descriptor, for who answers next. Who waits meanwhile goes on
    /// waiting. `None` if the thread that answers cannot be stopped.
    #[must_use]
    pub fn stop(mut self) -> Option<Remote> {
        self.stop_reader();
        let fd = std::os::fd::AsFd::as_fd(&self.memory.remote).try_clone_to_owned().ok()?;
        Remote::adopt(fd).ok()
    }
}

impl Drop for AdoptedMemory {
    fn drop(&mut self) {
        self.stop_reader();
    }
}

impl fmt::Debug for AdoptedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdoptedMemory")
            .field("memory", &self.memory)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

//! Faults that never happened, answered as far as the kernel: [`Rehearsal`], by which `uzone bench`
//! measures what of a fault is ours. Round trips through the kernel vary by more than all of it. Here
//! everything runs as in a mapping, the lookups, the decisions, the pages' words, the counts and the record
//! of the fault; only the two system calls are left out, the one that reads the fault and the one that
//! installs pages.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use uzone_os::uffd::{
    Answered, FaultKind, Features, KernelFaults, Modes, PageFault, Registered, Uffd, UffdError,
};
use uzone_os::{Anonymous, Mapping, Vaddr};
use uzone_pages::{ByteLen, Content, PageSize};

use crate::engine::core::Core;
use crate::engine::event_loop::EventLoop;
use crate::engine::inbox::PagerKey;
use crate::engine::io_pool::{IoPool, Submit};
use crate::engine::kernel::{Fill, Kernel};
use crate::engine::mapping_reader::{MappingReader, Scratch, Sources};
use crate::engine::pages::Policy;
use crate::error::MapError;
use crate::memory::fault_memory::FaultMemory;
use crate::options::LazyOptions;
use crate::track::page_states::PageStates;
use crate::track::record::Recorder;
use crate::{Backing, ZeroBacking};

/// A kernel that installs everything at once.
struct Agreeing;

impl Kernel for Agreeing {
    fn install(&self, _: Range<u64>, _: Fill<'_>) -> Result<Answered, UffdError> {
        Ok(Answered::All)
    }

    fn wake(&self, _: Range<u64>) {}
}

/// A mapping whose faults are made up.
pub struct Rehearsal {
    source: MappingReader,
    scratch: Scratch,
    core: Arc<Core>,
    /// Where the mapping starts.
    start: u64,
    // The thread that would answer real faults; it has none.
    idle: EventLoop,
}

impl Rehearsal {
    /// Makes one of `len`, whole pages of 4 KiB.
    ///
    /// # Errors
    /// As for [`Engine::map`](crate::Engine::map).
    pub fn new(len: ByteLen, options: &LazyOptions) -> Result<Self, MapError> {
        let page = PageSize::KIB_4;
        let contents = PageStates::reserve(page.pages_in(len)?, page)?;
        let mapping = Mapping::anonymous(len, Anonymous::default())?;
        let start = mapping.addr().get() as u64;
        let uffd = Uffd::open(Features::NONE, Features::THREAD_ID, KernelFaults::IfAllowed)?;
        let memory = Registered::new(Arc::new(uffd), mapping, Modes::MISSING);
        let memory = Arc::new(memory.map_err(|refused| refused.cause)?);
        let backing: Arc<dyn Backing> = Arc::new(ZeroBacking);
        let (areas, recorder) = ([contents.fault_area(start)], Recorder::new(options.trace));
        let (kernel, policy) = (Arc::new(Agreeing), Policy::default());
        let core = Core::new(kernel, backing, contents, &areas, policy, options, recorder);
        let core = Arc::new(core);
        let idle = EventLoop::start("uzone-idle", &[]).map_err(MapError::Thread)?;
        let pool = IoPool::start(NonZeroUsize::MIN).map_err(MapError::Thread)?;
        let (own, options) = (FaultMemory::Own(memory), options.clone().spin(Duration::ZERO));
        let (pagers, pool) = ([(own.clone(), core.clone())], Arc::new(pool));
        let source = MappingReader::new(own, Sources::default(), &pagers, &pool, &options, false);
        Ok(Self { source, scratch: Scratch::new(), core, start, idle })
    }

    /// Answers a read fault at byte `offset`, with its neighbours.
    pub fn fault(&mut self, offset: u64) {
        let fault = PageFault {
            address: Vaddr::new(self.start + offset),
            kind: FaultKind::Missing,
            is_write: false,
            thread: None,
        };
        let key = PagerKey { mapping: 0, pager: 0 };
        let submit = Submit { filler: self.idle.inbox(), key };
        self.source.rehearse(fault, &mut self.scratch, &submit);
    }

    /// Returns whether the page at byte `offset` is there.
    #[must_use]
    pub fn is_there(&self, offset: u64) -> bool {
        self.core.contents().get(offset >> self.core.page_size().shift()) == Content::Present
    }
}

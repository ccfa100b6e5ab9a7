//! What makes lazy mappings: [`Engine`].
//!
//! Cost: a mapping is one userfaultfd, about 40 KiB, and 8 bytes of descriptor a page. Those are written
//! when their page is touched, but for mappings of up to 262,144 pages, which have theirs from the start.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use uzone_os::uffd::{Features, KernelFaults, Modes, Registered, Uffd, UffdCall};
use uzone_os::{Access, Anonymous, HugeAdvice, HugeSize, Mapping};
use uzone_pages::{Advice, ByteLen, FaultArea, FaultAround, FaultPattern, PageSize};
use uzone_zone::{PagemapOps, Zone};

use crate::backing::{Backing, Memory};
use crate::core::{Core, Policy};
use crate::dirty::{Tracker, WriteTracking};
use crate::error::MapError;
use crate::event_loop::{Attached, EventLoop};
use crate::fault_memory::FaultMemory;
use crate::kernel::Kernel;
use crate::lazy::LazyMapping;
use crate::page_states::PageStates;
use crate::pool::Pool;
use crate::populate::Producer;
use crate::record::Recorder;
use crate::source::{Source, SourceParts};
use crate::transparent::{self, Transparent};

/// How many bytes are read from a backing at once.
const STAGING: u64 = 256 << 10;
/// How many threads answer faults at most, unless the engine is told otherwise.
const READERS: usize = 4;

/// How many threads of one kind an engine has at most.
const THREADS: usize = 1024;
/// How many faults a mapping remembers at most: those take 768 MiB.
pub(crate) const TRACED: usize = 1 << 24;

/// Who answers the faults of a mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Reader {
    /// One of the engine's threads, which it shares with other mappings: the one with the fewest.
    #[default]
    Shared,
    /// A thread of its own.
    Own {
        /// The CPUs that it may run on; all, if there is none.
        cpus: Vec<u32>,
    },
}

/// Whether the pages of a mapping are huge. Each is filled whole when any part of it is touched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HugePages {
    /// They are the host's small pages, of which [`LazyMapping::collapse`] can make huge ones later.
    #[default]
    None,
    /// They are of the hugetlb pool of that size: promised when memory is mapped.
    Pool(HugeSize),
    /// They are transparent huge pages, 2 MiB on common machines: made when they are touched and taken
    /// from free memory. Where none is free, a page is filled in small ones, and
    /// [`FaultStats::huge_pages`](crate::FaultStats::huge_pages) does not count it. They are swapped
    /// and pinned like other memory. Linux 6.8.
    Transparent,
}

/// How memory is mapped lazily.
#[derive(Clone, Debug)]
pub struct LazyOptions {
    /// How it will be read: [`Advice::Auto`] unless set.
    pub advice: Advice,
    /// How much a read fault maps, or starts with where windows grow: 64 KiB unless set.
    pub fault_around: FaultAround,
    /// Whether pages are huge: [`HugePages::None`] unless set. Only memory of its own can be told so.
    pub huge: HugePages,
    /// For how long the thread that answers looks for more before it sleeps. It burns that much of
    /// a processor after each burst of faults, and saves a wake-up: 20 us unless set.
    ///
    /// A thread that looks in vain a few times in a row sleeps at once, until a fault comes that it
    /// would have met. Zero is for a thread on the CPU of who reads: it sleeps at once always, and puts
    /// nothing in place ahead of who reads in order.
    pub spin: Duration,
    /// Who answers: [`Reader::Shared`] unless set.
    pub reader: Reader,
    /// After how long a page that is being produced is given up: it is bad then, and who waits for it
    /// gets `SIGBUS`. Without one, as by default, it is waited for as long as its backing takes, and so
    /// it is with one that is longer than the clock goes.
    pub deadline: Option<Duration>,
    /// How many of the last faults are remembered one by one, each in 48 bytes, for
    /// [`LazyMapping::take_trace`]: none unless set, and at most 16,777,216.
    pub trace: usize,
    /// Whether faults of system calls have to be answered too: [`KernelFaults::IfAllowed`] unless set.
    pub kernel_faults: KernelFaults,
    /// Whether writes are tracked, and how: not at all unless set.
    pub track_writes: Option<WriteTracking>,
    /// After how long without a page that was filled a thread of low priority makes huge pages of what
    /// is there, as [`LazyMapping::collapse`] does; `None`, the default, for never.
    pub collapse_when_settled: Option<Duration>,
}

impl Default for LazyOptions {
    fn default() -> Self {
        Self {
            advice: Advice::default(),
            fault_around: FaultAround::default(),
            huge: HugePages::None,
            spin: Duration::from_micros(20),
            reader: Reader::Shared,
            deadline: None,
            trace: 0,
            kernel_faults: KernelFaults::IfAllowed,
            track_writes: None,
            collapse_when_settled: None,
        }
    }
}

/// What an engine is made of.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The zone that memory is bound in: one of its own unless this says otherwise.
    pub zone: Option<Zone>,
    /// How many threads produce pages that are not at hand. They wait for devices, each for one page at a
    /// time; of these, all but one may read ahead. As many as there are CPUs unless set, and at least 2;
    /// at most 1024. While a backing waits for pages of other memory of the same engine, there may be up to
    /// 64 more.
    pub producers: NonZeroUsize,
    /// How many threads answer faults, each for its share of the mappings. As many as there are CPUs
    /// unless set, and at most 4 then; at most 1024.
    pub readers: NonZeroUsize,
    /// The CPUs that those may run on; all, if there is none, as by default. See
    /// [`Placement`](crate::Placement) for what it is worth.
    pub cpus: Vec<u32>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        Self {
            zone: None,
            producers: cpus.max(NonZeroUsize::MIN.saturating_add(1)),
            readers: cpus.min(NonZeroUsize::MIN.saturating_add(READERS - 1)),
            cpus: Vec::new(),
        }
    }
}

/// What makes lazy mappings and answers their faults: threads that answer, and threads that wait for
/// devices, shared by all mappings. They end when the engine and all mappings are dropped.
///
/// Idle threads sleep. A mapping belongs to one thread that answers, as long as it lives.
pub struct Engine {
    zone: Zone,
    pool: Arc<Pool>,
    readers: Vec<Arc<EventLoop>>,
}

impl Engine {
    /// Starts an engine with `producers` threads that produce pages which are not at hand, and all else as
    /// by default. A [`Backing::fault`] that hangs keeps one of them: with one producer, all other pages that
    /// are not at hand wait for it, those of other mappings too.
    ///
    /// # Errors
    /// [`MapError::Thread`] if a thread is refused.
    pub fn new(producers: NonZeroUsize) -> Result<Self, MapError> {
        Self::with(EngineOptions { producers, ..EngineOptions::default() })
    }

    /// Starts an engine.
    ///
    /// # Errors
    /// [`MapError::Thread`] if a thread is refused, or may not run on those CPUs.
    pub fn with(options: EngineOptions) -> Result<Self, MapError> {
        let EngineOptions { zone, producers, readers, cpus } = options;
        at_most("EngineOptions::producers", producers.get(), THREADS)?;
        at_most("EngineOptions::readers", readers.get(), THREADS)?;
        let pool = Arc::new(Pool::start(producers).map_err(MapError::Thread)?);
        let start = |index| EventLoop::start(&format!("uzone-fault-{index}"), &cpus).map(Arc::new);
        let readers: io::Result<Vec<_>> = (0..readers.get()).map(start).collect();
        let readers = readers.map_err(MapError::Thread)?;
        Ok(Self { zone: zone.unwrap_or_default(), pool, readers })
    }

    /// Returns the zone that lazily mapped memory is bound in: pages are pinned there by address
    /// ([`Zone::pin`]), and those that are absent are produced first.
    #[must_use]
    pub fn zone(&self) -> &Zone {
        &self.zone
    }

    /// Maps `len` bytes of `backing`, whole pages. Nothing is read before somebody touches it. It needs a
    /// userfaultfd that can say that a page is bad (Linux 6.6).
    ///
    /// A process that this one forks off does not have the mapping, unless it is of a memory file: its
    /// missing pages would be zero there.
    ///
    /// Costs some system calls, one descriptor of a file, and 8 bytes a page for what is known about
    /// it, in memory only where pages were touched, or at once for up to 262,144 of them.
    ///
    /// # Errors
    /// [`MapError`]: there is no userfaultfd or it lacks something, the backing is shorter, or there
    /// is no memory to be had.
    pub fn map(
        &self,
        len: ByteLen,
        backing: Arc<dyn Backing>,
        options: &LazyOptions,
    ) -> Result<LazyMapping, MapError> {
        at_most("LazyOptions::trace", options.trace, TRACED)?;
        let memory = backing.memory().map_err(MapError::Unknown)?;
        let (mapping, mut modes, mut required) = map_memory(len, memory, options)?;
        let page = match options.huge {
            HugePages::Transparent => transparent::page_size()?,
            HugePages::None | HugePages::Pool(_) => mapping.page_size(),
        };
        if let Some(has) = backing.byte_len()
            // The last page may be filled in part.
            && len > has.align_up(page.bytes())?
        {
            return Err(MapError::TooShort { asked: len, has });
        }
        if let Some(tracking) = options.track_writes {
            if options.huge == HugePages::Transparent {
                let reason = "writes are tracked in small pages: leave LazyOptions::huge as it is";
                return Err(MapError::Backing { reason });
            }
            (modes, required) = tracking.needs(&mapping, modes, required)?;
        }
        let pages = page
            .pages_in(len)
            .map_err(|_| MapError::CutsPage { len, page: ByteLen::new(page.bytes()) })?;
        if !backing.takes_pages_of(page) {
            return Err(MapError::Backing {
                reason: "its parts start or end inside of such a page",
            });
        }
        if mapping.is_private() {
            mapping.keep_from_children().map_err(MapError::Children)?;
        }
        let uffd = Uffd::open(required, Features::THREAD_ID, options.kernel_faults)?;
        let memory = Arc::new(Registered::new(Arc::new(uffd), mapping, modes)?);
        let producer = Producer::default();
        let ops = PagemapOps::default().populate(producer.clone());
        let contents = PageStates::bind(&self.zone, Mapping::lent(memory.clone()), page, ops)?;
        let tracker = match options.track_writes {
            Some(tracking) => Some(Arc::new(Tracker::new(tracking, memory.clone(), pages)?)),
            None => None,
        };
        let zeroes_by_copy = !memory.calls().takes(UffdCall::ZeroPage)
            || tracker.as_ref().is_some_and(|tracker| tracker.copies_zeroes());
        let kernel: Arc<dyn Kernel> = match &tracker {
            Some(tracker) => tracker.clone(),
            None if options.huge == HugePages::Transparent => {
                Arc::new(Transparent::new(memory.clone(), page))
            }
            None => memory.clone(),
        };
        let is_tracked = tracker.is_some();
        let policy = Policy { zeroes_by_copy, removed_is_zero: false, is_tracked };
        let area = contents.fault_area(memory.mapping().addr().get() as u64, page);
        let pattern = pattern(&[area], page, &*backing, options);
        let recorder = Recorder::new(options.trace);
        let core = Core::new(kernel, backing, contents, page, policy, pattern, recorder);
        let core = Arc::new(core);
        let room = room(page)?;
        producer.serves(&core, room);
        let attached =
            self.attach(FaultMemory::Own(memory.clone()), core.clone(), options, room)?;
        let mut mapping = LazyMapping::new(attached, memory, core, room, tracker);
        if let Some(quiet) = options.collapse_when_settled {
            mapping.collapse_when_settled(quiet).map_err(MapError::Thread)?;
        }
        Ok(mapping)
    }

    /// Lets a thread answer the faults of a mapping.
    pub(crate) fn attach(
        &self,
        told: FaultMemory,
        core: Arc<Core>,
        options: &LazyOptions,
        room: usize,
    ) -> Result<Attached, MapError> {
        let &LazyOptions { spin, deadline, .. } = options;
        let pool = self.pool.clone();
        let source = Source::new(SourceParts { told, core, pool, spin, deadline, room });
        let reader = match &options.reader {
            Reader::Shared => self.readers.iter().min_by_key(|reader| reader.sources()).cloned(),
            Reader::Own { cpus } => {
                let own = EventLoop::start("uzone-fault", cpus).map_err(MapError::Thread)?;
                Some(Arc::new(own))
            }
        };
        let reader = reader.unwrap_or_else(|| unreachable!("an engine has a reader"));
        reader.join(source).map_err(MapError::Thread)
    }
}

/// Refuses an option that is larger than `most`.
pub(crate) fn at_most(option: &'static str, asked: usize, most: usize) -> Result<(), MapError> {
    if asked > most { Err(MapError::TooMany { option, asked, most }) } else { Ok(()) }
}

/// Returns what is known about how the pages of a mapping will be touched.
pub(crate) fn pattern(
    areas: &[FaultArea],
    page: PageSize,
    backing: &dyn Backing,
    options: &LazyOptions,
) -> FaultPattern {
    let most = backing.largest_window();
    FaultPattern::new(areas, page, options.advice, options.fault_around, most)
}

/// Returns how many bytes are read from a backing at once, for pages of `page`.
pub(crate) fn room(page: PageSize) -> Result<usize, MapError> {
    Ok(ByteLen::new(STAGING.max(page.bytes())).to_usize()?)
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("zone", &self.zone)
            .field("readers", &self.readers.len())
            .finish_non_exhaustive()
    }
}

/// Returns what the addresses of a mapping are aligned to, so that windows are the same by addresses and by
/// offsets and each lies in one page table: 2 MiB, or less for a mapping that is in one page table anyhow.
fn table_align(len: ByteLen) -> ByteLen {
    let page = uzone_os::probe::page_size().bytes();
    ByteLen::new(
        len.get().checked_next_power_of_two().map_or(2 << 20, |len| len.clamp(page, 2 << 20)),
    )
}

/// Maps the addresses, and says which faults they have to tell of.
fn map_memory(
    len: ByteLen,
    memory: Memory,
    options: &LazyOptions,
) -> Result<(Mapping, Modes, Features), MapError> {
    match (memory, options.huge) {
        (Memory::Own, HugePages::None) => {
            let align = Some(table_align(len));
            let how = Anonymous { huge: HugeAdvice::Default, align, ..Anonymous::default() };
            Ok((Mapping::anonymous(len, how)?, Modes::MISSING, Features::POISON))
        }
        (Memory::Own, HugePages::Transparent) => {
            let align = Some(ByteLen::new(transparent::page_size()?.bytes()));
            let how = Anonymous { huge: HugeAdvice::Advise, align, ..Anonymous::default() };
            let features = Features::POISON | Features::MOVE;
            Ok((Mapping::anonymous(len, how)?, Modes::MISSING, features))
        }
        (Memory::Own, HugePages::Pool(size)) => {
            let features = Features::POISON | Features::MISSING_HUGETLB;
            Ok((Mapping::hugetlb(len, size)?, Modes::MISSING, features))
        }
        (Memory::File { .. }, HugePages::Pool(_) | HugePages::Transparent) => {
            Err(MapError::Backing { reason: "a memory file has the pages that it was made of" })
        }
        (Memory::File { fd, sharing }, HugePages::None) => {
            let align = table_align(len);
            let mapping = Mapping::file_aligned(fd, 0, len, Access::ReadWrite, sharing, align)?;
            let is_huge = mapping.page_size() != uzone_os::probe::page_size();
            let features = Features::POISON
                | if is_huge {
                    Features::MINOR_HUGETLB | Features::MISSING_HUGETLB
                } else {
                    Features::MINOR_SHMEM | Features::MISSING_SHMEM
                };
            let modes = Modes { missing: true, minor: true, write_protect: false };
            Ok((mapping, modes, features))
        }
    }
}

//! The maker of lazy mappings: [`Engine`].
//!
//! Cost: a mapping is one userfaultfd, about 55 KiB, and 8 bytes of descriptor a page. Those are written
//! when their page is touched, but for mappings of up to 262,144 pages, which have theirs from the start.

pub(crate) mod budget;
pub(crate) mod core;
pub(crate) mod event_loop;
mod exit;
pub(crate) mod follow;
pub(crate) mod inbox;
pub(crate) mod io_pool;
pub(crate) mod mapping_reader;
pub(crate) mod pending;
mod spin;
pub(crate) mod staged;
mod threads;

use std::fmt;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use uzone_os::uffd::in_thread::{Answers, InThread, Place, Source};
use uzone_os::uffd::{Features, Handover, KernelFaults, Modes, Registered, Uffd};
use uzone_os::{Access, Anonymous, HugeAdvice, Mapping, Sharing};
use uzone_pages::{ByteLen, PageCount, PageSize};
use uzone_zone::Zone;

use crate::backing::Backing;
use crate::engine::core::Core;
use crate::engine::event_loop::Attached;
use crate::engine::mapping_reader::{MappingReader, Sources};
use crate::engine::threads::Threads;
use crate::error::{MapError, at_most};
use crate::memory::kernel::Faults;
use crate::memory::mapping::LazyMapping;
use crate::memory::own::{Own, OwnMemory};
use crate::memory::populate::Producer;
use crate::options::{Answer, EngineOptions, LazyOptions};
use crate::pages::dirty::Tracker;
use crate::pages::states::PageStates;

/// How many faults a mapping remembers at most: those take 768 MiB.
pub(crate) const TRACED: usize = 1 << 24;

/// The slot and the source with which the threads of a mapping answer their faults, or the reason why they do not.
type Answering = Result<(Place, Source), &'static str>;

/// The maker of lazy mappings. It answers their faults by threads that answer, and threads that wait for
/// devices, shared by all mappings. They end when the engine and all mappings are dropped. The engines of a
/// process share them too, unless [`EngineOptions`] choose threads.
///
/// Idle threads sleep. A mapping belongs to one thread that answers, as long as it lives.
///
/// # Examples
///
/// A file of 4 MiB, of which the pages that are touched are read:
///
/// ```no_run
/// use std::fs::File;
/// use std::sync::Arc;
/// use uzone_fault::{Engine, EngineOptions, FileBacking, LazyOptions};
/// use uzone_pages::ByteLen;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let engine = Engine::with(EngineOptions::default())?;
/// let backing = Arc::new(FileBacking::new(File::open("data")?)?);
/// let memory = engine.map(ByteLen::mib(4), backing, &LazyOptions::default())?;
///
/// let mut bytes = [0; 64];
/// memory.read_at(3 << 20, &mut bytes)?; // so does any code that reads at `memory.addr()`
/// println!("{}", memory.stats());
/// # Ok(())
/// # }
/// ```
pub struct Engine {
    zone: Zone,
    threads: Arc<Threads>,
    leaves_sigbus: bool,
    /// The process that made it. A child that was forked off has the value and none of its threads,
    /// and locks may be as another thread left them, so nothing is waited for there.
    process: u32,
}

impl Engine {
    /// Starts an engine with `producers` I/O threads, and all else as by default. A [`Backing::fault`] that
    /// hangs keeps one of them: with one producer, all other pages that are not ready wait for it,
    /// including those of other mappings.
    ///
    /// # Errors
    /// [`MapError::Thread`] if a thread is refused.
    pub fn new(producers: NonZeroUsize) -> Result<Self, MapError> {
        Self::with(EngineOptions::default().producers(producers))
    }

    /// Starts an engine.
    ///
    /// # Errors
    /// [`MapError::Thread`] if a thread is refused.
    pub fn with(options: EngineOptions) -> Result<Self, MapError> {
        let threads = Threads::of(&options)?;
        let EngineOptions { zone, leaves_sigbus, .. } = options;
        let (zone, process) = (zone.unwrap_or_default(), std::process::id());
        Ok(Self { zone, threads, leaves_sigbus, process })
    }

    /// Returns the zone that lazily mapped memory is bound in: pages are pinned there by address
    /// ([`Zone::pin`]), and those that are absent are produced first.
    #[must_use]
    pub fn zone(&self) -> &Zone {
        &self.zone
    }

    /// Maps `len` bytes of `backing`, whole pages. Nothing is read before it is touched. It needs a
    /// userfaultfd that can poison a page.
    ///
    /// A process that this one forks off does not have the mapping, unless it is of a memory file: its
    /// missing pages would be zero there.
    ///
    /// Costs some system calls, one descriptor of a file, and 8 bytes a page for its
    /// descriptor, in memory only where pages were touched, or at once for up to 262,144 of them.
    ///
    /// # Errors
    /// [`MapError`]: there is no userfaultfd or it lacks something, the backing is shorter, or no memory is
    /// available.
    pub fn map(
        &self,
        len: ByteLen,
        backing: Arc<dyn Backing>,
        options: &LazyOptions,
    ) -> Result<LazyMapping, MapError> {
        self.check_process()?;
        at_most("LazyOptions::trace", options.trace, TRACED)?;
        let (memory, page, in_thread) = self.register(len, &*backing, options)?;
        let producer = Producer::default();
        let ops = producer.ops();
        let contents = PageStates::bind(&self.zone, Mapping::lent(memory.clone()), page, ops)?;
        let tracker = match options.track_writes {
            Some(tracking) => {
                let pages = pages_in(len, page)?;
                Some(Tracker::new(tracking, memory.clone(), pages)?)
            }
            None => None,
        };
        // The handover takes the faults that threads cannot answer: a page that is waited for until a deadline, and one
        // that cannot be filled, whose failure is decided about.
        let hands_over = options.deadline.is_some() || options.on_failure.is_some();
        let handover =
            (in_thread.is_ok() && hands_over).then(|| Handover::new(&memory).map(Arc::new));
        let handover = handover.transpose().map_err(MapError::Thread)?;
        let area = contents.fault_area(memory.mapping().addr().get() as u64);
        let own = Arc::new(OwnMemory { registered: memory, tracker, handover: handover.clone() });
        let core = Arc::new(Core::new(own.clone(), backing, contents, &[area], options));
        producer.serves(&core);
        let sources = Sources { handover, ..Sources::default() };
        let attached = Some(self.attach(own.clone(), core.clone(), sources, options)?);
        let in_thread = answer_in_thread(in_thread, &own, &core, options)?;
        tracing::debug!(%len, %page, ?in_thread, "map");
        Ok(LazyMapping { attached, memory: Own { in_thread, kernel: own }, core })
    }

    /// Refuses to work in a child that was forked off, which has no thread of the engine.
    pub(crate) fn check_process(&self) -> Result<(), MapError> {
        if self.process == std::process::id() { Ok(()) } else { Err(MapError::Forked) }
    }

    /// Makes the memory of a mapping, whose faults wait from now on. Returns the size of the pages that are filled at
    /// once, and the source from which its threads answer faults, or the reason why they do not.
    fn register(
        &self,
        len: ByteLen,
        backing: &dyn Backing,
        options: &LazyOptions,
    ) -> Result<(Arc<Registered>, PageSize, Answering), MapError> {
        let file = backing.memory_file().map_err(MapError::Unknown)?;
        let (mapping, mut modes, mut required) = map_memory(len, file, options)?;
        let page = mapping.page_size();
        if let Some(tracking) = options.track_writes {
            (modes, required) = tracking.needs(&mapping, modes, required)?;
        }
        pages_in(len, page)?;
        check_backing(backing, len, page)?;
        if mapping.is_private() {
            mapping.keep_from_children().map_err(MapError::Children)?;
        }
        if !options.dumps {
            // Where the kernel refuses, a dump has more than it needs.
            let _ = mapping.leave_out_of_dumps();
        }
        // Where the process locks all that it maps (mlockall(2)), the kernel has put pages in place by now, which
        // would never be missing.
        mapping.discard(0..mapping.len().get()).map_err(MapError::Present)?;
        let (uffd, in_thread) = self.open(backing, &mapping, required, options)?;
        let memory = Arc::new(
            Registered::new(Arc::new(uffd), mapping, modes).map_err(|refused| refused.cause)?,
        );
        Ok((memory, page, in_thread))
    }

    /// Opens the userfaultfd of a mapping. Returns the source from which its threads answer faults,
    /// or the reason why they do not.
    fn open(
        &self,
        backing: &dyn Backing,
        mapping: &Mapping,
        required: Features,
        options: &LazyOptions,
    ) -> Result<(Uffd, Answering), MapError> {
        let open = |required, faults| Uffd::open(required, Features::THREAD_ID, faults);
        let source = self.can_answer_in_thread(backing, mapping, options);
        if source.is_ok() && options.answer != Answer::InThread {
            let uffd = open(required, options.kernel_faults)?;
            if uffd.sees_kernel_faults() {
                return Ok((uffd, Err("faults of system calls are answered too")));
            }
        }
        let answering = source.and_then(|source| Ok((Place::take()?, source)));
        let uffd = match answering {
            Ok(_) => open(required | Features::SIGBUS, KernelFaults::Never)?,
            Err(_) => open(required, options.kernel_faults)?,
        };
        Ok((uffd, answering))
    }

    /// Returns the source from which the threads of a mapping can fill pages, or the reason why they cannot.
    fn can_answer_in_thread(
        &self,
        backing: &dyn Backing,
        mapping: &Mapping,
        options: &LazyOptions,
    ) -> Result<Source, &'static str> {
        let is_huge = mapping.page_size() != uzone_os::probe::page_size();
        let reasons = [
            (options.answer == Answer::Reader, "that was asked for"),
            (options.kernel_faults == KernelFaults::Required, "faults of system calls are wanted"),
            (self.leaves_sigbus, "the engine must not handle SIGBUS"),
            (is_huge, "its pages are huge"),
        ];
        if let Some((_, reason)) = reasons.into_iter().find(|(is_so, _)| *is_so) {
            return Err(reason);
        }
        backing.in_thread().ok_or("its backing runs code that a handler of a signal must not run")
    }

    /// Lets the reader with the fewest mappings answer the faults of one.
    pub(crate) fn attach(
        &self,
        faults: Arc<dyn Faults>,
        core: Arc<Core>,
        sources: Sources,
        options: &LazyOptions,
    ) -> Result<Attached, MapError> {
        let Threads { pool, readers } = &*self.threads;
        let event_loop = readers.iter().min_by_key(|reader| reader.readers());
        let event_loop = event_loop.unwrap_or_else(|| unreachable!("an engine has a reader"));
        let reader = MappingReader::new(faults, core, sources, pool, options);
        event_loop.join(reader).map_err(MapError::Thread)
    }
}

/// Returns how many pages `len` has, which cuts none.
fn pages_in(len: ByteLen, page: PageSize) -> Result<PageCount, MapError> {
    page.pages_in(len).map_err(|_| MapError::CutsPage { len, page: ByteLen::new(page.bytes()) })
}

/// Lets the threads of a mapping answer its faults, if they can.
fn answer_in_thread(
    answering: Answering,
    memory: &OwnMemory,
    core: &Core,
    options: &LazyOptions,
) -> Result<Result<Arc<InThread>, &'static str>, MapError> {
    let (place, source) = match answering {
        Ok(found) => found,
        Err(reason) => return Ok(Err(reason)),
    };
    let tracker = memory.tracker.as_ref();
    let answers = Answers {
        tracks_writes: tracker.is_some(),
        states: tracker.and_then(Tracker::states).cloned(),
        records: options.trace,
        handover: memory.handover.clone(),
        waits: options.deadline.is_none(),
        pace: options.budget.pace(),
        ..Answers::new(source, core.planner().clone())
    };
    let in_thread = InThread::start(place, memory.registered.clone(), answers);
    // No reader can take its place: this userfaultfd reports nothing.
    let in_thread = Arc::new(in_thread?);
    core.answered_in_thread(&in_thread);
    Ok(Ok(in_thread))
}

/// Refuses a backing that is shorter than `asked`, or cannot fill pages of `page`.
pub(crate) fn check_backing(
    backing: &dyn Backing,
    asked: ByteLen,
    page: PageSize,
) -> Result<(), MapError> {
    if let Some(has) = backing.byte_len()
        // The last page may be filled in part.
        && asked > has.align_up(page.bytes())?
    {
        return Err(MapError::TooShort { asked, has });
    }
    Ok(())
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("zone", &self.zone)
            .field("readers", &self.threads.readers.len())
            .finish_non_exhaustive()
    }
}

/// Returns the alignment of the addresses of a mapping, so that windows are the same by addresses and by
/// offsets and each lies in one page table: 2 MiB, or less for a mapping that is in one page table anyhow.
fn table_align(len: ByteLen) -> ByteLen {
    let page = uzone_os::probe::page_size().bytes();
    ByteLen::new(
        len.get().checked_next_power_of_two().map_or(2 << 20, |len| len.clamp(page, 2 << 20)),
    )
}

/// Maps the addresses, and returns which faults have to be registered.
fn map_memory(
    len: ByteLen,
    file: Option<(OwnedFd, Sharing)>,
    options: &LazyOptions,
) -> Result<(Mapping, Modes, Features), MapError> {
    match (file, options.huge) {
        (None, None) => {
            let align = Some(table_align(len));
            let how = Anonymous { huge: HugeAdvice::Default, align, ..Anonymous::default() };
            Ok((Mapping::anonymous(len, how)?, Modes::MISSING, Features::POISON))
        }
        (None, Some(size)) => {
            let features = Features::POISON | Features::MISSING_HUGETLB;
            Ok((Mapping::hugetlb(len, size)?, Modes::MISSING, features))
        }
        (Some(_), Some(_)) => {
            Err(MapError::Backing { reason: "a memory file has the pages that it was made of" })
        }
        (Some((fd, sharing)), None) => {
            let align = table_align(len);
            let mapping = Mapping::file_aligned(fd, 0, len, Access::ReadWrite, sharing, align)?;
            let is_huge = mapping.page_size() != uzone_os::probe::page_size();
            let features = Features::POISON
                | if is_huge {
                    Features::MINOR_HUGETLB | Features::MISSING_HUGETLB
                } else {
                    Features::MINOR_SHMEM | Features::MISSING_SHMEM
                };
            let modes = Modes::MISSING | Modes::MINOR;
            Ok((mapping, modes, features))
        }
    }
}

//! Memory of this process that is mapped lazily: [`Engine`], [`LazyMapping`].
//!
//! Cost: a mapping is one userfaultfd, one thread, and 8 bytes of descriptor a page, of which only
//! those are written whose page was touched.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use uzone_os::uffd::{Doorbell, Features, KernelFaults, Modes, Registered, Uffd, UffdCall};
use uzone_os::{Access, Addr, Anonymous, HugeAdvice, HugeSize, Mapping, RangeError};
use uzone_pages::{Advice, ByteLen, Content, FaultAround, FaultPattern, PageSize};

use crate::backing::{Backing, Memory};
use crate::collapse::{Collapser, Settler};
use crate::contents::Contents;
use crate::core::{Core, Counters, Hands, Policy};
use crate::dirty::{Tracker, WriteTracking};
use crate::error::{LazyError, MapError};
use crate::kernel::Kernel;
use crate::pool::Pool;
use crate::reader::{Control, Reader};
use crate::told::Told;

/// How many bytes are read from a backing at once.
pub(crate) const STAGING: u64 = 256 << 10;
/// How long [`LazyMapping::populate`] waits for a page that another thread is producing.
const PATIENCE: Duration = Duration::from_secs(30);

/// How memory is mapped lazily.
#[derive(Clone, Debug)]
pub struct LazyOptions {
    /// How it will be read.
    pub advice: Advice,
    /// How much a read fault maps, or starts with where windows grow.
    pub fault_around: FaultAround,
    /// Whether pages are huge, of the pool of that size. Only memory of its own can be told so.
    pub huge: Option<HugeSize>,
    /// For how long the thread that answers looks for more before it sleeps. It burns that much of
    /// a processor after each burst of faults, and saves a wake-up.
    pub spin: Duration,
    /// Whether faults of system calls have to be answered too.
    pub kernel_faults: KernelFaults,
    /// Whether writes are tracked, and how.
    pub track_writes: Option<WriteTracking>,
    /// After how long without a page that was filled a thread of low priority makes huge pages of what
    /// is there, as [`LazyMapping::collapse`] does; `None` for never.
    pub collapse_when_settled: Option<Duration>,
}

impl Default for LazyOptions {
    fn default() -> Self {
        Self {
            advice: Advice::default(),
            fault_around: FaultAround::default(),
            huge: None,
            spin: Duration::from_micros(20),
            kernel_faults: KernelFaults::IfAllowed,
            track_writes: None,
            collapse_when_settled: None,
        }
    }
}

/// What makes lazy mappings and produces their pages: threads that wait for devices, shared by all
/// mappings.
pub struct Engine {
    pool: Arc<Pool>,
}

impl Engine {
    /// Starts `threads` threads that produce pages which are not at hand.
    ///
    /// # Errors
    /// [`MapError::Thread`] if one is refused.
    pub fn new(threads: NonZeroUsize) -> Result<Self, MapError> {
        let pool = Pool::start(threads).map_err(MapError::Thread)?;
        Ok(Self { pool: Arc::new(pool) })
    }

    /// Maps `len` bytes of `backing`. Nothing is read before somebody touches it.
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
        let host = uzone_os::probe::page_size();
        if let Some(has) = backing.byte_len() {
            // The last page may be filled in part.
            if len > has.align_up(host.bytes())? {
                return Err(MapError::TooShort { asked: len, has });
            }
        }
        let memory = backing.memory().map_err(MapError::Thread)?;
        let (mapping, mut modes, mut required) = map_memory(len, memory, options)?;
        if let Some(tracking) = options.track_writes {
            (modes, required) = tracking.needs(&mapping, modes, required)?;
        }
        let page = mapping.page_size();
        let pages = page
            .pages_in(len)
            .map_err(|_| MapError::CutsPage { len, page: ByteLen::new(page.bytes()) })?;
        if !backing.takes_pages_of(page) {
            return Err(MapError::Backing {
                reason: "its parts start or end inside of such a page",
            });
        }
        let uffd = Uffd::open(required, Features::THREAD_ID, options.kernel_faults)?;
        let contents = Contents::new(pages)?;
        let memory = Arc::new(Registered::new(Arc::new(uffd), mapping, modes)?);
        let pattern = FaultPattern::new(
            contents.area(),
            options.advice,
            options.fault_around,
            backing.largest_window(),
        );
        let tracker = match options.track_writes {
            Some(tracking) => Some(Arc::new(Tracker::new(tracking, memory.clone(), pages)?)),
            None => None,
        };
        let zeroes_by_copy = !memory.calls().takes(UffdCall::ZeroPage)
            || tracker.as_ref().is_some_and(|tracker| tracker.copies_zeroes());
        let policy = Policy { zeroes_by_copy, removed_is_zero: false };
        let kernel: Arc<dyn Kernel> = match &tracker {
            Some(tracker) => tracker.clone(),
            None => memory.clone(),
        };
        let core = Arc::new(Core::new(kernel, backing, contents, page, policy, pattern));
        let room = ByteLen::new(STAGING.max(page.bytes())).to_usize()?;
        let bell = Doorbell::new().map_err(MapError::Thread)?;
        let control = Arc::new(Control { bell, stop: AtomicBool::new(false) });
        let reader = Reader {
            told: Told::Own(memory.clone()),
            core: core.clone(),
            pool: Some(self.pool.clone()),
            control: control.clone(),
            spin: options.spin,
            room,
        };
        let thread = Builder::new()
            .name("uzone-fault".to_owned())
            .spawn(move || reader.run())
            .map_err(MapError::Thread)?;
        let sees_kernel_faults = memory.uffd().sees_kernel_faults();
        let thread = Some(thread);
        let mut mapping = LazyMapping {
            memory,
            core,
            control,
            thread,
            room,
            sees_kernel_faults,
            tracker,
            settler: None,
        };
        if let Some(quiet) = options.collapse_when_settled {
            let settler = Settler::start(mapping.collapser(), quiet).map_err(MapError::Thread)?;
            mapping.settler = Some(settler);
        }
        Ok(mapping)
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

/// Maps the addresses, and says which faults they have to tell of.
fn map_memory(
    len: ByteLen,
    memory: Memory,
    options: &LazyOptions,
) -> Result<(Mapping, Modes, Features), MapError> {
    match (memory, options.huge) {
        (Memory::Own, None) => {
            // A window of any size is then one range of one page table.
            let align = (len.get() >= 2 << 20).then_some(ByteLen::mib(2));
            let how = Anonymous { huge: HugeAdvice::Default, align, ..Anonymous::default() };
            Ok((Mapping::anonymous(len, how)?, Modes::MISSING, Features::POISON))
        }
        (Memory::Own, Some(size)) => {
            let features = Features::POISON | Features::MISSING_HUGETLB;
            Ok((Mapping::hugetlb(len, size)?, Modes::MISSING, features))
        }
        (Memory::File { .. }, Some(_)) => {
            Err(MapError::Backing { reason: "a memory file has the pages that it was made of" })
        }
        (Memory::File { fd, sharing }, None) => {
            let mapping = Mapping::file(fd, 0, len, Access::ReadWrite, sharing)?;
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

/// What [`LazyMapping::populate`] makes present.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Populate {
    /// What is at hand. It never blocks.
    Cached,
    /// Every page.
    All,
}

/// Counts of what happened to a mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FaultStats {
    /// Faults that were told.
    pub faults: u64,
    /// Those of them for pages that the page cache had.
    pub minor: u64,
    /// Those for a page that somebody was producing already.
    pub coalesced: u64,
    /// Those for a page that was there by the time they were read.
    pub retouched: u64,
    /// Pages that were put in place at once because somebody waited for them.
    pub demand: u64,
    /// Pages that were put in place around those.
    pub around: u64,
    /// Pages that were put in place by [`LazyMapping::populate`].
    pub populated: u64,
    /// Pages that were not at hand and went to the threads that wait for devices.
    pub queued: u64,
    /// How often the kernel or a full queue put a page off.
    pub put_off: u64,
    /// Pages that are bad.
    pub poisoned: u64,
    /// Pages that were given back.
    pub evicted: u64,
    /// Neighbours that were not put in place because too many faults came at once.
    pub left_out: u64,
    /// Pages that were put in place as zeroes by the kernel, and take no memory until they are
    /// written, where the kernel has a zero page for the memory.
    pub zeroes: u64,
    /// Writes to pages that were protected, that were told; they are not among the faults.
    pub write_protect: u64,
    /// Huge pages that were made of small ones.
    pub collapsed: u64,
}

impl FaultStats {
    pub(crate) fn of(core: &Core) -> Self {
        let counters = core.counters();
        // Relaxed: each is a statistic of its own.
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Self {
            faults: get(&counters.faults),
            minor: get(&counters.minor),
            coalesced: get(&counters.coalesced),
            retouched: get(&counters.retouched),
            demand: get(&counters.demand),
            around: get(&counters.around),
            populated: get(&counters.populated),
            queued: get(&counters.queued),
            put_off: get(&counters.put_off),
            poisoned: get(&counters.poisoned),
            evicted: get(&counters.evicted),
            left_out: get(&counters.left_out),
            zeroes: get(&counters.zeroes),
            write_protect: get(&counters.write_protect),
            collapsed: get(&counters.collapsed),
        }
    }
}

/// Memory of this process whose pages come from a backing when they are touched.
///
/// Dropping it unmaps it. A thread of foreign code that still waits in it then gets a signal, and
/// never a page of zeroes.
pub struct LazyMapping {
    memory: Arc<Registered>,
    core: Arc<Core>,
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
    room: usize,
    sees_kernel_faults: bool,
    tracker: Option<Arc<Tracker>>,
    settler: Option<Settler>,
}

impl LazyMapping {
    fn mapping(&self) -> &Mapping {
        self.memory.mapping()
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// Returns how many bytes are read from a backing at once, or written to it.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    pub(crate) fn collapser(&self) -> Collapser {
        let (core, memory) = (self.core.clone(), self.memory.clone());
        Collapser { core, memory, is_tracked: self.tracker.is_some() }
    }

    pub(crate) fn tracking(&self) -> Option<&Tracker> {
        self.tracker.as_deref()
    }

    /// Returns where it starts, for foreign code that reads it.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.mapping().addr()
    }

    /// Returns how long it is; never zero.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        self.mapping().len()
    }

    /// Returns whether it has no byte, which never holds.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the size of a page.
    #[must_use]
    pub fn page_size(&self) -> PageSize {
        self.core.page_size()
    }

    /// Returns whether system calls may be given missing pages of it; otherwise they fail with
    /// `EFAULT` there.
    #[must_use]
    pub fn sees_kernel_faults(&self) -> bool {
        self.sees_kernel_faults
    }

    /// Copies bytes out. What is missing is produced, and the call waits for it; a page that is
    /// bad raises `SIGBUS`, so a caller whose backing may fail asks [`LazyMapping::populate`] first.
    ///
    /// # Errors
    /// [`LazyError::Access`] unless all bytes are inside.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), LazyError> {
        Ok(self.mapping().read_at(offset, out)?)
    }

    /// Copies bytes in. What is missing is produced first, as by [`LazyMapping::read_at`].
    ///
    /// # Errors
    /// [`LazyError::Access`] unless all bytes are inside.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), LazyError> {
        Ok(self.mapping().write_at(offset, bytes)?)
    }

    /// Changes how faults are answered from now on.
    pub fn advise(&self, advice: Advice, fault_around: FaultAround) {
        self.core.pattern().set(advice, fault_around);
    }

    /// Returns how much a read fault starts with now.
    #[must_use]
    pub fn fault_around(&self) -> FaultAround {
        self.core.pattern().size()
    }

    /// Returns what is known about the page that holds byte `offset`, or `None` if there is none.
    #[must_use]
    pub fn content(&self, offset: u64) -> Option<Content> {
        let page = offset >> self.page_size().shift();
        (page < self.core.contents().area().end().get()).then(|| self.core.contents().get(page))
    }

    /// Returns what happened so far.
    #[must_use]
    pub fn stats(&self) -> FaultStats {
        FaultStats::of(&self.core)
    }

    /// Returns the pages of a range of bytes that starts and ends at pages.
    pub(crate) fn pages(&self, range: &Range<u64>) -> Result<Range<u64>, RangeError> {
        let &Range { start, end } = range;
        let (page, len_bytes) = (self.page_size(), self.len().get());
        if start >= end {
            return Err(RangeError::Empty { start, end });
        }
        if end > len_bytes {
            return Err(RangeError::Beyond { start, end, len_bytes });
        }
        if (start | end) & (page.bytes() - 1) != 0 {
            return Err(RangeError::CutsPage { start, end, page });
        }
        Ok(start >> page.shift()..end >> page.shift())
    }

    /// Makes pages of a range present before anybody touches them, in the calling thread. Returns how
    /// many pages were put in place.
    ///
    /// # Errors
    /// [`LazyError::Poisoned`] or [`LazyError::Backing`] at the first page that cannot be had,
    /// [`LazyError::TimedOut`] at one that another thread did not produce in time; pages before it
    /// are present. [`LazyError::Range`] if the range is not inside, or cuts a page.
    pub fn populate(&self, range: Range<u64>, what: Populate) -> Result<u64, LazyError> {
        let pages = self.pages(&range)?;
        let mut hands = Hands::new(self.room);
        let step = FaultAround::MAX.pages(self.page_size()).get();
        let mut filled = 0;
        let mut at = pages.start;
        while at < pages.end {
            let window = at..pages.end.min(at + step);
            at = window.end;
            filled += self.core.map_ready(window.clone(), &mut hands);
            if what == Populate::All {
                for page in window {
                    filled += self.produce(page, &mut hands)?;
                }
            }
        }
        Counters::add(&self.core.counters().populated, filled);
        Ok(filled)
    }

    /// Makes one page present, or waits until somebody has. Returns whether it did itself.
    fn produce(&self, page: u64, hands: &mut Hands) -> Result<u64, LazyError> {
        let offset = page << self.page_size().shift();
        let give_up = Instant::now() + PATIENCE;
        loop {
            match self.core.contents().get(page) {
                Content::Present | Content::Zero => return Ok(0),
                Content::Poisoned => return Err(LazyError::Poisoned { offset }),
                Content::Unknown | Content::Absent => {
                    if self.core.contents().claim(page) {
                        return match self.core.produce(page, hands) {
                            Ok(()) => Ok(1),
                            Err(cause) => Err(LazyError::Backing { offset, cause }),
                        };
                    }
                }
                Content::Filling | Content::Zeroing | Content::Removed => {}
            }
            if Instant::now() >= give_up {
                return Err(LazyError::TimedOut { offset });
            }
            std::thread::yield_now();
        }
    }

    /// Gives the pages of a range back; they are produced anew when somebody touches them. Pages that
    /// are being produced stay, and so may one that was touched a moment ago. Returns how many were
    /// given back.
    ///
    /// Without [`LazyOptions::track_writes`], what was written to them is lost, unless it went to a
    /// memory file. With it, pages that were written stay, and [`LazyMapping::dirty`] says which those
    /// are; [`LazyMapping::write_back`] makes them clean, [`LazyMapping::evict_all`] drops them.
    ///
    /// # Errors
    /// [`LazyError`] if the range is not inside, cuts a page, or the kernel refuses;
    /// [`LazyError::CannotEvict`] where writes are tracked asynchronously and a page that is written
    /// meanwhile could be lost.
    pub fn evict(&self, range: Range<u64>) -> Result<u64, LazyError> {
        let pages = self.pages(&range)?;
        match self.tracking() {
            Some(tracker) => self.evict_clean(tracker, pages),
            None => self.evict_pages(pages),
        }
    }

    /// Gives pages back, whatever is in them.
    pub(crate) fn evict_pages(&self, pages: Range<u64>) -> Result<u64, LazyError> {
        let contents = self.core.contents();
        let mut evicted = 0;
        let mut at = pages.start;
        let mut answer = Ok(());
        while at < pages.end && answer.is_ok() {
            // A run of pages that are there and that nobody holds: from here until they are absent
            // again, whoever faults on one waits for the wake below.
            let start = at;
            while at < pages.end && contents.advance(at, Content::Present, Content::Removed) {
                at += 1;
            }
            if start == at {
                at += 1;
                continue;
            }
            let run = self.core.bytes(start..at);
            answer = self.mapping().discard(run.clone());
            if let (Ok(()), Some(tracker)) = (&answer, self.tracking()) {
                tracker.evicted(&(start..at));
            }
            let next = if answer.is_ok() { Content::Absent } else { Content::Filling };
            for page in start..at {
                if contents.advance(page, Content::Removed, next) && next == Content::Filling {
                    // The kernel refused, so the pages are as they were.
                    let _ = contents.advance(page, Content::Filling, Content::Present);
                }
            }
            if answer.is_ok() {
                evicted += at - start;
            }
            let _ = self.memory.wake(run);
        }
        Counters::add(&self.core.counters().evicted, evicted);
        answer?;
        Ok(evicted)
    }
}

impl Drop for LazyMapping {
    fn drop(&mut self) {
        // It may touch pages, which somebody has to fill until it has stopped.
        self.settler = None;
        // Release pairs with the Acquire of the reader.
        self.control.stop.store(true, Ordering::Release);
        if self.control.bell.ring().is_err() {
            // The reader would never stop, and the memory would never be given back; that leaks,
            // and harms nobody.
            return;
        }
        if let Some(thread) = self.thread.take() {
            // It was printed when it happened.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for LazyMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LazyMapping")
            .field("mapping", self.mapping())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

//! The options of an engine and of a mapping: [`EngineOptions`], [`LazyOptions`].

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::time::Duration;

use uzone_os::uffd::KernelFaults;
use uzone_pages::{Advice, FaultAround, PageSize};
use uzone_zone::Zone;

use crate::engine::budget::Budget;
use crate::error::Failure;

/// How many readers an engine has by default, if it may use as many CPUs.
const READERS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(3);

/// Who answers the faults of a mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The thread that takes a fault, where faults of system calls cannot be answered in any case
    /// ([`KernelFaults`]) and the mapping allows it; otherwise a reader.
    #[default]
    Auto,
    /// The thread that takes a fault, by a handler of `SIGBUS`, if the mapping allows it: then no other
    /// thread has to be woken. [`LazyMapping::answered_in_thread`](crate::LazyMapping::answered_in_thread)
    /// returns whether it does.
    ///
    /// A system call that is given a missing page fails with `EFAULT`: pin the pages first
    /// ([`LazyMapping::pin`](crate::LazyMapping::pin),
    /// [`LazyMapping::pin_for_write`](crate::LazyMapping::pin_for_write)). A thread that
    /// blocks `SIGBUS` dies of a fault. Never for memory of a KVM guest.
    InThread,
    /// A reader, another thread.
    Reader,
}

/// How writes are tracked. Every page is installed write-protected, and the first write to it removes the
/// protection; later ones cost nothing.
///
/// The time of the first write to a page of 4 KiB, as the median of 64 MiB in a virtual machine with two
/// busy CPUs on Linux 6.18, where one takes 0.1 to 0.3 us without tracking:
///
/// | | `Async` | `Sync` |
/// |---|---|---|
/// | at random | 3 us | 17 us |
/// | in order | 2.3 us | 1.6 us: up to 16 pages at once |
/// | making a dirty page clean | 0.15 us | 2.7 us where they are scattered |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteTracking {
    /// The kernel records them in the page tables. Only for private memory, whose clean pages are not
    /// evicted then ([`LazyError::CannotEvict`](crate::LazyError::CannotEvict)).
    Async,
    /// The first write to a page is an event. A writer that goes on page by page gets more pages at
    /// once from the fourth on, up to 16, which all count as written. It costs a byte a page of memory,
    /// and pages of zeroes are copied.
    Sync,
}

/// The fate of the threads that wait for a page which cannot be produced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The page is bad: a thread that touches it gets `SIGBUS`.
    #[default]
    Poison,
    /// They wait on, and so does each thread that touches a page which cannot be produced, until their
    /// process ends.
    Hold,
}

/// Decides about pages that cannot be produced.
#[derive(Clone)]
pub(crate) struct OnFailure(pub(crate) Arc<dyn Fn(&Failure) -> Refusal + Send + Sync>);

impl fmt::Debug for OnFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnFailure").finish_non_exhaustive()
    }
}

/// How memory is mapped lazily.
#[derive(Clone, Debug, Default)]
pub struct LazyOptions {
    pub(crate) advice: Advice,
    pub(crate) fault_around: FaultAround,
    pub(crate) huge: Option<PageSize>,
    pub(crate) process: Option<NonZeroU32>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) budget: Budget,
    pub(crate) trace: usize,
    pub(crate) kernel_faults: KernelFaults,
    pub(crate) track_writes: Option<WriteTracking>,
    pub(crate) on_failure: Option<OnFailure>,
    pub(crate) answer: Answer,
    pub(crate) dumps: bool,
}

impl LazyOptions {
    /// Sets the expected access pattern: [`Advice::Auto`] by default.
    #[must_use]
    pub fn advice(mut self, advice: Advice) -> Self {
        self.advice = advice;
        self
    }

    /// Sets how much a read fault maps, or starts with where windows grow: 64 KiB by default.
    #[must_use]
    pub fn fault_around(mut self, fault_around: FaultAround) -> Self {
        self.fault_around = fault_around;
        self
    }

    /// Sets that pages are huge, of the hugetlb pool of this size, which reserves them when the memory is mapped.
    /// A fault on any part of a huge page fills the whole page. By default pages are small, and
    /// [`LazyMapping::collapse`](crate::LazyMapping::collapse) can make huge pages of them later. A memory file
    /// keeps its own page size.
    #[must_use]
    pub fn huge(mut self, pool: impl Into<Option<PageSize>>) -> Self {
        self.huge = pool.into();
        self
    }

    /// Sets whose memory [`Engine::adopt`](crate::Engine::adopt) takes: the number of a process, or of a thread
    /// that has most of its faults. While that is kept to one CPU and faults are answered faster there, the reader
    /// goes to that CPU, if it may use it ([`FaultStats::shares_cpu`](crate::FaultStats::shares_cpu)). Without
    /// it, the reader runs where the scheduler puts it.
    #[must_use]
    pub fn process(mut self, process: u32) -> Self {
        self.process = NonZeroU32::new(process);
        self
    }

    /// Limits how long a page may take to be produced: after that it is poisoned, and the threads that wait
    /// for it get `SIGBUS`. By default there is no limit, and a time beyond the range of the clock is none.
    #[must_use]
    pub fn deadline(mut self, deadline: impl Into<Option<Duration>>) -> Self {
        self.deadline = deadline.into();
        self
    }

    /// Limits the work for the mapping, so that others of its reader have their turn: [`Budget`]. By
    /// default there is no limit, and readers are fair by the time that they take.
    #[must_use]
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = budget;
        self
    }

    /// Sets how many of the last faults are recorded, each in 48 bytes and in 32 more where threads answer
    /// themselves, for [`LazyMapping::take_trace`](crate::LazyMapping::take_trace): none by default, at most 16,777,216.
    #[must_use]
    pub fn trace(mut self, trace: usize) -> Self {
        self.trace = trace;
        self
    }

    /// Sets whether faults of system calls have to be answered too: [`KernelFaults::IfAllowed`] by default.
    #[must_use]
    pub fn kernel_faults(mut self, kernel_faults: KernelFaults) -> Self {
        self.kernel_faults = kernel_faults;
        self
    }

    /// Sets how writes are tracked: not at all by default.
    #[must_use]
    pub fn track_writes(mut self, track_writes: impl Into<Option<WriteTracking>>) -> Self {
        self.track_writes = track_writes.into();
        self
    }

    /// Sets who answers the faults: [`Answer::Auto`] by default.
    #[must_use]
    pub fn answer(mut self, answer: Answer) -> Self {
        self.answer = answer;
        self
    }

    /// Sets whether core dumps include the memory. They leave it out by default, as they do a mapping of a file: most of its
    /// bytes are the backing's, and the kernel would look for each page of it, present or not.
    #[must_use]
    pub fn dumps(mut self, dumps: bool) -> Self {
        self.dumps = dumps;
        self
    }

    /// Sets a closure that is called with a page that cannot be produced, before a thread that waits for it learns
    /// of that: by default nothing, and the page is made bad. A virtual machine whose monitor emulates an
    /// access reads zeroes from a bad page, so its server ends the machine here and returns
    /// [`Refusal::Hold`]. Once that was returned, no page of the mapping is made bad any more.
    ///
    /// It is called by the threads that answer faults, which answer nothing else meanwhile.
    #[must_use]
    pub fn on_failure(
        mut self,
        decide: impl Fn(&Failure) -> Refusal + Send + Sync + 'static,
    ) -> Self {
        self.on_failure = Some(OnFailure(Arc::new(decide)));
        self
    }
}

/// The zone and the threads of an engine.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    pub(crate) zone: Option<Zone>,
    pub(crate) producers: Option<NonZeroUsize>,
    pub(crate) readers: Option<NonZeroUsize>,
    pub(crate) leaves_sigbus: bool,
}

impl EngineOptions {
    /// Sets the zone that memory is bound in: a new zone by default.
    #[must_use]
    pub fn zone(mut self, zone: Zone) -> Self {
        self.zone = Some(zone);
        self
    }

    /// Sets how many I/O threads may produce pages that are not ready at once. Each waits for one page at a time.
    /// As many may read ahead; one thread more than that is started, so that neither waits for the other. The
    /// default is the number of CPUs, but at least 2 and at most 4; more are for devices that serve more requests
    /// at once, up to 1024. A backing must not wait for pages of other memory of the same engine: such a page is bad.
    #[must_use]
    pub fn producers(mut self, producers: NonZeroUsize) -> Self {
        self.producers = Some(producers);
        self
    }

    /// Sets the number of reader threads, which answer faults, each for its share of the mappings. The
    /// default is the number of CPUs, but at most 4; at most 1024 are allowed.
    #[must_use]
    pub fn readers(mut self, readers: NonZeroUsize) -> Self {
        self.readers = Some(readers);
        self
    }

    /// Has the engine start threads of its own, as many as by default. Without this and the other choices of
    /// threads, the engines of a process share theirs, which have the CPUs and the restrictions of the
    /// thread that made the first of them. Then a backing whose [`map_pages`](crate::Backing::map_pages)
    /// waits, or whose `fault` hangs, holds up the mappings of other engines too.
    #[must_use]
    pub fn own_threads(self) -> Self {
        self.producers(default_producers()).readers(default_readers())
    }

    /// Sets whether mappings may have the handler of `SIGBUS` installed, for faults that are answered by the
    /// threads that take them ([`Answer`]): they may by default.
    #[must_use]
    pub fn handles_sigbus(mut self, handles_sigbus: bool) -> Self {
        self.leaves_sigbus = !handles_sigbus;
        self
    }
}

pub(crate) fn default_producers() -> NonZeroUsize {
    let two = NonZeroUsize::MIN.saturating_add(1);
    default_readers().max(two)
}

pub(crate) fn default_readers() -> NonZeroUsize {
    std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN).min(READERS)
}

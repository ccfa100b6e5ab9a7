//! Memory whose faults are answered: [`LazyMapping`], of this process or of another.

use std::sync::Arc;

use uzone_pages::{Advice, Content, FaultAround};

use crate::engine::core::Core;
use crate::engine::event_loop::Attached;
use crate::error::Failure;
use crate::memory::own::Own;
use crate::stats::FaultStats;
use crate::trace::{FaultRecord, Latency};

/// Memory of this process whose pages come from a backing when they are touched. [`AdoptedMemory`](crate::AdoptedMemory)
/// is memory of another process, by the other parameter.
///
/// Dropping it unmaps it, as soon as no page of it is pinned or being produced. A thread of foreign
/// code that still waits in it then gets a signal, and never a page of zeroes.
///
/// # Examples
///
/// ```no_run
/// use std::sync::Arc;
/// use uzone_fault::{BackingError, Engine, EngineOptions, FunctionBacking, LazyOptions};
/// use uzone_pages::ByteLen;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Each page is full of the lowest byte of its number.
/// let backing = FunctionBacking::quick(|offset, pages: &mut [u8]| {
///     for (page, bytes) in (offset >> 12..).zip(pages.chunks_mut(4096)) {
///         bytes.fill(page.to_le_bytes()[0]);
///     }
///     Ok::<_, BackingError>(())
/// });
/// let engine = Engine::with(EngineOptions::default())?;
/// let memory = engine.map(ByteLen::gib(64), Arc::new(backing), &LazyOptions::default())?;
/// let mut byte = [0];
/// memory.read_at(200 << 12, &mut byte)?;
/// assert_eq!(byte, [200]);
///
/// memory.populate(0..1 << 20)?; // present before it is touched
/// let pinned = memory.pin(0..4096)?; // produced if it is absent, and not evicted
/// memory.evict(0..1 << 20)?; // all but the pinned page
/// # drop(pinned);
/// # Ok(())
/// # }
/// ```
pub struct LazyMapping<M = Own> {
    // Dropped first: no fault is answered afterwards, and threads of this process that wait get a signal.
    /// Some, until it stops.
    pub(crate) attached: Option<Attached>,
    pub(crate) memory: M,
    pub(crate) core: Arc<Core>,
}

impl<M> LazyMapping<M> {
    /// Returns the counts so far.
    #[must_use]
    pub fn stats(&self) -> FaultStats {
        self.core.stats()
    }

    /// Returns how long faults took so far, by class and outcome. Those that threads answer
    /// themselves are among them with [`LazyOptions::trace`](crate::LazyOptions::trace), as far as
    /// the trace had room for them since it was looked at last.
    #[must_use]
    pub fn latencies(&self) -> Vec<Latency> {
        self.core.all_recorded().latencies()
    }

    /// Takes the faults that were recorded since the last call: the last
    /// [`LazyOptions::trace`](crate::LazyOptions::trace) of them, in the order in which they were
    /// answered, and how many were forgotten before them.
    #[must_use]
    pub fn take_trace(&self) -> (Vec<FaultRecord>, u64) {
        self.core.all_recorded().take_trace()
    }

    /// Returns the last page that could not be produced for a waiting thread, and why.
    #[must_use]
    pub fn last_failure(&self) -> Option<Failure> {
        self.core.recorder.last_failure()
    }

    /// Changes how faults are answered from now on.
    pub fn advise(&self, advice: Advice, fault_around: FaultAround) {
        self.core.planner().set(advice, fault_around);
    }

    /// Returns the state of the page with byte `offset` of the mapping, or of the backing where the memory is another
    /// process's. `None` if there is none.
    #[must_use]
    pub fn content(&self, offset: u64) -> Option<Content> {
        self.core.page_at(offset).map(|page| self.core.content(page))
    }
}

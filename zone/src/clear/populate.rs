//! Making a region present before it is touched, and giving it back: [`Region::populate`],
//! [`Region::punch`].
//!
//! A first touch costs an exception for each page; asking for a range costs half of that, several
//! threads share it, and a huge page costs no more faults than a small one. So several threads ask, on
//! the node that each of them keeps to, for huge pages where there are any. What would fail after
//! minutes is looked up before: a memory limit that leaves too little, a pool of huge pages that is too
//! small, transparent huge pages that are switched off. Others take memory too, also under the same
//! limit, and beyond that the kernel kills a process instead of answering. So what is left is looked up
//! again and again ([`Watched`]), and the request ends before that with an error that states how much is
//! present. The kernel may still refuse a range halfway, of a pool for example; that is the same.
//!
//! Where huge pages are preferred, base pages fill in for those that there are not. The report states how
//! much is which.
//!
//! Units: bytes from the start of the region. Cost: what the kernel takes to clear the pages; a few
//! system calls and reads of `/proc` and `/sys` beside that.

mod compaction;
mod watched;

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use uzone_os::hugepages;
use uzone_os::memory::{self, Available};
use uzone_os::numa;
use uzone_os::{MappingError, PopulateHow, Populated, SystemRoot};
use uzone_pages::ByteLen;

use crate::backing::Backing;
use crate::error::WriteError;
use crate::progress::OnProgress;
use crate::region::Region;

use compaction::Compaction;
use watched::Watched;

/// How much is asked for first where base pages will not do: a few huge pages of the common size.
const TRIAL_BYTES: u64 = 8 << 20;

/// Whether memory is to be in huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Huge {
    /// It has to be, all of it that huge pages fit into; else it is an error.
    Required,
    /// As far as there are any. The report states how far that was.
    #[default]
    Preferred,
    /// As [`Huge::Preferred`], until the kernel has to move other memory away for them and that takes five times as
    /// long as base pages do; the rest is in base pages then, and so are the first 2 MiB, by which that is measured.
    Watched,
    /// Not where that can be had: memory of a hugetlb pool or a DAX device is what it is.
    Never,
}

/// The options of populating. By default: a thread for each CPU, on all nodes; huge pages if there are any;
/// without an end of time.
#[derive(Clone, Debug, Default)]
pub struct PopulateOptions {
    threads_per_node: Option<NonZeroUsize>,
    node: Option<u32>,
    huge: Huge,
    within: Option<Duration>,
    spare_percent: u8,
    chunk: Option<ByteLen>,
    present: OnPresent,
    progress: OnProgress,
    cancel: Arc<AtomicBool>,
}

/// The function that is called with each range that is present.
#[derive(Clone, Default)]
struct OnPresent(Option<Arc<dyn Fn(Range<u64>) + Send + Sync>>);

impl fmt::Debug for OnPresent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OnPresent").field(&self.0.is_some()).finish()
    }
}

impl PopulateOptions {
    /// Sets how many threads there are for each node, instead of one for each of its CPUs that this
    /// process may use.
    #[must_use]
    pub fn threads_per_node(mut self, threads: NonZeroUsize) -> Self {
        self.threads_per_node = Some(threads);
        self
    }

    /// Takes memory from one node alone, as far as it has any: only its CPUs touch it.
    #[must_use]
    pub fn node(mut self, node: u32) -> Self {
        self.node = Some(node);
        self
    }

    /// Sets whether memory is to be in huge pages.
    #[must_use]
    pub fn huge(mut self, huge: Huge) -> Self {
        self.huge = huge;
        self
    }

    /// Sets after how long no more is begun. What each thread has begun, 8 MiB at most, it finishes.
    #[must_use]
    pub fn within(mut self, time: Duration) -> Self {
        self.within = Some(time);
        self
    }

    /// Takes what is called after every chunk, by the thread that called [`Region::populate`], with how
    /// many bytes are present and how many will be, in ascending order.
    #[must_use]
    pub fn on_progress(
        mut self,
        progress: impl Fn(ByteLen, ByteLen) + Send + Sync + 'static,
    ) -> Self {
        self.progress = OnProgress::new(progress);
        self
    }

    /// Leaves a share of the CPUs alone, in percent, but takes one at least. A number of threads that was set is not
    /// changed by it.
    #[must_use]
    pub fn spare(mut self, percent: u8) -> Self {
        self.spare_percent = percent.min(100);
        self
    }

    /// Sets how much each thread asks for at a time, at most.
    #[must_use]
    pub fn chunk(mut self, most: ByteLen) -> Self {
        self.chunk = Some(most);
        self
    }

    /// Takes what is called with each range of bytes that is present, by the thread that has populated it, in any
    /// order.
    #[must_use]
    pub fn on_present(mut self, present: impl Fn(Range<u64>) + Send + Sync + 'static) -> Self {
        self.present = OnPresent(Some(Arc::new(present)));
        self
    }

    /// Takes a flag that stops the work once another thread sets it, at most a chunk of each thread
    /// later.
    #[must_use]
    pub fn cancel(mut self, cancel: Arc<AtomicBool>) -> Self {
        self.cancel = cancel;
        self
    }
}

/// What populating came to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a request that was cancelled or out of time leaves memory that is not present"]
#[non_exhaustive]
pub struct PopulateReport {
    /// How it ended, and how much is present from the start of the range on.
    pub populated: Populated,
    /// How many bytes of that are in huge pages.
    pub huge: ByteLen,
    /// How many are in base pages.
    pub base: ByteLen,
    /// Whether base pages were taken because the kernel moved other memory away for huge ones ([`Huge::Watched`]).
    pub is_compacting: bool,
    /// On how many nodes threads ran; none on a host that has no nodes.
    pub nodes: usize,
    /// How many threads there were at most.
    pub threads: usize,
    /// How long it took.
    pub elapsed: Duration,
}

impl PopulateReport {
    /// Returns whether all of the range is present.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.populated.done == self.populated.of
    }

    /// Returns how much is present, from the start of the range on.
    #[must_use]
    pub fn done(&self) -> ByteLen {
        self.populated.done
    }
}

impl fmt::Display for PopulateReport {
    /// `8 GiB present in 1.2s: 8 GiB in huge pages, 0 B in base pages; 2 threads`, without an end of
    /// line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { huge, base, threads, elapsed, is_compacting, .. } = self;
        let Populated { done, of, is_expired } = self.populated;
        write!(f, "{done} present")?;
        if done != of {
            let why = if is_expired { "out of time" } else { "cancelled" };
            write!(f, " of {of}, {why}")?;
        }
        write!(
            f,
            " in {elapsed:.1?}: {huge} in huge pages, {base} in base pages; {threads} threads"
        )?;
        if *is_compacting { f.write_str(" (memory is fragmented)") } else { Ok(()) }
    }
}

impl Region {
    /// Makes a range of bytes present, widened to whole pages. No byte changes; memory that was never
    /// touched is zero. Costs what the kernel takes to clear the pages, shared by the threads, and some
    /// reads of `/proc` and `/sys`. Source: madvise(2), `MADV_POPULATE_WRITE`.
    ///
    /// # Errors
    /// [`WriteError`] names what there was not enough of, with numbers; where that could be known
    /// before, nothing is populated. That it was cancelled or out of time is no error.
    pub fn populate(
        &self,
        range: Range<u64>,
        options: &PopulateOptions,
    ) -> Result<PopulateReport, WriteError> {
        let started = Instant::now();
        let (mapping, root) = (self.memory(), SystemRoot::host());
        let resident = mapping.resident_in(range.clone())?;
        let page = mapping.page_size().bytes();
        let (start, end) = (range.start / page * page, range.end.next_multiple_of(page));
        let needed = ByteLen::new((end - start).saturating_sub(resident.get()));
        let watched = self.check_memory(&root, needed)?;
        let wanted = self.prepare_huge(&root, start..end, options.huge)?;
        let (nodes, threads) = self.places(&root, options)?;

        // Of huge pages that are required a few are tried first: without them, the minutes that the
        // rest takes are saved.
        if options.huge == Huge::Required && !wanted.is_zero() {
            let trial = range.start..range.end.min(range.start.saturating_add(TRIAL_BYTES));
            mapping.populate(trial.clone())?;
            self.require_huge(&root, trial)?;
        }
        let watched = watched.map(|available| Watched::new(&root, &available, needed, threads));
        let may_begin = |chunk| watched.as_ref().is_none_or(|watched| watched.may_begin(chunk));
        let how = PopulateHow {
            threads,
            nodes: &nodes,
            deadline: options.within.and_then(|time| started.checked_add(time)),
            chunk: watched.as_ref().map(|it| it.chunk).into_iter().chain(options.chunk).min(),
            may_begin: Some(&may_begin),
            on_chunk: None,
        };
        let watches = options.huge == Huge::Watched && !wanted.is_zero();
        let (populated, is_compacting) =
            self.populate_noting(&root, range.clone(), watches, how, options)?;
        let Populated { done, of, is_expired } = populated;
        if done != of
            && !is_expired
            && let Some(left) = watched.and_then(Watched::into_shortage)
        {
            let needed = ByteLen::new(of.get() - done.get());
            let Available { bytes: available, limited_by } = left;
            return Err(WriteError::TakenMeanwhile { done, of, needed, available, limited_by });
        }
        if options.huge == Huge::Required && done == of {
            self.require_huge(&root, range.clone())?;
        }
        let elapsed = started.elapsed();
        tracing::debug!(?range, ?populated, %threads, ?elapsed, "populate");
        let huge = match done.get() {
            0 => done,
            len => mapping.huge_backed_in(start..(start + len).min(self.len().get()))?.min(done),
        };
        let base = ByteLen::new(done.get() - huge.get());
        let (nodes, threads) = (nodes.len(), threads.get());
        Ok(PopulateReport { populated, huge, base, is_compacting, nodes, threads, elapsed })
    }

    /// Populates a range, and tells the caller of the options of each chunk and of how far it is. If it `watches` huge
    /// pages, it begins with base pages. Returns whether huge pages were left then.
    fn populate_noting(
        &self,
        root: &SystemRoot,
        mut range: Range<u64>,
        watches: bool,
        how: PopulateHow<'_>,
        options: &PopulateOptions,
    ) -> Result<(Populated, bool), MappingError> {
        let present = |part: Range<u64>| {
            if let OnPresent(Some(present)) = &options.present {
                present(part);
            }
        };
        let (mut compaction, mut before) = (None, 0);
        if watches {
            let (measured, first) = Compaction::measure(self.memory(), root, range.clone())?;
            (range.start, before) = (first.end, first.end - first.start);
            present(first);
            compaction = Some(measured);
        }
        let with_first = |bytes: ByteLen| ByteLen::new(bytes.get() + before);
        let on_chunk = |part: Range<u64>, took| {
            if let Some(compaction) = &compaction {
                compaction.note(&part, took);
            }
            present(part);
        };
        let how = PopulateHow { on_chunk: Some(&on_chunk), ..how };
        let progress = |done, of| options.progress.call(with_first(done), with_first(of));
        let populated = if range.is_empty() {
            Populated { done: ByteLen::ZERO, of: ByteLen::ZERO, is_expired: false }
        } else {
            self.memory().populate_with(range, how, progress, &options.cancel)?
        };
        let Populated { done, of, is_expired } = populated;
        let populated = Populated { done: with_first(done), of: with_first(of), is_expired };
        Ok((populated, compaction.is_some_and(|it| it.is_compacting())))
    }

    /// Gives the pages of a range back to the kernel, after which its bytes read as zero, for other processes
    /// that map them as well. The range starts and ends at pages of [`Mapping::page_size`].
    ///
    /// The next touch takes fresh pages, which costs more than clearing in place does: it is for memory
    /// that is not needed for a while.
    ///
    /// # Errors
    /// [`MappingError`] if the range cuts a page, or the memory is of a kind that has other bytes behind
    /// it, or that its owner does not give back: adopted memory, DAX devices, read-only files.
    ///
    /// [`Mapping::page_size`]: uzone_os::Mapping::page_size
    pub fn punch(&self, range: Range<u64>) -> Result<(), MappingError> {
        self.memory().punch(range)
    }

    /// Refuses a region that cannot be populated for lack of memory.
    ///
    /// # Errors
    /// [`WriteError`] names what there is not enough of, with numbers.
    pub fn check_populate(&self) -> Result<(), WriteError> {
        self.check_memory(&SystemRoot::host(), self.len()).map(drop)
    }

    /// Refuses what there is not the memory for. Returns what there is, where that is to be looked up
    /// again.
    fn check_memory(
        &self,
        root: &SystemRoot,
        needed: ByteLen,
    ) -> Result<Option<Available>, WriteError> {
        let is_small = self.memory().page_size() == uzone_os::probe::page_size();
        match self.backing() {
            Backing::Hugetlb(size) => {
                let Some(pool) = hugepages::pool(root, *size)? else { return Ok(None) };
                // Those that are promised to this region are free until they are touched.
                let free = ByteLen::new(pool.free.saturating_mul(size.bytes()));
                if free < needed {
                    return Err(WriteError::HugePool { size: *size, needed, free });
                }
            }
            Backing::Anonymous | Backing::Memfd | Backing::Adopted if is_small => {
                let available = memory::available(root)?;
                if available.bytes < needed {
                    return Err(WriteError::TooLittleMemory {
                        needed,
                        available: available.bytes,
                        limited_by: available.limited_by,
                    });
                }
                return Ok(Some(available));
            }
            // The memory of a file is its own, or the page cache, which the kernel takes back.
            _ => {}
        }
        // A touch of a page that a pool does not have is refused, and no process is killed.
        Ok(None)
    }

    /// Tells the kernel about huge pages, and returns how many bytes of a range fit in them.
    fn prepare_huge(
        &self,
        root: &SystemRoot,
        range: Range<u64>,
        huge: Huge,
    ) -> Result<ByteLen, WriteError> {
        let mapping = self.memory();
        if mapping.page_size() != uzone_os::probe::page_size() {
            return Ok(ByteLen::new(range.end - range.start)); // huge already
        }
        let none = |why| WriteError::NoHugePages { backing: self.backing().clone(), why };
        let thp = hugepages::thp(root)?;
        let is_anonymous = matches!(self.backing(), Backing::Anonymous | Backing::Adopted);
        match (huge, thp) {
            (Huge::Never, Some(_)) => {
                mapping.advise_no_huge()?;
                Ok(ByteLen::ZERO)
            }
            (Huge::Never | Huge::Preferred | Huge::Watched, None) => Ok(ByteLen::ZERO),
            (Huge::Required, None) => {
                Err(none("this kernel has no transparent huge pages; use a hugetlb pool"))
            }
            (Huge::Required, Some(_)) if uzone_os::probe::thp_is_switched_off() => Err(none(
                "a parent or this program has switched them off for this process (PR_SET_THP_DISABLE of prctl(2)); start it without that, or use a hugetlb pool",
            )),
            (Huge::Required, Some(thp)) if thp.enabled == "never" && is_anonymous => Err(none(
                "they are switched off; write 'madvise' to /sys/kernel/mm/transparent_hugepage/enabled",
            )),
            (Huge::Required, Some(_))
                if matches!(self.backing(), Backing::File { .. } | Backing::Fsdax { .. }) =>
            {
                Err(none(
                    "files are mapped as their file system has them; use memory without a file",
                ))
            }
            (Huge::Required | Huge::Preferred | Huge::Watched, Some(thp)) => {
                if is_anonymous || *self.backing() == Backing::Memfd {
                    mapping.advise_huge()?;
                }
                Ok(fitting(mapping.addr().get() as u64, &range, thp.pmd_size.get()))
            }
        }
    }

    /// Makes huge pages of what is in base pages, and refuses if that does not go.
    fn require_huge(&self, root: &SystemRoot, range: Range<u64>) -> Result<(), WriteError> {
        let mapping = self.memory();
        let Some(thp) = hugepages::thp(root)? else { return Ok(()) };
        if mapping.page_size() != uzone_os::probe::page_size() {
            return Ok(());
        }
        let wanted = fitting(mapping.addr().get() as u64, &range, thp.pmd_size.get());
        if mapping.huge_backed_in(range.clone())? >= wanted {
            return Ok(());
        }
        // It succeeds, or the count below shows that it did not.
        if mapping.collapse(range.clone())?.is_none() {
            return Ok(());
        }
        let huge = mapping.huge_backed_in(range)?;
        if huge >= wanted { Ok(()) } else { Err(WriteError::TooFewHugePages { wanted, huge }) }
    }

    /// Returns for each node the CPUs that its threads keep to, and how many threads there are.
    fn places(
        &self,
        root: &SystemRoot,
        options: &PopulateOptions,
    ) -> Result<(Vec<Vec<u32>>, NonZeroUsize), WriteError> {
        let mut nodes = Vec::new();
        for node in numa::nodes(root)? {
            let is_wanted = options.node.is_none_or(|wanted| wanted == node.number);
            let usable = numa::usable(&node.cpus)?;
            if is_wanted && !usable.is_empty() {
                nodes.push(usable);
            }
        }
        if let (Some(node), true) = (options.node, nodes.is_empty()) {
            return Err(WriteError::Node { node });
        }
        let cpus = match nodes.iter().map(Vec::len).sum() {
            0 => numa::current_cpu_count()?,
            cpus => cpus,
        };
        let threads = match options.threads_per_node {
            Some(threads) => threads.get().saturating_mul(nodes.len().max(1)),
            None => cpus - cpus * usize::from(options.spare_percent) / 100,
        };
        Ok((nodes, NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN)))
    }
}

/// Returns how many bytes of a range are whole huge pages by address.
fn fitting(base: u64, range: &Range<u64>, huge: u64) -> ByteLen {
    let Some(start) = (base + range.start).checked_next_multiple_of(huge) else {
        return ByteLen::ZERO;
    };
    let end = (base + range.end) / huge * huge;
    ByteLen::new(end.saturating_sub(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_huge_pages_by_address_can_be_huge() {
        const HUGE: u64 = 2 << 20;
        for (base, range, expected) in [
            (0, 0..HUGE, HUGE),
            (0, 1..HUGE, 0),
            (4096, 0..HUGE, 0),
            (4096, 0..2 * HUGE, HUGE),
            (HUGE, 4096..3 * HUGE + 5, 2 * HUGE),
            (u64::MAX - HUGE - 9, 0..8, 0),
        ] {
            assert_eq!(fitting(base, &range, HUGE), ByteLen::new(expected), "{base:#x} {range:?}");
        }
    }
}

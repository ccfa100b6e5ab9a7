//! Making a region present before it is touched, and giving it back: [`Region::populate`],
//! [`Region::punch`].
//!
//! A first touch costs an exception for each page; asking for a range costs half of that, several
//! threads share it, and a huge page costs no more faults than a small one. So several threads ask, on
//! the nodes of the host in turn, for huge pages where there are any. A request that would fail after
//! minutes is refused at once: a memory limit that leaves too little, a pool of huge pages that is too
//! small, transparent huge pages that are switched off. Later the kernel may still refuse a range, and the
//! error states how much is present. Memory that other programs take meanwhile is not watched: where a
//! limit is reached, the kernel kills a process.
//!
//! Where huge pages are preferred, base pages fill in for those that there are not. The report states how
//! much is in each.
//!
//! Units: bytes from the start of the region. Cost: the time of the kernel to clear the pages; a few
//! system calls and reads of `/proc` and `/sys` beside that.

mod compaction;

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use uzone_os::{MappingError, SystemRoot, hugepages, lock, memory, numa, share_work};
use uzone_pages::{ByteLen, chunks};

use crate::error::WriteError;
use crate::progress::OnProgress;
use crate::region::Region;
use crate::setters::setters;
use crate::source::RegionSource;

use compaction::Compaction;

/// The bytes that the kernel is asked for at a time, at multiples of that address: no huge page is asked for
/// twice. Of a page that is larger, one page.
const CHUNK: ByteLen = ByteLen::mib(64);

/// Whether memory is to be in huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Huge {
    /// All memory that huge pages fit into has to be in them; else it is an error.
    Required,
    /// As far as there are any. The report states how far that was.
    #[default]
    Preferred,
    /// As [`Huge::Preferred`], until the kernel has to move other memory away for them and that takes a quarter
    /// longer than base pages do; the rest is in base pages then, and so are the first 2 MiB, by which that is measured.
    Watched,
    /// Base pages, where there is a choice: memory of a hugetlb pool or a DAX device has its own pages.
    Never,
}

/// The options of populating. By default: a thread for each CPU, on all nodes; huge pages if there are any.
#[derive(Clone, Debug, Default)]
pub struct PopulateOptions {
    threads: Option<NonZeroUsize>,
    node: Option<u32>,
    huge: Huge,
    spare_percent: u8,
    chunk: Option<ByteLen>,
    is_background: bool,
    present: OnPresent,
    progress: OnProgress,
    cancel: Arc<AtomicBool>,
}

/// The callback for each range that is present.
#[derive(Clone, Default)]
struct OnPresent(Option<Arc<dyn Fn(Range<u64>) + Send + Sync>>);

impl OnPresent {
    fn call(&self, range: Range<u64>) {
        if let Some(present) = &self.0 {
            present(range);
        }
    }
}

impl fmt::Debug for OnPresent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OnPresent").field(&self.0.is_some()).finish()
    }
}

impl PopulateOptions {
    setters! {
        /// Sets how many threads there are, instead of one for each CPU that this process may use.
        threads(threads: NonZeroUsize) threads = Some(threads);

        /// Takes memory from one node alone, as far as it has any: only its CPUs touch it.
        node(node: u32) node = Some(node);

        /// Sets whether memory is to be in huge pages.
        huge(huge: Huge) huge = huge;

        /// Leaves a share of the CPUs alone, in percent, but takes one at least. A number of threads that was set is not
        /// changed by it.
        spare(percent: u8) spare_percent = percent.min(100);

        /// Sets the most that each thread asks the kernel for at a time, instead of 64 MiB.
        chunk(most: ByteLen) chunk = Some(most);

        /// Populates beside other work of the process. All threads, the caller's too, yield to threads of an ordinary
        /// priority. Huge pages of memory without a file are made by faults, since a call that maps or unmaps memory waits for
        /// each thread that asks the kernel for a range.
        background() is_background = true;

        /// Takes a callback for each range of bytes that is present. The thread that has populated it calls, in any
        /// order.
        on_present(present: impl Fn(Range<u64>) + Send + Sync + 'static) present = OnPresent(Some(Arc::new(present)));

        /// Takes a callback for each chunk. The thread that populated it calls with the bytes that are
        /// present and the bytes in all. With several threads the calls may come out of order.
        on_progress(progress: impl Fn(ByteLen, ByteLen) + Send + Sync + 'static) progress = OnProgress::new(progress);

        /// Takes a flag that stops the work once another thread sets it, at most a chunk of each thread
        /// later.
        cancel(cancel: Arc<AtomicBool>) cancel = cancel;
    }
}

/// The outcome of populating.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a request that was cancelled leaves memory that is not present"]
#[non_exhaustive]
pub struct PopulateReport {
    /// The bytes that are present, from the start of the range on, in whole pages.
    pub done: ByteLen,
    /// The bytes of the range, in whole pages. If these are more, the caller cancelled.
    pub of: ByteLen,
    /// The bytes that are present in huge pages.
    pub huge: ByteLen,
    /// The bytes that are present in base pages.
    pub base: ByteLen,
    /// Whether base pages were taken because the kernel moved other memory away for huge ones ([`Huge::Watched`]).
    pub is_compacting: bool,
    /// The number of threads.
    pub threads: usize,
    /// The time that it took.
    pub elapsed: Duration,
}

impl PopulateReport {
    /// Returns whether all of the range is present.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.done == self.of
    }
}

impl fmt::Display for PopulateReport {
    /// `8 GiB present in 1.2s: 8 GiB in huge pages, 0 B in base pages; 2 threads`, without an end of
    /// line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { done, of, huge, base, is_compacting, threads, elapsed } = self;
        write!(f, "{done} present")?;
        if !self.is_whole() {
            write!(f, " of {of}, cancelled")?;
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
    /// touched is zero. Costs the time of the kernel to clear the pages, shared by the threads, and some
    /// reads of `/proc` and `/sys`. Core dumps include the range from then on. Several threads may populate parts of a region at once. Source:
    /// madvise(2), `MADV_POPULATE_WRITE`.
    ///
    /// # Errors
    /// [`WriteError`] names the resource that there was not enough of, with numbers, and how much is present;
    /// a shortage that is known before is found before anything is populated. A cancelled call is no error.
    pub fn populate(
        &self,
        range: Range<u64>,
        options: &PopulateOptions,
    ) -> Result<PopulateReport, WriteError> {
        let started = Instant::now();
        let (mapping, root) = (self.memory(), SystemRoot::host());
        // Addresses have 64 bits: the package below compiles for nothing else.
        let base = mapping.addr().get() as u64;
        let resident = mapping.resident_in(range.clone())?;
        let page = mapping.page_size().bytes();
        let whole = range.start / page * page..range.end.next_multiple_of(page);
        let of = ByteLen::new(whole.end - whole.start);
        self.check_memory(&root, ByteLen::new(of.get().saturating_sub(resident.get())))?;
        let fitting = self.prepare_huge(&root, whole.clone(), options.huge)?;
        self.dump_populated(&whole);
        let (nodes, threads) = self.places(&root, options)?;

        let watches = options.huge == Huge::Watched && !fitting.is_zero();
        let mut work =
            Chunks { region: self, base, range: whole.clone(), options, compaction: None };
        if watches {
            let (compaction, first) = Compaction::measure(mapping, &root, whole.clone())?;
            work.range.start = first.end;
            work.compaction = Some(compaction);
            options.present.call(first);
        }
        let (done, threads) = work.run(&nodes, threads)?;
        let is_compacting = work.compaction.is_some_and(|it| it.is_compacting());
        let done = ByteLen::new(done.get() + (work.range.start - whole.start));
        let elapsed = started.elapsed();
        tracing::debug!(?range, %done, %of, %threads, ?elapsed, "populate");
        let huge = match done.get() {
            0 => done,
            len => {
                let present = whole.start..(whole.start + len).min(self.len().get());
                mapping.huge_backed_in(present)?.min(done)
            }
        };
        let base = ByteLen::new(done.get() - huge.get());
        Ok(PopulateReport { done, of, huge, base, is_compacting, threads, elapsed })
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
    /// [`WriteError`] names the resource that there is not enough of, with numbers.
    pub fn check_populate(&self) -> Result<(), WriteError> {
        self.check_memory(&SystemRoot::host(), self.len())
    }

    /// Refuses a request that there is not the memory for.
    fn check_memory(&self, root: &SystemRoot, needed: ByteLen) -> Result<(), WriteError> {
        let is_small = self.memory().page_size() == uzone_os::probe::page_size();
        match self.backing() {
            RegionSource::Hugetlb(size) => {
                let Some(pool) = hugepages::pool(root, *size)? else { return Ok(()) };
                // Pages that are promised to this region are free until they are touched.
                let free = ByteLen::new(pool.free.saturating_mul(size.bytes()));
                if free < needed {
                    return Err(WriteError::HugePool { size: *size, needed, free });
                }
            }
            RegionSource::Anonymous | RegionSource::Memfd | RegionSource::Adopted if is_small => {
                let memory::Available { bytes: available, limited_by } = memory::available(root)?;
                if available < needed {
                    return Err(WriteError::TooLittleMemory { needed, available, limited_by });
                }
            }
            // The memory of a file is its own, or the page cache, which the kernel takes back.
            _ => {}
        }
        Ok(())
    }

    /// Tells the kernel about huge pages. Returns how many bytes of a range fit in transparent ones.
    fn prepare_huge(
        &self,
        root: &SystemRoot,
        range: Range<u64>,
        huge: Huge,
    ) -> Result<ByteLen, WriteError> {
        let mapping = self.memory();
        if mapping.page_size() != uzone_os::probe::page_size() {
            return Ok(ByteLen::ZERO); // huge already
        }
        let thp = hugepages::thp(root)?;
        let is_anonymous =
            matches!(self.backing(), RegionSource::Anonymous | RegionSource::Adopted);
        let is_file =
            matches!(self.backing(), RegionSource::File { .. } | RegionSource::Fsdax { .. });
        let why = match &thp {
            _ if huge != Huge::Required => None,
            None => Some("this kernel has no transparent huge pages; use a hugetlb pool"),
            Some(_) if uzone_os::probe::thp_is_switched_off() => Some(
                "a parent or this program has switched them off for this process (PR_SET_THP_DISABLE of prctl(2)); start it without that, or use a hugetlb pool",
            ),
            Some(thp) if thp.enabled == "never" && is_anonymous => Some(
                "they are switched off; write 'madvise' to /sys/kernel/mm/transparent_hugepage/enabled",
            ),
            Some(_) if is_file => {
                Some("files are mapped as their file system has them; use memory without a file")
            }
            Some(_) => None,
        };
        if let Some(why) = why {
            return Err(WriteError::NoHugePages { backing: self.backing().clone(), why });
        }
        let Some(thp) = thp else { return Ok(ByteLen::ZERO) };
        match huge {
            Huge::Never => mapping.advise_no_huge()?,
            _ if is_anonymous || *self.backing() == RegionSource::Memfd => mapping.advise_huge()?,
            _ => {}
        }
        Ok(fitting(mapping.addr().get() as u64, &range, thp.pmd_size.get()))
    }

    /// Makes huge pages of base pages, and refuses if that does not go.
    fn require_huge(&self, range: Range<u64>) -> Result<(), WriteError> {
        let mapping = self.memory();
        let Some(thp) = hugepages::thp(&SystemRoot::host())? else { return Ok(()) };
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

    /// Returns for each node the CPUs that its threads keep to, and how many threads there are. On a host of
    /// one node, threads run anywhere.
    fn places(
        &self,
        root: &SystemRoot,
        options: &PopulateOptions,
    ) -> Result<(Vec<Vec<u32>>, NonZeroUsize), WriteError> {
        let mut nodes = Vec::new();
        for node in numa::nodes(root)? {
            let is_wanted = options.node.is_none_or(|wanted| wanted == node.number);
            let usable: Vec<u32> = numa::usable(node.cpus)?.collect();
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
        if options.node.is_none() && nodes.len() < 2 {
            nodes.clear();
        }
        let cpus = cpus - cpus * usize::from(options.spare_percent) / 100;
        let cpus = NonZeroUsize::new(cpus).unwrap_or(NonZeroUsize::MIN);
        Ok((nodes, options.threads.unwrap_or(cpus)))
    }
}

/// A range of whole pages that threads populate.
struct Chunks<'a> {
    region: &'a Region,
    /// The address of the first byte of the region.
    base: u64,
    range: Range<u64>,
    options: &'a PopulateOptions,
    compaction: Option<Compaction<'a>>,
}

impl Chunks<'_> {
    /// Populates the range by threads that keep to `nodes` in turn, if there are any. Returns how many bytes are
    /// present, and how many threads there were.
    fn run(
        &self,
        nodes: &[Vec<u32>],
        threads: NonZeroUsize,
    ) -> Result<(ByteLen, usize), WriteError> {
        let Self { region, base, range, options, .. } = self;
        let most = options.chunk.map_or(CHUNK, |most| most.min(CHUNK)).get();
        // A power of two, at multiples of which chunks meet, and no less than a page.
        let least = region.memory().page_size().bytes().max(1 << 16);
        let chunk = ByteLen::new((1 << most.max(least).ilog2()).max(least));
        let parts = chunks(base + range.start..base + range.end, chunk, chunk)?;
        let (queue, done) = (Mutex::new(parts), AtomicU64::new(0));
        let (begun, number) = (OnceLock::new(), AtomicUsize::new(0));
        let work = |is_stopped: &AtomicBool| -> Result<(), WriteError> {
            let number = number.fetch_add(1, Ordering::Relaxed);
            if let Some(cpus) = nodes.get(number % nodes.len().max(1)) {
                numa::keep_thread_to(cpus)?;
            }
            if options.is_background {
                // Where that is refused, the thread competes with the others, and still does the work.
                let _ = uzone_os::thread::low();
            }
            // Relaxed: the flags only end the loop, and a chunk later is early enough.
            while !is_stopped.load(Ordering::Relaxed) && !options.cancel.load(Ordering::Relaxed) {
                let Some(part) = lock(&queue).next() else { break };
                self.populate(part.start - base..part.end - base, &done)
                    .inspect_err(|_| is_stopped.store(true, Ordering::Relaxed))?;
            }
            Ok(())
        };
        let most = usize::try_from((range.end - range.start) / chunk.get() + 2);
        let threads = threads.get().min(most.unwrap_or(usize::MAX));
        let share = || {
            let first = thread::current().id();
            share_work("uzone-populate", threads, |is_stopped| {
                // Starting a thread maps its stack, and a mapping waits for every populate that is under way:
                // all threads are started before the first of them asks for memory.
                if thread::current().id() == first {
                    let _ = begun.set(());
                } else {
                    begun.wait();
                }
                work(is_stopped)
            })
        };
        let all = if nodes.is_empty() {
            share()
        } else {
            // The caller's thread keeps to its own CPUs.
            let thread = thread::Builder::new().name("uzone-populate".to_owned());
            thread::scope(|scope| {
                thread.spawn_scoped(scope, share).map(thread::ScopedJoinHandle::join)
            })
            .map_err(WriteError::Thread)?
            .unwrap_or_else(|panic| resume_unwind(panic))
        };
        let (done, threads) = (ByteLen::new(done.into_inner()), all.len());
        match all.into_iter().find_map(Result::err) {
            Some(WriteError::Populate(MappingError::Populate { range, cause, .. })) => {
                Err(MappingError::Populate { range, done, cause }.into())
            }
            Some(error) => Err(error),
            None => Ok((done, threads)),
        }
    }

    /// Touches a byte of each huge page of a chunk. No byte changes.
    fn touch(&self, part: Range<u64>) -> Result<(), WriteError> {
        const APART: usize = (2 << 20) / size_of::<u64>();
        let end = part.end.min(self.region.len().get());
        for word in self.region.memory().as_words(part.start..end)?.iter().step_by(APART) {
            // The compiler must not know that it adds nothing, or it makes a load of it, and a load makes no page.
            word.fetch_add(std::hint::black_box(0), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Populates a chunk, and tells the caller of it.
    fn populate(&self, part: Range<u64>, done: &AtomicU64) -> Result<(), WriteError> {
        let started = Instant::now();
        if self.options.is_background && *self.region.backing() == RegionSource::Anonymous {
            self.touch(part.clone())?;
        }
        let bytes = self.region.memory().populate(part.clone())?.get();
        if let Some(compaction) = &self.compaction {
            compaction.note(&part, started.elapsed());
        }
        if self.options.huge == Huge::Required {
            self.region.require_huge(part.clone())?;
        }
        // Relaxed: a number to report, nothing more.
        let before = done.fetch_add(bytes, Ordering::Relaxed);
        self.options.present.call(part);
        let total = ByteLen::new(self.range.end - self.range.start);
        self.options.progress.call(ByteLen::new(before + bytes), total);
        Ok(())
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

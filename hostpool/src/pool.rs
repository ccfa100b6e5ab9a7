//! The pool and its blocks: [`HostPool`], [`Block`].

use std::fmt;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, Once, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use uzone_os::{Addr, Mapping, SystemRoot, Vendor, hugepages, lock, numa};
use uzone_pages::{ByteLen, FolioState, PageSize};
use uzone_zone::{BindError, PopulateReport, Region, RegionSource};

use crate::error::HostPoolError;
use crate::fill::{self, deadline};
use crate::inner::{Borders, Call, Inner};
use crate::options::{Budget, HostPoolOptions, Pages, Place, Zeroing};
use crate::pieces::Pieces;
use crate::register::Registration;
use crate::report::{HostPoolReport, HostPoolStats};

/// A pool of host memory for accelerators: blocks that are present, registered and zero.
///
/// Opening one returns at once, at any size: threads of the pool make memory present, and one registers it behind them,
/// piece by piece, while the first blocks are handed out already. It is dropped when it and all its blocks are.
///
/// A process that is forked off has no part of it.
pub struct HostPool {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
}

/// Blocks of a pool that were handed out, in a row; given back when this is dropped.
#[must_use = "dropping it gives the blocks back"]
pub struct Block {
    inner: Arc<Inner>,
    blocks: Range<usize>,
    /// Whether they are still this value's to give back.
    is_ours: bool,
}

impl HostPool {
    /// Opens a pool of as many whole blocks as fit into `size`. Returns in milliseconds, but with [`Budget::Eager`].
    ///
    /// # Errors
    /// [`HostPoolError::Geometry`] for blocks that are no whole pages; [`HostPoolError::Driver`] if the driver is not
    /// there, or this thread has no context of it; [`HostPoolError::Map`] or [`HostPoolError::Populate`] with the numbers
    /// if there is not enough memory; [`HostPoolError::Place`] for a node that cannot be had. With [`Budget::Eager`] also
    /// the error that ended filling it.
    pub fn open(size: ByteLen, options: HostPoolOptions) -> Result<Self, HostPoolError> {
        let mut notes = Vec::new();
        Self::open_on(size, options, |blocks, options| {
            let region = map(blocks, options, &mut notes)?;
            if options.budget != Budget::OnDemand {
                let checked = region.check_populate();
                checked.map_err(|error| HostPoolError::Populate(Arc::new(error)))?;
            }
            Ok((region, notes))
        })
    }

    /// Opens the memory file of another process's pool. No thread clears it.
    pub(crate) fn open_file(
        path: &Path,
        size: ByteLen,
        mut options: HostPoolOptions,
    ) -> Result<Self, HostPoolError> {
        options.budget = Budget::Background;
        options.zeroing = Zeroing::Never;
        options.pages = Pages::Small;
        Self::open_on(size, options, |_, _| {
            let region = Region::file(path, 0, size);
            let region = region.map_err(|error| HostPoolError::Map(Arc::new(error)))?;
            keep_to_this_process(&region)?;
            Ok((region, Vec::new()))
        })
    }

    fn open_on(
        size: ByteLen,
        options: HostPoolOptions,
        map: impl FnOnce(usize, &HostPoolOptions) -> Result<(Region, Vec<String>), HostPoolError>,
    ) -> Result<Self, HostPoolError> {
        let opened = Instant::now();
        let blocks = blocks_in(size, &options)?;
        let release = uzone_os::probe::kernel_release();
        let geometry = |why| HostPoolError::Geometry { size, block: options.block, why };
        let pieces =
            Pieces::new(blocks, options.block, options.piece, &release).map_err(geometry)?;
        let register =
            options.registration.resolve().map_err(|error| HostPoolError::Driver(error.into()))?;
        let (region, notes) = map(blocks, &options)?;
        let (budget, zeroing) = (options.budget, options.zeroing);
        let is_registered = register.is_some();
        let borders = borders(&options, is_registered, pieces.clone());
        let inner = Arc::new(Inner::new(region, borders, blocks, options, register, opened, notes));
        if is_registered {
            at_exit(&inner);
        }
        let mut pool = Self { inner: inner.clone(), threads: Vec::new() };
        if budget == Budget::OnDemand {
            uzone_pages::restock(&Call { inner: &inner, until: None }, 0, blocks);
            return Ok(pool);
        }
        let (filled, registered) = (inner.clone(), inner.clone());
        pool.start("uzone-fill", move || fill::populate(&filled))?;
        pool.start("uzone-register", move || fill::register(&registered, pieces))?;
        if let Zeroing::Ahead(percent) = zeroing {
            let cleared = inner.clone();
            pool.start("uzone-zero", move || cleared.clear_ahead(percent.get()))?;
        }
        if budget == Budget::Eager {
            pool.inner.wait_ready(blocks, None)?;
        }
        Ok(pool)
    }

    pub(crate) fn region(&self) -> &Region {
        self.inner.region()
    }

    /// Returns the memory file of a pool that is shared, to be passed to another process
    /// ([`AttachedPool::attach`](crate::AttachedPool::attach)).
    #[must_use]
    pub fn shared_file(&self) -> Option<BorrowedFd<'_>> {
        self.inner.region().mapping().fd()
    }

    /// Returns the name by which another process of this user attaches to a pool that is shared
    /// ([`AttachedPool::open`](crate::AttachedPool::open)).
    #[must_use]
    pub fn shared_name(&self) -> Option<String> {
        let file = self.shared_file()?.as_raw_fd();
        Some(format!("/proc/{}/fd/{file}", std::process::id()))
    }

    fn start(
        &mut self,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), HostPoolError> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        self.threads.push(thread.map_err(|error| HostPoolError::Thread(Arc::new(error)))?);
        Ok(())
    }

    /// Hands out a block that is ready. Waits for one that is being populated, registered or cleared, but not for one
    /// to be given back, and no longer than `within` ([`Duration::MAX`] is for ever). Costs a lock and a few steps if one is
    /// ready and zero; otherwise the time to clear one, on this thread.
    ///
    /// # Errors
    /// [`HostPoolError::NotReady`] if the time is up, [`HostPoolError::Exhausted`] if all are handed out, and the error that
    /// ended filling the pool if that has failed and no block is left.
    pub fn take(&self, within: Duration) -> Result<Block, HostPoolError> {
        self.take_run(1, within)
    }

    /// Hands out a block that is ready, if there is one. Does not wait for other threads.
    ///
    /// # Errors
    /// As [`HostPool::take`], but that no block is ready is no error.
    pub fn try_take(&self) -> Result<Option<Block>, HostPoolError> {
        match self.take(Duration::ZERO) {
            Ok(block) => Ok(Some(block)),
            Err(HostPoolError::NotReady { .. } | HostPoolError::Exhausted { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Hands out several blocks in a row, as one range of memory. If they fit into one piece ([`HostPoolOptions::piece`]),
    /// they are of one registration, as a copy by a driver demands; [`Block::parts`] are the registrations of others.
    /// All blocks of the pool are a run as well: for programs that keep a table of blocks of their own.
    ///
    /// # Errors
    /// As [`HostPool::take`], and [`HostPoolError::Geometry`] for no block.
    pub fn take_run(&self, blocks: usize, within: Duration) -> Result<Block, HostPoolError> {
        let inner = &self.inner;
        if !inner.is_ours() {
            return Err(HostPoolError::Forked);
        }
        if blocks == 0 {
            let (size, block) = (self.len(), self.block_len());
            return Err(HostPoolError::Geometry { size, block, why: "none was asked for".into() });
        }
        let until = deadline(within);
        let first = uzone_pages::hand_out(&Call { inner, until }, blocks)?;
        Ok(Block { inner: inner.clone(), blocks: first..first + blocks, is_ours: true })
    }

    /// Takes blocks back that [`Block::into_numbers`] named; some of them, or all.
    ///
    /// # Errors
    /// [`HostPoolError::NotHandedOut`] if one of them is free, or a [`Block`] still has it; then none is taken back.
    pub fn give_back(&self, numbers: Range<usize>) -> Result<(), HostPoolError> {
        let call = Call { inner: &self.inner, until: None };
        let state = uzone_pages::PoolBackend::lock(&call);
        let Range { start, end } = numbers;
        if end > self.inner.blocks || !(start..end).all(|number| state.is_loose(number)) {
            return Err(HostPoolError::NotHandedOut { start, end });
        }
        let clears = self.inner.options.zeroing == Zeroing::OnRelease;
        uzone_pages::give_back(&call, state, start, end.saturating_sub(start), clears);
        Ok(())
    }

    /// Returns how many bytes are ready: present and registered, handed out or not.
    #[must_use]
    pub fn ready(&self) -> ByteLen {
        self.inner.len_of(self.inner.sets().progress.ready)
    }

    /// Waits until `bytes` are ready, all at most, and no longer than `within`. Returns how many are.
    ///
    /// # Errors
    /// [`HostPoolError::NotReady`] if the time is up, or at once if the pool is filled on demand; the error that ended
    /// filling it if that has failed.
    pub fn wait_ready(&self, bytes: ByteLen, within: Duration) -> Result<ByteLen, HostPoolError> {
        let is_on_demand = self.inner.options.budget == Budget::OnDemand;
        let until = deadline(if is_on_demand { Duration::ZERO } else { within });
        let blocks = bytes.get().div_ceil(self.block_len().get());
        let blocks = usize::try_from(blocks).unwrap_or(usize::MAX).min(self.inner.blocks);
        Ok(self.inner.len_of(self.inner.wait_ready(blocks, until)?))
    }

    /// Returns the state of the pool so far, and why it is not better. Just after the last block became ready, it waits until
    /// the kernel has counted the huge pages.
    #[must_use]
    pub fn report(&self) -> HostPoolReport {
        let inner = &self.inner;
        let mut notes = inner.notes.clone();
        let sets = inner.counted();
        let progress = &sets.progress;
        let populated = progress.populated.as_ref();
        if populated.is_some_and(|report| report.is_compacting) {
            notes.push("memory is fragmented: huge pages were left when they took longer than small ones (compaction)".to_owned());
        } else if let Some(note) = populated.and_then(|report| few_huge(report, inner)) {
            notes.push(note);
        }
        if let Some(failure) = &sets.failure {
            notes.push(uzone_os::with_causes(failure));
        }
        HostPoolReport {
            len: self.len(),
            block: self.block_len(),
            ready: inner.len_of(progress.ready),
            huge: populated.map(|report| report.huge),
            small: populated.map(|report| report.base),
            node: inner.region().node(),
            registered_by: format!("{:?}", inner.options.registration),
            pieces: progress.pieces.len(),
            populating: progress.populating,
            registering: progress.registering,
            longest_piece: progress.longest_piece,
            first_ready: progress.first_ready,
            all_ready: progress.all_ready,
            notes,
        }
    }

    /// Returns the number of blocks in each state.
    #[must_use]
    pub fn stats(&self) -> HostPoolStats {
        let sets = self.inner.sets();
        let [cleared_ahead, cleared_on_demand, cleared_on_release] = sets.state.cleared();
        HostPoolStats {
            blocks: self.inner.blocks,
            used: sets.state.used(),
            zero: sets.state.count(FolioState::Zero),
            dirty: sets.state.count(FolioState::Dirty),
            in_work: sets.state.in_work(),
            bad: sets.state.count(FolioState::Bad),
            cleared_ahead,
            cleared_on_demand,
            cleared_on_release,
        }
    }

    /// Returns the address of the pool: block `n` starts `n` times the length of a block behind it.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.inner.address_of(0)
    }

    /// Returns how long the pool is; never zero.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        self.inner.len_of(self.inner.blocks)
    }

    /// Returns how long a block is.
    #[must_use]
    pub fn block_len(&self) -> ByteLen {
        self.inner.options.block
    }

    /// Returns how many blocks the pool has.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.inner.blocks
    }
}

impl Drop for HostPool {
    fn drop(&mut self) {
        if !self.inner.is_ours() {
            // The threads are the parent's: there is nothing to wait for.
            self.threads.drain(..).for_each(std::mem::forget);
            return;
        }
        self.inner.close();
        for thread in self.threads.drain(..) {
            // One that dropped the pool in a function of the caller cannot wait for itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join(); // a panic was printed
            }
        }
    }
}

impl fmt::Debug for HostPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPool").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl Block {
    /// Returns the number of the block, or of the first of several.
    #[must_use]
    pub fn number(&self) -> usize {
        self.blocks.start
    }

    /// Returns the numbers of the blocks.
    #[must_use]
    pub fn numbers(&self) -> Range<usize> {
        self.blocks.clone()
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.inner.address_of(self.blocks.start)
    }

    /// Returns a pointer to the first byte, for foreign code and for `unsafe` code of the caller. It is good for all
    /// bytes of the block, until that is dropped.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        let start = self.inner.bytes_of(&self.blocks).start;
        self.inner.region().as_ptr().wrapping_add(usize::try_from(start).unwrap_or(usize::MAX)) // in this process
    }

    /// Returns how long the memory is; never zero.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        self.inner.len_of(self.blocks.len())
    }

    /// Returns the parts that are one registration each, as addresses and lengths. A driver copies none that crosses
    /// a border between two. Without a registration, or with mlock(2), it is one part.
    pub fn parts(&self) -> impl Iterator<Item = (Addr, ByteLen)> {
        let (mut at, end) = (self.blocks.start, self.blocks.end);
        std::iter::from_fn(move || {
            let start = at;
            at = self.inner.border(start).min(end);
            let len = self.inner.len_of(at - start);
            (start < end).then(|| (self.inner.address_of(start), len))
        })
    }

    /// Copies bytes out of the block, from byte `offset_bytes` on.
    ///
    /// # Errors
    /// [`HostPoolError::Access`] unless all bytes are inside; then none is copied.
    pub fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), HostPoolError> {
        let start = self.inside(offset_bytes, out.len())?;
        Ok(self.inner.region().read_at(start, out)?)
    }

    /// Copies bytes into the block, from byte `offset_bytes` on.
    ///
    /// # Errors
    /// As [`Block::read_at`].
    pub fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), HostPoolError> {
        let start = self.inside(offset_bytes, bytes.len())?;
        Ok(self.inner.region().write_at(start, bytes)?)
    }

    /// Keeps the blocks handed out, for [`HostPool::give_back`] to take back.
    #[must_use = "they stay handed out until they are given to HostPool::give_back"]
    pub fn into_numbers(mut self) -> Range<usize> {
        self.is_ours = false;
        self.inner.sets().state.loosen(self.blocks.start, self.blocks.len());
        self.blocks.clone()
    }

    fn inside(&self, offset: u64, len: usize) -> Result<u64, HostPoolError> {
        let own = self.len().get();
        let end = offset.saturating_add(len as u64);
        if end > own {
            let error = uzone_os::AccessError::Beyond { start: offset, end, len_bytes: own };
            return Err(error.into());
        }
        Ok(self.inner.bytes_of(&self.blocks).start + offset)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if !self.is_ours || !self.inner.is_ours() {
            return;
        }
        let call = Call { inner: &self.inner, until: None };
        let state = uzone_pages::PoolBackend::lock(&call);
        let clears = self.inner.options.zeroing == Zeroing::OnRelease;
        uzone_pages::give_back(&call, state, self.blocks.start, self.blocks.len(), clears);
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Block").field(&self.blocks).finish()
    }
}

/// Returns the ends of the pieces, which a copy by a driver must not cross.
fn borders(options: &HostPoolOptions, is_registered: bool, pieces: Pieces) -> Borders {
    if !is_registered || matches!(options.registration, Registration::Locked) {
        Borders::None
    } else if options.budget == Budget::OnDemand {
        Borders::Blocks
    } else {
        Borders::Pieces(pieces.map(|piece| piece.end).collect())
    }
}

/// Returns how many blocks a pool has.
fn blocks_in(size: ByteLen, options: &HostPoolOptions) -> Result<usize, HostPoolError> {
    let (block, page) = (options.block, uzone_os::probe::page_size().bytes());
    let refused = |why: String| Err(HostPoolError::Geometry { size, block, why });
    if block.is_zero() || !block.get().is_multiple_of(page) {
        return refused(format!("a block is a multiple of {}", ByteLen::new(page)));
    }
    match usize::try_from(size.get() / block.get()) {
        Ok(blocks) if blocks > 0 => Ok(blocks),
        _ => refused("the pool is shorter than a block".to_owned()),
    }
}

/// Maps the memory, chooses its nodes and its pages, and keeps it from children and core dumps.
fn map(
    blocks: usize,
    options: &HostPoolOptions,
    notes: &mut Vec<String>,
) -> Result<Region, HostPoolError> {
    let len = ByteLen::new(blocks as u64 * options.block.get());
    let region = match options.pages {
        Pages::Hugetlb(page) => {
            let whole = ByteLen::new(len.get().next_multiple_of(page.bytes()));
            if options.is_shared { hugetlb_file(whole, page) } else { Region::hugetlb(whole, page) }
        }
        Pages::Transparent | Pages::Small if options.is_shared => {
            Region::memfd("uzone-hostpool", len)
        }
        Pages::Transparent | Pages::Small => Region::anonymous(len),
    };
    let region = region.map_err(|error| HostPoolError::Map(Arc::new(error)))?;
    keep_to_this_process(&region)?;
    let prepare = |error| HostPoolError::Prepare(Arc::new(error));
    let memory = region.mapping();
    let root = SystemRoot::host();
    let thp = hugepages::thp(&root).map_err(|error| HostPoolError::Host(Arc::new(error)))?;
    match (options.pages, thp) {
        (Pages::Small, Some(_)) => memory.advise_no_huge().map_err(prepare)?,
        (Pages::Transparent, None) => {
            notes.push("this kernel has no transparent huge pages".to_owned());
        }
        (Pages::Transparent, Some(thp)) if thp.enabled == "never" && !options.is_shared => {
            notes.push("transparent huge pages are switched off: write 'madvise' to /sys/kernel/mm/transparent_hugepage/enabled".to_owned());
        }
        _ => {}
    }
    choose_nodes(&region, options.place, &root, notes)?;
    Ok(region)
}

/// Makes a memory file of huge pages.
fn hugetlb_file(len: ByteLen, page: PageSize) -> Result<Region, BindError> {
    let backing = RegionSource::Hugetlb(page);
    let mapping = Mapping::memfd("uzone-hostpool", len, Some(page))
        .map_err(|cause| BindError::Region { len, backing, cause })?;
    Region::adopt(mapping).map_err(|refused| refused.cause)
}

/// Keeps the memory from children, whose copy of a page that a device writes to would be another, and from core dumps.
fn keep_to_this_process(region: &Region) -> Result<(), HostPoolError> {
    let kept = region.mapping().keep_from_children().and_then(|()| region.leave_out_of_dumps());
    kept.map_err(|error| HostPoolError::Prepare(Arc::new(error)))
}

fn choose_nodes(
    region: &Region,
    place: Place,
    root: &SystemRoot,
    notes: &mut Vec<String>,
) -> Result<(), HostPoolError> {
    if place == Place::Anywhere {
        return Ok(());
    }
    let nodes = numa::nodes(root).map_err(|error| HostPoolError::Host(Arc::new(error)))?;
    let memory = region.mapping();
    let (name, answer, has_cpus) = match place {
        Place::Anywhere => return Ok(()),
        Place::Node(number) => {
            let has_cpus = nodes.iter().any(|node| node.number == number && !node.cpus.is_empty());
            (format!("node {number}"), memory.prefer_node(number), has_cpus)
        }
        Place::Interleaved => {
            let with_memory = nodes.iter().filter(|node| !node.total.is_zero());
            let numbers: Vec<u32> = with_memory.map(|node| node.number).collect();
            let answer = if numbers.len() < 2 { Ok(()) } else { memory.interleave(&numbers) };
            ("all nodes in turn".to_owned(), answer, false)
        }
    };
    match answer {
        Ok(()) => Ok(()),
        // Containers forbid mbind(2). Memory comes from the node of the CPU that touches it first, all the same.
        Err(cause) if has_cpus => {
            notes.push(format!(
                "{name} is chosen by the CPUs that populate alone: mbind(2) is refused ({cause})"
            ));
            Ok(())
        }
        Err(cause) => Err(HostPoolError::Place { place: name, cause: Arc::new(cause) }),
    }
}

/// Returns a sentence for transparent huge pages that the host did not have.
fn few_huge(report: &PopulateReport, inner: &Inner) -> Option<String> {
    // The first stretch is in small pages, and so is a rest that does not fill a huge page.
    const FEW: u64 = 8 << 20;
    let is_wanted = inner.options.pages == Pages::Transparent && inner.notes.is_empty();
    (is_wanted && report.base.get() > FEW).then(|| {
        format!(
            "the host had no huge pages for {}: its memory is in use or fragmented",
            report.base
        )
    })
}

/// Pools that are registered, to be stopped when the process ends.
static LIVE: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// Has the registering thread of a pool stopped when the process ends, before the driver takes itself down. Hooks run in
/// reverse order, so each driver, which is loaded by now, is followed by a hook of its own.
fn at_exit(inner: &Arc<Inner>) {
    extern "C" fn stop() {
        let live: Vec<_> = lock(&LIVE).iter().filter_map(Weak::upgrade).collect();
        for inner in live.iter().filter(|inner| inner.is_ours()) {
            inner.close();
            inner.wait_for_driver();
        }
        // Registered memory stays so: the driver lets go of it.
        live.into_iter().for_each(std::mem::forget);
    }
    static HOOKS: [Once; 3] = [const { Once::new() }; 3];
    let hook = match inner.options.registration {
        Registration::Cuda | Registration::In(Vendor::Cuda, _) => 0,
        Registration::Hip | Registration::In(Vendor::Hip, _) => 1,
        _ => 2,
    };
    HOOKS[hook].call_once(|| {
        if let Err(error) = uzone_os::at_exit(stop) {
            tracing::warn!(%error, "the pool is not stopped at the end of the process");
        }
    });
    let mut live = lock(&LIVE);
    live.retain(|inner| inner.strong_count() > 0);
    live.push(Arc::downgrade(inner));
}

//! The state that a pool shares with its threads and its blocks: the memory, the states of the blocks, and how far it is.
//!
//! The steps by which blocks are handed out are those of [`uzone_pages::PoolState`]. A block that is not ready yet is *in
//! work* there, so a taker waits for it as for one that is being cleared.
//!
//! Locks: one, held for a few steps, and never while memory is cleared, populated or registered, nor while the caller's
//! functions run.

use std::collections::BTreeMap;
use std::error::Error;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uzone_os::{Addr, lock};
use uzone_pages::{ByteLen, FolioState, PoolBackend, PoolState};
use uzone_zone::{PopulateReport, Region, RegionSource, WriteError, ZeroOptions};

use crate::error::HostPoolError;
use crate::options::{Budget, HostPoolOptions, Zeroing};
use crate::pieces::pause_after;
use crate::register::Register;

/// The content of the bytes of a block. Written under the lock, or by the thread that has the block in work.
const ABSENT: u8 = 0;
const ZERO: u8 = 1;
const DIRTY: u8 = 2;
const BAD: u8 = 3;

/// The state under the lock.
pub(crate) struct Sets {
    pub(crate) state: PoolState,
    pub(crate) is_closing: bool,
    /// How many threads sleep until blocks have been sorted, or wait for readiness.
    takers: usize,
    /// Whether the worker sleeps until there is a dirty block.
    is_idle: bool,
    /// Whether some of it is still registered and cannot be unregistered.
    is_stuck: bool,
    /// The error that ended populating or registering.
    pub(crate) failure: Option<HostPoolError>,
    pub(crate) progress: Progress,
}

/// How far a pool is.
#[derive(Default)]
pub(crate) struct Progress {
    /// Bytes that are present: all before this one, and ranges behind it.
    present: u64,
    scattered: BTreeMap<u64, u64>,
    /// Pieces that are registered, in blocks.
    pub(crate) pieces: Vec<Range<usize>>,
    /// Whether a thread is in a call of the driver.
    pub(crate) is_registering: usize,
    pub(crate) registering: Duration,
    pub(crate) longest_piece: Duration,
    /// Blocks that are present and registered.
    pub(crate) ready: usize,
    pub(crate) first_ready: Option<Duration>,
    pub(crate) all_ready: Option<Duration>,
    pub(crate) populating: Duration,
    pub(crate) populated: Option<PopulateReport>,
}

/// The sets, locked.
pub(crate) struct Locked<'a>(MutexGuard<'a, Sets>);

impl Deref for Locked<'_> {
    type Target = PoolState;

    fn deref(&self) -> &PoolState {
        &self.0.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut PoolState {
        &mut self.0.state
    }
}

/// Where one registration ends and the next begins.
pub(crate) enum Borders {
    /// There is one at most.
    None,
    /// Behind each block.
    Blocks,
    /// Behind these blocks, ascending.
    Pieces(Vec<usize>),
}

pub(crate) struct Inner {
    /// `None` only while this is dropped.
    region: Option<Region>,
    pub(crate) options: HostPoolOptions,
    pub(crate) blocks: usize,
    borders: Borders,
    pub(crate) register: Option<Arc<dyn Register>>,
    content: Vec<AtomicU8>,
    sets: Mutex<Sets>,
    /// Takers sleep on it; signalled when blocks have been sorted, and when filling fails or ends.
    sorted: Condvar,
    /// The worker sleeps on it; signalled when there are dirty blocks, and when the pool is closed.
    dirtied: Condvar,
    /// The registering thread sleeps on it; signalled when memory is present, and when the pool is closed.
    pub(crate) filled: Condvar,
    pub(crate) cancel: Arc<AtomicBool>,
    pub(crate) opened: Instant,
    pub(crate) notes: Vec<String>,
    /// The process that the pool belongs to.
    process: u32,
}

/// How many bytes stay mapped because a driver may still use them.
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Returns how many bytes of pools that were dropped stay mapped, because they could not be unregistered and a device may
/// still use them. Each refusal is also logged as an error.
#[must_use]
pub fn leaked() -> ByteLen {
    ByteLen::new(LEAKED.load(Ordering::Relaxed)) // a statistic
}

impl Inner {
    pub(crate) fn new(
        region: Region,
        borders: Borders,
        blocks: usize,
        options: HostPoolOptions,
        register: Option<Arc<dyn Register>>,
        opened: Instant,
        notes: Vec<String>,
    ) -> Self {
        let sets = Sets {
            state: PoolState::new(blocks),
            is_closing: false,
            takers: 0,
            is_idle: false,
            is_stuck: false,
            failure: None,
            progress: Progress::default(),
        };
        let mut content = Vec::new();
        content.resize_with(blocks, || AtomicU8::new(ABSENT));
        Self {
            region: Some(region),
            options,
            blocks,
            borders,
            register,
            content,
            sets: Mutex::new(sets),
            sorted: Condvar::new(),
            dirtied: Condvar::new(),
            filled: Condvar::new(),
            cancel: Arc::default(),
            opened,
            notes,
            process: std::process::id(),
        }
    }

    pub(crate) fn region(&self) -> &Region {
        match &self.region {
            Some(region) => region,
            None => unreachable!("it is taken when the pool is dropped"),
        }
    }

    /// Returns whether the memory is of another process's pool.
    pub(crate) fn is_attached(&self) -> bool {
        matches!(self.region().backing(), RegionSource::File { .. })
    }

    /// Returns whether this is the process that opened the pool.
    pub(crate) fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }

    pub(crate) fn sets(&self) -> MutexGuard<'_, Sets> {
        lock(&self.sets)
    }

    /// Returns the end of the registration that a block is in.
    pub(crate) fn border(&self, block: usize) -> usize {
        match &self.borders {
            Borders::None => self.blocks,
            Borders::Blocks => block + 1,
            Borders::Pieces(ends) => {
                let index = ends.partition_point(|end| *end <= block);
                ends.get(index).copied().unwrap_or(self.blocks)
            }
        }
    }

    /// Returns where blocks lie, in bytes from the start of the pool.
    pub(crate) fn bytes_of(&self, blocks: &Range<usize>) -> Range<u64> {
        let block = self.options.block.get();
        blocks.start as u64 * block..blocks.end as u64 * block
    }

    pub(crate) fn len_of(&self, blocks: usize) -> ByteLen {
        ByteLen::new(blocks as u64 * self.options.block.get())
    }

    pub(crate) fn address_of(&self, block: usize) -> Addr {
        let offset = self.options.block.to_usize().unwrap_or(0) * block;
        Addr::new(self.region().addr().get() + offset)
    }

    /// Ends the threads.
    pub(crate) fn close(&self) {
        self.sets().is_closing = true;
        // Relaxed: nothing is published by it, and a chunk later is early enough.
        self.cancel.store(true, Ordering::Relaxed);
        self.dirtied.notify_all();
        self.filled.notify_all();
        self.sorted.notify_all();
    }

    /// Takes note that filling has failed: threads that wait for blocks get the failure.
    pub(crate) fn fail(&self, failure: HostPoolError) {
        let error = uzone_os::with_causes(&failure);
        tracing::error!(%error, "a pool of host memory is not complete");
        self.sets().failure.get_or_insert(failure);
        self.cancel.store(true, Ordering::Relaxed); // as in `close`
        self.filled.notify_all();
        self.sorted.notify_all();
    }

    /// Takes note of bytes that are present.
    pub(crate) fn note_present(&self, part: Range<u64>) {
        let mut sets = self.sets();
        let progress = &mut sets.progress;
        let before = progress.present;
        progress.scattered.insert(part.start, part.end);
        while let Some(end) = progress.scattered.remove(&progress.present) {
            progress.present = end;
        }
        if progress.present > before {
            drop(sets);
            self.filled.notify_all();
        }
    }

    /// Sleeps until blocks are present. Returns whether they are; if not, the pool is closed or has failed.
    pub(crate) fn wait_present(&self, blocks: &Range<usize>) -> bool {
        let end = self.bytes_of(blocks).end;
        let mut sets = self.sets();
        while !sets.is_closing && sets.failure.is_none() {
            if sets.progress.present >= end {
                return true;
            }
            sets = self.filled.wait(sets).unwrap_or_else(PoisonError::into_inner);
        }
        false
    }

    /// Returns the sets when the pages of a pool that is ready have been counted, which takes some milliseconds.
    pub(crate) fn counted(&self) -> MutexGuard<'_, Sets> {
        let is_filled = self.options.budget != Budget::OnDemand;
        let is_awaited = |sets: &mut Sets| {
            let Sets { progress, failure, is_closing, .. } = sets;
            let is_ready = is_filled && progress.ready == self.blocks;
            is_ready && progress.populated.is_none() && failure.is_none() && !*is_closing
        };
        // The limit is for a thread that has died.
        let answer =
            self.filled.wait_timeout_while(self.sets(), Duration::from_secs(5), is_awaited);
        answer.map_or_else(|error| error.into_inner().0, |(sets, _)| sets)
    }

    /// Sleeps until `until`, or until the pool is closed.
    pub(crate) fn sleep_until(&self, until: Instant) {
        let mut sets = self.sets();
        while !sets.is_closing {
            let Some(left) = until.checked_duration_since(Instant::now()) else { return };
            if left.is_zero() {
                return;
            }
            let answer = self.dirtied.wait_timeout(sets, left);
            sets = answer.map_or_else(|error| error.into_inner().0, |(sets, _)| sets);
        }
    }

    /// Registers blocks that are present, if the pool is registered at all. Returns how long that took.
    pub(crate) fn register_blocks(&self, blocks: Range<usize>) -> Result<Duration, HostPoolError> {
        let Some(register) = &self.register else { return Ok(Duration::ZERO) };
        let (start, len) = (self.address_of(blocks.start), self.len_of(blocks.len()));
        {
            let mut sets = self.sets();
            if sets.is_closing {
                return Err(HostPoolError::Closed);
            }
            sets.progress.is_registering += 1;
        }
        let started = Instant::now();
        let answer = register.register(start, len);
        let took = started.elapsed();
        let mut sets = self.sets();
        let progress = &mut sets.progress;
        progress.is_registering -= 1;
        let offset_bytes = self.bytes_of(&blocks).start;
        let answer = answer.map(|()| {
            progress.registering += took;
            progress.longest_piece = progress.longest_piece.max(took);
            progress.pieces.push(blocks);
            took
        });
        let is_closing = sets.is_closing;
        drop(sets);
        if is_closing {
            self.sorted.notify_all(); // for `wait_for_driver`
        }
        answer.map_err(|cause| {
            let (address, cause) = (start.get(), Arc::from(cause));
            HostPoolError::Register { address, offset_bytes, len, cause }
        })
    }

    /// Takes note that blocks are ready; the caller hands them out.
    pub(crate) fn note_ready(&self, blocks: &Range<usize>) {
        for content in &self.content[blocks.clone()] {
            content.store(ZERO, Ordering::Relaxed); // published by the lock below
        }
        let mut sets = self.sets();
        let progress = &mut sets.progress;
        progress.ready += blocks.len();
        let now = self.opened.elapsed();
        progress.first_ready.get_or_insert(now);
        if progress.ready == self.blocks {
            progress.all_ready = Some(now);
        }
    }

    /// Unregisters all pieces, and returns how many bytes could not be, and why.
    pub(crate) fn unregister_all(&self) -> (ByteLen, Option<Box<dyn Error + Send + Sync>>) {
        let pieces = std::mem::take(&mut self.sets().progress.pieces);
        let (mut left, mut first) = (ByteLen::ZERO, None);
        let Some(register) = &self.register else { return (left, first) };
        for (index, blocks) in pieces.iter().enumerate() {
            let started = Instant::now();
            if let Err(cause) = register.unregister(self.address_of(blocks.start)) {
                left = ByteLen::new(left.get() + self.len_of(blocks.len()).get());
                first.get_or_insert(cause);
            }
            // Unregistering has the driver's lock as well. A short one does others no harm.
            let took = started.elapsed();
            if took > Duration::from_micros(500) && index + 1 < pieces.len() {
                std::thread::sleep(pause_after(took, self.options.pause));
            }
        }
        (left, first)
    }

    /// Takes note of memory that could not be unregistered, so that it stays mapped.
    pub(crate) fn note_stuck(&self, left: ByteLen, cause: &(dyn Error + Send + Sync)) {
        LEAKED.fetch_add(left.get(), Ordering::Relaxed); // a statistic
        tracing::error!(%cause, "{left} of a pool stay registered, so the pool stays mapped");
        self.sets().is_stuck = true;
    }

    /// Waits until no thread is in a call of the driver, a few seconds at most: the process ends, and the driver
    /// takes itself down next.
    pub(crate) fn wait_for_driver(&self) {
        let until = Instant::now() + Duration::from_secs(5);
        let mut sets = self.sets();
        while sets.progress.is_registering > 0 {
            let Some(left) = until.checked_duration_since(Instant::now()) else { return };
            let answer = self.sorted.wait_timeout(sets, left);
            sets = answer.map_or_else(|error| error.into_inner().0, |(sets, _)| sets);
        }
    }

    /// Sleeps until so many blocks are ready, and returns how many are.
    pub(crate) fn wait_ready(
        &self,
        blocks: usize,
        until: Option<Instant>,
    ) -> Result<usize, HostPoolError> {
        let mut sets = self.sets();
        loop {
            let ready = sets.progress.ready;
            if ready >= blocks {
                return Ok(ready);
            }
            sets = self.sleep(sets, until)?;
        }
    }

    /// Sleeps until blocks have been sorted, or the pool has failed.
    fn sleep<'a>(
        &'a self,
        mut sets: MutexGuard<'a, Sets>,
        until: Option<Instant>,
    ) -> Result<MutexGuard<'a, Sets>, HostPoolError> {
        if let Some(failure) = &sets.failure {
            return Err(failure.clone());
        }
        if sets.is_closing {
            return Err(HostPoolError::Closed);
        }
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            let ready = self.len_of(sets.progress.ready);
            return Err(HostPoolError::NotReady { ready, of: self.len_of(self.blocks) });
        }
        sets.takers += 1;
        sets = match left {
            None => self.sorted.wait(sets).unwrap_or_else(PoisonError::into_inner),
            Some(left) => {
                let answer = self.sorted.wait_timeout(sets, left);
                answer.map_or_else(|error| error.into_inner().0, |(sets, _)| sets)
            }
        };
        sets.takers -= 1;
        Ok(sets)
    }

    /// Clears dirty blocks until the pool is closed.
    pub(crate) fn clear_ahead(&self, percent: u8) {
        const BATCH_BYTES: u64 = 2 << 20;
        let percent = u32::from(percent.clamp(1, 100));
        let batch = usize::try_from(BATCH_BYTES / self.options.block.get()).unwrap_or(1).max(1);
        let call = Call { inner: self, until: None };
        // Where the host does not allow it, the share is still kept.
        let _ = uzone_os::thread::idle();
        let mut sets = self.sets();
        while !sets.is_closing {
            if sets.state.count(FolioState::Dirty) == 0 {
                sets.is_idle = true;
                sets = self.dirtied.wait(sets).unwrap_or_else(PoisonError::into_inner);
                sets.is_idle = false;
                continue;
            }
            let started = Instant::now();
            if let Some(Err(_)) = uzone_pages::clear_ahead(&call, Locked(sets), 0, batch) {
                return; // memory that cannot be written: takers report it
            }
            let worked = started.elapsed();
            self.sleep_until(Instant::now() + worked * (100 - percent) / percent);
            sets = self.sets();
        }
    }

    fn clear_run(&self, blocks: &Range<usize>) -> Result<(), HostPoolError> {
        let Range { start, end } = self.bytes_of(blocks);
        let failed = |error: WriteError| HostPoolError::Populate(Arc::new(error));
        let len = ByteLen::new(end - start);
        let cleared = self.region().zero_range(start, len, &ZeroOptions::default());
        let error = cleared.map_err(failed)?.lost();
        self.content[blocks.clone()].iter().for_each(|content| {
            content.store(if error.is_some() { BAD } else { ZERO }, Ordering::Relaxed); // as above
        });
        error.map_or(Ok(()), |error| Err(failed(error.into())))
    }

    /// Populates and registers a block for its first taker.
    fn fill_block(&self, block: usize) -> Result<(), HostPoolError> {
        let (started, blocks) = (Instant::now(), block..block + 1);
        let populated = self.region().mapping().populate(self.bytes_of(&blocks));
        populated.map_err(|error| HostPoolError::Populate(Arc::new(error.into())))?;
        self.sets().progress.populating += started.elapsed();
        self.register_blocks(blocks.clone())?;
        self.note_ready(&blocks);
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Some(region) = self.region.take() else { return };
        if !self.is_ours() {
            // A forked child has no part of the memory. Other memory may lie there.
            std::mem::forget(region);
            return;
        }
        self.region = Some(region);
        let (left, cause) = self.unregister_all();
        let is_stuck = cause.is_some() || self.sets().is_stuck;
        if let Some(cause) = cause {
            self.note_stuck(left, &*cause);
        }
        if is_stuck {
            std::mem::forget(self.region.take());
        }
    }
}

/// Returns how many blocks the longest piece has. Pieces grow until they are as long as they may be, and the last one has
/// the rest.
fn longest(ends: &[usize]) -> usize {
    match ends {
        [.., before, first, last] => (first - before).max(last - first),
        [first, last] => (*first).max(last - first),
        _ => ends.first().copied().unwrap_or(0),
    }
}

/// A pool in the hands of one caller, who waits no longer than this.
pub(crate) struct Call<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) until: Option<Instant>,
}

impl PoolBackend for Call<'_> {
    type Failure = HostPoolError;
    type Locked<'a>
        = Locked<'a>
    where
        Self: 'a;

    fn lock(&self) -> Locked<'_> {
        Locked(self.inner.sets())
    }

    fn wait<'a>(&'a self, state: Locked<'a>) -> Result<Locked<'a>, HostPoolError> {
        self.inner.sleep(state.0, self.until).map(Locked)
    }

    fn sorted(&self, state: Locked<'_>) {
        let Locked(sets) = state;
        let wakes_worker = sets.is_idle && sets.state.count(FolioState::Dirty) > 0;
        let wakes_takers = sets.takers > 0;
        drop(sets);
        // A signal costs a system call, so only sleeping threads are signalled.
        if wakes_takers {
            self.inner.sorted.notify_all();
        }
        if wakes_worker {
            self.inner.dirtied.notify_all();
        }
    }

    fn state_of(&self, number: usize) -> FolioState {
        // Relaxed: the lock is held, under which it is written, or after which.
        match self.inner.content[number].load(Ordering::Relaxed) {
            BAD => FolioState::Bad,
            ZERO => FolioState::Zero,
            DIRTY if self.inner.options.zeroing == Zeroing::Never => FolioState::Zero,
            _ => FolioState::Dirty,
        }
    }

    fn own(&self, first: usize, folios: usize) -> usize {
        let is_owned = |number: &usize| {
            let is_zero = self.state_of(*number) == FolioState::Zero;
            if is_zero {
                self.inner.content[*number].store(DIRTY, Ordering::Relaxed); // under the lock
            }
            is_zero
        };
        (first..first + folios).filter(is_owned).count()
    }

    fn clear(&self, first: usize, folios: usize) -> Result<usize, HostPoolError> {
        let (mut at, end, mut cleared) = (first, first + folios, 0);
        // Relaxed: the blocks are in work of this thread.
        let content = |number: usize| self.inner.content[number].load(Ordering::Relaxed);
        while at < end {
            let run = (at..end).take_while(|number| content(*number) == content(at)).count();
            match content(at) {
                DIRTY if self.inner.options.zeroing != Zeroing::Never => {
                    self.inner.clear_run(&(at..at + run))?;
                    cleared += run;
                }
                ABSENT => {
                    (at..at + run).try_for_each(|block| self.inner.fill_block(block))?;
                    cleared += run;
                }
                _ => {}
            }
            at += run;
        }
        Ok(cleared)
    }

    fn run_end(&self, first: usize, folios: usize) -> usize {
        match &self.inner.borders {
            Borders::Pieces(ends) if folios <= longest(ends) => self.inner.border(first),
            _ => usize::MAX,
        }
    }

    fn exhausted(&self, folios: usize, free: usize, _: usize) -> HostPoolError {
        HostPoolError::Exhausted { wanted: folios, free, all: self.inner.blocks }
    }
}

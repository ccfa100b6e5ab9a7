//! Pages handed out and taken back: [`Pool`]. Nothing that one owner wrote reaches the next.
//!
//! A pool hands out folios of one pagemap, alone or several in a row, and only ones whose every byte is
//! zero; what comes back is dirty until it has been cleared. A worker clears dirty folios ahead of
//! need, at the lowest priority and within a share of one CPU; a taker that finds no zero folio does
//! not wait for it and clears their own. On a host with several NUMA nodes there is a worker on each,
//! which begins with its share of the folios and helps the others when that is done. Which node a
//! folio's memory is on is not queried: shares are in order, as a region is whose nodes were populated one
//! after the other.
//!
//! The pagemap's words are the truth about bytes, and the pool's sets only say where to look: a folio
//! is handed out by the step from *zero* to *present*, which one taker can make. A stranger that pins a
//! free page makes it present as well, so it is cleared again before it is handed out; a folio that is
//! still pinned when it comes back is refused, and one that is pinned behind the pool's back is set
//! aside until it no longer is.
//!
//! The steps are those of [`uzone_pages::PoolState`], which the model checker searches.
//!
//! Locks: one for the sets, held for a few steps and never while memory is cleared. The worker and the
//! waiting takers sleep on it. A taker that finds every folio handed out, except those that a worker is
//! clearing, waits for the worker: it clears 2 MiB at a time, or a folio, at its priority.
//!
//! Cost: a folio from the zero set is a lock, a few words of a bit set and one atomic step; one that
//! is given back the same, and a system call if a taker waits for it.

use std::fmt;
use std::num::NonZeroU8;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use uzone_os::{AccessError, SystemRoot, numa};
use uzone_pages::{
    ByteLen, Content, ErrorKind, Folio, FolioState, Order, PageCount, Payload, Pfn, PfnRange,
    PoolBackend, PoolState, Refusal,
};

use crate::clear::options::{Batching, ZeroOptions};
use crate::clear::populate::{NotPopulated, PopulateOptions, PopulateReport};
use crate::clear::zero::{CLEARABLE, Owned};
use crate::error::WriteError;
use crate::pagemap::{Pagemap, PagemapView};
use crate::pin::pin_target::{PinTarget, Segment};
use crate::progress::Cancel;

/// How much the worker takes at a time, so that a taker who has to wait for it does not for long.
const WORKER_BYTES: u64 = 2 << 20;

/// How a pool is run.
#[derive(Clone, Copy, Debug)]
pub struct PoolOptions {
    worker_percent: Option<NonZeroU8>,
    clears_on_release: bool,
}

impl Default for PoolOptions {
    /// A worker that takes at most half of an otherwise idle CPU.
    fn default() -> Self {
        Self { worker_percent: NonZeroU8::new(50), clears_on_release: false }
    }
}

impl PoolOptions {
    /// Limits the worker to this share of one CPU, in percent; what is more than 100 is 100. It runs
    /// when no other thread of the host wants to. On a host with several NUMA nodes, each has a worker
    /// that may take as much of one of its CPUs.
    #[must_use]
    pub fn worker(mut self, percent: NonZeroU8) -> Self {
        self.worker_percent = Some(percent);
        self
    }

    /// Has no worker: folios are cleared when they are handed out, or when they come back.
    #[must_use]
    pub fn without_worker(mut self) -> Self {
        self.worker_percent = None;
        self
    }

    /// Clears a folio when it comes back, on the thread that gives it back.
    #[must_use]
    pub fn clear_on_release(mut self) -> Self {
        self.clears_on_release = true;
        self
    }
}

/// Why no folio was handed out, or folios were not taken back: those are whose they were.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// There are not as many free folios in a row.
    #[error(
        "no {folios} free folios in a row: {free} of {all} are free, {pinned} of these pinned or not there: give back what is not needed, or make the pool larger"
    )]
    Exhausted {
        /// How many were asked for.
        folios: usize,
        /// How many are free at all.
        free: usize,
        /// How many of the free ones somebody has pinned behind the pool's back, is filling or
        /// clearing, or has elsewhere.
        pinned: usize,
        /// How many the pool has.
        all: usize,
    },
    /// None were asked for.
    #[error("no folio was asked for")]
    Nothing,
    /// The memory cannot be cleared.
    #[error("cannot clear the folio: {0}")]
    Clear(#[from] WriteError),
    /// The range that is given back is not of whole folios of the pool.
    #[error("{given} are no whole folios of the pool, which has {pool}")]
    Foreign {
        /// What was given back.
        given: PfnRange,
        /// The pages of the pool.
        pool: PfnRange,
    },
    /// A folio is free already.
    #[error("the folio of page {pfn} is free already")]
    Free {
        /// Its head.
        pfn: Pfn,
    },
    /// A guard has the folio: it is given back by that.
    #[error(
        "the folio of page {pfn} belongs to a Pooled guard: drop that, or take the range out of it by \
         Pooled::into_range first"
    )]
    Guarded {
        /// Its head.
        pfn: Pfn,
    },
    /// Somebody has pinned a folio, and may still write to it.
    #[error("the folio of page {pfn} has {pins} pins: give those back first")]
    Pinned {
        /// Its head.
        pfn: Pfn,
        /// How many pins.
        pins: u32,
    },
}

impl PoolError {
    /// Returns what kind of failure this is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Exhausted { .. } => ErrorKind::OutOfMemory,
            Self::Clear(error) => error.kind(),
            Self::Pinned { .. } | Self::Guarded { .. } => ErrorKind::Busy,
            Self::Nothing | Self::Foreign { .. } | Self::Free { .. } => ErrorKind::InvalidInput,
        }
    }
}

/// What a pool has and has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// How many folios it has.
    pub folios: usize,
    /// How many are handed out.
    pub used: usize,
    /// How many are free and zero.
    pub zero: usize,
    /// How many are free and wait to be cleared: the worker's queue.
    pub dirty: usize,
    /// How many are free and pinned behind the pool's back, or not there: set aside until somebody
    /// finds no other.
    pub pinned: usize,
    /// How many are free and bad, and never handed out.
    pub bad: usize,
    /// How many folios the worker has cleared.
    pub cleared_ahead: u64,
    /// How many folios a taker had to clear.
    pub cleared_on_demand: u64,
    /// How many folios were cleared when they came back.
    pub cleared_on_release: u64,
    /// How many bytes all of those have.
    pub cleared: ByteLen,
}

/// What the lock is around.
#[derive(Debug)]
struct Sets {
    stock: PoolState,
    is_closing: bool,
    /// How many takers sleep until folios have been sorted.
    takers: usize,
    /// How many workers sleep until there is a dirty folio.
    idle: usize,
}

/// The sets, locked.
struct Locked<'a>(MutexGuard<'a, Sets>);

impl Deref for Locked<'_> {
    type Target = PoolState;

    fn deref(&self) -> &PoolState {
        &self.0.stock
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut PoolState {
        &mut self.0.stock
    }
}

struct Shared<P: Payload> {
    pagemap: Pagemap<P>,
    options: PoolOptions,
    sets: Mutex<Sets>,
    /// Takers sleep on it; signalled when folios have been sorted.
    sorted: Condvar,
    /// Workers sleep on it; signalled when there are dirty folios, and when it ends.
    dirtied: Condvar,
    ahead: AtomicU64,
    on_demand: AtomicU64,
    on_release: AtomicU64,
    cancel: Cancel,
}

/// Folios of a pagemap that are handed out and taken back: what one owner wrote never reaches the next.
///
/// Dropping it stops its workers; what is handed out stays so until it is dropped as well.
pub struct Pool<P: Payload = ()> {
    shared: Arc<Shared<P>>,
    workers: Vec<JoinHandle<()>>,
}

/// Folios that were handed out; given back when this is dropped. Every byte was zero.
#[must_use = "dropping it gives the folios back"]
pub struct Pooled<P: Payload = ()> {
    shared: Arc<Shared<P>>,
    range: PfnRange,
    /// Whether the folios are still this value's to give back.
    is_ours: bool,
}

impl<P: Payload> Shared<P> {
    fn locked(&self) -> MutexGuard<'_, Sets> {
        // A panic elsewhere cannot leave the sets half changed: nothing between the changes panics.
        self.sets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self) -> Order {
        self.pagemap.inner.order()
    }

    /// Returns the pages of `folios` folios from the one with the number `first` on.
    fn pages(&self, first: usize, folios: usize) -> PfnRange {
        let order = self.order().get();
        let start = self.pagemap.range().start().get() + ((first as u64) << order);
        match PfnRange::try_new(Pfn::new(start), PageCount::new((folios as u64) << order)) {
            Ok(range) => range,
            Err(_) => unreachable!("folios of the pool are pages of its region"),
        }
    }

    /// Clears dirty folios until the pool ends, on `cpus` if there are any, and those from the number
    /// `from` on first.
    fn work(&self, percent: NonZeroU8, cpus: &[u32], from: usize) {
        // Where the host does not allow it, the share is still kept; where a CPU was taken away
        // meanwhile, memory of other nodes is cleared as well, and more slowly.
        let _ = uzone_os::priority::idle();
        if !cpus.is_empty() {
            let _ = numa::keep_thread_to(cpus);
        }
        let batch = usize::try_from(WORKER_BYTES >> self.pagemap.region().page_size().shift());
        let batch = (batch.unwrap_or(1) >> self.order().get()).max(1);
        let mut sets = self.locked();
        loop {
            if sets.is_closing {
                return;
            }
            if sets.stock.dirty() == 0 {
                sets.idle += 1;
                sets = self.dirtied.wait(sets).unwrap_or_else(PoisonError::into_inner);
                sets.idle -= 1;
                continue;
            }
            let started = Instant::now();
            if let Some(Err(_)) = uzone_pages::clear_ahead(self, Locked(sets), from, batch) {
                return; // memory that cannot be written: takers say so
            }
            sets = self.rest(started.elapsed(), percent);
        }
    }

    /// Leaves the CPU to others for as long as the worker's share wants, or until the pool ends.
    fn rest(&self, worked: Duration, percent: NonZeroU8) -> MutexGuard<'_, Sets> {
        let percent = u32::from(percent.get().min(100));
        let until = Instant::now() + worked * (100 - percent) / percent;
        let mut sets = self.locked();
        while !sets.is_closing {
            let Some(left) = until.checked_duration_since(Instant::now()) else { break };
            if left.is_zero() {
                break;
            }
            sets = self
                .dirtied
                .wait_timeout(sets, left)
                .map_or_else(|error| error.into_inner().0, |(sets, _)| sets);
        }
        sets
    }

    fn take(self: &Arc<Self>, folios: usize) -> Result<Pooled<P>, PoolError> {
        if folios == 0 {
            return Err(PoolError::Nothing);
        }
        // Before the lock: it may call the owner, who may ask the pool.
        self.pagemap.inner.collect_bus_errors();
        match uzone_pages::hand_out(&**self, folios) {
            Ok(first) => {
                let range = self.pages(first, folios);
                Ok(Pooled { shared: self.clone(), range, is_ours: true })
            }
            Err(Refusal::Exhausted { free, pinned }) => {
                Err(PoolError::Exhausted { folios, free, pinned, all: self.folios() })
            }
            Err(Refusal::Failed(failure)) => Err(failure.into()),
        }
    }

    /// Returns the folios of the pool that have pages of `range`, if there are any.
    fn whole_folios(&self, range: PfnRange) -> Option<PfnRange> {
        let (pool, order) = (self.pagemap.range(), self.order());
        let start = range.start().align_down(order).max(pool.start());
        // A pool ends with a folio, so no folio ends behind it.
        let end = range.end().align_up(order).map_or(pool.end(), |end| end.min(pool.end()));
        PfnRange::try_new(start, end.checked_since(start)?).ok()
    }

    fn populate(
        &self,
        range: PfnRange,
        options: &PopulateOptions,
    ) -> Result<Option<PopulateReport>, NotPopulated> {
        let Some(range) = self.whole_folios(range) else { return Ok(None) };
        let inner = &self.pagemap.inner;
        // While they are being filled no other thread can pin, fill or clear them.
        let states = (Content::Filling, Content::Absent);
        let mut filling = Owned::take(inner, range, &[Content::Absent], states, |_, _| ());
        let punch = |run: &PfnRange| inner.region.punch(inner.bytes_of(*run)).is_ok();
        let is_zero = filling.ranges.iter().all(punch);
        let report = self.pagemap.populate(range, options)?;
        filling.to = if is_zero { Content::Zero } else { Content::Present };
        drop(filling);
        let (first, folios) = self.numbers(range);
        uzone_pages::look_again(self, first, folios);
        Ok(Some(report))
    }

    fn folios(&self) -> usize {
        let folios = self.pagemap.range().pages().get() >> self.order().get();
        usize::try_from(folios).unwrap_or(usize::MAX)
    }

    /// Returns the number of the first folio of a range that was handed out, and how many it has.
    fn numbers(&self, range: PfnRange) -> (usize, usize) {
        let order = self.order();
        let pages = range.start().checked_since(self.pagemap.range().start()).unwrap_or_default();
        let first = usize::try_from(pages.get() >> order.get()).unwrap_or(usize::MAX);
        (first, usize::try_from(range.pages().get() >> order.get()).unwrap_or(0))
    }

    /// Takes folios back: those of a guard, or those whose owner has only their range.
    fn free(&self, given: PfnRange, is_guard: bool) -> Result<(), PoolError> {
        let (pool, order) = (self.pagemap.range(), self.order());
        let is_whole = given.start().is_aligned(order) && given.end().is_aligned(order);
        let before = given.start().checked_since(pool.start());
        let (Some(before), true) = (before, is_whole && pool.contains_range(given)) else {
            return Err(PoolError::Foreign { given, pool });
        };
        // Numbers of folios of the pool, which has sets of so many.
        let number = |pages: u64| usize::try_from(pages >> order.get()).unwrap_or(usize::MAX);
        let (first, folios) = (number(before.get()), number(given.pages().get()));
        let stock = self.lock();
        for number in first..first + folios {
            let pfn = self.pages(number, 1).start();
            if !stock.is_used(number) {
                return Err(PoolError::Free { pfn });
            }
            if !is_guard && !stock.is_loose(number) {
                return Err(PoolError::Guarded { pfn });
            }
            let pins = self.pagemap.inner.word(pfn).pins();
            if pins > 0 {
                return Err(PoolError::Pinned { pfn, pins });
            }
        }
        self.take_back(stock, first, folios);
        Ok(())
    }

    /// Takes folios back that are handed out.
    fn take_back(&self, stock: Locked<'_>, first: usize, folios: usize) {
        let clears = self.options.clears_on_release;
        let cleared = uzone_pages::give_back(self, stock, first, folios, clears);
        self.on_release.fetch_add(cleared as u64, Ordering::Relaxed); // a number to report
    }
}

impl<P: Payload> PoolBackend for Shared<P> {
    type Failure = WriteError;
    type Locked<'a>
        = Locked<'a>
    where
        Self: 'a;

    fn lock(&self) -> Locked<'_> {
        Locked(self.locked())
    }

    fn wait<'a>(&'a self, stock: Locked<'a>) -> Locked<'a> {
        let Locked(mut sets) = stock;
        sets.takers += 1;
        sets = self.sorted.wait(sets).unwrap_or_else(PoisonError::into_inner);
        sets.takers -= 1;
        Locked(sets)
    }

    fn sorted(&self, stock: Locked<'_>) {
        let Locked(sets) = stock;
        let (takers, wakes_worker) = (sets.takers, sets.idle > 0 && sets.stock.dirty() > 0);
        drop(sets);
        // A signal costs a system call, so only sleeping threads are signalled.
        if takers > 0 {
            self.sorted.notify_all();
        }
        if wakes_worker {
            // All, because one that rests waits here as well.
            self.dirtied.notify_all();
        }
    }

    fn standing(&self, number: usize) -> FolioState {
        let word = self.pagemap.inner.word(self.pages(number, 1).start());
        if word.content() == Content::Poisoned || word.is_partly_poisoned() {
            FolioState::Bad
        } else if word.content() == Content::Zero {
            FolioState::Zero
        } else if word.pins() > 0 || !CLEARABLE.contains(&word.content()) {
            FolioState::Aside
        } else {
            FolioState::Dirty
        }
    }

    fn own(&self, first: usize, folios: usize) -> usize {
        let is_owned = |number: &usize| {
            let head = self.pages(*number, 1).start();
            self.pagemap.inner.folio(head).is_some_and(Folio::take_zero)
        };
        (first..first + folios).filter(is_owned).count()
    }

    fn clear(&self, first: usize, folios: usize) -> Result<usize, WriteError> {
        // No thread takes when the pool ends, so this cancels the worker, and what comes back later.
        let options = ZeroOptions::default().batching(Batching::COOPERATIVE);
        let options = options.cancel(self.cancel.clone());
        let zeroed = self.pagemap.zero(self.pages(first, folios), &options)?;
        // What raised SIGBUS is bad now where somebody watches for that, and is set aside. Else it is
        // dirty as before, and a taker that wants it has to get the reason.
        if let Some(error) = zeroed.lost().next()
            && self.pagemap.inner.collect_bus_errors() == 0
        {
            return Err(WriteError::Access(error));
        }
        Ok(usize::try_from(zeroed.pages.get() >> self.order().get()).unwrap_or(usize::MAX))
    }

    fn count_ahead(&self, folios: usize) {
        // Relaxed: this thread takes the lock after it, as those do before who read the number.
        self.ahead.fetch_add(folios as u64, Ordering::Relaxed);
    }

    fn count_on_demand(&self, folios: usize) {
        self.on_demand.fetch_add(folios as u64, Ordering::Relaxed); // a number to report
    }
}

impl<P: Payload> Pool<P> {
    /// Takes a pagemap whose folios are not in use. Those that are known to be zero
    /// ([`BindOptions::known_zero`](crate::BindOptions::known_zero)) need not be cleared, all others
    /// are before they are handed out.
    ///
    /// Costs a look at every folio's word.
    ///
    /// # Errors
    /// The pagemap with what the system answered if the worker's thread cannot be started.
    pub fn new(
        pagemap: Pagemap<P>,
        options: PoolOptions,
    ) -> Result<Self, (Pagemap<P>, std::io::Error)>
    where
        P: Send + Sync + 'static,
    {
        Self::on(&places(&SystemRoot::host()), pagemap, options)
    }

    /// Makes a pool with a worker for each of `places`, which are CPUs to keep to; none, and it goes
    /// where it likes.
    fn on(
        places: &[Vec<u32>],
        pagemap: Pagemap<P>,
        options: PoolOptions,
    ) -> Result<Self, (Pagemap<P>, std::io::Error)>
    where
        P: Send + Sync + 'static,
    {
        let folios = pagemap.range().pages().get() >> pagemap.inner.order().get();
        let folios = usize::try_from(folios).unwrap_or(usize::MAX);
        let sets = Sets { stock: PoolState::new(folios), is_closing: false, takers: 0, idle: 0 };
        let shared = Arc::new(Shared {
            pagemap,
            options,
            sets: Mutex::new(sets),
            sorted: Condvar::new(),
            dirtied: Condvar::new(),
            ahead: AtomicU64::new(0),
            on_demand: AtomicU64::new(0),
            on_release: AtomicU64::new(0),
            cancel: Cancel::default(),
        });
        uzone_pages::restock(&*shared, 0, folios);
        let mut pool = Self { shared, workers: Vec::new() };
        let Some(percent) = options.worker_percent else { return Ok(pool) };
        for (index, cpus) in places.iter().enumerate() {
            let (shared, cpus) = (pool.shared.clone(), cpus.clone());
            let from = folios / places.len() * index;
            let thread = std::thread::Builder::new().name("uzone-zero".to_owned());
            match thread.spawn(move || shared.work(percent, &cpus, from)) {
                Ok(worker) => pool.workers.push(worker),
                Err(error) => match pool.into_pagemap() {
                    Ok(pagemap) => return Err((pagemap, error)),
                    Err(_) => unreachable!("nothing was handed out"),
                },
            }
        }
        Ok(pool)
    }

    /// Hands out a folio, every byte of which is zero. Costs a lock and an atomic step if one is zero
    /// already; otherwise the time to clear one, on this thread. If the last ones are being cleared, it
    /// waits for them.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] if none is free, and [`PoolError::Clear`] if its memory cannot be cleared.
    pub fn take(&self) -> Result<Pooled<P>, PoolError> {
        self.shared.take(1)
    }

    /// Hands out several folios in a row, every byte of which is zero; those of them that are not are
    /// cleared first, on this thread. Costs a search for the place besides.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] if there are not so many in a row, [`PoolError::Nothing`] for none, and
    /// [`PoolError::Clear`] if their memory cannot be cleared.
    pub fn take_run(&self, folios: usize) -> Result<Pooled<P>, PoolError> {
        self.shared.take(folios)
    }

    /// Takes folios back that [`Pooled::into_range`] named; some of them, or all.
    ///
    /// # Errors
    /// [`PoolError::Foreign`] if they are not whole folios of the pool, and [`PoolError::Free`],
    /// [`PoolError::Guarded`] or [`PoolError::Pinned`] if one is free already, still a guard's ([`Pooled`]),
    /// or pinned; then none is taken back.
    pub fn free(&self, range: PfnRange) -> Result<(), PoolError> {
        self.shared.free(range, false)
    }

    /// Makes absent folios of `range` present, and hands them out from then on. Their memory is given
    /// back to the kernel first, which answers the next touch with zeroes; where it does not take it
    /// back, the folios are dirty and the pool clears them. Pages that are not the pool's are left out,
    /// and folios that are not absent are only populated.
    ///
    /// Costs what [`Pagemap::populate`] does, and a system call for each run of absent folios.
    ///
    /// # Errors
    /// [`NotPopulated`] as [`Pagemap::populate`]; then the folios are absent as before.
    pub fn populate(
        &self,
        range: PfnRange,
        options: &PopulateOptions,
    ) -> Result<PopulateReport, NotPopulated> {
        self.shared.populate(range, options)?.map_or_else(
            || {
                let region = self.shared.pagemap.range();
                Err(NotPopulated::NotHere { asked: range, region })
            },
            Ok,
        )
    }

    /// Looks again at free folios of `range` that were set aside because they were pinned, bad or not
    /// there, after that has changed: memory that was populated since is handed out from then on. Pages
    /// that are not the pool's are left out.
    ///
    /// [`Pool::take`] does so by itself, for all that were set aside, before it reports that there are none.
    /// Costs a lock, held for a look at the word of each folio of the range.
    pub fn look_again(&self, range: PfnRange) {
        if let Some(folios) = self.shared.whole_folios(range) {
            let (first, folios) = self.shared.numbers(folios);
            uzone_pages::look_again(&*self.shared, first, folios);
        }
    }

    /// Returns the pagemap whose folios these are, to read it, to pin pages and to mark them bad. It
    /// neither writes to folios nor changes their content state: only the owner of a folio writes to it
    /// ([`Pooled::write_at`]), and only the pool knows which is zero.
    #[must_use]
    pub fn pagemap(&self) -> &PagemapView<P> {
        &self.shared.pagemap
    }

    /// Returns what the pool has and has done.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let stock = self.shared.lock();
        // Relaxed: numbers to report.
        let ahead = self.shared.ahead.load(Ordering::Relaxed);
        let on_demand = self.shared.on_demand.load(Ordering::Relaxed);
        let on_release = self.shared.on_release.load(Ordering::Relaxed);
        let folio =
            self.shared.order().pages().get() << self.pagemap().region().page_size().shift();
        PoolStats {
            folios: self.shared.folios(),
            used: stock.used(),
            zero: stock.zero(),
            dirty: stock.dirty(),
            pinned: stock.pinned(),
            bad: stock.bad(),
            cleared_ahead: ahead,
            cleared_on_demand: on_demand,
            cleared_on_release: on_release,
            cleared: ByteLen::new((ahead + on_demand + on_release).saturating_mul(folio)),
        }
    }

    /// Ends the pool and returns its pagemap, if nothing is handed out.
    ///
    /// # Errors
    /// The pool as it was, if something is, or if a callback of the pagemap calls this on a worker of the
    /// pool, which then has the pagemap.
    pub fn into_pagemap(mut self) -> Result<Pagemap<P>, Self> {
        let current = std::thread::current().id();
        let is_worker = self.workers.iter().any(|worker| worker.thread().id() == current);
        if is_worker || self.shared.lock().used() > 0 {
            return Err(self);
        }
        self.stop();
        // What is left is this share, unless a guard that was given back is about to let go of its.
        let mut shared = self.shared.clone();
        drop(self);
        loop {
            match Arc::try_unwrap(shared) {
                Ok(shared) => return Ok(shared.pagemap),
                Err(again) => shared = again,
            }
            std::thread::yield_now();
        }
    }

    fn stop(&mut self) {
        if self.workers.is_empty() {
            return;
        }
        self.shared.locked().is_closing = true;
        self.shared.cancel.cancel();
        self.shared.dirtied.notify_all();
        for worker in self.workers.drain(..) {
            // A worker that calls the owner, who drops the pool there, cannot wait for itself. It ends
            // when that call returns.
            if worker.thread().id() != std::thread::current().id() {
                // A worker that panicked has said so.
                let _ = worker.join();
            }
        }
    }
}

/// Returns for each node with CPUs that this thread may use which they are; one place without any, where
/// there are not several such nodes or the host does not say.
fn places(root: &SystemRoot) -> Vec<Vec<u32>> {
    let nodes = numa::nodes(root).unwrap_or_default();
    let usable = nodes.iter().filter_map(|node| numa::usable(&node.cpus).ok());
    let places: Vec<Vec<u32>> = usable.filter(|cpus| !cpus.is_empty()).collect();
    if places.len() > 1 { places } else { vec![Vec::new()] }
}

impl<P: Payload> Drop for Pool<P> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<P: Payload> fmt::Debug for Pool<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl<P: Payload> Pooled<P> {
    /// Returns the pages.
    #[must_use]
    pub fn range(&self) -> PfnRange {
        self.range
    }

    /// Returns where they lie in memory.
    #[must_use]
    pub fn segment(&self) -> Segment {
        match self.shared.pagemap.inner.segment(self.range) {
            Some(segment) => segment,
            None => unreachable!("what is handed out is of the region"),
        }
    }

    /// Copies bytes out of the folios, from byte `offset_bytes` of the first of them on.
    ///
    /// # Errors
    /// [`AccessError`] unless all bytes are inside; then none is copied. Offsets in the error are those
    /// of the region where the memory itself is at fault.
    pub fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let start = self.check_inside(offset_bytes, out.len())?;
        self.shared.pagemap.inner.region.read_at(start, out)
    }

    /// Copies bytes into the folios, from byte `offset_bytes` of the first of them on. Devices that have
    /// pinned them see each aligned 8 bytes change at once, and the whole in any order.
    ///
    /// # Errors
    /// As [`Pooled::read_at`].
    pub fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let start = self.check_inside(offset_bytes, bytes.len())?;
        self.shared.pagemap.inner.write(start, bytes)
    }

    /// Returns the byte of the region that byte `offset_bytes` of the folios is.
    fn check_inside(&self, offset_bytes: u64, len_bytes: usize) -> Result<u64, AccessError> {
        let bytes = self.shared.pagemap.inner.bytes_of(self.range);
        let held = ByteLen::new(bytes.end - bytes.start);
        crate::pin::pin_target::check_inside(offset_bytes, len_bytes, held)?;
        Ok(bytes.start + offset_bytes)
    }

    /// Gives the folios back.
    ///
    /// # Errors
    /// The folios, still handed out, with [`PoolError::Pinned`] if one of them is pinned.
    pub fn free(mut self) -> Result<(), (Self, PoolError)> {
        match self.shared.free(self.range, true) {
            Ok(()) => {
                self.is_ours = false;
                Ok(())
            }
            Err(failure) => Err((self, failure)),
        }
    }

    /// Keeps the folios handed out, for [`Pool::free`] to take back.
    #[must_use = "they stay handed out until they are given to Pool::free"]
    pub fn into_range(mut self) -> PfnRange {
        self.is_ours = false;
        let (first, folios) = self.shared.numbers(self.range);
        self.shared.lock().loosen(first, folios);
        self.range
    }
}

impl<P: Payload> Drop for Pooled<P> {
    /// Gives the folios back. Those that are pinned are set aside until they are not.
    fn drop(&mut self) {
        if !self.is_ours {
            return;
        }
        let (first, folios) = self.shared.numbers(self.range);
        let stock = self.shared.lock();
        self.shared.take_back(stock, first, folios);
    }
}

impl<P: Payload> fmt::Debug for Pooled<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pooled").field(&self.range).finish()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]
    use std::fs;

    use uzone_pages::MemoryKind;

    use super::*;
    use crate::{BindOptions, Region, Zone};

    /// A host with these nodes, each with its list of CPUs.
    fn host(name: &str, lists: &[&str]) -> (std::path::PathBuf, SystemRoot) {
        let directory =
            std::env::temp_dir().join(format!("uzone-pool-{name}-{}", std::process::id()));
        let nodes = directory.join("sys/devices/system/node");
        fs::create_dir_all(&nodes).unwrap();
        fs::write(nodes.join("online"), format!("0-{}\n", lists.len() - 1)).unwrap();
        for (number, list) in lists.iter().enumerate() {
            let node = nodes.join(format!("node{number}"));
            fs::create_dir_all(&node).unwrap();
            fs::write(node.join("cpulist"), format!("{list}\n")).unwrap();
            let meminfo =
                format!("Node {number} MemTotal: 1024 kB\nNode {number} MemFree: 512 kB\n");
            fs::write(node.join("meminfo"), meminfo).unwrap();
        }
        let root = SystemRoot::at(&directory);
        (directory, root)
    }

    #[test]
    fn there_is_a_worker_for_each_of_several_nodes_and_one_that_goes_anywhere_otherwise() {
        let mine = numa::usable(&(0..1024).collect::<Vec<_>>()).unwrap();
        let anywhere = vec![Vec::new()];
        let (first, second) = (mine[0], mine.get(1).copied());
        let no_cpu = "65535".to_owned();
        let mut cases = vec![
            // One node, one of memory alone, one whose CPUs are not ours.
            (vec![first.to_string()], anywhere.clone()),
            (vec![first.to_string(), String::new()], anywhere.clone()),
            (vec![first.to_string(), no_cpu.clone()], anywhere.clone()),
        ];
        if let Some(second) = second {
            let lists = vec![first.to_string(), String::new(), second.to_string(), no_cpu];
            cases.push((lists, vec![vec![first], vec![second]]));
        }
        for (index, (lists, expected)) in cases.into_iter().enumerate() {
            let lists: Vec<&str> = lists.iter().map(String::as_str).collect();
            let (directory, root) = host(&index.to_string(), &lists);
            assert_eq!(places(&root), expected, "{lists:?}");
            fs::remove_dir_all(directory).unwrap();
        }
        // A kernel without nodes.
        assert_eq!(places(&SystemRoot::at("/nowhere/at/all")), anywhere);
    }

    #[test]
    fn the_workers_of_several_nodes_leave_nothing_dirty_and_all_of_them_end() {
        let mine = numa::usable(&(0..1024).collect::<Vec<_>>()).unwrap();
        let places = [vec![mine[0]], vec![mine[mine.len() - 1]]];
        let region = Region::anonymous(ByteLen::mib(8)).unwrap();
        region.write_at(0, &vec![0xa5; 8 << 20]).unwrap();
        let options = BindOptions::new(MemoryKind::Generic);
        let pagemap = Zone::new().bind(region, options).unwrap();
        let workers = PoolOptions::default().worker(NonZeroU8::new(100).unwrap());
        let Ok(pool) = Pool::on(&places, pagemap, workers) else { panic!("threads") };
        assert_eq!(pool.workers.len(), 2);
        let until = Instant::now() + Duration::from_secs(60);
        while pool.stats().zero < pool.stats().folios {
            assert!(Instant::now() < until, "{:?}", pool.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(pool.stats().cleared_ahead, 2048);
        let Ok(pagemap) = pool.into_pagemap() else { panic!("nothing was handed out") };
        let mut bytes = vec![1; 8 << 20];
        pagemap.region().read_at(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
}

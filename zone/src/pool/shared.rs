//! The state that a pool shares with its workers and its guards: the sets under their lock, and the memory.
//!
//! Locks: one for the sets, held for a few steps and never while memory is cleared. The worker and the
//! waiting takers sleep on it.

use std::num::NonZeroU8;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uzone_os::{lock, numa};
use uzone_pages::{
    ByteLen, Content, Folio, FolioState, Order, PageCount, Payload, Pfn, PfnRange, PoolBackend,
    PoolState,
};

use crate::clear::options::ZeroOptions;
use crate::clear::zero::{CLEARABLE, Owned};
use crate::error::{PinError, WriteError};
use crate::pagemap::Pagemap;
use crate::pin::pin_target::PinTarget;
use crate::pool::options::{PoolError, PoolOptions, PoolStats};
use crate::populate::{PopulateOptions, PopulateReport};

/// How much the worker takes at a time, so that a taker that has to wait for it does not for long.
const WORKER_BYTES: u64 = 2 << 20;

/// The bytes of a large folio that are cleared between two looks at whether the pool ends.
const YIELD: ByteLen = ByteLen::mib(8);

/// The state under the lock.
#[derive(Debug)]
struct Sets {
    state: PoolState,
    is_closing: bool,
    /// How many takers sleep until folios have been sorted.
    takers: usize,
    /// How many workers sleep until there is a dirty folio.
    idle: usize,
}

/// The sets, locked.
pub(super) struct Locked<'a>(MutexGuard<'a, Sets>);

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

pub(super) struct Shared<P: Payload> {
    pub(super) pagemap: Pagemap<P>,
    pub(super) options: PoolOptions,
    pub(super) folios: usize,
    sets: Mutex<Sets>,
    /// Takers sleep on it; signalled when folios have been sorted.
    sorted: Condvar,
    /// Workers sleep on it; signalled when there are dirty folios, and when it ends.
    dirtied: Condvar,
    cancel: Arc<AtomicBool>,
}

impl<P: Payload> Shared<P> {
    /// Takes a pagemap, all of whose folios are in work.
    pub(super) fn new(pagemap: Pagemap<P>, options: PoolOptions) -> Self {
        let folios = pagemap.range().pages().get() >> pagemap.inner.order().get();
        let folios = usize::try_from(folios).unwrap_or(usize::MAX);
        let sets = Sets { state: PoolState::new(folios), is_closing: false, takers: 0, idle: 0 };
        Self {
            pagemap,
            options,
            folios,
            sets: Mutex::new(sets),
            sorted: Condvar::new(),
            dirtied: Condvar::new(),
            cancel: Arc::default(),
        }
    }

    /// Ends the workers.
    pub(super) fn close(&self) {
        lock(&self.sets).is_closing = true;
        // Relaxed: nothing is published by it, and a batch later is early enough.
        self.cancel.store(true, Ordering::Relaxed);
        self.dirtied.notify_all();
    }

    pub(super) fn stats(&self) -> PoolStats {
        let state = self.lock();
        let [ahead, on_demand, on_release] = state.cleared();
        let folio = self.order().pages().get() << self.pagemap.region().page_size().shift();
        PoolStats {
            folios: self.folios,
            used: state.used(),
            zero: state.count(FolioState::Zero),
            dirty: state.count(FolioState::Dirty),
            pinned: state.count(FolioState::Aside),
            bad: state.count(FolioState::Bad),
            cleared_ahead: ahead,
            cleared_on_demand: on_demand,
            cleared_on_release: on_release,
            cleared: ByteLen::new((ahead + on_demand + on_release).saturating_mul(folio)),
        }
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
    pub(super) fn work(&self, percent: NonZeroU8, cpus: &[u32], from: usize) {
        // Where the host does not allow it, the share is still kept; where a CPU was taken away
        // meanwhile, memory of other nodes is cleared as well, and more slowly.
        let _ = uzone_os::thread::idle();
        if !cpus.is_empty() {
            let _ = numa::keep_thread_to(cpus);
        }
        let batch = usize::try_from(WORKER_BYTES >> self.pagemap.region().page_size().shift());
        let batch = (batch.unwrap_or(1) >> self.order().get()).max(1);
        let mut sets = lock(&self.sets);
        loop {
            if sets.is_closing {
                return;
            }
            if sets.state.count(FolioState::Dirty) == 0 {
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
        let mut sets = lock(&self.sets);
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

    /// Hands folios out.
    pub(super) fn take(&self, folios: usize) -> Result<PfnRange, PoolError> {
        if folios == 0 {
            return Err(PoolError::Nothing);
        }
        // Before the lock: it may call the owner, which may use the pool.
        self.pagemap.inner.collect_bus_errors();
        Ok(self.pages(uzone_pages::hand_out(self, folios)?, folios))
    }

    /// Returns the folios of the pool that have pages of `range`, if there are any.
    pub(super) fn whole_folios(&self, range: PfnRange) -> Option<PfnRange> {
        let (pool, order) = (self.pagemap.range(), self.order());
        let start = range.start().align_down(order).max(pool.start());
        // A pool ends with a folio, so no folio ends behind it.
        let end = range.end().align_up(order).map_or(pool.end(), |end| end.min(pool.end()));
        PfnRange::try_new(start, end.checked_since(start)?).ok()
    }

    pub(super) fn populate(
        &self,
        range: PfnRange,
        options: &PopulateOptions,
    ) -> Result<PopulateReport, WriteError> {
        let region = self.pagemap.range();
        let not_here = PinError::NotHere { asked: range, region };
        let range = self.whole_folios(range).ok_or(not_here)?;
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
        Ok(report)
    }

    /// Returns the number of the first folio of a range that was handed out, and how many it has.
    pub(super) fn numbers(&self, range: PfnRange) -> (usize, usize) {
        let order = self.order();
        let pages = range.start().checked_since(self.pagemap.range().start()).unwrap_or_default();
        let first = usize::try_from(pages.get() >> order.get()).unwrap_or(usize::MAX);
        (first, usize::try_from(range.pages().get() >> order.get()).unwrap_or(0))
    }

    /// Takes folios back: those of a guard, or those whose owner has only their range.
    pub(super) fn free(&self, given: PfnRange, is_guard: bool) -> Result<(), PoolError> {
        let (pool, order) = (self.pagemap.range(), self.order());
        let is_whole = given.start().is_aligned(order) && given.end().is_aligned(order);
        if !is_whole || !pool.contains_range(given) {
            return Err(PoolError::Foreign { given, pool });
        }
        let (first, folios) = self.numbers(given);
        let state = self.lock();
        for number in first..first + folios {
            let pfn = self.pages(number, 1).start();
            if !state.is_used(number) {
                return Err(PoolError::Free { pfn });
            }
            if !is_guard && !state.is_loose(number) {
                return Err(PoolError::Guarded { pfn });
            }
            let pins = self.pagemap.inner.word(pfn).pins();
            if pins > 0 {
                return Err(PoolError::Pinned { pfn, pins });
            }
        }
        self.take_back(state, first, folios);
        Ok(())
    }

    /// Takes folios back that are handed out.
    pub(super) fn take_back(&self, state: Locked<'_>, first: usize, folios: usize) {
        let clears = self.options.clears_on_release;
        uzone_pages::give_back(self, state, first, folios, clears);
    }
}

impl<P: Payload> PoolBackend for Shared<P> {
    type Failure = PoolError;
    type Locked<'a>
        = Locked<'a>
    where
        Self: 'a;

    fn lock(&self) -> Locked<'_> {
        Locked(lock(&self.sets))
    }

    fn wait<'a>(&'a self, state: Locked<'a>) -> Result<Locked<'a>, PoolError> {
        let Locked(mut sets) = state;
        sets.takers += 1;
        sets = self.sorted.wait(sets).unwrap_or_else(PoisonError::into_inner);
        sets.takers -= 1;
        Ok(Locked(sets))
    }

    fn sorted(&self, state: Locked<'_>) {
        let Locked(sets) = state;
        let (takers, wakes_worker) =
            (sets.takers, sets.idle > 0 && sets.state.count(FolioState::Dirty) > 0);
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

    fn state_of(&self, number: usize) -> FolioState {
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
            self.pagemap.inner.memmap.folio(head).is_some_and(Folio::take_zero)
        };
        (first..first + folios).filter(is_owned).count()
    }

    fn clear(&self, first: usize, folios: usize) -> Result<usize, PoolError> {
        // No thread takes when the pool ends, so this cancels the worker, and folios that come back later.
        let options = ZeroOptions::default().batch(YIELD).cancel(self.cancel.clone());
        let cleared = self.pagemap.zero(self.pages(first, folios), &options)?;
        // A page that raised `SIGBUS` is bad now where the program watches for that, and is set aside. Else it
        // is dirty as before, and a taker that wants it has to get the reason.
        if let Some(error) = cleared.lost()
            && self.pagemap.inner.collect_bus_errors() == 0
        {
            return Err(WriteError::Access(error).into());
        }
        let shift = u32::from(self.order().get()) + self.pagemap.region().page_size().shift();
        Ok(usize::try_from(cleared.done_bytes().get() >> shift).unwrap_or(usize::MAX))
    }

    fn exhausted(&self, folios: usize, free: usize, pinned: usize) -> PoolError {
        PoolError::Exhausted { folios, free, pinned, all: self.folios }
    }
}

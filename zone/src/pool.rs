//! Pages handed out and taken back: [`Pool`]. Nothing that one owner wrote reaches the next.
//!
//! A pool hands out folios of one pagemap, alone or several in a row, and only ones whose every byte is
//! zero; a folio that comes back is dirty until it has been cleared. A worker clears dirty folios ahead of
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
//! A taker that finds every folio handed out, except those that a worker is
//! clearing, waits for the worker: it clears 2 MiB at a time, or a folio, at its priority.
//!
//! Cost: a folio from the zero set is a lock, a few words of a bit set and one atomic step; one that
//! is given back the same, and a system call if a taker waits for it.

pub(crate) mod options;
mod shared;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;

use uzone_os::thread::pause;
use uzone_os::{AccessError, SystemRoot, numa};
use uzone_pages::{Payload, PfnRange, PoolBackend};

use crate::error::WriteError;
use crate::pagemap::{Pagemap, PagemapView};
use crate::pin::pin_target::{PinTarget, Segment, as_ptr, as_words, start_inside};
use crate::pool::options::{PoolError, PoolOptions, PoolStats};
use crate::pool::shared::Shared;
use crate::populate::{PopulateOptions, PopulateReport};

/// Folios of a pagemap that are handed out and taken back: the bytes of one owner never reach the next.
///
/// Dropping it stops its workers; a folio that is handed out stays so until it is dropped as well.
///
/// # Examples
///
/// ```
/// use uzone_pages::{ByteLen, MemoryKind, Order};
/// use uzone_zone::{BindOptions, Pool, PoolOptions, Region, Zone};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Fresh memory of the kernel is zero, so nothing has to be cleared before its first owner.
/// let options = BindOptions::new(MemoryKind::Generic).order(Order::PMD).known_zero();
/// let pagemap = Zone::new().bind(Region::anonymous(ByteLen::mib(64))?, options)?;
/// let pool = Pool::new(pagemap, PoolOptions::default()).map_err(|(_, error)| error)?;
///
/// let first = pool.take()?; // 2 MiB of zeroes
/// first.write_at(0, b"a secret")?;
/// first.free().map_err(|(_, error)| error)?; // cleared before the next owner has it
///
/// for _ in 0..32 {
///     let mut bytes = [1; 8];
///     pool.take()?.read_at(0, &mut bytes)?;
///     assert_eq!(bytes, [0; 8]);
/// }
/// # Ok(())
/// # }
/// ```
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

impl<P: Payload> Pool<P> {
    /// Takes a pagemap whose folios are not in use. Those that are known to be zero
    /// ([`BindOptions::known_zero`](crate::BindOptions::known_zero)) need not be cleared, all others
    /// are before they are handed out.
    ///
    /// Costs a look at every folio's word.
    ///
    /// # Errors
    /// The pagemap with the answer of the system if the worker's thread cannot be started.
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
        let shared = Arc::new(Shared::new(pagemap, options));
        let folios = shared.folios;
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
        self.take_run(1)
    }

    /// Hands out several folios in a row, every byte of which is zero; those of them that are not are
    /// cleared first, on this thread. Costs a search for the place besides.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] if there are not so many in a row, [`PoolError::Nothing`] for none, and
    /// [`PoolError::Clear`] if their memory cannot be cleared.
    pub fn take_run(&self, folios: usize) -> Result<Pooled<P>, PoolError> {
        let range = self.shared.take(folios)?;
        Ok(Pooled { shared: self.shared.clone(), range, is_ours: true })
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
    /// Costs as much as [`Pagemap::populate`], and a system call for each run of absent folios.
    ///
    /// # Errors
    /// [`WriteError`] as [`Pagemap::populate`]; then the folios are absent as before.
    pub fn populate(
        &self,
        range: PfnRange,
        options: &PopulateOptions,
    ) -> Result<PopulateReport, WriteError> {
        self.shared.populate(range, options)
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

    /// Returns the numbers of the pool.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.shared.stats()
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
        // This share is left, unless a guard that was given back is about to let go of its own.
        let (mut shared, mut round) = (self.shared.clone(), 0);
        drop(self);
        loop {
            match Arc::try_unwrap(shared) {
                Ok(shared) => return Ok(shared.pagemap),
                Err(again) => shared = again,
            }
            pause(&mut round);
        }
    }

    fn stop(&mut self) {
        if self.workers.is_empty() {
            return;
        }
        self.shared.close();
        for worker in self.workers.drain(..) {
            // A worker in a call of the owner that drops the pool cannot wait for itself. It ends
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
    let usable = nodes.into_iter().filter_map(|node| numa::usable(node.cpus).ok());
    let places: Vec<Vec<u32>> =
        usable.map(Iterator::collect).filter(|cpus: &Vec<u32>| !cpus.is_empty()).collect();
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
        let inner = &self.shared.pagemap.inner;
        inner.region.read_at(start_inside(&**inner, self.range, offset_bytes, out.len())?, out)
    }

    /// Copies bytes into the folios, from byte `offset_bytes` of the first of them on. Devices that have
    /// pinned them see each aligned 8 bytes change at once, and the whole in any order.
    ///
    /// # Errors
    /// As [`Pooled::read_at`].
    pub fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let inner = &self.shared.pagemap.inner;
        inner.write(start_inside(&**inner, self.range, offset_bytes, bytes.len())?, bytes)
    }

    /// Returns the words of a range of the folios' bytes, counted from the first, to be read and written in place.
    ///
    /// They are atomic, and no slice of plain bytes is lent, also of private memory: a device or another thread may have
    /// pinned the folios and write to them, and [`Pool::pagemap`] reads them at any time.
    ///
    /// # Errors
    /// [`AccessError`] unless all bytes are inside, and start and end at multiples of 8.
    pub fn as_words(&self, range: Range<u64>) -> Result<&[AtomicU64], AccessError> {
        as_words(&*self.shared.pagemap.inner, self.range, range)
    }

    /// Returns a pointer to the first byte of the folios, for foreign code and for `unsafe` code of the caller. It is
    /// good for all of their bytes, until they are given back. A slice may be made of it while no other thread, device or
    /// guard has them.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        as_ptr(&*self.shared.pagemap.inner, self.range)
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
        let state = self.shared.lock();
        self.shared.take_back(state, first, folios);
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
    use std::num::NonZeroU8;
    use std::time::{Duration, Instant};

    use uzone_pages::{ByteLen, MemoryKind};

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
        let mine = numa::usable(0..1024).unwrap().collect::<Vec<_>>();
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
        let mine = numa::usable(0..1024).unwrap().collect::<Vec<_>>();
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

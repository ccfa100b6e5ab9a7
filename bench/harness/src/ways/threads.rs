//! Work of several threads that start together ([`together`]), and threads on chosen CPUs ([`on`]).

use std::sync::Barrier;
use std::time::{Duration, Instant};

use uzone_os::{numa, thread_faults};

use crate::{BenchError, Found, Result};

/// Returns the CPUs that this process may use.
pub fn usable_cpus() -> Result<Vec<u32>> {
    Ok(numa::usable(0..1024)?.collect())
}

/// Does something in a thread of its own, on these CPUs.
pub fn on<T: Send>(cpus: &[u32], work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || {
            numa::keep_thread_to(cpus)?;
            work()
        });
        let thread = thread.map_err(|_| BenchError::threads(1))?;
        thread.join().unwrap_or_else(|_| Err(BenchError::threads(1)))
    })
}

/// One thread's share of the work: its start, its end, and the faults that it took.
#[derive(Debug)]
pub struct Share {
    begun: Instant,
    ended: Instant,
    /// The time and the faults of the thread.
    pub found: Found,
}

impl Share {
    /// Does some work, and takes the kernel's count of the thread's faults.
    pub fn of(work: impl FnOnce() -> Result) -> Result<Self> {
        let before = thread_faults();
        let begun = Instant::now();
        work()?;
        let ended = Instant::now();
        let (elapsed, faults) = (ended - begun, thread_faults().saturating_sub(before));
        Ok(Self { begun, ended, found: Found { elapsed, faults, ..Found::default() } })
    }
}

/// Runs `work` on `threads` threads. It gets the barrier at which all start. The time is that from the start of the first
/// to the end of the last.
pub fn together(threads: usize, work: impl Fn(&Barrier) -> Result<Share> + Sync) -> Result<Found> {
    let (start, work) = (&Barrier::new(threads), &work);
    let shares: Vec<Share> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(move || work(start))).collect();
        let failed = BenchError::threads(threads.len());
        let joined = threads.into_iter().map(|thread| thread.join().ok());
        joined.collect::<Option<Result<_>>>().unwrap_or(Err(failed))
    })?;
    let begun = shares.iter().map(|share| share.begun).min();
    let ended = shares.iter().map(|share| share.ended).max();
    let elapsed = begun.zip(ended).map_or(Duration::ZERO, |(begun, ended)| ended - begun);
    let mut all = Found::default();
    shares.into_iter().for_each(|share| all.add(share.found));
    Ok(Found { elapsed, ..all })
}

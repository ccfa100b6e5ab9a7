//! `uzone-bench hostpool`: host memory for accelerators, registered with a driver of our own.
//!
//! The driver registers 30 GB/s with its lock held, as CUDA's does for huge pages, and the lock is as unfair. The rows
//! time the pool: until the first block is ready, until all of it is ready, and the longest wait of another thread for
//! the driver meanwhile. `scripts/gpu.sh` measures a real driver.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use uzone_hostpool::{Budget, HostPool, HostPoolOptions, Register, RegisterError, Registration};
use uzone_os::{Addr, lock};
use uzone_pages::{ByteLen, ErrorKind};
use uzone_zone::Region;

use crate::settings::{HostpoolSettings, Part};
use uzone_harness::{Bench, BenchError, Result, Role, Suite, Watch};

/// The rate at which the driver registers, in bytes a nanosecond.
const RATE: u64 = 30;
const LONG: Duration = Duration::from_secs(600);

/// The driver: its lock, which a question takes as well.
#[derive(Clone, Default)]
struct Stub(Arc<Mutex<()>>);

impl Register for Stub {
    fn register(&self, _: Addr, len: ByteLen) -> Result<(), RegisterError> {
        let _held = lock(&self.0);
        std::thread::sleep(Duration::from_nanos(len.get() / RATE));
        Ok(())
    }

    fn unregister(&self, _: Addr) -> Result<(), RegisterError> {
        Ok(())
    }
}

impl Stub {
    fn ask(&self) {
        drop(lock(&self.0));
    }
}

fn refused(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> BenchError {
    BenchError::host(ErrorKind::Other, uzone_os::with_causes(&*error.into()))
}

/// Opens a pool that the driver registers.
fn open(size: ByteLen, stub: &Stub) -> Result<HostPool> {
    let with = Registration::With(Arc::new(stub.clone()));
    HostPool::open(size, HostPoolOptions::default().register(with)).map_err(refused)
}

/// Populates by one thread, and registers in one call, as the driver does it.
fn naive(size: ByteLen, stub: &Stub) -> Result<Duration> {
    let started = Instant::now();
    let region = Region::anonymous(size)?;
    region.mapping().populate(0..size.get())?;
    stub.register(region.addr(), size).map_err(refused)?;
    Ok(started.elapsed())
}

/// The larger of populating alone, by the pool's threads, and registering alone.
fn parts_alone(size: ByteLen, stub: &Stub) -> Result<Duration> {
    let alone = HostPoolOptions::default().budget(Budget::Eager);
    let pool = HostPool::open(size, alone).map_err(refused)?;
    let populated = pool.report().all_ready.unwrap_or_default();
    let started = Instant::now();
    stub.register(pool.addr(), size).map_err(refused)?;
    Ok(populated.max(started.elapsed()))
}

fn first(size: ByteLen, stub: &Stub) -> Result<Duration> {
    let started = Instant::now();
    let pool = open(size, stub)?;
    let block = pool.take(LONG).map_err(refused)?;
    let elapsed = started.elapsed();
    let mut line = [1; 64];
    block.read_at(block.len().get() - 64, &mut line).map_err(refused)?;
    if line == [0; 64] { Ok(elapsed) } else { Err(BenchError::wrong_byte("hostpool", 0)) }
}

fn all(size: ByteLen, stub: &Stub) -> Result<Duration> {
    let started = Instant::now();
    let pool = open(size, stub)?;
    pool.wait_ready(size, LONG).map_err(refused)?;
    Ok(started.elapsed())
}

/// Runs `work` while another thread asks the driver, and returns its answer with the longest question.
fn asked<T>(stub: &Stub, work: impl FnOnce() -> Result<T>) -> Result<(T, Duration)> {
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            // Relaxed: the flag only ends the loop.
            while !is_done.load(Ordering::Relaxed) {
                let started = Instant::now();
                stub.ask();
                longest = longest.max(started.elapsed());
                std::thread::sleep(Duration::from_micros(50));
            }
            longest
        });
        let answer = work();
        is_done.store(true, Ordering::Relaxed);
        let longest = asker.join().map_err(|_| BenchError::threads(1))?;
        Ok((answer?, longest))
    })
}

/// The work of a row on a pool of a length.
type Row = fn(ByteLen, &Stub) -> Result<Duration>;

/// Runs the table.
pub(crate) fn run(settings: &HostpoolSettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let &HostpoolSettings { size, rounds } = settings;
    let mut session = part.session(format!("{size}, {rounds} rounds"), rounds, watch);
    let rows: [(Role, &str, &str, Row); 7] = [
        (Role::Naive, "naive", "naive, one thread, then one call", naive),
        (Role::Limit, "limit", "limit, the larger of both parts alone", parts_alone),
        (Role::Ours, "first", "ours, the first block", first),
        (Role::Ours, "all", "ours, all ready", all),
        (Role::Ours, "all-asked", "ours, all ready, another thread asking", |size, stub| {
            Ok(asked(stub, || all(size, stub))?.0)
        }),
        (Role::Naive, "wait-naive", "longest question, one call", |size, stub| {
            Ok(asked(stub, || naive(size, stub))?.1)
        }),
        (Role::Ours, "wait", "ours, longest question", |size, stub| {
            Ok(asked(stub, || all(size, stub))?.1)
        }),
    ];
    let stub = Stub::default();
    let mut suite = Suite::new("hostpool", size);
    for (role, row, name, work) in rows {
        let stub = &stub;
        let spec = suite.add(role, row, name, move |_| work(size, stub));
        match row {
            "wait" | "wait-naive" => spec.naive("wait-naive"),
            "first" => spec.naive("naive"),
            _ => spec.naive("naive").limit("limit"),
        };
    }
    let title = format!("{size} of host memory, registered by a driver that takes 30 GB/s");
    let note = "transparent huge pages; the driver is a lock that is held for so long; a question takes the lock";
    session.measure(suite, title, note)?;
    session.finish()
}

//! The time that a taker waits for a folio of a pool: `pool-take`.
//!
//! Each row takes folios of 2 MiB one by one, with the time of each, and gives them back outside of the time. They
//! differ in the thread that clears a folio: a worker ahead of need, the thread that gave it back, or the taker. The
//! naive way is a list of free folios behind a lock, which are cleared when they are taken.

use std::cell::RefCell;
use std::num::NonZeroU8;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use uzone_pages::{ByteLen, ErrorKind, MemoryKind, Order};
use uzone_zone::{BindOptions, Pool, PoolOptions, Pooled, PopulateOptions, Region, Zone};

use uzone_harness::{BenchError, Result, Role, Session, Suite, Times, bytes, index, nanoseconds};

const FOLIO: usize = 2 << 20;
/// The number of folios of a pool.
const FOLIOS: usize = 32;
/// The number of times that all of them are taken in a round, so that the 99th percentile rests on several takes.
const TURNS: usize = 8;
/// The time that a taker spins before it takes: the wake-up of a virtual CPU is no time of the pool. The taker does
/// not touch the pool meanwhile.
const AWAKE: Duration = Duration::from_micros(100);
/// The longest wait for a worker that gets no CPU.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns a pool of `folios`, present and dirty.
fn pool(folios: usize, options: PoolOptions) -> Result<Pool> {
    let region = Region::anonymous(bytes(folios * FOLIO))?;
    let report = region.populate(0..region.len().get(), &PopulateOptions::default())?;
    debug_assert!(report.is_whole(), "it is not cancelled");
    let order = BindOptions::new(MemoryKind::Generic).order(Order::new(9));
    let pagemap = Zone::new().bind(region, order)?;
    Pool::new(pagemap, options).map_err(|(_, _)| BenchError::threads(1))
}

/// Waits until `folios` are zero.
fn wait_for_zero(pool: &Pool, folios: usize) -> Result {
    let until = Instant::now() + PATIENCE;
    while pool.stats().zero < folios {
        if Instant::now() > until {
            // It has the lowest priority.
            let text = format!(
                "the worker of a pool did not clear its folios in {PATIENCE:?}: leave it a CPU"
            );
            return Err(BenchError::host(ErrorKind::Other, text));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    let awake = Instant::now() + AWAKE;
    while Instant::now() < awake {
        std::hint::spin_loop();
    }
    Ok(())
}

/// Takes `folios` one by one, with their times; dropped, they go back.
fn take(pool: &Pool, folios: usize, times: &RefCell<Vec<u64>>) -> Result<Duration> {
    let mut taken = Vec::with_capacity(folios);
    let mut elapsed = Duration::ZERO;
    for _ in 0..folios {
        let started = Instant::now();
        let folio = pool.take();
        let time = started.elapsed();
        taken.push(folio?);
        elapsed += time;
        times.borrow_mut().push(nanoseconds(time));
    }
    for folio in &taken {
        check(folio)?;
        // A tenant's first touch of each page, so that the folio comes back dirty.
        touch(folio)?;
    }
    Ok(elapsed)
}

/// Refuses a folio that has a byte at its edges or in its middle.
fn check(folio: &Pooled) -> Result {
    let len = bytes(FOLIO).get();
    for offset in [0, len / 2, len - 64] {
        let mut line = [1; 64];
        folio.read_at(offset, &mut line)?;
        if line != [0; 64] {
            return Err(BenchError::wrong_byte("pool-take", offset));
        }
    }
    Ok(())
}

fn touch(folio: &Pooled) -> Result {
    let len = bytes(FOLIO).get();
    for page in (0..len).step_by(4096) {
        folio.write_at(page, &[0xa5; 64])?;
    }
    Ok(folio.write_at(len - 64, &[0xa5; 64])?)
}

/// One turn of a row, which records the times of its calls.
type Turn<'a> = &'a dyn Fn(&RefCell<Vec<u64>>) -> Result<Duration>;

/// Runs the table. `size` is the largest size of a pool.
pub(crate) fn take_zeroed(size: ByteLen, session: &mut Session<'_>) -> Result {
    let folios = (index(size.get()) / FOLIO).clamp(2, FOLIOS);
    let all = NonZeroU8::new(100).unwrap_or(NonZeroU8::MIN);
    let ahead = pool(folios, PoolOptions::default().worker(all))?;
    let busy = pool(folios, PoolOptions::default().worker(all))?;
    let returned = pool(folios, PoolOptions::default().without_worker().clear_on_release())?;
    let demand = pool(folios, PoolOptions::default().without_worker())?;
    // Taken and given back once, they are zero.
    take(&returned, folios, &RefCell::new(Vec::new()))?;
    let folio = |_| vec![0xa5_u8; FOLIO].into_boxed_slice();
    let list = Mutex::new((0..folios).map(folio).collect::<Vec<_>>());

    let listed: Turn<'_> = &|times| Ok(take_listed(&list, folios, times));
    let idle: Turn<'_> = &|times| {
        wait_for_zero(&ahead, folios)?;
        take(&ahead, folios, times)
    };
    // Half are taken while the worker clears the other half.
    let at_work: Turn<'_> = &|times| {
        wait_for_zero(&busy, folios / 2)?;
        take(&busy, folios / 2, times)
    };
    let on_release: Turn<'_> = &|times| take(&returned, folios, times);
    let on_demand: Turn<'_> = &|times| take(&demand, folios, times);
    let (ours, written) = (Role::Ours, bytes(TURNS * folios * FOLIO).get());
    let rows = [
        (Role::Naive, "naive", "naive, a list and memset", written, TURNS, listed),
        (ours, "worker-idle", "ours, zeroed ahead, the worker idle", 0, TURNS, idle),
        (ours, "worker-busy", "ours, zeroed ahead, the worker at work", 0, TURNS * 2, at_work),
        (ours, "cleared-on-release", "ours, zeroed when given back", 0, TURNS, on_release),
        (ours, "on-demand", "ours, none zeroed", written, TURNS, on_demand),
    ];
    let mut suite = Suite::new("pool-take", bytes(folios * FOLIO));
    let taken = folios * TURNS;
    for (role, row, name, written, turns, turn) in rows {
        let times = Times::default();
        let seen = times.clone();
        suite.bytes = written;
        let spec = suite.add(role, row, name, move |_| {
            (0..turns).try_fold(Duration::ZERO, |elapsed, _| Ok(elapsed + turn(&times)?))
        });
        spec.naive("naive").counts(Some(taken as u64), None);
        spec.latencies = Some(seen);
        if row == "worker-idle" {
            spec.headline(format!("take {taken} zero folios of 2 MiB from a pool"));
        }
    }
    let note = format!(
        "one taker, {folios} folios, taken {TURNS} times a round; the clock's own time is in; \
         naive is a list of free folios that are cleared by memset when taken"
    );
    let title = "How long a taker waits for a zero folio of 2 MiB from a pool";
    session.measure(suite, title, note)
}

/// Takes folios of a list, and puts them back.
fn take_listed(list: &Mutex<Vec<Box<[u8]>>>, folios: usize, times: &RefCell<Vec<u64>>) -> Duration {
    let mut elapsed = Duration::ZERO;
    let mut taken = Vec::new();
    for _ in 0..folios {
        let started = Instant::now();
        let popped = list.lock().map_or(None, |mut list| list.pop());
        let Some(mut folio) = popped else { continue };
        folio.fill(0);
        let time = started.elapsed();
        elapsed += time;
        times.borrow_mut().push(nanoseconds(time));
        folio[0] = 1;
        taken.push(folio);
    }
    if let Ok(mut list) = list.lock() {
        list.extend(taken);
    }
    elapsed
}

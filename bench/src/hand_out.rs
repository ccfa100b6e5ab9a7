//! Folios of a pool: how long a taker waits for one, `pool-take`.
//!
//! Each row takes folios of 2 MiB one by one, with the time of each, and gives them back outside of the
//! time. What differs is who has cleared them: a worker ahead of need, the one who gave them back, or
//! the taker. The yardstick is what is written in a few lines: a list of free folios behind a lock,
//! which are cleared when they are taken.

use std::cell::RefCell;
use std::num::NonZeroU8;
use std::rc::Rc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use uzone_pages::{ByteLen, MemoryKind, Order};
use uzone_zone::{BindOptions, Pool, PoolOptions, Pooled, PopulateOptions, Region, Zone};

use crate::group::Watch;
use crate::report::{Bench, Role, Table};
use crate::suite::{BenchError, Suite};
use crate::zero::bytes;

const FOLIO: usize = 2 << 20;
/// How many folios a pool has.
const FOLIOS: usize = 32;
/// How often all of them are taken in a round, so that one in a hundred is one of some.
const TURNS: usize = 8;
/// A taker is awake for so long before it takes: what a virtual CPU takes to come back from sleep is
/// no time of the pool's. Nothing of the pool is touched meanwhile.
const AWAKE: Duration = Duration::from_micros(100);
/// How long to wait for a worker that gets no CPU.
const PATIENCE: Duration = Duration::from_secs(60);

/// A pool of so many folios, present and dirty.
fn pool(folios: usize, options: PoolOptions) -> Result<Pool, BenchError> {
    let region = Region::anonymous(bytes(folios * FOLIO))?;
    let report = region.populate(0..region.len().get(), &PopulateOptions::default())?;
    debug_assert!(report.is_whole(), "it is not cancelled");
    let order = BindOptions::new(MemoryKind::Generic).order(Order::new(9));
    let pagemap = Zone::new().bind(region, order)?;
    Pool::new(pagemap, options).map_err(|(_, _)| BenchError::Threads { threads: 1 })
}

/// Waits until so many folios are zero.
fn wait_for_zero(pool: &Pool, folios: usize) -> Result<(), BenchError> {
    let until = Instant::now() + PATIENCE;
    while pool.stats().zero < folios {
        if Instant::now() > until {
            return Err(BenchError::Worker { waited: PATIENCE });
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
fn take(pool: &Pool, folios: usize, times: &RefCell<Vec<u64>>) -> Result<Duration, BenchError> {
    let mut taken = Vec::with_capacity(folios);
    let mut elapsed = Duration::ZERO;
    for _ in 0..folios {
        let started = Instant::now();
        let folio = pool.take();
        let time = started.elapsed();
        taken.push(folio?);
        elapsed += time;
        times.borrow_mut().push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }
    for folio in &taken {
        check(folio)?;
        // A tenant's first touch of each page, so that what comes back is dirty.
        touch(folio)?;
    }
    Ok(elapsed)
}

/// Refuses a folio that has a byte at its edges or in its middle.
fn check(folio: &Pooled) -> Result<(), BenchError> {
    let len = bytes(FOLIO).get();
    for offset in [0, len / 2, len - 64] {
        let mut line = [1; 64];
        folio.read_at(offset, &mut line)?;
        if line != [0; 64] {
            let offset = usize::try_from(offset).unwrap_or(usize::MAX);
            return Err(BenchError::WrongByte { row: "pool-take".to_owned(), offset });
        }
    }
    Ok(())
}

fn touch(folio: &Pooled) -> Result<(), BenchError> {
    let len = bytes(FOLIO).get();
    for page in (0..len).step_by(4096) {
        folio.write_at(page, &[0xa5; 64])?;
    }
    Ok(folio.write_at(len - 64, &[0xa5; 64])?)
}

/// The times of a row's calls.
type Times = Rc<RefCell<Vec<u64>>>;
/// What a row does in a round.
type Run<'a> = Box<dyn FnMut() -> Result<Duration, BenchError> + 'a>;

/// Adds a row with what it is, its id and name, which takes every folio of the suite so many times a
/// round.
fn add<'a>(
    suite: &mut Suite<'a>,
    (role, row, name): (Role, &str, &str),
    written: u64,
    times: Times,
    run: Run<'a>,
) {
    let calls = suite.size.get() / bytes(FOLIO).get() * TURNS as u64;
    let spec = suite.add(role, &format!("pool-take/{row}"), name, written, 1, run);
    spec.calls = Some(calls);
    spec.naive = Some("pool-take/naive".to_owned());
    spec.latencies = Some(times);
}

/// Runs the table. `size` is how much memory a pool may have at most.
pub(crate) fn run(
    size: ByteLen,
    rounds: u32,
    watch: Watch<'_>,
    bench: &mut Bench,
) -> Result<(), BenchError> {
    let most = usize::try_from(size.get()).unwrap_or(usize::MAX) / FOLIO;
    let folios = most.clamp(2, FOLIOS);
    let all = NonZeroU8::new(100).unwrap_or(NonZeroU8::MIN);
    let ahead = pool(folios, PoolOptions::default().worker(all))?;
    let busy = pool(folios, PoolOptions::default().worker(all))?;
    let returned = pool(folios, PoolOptions::default().without_worker().clear_on_release())?;
    let demand = pool(folios, PoolOptions::default().without_worker())?;
    // Taken and given back once, they are zero.
    let unseen = RefCell::new(Vec::new());
    take(&returned, folios, &unseen)?;

    let list = Mutex::new(
        (0..folios).map(|_| vec![0xa5_u8; FOLIO].into_boxed_slice()).collect::<Vec<_>>(),
    );

    let mut suite = Suite::new(bytes(folios * FOLIO));
    let written = bytes(TURNS * folios * FOLIO).get();
    let times = || Rc::new(RefCell::new(Vec::new()));

    let seen = times();
    let list = &list;
    add(&mut suite, (Role::Naive, "naive", "naive, a list and memset"), written, seen.clone(), {
        Box::new(move || {
            let mut elapsed = Duration::ZERO;
            for _ in 0..TURNS {
                let mut taken = Vec::new();
                for _ in 0..folios {
                    let started = Instant::now();
                    let popped = list.lock().map_or(None, |mut list| list.pop());
                    let Some(mut folio) = popped else { continue };
                    folio.fill(0);
                    let time = started.elapsed();
                    elapsed += time;
                    seen.borrow_mut().push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
                    folio[0] = 1;
                    taken.push(folio);
                }
                if let Ok(mut list) = list.lock() {
                    list.extend(taken);
                }
            }
            Ok(elapsed)
        })
    });
    let seen = times();
    let pool = &ahead;
    let row = (Role::Ours, "worker-idle", "ours, zeroed ahead, the worker idle");
    add(&mut suite, row, 0, seen.clone(), {
        Box::new(move || {
            let mut elapsed = Duration::ZERO;
            for _ in 0..TURNS {
                wait_for_zero(pool, folios)?;
                elapsed += take(pool, folios, &seen)?;
            }
            Ok(elapsed)
        })
    });
    let seen = times();
    let pool = &busy;
    let row = (Role::Ours, "worker-busy", "ours, zeroed ahead, the worker at work");
    add(&mut suite, row, 0, seen.clone(), {
        Box::new(move || {
            let mut elapsed = Duration::ZERO;
            // Half are taken while the worker clears the other half.
            for _ in 0..TURNS * 2 {
                wait_for_zero(pool, folios / 2)?;
                elapsed += take(pool, folios / 2, &seen)?;
            }
            Ok(elapsed)
        })
    });
    let seen = times();
    let pool = &returned;
    let row = (Role::Ours, "cleared-on-release", "ours, zeroed when given back");
    add(&mut suite, row, 0, seen.clone(), {
        Box::new(move || {
            let mut elapsed = Duration::ZERO;
            for _ in 0..TURNS {
                elapsed += take(pool, folios, &seen)?;
            }
            Ok(elapsed)
        })
    });
    let seen = times();
    let pool = &demand;
    let row = (Role::Ours, "on-demand", "ours, none zeroed");
    add(&mut suite, row, written, seen.clone(), {
        Box::new(move || {
            let mut elapsed = Duration::ZERO;
            for _ in 0..TURNS {
                elapsed += take(pool, folios, &seen)?;
            }
            Ok(elapsed)
        })
    });
    if let Some(spec) = suite.spec("pool-take/worker-idle") {
        let taken = folios * TURNS;
        spec.headline = Some(format!("take {taken} zero folios of 2 MiB from a pool"));
    }
    suite.run("hand-out", rounds, watch, &mut bench.results)?;
    bench.tables.push(Table {
        id: "pool-take".to_owned(),
        title: "How long a taker waits for a zero folio of 2 MiB from a pool".to_owned(),
        note: format!(
            "one taker, {folios} folios, taken {TURNS} times a round; the clock's own time is in; \
             naive is a list of free folios that are cleared by memset when taken"
        ),
    });
    Ok(())
}

//! What a machine that faults at full speed does to one that takes a fault now and then.
//!
//! The noisy machine has threads that touch runs of their pages in a random order and give each run back, so
//! that faults and removals never cease. The quiet one touches a page every [`PAUSE`], and each touch is
//! timed.
//!
//! | row | the engine that answers the noisy machine |
//! |---|---|
//! | `alone` | there is none |
//! | `same` | the thread that answers the quiet one |
//! | `budget` | the same, with a budget of [`BUDGET`] faults a second |
//! | `apart` | an engine of its own, which shares nothing but the CPUs with the other |

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uzone_fault::{Budget, Engine, EngineOptions, LazyOptions};

use super::machine::Restore;
use crate::tables::snapshot::material::{Material, PAGE};
use uzone_harness::{
    Adopted, BenchError, Found, Reads, Result, Role, Session, Suite, check_word, nanoseconds, place,
};

/// How long the quiet machine runs between its faults.
const PAUSE: Duration = Duration::from_millis(2);
/// How many faults it takes at most.
const TOUCHES: usize = 250;
/// How many threads the noisy machine has.
const NOISY: usize = 2;
/// How many pages one of them touches before it gives them back.
const RUN: usize = 64;
/// How many faults of the noisy machine are read a second, where that is limited.
const BUDGET: NonZeroU32 = NonZeroU32::new(1000).unwrap();
/// How long the noisy machine may take to begin.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) fn table(restore: Restore<'_>, session: &mut Session<'_>) -> Result {
    let table = "restore-neighbour";
    let engine = || Engine::with(EngineOptions::default().readers(NonZeroUsize::MIN));
    let (one, other) = (&engine()?, &engine()?);
    let pages = &quiet_pages(restore.material.words.len());
    let mut suite = Suite::new(table, restore.len());
    let (free, limited) = (Budget::default(), Budget::default().faults_per_second(BUDGET));
    // The engine that answers the noisy machine, and that one's budget.
    for (row, name, role, noise) in [
        ("alone", "a quiet machine alone", Role::Peer, None),
        ("apart", "beside a noisy one of another engine", Role::Peer, Some((other, free))),
        ("same", "beside a noisy one of the same thread", Role::Ours, Some((one, free))),
        ("budget", "beside one with a budget", Role::Ours, Some((one, limited))),
    ] {
        suite.faults(role, row, name, move |row| {
            let quiet = machine(&restore, one, Budget::default())?;
            let times = match noise {
                None => touch_now_and_then(row, &quiet, pages, restore.material),
                Some((engine, budget)) => beside(row, &restore, &quiet, pages, engine, budget),
            }?;
            let elapsed = Duration::from_nanos(times.iter().sum());
            let faults = times.len() as u64;
            Ok(Found { elapsed, faults, touches_ns: times, ..Found::default() })
        });
    }
    suite.each_spec(|spec| {
        (spec.row.items, spec.row.bytes) = (pages.len() as u64, (pages.len() * PAGE) as u64);
    });
    session.measure(
        suite,
        format!("A machine that takes {} faults, {PAUSE:?} apart, beside a noisy one", pages.len()),
        format!(
            "raw, machines of {}; the noisy one has {NOISY} threads that fault and give pages back without a \
             pause; one thread answers each engine's faults, on any CPU",
            restore.len()
        ),
    )
}

/// Returns pages that are so far apart that none comes along with another, in a random order.
fn quiet_pages(pages: usize) -> Vec<usize> {
    let apart = (pages / TOUCHES).max(RUN);
    let mut quiet: Vec<usize> = (0..pages).step_by(apart).collect();
    fastrand::Rng::with_seed(23).shuffle(&mut quiet);
    quiet
}

fn machine(restore: &Restore<'_>, engine: &Engine, budget: Budget) -> Result<Adopted> {
    let options = LazyOptions::default().budget(budget);
    super::machine::machine(engine, restore.len(), restore.raw_backing()?, &options)
}

/// Touches pages with a pause before each, and returns how long each touch took.
fn touch_now_and_then(
    row: &str,
    memory: &Adopted,
    pages: &[usize],
    material: &Material,
) -> Result<Vec<u64>> {
    let mut times = Vec::with_capacity(pages.len());
    for &page in pages {
        std::thread::sleep(PAUSE);
        let (at, word) = (place(page as u64), material.words[page]);
        let touched = Instant::now();
        check_word(row, memory, at, word)?;
        times.push(nanoseconds(touched.elapsed()));
    }
    Ok(times)
}

/// Does the same beside a machine that faults as fast as it can, which `engine` answers.
fn beside(
    row: &str,
    restore: &Restore<'_>,
    quiet: &Adopted,
    pages: &[usize],
    engine: &Engine,
    budget: Budget,
) -> Result<Vec<u64>> {
    let noisy = &machine(restore, engine, budget)?;
    let stop = &AtomicBool::new(false);
    let failed = || BenchError::threads(NOISY);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..NOISY)
            .map(|part| {
                scope.spawn(move || fault_at_full_speed(row, noisy, part, restore.material, stop))
            })
            .collect();
        let give_up = Instant::now() + PATIENCE;
        while noisy.answering().stats().faults < RUN as u64 && Instant::now() < give_up {
            std::thread::yield_now();
        }
        let times = touch_now_and_then(row, quiet, pages, restore.material);
        // Also after a failure, or the scope would wait for ever. Relaxed: nothing is published by it.
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().unwrap_or_else(|_| Err(failed()))?;
        }
        times
    })
}

/// Touches the pages of a part run by run, each run in a random order, and gives each run back.
fn fault_at_full_speed(
    row: &str,
    memory: &Adopted,
    part: usize,
    material: &Material,
    stop: &AtomicBool,
) -> Result {
    let len = material.words.len() / NOISY;
    let mut random = fastrand::Rng::with_seed(part as u64);
    let mut bytes = [0; 8];
    for first in (part * len..(part + 1) * len).step_by(RUN).cycle() {
        let mut run: Vec<usize> = (first..(first + RUN).min((part + 1) * len)).collect();
        random.shuffle(&mut run);
        for &page in &run {
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            memory.read(place(page as u64), &mut bytes)?;
            // It was given back before, or not.
            let word = u64::from_ne_bytes(bytes);
            if word != material.words[page] && word != 0 {
                return Err(BenchError::wrong_byte(row, place(page as u64)));
            }
        }
        let start = (first * PAGE) as u64;
        memory.memory.mapping().discard(start..start + (run.len() * PAGE) as u64)?;
    }
    Ok(())
}

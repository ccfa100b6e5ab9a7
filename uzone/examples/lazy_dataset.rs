//! A dataset that is larger than memory and exists only as the means to compute it: compressed
//! columns, a sampled simulation, objects in a store. Readers see plain memory, and a page is made when
//! it is touched.
//!
//! `cargo run --release -p uzone --example lazy_dataset`
//!
//! 64 GiB of numbers are mapped whose pages are decoded from a first value and a step. One thread reads
//! a part in order and another part here and there, with each advice: the kernel's default, one page a fault, windows
//! that grow, and automatic. Prints the faults, the decoded pages, the pages that were not read, and the time of each;
//! fails if a byte is wrong.

use std::collections::HashSet;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use uzone::ByteLen;
use uzone::lazy::{Advice, BackingError, Engine, EngineOptions, FaultAround};
use uzone::lazy::{FunctionBacking, LazyMapping, LazyOptions};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const LEN: ByteLen = ByteLen::gib(64);
/// The numbers that are coded together.
const RUN: usize = 4096;
/// The length that is read in order.
const SCAN: ByteLen = ByteLen::mib(32);
/// The number of words that are read here and there.
const LOOKUPS: u64 = 2000;

/// Returns the code of a run: its first number, and by how much each is larger than the one before.
fn code(run: u64) -> (u64, u64) {
    let first = run.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (first, first >> 40 | 1)
}

/// Decodes the numbers from `offset` on: the cost of a fault.
fn decode(offset: u64, out: &mut [u8]) {
    for (start, part) in (offset..).step_by(RUN).zip(out.chunks_mut(RUN)) {
        let (mut number, step) = code(start / RUN as u64);
        for word in part.chunks_exact_mut(8) {
            word.copy_from_slice(&number.to_le_bytes());
            number = number.wrapping_add(step);
        }
    }
}

/// Reads one run, checks every byte of it, and returns its number.
fn read(memory: &LazyMapping, run: u64) -> Outcome<u64> {
    let mut bytes = [0; RUN];
    memory.read_at(run * RUN as u64, &mut bytes)?;
    let (first, step) = code(run);
    for (index, word) in (0..).zip(bytes.chunks_exact(8)) {
        if word != first.wrapping_add(step.wrapping_mul(index)).to_le_bytes() {
            return Err(format!("number {index} of run {run} is wrong").into());
        }
    }
    Ok(run)
}

/// Reads in order and here and there at once. Returns how many pages were touched.
fn readers(memory: &LazyMapping) -> Outcome<u64> {
    let page = memory.page_size().bytes();
    let touched: Outcome<Vec<HashSet<u64>>> = thread::scope(|scope| {
        let scan = scope.spawn(|| {
            let runs = 0..SCAN.get() / RUN as u64;
            runs.map(|run| Ok(read(memory, run)? * RUN as u64 / page)).collect()
        });
        let lookups = scope.spawn(|| {
            let mut random = 1_u64;
            let mut any = || {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 20) % (LEN.get() / RUN as u64)
            };
            (0..LOOKUPS).map(|_| Ok(read(memory, any())? * RUN as u64 / page)).collect()
        });
        [scan, lookups]
            .map(|reader| reader.join().map_err(|_| "a reader panicked")?)
            .into_iter()
            .collect()
    });
    Ok(touched?.into_iter().flatten().collect::<HashSet<_>>().len() as u64)
}

fn main() -> Outcome<()> {
    let engine = Engine::with(EngineOptions::default())?;
    // It never blocks, so it may fill whole windows, in the thread that answers faults.
    let decoded = Arc::new(AtomicU64::new(0));
    let counter = decoded.clone();
    let backing = Arc::new(FunctionBacking::quick(move |offset, pages: &mut [u8]| {
        counter.fetch_add((pages.len() / RUN) as u64, Ordering::Relaxed); // before they can be read
        decode(offset, pages);
        Ok::<_, BackingError>(())
    }));
    println!("{LEN} of numbers, {SCAN} of them read in order and {LOOKUPS} runs here and there");
    println!("advice      around    faults  pages made  not read      ms");
    let mut faults = Vec::new();
    for (advice, around) in [
        (Advice::Random, FaultAround::MIN),
        (Advice::Normal, FaultAround::DEFAULT),
        (Advice::Sequential, FaultAround::DEFAULT),
        (Advice::Auto, FaultAround::DEFAULT),
    ] {
        let memory = engine.map(LEN, backing.clone(), &LazyOptions::default())?;
        memory.advise(advice, around); // also later, when another phase begins
        let before = decoded.load(Ordering::Relaxed);
        let started = Instant::now();
        let touched = readers(&memory)?;
        let (elapsed, stats) = (started.elapsed(), memory.stats());
        let made = decoded.load(Ordering::Relaxed) - before;
        let wasted = made.checked_sub(touched).ok_or("pages were read that were not made")?;
        println!(
            "{:<10} {:>7} {:>9} {made:>11} {:>8}% {:>7}",
            format!("{advice:?}"),
            around.to_string(),
            stats.faults,
            wasted * 100 / made,
            elapsed.as_millis()
        );
        if stats.poisoned != 0 || (advice == Advice::Random && wasted > touched / 100) {
            return Err(format!("pages went bad, or were made and not read: {stats:?}").into());
        }
        faults.push(stats.faults);
    }
    if faults[2] >= faults[0] {
        return Err("windows that grow saved no fault".into());
    }
    Ok(())
}

//! The published experiment as it was run: every thread reads every word of the whole file, in order or its
//! pages at random, or touches one page of each page table.
//!
//! The other tables share the pages out and look at one word of each; these are slower by that, and run only
//! where they are asked for.

use std::sync::Arc;
use std::time::Duration;

use uzone_fault::{Engine, EngineOptions};
use uzone_pages::ByteLen;

use super::run::Run;
use super::scan::{Backend, ORDERS, SHUTEMOV};
use super::source::{PAGE, Source, word};
use super::touch::{Part, Pattern, Touched, together};
use super::ways::{Memory, Ways};
use crate::harness::reads::Reads;
use crate::harness::settings::WholeSettings;
use crate::harness::suite::{BenchError, Published, Suite};

/// How much was read in order, and at random.
const IN_ORDER: ByteLen = ByteLen::gib(16);
const RANDOM: ByteLen = ByteLen::gib(1);
/// Tables with so many threads have at most so many rounds.
const MANY: usize = 32;
const ROUNDS: u32 = 3;

/// Seconds by order of the window, for 1, 8, 32, 60 and 120 threads.
type Seconds = [(usize, [f64; 7]); 5];

const IN_ORDER_S: Seconds = [
    (1, [7.25, 6.46, 5.49, 5.49, 5.71, 5.90, 5.11]),
    (8, [16.65, 9.31, 6.61, 6.39, 6.67, 6.75, 6.37]),
    (32, [49.16, 29.71, 12.94, 10.18, 11.84, 9.59, 9.93]),
    (60, [86.26, 49.63, 22.34, 17.61, 16.52, 16.34, 16.33]),
    (120, [124.59, 79.76, 39.51, 32.17, 29.97, 28.73, 28.04]),
];
const RANDOM_S: Seconds = [
    (1, [15.35, 16.61, 16.57, 15.18, 16.56, 16.58, 15.37]),
    (8, [15.04, 15.10, 14.47, 14.29, 14.41, 14.30, 14.40]),
    (32, [20.43, 21.59, 22.12, 14.87, 14.88, 14.88, 14.82]),
    (60, [26.58, 25.69, 18.73, 20.15, 21.62, 17.75, 17.61]),
    (120, [41.84, 40.46, 36.09, 35.31, 35.81, 36.55, 34.29]),
];
// That of 8 threads and two pages repeats 32 threads' in the original.
const SPARSE_S: Seconds = [
    (1, [0.0399, 0.0454, 0.0518, 0.0637, 0.0791, 0.1765, 0.5412]),
    (8, [0.124, 0.489, 0.157, 0.192, 0.243, 0.544, 1.677]),
    (32, [0.452, 0.489, 0.565, 0.648, 0.790, 1.652, 5.000]),
    (60, [0.763, 0.870, 0.981, 1.162, 1.467, 3.040, 9.309]),
    (120, [1.596, 1.668, 2.009, 2.425, 2.941, 5.978, 18.40]),
];

/// Measures a table for each pattern and each number of threads.
pub(super) fn tables(run: &mut Run<'_>, settings: &WholeSettings) -> Result<(), BenchError> {
    let file = Source::new(&run.settings.directory, settings.size)?;
    let mapped = Arc::new(file.map(file.len)?);
    mapped.populate(0..file.len.get())?;
    let backend = Backend::File(&file, mapped);
    for pattern in [Pattern::InOrder, Pattern::Random, Pattern::OnePerTable] {
        for &threads in &settings.threads {
            table(run, &backend, pattern, threads, &settings.orders)?;
        }
    }
    Ok(())
}

fn table(
    run: &mut Run<'_>,
    backend: &Backend<'_>,
    pattern: Pattern,
    threads: usize,
    orders: &[u8],
) -> Result<(), BenchError> {
    let table = format!("fault-whole-{}-{threads}", pattern.id());
    if !run.wants(&table) {
        return Ok(());
    }
    let Backend::File(file, _) = backend else { unreachable!("the tables are of a file") };
    let len = if pattern == Pattern::Random { file.len.min(RANDOM) } else { file.len };
    file.warm(len)?;
    let pages = pattern.parts(len, PAGE, 1).concat();
    let visit = Visit { pages: &pages, threads, is_whole: pattern != Pattern::OnePerTable };
    let engine = &Engine::with(EngineOptions::default())?;
    let touched = pages.len() as u64;
    let touch = |row: &str, memory: Memory| visit.touch(row, &*memory);
    let mut suite = Suite::new(&table, len).threads(threads);
    Ways { backend, engine, len, orders, touched }.add(&mut suite, &touch)?;
    for &order in orders {
        for row in ["order", "thread-order"] {
            if let Some(spec) = suite.spec(&format!("{row}-{order}")) {
                spec.row.published = published(pattern, threads, order, len);
            }
        }
    }
    suite.each_spec(|spec| {
        spec.row.items = touched * threads as u64;
        if visit.is_whole {
            spec.limit("populate").row.bytes = len.get() * threads as u64;
        }
    });
    let plural = if threads == 1 { "thread" } else { "threads, each" };
    let what = if visit.is_whole { "every word of" } else { "a word of" };
    let title = format!("{threads} {plural} reading {what} {len} of a file, {}", pattern.title());
    suite.rounds = if threads >= MANY { ROUNDS } else { u32::MAX };
    let marked = suite.fewer(run.session.rounds);
    let note = format!("published: the kernel, {IN_ORDER} and {RANDOM} at random{marked}");
    run.session.measure(suite, &table, title, note)
}

/// Returns the published time of the kernel, for as many pages a thread.
fn published(pattern: Pattern, threads: usize, order: u8, len: ByteLen) -> Option<Published> {
    let (seconds, of) = match pattern {
        Pattern::InOrder => (IN_ORDER_S, IN_ORDER),
        Pattern::Random => (RANDOM_S, RANDOM),
        Pattern::OnePerTable => (SPARSE_S, IN_ORDER),
    };
    let (_, seconds) = seconds.into_iter().find(|(known, _)| *known == threads)?;
    let index = ORDERS.iter().position(|known| *known == order)?;
    let ns = Duration::from_secs_f64(seconds[index]).as_nanos() * u128::from(len.get());
    let ns = u64::try_from(ns / u128::from(of.get())).ok().filter(|ns| *ns > 0)?;
    Some(Published { ns, source: SHUTEMOV.into() })
}

/// Which pages every thread reads, and whether wholly.
#[derive(Clone, Copy)]
struct Visit<'a> {
    pages: &'a [u64],
    threads: usize,
    is_whole: bool,
}

impl Visit<'_> {
    /// Reads the pages by every thread, and checks every word.
    fn touch(&self, row: &str, memory: &dyn Reads) -> Result<Touched, BenchError> {
        together(self.threads, |_, start| {
            start.wait();
            Part::of(|| self.pages.iter().try_for_each(|&offset| self.check(row, memory, offset)))
        })
    }

    fn check(&self, row: &str, memory: &dyn Reads, offset: u64) -> Result<(), BenchError> {
        let mut page = [0; 4096];
        let (start, bytes) = if self.is_whole {
            (offset - offset % PAGE, &mut page[..])
        } else {
            (offset, &mut page[..8])
        };
        memory.read(start, bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        for (found, at) in words.iter().zip((start..).step_by(8)) {
            if u64::from_ne_bytes(*found) != word(at) {
                return Err(BenchError::wrong_byte(row, at));
            }
        }
        Ok(())
    }
}

//! The published experiment as it was run: every thread reads every word of the whole file, in order or its
//! pages at random, or touches one page of each page table.
//!
//! The other tables share the pages out and look at one word of each; these are slower by that, and run only
//! where they are asked for.

use std::sync::Arc;

use uzone_fault::{Engine, EngineOptions};

use super::backend::Backend;
use super::published::{IN_ORDER, RANDOM, published};
use super::run::{Run, Visitor, Visits, Ways};
use super::source::{PAGE, Source, word};
use super::touch::{Pattern, Placement};
use crate::settings::WholeSettings;
use uzone_harness::ways::threads::{Share, together};
use uzone_harness::{BenchError, Counted, Found, Reads, Result, Suite};

/// Tables with so many threads have at most so many rounds.
const MANY: usize = 32;
const ROUNDS: u32 = 3;

/// Measures a table for each pattern and each number of threads. A file is made if one of them is wanted.
pub(super) fn tables(run: &mut Run<'_>, settings: &WholeSettings) -> Result {
    let patterns = [Pattern::InOrder, Pattern::Random, Pattern::OnePerTable].into_iter();
    let all = patterns
        .flat_map(|pattern| settings.threads.iter().map(move |&threads| (pattern, threads)));
    let wanted: Vec<_> =
        all.filter(|&(pattern, threads)| run.wants(&id(pattern, threads))).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let file = Source::new(&run.settings.directory, settings.size)?;
    let backend = Backend::File(&file, file.mapped(file.len)?);
    for (pattern, threads) in wanted {
        table(run, &backend, pattern, threads, &settings.orders)?;
    }
    Ok(())
}

fn id(pattern: Pattern, threads: usize) -> String {
    format!("fault-whole-{}-{threads}", pattern.id())
}

fn table(
    run: &mut Run<'_>,
    backend: &Backend<'_>,
    pattern: Pattern,
    threads: usize,
    orders: &[u8],
) -> Result {
    let table = id(pattern, threads);
    let Backend::File(file, _) = backend else { unreachable!("the tables are of a file") };
    let len = if pattern == Pattern::Random { file.len.min(RANDOM) } else { file.len };
    file.warm(len)?;
    let pages = pattern.parts(len, PAGE, 1).concat();
    let visitor = Visit { pages: &pages, threads, is_whole: pattern != Pattern::OnePerTable };
    let touched = pages.len() as u64;
    let visits = Visits { visitor, placement: &Placement::anywhere()?, touched, page_bytes: PAGE };
    let engine = &Engine::with(EngineOptions::default())?;
    let mut suite = Suite::new(&table, len).threads(threads);
    Ways { visits, backend, engine, len }.add_all(&mut suite, orders)?;
    for &order in orders {
        for row in ["order", "thread-order"] {
            if let Some(spec) = suite.spec(&format!("{row}-{order}")) {
                spec.row.published = published(pattern, threads, order, len);
            }
        }
    }
    suite.each_spec(|spec| {
        spec.row.items = touched * threads as u64;
        if visitor.is_whole {
            spec.limit("populate").row.bytes = len.get() * threads as u64;
        }
    });
    let plural = if threads == 1 { "thread" } else { "threads, each" };
    let what = if visitor.is_whole { "every word of" } else { "a word of" };
    let title = format!("{threads} {plural} reading {what} {len} of a file, {}", pattern.title());
    suite.rounds = if threads >= MANY { ROUNDS } else { u32::MAX };
    let marked = suite.fewer(run.session.rounds);
    let note = format!("published: the kernel, {IN_ORDER} and {RANDOM} at random{marked}");
    run.session.measure(suite, title, note)
}

/// Which pages every thread reads, and whether wholly.
#[derive(Clone, Copy)]
struct Visit<'a> {
    pages: &'a [u64],
    threads: usize,
    is_whole: bool,
}

impl Visitor for Visit<'_> {
    /// Reads the pages by every thread, and checks every word.
    fn visit<M: Counted + Send + 'static>(&self, row: &str, memory: &Arc<M>) -> Result<Found> {
        together(self.threads, |_, start| {
            start.wait();
            let mut offsets = self.pages.iter();
            Share::of(|| offsets.try_for_each(|&offset| self.check(row, &**memory, offset)))
        })
    }
}

impl Visit<'_> {
    fn check(&self, row: &str, memory: &dyn Reads, offset: u64) -> Result {
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

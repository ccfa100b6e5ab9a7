//! Tables that touch pages of a file or a memory file, by window.

use uzone_fault::Engine;
use uzone_harness::{Result, Role, Session, Suite};
use uzone_pages::ByteLen;

use super::backend::Backend;
use super::published::{IN_ORDER, RANDOM, published as published_time};
use super::source::{self, Source};
use super::touch::{Pattern, Placement, Touching};
use super::ways::{Scan, Way};
use crate::settings::{FaultSettings, WholeSettings};

/// The memory that a table maps.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    Memory,
}

use Kind::{File, Memory};
use Way::{Bare, Kernel, OnePage, Populated, Reader, Thread};

const SEQ: &[Way] =
    &[OnePage, Reader(Some(0)), Reader(None), Thread(None), Bare(9), Kernel, Populated];
const ANY: &[Way] = &[OnePage, Reader(Some(0)), Reader(None), Thread(None), Kernel, Populated];

/// The order of the pages, the memory, the end of the placement's id, and the rows.
const TABLES: [(Pattern, Kind, &str, &[Way]); 6] = [
    (Pattern::InOrder, File, "", SEQ),
    (Pattern::InOrder, Memory, "", SEQ),
    (Pattern::InOrder, Memory, "-same", SEQ),
    (Pattern::Random, File, "", ANY),
    (Pattern::Random, File, "-same", ANY),
    (Pattern::Random, Memory, "", ANY),
];

/// Measures all pages in order and at random.
pub(super) fn tables(session: &mut Session<'_>, file: &Source, placements: &[Placement]) -> Result {
    let size = file.len;
    let of_file = Backend::File(file, file.mapped(size)?);
    let memory = Backend::Memory(source::memory_file(size)?);
    for (pattern, kind, place, ways) in TABLES {
        let backend = if kind == File { &of_file } else { &memory };
        let table = format!("fault-{}-{}{place}", pattern.id(), backend.id());
        if !session.wants(&table) {
            continue;
        }
        let Some(placement) = placements.iter().find(|placement| placement.id == place) else {
            session.skip(table, "this process may use one CPU only");
            continue;
        };
        let len = if pattern == Pattern::Random { size.min(RANDOM) } else { size };
        file.warm(len)?;
        let (offsets, engine) = (&pattern.offsets(len), &placement.engine()?);
        let scan = Scan { len, engine, placement, offsets, threads: 1, touching: Touching::Word };
        let mut suite = Suite::new(&table, len);
        for way in ways {
            // Populating does as much work as touching all pages.
            scan.add(&mut suite, backend, *way)?.naive("naive").limit("populate").row.bytes =
                len.get();
        }
        let (title, order) = (backend.title(), pattern.title());
        if let Some(spec) = suite.spec("auto").filter(|_| placement.is_first) {
            spec.headline(format!("map {len} of {}, {order}", title.to_lowercase()));
        }
        let title = format!("{title}, {order}: {len}, {} touches", offsets.len());
        session.measure(suite, title, placement.title.clone())?;
    }
    Ok(())
}

/// The densities: percents of the pages, and the orders of the two windows of which one is the best.
const DENSITIES: [(usize, [u8; 2]); 4] = [(1, [0, 4]), (5, [4, 9]), (20, [4, 9]), (100, [4, 9])];

/// Measures a part of the pages of a large file in random order, in the thread: the best window depends on the density,
/// and `auto` has to find it. In the file of the other tables, which is smaller, a wide window would look good at every
/// density.
pub(super) fn densities(
    session: &mut Session<'_>,
    settings: &FaultSettings,
    len: ByteLen,
    placement: &Placement,
) -> Result {
    let id = |kind: &str, percent| format!("fault-density-thread-{kind}-{percent}{}", placement.id);
    for (name, kind) in [("file", File), ("memfd", Memory)] {
        if !DENSITIES.iter().any(|(percent, _)| session.wants(&id(name, percent))) {
            continue;
        }
        let file = Source::new(&settings.directory, len)?;
        let backend = &match kind {
            File => Backend::File(&file, file.mapped(len)?),
            Memory => Backend::Memory(source::memory_file(len)?),
        };
        let pages = Pattern::Random.offsets(len);
        for (percent, [narrow, wide]) in &DENSITIES {
            let table = id(name, percent);
            if !session.wants(&table) {
                continue;
            }
            let offsets = &pages[..(pages.len() * percent / 100).max(1)];
            let (engine, touching) = (&placement.engine()?, Touching::Word);
            let scan = Scan { len, engine, placement, offsets, threads: 1, touching };
            let mut suite = Suite::new(table, len);
            for order in [None, Some(*narrow), Some(*wide)] {
                let spec = scan.add(&mut suite, backend, Thread(order))?;
                spec.row.role = if order.is_none() { Role::Ours } else { Role::Variant };
                spec.is_rival = true;
            }
            let title = format!(
                "{}, {percent} % of its pages in random order: {len}, {} touches",
                backend.title(),
                offsets.len()
            );
            let note =
                format!("{}; *x best* of auto is its time by the fastest row's", placement.title);
            session.measure(suite, title, note)?;
        }
    }
    Ok(())
}

/// Measures the published experiment as it was run: every thread reads every word of the whole file, in order or its
/// pages at random, or touches one page of each page table.
pub(super) fn published(
    session: &mut Session<'_>,
    settings: &FaultSettings,
    whole: &WholeSettings,
) -> Result {
    let id = |pattern: Pattern, threads: usize| format!("fault-whole-{}-{threads}", pattern.id());
    let patterns = [Pattern::InOrder, Pattern::Random, Pattern::OnePerTable].into_iter();
    let all =
        patterns.flat_map(|pattern| whole.threads.iter().map(move |&threads| (pattern, threads)));
    let wanted: Vec<_> =
        all.filter(|&(pattern, threads)| session.wants(&id(pattern, threads))).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let file = Source::new(&settings.directory, whole.size)?;
    let backend = &Backend::File(&file, file.mapped(file.len)?);
    let placement = &Placement::anywhere()?;
    for (pattern, threads) in wanted {
        let is_random = pattern == Pattern::Random;
        let len = if is_random { file.len.min(RANDOM) } else { file.len };
        file.warm(len)?;
        let is_whole = pattern != Pattern::OnePerTable;
        let touching = if is_whole { Touching::Page } else { Touching::Word };
        let engine = &Engine::with(uzone_fault::EngineOptions::default())?;
        let offsets = &pattern.offsets(len);
        let scan = Scan { len, engine, placement, offsets, threads, touching };
        let mut suite = Suite::new(id(pattern, threads), len).threads(threads);
        for way in [OnePage, Reader(None), Thread(None), Kernel, Populated] {
            scan.add(&mut suite, backend, way)?;
        }
        for &order in &whole.orders {
            for way in [Reader(Some(order)), Thread(Some(order))] {
                scan.add(&mut suite, backend, way)?.row.published =
                    published_time(pattern, threads, order, len);
            }
        }
        suite.naive("naive").each_spec(|spec| {
            if is_whole {
                spec.limit("populate").row.bytes = len.get() * threads as u64;
            }
        });
        let plural = if threads == 1 { "thread" } else { "threads, each" };
        let part = if is_whole { "every word of" } else { "a word of" };
        let title =
            format!("{threads} {plural} reading {part} {len} of a file, {}", pattern.title());
        let note = format!("published: the kernel, {IN_ORDER} and {RANDOM} at random");
        session.measure(suite, title, note)?;
    }
    Ok(())
}

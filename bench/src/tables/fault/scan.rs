//! Tables that touch pages of a file or a memory file, by window.

use std::sync::Arc;

use uzone_fault::Engine;
use uzone_harness::{Result, Role, Session, Suite};
use uzone_os::{SystemRoot, hugepages};
use uzone_pages::{ByteLen, PageSize};

use super::backend::Backend;
use super::published::{IN_ORDER, RANDOM, published as published_time};
use super::skip;
use super::source::{self, PAGE, Source};
use super::touch::{Pattern, Placement, Touching};
use super::ways::{Scan, Way};
use crate::settings::{FaultSettings, WholeSettings};

/// The memory that a table maps.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    Memory,
    Huge,
}

use Kind::{File, Huge, Memory};
use Way::{Bare, Kernel, OnePage, Populated, Reader, Thread};

const SEQ: &[Way] =
    &[OnePage, Reader(Some(0)), Reader(None), Thread(None), Bare(9), Kernel, Populated];
const ANY: &[Way] = &[OnePage, Reader(Some(0)), Reader(None), Thread(None), Kernel, Populated];
const SPARSE: &[Way] = &[OnePage, Reader(None), Thread(None), Bare(0), Kernel];
const POOL: &[Way] = &[OnePage, Reader(None), Kernel, Populated];

/// The order of the pages, the memory, the end of the placement's id, and the rows.
const TABLES: [(Pattern, Kind, &str, &[Way]); 8] = [
    (Pattern::InOrder, File, "", SEQ),
    (Pattern::InOrder, Memory, "", SEQ),
    (Pattern::InOrder, Memory, "-same", SEQ),
    (Pattern::Random, File, "", ANY),
    (Pattern::Random, File, "-same", ANY),
    (Pattern::Random, Memory, "", ANY),
    (Pattern::OnePerTable, File, "", SPARSE),
    (Pattern::InOrder, Huge, "", POOL),
];

/// Measures all pages in order and at random, and one page of each page table.
pub(super) fn tables(session: &mut Session<'_>, file: &Source, placements: &[Placement]) -> Result {
    let size = file.len;
    let of_file = Backend::File(file, file.mapped(size)?);
    let memory = Backend::Memory(source::memory_file(size, None)?);
    let huge = match free_huge_pages(size) {
        Ok(len) => Ok((len, Backend::Memory(source::memory_file(len, Some(PageSize::MIB_2))?))),
        Err(reason) => Err(reason),
    };
    for (pattern, kind, place, ways) in TABLES {
        // Tables of one placement are also measured with several threads.
        let is_wanted = |placement: &&Placement| {
            placement.id == place || (place.is_empty() && placement.threads > 1)
        };
        let (backend, most) = match (kind, &huge) {
            (File, _) => (&of_file, size),
            (Memory, _) => (&memory, size),
            (Huge, Ok((len, backend))) => (backend, *len),
            (Huge, Err(reason)) => {
                skip(session, "fault-seq-hugetlb", reason.clone());
                continue;
            }
        };
        let len = if pattern == Pattern::Random { most.min(RANDOM) } else { most };
        let wanted: Vec<_> = placements.iter().filter(is_wanted).collect();
        if wanted.is_empty() {
            let table = format!("fault-{}-{}", pattern.id(), backend.id());
            skip(session, &table, "this process may use one CPU only");
        }
        for placement in wanted {
            file.warm(len)?;
            table(session, pattern, backend, placement, len, ways)?;
        }
    }
    Ok(())
}

/// Measures one table.
fn table(
    session: &mut Session<'_>,
    pattern: Pattern,
    backend: &Backend<'_>,
    placement: &Placement,
    len: ByteLen,
    ways: &[Way],
) -> Result {
    let table = format!("fault-{}-{}{}", pattern.id(), backend.id(), placement.id);
    if !session.wants(&table) {
        return Ok(());
    }
    let page_bytes = backend.page().bytes();
    let parts = pattern.parts(len, page_bytes, placement.threads);
    let parts: &Vec<&[u64]> = &parts.iter().map(Vec::as_slice).collect();
    let touched = parts.iter().map(|part| part.len() as u64).sum();
    let is_sparse = pattern == Pattern::OnePerTable;
    let touching = if is_sparse { Touching::Timed } else { Touching::Word };
    let engine = &placement.engine()?;
    let scan = Scan { len, backend, engine, placement, parts, touching, touched };
    let mut suite = Suite::new(&table, len).threads(parts.len());
    scan.add_all(&mut suite, ways)?;
    suite.each_spec(|spec| {
        spec.row.items = touched;
        if is_sparse {
            spec.touch_naive = Some(spec.of_table("naive"));
        } else {
            // Populating does as much work as touching all pages.
            spec.limit("populate").row.bytes = touched * page_bytes;
        }
    });
    let title = backend.title();
    if let Some(spec) = suite.spec("auto").filter(|_| placement.is_first && !is_sparse) {
        spec.headline(format!("map {len} of {}, {}", title.to_lowercase(), pattern.title()));
    }
    let title = format!("{title}, {}: {len}, {touched} touches", pattern.title());
    session.measure(suite, title, placement.title.clone())
}

/// Returns the length for which the pool has pages twice, or the reason that it has too few.
fn free_huge_pages(most: ByteLen) -> Result<ByteLen, String> {
    let size = PageSize::MIB_2;
    let path = hugepages::nr_path(size);
    let free = match hugepages::pool(&SystemRoot::host(), size) {
        Ok(Some(pool)) => pool.free.saturating_sub(pool.reserved),
        Ok(None) => return Err("this kernel has no pool of 2 MiB pages".to_owned()),
        Err(error) => return Err(error.to_string()),
    };
    if free < 4 {
        return Err(format!("{free} pages of 2 MiB are free and 4 are needed: raise {path}"));
    }
    Ok(most.min(ByteLen::new((free / 2) << 21)))
}

/// The densities: id, thousandths of the pages, and whether a run without `--sweep` has it.
const DENSITIES: [(&str, usize, bool); 10] = [
    ("0.2", 2, false),
    ("1", 10, true),
    ("2", 20, false),
    ("5", 50, false),
    ("10", 100, true),
    ("15", 150, false),
    ("18", 180, false),
    ("20", 200, false),
    ("50", 500, false),
    ("100", 1000, true),
];

/// Measures a part of the pages of a large file in random order, in the thread and by a reader: the best window depends
/// on the density, and `auto` has to find it. In the file of the other tables, which is smaller, a wide window would
/// look good at every density.
pub(super) fn densities(
    session: &mut Session<'_>,
    settings: &FaultSettings,
    len: ByteLen,
    placements: &[Placement],
) -> Result {
    let Some(first) = placements.first() else { return Ok(()) };
    let same = placements.iter().find(|placement| placement.is_same());
    let (reader, thread) = (Reader as fn(Option<u8>) -> Way, Thread as fn(Option<u8>) -> Way);
    // The beginning of the id, the memory, the rows, the placement, and whether only a sweep measures it.
    let mut kinds = vec![
        ("fault-density-thread-file-", File, thread, first, false),
        ("fault-density-thread-memfd-", Memory, thread, first, true),
        ("fault-density-", File, reader, first, false),
    ];
    kinds.extend(
        same.filter(|same| !same.is_first).map(|same| ("fault-density-", File, reader, same, true)),
    );
    let is_measured = |is_swept: bool| settings.sweep || !is_swept;
    for (start, kind, way, placement, is_swept) in kinds {
        let densities = DENSITIES.iter().filter(|(.., is_usual)| is_measured(!is_usual));
        let wanted: Vec<_> = densities
            .map(|(id, per_mille, _)| (format!("{start}{id}{}", placement.id), id, per_mille))
            .filter(|(table, ..)| is_measured(is_swept) && session.wants(table))
            .collect();
        if wanted.is_empty() {
            continue;
        }
        let file = Source::new(&settings.directory, len)?;
        let backend = &match kind {
            File => Backend::File(&file, Arc::new(file.map(len)?)),
            _ => Backend::Memory(source::memory_file(len, None)?),
        };
        let pages = Pattern::Random.parts(len, PAGE, 1).concat();
        for (table, id, per_mille) in wanted {
            let touched = (pages.len() * per_mille / 1000).max(1);
            let parts = &[&pages[..touched]];
            let (engine, touched) = (&placement.engine()?, touched as u64);
            let touching = Touching::Word;
            let scan = Scan { len, backend, engine, placement, parts, touching, touched };
            let narrow = if *per_mille < 50 { 0 } else { 4 };
            let wide = if *per_mille < 50 { 4 } else { 9 };
            let mut suite = Suite::new(table, len);
            for order in [None, Some(narrow), Some(wide)] {
                let spec = scan.add(&mut suite, way(order))?;
                spec.row.role = Some(if order.is_none() { Role::Ours } else { Role::Variant });
                (spec.row.items, spec.is_rival) = (touched, true);
            }
            let title = backend.title();
            session.measure(
                suite,
                format!("{title}, {id} % of its pages in random order: {len}, {touched} touches"),
                format!("{}; *x best* of auto is its time by the fastest row's", placement.title),
            )?;
        }
    }
    Ok(())
}

/// Tables with so many threads have at most so many rounds.
const MANY: usize = 32;
const ROUNDS: u32 = 3;

/// Measures the published experiment as it was run: every thread reads every word of the whole file, in order or its
/// pages at random, or touches one page of each page table. The other tables share the pages out.
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
        let pages = &pattern.parts(len, PAGE, 1).concat()[..];
        let touched = pages.len() as u64;
        let scan = Scan {
            len,
            backend,
            engine: &Engine::with(uzone_fault::EngineOptions::default())?,
            placement,
            parts: &vec![pages; threads],
            touching: if is_whole { Touching::Page } else { Touching::Word },
            touched,
        };
        let mut suite = Suite::new(id(pattern, threads), len).threads(threads);
        scan.add_all(&mut suite, &[OnePage, Reader(None), Thread(None), Kernel, Populated])?;
        for &order in &whole.orders {
            for way in [Reader(Some(order)), Thread(Some(order))] {
                scan.add(&mut suite, way)?.naive("naive").row.published =
                    published_time(pattern, threads, order, len);
            }
        }
        suite.each_spec(|spec| {
            spec.row.items = touched * threads as u64;
            if is_whole {
                spec.limit("populate").row.bytes = len.get() * threads as u64;
            }
        });
        let plural = if threads == 1 { "thread" } else { "threads, each" };
        let part = if is_whole { "every word of" } else { "a word of" };
        let title =
            format!("{threads} {plural} reading {part} {len} of a file, {}", pattern.title());
        suite.rounds = if threads >= MANY { ROUNDS } else { u32::MAX };
        let marked = suite.fewer(session.rounds);
        let note = format!("published: the kernel, {IN_ORDER} and {RANDOM} at random{marked}");
        session.measure(suite, title, note)?;
    }
    Ok(())
}

//! Touching all pages, in order and at random, and one per page table: the published tables.

use std::cell::Cell;

use uzone_fault::LazyOptions;
use uzone_pages::ByteLen;

use super::backend::Backend;
use super::bare::spin_as_ours;
use super::huge;
use super::published::{ORDERS, published};
use super::run::{Ours, Run, Touches, Visits, Ways};
use super::touch::{Pattern, Placement};
use crate::harness::{Result, Role, Suite};

/// The windows that threads map for their own faults, by their order; `None` adapts.
const IN_THREAD: [Option<u8>; 5] = [Some(0), Some(4), Some(7), Some(9), None];
/// The same where two threads answer.
const TWO_READERS: [Option<u8>; 3] = [Some(0), Some(4), None];

/// The row of the default: adaptive windows that start at 16 pages. The summary shows it.
pub(super) const BY_DEFAULT: &str = "auto";

/// Measures one table.
pub(super) fn table(
    run: &mut Run<'_>,
    pattern: Pattern,
    backend: &Backend<'_>,
    placement: &Placement,
    len: ByteLen,
) -> Result {
    let table = format!("fault-{}-{}{}", pattern.id(), backend.id(), placement.id);
    if !run.wants(&table) {
        return Ok(());
    }
    let page_bytes = backend.page().bytes();
    let parts = pattern.parts(len, page_bytes, placement.threads);
    let threads = parts.len();
    let is_timed = pattern == Pattern::OnePerTable;
    let visits = match is_timed {
        true => Visits::timed(&parts, placement),
        false => Visits::untimed(&parts, placement),
    };
    let (touched, visits) = (visits.touched, Visits { page_bytes, ..visits });
    let ways = Ways { visits, backend, engine: &placement.engine()?, len };
    // How many pages were to be huge, and were not.
    let lacking = &Cell::new(0);
    let mut suite = Suite::new(&table, len).threads(threads);
    ways.add_naive(&mut suite);
    let spin = spin_as_ours(placement.spin);
    if spin.is_some() {
        let open = move || backend.bare(len, spin);
        let name = "one page, waiting as ours does";
        visits.add(&mut suite, Role::Peer, "naive-spin", name, open);
    }
    let is_published =
        matches!(backend, Backend::File(..)) && threads == 1 && pattern != Pattern::Random;
    for (order, ours) in rows(run, ways)? {
        let row = ours.row.clone();
        if row == huge::ROW {
            add_huge(&mut suite, ways, ours, lacking);
        } else {
            ways.add_ours(&mut suite, Role::Ours, ours);
        }
        let Some(spec) = suite.spec(&row) else { continue };
        let alike = if spin.is_some() { "naive-spin" } else { "naive" };
        spec.waiting_alike = Some(spec.of_table(alike));
        spec.touch_naive = is_timed.then(|| spec.of_table("naive"));
        if row == BY_DEFAULT && placement.is_first && !is_timed && !backend.is_huge() {
            let title = backend.title().to_lowercase();
            spec.headline(format!("map {len} of {title}, {}", pattern.title()));
        }
        let order = order.filter(|_| is_published);
        spec.row.published = order.and_then(|order| published(pattern, 1, order, len));
    }
    add_bare_threads(&mut suite, ways);
    ways.add_kernel(&mut suite);
    suite.naive("naive").each_spec(|spec| {
        spec.row.items = touched;
        if !is_timed {
            // Where one page of a table is touched, populating does much more than the row.
            spec.limit("populate").row.bytes = touched * page_bytes;
        }
    });
    let title = format!("{}, {}: {len}, {touched} touches", backend.title(), pattern.title());
    run.session.measure(suite, title, note(placement))?;
    leave_out_huge(run, &table, lacking.get());
    Ok(())
}

/// Adds handlers in the thread that keep no record.
fn add_bare_threads<'a>(suite: &mut Suite<'a>, ways: Ways<'a, Touches<'a>>) {
    let Ways { visits, backend, len, .. } = ways;
    for order in IN_THREAD.into_iter().flatten().filter(|_| !backend.is_huge()) {
        let name = format!("bare, {} pages, in the thread", 1_u64 << order);
        let open = move || backend.bare_thread(len, order);
        visits.add(suite, Role::Peer, &format!("thread-bare-{order}"), name, open);
    }
}

/// Leaves the row of huge pages out if some were not huge: it would be one of base pages.
fn leave_out_huge(run: &mut Run<'_>, table: &str, lacking: u64) {
    if lacking != 0 {
        let id = format!("{table}/{}", huge::ROW);
        run.session.bench.results.retain(|row| row.id != id);
        run.skip(&id, format!("{lacking} pages were not huge: too little memory is in one piece"));
    }
}

/// Returns where threads run, and how ours waits.
fn note(placement: &Placement) -> String {
    let title = &placement.title;
    match placement.spin {
        Some(spin) if spin.is_zero() => {
            format!("{title}; ours sleeps at once when nothing is left")
        }
        _ => format!("{title}; ours looks for {:?} before it sleeps", LazyOptions::DEFAULT_SPIN),
    }
}

/// Returns our rows, each with the order of its window if times were published for that order.
fn rows(run: &Run<'_>, ways: Ways<'_, Touches<'_>>) -> Result<Vec<(Option<u8>, Ours)>> {
    let Ways { visits, backend, .. } = ways;
    let Visits { visitor: Touches { parts, is_timed, .. }, placement, .. } = visits;
    let mut rows = Vec::new();
    for order in ORDERS.into_iter().map(Some).filter(|_| !backend.is_huge()).chain([None]) {
        rows.push((order, Ours::new(order, placement)?));
    }
    for order in IN_THREAD.into_iter().filter(|_| !backend.is_huge()) {
        rows.push((None, Ours::in_thread(order, placement)?));
    }
    if let Backend::File(..) = backend {
        for order in TWO_READERS.into_iter().filter(|_| parts.len() > 1 && !is_timed) {
            rows.push((None, Ours::two_readers(order, placement)?));
        }
        if run.has_huge {
            rows.push((None, huge::transparent(placement)?));
        }
    }
    Ok(rows)
}

/// Adds the row of transparent huge pages, and counts the pages of 2 MiB that did not become huge.
fn add_huge<'a>(
    suite: &mut Suite<'a>,
    Ways { visits, backend, engine, len }: Ways<'a, Touches<'a>>,
    Ours { row, name, options }: Ours,
    lacking: &'a Cell<u64>,
) {
    suite.faults(Role::Ours, &row, name, move |row| {
        let open = || backend.lazy(engine, len, &options);
        let memory = visits.placement.by_handler(open)?.into();
        let found = visits.found(row, &memory)?;
        // Each pattern touches each of them.
        let huge = memory.stats().huge_pages;
        lacking.set(lacking.get() + (len.get() >> 21).saturating_sub(huge));
        Ok(found)
    });
}

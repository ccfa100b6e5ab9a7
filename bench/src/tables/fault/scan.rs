//! Touching all pages, in order and at random, and one per page table: the published tables.

use uzone_pages::ByteLen;

use super::backend::Backend;
use super::published::{ORDERS, published};
use super::run::{Ours, Run, Touches, Visits, Ways};
use super::touch::{Pattern, Placement};
use uzone_harness::{Result, Role, Suite};

/// The windows that threads map for their own faults, by their order; `None` adapts.
const IN_THREAD: [Option<u8>; 5] = [Some(0), Some(4), Some(7), Some(9), None];

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
    let mut suite = Suite::new(&table, len).threads(threads);
    ways.add_naive(&mut suite);
    let is_published =
        matches!(backend, Backend::File(..)) && threads == 1 && pattern != Pattern::Random;
    for (order, ours) in rows(ways)? {
        let row = ours.row.clone();
        let spec = ways.add_ours(&mut suite, Role::Ours, ours);
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
    run.session.measure(suite, title, placement.title.clone())
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

/// Returns our rows, each with the order of its window if times were published for that order.
fn rows(ways: Ways<'_, Touches<'_>>) -> Result<Vec<(Option<u8>, Ours)>> {
    let backend = ways.backend;
    let mut rows = Vec::new();
    for order in ORDERS.into_iter().map(Some).filter(|_| !backend.is_huge()).chain([None]) {
        rows.push((order, Ours::new(order)?));
    }
    for order in IN_THREAD.into_iter().filter(|_| !backend.is_huge()) {
        rows.push((None, Ours::in_thread(order)?));
    }
    Ok(rows)
}

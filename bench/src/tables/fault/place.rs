//! Where the reader runs: by default, beside the places that a caller can choose for it.
//!
//! Most of a fault is waking threads, and what that costs depends on which CPUs sleep and how the machine
//! wakes them. The ratio of the default to the fastest place of its table is `ratio_best`.

use uzone_fault::{Engine, EngineOptions};

use super::run::{Ours, Run, Visits};
use super::source::{PAGE, Source};
use super::touch::{Pattern, Placement};
use crate::harness::{Result, Role, Suite};

/// The windows, by order; `None` adapts.
const WINDOWS: [Option<u8>; 3] = [Some(0), Some(4), None];
/// How many threads touch, whether they are kept to the first CPU, and the id of that.
const TOUCHERS: [(usize, bool, &str); 4] =
    [(1, true, "kept"), (1, false, "1"), (2, false, "2"), (8, false, "8")];
/// What every id begins with.
const ID: &str = "fault-place";

/// Measures a table for each window and each number of threads.
pub(super) fn tables(run: &mut Run<'_>, file: &Source) -> Result {
    for order in WINDOWS {
        for (threads, is_kept, id) in TOUCHERS {
            let (window, name) = match order {
                Some(order) => (format!("order-{order}"), format!("windows of {} KiB", 4 << order)),
                None => ("auto".to_owned(), "windows that adapt".to_owned()),
            };
            let table = format!("{ID}-{window}-{id}");
            if run.wants(&table) {
                let kept = if is_kept { ", kept to the first CPU" } else { "" };
                let threads_touch = if threads == 1 { "thread" } else { "threads" };
                let title =
                    format!("The place of the reader: {threads} {threads_touch}{kept}; {name}");
                let places = Placement::of_handler(threads, is_kept)?;
                measure(run, file, &table, order, &places, title)?;
            }
        }
    }
    Ok(())
}

fn measure(
    run: &mut Run<'_>,
    file: &Source,
    table: &str,
    order: Option<u8>,
    places: &[(&'static str, Placement)],
    title: String,
) -> Result {
    let len = file.len;
    let threads = places.first().map_or(1, |(_, place)| place.threads);
    let parts = &Pattern::InOrder.parts(len, PAGE, threads);
    let mut suite = Suite::new(table, len);
    suite.threads = threads;
    for (row, place) in places {
        let (role, engine) = if *row == "default" {
            (Role::Ours, Engine::with(EngineOptions::default())?)
        } else {
            (Role::Variant, place.engine()?)
        };
        let options = Ours::new(order, place)?.options;
        let visits = Visits::untimed(parts, place);
        let spec = suite.faults(role, row, place.title.clone(), move |row| {
            visits.found(row, &engine.map(len, file.backing()?, &options)?.into())
        });
        spec.is_rival = true;
    }
    run.session.measure(suite, title, "*x best* is the time by the fastest row's")
}

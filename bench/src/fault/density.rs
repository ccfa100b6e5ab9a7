//! A part of the pages of a file, touched in random order: which window is best depends on how large
//! the part is and on what a fault costs, and `auto` has to find out.
//!
//! The file is larger than what the other tables touch: a window that fills much of a small file at
//! once would look good at every density. The ratio of `auto` to the fastest window of its table is
//! `ratio_best`.

use uzone_pages::ByteLen;

use super::run::{Ours, Run, Visit};
use super::source::{PAGE, Source};
use super::touch::{Pattern, Placement};
use crate::report::Role;
use crate::suite::{BenchError, Suite};

/// A part of the pages.
struct Density {
    id: &'static str,
    /// How many of 1000 pages.
    per_mille: usize,
    /// The fixed windows, by order. One that cannot win and takes long is left out.
    windows: &'static [u8],
    /// How many rounds there are at most.
    rounds: u32,
}

const DENSITIES: [Density; 5] = [
    Density { id: "0.2", per_mille: 2, windows: &[0, 4], rounds: u32::MAX },
    Density { id: "1", per_mille: 10, windows: &[0, 4], rounds: u32::MAX },
    Density { id: "5", per_mille: 50, windows: &[0, 4, 9], rounds: 3 },
    Density { id: "20", per_mille: 200, windows: &[4, 9], rounds: 3 },
    Density { id: "100", per_mille: 1000, windows: &[4, 9], rounds: 3 },
];
/// What every id begins with.
pub(super) const ID: &str = "fault-density";

/// Returns the id of a table.
fn id(density: &str, placement: &Placement) -> String {
    format!("{ID}-{density}{}", placement.id)
}

/// Measures the tables of one placement.
pub(super) fn tables(
    run: &mut Run<'_>,
    file: &Source,
    placement: &Placement,
) -> Result<(), BenchError> {
    let len = file.len;
    let order = Pattern::Random.parts(len, PAGE, 1).concat();
    for Density { id: density, per_mille, windows, rounds } in DENSITIES {
        let table = id(density, placement);
        if !run.wants(&table) {
            continue;
        }
        let touched = (order.len() * per_mille / 1000).max(1);
        let parts = [order[..touched].to_vec()];
        let visit = Visit { is_timed: false, ..Visit::timed(&parts, placement) };
        let engine = placement.engine()?;
        let engine = &engine;
        let mut suite = Suite::new(len);
        for window in std::iter::once(None).chain(windows.iter().copied().map(Some)) {
            let Ours { row, name, options } = Ours::new(window, placement)?;
            let role = if window.is_none() { Role::Ours } else { Role::Variant };
            let spec = suite.faults(role, &format!("{table}/{row}"), name, 1, move |row| {
                let backing = file.backing()?;
                let memory = placement.by_handler(|| Ok(engine.map(len, backing, &options)?))?;
                visit.lazy(row, &memory)
            });
            spec.pages = visit.touched();
            spec.is_rival = true;
        }
        let rounds = rounds.min(run.settings.rounds);
        let marked = if rounds < run.settings.rounds {
            format!("; {rounds} rounds, because each takes long")
        } else {
            String::new()
        };
        let title = format!(
            "A file in the page cache, {density} % of its pages in random order: {len}, {touched} touches"
        );
        let note = format!(
            "{}; *x best* of auto is its time by the fastest row's{marked}",
            placement.title
        );
        run.session.table(table, title, note);
        let what = format!("{density} % at random{}", placement.id);
        suite.run(&what, rounds, run.session.watch, &mut run.session.bench.results)?;
    }
    Ok(())
}

/// Returns whether any table was asked for.
pub(super) fn is_wanted(run: &Run<'_>, placements: &[Placement]) -> bool {
    let mut ids =
        placements.iter().flat_map(|placement| DENSITIES.map(|density| id(density.id, placement)));
    run.settings.density > ByteLen::ZERO && ids.any(|table| run.wants(&table))
}

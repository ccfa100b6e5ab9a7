//! A part of the pages of a file, touched in random order: which window is best depends on how large
//! the part is and on what a fault costs, and `auto` has to find out.
//!
//! The file is larger than what the other tables touch: a window that fills much of a small file at
//! once would look good at every density. The ratio of `auto` to the fastest window of its table is
//! `ratio_best`. A reader answers for the file; the threads themselves answer for the file and for a memory file.

use uzone_pages::ByteLen;

use super::backend::Backend;
use super::run::{Ours, Run, Visits, Ways};
use super::source::{self, PAGE, Source};
use super::touch::{Pattern, Placement};
use uzone_harness::{Result, Role, Suite};

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

/// What a reader answers for.
const BY_READER: [Density; 5] = [
    Density { id: "0.2", per_mille: 2, windows: &[0, 4], rounds: u32::MAX },
    Density { id: "1", per_mille: 10, windows: &[0, 4], rounds: u32::MAX },
    Density { id: "5", per_mille: 50, windows: &[0, 4, 9], rounds: 3 },
    Density { id: "20", per_mille: 200, windows: &[4, 9], rounds: 3 },
    Density { id: "100", per_mille: 1000, windows: &[4, 9], rounds: 3 },
];
/// What the threads themselves answer for.
const IN_THREAD: [Density; 8] = [
    Density { id: "0.2", per_mille: 2, windows: &[0, 4], rounds: u32::MAX },
    Density { id: "1", per_mille: 10, windows: &[0, 4], rounds: u32::MAX },
    Density { id: "2", per_mille: 20, windows: &[0, 4, 9], rounds: u32::MAX },
    Density { id: "5", per_mille: 50, windows: &[0, 4, 9], rounds: u32::MAX },
    Density { id: "10", per_mille: 100, windows: &[0, 4, 9], rounds: u32::MAX },
    Density { id: "20", per_mille: 200, windows: &[0, 4, 9], rounds: u32::MAX },
    Density { id: "50", per_mille: 500, windows: &[4, 9], rounds: u32::MAX },
    Density { id: "100", per_mille: 1000, windows: &[4, 9], rounds: u32::MAX },
];
/// What every id begins with.
pub(super) const ID: &str = "fault-density";

/// The tables of one backend: its pages by their density, and what answers.
struct Tables<'a> {
    /// What their ids begin with.
    id: String,
    densities: &'static [Density],
    ours: fn(Option<u8>) -> Result<Ours>,
    placement: &'a Placement,
}

impl<'a> Tables<'a> {
    fn by_reader(placement: &'a Placement) -> Self {
        Self { id: format!("{ID}-"), densities: &BY_READER, ours: Ours::new, placement }
    }

    fn in_thread(backend: &str, placement: &'a Placement) -> Self {
        let id = format!("{ID}-thread-{backend}-");
        Self { id, densities: &IN_THREAD, ours: Ours::in_thread, placement }
    }

    /// Returns the id of a table.
    fn id(&self, density: &Density) -> String {
        format!("{}{}{}", self.id, density.id, self.placement.id)
    }

    fn are_wanted(&self, run: &Run<'_>) -> bool {
        self.densities.iter().any(|density| run.wants(&self.id(density)))
    }

    fn measure(&self, run: &mut Run<'_>, backend: &Backend<'_>, len: ByteLen) -> Result {
        let (placement, order) = (self.placement, Pattern::Random.parts(len, PAGE, 1).concat());
        for density in self.densities {
            let id = self.id(density);
            if !run.wants(&id) {
                continue;
            }
            let parts = [order[..(order.len() * density.per_mille / 1000).max(1)].to_vec()];
            let visits = Visits::untimed(&parts, placement);
            let (touched, engine) = (visits.touched, &placement.engine()?);
            let ways = Ways { visits, backend, engine, len };
            let mut suite = Suite::new(id, len);
            suite.rounds = density.rounds;
            for window in std::iter::once(None).chain(density.windows.iter().copied().map(Some)) {
                let role = if window.is_none() { Role::Ours } else { Role::Variant };
                let spec = ways.add_ours(&mut suite, role, (self.ours)(window)?);
                (spec.row.items, spec.is_rival) = (touched, true);
            }
            let title = format!(
                "{}, {} % of its pages in random order: {len}, {touched} touches",
                backend.title(),
                density.id
            );
            let note = format!(
                "{}; *x best* of auto is its time by the fastest row's{}",
                placement.title,
                suite.fewer(run.settings.rounds)
            );
            run.session.measure(suite, title, note)?;
        }
        Ok(())
    }
}

/// Measures the tables that were asked for, of `len` bytes.
pub(super) fn tables(run: &mut Run<'_>, len: ByteLen, placements: &[Placement]) -> Result {
    let alone: Vec<_> = placements.iter().filter(|place| place.threads == 1).collect();
    // No reader has a place where threads answer themselves.
    let in_thread = |backend| alone.first().map(|place| Tables::in_thread(backend, place));
    let by_reader = alone.iter().map(|place| Tables::by_reader(place));
    let of_file: Vec<_> = by_reader.chain(in_thread("file")).collect();
    if of_file.iter().any(|tables| tables.are_wanted(run)) {
        let file = Source::new(&run.settings.directory, len)?;
        file.warm(len)?;
        let backend = Backend::File(&file, file.map(len)?.into());
        for tables in &of_file {
            tables.measure(run, &backend, len)?;
        }
    }
    if let Some(of_memory) = in_thread("memfd").filter(|tables| tables.are_wanted(run)) {
        let backend = Backend::Memory(source::memory_file(len, None)?);
        of_memory.measure(run, &backend, len)?;
    }
    Ok(())
}

//! What `uzone demo` measures: four kinds of work, each the plain way, ours, and the limit.
//!
//! The rows of `bind`, `zero` and `pin` are those of the tables of these names, on less memory and under
//! names for people who never saw those tables. A file that is mapped lazily is read by another
//! process, which the caller has, so the caller does that work ([`map`]).

use std::num::NonZeroUsize;
use std::time::Duration;

use uzone_pages::ByteLen;

use crate::extents::{self, Arena, Work};
use crate::group::Watch;
use crate::report::{FaultSpec, Role, Row, Table};
use crate::suite::{BenchError, Suite};
use crate::{bind, fault, pin};

/// What is cleared at once.
const EXTENT: ByteLen = ByteLen::mib(2);
/// Memory that extents are taken from in turn, twice, where there is enough: longer than most caches.
pub const ARENA: ByteLen = ByteLen::mib(256);

/// Rows that are compared with each other.
#[derive(Clone, Debug)]
pub struct Part {
    /// Their table.
    pub table: Table,
    /// The rows: `naive`, `ours`, `limit`, and others.
    pub rows: Vec<Row>,
}

/// One reading of a file.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// How long it took.
    pub elapsed: Duration,
    /// How many page faults there were.
    pub faults: u64,
}

/// How a file is read once, in one of the ways that are compared.
pub type Reader<'a> = Box<dyn FnMut() -> Result<Reading, BenchError> + 'a>;

/// The ways of reading a file that nothing is mapped of yet.
pub struct Readers<'a> {
    /// A handler that answers one page for each fault.
    pub naive: Reader<'a>,
    /// With windows around each fault.
    pub ours: Reader<'a>,
    /// The kernel's own mapping.
    pub limit: Reader<'a>,
}

/// Returns how much memory the parts take at most, beside what the caller's readers do.
#[must_use]
pub fn memory(described: ByteLen, arena: ByteLen) -> ByteLen {
    // Descriptors of 64 bytes for bind, twice, and some on top, as `bind` asks for; and the arena.
    let bind = (described.get() >> 12) * 64 / 5 * 12;
    ByteLen::new(bind.max(arena.get() * 2 / 10 * 11) + (32 << 20))
}

/// Returns how many page faults of the calling thread the kernel has counted.
#[must_use]
pub fn kernel_faults() -> u64 {
    fault::kernel_faults()
}

/// Reads `len` bytes of a file in each of the ways, `rounds` times.
///
/// # Errors
/// What the ways answer.
pub fn map(
    len: ByteLen,
    rounds: u32,
    readers: Readers<'_>,
    watch: Watch<'_>,
) -> Result<Part, BenchError> {
    let table = Table {
        id: "demo-map".to_owned(),
        title: "Another process touches a file that is mapped lazily, page by page".to_owned(),
        note: format!(
            "{len} of the image; naive answers one page for each stop of the reader; the limit is \
             the kernel's own mapping of the same file, which copies nothing"
        ),
    };
    let Readers { naive, ours, limit } = readers;
    let mut suite = Suite::new(len);
    for (role, row, name, mut read) in [
        (Role::Naive, "naive", "a handler that answers page by page", naive),
        (Role::Ours, "ours", "uzone, neighbours come along", ours),
        (Role::Limit, "limit", "the kernel's own mapping", limit),
    ] {
        let faults = FaultSpec::default();
        let log = faults.log.clone();
        let spec = suite.add(role, &format!("demo-map/{row}"), name, len.get(), 1, move || {
            let Reading { elapsed, faults } = read()?;
            log.borrow_mut().push(faults, 0, Vec::new());
            Ok(elapsed)
        });
        spec.faults = Some(faults);
        spec.naive = Some("demo-map/naive".to_owned());
        spec.limit = (row != "limit").then(|| ("demo-map/limit".to_owned(), len.get()));
    }
    let mut rows = Vec::new();
    suite.run("reading the image again, in three ways", rounds, watch, &mut rows)?;
    Ok(Part { table, rows })
}

/// Describes memory, with descriptors of 64 bytes as Linux has them.
///
/// # Errors
/// As of [`bind::run`].
pub fn bind(size: ByteLen, rounds: u32, watch: Watch<'_>) -> Result<Part, BenchError> {
    let settings = bind::Settings {
        size,
        rebinds: rounds,
        first_binds: 0,
        threads: NonZeroUsize::MIN,
        growth: ByteLen::ZERO,
        tables: Vec::new(),
    };
    let bench = bind::run(&settings, watch)?;
    let table = Table {
        id: "demo-bind".to_owned(),
        title: format!("Describing {size} of memory: a note about each page of 4 KiB"),
        note: "naive writes the 64 bytes of each note field by field; the limit is a bare fill of \
               as many bytes"
            .to_owned(),
    };
    let rows = [
        ("bind-4k/naive", "demo-bind/naive", "field by field, 64 bytes a page"),
        ("bind-4k/ours-1", "demo-bind/ours", "uzone, 64 bytes a page"),
        (
            "bind-small/on-touch",
            "demo-bind/ours-on-touch",
            "uzone, notes that are made when looked at",
        ),
        ("bind-limit/line-1", "demo-bind/limit", "a bare fill"),
    ];
    Ok(Part { table, rows: take(&bench.results, &rows) })
}

/// Clears memory that is in no cache, 2 MiB at a time, of an arena of so many bytes, twice.
///
/// # Errors
/// [`BenchError`] if memory is short, or a row left a wrong byte.
pub fn zero(arena: ByteLen, rounds: u32, watch: Watch<'_>) -> Result<Part, BenchError> {
    let arena = Arena::of(Work::Zero, arena.get())?;
    let rows = extents::only_cold(Work::Zero, EXTENT, rounds, &arena, watch)?;
    let table = Table {
        id: "demo-zero".to_owned(),
        title: format!("Clearing {EXTENT} of memory"),
        note: "naive clears a page of 4 KiB at a time; the limit is a bare stream of stores"
            .to_owned(),
    };
    let wanted = [
        ("zero-cold-later/2M-page-at-a-time", "demo-zero/naive", "a page at a time"),
        ("zero-cold-later/2M-ours", "demo-zero/ours", "uzone, the whole extent"),
        ("zero-cold-later/2M-limit", "demo-zero/limit", "a bare stream of stores"),
    ];
    Ok(Part { table, rows: take(&rows, &wanted) })
}

/// Holds memory in place as for a device.
///
/// # Errors
/// As of [`pin::run`].
pub fn pin(size: ByteLen, rounds: u32, watch: Watch<'_>) -> Result<Part, BenchError> {
    let rows = pin::only_folios(&pin::Settings { size, rounds, tables: Vec::new() }, watch)?;
    let table = Table {
        id: "demo-pin".to_owned(),
        title: format!("Pinning {size} of memory: uzone does not take it away"),
        note: "naive counts for each page of 4 KiB; uzone counts for each 2 MiB; the limit is \
               bare counting of as many numbers"
            .to_owned(),
    };
    let wanted = [
        ("pin-2m/naive-pin", "demo-pin/naive", "a count for each page"),
        ("pin-2m/whole-pin", "demo-pin/ours", "uzone, all at once"),
        ("pin-2m/limit-one", "demo-pin/limit", "bare counting"),
    ];
    Ok(Part { table, rows: take(&rows, &wanted) })
}

/// Takes the rows that are wanted, under their new ids and names. Rows of another page than was
/// published on are not compared with that.
fn take(rows: &[Row], wanted: &[(&str, &str, &str)]) -> Vec<Row> {
    let taken = wanted.iter().filter_map(|(from, to, name)| {
        let row = rows.iter().find(|row| row.id == *from)?;
        let (id, name) = ((*to).to_owned(), (*name).to_owned());
        Some(Row { id, name, published: None, ..row.clone() })
    });
    taken.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_has_the_plain_way_ours_and_the_limit() {
        let reader = |micros: u64, faults| -> Reader<'static> {
            Box::new(move || Ok(Reading { elapsed: Duration::from_micros(micros), faults }))
        };
        let readers =
            Readers { naive: reader(90, 512), ours: reader(30, 4), limit: reader(15, 32) };
        let parts = [
            map(ByteLen::mib(2), 2, readers, &|_| ()).unwrap(),
            bind(ByteLen::gib(1), 1, &|_| ()).unwrap(),
            zero(ARENA, 1, &|_| ()).unwrap(),
            pin(ByteLen::gib(1), 1, &|_| ()).unwrap(),
        ];
        for Part { table, rows } in &parts {
            for row in ["naive", "ours", "limit"] {
                let id = format!("{}/{row}", table.id);
                assert!(rows.iter().any(|row| row.id == id), "{id}");
            }
            assert!(rows.iter().all(|row| row.median_ns > 0), "{rows:?}");
            let ours = &rows[1];
            assert!(ours.ratio_naive.is_some() && ours.share_of_limit.is_some(), "{ours:?}");
        }
        let ours = &parts[0].rows[1];
        assert_eq!((ours.median_ns, ours.ratio_naive), (30_000, Some(3.0)));
        assert_eq!(
            (ours.share_of_limit, ours.faults.map(|faults| faults.count)),
            (Some(0.5), Some(4))
        );
    }
}

//! What `uzone demo` measures: four kinds of work, each in the plain way, in ours, and at the limit.
//!
//! The rows of `bind`, `zero` and `pin` are those of the tables of these names, on less memory and under
//! names for readers who do not know those tables.

use std::fs::File;
use std::num::NonZeroUsize;
use std::sync::Arc;

use uzone_fault::{Engine, LazyOptions};
use uzone_os::{Access, Mapping, Sharing, probe};
use uzone_pages::ByteLen;
use uzone_stream::Work;

use super::extents::{self, Arena};
use super::fault::{Answer, Bare, Share};
use super::pin;
use crate::harness::{
    Adopted, Bench, BenchError, Benchmark, BindSettings, Counted, Found, Part, PinSettings, Reads,
    Result, Role, Row, Suite, Table, Watch, check_word, counted,
};

/// What is cleared at once.
const EXTENT: ByteLen = ByteLen::mib(2);
/// Memory that extents are taken from in turn, twice, where there is enough: longer than most caches.
pub const ARENA: ByteLen = ByteLen::mib(256);

/// Returns how much memory the parts take at most, beside what the caller's readers do.
#[must_use]
pub fn memory(described: ByteLen, arena: ByteLen) -> ByteLen {
    // Descriptors of 64 bytes for bind, twice, and some on top, as `bind` asks for; and the arena.
    let bind = (described.get() >> 12) * 64 / 5 * 12;
    ByteLen::new(bind.max(arena.get() * 2 / 10 * 11) + (32 << 20))
}

/// A file of which each page starts with its number, as a little-endian word.
#[derive(Clone, Copy)]
pub struct NumberedFile<'a> {
    /// The file.
    pub file: &'a File,
    /// How much of it is read.
    pub len: ByteLen,
    /// Whether a wrong number is an error; it is none if the file is known to be wrong.
    pub is_right: bool,
}

impl NumberedFile<'_> {
    /// Reads the number of each page in order.
    fn read(self, row: &str, memory: &impl Reads) -> Result<Found> {
        let page = probe::page_size().bytes();
        let read = |number: u64| match self.is_right {
            true => check_word(row, memory, number * page, number.to_le()),
            false => memory.read(number * page, &mut [0; 8]),
        };
        Ok(Share::of(|| (0..self.len.get() / page).try_for_each(read))?.found)
    }

    /// Does the same, and adds what memory counts.
    fn touch(self, row: &str, memory: &impl Counted) -> Result<Found> {
        let page = probe::page_size().bytes();
        counted(row, self.read(row, memory), memory, self.len.get() / page, page)
    }

    fn again(self) -> Result<File> {
        self.file.try_clone().map_err(BenchError::of_file("share"))
    }

    fn map(self, sharing: Sharing) -> Result<Mapping> {
        Ok(Mapping::file(self.again()?, 0, self.len, Access::ReadOnly, sharing)?)
    }
}

/// Maps a file lazily and touches it, `rounds` times in each way.
///
/// # Errors
/// [`BenchError`] if memory or a userfaultfd is refused, the file cannot be read, or a page is wrong.
pub fn map(
    image: NumberedFile<'_>,
    engine: &Engine,
    rounds: u32,
    watch: Watch<'_>,
) -> Result<Bench> {
    let len = image.len;
    let table = Table {
        id: "demo-map".to_owned(),
        title: "Touching a file that is mapped lazily, page by page".to_owned(),
        note: format!(
            "{len} of the image; naive answers one page for each stop of the reader; the limit is \
             the kernel's own mapping of the same file, which copies nothing"
        ),
    };
    let present = Arc::new(image.map(Sharing::Shared)?);
    present.populate(0..len.get())?;
    let mut suite = Suite::new("demo-map", len).writing(len.get());
    suite
        .faults(Role::Naive, "naive", "a handler that answers page by page", |row| {
            image.touch(row, &Bare::anonymous(len, Answer::Copy(present.clone()), None)?)
        })
        .limit("limit");
    suite
        .faults(Role::Ours, "ours", "uzone, neighbours come along", |row| {
            let options = LazyOptions::default();
            image.touch(row, &Adopted::file(engine, image.again()?, len, &options)?)
        })
        .limit("limit");
    suite.faults(Role::Limit, "limit", "the kernel's own mapping", |row| {
        image.read(row, &image.map(Sharing::Private)?)
    });
    suite.naive("naive");
    let results = suite.run("reading the image again, in three ways", rounds, watch)?;
    Ok(Bench { tables: vec![table], results, ..Bench::default() })
}

/// Returns a table of the demo with rows of a benchmark: `naive`, `ours`, `limit`, and others. These are named by
/// where each is taken from, and what its row and its name in the demo are.
fn table(
    id: &str,
    title: String,
    note: &str,
    rows: &[Row],
    wanted: &[(&str, &str, &str)],
) -> Bench {
    let taken = wanted.iter().filter_map(|(from, to, name)| {
        let row = rows.iter().find(|row| row.id == *from)?;
        // Rows of another page than was published on are not compared with that.
        let (id, name) = (format!("{id}/{to}"), (*name).to_owned());
        Some(Row { id, name, published: None, ..row.clone() })
    });
    let results = taken.collect();
    let table = Table { id: id.to_owned(), title, note: note.to_owned() };
    Bench { tables: vec![table], results, ..Bench::default() }
}

/// Describes memory, with descriptors of 64 bytes as Linux has them.
///
/// # Errors
/// [`BenchError`] if memory is short, or a row wrote something wrong.
pub fn bind(size: ByteLen, rounds: u32, watch: Watch<'_>) -> Result<Bench> {
    let settings = BindSettings {
        size,
        rebinds: rounds,
        first_binds: 0,
        threads: NonZeroUsize::MIN,
        growth: ByteLen::ZERO,
        dax: None,
    };
    let bench = Part::from(Benchmark::Bind(settings)).run(watch)?;
    Ok(table(
        "demo-bind",
        format!("Describing {size} of memory: a descriptor for each page of 4 KiB"),
        "naive writes the 64 bytes of each descriptor field by field; the limit is a bare fill of \
               as many bytes",
        &bench.results,
        &[
            ("bind-4k/naive", "naive", "field by field, 64 bytes a page"),
            ("bind-4k/ours-1", "ours", "uzone, 64 bytes a page"),
            ("bind-small/on-touch", "ours-on-touch", "uzone, descriptors initialised on first use"),
            ("bind-limit/line-1", "limit", "a bare fill"),
        ],
    ))
}

/// Clears memory that is in no cache, 2 MiB at a time, of an arena of so many bytes, twice.
///
/// # Errors
/// [`BenchError`] if memory is short, or a row left a wrong byte.
pub fn zero(arena: ByteLen, rounds: u32, watch: Watch<'_>) -> Result<Bench> {
    let arena = Arena::of(Work::Zero, arena.get())?;
    let rows = extents::only_cold(Work::Zero, EXTENT, rounds, &arena, watch)?;
    Ok(table(
        "demo-zero",
        format!("Clearing {EXTENT} of memory"),
        "naive clears a page of 4 KiB at a time; the limit is a bare stream of stores",
        &rows,
        &[
            ("zero-cold-later/2M-page-at-a-time", "naive", "a page at a time"),
            ("zero-cold-later/2M-ours", "ours", "uzone, the whole extent"),
            ("zero-cold-later/2M-limit", "limit", "a bare stream of stores"),
        ],
    ))
}

/// Holds memory in place as for a device.
///
/// # Errors
/// [`BenchError`] if memory is short, or a hold was refused.
pub fn pin(size: ByteLen, rounds: u32, watch: Watch<'_>) -> Result<Bench> {
    let rows = pin::only_folios(PinSettings { size, larger: ByteLen::ZERO, rounds }, watch)?;
    Ok(table(
        "demo-pin",
        format!("Pinning {size} of memory: uzone does not take it away"),
        "naive counts for each page of 4 KiB; uzone counts for each 2 MiB; the limit is \
               bare counting of as many numbers",
        &rows,
        &[
            ("pin-2m/naive-pin", "naive", "a count for each page"),
            ("pin-2m/whole-pin", "ours", "uzone, all at once"),
            ("pin-2m/limit-one", "limit", "bare counting"),
        ],
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_page_of_an_image_is_an_error_that_has_its_place() {
        use std::os::unix::fs::FileExt;
        let mut file = uzone_os::file_system::nameless_file(&std::env::temp_dir()).unwrap();
        let page = probe::page_size().bytes();
        let len = ByteLen::mib(2);
        std::io::Write::write_all(&mut file, &[7; 2 << 20]).unwrap();
        for number in 0..len.get() / page {
            file.write_all_at(&number.to_le_bytes(), number * page).unwrap();
        }
        let engine = Engine::new(NonZeroUsize::MIN).unwrap();
        let image = NumberedFile { file: &file, len, is_right: true };
        let map = match map(image, &engine, 2, &|_| ()) {
            Ok(part) => part,
            Err(error) => {
                println!(
                    "skipped: a_wrong_page_of_an_image_is_an_error_that_has_its_place: {error}"
                );
                assert!(std::env::var_os("REQUIRE_ALL").is_none(), "REQUIRE_ALL is set: {error}");
                return;
            }
        };
        assert_eq!(map.results[0].faults.expect("faults").count, len.get() / page);
        file.write_all_at(&[9], page).unwrap();
        let error = super::map(image, &engine, 1, &|_| ()).map(|_| ()).expect_err("a wrong byte");
        assert!(error.to_string().ends_with(&format!("left a wrong byte at {page:#x}")), "{error}");
    }
}

//! The tables of the demo: four kinds of work, each in the plain way, in ours, and at the limit.
//!
//! Its readers do not know the tables of the benchmark: fewer rows, less memory and plainer names.

use std::cell::RefCell;
use std::fs::File;
use std::sync::Arc;

use uzone_fault::{Engine, LazyOptions};
use uzone_os::{Access, Mapping, Sharing, probe};
use uzone_pages::{ByteLen, MemoryKind, Order, Tails};
use uzone_stream::{CacheState, NextUse, StorePolicy, Work};
use uzone_zone::{BindOptions, Zone};

use crate::session::headlines;
use crate::ways::bind::{keeping, linux};
use crate::ways::clear::{Arena, by, by_pages};
use crate::ways::naive_pin::Naive;
use crate::ways::one_page::{Answer, OnePage};
use crate::ways::threads::Share;
use crate::ways::{naive_bind, pin};
use crate::{
    Adopted, Bench, BenchError, Counted, Found, Reads, Result, Role, Suite, Table, Watch,
    check_memory, check_word, counted, fill_lines, index, present, timed,
};

/// The length that is cleared at once.
const EXTENT: ByteLen = ByteLen::mib(2);
/// The memory that extents are taken from in turn, where there is enough: longer than most caches.
pub const ARENA: ByteLen = ByteLen::mib(256);

/// Returns the largest amount of memory that a part takes, without the caller's readers.
#[must_use]
pub fn memory(described: ByteLen, arena: ByteLen) -> ByteLen {
    // Descriptors of 64 bytes for bind, twice, and some on top, as `bind` asks for; and the arena.
    let bind = (described.get() >> 12) * 64 / 5 * 12;
    ByteLen::new(bind.max(arena.get() / 10 * 11) + (32 << 20))
}

/// A file of which each page starts with its number, as a little-endian word.
#[derive(Clone, Copy)]
pub struct NumberedFile<'a> {
    /// The file.
    pub file: &'a File,
    /// The length that is read.
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

    /// Reads the numbers of memory that counts its faults.
    fn touch(self, row: &str, memory: &impl Counted) -> Result<Found> {
        let page = probe::page_size().bytes();
        counted(row, self.read(row, memory), memory, self.len.get() / page, page)
    }

    fn map(self, sharing: Sharing) -> Result<Mapping> {
        Ok(Mapping::file(self.file.try_clone()?, 0, self.len, Access::ReadOnly, sharing)?)
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
    let present = Arc::new(image.map(Sharing::Shared)?);
    present.populate(0..len.get())?;
    let mut suite = Suite::new("demo-map", len).writing(len.get());
    suite
        .faults(Role::Naive, "naive", "a handler that answers page by page", |row| {
            image.touch(row, &OnePage::anonymous(len, Answer::Copy(present.clone()))?)
        })
        .limit("limit");
    suite
        .faults(Role::Ours, "ours", "uzone, neighbours come along", |row| {
            let options = LazyOptions::default();
            image.touch(row, &Adopted::file(engine, image.file.try_clone()?, len, &options)?)
        })
        .limit("limit")
        .headline(format!("map a file of {len} lazily, and touch it"));
    suite.faults(Role::Peer, "kernel", "the kernel's own mapping, which copies nothing", |row| {
        image.read(row, &image.map(Sharing::Private)?)
    });
    let (from, mut copied) = (present.clone(), vec![1; index(len.get())]);
    suite.add(Role::Limit, "limit", "a bare copy", move |_| {
        timed(|| Ok(from.read_at(0, &mut copied)?))
    });
    suite.naive("naive");
    part(
        suite,
        "Touching a file that is mapped lazily, page by page".to_owned(),
        &format!(
            "{len} of the image; naive answers one page for each stop of the reader; the limit is \
             a bare copy into memory that is there"
        ),
        "reading the image again, in three ways",
        rounds,
        watch,
    )
}

/// Measures a suite as the one table of a part of the demo.
fn part(
    suite: Suite<'_>,
    title: String,
    note: &str,
    progress: &str,
    rounds: u32,
    watch: Watch<'_>,
) -> Result<Bench> {
    let table = Table { id: suite.table.clone(), title, note: note.to_owned() };
    let results = suite.run(progress, rounds, watch)?;
    let summary = headlines(&results);
    Ok(Bench { tables: vec![table], summary, results, ..Bench::default() })
}

/// Describes memory, with descriptors of 64 bytes as Linux has them.
///
/// # Errors
/// [`BenchError`] if memory is short, or a row wrote something wrong.
pub fn bind(size: ByteLen, rounds: u32, watch: Watch<'_>) -> Result<Bench> {
    let bytes = (size.get() >> 12) * 64;
    check_memory(ByteLen::new(bytes / 5 * 12))?;
    let zone = keeping(bytes * 2);
    let limit = RefCell::new(present(ByteLen::new(bytes))?);
    let template = naive_bind::template(size, Order::BASE, Some(limit.borrow().addr()))?;
    naive_bind::check(&template, &mut limit.borrow_mut(), "demo-bind/naive")?;
    let mut suite = Suite::new("demo-bind", size).writing(bytes);
    suite
        .add(Role::Naive, "naive", "field by field, 64 bytes a page", |_| {
            naive_bind::rebind(&template, &mut limit.borrow_mut())
        })
        .limit("limit");
    let options = linux(Order::BASE, Tails::Stored, 1);
    suite
        .bind(Role::Ours, "ours", "uzone, 64 bytes a page", &zone, options)?
        .limit("limit")
        .headline(format!("describe {size}: 64 bytes a page"));
    let options = BindOptions::new(MemoryKind::Generic);
    let name = "uzone, descriptors initialised on first use";
    suite
        .bind(Role::Ours, "ours-on-touch", name, &zone, options)?
        .headline(format!("describe {size}: initialised on first use"));
    suite.add(Role::Limit, "limit", "a bare fill", |_| {
        fill_lines(&mut limit.borrow_mut().as_bytes_mut()[..index(bytes)], 1)
    });
    suite.naive("naive");
    part(
        suite,
        format!("Describing {size} of memory: a descriptor for each page of 4 KiB"),
        "naive writes the 64 bytes of each descriptor field by field; the limit is a bare fill of \
         as many bytes",
        "describing memory in several ways",
        rounds,
        watch,
    )
}

/// Clears memory that is in no cache, 2 MiB at a time, of an arena of so many bytes.
///
/// # Errors
/// [`BenchError`] if memory is short, or a row left a wrong byte.
pub fn zero(arena: ByteLen, rounds: u32, watch: Watch<'_>) -> Result<Bench> {
    let arena = &Arena::new(false, arena)?;
    let extent = index(EXTENT.get());
    let mut suite = Suite::new("demo-zero", EXTENT).writing(EXTENT.get());
    let policy = StorePolicy::current();
    let method = policy.choose(Work::Zero, extent, CacheState::Cold, NextUse::Later);
    let clear = |row: &str, clear: &dyn Fn(&mut [u8])| {
        arena.with_next(extent, |dst, _| {
            dst[extent - 1] = 9;
            let elapsed = timed(|| {
                clear(dst);
                Ok(())
            })?;
            let wrong = dst.iter().position(|byte| *byte != 0);
            wrong.map_or(Ok(elapsed), |at| Err(BenchError::wrong_byte(row, at as u64)))
        })
    };
    suite
        .add(Role::Naive, "naive", "a page at a time", move |row| {
            clear(row, &|dst| by_pages(dst, &[]))
        })
        .limit("limit");
    suite
        .add(Role::Ours, "ours", "uzone, the whole extent", move |row| {
            clear(row, &|dst| by(method, dst, &[]))
        })
        .limit("limit")
        .headline(format!("clear {EXTENT} of memory"));
    suite.add(Role::Limit, "limit", "a bare stream of stores", |_| arena.limit(extent));
    suite.naive("naive");
    part(
        suite,
        format!("Clearing {EXTENT} of memory"),
        "naive clears a page of 4 KiB at a time; the limit is a bare stream of stores",
        "clearing memory in several ways",
        rounds,
        watch,
    )
}

/// Holds memory in place as for a device.
///
/// # Errors
/// [`BenchError`] if memory is short, or a hold was refused.
pub fn pin(size: ByteLen, rounds: u32, watch: Watch<'_>) -> Result<Bench> {
    let zone = Zone::with_keep_limit(ByteLen::ZERO);
    let folios = pin::bind(&zone, size, Order::PMD)?;
    pin::check_pins(&folios, "demo-pin/ours")?;
    let range = folios.range();
    let naive = Naive::new(range.pages().get(), pin::CALL_ENTRIES)?;
    let words = pin::words(size)?;
    let mut suite = Suite::new("demo-pin", size);
    suite.add(Role::Naive, "naive", "a count for each page", |_| {
        pin::timed_alone(|| naive.hold(), || naive.give_back())
    });
    suite
        .add(Role::Ours, "ours", "uzone, all at once", |_| timed(|| Ok(folios.pin(range)?)))
        .limit("limit")
        .headline(format!("pin {size} of memory"));
    suite.add(Role::Limit, "limit", "bare counting", |_| {
        pin::timed_alone(|| pin::bare_add(&words), || pin::bare_sub(&words))
    });
    suite.naive("naive");
    part(
        suite,
        format!("Pinning {size} of memory: uzone does not take it away"),
        "naive counts for each page of 4 KiB; uzone counts for each 2 MiB; the limit is \
         bare counting of as many numbers",
        "pinning memory in several ways",
        rounds,
        watch,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_page_of_an_image_is_an_error_that_has_its_place() {
        use std::os::unix::fs::FileExt;
        let mut file = tempfile::tempfile().unwrap();
        let page = probe::page_size().bytes();
        let len = ByteLen::mib(2);
        std::io::Write::write_all(&mut file, &[7; 2 << 20]).unwrap();
        for number in 0..len.get() / page {
            file.write_all_at(&number.to_le_bytes(), number * page).unwrap();
        }
        let engine = Engine::new(std::num::NonZeroUsize::MIN).unwrap();
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

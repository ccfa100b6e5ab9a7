//! `uzone-bench fault`: the cost of a page that is mapped when it is touched.
//!
//! The published experiment read a file of 16 GiB in order, 1 GiB at random, and one page of each page
//! table, with windows of 1 to 512 pages around each fault. The same is done here with memory whose
//! faults are answered in user space.
//!
//! | file | holds |
//! |---|---|
//! | `scan` | the tables of all pages in order and at random, and of a part of the pages; and the published experiment |
//! | `cold` | a file that the page cache has forgotten, touched here and there |
//! | `ways` | the rows: a window of the reader or of the thread, the one-page handler, the kernel |
//! | `backend`, `bare_thread` | the memory that a row maps |
//! | `touch` | the pages that are touched, by which threads, and on which CPUs |
//! | `source` | the files and their words |
//! | `published` | the published times |
//!
//! Every word that a row reads is compared with the word of the file. The naive row is a handler as
//! published examples have it: poll(2), read one event, answer one page. The limit is the kernel's
//! own mapping of the same file, populated at once.

mod backend;
mod bare_thread;
mod cold;
mod published;
mod scan;
mod source;
mod touch;
mod ways;

pub(crate) use touch::{Placement, Touching, touch};

use uzone_harness::{Bench, BenchError, Result, Watch};
use uzone_os::{SystemRoot, memory};
use uzone_pages::{ByteLen, ErrorKind};

use self::published::RANDOM;
use self::source::{PAGE, Source};
use crate::settings::{FaultSettings, Part};

/// Runs the tables.
pub(crate) fn run(settings: &FaultSettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let asked = settings.size;
    check(asked)?;
    if settings.density > ByteLen::ZERO {
        check(settings.density)?;
    }
    let (size, capped) = fitting(asked);
    let sentence = format!(
        "{size} in order{capped}, {} at random, {} rounds; the file is in {}",
        size.min(RANDOM),
        settings.rounds,
        settings.directory.display()
    );
    let mut session = part.session(sentence, settings.rounds, watch);
    let placements = Placement::all()?;
    let file = Source::new(&settings.directory, size)?;
    scan::tables(&mut session, &file, &placements)?;
    cold::table(&mut session, &file)?;
    drop(file);
    if let Some(whole) = &settings.whole {
        scan::published(&mut session, settings, whole)?;
    }
    if settings.density > ByteLen::ZERO {
        let len = fitting(settings.density).0;
        let placement = placements.first();
        placement.map_or(Ok(()), |first| scan::densities(&mut session, settings, len, first))?;
    }
    session.finish()
}

/// Returns an error for sizes that cannot be measured, and for any size on hosts whose pages are not of 4 KiB.
fn check(size: ByteLen) -> Result {
    let is_measured = size >= ByteLen::mib(4) && size.get().is_multiple_of(2 << 20);
    if is_measured && uzone_os::probe::page_size().bytes() == PAGE {
        return Ok(());
    }
    let text = format!(
        "{size} cannot be measured: a size is a multiple of 2 MiB, at least 4M, such as 2G"
    );
    Err(BenchError::host(ErrorKind::InvalidInput, text))
}

/// Returns the part of `asked` that fits the memory, and a note if that is less.
fn fitting(asked: ByteLen) -> (ByteLen, String) {
    let Ok(available) = memory::available(&SystemRoot::host()) else {
        return (asked, String::new());
    };
    // The file and a copy of it, and the words of its pages; a fifth is left to others.
    let room = available.bytes.get() / 5 * 2;
    if asked.get() <= room {
        return (asked, String::new());
    }
    let size = ByteLen::new((room & !((2 << 20) - 1)).max(4 << 20));
    (size, format!(" ({asked} were asked for: limited by {})", available.limited_by))
}

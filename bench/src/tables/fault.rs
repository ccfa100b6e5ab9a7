//! `uzone-bench fault`: what a page costs that is mapped when it is touched.
//!
//! The published experiment read a file of 16 GiB in order, 1 GiB at random, and one page of each page
//! table, with windows of 1 to 512 pages around each fault. The same is done here with memory whose
//! faults are answered in user space.
//!
//! | file | table |
//! |---|---|
//! | `scan` | all pages in order and at random, and one of each page table, by window |
//! | `density` | a part of the pages of a large file in random order, by window |
//! | `cold` | a file that the page cache has forgotten, touched here and there |
//! | `stall` | cached pages while another page does not come |
//! | `write` | the first write to a page whose writes are tracked |
//! | `whole` | every thread reads the whole file |
//!
//! `run` has what the tables share; `source` the files, and which bytes are right; `backend` what is made of them;
//! `touch` which pages are touched, by which threads, and on which CPUs; `bare_thread` the handler that keeps no record
//! of any page.
//!
//! Every word that a row reads is compared with what the file holds. The naive row is a handler as
//! published examples have it: poll(2), read one event, answer one page. The limit is the kernel's
//! own mapping of the same file, populated at once.

mod backend;
mod bare_thread;
mod cold;
mod density;
mod published;
mod run;
mod scan;
mod source;
mod stall;
mod touch;
mod whole;
mod write;

pub(crate) use touch::{Placement, touch};

use uzone_os::{SystemRoot, hugepages, memory};
use uzone_pages::{ByteLen, ErrorKind, PageSize};

use self::backend::Backend;
use self::published::RANDOM;
use self::run::Run;
use self::source::{PAGE, Source};
use self::touch::Pattern;
use crate::settings::{FaultSettings, Part};
use uzone_harness::{Bench, BenchError, Result, Watch};

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
    let session = part.session(sentence, settings.rounds, watch);
    let mut run = Run { session, settings };
    let placements = Placement::all(&settings.threads)?;
    if placements.first().is_some_and(|first| !first.id.is_empty()) {
        run.skip("fault-seq-file", "this process may use one CPU only");
    }
    let file = Source::new(&settings.directory, size)?;
    scans(&mut run, &file, size, &placements)?;
    if let Some(placement) = placements.first() {
        stall::table(&mut run, &file, placement)?;
    }
    file.warm(file.len)?;
    cold::table(&mut run, &file)?;
    drop(file);
    if let Some(whole) = &settings.whole {
        whole::tables(&mut run, whole)?;
    }
    if settings.density > ByteLen::ZERO {
        density::tables(&mut run, fitting(settings.density).0, &placements)?;
    }
    run.session.finish()
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

/// Measures the scans of `size` of a file and of memory files, and where the time of a fault goes.
fn scans(run: &mut Run<'_>, file: &Source, size: ByteLen, placements: &[Placement]) -> Result {
    let tables = [
        (Pattern::InOrder, size),
        (Pattern::Random, size.min(RANDOM)),
        (Pattern::OnePerTable, size),
    ];
    let alone = || placements.iter().filter(|placement| placement.threads == 1);
    {
        let mapped = file.mapped(size)?;
        let backend = Backend::File(file, mapped.clone());
        for (pattern, len) in tables {
            for placement in placements {
                file.warm(len)?;
                scan::table(run, pattern, &backend, placement, len)?;
            }
        }
        match free_huge_pages(size) {
            Ok(len) => {
                let mut in_order = |backend: Backend<'_>| {
                    let table = |at| scan::table(run, Pattern::InOrder, &backend, at, len);
                    alone().try_for_each(table)
                };
                in_order(Backend::HugeCopy(file, mapped))?;
                in_order(Backend::Memory(source::memory_file(len, Some(PageSize::MIB_2))?))?;
            }
            Err(reason) => {
                for id in ["fault-seq-hugetlb-copy", "fault-seq-hugetlb"] {
                    run.skip(id, reason.clone());
                }
            }
        }
    }
    let memory = source::memory_file(size, None)?;
    let backend = Backend::Memory(memory.clone());
    for (pattern, len) in tables {
        for placement in placements {
            scan::table(run, pattern, &backend, placement, len)?;
        }
    }
    for placement in alone() {
        write::tables(run, &memory, placement)?;
    }
    Ok(())
}

/// Returns as much of `asked` as there is memory for, and the words for it.
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

/// Returns how much can be had of the pool for two copies at once, or why it is too little.
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

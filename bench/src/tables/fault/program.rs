//! Programs over lazily mapped memory, by window: [`database`] is SQLite's queries, [`sources`] a search by the
//! crates of ripgrep. They take the place of the kernel builds and the tests of git in the published experiment.
//!
//! A program reads the memory by loads of its own thread, what it needs and in its own order. Its answers are
//! compared with those that it gives where no memory is mapped lazily.

mod database;
mod sources;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uzone_fault::{Engine, EngineOptions};

use super::backend::Backend;
use super::run::{Run, Visitor, Visits, Ways};
use super::source::{PAGE, Source};
use super::touch::{Placement, Share};
use crate::harness::{BenchError, Counted, Found, Reads, Result, Suite, WholeSettings, index};

/// Memory that holds a file.
type Memory = Arc<dyn Reads + Send>;

/// They are a note, and not figures of rows, because no row does the same work.
const PUBLISHED: &str = "published, for windows of 1, 16 and 512 pages: a build of Linux, 151.23, 150.86 and \
     151.45 s with 283.3, 204.8 and 193.4 million faults; a rebuild of it, 27.40, 26.86 and 26.76 s with 5.40, 2.58 \
     and 2.11 million; the tests of git, 66.09, 65.28 and 67.24 s with 129.6, \
     57.6 and 44.1 million (Kirill A. Shutemov, fault-around, February 2014: the kernel's own faults, 60 jobs, a \
     machine with 4 sockets)";

/// What a program was asked, and what it answered.
type Answers = Vec<(&'static str, String)>;

/// A program and the file that it reads.
struct Program<'a> {
    table: &'static str,
    title: String,
    file: Source,
    expected: Answers,
    /// Has the program answer from memory that holds the file.
    ask: Box<dyn Fn(Memory) -> Result<Answers> + 'a>,
}

/// Measures a table for each program.
pub(super) fn tables(run: &mut Run<'_>, settings: &WholeSettings) -> Result {
    let directory = &run.settings.directory;
    if run.wants(database::TABLE) {
        let program = database::program(directory, settings.programs)?;
        table(run, &program, &settings.orders)?;
    }
    if run.wants(sources::TABLE) {
        let program = sources::program(directory, settings.programs)?;
        table(run, &program, &settings.orders)?;
    }
    Ok(())
}

fn table(run: &mut Run<'_>, program: &Program<'_>, orders: &[u8]) -> Result {
    let (table, file, len) = (program.table, &program.file, program.file.len);
    let read = Arc::new(ReadPages::new(file)?);
    program.run(&format!("{table}/read"), read.clone())?;
    let touched = read.count();
    let backend = &Backend::File(file, file.mapped(len)?);
    let engine = &Engine::with(EngineOptions::default())?;
    let placement = &Placement::anywhere()?;
    let visits = Visits { visitor: program, placement, touched, page_bytes: PAGE };
    let mut suite = Suite::new(table, len);
    Ways { visits, backend, engine, len }.add_all(&mut suite, orders)?;
    suite.limit("populate").each_spec(|spec| spec.row.items = touched);
    let title =
        format!("{}, of whose {} pages it reads {touched}", program.title, len.get() / PAGE);
    let note =
        format!("one thread; the program's own work is in the time of each row; {PUBLISHED}");
    run.session.measure(suite, title, note)
}

impl Visitor for &Program<'_> {
    fn visit<M: Counted + Send + 'static>(&self, row: &str, memory: &Arc<M>) -> Result<Found> {
        self.run(row, memory.clone())
    }
}

impl Program<'_> {
    /// Runs it over memory, and compares its answers.
    fn run(&self, row: &str, memory: Memory) -> Result<Found> {
        let mut answers = Answers::new();
        let share = Share::of(|| {
            answers = (self.ask)(memory)?;
            Ok(())
        })?;
        match self.expected.iter().zip(&answers).find(|(expected, found)| expected != found) {
            Some(((question, _), _)) => Err(BenchError::wrong_answer(row, question)),
            None => Ok(share.found),
        }
    }
}

/// A file that is read by system calls, and which of its pages were.
struct ReadPages {
    file: File,
    is_read: Vec<AtomicBool>,
}

impl ReadPages {
    fn new(source: &Source) -> Result<Self> {
        let pages = source.len.get() / PAGE;
        let is_read = (0..pages).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { file: source.again()?, is_read })
    }

    fn count(&self) -> u64 {
        // The thread that asks has read them.
        let is_read = |page: &&AtomicBool| page.load(Ordering::Relaxed);
        self.is_read.iter().filter(is_read).count() as u64
    }
}

impl Reads for ReadPages {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result {
        self.file.read_exact_at(out, offset).map_err(BenchError::of_file("read"))?;
        for page in offset / PAGE..(offset + out.len() as u64).div_ceil(PAGE) {
            if let Some(is_read) = self.is_read.get(index(page)) {
                is_read.store(true, Ordering::Relaxed); // as above
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use uzone_pages::ByteLen;

    use super::*;

    struct Zeroes;

    impl Reads for Zeroes {
        fn read(&self, _: u64, out: &mut [u8]) -> Result {
            out.fill(0);
            Ok(())
        }
    }

    #[test]
    fn programs_answer_from_the_bytes_that_they_read_and_wrong_bytes_are_an_error() {
        let directory = std::env::temp_dir();
        let size = ByteLen::mib(2);
        let database = database::program(&directory, size).expect("a database");
        let sources = sources::program(&directory, size).expect("an image");
        for program in [database, sources] {
            let read = Arc::new(ReadPages::new(&program.file).expect("a file"));
            program.run("row", read.clone()).expect("the right answers");
            assert!((1..=program.file.len.get() / PAGE).contains(&read.count()));
            let error = program.run("row", Arc::new(Zeroes)).map(|_| ()).expect_err("other bytes");
            assert!(!error.is_of_this_host(), "{error}");
        }
    }
}

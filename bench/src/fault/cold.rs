//! A file that the page cache has forgotten, touched here and there.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use super::bare::{Answer, Bare, Waiting};
use super::run::{PAGE, Run};
use super::scan::{BY_DEFAULT, CopyMethod, file_backing, placed, settled, way};
use super::source::{Reads, Source, word};
use super::touch::{Pattern, Placement, touch};
use crate::report::{FaultSpec, Log, Role, Table};
use crate::suite::{BenchError, Suite};

/// How many pages are touched at most: a device takes its time.
const MOST: usize = 512;

/// A row, and what it does once.
struct Case<'a> {
    role: Role,
    id: String,
    name: String,
    run: Box<Do<'a>>,
}

type Do<'a> = dyn Fn(&str, &Log) -> Result<Duration, BenchError> + 'a;

fn case<'a>(
    role: Role,
    row: &str,
    name: &str,
    run: impl Fn(&str, &Log) -> Result<Duration, BenchError> + 'a,
) -> Case<'a> {
    Case { role, id: format!("fault-cold/{row}"), name: name.to_owned(), run: Box::new(run) }
}

/// Reading without mapping.
struct Plain<'a>(&'a File);

impl Reads for Plain<'_> {
    fn read(&self, offset: u64, out: &mut [u8; 8]) -> Result<(), BenchError> {
        // A page, as the others read it.
        let mut page = [0; 4096];
        let start = offset & !(PAGE - 1);
        self.0
            .read_exact_at(&mut page, start)
            .map_err(|cause| BenchError::UseFile { what: "read", cause })?;
        let at = usize::try_from(offset - start).unwrap_or(0);
        out.copy_from_slice(&page[at..at + 8]);
        Ok(())
    }
}

pub(super) fn table(run: &mut Run<'_>, file: &Source) -> Result<(), BenchError> {
    if !run.wants("fault-cold") {
        return Ok(());
    }
    let len = file.len;
    let kept = file.chill()?;
    if kept > 0 {
        let reason = format!(
            "the file system of {} keeps {kept} pages of a file after a request to drop them: name a \
             directory on a disk with --dir",
            file.directory().display()
        );
        run.skip("fault-cold", reason);
        return Ok(());
    }
    let placement = Placement::anywhere()?;
    let mut parts = Pattern::Random.parts(len, PAGE, 1);
    let pages = usize::try_from(len.get() / PAGE).unwrap_or(MOST);
    // Of all pages one in 64, so that hardly any is the neighbour of another.
    parts[0].truncate((pages / 64).clamp(1, MOST));
    let touched = parts[0].len() as u64;
    let (parts, placement) = (&parts, &placement);
    let shared = Arc::new(file.again()?);
    let engine = placement.engine()?;

    let mut cases = vec![
        case(Role::Naive, "kernel", "the kernel's own mapping", |row, log| {
            let memory = file.map(len)?;
            let done = touch(row, &memory, parts, placement, true, word)?;
            let wasted = (memory.resident()?.get() / PAGE).saturating_sub(touched);
            log.borrow_mut().push(done.kernel_faults, wasted, done.times_ns);
            Ok(done.elapsed)
        }),
        case(Role::Peer, "one-page", "one page, read and copied", |row, log| {
            let answer = Answer::Read(shared.clone());
            let memory = Bare::anonymous(len, answer, Waiting::Poll)?;
            let done = touch(row, &memory, parts, placement, true, word);
            memory.check(row)?;
            let done = done?;
            log.borrow_mut().push(memory.faults(), 0, done.times_ns);
            Ok(done.elapsed)
        }),
        case(Role::Limit, "read", "limit, a page read and not mapped", |row, log| {
            let done = touch(row, &Plain(&file.file), parts, placement, true, word)?;
            log.borrow_mut().push(0, 0, done.times_ns);
            Ok(done.elapsed)
        }),
    ];
    for order in [Some(0), Some(4), None] {
        let CopyMethod { row, name, options } = way(order, placement)?;
        let engine = &engine;
        cases.push(case(Role::Ours, &row, &name, move |row, log| {
            let memory = engine.map(len, Arc::new(file_backing(file)?), &options)?;
            let done = touch(row, &memory, parts, placement, true, word)?;
            let stats = settled(&memory);
            let wasted = placed(&stats).saturating_sub(touched);
            log.borrow_mut().push(stats.faults, wasted, done.times_ns);
            Ok(done.elapsed)
        }));
    }
    let naive = Log::default();
    let mut suite = Suite::new(len);
    for Case { role, id, name, run } in cases {
        let log = if id.ends_with("/kernel") { naive.clone() } else { Log::default() };
        let (row, found) = (id.clone(), log.clone());
        let spec = suite.add(role, &id, name, 0, 1, move || {
            file.chill()?;
            run(&row, &found)
        });
        spec.pages = touched;
        spec.cold = true;
        if id.ends_with(BY_DEFAULT) {
            spec.headline = Some(format!("touch {touched} pages of a file that is not cached"));
        }
        spec.naive = Some("fault-cold/kernel".to_owned());
        spec.limit = Some(("fault-cold/read".to_owned(), 0));
        spec.faults = Some(FaultSpec {
            log,
            naive: Some(naive.clone()),
            waiting_alike: Some("fault-cold/one-page".to_owned()),
            ..FaultSpec::default()
        });
    }
    run.bench.tables.push(Table {
        id: "fault-cold".to_owned(),
        title: format!(
            "A file of {len} that the page cache has forgotten: {touched} random touches"
        ),
        note: format!(
            "{}; each touch timed; forgotten again before each row; naive is the kernel's own \
             mapping, and x alike is against one-page reads",
            placement.title
        ),
    });
    suite.run("cold", run.settings.rounds, run.watch, &mut run.bench.results)
}

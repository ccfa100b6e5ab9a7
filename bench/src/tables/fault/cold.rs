//! A file that the page cache has forgotten, touched here and there.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::bare::{Answer, Bare, Waiting};
use super::run::{Ours, Run, Visit};
use super::scan::BY_DEFAULT;
use super::source::{PAGE, Source};
use super::touch::{Pattern, Placement};
use crate::harness::reads::Reads;
use crate::harness::suite::{BenchError, Role, Suite};

/// How many pages are touched at most: a device takes its time.
const MOST: usize = 512;

/// Reading without mapping.
struct Plain<'a>(&'a File);

impl Reads for Plain<'_> {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), BenchError> {
        // A page, as the others read it.
        let mut page = [0; 4096];
        let start = offset & !(PAGE - 1);
        self.0.read_exact_at(&mut page, start).map_err(BenchError::of_file("read"))?;
        let at = usize::try_from(offset - start).unwrap_or(0);
        out.copy_from_slice(&page[at..at + out.len()]);
        Ok(())
    }
}

/// Returns why the file cannot be forgotten, if that is so.
fn refusal(file: &Source) -> Result<Option<String>, BenchError> {
    let kept = file.chill()?;
    let reason = || {
        format!(
            "the file system of {} keeps {kept} pages of a file after a request to drop them: name a \
             directory on a disk with --dir",
            file.directory().display()
        )
    };
    Ok((kept > 0).then(reason))
}

pub(super) fn table(run: &mut Run<'_>, file: &Source) -> Result<(), BenchError> {
    if !run.wants("fault-cold") {
        return Ok(());
    }
    if let Some(reason) = refusal(file)? {
        run.skip("fault-cold", reason);
        return Ok(());
    }
    let len = file.len;
    let placement = &Placement::anywhere()?;
    let mut parts = Pattern::Random.parts(len, PAGE, 1);
    let pages = usize::try_from(len.get() / PAGE).unwrap_or(MOST);
    // Of all pages one in 64, so that hardly any is the neighbour of another.
    parts[0].truncate((pages / 64).clamp(1, MOST));
    let visit = Visit::timed(&parts, placement);
    let touched = visit.touched();
    let shared = Arc::new(file.again()?);
    let engine = &placement.engine()?;
    let mut suite = Suite::new("fault-cold", len);
    let spec = suite.faults(Role::Naive, "kernel", "the kernel's own mapping", |row| {
        file.chill()?;
        visit.kernel(row, &file.map(len)?)
    });
    let naive = spec.faults.log.clone();
    suite.faults(Role::Peer, "one-page", "one page, read and copied", |row| {
        file.chill()?;
        let answer = Answer::Read(shared.clone());
        visit.bare(row, &Bare::anonymous(len, answer, Waiting::Poll)?)
    });
    suite.faults(Role::Limit, "read", "limit, a page read and not mapped", |row| {
        file.chill()?;
        Ok(visit.touch(row, &Plain(&file.file))?.found(0, 0))
    });
    for order in [Some(0), Some(4), None] {
        let Ours { row, name, options } = Ours::new(order, placement)?;
        suite.faults(Role::Ours, &row, name, move |row| {
            file.chill()?;
            visit.lazy(row, &engine.map(len, file.backing()?, &options)?)
        });
    }
    if let Some(spec) = suite.spec(BY_DEFAULT) {
        spec.headline(format!("touch {touched} pages of a file that is not cached"));
    }
    suite.naive("kernel").limit("read").each_spec(|spec| {
        (spec.row.items, spec.row.cold) = (touched, true);
        spec.faults.naive = Some(naive.clone());
        spec.faults.waiting_alike = Some("fault-cold/one-page".to_owned());
    });
    let title =
        format!("A file of {len} that the page cache has forgotten: {touched} random touches");
    let note = format!(
        "{}; each touch timed; forgotten again before each row; naive is the kernel's own mapping, and \
         x alike is against one-page reads",
        placement.title
    );
    run.session.measure(suite, "cold", title, note)
}

//! A file that the page cache has forgotten, touched here and there.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use uzone_harness::ways::one_page::{Answer, OnePage};

use super::run::{Ours, Run, Visits};
use super::scan::BY_DEFAULT;
use super::source::{PAGE, Source};
use super::touch::{Pattern, Placement};
use uzone_harness::{BenchError, Counted, Reads, Result, Role, Suite};

/// How many pages are touched at most: a device takes its time.
const MOST: usize = 512;

/// Reading without mapping.
struct Plain(Arc<File>);

impl Reads for Plain {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result {
        // A page, as the others read it.
        let mut page = [0; 4096];
        let start = offset & !(PAGE - 1);
        self.0.read_exact_at(&mut page, start).map_err(BenchError::of_file("read"))?;
        let at = usize::try_from(offset - start).unwrap_or(0);
        out.copy_from_slice(&page[at..at + out.len()]);
        Ok(())
    }
}

impl Counted for Plain {
    fn counts(&self, _: &str) -> Result<(Option<u64>, u64)> {
        Ok((Some(0), 0))
    }
}

/// Returns why the file cannot be forgotten, if that is so.
fn refusal(file: &Source) -> Result<Option<String>> {
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

pub(super) fn table(run: &mut Run<'_>, file: &Source) -> Result {
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
    let visits = Visits::timed(&parts, placement);
    let touched = visits.touched;
    let shared = Arc::new(file.again()?);
    let plain = shared.clone();
    let engine = &placement.engine()?;
    let mut suite = Suite::new("fault-cold", len);
    visits.add(&mut suite, Role::Naive, "kernel", "the kernel's own mapping", || {
        file.chill()?;
        file.map(len)
    });
    visits.add(&mut suite, Role::Peer, "one-page", "one page, read and copied", move || {
        file.chill()?;
        let file = shared.clone();
        let read = move |offset, page: &mut [u8]| file.read_exact_at(page, offset);
        OnePage::anonymous(len, Answer::Fetch(Arc::new(read)))
    });
    visits.add(&mut suite, Role::Limit, "read", "limit, a page read and not mapped", move || {
        file.chill()?;
        Ok(Plain(plain.clone()))
    });
    for order in [Some(0), Some(4), None] {
        let Ours { row, name, options } = Ours::new(order)?;
        visits.add(&mut suite, Role::Ours, &row, name, move || {
            file.chill()?;
            Ok(engine.map(len, file.backing()?, &options)?)
        });
    }
    if let Some(spec) = suite.spec(BY_DEFAULT) {
        spec.headline(format!("touch {touched} pages of a file that is not cached"));
    }
    suite.naive("kernel").limit("read").each_spec(|spec| {
        (spec.row.items, spec.row.cold) = (touched, true);
        spec.touch_naive = Some(spec.of_table("kernel"));
    });
    let title =
        format!("A file of {len} that the page cache has forgotten: {touched} random touches");
    let note = format!(
        "{}; each touch timed; forgotten again before each row; naive is the kernel's own mapping, and \
         x alike is against one-page reads",
        placement.title
    );
    run.session.measure(suite, title, note)
}

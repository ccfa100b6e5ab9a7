//! A file that the page cache has forgotten, touched here and there.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use uzone_harness::ways::one_page::{Answer, OnePage};
use uzone_harness::{Counted, Reads, Result, Role, Session, Suite};

use super::source::{PAGE, Source};
use super::touch::{Pattern, Placement, Touching};
use super::ways::{Scan, Way};

const TABLE: &str = "fault-cold";
/// The largest number of touched pages: each takes a read of the device.
const MOST: usize = 512;

/// Reading without mapping.
struct Plain(File);

impl Reads for Plain {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result {
        // A page, as the others read it.
        let mut page = [0; 4096];
        let start = offset & !(PAGE - 1);
        self.0.read_exact_at(&mut page, start)?;
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

pub(super) fn table(session: &mut Session<'_>, file: &Source) -> Result {
    if !session.wants(TABLE) {
        return Ok(());
    }
    let kept = file.chill()?;
    if kept > 0 {
        let reason = format!(
            "the file system of {} keeps {kept} pages of a file after a request to drop them: name a \
             directory on a disk with --dir",
            file.directory().display()
        );
        session.skip(TABLE, reason);
        return Ok(());
    }
    let len = file.len;
    let placement = &Placement::anywhere()?;
    let mut offsets = Pattern::Random.offsets(len);
    let pages = usize::try_from(len.get() / PAGE).unwrap_or(MOST);
    // One page in 64, so that few are neighbours.
    offsets.truncate((pages / 64).clamp(1, MOST));
    let touched = offsets.len() as u64;
    let (offsets, engine) = (&offsets, &placement.engine()?);
    let scan = Scan { len, engine, placement, offsets, threads: 1, touching: Touching::Timed };
    let mut suite = Suite::new(TABLE, len);
    suite.faults(Role::Naive, "kernel", "the kernel's own mapping", move |row| {
        file.chill()?;
        scan.found(row, &file.map(len)?)
    });
    suite.faults(Role::Peer, "one-page", "one page, read and copied", move |row| {
        file.chill()?;
        let own = file.again()?;
        let read = move |offset, page: &mut [u8]| own.read_exact_at(page, offset);
        scan.found(row, &OnePage::anonymous(len, Answer::Fetch(Arc::new(read)))?)
    });
    suite.faults(Role::Limit, "read", "limit, a page read and not mapped", move |row| {
        file.chill()?;
        scan.found(row, &Plain(file.again()?))
    });
    let options = Way::Reader(None).options()?;
    suite
        .faults(Role::Ours, "auto", "ours, auto", move |row| {
            file.chill()?;
            scan.found(row, &engine.map(len, file.backing()?, &options)?)
        })
        .headline(format!("touch {touched} pages of a file that is not cached"));
    suite.naive("kernel").limit("read").each_spec(|spec| {
        (spec.row.items, spec.row.cold) = (touched, true);
    });
    session.measure(
        suite,
        format!("A file of {len} that the page cache has forgotten: {touched} random touches"),
        format!(
            "{}; each touch timed; forgotten again before each row; naive is the kernel's own mapping",
            placement.title
        ),
    )
}

//! Clones of one VM, which run at the same time from the same image.
//!
//! | row | place of a clone's pages |
//! |---|---|
//! | `own` | in memory of its own, as a monitor hands it over; decoded frames are shared |
//! | `share` | in a memory file that all clones map privately: a page is decoded and stored once |
//! | `kernel` | in the page cache: the kernel's own private mapping of the raw file |

use std::sync::Arc;

use uzone_fault::{Backing, Engine, LazyOptions, SharedBacking};
use uzone_os::Sharing;
use uzone_pages::ErrorKind;

use super::machine::{COLD_TOUCHES, Restore, machine};
use crate::tables::image::material::PAGE;
use uzone_harness::{BenchError, Found, Result, Role, Session, Suite};

/// The number of clones.
const CLONES: usize = 16;

pub(super) fn table(restore: Restore<'_>, session: &mut Session<'_>) -> Result {
    let restore = restore.of(&restore.pages[..restore.pages.len().min(COLD_TOUCHES)]);
    let (engine, len, offsets) = (&restore.engine()?, restore.len(), &restore.offsets());
    let mut suite = Suite::new("restore-clones", len);
    add_rows(&mut suite, restore, engine, offsets);
    let pages = restore.pages.len();
    let touched = (CLONES * pages) as u64;
    suite.naive("own").each_spec(|spec| {
        (spec.row.items, spec.row.bytes) = (touched, touched * PAGE as u64);
    });
    session.measure(
        suite,
        format!("{CLONES} clones of a VM of {len}: {pages} pages of a working set each"),
        format!(
            "{}; one after the other, and all stay; the memory of a clone counts shared pages once",
            restore.placement.title
        ),
    )
}

/// Adds the rows.
fn add_rows<'a>(
    suite: &mut Suite<'a>,
    restore: Restore<'a>,
    engine: &'a Engine,
    offsets: &'a [u64],
) {
    let len = restore.len();
    let name = "ours, packed, memory of each clone's own";
    suite.faults(Role::Naive, "own", name, move |row| {
        let backing = restore.packed()?;
        clones(|| {
            let new = || machine(engine, len, backing.clone(), &LazyOptions::default());
            let clone = restore.placement.by_handler(new)?;
            Ok((restore.found(row, &clone, offsets)?, clone))
        })
    });
    suite.faults(Role::Ours, "share", "ours, packed, pages shared by all", move |row| {
        let shared: Arc<dyn Backing> = Arc::new(SharedBacking::new(restore.packed()?, len)?);
        clones(|| {
            let new = || Ok(engine.map(len, shared.clone(), &LazyOptions::default())?);
            let clone = restore.placement.by_handler(new)?;
            Ok((restore.found(row, &clone, offsets)?, clone))
        })
    });
    suite.faults(Role::Peer, "kernel", "the kernel's mapping, raw", move |row| {
        clones(|| {
            let clone = restore.map_raw(Sharing::Private)?;
            Ok((restore.touch(row, &clone, offsets)?, clone))
        })
    });
}

/// Starts the clones, each of which touches its pages, and records the growth of this process.
fn clones<C>(mut start: impl FnMut() -> Result<(Found, C)>) -> Result<Found> {
    let before = share()?;
    let (mut all, mut alive) = (Found::default(), Vec::with_capacity(CLONES));
    for _ in 0..CLONES {
        let (found, clone) = start()?;
        alive.push(clone);
        all.add(found);
    }
    let grown = share()?.saturating_sub(before);
    Ok(Found { clone_bytes: Some(grown / CLONES as u64), ..all })
}

/// Returns the proportional set size of this process in bytes: a page that is mapped several times counts once.
fn share() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let kib = text.lines().find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB"));
    let kib: Option<u64> = kib.and_then(|kib| kib.parse().ok());
    let kib = kib.ok_or_else(|| {
        BenchError::host(ErrorKind::Other, "there is no Pss of this process".into())
    })?;
    Ok(kib << 10)
}

//! Clones of one VM, which run at the same time from the same image.
//!
//! | row | place of a clone's pages |
//! |---|---|
//! | `own` | in memory of its own, as a monitor hands it over; decoded frames are shared |
//! | `share` | in a memory file that all clones map privately: a page is decoded and stored once |
//! | `kernel` | in the page cache: the kernel's own private mapping of the raw file |

use std::cell::Cell;
use std::sync::Arc;

use uzone_fault::{Backing, Engine, LazyOptions, SharedBacking};
use uzone_os::Sharing;

use super::machine::{COLD_TOUCHES, Restore, machine};
use crate::tables::image::material::PAGE;
use uzone_harness::{BenchError, Found, Result, Role, Session, Suite};

const TABLE: &str = "restore-clones";
/// The number of clones.
const CLONES: usize = 16;

/// The growth of memory by the first clone of a row and by all clones, in KiB.
type Grown = Cell<Option<(u64, u64)>>;
/// The growth by each row.
type Memory = [Grown; 3];

pub(super) fn table(restore: Restore<'_>, session: &mut Session<'_>) -> Result {
    let restore = restore.of(&restore.pages[..restore.pages.len().min(COLD_TOUCHES)]);
    let (engine, len, offsets) = (&restore.engine()?, restore.len(), &restore.offsets());
    let memory: &Memory = &Memory::default();
    let mut suite = Suite::new(TABLE, len);
    add_rows(&mut suite, restore, engine, offsets, memory);
    let touched = (CLONES * restore.pages.len()) as u64;
    suite.naive("own").each_spec(|spec| {
        (spec.row.items, spec.row.bytes) = (touched, touched * PAGE as u64);
    });
    session.run(suite, TABLE)?;
    let [own, share, kernel] = memory.each_ref().map(|grown| {
        let mib = |kib: u64| kib.div_ceil(1 << 10);
        grown.get().map_or_else(
            || "unknown".to_owned(),
            |(first, all)| format!("{} and {} MiB", mib(first), mib(all)),
        )
    });
    session.table(
        TABLE,
        format!(
            "{CLONES} clones of a VM of {len}: {} pages of a working set each",
            restore.pages.len()
        ),
        format!(
            "{}; one after the other, and all stay; memory of the first and of all, shared pages counted once: \
             own {own}, shared {share}, the kernel's mapping {kernel}",
            restore.placement.title
        ),
    );
    Ok(())
}

/// Adds the rows.
fn add_rows<'a>(
    suite: &mut Suite<'a>,
    restore: Restore<'a>,
    engine: &'a Engine,
    offsets: &'a [u64],
    memory: &'a Memory,
) {
    let len = restore.len();
    let name = "ours, packed, memory of each clone's own";
    suite.faults(Role::Naive, "own", name, move |row| {
        let backing = restore.packed()?;
        clones(&memory[0], &own_share, || {
            let new = || machine(engine, len, backing.clone(), &LazyOptions::default());
            let clone = restore.placement.by_handler(new)?;
            Ok((restore.found(row, &clone, offsets)?, clone))
        })
    });
    suite.faults(Role::Ours, "share", "ours, packed, pages shared by all", move |row| {
        let shared: Arc<dyn Backing> = Arc::new(SharedBacking::new(restore.packed()?, len)?);
        clones(&memory[1], &own_share, || {
            let new = || Ok(engine.map(len, shared.clone(), &LazyOptions::default())?);
            let clone = restore.placement.by_handler(new)?;
            Ok((restore.found(row, &clone, offsets)?, clone))
        })
    });
    suite.faults(Role::Peer, "kernel", "the kernel's mapping, raw", move |row| {
        clones(&memory[2], &own_share, || {
            let clone = restore.map_raw(Sharing::Private)?;
            Ok((restore.touch(row, &clone, offsets)?, clone))
        })
    });
}

/// Starts the clones, each of which touches its pages, and records the growth of `share`, in KiB.
fn clones<C>(
    memory: &Grown,
    share: &dyn Fn() -> Option<u64>,
    mut start: impl FnMut() -> Result<(Found, C)>,
) -> Result<Found> {
    let before = share();
    let grown = || share()?.checked_sub(before?);
    let mut by_first = None;
    let (mut all, mut alive) = (None::<Found>, Vec::with_capacity(CLONES));
    for _ in 0..CLONES {
        let (found, clone) = start()?;
        alive.push(clone);
        by_first = by_first.or_else(grown);
        match &mut all {
            None => all = Some(found),
            Some(all) => all.add(found),
        }
    }
    let pair = by_first.zip(grown());
    memory.set(pair);
    let clone_bytes = pair.map(|(_, by_all)| (by_all << 10) / CLONES as u64);
    all.map(|all| Found { clone_bytes, ..all }).ok_or_else(|| BenchError::threads(CLONES))
}

/// Returns the proportional set size of this process in KiB.
fn own_share() -> Option<u64> {
    share_of("self")
}

/// Returns the proportional set size of a process in KiB: a page that is mapped several times counts once.
fn share_of(process: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup")).ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    kib.trim().strip_suffix(" kB")?.parse().ok()
}

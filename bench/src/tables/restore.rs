//! `uzone-bench restore`: a virtual machine that runs on from an image while its memory is brought in.
//!
//! The image is that of `uzone-bench snapshot`, raw and packed, in the page cache. The machine is memory that
//! is registered with a userfaultfd as Firecracker registers it, and threads that touch it; the descriptor is
//! handed to what answers, as it is to a server.
//!
//! | row | what answers |
//! |---|---|
//! | `naive` | one page for each fault, copied from a mapping of the raw file: the published example |
//! | `raw`, `packed` | ours |
//! | `huge` | ours from the raw file, by blocks of 2 MiB, of which huge pages can be made |
//! | `record` | ours from the packed image, a page at a time, and each fault is recorded |
//! | `replay` | ours from the packed image, and the list of the pages is installed ahead |
//! | `ordered` | the same, from an image in which those pages are packed together |
//! | `own` | ours from the raw file, for memory that the engine maps itself |
//! | `read-first` | nothing: all of the raw file is read before the machine runs |
//! | `kernel` | the kernel's own private mapping of the raw file |
//! | `decode` | nothing: the frames are decoded on all threads |
//!
//! `machine` has what the tables share. `neighbour` has the table of two machines side by side, `clones` that of
//! many machines of one image, of which some attach to the server of `attached`, and `far` that of an image in
//! object storage.

mod attached;
mod clones;
mod far;
mod machine;
mod neighbour;

use self::machine::{COLD_TOUCHES, Restore};
use super::fault::Placement;
use super::snapshot::material::Material;
use crate::settings::{Part, SnapshotSettings};
use uzone_harness::{Bench, Result, Session, Watch};

/// One of so many pages is in the working set, in runs of 1 to `LONGEST_RUN` pages.
const SET_SHARE: usize = 10;
const LONGEST_RUN: usize = 64;

/// Runs the tables.
pub(crate) fn run(settings: &SnapshotSettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let (size, rounds) = (settings.size, settings.rounds);
    let material = Material::new(settings, watch)?;
    let asked = format!(
        "an image of {size}: programs and libraries, {} % of its pages zero, in the page cache; {rounds} \
         rounds; the files are in {}",
        material.zero_percent(),
        settings.directory.display()
    );
    let mut session = part.session(asked, rounds, watch);
    let set = working_set(material.words.len());
    let ordered = material.pack_ordered(set.iter().map(|page| *page as u64).collect())?;
    let (material, all) = (&material, (0..material.words.len()).collect::<Vec<_>>());
    let orders = [
        ("restore-seq", "all pages in order", &all, None),
        ("restore-set", "a working set in a random order", &set, Some(&ordered)),
    ];
    let placements = Placement::all(&[1])?;
    for (table, what, pages, ordered) in orders {
        for placement in &placements {
            let table = format!("{table}{}", placement.id);
            if session.wants(&table) {
                let restore = Restore { material, ordered, placement, pages, is_cold: false };
                let measured = restore.table(&table, what, &mut session);
                session.or_skip(&table, measured)?;
            }
        }
    }
    type Table = fn(Restore<'_>, &mut Session<'_>) -> Result;
    let others: [(&str, Table); 6] = [
        ("restore-seq-cold", cold_table_in_order),
        ("restore-set-cold", cold_table),
        ("restore-clones", clones::table),
        ("restore-seq-far", far::table_in_order),
        ("restore-far", far::table),
        ("restore-neighbour", neighbour::table),
    ];
    for (table, measure) in others {
        let Some(placement) = placements.first().filter(|_| session.wants(table)) else { continue };
        let ordered = Some(&ordered);
        let restore = Restore { material, ordered, placement, pages: &set, is_cold: false };
        let measured = measure(restore, &mut session);
        session.or_skip(table, measured)?;
    }
    session.finish()
}

/// Returns pages in runs, one of ten, in a random order that is the same in every run.
fn working_set(pages: usize) -> Vec<usize> {
    let mut random = fastrand::Rng::with_seed(17);
    let mut is_in = vec![false; pages];
    let wanted = (pages / SET_SHARE).max(1);
    let mut count = 0;
    while count < wanted {
        let first = random.usize(..pages);
        let len = random.usize(1..=LONGEST_RUN);
        for page in is_in.iter_mut().skip(first).take(len.min(wanted - count)) {
            count += usize::from(!std::mem::replace(page, true));
        }
    }
    let mut set: Vec<usize> = (0..pages).filter(|page| is_in[*page]).collect();
    random.shuffle(&mut set);
    set
}

/// Runs the table of all pages in order, where the page cache has none of the files.
fn cold_table_in_order(restore: Restore<'_>, session: &mut Session<'_>) -> Result {
    let pages: &Vec<usize> = &(0..restore.material.words.len()).collect();
    let cold = Restore { pages, ordered: None, is_cold: true, ..restore };
    cold.table("restore-seq-cold", "all pages in order, cold", session)
}

/// Runs the table of a working set whose files are not in the page cache.
fn cold_table(restore: Restore<'_>, session: &mut Session<'_>) -> Result {
    let pages = &restore.pages[..restore.pages.len().min(COLD_TOUCHES)];
    let cold = Restore { pages, is_cold: true, ..restore };
    cold.table("restore-set-cold", "a working set in a random order, cold", session)
}

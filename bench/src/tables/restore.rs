//! `uzone-bench restore`: a VM that runs on from an image while its memory is brought in.
//!
//! The image is the one of `uzone-bench snapshot`, raw and packed, in the page cache. The VM is memory that is
//! registered with a userfaultfd as Firecracker registers it, and threads that touch it; the handler gets the
//! descriptor as a server does.
//!
//! | row | handler |
//! |---|---|
//! | `naive` | one page for each fault, copied from a mapping of the raw file: the published example |
//! | `raw`, `packed` | ours |
//! | `huge` | ours from the raw file, by blocks of 2 MiB, of which huge pages can be made |
//! | `replay` | ours from the packed image, and the list of the pages is installed ahead |
//! | `ordered` | the same, from an image in which the pages of the list are packed together |
//! | `kernel` | the kernel's own private mapping of the raw file |
//! | `decode` | nothing: the frames are decoded on all threads |
//!
//! `machine` has the rows of most tables, `clones` the table of many VMs of one image, and `far` the table of an image
//! in object storage.

mod clones;
mod far;
mod machine;

use uzone_harness::{Bench, Result, Watch};

use self::machine::{COLD_TOUCHES, Restore};
use super::fault::Placement;
use super::image::material::Material;
use crate::settings::{Part, SnapshotSettings};

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
    let (material, ordered) = (&material, Some(&ordered));
    let all: Vec<usize> = (0..material.words.len()).collect();
    let placements = Placement::all()?;
    let (Some(first), same) = (placements.first(), placements.last()) else {
        return session.finish();
    };
    let of = |pages, placement, is_cold| Restore { material, ordered, placement, pages, is_cold };
    let (in_order, of_set) = ("all pages in order", "a working set in a random order");
    let cold = &set[..set.len().min(COLD_TOUCHES)];
    let seq: &[&str] = &["raw", "huge", "packed"];
    let rows: &[&str] = &["raw", "packed", "replay", "ordered"];
    for (table, pages, restore, rows) in [
        (format!("restore-seq{}", first.id), in_order, of(&all, first, false), seq),
        (format!("restore-set{}", first.id), of_set, of(&set, first, false), rows),
        ("restore-set-same".to_owned(), of_set, of(&set, same.unwrap_or(first), false), rows),
        ("restore-set-cold".to_owned(), of_set, of(cold, first, true), rows),
    ] {
        // On a host of one CPU, two of the tables are the same.
        if !session.bench.tables.iter().any(|known| known.id == table) {
            session.each(&[(&table, &|session| restore.table(&table, pages, rows, session))])?;
        }
    }
    session.each(&[
        ("restore-clones", &|session| clones::table(of(&set, first, false), session)),
        ("restore-far", &|session| far::table(of(&set, first, false), session)),
    ])?;
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

//! `uzone-bench snapshot`: packing an image of memory, reading it, checking it, and mapping it lazily.
//!
//! The image is made of the programs and libraries of this host (`material.rs`), in a file without a name;
//! all files are in the page cache but for rows that are cold. `zstd` is measured if it is installed.
//!
//! | table | asks |
//! |---|---|
//! | `snapshot-pack`, `snapshot-unpack` | how fast an image is written and undone, beside `zstd` and frames |
//! | `snapshot-read`, `snapshot-read-cold` | 64 KiB at a random place; the same from the device |
//! | `snapshot-verify` | every hash, beside BLAKE3 alone |
//! | `snapshot-touch-seq`, `snapshot-touch-random` | a lazily mapped image, beside reading all of it first |
//! | `snapshot-s3-seq`, `snapshot-s3-random` | an image in S3, beside its link and one round trip |
//! | `snapshot-share` | the second mapping of shared pages, beside the kernel's mapping of their file |
//!
//! The first four are in `snapshot/pack.rs`, the others in `snapshot/touch.rs`, `snapshot/share.rs` and
//! `snapshot/remote.rs`. The limits decode frames without hashes (`snapshot/frames.rs`), or ask the store
//! and do nothing else (`snapshot/store.rs`).

pub(crate) mod frames;
pub(crate) mod material;
pub(crate) mod pack;
mod remote;
mod share;
pub(crate) mod store;
mod touch;

use self::material::Material;
use crate::settings::{Part, SnapshotSettings};
use uzone_harness::{Bench, Result, Session, Watch};

/// Runs the tables.
pub(crate) fn run(settings: &SnapshotSettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let &SnapshotSettings { size, rounds, threads, .. } = settings;
    let material = Material::new(settings, watch)?;
    let asked = format!(
        "an image of {size}: programs and libraries, {} % of its pages zero; {rounds} rounds, {threads} \
         threads; the files are in {}",
        material.zero_percent(),
        settings.directory.display()
    );
    let mut session = part.session(asked, rounds, watch);
    if session.wants_any(&["snapshot-pack", "snapshot-unpack"]) {
        pack::tables(&material, &mut session)?;
    }
    let tables: [(&str, Rows); 8] = [
        ("snapshot-read", pack::read),
        ("snapshot-read-cold", pack::read_cold),
        ("snapshot-verify", pack::verify),
        ("snapshot-touch-seq", touch::in_order),
        ("snapshot-touch-random", touch::at_random),
        ("snapshot-share", share::in_order),
        ("snapshot-s3-seq", remote::in_order),
        ("snapshot-s3-random", remote::at_random),
    ];
    for (table, rows) in tables {
        if session.wants(table) {
            let measured = rows(&material, &mut session);
            // A host without userfaultfd lacks only the tables that touch memory.
            match pack::TABLES.contains(&table) {
                true => measured?,
                false => session.or_skip(table, measured)?,
            }
        }
    }
    session.finish()
}

/// A function that measures a table.
type Rows = fn(&Material, &mut Session<'_>) -> Result;

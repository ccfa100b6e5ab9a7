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
//! | `snapshot-touch-seq` | a lazily mapped image, beside reading all of it first |
//! | `snapshot-s3-seq` | an image in S3, beside its link |
//!
//! The first five are in `image/pack.rs`, the others in `image/touch.rs` and `image/remote.rs`. The limits decode frames
//! without hashes (`image/frames.rs`), or ask the store and do nothing else (`image/store.rs`).

pub(crate) mod frames;
pub(crate) mod material;
pub(crate) mod pack;
mod remote;
pub(crate) mod store;
mod touch;

use self::material::Material;
use crate::settings::{Part, SnapshotSettings};
use uzone_harness::{Bench, Result, Watch};

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
    let material = &material;
    session.each(&[
        ("snapshot-read", &|session| pack::read(material, false, session)),
        ("snapshot-read-cold", &|session| pack::read(material, true, session)),
        ("snapshot-verify", &|session| pack::verify(material, session)),
        ("snapshot-touch-seq", &|session| touch::in_order(material, session)),
        ("snapshot-s3-seq", &|session| remote::in_order(material, session)),
    ])?;
    session.finish()
}

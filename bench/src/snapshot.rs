//! `uzone bench snapshot`: packing an image of memory, reading it, checking it, and mapping it lazily.
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
//! and do nothing else (`snapshot/store.rs`). The kernel's rival is EROFS (`snapshot/erofs.rs`).

pub(crate) mod erofs;
pub(crate) mod frames;
pub(crate) mod material;
pub(crate) mod pack;
mod remote;
mod share;
pub(crate) mod store;
mod touch;

use crate::group::Watch;
use crate::report::Bench;
use crate::settings::Part;
pub use crate::settings::SnapshotSettings as Settings;
use crate::suite::{BenchError, Session, sentence};

use self::erofs::Erofs;
use self::material::Material;

/// Runs the tables.
///
/// # Errors
/// [`BenchError`] if the files cannot be made, or a row left a wrong byte.
pub fn run(settings: &Settings, watch: Watch<'_>) -> Result<Bench, BenchError> {
    let &Settings { size, rounds, threads, .. } = settings;
    if size.get() < 4 << 20 || !size.get().is_multiple_of(2 << 20) {
        return Err(BenchError::SnapshotSize { size });
    }
    let threads = threads.get();
    let mut material = Material::new(&settings.directory, size, threads, watch)?;
    let asked = format!(
        "an image of {size}: programs and libraries, {} % of its pages zero; {rounds} rounds, {threads} \
         threads; the files are in {}",
        material.zero_percent(),
        settings.directory.display()
    );
    let mut session = Session::new(asked, &Part::Snapshot(settings.clone()), rounds, watch);
    let erofs = ["snapshot-read", "snapshot-touch-seq", "snapshot-touch-random"];
    let erofs = erofs.into_iter().filter(|table| session.wants(table)).collect::<Vec<_>>();
    if !erofs.is_empty() {
        match Erofs::new(&material)? {
            Ok(made) => material.erofs = Some(made),
            Err(reason) => {
                erofs.iter().for_each(|table| session.skip(format!("{table}/erofs"), &*reason));
            }
        }
    }
    if session.wants_any(&["snapshot-pack", "snapshot-unpack"]) {
        pack::tables(&material, &mut session)?;
    }
    if session.wants("snapshot-read") {
        pack::read(&material, &mut session)?;
    }
    if session.wants("snapshot-read-cold") {
        pack::read_cold(&material, &mut session)?;
    }
    if session.wants("snapshot-verify") {
        pack::verify(&material, &mut session)?;
    }
    let touched: [(&str, Rows); 5] = [
        ("snapshot-touch-seq", touch::in_order),
        ("snapshot-touch-random", touch::at_random),
        ("snapshot-share", share::in_order),
        ("snapshot-s3-seq", remote::in_order),
        ("snapshot-s3-random", remote::at_random),
    ];
    for (table, rows) in touched {
        if !session.wants(table) {
            continue;
        }
        match rows(&material, &mut session) {
            // A host without userfaultfd has the other tables.
            Err(error) if error.is_of_this_host() => session.skip(table, sentence(&error)),
            done => done?,
        }
    }
    session.finish()
}

/// What measures a table.
type Rows = fn(&Material, &mut Session<'_>) -> Result<(), BenchError>;

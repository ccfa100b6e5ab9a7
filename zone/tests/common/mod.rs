//! What several tests set up.
#![allow(dead_code, reason = "each test uses a part of this")]
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "../../../os/tests/common/needs.rs"]
pub(crate) mod needs;

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use uzone_pages::{ByteLen, LinuxPage, LinuxSeed, MemoryKind, PageCount, Payload, Pfn, PfnRange};
use uzone_zone::{BindError, BindFailure, BindOptions, Pagemap, Region};

pub(crate) fn range(start: u64, pages: u64) -> PfnRange {
    PfnRange::try_new(Pfn::new(start), PageCount::new(pages)).unwrap()
}

pub(crate) fn anonymous(len: u64) -> Region {
    Region::anonymous(ByteLen::new(len)).unwrap()
}

/// Descriptors that are Linux's, and have to be written.
pub(crate) fn linux() -> BindOptions<LinuxPage> {
    BindOptions::with_payload(MemoryKind::Generic, LinuxSeed::default())
}

/// Returns why a region was not bound.
pub(crate) fn cause<P: Payload>(bound: Result<Pagemap<P>, BindFailure>) -> BindError {
    match bound {
        Ok(pagemap) => panic!("bound: {}", pagemap.report()),
        Err(failure) => failure.cause,
    }
}

/// Returns all bytes of a region.
pub(crate) fn bytes(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len().to_usize().unwrap()];
    region.read_at(0, &mut bytes).unwrap();
    bytes
}

/// A file that is removed at the end.
pub(crate) struct Temporary(pub(crate) PathBuf);

impl Temporary {
    pub(crate) fn new(name: &str, bytes: &[u8]) -> Self {
        let file = Self::sparse(name, 0);
        std::fs::write(&file.0, bytes).unwrap();
        file
    }

    /// A file of `len` bytes, none of which was written.
    pub(crate) fn sparse(name: &str, len: u64) -> Self {
        Self::sparse_in(&std::env::temp_dir(), name, len)
    }

    pub(crate) fn sparse_in(directory: &Path, name: &str, len: u64) -> Self {
        let path = directory.join(format!("uzone-{name}-{}", std::process::id()));
        File::create(&path).unwrap().set_len(len).unwrap();
        Self(path)
    }

    pub(crate) fn truncate(&self, len: u64) {
        OpenOptions::new().write(true).open(&self.0).unwrap().set_len(len).unwrap();
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // A file that stays behind is no reason to fail a test that passed.
        let _ = std::fs::remove_file(&self.0);
    }
}

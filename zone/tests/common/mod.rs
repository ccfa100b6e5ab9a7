//! What several tests set up.
#![allow(dead_code, reason = "each test uses a part of this")]
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "../../../os/tests/common/needs.rs"]
pub(crate) mod needs;

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::path::{Path, PathBuf};

use uzone_os::{Anonymous, HugeAdvice, Mapping};
use uzone_pages::{
    ByteLen, LinuxPage, LinuxSeed, MemoryKind, PageCount, Payload, Pfn, PfnRange, Template, Word,
};
use uzone_zone::{BindError, BindFailure, BindOptions, Pagemap, Region};
use zerocopy::Immutable;

pub(crate) fn range(start: u64, pages: u64) -> PfnRange {
    PfnRange::try_new(Pfn::new(start), PageCount::new(pages)).unwrap()
}

/// Returns pages of a pagemap, the first of which is `from` pages behind its own first.
pub(crate) fn pages_in(pagemap: &Pagemap, from: u64, pages: u64) -> PfnRange {
    range(pagemap.range().start().get() + from, pages)
}

/// Returns how many bytes of the process the kernel has mapped at the addresses.
pub(crate) fn mapped(addresses: Range<u64>) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let number = |digits| u64::from_str_radix(digits, 16).unwrap();
    let lines = maps.lines().map(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split(' ').next().unwrap();
        number(end).min(addresses.end).saturating_sub(number(start).max(addresses.start))
    });
    lines.sum()
}

pub(crate) fn is_mapped(address: usize) -> bool {
    let address = address as u64;
    mapped(address..address + 1) == 1
}

pub(crate) fn anonymous(len: u64) -> Region {
    Region::anonymous(ByteLen::new(len)).unwrap()
}

/// Returns regions of a MiB of base pages, each behind the one before.
pub(crate) fn neighbours(count: u64) -> Vec<Region> {
    let how = Anonymous { huge: HugeAdvice::Never, ..Anonymous::default() };
    let mut parts = vec![Mapping::anonymous(ByteLen::mib(count), how).unwrap()];
    for _ in 1..count {
        let (front, behind) = parts.pop().unwrap().cut(ByteLen::mib(1)).unwrap();
        parts.extend([front, behind]);
    }
    parts.into_iter().map(|part| Region::adopt(part).unwrap()).collect()
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

/// Returns the bytes that `read_at` of a region or of a guard reads.
pub(crate) fn read<const N: usize, E: Debug>(
    read_at: impl FnOnce(&mut [u8]) -> Result<(), E>,
) -> [u8; N] {
    let mut bytes = [0xee; N];
    read_at(&mut bytes).unwrap();
    bytes
}

/// Returns the bytes of a region in a range.
pub(crate) fn bytes_in(region: &Region, range: Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0xee; usize::try_from(range.end - range.start).unwrap()];
    region.read_at(range.start, &mut bytes).unwrap();
    bytes
}

/// Returns all bytes of a region.
pub(crate) fn bytes(region: &Region) -> Vec<u8> {
    bytes_in(region, 0..region.len().get())
}

pub(crate) fn is_zero(region: &Region, range: Range<u64>) -> bool {
    bytes_in(region, range).iter().all(|byte| *byte == 0)
}

/// Returns how many descriptors a region has.
pub(crate) fn descriptor_count<P: Payload>(pagemap: &Pagemap<P>) -> u64 {
    pagemap.report().bytes.get() / Template::<P>::DESCRIPTOR_BYTES as u64
}

/// Compares every descriptor with the slow path.
pub(crate) fn assert_fresh<P: Payload + Immutable>(pagemap: &Pagemap<P>, case: &str) {
    let mut descriptors = 0;
    for page in pagemap.pages() {
        assert_eq!(page.word(), Word::initial(pagemap.kind()), "{case}: {page:?}");
        let Some(written) = page.payload() else { continue };
        let expected = pagemap.fresh_payload(page.pfn()).unwrap();
        let (written, expected) = (written.as_bytes(), expected.as_bytes());
        assert!(written == expected, "{case}: {page:?} is {written:x?}, not {expected:x?}");
        descriptors += 1;
    }
    assert_eq!(descriptors, descriptor_count(pagemap), "{case}");
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

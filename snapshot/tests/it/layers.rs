//! A memory file and diffs of it become one image: each page is that of the newest diff which has it, in
//! whatever order the pages are packed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::Directory;
use proptest::prelude::*;
use uzone_snapshot::{Layers, Packer, RequestOptions, SnapshotError, Source};

const PAGE: usize = 4096;

impl Directory {
    /// Writes a sparse file of so many pages; `pages` are data, each full of a byte.
    fn sparse(&self, name: &str, len_pages: usize, pages: &[(usize, u8)]) -> PathBuf {
        let path = self.0.join(name);
        let file = File::create(&path).unwrap();
        file.set_len((len_pages * PAGE) as u64).unwrap();
        for (page, byte) in pages {
            file.write_all_at(&[*byte; PAGE], (page * PAGE) as u64).unwrap();
        }
        path
    }
}

/// Opens layers, or returns nothing where the temporary directory has no holes.
fn open(base: &Path, diffs: &[PathBuf], takes_all: bool) -> Option<Layers> {
    match Layers::open(base, diffs, takes_all, &RequestOptions::default()) {
        Err(SnapshotError::Holes { path, why }) => {
            eprintln!("skipped: layers: {}: {why}", path.display());
            None
        }
        layers => Some(layers.unwrap()),
    }
}

fn read(layers: &Layers) -> Vec<u8> {
    let mut bytes = vec![0xaa; usize::try_from(layers.byte_len()).unwrap()];
    layers.read_at(0, &mut bytes).unwrap();
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_page_is_that_of_the_newest_diff_which_has_it(
        base in prop::collection::vec((0_usize..40, 1_u8..9), 0..20),
        // Zeroes are data as well: a page that was cleared hides the one below it.
        diffs in prop::collection::vec(prop::collection::vec((0_usize..40, 0_u8..9), 0..20), 0..4),
        reads in prop::collection::vec((0_usize..40 * PAGE, 0_usize..9 * PAGE), 20),
        order in prop::collection::vec(0_u64..45, 0..30),
    ) {
        let directory = Directory::new("merge");
        let mut expected = vec![0; 40 * PAGE];
        for (page, byte) in base.iter().chain(diffs.iter().flatten()) {
            expected[page * PAGE..(page + 1) * PAGE].fill(*byte);
        }
        let base = directory.sparse("base", 40, &base);
        let files: Vec<PathBuf> = diffs
            .iter()
            .enumerate()
            .map(|(number, pages)| directory.sparse(&format!("diff-{number}"), 40, pages))
            .collect();
        if let Some(layers) = open(&base, &files, false) {
            prop_assert!(read(&layers) == expected);
            // At any place, also before the one that was read last.
            for (start, len) in reads {
                let end = expected.len().min(start + len);
                let mut out = vec![0xaa; end - start];
                layers.read_at(start as u64, &mut out).unwrap();
                prop_assert!(out == expected[start..end], "{start}..{end}");
            }
            let packer = Packer::default().threads(2).order(order);
            let pack = |name: &str, source: &dyn Source| {
                let path = directory.0.join(name);
                let packed = packer.pack_source(source, &path, None, &|_| true).unwrap();
                assert_eq!(packed.image_bytes, source.byte_len());
                std::fs::read(path).unwrap()
            };
            prop_assert!(pack("layers", &layers) == pack("merged", &expected));
        }
        // Whole diffs hide everything below them.
        let all = read(&open(&base, &files, true).unwrap());
        prop_assert!(all == std::fs::read(files.last().unwrap_or(&base)).unwrap());
    }
}

#[test]
fn a_diff_that_is_cut_while_it_is_packed_is_an_error_and_hides_no_page() {
    let directory = Directory::new("cut");
    let base = directory.sparse("mem", 40, &[(30, 1)]);
    let diff = directory.sparse("diff", 40, &[(2, 2), (30, 3)]);
    let Some(layers) = open(&base, std::slice::from_ref(&diff), false) else { return };
    let mut page = [0; PAGE];
    layers.read_at((2 * PAGE) as u64, &mut page).unwrap();
    File::options().write(true).open(&diff).unwrap().set_len((20 * PAGE) as u64).unwrap();
    for at in [30, 25, 10] {
        let error = layers.read_at((at * PAGE) as u64, &mut page).unwrap_err();
        let text = uzone_os::with_causes(&error);
        assert!(text.contains("diff: the file became shorter"), "{at}: {text}");
    }
    layers.read_at((2 * PAGE) as u64, &mut page).unwrap();
    assert_eq!(page, [2; PAGE]);
}

#[test]
fn what_is_no_diff_of_this_memory_is_refused_by_name() {
    let directory = Directory::new("refuse");
    let base = directory.sparse("mem", 10, &[(0, 1)]);
    let longer = directory.sparse("longer", 11, &[(0, 1)]);
    let error =
        Layers::open(&base, std::slice::from_ref(&longer), true, &RequestOptions::default())
            .unwrap_err();
    assert!(matches!(error, SnapshotError::OtherLength { .. }), "{error}");
    let said = error.to_string();
    assert!(said.contains("longer has 45056 bytes") && said.contains("has 40960"), "{said}");
    let missing = directory.0.join("missing");
    let said =
        Layers::open(&base, std::slice::from_ref(&missing), false, &RequestOptions::default())
            .unwrap_err()
            .to_string();
    assert!(said.contains("missing"), "{said}");
    let folder = Layers::open(&directory.0, &[], false, &RequestOptions::default());
    let said = uzone_os::with_causes(&folder.unwrap_err());
    assert!(said.contains("not a regular file"), "{said}");
    // A file of procfs: no type of file system that is known to have holes.
    let proc = PathBuf::from("/proc/self/cmdline");
    let empty = directory.sparse("empty", 0, &[]);
    let error = Layers::open(&empty, &[proc], false, &RequestOptions::default()).unwrap_err();
    assert!(matches!(error, SnapshotError::Holes { .. }), "{error}");
    assert!(error.to_string().contains("--all-data"), "{error}");
}

#[test]
fn a_file_that_becomes_shorter_is_an_error_and_no_short_image() {
    let directory = Directory::new("shorter");
    let base = directory.sparse("mem", 10, &[(0, 1), (9, 1)]);
    let layers = Layers::open(&base, &[], false, &RequestOptions::default()).unwrap();
    File::options().write(true).open(&base).unwrap().set_len(PAGE as u64).unwrap();
    let path = directory.0.join("image");
    let error = Packer::default().pack_source(&layers, &path, None, &|_| true).unwrap_err();
    assert!(matches!(error, SnapshotError::Input { .. }), "{error}");
    let part = format!("{}: the file became shorter", base.display());
    let text = uzone_os::with_causes(&error);
    assert!(text.contains(&part), "{text}");
    assert!(layers.read_at(10 * PAGE as u64, &mut [0]).is_err(), "behind the end");
    assert!(!path.exists());
}

//! The inputs that are kept in `fuzz/corpus`, and valid images that are changed at random, through every
//! parser of an image: no panic, no wrong byte, and no more memory than the length of the file allows.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod targets;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use peak_alloc::PeakAlloc;
use proptest::prelude::*;
use uzone_pages::ByteLen;
use uzone_snapshot::{Codec, FrameCache, Image, ImageRegion, OpenOptions, Packer, Root};

/// Counts allocated bytes.
#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// Makes a file, a copy of it, an index of it, and its tables: so many bytes for each byte of the file, and
/// so many for memory that does not depend on it (a page to read into, the root of a hash tree, names).
const BYTES_PER_BYTE: usize = 8;
const BYTES_IN_ANY_CASE: usize = 96 << 10;

/// The tests of this file share the counts of the allocator.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a target, and checks how much memory it took.
fn run(name: &str, target: targets::Target, bytes: &[u8]) -> Result<(), TestCaseError> {
    let before = ALLOCATED.current_usage();
    ALLOCATED.reset_peak_usage();
    let file_len = target(bytes);
    let peak = ALLOCATED.peak_usage().saturating_sub(before);
    let most = file_len * BYTES_PER_BYTE + BYTES_IN_ANY_CASE;
    prop_assert!(peak <= most, "{name}: {peak} bytes were allocated for a file of {file_len}");
    Ok(())
}

#[test]
fn every_input_that_is_kept_is_parsed_or_refused() {
    let _alone = alone();
    // Once before it is counted: the buffers of the thread are made then.
    targets::image(&[]);
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    for (name, target) in targets::TARGETS {
        let mut ran = 0;
        for entry in std::fs::read_dir(corpus.join(name)).unwrap() {
            let path = entry.unwrap().path();
            run(&path.display().to_string(), target, &std::fs::read(&path).unwrap()).unwrap();
            ran += 1;
        }
        assert!(ran >= 3, "{name} has {ran} inputs");
    }
}

/// Makes a sparse file of `len` bytes that has these ones at these places.
fn sparse(path: &Path, len: u64, parts: &[(u64, &[u8])]) {
    let file = File::create(path).unwrap();
    file.set_len(len).unwrap();
    for (at, bytes) in parts {
        file.write_all_at(bytes, *at).unwrap();
    }
}

#[test]
fn no_memory_is_taken_for_what_a_sparse_file_claims() {
    const GIB: u64 = 1 << 30;
    let _alone = alone();
    let path = std::env::temp_dir().join(format!("uzone-claims-{}", std::process::id()));
    let options = OpenOptions::default();
    // An index of that length: its end, and the header of its frame.
    let end = |len: u64| {
        let trailer = [&len.to_le_bytes()[..], b"UZONEEND", &SEEK_TABLE].concat();
        let payload = u32::try_from(len + 16).unwrap_or(u32::MAX);
        let frame = [&0x184D_2A5D_u32.to_le_bytes()[..], &payload.to_le_bytes()].concat();
        (trailer, frame)
    };
    let header = |image_len: u64| {
        let mut header = [0; 128];
        header[..16].copy_from_slice(b"UZONEIMG\x01\0\0\0\0\0\x0c\x0c");
        header[16..24].copy_from_slice(&image_len.to_le_bytes());
        header
    };
    for (len, image_len) in [(40 * GIB, 4096), (3 * GIB, 4096), (GIB / 4, 3 << 40)] {
        let ((trailer, frame), header) = (end(len), header(image_len));
        let after = 8 + len;
        let parts = [(0, &frame[..]), (8, &header), (after, &trailer)];
        sparse(&path, after + trailer.len() as u64, &parts);
        let before = ALLOCATED.current_usage();
        ALLOCATED.reset_peak_usage();
        let error = Image::open(&path, &options).unwrap_err();
        let peak = ALLOCATED.peak_usage().saturating_sub(before);
        assert!(peak < 4 << 20, "{peak} bytes for an index of {len}: {error}");
        assert_eq!(error.kind(), uzone_pages::ErrorKind::InvalidData, "{error}");
    }
    sparse(&path, 4 << 40, &[(0, &[7])]);
    let before = ALLOCATED.current_usage();
    ALLOCATED.reset_peak_usage();
    let raw = Image::open_or_raw(&path, &options).unwrap();
    let mut page = [1; 4096];
    raw.read_at(0, &mut page).unwrap();
    assert_eq!((page[0], page[1]), (7, 0));
    raw.read_at((4 << 40) - 4096, &mut page).unwrap();
    assert_eq!(page, [0; 4096]);
    let peak = ALLOCATED.peak_usage().saturating_sub(before);
    assert!(peak < 4 << 20, "{peak} bytes for raw memory");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_long_index_is_read_in_parts() {
    let _alone = alone();
    let path = std::env::temp_dir().join(format!("uzone-long-index-{}", std::process::id()));
    let region = ImageRegion { guest_addr: 0, offset: 0, len_bytes: 4096, page_bytes: 4096 };
    let (regions, set) = (vec![region; 40_000], vec![1; 200_000]);
    let packer = Packer::default().regions(regions.clone()).working_set(set.clone());
    let packed = packer.pack(&mut &[7; 8192][..], &path, None, &|_| true).unwrap();
    let open = || Image::open(&path, &OpenOptions::default().root(packed.root));
    let image = open().unwrap();
    assert!(image.regions() == regions && image.working_set() == set);
    image.verify(1, true, &|_| ()).unwrap();
    // A byte of the regions, and one of the working set.
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let len = file.metadata().unwrap().len();
    file.write_all_at(&[1], len - 100_000).unwrap();
    assert!(open().unwrap().working_set().is_empty());
    file.write_all_at(&[1], 100_000).unwrap();
    let error = open().unwrap_err();
    assert!(error.to_string().contains("root hash does not match"), "{error}");
    std::fs::remove_file(&path).unwrap();
}

/// A seek table without an entry: the header of its frame, and its footer.
const SEEK_TABLE: [u8; 17] =
    [0x5e, 0x2a, 0x4d, 0x18, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0xb1, 0xea, 0x92, 0x8f];

/// A change of the bytes of a file.
#[derive(Clone, Debug)]
enum Change {
    Flip { at: prop::sample::Index, bit: u8 },
    Number { at: prop::sample::Index, value: u64 },
    Cut { at: prop::sample::Index },
    Insert { at: prop::sample::Index, bytes: Vec<u8> },
    Repeat { at: prop::sample::Index, len: usize },
}

impl Change {
    fn apply(&self, file: &mut Vec<u8>) {
        match self {
            Self::Flip { at, bit } => {
                let at = at.index(file.len());
                file[at] ^= 1 << bit;
            }
            Self::Number { at, value } => {
                let at = at.index(file.len());
                let len = 8.min(file.len() - at);
                file[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
            }
            Self::Cut { at } => file.truncate(at.index(file.len())),
            Self::Insert { at, bytes } => {
                let at = at.index(file.len());
                file.splice(at..at, bytes.iter().copied());
            }
            Self::Repeat { at, len } => {
                let at = at.index(file.len());
                let end = file.len().min(at + len);
                let part = file[at..end].to_vec();
                file.extend(part);
            }
        }
        // Each change needs a byte to change.
        if file.is_empty() {
            file.push(0);
        }
    }
}

fn change() -> impl Strategy<Value = Change> {
    let at = any::<prop::sample::Index>;
    let value = prop_oneof![
        Just(0_u64),
        Just(u64::MAX),
        (0_u32..64).prop_map(|shift| 1 << shift),
        any::<u64>(),
        0_u64..10_000,
    ];
    prop_oneof![
        4 => (at(), 0_u8..8).prop_map(|(at, bit)| Change::Flip { at, bit }),
        4 => (at(), value).prop_map(|(at, value)| Change::Number { at, value }),
        1 => at().prop_map(|at| Change::Cut { at }),
        1 => (at(), prop::collection::vec(any::<u8>(), 1..40))
            .prop_map(|(at, bytes)| Change::Insert { at, bytes }),
        1 => (at(), 1_usize..400).prop_map(|(at, len)| Change::Repeat { at, len }),
    ]
}

/// Returns the bytes of three frames, one of them zero, and the images of them by each codec.
fn samples() -> (Vec<u8>, Vec<(Vec<u8>, Root)>) {
    let mut raw: Vec<u8> = (0..2_600_u32).flat_map(|n| (n * n).to_le_bytes()).collect();
    raw[4096..8192].fill(0);
    let path = std::env::temp_dir().join(format!("uzone-snapshot-corpus-{}", std::process::id()));
    let pack = |codec| {
        let packer = Packer::default().codec(codec).level(1).frame(ByteLen::kib(4)).threads(1);
        let packed =
            packer.working_set(vec![2, 0]).pack(&mut &*raw, &path, None, &|_| true).unwrap();
        let file = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        (file, packed.root)
    };
    let mut images = [Codec::None, Codec::Zstd, Codec::Lz4].map(pack).to_vec();
    let packer = Packer::default().codec(Codec::Lz4).frame(ByteLen::kib(4)).order(vec![2, 0]);
    let packed = packer.pack_source(&raw, &path, None, &|_| true).unwrap();
    images.push((std::fs::read(&path).unwrap(), packed.root));
    std::fs::remove_file(&path).unwrap();
    (raw, images)
}

/// Returns the index of an image, without its trailer, and the bytes behind it.
fn index_of(file: &[u8]) -> (&[u8], &[u8]) {
    let start = file.windows(8).rposition(|window| window == b"UZONEIMG").unwrap();
    let end = file.windows(8).rposition(|window| window == b"UZONEEND").unwrap() - 8;
    (&file[start..end], &file[end + 16..])
}

fn open_with(file: &[u8], root: Option<Root>) -> Option<Image> {
    let options = OpenOptions::default().cache(FrameCache::new(0));
    let options = root.into_iter().fold(options, OpenOptions::root);
    Image::from_source(Box::new(file.to_vec()), &options).ok()
}

#[test]
fn a_valid_image_that_is_changed_is_read_as_it_was_or_refused() {
    let _alone = alone();
    let (raw, images) = samples();
    for (file, _) in &images {
        targets::image(file);
    }
    let config =
        ProptestConfig { cases: 3_000, failure_persistence: None, ..ProptestConfig::default() };
    let changed = (0..images.len(), prop::collection::vec(change(), 1..5));
    proptest!(config, |((sample, changes) in changed)| {
        let (file, root) = &images[sample];
        let mut whole = file.clone();
        changes.iter().for_each(|change| change.apply(&mut whole));
        run("image", targets::image, &whole)?;
        let (index, seek_table) = index_of(file);
        let (mut index, mut seek_table) = (index.to_vec(), seek_table.to_vec());
        changes.iter().for_each(|change| change.apply(&mut index));
        run("index", targets::index, &index)?;
        // A forged index whose hashes match never has the required root hash.
        let forged = targets::file_of_index(&index);
        if open_with(&forged, Some(*root)).is_some() {
            let covered = targets::covered_len(index_of(file).0).unwrap();
            prop_assert!(index_of(&forged).0[..covered] == index_of(file).0[..covered]);
        }
        changes.iter().for_each(|change| change.apply(&mut seek_table));
        run("seek_table", targets::seek_table, &seek_table)?;
        // The bytes are right, with the root hash that is known and without.
        for image in [Some(*root), None].into_iter().filter_map(|root| open_with(&whole, root)) {
            for (number, expected) in raw.chunks(4096).enumerate() {
                let mut read = vec![0xaa; expected.len()];
                if image.read_at(number as u64 * 4096, &mut read).is_ok() {
                    prop_assert!(read == expected, "frame {}", number);
                }
            }
        }
    });
}

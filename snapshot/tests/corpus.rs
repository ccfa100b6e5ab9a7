//! The inputs that are kept in `fuzz/corpus`, and valid images that are changed at random, through every
//! parser of an image: no panic, no wrong byte, and no more memory than the length of the file allows.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod targets;

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use peak_alloc::PeakAlloc;
use proptest::prelude::*;
use uzone_pages::ByteLen;
use uzone_snapshot::{Codec, FrameCache, Image, OpenOptions, Packer, Root};

/// Counts what is allocated.
#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// Makes a file, a copy of it, an index of it, and its tables: so many bytes for each byte of the file, and
/// so many for what does not depend on it (a page to read into, the root of a hash tree, names).
const BYTES_PER_BYTE: usize = 8;
const BYTES_IN_ANY_CASE: usize = 96 << 10;

/// The tests of this file share what the allocator counts.
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
    // Once before it is counted: what a thread keeps is made then.
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

/// Returns the index of an image, without its trailer, and what is behind it.
fn index_of(file: &[u8]) -> (&[u8], &[u8]) {
    let start = file.windows(8).rposition(|window| window == b"UZONEIMG").unwrap();
    let end = file.windows(8).rposition(|window| window == b"UZONEEND").unwrap() - 8;
    (&file[start..end], &file[end + 16..])
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
        changes.iter().for_each(|change| change.apply(&mut seek_table));
        run("seek_table", targets::seek_table, &seek_table)?;
        // With the root hash that is known, what is read is right.
        let options = OpenOptions::default().root(*root).cache(FrameCache::new(0));
        if let Ok(image) = Image::from_source(Box::new(whole), &options) {
            for (number, expected) in raw.chunks(4096).enumerate() {
                let mut read = vec![0xaa; expected.len()];
                if image.read_at(number as u64 * 4096, &mut read).is_ok() {
                    prop_assert!(read == expected, "frame {}", number);
                }
            }
        }
    });
}

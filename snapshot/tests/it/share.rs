//! Images with one cache decode a stored frame once, whichever of them is read.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{Directory, all};
use uzone_pages::ByteLen;
use uzone_snapshot::{FileSource, FrameCache, Image, OpenOptions, Packer, Source};

const FRAME: u64 = 64 << 10;

/// A file that counts how often it is read. A stored frame is read each time it is decoded.
struct Counting {
    file: FileSource,
    reads: Arc<AtomicU64>,
}

impl Counting {
    fn open(path: &Path, reads: &Arc<AtomicU64>) -> Box<dyn Source> {
        Box::new(Self { file: FileSource::open(path).unwrap(), reads: reads.clone() })
    }
}

impl Source for Counting {
    fn name(&self) -> String {
        self.file.name()
    }

    fn byte_len(&self) -> u64 {
        self.file.byte_len()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.file.read_at(offset, out)
    }

    fn neighbour(&self, name: &str) -> io::Result<Box<dyn Source>> {
        let path = PathBuf::from(self.name());
        Ok(Self::open(&path.parent().unwrap().join(name), &self.reads))
    }
}

fn memory(frames: u64) -> Vec<u8> {
    (0..frames * FRAME).map(|at| (at / 4096 * 31 + at % 251) as u8 | 1).collect()
}

/// Packs an image and opens it to be counted, with `cache`.
fn packed(
    path: &Path,
    bytes: &[u8],
    frame: u64,
    parent: Option<&Image>,
    cache: &Arc<FrameCache>,
    reads: &Arc<AtomicU64>,
) -> Image {
    let packer = Packer::default().frame(ByteLen::new(frame));
    packer.pack(&mut &*bytes, path, parent, &|_| true).unwrap();
    let options = OpenOptions::default().cache(cache.clone());
    Image::from_source(Counting::open(path, reads), &options).unwrap()
}

#[test]
fn an_image_that_is_opened_twice_decodes_each_frame_once() {
    let directory = Directory::new("twice");
    let (bytes, cache, reads) = (memory(8), FrameCache::new(1 << 30), Arc::default());
    let path = directory.file("image");
    let first = packed(&path, &bytes, FRAME, None, &cache, &reads);
    let options = OpenOptions::default().cache(cache.clone());
    let second = Image::from_source(Counting::open(&path, &reads), &options).unwrap();
    let opened = reads.load(Ordering::Relaxed);
    assert!(all(&first) == bytes);
    assert_eq!(reads.load(Ordering::Relaxed) - opened, 8);
    assert!(all(&second) == bytes);
    assert_eq!(reads.load(Ordering::Relaxed) - opened, 8);
    // With a cache of its own it decodes them again.
    let alone = Image::from_source(Counting::open(&path, &reads), &OpenOptions::default()).unwrap();
    let opened = reads.load(Ordering::Relaxed);
    assert!(all(&alone) == bytes);
    assert_eq!(reads.load(Ordering::Relaxed) - opened, 8);
}

#[test]
fn children_share_the_frames_of_their_parent_whatever_their_own_sizes_are() {
    let directory = Directory::new("children");
    let (bytes, cache, reads) = (memory(16), FrameCache::new(1 << 30), Arc::default());
    for (name, frame, child_frame) in [
        ("alike", FRAME, FRAME),
        ("smaller", 4 * FRAME, FRAME / 16),
        ("larger", FRAME / 16, 4 * FRAME),
    ] {
        let file = |end: &str| directory.file(&format!("{name}-{end}"));
        let parent = packed(&file("parent"), &bytes, frame, None, &cache, &reads);
        let mut one = bytes.clone();
        one[0] ^= 2;
        let mut two = bytes.clone();
        two[1] ^= 2;
        let one = (packed(&file("one"), &one, child_frame, Some(&parent), &cache, &reads), one);
        let two = (packed(&file("two"), &two, child_frame, Some(&parent), &cache, &reads), two);
        assert_eq!(one.0.frame_counts().stored, 1);
        // Packing read whole frames of the parent past the cache, and others through it.
        assert!(all(&parent) == bytes);
        let before = reads.load(Ordering::Relaxed);
        assert!(all(&one.0) == one.1, "{name}");
        assert!(all(&two.0) == two.1, "{name}");
        assert!(all(&parent) == bytes);
        assert_eq!(reads.load(Ordering::Relaxed) - before, 2, "{name}");
    }
}

#[test]
fn a_child_of_small_frames_is_unpacked_with_one_decoding_of_each_large_one() {
    let directory = Directory::new("unpack");
    let (bytes, cache, reads) = (memory(16), FrameCache::new(1 << 30), Arc::default());
    let file = |name: &str| directory.file(name);
    let parent = packed(&file("parent"), &bytes, 4 * FRAME, None, &cache, &reads);
    let mut changed = bytes.clone();
    changed[0] ^= 2;
    drop(packed(&file("child"), &changed, FRAME / 16, Some(&parent), &cache, &reads));
    // Nothing is decoded yet.
    let options = OpenOptions::default();
    let child = Image::from_source(Counting::open(&file("child"), &reads), &options).unwrap();
    let before = reads.load(Ordering::Relaxed);
    child.unpack(&file("raw"), 2, &|_| true).unwrap();
    assert_eq!(reads.load(Ordering::Relaxed) - before, 1 + 4);
    assert!(std::fs::read(file("raw")).unwrap() == changed);
}

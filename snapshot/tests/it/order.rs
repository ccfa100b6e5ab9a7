//! Images whose pages are packed in another order, and images that are packed anew: every byte is where it
//! was, however it is read.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use uzone_fault::Backing;
use uzone_pages::ByteLen;
use uzone_snapshot::{
    Codec, FrameCache, Image, ImageRegion, OpenOptions, Packer, SnapshotBacking, SnapshotError,
    Source,
};

use crate::common::{Directory, all, map, memory};

/// Packs in an order, and opens the image.
fn pack(packer: &Packer, bytes: &[u8]) -> Image {
    let (directory, source) = (Directory::new("order"), bytes.to_vec());
    let path = directory.file("image");
    let packed = packer.pack_source(&source, &path, None, &|_| true).unwrap();
    let options = OpenOptions::default().root(packed.root).cache(FrameCache::new(1 << 20));
    Image::open(&path, &options).unwrap()
}

/// Packs in an order, and opens the image by a source that notes which of its bytes are read.
fn pack_counted(packer: &Packer, bytes: &Vec<u8>) -> (Image, Arc<Mutex<HashSet<u64>>>) {
    let (directory, reads) = (Directory::new("order"), Arc::<Mutex<HashSet<u64>>>::default());
    let path = directory.file("image");
    packer.pack_source(bytes, &path, None, &|_| true).unwrap();
    let source = Counted { file: std::fs::read(&path).unwrap(), reads: reads.clone() };
    let image = Image::from_source(Box::new(source), &OpenOptions::default()).unwrap();
    reads.lock().unwrap().clear();
    (image, reads)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_image_in_any_order_has_every_byte_where_it_was(
        pages in 0_usize..90,
        rest in prop_oneof![Just(0_usize), 1_usize..4096],
        order in prop::collection::vec(0_u64..100, 0..60),
        codec in prop_oneof![Just(Codec::Zstd), Just(Codec::Lz4), Just(Codec::None)],
        frame_shift in 12_u32..17,
        reads in prop::collection::vec((0_usize..400_000, 0_usize..90_000), 20),
    ) {
        let bytes = memory(pages, rest, 1);
        let packer = Packer::default().codec(codec).level(1).frame(ByteLen::new(1 << frame_shift));
        let packer = packer.threads(2).order(order.clone());
        let image = pack(&packer, &bytes);
        prop_assert_eq!(image.byte_len(), bytes.len() as u64);
        for (start, len) in reads {
            let start = start.min(bytes.len());
            let end = bytes.len().min(start + len);
            let mut out = vec![0xaa; end - start];
            image.read_at(start as u64, &mut out).unwrap();
            prop_assert!(out == bytes[start..end], "{start}..{end}");
        }
        image.verify(2, true, &|_| ()).unwrap();
        let zero = bytes.chunks(4096).filter(|page| page.iter().all(|byte| *byte == 0)).count();
        prop_assert_eq!(image.zero_pages(), zero as u64);
        let parts = image.page_counts(7);
        prop_assert_eq!(parts.iter().map(|part| part.zero).sum::<u64>(), zero as u64);
        let directory = Directory::new("order");
        image.unpack(&directory.file("raw"), 2, &|_| true).unwrap();
        prop_assert!(std::fs::read(directory.file("raw")).unwrap() == bytes);
    }
}

/// A source that counts which bytes are read.
struct Counted {
    file: Vec<u8>,
    reads: Arc<Mutex<HashSet<u64>>>,
}

impl Source for Counted {
    fn name(&self) -> String {
        "a source that counts".to_owned()
    }

    fn byte_len(&self) -> u64 {
        self.file.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.reads.lock().unwrap().insert(offset);
        self.file.read_at(offset, out)
    }
}

#[test]
fn the_pages_of_the_order_are_in_the_first_frames() {
    let (bytes, order) = (memory(800, 0, 1), (0..32).map(|n| n * 21 + 1).collect::<Vec<u64>>());
    // 32 pages are 2 frames of 64 KiB, and would have been in 32.
    for (packer, frames) in [(Packer::default().order(order.clone()), 2), (Packer::default(), 32)] {
        let (image, reads) = pack_counted(&packer, &bytes);
        let mut page = [0; 4096];
        for number in &order {
            image.read_at(number * 4096, &mut page).unwrap();
            let start = usize::try_from(number * 4096).unwrap();
            assert!(page == bytes[start..start + 4096]);
        }
        assert_eq!(reads.lock().unwrap().len(), frames);
    }
}

#[test]
fn an_image_in_an_order_is_mapped_lazily() {
    let bytes = memory(300, 77, 1);
    let order: Vec<u64> = (0..100).map(|n| (n * 37) % 300).collect();
    let image = Arc::new(pack(&Packer::default().order(order), &bytes));
    let Some(mapping) = map("lazily mapped images in an order", image, 301) else { return };
    for step in [1_usize, 7] {
        for number in (0..301).map(|page| page * step % 301) {
            let mut read = [0xaa; 4096];
            mapping.read_at(number as u64 * 4096, &mut read).unwrap();
            let expected = &bytes[number * 4096..bytes.len().min((number + 1) * 4096)];
            assert!(read[..expected.len()] == *expected, "page {number}");
        }
    }
}

/// A page whose neighbours are packed elsewhere comes with those of its own frame.
#[test]
fn a_touch_reads_no_frame_but_that_of_its_page() {
    let bytes = memory(1024, 0, 1);
    let order: Vec<u64> = (0..64).map(|n| n * 16).collect();
    let (image, reads) = pack_counted(&Packer::default().order(order), &bytes);
    let image = Arc::new(image);
    let backing = SnapshotBacking::new(image.clone());
    let page = |number: u64| number * 4096;
    // Sixteen of the list are a frame, and the others follow in theirs.
    let places = [16, 1, 17].map(|number| backing.stored_at(page(number)));
    assert_eq!(places, [page(1), page(64), page(64 + 15)]);
    let Some(mapping) = map("lazily mapped images in an order", image, 1024) else { return };
    let touch = |number: u64| {
        let mut read = [0xaa; 4096];
        mapping.read_at(page(number), &mut read).unwrap();
        let start = usize::try_from(page(number)).unwrap();
        assert!(read[..] == bytes[start..start + 4096], "page {number}");
    };
    // Pages of the list, and others, that are far from each other; pages of zeroes take no read.
    for (touched, number) in [34, 160, 700, 1009].into_iter().enumerate() {
        touch(number);
        assert_eq!(reads.lock().unwrap().len(), touched + 1, "page {number}");
    }
    (0..1024).rev().for_each(touch);
}

#[test]
fn an_image_is_packed_anew_without_the_images_below_it() {
    let (mut bytes, packer) = (memory(200, 9, 1), Packer::default().frame(ByteLen::kib(16)));
    let directory = Directory::new("order");
    let file = |name| directory.file(name);
    let [base, child, other, alone] = ["base", "child", "other", "alone"].map(file);
    packer.pack(&mut &*bytes, &base, None, &|_| true).unwrap();
    let below = Image::open(&base, &OpenOptions::default()).unwrap();
    bytes[50_000] ^= 1;
    packer.pack(&mut &*bytes, &child, Some(&below), &|_| true).unwrap();
    let image = Image::open(&child, &OpenOptions::default()).unwrap();
    // Against another parent, which has another frame changed.
    let mut changed = bytes.clone();
    changed[300_000] ^= 1;
    packer.pack(&mut &*changed, &other, None, &|_| true).unwrap();
    let beside = Image::open(&other, &OpenOptions::default()).unwrap();
    for (parent, stored) in [(None, None), (Some(&beside), Some(1))] {
        let packed = packer.pack_source(&image, &alone, parent, &|_| true).unwrap();
        if let Some(stored) = stored {
            assert_eq!(packed.stored_frames, stored);
        }
        let again = Image::open(&alone, &OpenOptions::default().root(packed.root)).unwrap();
        assert_eq!(again.parent().is_some(), parent.is_some());
        assert!(all(&again) == bytes);
    }
}

#[test]
fn a_source_that_fails_leaves_no_image_and_an_order_goes_with_no_parent() {
    let (bytes, directory) = (memory(20, 0, 1), Directory::new("order"));
    let path = directory.file("image");
    let packer = Packer::default().frame(ByteLen::kib(4)).order(vec![3]);
    let packed = Packer::default().frame(ByteLen::kib(4));
    packed.pack(&mut &*bytes, &path, None, &|_| true).unwrap();
    let mut file = std::fs::read(&path).unwrap();
    let parent = Image::open(&path, &OpenOptions::default()).unwrap();
    let error = packer.pack_source(&bytes, &path, Some(&parent), &|_| true).unwrap_err();
    assert!(error.to_string().contains("has no parent"), "{error}");
    std::fs::remove_file(&path).unwrap();
    // Its second frame is damaged: reading it anew is an error that names the frame.
    file[30] ^= 1;
    let damaged = Image::from_source(Box::new(file), &OpenOptions::default()).unwrap();
    let region = ImageRegion { guest_addr: 0, offset: 0, len_bytes: 4096, page_bytes: 4096 };
    let packer = packer.regions(vec![region]);
    let error = packer.pack_source(&damaged, &path, None, &|_| true).unwrap_err();
    let SnapshotError::Input { cause, .. } = &error else { panic!("{error}") };
    assert!(cause.to_string().contains("is damaged"), "{cause}");
    assert!(!path.exists());
}

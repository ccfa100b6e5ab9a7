//! A packed image is mapped lazily: every page that is touched has the bytes of the image.

use std::sync::Arc;

use crate::common::{Directory, map, memory};
use uzone_pages::ByteLen;
use uzone_snapshot::{FrameCache, Image, OpenOptions, Packer, Source};

#[test]
fn threads_that_touch_pages_at_random_read_the_bytes_of_the_image() {
    let (bytes, directory) = (memory(700, 600, 1), Directory::new("lazy-random"));
    let path = directory.file("image");
    Packer::default().pack(&mut &*bytes, &path, None, &|_| true).unwrap();
    let image = Arc::new(Image::open(&path, &OpenOptions::default()).unwrap());
    std::fs::remove_file(&path).unwrap();
    let Some(mapping) = map("lazily mapped images", image, 701) else { return };
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (mapping, bytes) = (&mapping, &bytes);
            scope.spawn(move || {
                let mut state = thread * 77 + 1;
                for _ in 0..400 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let page = usize::try_from((state >> 33) % 701).unwrap();
                    let mut read = [0xaa; 4096];
                    mapping.read_at(page as u64 * 4096, &mut read).unwrap();
                    let expected = &bytes[page * 4096..bytes.len().min((page + 1) * 4096)];
                    assert!(read[..expected.len()] == *expected, "page {page}");
                    assert!(read[expected.len()..].iter().all(|byte| *byte == 0), "page {page}");
                }
            });
        }
    });
}

/// Bytes that are never ready without waiting.
struct Slow(Vec<u8>);

impl Source for Slow {
    fn name(&self) -> String {
        "a slow source".to_owned()
    }

    fn byte_len(&self) -> u64 {
        self.0.byte_len()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.0.read_at(offset, out)
    }
}

type MakeSource = fn(Vec<u8>) -> Box<dyn Source>;

#[test]
fn an_image_that_is_read_in_order_has_its_bytes_whether_or_not_its_source_waits() {
    let (bytes, directory) = (memory(2000, 600, 1), Directory::new("lazy-order"));
    let path = directory.file("image");
    Packer::default().pack(&mut &*bytes, &path, None, &|_| true).unwrap();
    let file = std::fs::read(&path).unwrap();
    let sources: [MakeSource; 2] = [|file| Box::new(file), |file| Box::new(Slow(file))];
    for source in sources {
        for cache in [64 << 20, 1 << 20, 0] {
            let options = OpenOptions::default().cache(FrameCache::new(cache));
            let image = Arc::new(Image::from_source(source(file.clone()), &options).unwrap());
            let name = image.name();
            let Some(mapping) = map("lazily mapped images", image, 2001) else { return };
            for (page, expected) in bytes.chunks(4096).enumerate() {
                let mut read = [0xaa; 4096];
                mapping.read_at(page as u64 * 4096, &mut read).unwrap();
                assert!(
                    read[..expected.len()] == *expected,
                    "page {page} of {name}, cache {cache}"
                );
            }
        }
    }
}

#[test]
fn a_frame_that_is_damaged_makes_its_pages_bad_and_no_others() {
    let (bytes, directory) = (memory(64, 600, 1), Directory::new("lazy-bad"));
    let path = directory.file("image");
    Packer::default().pack(&mut &*bytes, &path, None, &|_| true).unwrap();
    let mut file = std::fs::read(&path).unwrap();
    file[100] ^= 1;
    let image = Arc::new(Image::from_source(Box::new(file), &OpenOptions::default()).unwrap());
    let Some(mapping) = map("lazily mapped images", image, 64) else { return };
    let mut read = [0xaa; 4096];
    assert!(mapping.read_at(4096, &mut read).is_err());
    let failure = mapping.last_failure().unwrap();
    assert!(failure.reason.contains("do not match their hash"), "{}", failure.reason);
    mapping.read_at(20 * 4096, &mut read).unwrap();
    assert!(read == bytes[20 * 4096..21 * 4096]);
}

#[test]
fn a_child_is_mapped_with_the_frames_of_a_parent_that_has_others() {
    for (frame, child_frame) in
        [(ByteLen::kib(4), ByteLen::kib(64)), (ByteLen::mib(2), ByteLen::kib(4))]
    {
        let (mut bytes, directory) = (memory(300, 600, 1), Directory::new("lazy-child"));
        let (parent, child) = (directory.file("parent"), directory.file("child"));
        Packer::default().frame(frame).pack(&mut &*bytes, &parent, None, &|_| true).unwrap();
        let below = Image::open(&parent, &OpenOptions::default()).unwrap();
        bytes[100 * 4096 + 9] ^= 1;
        let packer = Packer::default().frame(child_frame);
        packer.pack(&mut &*bytes, &child, Some(&below), &|_| true).unwrap();
        let image = Arc::new(Image::open(&child, &OpenOptions::default()).unwrap());
        std::fs::remove_file(&parent).unwrap();
        std::fs::remove_file(&child).unwrap();
        let Some(mapping) = map("lazily mapped images", image, 301) else { return };
        let mut read = vec![0xaa; 301 * 4096];
        mapping.read_at(0, &mut read).unwrap();
        assert!(read[..bytes.len()] == bytes[..], "{frame}");
        assert!(read[bytes.len()..].iter().all(|byte| *byte == 0), "{frame}");
    }
}

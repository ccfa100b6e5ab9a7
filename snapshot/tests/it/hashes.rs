//! Raw memory with hashes beside it: verified as a packed image is, with the root hash of that.

use std::fs;
use std::path::Path;

use crate::common::{Directory, all};
use uzone_pages::{ByteLen, ErrorKind};
use uzone_snapshot::{Codec, HASHES, Image, OpenOptions, Packed, Packer};

const PAGES: usize = 500;

/// Returns bytes with zeroes in long runs, of which some are whole frames.
fn memory() -> Vec<u8> {
    let byte = |at: usize| u8::try_from(at * 7 % 251 + 1).unwrap();
    let mut bytes: Vec<u8> = (0..PAGES * 4096).map(byte).collect();
    bytes[50 * 4096..200 * 4096].fill(0);
    bytes[300 * 4096..301 * 4096].fill(0);
    bytes
}

fn pack(raw: &[u8], path: &Path, hashes_only: bool) -> Packed {
    let packer = Packer::default().codec(Codec::None).frame(ByteLen::kib(16));
    packer.hashes_only(hashes_only).pack(&mut &*raw, path, None, &|_| true).unwrap()
}

fn open(path: &Path) -> Result<Image, uzone_snapshot::SnapshotError> {
    Image::open(path, &OpenOptions::default())
}

#[test]
fn raw_memory_with_hashes_is_an_image_with_the_root_hash_of_the_packed_one() {
    let dir = Directory::new("root");
    let (raw, bytes) = (dir.file("raw"), memory());
    fs::write(&raw, &bytes).unwrap();
    assert_eq!(open(&raw).unwrap_err().kind(), ErrorKind::InvalidData);
    let plain = Image::open_or_raw(&raw, &OpenOptions::default()).unwrap();
    assert!(plain.is_raw() && plain.raw_file().is_some() && all(&plain) == bytes);
    assert!(plain.verify(1, false, &|_| ()).is_err(), "there is nothing to compare it with");

    let packed = pack(&bytes, &dir.file("packed"), false);
    let hashes = pack(&bytes, &dir.file(&format!("raw{HASHES}")), true);
    assert_eq!((hashes.root, hashes.zero_pages), (packed.root, packed.zero_pages));
    assert!(hashes.file_bytes < 16 << 10, "{hashes:?}");
    let image = Image::open_or_raw(&raw, &OpenOptions::default().root(packed.root)).unwrap();
    assert!(!image.is_raw() && image.raw_file().is_none() && image.root_was_required());
    assert_eq!((image.identity(), image.sources().len()), (packed.root.to_string(), 2));
    assert!(all(&image) == bytes);
    for decode in [false, true] {
        assert_eq!(image.verify(2, decode, &|_| ()).unwrap(), packed.stored_frames);
    }
}

#[test]
fn memory_that_does_not_match_its_hashes_is_an_error() {
    let dir = Directory::new("damage");
    let (raw, mut bytes) = (dir.file("raw"), memory());
    let hashes = dir.file(&format!("raw{HASHES}"));
    pack(&bytes, &hashes, true);
    bytes[250 * 4096 + 77] ^= 1;
    fs::write(&raw, &bytes).unwrap();
    let image = open(&raw).unwrap();
    let mut page = [0; 4096];
    let error = image.read_at(250 * 4096, &mut page).unwrap_err();
    assert!(error.to_string().contains("do not match their hash"), "{error}");
    image.read_at(256 * 4096, &mut page).unwrap();
    assert!(page == bytes[256 * 4096..257 * 4096]);
    assert!(image.verify(2, false, &|_| ()).is_err());
    // Zeroes are known from the hashes, and not read.
    bytes[250 * 4096 + 77] ^= 1;
    bytes[60 * 4096] = 1;
    fs::write(&raw, &bytes).unwrap();
    open(&raw).unwrap().read_at(60 * 4096, &mut page).unwrap();
    assert_eq!(page, [0; 4096]);

    fs::write(&raw, &bytes[..400 * 4096]).unwrap();
    let error = open(&raw).unwrap_err();
    assert!(error.to_string().contains("raw memory as long as this"), "{error}");
    let error = Image::open_or_raw(&raw, &OpenOptions::default()).unwrap_err();
    assert!(error.to_string().contains(HASHES), "never taken for raw: {error}");
    let whole = fs::read(&hashes).unwrap();
    fs::write(&raw, memory()).unwrap();
    for damaged in [&whole[..0], &whole[..whole.len() - 1], &whole[1..], &[7; 5000]] {
        fs::write(&hashes, damaged).unwrap();
        let error = Image::open_or_raw(&raw, &OpenOptions::default()).unwrap_err();
        assert!(error.to_string().contains(HASHES), "never taken for raw: {error}");
    }
    fs::write(&hashes, whole).unwrap();
    // An image with frames has no hashes of raw memory, and hashes alone are no image.
    fs::write(&raw, &bytes).unwrap();
    fs::copy(&hashes, dir.file("hashes")).unwrap();
    assert!(open(&dir.file("hashes")).unwrap_err().to_string().contains("where the frames end"));
    pack(&memory(), &hashes, false);
    assert!(open(&raw).unwrap_err().to_string().contains("where the frames end"));
}

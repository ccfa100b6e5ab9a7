//! The test vectors of `docs/FORMAT.md` are images, and the packer writes the bytes that stand there.

use uzone_pages::{ByteLen, ErrorKind};
use uzone_snapshot::{Codec, Image, ImageRegion, OpenOptions, Packer, SnapshotError};

const DOCUMENT: &str = include_str!("../../../docs/FORMAT.md");
/// Where the root hash starts in the header of an index.
const ROOT_AT: usize = 96;
const MAGIC: &[u8] = b"UZONEIMG";

/// Returns the bytes of the vector under `heading`: each line has an offset, the bytes, and a comment.
fn vector(heading: &str) -> Vec<u8> {
    let (_, section) = DOCUMENT.split_once(&format!("### {heading}\n")).unwrap();
    let (_, block) = section.split_once("```text\n").unwrap();
    let (block, _) = block.split_once("```").unwrap();
    let mut bytes = Vec::new();
    for line in block.lines() {
        let line = line.split('#').next().unwrap();
        let (offset, digits) = line.split_once("  ").unwrap();
        assert_eq!(usize::from_str_radix(offset, 16), Ok(bytes.len()), "{line}");
        bytes.extend(digits.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()));
    }
    bytes
}

/// Returns the raw bytes that both vectors hold.
fn raw() -> Vec<u8> {
    [&[0; 4096][..], b"uzone\n"].concat()
}

fn packer(codec: Codec) -> Packer {
    Packer::default().codec(codec).frame(ByteLen::kib(4)).working_set(vec![1])
}

fn open(file: Vec<u8>) -> Result<Image, SnapshotError> {
    Image::from_source(Box::new(file), &OpenOptions::default())
}

/// Returns where the index starts in a file.
fn index_at(file: &[u8]) -> usize {
    file.windows(MAGIC.len()).position(|window| window == MAGIC).unwrap()
}

#[test]
fn the_images_of_the_document_have_the_bytes_and_the_root_that_it_names() {
    for (heading, codec, stored) in [("Codec none", Codec::None, 1), ("Codec zstd", Codec::Zstd, 2)]
    {
        let file = vector(heading);
        let root = index_at(&file) + ROOT_AT;
        let root: String = file[root..root + 32].iter().map(|byte| format!("{byte:02x}")).collect();
        let options = OpenOptions::default().root(root.parse().unwrap());
        let image = Image::from_source(Box::new(file.clone()), &options).unwrap();
        assert_eq!(image.root().to_string(), root);
        assert_eq!(image.codec(), codec);
        assert_eq!((image.page_bytes(), image.frame_bytes()), (4096, 4096));
        let whole = ImageRegion { guest_addr: 0, offset: 0, len_bytes: 4102, page_bytes: 4096 };
        assert_eq!(image.regions(), [whole]);
        assert_eq!(image.working_set(), [1]);
        assert_eq!(image.zero_pages(), 1);
        let mut bytes = vec![0xaa; usize::try_from(image.byte_len()).unwrap()];
        image.read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, raw(), "{heading}");
        assert_eq!(image.verify(1, true, &|_| ()).unwrap(), stored);
    }
}

#[test]
fn the_packer_writes_the_image_of_the_document_byte_for_byte() {
    let path = std::env::temp_dir().join(format!("uzone-format-{}", std::process::id()));
    let packed = packer(Codec::None).pack(&mut &*raw(), &path, None, &|_| true);
    let file = std::fs::read(&path);
    let _ = std::fs::remove_file(&path);
    packed.unwrap();
    assert_eq!(file.unwrap(), vector("Codec none"));
}

#[test]
fn a_decoder_of_zstd_reads_the_image_of_the_document() {
    assert_eq!(zstd::stream::decode_all(&*vector("Codec zstd")).unwrap(), raw());
}

/// Returns the stored and the raw length of each frame of a file of zstd, but for the seek table, as a decoder finds
/// them, and those in its seek table.
fn frames_and_entries(file: &[u8]) -> [Vec<(usize, usize)>; 2] {
    let number = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap()) as usize;
    let count = number(file.len() - 9);
    let table = file.len() - 9 - count * 8;
    let entries = (0..count).map(|entry| table + entry * 8).map(|at| (number(at), number(at + 4)));
    let (mut at, mut frames) = (0, Vec::new());
    while at < table - 8 {
        let len = zstd::zstd_safe::find_frame_compressed_size(&file[at..]).unwrap();
        let raw = zstd::stream::decode_all(&file[at..at + len]).unwrap();
        frames.push((len, raw.len()));
        at += len;
    }
    assert_eq!(at, table - 8, "the frame of the seek table follows");
    [frames, entries.collect()]
}

#[test]
fn the_seek_table_has_an_entry_for_each_frame_before_it() {
    let path = std::env::temp_dir().join(format!("uzone-entries-{}", std::process::id()));
    for len in [0, 5, 4096, 700_000] {
        let packed = Packer::default().pack(&mut &vec![7; len][..], &path, None, &|_| true);
        let file = std::fs::read(&path);
        let _ = std::fs::remove_file(&path);
        packed.unwrap();
        let [frames, entries] = frames_and_entries(&file.unwrap());
        assert_eq!(frames, entries, "of {len} bytes");
        assert_eq!(frames.len(), len.div_ceil(64 << 10) + 1);
        assert_eq!(frames.last().map(|(_, raw)| *raw), Some(0), "the index");
    }
}

#[test]
fn an_image_whose_seek_table_has_no_entry_for_its_index_is_read_and_verified() {
    let new = vector("Codec zstd");
    // The last entry is before the footer; the length of the table and the count are less then.
    let mut old = [&new[..new.len() - 17], &new[new.len() - 9..]].concat();
    let table = new.len() - 9 - 3 * 8 - 4;
    old[table] -= 8;
    let count = old.len() - 9;
    old[count] -= 1;
    let image = open(old.clone()).unwrap();
    let mut bytes = vec![0xaa; raw().len()];
    image.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, raw());
    assert_eq!(image.verify(1, true, &|_| ()).unwrap(), 2);
    old[table + 4] ^= 1;
    assert!(open(old).unwrap().verify(1, false, &|_| ()).is_err());
}

#[test]
fn another_major_version_is_refused_by_its_number() {
    let mut file = vector("Codec none");
    let major = index_at(&file) + 8;
    file[major] = 2;
    let error = open(file).unwrap_err();
    assert!(matches!(error, SnapshotError::Version { major: 2, .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::NotSupported);
}

/// Returns an image of the document whose index `change` has changed, with a root hash and lengths that fit
/// it, as a forger or another writer does.
fn rewritten(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let file = vector("Codec none");
    let (start, end) = (index_at(&file), file.len() - 33);
    // The working set of one page is 32 bytes.
    let covered = end - start - 32;
    let mut index = file[start..end].to_vec();
    change(&mut index);
    index[ROOT_AT..ROOT_AT + 32].fill(0);
    let root = *blake3::hash(&index[..covered]).as_bytes();
    index[ROOT_AT..ROOT_AT + 32].copy_from_slice(&root);
    let len = u32::try_from(index.len()).unwrap();
    let mut out = file[..start - 4].to_vec();
    out.extend((len + 16).to_le_bytes());
    out.extend(index);
    out.extend(u64::from(len).to_le_bytes());
    out.extend(&file[end + 8..]);
    out
}

#[test]
fn an_image_of_a_newer_minor_version_is_read_and_verified() {
    assert_eq!(rewritten(|_| ()), vector("Codec none"), "nothing was changed");
    let newer = rewritten(|index| {
        index[10] = 7;
        index[56..64].fill(3);
        index.extend(b"what a later version adds");
    });
    let image = open(newer.clone()).unwrap();
    let mut bytes = vec![0xaa; raw().len()];
    image.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, raw());
    assert_eq!(image.working_set(), [1]);
    assert_eq!(image.verify(1, true, &|_| ()).unwrap(), 1);
    // Its seek table is verified as that of any other.
    let mut damaged = newer;
    let descriptor = damaged.len() - 5;
    damaged[descriptor] ^= 1;
    assert!(open(damaged).unwrap().verify(1, false, &|_| ()).is_err());
}

#[test]
fn a_working_set_with_any_count_is_left_out_unless_its_hash_matches() {
    for count in [0, 2, 1 << 61, (1 << 61) - 1, u64::MAX / 8, u64::MAX] {
        let image = open(rewritten(|index| {
            let at = index.len() - 32;
            index[at..at + 8].copy_from_slice(&count.to_le_bytes());
        }));
        let image = image.unwrap();
        assert!(image.working_set().is_empty(), "{count:#x}");
        assert!(image.verify(1, false, &|_| ()).is_err(), "{count:#x}: the damage shows");
    }
    let image = open(rewritten(|index| index.truncate(index.len() - 32))).unwrap();
    assert!(image.working_set().is_empty());
}

#[test]
fn a_page_that_is_zero_in_the_index_and_not_in_its_frame_is_found_by_verifying() {
    let image = open(rewritten(|index| index[161] |= 2)).unwrap();
    assert_eq!(image.zero_pages(), 2);
    assert_eq!(image.verify(1, false, &|_| ()).unwrap(), 1, "its hashes match");
    let error = image.verify(1, true, &|_| ()).unwrap_err();
    assert!(matches!(error, SnapshotError::BadFrame { frame: 1, .. }), "{error}");
    assert!(error.to_string().contains("has as zero"), "{error}");
}

//! The targets of the fuzzer: each parser of an image with bytes that may be anything. `fuzz/` calls these functions
//! without an end, and `tests/corpus.rs` with the bytes that are kept in `fuzz/corpus`.
//!
//! A target panics if an image contradicts itself.
#![allow(dead_code, reason = "each test program uses its part")]

use uzone_snapshot::{FrameCache, Image, OpenOptions};

/// A parser that is fuzzed: it takes bytes, and returns how long the file was that it made of them.
pub(crate) type Target = fn(&[u8]) -> usize;

/// The targets, by the name of their directory in `fuzz/corpus`.
pub(crate) const TARGETS: [(&str, Target); 4] =
    [("image", image), ("index", index), ("seek_table", seek_table), ("working_set", working_set)];

const HEADER: usize = 128;
const ROOT: usize = 96;
const END_MAGIC: &[u8] = b"UZONEEND";
/// The longest prefix of data that is made for an index which asks for some.
const MOST_DATA: u64 = 64 << 10;
/// The header of an index of two pages of zeroes in one frame, without its root: version 1.0, codec none.
const ZEROES: [u64; 8] = [0x474d_4945_4e4f_5a55, 0x100c_0000_0000_0001, 8192, 0, 0, 0, 0, 0];

/// Takes the bytes for a file.
pub(crate) fn image(bytes: &[u8]) -> usize {
    open(bytes.to_vec());
    bytes.len()
}

/// Takes the bytes for an index, and makes its root hash right.
pub(crate) fn index(bytes: &[u8]) -> usize {
    let file = file_of_index(bytes);
    let len = file.len();
    open(file);
    len
}

/// Returns a file with an index, whose root hash is made right.
pub(crate) fn file_of_index(bytes: &[u8]) -> Vec<u8> {
    let mut payload = bytes.to_vec();
    fix_root(&mut payload);
    let data_len = number(&payload, 24).filter(|len| *len <= MOST_DATA).unwrap_or(0);
    let mut file: Vec<u8> = (0..data_len).map(|at| at.to_le_bytes()[0]).collect();
    finish(&mut file, &payload, &[]);
    file
}

/// Takes the bytes for those behind the index.
pub(crate) fn seek_table(bytes: &[u8]) -> usize {
    let mut file = Vec::new();
    finish(&mut file, &zeroes(), bytes);
    let len = file.len();
    open(file);
    len
}

/// Takes the bytes for the working set of a sound index: the image can be opened, whatever they are.
pub(crate) fn working_set(bytes: &[u8]) -> usize {
    let (mut file, mut payload) = (Vec::new(), zeroes());
    payload.extend(bytes);
    finish(&mut file, &payload, &[]);
    let len = file.len();
    let image = open(file).expect("a damaged working set costs time alone");
    assert!(image.working_set().iter().all(|page| *page < 2), "a page that there is not");
    len
}

/// Opens a file, and asks for everything that an image can be asked for, up to so many bytes.
fn open(file: Vec<u8>) -> Option<Image> {
    let options = OpenOptions::default().cache(FrameCache::new(0));
    let image = Image::from_source(Box::new(file), &options).ok()?;
    let counts = image.frame_counts();
    assert_eq!(counts.frames, counts.zero + counts.stored + counts.parent);
    assert_eq!(counts.frames, image.byte_len().div_ceil(image.frame_bytes()));
    assert!(
        image.regions().iter().all(|region| region.offset + region.len_bytes <= image.byte_len())
    );
    let pages = image.byte_len().div_ceil(image.page_bytes());
    assert!(image.zero_pages() <= pages);
    // Its answer depends on hashes that the fuzzer does not make; it has to answer.
    let _ = image.verify(1, false, &|_| ());
    let mut out = vec![0xaa; 4096];
    let len = usize::try_from(image.byte_len()).map_or(4096, |len| len.min(4096));
    let _ = image.read_at(0, &mut out[..len]);
    let end = image.byte_len().saturating_sub(4096);
    if end > 0 {
        let _ = image.read_at(end, &mut out);
    }
    image.read_at(image.byte_len(), &mut out[..1]).expect_err("there is no byte behind the end");
    Some(image)
}

/// Returns the index of two pages of zeroes, without a working set.
fn zeroes() -> Vec<u8> {
    let mut payload: Vec<u8> = ZEROES.iter().flat_map(|word| word.to_le_bytes()).collect();
    payload.resize(HEADER, 0);
    payload.extend([0, 0b11]);
    fix_root(&mut payload);
    payload
}

/// Puts the right root hash into an index, as far as the header states how long it is.
pub(crate) fn fix_root(payload: &mut [u8]) {
    let Some(covered) = covered_len(payload) else { return };
    payload[ROOT..HEADER].fill(0);
    let root = blake3::hash(&payload[..covered]);
    payload[ROOT..HEADER].copy_from_slice(root.as_bytes());
}

/// Returns how many bytes of an index its root hash covers, if they are all there.
pub(crate) fn covered_len(payload: &[u8]) -> Option<usize> {
    let [image, stored, regions, name] = [16, 32, 40, 48].map(|at| number(payload, at));
    let (flags, page, frame) = (payload.get(13)?, payload.get(14)?, payload.get(15)?);
    let ordered = if flags & 2 == 0 { 0 } else { number(payload, 56)? };
    let pages = image?.div_ceil(1_u64.checked_shl(u32::from(*page))?);
    let frames = image?.div_ceil(1_u64.checked_shl(u32::from(*frame))?);
    let parts = [
        regions?.checked_mul(32)?,
        name?,
        frames.div_ceil(8),
        pages.div_ceil(8),
        stored?.checked_mul(20)?,
        ordered.checked_mul(8)?,
    ];
    let len = parts.into_iter().try_fold(HEADER as u64, u64::checked_add)?;
    usize::try_from(len).ok().filter(|len| *len <= payload.len())
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().copied().map(u64::from_le_bytes)
}

/// Puts the frame of an index behind a file, and a seek table: an empty one, or the given bytes.
fn finish(file: &mut Vec<u8>, payload: &[u8], seek_table: &[u8]) {
    file.extend(0x184d_2a5d_u32.to_le_bytes());
    file.extend((u32::try_from(payload.len()).expect("a short index") + 16).to_le_bytes());
    file.extend(payload);
    file.extend((payload.len() as u64).to_le_bytes());
    file.extend(END_MAGIC);
    if seek_table.is_empty() {
        file.extend(0x184d_2a5e_u32.to_le_bytes());
        file.extend(9_u32.to_le_bytes());
        file.extend([0; 5]);
        file.extend(0x8f92_eab1_u32.to_le_bytes());
    } else {
        file.extend(seek_table);
    }
}

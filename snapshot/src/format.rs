//! The index of an image as bytes, and back: [`Index`]. `docs/FORMAT.md` draws it.
//!
//! Everything here is a pure function. [`Index::decode`] takes bytes that may be anything: every length is
//! checked before memory is taken for it, so it allocates no more than a small multiple of the bytes it got.
//!
//! Units: offsets and lengths are bytes; numbers are little-endian.

use std::fmt;
use std::str::FromStr;

use crate::error::SnapshotError;
use crate::order::Order;

/// The version of the format: a reader refuses another major, and reads every minor.
pub(crate) const MAJOR: u16 = 1;
pub(crate) const MINOR: u16 = 0;

const MAGIC: [u8; 8] = *b"UZONEIMG";
const END_MAGIC: [u8; 8] = *b"UZONEEND";
/// Magic numbers of skippable frames: of the index, and of one stored frame of another codec than zstd.
const INDEX_FRAME: u32 = 0x184D_2A5D;
const STORED_FRAME: u32 = 0x184D_2A5C;
/// Those of the published seek table, which is a skippable frame as well.
const SEEK_FRAME: u32 = 0x184D_2A5E;
const SEEK_MAGIC: u32 = 0x8F92_EAB1;

pub(crate) const HEADER_LEN: usize = 128;
const ROOT_AT: usize = 96;
const REGION_LEN: usize = 32;
const RECORD_LEN: usize = 20;
const TRAILER_LEN: usize = 16;
const SEEK_FOOTER_LEN: u64 = 9;
/// The header of a skippable frame.
pub(crate) const SKIPPABLE_LEN: u64 = 8;
const HAS_PARENT: u8 = 1;
const HAS_ORDER: u8 = 2;

/// The smallest and the largest page and frame, as powers of two.
const PAGE_SHIFTS: std::ops::RangeInclusive<u8> = 12..=21;
const FRAME_SHIFTS: std::ops::RangeInclusive<u8> = 12..=24;

/// How the bytes of a frame are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// As they are.
    None,
    /// As a zstd frame with its length and its checksum.
    Zstd,
    /// As an LZ4 block.
    Lz4,
}

impl Codec {
    /// Returns the name that the command takes.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zstd => "zstd",
            Self::Lz4 => "lz4",
        }
    }
}

/// The hash that names an image: it covers the index, and with it the hash of every stored frame and the
/// root of the parent. It does not cover the working set.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Root(pub(crate) [u8; 32]);

impl fmt::Display for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Root({self})")
    }
}

impl FromStr for Root {
    type Err = SnapshotError;

    fn from_str(text: &str) -> Result<Self, SnapshotError> {
        let why = "a root hash has 64 hexadecimal digits";
        let hash = blake3::Hash::from_hex(text).map_err(|_| SnapshotError::Options { why })?;
        Ok(Self(*hash.as_bytes()))
    }
}

/// A part of guest memory, and where the image has its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageRegion {
    /// The address of its first byte in the guest.
    pub guest_addr: u64,
    /// Where its bytes start in the image.
    pub offset: u64,
    /// How long it is.
    pub len_bytes: u64,
    /// The size of its pages.
    pub page_bytes: u64,
}

impl ImageRegion {
    /// Returns whether it can be a part of an image of `image_len` bytes.
    pub(crate) fn is_inside(&self, image_len: u64) -> bool {
        self.offset.checked_add(self.len_bytes).is_some_and(|end| end <= image_len)
            && self.guest_addr.checked_add(self.len_bytes).is_some()
            && self.page_bytes.is_power_of_two()
    }
}

/// A stored frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// The first 16 bytes of the BLAKE3 hash of the stored bytes.
    pub(crate) hash: [u8; 16],
    /// How many bytes are stored.
    pub(crate) len: u32,
}

/// Another image that has the frames which this one does not store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ParentLink {
    pub(crate) root: Root,
    /// Its path, from the directory of this image.
    pub(crate) name: String,
}

/// The index of an image: all of it but the frames.
///
/// # Invariants
/// `stored` has a bit for each frame, and as many of them are set as there are `records`; `zero` has a bit
/// for each page. Without a parent, every page of a frame that is not stored is zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Index {
    /// The minor version; a newer one may have more in its index than is known here.
    pub(crate) minor: u16,
    pub(crate) codec: Codec,
    pub(crate) page_shift: u8,
    pub(crate) frame_shift: u8,
    pub(crate) image_len: u64,
    /// Where the frames end in the file.
    pub(crate) data_len: u64,
    pub(crate) regions: Vec<ImageRegion>,
    pub(crate) parent: Option<ParentLink>,
    pub(crate) stored: Vec<u8>,
    pub(crate) zero: Vec<u8>,
    pub(crate) records: Vec<Record>,
    /// The pages that are packed first. The maps and the records are in the packed order.
    pub(crate) order: Order,
    /// The pages that a run touched, in that order.
    pub(crate) working_set: Vec<u64>,
}

/// Returns whether a bit of a map is set.
pub(crate) fn bit(map: &[u8], at: u64) -> bool {
    usize::try_from(at / 8)
        .ok()
        .and_then(|byte| map.get(byte))
        .is_some_and(|byte| byte >> (at % 8) & 1 == 1)
}

/// Sets a bit of a map, which grows as far as needed.
pub(crate) fn set_bit(map: &mut Vec<u8>, at: u64) {
    let byte = usize::try_from(at / 8).unwrap_or(usize::MAX);
    if map.len() <= byte {
        map.resize(byte + 1, 0);
    }
    map[byte] |= 1 << (at % 8);
}

impl Index {
    /// Returns the index of an empty image.
    pub(crate) fn new(codec: Codec, page_shift: u8, frame_shift: u8) -> Self {
        Self {
            minor: MINOR,
            codec,
            page_shift,
            frame_shift,
            image_len: 0,
            data_len: 0,
            regions: Vec::new(),
            parent: None,
            stored: Vec::new(),
            zero: Vec::new(),
            records: Vec::new(),
            order: Order::default(),
            working_set: Vec::new(),
        }
    }

    /// Returns how many bytes of the file stand before the stored bytes of each frame.
    pub(crate) fn before_frame(&self) -> u64 {
        if self.codec == Codec::Zstd { 0 } else { SKIPPABLE_LEN }
    }

    /// Returns how many frames the image has, stored or not.
    pub(crate) fn frames(&self) -> u64 {
        self.image_len.div_ceil(1 << self.frame_shift)
    }

    /// Returns where each stored frame starts in a packed image.
    pub(crate) fn packed_offsets(&self) -> Vec<u64> {
        let before = self.before_frame();
        let mut end = 0;
        let offsets = self.records.iter().map(|record| {
            let start = end + before;
            end = start + u64::from(record.len);
            start
        });
        offsets.collect()
    }

    /// Returns where each stored frame starts in raw memory.
    pub(crate) fn raw_offsets(&self) -> Vec<u64> {
        let stored = (0..self.frames()).filter(|frame| bit(&self.stored, *frame));
        stored.map(|frame| frame << self.frame_shift).collect()
    }

    /// Returns how many pages the image has.
    pub(crate) fn pages(&self) -> u64 {
        self.image_len.div_ceil(1 << self.page_shift)
    }

    /// Returns how many bytes a frame has: the last may be shorter.
    pub(crate) fn frame_len(&self, frame: u64) -> u64 {
        self.image_len.saturating_sub(frame << self.frame_shift).min(1 << self.frame_shift)
    }

    /// Returns the pages of a frame.
    pub(crate) fn pages_of(&self, frame: u64) -> std::ops::Range<u64> {
        let shift = self.frame_shift - self.page_shift;
        frame << shift..((frame + 1) << shift).min(self.pages())
    }

    /// Returns whether every page of a frame is zero.
    pub(crate) fn is_zero_frame(&self, frame: u64) -> bool {
        self.pages_of(frame).all(|page| bit(&self.zero, page))
    }

    /// Returns whether `zstd -d` makes the raw bytes of this image.
    pub(crate) fn is_plain(&self) -> bool {
        self.codec == Codec::Zstd && self.parent.is_none() && self.order.is_empty()
    }

    /// Returns how many pages of the image are not shorter than a page.
    pub(crate) fn whole_pages(&self) -> u64 {
        self.image_len >> self.page_shift
    }

    /// Returns where the byte at `offset` of the image is packed, and up to where in the image the bytes
    /// behind it follow there, at most up to `end`.
    pub(crate) fn packed_at(&self, offset: u64, end: u64) -> (u64, u64) {
        if self.order.is_empty() {
            return (offset, end);
        }
        let page = offset >> self.page_shift;
        let place = self.order.place_of(page);
        let inside = offset - (page << self.page_shift);
        // Within one frame: a caller takes no more at once.
        let most = 1 << (self.frame_shift - self.page_shift);
        let mut pages = 1;
        while pages < most
            && (page + pages) << self.page_shift < end
            && self.order.place_of(page + pages) == place + pages
        {
            pages += 1;
        }
        ((place << self.page_shift) + inside, end.min((page + pages) << self.page_shift))
    }

    /// Returns where a page is packed.
    pub(crate) fn place_of(&self, page: u64) -> u64 {
        self.order.place_of(page)
    }

    /// Returns the index as the payload of its frame, without the trailer, and the root hash.
    pub(crate) fn encode(&self) -> (Vec<u8>, Root) {
        let mut out =
            Vec::with_capacity(HEADER_LEN + self.records.len() * RECORD_LEN + self.zero.len());
        out.extend(MAGIC);
        out.extend(MAJOR.to_le_bytes());
        out.extend(self.minor.to_le_bytes());
        let codec = match self.codec {
            Codec::None => 0,
            Codec::Zstd => 1,
            Codec::Lz4 => 2,
        };
        let has_parent = if self.parent.is_some() { HAS_PARENT } else { 0 };
        let flags = has_parent | if self.order.is_empty() { 0 } else { HAS_ORDER };
        out.extend([codec, flags, self.page_shift, self.frame_shift]);
        let name = self.parent.as_ref().map_or("", |parent| &parent.name);
        out.extend(self.image_len.to_le_bytes());
        out.extend(self.data_len.to_le_bytes());
        out.extend((self.records.len() as u64).to_le_bytes());
        out.extend((self.regions.len() as u64).to_le_bytes());
        out.extend((name.len() as u64).to_le_bytes());
        out.extend((self.order.listed().len() as u64).to_le_bytes());
        out.extend(self.parent.as_ref().map_or([0; 32], |parent| parent.root.0));
        out.extend([0; 32]);
        debug_assert_eq!(out.len(), HEADER_LEN);
        for region in &self.regions {
            for number in [region.guest_addr, region.offset, region.len_bytes, region.page_bytes] {
                out.extend(number.to_le_bytes());
            }
        }
        out.extend(name.as_bytes());
        out.extend(&self.stored);
        out.extend(&self.zero);
        for record in &self.records {
            out.extend(record.hash);
            out.extend(record.len.to_le_bytes());
        }
        for page in self.order.listed() {
            out.extend(page.to_le_bytes());
        }
        let root = Root(*blake3::hash(&out).as_bytes());
        out[ROOT_AT..HEADER_LEN].copy_from_slice(&root.0);
        let set_at = out.len();
        out.extend((self.working_set.len() as u64).to_le_bytes());
        for page in &self.working_set {
            out.extend(page.to_le_bytes());
        }
        let hash = short_hash(&out[set_at..]);
        out.extend(hash);
        (out, root)
    }

    /// Returns the major version of an index, if it starts as one does.
    pub(crate) fn major(bytes: &[u8]) -> Option<u16> {
        let version = bytes.strip_prefix(&MAGIC)?.first_chunk()?;
        Some(u16::from_le_bytes(*version))
    }

    /// Returns how long the part of an index is that its root hash covers, by its header.
    pub(crate) fn covered_len(header: &[u8]) -> Result<u64, &'static str> {
        let header = header.get(..HEADER_LEN).ok_or(SHORT)?;
        let index = Self::from_header(header)?;
        let [stored, regions, name_len, ordered] = [32, 40, 48, 56].map(|at| number(header, at));
        let ordered = if header[13] & HAS_ORDER == 0 { 0 } else { ordered };
        let maps = [index.frames().div_ceil(8), index.pages().div_ceil(8)];
        let lists = [(regions, REGION_LEN), (stored, RECORD_LEN), (ordered, 8)];
        let lists = lists.map(|(count, each)| count.checked_mul(each as u64));
        let mut parts =
            [HEADER_LEN as u64, name_len].into_iter().chain(maps).map(Some).chain(lists);
        parts.try_fold(0_u64, |sum, part| sum.checked_add(part?)).ok_or(SHORT)
    }

    /// Reads an index of this major version, and checks its root hash.
    pub(crate) fn decode(bytes: &[u8]) -> Result<(Self, Root), &'static str> {
        let mut rest = bytes;
        let header = take(&mut rest, HEADER_LEN as u64)?;
        let mut index = Self::from_header(header)?;
        let [stored, regions, name_len] = [32, 40, 48].map(|at| number(header, at));
        index.regions = read_regions(&mut rest, regions, index.image_len)?;
        let name = take(&mut rest, name_len)?;
        if header[13] & HAS_PARENT != 0 {
            let name =
                std::str::from_utf8(name).map_err(|_| "the name of its parent is not text")?;
            let root = Root(array(header, 64));
            index.parent = Some(ParentLink { root, name: name.to_owned() });
        }
        index.stored = take(&mut rest, index.frames().div_ceil(8))?.to_vec();
        index.zero = take(&mut rest, index.pages().div_ceil(8))?.to_vec();
        let record_bytes = stored.checked_mul(RECORD_LEN as u64).ok_or(SHORT)?;
        let records = take(&mut rest, record_bytes)?;
        index.records = records
            .chunks_exact(RECORD_LEN)
            .map(|record| Record {
                hash: array(record, 0),
                len: u32::from_le_bytes(array(record, 16)),
            })
            .collect();
        if header[13] & HAS_ORDER != 0 {
            index.order = read_order(&mut rest, number(header, 56), index.whole_pages())?;
        }
        let covered = bytes.len() - rest.len();
        let root = Root(array(header, ROOT_AT));
        if root_of(&bytes[..covered]) != root {
            return Err(OTHER_ROOT);
        }
        index.working_set = read_working_set(rest, index.pages());
        index.check()?;
        Ok((index, root))
    }

    /// Returns an index with the fields of the header, and nothing else.
    fn from_header(header: &[u8]) -> Result<Self, &'static str> {
        if header[..8] != MAGIC {
            return Err("it does not start with the magic number");
        }
        let [codec, flags, page_shift, frame_shift] =
            [header[12], header[13], header[14], header[15]];
        let codec = match codec {
            0 => Codec::None,
            1 => Codec::Zstd,
            2 => Codec::Lz4,
            _ => return Err("it names a codec that does not exist"),
        };
        let sizes_are_valid = PAGE_SHIFTS.contains(&page_shift)
            && FRAME_SHIFTS.contains(&frame_shift)
            && page_shift <= frame_shift;
        if !sizes_are_valid || flags & !(HAS_PARENT | HAS_ORDER) != 0 {
            return Err("it has a page size, a frame size or a flag that does not exist");
        }
        Ok(Self {
            minor: u16::from_le_bytes([header[10], header[11]]),
            image_len: number(header, 16),
            data_len: number(header, 24),
            ..Self::new(codec, page_shift, frame_shift)
        })
    }

    /// Checks the invariants, and that the frames fill the data exactly.
    fn check(&self) -> Result<(), &'static str> {
        let set: u64 = self.stored.iter().map(|byte| u64::from(byte.count_ones())).sum();
        if set != self.records.len() as u64
            || (self.frames()..self.stored.len() as u64 * 8).any(|at| bit(&self.stored, at))
        {
            return Err("it does not have a record for each stored frame");
        }
        if (self.pages()..self.zero.len() as u64 * 8).any(|at| bit(&self.zero, at)) {
            return Err("it has a page behind its end");
        }
        let before = self.before_frame();
        let mut lens = self.records.iter().map(|record| u64::from(record.len) + before);
        let sum = lens.try_fold(0_u64, u64::checked_add);
        if sum != Some(self.data_len) {
            return Err("the lengths of its frames are not the length of its data");
        }
        let is_open = |frame| !bit(&self.stored, frame) && !self.is_zero_frame(frame);
        if self.parent.is_some() && !self.order.is_empty() {
            return Err("it has a parent and an order, which no image has");
        }
        if self.parent.is_none() && (0..self.frames()).any(is_open) {
            return Err("a frame is neither stored nor zero, and there is no parent");
        }
        Ok(())
    }

    /// Returns whether a parent of this length has every frame that is neither stored nor zero here.
    pub(crate) fn fits_parent(&self, parent_len: u64) -> bool {
        // Without a longer image the range has no frame that ends behind the parent.
        self.image_len <= parent_len
            || (parent_len >> self.frame_shift..self.frames())
                .all(|frame| bit(&self.stored, frame) || self.is_zero_frame(frame))
    }
}

pub(crate) const SHORT: &str = "it ends too early";
pub(crate) const OTHER_ROOT: &str = "its root hash does not match";
/// How long a working set of no page is.
pub(crate) const WORKING_SET_LEAST: u64 = 24;

fn take<'a>(rest: &mut &'a [u8], len: u64) -> Result<&'a [u8], &'static str> {
    let len = usize::try_from(len).map_err(|_| SHORT)?;
    let (front, behind) = rest.split_at_checked(len).ok_or(SHORT)?;
    *rest = behind;
    Ok(front)
}

/// Returns `N` bytes from `at` on, zeroes where there are none.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|bytes| bytes.first_chunk()).copied().unwrap_or([0; N])
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

fn read_regions(
    rest: &mut &[u8],
    count: u64,
    image_len: u64,
) -> Result<Vec<ImageRegion>, &'static str> {
    let len = count.checked_mul(REGION_LEN as u64).ok_or(SHORT)?;
    let regions: Vec<ImageRegion> = take(rest, len)?
        .chunks_exact(REGION_LEN)
        .map(|region| ImageRegion {
            guest_addr: number(region, 0),
            offset: number(region, 8),
            len_bytes: number(region, 16),
            page_bytes: number(region, 24),
        })
        .collect();
    if regions.iter().all(|region| region.is_inside(image_len)) {
        Ok(regions)
    } else {
        Err("a region is not inside the image")
    }
}

fn read_order(rest: &mut &[u8], count: u64, whole_pages: u64) -> Result<Order, &'static str> {
    let len = count.checked_mul(8).ok_or(SHORT)?;
    let pages: Vec<u64> = take(rest, len)?.chunks_exact(8).map(|page| number(page, 0)).collect();
    let order = Order::new(&pages, whole_pages);
    if pages.is_empty() || order.listed() != pages {
        return Err("its order has no page, a page twice, or a page that is not there");
    }
    Ok(order)
}

/// Returns the working set; an empty one if it is damaged, because a wrong one would only cost time.
fn read_working_set(bytes: &[u8], pages: u64) -> Vec<u64> {
    let list = || {
        let len = usize::try_from(number(bytes, 0)).ok()?.checked_mul(8)?.checked_add(8)?;
        let (hashed, behind) = bytes.split_at_checked(len)?;
        (short_hash(hashed) == *behind.first_chunk()?).then_some(hashed.get(8..)?)
    };
    let listed = list().unwrap_or_default().chunks_exact(8).map(|page| number(page, 0));
    listed.filter(|page| *page < pages).collect()
}

fn root_of(covered: &[u8]) -> Root {
    let mut hasher = root_hasher(covered);
    hasher.update(&covered[HEADER_LEN..]);
    Root(*hasher.finalize().as_bytes())
}

/// Returns the hasher of a root hash, which has the header.
pub(crate) fn root_hasher(header: &[u8]) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&header[..ROOT_AT]);
    hasher.update(&[0; 32]);
    hasher
}

/// Returns the root hash that a header states.
pub(crate) fn root_in(header: &[u8]) -> &[u8] {
    &header[ROOT_AT..HEADER_LEN]
}

/// Returns whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // In pieces, so that a page of other bytes is known by its start.
    bytes.chunks(512).all(|piece| piece.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Returns the first 16 bytes of the BLAKE3 hash of `bytes`.
pub(crate) fn short_hash(bytes: &[u8]) -> [u8; 16] {
    array(blake3::hash(bytes).as_bytes(), 0)
}

/// How many bytes BLAKE3 hashes side by side where a CPU has the widest registers: 16 chunks of 1 KiB. It
/// takes three times as long for a chunk less.
const HASHED_TOGETHER: usize = 16 << 10;
/// One chunk, which nothing is hashed beside.
const CHUNK: usize = 1 << 10;

/// Returns the hash of stored bytes that a record has: of more than a chunk, with zeroes up to a multiple of
/// 16 KiB behind them. `stored` is as it was, and has room for the zeroes.
pub(crate) fn stored_hash(stored: &mut Vec<u8>) -> [u8; 16] {
    let len = stored.len();
    if len > CHUNK {
        stored.resize(len.next_multiple_of(HASHED_TOGETHER), 0);
    }
    let hash = short_hash(stored);
    stored.truncate(len);
    hash
}

/// Returns the header of a skippable frame for the stored bytes of one frame.
pub(crate) fn stored_header(len: u32) -> [u8; 8] {
    skippable(STORED_FRAME, len)
}

fn skippable(magic: u32, len: u32) -> [u8; 8] {
    let mut header = [0; 8];
    header[..4].copy_from_slice(&magic.to_le_bytes());
    header[4..].copy_from_slice(&len.to_le_bytes());
    header
}

/// Returns the bytes behind the frames: the index in its frame, and the seek table. `None` if the index is
/// longer than a frame can be, which an image of 64 TiB in frames of 64 KiB would be.
pub(crate) fn tail(index: &Index) -> Option<(Vec<u8>, Root)> {
    let (mut out, root) = index_frame(index)?;
    out.extend(seek_table(index, Some(out.len() as u64))?);
    Some((out, root))
}

/// Returns the index in its frame; `None` as for [`tail`].
pub(crate) fn index_frame(index: &Index) -> Option<(Vec<u8>, Root)> {
    let (mut payload, root) = index.encode();
    let len = payload.len() as u64;
    payload.extend(len.to_le_bytes());
    payload.extend(END_MAGIC);
    let mut out = skippable(INDEX_FRAME, u32::try_from(payload.len()).ok()?).to_vec();
    out.append(&mut payload);
    Some((out, root))
}

/// Returns the seek table of an image whose index takes so many bytes with its frame; `None` as for [`tail`]. Without
/// that length, it has no entry for the index, as none had before the published format was followed in that.
pub(crate) fn seek_table(index: &Index, index_len: Option<u64>) -> Option<Vec<u8>> {
    let listed: &[Record] = if index.is_plain() { &index.records } else { &[] };
    let frames =
        (0..).zip(listed).map(|(frame, record)| (record.len.into(), index.frame_len(frame)));
    // A skippable frame becomes no bytes.
    let last = index_len.filter(|_| index.is_plain()).map(|len| (len, 0));
    let mut entries = Vec::new();
    for (stored, raw) in frames.chain(last) {
        entries.extend(u32::try_from(stored).ok()?.to_le_bytes());
        entries.extend(u32::try_from(raw).ok()?.to_le_bytes());
    }
    let count = u32::try_from(entries.len() / 8).ok()?;
    let len = entries.len() as u64 + SEEK_FOOTER_LEN;
    let mut out = skippable(SEEK_FRAME, u32::try_from(len).ok()?).to_vec();
    out.append(&mut entries);
    out.extend(count.to_le_bytes());
    out.push(0);
    out.extend(SEEK_MAGIC.to_le_bytes());
    Some(out)
}

/// How long the end of a file is that [`trailer_at`] asks for.
pub(crate) const FOOTER_LEN: usize = 9;
const _: () = assert!(FOOTER_LEN as u64 == SEEK_FOOTER_LEN);
/// The length of the bytes that [`index_place`] takes: the trailer of the index, and the header of the seek table.
pub(crate) const TRAILER: usize = TRAILER_LEN + 8;

/// Returns where the trailer of the index starts in a file of `file_len` bytes, of which `footer` are the
/// last [`FOOTER_LEN`].
pub(crate) fn trailer_at(file_len: u64, footer: &[u8]) -> Result<u64, &'static str> {
    if u32::from_le_bytes(array(footer, 5)) != SEEK_MAGIC {
        return Err("it does not end with a seek table");
    }
    let entry = if footer[4] & 0x80 == 0 { 8 } else { 12 };
    let table = u64::from(u32::from_le_bytes(array(footer, 0))) * entry + SEEK_FOOTER_LEN;
    file_len.checked_sub(table + TRAILER as u64).ok_or("its seek table is longer than the file")
}

/// Returns where the frame of the index starts, and how long the index is without its trailer, from
/// the bytes at [`trailer_at`].
pub(crate) fn index_place(trailer_at: u64, trailer: &[u8]) -> Result<(u64, u64), &'static str> {
    if trailer[8..16] != END_MAGIC || u32::from_le_bytes(array(trailer, 16)) != SEEK_FRAME {
        return Err("there is no index before its seek table");
    }
    let len = number(trailer, 0);
    let start = trailer_at.checked_sub(len).and_then(|start| start.checked_sub(SKIPPABLE_LEN));
    let start = start.ok_or("its index is longer than the file")?;
    Ok((start, len))
}

/// Checks the header of the frame of the index.
pub(crate) fn is_index_header(header: &[u8], len: u64) -> bool {
    u32::from_le_bytes(array(header, 0)) == INDEX_FRAME
        && u64::from(u32::from_le_bytes(array(header, 4))) == len + TRAILER_LEN as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_bytes_of_more_than_a_chunk_are_hashed_with_zeroes_behind_them() {
        for (len, hashed) in
            [(0, 0), (1, 1), (1024, 1024), (1025, 16384), (16384, 16384), (16385, 32768)]
        {
            let mut stored = vec![7; len];
            let mut padded = stored.clone();
            padded.resize(hashed, 0);
            assert_eq!(stored_hash(&mut stored), short_hash(&padded), "{len}");
            assert_eq!(stored, vec![7; len], "it is as it was");
        }
    }
}

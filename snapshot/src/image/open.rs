//! How an image is opened: by its index, by hashes beside raw memory, or as raw memory; and its parents.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::slice::from_ref;
use std::sync::Arc;

use super::{HASHES, Image, Kind, OpenOptions, RANK_FRAMES};
use crate::codec;
use crate::disk_cache::{CachedImage, DiskCache};
use crate::error::SnapshotError;
use crate::file_source::open_by;
use crate::format::{self, Codec, FOOTER_LEN, Index, Root, SKIPPABLE_LEN};
use crate::frame_cache::FrameCache;
use crate::source::{self, Address, Source};

/// The largest number of images below another one.
pub(crate) const MAX_DEPTH: usize = 16;
/// How a packed image starts: a frame of zstd, or one that is skipped. RFC 8878.
const ZSTD_FRAME: u32 = 0xfd2f_b528;
const FIRST_SKIPPABLE: u32 = 0x184d_2a50;
const LAST_SKIPPABLE: u32 = 0x184d_2a5f;
/// How large the pages of raw memory are taken to be, and how much of it is read at once.
const RAW_PAGE_SHIFT: u8 = 12;
const RAW_FRAME_SHIFT: u8 = 16;

/// The header of the frame of an index.
const HEADER: usize = 8;
const _: () = assert!(HEADER as u64 == SKIPPABLE_LEN);
/// How much of an index is read at first.
const PART: u64 = 1 << 20;
/// How much of the end of a source is read first: its footer, and more to tell it from others by.
const END: u64 = 4 << 10;

/// Caches that an image and its parents share.
struct Caches {
    frames: Arc<FrameCache>,
    disk: Option<Arc<DiskCache>>,
}

impl Caches {
    fn of(options: &OpenOptions) -> Self {
        let frames = options.cache.clone().unwrap_or_else(|| FrameCache::new(16 << 20));
        Self { frames, disk: options.disk_cache.clone() }
    }
}

/// The index of a source, and where its frames are kept.
struct Found {
    index: Index,
    root: Root,
    root_was_required: bool,
    disk: Option<CachedImage>,
}

impl Image {
    /// Opens the image in a file, and its parents beside it; with the feature `object-storage`, `path` may be
    /// a URL. `#root=HASH` behind that requires this root hash.
    ///
    /// # Errors
    /// [`SnapshotError`] if it cannot be read, is no image, is damaged, or is not the one that is required.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Self, SnapshotError> {
        let path = path.as_ref();
        let mut options = options.clone();
        if source::address(path) == Address::File {
            options.disk_cache = None;
        }
        if let Address::Url { fragment: Some(fragment), .. } = source::address(path) {
            let root = fragment.strip_prefix("root=").and_then(|root| root.parse().ok());
            let why =
                "what follows # in a URL is root= and the 64 hexadecimal digits of a root hash";
            let root = root.ok_or(SnapshotError::Options { why })?;
            if options.root.is_some_and(|other| other != root) {
                let why = "the URL requires another root hash than the options";
                return Err(SnapshotError::Options { why });
            }
            options.root = Some(root);
        }
        let source = open_by(path, &options.requests, &options.files)
            .map_err(|cause| unopened(&path.display(), cause))?;
        let caches = Caches::of(&options);
        let image = match Found::read(&*source, true, options.root, &caches) {
            Err(not_packed @ SnapshotError::NotAnImage { .. }) => {
                let has_start = starts_as_packed(&*source);
                Self::open_hashed(source, options.root, &caches, not_packed).map_err(|error| {
                    match error {
                        SnapshotError::NotAnImage { name, why } if has_start => {
                            SnapshotError::Cut { name, why }
                        }
                        error => error,
                    }
                })?
            }
            found => Self::open_found(source, found?, &caches, MAX_DEPTH)?,
        };
        if options.root.is_none() {
            tracing::info!(image = %image.name(), "opened without a root hash: damage is found, forgery is not");
        }
        Ok(image)
    }

    /// Opens raw memory by the hashes beside it, if there are any.
    fn open_hashed(
        source: Box<dyn Source>,
        root: Option<Root>,
        caches: &Caches,
        not_packed: SnapshotError,
    ) -> Result<Self, SnapshotError> {
        let name = source.name();
        let name = Path::new(&name).file_name().and_then(|name| name.to_str());
        let Some(name) = name.map(|name| format!("{name}{HASHES}")) else { return Err(not_packed) };
        let hashes = match (source.neighbour(&name), source.file()) {
            (Ok(hashes), _) => hashes,
            (Err(cause), _) if cause.kind() == io::ErrorKind::NotFound => return Err(not_packed),
            // A store answers this for a missing object if the user may not list the bucket.
            (Err(cause), None) if cause.kind() == io::ErrorKind::PermissionDenied => {
                return Err(not_packed);
            }
            (Err(cause), _) => return Err(unopened(&name, cause)),
        };
        let found = Found::read(&*hashes, false, root, caches).map_err(|error| match error {
            // The memory is not taken for raw then.
            SnapshotError::NotAnImage { name, why } => SnapshotError::BadIndex { name, why },
            error => error,
        })?;
        let index = &found.index;
        if index.codec != Codec::None
            || index.image_len != source.byte_len()
            || index.parent.is_some()
            || !index.order.is_empty()
        {
            let why = "it does not have the hashes of raw memory as long as this";
            return Err(SnapshotError::BadIndex { name: hashes.name(), why });
        }
        let offsets = index.raw_offsets();
        Ok(Self::of(source, Kind::Hashed(hashes), found, offsets, &caches.frames))
    }

    /// Opens an image as [`Image::open`] does, or the raw bytes of memory, which have no hashes: the bytes of the
    /// source are the memory then. A packed image that lost its end would look like raw bytes, so a source that starts
    /// as a packed image does, or is not whole pages of 4 KiB, is not taken for raw; nor is anything where a
    /// root hash is required.
    ///
    /// # Errors
    /// As for [`Image::open`].
    pub fn open_or_raw(
        path: impl AsRef<Path>,
        options: &OpenOptions,
    ) -> Result<Self, SnapshotError> {
        let path = path.as_ref();
        match Self::open(path, options) {
            Err(not_packed @ SnapshotError::NotAnImage { .. })
                if options.root.is_none()
                    && !matches!(source::address(path), Address::Url { fragment: Some(_), .. }) =>
            {
                Self::open_raw(path, options, not_packed)
            }
            opened => opened,
        }
    }

    fn open_raw(
        path: &Path,
        options: &OpenOptions,
        not_packed: SnapshotError,
    ) -> Result<Self, SnapshotError> {
        let name = path.display().to_string();
        let failed = |cause| unopened(&name, cause);
        let source = open_by(path, &options.requests, &options.files).map_err(failed)?;
        let len = source.byte_len();
        if len == 0 || !len.is_multiple_of(1 << RAW_PAGE_SHIFT) {
            let why = "it ends neither as a packed image does nor, as raw memory, with a whole page of 4096 bytes";
            return Err(SnapshotError::NotAnImage { name, why });
        }
        if starts_as_packed(&*source) {
            return Err(not_packed);
        }
        let Some(identity) = source.identity() else {
            let why =
                "the server sends no strong ETag, by which a replaced raw object would be noticed";
            return Err(SnapshotError::NotAnImage { name, why });
        };
        tracing::info!(image = %name, "raw memory has no hashes: neither damage nor forgery is found");
        if options.disk_cache.is_some() && source.file().is_none() {
            tracing::warn!(image = %name, "raw memory has no hashes and is not kept in the disk cache");
        }
        let root = Root(*blake3::hash(identity.as_bytes()).as_bytes());
        let index = raw_index(len);
        let found = Found { index, root, root_was_required: false, disk: None };
        let cache = Caches::of(options).frames;
        Ok(Self::of(source, Kind::Raw(identity), found, Vec::new(), &cache))
    }

    /// Returns whether a source ends as a packed image or the hashes of raw memory do.
    ///
    /// # Errors
    /// [`SnapshotError::Read`].
    pub fn is_packed(source: &dyn Source) -> Result<bool, SnapshotError> {
        let mut footer = [0; FOOTER_LEN];
        let Some(at) = source.byte_len().checked_sub(FOOTER_LEN as u64) else { return Ok(false) };
        read(source, at, &mut footer)?;
        let Ok(at) = format::trailer_at(source.byte_len(), &footer) else { return Ok(false) };
        let mut trailer = [0; format::TRAILER];
        read(source, at, &mut trailer)?;
        Ok(format::index_place(at, &trailer).is_ok())
    }

    /// Opens the image in a source, and its parents beside it.
    ///
    /// # Errors
    /// As for [`Image::open`].
    pub fn from_source(
        source: Box<dyn Source>,
        options: &OpenOptions,
    ) -> Result<Self, SnapshotError> {
        let caches = Caches::of(options);
        let found = Found::read(&*source, true, options.root, &caches)?;
        Self::open_found(source, found, &caches, MAX_DEPTH)
    }

    /// Opens the packed image whose index was found in a source, and its parents.
    fn open_found(
        source: Box<dyn Source>,
        found: Found,
        caches: &Caches,
        depth: usize,
    ) -> Result<Self, SnapshotError> {
        let parent = Self::open_parent(&*source, &found.index, caches, depth)?;
        let offsets = found.index.packed_offsets();
        let mut image = Self::of(source, Kind::Packed, found, offsets, &caches.frames);
        image.parent = parent;
        Ok(image)
    }

    /// Makes an image whose stored frames start at `offsets`, without a parent.
    fn of(
        source: Box<dyn Source>,
        kind: Kind,
        found: Found,
        offsets: Vec<u64>,
        cache: &Arc<FrameCache>,
    ) -> Self {
        let Found { index, root, root_was_required, disk } = found;
        let ranks = index.stored.chunks(usize::try_from(RANK_FRAMES / 8).unwrap_or(1)).scan(
            0,
            |before, part| {
                let rank = *before;
                *before += part.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>();
                Some(rank)
            },
        );
        Self {
            source,
            root,
            parent: None,
            offsets,
            ranks: ranks.collect(),
            cache: cache.clone(),
            disk,
            index,
            root_was_required,
            kind,
        }
    }

    /// Opens the parent that an index names, and checks its root hash and length.
    fn open_parent(
        source: &dyn Source,
        index: &Index,
        caches: &Caches,
        depth: usize,
    ) -> Result<Option<Box<Self>>, SnapshotError> {
        let Some(link) = &index.parent else { return Ok(None) };
        if depth == 0 {
            return Err(SnapshotError::TooDeep { name: source.name(), max: MAX_DEPTH });
        }
        let failed = |cause| SnapshotError::Parent {
            name: source.name(),
            parent: link.name.clone(),
            cause: Box::new(cause),
        };
        let below =
            source.neighbour(&link.name).map_err(|cause| failed(unopened(&link.name, cause)))?;
        let below = match Found::read(&*below, true, Some(link.root), caches) {
            Err(not_packed @ SnapshotError::NotAnImage { .. }) => {
                Self::open_hashed(below, Some(link.root), caches, not_packed)
            }
            found => found.and_then(|found| Self::open_found(below, found, caches, depth - 1)),
        };
        let below = below.map_err(failed)?;
        if !index.fits_parent(below.byte_len()) {
            let why = "a frame is neither stored nor zero, and lies behind the end of the parent";
            return Err(SnapshotError::BadIndex { name: source.name(), why });
        }
        Ok(Some(Box::new(below)))
    }
}

/// Returns an index of the raw bytes of memory: each frame is stored as it is, which takes no map and no record.
fn raw_index(len: u64) -> Index {
    let empty = Index::new(Codec::None, RAW_PAGE_SHIFT, RAW_FRAME_SHIFT);
    Index { image_len: len, data_len: len, ..empty }
}

/// Returns an error of opening a source.
fn unopened(name: &impl ToString, cause: io::Error) -> SnapshotError {
    SnapshotError::Open { name: name.to_string(), cause }
}

/// Returns whether a source starts as a packed image does.
fn starts_as_packed(source: &dyn Source) -> bool {
    let mut start = [0; 4];
    source.byte_len() >= 4
        && source.read_at(0, &mut start).is_ok()
        && matches!(u32::from_le_bytes(start), ZSTD_FRAME | FIRST_SKIPPABLE..=LAST_SKIPPABLE)
}

fn check_root(name: &str, expected: Option<Root>, found: Root) -> Result<(), SnapshotError> {
    match expected {
        Some(expected) if expected != found => {
            Err(SnapshotError::OtherRoot { name: name.to_owned(), expected, found })
        }
        _ => Ok(()),
    }
}

impl Found {
    /// Finds and reads the index of a source, before which there are frames or nothing. One that was kept on
    /// disk is not read from the source, but for its end.
    fn read(
        source: &dyn Source,
        has_frames: bool,
        expected: Option<Root>,
        caches: &Caches,
    ) -> Result<Self, SnapshotError> {
        let file_len = source.byte_len();
        let mut end = vec![0; usize::try_from(file_len.min(END)).unwrap_or(usize::MAX)];
        read(source, file_len - end.len() as u64, &mut end)?;
        let disk = caches.disk.as_ref();
        let keeper =
            disk.and_then(|disk| Some((disk, key_of(source, has_frames, expected, &end)?)));
        let kept = keeper
            .and_then(|(disk, key)| disk.index(key, file_len))
            .and_then(|bytes| decode(source, &bytes).ok())
            .filter(|(_, root)| expected.is_none_or(|expected| expected == *root));
        let (index, root, fetched) = match kept {
            Some((index, root)) => (index, root, None),
            None => {
                let (start, frame) = fetch_index(source, &end)?;
                let (index, root) = decode(source, &frame[HEADER..])?;
                if start != if has_frames { index.data_len } else { 0 } {
                    return Err(bad(source, "it does not start where the frames end"));
                }
                check_root(&source.name(), expected, root)?;
                (index, root, Some(frame))
            }
        };
        // In use before there is room made for its index.
        let cached = disk.and_then(|disk| disk.image(root));
        if let (Some((disk, key)), Some(frame)) = (keeper, fetched) {
            disk.keep_index(key, &frame[HEADER..]);
        }
        Ok(Self { index, root, root_was_required: expected.is_some(), disk: cached })
    }
}

/// Returns under which key the index of a source far away is kept: by the identity of its bytes, or
/// else by the root hash that it must have; and by its end, in case a store calls two objects the same.
fn key_of(
    source: &dyn Source,
    has_frames: bool,
    root: Option<Root>,
    end: &[u8],
) -> Option<blake3::Hash> {
    if source.file().is_some() {
        return None;
    }
    let by_root = || {
        root.map(|root| format!("{} of {} bytes, root {root}", source.name(), source.byte_len()))
    };
    let identity = source.identity().or_else(by_root)?;
    let mut hasher = blake3::Hasher::new();
    Some(hasher.update(&[has_frames.into()]).update(identity.as_bytes()).update(end).finalize())
}

fn not(source: &dyn Source, why: &'static str) -> SnapshotError {
    SnapshotError::NotAnImage { name: source.name(), why }
}

fn bad(source: &dyn Source, why: &'static str) -> SnapshotError {
    SnapshotError::BadIndex { name: source.name(), why }
}

fn read(source: &dyn Source, offset: u64, out: &mut [u8]) -> Result<(), SnapshotError> {
    source.read_at(offset, out).map_err(SnapshotError::read(source, offset, out.len()))
}

/// Finds and reads the frame of an index by the end of its source. Returns where it starts, and all but its
/// trailer.
fn fetch_index(source: &dyn Source, end: &[u8]) -> Result<(u64, Vec<u8>), SnapshotError> {
    let footer: &[u8; FOOTER_LEN] =
        end.last_chunk().ok_or_else(|| not(source, "it is too short"))?;
    let trailer_at =
        format::trailer_at(source.byte_len(), footer).map_err(|why| not(source, why))?;
    let mut trailer = [0; format::TRAILER];
    read(source, trailer_at, &mut trailer)?;
    let (start, len) = format::index_place(trailer_at, &trailer).map_err(|why| not(source, why))?;
    // Each read of an object is a request, and nothing of an object is a hole.
    let first = if source.file().is_some() { format::HEADER_LEN as u64 } else { PART };
    let mut frame = Vec::new();
    read_more(source, start, len.min(first) + SKIPPABLE_LEN, &mut frame)?;
    if !format::is_index_header(&frame, len) {
        return Err(bad(source, "its frame and its trailer have different lengths"));
    }
    let used = match source.file() {
        // It may be a hole for the most part.
        Some(_) if len > PART => {
            verified_len(source, start + SKIPPABLE_LEN, len, &frame[HEADER..])?
        }
        _ => len,
    };
    let rest = start + frame.len() as u64..start + SKIPPABLE_LEN + used;
    source.will_need(from_ref(&rest));
    while (frame.len() as u64) < SKIPPABLE_LEN + used {
        let left = SKIPPABLE_LEN + used - frame.len() as u64;
        // Of an index that is long, each part is as long as all that has come.
        let part = left.min(PART.max(frame.len() as u64));
        read_more(source, start + frame.len() as u64, part, &mut frame)?;
    }
    Ok((start, frame))
}

/// Reads `len` bytes at `offset` behind those that are there: memory is taken when the bytes before have come.
fn read_more(
    source: &dyn Source,
    offset: u64,
    len: u64,
    out: &mut Vec<u8>,
) -> Result<(), SnapshotError> {
    let before = out.len();
    out.resize(before + usize::try_from(len).unwrap_or(usize::MAX), 0);
    read(source, offset, &mut out[before..])
}

/// Returns how much of an index of `len` bytes at `start` is covered by hashes that match, or as much of it as tells
/// that it has another version. It takes no memory for the index.
fn verified_len(
    source: &dyn Source,
    start: u64,
    len: u64,
    header: &[u8],
) -> Result<u64, SnapshotError> {
    if Index::major(header) != Some(format::MAJOR) {
        return Ok(header.len() as u64);
    }
    let covered = Index::covered_len(header).map_err(|why| bad(source, why))?;
    let behind = len.checked_sub(covered).ok_or_else(|| bad(source, format::SHORT))?;
    let hash = |mut hasher: blake3::Hasher, range: Range<u64>| {
        let (mut at, mut part) = (range.start, Vec::new());
        while at < range.end {
            part.clear();
            read_more(source, start + at, (range.end - at).min(PART), &mut part)?;
            hasher.update(&part);
            at += part.len() as u64;
        }
        Ok::<_, SnapshotError>(hasher.finalize())
    };
    let root = hash(format::root_hasher(header), header.len() as u64..covered)?;
    if root.as_bytes() != format::root_in(header) {
        return Err(bad(source, format::OTHER_ROOT));
    }
    let mut count = [0; 8];
    if behind < format::WORKING_SET_LEAST {
        return Ok(covered);
    }
    read(source, start + covered, &mut count)?;
    let set = u64::from_le_bytes(count).checked_mul(8).and_then(|bytes| bytes.checked_add(8));
    let Some(set) = set.filter(|set| *set <= behind - 16) else { return Ok(covered) };
    let mut expected = [0; 16];
    read(source, start + covered + set, &mut expected)?;
    let found = hash(blake3::Hasher::new(), covered..covered + set)?;
    // One that is damaged is left out.
    Ok(if found.as_bytes().starts_with(&expected) { covered + set + 16 } else { covered })
}

/// Reads an index, and checks the rules that a packer follows.
fn decode(source: &dyn Source, bytes: &[u8]) -> Result<(Index, Root), SnapshotError> {
    if let Some(major) = Index::major(bytes).filter(|major| *major != format::MAJOR) {
        return Err(SnapshotError::Version { name: source.name(), major });
    }
    let (index, root) = Index::decode(bytes).map_err(|why| bad(source, why))?;
    let longest = codec::longest_stored(index.codec, 1 << index.frame_shift)
        .map_err(|cause| SnapshotError::Codec { codec: index.codec.name(), cause })?;
    if index.records.iter().any(|record| record.len as usize > longest) {
        return Err(bad(source, "a stored frame is longer than its codec makes it"));
    }
    Ok((index, root))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writer::Packer;

    /// A packer makes no chain that is too long, so the limit is lowered here.
    #[test]
    fn an_image_with_more_below_it_than_the_limit_is_refused() {
        let name = |end: &str| format!("uzone-depth-{}-{end}", std::process::id());
        let path = |end: &str| std::env::temp_dir().join(name(end));
        let (base, child) = (path("base"), path("child"));
        let packer = Packer::default();
        packer.pack(&mut &[1_u8; 4096][..], &base, None, &|_| true).unwrap();
        let parent = Image::open(&base, &OpenOptions::default()).unwrap();
        packer.pack(&mut &[2_u8; 4096][..], &child, Some(&parent), &|_| true).unwrap();
        let open = |limit| {
            let options = OpenOptions::default();
            let caches = Caches::of(&options);
            let source = open_by(&child, &options.requests, &options.files).unwrap();
            let found = Found::read(&*source, true, None, &caches).unwrap();
            Image::open_found(source, found, &caches, limit)
        };
        assert_eq!(open(1).unwrap().parents(), 1);
        let error = open(0).expect_err("one more than the limit");
        assert!(matches!(error, SnapshotError::TooDeep { .. }), "{error}");
        for path in [base, child] {
            std::fs::remove_file(path).unwrap();
        }
    }
}

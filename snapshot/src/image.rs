//! A packed image that is open: [`Image`].
//!
//! Stored bytes are hashed before they are decoded, and what comes out has its length and, for zstd, its
//! checksum. A frame that does not match is read once more, and is an error then: never zeroes, never
//! other bytes.
//!
//! Sharing: every method takes `&self`, from any thread.
//! Cost: 24 bytes of memory a stored frame, and two bits a page.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::cache::{FrameCache, Ready};
use crate::codec::{self, Decoder};
use crate::disk::{CachedImage, DiskCache};
use crate::error::SnapshotError;
use crate::format::{
    self, Codec, FOOTER_LEN, Flaw, ImageRegion, Index, Record, Root, SKIPPABLE_LEN, bit, is_zero,
    stored_hash,
};
use crate::order::Order;
use crate::source::{self, Address, Source};

/// The longest chain of parents.
const MAX_DEPTH: usize = 16;
/// The longest frame that is decoded by a thread that answers faults: others wait meanwhile, for 0.2 ms.
const LONGEST_READY: u64 = 256 << 10;
/// How much is read at once where nothing is decoded.
const READ_BYTES: u64 = 1 << 20;
/// How much may be read for frames that are verified together: one of 16 MiB, or several with others between.
const LONGEST_READ: u64 = 17 << 20;
/// How many frames of a map share a count of those before them.
const RANK_FRAMES: u64 = 512;

/// How a packed image starts: a frame of zstd, or one that is skipped. RFC 8878.
const ZSTD_FRAME: u32 = 0xfd2f_b528;
const FIRST_SKIPPABLE: u32 = 0x184d_2a50;
const LAST_SKIPPABLE: u32 = 0x184d_2a5f;
/// What follows the name of raw memory in the name of its hashes ([`Packer::hashes_only`]).
///
/// [`Packer::hashes_only`]: crate::Packer::hashes_only
pub const HASHES: &str = ".hashes";
/// How large the pages of raw memory are taken to be, and how much of it is read at once.
const RAW_PAGE_SHIFT: u8 = 12;
const RAW_FRAME_SHIFT: u8 = 16;

/// A packed image, or the raw bytes of memory.
pub struct Image {
    source: Box<dyn Source>,
    index: Index,
    root: Root,
    parent: Option<Box<Image>>,
    /// Where each stored frame starts in the file.
    offsets: Vec<u64>,
    /// How many frames before every [`RANK_FRAMES`]th are stored.
    ranks: Vec<u64>,
    cache: Arc<FrameCache>,
    /// Stored frames that were fetched already.
    disk: Option<CachedImage>,
    root_was_required: bool,
    /// Of raw memory that has no hashes: what tells it from others.
    raw: Option<String>,
    /// Where the hashes of raw memory are.
    hashes: Option<Box<dyn Source>>,
}

/// What is to be checked when an image is opened, and what it may use.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    root: Option<Root>,
    cache: Option<Arc<FrameCache>>,
    disk: Option<Arc<DiskCache>>,
}

impl OpenOptions {
    /// Requires this root hash, which makes the bytes authentic: without it, hashes show damage and not
    /// forgery.
    #[must_use]
    pub fn root(mut self, root: Root) -> Self {
        self.root = Some(root);
        self
    }

    /// Keeps decoded frames in this cache. Images that share it decode a frame once: an image that is opened
    /// several times, and the children of one parent. Without one, an image and its parents have a cache of
    /// 16 MiB.
    #[must_use]
    pub fn cache(mut self, cache: Arc<FrameCache>) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Keeps stored frames of the image and its parents on disk as well. [`Image::open`] does so for images
    /// in object storage alone.
    #[must_use]
    pub fn disk_cache(mut self, disk: Arc<DiskCache>) -> Self {
        self.disk = Some(disk);
        self
    }
}

/// What an image and its parents share.
#[derive(Clone, Copy)]
struct Caches<'a> {
    frames: &'a Arc<FrameCache>,
    disk: Option<&'a Arc<DiskCache>>,
}

/// Where the bytes of a frame come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Zero,
    /// Its number among the stored frames.
    Stored(usize),
    Parent,
}

/// Bytes of an image that are all in one stored frame, of the image or of one of its parents, or are zero.
pub(crate) struct Extent<'a> {
    /// Where they end.
    pub(crate) end: u64,
    /// Where they are; `None` if they are zero.
    pub(crate) stored: Option<StoredPart<'a>>,
}

/// A part of a stored frame.
#[derive(Clone, Copy)]
pub(crate) struct StoredPart<'a> {
    /// The image that stores the frame.
    owner: &'a Image,
    frame: u64,
    /// The number of the frame among those that the owner stores.
    number: usize,
    /// Where the part starts in the frame.
    pub(crate) start: usize,
}

impl StoredPart<'_> {
    /// Returns the bytes of the whole frame if they are decoded already.
    pub(crate) fn kept(&self) -> Option<Arc<[u8]>> {
        self.owner.cache.get((self.owner.root, self.frame))
    }

    /// Returns the bytes of the whole frame if that takes no device: decoded already, or now. A frame that is
    /// damaged is not ready, nor is one that takes long to decode.
    pub(crate) fn ready(&self) -> Ready {
        let owner = self.owner;
        if owner.frame_bytes() > LONGEST_READY {
            return self.kept().map_or(Ready::No, Ready::Bytes);
        }
        owner.cache.ready_or_decode((owner.root, self.frame), || {
            let mut bytes = owner.cache.room(self.frame_len());
            let out = Arc::get_mut(&mut bytes)?;
            owner.read_stored_ready(self.number, out).then_some(bytes)
        })
    }

    /// Waits for a frame that was [`Ready::Soon`].
    pub(crate) fn soon(&self) -> Option<Arc<[u8]>> {
        self.owner.cache.soon((self.owner.root, self.frame))
    }

    /// Returns where the stored bytes of the whole frame are in the file of its owner.
    fn in_file(&self) -> Range<u64> {
        let (offset, record) = self.owner.stored(self.number);
        offset..offset + u64::from(record.len)
    }

    /// Returns the bytes of the whole frame. It may block.
    pub(crate) fn get(&self) -> Result<Arc<[u8]>, SnapshotError> {
        let owner = self.owner;
        owner.cache.get_or_decode((owner.root, self.frame), || {
            let mut bytes = owner.cache.room(self.frame_len());
            // There is no other holder. An empty slice would be an error of the decoder.
            let out = Arc::get_mut(&mut bytes).unwrap_or_default();
            owner.read_stored(self.frame, self.number, out)?;
            Ok(bytes)
        })
    }

    fn frame_len(&self) -> usize {
        usize::try_from(self.owner.index.frame_len(self.frame)).unwrap_or(usize::MAX)
    }
}

/// How the frames of an image are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FrameCounts {
    /// All frames.
    pub frames: u64,
    /// Frames of zeroes, which are never decoded.
    pub zero: u64,
    /// Frames that are decoded from this image.
    pub stored: u64,
    /// Frames that the parent has.
    pub parent: u64,
}

/// Where the pages of a part of an image are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageCounts {
    /// How many bytes the part has.
    pub len_bytes: u64,
    /// Pages of zeroes.
    pub zero: u64,
    /// Other pages that this image stores.
    pub stored: u64,
    /// Other pages that the parent has.
    pub parent: u64,
    /// Pages of the working set, whatever else they are.
    pub working_set: u64,
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
            options.disk = None;
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
        let open = || source::open_source(path).map_err(|cause| unread(&path.display(), cause));
        let image = match Self::from_source(open()?, &options) {
            Err(not_packed @ SnapshotError::NotAnImage { .. }) => {
                Self::open_hashed(open()?, &options, not_packed)?
            }
            opened => opened?,
        };
        if options.root.is_none() {
            tracing::info!(image = %image.name(), "opened without a root hash: damage is found, forgery is not");
        }
        Ok(image)
    }

    /// Opens raw memory by the hashes beside it, if there are any.
    fn open_hashed(
        source: Box<dyn Source>,
        options: &OpenOptions,
        not_packed: SnapshotError,
    ) -> Result<Self, SnapshotError> {
        let name = source.name();
        let name = Path::new(&name).file_name().and_then(|name| name.to_str());
        let Some(name) = name.map(|name| format!("{name}{HASHES}")) else { return Err(not_packed) };
        let hashes = match (source.neighbour(&name), source.file()) {
            (Ok(hashes), _) => hashes,
            (Err(cause), _) if cause.kind() == io::ErrorKind::NotFound => return Err(not_packed),
            // A store answers so where there is nothing, to those who may not list what there is.
            (Err(cause), None) if cause.kind() == io::ErrorKind::PermissionDenied => {
                return Err(not_packed);
            }
            (Err(cause), _) => return Err(unread(&name, cause)),
        };
        let (index, found) = read_index(&*hashes, false).map_err(|error| match error {
            // The memory is not taken for raw then.
            SnapshotError::NotAnImage { name, why } => SnapshotError::BadIndex { name, why },
            error => error,
        })?;
        if index.codec != Codec::None
            || index.image_len != source.byte_len()
            || index.parent.is_some()
            || !index.order.is_empty()
        {
            let why = "it does not have the hashes of raw memory as long as this";
            return Err(SnapshotError::BadIndex { name: hashes.name(), why });
        }
        check_root(&hashes.name(), options.root, found)?;
        let cache = options.cache.clone().unwrap_or_else(|| FrameCache::new(16 << 20));
        let disk = options.disk.as_ref().and_then(|disk| disk.image(found));
        let offsets = index.raw_offsets();
        let mut image = Self::of(source, index, offsets, found, &cache);
        (image.disk, image.hashes) = (disk, Some(hashes));
        image.root_was_required = options.root.is_some();
        Ok(image)
    }

    /// Opens an image as [`Image::open`] does, or the raw bytes of memory, which have no hashes: what the
    /// source has is what is read. A packed image that lost its end would look like raw bytes, so what starts
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
        let mut start = [0; 4];
        let name = path.display().to_string();
        let failed = |cause| unread(&name, cause);
        let source = source::open_source(path).map_err(failed)?;
        let len = source.byte_len();
        if len == 0 || !len.is_multiple_of(1 << RAW_PAGE_SHIFT) {
            return Err(not_packed);
        }
        source.read_at(0, &mut start).map_err(failed)?;
        if matches!(u32::from_le_bytes(start), ZSTD_FRAME | FIRST_SKIPPABLE..=LAST_SKIPPABLE) {
            return Err(not_packed);
        }
        let Some(identity) = source.identity() else {
            let why = "it is no packed image, and its store names no version (a strong ETag), so that as raw \
                       memory it could be replaced while it is read";
            return Err(SnapshotError::NotAnImage { name, why });
        };
        tracing::info!(image = %name, "raw memory has no hashes: neither damage nor forgery is found");
        if options.disk.is_some() && source.file().is_none() {
            tracing::warn!(image = %name, "raw memory has no hashes and is not kept in the disk cache");
        }
        let root = Root(*blake3::hash(identity.as_bytes()).as_bytes());
        let cache = options.cache.clone().unwrap_or_else(|| FrameCache::new(16 << 20));
        let index = raw_index(len);
        let offsets = index.raw_offsets();
        let mut image = Self::of(source, index, offsets, root, &cache);
        image.raw = Some(identity);
        Ok(image)
    }

    /// Opens the image in a source, and its parents beside it.
    ///
    /// # Errors
    /// As for [`Image::open`].
    pub fn from_source(
        source: Box<dyn Source>,
        options: &OpenOptions,
    ) -> Result<Self, SnapshotError> {
        let cache = options.cache.clone().unwrap_or_else(|| FrameCache::new(16 << 20));
        let caches = Caches { frames: &cache, disk: options.disk.as_ref() };
        Self::open_at(source, options.root, caches, MAX_DEPTH)
    }

    fn open_at(
        source: Box<dyn Source>,
        root: Option<Root>,
        caches: Caches<'_>,
        depth: usize,
    ) -> Result<Self, SnapshotError> {
        let (index, found) = read_index(&*source, true)?;
        check_root(&source.name(), root, found)?;
        let parent = Self::open_parent(&*source, &index, caches, depth)?;
        let offsets = index.packed_offsets();
        let mut image = Self::of(source, index, offsets, found, caches.frames);
        image.parent = parent;
        image.disk = caches.disk.and_then(|disk| disk.image(found));
        image.root_was_required = root.is_some();
        Ok(image)
    }

    /// Makes an image whose stored frames start at `offsets`, without a parent and a disk cache.
    fn of(
        source: Box<dyn Source>,
        index: Index,
        offsets: Vec<u64>,
        root: Root,
        cache: &Arc<FrameCache>,
    ) -> Self {
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
            disk: None,
            index,
            root_was_required: false,
            raw: None,
            hashes: None,
        }
    }

    /// Opens the parent that an index names, and checks that it has what it must have.
    fn open_parent(
        source: &dyn Source,
        index: &Index,
        caches: Caches<'_>,
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
        let below = source.neighbour(&link.name).map_err(|cause| {
            let (name, len_bytes) = (link.name.clone(), FOOTER_LEN as u64);
            failed(SnapshotError::Read { name, offset: 0, len_bytes, cause })
        })?;
        let below = Self::open_at(below, Some(link.root), caches, depth - 1).map_err(failed)?;
        if !index.fits_parent(below.byte_len()) {
            let why = "a frame is neither stored nor zero, and lies behind the end of the parent";
            return Err(SnapshotError::BadIndex { name: source.name(), why });
        }
        Ok(Some(Box::new(below)))
    }

    /// Returns whether so many bytes of decoded frames can be kept.
    pub(crate) fn keeps(&self, len_bytes: u64) -> bool {
        self.cache.has_room_for(len_bytes)
    }

    /// Returns how many bytes the image has.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.index.image_len
    }

    /// Returns how many bytes the file has.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.source.byte_len()
    }

    /// Returns the name of its file.
    #[must_use]
    pub fn name(&self) -> String {
        self.source.name()
    }

    /// Returns the names of what the image is read from: of its file, of the hashes beside that, and of its
    /// parents.
    #[must_use]
    pub fn sources(&self) -> Vec<String> {
        let own = [Some(&self.source), self.hashes.as_ref()];
        let own = own.into_iter().flatten().map(|source| source.name());
        own.chain(self.parent.iter().flat_map(|parent| parent.sources())).collect()
    }

    /// Returns whether it is the raw bytes of memory, without hashes.
    #[must_use]
    pub fn is_raw(&self) -> bool {
        self.raw.is_some()
    }

    /// Returns what tells the image from all others: its root hash; of raw memory, which file it is and when
    /// that was changed, or the URL and the version of the object.
    #[must_use]
    pub fn identity(&self) -> String {
        self.raw.clone().unwrap_or_else(|| self.root.to_string())
    }

    /// Returns the file of raw memory, whose bytes are those of the image.
    #[must_use]
    pub fn raw_file(&self) -> Option<&File> {
        self.raw.as_ref().and_then(|_| self.source.file())
    }

    /// Returns the root hash; of raw memory, a hash of its [identity](Image::identity).
    #[must_use]
    pub fn root(&self) -> Root {
        self.root
    }

    /// Returns whether a root hash was required, so that the bytes are authentic.
    #[must_use]
    pub fn root_was_required(&self) -> bool {
        self.root_was_required
    }

    /// Returns how frames are stored.
    #[must_use]
    pub fn codec(&self) -> Codec {
        self.index.codec
    }

    /// Returns the size of a page in bytes.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        1 << self.index.page_shift
    }

    /// Returns the size of a frame in bytes.
    #[must_use]
    pub fn frame_bytes(&self) -> u64 {
        1 << self.index.frame_shift
    }

    /// Returns the regions of guest memory.
    #[must_use]
    pub fn regions(&self) -> &[ImageRegion] {
        &self.index.regions
    }

    /// Returns the pages that a recorded run touched, in that order.
    #[must_use]
    pub fn working_set(&self) -> &[u64] {
        &self.index.working_set
    }

    /// Returns the image that has the frames which this one does not store.
    #[must_use]
    pub fn parent(&self) -> Option<&Image> {
        self.parent.as_deref()
    }

    /// Returns how many pages are zero.
    #[must_use]
    pub fn zero_pages(&self) -> u64 {
        self.index.zero.iter().map(|byte| u64::from(byte.count_ones())).sum()
    }

    /// Returns how the frames are stored.
    #[must_use]
    pub fn frame_counts(&self) -> FrameCounts {
        let mut counts = FrameCounts { frames: self.index.frames(), ..FrameCounts::default() };
        for frame in 0..counts.frames {
            match self.origin(frame) {
                Origin::Zero => counts.zero += 1,
                Origin::Stored(_) => counts.stored += 1,
                Origin::Parent => counts.parent += 1,
            }
        }
        counts
    }

    /// Returns where the pages are, in at most `most` parts of equal length, each of whole frames; the last
    /// may be shorter.
    #[must_use]
    pub fn page_counts(&self, most: usize) -> Vec<PageCounts> {
        let frames = self.index.frames();
        let each = frames.div_ceil(u64::try_from(most.max(1)).unwrap_or(u64::MAX)).max(1);
        let starts = (0..frames).step_by(usize::try_from(each).unwrap_or(usize::MAX));
        let mut parts: Vec<PageCounts> =
            starts.map(|start| self.page_counts_of(start..frames.min(start + each))).collect();
        let per_part = each << (self.index.frame_shift - self.index.page_shift);
        for page in &self.index.working_set {
            if let Some(part) =
                usize::try_from(page / per_part).ok().and_then(|at| parts.get_mut(at))
            {
                part.working_set += 1;
            }
        }
        parts
    }

    fn page_counts_of(&self, frames: Range<u64>) -> PageCounts {
        let mut counts = PageCounts::default();
        let mut last = None;
        for frame in frames {
            counts.len_bytes += self.index.frame_len(frame);
            for page in self.index.pages_of(frame) {
                let place = self.index.place_of(page);
                if bit(&self.index.zero, place) {
                    counts.zero += 1;
                    continue;
                }
                // The frame that the page is packed in, which is often that of the page before.
                let packed = place >> (self.index.frame_shift - self.index.page_shift);
                let origin = match last {
                    Some((known, origin)) if known == packed => origin,
                    _ => self.origin(packed),
                };
                last = Some((packed, origin));
                match origin {
                    Origin::Stored(_) => counts.stored += 1,
                    Origin::Parent => counts.parent += 1,
                    Origin::Zero => {}
                }
            }
        }
        counts
    }

    /// Returns whether every byte of a page is zero.
    pub(crate) fn is_zero_page(&self, page: u64) -> bool {
        bit(&self.index.zero, self.index.place_of(page))
    }

    /// Returns the number of a frame among those that are stored.
    fn stored_number(&self, frame: u64) -> Option<usize> {
        if !bit(&self.index.stored, frame) {
            return None;
        }
        let block = frame / RANK_FRAMES;
        let before = *self.ranks.get(usize::try_from(block).ok()?)?;
        let inside = (block * RANK_FRAMES..frame).filter(|at| bit(&self.index.stored, *at)).count();
        usize::try_from(before).ok()?.checked_add(inside)
    }

    pub(crate) fn origin(&self, frame: u64) -> Origin {
        if self.index.is_zero_frame(frame) {
            return Origin::Zero;
        }
        self.stored_number(frame).map_or(Origin::Parent, Origin::Stored)
    }

    fn stored(&self, number: usize) -> (u64, Record) {
        (self.offsets[number], self.index.records[number])
    }

    /// Returns where the bytes from `offset` on are, as far as they are in one place and before `end`.
    /// Both are inside the image.
    pub(crate) fn extent(&self, offset: u64, end: u64) -> Extent<'_> {
        let (mut image, mut end) = (self, end);
        loop {
            let (at, run_end) = image.index.packed_at(offset, end);
            let frame = at >> image.index.frame_shift;
            let first = frame << image.index.frame_shift;
            end = run_end.min(offset + (first + image.frame_bytes() - at));
            match (image.origin(frame), image.parent()) {
                (Origin::Stored(number), _) => {
                    let start = usize::try_from(at - first).unwrap_or(usize::MAX);
                    let stored = Some(StoredPart { owner: image, frame, number, start });
                    return Extent { end, stored };
                }
                // As long as this frame, which was checked when the parent was opened.
                (Origin::Parent, Some(parent)) => image = parent,
                (Origin::Zero | Origin::Parent, _) => return Extent { end, stored: None },
            }
        }
    }

    fn read_stored(&self, frame: u64, number: usize, out: &mut [u8]) -> Result<(), SnapshotError> {
        // Taken out meanwhile: a source may itself read an image in this thread.
        let mut scratch = SCRATCH.take();
        let result = self.read_stored_with(&mut scratch, frame, number, out);
        SCRATCH.set(scratch);
        result
    }

    /// Reads, verifies and decodes a frame if that takes no device. Returns whether it did.
    fn read_stored_ready(&self, number: usize, out: &mut [u8]) -> bool {
        let (offset, record) = self.stored(number);
        let mut scratch = SCRATCH.take();
        scratch.stored.resize(usize::try_from(record.len).unwrap_or(usize::MAX), 0);
        let is_read = (self.read_kept(offset, record, true, &mut scratch.stored)
            || (self.source.read_ready(offset, &mut scratch.stored).unwrap_or(false)
                && self.is_right(record, &mut scratch.stored)))
            && scratch.decode(self.index.codec, out).unwrap_or(false);
        SCRATCH.set(scratch);
        is_read
    }

    fn read_stored_with(
        &self,
        scratch: &mut Scratch,
        frame: u64,
        number: usize,
        out: &mut [u8],
    ) -> Result<(), SnapshotError> {
        let (offset, record) = self.stored(number);
        let mut is_again = false;
        loop {
            let why = if !self.read_verified(offset, record, is_again, &mut scratch.stored)? {
                "its bytes do not match their hash"
            } else if scratch.decode(self.index.codec, out)? {
                return Ok(());
            } else {
                "its bytes match their hash and cannot be decoded: the writer was faulty"
            };
            if is_again {
                let name = self.source.name();
                return Err(SnapshotError::BadFrame { name, frame, offset, why });
            }
            tracing::warn!(image = %self.source.name(), frame, why, "reading a frame again");
            is_again = true;
        }
    }

    /// Reads the stored bytes of a frame, the second time from where they are kept for good. Returns whether
    /// their hash matches.
    fn read_verified(
        &self,
        offset: u64,
        record: Record,
        is_again: bool,
        stored: &mut Vec<u8>,
    ) -> Result<bool, SnapshotError> {
        stored.resize(usize::try_from(record.len).unwrap_or(usize::MAX), 0);
        if !is_again && self.read_kept(offset, record, false, stored) {
            return Ok(true);
        }
        let read = if is_again {
            self.source.read_again(offset, stored)
        } else {
            self.source.read_at(offset, stored)
        };
        read.map_err(|cause| SnapshotError::Read {
            name: self.source.name(),
            offset,
            len_bytes: u64::from(record.len),
            cause,
        })?;
        let is_right = self.is_right(record, stored);
        if let Some(disk) = self.disk.as_ref().filter(|_| is_right) {
            disk.write(offset, stored);
        }
        Ok(is_right)
    }

    /// Returns whether stored bytes have their hash. Raw memory has none.
    fn is_right(&self, record: Record, stored: &mut Vec<u8>) -> bool {
        self.raw.is_some() || stored_hash(stored) == record.hash
    }

    /// Reads the stored bytes of a frame from the disk cache; if it is to be ready, without waiting for a
    /// device. Returns whether they are there and match their hash.
    fn read_kept(&self, offset: u64, record: Record, is_ready: bool, stored: &mut Vec<u8>) -> bool {
        let is_read = self.disk.as_ref().is_some_and(|disk| {
            if is_ready { disk.read_ready(offset, stored) } else { disk.read(offset, stored) }
        });
        is_read && stored_hash(stored) == record.hash
    }

    /// Reads bytes of the image, decoding what is not in the cache.
    ///
    /// # Errors
    /// [`SnapshotError`] if they are not all inside, or a frame cannot be had. Then `out` has no meaning.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), SnapshotError> {
        self.for_extents(offset, out, |stored, part| {
            let bytes = stored.get()?;
            part.copy_from_slice(&bytes[stored.start..stored.start + part.len()]);
            Ok(())
        })
    }

    /// Reads bytes of the image. A frame of which all bytes are asked for does not fill the cache; one that
    /// is asked for in parts does, so that it is decoded once.
    pub(crate) fn read_through(&self, offset: u64, out: &mut [u8]) -> Result<(), SnapshotError> {
        self.for_extents(offset, out, |stored, part| {
            if part.len() == stored.frame_len() {
                return stored.owner.read_stored(stored.frame, stored.number, part);
            }
            let bytes = stored.get()?;
            part.copy_from_slice(&bytes[stored.start..stored.start + part.len()]);
            Ok(())
        })
    }

    /// Has the stored frames of some ranges fetched that are not decoded yet, without waiting for them.
    pub(crate) fn will_need(&self, ranges: &[Range<u64>]) {
        let mut wanted = Vec::new();
        for range in ranges {
            let (mut at, end) = (range.start, range.end.min(self.byte_len()));
            while at < end {
                let extent = self.extent(at, end);
                wanted.extend(extent.stored.filter(|stored| stored.kept().is_none()));
                at = extent.end;
            }
        }
        wanted.sort_unstable_by_key(|stored| (stored.owner.root.0, stored.number));
        wanted.dedup_by_key(|stored| (stored.owner.root, stored.number));
        for of_one in wanted.chunk_by(|one, other| one.owner.root == other.owner.root) {
            let owner = of_one[0].owner;
            let frames = of_one.iter().map(StoredPart::in_file).collect();
            let frames = owner.disk.iter().fold(frames, |frames, disk| disk.will_need(frames));
            owner.source.will_need(&frames);
        }
    }

    /// Calls `read` for each part of `out` that is in one stored frame, and zeroes the others.
    fn for_extents(
        &self,
        offset: u64,
        out: &mut [u8],
        mut read: impl FnMut(&StoredPart<'_>, &mut [u8]) -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        let len_bytes = out.len() as u64;
        let image_len = self.index.image_len;
        let end = offset.checked_add(len_bytes).filter(|end| *end <= image_len);
        let end = end.ok_or(SnapshotError::Beyond { offset, len_bytes, image_len })?;
        let (mut at, mut rest) = (offset, out);
        while at < end {
            let extent = self.extent(at, end);
            let len = usize::try_from(extent.end - at).unwrap_or(usize::MAX);
            let (part, behind) = rest.split_at_mut(len);
            match extent.stored {
                Some(stored) => read(&stored, part)?,
                None => part.fill(0),
            }
            (at, rest) = (extent.end, behind);
        }
        Ok(())
    }

    /// Reads every stored frame of this image and checks its hash, with `threads` threads; with `decode`, it
    /// is decoded as well, and compared with the map of zero pages. `progress` is called now and then with
    /// how many bytes of the file were read. Returns how many frames were checked. The parents are images of
    /// their own.
    ///
    /// # Errors
    /// [`SnapshotError::BadFrame`] for the first bad frame in the order of the file, or another one if the
    /// file cannot be read or its seek table is not that of its frames.
    pub fn verify(
        &self,
        threads: usize,
        decode: bool,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<u64, SnapshotError> {
        self.check_tail()?;
        let frames: Vec<u64> =
            (0..self.index.frames()).filter(|frame| bit(&self.index.stored, *frame)).collect();
        // Frames that follow each other in the file are read together.
        let each = if decode { 1 } else { (READ_BYTES / self.frame_bytes()).clamp(1, 64) };
        let each = usize::try_from(each).unwrap_or(1);
        let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
        let failed = AtomicBool::new(false);
        let first: Mutex<Option<(usize, SnapshotError)>> = Mutex::default();
        let work = || {
            let mut room = Room::default();
            // Relaxed: the numbers alone are shared, and the scope ends with a join. Threads take frames in
            // order, so the frames before the first failure are all looked at.
            while !failed.load(Ordering::Relaxed) {
                let start = next.fetch_add(each, Ordering::Relaxed);
                let Some(taken) = frames.get(start..).filter(|rest| !rest.is_empty()) else {
                    break;
                };
                let taken = &taken[..each.min(taken.len())];
                let result = if decode {
                    self.check_decoded(start, taken[0], &mut room)
                } else {
                    self.check_hashes(start, taken, &mut room)
                };
                if let Err((number, error)) = result {
                    failed.store(true, Ordering::Relaxed);
                    let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
                    if first.as_ref().is_none_or(|(at, _)| number < *at) {
                        *first = Some((number, error));
                    }
                }
                let records = &self.index.records[start..start + taken.len()];
                let read: u64 = records.iter().map(|record| u64::from(record.len)).sum();
                progress(done.fetch_add(read, Ordering::Relaxed) + read);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.max(1) {
                scope.spawn(work);
            }
            work();
        });
        match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, error)) => Err(error),
            None => Ok(frames.len() as u64),
        }
    }

    /// Decodes a stored frame, and compares it with the map of zero pages.
    fn check_decoded(
        &self,
        number: usize,
        frame: u64,
        room: &mut Room,
    ) -> Result<(), (usize, SnapshotError)> {
        room.whole.resize(usize::try_from(self.index.frame_len(frame)).unwrap_or(0), 0);
        self.read_stored(frame, number, &mut room.whole)
            .and_then(|()| self.check_zero_pages(frame, self.offsets[number], &room.whole))
            .map_err(|error| (number, error))
    }

    /// Compares the hashes of stored frames that follow each other. One that does not match is read again,
    /// and so is each if they cannot be read together.
    fn check_hashes(
        &self,
        start: usize,
        frames: &[u64],
        room: &mut Room,
    ) -> Result<(), (usize, SnapshotError)> {
        let numbers = start..start + frames.len();
        let parts = self.offsets[numbers.clone()].iter().zip(&self.index.records[numbers]);
        let from = self.offsets[start];
        let end = parts.clone().next_back().map_or(from, |(at, record)| at + u64::from(record.len));
        // With a disk cache, each frame is read alone: some are there. In raw memory, those of zeroes are in
        // between.
        let is_read = self.disk.is_none() && end - from <= LONGEST_READ && {
            room.whole.resize(usize::try_from(end - from).unwrap_or(usize::MAX), 0);
            self.source.read_at(from, &mut room.whole).is_ok()
        };
        for ((at, record), (number, frame)) in parts.zip((start..).zip(frames)) {
            let inside = usize::try_from(at - from).unwrap_or(usize::MAX);
            let len = usize::try_from(record.len).unwrap_or(usize::MAX);
            room.stored.clear();
            if is_read {
                room.stored.extend_from_slice(&room.whole[inside..inside + len]);
            }
            if !is_read || stored_hash(&mut room.stored) != record.hash {
                self.check_hash(*frame, *at, *record, is_read, &mut room.stored)
                    .map_err(|error| (number, error))?;
            }
        }
        Ok(())
    }

    fn check_hash(
        &self,
        frame: u64,
        offset: u64,
        record: Record,
        is_again: bool,
        stored: &mut Vec<u8>,
    ) -> Result<(), SnapshotError> {
        if (!is_again && self.read_verified(offset, record, false, stored)?)
            || self.read_verified(offset, record, true, stored)?
        {
            return Ok(());
        }
        let why = "its bytes do not match their hash";
        Err(SnapshotError::BadFrame { name: self.source.name(), frame, offset, why })
    }

    /// Checks that the pages of a frame which the index has as zero are zero in its bytes.
    fn check_zero_pages(&self, frame: u64, offset: u64, raw: &[u8]) -> Result<(), SnapshotError> {
        let page_len = usize::try_from(self.page_bytes()).unwrap_or(usize::MAX);
        let places = self.index.pages_of(frame).zip(raw.chunks(page_len));
        let is_right = |(at, bytes): (u64, &[u8])| !bit(&self.index.zero, at) || is_zero(bytes);
        if places.into_iter().all(is_right) {
            return Ok(());
        }
        let why = "a page that the index has as zero is not: the writer was faulty";
        Err(SnapshotError::BadFrame { name: self.source.name(), frame, offset, why })
    }

    /// Checks that what follows the frames is what a writer makes of this index: the seek table, by which
    /// other programs find frames, is covered by no hash.
    fn check_tail(&self) -> Result<(), SnapshotError> {
        if self.is_raw() {
            let why = "raw memory has no hashes";
            return Err(SnapshotError::NotAnImage { name: self.source.name(), why });
        }
        let bad = |why| SnapshotError::BadIndex { name: self.source.name(), why };
        // What a newer minor version adds to the index is not known here, only where the seek table starts.
        let tail = if self.index.minor == format::MINOR {
            format::tail(&self.index).map(|(tail, _)| tail)
        } else {
            format::seek_table(&self.index)
        };
        let tail = tail.ok_or_else(|| bad("it is longer than a frame can be"))?;
        let mut found = vec![0; tail.len()];
        let source = self.hashes.as_ref().unwrap_or(&self.source);
        let end = source.byte_len();
        let start =
            end.checked_sub(tail.len() as u64).ok_or_else(|| bad("the file is too short"))?;
        source.read_at(start, &mut found).map_err(|cause| SnapshotError::Read {
            name: source.name(),
            offset: start,
            len_bytes: tail.len() as u64,
            cause,
        })?;
        if found == tail {
            Ok(())
        } else {
            Err(bad("the index and the seek table do not belong together"))
        }
    }
}

/// The bytes of an image as a source: of a packer that stores them against another parent, or in an order.
impl Source for Image {
    fn name(&self) -> String {
        self.source.name()
    }

    fn byte_len(&self) -> u64 {
        self.index.image_len
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.read_through(offset, out).map_err(|error| match error {
            SnapshotError::Read { cause, .. } => cause,
            other => io::Error::new(io::ErrorKind::InvalidData, other),
        })
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image")
            .field("name", &self.source.name())
            .field("root", &self.root)
            .field("byte_len", &self.index.image_len)
            .finish_non_exhaustive()
    }
}

/// Returns an index of the raw bytes of memory: each frame is stored as it is, and has no hash.
fn raw_index(len: u64) -> Index {
    let frames = len.div_ceil(1 << RAW_FRAME_SHIFT);
    let record = |frame: u64| {
        let left = len - (frame << RAW_FRAME_SHIFT);
        let len = u32::try_from(left.min(1 << RAW_FRAME_SHIFT)).unwrap_or(u32::MAX);
        Record { hash: [0; 16], len }
    };
    Index {
        minor: format::MINOR,
        codec: Codec::None,
        page_shift: RAW_PAGE_SHIFT,
        frame_shift: RAW_FRAME_SHIFT,
        image_len: len,
        data_len: len,
        regions: Vec::new(),
        parent: None,
        stored: vec![0xff; usize::try_from(frames.div_ceil(8)).unwrap_or(usize::MAX)],
        zero: Vec::new(),
        records: (0..frames).map(record).collect(),
        order: Order::default(),
        working_set: Vec::new(),
    }
}

/// Returns an error of the first read of a source.
fn unread(name: &impl ToString, cause: io::Error) -> SnapshotError {
    let (name, len_bytes) = (name.to_string(), FOOTER_LEN as u64);
    SnapshotError::Read { name, offset: 0, len_bytes, cause }
}

fn check_root(name: &str, expected: Option<Root>, found: Root) -> Result<(), SnapshotError> {
    match expected {
        Some(expected) if expected != found => {
            Err(SnapshotError::OtherRoot { name: name.to_owned(), expected, found })
        }
        _ => Ok(()),
    }
}

/// Finds and reads the index of a source, before which there are frames or nothing.
fn read_index(source: &dyn Source, has_frames: bool) -> Result<(Index, Root), SnapshotError> {
    let name = || source.name();
    let read = |offset, out: &mut [u8]| {
        source.read_at(offset, out).map_err(|cause| SnapshotError::Read {
            name: source.name(),
            offset,
            len_bytes: out.len() as u64,
            cause,
        })
    };
    let not = |why| SnapshotError::NotAnImage { name: name(), why };
    let file_len = source.byte_len();
    let footer_at =
        file_len.checked_sub(FOOTER_LEN as u64).ok_or_else(|| not("it is too short"))?;
    let mut footer = [0; FOOTER_LEN];
    read(footer_at, &mut footer)?;
    let trailer_at = format::trailer_at(file_len, &footer).map_err(not)?;
    let mut trailer = [0; format::TRAILER];
    read(trailer_at, &mut trailer)?;
    let place = format::index_place(trailer_at, &trailer).map_err(not)?;
    let bad = |why| SnapshotError::BadIndex { name: name(), why };
    let mut header = [0; 8];
    read(place.start, &mut header)?;
    if !format::is_index_header(&header, place.len) {
        return Err(bad("its frame and its trailer have different lengths"));
    }
    // Not longer than the file, as was checked.
    let mut bytes = vec![0; usize::try_from(place.len).unwrap_or(usize::MAX)];
    read(place.start + SKIPPABLE_LEN, &mut bytes)?;
    let (index, root) = Index::decode(&bytes).map_err(|flaw| match flaw {
        Flaw::Version(major) => SnapshotError::Version { name: name(), major },
        Flaw::Bad(why) => bad(why),
    })?;
    if place.start != if has_frames { index.data_len } else { 0 } {
        return Err(bad("it does not start where the frames end"));
    }
    let longest = codec::longest_stored(index.codec, 1 << index.frame_shift)
        .map_err(|cause| SnapshotError::Codec { codec: index.codec.name(), cause })?;
    if index.records.iter().any(|record| record.len as usize > longest) {
        return Err(bad("a stored frame is longer than its codec makes it"));
    }
    Ok((index, root))
}

/// What a thread that verifies keeps.
#[derive(Default)]
struct Room {
    /// Bytes of several stored frames, or of one that is decoded.
    whole: Vec<u8>,
    /// Those of one stored frame.
    stored: Vec<u8>,
}

/// What a thread keeps from one frame to the next.
#[derive(Default)]
struct Scratch {
    stored: Vec<u8>,
    decoder: Option<(Codec, Decoder)>,
}

impl Scratch {
    /// Decodes the stored bytes into `out`. Returns whether they are a frame of that length.
    fn decode(&mut self, codec: Codec, out: &mut [u8]) -> Result<bool, SnapshotError> {
        if self.decoder.as_ref().is_none_or(|(has, _)| *has != codec) {
            let failed = |cause: io::Error| SnapshotError::Codec { codec: codec.name(), cause };
            self.decoder = Some((codec, Decoder::new(codec).map_err(failed)?));
        }
        Ok(self.decoder.as_mut().is_some_and(|(_, decoder)| decoder.decode(&self.stored, out)))
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { stored: Vec::new(), decoder: None }) };
}

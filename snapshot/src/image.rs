//! A packed image that is open: [`Image`].
//!
//! Stored bytes are hashed before they are decoded, and the decoded bytes are checked by length and, for zstd, its
//! checksum. A frame that does not match is read once more, and is an error then: never zeroes, never
//! other bytes.
//!
//! Sharing: every method takes `&self`, from any thread.
//! Cost: 24 bytes of memory a stored frame, and two bits a page.

mod open;
mod verify;

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::iter;
use std::ops::Range;
use std::slice::from_ref;
use std::sync::Arc;

use crate::codec::Decoder;
use crate::disk_cache::{CachedImage, DiskCache};
use crate::error::SnapshotError;
use crate::file_source::{self, OpenFiles};
use crate::format::{Codec, ImageRegion, Index, Record, Root, bit, stored_hash};
use crate::frame_cache::{FrameCache, Ready};
use crate::frame_memory::Frame;
use crate::options::options;
use crate::source::{AHEAD, RequestOptions, Source, ahead_of};

pub(crate) use open::MAX_DEPTH;

/// The longest frame that is decoded by a thread that answers faults: others wait meanwhile, for 0.2 ms.
const LONGEST_READY: u64 = 256 << 10;
/// How much is read at once where nothing is decoded.
const READ_BYTES: u64 = 1 << 20;
/// How many frames of a map share a count of those before them.
const RANK_FRAMES: u64 = 512;

/// The suffix of the name of raw memory in the name of its hashes ([`Packer::hashes_only`]).
///
/// [`Packer::hashes_only`]: crate::Packer::hashes_only
pub const HASHES: &str = ".hashes";

/// A packed image, or the raw bytes of memory.
///
/// Opening reads the index and checks it. Frames are read when their bytes are needed, compared with their hashes, and
/// decoded; the [`FrameCache`] keeps the latest. Any number of threads read at once.
///
/// # Examples
///
/// ```
/// use uzone_snapshot::{Image, OpenOptions, Packer};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = std::env::temp_dir().join(format!("image-example-{}", std::process::id()));
/// # let memory: Vec<u8> = (0..1 << 20).map(|at| (at / 4096) as u8).collect();
/// # let packed = Packer::default().pack(&mut &*memory, &path, None, &|_| true)?;
/// # let expected = packed.root;
/// // With the root hash from a source that you trust, forgery is found, and without it damage alone.
/// let image = Image::open(&path, &OpenOptions::default().root(expected))?;
/// println!("{} bytes, of which {} pages are zero", image.byte_len(), image.zero_pages());
///
/// let mut page = [0; 4096];
/// image.read_at(5 * 4096, &mut page)?; // decodes the frame that has this page
/// assert_eq!(page, [5; 4096]);
/// # Ok(std::fs::remove_file(&path)?)
/// # }
/// ```
///
/// [`SnapshotBacking`](crate::SnapshotBacking) maps an image, so that a page is read when it is first touched.
pub struct Image {
    source: Box<dyn Source>,
    index: Index,
    root: Root,
    parent: Option<Box<Image>>,
    /// Where each stored frame starts in the file; raw memory has its frames where it has its bytes.
    offsets: Vec<u64>,
    /// How many frames before every [`RANK_FRAMES`]th are stored.
    ranks: Vec<u64>,
    cache: Arc<FrameCache>,
    /// Stored frames that were fetched already.
    disk: Option<CachedImage>,
    root_was_required: bool,
    kind: Kind,
}

/// The three kinds of an image.
enum Kind {
    /// Compressed frames with an index behind them.
    Packed,
    /// Raw memory, and the source that has its hashes.
    Hashed(Box<dyn Source>),
    /// Raw memory without hashes, and the identity of its source.
    Raw(String),
}

options! {
    /// The checks when an image is opened, and the caches that it may use.
    #[derive(Clone, Debug)]
    pub struct OpenOptions {
        /// Requires this root hash, which makes the bytes authentic: without it, hashes show damage and not
        /// forgery.
        root: Option<Root> [Root] = None,
        /// Keeps decoded frames in this cache. Images that share it decode a frame once: an image that is opened
        /// several times, and the children of one parent. Without one, an image and its parents have a cache of
        /// 16 MiB.
        cache: Option<Arc<FrameCache>> [Arc<FrameCache>] = None,
        /// Keeps the indexes and stored frames of the image and its parents on disk as well. [`Image::open`] does
        /// so for images in object storage alone.
        disk_cache: Option<Arc<DiskCache>> [Arc<DiskCache>] = None,
        /// Sets how an image in object storage and its parents are requested.
        requests: RequestOptions = RequestOptions::default(),
        /// Opens the image and its parents by files that are open already ([`Image::files`] of an image that was
        /// opened by the same path): they are the same, although the files may have been replaced since.
        files: OpenFiles [Vec<(String, File)>] = OpenFiles::default(),
    }
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
    pub(crate) fn kept(&self) -> Option<Frame> {
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
            let out = bytes.get_mut()?;
            owner.read_stored_ready(self.number, out).then_some(bytes)
        })
    }

    /// Gives the whole frame up if it is kept.
    pub(crate) fn forget(&self) {
        self.owner.cache.forget((self.owner.root, self.frame));
    }

    /// Waits for a frame that was [`Ready::Soon`].
    pub(crate) fn soon(&self) -> Option<Frame> {
        self.owner.cache.soon((self.owner.root, self.frame))
    }

    /// Returns where the stored bytes of the whole frame are in the file of its owner.
    fn in_file(&self) -> Range<u64> {
        let (offset, record) = self.owner.stored(self.number);
        offset..offset + u64::from(record.len)
    }

    /// Returns the bytes of the whole frame. It may block.
    pub(crate) fn get(&self) -> Result<Frame, SnapshotError> {
        let owner = self.owner;
        owner.cache.get_or_decode((owner.root, self.frame), || {
            let mut bytes = owner.cache.room(self.frame_len());
            // There is no other holder. An empty slice would be an error of the decoder.
            let out = bytes.get_mut().unwrap_or_default();
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

    /// Returns the names of the sources that the image is read from: its file, the hashes beside that, and the
    /// sources of its parents.
    #[must_use]
    pub fn sources(&self) -> Vec<String> {
        let own = self.own_sources().map(Source::name);
        own.chain(self.parent.iter().flat_map(|parent| parent.sources())).collect()
    }

    /// Returns the files that the image is read from, with their names: the [`Image::sources`] that are files.
    #[must_use]
    pub fn files(&self) -> Vec<(String, &File)> {
        let own = self.own_sources().filter_map(|source| Some((source.name(), source.file()?)));
        own.chain(self.parent.iter().flat_map(|parent| parent.files())).collect()
    }

    fn own_sources(&self) -> impl Iterator<Item = &dyn Source> {
        let hashes = if let Kind::Hashed(hashes) = &self.kind { Some(&**hashes) } else { None };
        iter::once(&*self.source).chain(hashes)
    }

    /// Returns the identity of raw memory without hashes.
    fn raw_identity(&self) -> Option<&String> {
        if let Kind::Raw(identity) = &self.kind { Some(identity) } else { None }
    }

    /// Returns whether raw memory without hashes is as it was when it was opened, by its length and the time of its last
    /// change. Other images show a change by their hashes.
    ///
    /// # Errors
    /// The error of the system.
    pub fn is_unchanged(&self) -> io::Result<bool> {
        match (self.raw_identity(), self.source.file()) {
            (Some(identity), Some(file)) => Ok(*identity == file_source::identity(file)?),
            _ => Ok(true),
        }
    }

    /// Returns whether it is the raw bytes of memory, without hashes.
    #[must_use]
    pub fn is_raw(&self) -> bool {
        self.raw_identity().is_some()
    }

    /// Returns the identity of the image: its root hash; of raw memory, the file's numbers and the time of its last
    /// change, or the URL and the version of the object.
    #[must_use]
    pub fn identity(&self) -> String {
        self.raw_identity().cloned().unwrap_or_else(|| self.root.to_string())
    }

    /// Returns the file of raw memory, whose bytes are those of the image.
    #[must_use]
    pub fn raw_file(&self) -> Option<&File> {
        self.raw_identity().and_then(|_| self.source.file())
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

    /// Returns the number of images below this one: its parent, the parent of that, and so on.
    pub(crate) fn parents(&self) -> usize {
        iter::successors(self.parent(), |image| image.parent()).count()
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
        if self.is_raw() {
            return usize::try_from(frame).ok();
        }
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
        if self.is_raw() {
            let frame = number as u64;
            let len = u32::try_from(self.index.frame_len(frame)).unwrap_or(u32::MAX);
            return (frame << self.index.frame_shift, Record { hash: [0; 16], len });
        }
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

    /// Returns the parts of stored frames that some bytes are in, as far as there are such bytes.
    pub(crate) fn stored_in(&self, range: &Range<u64>) -> impl Iterator<Item = StoredPart<'_>> {
        let (mut at, end) = (range.start, range.end.min(self.byte_len()));
        let extents = iter::from_fn(move || {
            let extent = (at < end).then(|| self.extent(at, end))?;
            at = extent.end;
            Some(extent)
        });
        extents.filter_map(|extent| extent.stored)
    }

    /// Returns where a byte is in the order in which the pages are packed.
    pub(crate) fn packed_at(&self, offset: u64) -> u64 {
        self.index.packed_at(offset, offset.saturating_add(1)).0
    }

    /// Returns whether its pages are packed in another order than that of their offsets.
    pub(crate) fn has_order(&self) -> bool {
        !self.index.order.is_empty()
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
        let mut is_read = self.read_kept(offset, record, true, &mut scratch.stored);
        // A frame that comes from the source is kept on disk, which may wait.
        if !is_read
            && self.disk.is_none()
            && self.source.read_ready(offset, &mut scratch.stored).unwrap_or(false)
        {
            self.cache.note_read(record.len.into());
            is_read = self.is_right(record, &mut scratch.stored);
        }
        let is_read = is_read && scratch.decode(self.index.codec, out).unwrap_or(false);
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
        read.map_err(SnapshotError::read(&*self.source, offset, stored.len()))?;
        self.cache.note_read(record.len.into());
        let is_right = self.is_right(record, stored);
        if let Some(disk) = self.disk.as_ref().filter(|_| is_right) {
            disk.write(offset, stored);
        }
        Ok(is_right)
    }

    /// Returns whether stored bytes have their hash. Raw memory has none.
    fn is_right(&self, record: Record, stored: &mut Vec<u8>) -> bool {
        self.is_raw() || stored_hash(stored) == record.hash
    }

    /// Reads the stored bytes of a frame from the disk cache; if it is to be ready, without waiting for a
    /// device. Returns whether they are there and match their hash.
    fn read_kept(&self, offset: u64, record: Record, is_ready: bool, stored: &mut Vec<u8>) -> bool {
        let is_read = self.disk.as_ref().is_some_and(|disk| {
            if is_ready { disk.read_ready(offset, stored) } else { disk.read(offset, stored) }
        });
        is_read && stored_hash(stored) == record.hash
    }

    /// Reads bytes of the image, and decodes frames that are not in the cache. An image in object storage is requested ahead
    /// within one call; a program that reads it in order by many calls announces the bytes ([`Source::will_need`]).
    ///
    /// # Errors
    /// [`SnapshotError`] if they are not all inside, or a frame cannot be had. Then `out` has no meaning.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), SnapshotError> {
        self.read(offset, out, true)
    }

    /// Reads bytes of the image. A frame of which all bytes are asked for does not fill the cache; one that
    /// is asked for in parts does, so that it is decoded once.
    pub(crate) fn read_through(&self, offset: u64, out: &mut [u8]) -> Result<(), SnapshotError> {
        self.read(offset, out, false)
    }

    fn read(&self, offset: u64, out: &mut [u8], fills: bool) -> Result<(), SnapshotError> {
        let len_bytes = out.len() as u64;
        let image_len = self.index.image_len;
        let end = offset.checked_add(len_bytes).filter(|end| *end <= image_len);
        let end = end.ok_or(SnapshotError::Beyond { offset, len_bytes, image_len })?;
        let (mut at, mut rest) = (offset, out);
        while at < end {
            let extent = self.extent(at, end);
            let len = usize::try_from(extent.end - at).unwrap_or(usize::MAX);
            let (part, behind) = rest.split_at_mut(len);
            if len_bytes > self.frame_bytes() {
                self.reads_in_order(&(at..extent.end), &(offset..end));
            }
            match extent.stored {
                Some(stored) if !fills && len == stored.frame_len() => {
                    stored.owner.read_stored(stored.frame, stored.number, part)?;
                }
                Some(stored) => {
                    let bytes = stored.get()?;
                    part.copy_from_slice(&bytes[stored.start..stored.start + len]);
                }
                None => part.fill(0),
            }
            (at, rest) = (extent.end, behind);
        }
        Ok(())
    }

    /// Has the stored frames of some ranges fetched that are not decoded yet, without waiting for them.
    pub(crate) fn will_need(&self, ranges: &[Range<u64>]) {
        let mut wanted = Vec::new();
        for range in ranges {
            wanted.extend(self.stored_in(range).filter(|stored| stored.kept().is_none()));
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

    /// Announces at most `len_bytes` bytes from `start` on to a source where each read is a request.
    pub(crate) fn announce(&self, start: u64, len_bytes: u64) {
        if self.source.file().is_none() {
            self.will_need(from_ref(&(start..start + len_bytes.min(AHEAD))));
        }
    }

    /// Announces bytes to a source where each read is a request: `part` of `whole` is read, in order.
    pub(crate) fn reads_in_order(&self, part: &Range<u64>, whole: &Range<u64>) {
        if self.source.file().is_none()
            && let Some(ahead) = ahead_of(part, whole)
        {
            self.will_need(&[ahead]);
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

    fn mode_for(&self, group: u32) -> u32 {
        let below = self.parent.as_ref().map_or(0o666, |parent| parent.mode_for(group));
        self.source.mode_for(group) & below
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.read_through(offset, out).map_err(|error| match error {
            SnapshotError::Read { cause, .. } => cause,
            other => io::Error::new(io::ErrorKind::InvalidData, other),
        })
    }

    fn will_need(&self, ranges: &[Range<u64>]) {
        Self::will_need(self, ranges);
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

/// Buffers of one thread, used again for each frame.
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

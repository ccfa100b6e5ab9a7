//! Writing an image: [`Packer`].
//!
//! One thread after the other reads the next frame of the input, compresses and hashes it, and puts it into a
//! buffer when its turn comes; one that has filled the buffer writes it, while the others fill the next. So
//! the input is read in order, frames are written in order, and at most two frames a thread and some MiB are
//! in memory. The file has no name until all of it is on the device.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::iter::Peekable;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use uzone_os::{lock, share_work};
use uzone_pages::ByteLen;

use crate::codec::Encoder;
use crate::error::SnapshotError;
use crate::format::{
    self, Codec, ImageRegion, Index, ParentLink, Record, Root, is_zero, set_bit, stored_hash,
};
#[cfg(doc)]
use crate::image::HASHES;
use crate::image::{Image, MAX_DEPTH};
use crate::options::options;
use crate::order::Order;
use crate::output::OutputFile;
use crate::source::{self, Address, OWNER_ALONE, Source, ahead_of};

options! {
    /// The settings of an image to write, and the calls that write it.
    ///
    /// Memory is read once and in order. The file has its name when all of it is on the device; a packer that
    /// fails or is cancelled leaves nothing behind.
    ///
    /// # Examples
    ///
    /// Packs a MiB, and a changed copy of it against the first image, of which only the changed frame is stored:
    ///
    /// ```
    /// use uzone_snapshot::{Image, OpenOptions, Packer};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = std::env::temp_dir().join(format!("packer-example-{}", std::process::id()));
    /// # std::fs::create_dir(&folder)?;
    /// let mut memory: Vec<u8> = (0..1 << 20).map(|at| (at / 4096) as u8).collect();
    /// let keep_going = |_done_bytes: u64| true; // progress; `false` cancels
    /// Packer::default().pack(&mut &*memory, &folder.join("base.uz"), None, &keep_going)?;
    ///
    /// memory[300_000] ^= 1;
    /// let base = Image::open(folder.join("base.uz"), &OpenOptions::default())?;
    /// Packer::default().pack(&mut &*memory, &folder.join("diff.uz"), Some(&base), &keep_going)?;
    ///
    /// let diff = Image::open(folder.join("diff.uz"), &OpenOptions::default())?;
    /// assert_eq!(diff.frame_counts().stored, 1);
    /// # Ok(std::fs::remove_dir_all(&folder)?)
    /// # }
    /// ```
    ///
    /// By default: zstd of level 3, pages of 4 KiB, frames of 64 KiB, a thread for each CPU.
    #[derive(Clone, Debug)]
    pub struct Packer {
        /// Sets how frames are stored.
        codec: Codec = Codec::Zstd,
        /// Sets the level of the codec.
        level: i32 = 3,
        /// Sets how many threads compress; zero counts as one.
        threads: usize = std::thread::available_parallelism().map_or(1, usize::from),
        /// Sets the size of a page, the unit of the map of zero pages: a power of two from 4 KiB to 2 MiB.
        page: ByteLen = ByteLen::kib(4),
        /// Sets the size of a frame, the unit of compression: a power of two from a page to 16 MiB.
        frame: ByteLen = ByteLen::kib(64),
        /// Sets the regions of guest memory. Without any, the image is one region at address 0.
        regions: Vec<ImageRegion> = Vec::new(),
        /// Sets the pages that a recorded run touched, in that order.
        working_set: Vec<u64> = Vec::new(),
        /// Sets the pages that are packed first, together and in that order: those that a run touches need fewer
        /// frames then. It takes a [`Packer::pack_source`], and goes with no parent. Pages that are not in the
        /// image, and a last page that is shorter than the others, are left out.
        order: Vec<u64> = Vec::new(),
        /// Writes no frames, only the index and the seek table of an image with [`Codec::None`], and with no parent and no
        /// order: the hashes of raw memory. [`Image::open`] finds them beside a file by the name of that with
        /// [`HASHES`] behind it.
        hashes_only: bool = false,
    }
}

/// An image that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Packed {
    /// The root hash.
    pub root: Root,
    /// How many bytes the image has.
    pub image_bytes: u64,
    /// How many bytes the file has.
    pub file_bytes: u64,
    /// How many pages are zero.
    pub zero_pages: u64,
    /// How many frames have stored bytes, including frames of zeroes that a stream of zstd needs.
    pub stored_frames: u64,
}

impl Packer {
    /// Writes the bytes of a source as an image, as [`Packer::pack`] does; the source may be another image,
    /// whose regions and working set it does not take by itself.
    ///
    /// # Errors
    /// As for [`Packer::pack`].
    pub fn pack_source(
        &self,
        source: &dyn Source,
        path: &Path,
        parent: Option<&Image>,
        progress: &(dyn Fn(u64) -> bool + Sync),
    ) -> Result<Packed, SnapshotError> {
        let mut index = self.empty_index()?;
        index.image_len = source.byte_len();
        let order = Order::new(&self.order, index.whole_pages());
        if parent.is_some() && !order.is_empty() {
            let why = "an image with an order has no parent: leave one of them out";
            return Err(SnapshotError::Options { why });
        }
        let pages = order.pages(index.pages()).peekable();
        let (listed, page) = (order.listed(), self.page.get());
        let mut bytes =
            InOrder { source, pages, listed, announced: 0, taken: 0, page, run: 0..0, data: 0..0 };
        let mode = |group| source.mode_for(group);
        let input =
            Feed { bytes: &mut bytes, len: Some(index.image_len), mode: &mode, order: &order };
        self.pack_in(input, path, parent, progress)
    }

    /// Writes the bytes of `input` as an image to `path`; a file that is there is replaced as a whole. The path
    /// may be that of a pipe or a device, `-` for standard output, or with the feature `object-storage` a URL: an
    /// object appears when it is whole. `progress` is called now and then with how many bytes of the input were
    /// written, and cancels by returning `false`.
    ///
    /// A new file is for its owner alone, because memory has keys in it. With [`Packer::pack_source`], it is for
    /// users who may read the file of the source, as far as the umask allows that.
    ///
    /// With a parent, frames whose bytes the parent has are not stored; the new image finds it by its path
    /// from the directory of `path`, or by its key in the same store.
    ///
    /// # Errors
    /// [`SnapshotError`]. Then a file or an object at `path` is as before.
    pub fn pack(
        &self,
        input: &mut (dyn Read + Send),
        path: &Path,
        parent: Option<&Image>,
        progress: &(dyn Fn(u64) -> bool + Sync),
    ) -> Result<Packed, SnapshotError> {
        if !self.order.is_empty() {
            let why = "an order needs an input that can be read at any place, such as a file";
            return Err(SnapshotError::Options { why });
        }
        let order = Order::default();
        let mut bytes = input;
        let input = Feed { bytes: &mut bytes, len: None, mode: &|_| OWNER_ALONE, order: &order };
        self.pack_in(input, path, parent, progress)
    }

    /// Writes the bytes of `input`, which are in this order already.
    fn pack_in(
        &self,
        input: Feed<'_>,
        path: &Path,
        parent: Option<&Image>,
        progress: &(dyn Fn(u64) -> bool + Sync),
    ) -> Result<Packed, SnapshotError> {
        let Feed { bytes, len, mode, order } = input;
        let mut index = Index { order: order.clone(), ..self.empty_index()? };
        if self.hashes_only && (index.codec != Codec::None || parent.is_some() || !order.is_empty())
        {
            let why = "hashes of raw memory have no codec, no parent and no order";
            return Err(SnapshotError::Options { why });
        }
        self.check_regions(len.unwrap_or(u64::MAX))?;
        let file = OutputFile::of_image(path, mode)?;
        if let Some(parent) = parent {
            if parent.parents() == MAX_DEPTH {
                let name = path.display().to_string();
                return Err(SnapshotError::TooDeep { name, max: MAX_DEPTH });
            }
            index.parent = Some(link_to(parent, path, &file)?);
        }
        let is_plain = index.is_plain();
        let threads = self.threads.max(1);
        let turns = Turns::new(bytes, &file, index, threads as u64 * 2);
        let work = || {
            let _stop = StopOnPanic(&turns);
            let mut worker = Worker {
                packer: self,
                parent,
                is_plain,
                raw: Vec::new(),
                other: Vec::new(),
                zeroes: None,
            };
            if let Err(error) = worker.run(&turns, progress) {
                turns.stop(error);
            }
        };
        share_work("uzone-pack", threads, |_| work());
        let input = turns.input.into_inner().unwrap_or_else(PoisonError::into_inner);
        let output = turns.output.into_inner().unwrap_or_else(PoisonError::into_inner);
        let packed = output.finish(input.done, self)?;
        file.finish()?;
        Ok(packed)
    }

    /// Checks the options, as far as they do not depend on the input.
    ///
    /// # Errors
    /// [`SnapshotError::Options`].
    pub fn check(&self) -> Result<(), SnapshotError> {
        self.empty_index().map(drop)
    }

    /// Checks that the regions can be those of an image of `len` bytes.
    fn check_regions(&self, len: u64) -> Result<(), SnapshotError> {
        match self.regions.iter().all(|region| region.is_inside(len)) {
            true => Ok(()),
            false => Err(SnapshotError::Options { why: "a region is not inside the input" }),
        }
    }

    /// Checks the options, and returns an index without frames.
    fn empty_index(&self) -> Result<Index, SnapshotError> {
        let options = |why| SnapshotError::Options { why };
        let shift = |len: ByteLen, most: u64| {
            let is_valid = len.get().is_power_of_two() && (4 << 10..=most).contains(&len.get());
            u8::try_from(len.get().trailing_zeros()).ok().filter(|_| is_valid)
        };
        let page_shift = shift(self.page, 2 << 20)
            .ok_or_else(|| options("a page is a power of two from 4K to 2M"))?;
        let frame_shift = shift(self.frame, 16 << 20)
            .filter(|frame| *frame >= page_shift)
            .ok_or_else(|| options("a frame is a power of two from the size of a page to 16M"))?;
        let levels = match self.codec {
            Codec::Zstd => zstd::compression_level_range(),
            Codec::Lz4 => 0..=12,
            Codec::None => i32::MIN..=i32::MAX,
        };
        if !levels.contains(&self.level) {
            return Err(options("the codec has no such level: zstd has up to 22, lz4 has 0 to 12"));
        }
        let working_set = self.working_set.clone();
        Ok(Index { working_set, ..Index::new(self.codec, page_shift, frame_shift) })
    }
}

/// The bytes that are packed, in their order.
trait Bytes: Read + Send {
    /// Passes over the next `most` bytes, or all that are left, if these are known to be zeroes without reading
    /// them. Returns how many they were, or 0.
    fn skip_zeroes(&mut self, most: u64) -> io::Result<u64> {
        let _ = most;
        Ok(0)
    }
}

/// Bytes of which nothing is known before they are read.
impl Bytes for &mut (dyn Read + Send + '_) {}

/// The input of an image.
struct Feed<'a> {
    bytes: &'a mut dyn Bytes,
    /// How many bytes it has, where that is known before they are read.
    len: Option<u64>,
    /// Returns the permissions that an image of a group has at most.
    mode: &'a dyn Fn(u32) -> u32,
    /// The order that the bytes are in.
    order: &'a Order,
}

/// How many listed pages are announced to a source at once, and at most how many bytes: the bytes between them
/// come along, so that two of these fit into the memory of a source.
const ANNOUNCED_PAGES: u64 = 128;
const ANNOUNCED_BYTES: u64 = 2 << 20;

/// The pages of a source in an order, as bytes.
struct InOrder<'a, I: Iterator<Item = u64>> {
    source: &'a dyn Source,
    pages: Peekable<I>,
    listed: &'a [u64],
    /// How many of the listed pages were announced to the source, and how many pages were taken.
    announced: usize,
    taken: usize,
    page: u64,
    /// Bytes of the source that come next.
    run: Range<u64>,
    /// The data of the source that was found last: there is none between the bytes that were taken and it.
    data: Range<u64>,
}

impl<I: Iterator<Item = u64>> InOrder<'_, I> {
    /// Announces the pages that follow, a part ahead of the one that is read: alone, each would wait for a
    /// device or a network.
    fn announce(&mut self) {
        let (source, page) = (self.source, self.page);
        let part = ANNOUNCED_PAGES.min(ANNOUNCED_BYTES / page).max(1);
        let part = usize::try_from(part).unwrap_or(1);
        while self.announced < self.listed.len() && self.announced < self.taken + part + 1 {
            let end = self.listed.len().min(self.announced + part);
            let mut pages = self.listed[self.announced..end].to_vec();
            pages.sort_unstable();
            let len = source.byte_len();
            let ranges = pages.iter().map(|at| at * page..len.min((at + 1) * page));
            source.will_need(&ranges.collect::<Vec<_>>());
            self.announced = end;
        }
    }
}

impl<I: Iterator<Item = u64>> Read for InOrder<'_, I> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.run.is_empty() {
            self.announce();
            let Some(page) = self.pages.next() else { return Ok(0) };
            self.taken += 1;
            let start = page * self.page;
            self.run = start..self.source.byte_len().min(start + self.page);
        }
        // Pages that follow each other are read together.
        while self.run.end - self.run.start < out.len() as u64
            && self.run.end.is_multiple_of(self.page)
            && let Some(page) = self.pages.next_if_eq(&(self.run.end / self.page))
        {
            self.taken += 1;
            self.run.end = self.source.byte_len().min((page + 1) * self.page);
        }
        let len =
            usize::try_from(self.run.end - self.run.start).unwrap_or(usize::MAX).min(out.len());
        let source = self.source;
        let part = self.run.start..self.run.start + len as u64;
        if self.taken > self.listed.len()
            && source.file().is_none()
            && let Some(mut ahead) = ahead_of(&part, &(0..source.byte_len()))
        {
            if !self.listed.is_empty() {
                // Pages before this one may have been listed, and have announced nothing.
                ahead.start = part.start;
            }
            source.will_need(&[ahead]);
        }
        source.read_at(part.start, &mut out[..len])?;
        self.run.start += len as u64;
        Ok(len)
    }
}

impl<I: Iterator<Item = u64> + Send> Bytes for InOrder<'_, I> {
    fn skip_zeroes(&mut self, most: u64) -> io::Result<u64> {
        // The bytes of a listed page may be anywhere.
        if !self.listed.is_empty() || !self.run.is_empty() {
            return Ok(0);
        }
        let at = self.taken as u64 * self.page;
        let most = most.min(self.source.byte_len().saturating_sub(at));
        if at >= self.data.end && most > 0 {
            self.data = self.source.data_at(at)?;
        }
        if self.data.start < at + most {
            return Ok(0);
        }
        for _ in 0..most.div_ceil(self.page) {
            self.taken += usize::from(self.pages.next().is_some());
        }
        Ok(most)
    }
}

/// Returns how the image that is written to `path` names its parent.
fn link_to(parent: &Image, path: &Path, file: &OutputFile) -> Result<ParentLink, SnapshotError> {
    let parent_name = parent.name();
    let name = match (source::address(path), source::address(Path::new(&parent_name))) {
        (Address::File, Address::File) => return link_to_file(parent, file),
        #[cfg(feature = "object-storage")]
        (Address::Url { url, .. }, Address::Url { url: other, .. }) => {
            crate::object::relative(url, other)
        }
        _ => None,
    };
    let why =
        "an image and its parent are both files, or objects of one store: copy the parent there";
    Ok(ParentLink { root: parent.root(), name: name.ok_or(SnapshotError::Options { why })? })
}

/// Returns the way from the directory of an image to its parent. Of a stream, no one knows which directory it will
/// be in: it names its parent from the root on.
fn link_to_file(parent: &Image, file: &OutputFile) -> Result<ParentLink, SnapshotError> {
    let absolute =
        |path: &Path, step| fs::canonicalize(path).map_err(SnapshotError::write(path, step));
    let other = absolute(Path::new(&parent.name()), "find the parent")?;
    let own = file.directory().map(|own| absolute(own, "find the directory"));
    let name = match own.transpose()? {
        None => other,
        // From the common part up and down again.
        Some(own) => {
            let both = own.components().zip(other.components());
            let common = both.take_while(|(a, b)| a == b).count();
            let up = own.components().skip(common).map(|_| Component::ParentDir);
            up.chain(other.components().skip(common)).collect::<PathBuf>()
        }
    };
    match name.to_str() {
        Some(name) => Ok(ParentLink { root: parent.root(), name: name.to_owned() }),
        None => {
            Err(SnapshotError::Options { why: "the path of the parent is not UTF-8: rename it" })
        }
    }
}

/// The state that the threads share.
struct Turns<'a> {
    input: Mutex<Input<'a>>,
    // Never waits for `input` while it is held.
    output: Mutex<Output<'a>>,
    /// Frames were collected, or it is over.
    moved: Condvar,
    /// A thread has written its buffer, or it is over.
    written: Condvar,
    /// How many frames may be between the oldest that is not written and the newest that was read.
    window: u64,
}

struct Input<'a> {
    from: &'a mut dyn Bytes,
    next: u64,
    done: u64,
    is_over: bool,
}

struct Output<'a> {
    file: &'a OutputFile,
    /// Frames whose turn has not come.
    waiting: BTreeMap<u64, Frame>,
    next: u64,
    /// The bytes to write next, in the order of the file.
    buffer: Vec<u8>,
    /// Whether a thread writes the bytes before it.
    is_writing: bool,
    /// An empty buffer, for when that one is written.
    spare: Vec<u8>,
    index: Index,
    stop: Option<SnapshotError>,
}

/// A frame that is ready to be written.
struct Frame {
    /// The bytes to store, and their hash; `None` if nothing is.
    stored: Option<(Vec<u8>, [u8; 16])>,
    /// A bit for each page: whether it is zero.
    zero: Vec<bool>,
    raw_len: u64,
}

impl<'a> Turns<'a> {
    fn new(from: &'a mut dyn Bytes, file: &'a OutputFile, index: Index, window: u64) -> Self {
        let output = Output {
            file,
            waiting: BTreeMap::new(),
            next: 0,
            buffer: Vec::new(),
            is_writing: false,
            spare: Vec::new(),
            index,
            stop: None,
        };
        Self {
            input: Mutex::new(Input { from, next: 0, done: 0, is_over: false }),
            output: Mutex::new(output),
            moved: Condvar::new(),
            written: Condvar::new(),
            window,
        }
    }

    fn stop(&self, error: SnapshotError) {
        lock(&self.output).stop.get_or_insert(error);
        self.moved.notify_all();
        self.written.notify_all();
    }

    /// Writes the collected bytes if there are enough. The others collect meanwhile, as much again.
    fn write_full(&self, mut output: MutexGuard<'_, Output<'_>>) -> Result<(), SnapshotError> {
        while output.is_writing && output.buffer.len() >= WRITE_BYTES && output.stop.is_none() {
            output = self.written.wait(output).unwrap_or_else(PoisonError::into_inner);
        }
        if output.is_writing || output.buffer.len() < WRITE_BYTES {
            return Ok(());
        }
        output.is_writing = true;
        let spare = std::mem::take(&mut output.spare);
        let mut full = std::mem::replace(&mut output.buffer, spare);
        let file = output.file;
        drop(output);
        let written = file.append(&full);
        full.clear();
        let mut output = lock(&self.output);
        (output.is_writing, output.spare) = (false, full);
        drop(output);
        self.written.notify_all();
        written
    }

    /// Waits until frame `number` is within the window. Returns whether to go on.
    fn wait(&self, number: u64) -> bool {
        let mut output = lock(&self.output);
        while output.stop.is_none() && number >= output.next + self.window {
            output = self.moved.wait(output).unwrap_or_else(PoisonError::into_inner);
        }
        output.stop.is_none()
    }
}

/// Ends the other threads if this one panics: they would wait for its frame.
struct StopOnPanic<'a, 'b>(&'a Turns<'b>);

impl Drop for StopOnPanic<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop(SnapshotError::Cancelled);
        }
    }
}

/// One thread, with its buffers.
struct Worker<'a> {
    packer: &'a Packer,
    parent: Option<&'a Image>,
    is_plain: bool,
    raw: Vec<u8>,
    other: Vec<u8>,
    /// A frame of zeroes as it is stored, how long it is raw, and its hash.
    zeroes: Option<(u64, Vec<u8>, [u8; 16])>,
}

/// A frame that was read.
struct ReadFrame {
    number: u64,
    /// How long it is if it is all zeroes and no byte of it was read; otherwise 0.
    zeroes: u64,
}

impl Worker<'_> {
    fn run(
        &mut self,
        turns: &Turns<'_>,
        progress: &(dyn Fn(u64) -> bool + Sync),
    ) -> Result<(), SnapshotError> {
        let mut encoder = Encoder::new(self.packer.codec, self.packer.level)?;
        while let Some(ReadFrame { number, zeroes }) = self.read_next(turns)? {
            let frame = match zeroes {
                0 => self.encode(number, &mut encoder)?,
                len => self.encode_zeroes(len, &mut encoder)?,
            };
            let mut output = lock(&turns.output);
            if output.stop.is_some() {
                return Ok(());
            }
            output.waiting.insert(number, frame);
            let done = output.collect_ready(!self.packer.hashes_only);
            turns.write_full(output)?;
            if let Some(frames) = done {
                turns.moved.notify_all();
                if !progress(frames * self.packer.frame.get()) {
                    return Err(SnapshotError::Cancelled);
                }
            }
        }
        Ok(())
    }

    /// Reads the next frame of the input, or passes over it. Returns `None` behind the last.
    fn read_next(&mut self, turns: &Turns<'_>) -> Result<Option<ReadFrame>, SnapshotError> {
        let mut input = lock(&turns.input);
        let number = input.next;
        // While this thread waits, the others write: they need the output alone.
        if input.is_over || !turns.wait(number) {
            return Ok(None);
        }
        let skipped = input.from.skip_zeroes(self.packer.frame.get());
        let zeroes = skipped.map_err(|cause| {
            input.is_over = true;
            SnapshotError::Input { done: input.done, cause }
        })?;
        if zeroes > 0 {
            input.next += 1;
            input.done += zeroes;
            return Ok(Some(ReadFrame { number, zeroes }));
        }
        let len = usize::try_from(self.packer.frame.get()).unwrap_or(usize::MAX);
        self.raw.resize(len, 0);
        let mut filled = 0;
        while filled < len {
            match input.from.read(&mut self.raw[filled..]) {
                Ok(0) => {
                    input.is_over = true;
                    break;
                }
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => {
                    input.is_over = true;
                    return Err(SnapshotError::Input { done: input.done + filled as u64, cause });
                }
            }
        }
        self.raw.truncate(filled);
        input.next += 1;
        input.done += filled as u64;
        Ok((filled > 0).then_some(ReadFrame { number, zeroes }))
    }

    /// Makes a frame of `len` zeroes, which is encoded once for all of that length.
    fn encode_zeroes(&mut self, len: u64, encoder: &mut Encoder) -> Result<Frame, SnapshotError> {
        let pages = usize::try_from(len.div_ceil(self.packer.page.get())).unwrap_or(usize::MAX);
        let mut frame = Frame { stored: None, zero: vec![true; pages], raw_len: len };
        if !self.is_plain {
            return Ok(frame);
        }
        if self.zeroes.as_ref().is_none_or(|(known, ..)| *known != len) {
            let (raw, mut stored) =
                (vec![0; usize::try_from(len).unwrap_or(usize::MAX)], Vec::new());
            encoder.encode(&raw, &mut stored)?;
            let hash = stored_hash(&mut stored);
            stored.shrink_to_fit();
            self.zeroes = Some((len, stored, hash));
        }
        frame.stored = self.zeroes.as_ref().map(|(_, stored, hash)| (stored.clone(), *hash));
        Ok(frame)
    }

    fn encode(&mut self, number: u64, encoder: &mut Encoder) -> Result<Frame, SnapshotError> {
        let page = usize::try_from(self.packer.page.get()).unwrap_or(usize::MAX);
        let zero: Vec<bool> = self.raw.chunks(page).map(is_zero).collect();
        let raw_len = self.raw.len() as u64;
        let nothing_to_store =
            !self.is_plain && (zero.iter().all(|zero| *zero) || self.parent_has(number)?);
        let stored = if nothing_to_store {
            None
        } else {
            let mut stored = Vec::new();
            encoder.encode(&self.raw, &mut stored)?;
            let hash = stored_hash(&mut stored);
            Some((stored, hash))
        };
        Ok(Frame { stored, zero, raw_len })
    }

    /// Returns whether the parent has the same bytes at the same place.
    fn parent_has(&mut self, number: u64) -> Result<bool, SnapshotError> {
        let Some(parent) = self.parent else { return Ok(false) };
        let offset = number * self.packer.frame.get();
        if offset + self.raw.len() as u64 > parent.byte_len() {
            return Ok(false);
        }
        self.other.resize(self.raw.len(), 0);
        parent.read_through(offset, &mut self.other)?;
        Ok(self.other == self.raw)
    }
}

/// How much is collected before it is written.
const WRITE_BYTES: usize = 1 << 20;

impl Output<'_> {
    /// Puts the frames whose turn it is where they are written from, if they are. Returns how many are behind
    /// that if any was.
    fn collect_ready(&mut self, are_written: bool) -> Option<u64> {
        let (first, around) = (self.next, self.index.before_frame());
        while let Some(frame) = self.waiting.remove(&self.next) {
            let index = &mut self.index;
            let first_page = self.next << (index.frame_shift - index.page_shift);
            for (page, _) in (first_page..).zip(&frame.zero).filter(|(_, zero)| **zero) {
                set_bit(&mut index.zero, page);
            }
            index.image_len += frame.raw_len;
            if let Some((stored, hash)) = frame.stored {
                let len = u32::try_from(stored.len()).unwrap_or(u32::MAX); // a frame has at most 16 MiB
                set_bit(&mut index.stored, self.next);
                index.records.push(Record { hash, len });
                index.data_len += around + u64::from(len);
                if around > 0 && are_written {
                    self.buffer.extend(format::stored_header(len));
                }
                if are_written {
                    self.buffer.extend(stored);
                }
            }
            self.next += 1;
        }
        (self.next > first).then_some(self.next)
    }

    /// Writes the index and the seek table.
    fn finish(mut self, read: u64, packer: &Packer) -> Result<Packed, SnapshotError> {
        let regions = &packer.regions;
        if let Some(error) = self.stop.take() {
            return Err(error);
        }
        let index = &mut self.index;
        debug_assert_eq!(index.image_len, read);
        index.stored.resize(usize::try_from(index.frames().div_ceil(8)).unwrap_or(usize::MAX), 0);
        index.zero.resize(usize::try_from(index.pages().div_ceil(8)).unwrap_or(usize::MAX), 0);
        let all = ImageRegion {
            guest_addr: 0,
            offset: 0,
            len_bytes: read,
            page_bytes: 1 << index.page_shift,
        };
        index.regions = if regions.is_empty() { vec![all] } else { regions.clone() };
        packer.check_regions(read)?;
        let pages = index.pages();
        index.working_set.retain(|page| *page < pages);
        let (tail, root) = format::tail(index).ok_or(SnapshotError::Options {
            why: "the image has too many frames: take larger ones",
        })?;
        let data_len = if packer.hashes_only { 0 } else { index.data_len };
        let packed = Packed {
            root,
            image_bytes: read,
            file_bytes: data_len + tail.len() as u64,
            zero_pages: index.zero.iter().map(|byte| u64::from(byte.count_ones())).sum(),
            stored_frames: index.records.len() as u64,
        };
        self.buffer.extend(tail);
        self.file.append(&self.buffer)?;
        Ok(packed)
    }
}

//! The measured image and its packed forms: [`Material`].
//!
//! The image looks like the memory of a VM that runs programs: runs of pages of the files in
//! `/usr/bin` and `/usr/lib` (131 pages on average, in an order that is the same in every run on one host),
//! and between them runs of zero pages (56 on average), which are about 30 % of it. The end of a file is
//! padded to a page.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use uzone_pages::ByteLen;
use uzone_snapshot::{Codec, FileSource, FrameCache, Image, OpenOptions, Packed, Packer};

use super::frames::{self, Reader, Stored};
pub(crate) use super::frames::{FRAME, LEVEL};
use crate::settings::SnapshotSettings;
use uzone_harness::{BenchError, Phase, Result, Watch, index, place};

pub(crate) const PAGE: usize = 4096;

/// The longest runs of pages of a file, and of zero pages.
const LONGEST_RUN: usize = 261;
const LONGEST_ZEROES: usize = 111;

/// The length of another image, whose decoded frames fill the frame cache: longer than the cache.
const OTHER: usize = 48 << 20;

/// The folders of the files that the image is made of.
const DIRECTORIES: [&str; 2] = ["/usr/bin", "/usr/lib"];

/// The image and its packed forms.
pub(crate) struct Material {
    pub(crate) directory: PathBuf,
    pub(crate) len: usize,
    pub(crate) threads: usize,
    /// The bytes of the image.
    pub(crate) raw: File,
    /// Independent frames of it, and their places.
    pub(crate) frames: (File, Vec<Stored>),
    pub(crate) frames_len: u64,
    /// The packed image.
    pub(crate) packed: File,
    pub(crate) packed_len: u64,
    /// Another image, in lz4, of the first [`OTHER`] bytes.
    other: File,
    /// Whether all bytes of each frame are zero.
    pub(crate) is_zero: Vec<bool>,
    /// A word of each page, to check touches.
    pub(crate) words: Vec<u64>,
    zero_pages: usize,
}

impl Material {
    /// Makes the files, and compares the packed image with the bytes once.
    pub(crate) fn new(settings: &SnapshotSettings, watch: Watch<'_>) -> Result<Self> {
        let (size, directory, threads) =
            (settings.size, &settings.directory, settings.threads.get());
        if size.get() < 4 << 20 || !size.get().is_multiple_of(2 << 20) {
            return Err(BenchError::image_size(size));
        }
        let begin = |done| {
            let step = "making an image of programs";
            watch(Phase { step, done, total: 4, part: None });
        };
        begin(0);
        let no_file = |cause| BenchError::no_file(size, directory, cause);
        let new_file = || tempfile::tempfile_in(directory).map_err(no_file);
        let len = usize::try_from(size.get()).map_err(|_| BenchError::image_size(size))?;
        let raw = new_file()?;
        let mut writer =
            Writer { to: &raw, at: 0, words: Vec::new(), is_zero: Vec::new(), zero_pages: 0 };
        writer.fill(len).map_err(no_file)?;
        let Writer { words, is_zero, zero_pages, .. } = writer;
        begin(1);
        let plain = new_file()?;
        let (stored, frames_len) = frames::pack(&raw, &plain, len / FRAME, threads)?;
        begin(2);
        let mut material = Self {
            directory: directory.to_owned(),
            len,
            threads,
            packed: new_file()?,
            packed_len: 0,
            other: new_file()?,
            raw,
            frames: (plain, stored),
            frames_len,
            is_zero,
            words,
            zero_pages,
        };
        let (packed, result) = material.pack(Codec::Zstd)?;
        (material.packed, material.packed_len) = (packed, result.file_bytes);
        (material.other, _) = material.pack_first(len.min(OTHER), Codec::Lz4)?;
        begin(3);
        material.check()?;
        begin(4);
        Ok(material)
    }

    /// Returns the mean length of a frame in the packed image.
    pub(crate) fn mean_frame(&self) -> u64 {
        self.packed_len / self.is_zero.len().max(1) as u64
    }

    pub(crate) fn zero_percent(&self) -> usize {
        self.zero_pages * 100 / self.words.len().max(1)
    }

    /// Returns the ratio of the image's length to `len`, for the name of a row.
    pub(crate) fn smaller(&self, len: u64) -> String {
        let hundredths = self.len as u64 * 100 / len.max(1);
        format!("{}.{:02} times smaller", hundredths / 100, hundredths % 100)
    }

    pub(crate) fn new_file(&self) -> Result<File> {
        Ok(tempfile::tempfile_in(&self.directory)?)
    }

    /// Returns the bytes of the image, from the first on.
    pub(crate) fn input(&self) -> impl Read + Send + '_ {
        Input { file: &self.raw, at: 0 }
    }

    /// Packs the image into a file without a name.
    pub(crate) fn pack(&self, codec: Codec) -> Result<(File, Packed)> {
        self.pack_first(self.len, codec)
    }

    /// Packs the image with these pages before all others, in that order.
    pub(crate) fn pack_ordered(&self, pages: Vec<u64>) -> Result<File> {
        let raw = self.raw.try_clone()?;
        let source = FileSource::from_file(raw, "the image")?;
        let packer = self.packer(Codec::Zstd).order(pages);
        let write = |path: &Path| Ok(packer.pack_source(&source, path, None, &|_| true)?);
        self.written(write).map(|(file, _)| file)
    }

    fn packer(&self, codec: Codec) -> Packer {
        let packer = Packer::default().codec(codec).threads(self.threads);
        packer.level(if codec == Codec::Zstd { LEVEL } else { 0 })
    }

    /// Packs the first `len` bytes of the image.
    fn pack_first(&self, len: usize, codec: Codec) -> Result<(File, Packed)> {
        let packer = self.packer(codec);
        self.written(|path| {
            Ok(packer.pack(&mut self.input().take(len as u64), path, None, &|_| true)?)
        })
    }

    /// Calls `write` with a path, opens the file, and removes the path.
    fn written(&self, write: impl FnOnce(&Path) -> Result<Packed>) -> Result<(File, Packed)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed); // a name, and nothing else
        let name = format!("uzone-bench-{}-{number}.image", std::process::id());
        let path = self.directory.join(name);
        let packed = write(&path)?;
        let file = File::open(&path);
        std::fs::remove_file(&path)?;
        Ok((file?, packed))
    }

    /// Opens the packed image with a frame cache of `room`.
    pub(crate) fn open(&self, room: ByteLen) -> Result<Image> {
        open(&self.packed, FrameCache::new(room.get()))
    }

    /// Opens the packed image with a frame cache that is full of another image's frames, as in a process that has run
    /// for some time.
    pub(crate) fn open_later(&self, room: ByteLen) -> Result<Image> {
        let cache = FrameCache::new(room.get());
        let other = open(&self.other, cache.clone())?;
        let mut byte = [0];
        for at in (0..other.byte_len()).step_by(FRAME) {
            other.read_at(at, &mut byte)?;
        }
        open(&self.packed, cache)
    }

    /// Compares every byte of the packed image.
    fn check(&self) -> Result {
        let image = self.open(ByteLen::ZERO)?;
        let (mut right, mut found) = (vec![0; 16 * FRAME], vec![0; 16 * FRAME]);
        let mut at = 0;
        while at < self.len {
            let part = (self.len - at).min(right.len());
            self.raw.read_exact_at(&mut right[..part], at as u64)?;
            image.read_at(at as u64, &mut found[..part])?;
            if let Some(wrong) = (0..part).find(|byte| right[*byte] != found[*byte]) {
                return Err(BenchError::wrong_byte("snapshot-pack/ours", (at + wrong) as u64));
            }
            at += part;
        }
        Ok(())
    }

    /// Returns the command `zstd`, which reads and writes files without a name, or `None` if there is none.
    pub(crate) fn zstd(&self, arguments: &[String]) -> Option<Command> {
        let mut ask = Command::new("zstd");
        ask.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        ask.status().ok().filter(std::process::ExitStatus::success)?;
        let mut command = Command::new("zstd");
        command.args(["-q", "-c"]).args(arguments);
        Some(command)
    }
}

pub(crate) fn open(file: &File, cache: Arc<FrameCache>) -> Result<Image> {
    let file = file.try_clone()?;
    let source = FileSource::from_file(file, "the packed image")?;
    Ok(Image::from_source(Box::new(source), &OpenOptions::default().cache(cache))?)
}

/// A file that is read from its start, independently of other readers.
struct Input<'a> {
    file: &'a File,
    at: u64,
}

impl Read for Input<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = self.file.read_at(out, self.at)?;
        self.at += len as u64;
        Ok(len)
    }
}

/// Writes the image, and records a word of each page and the zero frames.
struct Writer<'a> {
    to: &'a File,
    at: usize,
    words: Vec<u64>,
    is_zero: Vec<bool>,
    zero_pages: usize,
}

impl Writer<'_> {
    fn fill(&mut self, len: usize) -> io::Result<()> {
        let mut random = fastrand::Rng::with_seed(0x736e_6170);
        let mut files = programs();
        random.shuffle(&mut files);
        let mut run = vec![0; LONGEST_RUN * PAGE];
        let mut left = random.usize(1..=LONGEST_RUN);
        while self.at < len {
            let before = self.at;
            for path in &files {
                // Files that cannot be opened are left out.
                let Ok(mut file) = File::open(path) else { continue };
                while self.at < len {
                    let filled = read_up_to(&mut file, &mut run[..left * PAGE]);
                    if filled == 0 {
                        break;
                    }
                    let end = filled.next_multiple_of(PAGE);
                    run[filled..end].fill(0);
                    self.put(&run[..end.min(len - self.at)])?;
                    left -= end / PAGE;
                    if left == 0 {
                        let zeroes = random.usize(1..=LONGEST_ZEROES) * PAGE;
                        run[..zeroes].fill(0);
                        self.put(&run[..zeroes.min(len - self.at)])?;
                        left = random.usize(1..=LONGEST_RUN);
                    }
                }
            }
            if self.at == before {
                let text = format!("{DIRECTORIES:?} have no file that can be read");
                return Err(io::Error::new(io::ErrorKind::NotFound, text));
            }
        }
        self.to.sync_all()
    }

    fn put(&mut self, pages: &[u8]) -> io::Result<()> {
        for page in pages.chunks_exact(PAGE) {
            let number = self.words.len();
            let inside = index(place(number as u64)) - number * PAGE;
            let word = page[inside..].first_chunk().copied().unwrap_or_default();
            self.words.push(u64::from_ne_bytes(word));
            let is_zero = page.iter().all(|byte| *byte == 0);
            self.zero_pages += usize::from(is_zero);
            match self.is_zero.get_mut(number * PAGE / FRAME) {
                Some(frame) => *frame &= is_zero,
                None => self.is_zero.push(is_zero),
            }
        }
        self.at += pages.len();
        self.to.write_all(pages)
    }
}

/// Reads until `out` is full, the file ends, or a read fails. Returns the number of bytes.
fn read_up_to(file: &mut File, out: &mut [u8]) -> usize {
    let mut filled = 0;
    while let Some(count) = file.read(&mut out[filled..]).ok().filter(|count| *count > 0) {
        filled += count;
    }
    filled
}

/// Returns the regular files of a page at least in [`DIRECTORIES`], sorted.
fn programs() -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut open: Vec<PathBuf> = DIRECTORIES.map(PathBuf::from).to_vec();
    while let Some(directory) = open.pop() {
        let Ok(entries) = std::fs::read_dir(directory) else { continue };
        for entry in entries.flatten() {
            // Of the entry itself: links are left out.
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => open.push(entry.path()),
                Ok(metadata) if metadata.is_file() && metadata.len() >= PAGE as u64 => {
                    files.push(entry.path());
                }
                _ => {}
            }
        }
    }
    files.sort();
    files
}

/// Returns the frames that are not all zero, in an order that is the same in every run.
pub(crate) fn random_frames(material: &Material, most: usize) -> Vec<usize> {
    let stored = |frame: &usize| !material.is_zero[*frame];
    let mut frames: Vec<usize> = (0..material.is_zero.len()).filter(stored).collect();
    fastrand::Rng::with_seed(11).shuffle(&mut frames);
    frames.truncate(most);
    frames
}

/// Decodes a frame and does nothing else.
pub(crate) fn decode<'r>(
    material: &Material,
    reader: &'r mut Reader,
    frame: usize,
) -> io::Result<&'r [u8]> {
    reader.read(&material.frames.0, material.frames.1[frame])
}

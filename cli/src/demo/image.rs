//! The image: a file made of what is found on any Linux, that has no name and is gone with the process.
//!
//! It repeats bytes of programs and libraries, and each page starts with its number, so that no two
//! pages are equal and one in a wrong place is noticed. Hashes are taken of what is written, not of what
//! is read back.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use uzone_os::file_system;
use uzone_pages::{ByteLen, PageSize};

use super::steps::units;
use crate::exit::{Exit, Failure};
use crate::output::Output;
use crate::progress::Progress;

/// As much is hashed at once, so that a difference has a place.
pub(super) const CHUNK: u64 = 4 << 20;

/// Where bytes are taken from: this program first, then what lies here, in this order.
const PLACES: [&str; 5] = ["/usr/bin", "/usr/lib", "/usr/share", "/bin", "/etc"];
/// As many bytes are collected; an image that is longer repeats them.
const MOST_SOURCE: usize = 64 << 20;
/// No file gives more, so that there are many.
const MOST_OF_ONE: u64 = 1 << 20;
/// Directories below directories are looked into so deep.
const DEEPEST: u32 = 4;

/// What the image was made of, and the hash of all of it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ImageFacts {
    pub(super) source_files: u64,
    pub(super) source_bytes: u64,
    pub(super) hash: String,
}

/// A file without a name, and what is known about its bytes.
pub(super) struct Image {
    pub(super) file: File,
    pub(super) facts: ImageFacts,
    /// The hashes of its chunks, in order.
    chunks: Vec<String>,
}

impl Image {
    /// Returns whether the chunk at `offset` has that hash.
    fn has(&self, offset: u64, hash: &str) -> bool {
        usize::try_from(offset / CHUNK)
            .ok()
            .and_then(|chunk| self.chunks.get(chunk))
            .is_some_and(|right| right == hash)
    }

    /// Reads the first `len` bytes chunk by chunk. Returns where the first one starts that is not the image's.
    pub(super) fn first_difference(
        &self,
        len: ByteLen,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), Failure>,
    ) -> Result<Option<u64>, Failure> {
        let mut bytes = vec![0; ByteLen::new(CHUNK).to_usize()?];
        let mut first = None;
        for offset in (0..len.get()).step_by(bytes.len()) {
            let left = ByteLen::new((len.get() - offset).min(CHUNK)).to_usize()?;
            let chunk = &mut bytes[..left];
            read(offset, chunk)?;
            if !self.has(offset, &blake3::hash(chunk).to_hex()) {
                first.get_or_insert(offset);
            }
        }
        Ok(first)
    }

    /// Returns how many chunks it has.
    pub(super) fn chunks(&self) -> usize {
        self.chunks.len()
    }
}

/// Fills a file without a name, which was made before, with `len` bytes.
pub(super) fn make(
    mut file: File,
    directory: &Path,
    len: ByteLen,
    page: PageSize,
    out: &Output,
) -> Result<Image, Failure> {
    let (source, source_files) = collect(wanted(len));
    let source_bytes = source.len() as u64;
    let progress = Progress::new(out, "making the image", units(len.get()));
    let mut whole = blake3::Hasher::new();
    let mut chunks = Vec::new();
    let mut chunk = Vec::new();
    let mut pages = Pages { source: &source, at: 0, number: 0, page };
    let mut offset = 0;
    while offset < len.get() {
        let bytes = (len.get() - offset).min(CHUNK);
        pages.fill(&mut chunk, bytes);
        file.write_all(&chunk).map_err(|cause| {
            let text = format!(
                "cannot write the image of {len} in {}: free space there, ask for less with --size, or name \
                 another directory with --dir",
                directory.display()
            );
            Failure::of(text, cause).with(Exit::Io)
        })?;
        whole.update(&chunk);
        chunks.push(blake3::hash(&chunk).to_hex().to_string());
        offset += bytes;
        progress.set(units(offset));
    }
    let hash = whole.finalize().to_hex().to_string();
    Ok(Image { file, facts: ImageFacts { source_files, source_bytes, hash }, chunks })
}

/// Makes the empty file.
pub(super) fn create(directory: &Path) -> Result<File, Failure> {
    file_system::nameless_file(directory).map_err(|cause| no_file(directory, cause))
}

/// Returns that no file can be made.
pub(super) fn no_file(directory: &Path, cause: io::Error) -> Failure {
    let directory = directory.display();
    Failure::of(
        format!("cannot make a file in {directory}: name another directory with --dir"),
        cause,
    )
}

/// Returns that the image cannot be read again.
pub(super) fn unread(cause: io::Error) -> Failure {
    Failure::of(format!("cannot read the image again: {cause}"), cause)
}

fn wanted(len: ByteLen) -> usize {
    usize::try_from(len.get()).map_or(MOST_SOURCE, |len| len.min(MOST_SOURCE))
}

/// Pages made of source bytes, one after the other.
struct Pages<'a> {
    source: &'a [u8],
    /// Where in the source the next page starts.
    at: usize,
    number: u64,
    page: PageSize,
}

impl Pages<'_> {
    /// Makes the next `bytes`, which are whole pages.
    fn fill(&mut self, out: &mut Vec<u8>, bytes: u64) {
        out.clear();
        for _ in 0..bytes >> self.page.shift() {
            out.extend_from_slice(&self.number.to_le_bytes());
            let mut left = usize::try_from(self.page.bytes()).unwrap_or(0) - 8;
            while left > 0 {
                let part = &self.source[self.at..];
                let part = &part[..part.len().min(left)];
                out.extend_from_slice(part);
                left -= part.len();
                self.at = (self.at + part.len()) % self.source.len();
            }
            self.number += 1;
        }
    }
}

/// Returns up to `most` bytes of files on this host, and how many files gave some.
fn collect(most: usize) -> (Vec<u8>, u64) {
    let mut source = Vec::new();
    let mut files = 0;
    let mut take = |path: &Path| {
        // A file that may not be read, or is gone by now, gives nothing.
        let before = source.len();
        let room = (most - before) as u64;
        if let Ok(file) = File::open(path) {
            let _ = file.take(MOST_OF_ONE.min(room)).read_to_end(&mut source);
        }
        files += u64::from(source.len() > before);
        source.len() < most
    };
    let mut wants_more = take(Path::new("/proc/self/exe"));
    for place in PLACES {
        wants_more = wants_more && walk(Path::new(place), DEEPEST, &mut take).is_continue();
    }
    if source.is_empty() {
        // Nothing could be read, which no Linux is known for: numbers will do.
        source.extend((0..1024_u32).flat_map(|number| number.wrapping_mul(40_503).to_le_bytes()));
    }
    (source, files)
}

/// Shows the regular files below a directory, by name, until `take` has enough.
fn walk(
    directory: &Path,
    depth: u32,
    take: &mut impl FnMut(&Path) -> bool,
) -> std::ops::ControlFlow<()> {
    use std::ops::ControlFlow::{Break, Continue};
    let Ok(entries) = fs::read_dir(directory) else { return Continue(()) };
    let kind = |entry: fs::DirEntry| -> io::Result<(PathBuf, fs::FileType)> {
        Ok((entry.path(), entry.file_type()?))
    };
    let mut entries: Vec<_> = entries.filter_map(|entry| entry.and_then(kind).ok()).collect();
    entries.sort_by(|(one, _), (other, _)| one.cmp(other));
    for (path, kind) in entries {
        // Links lead to what is elsewhere already, and other kinds may never end.
        if kind.is_file() && !take(&path) {
            return Break(());
        }
        if kind.is_dir() && depth > 1 {
            walk(&path, depth - 1, take)?;
        }
    }
    Continue(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::output::Flags;

    #[test]
    fn no_two_pages_of_an_image_are_equal_and_its_hashes_are_those_of_its_bytes() {
        let directory = std::env::temp_dir();
        let len = ByteLen::mib(6);
        let out = Output::new(Flags::default());
        let file = create(&directory).unwrap();
        let image = make(file, &directory, len, PageSize::KIB_4, &out).unwrap();
        let mut bytes = vec![0; len.to_usize().unwrap()];
        image.file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(image.file.metadata().unwrap().len(), len.get());
        let pages: HashSet<&[u8]> = bytes.chunks(4096).collect();
        assert_eq!(pages.len(), bytes.len() / 4096);
        for (number, page) in bytes.chunks(4096).enumerate() {
            assert_eq!(page[..8], (number as u64).to_le_bytes());
        }
        assert_eq!(image.facts.hash, blake3::hash(&bytes).to_hex().as_str());
        assert_eq!(image.chunks(), 2);
        let hash = |range| blake3::hash(&bytes[range]).to_hex().to_string();
        assert!(image.has(0, &hash(0..4 << 20)) && image.has(CHUNK, &hash(4 << 20..6 << 20)));
        // The right bytes in the wrong place, and what is no chunk.
        assert!(!image.has(CHUNK, &hash(0..4 << 20)) && !image.has(2 * CHUNK, &image.facts.hash));
        assert!(image.facts.source_files > 0 && image.facts.source_bytes > 0);
    }

    #[test]
    fn a_source_that_is_shorter_than_a_page_is_repeated() {
        let mut pages = Pages { source: b"abc", at: 0, number: 7, page: PageSize::KIB_4 };
        let mut out = Vec::new();
        pages.fill(&mut out, 8192);
        assert_eq!(out.len(), 8192);
        assert_eq!(&out[..13], b"\x07\0\0\0\0\0\0\0abcab");
        // 4088 bytes end inside of the source, and the next page goes on there.
        assert_eq!(&out[4096..4109], b"\x08\0\0\0\0\0\0\0cabca");
    }
}

//! The search of ripgrep (`grep-searcher`) through a tree of sources in one image.
//!
//! The files are generated, so that every run has the same: 512 bytes to 128 KiB, each size class as frequent
//! as the others, and each file starts at a page, as in an image of a file system. One file in three is of
//! the language that is searched. They are visited in an order that looks random, as a walk of a tree does
//! whose directories are hashed.

use std::fmt::Write;
use std::io::{self, Read};
use std::path::Path;

use grep_regex::RegexMatcher;
use grep_searcher::{Searcher, Sink, SinkMatch};
use uzone_pages::ByteLen;

use super::super::source::{PAGE, Source};
use super::{Answers, Memory, Program};
use crate::harness::{BenchError, Reads, Result};

pub(super) const TABLE: &str = "fault-program-grep";

const PATTERN: &str = r"\b(lock|read)_[0-9a-f]+7\(.*\.unwrap\(\)";
/// The smallest file, and how many times its size doubles at most.
const SMALLEST: usize = 512;
const DOUBLINGS: u32 = 8;
/// One file in so many is searched.
const SEARCHED: usize = 3;

const WORDS: [&str; 8] = ["lock", "read", "page", "window", "fault", "write", "zone", "folio"];

/// Where a file is in the image.
#[derive(Clone, Copy)]
struct Place {
    offset: u64,
    len: usize,
}

/// Makes an image of `size`.
pub(super) fn program(directory: &Path, size: ByteLen) -> Result<Program<'static>> {
    let (bytes, mut places) = image(usize::try_from(size.get()).unwrap_or(usize::MAX));
    fastrand::Rng::with_seed(0x77_61_6c_6b).shuffle(&mut places);
    let files = places.len();
    let matcher = RegexMatcher::new(PATTERN)?;
    let expected = search(|searcher, lines| {
        for place in &places {
            let start = usize::try_from(place.offset).unwrap_or(usize::MAX);
            searcher.search_slice(&matcher, &bytes[start..start + place.len], &mut *lines)?;
        }
        Ok(())
    })?;
    let file = Source::of(directory, &bytes)?;
    let title = format!("ripgrep, a search of {files} files of an image of {:.1}", file.len);
    let ask = Box::new(move |memory: Memory| {
        search(|searcher, lines| {
            for Place { offset, len } in &places {
                let from = MemoryReader { memory: &*memory, next: *offset, left: *len };
                searcher.search_reader(&matcher, from, &mut *lines)?;
            }
            Ok(())
        })
    });
    Ok(Program { table: TABLE, title, file, expected, ask })
}

/// Returns the bytes of the image, and where the files are that are searched.
fn image(size: usize) -> (Vec<u8>, Vec<Place>) {
    let mut random = fastrand::Rng::with_seed(0x67_72_65_70);
    let page = usize::try_from(PAGE).unwrap_or(SMALLEST);
    let mut text = String::with_capacity(size);
    let mut places = Vec::new();
    for number in 0.. {
        let offset = text.len();
        let most = SMALLEST << random.u32(0..DOUBLINGS);
        write_file(&mut text, random.usize(most / 2..=most), &mut random);
        let len = text.len() - offset;
        let end = text.len().next_multiple_of(page);
        if end > size {
            text.truncate(offset);
            break;
        }
        text.extend(std::iter::repeat_n('\0', end - text.len()));
        if number % SEARCHED == 0 {
            places.push(Place { offset: offset as u64, len });
        }
    }
    (text.into_bytes(), places)
}

/// Adds lines of at least `len` bytes.
fn write_file(text: &mut String, len: usize, random: &mut fastrand::Rng) {
    let end = text.len() + len;
    while text.len() < end {
        let mut word = || WORDS[random.usize(..WORDS.len())];
        let (kind, call) = (word(), word());
        let (value, indent) = (random.u16(..), random.usize(1..5) * 4);
        let tail = if random.bool() { "?" } else { ".unwrap()" };
        let line = format!("let {kind} = self.{call}_{value:x}({kind}, {value}){tail};");
        // Writing to a string does not fail.
        let _ = writeln!(text, "{:indent$}{line}", "");
    }
}

/// Returns what `all` finds.
fn search(all: impl FnOnce(&mut Searcher, &mut Lines) -> io::Result<()>) -> Result<Answers> {
    let mut lines = Lines::default();
    let failed = |cause| BenchError::failed("search the sources", false, cause);
    all(&mut Searcher::new(), &mut lines).map_err(failed)?;
    Ok(vec![(PATTERN, format!("{} lines, {}", lines.count, lines.hash.finalize()))])
}

/// The lines that were found, and a hash of them and of their numbers.
#[derive(Default)]
struct Lines {
    count: u64,
    hash: blake3::Hasher,
}

impl Sink for Lines {
    type Error = io::Error;

    fn matched(&mut self, _: &Searcher, line: &SinkMatch<'_>) -> io::Result<bool> {
        self.count += 1;
        self.hash.update(&line.line_number().unwrap_or_default().to_le_bytes());
        self.hash.update(line.bytes());
        Ok(true)
    }
}

/// A file in memory, as a stream.
struct MemoryReader<'a> {
    memory: &'a dyn Reads,
    next: u64,
    left: usize,
}

impl Read for MemoryReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = out.len().min(self.left);
        self.memory.read(self.next, &mut out[..len]).map_err(io::Error::other)?;
        self.next += len as u64;
        self.left -= len;
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_start_at_pages_and_every_run_has_the_same() {
        let (bytes, places) = image(1 << 20);
        assert!(bytes.len() <= 1 << 20 && bytes.len() > 1 << 19);
        assert_eq!(bytes.len() as u64 % PAGE, 0);
        assert!(places.len() > 5);
        for Place { offset, len } in &places {
            let start = usize::try_from(*offset).expect("it is small");
            let file = &bytes[start..start + len];
            assert!(*offset % PAGE == 0 && file.ends_with(b";\n") && !file.contains(&0));
        }
        assert!(bytes == image(1 << 20).0);
    }
}

//! A program that knows nothing of us reads lazily mapped memory by plain loads, and finds as much as in an ordinary
//! mapping: ripgrep's search.
//!
//! `UZONE_FAULT_TEST_MIB` sets how much ripgrep searches (256 if it is not set; it is meant for 1024 and more).
//!
//! Unsafe: foreign code wants a slice, and lazily mapped memory lends none: its bytes may go bad. In
//! these tests the backing does not fail and no thread writes, so that a slice is sound.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

#[path = "../../fault/tests/common/mod.rs"]
mod common;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::{engine, map, options, page, scattered, unnamed_file};
use grep_regex::RegexMatcher;
use grep_searcher::sinks::UTF8;
use grep_searcher::{MmapChoice, Searcher, SearcherBuilder};
use uzone_fault::{FileBacking, LazyMapping};
use uzone_os::page_cache;
use uzone_pages::Advice;

fn size() -> u64 {
    let mib = std::env::var("UZONE_FAULT_TEST_MIB").ok().and_then(|mib| mib.parse().ok());
    mib.unwrap_or(256_u64) << 20
}

/// Lends what is mapped to code that wants a slice.
///
/// # Safety
/// The slice may not be used after the memory was dropped or written to, and the backing may not fail.
unsafe fn lend(memory: &LazyMapping, len: usize) -> &'static [u8] {
    assert!(len as u64 <= memory.len().get());
    let start = std::ptr::with_exposed_provenance::<u8>(memory.addr().get());
    // SAFETY: `from_raw_parts` wants `len` bytes that can be read and stay as they are.
    // 1. They are of the mapping, by the assertion above; what is missing is produced when it is read.
    // 2. They stay, and the mapping stays, by what the caller has promised. A page that is evicted
    //    comes back with the same bytes before any load of it ends.
    unsafe { std::slice::from_raw_parts(start, len) }
}

/// Lines of text, one in about 4000 of which has what is searched for.
fn text(len: u64) -> File {
    let mut out = BufWriter::with_capacity(1 << 20, unnamed_file());
    let mut written = 0;
    let mut numbers = scattered(11, 1 << 40);
    for line in 0.. {
        let number = numbers.next().unwrap();
        let word = if number % 4001 == 7 { "needle" } else { "hay" };
        let text =
            format!("{line:010} {number:012x} {word}-{} and more of the same\n", number % 97);
        if written + text.len() as u64 > len {
            break;
        }
        out.write_all(text.as_bytes()).unwrap();
        written += text.len() as u64;
    }
    let file = out.into_inner().unwrap();
    file.sync_all().unwrap();
    file
}

fn searcher() -> Searcher {
    SearcherBuilder::new().line_number(true).memory_map(MmapChoice::never()).build()
}

type Found = Vec<(u64, String)>;

fn search(bytes: &[u8]) -> Found {
    let matcher = RegexMatcher::new(r"[0-9a-f]+ needle-(1|3|5)[0-9] and").unwrap();
    let mut found = Found::new();
    let sink = UTF8(|line, text| {
        found.push((line, text.to_owned()));
        Ok(true)
    });
    searcher().search_slice(&matcher, bytes, sink).unwrap();
    found
}

/// What ripgrep finds in the file by itself.
fn search_plainly(file: &File) -> Found {
    let matcher = RegexMatcher::new(r"[0-9a-f]+ needle-(1|3|5)[0-9] and").unwrap();
    let mut found = Found::new();
    let sink = UTF8(|line, text| {
        found.push((line, text.to_owned()));
        Ok(true)
    });
    std::io::Seek::rewind(&mut &*file).unwrap();
    searcher().search_file(&matcher, file, sink).unwrap();
    found
}

/// Reads a file until the page cache has all of it: some of what was read before may be gone.
fn warm(file: &File, bytes: u64) {
    let whole = NonZeroU64::new(bytes).unwrap();
    let is_cached = || {
        let pages = page_cache::cached(file, 0, whole).unwrap();
        pages.is_none_or(|pages| pages >= bytes.div_ceil(page()))
    };
    for _ in 0..8 {
        std::io::Seek::rewind(&mut &*file).unwrap();
        std::io::copy(&mut &*file, &mut std::io::sink()).unwrap();
        if is_cached() {
            return;
        }
    }
    panic!("the page cache does not keep {bytes} bytes");
}

#[test]
fn ripgrep_finds_the_same_lines_in_lazily_mapped_memory() {
    let name = "ripgrep_finds_the_same_lines";
    let file = text(size());
    let bytes = file.metadata().unwrap().len();
    let len = bytes.next_multiple_of(page());
    let expected = search_plainly(&file);
    assert!(expected.len() as u64 > size() / (1 << 20), "{} lines", expected.len());
    let engine = engine();
    let length = usize::try_from(bytes).unwrap();
    for is_cold in [false, true] {
        if is_cold {
            let whole = NonZeroU64::new(bytes).unwrap();
            page_cache::forget(&file, 0, whole).unwrap();
        } else {
            warm(&file, bytes);
        }
        let backing = FileBacking::new(file.try_clone().unwrap()).unwrap();
        let Some(memory) = map(name, &engine, len, backing, &options(Advice::Auto, 16)) else {
            return;
        };
        // SAFETY: the memory lives until the end of this round, no thread writes to it, and the file
        // stays as it is, so that its backing does not fail.
        let slice = unsafe { lend(&memory, length) };
        let found = search(slice);
        assert!(found == expected, "{} lines, not {}", found.len(), expected.len());
        let stats = memory.stats();
        assert_eq!(stats.poisoned, 0, "{stats:?}");
        // It reads in order, and windows grow.
        assert!(is_cold || stats.faults < len / page() / 50, "{stats:?}");
        // The host may have taken a page out of its cache meanwhile.
        assert!(is_cold || stats.queued <= stats.faults / 50, "{stats:?}");
        // Once more while pages are given back under it, by two at once.
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                for at in scattered(3, len / page()) {
                    let end = (at + 1 + at % 500).min(len / page());
                    memory.evict(at * page()..end * page()).unwrap();
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
            let both: Vec<_> = (0..2).map(|_| scope.spawn(|| search(slice))).collect();
            for found in both {
                assert!(found.join().unwrap() == expected);
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(memory.stats().evicted > 0);
    }
}

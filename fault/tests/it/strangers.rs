//! What programs of strangers do: options at their limits, errors and panics that
//! panic again, backings that read other lazily mapped memory, threads that are kept to other CPUs,
//! regions at any address. Each gets the right bytes or a named error, and nothing hangs.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::common::{
    anonymous, bytes_of, check_all, check_page, engine, fill_wanted, function, map, options, page,
    region_at, registered, remote, skip, try_page, userfaultfd, wait_for, word,
};
use uzone_fault::{
    Backing, BackingError, Engine, EngineOptions, FunctionBacking, LazyOptions, MapError,
    MemoryBacking, Window,
};
use uzone_os::uffd::{Features, KernelFaults};
use uzone_os::{Mapping, Sharing, sigbus};
use uzone_pages::{Advice, ByteLen, Content};

#[test]
fn a_deadline_that_is_longer_than_the_clock_goes_is_none() {
    for deadline in [Duration::MAX, Duration::from_secs(u64::MAX / 2)] {
        let options = LazyOptions::default().deadline(deadline);
        let name = "a_deadline_that_is_longer_than_the_clock_goes_is_none";
        let slow = crate::common::slow();
        let Some(memory) = map(name, &engine(), 16 * page(), slow, &options) else { return };
        check_all(&memory);
        assert!(!memory.stats().has_failed);
    }
}

#[test]
fn options_that_no_host_can_have_are_refused_by_name() {
    let engine = engine();
    let options = LazyOptions::default().trace(usize::MAX);
    let error = engine.map(ByteLen::new(page()), Arc::new(function()), &options).unwrap_err();
    assert!(matches!(error, MapError::TooMany { option: "LazyOptions::trace", .. }), "{error}");
    for options in [
        EngineOptions::default().producers(NonZeroUsize::MAX),
        EngineOptions::default().readers(NonZeroUsize::MAX),
    ] {
        let error = Engine::with(options).unwrap_err();
        assert!(error.to_string().contains("at most 1024"), "{error}");
    }
}

/// An error that panics when it is printed, and again when it is dropped.
#[derive(Debug)]
struct Hostile;

impl fmt::Display for Hostile {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::panic::resume_unwind(Box::new(Bomb))
    }
}

impl std::error::Error for Hostile {}

impl Drop for Hostile {
    fn drop(&mut self) {
        if !thread::panicking() {
            std::panic::resume_unwind(Box::new(Bomb));
        }
    }
}

/// What a panic has with it, which panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        if !thread::panicking() {
            std::panic::resume_unwind(Box::new("a bomb"));
        }
    }
}

struct Spiteful;

impl Backing for Spiteful {
    fn map_pages(&self, window: &mut Window<'_>) {
        if window.range().start / page() % 4 == 3 {
            std::panic::resume_unwind(Box::new(Bomb));
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        match window.range().start / page() % 4 {
            0 => Err(BackingError::Other(Box::new(Hostile))),
            1 => std::panic::resume_unwind(Box::new(Bomb)),
            _ => fill_wanted(window),
        }
    }

    fn read_ahead(&self, _: std::ops::Range<u64>) {
        std::panic::resume_unwind(Box::new(Bomb));
    }
}

#[test]
fn errors_and_panics_that_panic_again_make_pages_bad_and_end_no_thread() {
    let name = "errors_and_panics_that_panic_again";
    if !sigbus::recovers_copies() || sigbus::install().is_err() {
        return skip(name, "a copy out of a bad page ends the process here");
    }
    let engine = engine();
    for advice in [Advice::Sequential, Advice::Random] {
        let Some(memory) = map(name, &engine, 64 * page(), Spiteful, &options(advice, 4)) else {
            return;
        };
        for at in 0..64 {
            let is_bad = try_page(&memory, at * page()).is_err();
            assert_eq!(is_bad, at % 4 < 2, "page {at}");
        }
        wait_for("the last failure", || memory.last_failure().is_some());
        assert!(memory.last_failure().unwrap().reason.contains("panicked"));
    }
}

#[test]
fn a_backing_that_waits_for_other_memory_of_its_engine_is_refused_and_of_another_engine_not() {
    let name = "a_backing_that_waits_for_other_memory_of_its_engine";
    sigbus::install().unwrap();
    let own = options(Advice::Random, 1);
    let threads = || Engine::with(EngineOptions::default().own_threads()).unwrap();
    let (engine, another) = (threads(), threads());
    for (below_of, is_refused) in [(&engine, true), (&another, false)] {
        let below = map(name, below_of, 4 * page(), crate::common::slow(), &own);
        let Some(below) = below.map(Arc::new) else { return };
        let read = below.clone();
        let layered = FunctionBacking::slow(move |offset, out: &mut [u8]| {
            read.read_at(offset, out).map_err(|error| BackingError::Other(Box::new(error)))
        });
        let top = map(name, &engine, 4 * page(), layered, &own).unwrap();
        assert_eq!(try_page(&top, page()).is_err(), is_refused);
        let failure = below.last_failure().map_or(String::new(), |failure| failure.reason);
        assert_eq!(failure.contains("an engine with threads of its own"), is_refused, "{failure}");
    }
}

#[test]
fn a_small_mapping_and_a_memory_file_are_placed_so_that_windows_fit_page_tables() {
    let name = "a_small_mapping_and_a_memory_file_are_placed";
    let engine = engine();
    let table = page() / 8 * page();
    for pages in [2, 3, 16, 100, 511, 512, 700] {
        let len = pages * page();
        for _ in 0..4 {
            let Some(memory) = map(name, &engine, len, function(), &options(Advice::Normal, 512))
            else {
                return;
            };
            let (first, last) = (memory.addr().get() as u64, memory.addr().get() as u64 + len - 1);
            let is_aligned = first.is_multiple_of(table);
            assert!(is_aligned || first / table == last / table, "{pages} pages at {first:#x}");
            check_page(&memory, 0);
            wait_for("the window", || {
                let stats = memory.stats();
                stats.demand + stats.around == pages.min(512)
            });
            assert_eq!(memory.content(len), None);
        }
        let file = Arc::new(Mapping::memfd("placed", ByteLen::new(len), None).unwrap());
        file.write_at(len - 8, &word(len - 8).to_ne_bytes()).unwrap();
        let backing = MemoryBacking::new(file, Sharing::Shared).unwrap();
        let memory = map(name, &engine, len, backing, &LazyOptions::default()).unwrap();
        let first = memory.addr().get() as u64;
        let last = first + len - 1;
        assert!(first.is_multiple_of(table) || first / table == last / table);
        assert_eq!(bytes_of(&memory, len - 8, 8), word(len - 8).to_ne_bytes());
    }
}

/// The kernel's window of 16 pages around a fault, by addresses in pages.
fn kernel_window(fault: u64, area: (u64, u64)) -> (u64, u64) {
    let (pte, offset) = (fault % 512, fault - area.0);
    let from = (pte / 16 * 16).max(pte - pte.min(offset));
    let to = (from + 16).min(512).min(pte + area.1 - fault);
    (fault - pte + from, fault - pte + to)
}

#[test]
fn windows_of_adopted_memory_are_those_of_the_kernel_in_each_region() {
    let name = "windows_of_adopted_memory_are_those_of_the_kernel_in_each_region";
    let Some(uffd) = userfaultfd(name, Features::NONE, KernelFaults::IfAllowed) else { return };
    let lens = [345_u64, 777, 20];
    let areas = lens.map(|pages| registered(&uffd, anonymous(pages)));
    // Neighbours in the backing, behind a gap that is no multiple of a window.
    let mut offset = 311 * page();
    let regions: Vec<_> = areas
        .iter()
        .map(|memory| {
            let region = region_at(offset, memory);
            offset += region.len.get();
            region
        })
        .collect();
    let engine = engine();
    let adopt = || {
        let (remote, options) = (remote(&areas[0]), options(Advice::Normal, 16));
        engine.adopt(remote, regions.clone(), Arc::new(function()), &options, None).unwrap()
    };
    let mut state = 7_u64;
    for _ in 0..40 {
        let server = adopt();
        for (memory, region) in areas.iter().zip(&regions) {
            let pages = region.len.get() / page();
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
            // The first of an area counts as read in order, and the last touches its end.
            let at = [1 + (state >> 33) % (pages - 1), pages - 1][usize::from(state >> 60 == 3)];
            let mut seen = [0; 8];
            memory.mapping().read_at(at * page(), &mut seen).unwrap();
            assert_eq!(u64::from_ne_bytes(seen), word(region.offset + at * page()));
            let first = region.start.get() / page();
            let (from, to) = kernel_window(first + at, (first, first + pages));
            let expected: Vec<u64> = (from - first..to - first).collect();
            let content = |at: u64| server.content(region.offset + at * page());
            let present = || (0..pages).filter(|&at| content(at) == Some(Content::Present));
            wait_for("the window", || present().count() >= expected.len());
            assert!(present().eq(expected.iter().copied()), "page {at} of {pages} at {first:#x}");
        }
        // The next server starts anew.
        server.stop().unwrap();
        for memory in &areas {
            memory.mapping().discard(0..memory.mapping().len().get()).unwrap();
        }
    }
}

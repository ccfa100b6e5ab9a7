//! Memory that is made of parts has each part's bytes, in whatever order threads touch them.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

mod common;

use std::ops::Range;
use std::sync::Arc;

use common::{
    bytes_of, check_page, engine, file_with, function, map, page, scattered, usize_of, wait_for,
    words, write_words,
};
use uzone_fault::{
    Backing, BackingError, CompositeBacking, FileBacking, FunctionBacking, LazyOptions, MapError,
    MemoryBacking, ZeroBacking,
};
use uzone_os::{Mapping, Sharing, probe};
use uzone_pages::{Advice, ByteLen, FaultAround, PageSize};

/// A part of a backing.
type Part = (Range<u64>, Arc<dyn Backing>, u64);

/// A file of which the last page is not full, zeroes, a function, a gap, a slow function, and the
/// same file once more from inside of it; and the bytes of all that.
fn parts() -> (CompositeBacking, Vec<u8>) {
    let page = page();
    let file = file_with(&words(20 * page + 100));
    let taken = || Arc::new(FileBacking::new(file.try_clone().unwrap()).unwrap());
    let slow = common::slow();
    let parts: Vec<Part> = vec![
        (0..21 * page, taken(), 0),
        (21 * page..30 * page, Arc::new(ZeroBacking), 0),
        (30 * page..61 * page, Arc::new(function()), 1000 * page),
        (90 * page..95 * page, Arc::new(slow), 0),
        (95 * page..97 * page, taken(), 19 * page),
    ];
    let whole = CompositeBacking::with_zero_gaps(probe::page_size(), parts).unwrap();
    let mut bytes = vec![0; usize_of(97 * page)];
    let at = |pages: u64| usize_of(pages * page);
    bytes[..at(20) + 100].copy_from_slice(&words(20 * page + 100));
    write_words(1000 * page, &mut bytes[at(30)..at(61)]);
    write_words(0, &mut bytes[at(90)..at(95)]);
    write_words(19 * page, &mut bytes[at(95)..at(96) + 100]);
    (whole, bytes)
}

#[test]
fn each_part_has_its_bytes_in_any_order_of_touches() {
    for (advice, pages) in
        [(Advice::Normal, 16), (Advice::Sequential, 16), (Advice::Random, 1), (Advice::Auto, 128)]
    {
        let (whole, expected) = parts();
        let fault_around = FaultAround::try_new(ByteLen::new(pages * page())).unwrap();
        let options = LazyOptions::default().advice(advice).fault_around(fault_around);
        let Some(memory) = map("each_part_has_its_bytes", &engine(), 97 * page(), whole, &options)
        else {
            return;
        };
        let check = |at: u64| {
            let seen = bytes_of(&memory, at * page(), page());
            assert!(seen == expected[usize_of(at * page())..][..seen.len()], "page {at}");
        };
        scattered(pages, 97).take(60).for_each(check);
        (0..97).for_each(check);
        // 9 that are a part, and 29 that none has: no memory is taken for them.
        wait_for("the zeroes", || memory.stats().zeroes == 38);
        assert_eq!(memory.stats().poisoned, 0);
        assert!(memory.evict(0..97 * page()).unwrap() > 0);
        memory.populate(0..97 * page()).unwrap();
        (0..97).for_each(check);
        assert_eq!(memory.stats().zeroes, 76);
    }
}

#[test]
fn a_part_that_fails_is_a_signal_there_and_nowhere_else() {
    let lost =
        FunctionBacking::quick(|_, _: &mut [u8]| Err(BackingError::Other("it is lost".into())));
    let parts: Vec<Part> = vec![
        (0..2 * page(), Arc::new(function()), 0),
        (2 * page()..3 * page(), Arc::new(lost), 0),
        (3 * page()..4 * page(), Arc::new(function()), 3 * page()),
    ];
    let whole = CompositeBacking::of_parts(probe::page_size(), parts).unwrap();
    let name = "a_part_that_fails";
    let Some(memory) = map(name, &engine(), 4 * page(), whole, &LazyOptions::default()) else {
        return;
    };
    assert!(memory.populate(2 * page()..3 * page()).is_err());
    for at in [0, 1, 3] {
        check_page(&memory, at * page());
    }
    assert_eq!(memory.stats().poisoned, 1);
}

#[test]
fn parts_that_cannot_be_mapped_are_refused_with_the_reason() {
    let file = Arc::new(Mapping::memfd("part", ByteLen::new(page()), None).unwrap());
    let memory = MemoryBacking::new(file, Sharing::Private).unwrap();
    let of_parts = |parts: Vec<Part>| CompositeBacking::of_parts(probe::page_size(), parts);
    let error = of_parts(vec![(0..page(), Arc::new(memory), 0)]).unwrap_err();
    let is_of_part = |error: &MapError, reason: &str| matches!(error, MapError::Part { reason: it } if it.contains(reason));
    assert!(is_of_part(&error, "the part at 0x0 is a memory file"), "{error}");
    let short = FileBacking::new(file_with(&words(100))).unwrap();
    let error = of_parts(vec![(0..2 * page(), Arc::new(short), 0)]).unwrap_err();
    assert!(is_of_part(&error, "the part at 0x0 wants its backing up to"), "{error}");
    // Huge pages would be in two parts.
    let parts: Vec<Part> = vec![
        (0..page(), Arc::new(ZeroBacking), 0),
        (page()..2 << 20, Arc::new(function()), page()),
    ];
    let whole = of_parts(parts).unwrap();
    assert!(!whole.takes_pages_of(PageSize::MIB_2));
    let options = LazyOptions::default().huge(PageSize::MIB_2);
    assert!(matches!(
        engine().map(ByteLen::mib(2), Arc::new(whole), &options),
        Err(MapError::Backing { .. } | MapError::Map(_))
    ));
}

//! Clearing and copying the plain memory of regions: exactly the bytes that were asked for, however
//! they are cut, also when it is cancelled.
#![allow(clippy::single_range_in_vec_init, reason = "a list of ranges may have one")]

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::{Temporary, bytes};
use uzone_os::{Access, AccessError, Mapping, Sharing, SystemRoot, memory};
use uzone_pages::{AddrError, ByteLen};
use uzone_stream::{CacheState, NextUse};
use uzone_zone::{Region, Unclearable, WriteError, ZeroOptions};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

/// A region in which no byte is zero, and each differs from its neighbours.
fn filled(len: u64) -> Region {
    let region = Region::anonymous(ByteLen::new(len)).expect("memory for a test");
    region.write_at(0, &pattern(0..len)).expect("inside");
    region
}

fn pattern(bytes: std::ops::Range<u64>) -> Vec<u8> {
    bytes
        .map(|at| u8::try_from(at.wrapping_mul(0x9e37_79b9) >> 11 & 0x7f).map_or(1, |b| b | 0x80))
        .collect()
}

/// Asserts that exactly `ranges` are zero.
#[track_caller]
fn only_these_are_zero(region: &Region, ranges: &[std::ops::Range<u64>], case: &str) {
    let mut expected = pattern(0..region.len().get());
    for range in ranges {
        let range = usize::try_from(range.start).expect("small")
            ..usize::try_from(range.end).expect("small");
        expected[range].fill(0);
    }
    let found = bytes(region);
    if let Some(at) = found.iter().zip(&expected).position(|(found, expected)| found != expected) {
        panic!("{case}: byte {at:#x} is {:#x} and not {:#x}", found[at], expected[at]);
    }
}

fn threads(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).expect("not zero")
}

#[test]
fn every_byte_of_the_range_is_zero_and_none_beside_it_for_hints_batches_and_threads() {
    let len = 2 * MIB + 16 * PAGE;
    for (start, size) in [(0, len), (PAGE, 2 * MIB), (3, 5), (8, 8), (4095, 2), (17, 2 * MIB + 11)]
    {
        for hint in [None, Some(start), Some(start + size / 2), Some(start + size - 1)] {
            for batch in [u64::MAX, PAGE, 100_001] {
                for count in [1, 3] {
                    let region = filled(len);
                    let mut options =
                        ZeroOptions::default().batch(ByteLen::new(batch)).threads(threads(count));
                    if let Some(hint) = hint {
                        options = options.hint(hint);
                    }
                    let case = format!("{size:#x} at {start:#x}, {options:?}");
                    let done = region.zero_range(start, ByteLen::new(size), &options).expect(&case);
                    assert!(done.is_whole(), "{case}");
                    assert_eq!(done.done, [start..start + size], "{case}");
                    assert_eq!(done.done_bytes(), ByteLen::new(size));
                    only_these_are_zero(&region, &done.done, &case);
                }
            }
        }
    }
}

/// A word in each line of memory, set before and looked at afterwards: of a gigabyte, all bytes would
/// take minutes to set.
fn words(region: &Region, range: std::ops::Range<u64>) -> &[AtomicU64] {
    region.mapping().as_words(range).expect("words of the region")
}

#[test]
fn every_size_up_to_a_gibibyte_is_cleared_wherever_the_hint_is_and_no_page_beside_it() {
    const MARK: u64 = 0xa5a5_a5a5_a5a5_a5a5;
    let largest = 1 << 30;
    let available = memory::available(&SystemRoot::host()).expect("the host reports it");
    if available.bytes < ByteLen::new(2 * largest) {
        println!("skipped: a gibibyte: {} are available", available.bytes);
        return;
    }
    let region = Region::anonymous(ByteLen::new(largest + 2 * PAGE)).expect("memory for a test");
    // Before and behind the range nothing may change: a page on either side.
    for size in [PAGE, 16 * PAGE, 2 * MIB, 8 * MIB, 32 * MIB, 256 * MIB, largest] {
        let range = PAGE..PAGE + size;
        let hints = [None, Some(PAGE), Some(PAGE + size / 2), Some(PAGE + size - 1)];
        // Of the largest, one without a hint and one with the last page.
        let step = if size == largest { 3 } else { 1 };
        for (case, hint) in hints.into_iter().step_by(step).enumerate() {
            let all = words(&region, 0..PAGE + size + PAGE);
            for word in all.iter().step_by(8) {
                word.store(MARK, Ordering::Relaxed);
            }
            let mut options = ZeroOptions::default().threads(threads(1 + case % 2));
            if let Some(hint) = hint {
                options = options.hint(hint);
            }
            let done = region.zero_range(PAGE, ByteLen::new(size), &options).expect("inside");
            assert!(done.is_whole());
            let left = words(&region, range.clone())
                .iter()
                .position(|word| word.load(Ordering::Relaxed) != 0);
            assert_eq!(left, None, "{size:#x}, {options:?}");
            for beside in [0..PAGE, range.end..range.end + PAGE] {
                let words = words(&region, beside).iter().step_by(8);
                assert!(words.into_iter().all(|word| word.load(Ordering::Relaxed) == MARK));
            }
        }
    }
}

#[test]
fn every_word_about_both_ends_clears_and_copies_the_same() {
    for (was, next) in [
        (CacheState::Hot, NextUse::Soon),
        (CacheState::Cold, NextUse::Later),
        (CacheState::Cold, NextUse::Soon),
    ] {
        let options = ZeroOptions::default().was(was).next(next).hint(PAGE * 9);
        let region = filled(MIB);
        let case = format!("{options:?}");
        let done = region.zero_range(PAGE, ByteLen::new(MIB / 2), &options).expect(&case);
        assert!(done.stores.is_some(), "{case}");
        only_these_are_zero(&region, &done.done, &case);
        let from = filled(MIB);
        let done = region.copy_range(PAGE, &from, PAGE, ByteLen::new(MIB / 2), &options);
        assert!(done.expect(&case).is_whole());
        only_these_are_zero(&region, &[], &case);
    }
}

#[test]
fn a_copy_arrives_byte_for_byte_however_the_two_lie_to_each_other() {
    let from = filled(MIB);
    for (to, at, len) in [
        (0, 0, MIB),
        (PAGE, 8, 65_536),
        (3, 11, 70_000),
        (5, 8, 70_000),
        (PAGE, 0, 3),
        (0, 1, 0x20_001),
    ] {
        for batch in [u64::MAX, 10_007] {
            for count in [1, 2] {
                let region = Region::anonymous(ByteLen::new(MIB)).expect("memory");
                let options = ZeroOptions::default()
                    .batch(ByteLen::new(batch))
                    .threads(threads(count))
                    .hint(to);
                let done =
                    region.copy_range(to, &from, at, ByteLen::new(len), &options).expect("inside");
                assert_eq!(done.done, [to..to + len]);
                let mut expected = vec![0; usize::try_from(MIB).expect("small")];
                let source = pattern(at..at + len);
                expected[usize::try_from(to).expect("small")..][..source.len()]
                    .copy_from_slice(&source);
                assert!(
                    bytes(&region) == expected,
                    "{len:#x} from {at:#x} to {to:#x}, batches of {batch}"
                );
            }
        }
    }
}

#[test]
fn a_copy_inside_of_one_region_is_done_unless_the_two_overlap() {
    let region = filled(MIB);
    let half = ByteLen::new(MIB / 2);
    let done =
        region.copy_range(0, &region, MIB / 2, half, &ZeroOptions::default()).expect("disjoint");
    assert!(done.is_whole());
    assert!(bytes(&region)[..1 << 19] == pattern(MIB / 2..MIB));
    let error = region.copy_range(8, &region, MIB / 2, half, &ZeroOptions::default()).unwrap_err();
    let start = region.mapping().addr().get() as u64;
    let WriteError::Overlap { from, to, len } = error else {
        panic!("they share the last 8 bytes: {error:?}")
    };
    assert_eq!((from, to, len), (start + MIB / 2, start + 8, half));
    assert!(error.to_string().contains("they overlap"), "{error}");
}

#[test]
fn a_preemptible_caller_gets_whole_extents_and_a_cooperative_one_a_yield_point_after_each_batch() {
    let (region, len) = (filled(2 * MIB), ByteLen::mib(2));
    let yields = |options: ZeroOptions| {
        let calls = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&calls);
        let options = options.on_batch(move |_, _| {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        assert!(region.zero_range(0, len, &options).expect("inside").is_whole());
        calls.load(Ordering::Relaxed)
    };
    assert_eq!(yields(ZeroOptions::default()), 1);
    assert_eq!(yields(ZeroOptions::default().hint(MIB)), 3, "right, left, and the neighbourhood");
    let batches = |len| ZeroOptions::default().batch(ByteLen::new(len));
    assert_eq!(yields(batches(3 * PAGE)), 171, "512 pages by 3");
    assert_eq!(yields(batches(PAGE)), 512, "a page at a time");
    assert_eq!(region.zero_range(0, ByteLen::new(4), &batches(0)).expect("inside").done, [0..4]);
}

#[test]
fn the_neighbourhood_of_the_hint_is_written_last_also_by_several_threads() {
    for count in [1, 2, 4] {
        let region = filled(8 * MIB);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let tell = Arc::clone(&seen);
        let hint = 5 * MIB + 7;
        let options = ZeroOptions::default()
            .threads(threads(count))
            .batch(ByteLen::mib(1))
            .hint(hint)
            .on_batch(move |done, _| tell.lock().expect("alone").push(done.get()));
        assert!(region.zero_range(0, ByteLen::mib(8), &options).expect("inside").is_whole());
        let seen = seen.lock().expect("alone");
        // The five pages come alone, and after them nothing.
        let done: &[u64] = &seen;
        let last = done.len() - 1;
        assert_eq!(done[last], 8 * MIB, "{done:?}");
        assert!(done[..last].iter().all(|done| *done <= 8 * MIB - 5 * PAGE), "{done:?}");
    }
}

#[test]
fn what_was_cancelled_says_exactly_what_is_cleared() {
    for count in [1, 2] {
        for stop_after in [1, 3, 10] {
            let region = filled(4 * MIB);
            let cancel = Arc::<AtomicBool>::default();
            let (stop, calls) = (cancel.clone(), Arc::new(AtomicU64::new(0)));
            let counted = calls.clone();
            let options = ZeroOptions::default()
                .threads(threads(count))
                .batch(ByteLen::kib(64))
                .hint(MIB)
                .cancel(cancel)
                .on_batch(move |_, _| {
                    if counted.fetch_add(1, Ordering::Relaxed) + 1 >= stop_after {
                        stop.store(true, Ordering::Relaxed);
                    }
                });
            let done = region.zero_range(0, ByteLen::mib(4), &options).expect("inside");
            assert!(!done.is_whole());
            let calls = calls.load(Ordering::Relaxed);
            assert!(calls >= stop_after && calls < stop_after + 2, "{done:?}");
            let left = |(range, why): &(std::ops::Range<u64>, Unclearable)| {
                assert_eq!(*why, Unclearable::Cancelled);
                range.end - range.start
            };
            let left: u64 = done.left.iter().map(left).sum();
            assert_eq!(done.done_bytes().get() + left, 4 * MIB);
            only_these_are_zero(&region, &done.done, &format!("{done}"));
        }
    }
    // Before the first batch.
    let (region, cancel) = (filled(MIB), Arc::<AtomicBool>::default());
    cancel.store(true, Ordering::Relaxed);
    let options = ZeroOptions::default().cancel(cancel);
    let done = region.zero_range(0, ByteLen::mib(1), &options).expect("inside");
    assert!(done.done.is_empty());
    assert_eq!(done.left, [(0..MIB, Unclearable::Cancelled)]);
    only_these_are_zero(&region, &[], "cancelled before it began");
}

#[test]
fn what_cannot_be_cleared_is_refused_and_nothing_is_written() {
    let region = filled(MIB);
    let zero = |start, len, options: &ZeroOptions| {
        region.zero_range(start, ByteLen::new(len), options).unwrap_err()
    };
    let refused = |error| match error {
        WriteError::Addr(error) => error,
        error => panic!("not for its bytes: {error:?}"),
    };
    let plain = ZeroOptions::default();
    assert_eq!(refused(zero(5, 0, &plain)), AddrError::NoBytes { start: 5, end: 5 });
    for (start, len) in [(0, MIB + 1), (MIB, 1), (u64::MAX, 2), (1, u64::MAX), (u64::MAX - 1, 1)] {
        let error = zero(start, len, &plain);
        assert!(matches!(error, WriteError::Access(AccessError::Beyond { .. })), "{error:?}");
    }
    assert_eq!(
        refused(zero(PAGE, PAGE, &ZeroOptions::default().hint(0))),
        AddrError::HintOutside { hint: 0, start: PAGE, end: 2 * PAGE }
    );
    let (from, len) = (filled(PAGE), ByteLen::new(2 * PAGE));
    let error = region.copy_range(0, &from, 0, len, &plain).unwrap_err();
    assert!(matches!(error, WriteError::Access(AccessError::Beyond { .. })), "{error:?}");
    only_these_are_zero(&region, &[], "refused");
}

#[test]
fn a_file_is_cleared_in_every_mapping_of_it_and_a_read_only_one_is_only_read() {
    let scratch = Temporary::new("clear", &pattern(0..MIB));
    let region = Region::file(&scratch.0, 0, ByteLen::new(MIB)).expect("a file");
    let done =
        region.zero_range(PAGE, ByteLen::new(PAGE), &ZeroOptions::default()).expect("inside");
    assert!(done.is_whole());
    only_these_are_zero(&region, &[PAGE..2 * PAGE], "by way of the region");
    assert!(std::fs::read(&scratch.0).expect("the file") == bytes(&region));

    let file = std::fs::File::open(&scratch.0).expect("the file");
    let mapping = Mapping::file(file, 0, ByteLen::new(MIB), Access::ReadOnly, Sharing::Shared);
    let read_only = Region::adopt(mapping.expect("a mapping")).expect("whole pages");
    let error = read_only.zero_range(0, ByteLen::new(PAGE), &ZeroOptions::default()).unwrap_err();
    let WriteError::Access(error) = error else { panic!("it is read-only: {error:?}") };
    assert_eq!(error, AccessError::ReadOnly { offset: 0, len_bytes: 4096 });
    let copy = filled(MIB);
    let done = copy.copy_range(0, &read_only, 0, ByteLen::new(MIB), &ZeroOptions::default());
    assert!(done.expect("inside").is_whole());
    only_these_are_zero(&copy, &[PAGE..2 * PAGE], "copied from read-only memory");
}

#[test]
fn a_callback_that_panics_stops_all_threads_and_comes_through() {
    let region = filled(16 * MIB);
    let options = ZeroOptions::default()
        .threads(threads(2))
        .batch(ByteLen::kib(4))
        .on_batch(|_, _| panic!("on purpose"));
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        region.zero_range(0, ByteLen::mib(16), &options)
    }));
    assert!(result.is_err());
    let left = bytes(&region).iter().filter(|byte| **byte != 0).count();
    assert!(left > 15 << 20, "the other thread went on: {left} bytes are left");
}

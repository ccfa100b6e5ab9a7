//! Clearing and copying the plain memory of regions: exactly the bytes that were asked for, however
//! they are cut, by whatever stores, also when it is cancelled.
#![allow(clippy::single_range_in_vec_init, reason = "a list of ranges may have one")]

mod common;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Temporary, bytes, bytes_in};
use uzone_os::{Access, AccessError, Mapping, Sharing, SystemRoot, memory};
use uzone_pages::{AddrError, ByteLen};
use uzone_stream::{CacheState, CopyMethod, NextUse, Path as StorePath};
use uzone_zone::{Batching, Region, WriteError, ZeroOptions};

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
            for batching in [
                Batching::Whole,
                Batching::Bytes(ByteLen::new(PAGE)),
                Batching::Bytes(ByteLen::new(100_001)),
                Batching::COOPERATIVE,
            ] {
                for count in [1, 3] {
                    let region = filled(len);
                    let mut options =
                        ZeroOptions::default().batching(batching).threads(threads(count));
                    if let Some(hint) = hint {
                        options = options.hint(hint);
                    }
                    let case = format!("{size:#x} at {start:#x}, {options:?}");
                    let done = region.zero_range(start, ByteLen::new(size), &options).expect(&case);
                    assert!(done.is_whole(), "{case}");
                    assert_eq!(done.ranges, [start..start + size], "{case}");
                    assert_eq!((done.done.get(), done.total.get()), (size, size));
                    only_these_are_zero(&region, &done.ranges, &case);
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
fn every_way_and_every_word_about_both_ends_clears_and_copies_the_same() {
    let ways = CopyMethod::all().map(Some).chain([None]);
    for way in ways {
        for (was, next) in [
            (CacheState::Hot, NextUse::Soon),
            (CacheState::Cold, NextUse::Later),
            (CacheState::Cold, NextUse::Soon),
        ] {
            let mut options = ZeroOptions::default().was(was).next(next).hint(PAGE * 9);
            if let Some(way) = way {
                options = options.way(way);
            }
            let region = filled(MIB);
            let case = format!("{options:?}");
            let done = region.zero_range(PAGE, ByteLen::new(MIB / 2), &options).expect(&case);
            assert!(way.is_none_or(|way| done.way == way), "{case}");
            only_these_are_zero(&region, &done.ranges, &case);
            let from = filled(MIB);
            let done = region.copy_range(PAGE, &from, PAGE, ByteLen::new(MIB / 2), &options);
            assert!(done.expect(&case).is_whole());
            only_these_are_zero(&region, &[], &case);
        }
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
        for batching in
            [Batching::Whole, Batching::Bytes(ByteLen::new(10_007)), Batching::COOPERATIVE]
        {
            for count in [1, 2] {
                let region = Region::anonymous(ByteLen::new(MIB)).expect("memory");
                let options =
                    ZeroOptions::default().batching(batching).threads(threads(count)).hint(to);
                let done =
                    region.copy_range(to, &from, at, ByteLen::new(len), &options).expect("inside");
                assert_eq!(done.ranges, [to..to + len]);
                let mut expected = vec![0; usize::try_from(MIB).expect("small")];
                let source = pattern(at..at + len);
                expected[usize::try_from(to).expect("small")..][..source.len()]
                    .copy_from_slice(&source);
                assert!(
                    bytes(&region) == expected,
                    "{len:#x} from {at:#x} to {to:#x}, {batching:?}"
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
    let zero = |options: &ZeroOptions| region.zero_range(0, len, options).expect("inside").batches;
    assert_eq!(zero(&ZeroOptions::default()), 1);
    assert_eq!(zero(&ZeroOptions::default().hint(MIB)), 3, "right, left, and the neighbourhood");
    let calls = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&calls);
    let options = ZeroOptions::default()
        .batching(Batching::Bytes(ByteLen::new(3 * PAGE)))
        .on_batch(move |_, _| {
            counted.fetch_add(1, Ordering::Relaxed);
        });
    assert_eq!(zero(&options), 171, "512 pages by 3");
    assert_eq!(calls.load(Ordering::Relaxed), 171);
    let single = ZeroOptions::default().batching(Batching::Bytes(ByteLen::new(PAGE)));
    assert_eq!(zero(&single), 512, "as where several pages cannot be cleared at once");
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
            .batching(Batching::Bytes(ByteLen::mib(1)))
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
    let region = filled(MIB);
    let batches: Vec<_> = region
        .zero_batches(0, ByteLen::new(MIB), &ZeroOptions::default().hint(MIB / 2))
        .expect("inside")
        .map(|batch| batch.start / PAGE..batch.end / PAGE)
        .collect();
    assert_eq!(batches, [131..256, 0..126, 126..131]);
}

#[test]
fn what_was_cancelled_says_exactly_what_is_cleared() {
    for count in [1, 2] {
        for stop_after in [1, 3, 10] {
            let region = filled(4 * MIB);
            let cancel = Arc::<AtomicBool>::default();
            let (stop, calls) = (cancel.clone(), Arc::new(AtomicU64::new(0)));
            let options = ZeroOptions::default()
                .threads(threads(count))
                .batching(Batching::Bytes(ByteLen::kib(64)))
                .hint(MIB)
                .cancel(cancel)
                .on_batch(move |_, _| {
                    if calls.fetch_add(1, Ordering::Relaxed) + 1 >= stop_after {
                        stop.store(true, Ordering::Relaxed);
                    }
                });
            let done = region.zero_range(0, ByteLen::mib(4), &options).expect("inside");
            assert!(!done.is_whole());
            assert!(done.batches >= stop_after && done.batches < stop_after + 2, "{done:?}");
            assert_eq!(done.done.get(), done.ranges.iter().map(|r| r.end - r.start).sum::<u64>());
            only_these_are_zero(&region, &done.ranges, &format!("{done}"));
        }
    }
    // Before the first batch.
    let (region, cancel) = (filled(MIB), Arc::<AtomicBool>::default());
    cancel.store(true, Ordering::Relaxed);
    let options = ZeroOptions::default().cancel(cancel);
    let done = region.zero_range(0, ByteLen::mib(1), &options).expect("inside");
    assert_eq!((done.done, done.ranges.len()), (ByteLen::ZERO, 0));
    only_these_are_zero(&region, &[], "cancelled before it began");
}

#[test]
fn batches_that_are_not_asked_for_are_not_written() {
    let region = filled(MIB);
    let options = ZeroOptions::default().batching(Batching::Bytes(ByteLen::new(3 * PAGE)));
    let mut batches = region.zero_batches(PAGE, ByteLen::new(MIB / 2), &options).expect("inside");
    assert_eq!(batches.next_len(), ByteLen::new(3 * PAGE));
    let first = batches.next().expect("a batch");
    assert_eq!(first, PAGE..4 * PAGE);
    assert_eq!(batches.left(), ByteLen::new(MIB / 2 - 3 * PAGE));
    drop(batches);
    only_these_are_zero(&region, &[PAGE..4 * PAGE], "one batch");
    let from = filled(MIB);
    let copied: u64 = region
        .copy_batches(0, &from, 0, ByteLen::new(MIB), &options)
        .expect("inside")
        .map(|batch| batch.end - batch.start)
        .sum();
    assert_eq!(copied, MIB);
    only_these_are_zero(&region, &[], "copied over");
}

#[test]
fn the_pause_between_yield_points_follows_the_bound() {
    let region = filled(64 * MIB);
    let zero = |bound| {
        let options = ZeroOptions::default().batching(Batching::Pause(bound));
        region.zero_range(0, ByteLen::mib(64), &options).expect("inside")
    };
    let (short, long) = (zero(Duration::from_micros(20)), zero(Duration::from_millis(100)));
    assert!(short.batches > 4 * long.batches, "{short}; {long}");
    assert!(short.is_whole() && long.is_whole());
    let batches = zero(Duration::ZERO).batches;
    assert_eq!(batches, 64 * MIB / PAGE, "a page at a time is the least there is");
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
    if let Some(path) = StorePath::ALL.into_iter().find(|path| !path.is_available()) {
        let way = CopyMethod::Streaming(path);
        let error = zero(0, PAGE, &ZeroOptions::default().way(way));
        assert!(
            matches!(error, WriteError::Unavailable { way: asked } if asked == way),
            "{error:?}"
        );
    } else {
        eprintln!("skipped: unavailable stores: this CPU offers every path");
    }
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
fn memory_that_is_not_there_ends_a_copy_with_what_was_copied_before() {
    use uzone_os::sigbus;
    if !sigbus::recovers_copies() {
        eprintln!("skipped: memory_that_is_not_there: copies are not recovered on this machine");
        return;
    }
    sigbus::install().expect("a handler of SIGBUS");
    let scratch = Temporary::new("clear-bus", &pattern(0..16 * PAGE));
    let from = Region::file(&scratch.0, 0, ByteLen::new(16 * PAGE)).expect("a file");
    scratch.truncate(8 * PAGE);
    for count in [1, 2] {
        let region = Region::anonymous(ByteLen::new(32 * PAGE)).expect("memory");
        // Words that do not fit each other go through a buffer, whose copies are recovered.
        let options = ZeroOptions::default()
            .threads(threads(count))
            .batching(Batching::Bytes(ByteLen::new(PAGE)));
        let len = ByteLen::new(16 * PAGE);
        let done = region.copy_range(3, &from, 0, len, &options).expect("inside");
        assert!(matches!(done.error, Some(AccessError::Bus { .. })), "{:?}", done.error);
        assert!(!done.is_whole());
        assert_eq!(done.ranges, [3..3 + 8 * PAGE], "{done:?}");
        assert!(bytes_in(&region, 3..3 + 8 * PAGE) == pattern(0..8 * PAGE));
    }
    let region = Region::anonymous(ByteLen::new(32 * PAGE)).expect("memory");
    let options = ZeroOptions::default().batching(Batching::Bytes(ByteLen::new(PAGE)));
    let mut batches =
        region.copy_batches(3, &from, 0, ByteLen::new(16 * PAGE), &options).expect("inside");
    assert_eq!(batches.by_ref().count(), 8);
    assert!(matches!(batches.error(), Some(AccessError::Bus { .. })));
    assert_eq!((batches.left().get(), batches.next()), (8 * PAGE, None));
}

#[test]
fn a_callback_that_panics_stops_all_threads_and_comes_through() {
    let region = filled(16 * MIB);
    let options = ZeroOptions::default()
        .threads(threads(2))
        .batching(Batching::Bytes(ByteLen::kib(4)))
        .on_batch(|_, _| panic!("on purpose"));
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        region.zero_range(0, ByteLen::mib(16), &options)
    }));
    assert!(result.is_err());
    let left = bytes(&region).iter().filter(|byte| **byte != 0).count();
    assert!(left > 15 << 20, "the other thread went on: {left} bytes are left");
}

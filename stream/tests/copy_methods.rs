//! Every way of clearing and copying against `fill` and `copy_from_slice`: lengths, alignments, the
//! bytes beside, and others who touch the same words.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{Arena, noise};
use uzone_stream::{CopyMethod, Path, copy_bytes, copy_words, zero_bytes, zero_words};

/// Lengths around everything that cuts an extent: words, lines, pages, groups of eight pages.
const LENGTHS: [usize; 24] = [
    511, 512, 520, 1000, 4031, 4032, 4095, 4096, 4097, 4160, 8192, 12_289, 28_672, 32_767, 32_768,
    32_769, 32_832, 36_864, 40_000, 65_536, 69_632, 69_700, 98_304, 100_001,
];
const STRIDE: usize = if cfg!(miri) { 37 } else { 1 };

#[test]
fn every_way_clears_and_copies_every_short_length_at_every_alignment_and_nothing_beside_it() {
    let longest = if cfg!(miri) { 150 } else { 330 };
    let (mut arena, src) = (Arena::new(longest), noise(longest + 64));
    let zeroes = vec![0; longest];
    for way in CopyMethod::all() {
        let case = way.to_string();
        for len_bytes in (0..=longest).step_by(STRIDE) {
            for offset in (0..64).step_by(STRIDE) {
                arena.check(&case, offset, &zeroes[..len_bytes], |dst| zero_bytes(way, dst));
                for from in [offset, (offset * 7 + len_bytes + 3) % 64] {
                    let src = &src[from..][..len_bytes];
                    arena.check(&case, offset, src, |dst| copy_bytes(way, dst, src));
                }
            }
        }
    }
}

#[test]
fn every_way_clears_and_copies_extents_of_many_pages() {
    let longest = LENGTHS[LENGTHS.len() - 1];
    let (mut arena, src) = (Arena::new(longest), noise(longest + 64));
    let zeroes = vec![0; longest];
    let lengths = LENGTHS.into_iter().step_by(if cfg!(miri) { 11 } else { 1 });
    for way in CopyMethod::all() {
        let case = way.to_string();
        for len_bytes in lengths.clone() {
            for offset in [0, 8, 1, 56, 63] {
                arena.check(&case, offset, &zeroes[..len_bytes], |dst| zero_bytes(way, dst));
                for from in [offset, 0, 5] {
                    let src = &src[from..][..len_bytes];
                    arena.check(&case, offset, src, |dst| copy_bytes(way, dst, src));
                }
            }
        }
    }
}

fn words(count: usize) -> Vec<AtomicU64> {
    (0..count as u64).map(|word| AtomicU64::new(word.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
}

fn values(words: &[AtomicU64]) -> Vec<u64> {
    words.iter().map(|word| word.load(Ordering::Relaxed)).collect()
}

#[test]
fn words_are_cleared_and_copied_wherever_they_begin_and_none_beside_them() {
    let longest = if cfg!(miri) { 40 } else { 5000 };
    let src = words(longest + 16);
    for way in CopyMethod::all() {
        for count in
            [0, 1, 7, 8, 9, 30, 511, 512, 513, 4096, 4100].into_iter().filter(|n| *n < longest)
        {
            for (at, from) in [(0, 0), (1, 1), (3, 7), (8, 0), (7, 8)] {
                let dst = words(longest + 16);
                let mut expected = values(&dst);
                zero_words(way, &dst[at..][..count]);
                expected[at..][..count].fill(0);
                assert_eq!(values(&dst), expected, "{way}: zero {count} at {at}");
                copy_words(way, &dst[at..][..count], &src[from..][..count]);
                expected[at..][..count].copy_from_slice(&values(&src[from..][..count]));
                assert_eq!(values(&dst), expected, "{way}: copy {count} from {from} to {at}");
            }
        }
    }
}

#[test]
fn no_thread_ever_sees_half_a_word() {
    let rounds = if cfg!(miri) { 2 } else { 300 };
    let count = if cfg!(miri) { 24 } else { 4096 + 24 };
    let is_whole = |word: u64| [0, 0x1111_1111_1111_1111, u64::MAX].contains(&word);
    let [ones, all] = [0x1111_1111_1111_1111, u64::MAX]
        .map(|value| (0..count).map(|_| AtomicU64::new(value)).collect::<Vec<_>>());
    for way in CopyMethod::all() {
        let shared: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(0)).collect();
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    for word in &shared {
                        let seen = word.load(Ordering::Relaxed);
                        assert!(is_whole(seen), "{way}: {seen:#x}");
                    }
                }
            });
            let racing = scope.spawn(|| {
                for _ in 0..rounds {
                    copy_words(way, &shared, &ones);
                    zero_words(way, &shared[3..]);
                }
            });
            for _ in 0..rounds {
                copy_words(way, &shared, &all);
                zero_words(way, &shared);
            }
            // A thread that panicked is reported by the scope, once the other has seen this.
            let joined = racing.join();
            is_done.store(true, Ordering::Relaxed);
            assert!(joined.is_ok());
        });
        assert!(values(&shared).into_iter().all(is_whole));
    }
}

#[test]
fn what_was_cleared_past_the_cache_is_seen_by_a_thread_that_learns_of_the_return() {
    if cfg!(miri) {
        eprintln!("skipped: visibility: Miri has no streaming stores");
        return;
    }
    for way in CopyMethod::all() {
        let (shared, turn) = (words(2048), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in (1..400).step_by(2) {
                    while turn.load(Ordering::Acquire) != round {
                        std::thread::yield_now();
                    }
                    let left =
                        shared.iter().filter(|word| word.load(Ordering::Relaxed) != 0).count();
                    // Not an assertion: the other thread would wait forever.
                    turn.store(if left == 0 { round + 1 } else { u64::MAX }, Ordering::Release);
                }
            });
            for round in (1..400).step_by(2) {
                shared.iter().for_each(|word| word.store(round, Ordering::Relaxed));
                zero_words(way, &shared);
                turn.store(round, Ordering::Release);
                while turn.load(Ordering::Acquire) == round {
                    std::thread::yield_now();
                }
                assert_eq!(turn.load(Ordering::Acquire), round + 1, "{way}: old words were seen");
            }
        });
    }
}

#[test]
fn unequal_lengths_and_ways_that_are_not_there_panic_and_write_nothing() {
    for way in CopyMethod::all() {
        let (mut bytes, row) = ([1; 64], words(8));
        assert!(catch_unwind(AssertUnwindSafe(|| copy_bytes(way, &mut bytes, &[2; 63]))).is_err());
        let other = words(7);
        assert!(catch_unwind(AssertUnwindSafe(|| copy_words(way, &row, &other))).is_err());
        assert_eq!((bytes, values(&row)), ([1; 64], values(&words(8))));
    }
    for path in Path::ALL.into_iter().filter(|path| !path.is_available()) {
        for way in [CopyMethod::Streaming(path), CopyMethod::Interleaved(path)] {
            assert!(!way.is_available() && CopyMethod::all().all(|there| there != way));
            let mut bytes = [1; 64];
            let result = catch_unwind(AssertUnwindSafe(|| zero_bytes(way, &mut bytes)));
            assert!(result.is_err() && bytes == [1; 64], "{way}");
        }
    }
}

#[test]
fn the_portable_path_is_a_way_that_leaves_bytes_in_the_cache() {
    for way in [CopyMethod::Streaming(Path::Portable), CopyMethod::Interleaved(Path::Portable)] {
        assert!(way.is_cached() && way.is_available());
        let (mut bytes, src) = (noise(5000), noise(6000));
        copy_bytes(way, &mut bytes, &src[1000..]);
        assert_eq!(bytes, src[1000..]);
        zero_bytes(way, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
}

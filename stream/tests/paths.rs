//! Every available path against a plain model: each length, each alignment, and the bytes beside.
//!
//! Under Miri only the portable path is available and the tables are thinned out.

mod common;

use common::{Arena, noise, paths};
use uzone_stream::{Path, Pattern, copy_by, copy_flush, fill_by, zero_by};

/// The longest destination that the full tables go to, in bytes.
const LONGEST: usize = if cfg!(miri) { 72 } else { 512 };
/// Every how many lengths and alignments a thinned table looks.
const STRIDE: usize = if cfg!(miri) { 31 } else { 1 };

/// Words of an element and their steps, with carries over every byte.
fn element(words: usize, is_linear: bool) -> (Vec<u64>, Vec<u64>) {
    let base = (0..words as u64).map(|j| 0xf1f2_f3f4_f5f6_f7f8_u64.wrapping_mul(j + 1)).collect();
    let step = |j: u64| {
        if is_linear { 0x0101_0101_0101_01ff_u64.wrapping_mul(j + 3) } else { 0 }
    };
    (base, (0..words as u64).map(step).collect())
}

/// The meaning of a fill, one word at a time.
fn model(len_bytes: usize, words: &[u64], steps: &[u64]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len_bytes + 96);
    let mut element = 0_u64;
    while bytes.len() < len_bytes {
        for (word, step) in words.iter().zip(steps) {
            bytes.extend(word.wrapping_add(element.wrapping_mul(*step)).to_ne_bytes());
        }
        element += 1;
    }
    bytes.truncate(len_bytes);
    bytes
}

#[test]
fn every_available_path_copies_every_length_to_every_alignment_and_nothing_beside_it() {
    let src = noise(LONGEST + 64);
    let mut arena = Arena::new(LONGEST);
    for path in paths() {
        for len_bytes in (0..=LONGEST).step_by(STRIDE) {
            for offset in (0..64).step_by(STRIDE) {
                // One source that is aligned as the destination is, and one that is not.
                for from in [offset, (offset * 7 + len_bytes + 3) % 64] {
                    let src = &src[from..][..len_bytes];
                    arena.check(path.name(), offset, src, |dst| copy_by(path, dst, src));
                }
            }
        }
    }
}

#[test]
fn every_available_path_zeroes_every_length_at_every_alignment_and_nothing_beside_it() {
    let mut arena = Arena::new(LONGEST);
    for path in paths() {
        for len_bytes in (0..=LONGEST).step_by(STRIDE) {
            for offset in (0..64).step_by(STRIDE) {
                let expected = &[0; LONGEST][..len_bytes];
                arena.check(path.name(), offset, expected, |dst| zero_by(path, dst));
            }
        }
    }
}

#[test]
fn every_available_path_fills_64_byte_elements_at_every_length_and_alignment() {
    let paths = paths();
    let mut arena = Arena::new(LONGEST);
    for is_linear in [false, true] {
        let (words, steps) = element(8, is_linear);
        let pattern = Pattern::linear(&words, &steps).unwrap();
        let expected = model(LONGEST, &words, &steps);
        for &path in &paths {
            for len_bytes in (0..=LONGEST).step_by(STRIDE) {
                for offset in (0..64).step_by(STRIDE) {
                    let expected = &expected[..len_bytes];
                    arena.check(path.name(), offset, expected, |dst| {
                        fill_by(path, dst, &pattern);
                    });
                }
            }
        }
    }
}

#[test]
fn every_available_path_fills_elements_of_every_size_at_any_phase() {
    // Beyond two blocks of the longest kind (704 bytes), and past the pieces of a misaligned fill.
    let longest = if cfg!(miri) { 200 } else { 4500 };
    let lengths: Vec<usize> = if cfg!(miri) {
        vec![0, 7, 200]
    } else {
        let short = (0..200).step_by(3);
        let middle = (200..1600).step_by(41);
        short.chain(middle).chain([1472, 2047, 2048, 2049, 4096, 4500]).collect()
    };
    // Every phase in a line, and some that cut words.
    let offsets: &[usize] =
        if cfg!(miri) { &[0, 8, 13] } else { &[0, 8, 16, 24, 32, 40, 48, 56, 1, 4, 13, 63] };
    let paths = paths();
    let mut arena = Arena::new(longest);
    for element_words in (1..=12).step_by(if cfg!(miri) { 5 } else { 1 }) {
        for is_linear in [false, true] {
            let (words, steps) = element(element_words, is_linear);
            let pattern = Pattern::linear(&words, &steps).unwrap();
            let expected = model(longest, &words, &steps);
            for &path in &paths {
                let case = format!("{path}, {element_words} words, linear: {is_linear}");
                for &len_bytes in &lengths {
                    for &offset in offsets {
                        let expected = &expected[..len_bytes];
                        arena.check(&case, offset, expected, |dst| fill_by(path, dst, &pattern));
                    }
                }
            }
        }
    }
}

#[test]
fn a_constant_pattern_is_a_linear_one_that_stands_still() {
    let (words, _) = element(7, false);
    let expected = model(300, &words, &[0; 7]);
    let pattern = Pattern::constant(&words).unwrap();
    let mut arena = Arena::new(300);
    for path in paths() {
        arena.check(path.name(), 8, &expected, |dst| {
            fill_by(path, dst, &pattern);
        });
    }
}

#[test]
fn nothing_at_all_may_be_copied_filled_and_zeroed() {
    let pattern = Pattern::constant(&[1]).unwrap();
    for path in paths() {
        copy_by(path, &mut [], &[]);
        fill_by(path, &mut [], &pattern);
        zero_by(path, &mut []);
    }
    copy_flush(&mut [], &[]);
}

#[test]
fn a_copy_of_unequal_lengths_panics_and_writes_nothing() {
    for path in paths() {
        let mut dst = [1; 64];
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            copy_by(path, &mut dst, &[2; 63]);
        }));
        assert!(result.is_err(), "{path}");
        assert_eq!(dst, [1; 64]);
    }
    let result = std::panic::catch_unwind(|| copy_flush(&mut [1; 8], &[2; 4]));
    assert!(result.is_err());
}

#[test]
fn a_path_that_is_not_available_panics_before_it_writes() {
    for path in Path::ALL.into_iter().filter(|path| !path.is_available()) {
        let mut dst = [1; 64];
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            zero_by(path, &mut dst);
        }));
        assert!(result.is_err(), "{path}");
        assert_eq!(dst, [1; 64]);
    }
}

#[test]
fn copy_flush_copies_every_length_to_every_alignment_and_nothing_beside_it() {
    let longest = LONGEST.min(200);
    let src = noise(longest + 64);
    let mut arena = Arena::new(longest);
    for len_bytes in (0..=longest).step_by(STRIDE) {
        for offset in (0..64).step_by(STRIDE) {
            for from in [offset, (offset + 5) % 64] {
                let src = &src[from..][..len_bytes];
                arena.check("copy_flush", offset, src, |dst| copy_flush(dst, src));
            }
        }
    }
    for len_bytes in [4, 8, 16, 32, 64].into_iter().filter(|n| *n <= longest) {
        for offset in (0..64).step_by(len_bytes) {
            let src = &src[3..][..len_bytes];
            arena.check("copy_flush", offset, src, |dst| copy_flush(dst, src));
        }
    }
}

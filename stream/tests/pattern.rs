//! Patterns: accepted lengths, and that shifting them agrees with a plain model.

use uzone_stream::{Path, Pattern, StreamError, fill_by};

/// Enough for two blocks of every element; less where it takes long.
const IMAGE_BYTES: usize = if cfg!(miri) { 200 } else { 1500 };

/// Returns the bytes of a fill with this pattern.
fn image(pattern: &Pattern, len_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; len_bytes];
    fill_by(Path::Portable, &mut bytes, pattern);
    bytes
}

fn element(words: usize) -> (Vec<u64>, Vec<u64>) {
    let base = (0..words as u64).map(|j| u64::MAX / 5 * (j % 5 + 1)).collect();
    let steps = (0..words as u64).map(|j| (j + 1) << (j * 5)).collect();
    (base, steps)
}

#[test]
fn an_element_has_1_to_12_words_and_a_step_for_each() {
    for words in [0, 13, 14, 100] {
        assert_eq!(
            Pattern::constant(&vec![1; words]),
            Err(StreamError::ElementWords { words }),
            "{words}"
        );
    }
    for words in 1..=12 {
        assert_eq!(Pattern::constant(&vec![1; words]).unwrap().element_bytes(), words * 8);
        let error = Pattern::linear(&vec![1; words], &vec![1; words - 1]);
        assert_eq!(error, Err(StreamError::StepWords { words, steps: words - 1 }));
        let error = Pattern::linear(&vec![1; words], &vec![1; words + 1]);
        assert_eq!(error, Err(StreamError::StepWords { words, steps: words + 1 }));
    }
}

#[test]
fn added_words_reach_every_element() {
    for words in 1..=12 {
        let (base, steps) = element(words);
        let deltas: Vec<u64> = (0..words as u64).map(|j| u64::MAX - 1000 * j).collect();
        let mut pattern = Pattern::linear(&base, &steps).unwrap();
        pattern.add(&deltas);
        let sums: Vec<u64> =
            base.iter().zip(&deltas).map(|(word, delta)| word.wrapping_add(*delta)).collect();
        let fresh = Pattern::linear(&sums, &steps).unwrap();
        assert_eq!(pattern, fresh, "{words} words");
        assert_eq!(image(&pattern, IMAGE_BYTES), image(&fresh, IMAGE_BYTES), "{words} words");
        assert_eq!(pattern.element(), &sums[..]);
    }
}

#[test]
#[should_panic(expected = "one delta for each word")]
fn deltas_of_another_length_panic() {
    Pattern::constant(&[1, 2]).unwrap().add(&[1]);
}

#[test]
fn a_pattern_that_was_shifted_fills_the_same_on_every_path() {
    for path in Path::ALL {
        if !path.is_available() {
            eprintln!("skipped: {path}: this CPU does not offer it");
            continue;
        }
        for words in [1, 2, 8, 9, 11] {
            let (base, steps) = element(words);
            let mut pattern = Pattern::linear(&base, &steps).unwrap();
            pattern.add(&vec![77; words]);
            // From the second word of a line on, so that the block is read rotated.
            let expected = image(&pattern, 1700);
            let mut room = vec![0; 1700 + 72];
            let first = room.as_ptr().addr().wrapping_neg() % 64 + 8;
            fill_by(path, &mut room[first..][..1700], &pattern);
            assert!(room[first..][..1700] == expected, "{path}, {words} words");
        }
    }
}

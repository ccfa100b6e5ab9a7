//! Several sets of small numbers, in which the first member of each is found in a few steps: [`Bits`].
//!
//! One bit for each number, one for each word of those, and so on until one word is left: looking
//! for a member goes down from there, a word a level (four for 16 million numbers).
//!
//! The words of all sets for the same numbers share a cache line, and all lines are one allocation.
//! A number goes from set to set as a rule, and moving one waits for one cache line a level and for
//! nothing else.
//!
//! Not for several threads: a caller that shares it has a lock.

use alloc::vec;
use alloc::vec::Vec;

const WORD_BITS: usize = 64;

/// More levels than numbers of 64 bits need.
const LEVELS: usize = 11;

/// A word of each set, for the same numbers.
#[derive(Clone, Debug)]
#[repr(align(64))]
struct Row<const SETS: usize>([u64; SETS]);

/// `SETS` sets of numbers below a bound that is fixed when they are made. A set is named by its index.
#[derive(Debug)]
pub(crate) struct Bits<const SETS: usize> {
    /// The rows of the numbers, then which of those have any, and so on; the last level is one row.
    rows: Vec<Row<SETS>>,
    members: [usize; SETS],
    bound: usize,
    levels: usize,
    /// Where in `rows` each level starts.
    starts: [usize; LEVELS],
}

impl<const SETS: usize> Bits<SETS> {
    /// Makes empty sets of numbers below `bound`.
    pub(crate) fn new(bound: usize) -> Self {
        let mut starts = [0; LEVELS];
        let (mut levels, mut all, mut rows) = (0, 0, bound);
        loop {
            rows = rows.div_ceil(WORD_BITS).max(1);
            starts[levels] = all;
            levels += 1;
            all += rows;
            if rows == 1 {
                let rows = vec![Row([0; SETS]); all];
                return Self { rows, members: [0; SETS], bound, levels, starts };
            }
        }
    }

    /// Returns the bound: every number is below it.
    pub(crate) fn bound(&self) -> usize {
        self.bound
    }

    /// Returns how many members a set has.
    pub(crate) fn len(&self, set: usize) -> usize {
        self.members[set]
    }

    fn word(&self, set: usize, level: usize, index: usize) -> u64 {
        self.rows[self.starts[level] + index].0[set]
    }

    /// Returns where a level ends in `rows`.
    fn end(&self, level: usize) -> usize {
        if level + 1 < self.levels { self.starts[level + 1] } else { self.rows.len() }
    }

    pub(crate) fn contains(&self, set: usize, number: usize) -> bool {
        number < self.bound
            && self.word(set, 0, number / WORD_BITS) >> (number % WORD_BITS) & 1 != 0
    }

    /// Adds a number below the bound to a set. Returns whether it was not there.
    pub(crate) fn insert(&mut self, set: usize, number: usize) -> bool {
        assert!(number < self.bound, "{number} in a set of numbers below {}", self.bound);
        if self.contains(set, number) {
            return false;
        }
        let mut index = number;
        for start in &self.starts[..self.levels] {
            let word = &mut self.rows[start + index / WORD_BITS].0[set];
            let was_empty = *word == 0;
            *word |= 1 << (index % WORD_BITS);
            if !was_empty {
                break;
            }
            index /= WORD_BITS;
        }
        self.members[set] += 1;
        true
    }

    /// Takes a number out of a set. Returns whether it was there.
    pub(crate) fn remove(&mut self, set: usize, number: usize) -> bool {
        if !self.contains(set, number) {
            return false;
        }
        let mut index = number;
        for start in &self.starts[..self.levels] {
            let word = &mut self.rows[start + index / WORD_BITS].0[set];
            *word &= !(1 << (index % WORD_BITS));
            if *word != 0 {
                break;
            }
            index /= WORD_BITS;
        }
        self.members[set] -= 1;
        true
    }

    /// Returns the smallest member of a set.
    pub(crate) fn first(&self, set: usize) -> Option<usize> {
        if self.members[set] == 0 {
            return None;
        }
        Some(self.leftmost(set, self.levels, 0))
    }

    /// Goes down from below `level` to the leftmost member under the bit `index` of that.
    fn leftmost(&self, set: usize, level: usize, index: usize) -> usize {
        (0..level).rev().fold(index, |index, level| {
            index * WORD_BITS + self.word(set, level, index).trailing_zeros() as usize
        })
    }

    /// Returns the smallest member of a set that is at least `from`.
    pub(crate) fn first_from(&self, set: usize, from: usize) -> Option<usize> {
        let mut index = from;
        // Up, until a word has a member to the right; down again, to the leftmost each time.
        for level in 0..self.levels {
            let (word, bit) = (index / WORD_BITS, index % WORD_BITS);
            let is_there = word < self.end(level) - self.starts[level];
            let right = if is_there { self.word(set, level, word) & (!0 << bit) } else { 0 };
            if right != 0 {
                let found = word * WORD_BITS + right.trailing_zeros() as usize;
                return Some(self.leftmost(set, level, found));
            }
            index = word + 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use alloc::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 8 } else { 256 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn they_are_sets(
            bound in prop_oneof![1_usize..200, 4000..5000_usize, Just(if cfg!(miri) { 70_000 } else { 300_000 })],
            steps in prop::collection::vec(
                (any::<bool>(), 0..3_usize, any::<usize>()),
                0..if cfg!(miri) { 30 } else { 300 },
            ),
        ) {
            let mut bits = Bits::<3>::new(bound);
            let mut plain = [const { BTreeSet::new() }; 3];
            for (is_insert, set, number) in steps {
                let number = number % bound;
                if is_insert {
                    prop_assert_eq!(bits.insert(set, number), plain[set].insert(number));
                } else {
                    prop_assert_eq!(bits.remove(set, number), plain[set].remove(&number));
                }
                for (set, plain) in plain.iter().enumerate() {
                    prop_assert_eq!(bits.len(set), plain.len());
                    prop_assert_eq!(bits.first(set), plain.first().copied());
                    let next = plain.range(number..).next().copied();
                    prop_assert_eq!(bits.first_from(set, number), next);
                    prop_assert_eq!(bits.contains(set, number), plain.contains(&number));
                }
            }
            prop_assert!(!bits.contains(0, bound));
            prop_assert_eq!(bits.first_from(0, bound), None);
        }
    }

    #[test]
    fn the_words_of_all_sets_for_the_same_numbers_are_a_cache_line() {
        assert_eq!(size_of::<Row<5>>(), 64);
        assert_eq!(Bits::<5>::new(64).rows.len(), 1);
        assert_eq!(Bits::<5>::new(65).rows.len(), 3);
        assert_eq!(Bits::<5>::new(0).rows.len(), 1);
    }
}

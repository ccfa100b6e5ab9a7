//! A set of small numbers in which the first member is found in a few steps: [`Bits`].
//!
//! One bit for each number, one for each word of those, and so on until one word is left: looking
//! for a member goes down from there, a word a level (four for 16 million numbers).
//!
//! Not for several threads: whoever shares it has a lock.

use alloc::vec;
use alloc::vec::Vec;

const WORD_BITS: usize = 64;

/// A set of numbers below a bound that is fixed when it is made.
#[derive(Debug)]
pub(crate) struct Bits {
    /// The numbers, then which words of them have any, and so on; the last level is one word.
    levels: Vec<Vec<u64>>,
    bound: usize,
    members: usize,
}

impl Bits {
    /// Makes an empty set of numbers below `bound`.
    pub(crate) fn new(bound: usize) -> Self {
        let mut levels = Vec::new();
        let mut words = bound;
        loop {
            words = words.div_ceil(WORD_BITS).max(1);
            levels.push(vec![0; words]);
            if words == 1 {
                return Self { levels, bound, members: 0 };
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.members
    }

    pub(crate) fn contains(&self, number: usize) -> bool {
        number < self.bound && self.levels[0][number / WORD_BITS] >> (number % WORD_BITS) & 1 != 0
    }

    /// Adds a number below the bound. Returns whether it was not there.
    pub(crate) fn insert(&mut self, number: usize) -> bool {
        assert!(number < self.bound, "{number} in a set of numbers below {}", self.bound);
        if self.contains(number) {
            return false;
        }
        let mut index = number;
        for level in &mut self.levels {
            let word = &mut level[index / WORD_BITS];
            let was_empty = *word == 0;
            *word |= 1 << (index % WORD_BITS);
            if !was_empty {
                break;
            }
            index /= WORD_BITS;
        }
        self.members += 1;
        true
    }

    /// Takes a number out. Returns whether it was there.
    pub(crate) fn remove(&mut self, number: usize) -> bool {
        if !self.contains(number) {
            return false;
        }
        let mut index = number;
        for level in &mut self.levels {
            let word = &mut level[index / WORD_BITS];
            *word &= !(1 << (index % WORD_BITS));
            if *word != 0 {
                break;
            }
            index /= WORD_BITS;
        }
        self.members -= 1;
        true
    }

    /// Returns the smallest member.
    pub(crate) fn first(&self) -> Option<usize> {
        if self.members == 0 {
            return None;
        }
        Some(
            self.levels
                .iter()
                .rev()
                .fold(0, |index, level| index * WORD_BITS + level[index].trailing_zeros() as usize),
        )
    }

    /// Returns the smallest member that is at least `from`.
    pub(crate) fn first_from(&self, from: usize) -> Option<usize> {
        let mut index = from;
        let mut at = 0;
        // Up, until a word has a member to the right.
        loop {
            let level = self.levels.get(at)?;
            let (word, bit) = (index / WORD_BITS, index % WORD_BITS);
            let right = level.get(word).map_or(0, |word| word & (!0 << bit));
            if right != 0 {
                index = word * WORD_BITS + right.trailing_zeros() as usize;
                break;
            }
            index = word + 1;
            at += 1;
        }
        // Down again, to the leftmost each time.
        for level in self.levels[..at].iter().rev() {
            index = index * WORD_BITS + level[index].trailing_zeros() as usize;
        }
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it could not do by panicking")]
    use alloc::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set(
            bound in prop_oneof![1_usize..200, 4000..5000_usize, Just(300_000)],
            steps in prop::collection::vec((any::<bool>(), any::<usize>()), 0..300),
        ) {
            let mut bits = Bits::new(bound);
            let mut plain = BTreeSet::new();
            for (is_insert, number) in steps {
                let number = number % bound;
                if is_insert {
                    prop_assert_eq!(bits.insert(number), plain.insert(number));
                } else {
                    prop_assert_eq!(bits.remove(number), plain.remove(&number));
                }
                prop_assert_eq!(bits.len(), plain.len());
                prop_assert_eq!(bits.first(), plain.first().copied());
                prop_assert_eq!(bits.first_from(number), plain.range(number..).next().copied());
                prop_assert_eq!(bits.contains(number), plain.contains(&number));
            }
            prop_assert!(!bits.contains(bound));
            prop_assert_eq!(bits.first_from(bound), None);
        }
    }
}

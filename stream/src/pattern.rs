//! The pattern that a fill repeats: an element of 1 to 12 words, the same every time or counting up.
//!
//! A pattern is prepared once: its element is repeated until it fills whole cache lines (the
//! *block*: 1 line for elements of 8, 16, 32 and 64 bytes, up to 11 for one of 88), so that filling
//! is whole-line stores whatever the element's size. Not here: the stores themselves.
//!
//! Units: a word is 8 bytes in the machine's byte order; an element is counted in words here and
//! in bytes where a name ends in `bytes`.
//! Cost: preparing is some 200 additions; 1.6 KiB of memory each.

use std::fmt;

use crate::LINE_BYTES;
use crate::error::{MAX_ELEMENT_WORDS, StreamError};

/// Words of a line.
const LINE_WORDS: usize = LINE_BYTES / 8;
/// The longest block, in lines: that of an 11-word element. A 9-word one takes 9.
pub(crate) const BLOCK_LINES: usize = 11;
/// The longest block, in words.
pub(crate) const BLOCK_WORDS: usize = BLOCK_LINES * LINE_WORDS;
/// A block and the line after it, so that a whole block can be read from any of its first 8 words.
const ROOM_WORDS: usize = BLOCK_WORDS + LINE_WORDS;

/// A prepared repeating element for [`fill`](crate::fill): 8 to 96 bytes in steps of 8.
///
/// Word `j` of element `i` is `words[j] + i * steps[j]`, wrapping; a constant pattern has steps of
/// zero.
///
/// # Invariants
///
/// With `n` = `element_words` and `b` = the words of a block (the least common multiple of `n` and
/// 8): `words[k + b] == words[k] + steps[k]`, `steps[k] == element_steps[k % n] * (b / n)`, both for
/// `k < 8` beyond the block as well.
#[derive(Clone)]
#[repr(C, align(64))]
pub struct Pattern {
    words: [u64; ROOM_WORDS],
    steps: [u64; ROOM_WORDS],
    element_steps: [u64; MAX_ELEMENT_WORDS],
    element_words: usize,
    block_lines: usize,
    is_linear: bool,
}

impl Pattern {
    /// Takes the words of one element, which is the same every time.
    ///
    /// # Errors
    ///
    /// [`StreamError::ElementWords`] unless there are 1 to 12 words.
    pub fn constant(words: &[u64]) -> Result<Self, StreamError> {
        let zeroes = [0; MAX_ELEMENT_WORDS];
        // An element that is too long gets too few steps, but its own length is refused first.
        Self::linear(words, &zeroes[..words.len().min(MAX_ELEMENT_WORDS)])
    }

    /// Takes the words of element 0, and the growth of each from one element to the next.
    ///
    /// Additions wrap, so `u64::MAX` counts down. Steps that are all zero make a constant pattern.
    ///
    /// # Errors
    ///
    /// [`StreamError::ElementWords`] unless there are 1 to 12 words, and
    /// [`StreamError::StepWords`] unless there are as many steps.
    pub fn linear(words: &[u64], steps: &[u64]) -> Result<Self, StreamError> {
        let element_words = words.len();
        if element_words == 0 || element_words > MAX_ELEMENT_WORDS {
            return Err(StreamError::ElementWords { words: element_words });
        }
        if steps.len() != element_words {
            return Err(StreamError::StepWords { words: element_words, steps: steps.len() });
        }
        // lcm(n, 8) / 8: 8 is a power of two, so the common divisor is n's lowest set bit, at most 8.
        let block_lines = element_words >> element_words.trailing_zeros().min(3);
        let block_elements = (block_lines * LINE_WORDS / element_words) as u64; // at most 8
        let mut pattern = Self {
            words: [0; ROOM_WORDS],
            steps: [0; ROOM_WORDS],
            element_steps: [0; MAX_ELEMENT_WORDS],
            element_words,
            block_lines,
            is_linear: steps.iter().any(|step| *step != 0),
        };
        pattern.element_steps[..element_words].copy_from_slice(steps);
        let room = pattern.room_words();
        for k in 0..room {
            let (element, j) = ((k / element_words) as u64, k % element_words); // at most 96
            pattern.words[k] = words[j].wrapping_add(element.wrapping_mul(steps[j]));
            pattern.steps[k] = steps[j].wrapping_mul(block_elements);
        }
        Ok(pattern)
    }

    /// Returns the length of one element, in bytes.
    #[inline]
    #[must_use]
    pub fn element_bytes(&self) -> usize {
        self.element_words * 8
    }

    /// Returns the words of element 0.
    #[inline]
    #[must_use]
    pub fn element(&self) -> &[u64] {
        &self.words[..self.element_words]
    }

    /// Returns whether elements differ from each other.
    #[inline]
    #[must_use]
    pub fn is_linear(&self) -> bool {
        self.is_linear
    }

    /// Adds `deltas` to the words of every element, wrapping: a new base address for all of them.
    ///
    /// Cost: two vector additions for each 16 bytes of a 64-byte element (some 2 ns); some 20 ns for
    /// sizes that do not divide a line.
    ///
    /// # Panics
    ///
    /// Unless there are as many deltas as an element has words.
    #[inline]
    pub fn add(&mut self, deltas: &[u64]) {
        assert!(deltas.len() == self.element_words, "one delta for each word of an element");
        if let Ok(line) = deltas.try_into() {
            self.add_to_line(line);
        } else {
            self.add_to_all(deltas);
        }
    }

    /// `add` for elements of exactly one line: 16 additions without a loop over the element.
    #[inline]
    fn add_to_line(&mut self, deltas: &[u64; LINE_WORDS]) {
        for line in self.words.as_chunks_mut::<LINE_WORDS>().0.iter_mut().take(2) {
            for (word, delta) in line.iter_mut().zip(deltas) {
                *word = word.wrapping_add(*delta);
            }
        }
    }

    /// `add` for any element.
    fn add_to_all(&mut self, deltas: &[u64]) {
        let room = self.room_words();
        for element in self.words[..room].chunks_mut(self.element_words) {
            for (word, delta) in element.iter_mut().zip(deltas) {
                *word = word.wrapping_add(*delta);
            }
        }
    }

    /// How many words of the two arrays are in use: a block and one line.
    #[inline]
    fn room_words(&self) -> usize {
        (self.block_lines + 1) * LINE_WORDS
    }

    /// The length of a block: 1 to 11 lines.
    #[inline]
    pub(crate) fn block_lines(&self) -> usize {
        self.block_lines
    }

    /// The words of a block, and 8 more of the one after it.
    #[inline]
    pub(crate) fn words(&self) -> &[u64; ROOM_WORDS] {
        &self.words
    }

    /// The growth of each of [`Pattern::words`] from one block to the next.
    #[inline]
    pub(crate) fn steps(&self) -> &[u64; ROOM_WORDS] {
        &self.steps
    }

    /// Writes the words from number `first_word` of the endless pattern on to `out`.
    ///
    /// For architectures with streaming stores, whose misaligned fills go this way.
    #[cfg(uzone_asm)]
    pub(crate) fn write_words(&self, first_word: usize, out: &mut [[u8; 8]]) {
        let mut j = first_word % self.element_words;
        let mut element = (first_word / self.element_words) as u64; // usize is at most 64 bits
        for bytes in out {
            let grown = element.wrapping_mul(self.element_steps[j]);
            *bytes = self.words[j].wrapping_add(grown).to_ne_bytes();
            j += 1;
            if j == self.element_words {
                j = 0;
                element = element.wrapping_add(1);
            }
        }
    }
}

impl fmt::Debug for Pattern {
    /// Element 0 and its steps; the block is derived from them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pattern")
            .field("words", &self.element())
            .field("steps", &&self.element_steps[..self.element_words])
            .finish()
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.element() == other.element() && self.element_steps == other.element_steps
    }
}

impl Eq for Pattern {}

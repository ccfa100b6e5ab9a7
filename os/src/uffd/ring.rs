//! The last faults that were answered in handlers of signals: [`Ring`].
//!
//! A handler waits for nothing: it takes the next entry, and if another handler is still writing to that one,
//! which has come round, its own record is lost. `tests/loom.rs` searches the interleavings.

use crate::sync::{AtomicU64, Ordering};

/// The number of an entry that is being written.
const BUSY: u64 = u64::MAX;

/// One record, of words that belong together.
struct Entry {
    /// One more than the number of the record, [`BUSY`], or 0 while there is none.
    number: AtomicU64,
    words: [AtomicU64; Ring::WORDS],
}

/// Records, the last of which are kept.
pub(crate) struct Ring {
    entries: Box<[Entry]>,
    /// The number of written records.
    next: AtomicU64,
    /// The number of records that were taken out, or lost.
    taken: AtomicU64,
}

impl Ring {
    /// The number of words that a record has.
    pub(crate) const WORDS: usize = 3;

    /// Makes room for `keeps` records.
    pub(crate) fn new(keeps: usize) -> Self {
        let entry = || Entry {
            number: AtomicU64::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        };
        let entries = (0..keeps).map(|_| entry()).collect();
        Self { entries, next: AtomicU64::new(0), taken: AtomicU64::new(0) }
    }

    fn entry(&self, number: u64) -> Option<&Entry> {
        let count = self.entries.len() as u64;
        self.entries.get(usize::try_from(number.checked_rem(count)?).ok()?)
    }

    /// Writes a record. Called by handlers.
    pub(crate) fn push(&self, words: [u64; Self::WORDS]) {
        // Relaxed: only the number counts.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let Some(entry) = self.entry(number) else { return };
        // Acquire pairs with the Release of the one that wrote it before: its words are older. The words
        // are Release too, for a reader that finds one of them and then looks at the number again.
        if entry.number.swap(BUSY, Ordering::Acquire) == BUSY {
            return;
        }
        for (place, word) in entry.words.iter().zip(words) {
            place.store(word, Ordering::Release);
        }
        // Release pairs with the Acquire of `take`.
        entry.number.store(number + 1, Ordering::Release);
    }

    /// Takes the records out that were written since the last call, in order, and returns the number that were
    /// lost. One thread at a time calls it.
    pub(crate) fn take(&self, mut found: impl FnMut([u64; Self::WORDS])) -> u64 {
        // Relaxed: each entry publishes itself.
        let next = self.next.load(Ordering::Relaxed);
        let first = self.taken.swap(next, Ordering::Relaxed);
        let oldest = next.saturating_sub(self.entries.len() as u64).max(first);
        let mut lost = oldest - first;
        for number in oldest..next {
            match self.read(number) {
                Some(words) => found(words),
                None => lost += 1,
            }
        }
        lost
    }

    fn read(&self, number: u64) -> Option<[u64; Self::WORDS]> {
        let entry = self.entry(number)?;
        // Acquire pairs with the Release of `push`.
        if entry.number.load(Ordering::Acquire) != number + 1 {
            return None;
        }
        let mut words = [0; Self::WORDS];
        for (word, place) in words.iter_mut().zip(&entry.words) {
            // Acquire: if it is of a later record, that one's mark is seen below.
            *word = place.load(Ordering::Acquire);
        }
        (entry.number.load(Ordering::Relaxed) == number + 1).then_some(words)
    }
}

//! Copying in and out of memory that may change under us, without ever lending a slice of it.
//!
//! A shared mapping changes when another process writes, and two threads of ours may call at the
//! same time. So memory is seen as a row of atomic 64-bit words and every access is one whole,
//! aligned word; a byte in part of a word is changed by compare-and-swap, so that its neighbours
//! keep what someone else writes meanwhile. Racing calls may therefore see old and new words side
//! by side; they never see a torn word, and nothing about them is undefined.
//!
//! Gigabytes move the same way, and faster: [`Mapping::as_words`](crate::Mapping::as_words) lends the
//! words themselves, and `uzone-stream` clears and copies words by stores past the cache. Memory of
//! which we are the only user has slices ([`crate::Exclusive`]).
//!
//! Cost: a load and a store for 8 bytes, so a fraction of a memcpy in cache and about the same from
//! memory.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::options::RangeError;

const WORD: usize = size_of::<AtomicU64>();

/// Bytes that could not be copied in or out of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The bytes are not all inside.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The mapping is read-only.
    #[error("cannot write {len_bytes} bytes at {offset:#x}: the mapping is read-only")]
    ReadOnly {
        /// Where the write would have started.
        offset: u64,
        /// How many bytes were given.
        len_bytes: usize,
    },
    /// The bytes are not whole words.
    #[error("bytes {start:#x} to {end:#x} are no words: words start and end at multiples of 8")]
    CutsWord {
        /// Where they start.
        start: u64,
        /// Where they end.
        end: u64,
    },
}

/// Copies `out.len()` bytes that start `offset` bytes into `words`.
///
/// Relaxed is enough throughout this file: nothing else is published by these words, and whoever
/// passes messages through shared memory brings its own synchronisation.
///
/// # Panics
/// If the bytes are not all inside, which the caller has checked.
pub(crate) fn read(words: &[AtomicU64], offset: usize, out: &mut [u8]) {
    let mut next = offset / WORD;
    let skipped = offset % WORD;
    let mut rest = out;
    if skipped != 0 && !rest.is_empty() {
        let (head, tail) = rest.split_at_mut(rest.len().min(WORD - skipped));
        let word = words[next].load(Ordering::Relaxed).to_ne_bytes();
        head.copy_from_slice(&word[skipped..skipped + head.len()]);
        next += 1;
        rest = tail;
    }
    let (whole, tail) = rest.as_chunks_mut::<WORD>();
    let last = next + whole.len();
    for (chunk, word) in whole.iter_mut().zip(&words[next..last]) {
        *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
    }
    if !tail.is_empty() {
        let word = words[last].load(Ordering::Relaxed).to_ne_bytes();
        tail.copy_from_slice(&word[..tail.len()]);
    }
}

/// Copies `bytes` to where they start `offset` bytes into `words`.
///
/// # Panics
/// If the bytes are not all inside, which the caller has checked.
pub(crate) fn write(words: &[AtomicU64], offset: usize, bytes: &[u8]) {
    let mut next = offset / WORD;
    let skipped = offset % WORD;
    let mut rest = bytes;
    if skipped != 0 && !rest.is_empty() {
        let (head, tail) = rest.split_at(rest.len().min(WORD - skipped));
        replace_part(&words[next], skipped, head);
        next += 1;
        rest = tail;
    }
    let (whole, tail) = rest.as_chunks::<WORD>();
    for (chunk, word) in whole.iter().zip(&words[next..next + whole.len()]) {
        word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
    }
    if !tail.is_empty() {
        replace_part(&words[next + whole.len()], 0, tail);
    }
}

/// Replaces some bytes of a word and leaves the others to whoever writes them meanwhile.
fn replace_part(word: &AtomicU64, at: usize, bytes: &[u8]) {
    let mut old = word.load(Ordering::Relaxed);
    loop {
        let mut new = old.to_ne_bytes();
        new[at..at + bytes.len()].copy_from_slice(bytes);
        let new = u64::from_ne_bytes(new);
        // It ends: an exchange fails only because another thread's write succeeded.
        match word.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return,
            Err(seen) => old = seen,
        }
    }
}

/// Touches every page of `stride` bytes as a write that changes nothing.
///
/// This is what makes memory present on a kernel that cannot be asked to. An addition of zero is a
/// write to the memory system and loses no update of another thread. The compiler must not know that
/// it is zero, or it makes a load of it, and a load makes no page that can be written.
pub(crate) fn touch_for_write(words: &[AtomicU64], stride: usize) {
    for word in words.iter().step_by((stride / WORD).max(1)) {
        word.fetch_add(core::hint::black_box(0), Ordering::Relaxed);
    }
}

/// Touches every page of `stride` bytes as a read.
pub(crate) fn touch_for_read(words: &[AtomicU64], stride: usize) {
    for word in words.iter().step_by((stride / WORD).max(1)) {
        core::hint::black_box(word.load(Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> Vec<AtomicU64> {
        (0..4).map(|word| AtomicU64::new(u64::from_ne_bytes([word * 8 + 1; 8]))).collect()
    }

    fn all(words: &[AtomicU64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect()
    }

    #[test]
    fn every_offset_and_length_reads_what_a_slice_would() {
        let words = words();
        let expected = all(&words);
        for start in 0..=32 {
            for end in start..=32 {
                let mut out = vec![0xee; end - start];
                read(&words, start, &mut out);
                assert_eq!(out, expected[start..end], "{start}..{end}");
            }
        }
    }

    #[test]
    fn every_offset_and_length_writes_there_and_nothing_beside_it() {
        for start in 0..=32 {
            for end in start..=32 {
                let words = words();
                let mut expected = all(&words);
                let bytes: Vec<u8> = (100..).take(end - start).collect();
                expected[start..end].copy_from_slice(&bytes);
                write(&words, start, &bytes);
                assert_eq!(all(&words), expected, "{start}..{end}");
            }
        }
    }

    #[test]
    fn two_threads_writing_halves_of_one_word_lose_nothing() {
        let words = [AtomicU64::new(0)];
        std::thread::scope(|scope| {
            for (at, byte) in [(0, 0x11), (4, 0x22)] {
                let words = &words;
                scope.spawn(move || {
                    for _ in 0..10_000 {
                        write(words, at, &[byte; 4]);
                        let mut seen = [0; 4];
                        read(words, at, &mut seen);
                        assert_eq!(seen, [byte; 4]);
                    }
                });
            }
        });
        assert_eq!(all(&words), [0x11, 0x11, 0x11, 0x11, 0x22, 0x22, 0x22, 0x22]);
    }

    #[test]
    fn touching_changes_no_byte() {
        let words = words();
        let before = all(&words);
        touch_for_write(&words, 8);
        touch_for_read(&words, 16);
        assert_eq!(all(&words), before);
    }
}

//! Copying in and out of memory that may change under us, without ever lending a slice of it.
//!
//! A shared mapping changes when another process writes, and two threads of ours may call at the
//! same time. So memory is seen as a row of atomic 64-bit words and every access is one whole,
//! aligned word; a byte in part of a word is changed by compare-and-swap, so that its neighbours
//! keep the stores of another writer. Racing calls may therefore see old and new words side
//! by side; they never see a torn word, and nothing about them is undefined.
//!
//! It may also turn out not to be there, and touching it raises SIGBUS. On x86-64 the words are touched in
//! routines that the handler of [`sigbus`](crate::sigbus) knows, if it is installed: then the copy stops at the
//! bad word and returns an error. How a copy is cut into words is written once, here, and a [`Copier`] touches the words.
//!
//! Gigabytes move the same way, and faster: [`Mapping::zero_by`](crate::Mapping::zero_by) and
//! [`copy_by`](crate::Mapping::copy_by) take the stores of `uzone-stream`, of which many go past the cache,
//! and return an error as well if memory is not there. Memory of which we are the only user has slices
//! ([`crate::Exclusive`]).
//!
//! Cost: a load and a store for 8 bytes, so a fraction of a memcpy in cache and about the same from
//! memory.

use core::ops::Range;
use core::sync::atomic::AtomicU64;

use uzone_pages::{ErrorKind, PageSize, Touch};

use crate::map::options::Addr;
use crate::sigbus::copier::{Copier, Fault, WORD};
use crate::sigbus::error::BusKind;

/// A range of bytes that is not inside a mapping, or bytes that could not be copied in or out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The range has no byte, or ends before it starts.
    #[error("the range {start:#x} to {end:#x} has no byte")]
    Empty {
        /// The start.
        start: u64,
        /// The end.
        end: u64,
    },
    /// The range ends behind the mapping.
    #[error("bytes {start:#x} to {end:#x} are not all inside a mapping of {len_bytes:#x} bytes")]
    Beyond {
        /// The start.
        start: u64,
        /// The end; the largest number if that has no 64-bit number.
        end: u64,
        /// The length of the mapping.
        len_bytes: u64,
    },
    /// The range cuts a page.
    #[error("bytes {start:#x} to {end:#x} do not start and end at multiples of {page}")]
    CutsPage {
        /// The start.
        start: u64,
        /// The end.
        end: u64,
        /// The size of a page of the mapping.
        page: PageSize,
    },
    /// The mapping is read-only.
    #[error("cannot write {len_bytes} bytes at {offset:#x}: the mapping is read-only")]
    ReadOnly {
        /// The start of the write.
        offset: u64,
        /// The number of bytes that were given.
        len_bytes: usize,
    },
    /// The memory is not there: touching it raised SIGBUS. Only once
    /// [`sigbus::install`](crate::sigbus::install) was called; the process dies otherwise.
    #[error(
        "cannot {direction} the byte at {offset:#x} of the mapping, at {address}, after {copied_bytes} of {len_bytes} bytes: {kind}"
    )]
    Bus {
        /// The direction of the copy.
        direction: Touch,
        /// The address of the first byte that was not copied.
        address: Addr,
        /// The position, in bytes from the start of the mapping.
        offset: u64,
        /// The number of bytes before it that were copied. On a broken page they may be up to 31 fewer than
        /// were: the hardware names the page, and the code knows how many it has counted. None
        /// of a clearing or a copy by a [`CopyMethod`](uzone_stream::CopyMethod), which go in any order.
        copied_bytes: usize,
        /// The number of bytes that were to be copied.
        len_bytes: usize,
        /// The problem, as the kernel reports it.
        kind: BusKind,
        /// The part that is broken, as in [`BusError::lsb`](crate::sigbus::BusError::lsb).
        lsb: u8,
    },
    /// The bytes are not whole words.
    #[error(
        "bytes {start:#x} to {end:#x} are not whole words: words start and end at multiples of 8"
    )]
    CutsWord {
        /// The start.
        start: u64,
        /// The end.
        end: u64,
    },
}

impl AccessError {
    /// Refuses a range that is not one or more whole pages of memory of that length.
    ///
    /// # Errors
    /// [`AccessError::Empty`], [`AccessError::Beyond`] or [`AccessError::CutsPage`].
    pub fn check_pages(range: &Range<u64>, len_bytes: u64, page: PageSize) -> Result<(), Self> {
        let &Range { start, end } = range;
        if start >= end {
            return Err(Self::Empty { start, end });
        }
        if end > len_bytes {
            return Err(Self::Beyond { start, end, len_bytes });
        }
        if (start | end) & (page.bytes() - 1) != 0 {
            return Err(Self::CutsPage { start, end, page });
        }
        Ok(())
    }

    /// Returns the kind of failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Bus { kind: BusKind::ActionRequired | BusKind::ActionOptional, .. } => {
                ErrorKind::Poisoned
            }
            Self::Bus { .. } => ErrorKind::Io,
            _ => ErrorKind::InvalidInput,
        }
    }
}

/// Copies `out.len()` bytes that start `offset` bytes into `words`.
///
/// # Errors
/// [`Fault`] at the first word that is not there. The bytes before it are copied.
///
/// # Panics
/// If the bytes are not all inside, which the caller has checked.
pub(crate) fn read<C: Copier>(
    words: &[AtomicU64],
    offset: usize,
    out: &mut [u8],
) -> Result<(), Fault> {
    let mut next = offset / WORD;
    let skipped = offset % WORD;
    let mut rest = out;
    if skipped != 0 && !rest.is_empty() {
        let (head, tail) = rest.split_at_mut(rest.len().min(WORD - skipped));
        let word = C::load(&words[next])?.to_ne_bytes();
        head.copy_from_slice(&word[skipped..skipped + head.len()]);
        next += 1;
        rest = tail;
    }
    let (whole, tail) = rest.as_chunks_mut::<WORD>();
    let last = next + whole.len();
    if !whole.is_empty() {
        C::copy_out(&words[next..last], whole)?;
    }
    if !tail.is_empty() {
        let word = C::load(&words[last])?.to_ne_bytes();
        tail.copy_from_slice(&word[..tail.len()]);
    }
    Ok(())
}

/// Copies `bytes` to where they start `offset` bytes into `words`.
///
/// # Errors
/// [`Fault`] at the first word that is not there. The bytes before it are copied.
///
/// # Panics
/// If the bytes are not all inside, which the caller has checked.
pub(crate) fn write<C: Copier>(
    words: &[AtomicU64],
    offset: usize,
    bytes: &[u8],
) -> Result<(), Fault> {
    let mut next = offset / WORD;
    let skipped = offset % WORD;
    let mut rest = bytes;
    if skipped != 0 && !rest.is_empty() {
        let (head, tail) = rest.split_at(rest.len().min(WORD - skipped));
        replace_part::<C>(&words[next], skipped, head)?;
        next += 1;
        rest = tail;
    }
    let (whole, tail) = rest.as_chunks::<WORD>();
    let last = next + whole.len();
    if !whole.is_empty() {
        C::copy_in(&words[next..last], whole)?;
    }
    if !tail.is_empty() {
        replace_part::<C>(&words[last], 0, tail)?;
    }
    Ok(())
}

/// Replaces some bytes of a word. Concurrent writes to the others are kept.
fn replace_part<C: Copier>(word: &AtomicU64, at: usize, bytes: &[u8]) -> Result<(), Fault> {
    let mut keep = [0xff; WORD];
    let mut bits = [0; WORD];
    keep[at..at + bytes.len()].fill(0);
    bits[at..at + bytes.len()].copy_from_slice(bytes);
    C::merge(word, u64::from_ne_bytes(keep), u64::from_ne_bytes(bits))
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::Ordering;

    use super::*;
    use crate::sigbus::Best;
    use crate::sigbus::plain::Plain;

    /// More than a turn of the guarded loop, and not a multiple of it.
    const WORDS: usize = 11;

    fn words() -> Vec<AtomicU64> {
        (1..)
            .step_by(8)
            .take(WORDS)
            .map(|first: u8| {
                AtomicU64::new(u64::from_ne_bytes(core::array::from_fn(|at| {
                    first + u8::try_from(at).unwrap()
                })))
            })
            .collect()
    }

    fn all(words: &[AtomicU64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect()
    }

    fn reads_what_a_slice_would<C: Copier>() {
        let words = words();
        let expected = all(&words);
        for start in 0..=WORDS * 8 {
            for end in start..=WORDS * 8 {
                // Every alignment of the other side, too.
                let shift = (start + end) % 8;
                let mut out = vec![0xee; end - start + 16];
                read::<C>(&words, start, &mut out[shift..shift + end - start]).unwrap();
                let (before, rest) = out.split_at(shift);
                let (seen, behind) = rest.split_at(end - start);
                assert_eq!(seen, &expected[start..end], "{start}..{end}");
                assert!(before.iter().chain(behind).all(|&byte| byte == 0xee), "{start}..{end}");
            }
        }
    }

    #[test]
    fn every_offset_and_length_reads_what_a_slice_would() {
        reads_what_a_slice_would::<Plain>();
        reads_what_a_slice_would::<Best>();
    }

    fn writes_there_and_nothing_beside_it<C: Copier>() {
        for start in 0..=WORDS * 8 {
            for end in start..=WORDS * 8 {
                let words = words();
                let mut expected = all(&words);
                let shift = (start + end) % 8;
                let bytes: Vec<u8> = (100..).take(end - start + shift).collect();
                expected[start..end].copy_from_slice(&bytes[shift..]);
                write::<C>(&words, start, &bytes[shift..]).unwrap();
                assert_eq!(all(&words), expected, "{start}..{end}");
            }
        }
    }

    #[test]
    fn every_offset_and_length_writes_there_and_nothing_beside_it() {
        writes_there_and_nothing_beside_it::<Plain>();
        writes_there_and_nothing_beside_it::<Best>();
    }

    #[test]
    fn long_copies_are_the_same_by_each_way() {
        let mut random = 1_u64;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(random >> 33).unwrap() % below
        };
        let words: Vec<_> = (0..4096).map(|word| AtomicU64::new(word * 0x9e37_79b9)).collect();
        let len = words.len() * 8;
        for _ in 0..300 {
            let start = next(len);
            let end = start + next(len - start + 1);
            let (mut plain, mut best) = (vec![1; end - start], vec![2; end - start]);
            read::<Plain>(&words, start, &mut plain).unwrap();
            read::<Best>(&words, start, &mut best).unwrap();
            assert!(plain == best, "{start}..{end}");
            let to = next(len - (end - start) + 1);
            let other: Vec<_> =
                words.iter().map(|word| AtomicU64::new(word.load(Ordering::Relaxed))).collect();
            write::<Plain>(&other, to, &plain).unwrap();
            write::<Best>(&words, to, &best).unwrap();
            assert!(all(&words) == all(&other), "{start}..{end} to {to}");
        }
    }

    fn loses_nothing<C: Copier>() {
        let words = [AtomicU64::new(0)];
        std::thread::scope(|scope| {
            for (at, byte) in [(0, 0x11), (4, 0x22)] {
                let words = &words;
                scope.spawn(move || {
                    for _ in 0..10_000 {
                        write::<C>(words, at, &[byte; 4]).unwrap();
                        let mut seen = [0; 4];
                        read::<C>(words, at, &mut seen).unwrap();
                        assert_eq!(seen, [byte; 4]);
                    }
                });
            }
        });
        assert_eq!(all(&words), [0x11, 0x11, 0x11, 0x11, 0x22, 0x22, 0x22, 0x22]);
    }

    #[test]
    fn two_threads_writing_halves_of_one_word_lose_nothing() {
        loses_nothing::<Plain>();
        loses_nothing::<Best>();
    }

    #[test]
    fn no_reader_sees_a_word_half_written() {
        let words: Vec<_> = (0..64).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for round in 0..20_000_u32 {
                    let byte = round.to_ne_bytes()[0];
                    write::<Best>(&words, 0, &[byte; 512]).unwrap();
                }
            });
            let mut seen = [0; 512];
            while !writer.is_finished() {
                read::<Best>(&words, 0, &mut seen).unwrap();
                for word in seen.as_chunks::<8>().0 {
                    assert_eq!(*word, [word[0]; 8], "a torn word");
                }
            }
        });
    }
}

//! Bytes of an object that are requested before they are read: [`Requests`].
//!
//! A reader announces the ranges that it will read ([`Requests::announce`]). They are requested in chunks. A chunk is
//! dropped when all of it was read, or when later ranges need its room and reads of other bytes have left it behind.
//! Pure decisions; the caller sends the requests.
//!
//! Units: bytes of the object.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::source::joined;

/// The longest request.
const CHUNK: u64 = 2 << 20;
/// How many bytes are kept. A chunk that is older than as many read bytes gives room.
const MOST: u64 = 64 << 20;
/// How far apart requested ranges are at least: a shorter gap costs less than another request.
const GAP: u64 = 32 << 10;

/// Requests that run ahead of reads.
#[derive(Debug)]
pub(super) struct Requests {
    len: u64,
    /// By where they start. They do not overlap.
    chunks: BTreeMap<u64, Chunk>,
    bytes: u64,
    /// How many bytes were read so far.
    read: u64,
}

#[derive(Debug)]
struct Chunk {
    end: u64,
    /// `None` until they have come.
    bytes: Option<Vec<u8>>,
    /// A reader has waited long enough; no other one waits.
    is_late: bool,
    /// How many bytes of it were not read.
    left: u64,
    /// How many bytes of the object had been read when it was announced.
    since: u64,
}

/// Whether bytes are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    All,
    /// Some of them were requested and have not come.
    Coming,
    No,
}

impl Requests {
    /// Knows nothing of an object of that length.
    pub(super) fn new(len: u64) -> Self {
        Self { len, chunks: BTreeMap::new(), bytes: 0, read: 0 }
    }

    /// Takes ranges that will be read, in ascending order. Returns the ranges to request, as far as there is room; each of
    /// them has to arrive, or to be given up, by [`Requests::arrive`].
    pub(super) fn announce(&mut self, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        let mut wanted = Vec::new();
        for range in joined(ranges, GAP) {
            self.claim(range.start..range.end.min(self.len), &mut wanted);
        }
        wanted
    }

    /// Keeps the last bytes, as if they had been announced.
    pub(super) fn keep_tail(&mut self, tail: Vec<u8>) {
        let start = self.len.saturating_sub(tail.len() as u64);
        self.announce(std::slice::from_ref(&(start..self.len)));
        self.arrive(start, Some(tail));
    }

    /// Makes chunks of the parts of a range that no chunk has.
    fn claim(&mut self, range: Range<u64>, wanted: &mut Vec<Range<u64>>) {
        let mut at = range.start;
        while at < range.end {
            let before = self.chunks.range(..=at).next_back().map(|(_, chunk)| chunk.end);
            if let Some(end) = before.filter(|end| *end > at) {
                at = end;
                continue;
            }
            let next = self.chunks.range(at..).next().map_or(self.len, |(start, _)| *start);
            let end = range.end.min(at + CHUNK).min(next);
            if self.bytes + (end - at) > MOST {
                self.drop_the_old();
            }
            if self.bytes + (end - at) > MOST {
                return;
            }
            let (left, since) = (end - at, self.read);
            self.bytes += left;
            self.chunks.insert(at, Chunk { end, bytes: None, is_late: false, left, since });
            wanted.push(at..end);
            at = end;
        }
    }

    /// Drops the chunks that as many bytes were read past as are kept.
    fn drop_the_old(&mut self) {
        let is_old = |chunk: &Chunk| self.read - chunk.since >= MOST;
        let old = self.chunks.iter().filter(|(_, chunk)| is_old(chunk)).map(|(start, _)| *start);
        old.collect::<Vec<_>>().into_iter().for_each(|start| self.drop_chunk(start));
    }

    fn drop_chunk(&mut self, start: u64) {
        if let Some(chunk) = self.chunks.remove(&start) {
            self.bytes -= chunk.end - start;
        }
    }

    /// Takes the bytes of a chunk, or gives it up without. One that was dropped meanwhile stays so.
    pub(super) fn arrive(&mut self, start: u64, bytes: Option<Vec<u8>>) {
        match (self.chunks.get_mut(&start), bytes) {
            (Some(chunk), Some(bytes)) if bytes.len() as u64 == chunk.end - start => {
                chunk.bytes = Some(bytes);
            }
            (Some(chunk), _) if chunk.bytes.is_none() => self.drop_chunk(start),
            _ => {}
        }
    }

    /// Notes that bytes are read from elsewhere.
    pub(super) fn note_read(&mut self, range: &Range<u64>) {
        self.read += range.end - range.start;
    }

    /// Copies a range that is kept.
    pub(super) fn copy(&mut self, range: &Range<u64>, out: &mut [u8]) -> Kept {
        let (mut at, mut kept, mut over) = (range.start, Kept::All, Vec::new());
        let place = |at: u64, from: u64| usize::try_from(at - from).unwrap_or(usize::MAX);
        while at < range.end {
            let before = self.chunks.range_mut(..=at).next_back();
            let Some((start, chunk)) = before.filter(|(_, chunk)| chunk.end > at) else {
                return Kept::No;
            };
            let end = chunk.end.min(range.end);
            match &chunk.bytes {
                Some(bytes) => {
                    out[place(at, range.start)..place(end, range.start)]
                        .copy_from_slice(&bytes[place(at, *start)..place(end, *start)]);
                    chunk.left = chunk.left.saturating_sub(end - at);
                    over.extend((chunk.left == 0).then_some(*start));
                }
                None if chunk.is_late => return Kept::No,
                None => kept = Kept::Coming,
            }
            at = end;
        }
        if kept == Kept::All {
            self.note_read(range);
            over.into_iter().for_each(|start| self.drop_chunk(start));
        }
        kept
    }

    /// Has no reader wait for the chunks of a range any more.
    pub(super) fn give_up(&mut self, range: &Range<u64>) {
        for start in self.touching(range) {
            if let Some(chunk) = self.chunks.get_mut(&start) {
                chunk.is_late = true;
            }
        }
    }

    /// Drops the bytes of a range that are kept.
    pub(super) fn forget(&mut self, range: &Range<u64>) {
        self.touching(range).into_iter().for_each(|start| self.drop_chunk(start));
    }

    fn touching(&self, range: &Range<u64>) -> Vec<u64> {
        let touching = self.chunks.range(..range.end).filter(|(_, chunk)| chunk.end > range.start);
        touching.map(|(start, _)| *start).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;

    const LEN: u64 = 400 << 20;
    const READ: u64 = 20_000;

    fn byte(at: u64) -> u8 {
        u8::try_from(at % 251).unwrap()
    }

    fn answer(ahead: &mut Requests, wanted: &[Range<u64>]) {
        for range in wanted {
            ahead.arrive(range.start, Some(range.clone().map(byte).collect()));
        }
    }

    #[test]
    fn announced_ranges_are_requested_once_in_few_parts_and_dropped_when_they_were_read() {
        let mut ahead = Requests::new(LEN);
        let ranges: Vec<_> =
            (0..100).map(|number| number * (30 << 10)..number * (30 << 10) + READ).collect();
        let wanted = ahead.announce(&ranges);
        assert_eq!(wanted.len(), 2, "{wanted:?}");
        assert_eq!(ahead.announce(&ranges), []);
        let mut out = vec![0; 20_000];
        assert_eq!(ahead.copy(&ranges[50], &mut out), Kept::Coming);
        answer(&mut ahead, &wanted);
        for range in ranges {
            assert_eq!(ahead.copy(&range, &mut out), Kept::All);
            assert!(out.iter().zip(range).all(|(found, at)| *found == byte(at)));
        }
        // The gaps were not read.
        assert_eq!(ahead.chunks.len(), 2);
        assert_eq!(ahead.copy(&(LEN - 10..LEN), &mut [0; 10]), Kept::No);
        let all = 8 << 20..12 << 20;
        let wanted = ahead.announce(from_ref(&all));
        answer(&mut ahead, &wanted);
        for at in all.step_by(1 << 16) {
            let mut out = vec![0; 1 << 16];
            assert_eq!(ahead.copy(&(at..at + (1 << 16)), &mut out), Kept::All);
        }
        assert_eq!(ahead.chunks.len(), 2, "chunks that were read are dropped");
    }

    #[test]
    fn there_is_room_for_a_limit_and_chunks_that_reads_have_left_behind_give_theirs() {
        let mut ahead = Requests::new(LEN);
        let wanted = ahead.announce(from_ref(&(0..LEN)));
        assert_eq!((wanted.len() as u64, ahead.bytes), (MOST / CHUNK, MOST));
        let other = LEN / 2..LEN / 2 + READ;
        assert_eq!(ahead.announce(from_ref(&other)), [], "there is no room");
        ahead.note_read(&(0..MOST));
        assert_eq!(ahead.announce(from_ref(&other)), from_ref(&other));
        assert_eq!(ahead.bytes, READ);
    }

    #[test]
    fn a_request_that_failed_or_was_forgotten_is_not_waited_for() {
        let mut ahead = Requests::new(LEN);
        let first = ahead.announce(from_ref(&(0..READ))).remove(0);
        let inside = first.start..first.start + 10;
        assert_eq!(ahead.copy(&inside, &mut [0; 10]), Kept::Coming);
        ahead.give_up(&inside);
        assert_eq!(ahead.copy(&inside, &mut [0; 10]), Kept::No, "one reader waits, and no other");
        ahead.arrive(first.start, None);
        assert_eq!(ahead.copy(&inside, &mut [0; 10]), Kept::No);
        ahead.arrive(first.start, Some(vec![0; 10]));
        assert_eq!(ahead.copy(&inside, &mut [0; 10]), Kept::No, "it was given up");
        let wanted = ahead.announce(from_ref(&(0..100)));
        answer(&mut ahead, &wanted);
        assert_eq!(ahead.copy(&(5..15), &mut [0; 10]), Kept::All);
        ahead.forget(&(14..20));
        assert_eq!((ahead.copy(&(5..15), &mut [0; 10]), ahead.bytes), (Kept::No, 0));
    }
}

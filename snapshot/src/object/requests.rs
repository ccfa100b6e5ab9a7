//! Which bytes of an object are requested before they are read: [`Requests`].
//!
//! A reader in order is one whose reads follow each other, give or take [`SLACK`]: several threads that
//! share the work are one reader. Behind its third read, requests run ahead of it, at most four times as far
//! as it has read, and to 32 MiB, which is kept full by single requests; not while it leaves out more
//! than it reads, as reads at random of a small object do that are near each other. An announced range is
//! requested in any case ([`Requests::announce`]).
//! Pure decisions; the caller sends the requests.
//!
//! Units: bytes of the object.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::source::joined;

/// How far reads of one reader may be from where they would be in order.
const SLACK: u64 = 1 << 20;
/// The longest request.
const CHUNK: u64 = 2 << 20;
/// How far requests run ahead at most.
const FARTHEST: u64 = 32 << 20;
/// After how many reads in order.
const IN_ORDER: u32 = 2;
/// How many bytes are requested ahead for each that a reader has read in order.
const TIMES: u64 = 4;
/// How many readers are known, and how many bytes are kept for all of them.
const READERS: usize = 8;
const MOST: u64 = 64 << 20;
/// How many of these are of chunks that were announced, and how far apart those are at least: a shorter gap
/// costs less than another request.
const ANNOUNCED: u64 = 16 << 20;
const GAP: u64 = 32 << 10;

/// Requests that run ahead of reads, and the readers that they are for.
#[derive(Debug)]
pub(super) struct Requests {
    len: u64,
    /// By where they start. They do not overlap.
    chunks: BTreeMap<u64, Chunk>,
    bytes: u64,
    readers: Vec<Reader>,
    reads: u64,
    /// Announced ranges, the oldest first, and their bytes.
    announced: VecDeque<Range<u64>>,
    announced_bytes: u64,
}

#[derive(Debug)]
struct Chunk {
    end: u64,
    /// `None` until they have come.
    bytes: Option<Vec<u8>>,
    /// A reader has waited long enough; no other one waits.
    is_late: bool,
    /// It stays until there is no room for others that are announced, wherever readers are.
    is_announced: bool,
}

#[derive(Debug)]
struct Reader {
    /// Where the count of skipped bytes starts.
    start: u64,
    /// How many bytes it has read since.
    read: u64,
    /// How many bytes it has read in order.
    earned: u64,
    /// Where its farthest read ended.
    next: u64,
    in_order: u32,
    /// Up to where was requested for it, and from where on that is kept.
    requested: u64,
    kept: u64,
    latest: u64,
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
        Self {
            len,
            chunks: BTreeMap::new(),
            bytes: 0,
            readers: Vec::new(),
            reads: 0,
            announced: VecDeque::new(),
            announced_bytes: 0,
        }
    }

    /// Takes ranges that will be read, in ascending order. Returns the ranges to request, as
    /// [`Requests::note`] does. Chunks that were announced long ago are dropped for them.
    pub(super) fn announce(&mut self, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        let mut wanted = Vec::new();
        for range in joined(ranges, GAP) {
            let claimed = self.claim(range.start..range.end.min(self.len));
            for claimed in claimed {
                if let Some(chunk) = self.chunks.get_mut(&claimed.start) {
                    chunk.is_announced = true;
                }
                self.announced_bytes += claimed.end - claimed.start;
                self.announced.push_back(claimed.clone());
                wanted.push(claimed);
            }
            while self.announced_bytes > ANNOUNCED
                && let Some(oldest) = self.announced.pop_front()
            {
                self.announced_bytes -= oldest.end - oldest.start;
                self.drop_chunk(oldest.start);
            }
        }
        wanted
    }

    /// Keeps the last bytes, as if they had been announced.
    pub(super) fn keep_tail(&mut self, tail: Vec<u8>) {
        let start = self.len.saturating_sub(tail.len() as u64);
        self.announce(std::slice::from_ref(&(start..self.len)));
        self.arrive(start, Some(tail));
    }

    /// Records a read. Returns the ranges to request; each of them has to arrive, or to be given up, by
    /// [`Requests::arrive`].
    pub(super) fn note(&mut self, range: &Range<u64>) -> Vec<Range<u64>> {
        self.reads += 1;
        let is_near = |reader: &Reader| {
            (reader.next.saturating_sub(SLACK)..=reader.next + SLACK).contains(&range.start)
        };
        let Some(at) = self.readers.iter().position(is_near) else {
            self.meet(range);
            return Vec::new();
        };
        let reader = &mut self.readers[at];
        reader.latest = self.reads;
        reader.read += range.end - range.start;
        reader.earned += range.end - range.start;
        if range.end <= reader.next {
            return Vec::new();
        }
        reader.next = range.end;
        reader.in_order += 1;
        let passed = reader.kept..reader.next.saturating_sub(SLACK);
        let dropped = self.drop_chunks(&passed);
        let reader = &mut self.readers[at];
        reader.kept = reader.kept.max(dropped);
        let span = reader.next.saturating_sub(reader.start);
        if span > 2 * reader.read {
            reader.earned = 0;
        }
        if span > SLACK {
            // Older reads count less.
            reader.start += span / 2;
            reader.read -= reader.read / 2;
        }
        if reader.in_order < IN_ORDER || reader.earned == 0 {
            return Vec::new();
        }
        let window = (TIMES * reader.earned).min(FARTHEST);
        reader.requested = reader.requested.max(reader.next);
        let left = reader.requested - reader.next;
        // There is room for a request: if all of a window were requested at once, it would come at once, and
        // the link would be idle until half of it is read.
        if left > window / 2 && left + CHUNK > window {
            return Vec::new();
        }
        let end = (reader.next + window).min(self.len);
        let start = reader.requested;
        let wanted = self.claim(start..end);
        if let Some(last) = wanted.last() {
            self.readers[at].requested = last.end;
        }
        wanted
    }

    /// Knows a new reader, in the place of the one that read the longest time ago if there are too many.
    fn meet(&mut self, range: &Range<u64>) {
        if self.readers.len() == READERS {
            let oldest = (0..READERS).min_by_key(|at| self.readers[*at].latest).unwrap_or(0);
            let Reader { kept, requested, .. } = self.readers.swap_remove(oldest);
            self.drop_chunks(&(kept..requested));
        }
        let next = range.end;
        let reader = Reader {
            start: range.start,
            read: next - range.start,
            earned: next - range.start,
            next,
            in_order: 0,
            requested: next,
            kept: next.saturating_sub(SLACK),
            latest: self.reads,
        };
        self.readers.push(reader);
    }

    /// Makes chunks of the parts of a range that no chunk has, as far as there is room.
    fn claim(&mut self, range: Range<u64>) -> Vec<Range<u64>> {
        let (mut at, mut wanted) = (range.start, Vec::new());
        while at < range.end {
            let before = self.chunks.range(..=at).next_back().map(|(_, chunk)| chunk.end);
            if let Some(end) = before.filter(|end| *end > at) {
                at = end;
                continue;
            }
            let next = self.chunks.range(at..).next().map_or(self.len, |(start, _)| *start);
            let end = range.end.min(at + CHUNK).min(next);
            if self.bytes + (end - at) > MOST {
                break;
            }
            self.bytes += end - at;
            self.chunks.insert(at, Chunk { end, bytes: None, is_late: false, is_announced: false });
            wanted.push(at..end);
            at = end;
        }
        wanted
    }

    /// Drops the chunks that are wholly in a range. Returns where the last of them ended, or 0.
    fn drop_chunks(&mut self, range: &Range<u64>) -> u64 {
        if range.is_empty() {
            return 0;
        }
        let inside = self.chunks.range(range.clone());
        let inside = inside.filter(|(_, chunk)| chunk.end <= range.end && !chunk.is_announced);
        let dropped: Vec<(u64, u64)> = inside.map(|(start, chunk)| (*start, chunk.end)).collect();
        dropped.iter().for_each(|(start, _)| self.drop_chunk(*start));
        dropped.last().map_or(0, |(_, end)| *end)
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

    /// Copies a range that is kept.
    pub(super) fn copy(&self, range: &Range<u64>, out: &mut [u8]) -> Kept {
        let (mut at, mut kept) = (range.start, Kept::All);
        while at < range.end {
            let before = self.chunks.range(..=at).next_back();
            let Some((start, chunk)) = before.filter(|(_, chunk)| chunk.end > at) else {
                return Kept::No;
            };
            let end = chunk.end.min(range.end);
            let place = |at: u64, from: u64| usize::try_from(at - from).unwrap_or(usize::MAX);
            match &chunk.bytes {
                Some(bytes) => out[place(at, range.start)..place(end, range.start)]
                    .copy_from_slice(&bytes[place(at, *start)..place(end, *start)]),
                None if chunk.is_late => return Kept::No,
                None => kept = Kept::Coming,
            }
            at = end;
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

    const LEN: u64 = 200 << 20;
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
    fn a_reader_in_order_finds_everything_behind_its_third_read() {
        let mut ahead = Requests::new(LEN);
        let (mut at, mut requested, mut out) = (5000, 0, vec![0; 20_000]);
        while at + READ <= 20 << 20 {
            let wanted = ahead.note(&(at..at + READ));
            assert!(wanted.iter().all(|range| range.end - range.start <= CHUNK));
            requested += wanted.iter().map(|range| range.end - range.start).sum::<u64>();
            let kept = ahead.copy(&(at..at + READ), &mut out);
            answer(&mut ahead, &wanted);
            if at >= 5000 + 4 * READ {
                assert_eq!(kept, Kept::All, "{at}");
                assert!(out.iter().zip(at..).all(|(found, at)| *found == byte(at)));
            }
            assert!(ahead.bytes <= MOST);
            at += READ;
        }
        assert!(requested <= at + FARTHEST + CHUNK, "each byte once: {requested}");
        assert!(ahead.bytes <= FARTHEST + 2 * CHUNK + SLACK, "what was read is dropped");
    }

    #[test]
    fn the_largest_window_is_kept_full_by_single_requests() {
        let mut ahead = Requests::new(LEN);
        for at in (0..150 << 20).step_by(1 << 16) {
            let wanted = ahead.note(&(at..at + (1 << 16)));
            answer(&mut ahead, &wanted);
            if at >= 64 << 20 {
                let reader = &ahead.readers[0];
                assert!(wanted.len() <= 1, "{wanted:?}");
                assert!(reader.requested - reader.next >= FARTHEST - 2 * CHUNK, "{at}");
            }
        }
    }

    #[test]
    fn reads_at_random_request_nothing() {
        let mut ahead = Requests::new(LEN);
        for number in 0..100_u64 {
            let at = number * 37 % 100 * (2 << 20);
            assert!(ahead.note(&(at..at + READ)).is_empty(), "{number}");
        }
        assert_eq!(ahead.copy(&(0..10), &mut [0; 10]), Kept::No);
        assert!(ahead.readers.len() <= READERS);
        // Of an object so small that most are near one before.
        for number in 0..100_u64 {
            let at = number * 37 % 100 * (280 << 10);
            assert!(ahead.note(&(at..at + READ)).is_empty(), "{number}");
        }
    }

    #[test]
    fn what_is_announced_is_requested_once_in_few_parts_and_kept_within_a_limit() {
        let mut ahead = Requests::new(LEN);
        let ranges: Vec<_> =
            (0..100).map(|number| number * (30 << 10)..number * (30 << 10) + READ).collect();
        let wanted = ahead.announce(&ranges);
        assert_eq!(wanted.len(), 2, "{wanted:?}");
        assert_eq!(ahead.announce(&ranges), []);
        assert_eq!(ahead.copy(&ranges[50], &mut vec![0; 20_000]), Kept::Coming);
        answer(&mut ahead, &wanted);
        let mut out = vec![0; 20_000];
        for range in ranges {
            assert_eq!(ahead.copy(&range, &mut out), Kept::All);
            assert!(out.iter().zip(range).all(|(found, at)| *found == byte(at)));
        }
        for number in (0..100).rev() {
            ahead.note(&(number << 20..(number << 20) + READ));
        }
        assert_eq!(ahead.copy(&(0..READ), &mut out), Kept::All, "other readers do not drop it");
        for start in (10 << 20..LEN - READ).step_by(1 << 20) {
            let range = start..start + READ;
            assert_eq!(ahead.announce(from_ref(&range)), from_ref(&range));
        }
        let far: Vec<_> =
            (1..20).map(|number| number * (10 << 20)..(number + 1) * (10 << 20)).collect();
        let requested = far.iter().flat_map(|range| ahead.announce(from_ref(range)));
        assert!(requested.count() > 80);
        assert!(ahead.bytes <= ANNOUNCED && ahead.announced_bytes <= ANNOUNCED, "{}", ahead.bytes);
        assert_eq!(ahead.copy(&(0..10), &mut [0; 10]), Kept::No, "the oldest gave room");
    }

    #[test]
    fn readers_that_take_turns_are_both_in_order_and_the_limit_holds() {
        let mut ahead = Requests::new(LEN);
        let mut at = [0, 50 << 20, 100 << 20, 150 << 20];
        for _ in 0..1000 {
            for at in &mut at {
                let wanted = ahead.note(&(*at..*at + READ));
                answer(&mut ahead, &wanted);
                *at += READ;
                assert!(ahead.bytes <= MOST);
                let sum: u64 = ahead.chunks.iter().map(|(start, chunk)| chunk.end - start).sum();
                assert_eq!(sum, ahead.bytes);
            }
        }
        assert!(ahead.bytes > 0);
    }

    #[test]
    fn a_request_that_failed_or_was_forgotten_is_not_waited_for() {
        let mut ahead = Requests::new(LEN);
        let wanted: Vec<_> =
            (0..4).flat_map(|number| ahead.note(&(number * READ..(number + 1) * READ))).collect();
        let first = wanted[0].clone();
        let inside = first.start..first.start + 10;
        assert_eq!(ahead.copy(&inside, &mut [0; 10]), Kept::Coming);
        ahead.give_up(&inside);
        assert_eq!(ahead.copy(&inside, &mut [0; 10]), Kept::No, "one reader waits, and no other");
        ahead.arrive(first.start, None);
        assert_eq!(ahead.copy(&inside, &mut [0; 10]), Kept::No);
        ahead.arrive(first.start, Some(vec![0; 10]));
        assert_eq!(ahead.copy(&inside, &mut [0; 10]), Kept::No, "it was given up");
        let mut ahead = Requests::new(LEN);
        let wanted = ahead.claim(0..100);
        answer(&mut ahead, &wanted);
        assert_eq!(ahead.copy(&(5..15), &mut [0; 10]), Kept::All);
        ahead.forget(&(14..20));
        assert_eq!((ahead.copy(&(5..15), &mut [0; 10]), ahead.bytes), (Kept::No, 0));
    }
}

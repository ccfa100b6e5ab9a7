//! Cached or streaming: which store is faster for how many bytes, found by a short measurement.
//!
//! This file is about patterned fills, and has the tools of the measurement; `ways.rs` measures
//! clearing and copying with them.
//!
//! Size alone does not decide. A destination that is in the cache is written fastest through the
//! cache; one that is not, and that nobody reads soon, is written fastest past it; one that is read
//! at once pays for having been sent to memory. So the caller says what the destination was and
//! what comes next ([`Was`], [`Next`]), and the measurement gives one length for each case from
//! which on streaming wins.
//!
//! Not here: what a bystander loses when its lines are pushed out of the cache (streaming spares
//! them at any length), and two threads at once (the lengths are those of one).
//!
//! A length is looked for by bisection: below it cached stores won, from it on streaming ones did.
//!
//! Others may have the core meanwhile. So a length is decided when two rounds agree, or by the best of
//! five; and time that is too long for what was done is not taken off the time there is, or a busy
//! machine would be left with the defaults.
//!
//! Units: lengths in bytes. Cost: one measurement per process, 4 MiB of memory while it runs, and 20 ms
//! at most on a core of its own; where others have that meanwhile, up to 100 ms of theirs. No system
//! call inside a timed part except what reading the clock is.

use std::fmt;
use std::hint::black_box;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::path::{Path, Ready};
use crate::pattern::Pattern;
use crate::{LINE_BYTES, arch};

/// The memory measured on, and the longest length tried.
pub(crate) const BUFFER_BYTES: usize = 4 << 20;
/// The shortest length tried.
const SHORTEST_BYTES: usize = 4 << 10;
/// Short lengths are tried many times in a row, until they add up to this: one alone would be of
/// the same order as reading the clock.
const BATCH_BYTES: usize = 256 << 10;
/// Every length tried, in ascending order.
const LENGTHS: [usize; 11] = {
    let mut lengths = [0; 11];
    let mut index = 0;
    while index < lengths.len() {
        lengths[index] = SHORTEST_BYTES << index;
        index += 1;
    }
    assert!(lengths[lengths.len() - 1] == BUFFER_BYTES);
    lengths
};
/// How much the paths are compared on.
const PATH_BYTES: usize = 512 << 10;
/// The paths are compared for at most one so-manieth of the time.
const PATH_PARTS: u32 = 3;
/// How often each path is tried; the best counts, because noise only ever adds.
const PATH_ROUNDS: usize = 16;
/// How often each length is tried on either side, unless two rounds agree; the best counts.
const LENGTH_ROUNDS: usize = 5;
/// No part begins after this much time. What is then under way (1 to 2 ms) ends well within 20 ms.
pub(crate) const BUDGET: Duration = Duration::from_millis(16);
/// No part takes longer than this for a byte on machines that have these stores, unless somebody else
/// has the core: what goes beyond is theirs.
const SLOWEST_NS_PER_BYTE: u64 = 1;
/// How much time of others is waited out, before the measurement does with what it has.
const MOST_LOST: Duration = Duration::from_millis(100);
/// A path is as good as the fastest if it takes at most this share more time, in percent.
const TIE_PERCENT: u64 = 2;

/// The length from which on cold memory that nobody reads soon is streamed, if not measured.
const DEFAULT_COLD_LATER_BYTES: usize = 4 << 10;
/// The length from which on cold memory that is read at once is streamed, if not measured.
const DEFAULT_COLD_SOON_BYTES: usize = 8 << 20;
/// The length from which on memory that is in the cache is streamed, if not measured.
const DEFAULT_HOT_BYTES: usize = 32 << 20;

/// Where the destination was before the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Was {
    /// In the cache: written or read a moment ago.
    Hot,
    /// In memory only.
    Cold,
}

/// What happens to the destination after the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Next {
    /// Somebody reads it at once.
    Soon,
    /// Nobody reads it while it would still be in the cache.
    Later,
}

/// How to store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Store {
    /// Through the cache: [`Path::Portable`].
    Cached,
    /// Past the cache: [`Calibration::path`].
    Streaming,
}

/// How a [`Crossover`] was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Basis {
    /// Streaming won at this length and at every longer one tried.
    Measured,
    /// Cached stores won at the longest length tried (4 MiB): the length is the documented default.
    Beyond,
    /// Cached stores won at the longest length tried, by less than at half of it: the length is where
    /// they would cease to.
    Extrapolated,
    /// Time ran out: the length is the shortest at which streaming was seen to win, else the
    /// documented default.
    OutOfTime,
    /// There are no streaming stores here, so the length is never reached.
    NoStreaming,
}

/// From which length on streaming is the faster way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Crossover {
    /// The length, in bytes.
    pub bytes: usize,
    /// How it was found.
    pub basis: Basis,
}

/// What the measurement found.
///
/// Defaults, where it found nothing: streaming from 4 KiB for cold memory that is read later, from
/// 8 MiB for cold memory that is read at once, from 32 MiB for memory in the cache; and the widest
/// available register store as the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Calibration {
    /// The widest path within 2 % of the fastest, for a non-zero fill of lines that are not in the
    /// cache.
    pub path: Path,
    /// For [`Was::Cold`] and [`Next::Later`].
    pub cold_later: Crossover,
    /// For [`Was::Cold`] and [`Next::Soon`].
    pub cold_soon: Crossover,
    /// For [`Was::Hot`], whatever comes next.
    pub hot: Crossover,
    /// How long the measurement took, page faults of its buffer included.
    pub elapsed: Duration,
    /// Whether everything was tried before time ran out.
    pub complete: bool,
}

/// Returns this process's calibration; the first call measures.
///
/// Cost: up to 20 ms once (some 10 as a rule; more where others have the core), then a load. Threads that call at the same time wait
/// for the one that measures.
pub fn calibration() -> &'static Calibration {
    static CALIBRATION: OnceLock<Calibration> = OnceLock::new();
    CALIBRATION.get_or_init(Calibration::measure)
}

impl Calibration {
    /// Measures now. For tests and benchmarks; everything else takes [`calibration`].
    ///
    /// Cost: up to 20 ms on a core of its own, 4 MiB of memory.
    #[must_use]
    pub fn measure() -> Self {
        Self::measure_within(BUDGET)
    }

    /// Returns which store is the faster one for `len_bytes` bytes.
    ///
    /// For many calls in one scope on neighbouring memory, ask with their total.
    #[inline]
    #[must_use]
    pub fn choose(&self, len_bytes: usize, was: Was, next: Next) -> Store {
        let crossover = match (was, next) {
            (Was::Cold, Next::Later) => self.cold_later,
            (Was::Cold, Next::Soon) => self.cold_soon,
            (Was::Hot, Next::Soon | Next::Later) => self.hot,
        };
        if crossover.basis != Basis::NoStreaming && len_bytes >= crossover.bytes {
            Store::Streaming
        } else {
            Store::Cached
        }
    }

    /// [`Calibration::measure`] with another budget.
    fn measure_within(budget: Duration) -> Self {
        let start = Instant::now();
        let default = |bytes| Crossover { bytes, basis: Basis::OutOfTime };
        let mut found = Self {
            path: Path::Portable,
            cold_later: default(DEFAULT_COLD_LATER_BYTES),
            cold_soon: default(DEFAULT_COLD_SOON_BYTES),
            hot: default(DEFAULT_HOT_BYTES),
            elapsed: Duration::ZERO,
            complete: true,
        };
        let Some(widest) = PREFERENCE.into_iter().find(|path| path.is_available()) else {
            let never = Crossover { bytes: usize::MAX, basis: Basis::NoStreaming };
            (found.cold_later, found.cold_soon, found.hot) = (never, never, never);
            return found;
        };
        let mut bench = Bench::new(start, budget);
        found.path = bench.best_path().unwrap_or(widest);
        let path = found.path;
        let mut crossover =
            |case: Case| bisect(case, |len_bytes| bench.streaming_wins(path, case, len_bytes));
        // Those that are found soonest come first.
        found.cold_later = crossover(Case::ColdLater);
        found.hot = crossover(Case::Hot);
        found.cold_soon = crossover(Case::ColdSoon);
        found.complete = !bench.ran_out;
        found.elapsed = start.elapsed();
        found
    }
}

/// The streaming paths, the one to take among equals first. Wider is better, and of two that are
/// equally wide the one that needs no way through memory.
pub(crate) const PREFERENCE: [Path; 5] =
    [Path::Avx512, Path::Movdir64b, Path::Avx2, Path::Sse2, Path::Movnti];

/// Returns the first path that takes at most [`TIE_PERCENT`] more time than the fastest.
fn first_near_fastest(times: &[(Path, Duration)]) -> Option<Path> {
    let fastest = times.iter().map(|(_, time)| *time).min()?;
    let limit = fastest.as_nanos() * u128::from(100 + TIE_PERCENT) / 100;
    times.iter().find(|(_, time)| time.as_nanos() <= limit).map(|(path, _)| *path)
}

/// A case that has a crossover of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Case {
    ColdLater,
    ColdSoon,
    Hot,
}

impl Case {
    /// Returns the length from which on streaming is taken to win, if that is not measured.
    fn default_bytes(self) -> usize {
        match self {
            Self::ColdLater => DEFAULT_COLD_LATER_BYTES,
            Self::ColdSoon => DEFAULT_COLD_SOON_BYTES,
            Self::Hot => DEFAULT_HOT_BYTES,
        }
    }

    /// Returns which of [`LENGTHS`] to try first: where most machines decide the case.
    fn first(self) -> usize {
        match self {
            Self::ColdLater => 0,
            Self::ColdSoon => LENGTHS.len() - 3,
            Self::Hot => LENGTHS.len() - 1,
        }
    }
}

/// Returns the shortest length at which streaming wins, if it wins at every longer one as well.
/// `streaming_wins` tries a length, and returns `None` if there is no time left for it.
pub(crate) fn bisect(
    case: Case,
    mut streaming_wins: impl FnMut(usize) -> Option<bool>,
) -> Crossover {
    // Streaming loses below `lost` and wins from `won` on; where they meet is the answer.
    let (mut lost, mut won) = (0, LENGTHS.len());
    let mut next = case.first();
    while lost < won {
        let won_bytes = LENGTHS.get(won).copied().unwrap_or(case.default_bytes());
        match streaming_wins(LENGTHS[next]) {
            None => return Crossover { bytes: won_bytes, basis: Basis::OutOfTime },
            Some(true) => won = next,
            Some(false) => lost = next + 1,
        }
        next = lost.midpoint(won);
    }
    match LENGTHS.get(won) {
        Some(bytes) => Crossover { bytes: *bytes, basis: Basis::Measured },
        None => Crossover { bytes: case.default_bytes(), basis: Basis::Beyond },
    }
}

/// The memory measured on, and the time left.
pub(crate) struct Bench {
    buffer: Vec<u8>,
    /// Of the buffer, where the first line starts.
    first: usize,
    pattern: Pattern,
    start: Instant,
    budget: Duration,
    /// How much of the time somebody else had the core.
    lost: Duration,
    pub(crate) ran_out: bool,
}

impl Bench {
    /// Takes the memory from the system by writing to all of it once.
    pub(crate) fn new(start: Instant, budget: Duration) -> Self {
        // Neither zero nor the same word all over: some machines write such lines faster than
        // others, which says nothing about paths.
        let mut words = [0x0123_4567_89ab_cdef_u64; LINE_BYTES / 8];
        for (word, turn) in words.iter_mut().zip(0..) {
            *word = word.rotate_left(turn * 7);
        }
        let pattern = Pattern::constant(&words).expect("an element of one line is valid");
        // Without memory there is nothing to measure on, and the defaults have to do.
        let mut buffer = Vec::new();
        if buffer.try_reserve_exact(BUFFER_BYTES + LINE_BYTES).is_err() {
            let lost = Duration::ZERO;
            return Self { buffer, first: 0, pattern, start, budget, lost, ran_out: true };
        }
        buffer.resize(BUFFER_BYTES + LINE_BYTES, 0);
        let first = buffer.as_ptr().addr().wrapping_neg() % LINE_BYTES;
        let mut bench =
            Self { buffer, first, pattern, start, budget, lost: Duration::ZERO, ran_out: false };
        // Page by page (of the smallest size there is), so that a slow first touch cannot take us
        // past the deadline by much.
        for at in (0..bench.buffer.len()).step_by(BATCH_BYTES) {
            if !bench.has_time() {
                break;
            }
            let begun = Instant::now();
            let chunk = bench.buffer[at..].iter_mut().take(BATCH_BYTES);
            chunk.step_by(4096).for_each(|byte| *byte = 1);
            bench.forgive(begun, BATCH_BYTES);
        }
        bench
    }

    /// Returns whether another part may begin, and remembers if not.
    pub(crate) fn has_time(&mut self) -> bool {
        let ours = self.start.elapsed().saturating_sub(self.lost.min(MOST_LOST));
        self.ran_out = self.ran_out || ours > self.budget;
        !self.ran_out
    }

    /// Leaves out of account what a part that began at `begun`, and touched so many bytes, took too
    /// long.
    pub(crate) fn forgive(&mut self, begun: Instant, len_bytes: usize) {
        let most = Duration::from_nanos(SLOWEST_NS_PER_BYTE.saturating_mul(len_bytes as u64));
        self.lost += begun.elapsed().saturating_sub(most);
    }

    /// Returns the memory measured on: whole lines, none if there was no memory to be had.
    pub(crate) fn memory(&mut self) -> &mut [u8] {
        match self.buffer.get_mut(self.first..) {
            Some(memory) if memory.len() >= BUFFER_BYTES => &mut memory[..BUFFER_BYTES],
            _ => &mut [],
        }
    }

    /// Returns the path to prefer, or `None` if there was not the time to try each at least once.
    fn best_path(&mut self) -> Option<Path> {
        let mut times: Vec<(Path, Duration)> = PREFERENCE
            .into_iter()
            .filter(|path| path.is_available())
            .map(|path| (path, Duration::MAX))
            .collect();
        for round in 0..PATH_ROUNDS {
            // After a few rounds, no more time for what is far behind.
            let fastest = times.iter().map(|(_, time)| *time).min().unwrap_or_default();
            let far = fastest.saturating_add(fastest / 4);
            for (path, best) in &mut times {
                if round >= PATH_ROUNDS / 4 && *best > far {
                    continue;
                }
                if !self.has_time() {
                    return if round == 0 { None } else { first_near_fastest(&times) };
                }
                if round > 0 && self.start.elapsed() > self.budget / PATH_PARTS {
                    return first_near_fastest(&times); // the rest is for the lengths
                }
                let time = self.time(*path, Case::ColdLater, PATH_BYTES, PATH_BYTES);
                *best = time.min(*best);
            }
        }
        first_near_fastest(&times)
    }

    /// Returns whether streaming is faster at a length, or `None` if there is no time left to try.
    fn streaming_wins(&mut self, path: Path, case: Case, len_bytes: usize) -> Option<bool> {
        let batch_bytes = len_bytes.max(BATCH_BYTES);
        let (cached, streaming) = duel(LENGTH_ROUNDS, || {
            self.has_time().then(|| {
                let cached = self.time(Path::Portable, case, len_bytes, batch_bytes);
                (cached, self.time(path, case, len_bytes, batch_bytes))
            })
        })?;
        Some(streaming < cached)
    }

    /// Returns how long it takes to fill `batch_bytes` of the buffer in calls of `len_bytes`.
    ///
    /// Cached stores to memory that nobody reads soon only put their write-back off, so theirs is
    /// part of the time; without it they would look like streaming ones at any length that fits
    /// the cache.
    fn time(&mut self, path: Path, case: Case, len_bytes: usize, batch_bytes: usize) -> Duration {
        let begun = Instant::now();
        let path = Ready::new(path);
        let batch = &mut self.buffer[self.first..][..batch_bytes];
        match case {
            Case::Hot => batch.fill(0xa5),
            Case::ColdLater | Case::ColdSoon => arch::evict_lines(batch),
        }
        arch::drain();
        let start = Instant::now();
        for extent in batch.chunks_mut(len_bytes) {
            arch::fill(path, extent, &self.pattern);
            if case == Case::ColdLater && path.path() == Path::Portable {
                arch::write_back_lines(extent);
            }
            arch::drain();
            if case == Case::ColdSoon {
                black_box(sum(extent));
            }
        }
        let elapsed = start.elapsed();
        self.forgive(begun, batch_bytes);
        elapsed
    }
}

/// Tries two things `most` times, or until two rounds in a row say alike which is the faster, and
/// returns the best time of either; `None` if there was no time for the first two rounds. `round` tries
/// both, and returns `None` if there is no time left.
pub(crate) fn duel(
    most: usize,
    mut round: impl FnMut() -> Option<(Duration, Duration)>,
) -> Option<(Duration, Duration)> {
    let mut before = round()?;
    let (mut one, mut other) = before;
    for done in 1..most {
        let Some(now) = round() else { return if done == 1 { None } else { Some((one, other)) } };
        (one, other) = (one.min(now.0), other.min(now.1));
        let is_first = [before, now, (one, other)].map(|(one, other)| one <= other);
        if is_first.iter().all(|said| *said == is_first[0]) {
            break;
        }
        before = now;
    }
    Some((one, other))
}

/// Reads every line of `bytes`.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    words
        .iter()
        .step_by(LINE_BYTES / 8)
        .map(|word| u64::from_ne_bytes(*word))
        .fold(0, u64::wrapping_add)
}

impl fmt::Display for Crossover {
    /// `64 KiB`, and how it was found unless it was measured.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.basis {
            Basis::Measured => write!(f, "{} KiB", self.bytes >> 10),
            Basis::Beyond => write!(f, "{} KiB (default; cached won at 4 MiB)", self.bytes >> 10),
            Basis::Extrapolated => write!(f, "{} KiB (extrapolated)", self.bytes >> 10),
            Basis::OutOfTime => write!(f, "{} KiB (not measured to the end)", self.bytes >> 10),
            Basis::NoStreaming => f.write_str("never (no streaming stores)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(bytes: usize, basis: Basis) -> Crossover {
        Crossover { bytes, basis }
    }

    #[test]
    fn the_choice_follows_size_past_and_future_and_nothing_else() {
        let found = Calibration {
            path: Path::Portable,
            cold_later: at(4096, Basis::Measured),
            cold_soon: at(2 << 20, Basis::OutOfTime),
            hot: at(32 << 20, Basis::Beyond),
            elapsed: Duration::ZERO,
            complete: true,
        };
        let (c, s) = (Store::Cached, Store::Streaming);
        // Bytes; cold and later, cold and soon, hot and later, hot and soon.
        let table = [
            (0, [c, c, c, c]),
            (4095, [c, c, c, c]),
            (4096, [s, c, c, c]),
            ((2 << 20) - 1, [s, c, c, c]),
            (2 << 20, [s, s, c, c]),
            ((32 << 20) - 1, [s, s, c, c]),
            (32 << 20, [s, s, s, s]),
            (usize::MAX, [s, s, s, s]),
        ];
        for (bytes, expected) in table {
            let found = [
                found.choose(bytes, Was::Cold, Next::Later),
                found.choose(bytes, Was::Cold, Next::Soon),
                found.choose(bytes, Was::Hot, Next::Later),
                found.choose(bytes, Was::Hot, Next::Soon),
            ];
            assert_eq!(found, expected, "{bytes}");
        }
    }

    #[test]
    fn a_crossover_is_found_wherever_it_is_and_whatever_is_asked_first() {
        for case in [Case::ColdLater, Case::ColdSoon, Case::Hot] {
            for (index, expected) in LENGTHS.into_iter().enumerate() {
                let mut tries = 0;
                let found = bisect(case, |len_bytes| {
                    tries += 1;
                    Some(len_bytes >= LENGTHS[index])
                });
                assert_eq!(found, at(expected, Basis::Measured), "{case:?}");
                assert!(tries <= 6, "{case:?}: {tries} tries for {expected}");
            }
            let never = bisect(case, |_| Some(false));
            assert_eq!(never, at(case.default_bytes(), Basis::Beyond));
            // Without time the answer is the last that was seen to win.
            let none = bisect(case, |_| None);
            assert_eq!(none, at(case.default_bytes(), Basis::OutOfTime));
            let mut first = Some(true);
            let one = bisect(case, |_| first.take());
            let expected = match case {
                Case::ColdLater => at(LENGTHS[0], Basis::Measured),
                _ => at(LENGTHS[case.first()], Basis::OutOfTime),
            };
            assert_eq!(one, expected);
        }
    }

    #[test]
    fn a_duel_ends_when_two_rounds_agree_or_by_the_best_of_all() {
        let us = Duration::from_micros;
        // The rounds, how many of them were wanted, and what came out.
        for (times, most, expected_rounds, expected) in [
            (&[(10, 20), (11, 19), (1, 1)][..], 5, 2, Some((10, 19))),
            // One round was spoilt, and two that agree follow.
            (&[(90, 20), (10, 20), (10, 21)], 5, 3, Some((10, 20))),
            // Rounds that agree, but not with the best of all, are no end.
            (&[(10, 20), (90, 20), (90, 21), (10, 20)], 4, 4, Some((10, 20))),
            (&[(10, 20), (20, 10), (10, 20), (20, 10), (9, 10)], 5, 5, Some((9, 10))),
            // Time ran out.
            (&[], 5, 1, None),
            (&[(10, 20)], 5, 2, None),
            (&[(10, 20), (20, 10)], 5, 3, Some((10, 10))),
            (&[(10, 20)], 1, 1, Some((10, 20))),
        ] {
            let mut rounds = 0;
            let found = duel(most, || {
                rounds += 1;
                times.get(rounds - 1).map(|(one, other)| (us(*one), us(*other)))
            });
            assert_eq!(rounds, expected_rounds, "{times:?}");
            assert_eq!(found, expected.map(|(one, other)| (us(one), us(other))), "{times:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "megabytes that are written byte by byte")]
    fn time_that_others_had_is_not_taken_off_the_time_there_is() {
        let mut bench = Bench::new(Instant::now(), Duration::from_secs(3600));
        assert!(bench.has_time());
        let ago = |millis| Instant::now().checked_sub(Duration::from_millis(millis)).unwrap();
        (bench.start, bench.budget) = (ago(60), Duration::from_millis(20));
        bench.forgive(ago(50), 1 << 20);
        assert!(bench.has_time(), "49 of 60 ms were not ours");
        // There is an end to it.
        bench.start = ago(5000);
        bench.forgive(ago(5000), 1 << 20);
        assert!(!bench.has_time());
        assert!(bench.ran_out);
    }

    #[test]
    fn without_streaming_stores_everything_is_cached() {
        let never = at(usize::MAX, Basis::NoStreaming);
        let found = Calibration {
            path: Path::Portable,
            cold_later: never,
            cold_soon: never,
            hot: never,
            elapsed: Duration::ZERO,
            complete: true,
        };
        for was in [Was::Hot, Was::Cold] {
            for next in [Next::Soon, Next::Later] {
                assert_eq!(found.choose(usize::MAX, was, next), Store::Cached);
            }
        }
    }

    #[test]
    fn the_first_path_that_is_nearly_as_fast_as_the_fastest_is_taken() {
        let ns = Duration::from_nanos;
        let (wide, middle, narrow) = (Path::Avx512, Path::Avx2, Path::Movnti);
        // Times of the three, and who is taken.
        let table = [
            ([100, 100, 100], wide),
            ([102, 100, 100], wide),
            ([103, 100, 100], middle),
            ([103, 103, 100], narrow),
            ([90, 100, 100], wide),
        ];
        for (times, expected) in table {
            let times: Vec<_> = [wide, middle, narrow].into_iter().zip(times.map(ns)).collect();
            assert_eq!(first_near_fastest(&times), Some(expected), "{times:?}");
        }
        assert_eq!(first_near_fastest(&[]), None);
    }

    #[test]
    fn without_any_time_the_answers_are_the_defaults_and_say_so() {
        let found = Calibration::measure_within(Duration::ZERO);
        if found.path == Path::Portable {
            assert_eq!(found.hot.basis, Basis::NoStreaming);
            return;
        }
        assert!(!found.complete);
        assert_eq!(Some(found.path), PREFERENCE.into_iter().find(|path| path.is_available()));
        assert_eq!(found.cold_later, at(DEFAULT_COLD_LATER_BYTES, Basis::OutOfTime));
        assert_eq!(found.cold_soon, at(DEFAULT_COLD_SOON_BYTES, Basis::OutOfTime));
        assert_eq!(found.hot, at(DEFAULT_HOT_BYTES, Basis::OutOfTime));
    }
}

//! Cached or streaming: which store is faster for how many bytes, found by a short measurement.
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
//! Units: lengths in bytes. Cost: one measurement per process, 20 ms at most, 4 MiB of memory while
//! it runs. No system call inside a timed part except what reading the clock is.

use std::fmt;
use std::hint::black_box;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::path::{Path, Ready};
use crate::pattern::Pattern;
use crate::{LINE_BYTES, arch};

/// The memory measured on, and the longest length tried.
const BUFFER_BYTES: usize = 4 << 20;
/// The shortest length tried.
const SHORTEST_BYTES: usize = 4 << 10;
/// Short lengths are tried many times in a row, until they add up to this: one alone would be of
/// the same order as reading the clock.
const BATCH_BYTES: usize = 256 << 10;
/// How much the paths are compared on.
const PATH_BYTES: usize = 1 << 20;
/// How often each path is tried; the best counts, because noise only ever adds.
const PATH_ROUNDS: usize = 16;
/// How often each length is tried on either side; the best counts.
const LENGTH_ROUNDS: usize = 2;
/// No part begins after this much time. What is then under way (1 to 2 ms) ends well within 20 ms.
const BUDGET: Duration = Duration::from_millis(14);
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
/// Cost: up to 20 ms once (some 10 as a rule), then a load. Threads that call at the same time wait
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
        // The longest lengths take the most time, so the cases with the fewest tries come first:
        // each goes down from the longest length and stops where cached stores win.
        found.hot = bench.crossover(found.path, Case::Hot, DEFAULT_HOT_BYTES);
        found.cold_soon = bench.crossover(found.path, Case::ColdSoon, DEFAULT_COLD_SOON_BYTES);
        found.cold_later = bench.crossover(found.path, Case::ColdLater, DEFAULT_COLD_LATER_BYTES);
        found.complete = !bench.ran_out;
        found.elapsed = start.elapsed();
        found
    }
}

/// The streaming paths, the one to take among equals first. Wider is better, and of two that are
/// equally wide the one that needs no way through memory.
const PREFERENCE: [Path; 5] = [Path::Avx512, Path::Movdir64b, Path::Avx2, Path::Sse2, Path::Movnti];

/// Returns the first path that takes at most [`TIE_PERCENT`] more time than the fastest.
fn first_near_fastest(times: &[(Path, Duration)]) -> Option<Path> {
    let fastest = times.iter().map(|(_, time)| *time).min()?;
    let limit = fastest.as_nanos() * u128::from(100 + TIE_PERCENT) / 100;
    times.iter().find(|(_, time)| time.as_nanos() <= limit).map(|(path, _)| *path)
}

/// A case that has a crossover of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    ColdLater,
    ColdSoon,
    Hot,
}

/// The memory measured on, and the time left.
struct Bench {
    buffer: Vec<u8>,
    /// Of the buffer, where the first line starts.
    first: usize,
    pattern: Pattern,
    start: Instant,
    budget: Duration,
    ran_out: bool,
}

impl Bench {
    /// Takes the memory from the system by writing to all of it once.
    fn new(start: Instant, budget: Duration) -> Self {
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
            return Self { buffer, first: 0, pattern, start, budget, ran_out: true };
        }
        buffer.resize(BUFFER_BYTES + LINE_BYTES, 0);
        let first = buffer.as_ptr().addr().wrapping_neg() % LINE_BYTES;
        let mut ran_out = false;
        // Page by page (of the smallest size there is), so that a slow first touch cannot take us
        // past the deadline by much.
        for chunk in buffer.chunks_mut(BATCH_BYTES) {
            ran_out = ran_out || start.elapsed() > budget;
            if !ran_out {
                chunk.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
            }
        }
        Self { buffer, first, pattern, start, budget, ran_out }
    }

    /// Returns whether another part may begin, and remembers if not.
    fn has_time(&mut self) -> bool {
        self.ran_out = self.ran_out || self.start.elapsed() > self.budget;
        !self.ran_out
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
                let time = self.time(*path, Case::ColdLater, PATH_BYTES, PATH_BYTES);
                *best = time.min(*best);
            }
        }
        first_near_fastest(&times)
    }

    /// Goes down from the longest length until cached stores win.
    fn crossover(&mut self, path: Path, case: Case, default_bytes: usize) -> Crossover {
        let mut len_bytes = BUFFER_BYTES;
        let mut shortest_won = None;
        while len_bytes >= SHORTEST_BYTES {
            let (mut cached, mut streaming) = (Duration::MAX, Duration::MAX);
            let batch_bytes = len_bytes.max(BATCH_BYTES);
            for _ in 0..LENGTH_ROUNDS {
                if !self.has_time() {
                    let bytes = shortest_won.unwrap_or(default_bytes);
                    return Crossover { bytes, basis: Basis::OutOfTime };
                }
                cached = cached.min(self.time(Path::Portable, case, len_bytes, batch_bytes));
                streaming = streaming.min(self.time(path, case, len_bytes, batch_bytes));
            }
            if cached <= streaming {
                break;
            }
            shortest_won = Some(len_bytes);
            len_bytes /= 2;
        }
        match shortest_won {
            Some(bytes) => Crossover { bytes, basis: Basis::Measured },
            None => Crossover { bytes: default_bytes, basis: Basis::Beyond },
        }
    }

    /// Returns how long it takes to fill `batch_bytes` of the buffer in calls of `len_bytes`.
    ///
    /// Cached stores to memory that nobody reads soon only put their write-back off, so theirs is
    /// part of the time; without it they would look like streaming ones at any length that fits
    /// the cache.
    fn time(&mut self, path: Path, case: Case, len_bytes: usize, batch_bytes: usize) -> Duration {
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
        start.elapsed()
    }
}

/// Reads every line of `bytes`.
fn sum(bytes: &[u8]) -> u64 {
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

//! Which [`Way`] is the fastest for how many bytes: [`zero_ways`], [`copy_ways`].
//!
//! Size alone does not decide, as `calibrate.rs` says, so the caller says what the destination was
//! and what comes next. Measured are, for clearing and for copying: which of the cached ways is
//! better, for short and for long extents, hot and cold; whether a copy of several pages wants them
//! side by side; and from which length on streaming wins in each case.
//!
//! A destination that is hot may be longer than what can be tried in the time there is. Then the
//! advantage of the cached way at the two longest lengths says where it would end, which is rounded up:
//! it shrinks more slowly the longer the extent. A destination that is hot and read at once stays in
//! the cache for twice that: what is streamed has to come back from memory first.
//!
//! Not here: the source of a copy, which is taken to be cold. Reading what is in the cache helps every
//! way alike.
//!
//! Units: lengths in bytes. Cost: one measurement per process for clearing and one for copying, 20 ms
//! at most for each, and what [`best`] costs; 4 MiB of memory meanwhile.

use std::hint::black_box;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::arch;
use crate::calibrate::{
    BUDGET, BUFFER_BYTES, Basis, Bench, Case, Crossover, Next, Was, bisect, duel, sum,
};
use crate::path::{Path, best};
use crate::way::{Way, copy_bytes, zero_bytes};

/// From here on an extent is long: it has several pages of the smallest size.
const LONG_BYTES: usize = 16 << 10;
/// The two lengths at which cached ways are compared, below and above [`LONG_BYTES`].
const CACHED_BYTES: [usize; 2] = [4 << 10, 64 << 10];
/// The length at which a copy of pages side by side is compared with one of page after page.
const PAGES_BYTES: usize = 256 << 10;
/// How often cached ways are compared: they are near each other, and short.
const CACHED_ROUNDS: usize = 8;
/// The widest registers are taken if they are faster than the CPU's own loop by this, in percent, for
/// short extents and for long ones: less is noise, and for long ones the loop is the surer choice.
const WIDE_PERCENT: [u32; 2] = [2, 6];
/// How often a length is tried, unless two rounds agree.
const LENGTH_ROUNDS: usize = 5;
/// Short lengths are tried many times in a row, until they add up to this.
const BATCH_BYTES: usize = 128 << 10;
/// The longest length that an extrapolation goes to. What is longer does not stay in the caches of
/// common machines, so that it is not hot.
const FARTHEST_BYTES: usize = BUFFER_BYTES << 3;
/// From which length on memory in the cache is cleared by streaming, if not measured.
const DEFAULT_HOT_ZERO_BYTES: usize = 16 << 20;
/// The same for a copy, whose source takes as much of the cache.
const DEFAULT_HOT_COPY_BYTES: usize = 8 << 20;
/// How much farther than where the line ends an advantage is taken to go, in doublings: it shrinks
/// more slowly the longer the extent, and what is lost by going too far is less.
const FARTHER: f64 = 0.15;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Zero,
    Copy,
}

/// Which way to take for which length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ways {
    /// The cached ways for a cold destination: below 16 KiB, and from there on.
    pub cold: [Way; 2],
    /// The cached ways for a destination in the cache: below 16 KiB, and from there on.
    pub warm: [Way; 2],
    /// The ways past the cache: below 16 KiB, and from there on.
    pub streaming: [Way; 2],
    /// From which length on streaming wins for [`Was::Cold`] and [`Next::Later`].
    pub cold_later: Crossover,
    /// For [`Was::Cold`] and [`Next::Soon`].
    pub cold_soon: Crossover,
    /// For [`Was::Hot`] and [`Next::Later`]; twice as long for [`Next::Soon`].
    pub hot: Crossover,
    /// How long the measurement took, page faults of its buffer included.
    pub elapsed: Duration,
    /// Whether everything was tried before time ran out.
    pub complete: bool,
}

/// Returns this process's ways of clearing; the first call measures.
///
/// Cost: up to 20 ms once (more where others have the core), then a load. Threads that call at the same time wait for the one that
/// measures.
#[inline]
pub fn zero_ways() -> &'static Ways {
    static WAYS: OnceLock<Ways> = OnceLock::new();
    WAYS.get_or_init(|| Ways::measure(Work::Zero, best(), BUDGET))
}

/// Returns this process's ways of copying; the first call measures.
///
/// Cost: as [`zero_ways`].
#[inline]
pub fn copy_ways() -> &'static Ways {
    static WAYS: OnceLock<Ways> = OnceLock::new();
    WAYS.get_or_init(|| Ways::measure(Work::Copy, best(), BUDGET))
}

impl Ways {
    /// Measures clearing now. For tests and benchmarks; everything else takes [`zero_ways`].
    ///
    /// Cost: up to 20 ms on a core of its own, 4 MiB of memory.
    #[must_use]
    pub fn measure_zero() -> Self {
        Self::measure(Work::Zero, best(), BUDGET)
    }

    /// Measures copying now, as [`Ways::measure_zero`].
    #[must_use]
    pub fn measure_copy() -> Self {
        Self::measure(Work::Copy, best(), BUDGET)
    }

    /// Returns the fastest way for an extent of `len_bytes`. Of an extent that is taken in batches,
    /// ask with its whole length.
    #[inline]
    #[must_use]
    pub fn choose(&self, len_bytes: usize, was: Was, next: Next) -> Way {
        let (crossover, cached) = match (was, next) {
            (Was::Cold, Next::Later) => (self.cold_later, self.cold),
            (Was::Cold, Next::Soon) => (self.cold_soon, self.cold),
            (Was::Hot, Next::Later) => (self.hot, self.warm),
            (Was::Hot, Next::Soon) => {
                let bytes = self.hot.bytes.saturating_mul(2);
                (Crossover { bytes, ..self.hot }, self.warm)
            }
        };
        let is_streaming = crossover.basis != Basis::NoStreaming && len_bytes >= crossover.bytes;
        let [short, long] = if is_streaming { self.streaming } else { cached };
        if len_bytes < LONG_BYTES { short } else { long }
    }

    fn measure(work: Work, path: Path, budget: Duration) -> Self {
        let start = Instant::now();
        let never = Crossover { bytes: usize::MAX, basis: Basis::NoStreaming };
        let streaming = match work {
            Work::Zero => [Way::Streaming(path); 2],
            Work::Copy => [Way::Streaming(path), Way::SideBySide(path)],
        };
        let mut found = Self {
            cold: [Way::String; 2],
            warm: [Way::String; 2],
            streaming,
            cold_later: never,
            cold_soon: never,
            hot: never,
            elapsed: Duration::ZERO,
            complete: true,
        };
        let mut trial = Trial { work, bench: Bench::new(start, budget) };
        for (case, ways) in [(Case::ColdSoon, &mut found.cold), (Case::Hot, &mut found.warm)] {
            let lengths = CACHED_BYTES.into_iter().zip(WIDE_PERCENT);
            for (way, (len_bytes, percent)) in ways.iter_mut().zip(lengths) {
                let times = trial.bests(case, len_bytes, Way::Wide, Way::String);
                if times.is_some_and(|(wide, string)| is_faster(wide, string, percent)) {
                    *way = Way::Wide;
                }
            }
        }
        if path != Path::Portable {
            if work == Work::Copy {
                let [one, several] = found.streaming;
                let times = trial.times(Case::ColdLater, PAGES_BYTES, one, several);
                if times.is_some_and(|(one, several)| one < several) {
                    found.streaming[1] = one;
                }
            }
            // Those that are found soonest come first.
            found.cold_later = trial.crossover(&found, Case::ColdLater);
            found.hot = trial.crossover(&found, Case::Hot);
            found.cold_soon = trial.crossover(&found, Case::ColdSoon);
        }
        found.complete = !trial.bench.ran_out;
        found.elapsed = start.elapsed();
        found
    }
}

/// What is measured, and on what.
struct Trial {
    work: Work,
    bench: Bench,
}

impl Trial {
    /// The longest extent that there is memory for: a copy has a source as well.
    fn longest(&self) -> usize {
        match self.work {
            Work::Zero => BUFFER_BYTES,
            Work::Copy => BUFFER_BYTES / 2,
        }
    }

    /// Returns from which length on streaming wins.
    fn crossover(&mut self, found: &Ways, case: Case) -> Crossover {
        let longest = self.longest();
        let crossover = bisect(case, |len_bytes| {
            let len_bytes = len_bytes.min(longest);
            let (cached, streaming) = self.compared(found, case, len_bytes)?;
            Some(streaming < cached)
        });
        let default = match self.work {
            Work::Zero => DEFAULT_HOT_ZERO_BYTES,
            Work::Copy => DEFAULT_HOT_COPY_BYTES,
        };
        let crossover = match (case, crossover.basis) {
            (Case::Hot, Basis::Beyond | Basis::OutOfTime) => {
                Crossover { bytes: crossover.bytes.min(default), ..crossover }
            }
            _ => crossover,
        };
        if crossover.basis != Basis::Beyond {
            return crossover;
        }
        let halves = self.compared(found, case, longest / 2);
        let wholes = self.compared(found, case, longest);
        let far = halves.zip(wholes).and_then(|(half, whole)| extrapolate(longest, half, whole));
        match far {
            Some(bytes) => Crossover { bytes, basis: Basis::Extrapolated },
            None => crossover,
        }
    }

    /// Returns how long the cached way and the streaming one take for an extent.
    fn compared(
        &mut self,
        found: &Ways,
        case: Case,
        len_bytes: usize,
    ) -> Option<(Duration, Duration)> {
        let length = usize::from(len_bytes >= LONG_BYTES);
        let cached = if case == Case::Hot { found.warm } else { found.cold };
        self.times(case, len_bytes, cached[length], found.streaming[length])
    }

    /// Returns how long two ways take of which one is faster by far as a rule, or `None` if there is no
    /// time left to try them.
    fn times(
        &mut self,
        case: Case,
        len_bytes: usize,
        one: Way,
        other: Way,
    ) -> Option<(Duration, Duration)> {
        duel(LENGTH_ROUNDS, || self.round(case, len_bytes, one, other))
    }

    /// Returns how long two ways take that are near each other, or `None` if there is no time left to
    /// try them.
    fn bests(
        &mut self,
        case: Case,
        len_bytes: usize,
        one: Way,
        other: Way,
    ) -> Option<(Duration, Duration)> {
        let (mut first, mut second) = self.round(case, len_bytes, one, other)?;
        for _ in 1..CACHED_ROUNDS {
            let now = self.round(case, len_bytes, one, other)?;
            (first, second) = (first.min(now.0), second.min(now.1));
        }
        Some((first, second))
    }

    /// Tries two ways, one after the other.
    fn round(
        &mut self,
        case: Case,
        len_bytes: usize,
        one: Way,
        other: Way,
    ) -> Option<(Duration, Duration)> {
        self.bench.has_time().then(|| {
            let first = self.time(case, len_bytes, one);
            (first, self.time(case, len_bytes, other))
        })
    }

    /// Returns how long a batch takes in calls of `len_bytes`. What cached ways put off for somebody
    /// else to write back is part of their time, as in `calibrate.rs`.
    fn time(&mut self, case: Case, len_bytes: usize, way: Way) -> Duration {
        let begun = Instant::now();
        let batch_bytes = len_bytes.max(BATCH_BYTES);
        let (dst, src) = self.bench.memory().split_at_mut(batch_bytes);
        let src: &mut [u8] = match self.work {
            Work::Zero => &mut [],
            Work::Copy => &mut src[..batch_bytes],
        };
        match case {
            Case::Hot => dst.fill(0xa5),
            Case::ColdLater | Case::ColdSoon => arch::evict_lines(dst),
        }
        let src_bytes = src.len();
        arch::evict_lines(src);
        arch::drain();
        let start = Instant::now();
        for (index, extent) in dst.chunks_mut(len_bytes).enumerate() {
            match self.work {
                Work::Zero => zero_bytes(way, extent),
                Work::Copy => copy_bytes(way, extent, &src[index * len_bytes..][..len_bytes]),
            }
            if case == Case::ColdLater && way.is_cached() {
                arch::write_back_lines(extent);
                arch::drain();
            }
            if case == Case::ColdSoon {
                black_box(sum(extent));
            }
        }
        let elapsed = start.elapsed();
        self.bench.forgive(begun, batch_bytes + src_bytes);
        elapsed
    }
}

/// Returns whether the widest registers are faster than the CPU's own loop by so many percent.
fn is_faster(wide: Duration, string: Duration, percent: u32) -> bool {
    wide * 100 < string * (100 - percent)
}

/// Returns where the advantage of cached stores ends if it goes on shrinking as from half of the
/// longest length tried to all of it, in whole doublings, or `None` if it does not shrink. Times are of cached and
/// streaming stores.
fn extrapolate(
    longest: usize,
    half: (Duration, Duration),
    whole: (Duration, Duration),
) -> Option<usize> {
    let advantage = |(cached, streaming): (Duration, Duration)| {
        (streaming.as_secs_f64() / cached.as_secs_f64().max(1e-9)).log2()
    };
    let (half, whole) = (advantage(half), advantage(whole));
    let lost = half - whole;
    // Less than this for a doubling is noise, and would end nowhere near.
    if whole <= 0.0 || lost < 0.2 {
        return None;
    }
    let doublings = (whole / lost + FARTHER).ceil().max(1.0);
    let mut bytes = longest;
    let mut done = 0.0;
    while done < doublings && bytes < FARTHEST_BYTES {
        bytes *= 2;
        done += 1.0;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(bytes: usize, basis: Basis) -> Crossover {
        Crossover { bytes, basis }
    }

    #[test]
    fn the_choice_follows_size_past_and_future() {
        let path = Path::Portable;
        let (one, several) = (Way::Streaming(path), Way::SideBySide(path));
        let ways = Ways {
            cold: [Way::Wide, Way::String],
            warm: [Way::String, Way::Wide],
            streaming: [one, several],
            cold_later: at(4096, Basis::Measured),
            cold_soon: at(2 << 20, Basis::Measured),
            hot: at(8 << 20, Basis::Extrapolated),
            elapsed: Duration::ZERO,
            complete: true,
        };
        let (s, w) = (Way::String, Way::Wide);
        for (bytes, expected) in [
            (0, [w, w, s, s]),
            (4095, [w, w, s, s]),
            (4096, [one, w, s, s]),
            (LONG_BYTES - 1, [one, w, s, s]),
            (LONG_BYTES, [several, s, w, w]),
            (2 << 20, [several, several, w, w]),
            (8 << 20, [several, several, several, w]),
            (16 << 20, [several, several, several, several]),
            (usize::MAX, [several, several, several, several]),
        ] {
            let found = [
                ways.choose(bytes, Was::Cold, Next::Later),
                ways.choose(bytes, Was::Cold, Next::Soon),
                ways.choose(bytes, Was::Hot, Next::Later),
                ways.choose(bytes, Was::Hot, Next::Soon),
            ];
            assert_eq!(found, expected, "{bytes}");
        }
    }

    #[test]
    fn an_advantage_that_shrinks_ends_where_the_line_through_two_points_does() {
        let us = Duration::from_micros;
        // Times of cached and streaming stores at half the length and at all of it; where it ends.
        for (half, whole, expected) in [
            ((us(100), us(348)), (us(200), us(348)), Some(8 << 20)),
            ((us(100), us(400)), (us(200), us(400)), Some(16 << 20)),
            ((us(100), us(696)), (us(200), us(696)), Some(16 << 20)),
            // It shrank by 0.8 of a doubling and has 1.1 left, as on a Xeon with 2 MiB of L2.
            ((us(100), us(376)), (us(200), us(430)), Some(16 << 20)),
            ((us(100), us(400)), (us(100), us(380)), None),
            ((us(100), us(300)), (us(100), us(400)), None),
            ((us(100), us(150)), (us(400), us(400)), None),
            ((us(1), us(1 << 30)), (us(1), us(1 << 29)), Some(FARTHEST_BYTES)),
            ((us(0), us(0)), (us(0), us(0)), None),
        ] {
            assert_eq!(extrapolate(4 << 20, half, whole), expected, "{half:?} {whole:?}");
        }
    }

    #[test]
    fn of_cached_ways_the_wide_one_has_to_win_by_more_than_noise() {
        let us = Duration::from_micros;
        for (wide, string, expected) in
            [(90, 100, true), (93, 100, true), (95, 100, false), (110, 100, false), (0, 0, false)]
        {
            assert_eq!(is_faster(us(wide), us(string), 6), expected, "{wide} {string}");
        }
    }

    #[test]
    fn without_any_time_the_answers_are_the_defaults_and_say_so() {
        if cfg!(miri) {
            println!("skipped: ways without any time: Miri takes minutes to make the buffers");
            return;
        }
        for work in [Work::Zero, Work::Copy] {
            let found = Ways::measure(work, Path::Portable, Duration::ZERO);
            assert_eq!(found.hot.basis, Basis::NoStreaming);
            assert_eq!(found.choose(usize::MAX, Was::Cold, Next::Later), Way::String);
            let path = Path::ALL.into_iter().rfind(|path| path.is_available()).unwrap();
            let found = Ways::measure(work, path, Duration::ZERO);
            assert!(!found.complete);
            for crossover in [found.cold_later, found.cold_soon, found.hot] {
                let expected =
                    if path == Path::Portable { Basis::NoStreaming } else { Basis::OutOfTime };
                assert_eq!(crossover.basis, expected);
            }
        }
    }
}

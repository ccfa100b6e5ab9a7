//! Whether another store is faster than the default on this machine: [`StorePolicy::measure`].
//!
//! Noise makes a slow store look fast now and then, so a store replaces the default only if it is
//! better by 10 % in each of three repeats, and by the best of several interleaved rounds in each.
//! What is measured is memory that is not in the cache and is not read soon, which is what streaming
//! is for.
//!
//! Units: lengths in bytes. Cost: about 100 ms and 4 MiB of memory. No system call inside a timed part
//! except what reading the clock is.

use std::time::{Duration, Instant};

use crate::copy_method::{CopyMethod, copy_bytes, zero_bytes};
use crate::path::Ready;
use crate::pattern::Pattern;
use crate::policy::{Basis, StorePolicy, WIDEST_FIRST};
use crate::work::Work;
use crate::{LINE_BYTES, arch};

/// How much is written at a time.
const LEN_BYTES: usize = 512 << 10;
/// How much memory there is for the destination and the source.
const BUFFER_BYTES: usize = 4 << 20;
/// How often the whole is repeated.
const REPEATS: usize = 3;
/// How often each store is tried in a repeat; the best counts, because noise only ever adds.
const ROUNDS: usize = 8;
/// How much less time a store has to take than the default, in percent.
const BETTER_PERCENT: u32 = 10;

impl StorePolicy {
    /// Measures which stores are fastest on this machine, and returns the default for this CPU with
    /// each store replaced that another beats by 10 % in three repeats.
    ///
    /// The policy of the process does not change ([`StorePolicy::make_current`]). To give the result
    /// to other processes, set [`STORE_POLICY`](crate::STORE_POLICY) to its `Display`.
    ///
    /// Cost: about 100 ms and 4 MiB of memory. Without that memory the default is returned.
    #[must_use]
    pub fn measure() -> Self {
        let mut policy = Self::for_cpu();
        let Some(mut buffer) = Buffer::new() else { return policy };
        for work in Work::ALL {
            let default = policy.streaming(work);
            if default.is_cached() {
                continue; // there are no streaming stores
            }
            let others = || {
                let stores = WIDEST_FIRST.into_iter().filter(|path| path.is_available());
                let asides =
                    stores.clone().map(CopyMethod::Interleaved).filter(|_| work == Work::Copy);
                stores.map(CopyMethod::Streaming).chain(asides).filter(|way| *way != default)
            };
            let repeats: Vec<Repeat> = (0..REPEATS)
                .map(|_| {
                    let mut repeat = Repeat {
                        default: Duration::MAX,
                        others: others().map(|way| (way, Duration::MAX)).collect(),
                    };
                    for _ in 0..ROUNDS {
                        repeat.default = repeat.default.min(buffer.time(work, default));
                        for (way, best) in &mut repeat.others {
                            *best = (*best).min(buffer.time(work, *way));
                        }
                    }
                    repeat
                })
                .collect();
            if let Some(way) = winner(&repeats) {
                policy = policy.with(work, way, Basis::Measured);
            }
        }
        policy
    }
}

/// The best times of one repeat.
struct Repeat {
    default: Duration,
    others: Vec<(CopyMethod, Duration)>,
}

/// Returns the way that beats the default by [`BETTER_PERCENT`] in every repeat; of several, the one
/// with the shortest time in its worst repeat.
fn winner(repeats: &[Repeat]) -> Option<CopyMethod> {
    let (first, _) = repeats.split_first()?;
    let worst = |way: CopyMethod| {
        repeats
            .iter()
            .map(|repeat| {
                let (_, time) = repeat.others.iter().find(|(other, _)| *other == way)?;
                (*time * 100 < repeat.default * (100 - BETTER_PERCENT)).then_some(*time)
            })
            .collect::<Option<Vec<_>>>()?
            .into_iter()
            .max()
    };
    first
        .others
        .iter()
        .filter_map(|(way, _)| Some((*way, worst(*way)?)))
        .min_by_key(|(_, time)| *time)
        .map(|(way, _)| way)
}

/// The memory measured on.
struct Buffer {
    bytes: Vec<u8>,
    /// Where the first line starts.
    first: usize,
    /// Where the next extent starts, so that no extent follows itself.
    at: usize,
    pattern: Pattern,
}

impl Buffer {
    /// Takes the memory, and writes to all of it once.
    fn new() -> Option<Self> {
        // Neither zero nor the same word all over: some machines write such lines faster than
        // others, which has nothing to do with stores.
        let mut words = [0x0123_4567_89ab_cdef_u64; LINE_BYTES / 8];
        for (word, turn) in words.iter_mut().zip(0..) {
            *word = word.rotate_left(turn * 7);
        }
        let pattern = Pattern::constant(&words).ok()?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(BUFFER_BYTES + LINE_BYTES).ok()?;
        bytes.resize(BUFFER_BYTES + LINE_BYTES, 1);
        let first = bytes.as_ptr().addr().wrapping_neg() % LINE_BYTES;
        Some(Self { bytes, first, at: 0, pattern })
    }

    /// Returns how long a way takes for [`LEN_BYTES`] that are not in the cache.
    fn time(&mut self, work: Work, way: CopyMethod) -> Duration {
        let (dst, src) = self.bytes[self.first..][..BUFFER_BYTES].split_at_mut(BUFFER_BYTES / 2);
        let dst = &mut dst[self.at..][..LEN_BYTES];
        let src = &mut src[self.at..][..LEN_BYTES];
        self.at = (self.at + LEN_BYTES) % (BUFFER_BYTES / 2);
        arch::evict_lines(dst);
        if work == Work::Copy {
            arch::evict_lines(src);
        }
        arch::drain();
        let start = Instant::now();
        match (work, way) {
            (Work::Fill, CopyMethod::Streaming(path) | CopyMethod::Interleaved(path)) => {
                arch::fill(Ready::new(path), dst, &self.pattern);
                arch::drain();
            }
            (Work::Fill | Work::Zero, way) => zero_bytes(way, dst),
            (Work::Copy, way) => copy_bytes(way, dst, src),
        }
        start.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::Path;

    #[test]
    fn a_store_replaces_the_default_only_if_it_is_better_by_a_tenth_every_time() {
        let ns = Duration::from_nanos;
        let (sse2, avx2) = (CopyMethod::Streaming(Path::Sse2), CopyMethod::Streaming(Path::Avx2));
        // The times of the default, SSE2 and AVX2 in each repeat, and which store wins.
        for (times, expected) in [
            ([(100, 120, 120); 3], None),
            ([(100, 90, 91); 3], None),
            ([(100, 89, 120); 3], Some(sse2)),
            ([(100, 89, 85); 3], Some(avx2)),
            // One repeat of three is noise.
            ([(100, 50, 120), (100, 100, 120), (100, 50, 120)], None),
            ([(100, 50, 89), (100, 100, 89), (100, 50, 89)], Some(avx2)),
            // A repeat in which the default was disturbed proves nothing about the others.
            ([(200, 100, 100), (100, 100, 100), (100, 100, 100)], None),
        ] {
            let repeats: Vec<Repeat> = times
                .into_iter()
                .map(|(default, one, other)| Repeat {
                    default: ns(default),
                    others: vec![(sse2, ns(one)), (avx2, ns(other))],
                })
                .collect();
            assert_eq!(winner(&repeats), expected, "{times:?}");
        }
        assert_eq!(winner(&[]), None);
    }
}

//! Whether another store is faster than the default on this machine: [`faster_stores`].
//!
//! Noise makes a slow store look fast now and then, so a store replaces the default only if it is
//! better by 10 % in each of three repeats, and by the best of several interleaved rounds in each.
//! The measured memory is not in the cache and is not read soon: streaming is for such memory.
//!
//! Units: lengths in bytes. Cost: about 100 ms and 4 MiB of memory. A timed part makes no system call but for reading
//! the clock.

use std::time::{Duration, Instant};

use uzone_stream::{
    CacheState, CopyMethod, LINE_BYTES, NextUse, Pattern, StorePolicy, Work, copy_bytes, evict,
    fill_by, zero_bytes,
};

/// The bytes that one store writes at a time.
const LEN_BYTES: usize = 512 << 10;
/// The memory of the destination and the source together.
const BUFFER_BYTES: usize = 4 << 20;
/// The repeats of the whole measurement.
const REPEATS: usize = 3;
/// The tries of each store in a repeat. The best counts, because noise only ever adds.
const ROUNDS: usize = 8;
/// The time that a store has to save beside the default, in percent.
const BETTER_PERCENT: u32 = 10;

/// Measures which stores are fastest on this machine, and returns the default for this CPU with each store replaced that
/// another beats by 10 % in three repeats; `None` if no store does, or there is no memory to measure in.
///
/// The policy of the process does not change ([`StorePolicy::make_current`]). To give the result to other processes, set
/// [`STORE_POLICY`](uzone_stream::STORE_POLICY) to its `Display`.
///
/// Cost: about 100 ms and 4 MiB of memory.
pub fn faster_stores() -> Option<StorePolicy> {
    let table = StorePolicy::for_cpu();
    let mut buffer = Buffer::new()?;
    let mut faster = Vec::new();
    for work in Work::ALL {
        let default = table.choose(work, LEN_BYTES, CacheState::Cold, NextUse::Later);
        if default.is_cached() {
            continue; // there are no streaming stores
        }
        let others = || {
            let of_work =
                |way: &CopyMethod| work == Work::Copy || !matches!(way, CopyMethod::Interleaved(_));
            CopyMethod::all().filter(|way| !way.is_cached() && *way != default).filter(of_work)
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
        faster.extend(winner(&repeats).map(|way| as_text(work, way)));
    }
    if faster.is_empty() {
        return None;
    }
    // A text of stores that are available here is always read.
    table.with_text(&faster.join(",")).ok()
}

/// Returns the store of a kind of work as a policy writes it.
fn as_text(work: Work, way: CopyMethod) -> String {
    let aside = if matches!(way, CopyMethod::Interleaved(_)) { "-aside" } else { "" };
    format!("{}={}{aside}", work.name(), way.path())
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
        evict(dst);
        if work == Work::Copy {
            evict(src);
        }
        let start = Instant::now();
        match (work, way) {
            (Work::Fill, CopyMethod::Streaming(path) | CopyMethod::Interleaved(path)) => {
                fill_by(path, dst, &self.pattern);
            }
            (Work::Fill | Work::Zero, way) => zero_bytes(way, dst),
            (Work::Copy, way) => copy_bytes(way, dst, src),
        }
        start.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use uzone_stream::Path;

    use super::*;

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

    #[test]
    fn a_faster_policy_has_stores_of_this_cpu_and_can_be_given_to_another_process() {
        let Some(found) = faster_stores() else { return };
        let table = StorePolicy::for_cpu();
        assert_ne!(found.to_string(), table.to_string());
        for work in Work::ALL {
            assert!(found.store(work).is_available());
        }
        assert_eq!(table.with_text(&found.to_string()).expect("it is read"), found);
        let aside = as_text(Work::Copy, CopyMethod::Interleaved(Path::Avx2));
        assert_eq!(aside, "copy=avx2-aside");
    }
}

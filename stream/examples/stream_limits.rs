//! How near each path comes to the machine's limit: fills, zeroes and copies 1 GiB by every path,
//! in the same rounds as bare loops of the same store and as plain stores.
//!
//! `cargo run --release -p uzone-stream --example stream_limits [MiB] [rounds]`
//!
//! Memory is mapped and written before anything is timed, and far longer than the caches, so it is
//! cold whenever a case begins. Shown are the median rate in GB/s (10^9 bytes written per second)
//! and the median, over the rounds, of the ratio to the bare loop of the same round; where other
//! processes use the machine, the ratio of the best rounds is more reliable.
//!
//! Unsafe: the bare loops, with which the library is compared.

#![allow(clippy::cast_precision_loss)] // figures for people

use std::collections::BTreeMap;
use std::env;
use std::hint::black_box;
use std::time::Instant;

use uzone_stream::{LINE_BYTES, Path, Pattern, StorePolicy, Streaming, copy_by, fill_by, zero_by};

/// A compound page's descriptors, in bytes: a head, a first tail, and 510 tails.
const COMPOUND_BYTES: usize = 512 * 64;

/// A descriptor that looks like one: how fast lines can be written depends on their content, zeroes
/// and repeated words being the fastest on some machines.
const WORDS: [u64; 8] =
    [0x0400_0000_0000_0040, 0x7f12_3456_7881, 0x7f65_4321_0000, 3, 0, 0x1000, 0xffff_ffff, 0];

/// The growth of a descriptor from one to the next.
const STEPS: [u64; 8] = [0, 0, 0, 0, 1, 4096, 0, 0];

/// Seconds of each case, one for each round.
type Times = BTreeMap<String, Vec<f64>>;

fn main() {
    let mut numbers = env::args().skip(1).map(|word| word.parse::<usize>().expect("a number"));
    let len_bytes = numbers.next().unwrap_or(1024) << 20;
    let rounds = numbers.next().unwrap_or(7);

    let policy = StorePolicy::current();
    println!("{policy} ({:?}), problem: {:?}", policy.basis(), StorePolicy::problem());

    // Both start where a line starts.
    let [mut src, mut dst] = [0x5a_u8, 0xa5].map(|byte| vec![byte; len_bytes + LINE_BYTES]);
    let [src, dst] = [&mut src, &mut dst].map(|bytes| {
        let at = bytes.as_ptr().addr().wrapping_neg() % LINE_BYTES;
        &mut bytes[at..][..len_bytes]
    });
    for (index, line) in src.chunks_exact_mut(LINE_BYTES).enumerate() {
        line[..8].copy_from_slice(&index.to_ne_bytes()[..8]);
    }
    let mut times = Times::new();
    for round in 0..rounds {
        // Each round begins with another path, so that none has always the same neighbour.
        for index in 0..Path::ALL.len() {
            let path = Path::ALL[(index + round) % Path::ALL.len()];
            if path.is_available() {
                one_round(path, dst, src, &mut times);
            } else if round == 0 {
                println!("skipped: {path:?}: this CPU or build does not offer it");
            }
        }
    }
    println!(
        "{} MiB, {rounds} rounds; GB/s, ratio to the bare loop of the same store",
        len_bytes >> 20
    );
    for what in ["fill", "linear", "fill72", "zero", "copy", "compounds"] {
        for path in Path::ALL.into_iter().filter(|path| path.is_available()) {
            let ours = &times[&format!("{what}/{path}")];
            print!("{what:10} {path:10} {:6.2}", len_bytes as f64 / 1e9 / median(ours.clone()));
            let yardstick = match what {
                "compounds" => "linear",
                "fill72" => "fill",
                _ => what,
            };
            let name = format!("bare {yardstick}/{path}");
            if let Some(bare) = times.get(&name) {
                let ratios = bare.iter().zip(ours).map(|(bare, ours)| bare / ours).collect();
                let bare = len_bytes as f64 / 1e9 / median(bare.clone());
                print!("  bare {bare:6.2}  ratio {:.3}", median(ratios));
                print!("  of the best {:.3}", best(&times[&name]) / best(ours));
            }
            if what == "compounds" {
                // The cost of the two short calls of each compound, beside one long fill.
                let calls = (len_bytes / COMPOUND_BYTES * 3) as f64;
                let whole = best(&times[&format!("linear/{path}")]);
                print!("  ns added per call {:.1}", (best(ours) - whole) / calls * 1e9);
            }
            println!();
        }
    }
    calls(dst);
}

/// Times every case on `path` once.
fn one_round(path: Path, dst: &mut [u8], src: &[u8], times: &mut Times) {
    let pattern = Pattern::constant(&WORDS).expect("8 words");
    let linear = Pattern::linear(&WORDS, &STEPS).expect("8 words");
    let pattern_72 =
        Pattern::linear(&[7, 0x7f12_3456_7881, 3, 4, 0, 6, 7, 0, 9], &[0, 0, 0, 0, 1, 0, 64, 0, 0])
            .expect("9 words");
    // Before each case the memory is brought into the same state: how fast it can be written was
    // seen to depend on the last write to it.
    let before = Pattern::linear(&[!0; 8], &[3, 5, 7, 11, 13, 17, 19, 23]).expect("8 words");
    let mut time = |what: &str, act: &mut dyn FnMut(&mut [u8])| {
        fill_by(uzone_stream::best(), dst, &before);
        let start = Instant::now();
        act(dst);
        let seconds = start.elapsed().as_secs_f64();
        black_box(&dst);
        times.entry(format!("{what}/{path}")).or_default().push(seconds);
    };
    if let Some(bare) = bare::loops(path) {
        time("bare fill", &mut |dst| (bare.fill)(dst, &WORDS, &STEPS));
        time("bare linear", &mut |dst| (bare.linear)(dst, &WORDS, &STEPS));
        time("bare zero", &mut |dst| (bare.fill)(dst, &[0; 8], &[0; 8]));
        time("bare copy", &mut |dst| (bare.copy)(dst, src));
    }
    time("fill", &mut |dst| fill_by(path, dst, &pattern));
    time("linear", &mut |dst| fill_by(path, dst, &linear));
    time("fill72", &mut |dst| fill_by(path, dst, &pattern_72));
    time("compounds", &mut |dst| {
        compounds(path, dst, &pattern, &linear);
    });
    time("zero", &mut |dst| zero_by(path, dst));
    time("copy", &mut |dst| copy_by(path, dst, src));
}

/// Initialises the descriptors of compound pages: three calls each, in one scope.
fn compounds(path: Path, dst: &mut [u8], head: &Pattern, tail: &Pattern) {
    let (mut head, mut tail) = (head.clone(), tail.clone());
    Streaming::scope(path, |stream| {
        for compound in dst.chunks_exact_mut(COMPOUND_BYTES) {
            let (first, rest) = compound.split_at_mut(64);
            let (second, rest) = rest.split_at_mut(64);
            stream.fill(first, &head);
            stream.fill(second, &tail);
            stream.fill(rest, &tail);
            head.add(&[0, 0, 0, 0, 512, 0, 0, 0]);
            tail.add(&[0, 32768, 0, 0, 0, 0, 0, 0]);
        }
    });
}

/// The cost of a call beside its stores: calls of 64 bytes, one after the other, against one call.
fn calls(dst: &mut [u8]) {
    let pattern = Pattern::constant(&WORDS).expect("8 words");
    for path in Path::ALL.into_iter().filter(|path| path.is_available()) {
        let calls = (dst.len() / 64) as f64;
        let start = Instant::now();
        Streaming::scope(path, |stream| {
            for line in dst.chunks_exact_mut(64) {
                stream.fill(line, &pattern);
            }
        });
        let each = start.elapsed().as_secs_f64();
        let src = [0x5a; 64];
        let start = Instant::now();
        Streaming::scope(path, |stream| {
            for line in dst.chunks_exact_mut(64) {
                stream.copy(line, &src);
            }
        });
        let copied = start.elapsed().as_secs_f64();
        let start = Instant::now();
        fill_by(path, dst, &pattern);
        let whole = start.elapsed().as_secs_f64();
        // Nothing to store: the call alone is left.
        let empty_calls = 10_000_000;
        let start = Instant::now();
        Streaming::scope(path, |stream| {
            for _ in 0..empty_calls {
                stream.fill(black_box::<&mut [u8]>(&mut []), &pattern);
            }
        });
        let empty = start.elapsed().as_secs_f64() / f64::from(empty_calls);
        println!(
            "64-byte calls on {path:10} {:5.2} ns a fill, {:5.2} a copy, {:5.2} as one fill; an empty one {:4.2}",
            each / calls * 1e9,
            copied / calls * 1e9,
            whole / calls * 1e9,
            empty * 1e9
        );
    }
}

/// The least of a non-empty list.
fn best(list: &[f64]) -> f64 {
    list.iter().copied().fold(f64::INFINITY, f64::min)
}

/// The middle of a non-empty list.
fn median(mut list: Vec<f64>) -> f64 {
    list.sort_by(f64::total_cmp);
    list[list.len() / 2]
}

/// Loops of nothing but the store, over whole aligned lines.
mod bare {
    use uzone_stream::Path;

    pub(super) struct Loops {
        pub(super) fill: fn(&mut [u8], &[u64; 8], &[u64; 8]),
        pub(super) linear: fn(&mut [u8], &[u64; 8], &[u64; 8]),
        pub(super) copy: fn(&mut [u8], &[u8]),
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn loops(_: Path) -> Option<Loops> {
        None
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) use x86_64::loops;

    #[cfg(target_arch = "x86_64")]
    mod x86_64 {
        use std::arch::x86_64::*;

        use super::{Loops, Path};

        /// The loops of one width: `$count` stores to a line.
        macro_rules! bare {
            ($name:ident, $value:ty, $width:literal, $load:path, $add:path, $stream:path $(, $feature:literal)?) => {
                mod $name {
                    use super::*;

                    /// The parts of a line that is made of `words`.
                    $(#[target_feature(enable = $feature)])?
                    fn parts(words: &[u64; 8]) -> [$value; 64 / $width] {
                        std::array::from_fn(|index| {
                            let part = words.as_ptr().wrapping_byte_add(index * $width);
                            // SAFETY: the part lies within the 8 words; any alignment will do.
                            unsafe { $load(part.cast()) }
                        })
                    }

                    /// A fill with `words`; each word grows by its step from line to line.
                    $(#[target_feature(enable = $feature)])?
                    fn fill_inner<const LINEAR: bool>(dst: &mut [u8], words: &[u64; 8], steps: &[u64; 8]) {
                        assert!(dst.as_ptr().addr() % 64 == 0);
                        let (mut values, steps) = (parts(words), parts(steps));
                        for line in dst.as_chunks_mut::<64>().0 {
                            for index in 0..64 / $width {
                                let part = line.as_mut_ptr().wrapping_add(index * $width);
                                // SAFETY: the part lies within the line and is aligned to its width.
                                unsafe { $stream(part.cast(), values[index]) };
                                if LINEAR {
                                    // SAFETY: the CPU has the feature, or it is the baseline's.
                                    #[allow(unused_unsafe)]
                                    let sum = unsafe { $add(values[index], steps[index]) };
                                    values[index] = sum;
                                }
                            }
                        }
                        // SAFETY: SSE is on every x86-64 CPU.
                        #[allow(unused_unsafe)]
                        unsafe { _mm_sfence() };
                    }

                    $(#[target_feature(enable = $feature)])?
                    fn copy_inner(dst: &mut [u8], src: &[u8]) {
                        assert!(dst.as_ptr().addr() % 64 == 0);
                        let src = src.as_chunks::<$width>().0;
                        for (part, src) in dst.as_chunks_mut::<$width>().0.iter_mut().zip(src) {
                            // SAFETY: `src` has the width of the load, which takes any alignment.
                            let value = unsafe { $load(src.as_ptr().cast()) };
                            // SAFETY: `part` has the width of the store and its alignment.
                            unsafe { $stream(part.as_mut_ptr().cast(), value) };
                        }
                        // SAFETY: SSE is on every x86-64 CPU.
                        #[allow(unused_unsafe)]
                        unsafe { _mm_sfence() };
                    }

                    /// The loops, for a CPU that has the feature.
                    pub(super) const LOOPS: Loops = Loops {
                        fill: |dst, words, steps| {
                            // SAFETY: the caller of `loops` gets this only with the CPU feature.
                            #[allow(unused_unsafe)]
                            unsafe { fill_inner::<false>(dst, words, steps) }
                        },
                        linear: |dst, words, steps| {
                            // SAFETY: as above.
                            #[allow(unused_unsafe)]
                            unsafe { fill_inner::<true>(dst, words, steps) }
                        },
                        copy: |dst, src| {
                            // SAFETY: as above.
                            #[allow(unused_unsafe)]
                            unsafe { copy_inner(dst, src) }
                        },
                    };
                }
            };
        }

        /// An 8-byte load with the shape of the wider ones.
        unsafe fn load_word(src: *const i64) -> i64 {
            // SAFETY: the caller has 8 readable bytes there.
            unsafe { src.read_unaligned() }
        }

        bare!(movnti, i64, 8, load_word, i64::wrapping_add, _mm_stream_si64);
        bare!(sse2, __m128i, 16, _mm_loadu_si128, _mm_add_epi64, _mm_stream_si128);
        bare!(avx2, __m256i, 32, _mm256_loadu_si256, _mm256_add_epi64, _mm256_stream_si256, "avx2");
        bare!(
            avx512,
            __m512i,
            64,
            _mm512_loadu_si512,
            _mm512_add_epi64,
            _mm512_stream_si512,
            "avx512f"
        );

        /// The bare loops with the store of `path`, which is available.
        pub(in super::super) fn loops(path: Path) -> Option<Loops> {
            match path {
                _ if !path.is_available() => None,
                Path::Movnti => Some(movnti::LOOPS),
                Path::Sse2 => Some(sse2::LOOPS),
                Path::Avx2 => Some(avx2::LOOPS),
                Path::Avx512 => Some(avx512::LOOPS),
                _ => None,
            }
        }
    }
}

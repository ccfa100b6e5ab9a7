//! How fast each way clears and copies, by size, for memory that is in the cache or not and that is
//! read at once or not. The table of CPUs is made from it.
//!
//! `cargo run --release -p uzone-stream --example stream_ways [zero|copy] [rounds]`
//!
//! The policy of this process and the result of a measurement are printed first, and beside each row the store that
//! the policy chooses. The other figures are medians in GB/s, those of plain `fill` and `copy_from_slice` beside them.

#![allow(clippy::cast_precision_loss)] // figures for people

use std::env;
use std::hint::black_box;
use std::time::Instant;

use uzone_stream::{CacheState, CopyMethod, NextUse, StorePolicy, Work, copy_bytes, zero_bytes};

/// The memory that cold extents are taken from in turn: longer than the caches.
const ARENA: usize = 512 << 20;

fn read(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().step_by(8).map(|word| u64::from_ne_bytes(*word)).fold(0, u64::wrapping_add)
}

fn main() {
    let mut arguments = env::args().skip(1);
    let is_copy = arguments.next().is_some_and(|word| word == "copy");
    let rounds: usize = arguments.next().map_or(9, |word| word.parse().expect("a number"));
    let mut dst = vec![1_u8; ARENA + 4096];
    let dst_at = dst.as_ptr().addr().wrapping_neg() % 4096;
    let dst = &mut dst[dst_at..][..ARENA];
    let src = vec![2_u8; if is_copy { ARENA + 4096 } else { 8192 }];
    let src_at = src.as_ptr().addr().wrapping_neg() % 4096;
    let src = &src[src_at..];
    let work = if is_copy { Work::Copy } else { Work::Zero };
    let policy = StorePolicy::current();
    println!("{policy} ({:?})", policy.basis());
    let ways: Vec<Option<CopyMethod>> = std::iter::once(None)
        .chain(
            CopyMethod::all()
                .filter(|way| is_copy || !matches!(way, CopyMethod::Interleaved(_)))
                .map(Some),
        )
        .collect();
    for (was, next) in [
        (CacheState::Cold, NextUse::Later),
        (CacheState::Cold, NextUse::Soon),
        (CacheState::Hot, NextUse::Later),
        (CacheState::Hot, NextUse::Soon),
    ] {
        println!("{was:?} {next:?}");
        print!("{:>9} {:>9}", "size", "plain");
        for way in ways.iter().flatten() {
            print!(" {:>9}", way.to_string().replace(", side by side", "+8"));
        }
        println!("  chosen");
        for shift in (12..=28).step_by(2) {
            let size = 1_usize << shift;
            let mut times = vec![Vec::new(); ways.len()];
            // Enough calls for the clock.
            let calls = ((1 << 20) / size).clamp(1, 64);
            let mut at = 0;
            for round in 0..=rounds {
                for (way, times) in ways.iter().zip(&mut times) {
                    if at + calls * size > ARENA {
                        at = 0;
                    }
                    let here = if was == CacheState::Hot { 0 } else { at };
                    let dst = &mut dst[here..][..calls * size];
                    at += (calls * size).max(4 << 20);
                    let mut total = 0;
                    for part in dst.chunks_mut(size) {
                        let src = if is_copy { &src[here..][..size] } else { &[][..] };
                        if was == CacheState::Hot {
                            part.fill(3);
                        }
                        let start = Instant::now();
                        match (way, is_copy) {
                            (None, false) => part.fill(0),
                            (None, true) => part.copy_from_slice(src),
                            (Some(way), false) => zero_bytes(*way, part),
                            (Some(way), true) => copy_bytes(*way, part, src),
                        }
                        if next == NextUse::Soon {
                            black_box(read(black_box(part)));
                        }
                        black_box(part);
                        total += start.elapsed().as_nanos();
                    }
                    if round > 0 {
                        times.push(total);
                    }
                }
            }
            print!("{:>8}K", size >> 10);
            for times in &mut times {
                times.sort_unstable();
                let median = times[times.len() / 2];
                print!(" {:>9.1}", (calls * size) as f64 / median as f64);
            }
            println!("  {}", policy.choose(work, size, was, next));
        }
    }
}

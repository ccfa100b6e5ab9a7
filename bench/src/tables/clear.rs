//! `uzone-bench zero` and `uzone-bench copy`: extents that are cleared or copied, out of cache.
//!
//! | row | work |
//! |---|---|
//! | page at a time | a call for every 4 KiB, by the CPU's own loop, as a straightforward port does it |
//! | libc | `memset` or `memcpy` of the C library |
//! | ours | the store policy's way for the length and the case |
//! | ours, by a region | the same by `Region::zero_range` or `copy_range`, from 64 KiB on |
//! | limit | a bare streaming fill of as many bytes |
//!
//! Extents are taken in turn from memory that is longer than the caches. Where the case reads the bytes at once, the
//! time includes that. `pool-take` is in `pool.rs`; `zero-demand` and `populate` are in `first_touch.rs`.

use std::hint::black_box;

use uzone_harness::ways::clear::{Arena, by, by_pages};
use uzone_harness::{Bench, BenchError, Result, Role, Session, Suite, Watch, bytes, index, timed};
use uzone_pages::ByteLen;
use uzone_stream::{CacheState, NextUse, StorePolicy, Work};
use uzone_zone::{PopulateOptions, Region, WriteError, ZeroOptions};

use super::{first_touch, pool};
use crate::settings::{CopySettings, Part, ZeroSettings};

/// The lengths that are measured beside the largest one, and the most that this may be.
const SMALLEST: u64 = 4 << 10;
const FOLIO: u64 = 2 << 20;
const MOST: u64 = 1 << 30;
/// The least memory that extents are taken from in turn.
const LEAST_ARENA: ByteLen = ByteLen::mib(512);
/// The least where the largest extent is shorter than 1 MiB: more than a core's caches in common CPUs.
const LEAST_SHORT_ARENA: ByteLen = ByteLen::mib(64);
/// The least length that a row handles in a round, for the clock's sake.
const BATCH: usize = 1 << 20;
/// The least length that is measured by a region, whose checks and report are a part of shorter times.
const REGION_BYTES: u64 = 64 << 10;

/// Runs the tables of clearing.
pub(crate) fn zero(settings: &ZeroSettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let &ZeroSettings { size, rounds, threads, populate, first_touches } = settings;
    check_size(size)?;
    first_touch::check(populate)?;
    let sentence = format!(
        "extents up to {size}, {rounds} rounds; {populate} touched first, {first_touches} rounds; \
         up to {threads} threads"
    );
    let mut session = part.session(sentence, rounds, watch);
    let arena = &arena(Work::Zero, size)?;
    extents(Work::Zero, NextUse::Later, size, arena, &mut session)?;
    extents(Work::Zero, NextUse::Soon, size, arena, &mut session)?;
    session.each(&[("pool-take", &|session| pool::take_zeroed(size, session))])?;
    session.rounds = first_touches;
    first_touch::tables(populate, threads, arena, &mut session)?;
    session.finish()
}

/// Runs the tables of copying.
pub(crate) fn copy(settings: &CopySettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let &CopySettings { size, rounds } = settings;
    check_size(size)?;
    let mut session = part.session(format!("extents up to {size}, {rounds} rounds"), rounds, watch);
    let arena = &arena(Work::Copy, size)?;
    extents(Work::Copy, NextUse::Later, size, arena, &mut session)?;
    session.finish()
}

/// Refuses a largest extent that cannot be measured.
fn check_size(largest: ByteLen) -> Result {
    if largest.get().is_power_of_two() && (SMALLEST..=MOST).contains(&largest.get()) {
        return Ok(());
    }
    Err(BenchError::not_valid(format!(
        "extents up to {largest} cannot be measured: the largest is a power of two from 4K to 1G"
    )))
}

fn arena(work: Work, largest: ByteLen) -> Result<Arena> {
    let least = if largest < ByteLen::mib(1) { LEAST_SHORT_ARENA } else { LEAST_ARENA };
    Arena::new(work == Work::Copy, largest.max(least))
}

/// Returns a present region.
fn region(len: ByteLen) -> Result<Region> {
    let region = Region::anonymous(len)?;
    let populated = region.populate(0..len.get(), &PopulateOptions::default())?;
    debug_assert!(populated.is_whole(), "it is not cancelled");
    Ok(region)
}

/// Reads every line of `bytes`.
fn read(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().step_by(8).map(|word| u64::from_ne_bytes(*word)).fold(0, u64::wrapping_add)
}

/// Clears or copies an extent: its destination and its source, which is empty where it is cleared.
type Op = fn(&mut [u8], &[u8], NextUse);

fn libc(dst: &mut [u8], src: &[u8], _: NextUse) {
    if src.is_empty() { dst.fill(0) } else { dst.copy_from_slice(src) }
}

fn ours(dst: &mut [u8], src: &[u8], next: NextUse) {
    let work = if src.is_empty() { Work::Zero } else { Work::Copy };
    let way = StorePolicy::current().choose(work, dst.len(), CacheState::Cold, next);
    by(way, dst, src);
}

const OPS: [(Role, &str, &str, Op); 3] = [
    (Role::Naive, "page-at-a-time", "a page at a time", |dst, src, _| by_pages(dst, src)),
    (Role::Peer, "libc", "the C library", libc),
    (Role::Ours, "ours", "ours", ours),
];

/// Measures extents of three lengths.
fn extents(
    work: Work,
    next: NextUse,
    largest: ByteLen,
    arena: &Arena,
    session: &mut Session<'_>,
) -> Result {
    let end = if next == NextUse::Later { "later" } else { "soon" };
    let table = format!("{}-cold-{end}", work.name());
    if !session.wants(&table) {
        return Ok(());
    }
    let is_copy = work == Work::Copy;
    let region_len = bytes(arena.len);
    let (to, from) = (region(region_len)?, if is_copy { Some(region(region_len)?) } else { None });
    let verb = if is_copy { "copy" } else { "clear" };
    let mut lengths = vec![SMALLEST, FOLIO.min(largest.get()), largest.get()];
    lengths.dedup();
    for len in lengths {
        let size = index(len);
        let calls = (BATCH / size).max(1);
        let mut suite = Suite::new(&table, ByteLen::new(len)).writing(len * calls as u64);
        let row = |row: &str| format!("{}-{row}", label(len));
        let name = |row: &str| format!("{}, {row}", ByteLen::new(len));
        for (role, way, title, op) in OPS {
            check(&suite.id(&row(way)), arena, size, next, op)?;
            let spec = suite.add(role, &row(way), name(title), move |_| {
                arena.with_next(size * calls, |dst, src| {
                    timed(|| {
                        for (index, dst) in dst.chunks_mut(size).enumerate() {
                            let src = src.get(index * size..).unwrap_or_default();
                            op(dst, &src[..size.min(src.len())], next);
                            if next == NextUse::Soon {
                                black_box(read(black_box(dst)));
                            }
                        }
                        Ok(())
                    })
                })
            });
            spec.is_rival = true;
            let is_shown = len == largest.get() || len == FOLIO;
            if role == Role::Ours && next == NextUse::Later && is_shown {
                spec.headline(format!("{verb} {} at a time, out of cache", ByteLen::new(len)));
            }
        }
        if len >= REGION_BYTES && next == NextUse::Later {
            let (to, from) = (&to, from.as_ref());
            check_region(&suite.id(&row("region")), to, from, len)?;
            suite.add(Role::Ours, &row("region"), name("ours, by a region"), move |_| {
                let at = bytes(arena.next(size * calls)).get();
                timed(|| {
                    (0..calls as u64).try_for_each(|call| by_region(to, from, at + call * len, len))
                })
            });
        }
        suite.add(Role::Limit, &row("limit"), name("limit"), move |_| arena.limit(size * calls));
        suite.naive(&row("page-at-a-time")).limit(&row("limit"));
        session.run(suite, &format!("{table}, {}", label(len)))?;
    }
    let then = if next == NextUse::Later { "not used afterwards" } else { "read at once" };
    session.table(
        table,
        format!("To {verb} memory that is out of cache, {then}"),
        "one thread; naive is a page at a time; the limit is a bare streaming fill of the same bytes",
    );
    Ok(())
}

/// Returns a length as it is in the id of a row.
fn label(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 30 => format!("{}G", bytes >> 30),
        bytes if bytes >= 1 << 20 => format!("{}M", bytes >> 20),
        bytes => format!("{}K", bytes >> 10),
    }
}

/// Clears or copies by a region.
fn by_region(to: &Region, from: Option<&Region>, at: u64, len: u64) -> Result {
    let (len, options) = (ByteLen::new(len), ZeroOptions::default());
    let done = match from {
        None => to.zero_range(at, len, &options)?,
        Some(from) => to.copy_range(at, from, at, len, &options)?,
    };
    let _ = black_box(done);
    Ok(())
}

/// Checks that a row writes the right bytes before it is timed.
fn check(row: &str, arena: &Arena, size: usize, next: NextUse, op: Op) -> Result {
    arena.with_next(size, |dst, src| {
        dst.fill(9);
        op(dst, src, next);
        // Compared as words, and by the compiler's best: this is most of a run's time otherwise.
        let is_right = if src.is_empty() {
            dst.as_chunks::<64>().0.iter().all(|line| *line == [0; 64])
        } else {
            dst == src
        };
        let expected = |offset| src.get(offset).copied().unwrap_or(0);
        let wrong = || dst.iter().enumerate().position(|(at, byte)| *byte != expected(at));
        if is_right {
            return Ok(());
        }
        Err(BenchError::wrong_byte(row, wrong().unwrap_or(size) as u64))
    })
}

/// Checks the same of a region, at both ends of the extent and in its middle.
fn check_region(row: &str, to: &Region, from: Option<&Region>, len: u64) -> Result {
    let places = [0, len / 2, len - 64];
    for at in places {
        to.write_at(at, &[9; 64]).map_err(WriteError::from)?;
    }
    by_region(to, from, 0, len)?;
    for at in places {
        let mut found = [9; 64];
        to.read_at(at, &mut found).map_err(WriteError::from)?;
        // A region that is copied from was never written, so it is zero as well.
        if found != [0; 64] {
            return Err(BenchError::wrong_byte(row, at));
        }
    }
    Ok(())
}

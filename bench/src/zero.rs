//! `uzone bench zero`: clearing extents of every size, and what it does to those around.
//!
//! The extents are those of `extents.rs`. Beside them:
//!
//! | table | asks |
//! |---|---|
//! | `zero-hint` | a 2 MiB folio is cleared and one page of it read at once: which way is fastest together |
//! | `zero-bystander` | 1 MiB that a thread works with is read again after 2 MiB were cleared |
//! | `zero-pause` | what batches cost, and how long others wait for one |
//! | `zero-threads` | what a second thread brings |
//! | `pool-take` | how long a taker waits for a zero folio, by what has cleared it |
//! | `zero-kernel` | clearing in place beside the kernel's own |
//! | `zero-demand-2m`, `zero-demand-1g` | huge pages touched for the first time, as published |
//! | `populate` | first touch |
//!
//! `pool-take` is in `hand_out.rs`, and what is below it in `first_touch.rs`.

use std::cell::RefCell;
use std::hint::black_box;
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use uzone_pages::ByteLen;
use uzone_stream::{NextUse, StorePolicy, Work as StoreWork, zero_bytes};
use uzone_zone::{Batching, CacheState, CopyMethod, Region, WriteError, ZeroOptions};

use crate::extents::{self, Arena, Work, label, read};
use crate::first_touch;
use crate::group::Watch;
use crate::hand_out;
use crate::report::{Bench, Role};
use crate::settings::Part;
pub use crate::settings::ZeroSettings as Settings;
use crate::suite::{BenchError, Session, Suite, bytes, fill_zeroes, nanoseconds};

/// A folio.
const FOLIO: usize = 2 << 20;
const PAGE: usize = 4096;
/// What the bystander works with.
const WORKING_SET: usize = 1 << 20;
/// How often the small tables do their work in a round.
const CALLS: usize = 8;

/// Runs the tables.
///
/// # Errors
/// [`BenchError`] if memory is short, or a row left a wrong byte.
pub fn run(settings: &Settings, watch: Watch<'_>) -> Result<Bench, BenchError> {
    let &Settings { size, rounds, threads, populate, first_touches, .. } = settings;
    extents::check_size(size)?;
    first_touch::check(populate)?;
    let sentence = format!(
        "extents up to {size}, {rounds} rounds; {populate} touched first, {first_touches} rounds; \
         up to {threads} threads"
    );
    let mut session = Session::new(sentence, &Part::Zero(settings.clone()), rounds, watch);
    let arena = Arena::new(Work::Zero, size)?;
    extents::run(Work::Zero, size, &arena, &mut session)?;
    if session.wants("zero-hint") {
        hint(&arena, &mut session)?;
    }
    if session.wants("zero-bystander") {
        bystander(&arena, &mut session)?;
    }
    if session.wants("zero-pause") {
        pauses(&arena, &mut session)?;
    }
    if session.wants("zero-threads") {
        several(&arena, threads, &mut session)?;
    }
    if session.wants("pool-take") {
        hand_out::run(size, &mut session)?;
    }
    if session.wants("zero-kernel") {
        first_touch::kernel(&arena, &mut session)?;
    }
    session.rounds = first_touches;
    for demand in first_touch::DEMAND.iter().filter(|_| !populate.is_zero()) {
        if session.wants(demand.table) {
            first_touch::demand(demand, populate, threads, &arena, &mut session)?;
        }
    }
    if session.wants("populate") && !populate.is_zero() {
        first_touch::populate(&arena, populate, threads, &mut session)?;
    }
    session.finish()
}

/// Clears 2 MiB and reads the page in its middle at once.
fn hint(arena: &Arena, session: &mut Session<'_>) -> Result<(), BenchError> {
    let page = FOLIO / 2..FOLIO / 2 + PAGE;
    let mut suite = Suite::new(bytes(FOLIO));
    let total = bytes(FOLIO * CALLS).get();
    let mut add = |role: Role, row: &str, name: &str, clear: fn(&mut [u8])| {
        let page = page.clone();
        let spec = suite.add(role, &format!("zero-hint/{row}"), name, total, 1, move || {
            let mut elapsed = Duration::ZERO;
            for _ in 0..CALLS {
                elapsed += arena.with_next(FOLIO, |folio| {
                    let started = Instant::now();
                    clear(folio);
                    black_box(read(black_box(&folio[page.clone()])));
                    started.elapsed()
                });
            }
            Ok(elapsed)
        });
        spec.is_rival = true;
    };
    add(Role::Naive, "page-at-a-time", "a page at a time, then read", |folio| {
        folio.chunks_mut(PAGE).for_each(|page| zero_bytes(CopyMethod::String, page));
    });
    add(Role::Peer, "libc", "memset, then read", |folio| folio.fill(0));
    add(Role::Variant, "streaming", "streaming without a hint, then read", |folio| {
        zero_bytes(past(), folio);
    });
    let options = |at: usize| ZeroOptions::default().hint(bytes(at + FOLIO / 2).get());
    let name = "ours with a hint, then read";
    let spec = suite.add(Role::Ours, "zero-hint/ours", name, total, 1, || {
        let mut elapsed = Duration::ZERO;
        for _ in 0..CALLS {
            let at = arena.next(FOLIO);
            let options = options(at);
            let read_at = bytes(at + FOLIO / 2).get();
            let started = Instant::now();
            let _ = black_box(arena.region.zero_range(bytes(at).get(), bytes(FOLIO), &options)?);
            black_box(read_words(&arena.region, read_at)?);
            elapsed += started.elapsed();
        }
        Ok(elapsed)
    });
    spec.is_rival = true;
    suite.each_spec(|spec| {
        spec.naive("zero-hint/page-at-a-time");
    });
    session.run(suite, "a folio of which a page is read at once")?;
    session.table(
        "zero-hint",
        "A 2 MiB folio is cleared, and one page of it read at once",
        "both together, eight times; out of cache; naive is a page at a time",
    );
    Ok(())
}

/// Reads every line of a page of a region.
fn read_words(region: &Region, at: u64) -> Result<u64, BenchError> {
    let words = region.mapping().as_words(at..at + bytes(PAGE).get()).map_err(WriteError::from)?;
    let lines = words.iter().step_by(8).map(|word| word.load(Ordering::Relaxed));
    Ok(lines.fold(0, u64::wrapping_add))
}

/// What a row is, its id and name, and how it clears.
type ClearRow = (Role, &'static str, &'static str, fn(&mut [u8]));

/// Reads 1 MiB again after 2 MiB were cleared.
fn bystander(arena: &Arena, session: &mut Session<'_>) -> Result<(), BenchError> {
    let own = vec![1_u8; WORKING_SET];
    let mut suite = Suite::new(bytes(WORKING_SET));
    let total = bytes(WORKING_SET * CALLS).get();
    let rows: [ClearRow; 5] = [
        (Role::Limit, "undisturbed", "undisturbed", |_| {}),
        (Role::Peer, "page-at-a-time", "after a page at a time", |folio| {
            folio.chunks_mut(PAGE).for_each(|page| zero_bytes(CopyMethod::String, page));
        }),
        (Role::Naive, "libc", "after memset", |folio| folio.fill(0)),
        (Role::Variant, "string", "after one string store", |folio| {
            zero_bytes(CopyMethod::String, folio);
        }),
        (Role::Ours, "ours", "after ours", |folio| {
            zero_bytes(past(), folio);
        }),
    ];
    for (role, row, name, clear) in rows {
        let own = &own;
        suite.add(role, &format!("zero-bystander/{row}"), name, total, 1, move || {
            let mut elapsed = Duration::ZERO;
            for _ in 0..CALLS {
                // Twice, so that it is in the cache as well as it can be.
                black_box(read(black_box(own)));
                black_box(read(black_box(own)));
                arena.with_next(FOLIO, clear);
                let started = Instant::now();
                black_box(read(black_box(own)));
                elapsed += started.elapsed();
            }
            Ok(elapsed)
        });
    }
    suite.each_spec(|spec| {
        spec.naive("zero-bystander/libc").limit("zero-bystander/undisturbed", total);
    });
    session.run(suite, "a bystander")?;
    session.table(
        "zero-bystander",
        "1 MiB that somebody works with is read again after 2 MiB were cleared",
        "the reading alone, eight times; naive is after memset, the limit is undisturbed",
    );
    Ok(())
}

/// Clears the largest extent in batches of several sizes.
fn pauses(arena: &Arena, session: &mut Session<'_>) -> Result<(), BenchError> {
    let len = bytes(arena.len);
    let mut suite = Suite::new(len);
    let batch = |shift: u32| Batching::Bytes(ByteLen::new(1 << shift));
    let mut cases: Vec<(String, String, Batching)> = [16, 18, 20, 21, 23, 25]
        .into_iter()
        .map(|shift| {
            let label = label(1 << shift);
            (label.clone(), format!("batches of {label}"), batch(shift))
        })
        .collect();
    cases.push(("default".to_owned(), "pauses of 1 ms at most".to_owned(), Batching::COOPERATIVE));
    cases.push(("whole".to_owned(), "in one go".to_owned(), Batching::Whole));
    for (row, name, batching) in cases {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let pauses = Rc::clone(&seen);
        let role = if batching == Batching::Whole { Role::Naive } else { Role::Ours };
        let spec = suite.add(role, &format!("zero-pause/{row}"), name, len.get(), 1, move || {
            let options = ZeroOptions::default().batching(batching);
            let started = Instant::now();
            let mut last = started;
            for batch in arena.region.zero_batches(0, len, &options)? {
                black_box(batch);
                let now = Instant::now();
                pauses.borrow_mut().push(nanoseconds(now.duration_since(last)));
                last = now;
            }
            Ok(started.elapsed())
        });
        spec.naive("zero-pause/whole");
        spec.pauses = Some(seen);
    }
    session.run(suite, "batches")?;
    session.table(
        "zero-pause",
        format!("Clearing {len} in batches, and how long others wait for one"),
        "one thread, out of cache; naive is one go; pauses of all rounds, the first included",
    );
    Ok(())
}

/// Clears the largest extent by several threads.
fn several(
    arena: &Arena,
    threads: NonZeroUsize,
    session: &mut Session<'_>,
) -> Result<(), BenchError> {
    let len = bytes(arena.len);
    let mut suite = Suite::new(len);
    let mut counts = vec![NonZeroUsize::MIN, threads];
    counts.dedup();
    for count in counts {
        let limit = format!("zero-threads/limit-{count}");
        let (name, threads) = (format!("limit, threads: {count}"), count.get());
        suite.add(Role::Limit, &limit, name, len.get(), threads, move || {
            arena.with_next(arena.len, |dst| fill_zeroes(dst, threads))
        });
        let row = format!("zero-threads/ours-{count}");
        let name = format!("ours, threads: {count}");
        let spec = suite.add(Role::Ours, &row, name, len.get(), threads, move || {
            let options = ZeroOptions::default().threads(count);
            let started = Instant::now();
            let _ = black_box(arena.region.zero_range(0, len, &options)?);
            Ok(started.elapsed())
        });
        spec.limit(limit, len.get());
        spec.naive("zero-threads/ours-1");
    }
    session.run(suite, "threads")?;
    session.table(
        "zero-threads",
        format!("Clearing {len} by several threads"),
        "out of cache; naive is ours on one thread; the limit has as many threads",
    );
    Ok(())
}

/// Returns the way past the cache for a folio.
fn past() -> CopyMethod {
    StorePolicy::current().choose(StoreWork::Zero, FOLIO, CacheState::Cold, NextUse::Later)
}

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
use uzone_stream::{CacheState, CopyMethod, NextUse, StorePolicy, Work, zero_bytes};
use uzone_zone::{Batching, Region, WriteError, ZeroOptions};

use crate::harness::{
    Bench, Part, Result, Role, Session, Suite, Watch, ZeroSettings, bytes, fill_zeroes,
    nanoseconds, timed,
};
use crate::tables::extents::{self, Arena, label, read};
use crate::tables::first_touch;
use crate::tables::hand_out;

/// A folio.
const FOLIO: usize = 2 << 20;
const PAGE: usize = 4096;
/// What the bystander works with.
const WORKING_SET: usize = 1 << 20;
/// How often the small tables do their work in a round.
const CALLS: usize = 8;

/// Runs the tables.
pub(crate) fn run(settings: &ZeroSettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let &ZeroSettings { size, rounds, threads, populate, first_touches } = settings;
    extents::check_size(size)?;
    first_touch::check(populate)?;
    let sentence = format!(
        "extents up to {size}, {rounds} rounds; {populate} touched first, {first_touches} rounds; \
         up to {threads} threads"
    );
    let mut session = Session::new(sentence, part, rounds, watch);
    let arena = Arena::new(Work::Zero, size)?;
    extents::run(Work::Zero, size, &arena, &mut session)?;
    type Table = fn(&Arena, &ZeroSettings, &mut Session<'_>) -> Result;
    let tables: [(&str, Table); 6] = [
        ("zero-hint", hint),
        ("zero-bystander", bystander),
        ("zero-pause", pauses),
        ("zero-threads", several),
        ("pool-take", |_, settings, session| hand_out::run(settings.size, session)),
        ("zero-kernel", |arena, _, session| first_touch::kernel(arena, session)),
    ];
    for (table, measure) in tables {
        if session.wants(table) {
            measure(&arena, settings, &mut session)?;
        }
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

/// What a row is, its id and name, and how it clears.
type ClearRow = (Role, &'static str, &'static str, fn(&mut [u8]));

/// Does something so often, and returns how long it took in all.
fn times(calls: usize, mut work: impl FnMut() -> Result<Duration>) -> Result<Duration> {
    (0..calls).try_fold(Duration::ZERO, |elapsed, _| Ok(elapsed + work()?))
}

fn by_pages(folio: &mut [u8]) {
    folio.chunks_mut(PAGE).for_each(|page| zero_bytes(CopyMethod::String, page));
}

/// Clears 2 MiB and reads the page in its middle at once.
fn hint(arena: &Arena, _: &ZeroSettings, session: &mut Session<'_>) -> Result {
    let total = bytes(FOLIO * CALLS).get();
    let mut suite = Suite::new("zero-hint", bytes(FOLIO)).writing(total);
    let rows: [ClearRow; 3] = [
        (Role::Naive, "page-at-a-time", "a page at a time, then read", by_pages),
        (Role::Peer, "libc", "memset, then read", |folio| folio.fill(0)),
        (Role::Variant, "streaming", "streaming without a hint, then read", |folio| {
            zero_bytes(past(), folio);
        }),
    ];
    for (role, row, name, clear) in rows {
        suite.add(role, row, name, move |_| {
            times(CALLS, || {
                arena.with_next(FOLIO, |folio| {
                    timed(|| {
                        clear(folio);
                        Ok(black_box(read(black_box(&folio[FOLIO / 2..FOLIO / 2 + PAGE]))))
                    })
                })
            })
        });
    }
    suite.add(Role::Ours, "ours", "ours with a hint, then read", |_| {
        times(CALLS, || {
            let at = arena.next(FOLIO);
            let (start, read_at) = (bytes(at).get(), bytes(at + FOLIO / 2).get());
            let options = ZeroOptions::default().hint(read_at);
            timed(|| {
                let _ = black_box(arena.region.zero_range(start, bytes(FOLIO), &options)?);
                Ok(black_box(read_words(&arena.region, read_at)?))
            })
        })
    });
    suite.naive("page-at-a-time").each_spec(|spec| spec.is_rival = true);
    session.measure(
        suite,
        "A 2 MiB folio is cleared, and one page of it read at once",
        "both together, eight times; out of cache; naive is a page at a time",
    )
}

/// Reads every line of a page of a region.
fn read_words(region: &Region, at: u64) -> Result<u64> {
    let words = region.mapping().as_words(at..at + bytes(PAGE).get()).map_err(WriteError::from)?;
    let lines = words.iter().step_by(8).map(|word| word.load(Ordering::Relaxed));
    Ok(lines.fold(0, u64::wrapping_add))
}

/// Reads 1 MiB again after 2 MiB were cleared.
fn bystander(arena: &Arena, _: &ZeroSettings, session: &mut Session<'_>) -> Result {
    let own = &vec![1_u8; WORKING_SET];
    let total = bytes(WORKING_SET * CALLS).get();
    let mut suite = Suite::new("zero-bystander", bytes(WORKING_SET)).writing(total);
    let rows: [ClearRow; 5] = [
        (Role::Limit, "undisturbed", "undisturbed", |_| {}),
        (Role::Peer, "page-at-a-time", "after a page at a time", by_pages),
        (Role::Naive, "libc", "after memset", |folio| folio.fill(0)),
        (Role::Variant, "string", "after one string store", |folio| {
            zero_bytes(CopyMethod::String, folio);
        }),
        (Role::Ours, "ours", "after ours", |folio| {
            zero_bytes(past(), folio);
        }),
    ];
    for (role, row, name, clear) in rows {
        suite.add(role, row, name, move |_| {
            times(CALLS, || {
                // Twice, so that it is in the cache as well as it can be.
                black_box(read(black_box(own)));
                black_box(read(black_box(own)));
                arena.with_next(FOLIO, clear);
                timed(|| Ok(black_box(read(black_box(own)))))
            })
        });
    }
    suite.naive("libc").limit("undisturbed");
    session.measure(
        suite,
        "1 MiB that is in use is read again after 2 MiB were cleared",
        "the reading alone, eight times; naive is after memset, the limit is undisturbed",
    )
}

/// Clears the largest extent in batches of several sizes.
fn pauses(arena: &Arena, _: &ZeroSettings, session: &mut Session<'_>) -> Result {
    let len = bytes(arena.len);
    let mut suite = Suite::new("zero-pause", len).writing(len.get());
    let batch = |shift: u32| {
        let (label, size) = (label(1 << shift), ByteLen::new(1 << shift));
        (label.clone(), format!("batches of {label}"), Batching::Bytes(size))
    };
    let mut cases: Vec<(String, String, Batching)> =
        [16, 18, 20, 21, 23, 25].into_iter().map(batch).collect();
    cases.push(("default".to_owned(), "pauses of 1 ms at most".to_owned(), Batching::COOPERATIVE));
    cases.push(("whole".to_owned(), "in one go".to_owned(), Batching::Whole));
    for (row, name, batching) in cases {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let pauses = Rc::clone(&seen);
        let role = if batching == Batching::Whole { Role::Naive } else { Role::Ours };
        let spec = suite.add(role, &row, name, move |_| {
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
        spec.pauses = Some(seen);
    }
    suite.naive("whole");
    session.measure(
        suite,
        format!("Clearing {len} in batches, and how long others wait for one"),
        "one thread, out of cache; naive is one go; pauses of all rounds, the first included",
    )
}

/// Clears the largest extent by several threads.
fn several(arena: &Arena, asked: &ZeroSettings, session: &mut Session<'_>) -> Result {
    let len = bytes(arena.len);
    let mut suite = Suite::new("zero-threads", len).writing(len.get());
    let mut counts = vec![NonZeroUsize::MIN, asked.threads];
    counts.dedup();
    for count in counts {
        suite.threads = count.get();
        let limit = format!("limit-{count}");
        suite.add(Role::Limit, &limit, format!("limit, threads: {count}"), move |_| {
            arena.with_next(arena.len, |dst| fill_zeroes(dst, count.get()))
        });
        let name = format!("ours, threads: {count}");
        let spec = suite.add(Role::Ours, &format!("ours-{count}"), name, move |_| {
            let options = ZeroOptions::default().threads(count);
            timed(|| Ok(black_box(arena.region.zero_range(0, len, &options)?)))
        });
        spec.limit(&limit).naive("ours-1");
    }
    session.measure(
        suite,
        format!("Clearing {len} by several threads"),
        "out of cache; naive is ours on one thread; the limit has as many threads",
    )
}

/// Returns the way past the cache for a folio.
fn past() -> CopyMethod {
    StorePolicy::current().choose(Work::Zero, FOLIO, CacheState::Cold, NextUse::Later)
}

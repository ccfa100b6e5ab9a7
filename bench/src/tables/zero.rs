//! `uzone-bench zero`: clearing extents of every size, and what it does to those around.
//!
//! The extents are those of `extents.rs`. Beside them:
//!
//! | table | asks |
//! |---|---|
//! | `zero-threads` | what a second thread brings |
//! | `pool-take` | how long a taker waits for a zero folio, by what has cleared it |
//! | `zero-kernel` | clearing in place beside the kernel's own |
//! | `zero-demand-2m`, `zero-demand-1g` | huge pages touched for the first time, as published |
//! | `populate` | first touch |
//!
//! `pool-take` is in `hand_out.rs`, and what is below it in `first_touch.rs`.

use std::hint::black_box;
use std::num::NonZeroUsize;

use uzone_harness::{Bench, Result, Role, Session, Suite, Watch, bytes, fill_zeroes, timed};
use uzone_stream::Work;
use uzone_zone::ZeroOptions;

use crate::settings::{Part, ZeroSettings};
use crate::tables::extents::{self, Arena};
use crate::tables::first_touch;
use crate::tables::hand_out;

/// Runs the tables.
pub(crate) fn run(settings: &ZeroSettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let &ZeroSettings { size, rounds, threads, populate, first_touches } = settings;
    extents::check_size(size)?;
    first_touch::check(populate)?;
    let sentence = format!(
        "extents up to {size}, {rounds} rounds; {populate} touched first, {first_touches} rounds; \
         up to {threads} threads"
    );
    let mut session = part.session(sentence, rounds, watch);
    let arena = Arena::new(Work::Zero, size)?;
    extents::run(Work::Zero, size, &arena, &mut session)?;
    type Table = fn(&Arena, &ZeroSettings, &mut Session<'_>) -> Result;
    let tables: [(&str, Table); 3] = [
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

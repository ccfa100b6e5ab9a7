//! The first write to each page of memory whose writes are tracked: in order and in random order, by how it is
//! learned of.
//!
//! All pages are there before. The limit is memory whose writes are not tracked. Afterwards the words are
//! compared, and so is what is dirty.

use std::sync::Arc;
use std::time::Instant;

use uzone_fault::{Answer, LazyMapping, LazyOptions, MemoryBacking, WriteTracking};
use uzone_os::{Mapping, Sharing};
use uzone_pages::ByteLen;

use super::run::{Ours, Run};
use super::source::PAGE;
use super::touch::{Pattern, Placement};
use uzone_harness::{BenchError, Found, Result, Role, Suite, check_word, nanoseconds};

/// How much is written at most.
const MOST: ByteLen = ByteLen::mib(64);

/// Runs the tables of one placement.
pub(super) fn tables(run: &mut Run<'_>, memory: &Arc<Mapping>, placement: &Placement) -> Result {
    for pattern in [Pattern::InOrder, Pattern::Random] {
        let table = format!("fault-write-{}{}", pattern.id(), placement.id);
        if run.wants(&table) {
            write(run, &table, memory, pattern, placement)?;
        }
    }
    Ok(())
}

fn write(
    run: &mut Run<'_>,
    table: &str,
    memory: &Arc<Mapping>,
    pattern: Pattern,
    placement: &Placement,
) -> Result {
    let len = memory.len().min(MOST);
    let parts = pattern.parts(len, PAGE, 1);
    let offsets = &parts.concat()[..];
    let free = Ours::new(None)?.options;
    let tracked = |track, answer| free.clone().answer(answer).track_writes(track);
    let event = |answer| tracked(WriteTracking::Sync, answer);
    let recorded = |answer| tracked(WriteTracking::Async, answer);
    let (reader, thread) = (Answer::Reader, Answer::InThread);
    let engine = &placement.engine()?;
    let mut suite = Suite::new(table, len);
    let rows: [(&str, &str, Role, LazyOptions); 5] = [
        ("free", "not tracked", Role::Limit, free.clone()),
        ("reader", "an event a page, by a reader", Role::Ours, event(reader)),
        ("thread", "an event a page, in the thread", Role::Ours, event(thread)),
        ("kernel", "recorded by the kernel, by a reader", Role::Ours, recorded(reader)),
        ("thread-kernel", "the same, in the thread", Role::Ours, recorded(thread)),
    ];
    for (row, name, role, options) in rows {
        let is_tracked = role == Role::Ours;
        suite.faults(role, row, name, move |row| {
            let backing = Arc::new(MemoryBacking::new(memory.clone(), Sharing::Private)?);
            let memory = placement.by_handler(|| Ok(engine.map(len, backing, &options)?))?;
            memory.populate(0..len.get())?;
            placement.by_toucher(|| write_all(row, &memory, offsets, is_tracked))
        });
    }
    let pages = offsets.len() as u64;
    suite.limit("free").each_spec(|spec| spec.row.items = pages);
    let title = format!("The first write to each of {pages} pages, {}", pattern.title());
    let note = format!("{}; private memory of a memory file, present before", placement.title);
    run.session.measure(suite, title, note)
}

/// Writes a word to each page, and compares what is there and what is dirty.
fn write_all(row: &str, memory: &LazyMapping, offsets: &[u64], is_tracked: bool) -> Result<Found> {
    let before = memory.stats().write_protect;
    let mut touches_ns = Vec::with_capacity(offsets.len());
    let begun = Instant::now();
    let mut last = begun;
    for offset in offsets {
        memory.write_at(*offset, &(offset ^ 0x5a5a).to_ne_bytes())?;
        let now = Instant::now();
        touches_ns.push(nanoseconds(now - last));
        last = now;
    }
    let elapsed = begun.elapsed();
    let faults = memory.stats().write_protect - before;
    for &offset in offsets {
        check_word(row, memory, offset, offset ^ 0x5a5a)?;
    }
    let whole = 0..memory.len().get();
    if is_tracked && memory.dirty(whole.clone())? != std::slice::from_ref(&whole) {
        return Err(BenchError::wrong_byte(row, 0));
    }
    Ok(Found { elapsed, faults, touches_ns, ..Found::default() })
}

//! The first write to each page of memory whose writes are tracked, in random order.
//!
//! All pages are present before. The limit is memory whose writes are not tracked. Afterwards the words and the dirty
//! pages are compared.

use std::sync::Arc;
use std::time::Instant;

use uzone_fault::{Answer, LazyMapping, LazyOptions, MemoryBacking, WriteTracking};
use uzone_harness::{BenchError, Found, Result, Role, Session, Suite, check_word, nanoseconds};
use uzone_os::Sharing;
use uzone_pages::ByteLen;

use super::source::{PAGE, memory_file};
use super::touch::{Pattern, Placement};

/// The largest length that is written.
const MOST: ByteLen = ByteLen::mib(64);

pub(super) fn table(session: &mut Session<'_>, placement: &Placement, size: ByteLen) -> Result {
    let table = format!("fault-write-random{}", placement.id);
    if !session.wants(&table) {
        return Ok(());
    }
    let len = size.min(MOST);
    let memory = &memory_file(len, None)?;
    let offsets = &Pattern::Random.parts(len, PAGE, 1).concat()[..];
    let tracked = |track, answer| LazyOptions::default().answer(answer).track_writes(track);
    let rows: [(&str, &str, Role, LazyOptions); 4] = [
        ("free", "not tracked", Role::Limit, LazyOptions::default()),
        (
            "reader",
            "an event a page, by a reader",
            Role::Ours,
            tracked(WriteTracking::Sync, Answer::Reader),
        ),
        (
            "thread",
            "an event a page, in the thread",
            Role::Ours,
            tracked(WriteTracking::Sync, Answer::InThread),
        ),
        (
            "kernel",
            "recorded by the kernel",
            Role::Ours,
            tracked(WriteTracking::Async, Answer::Reader),
        ),
    ];
    let engine = &placement.engine()?;
    let mut suite = Suite::new(table, len);
    for (row, name, role, options) in rows {
        suite.faults(role, row, name, move |row| {
            let backing = Arc::new(MemoryBacking::new(memory.clone(), Sharing::Private)?);
            let memory = placement.by_handler(|| Ok(engine.map(len, backing, &options)?))?;
            memory.populate(0..len.get())?;
            placement.by_toucher(|| write_all(row, &memory, offsets, role == Role::Ours))
        });
    }
    let pages = offsets.len() as u64;
    suite.limit("free").each_spec(|spec| spec.row.items = pages);
    let title = format!("The first write to each of {pages} pages, {}", Pattern::Random.title());
    let note = format!("{}; private memory of a memory file, present before", placement.title);
    session.measure(suite, title, note)
}

/// Writes a word to each page, and compares the words and the dirty pages.
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

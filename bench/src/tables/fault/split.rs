//! Where the time of one fault goes: the kernel's round trip, the copy, and our bookkeeping.
//!
//! A bare handler that waits as ours does and keeps no record of anything answers by the zero page,
//! by a copy, or by continuing; ours does the same with a backing that does next to nothing. What
//! ours takes beyond that is its bookkeeping, as far as differences of round trips show it: these vary
//! by more. So the same faults are answered without the kernel as well: what is left is ours alone.

use std::sync::Arc;
use std::time::Instant;

use uzone_fault::rehearsal::Rehearsal;
use uzone_fault::{Backing, FunctionBacking, LazyOptions, MemoryBacking, ZeroBacking};
use uzone_os::{Access, Mapping, Sharing};
use uzone_pages::ByteLen;

use super::bare::{Answer, Bare, spin_as_ours};
use super::run::{Ours, Run, Touches, Visits};
use super::source::{self, PAGE, Source, mark, word};
use super::touch::{Pattern, Placement};
use crate::harness::{BenchError, Found, Result, Role, Suite, anonymous, nanoseconds};

/// How much is touched at most, one page a fault.
const MOST: ByteLen = ByteLen::mib(64);

/// How many faults are timed together where they are ours alone: to ask for the time takes as long as a
/// part of one.
const TIMED: usize = 16;

/// What stands at an offset.
type Oracle = fn(u64) -> u64;
/// Id, name, how the handler answers, beyond which row, and what is right.
type BareRow = (&'static str, &'static str, Answer, Option<&'static str>, Oracle);
/// The same for a backing.
type OurRow = (&'static str, &'static str, Arc<dyn Backing>, &'static str, Oracle);

fn zero(_: u64) -> u64 {
    0
}

pub(super) fn table(
    run: &mut Run<'_>,
    file: &Source,
    memory: &Arc<Mapping>,
    placement: &Placement,
) -> Result {
    let table = format!("fault-split{}", placement.id);
    if !run.wants(&table) {
        return Ok(());
    }
    let len = file.len.min(MOST);
    file.warm(len)?;
    let parts = Pattern::Random.parts(len, PAGE, 1);
    let visits = Visits::timed(&parts, placement);
    let (touched, options) = (visits.touched, Ours::new(Some(0), placement)?.options);
    let expecting = |expected| Visits { visitor: Touches { expected, ..visits.visitor }, ..visits };
    let spin = spin_as_ours(placement.spin);
    let engine = &placement.engine()?;
    let mut suite = Suite::new(&table, len);
    let marked = Answer::Fetch(Arc::new(|offset, page: &mut [u8]| {
        mark(offset, page);
        Ok(())
    }));
    let bare: [BareRow; 3] = [
        ("zero", "bare, the zero page: a round trip", Answer::Zero, None, zero),
        ("copy", "bare, a copy (beyond the zero page)", marked, Some("zero"), word),
        ("continue", "bare, continued", Answer::Continue, None, word),
    ];
    for (row, name, answer, beyond, expected) in bare {
        let spec = expecting(expected).add(&mut suite, Role::Limit, row, name, move || {
            let mapping = match answer {
                Answer::Continue => source::map_memory_file(memory, len, Access::ReadWrite)?,
                _ => anonymous(len)?,
            };
            Bare::new(mapping, answer.clone(), spin)
        });
        spec.beyond = beyond.map(|row| spec.of_table(row));
    }
    for (row, name, backing, beyond, expected) in backings(file, memory)? {
        let options = options.clone();
        let map = move || Ok(engine.map(len, backing.clone(), &options)?);
        let spec = expecting(expected).add(&mut suite, Role::Ours, row, name, map);
        spec.beyond = Some(spec.of_table(beyond));
    }
    add_alone(&mut suite, &parts.concat(), len, placement)?;
    suite.each_spec(|spec| spec.row.items = touched);
    let title = format!("Where a fault's time goes: {touched} faults of one page each");
    let note = format!(
        "{}; all wait alike; beyond is the difference of the median touches; ours alone: {TIMED} faults at once",
        placement.title
    );
    run.session.measure(suite, title, note)
}

/// Returns the rows of ours.
fn backings(file: &Source, memory: &Arc<Mapping>) -> Result<[OurRow; 4]> {
    let function = FunctionBacking::quick(|offset, pages: &mut [u8]| {
        mark(offset, pages);
        Ok(())
    });
    let memory = MemoryBacking::new(memory.clone(), Sharing::Private)?;
    Ok([
        (
            "ours-zero",
            "ours, zeroes (beyond the bare zero page)",
            Arc::new(ZeroBacking),
            "zero",
            zero,
        ),
        ("ours-copy", "ours, a copy (beyond the bare one)", Arc::new(function), "copy", word),
        (
            "ours-continue",
            "ours, continued (beyond the bare one)",
            Arc::new(memory),
            "continue",
            word,
        ),
        ("ours-file", "ours, a file (beyond ours, a copy)", file.backing()?, "ours-copy", word),
    ])
}

/// Adds ours without the kernel.
fn add_alone<'a>(
    suite: &mut Suite<'a>,
    touched: &[u64],
    len: ByteLen,
    placement: &'a Placement,
) -> Result {
    for (row, name, order) in [
        ("ours-alone", "ours alone, without the kernel, 1 page", 0),
        ("ours-alone-16", "ours alone, without the kernel, 16 pages", 4),
    ] {
        let options = Ours::new(Some(order), placement)?.options;
        // One page of each window.
        let mut offsets = touched.to_vec();
        offsets.retain(|at| (at / PAGE).is_multiple_of(1 << order));
        suite.faults(Role::Ours, row, name, move |row| {
            placement.by_handler(|| rehearse(row, len, &options, &offsets))
        });
    }
    Ok(())
}

/// Answers faults at `offsets` without the kernel.
fn rehearse(row: &str, len: ByteLen, options: &LazyOptions, offsets: &[u64]) -> Result<Found> {
    let mut rehearsal = Rehearsal::new(len, options)?;
    let mut touches_ns = Vec::with_capacity(offsets.len() / TIMED);
    let begun = Instant::now();
    for some in offsets.chunks_exact(TIMED) {
        let answered = Instant::now();
        for offset in some {
            rehearsal.fault(offset / PAGE * PAGE);
        }
        touches_ns.push(nanoseconds(answered.elapsed()) / TIMED as u64);
    }
    let elapsed = begun.elapsed();
    match offsets.iter().find(|&&offset| !rehearsal.is_there(offset)) {
        Some(&offset) => Err(BenchError::wrong_byte(row, offset)),
        None => {
            let faults = (touches_ns.len() * TIMED) as u64;
            Ok(Found { elapsed, faults, touches_ns, ..Found::default() })
        }
    }
}

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

use super::bare::{Answer, Bare, Waiting};
use super::run::{Ours, Run, Visit};
use super::source::{self, PAGE, Source, mark, word};
use super::touch::{Pattern, Placement};
use crate::harness::group::nanoseconds;
use crate::harness::report::Log;
use crate::harness::suite::{BenchError, Found, Role, Suite};

/// How much is touched at most, one page a fault.
const MOST: ByteLen = ByteLen::mib(64);

/// How many faults are timed together where they are ours alone: to ask for the time takes as long as a
/// part of one.
const TIMED: usize = 16;

/// What stands at an offset.
type Oracle = fn(u64) -> u64;
/// Id, name, how the handler answers, beyond which of the rows, and what is right.
type BareRow = (&'static str, &'static str, Answer, Option<usize>, Oracle);
/// The same for a backing.
type OurRow = (&'static str, &'static str, Arc<dyn Backing>, usize, Oracle);

fn zero(_: u64) -> u64 {
    0
}

pub(super) fn table(
    run: &mut Run<'_>,
    file: &Source,
    memory: &Arc<Mapping>,
    placement: &Placement,
) -> Result<(), BenchError> {
    let table = format!("fault-split{}", placement.id);
    if !run.wants(&table) {
        return Ok(());
    }
    let len = file.len.min(MOST);
    file.warm(len)?;
    let parts = Pattern::Random.parts(len, PAGE, 1);
    let visit = Visit::timed(&parts, placement);
    let (touched, options) = (visit.touched(), Ours::new(Some(0), placement)?.options);
    let waiting = Waiting::like_ours(placement.spin);
    let engine = &placement.engine()?;
    let mut suite = Suite::new(&table, len);
    let bare: [BareRow; 3] = [
        ("zero", "bare, the zero page: a round trip", Answer::Zero, None, zero),
        ("copy", "bare, a copy (beyond the zero page)", Answer::Mark, Some(0), word),
        ("continue", "bare, continued", Answer::Continue, None, word),
    ];
    // Of the rows so far, which later ones are compared with.
    let mut logs: Vec<Log> = Vec::new();
    for (row, name, answer, beyond, expected) in bare {
        let visit = Visit { expected, ..visit };
        let spec = suite.faults(Role::Limit, row, name, move |row| {
            let answer = answer.clone();
            let memory = placement.by_handler(|| match answer {
                Answer::Continue => {
                    let mapping = source::map_memory_file(memory, len, Access::ReadWrite)?;
                    Bare::new(mapping, answer, waiting)
                }
                _ => Bare::anonymous(len, answer, waiting),
            })?;
            visit.bare(row, &memory)
        });
        spec.faults.beyond = beyond.map(|other| logs[other].clone());
        logs.push(spec.faults.log.clone());
    }
    for (row, name, backing, beyond, expected) in backings(file, memory)? {
        let (visit, options) = (Visit { expected, ..visit }, options.clone());
        let spec = suite.faults(Role::Ours, row, name, move |row| {
            let backing = backing.clone();
            let memory = placement.by_handler(|| Ok(engine.map(len, backing, &options)?))?;
            visit.lazy(row, &memory)
        });
        spec.faults.beyond = Some(logs[beyond].clone());
        logs.push(spec.faults.log.clone());
    }
    add_alone(&mut suite, &parts.concat(), len, placement)?;
    suite.each_spec(|spec| spec.row.items = touched);
    let title = format!("Where a fault's time goes: {touched} faults of one page each");
    let note = format!(
        "{}; all wait alike; beyond is the difference of the median touches; ours alone: {TIMED} faults at once",
        placement.title
    );
    run.session.measure(suite, &format!("split{}", placement.id), title, note)
}

/// Returns the rows of ours. The numbers are those of the rows that they are compared with: first are the bare
/// ones.
fn backings(file: &Source, memory: &Arc<Mapping>) -> Result<[OurRow; 4], BenchError> {
    let function = FunctionBacking::quick(|offset, pages: &mut [u8]| {
        mark(offset, pages);
        Ok(())
    });
    let memory = MemoryBacking::new(memory.clone(), Sharing::Private)?;
    Ok([
        ("ours-zero", "ours, zeroes (beyond the bare zero page)", Arc::new(ZeroBacking), 0, zero),
        ("ours-copy", "ours, a copy (beyond the bare one)", Arc::new(function), 1, word),
        ("ours-continue", "ours, continued (beyond the bare one)", Arc::new(memory), 2, word),
        ("ours-file", "ours, a file (beyond ours, a copy)", file.backing()?, 4, word),
    ])
}

/// Adds ours without the kernel.
fn add_alone<'a>(
    suite: &mut Suite<'a>,
    touched: &[u64],
    len: ByteLen,
    placement: &'a Placement,
) -> Result<(), BenchError> {
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
fn rehearse(
    row: &str,
    len: ByteLen,
    options: &LazyOptions,
    offsets: &[u64],
) -> Result<Found, BenchError> {
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

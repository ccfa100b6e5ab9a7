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
use super::run::{PAGE, Run};
use super::scan::{file_backing, settled, way};
use super::source::{self, Source, place, word};
use super::touch::{Pattern, Placement, touch};
use crate::report::{FaultSpec, Log, Role, Table};
use crate::suite::{BenchError, Suite};

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

/// Writes the one word of each page that is looked at.
pub(super) fn mark(offset: u64, pages: &mut [u8]) {
    for (index, page) in pages.chunks_exact_mut(4096).enumerate() {
        let start = offset + index as u64 * PAGE;
        let at = place(start / PAGE);
        let inside = usize::try_from(at - start).unwrap_or(0);
        page[inside..inside + 8].copy_from_slice(&word(at).to_ne_bytes());
    }
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
    let touched: u64 = parts.iter().map(|part| part.len() as u64).sum();
    let parts = &parts;
    let options = way(Some(0), placement)?.options;
    let spin = placement.spin.unwrap_or(LazyOptions::DEFAULT_SPIN);
    let waiting = if spin.is_zero() { Waiting::Poll } else { Waiting::Spin(spin) };
    let logs: [Log; 4] = Default::default();
    let engine = placement.engine()?;
    let mut suite = Suite::new(len);

    let bare: [BareRow; 3] = [
        ("zero", "bare, the zero page: a round trip", Answer::Zero, None, zero),
        ("copy", "bare, a copy (beyond the zero page)", Answer::Mark, Some(0), word),
        ("continue", "bare, continued", Answer::Continue, None, word),
    ];
    for (index, (row, name, answer, beyond, expected)) in bare.into_iter().enumerate() {
        let id = format!("{table}/{row}");
        let (case, found) = (id.clone(), logs[index].clone());
        let memory = memory.clone();
        let spec = suite.add(Role::Limit, &id, name, 0, 1, move || {
            let answer = answer.clone();
            let memory = placement.by_handler(|| match answer {
                Answer::Continue => {
                    let mapping = source::map_memory_file(&memory, len, Access::ReadWrite)?;
                    Bare::new(mapping, answer, waiting)
                }
                _ => Bare::anonymous(len, answer, waiting),
            })?;
            let done = touch(&case, &memory, parts, placement, true, expected);
            memory.check(&case)?;
            let done = done?;
            found.borrow_mut().push(memory.faults(), 0, done.times_ns);
            Ok(done.elapsed)
        });
        spec.faults = Some(FaultSpec {
            log: logs[index].clone(),
            beyond: beyond.map(|other| logs[other].clone()),
            ..FaultSpec::default()
        });
    }

    let function = FunctionBacking::quick(|offset, pages: &mut [u8]| {
        mark(offset, pages);
        Ok(())
    });
    let backings: [OurRow; 4] = [
        ("ours-zero", "ours, zeroes (beyond the bare zero page)", Arc::new(ZeroBacking), 0, zero),
        ("ours-copy", "ours, a copy (beyond the bare one)", Arc::new(function), 1, word),
        (
            "ours-continue",
            "ours, continued (beyond the bare one)",
            Arc::new(MemoryBacking::new(memory.clone(), Sharing::Private)?),
            2,
            word,
        ),
        ("ours-file", "ours, a file (beyond ours, a copy)", Arc::new(file_backing(file)?), 3, word),
    ];
    for (row, name, backing, beyond, expected) in backings {
        let id = format!("{table}/{row}");
        let log = if row == "ours-copy" { logs[3].clone() } else { Log::default() };
        let (case, found) = (id.clone(), log.clone());
        let (engine, options) = (&engine, options.clone());
        let spec = suite.add(Role::Ours, &id, name, 0, 1, move || {
            let backing = backing.clone();
            let memory = placement.by_handler(|| Ok(engine.map(len, backing, &options)?))?;
            let done = touch(&case, &memory, parts, placement, true, expected)?;
            let stats = settled(&memory);
            found.borrow_mut().push(stats.faults, 0, done.times_ns);
            Ok(done.elapsed)
        });
        spec.faults =
            Some(FaultSpec { log, beyond: Some(logs[beyond].clone()), ..FaultSpec::default() });
    }
    for (row, name, order) in [
        ("ours-alone", "ours alone, without the kernel, 1 page", 0),
        ("ours-alone-16", "ours alone, without the kernel, 16 pages", 4),
    ] {
        let id = format!("{table}/{row}");
        let (case, log) = (id.clone(), Log::default());
        let found = log.clone();
        let options = way(Some(order), placement)?.options;
        // One page of each window.
        let offsets: Vec<u64> = parts
            .concat()
            .into_iter()
            .filter(|at| (at / PAGE).is_multiple_of(1 << order))
            .collect();
        let spec = suite.add(Role::Ours, &id, name, 0, 1, move || {
            placement
                .by_handler(|| {
                    let mut rehearsal = Rehearsal::new(len, &options)?;
                    let mut times_ns = Vec::with_capacity(offsets.len() / TIMED);
                    let begun = Instant::now();
                    for some in offsets.chunks_exact(TIMED) {
                        let answered = Instant::now();
                        for &offset in some {
                            rehearsal.fault(offset / PAGE * PAGE);
                        }
                        let ns = answered.elapsed().as_nanos() / TIMED as u128;
                        times_ns.push(u64::try_from(ns).unwrap_or(u64::MAX));
                    }
                    let elapsed = begun.elapsed();
                    if let Some(&offset) =
                        offsets.iter().find(|&&offset| !rehearsal.is_there(offset))
                    {
                        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
                        return Err(BenchError::WrongByte { row: case.clone(), offset });
                    }
                    Ok((elapsed, times_ns))
                })
                .map(|(elapsed, times_ns)| {
                    let faults = (times_ns.len() * TIMED) as u64;
                    found.borrow_mut().push(faults, 0, times_ns);
                    elapsed
                })
        });
        spec.faults = Some(FaultSpec { log, ..FaultSpec::default() });
    }
    suite.each_spec(|spec| spec.pages = touched);
    run.bench.tables.push(Table {
        id: table,
        title: format!("Where a fault's time goes: {touched} faults of one page each"),
        note: format!(
            "{}; all wait alike; beyond is the difference of the median touches; ours alone: {TIMED} faults at once",
            placement.title
        ),
    });
    let what = format!("split{}", placement.id);
    suite.run(&what, run.settings.rounds, run.watch, &mut run.bench.results)
}

//! What a page that does not come does to the others: touches of cached pages are timed, with and
//! without one page whose backing stalls until they are done.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use uzone_fault::{Backing, BackingError, FileBacking, Window};
use uzone_pages::ByteLen;

use super::run::{PAGE, Run};
use super::scan::{CopyMethod, file_backing, placed, settled, way};
use super::source::{Reads, Source, place, word};
use super::touch::{Pattern, Placement, touch};
use crate::report::{FaultSpec, Log, Role, Table};
use crate::suite::{BenchError, Suite};

/// How much is touched at most.
const MOST: ByteLen = ByteLen::mib(256);
/// How much is left out around the page that stalls: as much as a window may be.
const APART: u64 = 2 << 20;
/// How long the stalled page may take to be asked for.
const PATIENCE: Duration = Duration::from_secs(20);

/// Something that is shut and is opened once.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.is_open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let is_open = self.is_open.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = self.opened.wait_while(is_open, |is_open| !*is_open);
        drop(passed.unwrap_or_else(PoisonError::into_inner));
    }
}

/// A file of which the last page stalls.
struct Stalling {
    file: FileBacking,
    stalled: u64,
    gate: Arc<Gate>,
}

impl Backing for Stalling {
    fn map_pages(&self, window: &mut Window<'_>) {
        if !window.range().contains(&self.stalled) {
            self.file.map_pages(window);
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        if window.range().contains(&self.stalled) {
            self.gate.pass();
        }
        self.file.fault(window)
    }

    fn byte_len(&self) -> Option<ByteLen> {
        self.file.byte_len()
    }
}

pub(super) fn table(
    run: &mut Run<'_>,
    file: &Source,
    placement: &Placement,
) -> Result<(), BenchError> {
    if !run.wants("fault-stall") {
        return Ok(());
    }
    let len = file.len.min(MOST);
    file.warm(len)?;
    let rest = ByteLen::new(len.get() - APART);
    let parts = Pattern::Random.parts(rest, PAGE, 1);
    let touched: u64 = parts.iter().map(|part| part.len() as u64).sum();
    let stalled = len.get() - PAGE;
    let engine = placement.engine()?;
    let (engine, parts) = (&engine, &parts);
    let mut suite = Suite::new(rest);
    for order in [Some(0), Some(4), None] {
        let CopyMethod { row, name, options } = way(order, placement)?;
        for (state, is_stalled) in [("free", false), ("stalled", true)] {
            let id = format!("fault-stall/{row}-{state}");
            let log = Log::default();
            let (found, case, options) = (log.clone(), id.clone(), options.clone());
            let name = match is_stalled {
                false => format!("{name}: all at hand"),
                true => format!("{name}: one page stalled"),
            };
            let spec = suite.add(Role::Ours, &id, name, 0, 1, move || {
                let gate = Arc::new(Gate::default());
                let backing =
                    Arc::new(Stalling { file: file_backing(file)?, stalled, gate: gate.clone() });
                let memory = placement.by_handler(|| Ok(engine.map(len, backing, &options)?))?;
                let done = std::thread::scope(|scope| {
                    let waiter = is_stalled.then(|| {
                        scope.spawn(|| {
                            let (at, mut bytes) = (place(stalled / PAGE), [0; 8]);
                            memory.read(at, &mut bytes)?;
                            match u64::from_ne_bytes(bytes) == word(at) {
                                true => Ok(()),
                                false => Err(BenchError::WrongByte {
                                    row: case.clone(),
                                    offset: usize::try_from(at).unwrap_or(usize::MAX),
                                }),
                            }
                        })
                    });
                    let give_up = Instant::now() + PATIENCE;
                    while is_stalled && memory.stats().queued == 0 && Instant::now() < give_up {
                        std::thread::yield_now();
                    }
                    let done = touch(&case, &memory, parts, placement, true, word);
                    // Also after a failure, or the scope would wait for a thread that waits for us.
                    gate.open();
                    match waiter.map(std::thread::ScopedJoinHandle::join) {
                        None | Some(Ok(Ok(()))) => done,
                        Some(Ok(Err(error))) => Err(error),
                        Some(Err(_)) => Err(BenchError::Threads { threads: 2 }),
                    }
                })?;
                let stats = settled(&memory);
                let wasted = placed(&stats).saturating_sub(touched + u64::from(is_stalled));
                found.borrow_mut().push(stats.faults, wasted, done.times_ns);
                Ok(done.elapsed)
            });
            spec.pages = touched;
            spec.naive = is_stalled.then(|| format!("fault-stall/{row}-free"));
            spec.faults = Some(FaultSpec { log, ..FaultSpec::default() });
        }
    }
    run.bench.tables.push(Table {
        id: "fault-stall".to_owned(),
        title: format!(
            "A page whose backing stalls: {touched} touches of cached pages of {len} meanwhile"
        ),
        note: format!(
            "{}; in random order, each touch timed; naive is the same with all at hand",
            placement.title
        ),
    });
    suite.run("one page stalled", run.settings.rounds, run.watch, &mut run.bench.results)
}

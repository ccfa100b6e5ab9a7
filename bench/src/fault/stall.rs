//! What a page that does not come does to the others: touches of cached pages are timed, with and
//! without one page whose backing stalls until they are done.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use uzone_fault::{Backing, BackingError, FileBacking, Window};
use uzone_pages::ByteLen;

use super::run::{Ours, Run, Visit};
use super::source::{PAGE, Reads, Source, place, word};
use super::touch::{Pattern, Placement};
use crate::report::Role;
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
    file: Arc<FileBacking>,
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
    let visit = Visit::timed(&parts, placement);
    let touched = visit.touched();
    let stalled = len.get() - PAGE;
    let engine = &placement.engine()?;
    let mut suite = Suite::new(rest);
    for order in [Some(0), Some(4), None] {
        let Ours { row, name, options } = Ours::new(order, placement)?;
        for (state, is_stalled) in [("free", false), ("stalled", true)] {
            let what = if is_stalled { "one page stalled" } else { "all ready" };
            let (id, options) = (format!("fault-stall/{row}-{state}"), options.clone());
            let spec = suite.faults(Role::Ours, &id, format!("{name}: {what}"), 1, move |case| {
                let gate = Arc::new(Gate::default());
                let backing = Stalling { file: file.backing()?, stalled, gate: gate.clone() };
                let memory =
                    placement.by_handler(|| Ok(engine.map(len, Arc::new(backing), &options)?))?;
                let done = std::thread::scope(|scope| {
                    let waiter = is_stalled.then(|| {
                        scope.spawn(|| {
                            let (at, mut bytes) = (place(stalled / PAGE), [0; 8]);
                            memory.read(at, &mut bytes)?;
                            let is_right = u64::from_ne_bytes(bytes) == word(at);
                            is_right.then_some(()).ok_or_else(|| BenchError::wrong_byte(case, at))
                        })
                    });
                    let give_up = Instant::now() + PATIENCE;
                    while is_stalled && memory.stats().queued == 0 && Instant::now() < give_up {
                        std::thread::yield_now();
                    }
                    let done = visit.touch(case, &memory);
                    // Also after a failure, or the scope would wait for a thread that waits for us.
                    gate.open();
                    match waiter.map(std::thread::ScopedJoinHandle::join) {
                        None | Some(Ok(Ok(()))) => done,
                        Some(Ok(Err(error))) => Err(error),
                        Some(Err(_)) => Err(BenchError::Threads { threads: 2 }),
                    }
                })?;
                Ok(visit.found(done, &memory, touched + u64::from(is_stalled)))
            });
            spec.pages = touched;
            spec.naive = is_stalled.then(|| format!("fault-stall/{row}-free"));
        }
    }
    let title = format!(
        "A page whose backing stalls: {touched} touches of cached pages of {len} meanwhile"
    );
    let note = format!(
        "{}; in random order, each touch timed; naive is the same with all ready",
        placement.title
    );
    run.session.table("fault-stall", title, note);
    run.session.run(suite, "one page stalled")
}

//! What a page that does not come does to the others: touches of cached pages are timed, with and
//! without one page whose backing stalls until they are done.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use uzone_fault::{Backing, BackingError, FileBacking, LazyMapping, Window};
use uzone_pages::ByteLen;

use super::run::{Ours, Run, Visitor, Visits};
use super::source::{PAGE, Source, word};
use super::touch::{Pattern, Placement};
use uzone_harness::{BenchError, Counted, Result, Role, Suite, check_word, counted, place};

/// How much is touched at most.
const MOST: ByteLen = ByteLen::mib(256);
/// How much is left out around the page that stalls: as much as a window may be.
const APART: u64 = 2 << 20;
/// How long the stalled page may take to be asked for.
const PATIENCE: Duration = Duration::from_secs(20);

/// A file of which the last page stalls.
struct Stalling {
    file: Arc<FileBacking>,
    stalled: u64,
    /// Shut until it is set.
    gate: Arc<OnceLock<()>>,
}

impl Backing for Stalling {
    fn map_pages(&self, window: &mut Window<'_>) {
        if !window.range().contains(&self.stalled) {
            self.file.map_pages(window);
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        if window.range().contains(&self.stalled) {
            self.gate.wait();
        }
        self.file.fault(window)
    }

    fn byte_len(&self) -> Option<ByteLen> {
        self.file.byte_len()
    }
}

pub(super) fn table(run: &mut Run<'_>, file: &Source, placement: &Placement) -> Result {
    if !run.wants("fault-stall") {
        return Ok(());
    }
    let len = file.len.min(MOST);
    file.warm(len)?;
    let rest = ByteLen::new(len.get() - APART);
    let parts = Pattern::Random.parts(rest, PAGE, 1);
    let visits = Visits::timed(&parts, placement);
    let touched = visits.touched;
    let stalled = len.get() - PAGE;
    let engine = &placement.engine()?;
    let mut suite = Suite::new("fault-stall", rest);
    for order in [Some(0), Some(4), None] {
        let Ours { row, name, options } = Ours::new(order)?;
        for (state, is_stalled) in [("free", false), ("stalled", true)] {
            let what = if is_stalled { "one page stalled" } else { "all ready" };
            let (id, options) = (format!("{row}-{state}"), options.clone());
            let spec = suite.faults(Role::Ours, &id, format!("{name}: {what}"), move |row| {
                let gate = Arc::new(OnceLock::new());
                let backing = Stalling { file: file.backing()?, stalled, gate: gate.clone() };
                let map = || Ok(engine.map(len, Arc::new(backing), &options)?);
                let memory = Arc::new(placement.by_handler(map)?);
                let at = is_stalled.then(|| place(stalled / PAGE));
                let touch = || visits.visitor.visit(row, &memory);
                let found = beside(row, &memory, at, &gate, touch);
                memory.settle();
                counted(row, found, &*memory, touched + u64::from(is_stalled), PAGE)
            });
            spec.row.items = touched;
            if is_stalled {
                spec.naive(&format!("{row}-free"));
            }
        }
    }
    let title = format!(
        "A page whose backing stalls: {touched} touches of cached pages of {len} meanwhile"
    );
    let note = format!(
        "{}; in random order, each touch timed; naive is the same with all ready",
        placement.title
    );
    run.session.measure(suite, title, note)
}

/// Does `work` while another thread waits for the word at `at`, if there is one, until the gate is
/// set.
fn beside<T>(
    row: &str,
    memory: &LazyMapping,
    at: Option<u64>,
    gate: &OnceLock<()>,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    std::thread::scope(|scope| {
        let waiter = at.map(|at| scope.spawn(move || check_word(row, memory, at, word(at))));
        let give_up = Instant::now() + PATIENCE;
        while at.is_some() && memory.stats().queued == 0 && Instant::now() < give_up {
            std::thread::yield_now();
        }
        let done = work();
        // Also after a failure, or the scope would wait for a thread that waits for us.
        let _ = gate.set(());
        let waited = waiter.map(|waiter| waiter.join().map_err(|_| BenchError::threads(2)));
        waited.transpose()?.transpose()?;
        done
    })
}

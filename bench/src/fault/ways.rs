//! The rows of a table in which all of a file's memory is visited in one step: [`Ways`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_fault::Engine;
use uzone_pages::ByteLen;

use super::bare::Waiting;
use super::run::{Ours, settled};
use super::scan::Backend;
use super::source::{PAGE, Reads};
use super::touch::Placement;
use crate::report::{Found, Role};
use crate::suite::{BenchError, Suite};

/// Memory that holds a file.
pub(super) type Memory = Arc<dyn Reads + Send>;

/// What came of a visit.
pub(super) struct Done {
    pub(super) elapsed: Duration,
    pub(super) kernel_faults: u64,
}

impl Done {
    fn found(self, faults: u64, wasted: u64) -> Found {
        Found { elapsed: self.elapsed, faults, wasted, ..Found::default() }
    }
}

/// How the faults of the memory are answered, and what is counted of a visit.
#[derive(Clone, Copy)]
pub(super) struct Ways<'a> {
    pub(super) table: &'a str,
    pub(super) backend: &'a Backend<'a>,
    pub(super) engine: &'a Engine,
    pub(super) len: ByteLen,
    pub(super) threads: usize,
    /// The windows, by order.
    pub(super) orders: &'a [u8],
    /// How many pages a visit reads; others that are mapped are wasted.
    pub(super) touched: u64,
}

impl<'a> Ways<'a> {
    pub(super) fn id(&self, row: &str) -> String {
        format!("{}/{row}", self.table)
    }

    /// Adds the one-page handler, ours by each window and with either thread, the kernel's own mapping, and the
    /// limit.
    pub(super) fn add(
        self,
        suite: &mut Suite<'a>,
        visit: &'a impl Fn(&str, Memory) -> Result<Done, BenchError>,
    ) -> Result<(), BenchError> {
        let Self { backend, engine, len, threads, orders, touched, .. } = self;
        let name = "one page, poll and read";
        suite.faults(Role::Naive, &self.id("naive"), name, threads, move |row| {
            let memory = Arc::new(backend.bare(len, Waiting::Poll)?);
            let done = visit(row, memory.clone());
            memory.check(row)?;
            Ok(done?.found(memory.faults(), 0))
        });
        let anywhere = Placement::anywhere()?;
        for order in orders.iter().copied().map(Some).chain([None]) {
            let ways = [Ours::new(order, &anywhere)?, Ours::in_thread(order, &anywhere)?];
            for Ours { row, name, options } in ways {
                suite.faults(Role::Ours, &self.id(&row), name, threads, move |row| {
                    let memory = Arc::new(backend.lazy(engine, len, &options)?);
                    let done = visit(row, memory.clone())?;
                    let stats = settled(&memory);
                    let placed = stats.demand + stats.around + stats.populated;
                    Ok(done.found(stats.faults, placed.saturating_sub(touched)))
                });
            }
        }
        for (role, row, name, is_populated) in [
            (Role::Peer, "kernel", "the kernel's own mapping", false),
            (Role::Limit, "populate", "limit, populated by the kernel", true),
        ] {
            suite.faults(role, &self.id(row), name, threads, move |row| {
                let memory = Arc::new(backend.plain(len)?);
                let begun = Instant::now();
                if is_populated {
                    memory.populate(0..len.get())?;
                }
                let populated = if is_populated { begun.elapsed() } else { Duration::ZERO };
                let done = visit(row, memory.clone())?;
                let resident = memory.resident()?.get() / PAGE;
                let faults = done.kernel_faults;
                Ok(done.found(faults, resident.saturating_sub(touched)).after(populated))
            });
        }
        Ok(())
    }
}

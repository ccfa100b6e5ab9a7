//! The rows of a table in which all of a file's memory is visited in one step: [`Ways`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_fault::Engine;
use uzone_pages::ByteLen;

use super::bare::Waiting;
use super::run::{Ours, placed, settled};
use super::scan::Backend;
use super::source::PAGE;
use super::touch::{Placement, Touched};
use crate::harness::reads::Reads;
use crate::harness::suite::{BenchError, Role, Suite};

/// Memory that holds a file.
pub(super) type Memory = Arc<dyn Reads + Send>;

/// How the faults of the memory are answered, and what is counted of a visit.
#[derive(Clone, Copy)]
pub(super) struct Ways<'a> {
    pub(super) backend: &'a Backend<'a>,
    pub(super) engine: &'a Engine,
    pub(super) len: ByteLen,
    /// The windows, by order.
    pub(super) orders: &'a [u8],
    /// How many pages a visit reads; others that are mapped are wasted.
    pub(super) touched: u64,
}

impl<'a> Ways<'a> {
    /// Adds the one-page handler, ours by each window and with either thread, the kernel's own mapping, and the
    /// limit.
    pub(super) fn add(
        self,
        suite: &mut Suite<'a>,
        visit: &'a impl Fn(&str, Memory) -> Result<Touched, BenchError>,
    ) -> Result<(), BenchError> {
        let Self { backend, engine, len, orders, touched } = self;
        suite.faults(Role::Naive, "naive", "one page, poll and read", move |row| {
            let memory = Arc::new(backend.bare(len, Waiting::Poll)?);
            let done = visit(row, memory.clone());
            memory.check(row)?;
            Ok(done?.found(memory.faults(), 0))
        });
        let anywhere = Placement::anywhere()?;
        for order in orders.iter().copied().map(Some).chain([None]) {
            let ways = [Ours::new(order, &anywhere)?, Ours::in_thread(order, &anywhere)?];
            for Ours { row, name, options } in ways {
                suite.faults(Role::Ours, &row, name, move |row| {
                    let memory = Arc::new(backend.lazy(engine, len, &options)?);
                    let done = visit(row, memory.clone())?;
                    let stats = settled(&memory);
                    Ok(done.found(stats.faults, placed(&stats).saturating_sub(touched)))
                });
            }
        }
        for (role, row, name, is_populated) in [
            (Role::Peer, "kernel", "the kernel's own mapping", false),
            (Role::Limit, "populate", "limit, populated by the kernel", true),
        ] {
            suite.faults(role, row, name, move |row| {
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
        suite.naive("naive");
        Ok(())
    }
}

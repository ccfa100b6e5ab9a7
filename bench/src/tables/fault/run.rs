//! What the tables of `uzone-bench fault` share: what they are run with ([`Run`]), one way of ours ([`Ours`]), and
//! rows whose memory is visited in one step ([`Visits`], [`Ways`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_fault::{Answer, Engine, LazyOptions, MapError};
use uzone_pages::{Advice, ByteLen, FaultAround};

use super::backend::Backend;
use super::source::{PAGE, word};
use super::touch::{Placement, touch};
use crate::settings::FaultSettings;
use uzone_harness::{Counted, Found, Result, Role, RowSpec, Session, Suite, counted};

/// What the tables are run with.
pub(super) struct Run<'a> {
    pub(super) session: Session<'a>,
    pub(super) settings: &'a FaultSettings,
}

impl Run<'_> {
    /// Returns whether a table was asked for.
    pub(super) fn wants(&self, table: &str) -> bool {
        self.session.wants(table)
    }

    /// Leaves a table out, if it was asked for.
    pub(super) fn skip(&mut self, table: &str, reason: impl Into<String>) {
        if self.wants(table) {
            self.session.skip(table, reason);
        }
    }
}

/// One way of ours: its row, its name, and its options.
pub(super) struct Ours {
    pub(super) row: String,
    pub(super) name: String,
    pub(super) options: LazyOptions,
}

impl Ours {
    /// A window of so many pages, or the one that adapts.
    pub(super) fn new(order: Option<u8>) -> Result<Self> {
        let (row, name, advice, size) = match order {
            Some(order) => {
                let pages = 1_u64 << order;
                let size = ByteLen::new(pages * PAGE);
                let size = FaultAround::try_new(size).map_err(MapError::from)?;
                let advice = if order == 0 { Advice::Random } else { Advice::Normal };
                let name = if pages == 1 { "page" } else { "pages" };
                (format!("order-{order}"), format!("ours, {pages} {name}"), advice, size)
            }
            None => {
                ("auto".to_owned(), "ours, auto".to_owned(), Advice::Auto, FaultAround::DEFAULT)
            }
        };
        let options = LazyOptions::default().advice(advice).fault_around(size);
        Ok(Self { row, name, options })
    }

    /// The same, and the threads that take faults answer them.
    pub(super) fn in_thread(order: Option<u8>) -> Result<Self> {
        let Self { row, name, options } = Self::new(order)?;
        let options = options.answer(Answer::InThread);
        Ok(Self { row: format!("thread-{row}"), name: format!("{name}, in the thread"), options })
    }
}

/// What visits memory.
pub(super) trait Visitor {
    fn visit<M: Counted + Send + 'static>(&self, row: &str, memory: &Arc<M>) -> Result<Found>;
}

/// The pages that each row of a table touches, and how.
#[derive(Clone, Copy)]
pub(super) struct Touches<'a> {
    /// The offsets that each thread touches.
    pub(super) parts: &'a [Vec<u64>],
    pub(super) placement: &'a Placement,
    /// Whether each touch is timed.
    pub(super) is_timed: bool,
    /// Returns the right word at an offset.
    pub(super) expected: fn(u64) -> u64,
}

impl Visitor for Touches<'_> {
    fn visit<M: Counted + Send + 'static>(&self, row: &str, memory: &Arc<M>) -> Result<Found> {
        touch(row, &**memory, self.parts, self.placement, self.is_timed, &self.expected)
    }
}

/// How the rows of a table visit memory, and how much of it.
#[derive(Clone, Copy)]
pub(super) struct Visits<'a, V> {
    pub(super) visitor: V,
    pub(super) placement: &'a Placement,
    /// How many pages a visit touches; others that are mapped are wasted.
    pub(super) touched: u64,
    /// The size of the pages that are touched.
    pub(super) page_bytes: u64,
}

impl<'a> Visits<'a, Touches<'a>> {
    /// Touches pages with the words of the file; each touch is timed.
    pub(super) fn timed(parts: &'a [Vec<u64>], placement: &'a Placement) -> Self {
        let visitor = Touches { parts, placement, is_timed: true, expected: word };
        let touched = parts.iter().map(|part| part.len() as u64).sum();
        Self { visitor, placement, touched, page_bytes: PAGE }
    }

    /// The same, and no single touch is timed.
    pub(super) fn untimed(parts: &'a [Vec<u64>], placement: &'a Placement) -> Self {
        let timed = Self::timed(parts, placement);
        Self { visitor: Touches { is_timed: false, ..timed.visitor }, ..timed }
    }
}

impl<'a, V: Visitor + Copy + 'a> Visits<'a, V> {
    /// Visits memory, and adds what it counts.
    pub(super) fn found<M: Counted + Send + 'static>(
        self,
        row: &str,
        memory: &Arc<M>,
    ) -> Result<Found> {
        let found = self.visitor.visit(row, memory);
        memory.settle();
        counted(row, found, &**memory, self.touched, self.page_bytes)
    }

    /// Adds a row that visits what `open` returns, which is called where the handler runs.
    pub(super) fn add<'s, M: Counted + Send + 'static>(
        self,
        suite: &'s mut Suite<'a>,
        role: Role,
        row: &str,
        name: impl Into<String>,
        open: impl Fn() -> Result<M> + Send + Sync + 'a,
    ) -> &'s mut RowSpec {
        suite.faults(role, row, name, move |row| {
            self.found(row, &Arc::new(self.placement.by_handler(&open)?))
        })
    }
}

/// The rows of a table that visit memory of one backend.
#[derive(Clone, Copy)]
pub(super) struct Ways<'a, V> {
    pub(super) visits: Visits<'a, V>,
    pub(super) backend: &'a Backend<'a>,
    pub(super) engine: &'a Engine,
    pub(super) len: ByteLen,
}

impl<'a, V: Visitor + Copy + 'a> Ways<'a, V> {
    /// Adds the naive row, a one-page handler as published examples have it.
    pub(super) fn add_naive(self, suite: &mut Suite<'a>) {
        let name = "one page, poll and read";
        let open = move || self.backend.one_page(self.len);
        self.visits.add(suite, Role::Naive, "naive", name, open);
    }

    /// Adds one of ours.
    pub(super) fn add_ours<'s>(
        self,
        suite: &'s mut Suite<'a>,
        role: Role,
        Ours { row, name, options }: Ours,
    ) -> &'s mut RowSpec {
        let open = move || self.backend.lazy(self.engine, self.len, &options);
        self.visits.add(suite, role, &row, name, open)
    }

    /// Adds the kernel's own mapping, and the limit: the same populated at once.
    pub(super) fn add_kernel(self, suite: &mut Suite<'a>) {
        for (role, row, name, is_limit) in [
            (Role::Peer, "kernel", "the kernel's own mapping", false),
            (Role::Limit, "populate", "limit, populated by the kernel", true),
        ] {
            suite.faults(role, row, name, move |row| {
                let memory = Arc::new(self.backend.plain(self.len)?);
                let begun = Instant::now();
                if is_limit {
                    memory.populate(0..self.len.get())?;
                }
                let populated = if is_limit { begun.elapsed() } else { Duration::ZERO };
                Ok(self.visits.found(row, &memory)?.after(populated))
            });
        }
    }

    /// Adds the naive row, ours by each window and with either thread, and the kernel's.
    pub(super) fn add_all(self, suite: &mut Suite<'a>, orders: &[u8]) -> Result {
        self.add_naive(suite);
        for order in orders.iter().copied().map(Some).chain([None]) {
            self.add_ours(suite, Role::Ours, Ours::new(order)?);
            self.add_ours(suite, Role::Ours, Ours::in_thread(order)?);
        }
        self.add_kernel(suite);
        suite.naive("naive");
        Ok(())
    }
}

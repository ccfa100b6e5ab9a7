//! The rows of a table ([`Way`]), and the touches that they have in common ([`Scan`]).

use std::time::{Duration, Instant};

use uzone_fault::{Answer, Engine, LazyOptions, MapError};
use uzone_harness::{Counted, Found, Result, Role, RowSpec, Suite, counted};
use uzone_pages::{Advice, ByteLen, FaultAround};

use super::backend::Backend;
use super::source::{PAGE, word};
use super::touch::{Placement, Touching, touch};

/// One row: a mapping, and the handler of its faults.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// A one-page handler as published examples have it: the naive row.
    OnePage,
    /// Ours, answered by a reader, with a window of this order; `None` adapts.
    Reader(Option<u8>),
    /// Ours, answered by the thread that takes the fault.
    Thread(Option<u8>),
    /// A handler in the thread that keeps no record of any page.
    Bare(u8),
    /// The kernel's own mapping.
    Kernel,
    /// The kernel's own mapping, populated at once: the limit.
    Populated,
}

impl Way {
    /// Returns the row's role, id and name.
    fn spec(self) -> (Role, String, String) {
        let pages = |order: u8| match 1_u64 << order {
            1 => "1 page".to_owned(),
            pages => format!("{pages} pages"),
        };
        let window = |order: Option<u8>| match order {
            Some(order) => (format!("order-{order}"), format!("ours, {}", pages(order))),
            None => ("auto".to_owned(), "ours, auto".to_owned()),
        };
        match self {
            Self::OnePage => (Role::Naive, "naive".into(), "one page, poll and read".into()),
            Self::Reader(order) => {
                let (id, name) = window(order);
                (Role::Ours, id, name)
            }
            Self::Thread(order) => {
                let (id, name) = window(order);
                (Role::Ours, format!("thread-{id}"), format!("{name}, in the thread"))
            }
            Self::Bare(order) => {
                let name = format!("bare, {}, in the thread", pages(order));
                (Role::Peer, format!("thread-bare-{order}"), name)
            }
            Self::Kernel => (Role::Peer, "kernel".into(), "the kernel's own mapping".into()),
            Self::Populated => {
                (Role::Limit, "populate".into(), "limit, populated by the kernel".into())
            }
        }
    }

    /// Returns the options of a row of ours.
    pub(super) fn options(self) -> Result<LazyOptions> {
        let (order, answer) = match self {
            Self::Thread(order) => (order, Answer::InThread),
            Self::Reader(order) => (order, Answer::Reader),
            _ => (None, Answer::Reader),
        };
        let (advice, size) = match order {
            Some(order) => {
                let size = FaultAround::try_new(ByteLen::new(PAGE << order));
                let advice = if order == 0 { Advice::Random } else { Advice::Normal };
                (advice, size.map_err(MapError::from)?)
            }
            None => (Advice::Auto, FaultAround::DEFAULT),
        };
        Ok(LazyOptions::default().advice(advice).fault_around(size).answer(answer))
    }
}

/// The pages that the rows of a table touch, and the threads.
#[derive(Clone, Copy)]
pub(super) struct Scan<'a> {
    pub(super) len: ByteLen,
    pub(super) engine: &'a Engine,
    pub(super) placement: &'a Placement,
    /// The offsets that each thread touches.
    pub(super) offsets: &'a [u64],
    pub(super) threads: usize,
    pub(super) touching: Touching,
}

impl<'a> Scan<'a> {
    /// Adds a row that maps the bytes of `backend`.
    pub(super) fn add<'s>(
        self,
        suite: &'s mut Suite<'a>,
        backend: &'a Backend<'a>,
        way: Way,
    ) -> Result<&'s mut RowSpec> {
        let len = self.len;
        let spec = match way {
            Way::OnePage => self.row(suite, way, move || backend.one_page(len)),
            Way::Bare(order) => self.row(suite, way, move || backend.bare_thread(len, order)),
            Way::Reader(_) | Way::Thread(_) => {
                let options = way.options()?;
                self.row(suite, way, move || backend.lazy(self.engine, len, &options))
            }
            Way::Kernel | Way::Populated => {
                let (role, id, name) = way.spec();
                suite.faults(role, &id, name, move |row| {
                    let memory = backend.plain(len)?;
                    let begun = Instant::now();
                    if way == Way::Populated {
                        memory.populate(0..len.get())?;
                    }
                    let is_populated = way == Way::Populated;
                    let populated = if is_populated { begun.elapsed() } else { Duration::ZERO };
                    Ok(self.found(row, &memory)?.after(populated))
                })
            }
        };
        spec.row.items = (self.offsets.len() * self.threads) as u64;
        Ok(spec)
    }

    /// Adds a row that touches the memory that `open` returns, which is called where the handler runs.
    fn row<'s, M: Counted + Send>(
        self,
        suite: &'s mut Suite<'a>,
        way: Way,
        open: impl Fn() -> Result<M> + Send + Sync + 'a,
    ) -> &'s mut RowSpec {
        let (role, id, name) = way.spec();
        suite
            .faults(role, &id, name, move |row| self.found(row, &self.placement.by_handler(&open)?))
    }

    /// Touches memory, and adds its counts.
    pub(super) fn found<M: Counted>(self, row: &str, memory: &M) -> Result<Found> {
        let Self { offsets, threads, placement, touching, .. } = self;
        let found = touch(row, memory, offsets, threads, placement, touching, &word);
        memory.settle();
        counted(row, found, memory, offsets.len() as u64, PAGE)
    }
}

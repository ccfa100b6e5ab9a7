//! What the tables of `uzone bench fault` share: what they are run with ([`Run`]), one way of ours
//! ([`Ours`]), and the touches of a row ([`Visit`]).

use std::num::NonZeroUsize;
use std::time::Duration;

use uzone_fault::{Answer, FaultStats, LazyMapping, LazyOptions, MapError, Reader};
use uzone_os::Mapping;
use uzone_pages::{Advice, ByteLen, FaultAround};

use super::bare::{Bare, BareThread};
use super::source::{PAGE, word};
use super::touch::{Placement, Touched, touch};
use crate::harness::reads::Reads;
use crate::harness::settings::FaultSettings;
use crate::harness::suite::{BenchError, Found, Session};

/// What the tables are run with.
pub(super) struct Run<'a> {
    pub(super) session: Session<'a>,
    pub(super) settings: &'a FaultSettings,
    /// Whether mappings can have transparent huge pages.
    pub(super) has_huge: bool,
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
    pub(super) fn new(order: Option<u8>, placement: &Placement) -> Result<Self, BenchError> {
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
        let mut options = LazyOptions::default().advice(advice).fault_around(size);
        if let Some(spin) = placement.spin {
            options = options.spin(spin);
        }
        Ok(Self { row, name, options })
    }

    /// The same, and two threads answer for the mapping.
    pub(super) fn two_readers(
        order: Option<u8>,
        placement: &Placement,
    ) -> Result<Self, BenchError> {
        let Self { row, name, options } = Self::new(order, placement)?;
        let own = Reader::Own { cpus: Vec::new() };
        let options = options.answer(Answer::Reader).reader(own);
        let options = options.readers(NonZeroUsize::MIN.saturating_add(1));
        Ok(Self { row: format!("readers-2-{row}"), name: format!("{name}, two readers"), options })
    }

    /// The same, and the threads that take faults answer them.
    pub(super) fn in_thread(order: Option<u8>, placement: &Placement) -> Result<Self, BenchError> {
        let Self { row, name, options } = Self::new(order, placement)?;
        let options = options.answer(Answer::InThread);
        Ok(Self { row: format!("thread-{row}"), name: format!("{name}, in the thread"), options })
    }
}

/// The pages that each row of a table touches, and how.
#[derive(Clone, Copy)]
pub(super) struct Visit<'a> {
    /// The offsets that each thread touches.
    pub(super) parts: &'a [Vec<u64>],
    pub(super) placement: &'a Placement,
    /// The size of the pages that are touched.
    pub(super) page_bytes: u64,
    /// Whether each touch is timed.
    pub(super) is_timed: bool,
    /// Returns the right word at an offset.
    pub(super) expected: fn(u64) -> u64,
}

impl<'a> Visit<'a> {
    /// Touches of pages with the words of the file, each of them timed.
    pub(super) fn timed(parts: &'a [Vec<u64>], placement: &'a Placement) -> Self {
        Self { parts, placement, page_bytes: PAGE, is_timed: true, expected: word }
    }

    /// Returns how many pages are touched.
    pub(super) fn touched(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }

    /// Touches any memory.
    pub(super) fn touch(&self, row: &str, memory: &impl Reads) -> Result<Touched, BenchError> {
        touch(row, memory, self.parts, self.placement, self.is_timed, &self.expected)
    }

    /// Touches memory of a one-page handler, which maps the faulting pages and nothing else.
    pub(super) fn bare(&self, row: &str, memory: &Bare) -> Result<Found, BenchError> {
        let done = self.touch(row, memory);
        memory.check(row)?;
        Ok(done?.found(memory.faults(), 0))
    }

    /// Touches memory that threads fill for themselves without a record.
    pub(super) fn bare_thread(&self, row: &str, memory: &BareThread) -> Result<Found, BenchError> {
        Ok(self.touch(row, memory)?.found(memory.faults(), 0))
    }

    /// Touches memory of ours.
    pub(super) fn lazy(&self, row: &str, memory: &LazyMapping) -> Result<Found, BenchError> {
        let done = self.touch(row, memory)?;
        Ok(self.found(done, memory, self.touched()))
    }

    /// Sums up touches of memory of ours, of which so many pages were touched.
    pub(super) fn found(&self, done: Touched, memory: &LazyMapping, touched: u64) -> Found {
        let stats = settled(memory);
        // The untouched rest of a huge page counts as wasted small pages.
        let placed = placed(&stats) * (memory.page_size().bytes() / self.page_bytes);
        done.found(stats.faults, placed.saturating_sub(touched))
    }

    /// Touches a mapping whose faults the kernel handles.
    pub(super) fn kernel(&self, row: &str, memory: &Mapping) -> Result<Found, BenchError> {
        let done = self.touch(row, memory)?;
        let resident = memory.resident()?.get() / self.page_bytes;
        let faults = done.kernel_faults;
        Ok(done.found(faults, resident.saturating_sub(self.touched())))
    }
}

/// Returns how many pages an engine has installed, whatever for.
pub(crate) fn placed(stats: &FaultStats) -> u64 {
    stats.demand + stats.around + stats.populated
}

/// Waits until no page is installed any more: neighbours come after the page that was touched.
pub(super) fn settled(memory: &LazyMapping) -> FaultStats {
    let mut before = memory.stats();
    loop {
        std::thread::sleep(Duration::from_millis(2));
        let now = memory.stats();
        if now == before {
            return now;
        }
        before = now;
    }
}

//! Touching all pages, in order and at random, and one per page table: the published tables.

use std::cell::Cell;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_fault::{
    Backing, Engine, FaultStats, FileBacking, HugePages, LazyMapping, LazyOptions, MapError,
    MemoryBacking,
};
use uzone_os::{Access, HugeSize, Mapping, Sharing};
use uzone_pages::{Advice, ByteLen, FaultAround, PageSize};

use super::bare::{Answer, Bare, Waiting};
use super::huge;
use super::run::{PAGE, Run};
use super::source::{self, Source, word};
use super::touch::{Pattern, Placement, touch};
use crate::report::{FaultSpec, Log, Published, Role, Table};
use crate::suite::{BenchError, Suite};

/// The orders of the windows, as published.
pub(super) const ORDERS: [u8; 7] = [0, 1, 3, 4, 5, 7, 9];

/// The row of the default: adaptive windows that start at 16 pages. The summary shows it.
pub(super) const BY_DEFAULT: &str = "auto";

/// What pages are made of.
pub(super) enum Backend<'a> {
    /// A file, and a mapping of it whose pages are all present: the naive handler copies from that.
    File(&'a Source, Arc<Mapping>),
    /// A memory file.
    Memory(Arc<Mapping>),
    /// The file again, into huge pages of the pool.
    HugeCopy(&'a Source, Arc<Mapping>),
}

impl Backend<'_> {
    fn page(&self) -> PageSize {
        match self {
            Self::File(..) => PageSize::KIB_4,
            Self::Memory(memory) => memory.page_size(),
            Self::HugeCopy(..) => HugeSize::MIB_2.page_size(),
        }
    }

    fn is_huge(&self) -> bool {
        self.page() != PageSize::KIB_4
    }

    fn id(&self) -> &'static str {
        match self {
            Self::File(..) => "file",
            Self::Memory(_) if self.is_huge() => "hugetlb",
            Self::Memory(_) => "memfd",
            Self::HugeCopy(..) => "hugetlb-copy",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::File(..) => "A file in the page cache",
            Self::Memory(_) if self.is_huge() => "A memory file of 2 MiB pages",
            Self::Memory(_) => "A memory file",
            Self::HugeCopy(..) => "A file in the page cache, copied into 2 MiB pages",
        }
    }

    pub(super) fn bare(&self, len: ByteLen, waiting: Waiting) -> Result<Bare, BenchError> {
        match self {
            Self::File(_, mapped) => Bare::anonymous(len, Answer::Copy(mapped.clone()), waiting),
            Self::HugeCopy(_, mapped) => {
                let memory = Mapping::hugetlb(len, HugeSize::MIB_2)?;
                Bare::new(memory, Answer::Copy(mapped.clone()), waiting)
            }
            Self::Memory(memory) => {
                let memory = source::map_memory_file(memory, len, Access::ReadWrite)?;
                Bare::new(memory, Answer::Continue, waiting)
            }
        }
    }

    pub(super) fn lazy(
        &self,
        engine: &Engine,
        len: ByteLen,
        options: &LazyOptions,
    ) -> Result<LazyMapping, BenchError> {
        let backing: Arc<dyn Backing> = match self {
            Self::File(file, _) | Self::HugeCopy(file, _) => Arc::new(file_backing(file)?),
            Self::Memory(memory) => Arc::new(MemoryBacking::new(memory.clone(), Sharing::Private)?),
        };
        let mut options = options.clone();
        if matches!(self, Self::HugeCopy(..)) {
            options = options.huge(HugePages::Pool(HugeSize::MIB_2));
        }
        Ok(engine.map(len, backing, &options)?)
    }

    fn plain(&self, len: ByteLen) -> Result<Mapping, BenchError> {
        match self {
            Self::File(file, _) | Self::HugeCopy(file, _) => file.map(len),
            Self::Memory(memory) => source::map_memory_file(memory, len, Access::ReadOnly),
        }
    }
}

pub(super) fn file_backing(file: &Source) -> Result<FileBacking, BenchError> {
    FileBacking::new(file.again()?)
        .map_err(|cause| BenchError::UseFile { what: "ask the length of", cause })
}

/// One way of ours: its id, its name, and its options.
pub(super) struct CopyMethod {
    pub(super) row: String,
    pub(super) name: String,
    pub(super) options: LazyOptions,
}

/// A window of so many pages, or the one that adapts.
pub(super) fn way(order: Option<u8>, placement: &Placement) -> Result<CopyMethod, BenchError> {
    let (row, name, advice, fault_around) = match order {
        Some(order) => {
            let pages = 1_u64 << order;
            let size = FaultAround::try_new(ByteLen::new(pages * PAGE)).map_err(MapError::from)?;
            let advice = if order == 0 { Advice::Random } else { Advice::Normal };
            let name = if pages == 1 { "page" } else { "pages" };
            (format!("order-{order}"), format!("ours, {pages} {name}"), advice, size)
        }
        None => ("auto".to_owned(), "ours, auto".to_owned(), Advice::Auto, FaultAround::DEFAULT),
    };
    let mut options = LazyOptions::default().advice(advice).fault_around(fault_around);
    if let Some(spin) = placement.spin {
        options = options.spin(spin);
    }
    Ok(CopyMethod { row, name, options })
}

/// Waits until nothing is put in place any more: neighbours come after the page that was touched.
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

/// Returns how many pages were put in place.
pub(super) fn placed(stats: &FaultStats) -> u64 {
    stats.demand + stats.around + stats.populated
}

/// Measures one table.
pub(super) fn table(
    run: &mut Run<'_>,
    pattern: Pattern,
    backend: &Backend<'_>,
    placement: &Placement,
    len: ByteLen,
) -> Result<(), BenchError> {
    let table = format!("fault-{}-{}{}", pattern.id(), backend.id(), placement.id);
    if !run.wants(&table) {
        return Ok(());
    }
    let page = backend.page();
    let parts = pattern.parts(len, page.bytes(), placement.threads);
    let touched: u64 = parts.iter().map(|part| part.len() as u64).sum();
    let threads = parts.len();
    let is_timed = pattern == Pattern::OnePerTable;
    let is_headline = placement.is_first && !is_timed && !backend.is_huge();
    let naive = format!("{table}/naive");
    let limit = format!("{table}/populate");
    let naive_log = Log::default();
    let engine = placement.engine()?;
    let (engine, parts) = (&engine, &parts);

    // How many pages were to be huge, and were not.
    let lacking = Cell::new(0);
    let lacking = &lacking;
    let mut suite = Suite::new(len);
    let spins = placement.spin != Some(Duration::ZERO);
    let alike = if spins { format!("{table}/naive-spin") } else { naive.clone() };
    let mut bare = |role: Role, row: &str, name: &str, waiting: Waiting, log: Log| {
        let id = format!("{table}/{row}");
        let (found, case) = (log.clone(), id.clone());
        let spec = suite.add(role, &id, name, 0, threads, move || {
            let memory = placement.by_handler(|| backend.bare(len, waiting))?;
            let done = touch(&case, &memory, parts, placement, is_timed, word);
            memory.check(&case)?;
            let done = done?;
            // It maps the faulting pages, and nothing else.
            found.borrow_mut().push(memory.faults(), 0, done.times_ns);
            Ok(done.elapsed)
        });
        spec.faults = Some(FaultSpec { log, ..FaultSpec::default() });
    };
    bare(Role::Naive, "naive", "one page, poll and read", Waiting::Poll, naive_log.clone());
    if spins {
        let spin = placement.spin.unwrap_or(LazyOptions::DEFAULT_SPIN);
        let name = "one page, waiting as ours does";
        bare(Role::Peer, "naive-spin", name, Waiting::Spin(spin), Log::default());
    }

    let orders = ORDERS.into_iter().map(Some).filter(|_| !backend.is_huge());
    let mut ways: Vec<(Option<u8>, CopyMethod)> = Vec::new();
    for order in orders.chain([None]) {
        ways.push((order, way(order, placement)?));
    }
    if matches!(backend, Backend::File(..)) && run.has_huge {
        ways.push((None, huge::transparent(placement)?));
    }
    for (order, CopyMethod { row, name, options }) in ways {
        let id = format!("{table}/{row}");
        let log = Log::default();
        let (found, case) = (log.clone(), id.clone());
        let is_transparent = row == huge::ROW;
        let spec = suite.add(Role::Ours, &id, name, 0, threads, move || {
            let memory = placement.by_handler(|| backend.lazy(engine, len, &options))?;
            let done = touch(&case, &memory, parts, placement, is_timed, word)?;
            let stats = settled(&memory);
            // The untouched rest of a huge page counts as wasted small pages.
            let placed = placed(&stats) * (memory.page_size().bytes() / page.bytes());
            found.borrow_mut().push(stats.faults, placed.saturating_sub(touched), done.times_ns);
            if is_transparent {
                // Each pattern touches each of them.
                lacking.set(lacking.get() + (len.get() >> 21).saturating_sub(stats.huge_pages));
            }
            Ok(done.elapsed)
        });
        spec.faults = Some(FaultSpec {
            log,
            waiting_alike: Some(alike.clone()),
            naive: is_timed.then(|| naive_log.clone()),
            ..FaultSpec::default()
        });
        if is_headline && row == BY_DEFAULT {
            let title = backend.title().to_lowercase();
            spec.headline = Some(format!("map {len} of {title}, {}", pattern.title()));
        }
        let is_published = matches!(backend, Backend::File(..)) && threads == 1;
        spec.published = order.filter(|_| is_published).and_then(|order| {
            let index = ORDERS.iter().position(|known| *known == order)?;
            published(pattern, index, touched)
        });
    }
    for (role, row, name, populates) in [
        (Role::Peer, "kernel", "the kernel's own mapping", false),
        (Role::Limit, "populate", "limit, populated by the kernel", true),
    ] {
        let id = format!("{table}/{row}");
        let log = Log::default();
        let (found, case) = (log.clone(), id.clone());
        let spec = suite.add(role, &id, name, 0, threads, move || {
            let memory = backend.plain(len)?;
            let begun = Instant::now();
            if populates {
                memory.populate(0..len.get())?;
            }
            let populated = begun.elapsed();
            let done = touch(&case, &memory, parts, placement, is_timed, word)?;
            let wasted = (memory.resident()?.get() / page.bytes()).saturating_sub(touched);
            found.borrow_mut().push(done.kernel_faults, wasted, done.times_ns);
            Ok(if populates { populated + done.elapsed } else { done.elapsed })
        });
        spec.faults = Some(FaultSpec { log, ..FaultSpec::default() });
    }
    suite.each_spec(|spec| {
        spec.pages = touched;
        spec.naive = Some(naive.clone());
        // Where one page of a table is touched, populating does much more than the row.
        spec.limit = (!is_timed).then(|| (limit.clone(), 0));
        if spec.bytes == 0 && !is_timed {
            spec.bytes = touched * page.bytes();
        }
    });
    let mut note = placement.title.clone();
    let _ = match placement.spin {
        Some(spin) if spin.is_zero() => write!(note, "; ours sleeps at once when nothing is left"),
        _ => write!(note, "; ours looks for {:?} before it sleeps", LazyOptions::DEFAULT_SPIN),
    };
    run.bench.tables.push(Table {
        id: table.clone(),
        title: format!("{}, {}: {len}, {touched} touches", backend.title(), pattern.title()),
        note,
    });
    let what = format!("{} {}{}", pattern.id(), backend.id(), placement.id);
    suite.run(&what, run.settings.rounds, run.watch, &mut run.bench.results)?;
    let lacking = lacking.get();
    if lacking != 0 {
        // A row of the one that were pages of the other would be none.
        let id = format!("{table}/{}", huge::ROW);
        run.bench.results.retain(|row| row.id != id);
        run.skip(&id, format!("{lacking} pages were not huge: too little memory is in one piece"));
    }
    Ok(())
}

/// Seconds for 16 GiB in order, by order of the window, one thread.
const IN_ORDER_S: [f64; 7] = [7.25, 6.46, 5.49, 5.49, 5.71, 5.90, 5.11];
/// Seconds for a page of each table of 16 GiB, by order of the window, one thread.
const SPARSE_S: [f64; 7] = [0.0399, 0.0454, 0.0518, 0.0637, 0.0791, 0.1765, 0.5412];
const SHUTEMOV: &str = "Kirill A. Shutemov, fault-around, February 2014: the kernel's own faults on a \
     file of 16 GiB, one thread of a machine with 4 sockets; scaled to as many touches as here. \
     The published random rows touch each page often, and are not compared";

/// Returns the published time for as many touches.
fn published(pattern: Pattern, index: usize, touched: u64) -> Option<Published> {
    let (seconds, pages) = match pattern {
        Pattern::InOrder => (IN_ORDER_S[index], 16_u64 << (30 - 12)),
        Pattern::OnePerTable => (SPARSE_S[index], 16_u64 << (30 - 21)),
        Pattern::Random => return None,
    };
    let ns = Duration::from_secs_f64(seconds).as_nanos() * u128::from(touched) / u128::from(pages);
    Some(Published { ns: u64::try_from(ns).ok().filter(|ns| *ns > 0)?, source: SHUTEMOV.into() })
}

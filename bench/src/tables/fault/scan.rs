//! Touching all pages, in order and at random, and one per page table: the published tables.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_fault::{Backing, Engine, HugePages, LazyMapping, LazyOptions, MemoryBacking};
use uzone_os::{Access, HugeSize, Mapping, Sharing};
use uzone_pages::{ByteLen, PageSize};

use super::bare::{Answer, Bare, BareThread, Waiting};
use super::huge;
use super::run::{Ours, Run, Visit};
use super::source::{self, Source};
use super::touch::{Pattern, Placement};
use crate::harness::report::{Log, RowSpec};
use crate::harness::suite::{BenchError, Published, Role, Suite};

/// The windows that threads map for their own faults, by their order; `None` adapts.
const IN_THREAD: [Option<u8>; 5] = [Some(0), Some(4), Some(7), Some(9), None];
/// The same where two threads answer.
const TWO_READERS: [Option<u8>; 3] = [Some(0), Some(4), None];
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

    pub(super) fn title(&self) -> &'static str {
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

    /// Returns memory that threads fill for themselves, as many pages at once as a window of `order` has. Not
    /// of huge pages.
    fn bare_thread(&self, len: ByteLen, order: u8) -> Result<BareThread, BenchError> {
        let window = ByteLen::new(self.page().bytes() << order);
        match self {
            Self::File(_, mapped) | Self::HugeCopy(_, mapped) => {
                BareThread::copied(len, mapped.clone(), window)
            }
            Self::Memory(memory) => {
                let memory = source::map_memory_file(memory, len, Access::ReadWrite)?;
                BareThread::shared(memory, window)
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
            Self::File(file, _) | Self::HugeCopy(file, _) => file.backing()?,
            Self::Memory(memory) => Arc::new(MemoryBacking::new(memory.clone(), Sharing::Private)?),
        };
        let mut options = options.clone();
        if matches!(self, Self::HugeCopy(..)) {
            options = options.huge(HugePages::Pool(HugeSize::MIB_2));
        }
        Ok(engine.map(len, backing, &options)?)
    }

    pub(super) fn plain(&self, len: ByteLen) -> Result<Mapping, BenchError> {
        match self {
            Self::File(file, _) | Self::HugeCopy(file, _) => file.map(len),
            Self::Memory(memory) => source::map_memory_file(memory, len, Access::ReadOnly),
        }
    }
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
    let page = backend.page().bytes();
    let parts = pattern.parts(len, page, placement.threads);
    let threads = parts.len();
    let is_timed = pattern == Pattern::OnePerTable;
    let visit = Visit { is_timed, page_bytes: page, ..Visit::timed(&parts, placement) };
    let touched = visit.touched();
    let engine = &placement.engine()?;
    // How many pages were to be huge, and were not.
    let lacking = &Cell::new(0);
    let mut suite = Suite::new(&table, len).threads(threads);
    let (naive, alike) = add_one_page(&mut suite, backend, visit, len);
    for (order, ours) in ways(run, backend, visit)? {
        let is_default = ours.row == BY_DEFAULT;
        let spec = add_ours(&mut suite, backend, visit, (engine, len), ours, lacking);
        spec.faults.waiting_alike = Some(alike.clone());
        spec.faults.naive = is_timed.then(|| naive.clone());
        if is_default && placement.is_first && !is_timed && !backend.is_huge() {
            let title = backend.title().to_lowercase();
            spec.headline(format!("map {len} of {title}, {}", pattern.title()));
        }
        let is_published = matches!(backend, Backend::File(..)) && threads == 1;
        let order = order.filter(|_| is_published);
        spec.row.published = order.and_then(|order| published(pattern, order, touched));
    }
    for order in IN_THREAD.into_iter().flatten().filter(|_| !backend.is_huge()) {
        let name = format!("bare, {} pages, in the thread", 1_u64 << order);
        suite.faults(Role::Peer, &format!("thread-bare-{order}"), name, move |row| {
            visit.bare_thread(row, &backend.bare_thread(len, order)?)
        });
    }
    add_kernel(&mut suite, backend, visit, len);
    suite.naive("naive").each_spec(|spec| {
        spec.row.items = touched;
        if !is_timed {
            // Where one page of a table is touched, populating does much more than the row.
            spec.limit("populate").row.bytes = touched * page;
        }
    });
    let title = format!("{}, {}: {len}, {touched} touches", backend.title(), pattern.title());
    let what = format!("{} {}{}", pattern.id(), backend.id(), placement.id);
    run.session.measure(suite, &what, title, note(placement))?;
    if lacking.get() != 0 {
        // A row of the one that were pages of the other would be none.
        let (id, lacking) = (format!("{table}/{}", huge::ROW), lacking.get());
        run.session.bench.results.retain(|row| row.id != id);
        run.skip(&id, format!("{lacking} pages were not huge: too little memory is in one piece"));
    }
    Ok(())
}

/// Returns where threads run, and how ours waits.
fn note(placement: &Placement) -> String {
    let title = &placement.title;
    match placement.spin {
        Some(spin) if spin.is_zero() => {
            format!("{title}; ours sleeps at once when nothing is left")
        }
        _ => format!("{title}; ours looks for {:?} before it sleeps", LazyOptions::DEFAULT_SPIN),
    }
}

/// Adds the one-page handlers. Returns where the touches of the naive one are, and the id of the one that waits as
/// ours does.
fn add_one_page<'a>(
    suite: &mut Suite<'a>,
    backend: &'a Backend<'_>,
    visit: Visit<'a>,
    len: ByteLen,
) -> (Log, String) {
    let mut add = |role, row, name, waiting| {
        let spec = suite.faults(role, row, name, move |row| {
            visit.bare(row, &visit.placement.by_handler(|| backend.bare(len, waiting))?)
        });
        (spec.faults.log.clone(), spec.row.id.clone())
    };
    let (log, id) = add(Role::Naive, "naive", "one page, poll and read", Waiting::Poll);
    match Waiting::like_ours(visit.placement.spin) {
        Waiting::Poll => (log, id),
        spin => (log, add(Role::Peer, "naive-spin", "one page, waiting as ours does", spin).1),
    }
}

/// Returns our rows, with the order of the window of those that a time was published for.
fn ways(
    run: &Run<'_>,
    backend: &Backend<'_>,
    visit: Visit<'_>,
) -> Result<Vec<(Option<u8>, Ours)>, BenchError> {
    let (placement, threads) = (visit.placement, visit.parts.len());
    let orders = ORDERS.into_iter().map(Some).filter(|_| !backend.is_huge()).chain([None]);
    let mut ways: Vec<(Option<u8>, Ours)> = orders
        .map(|order| Ok((order, Ours::new(order, placement)?)))
        .collect::<Result<_, BenchError>>()?;
    let mut others: Vec<Ours> = Vec::new();
    if !backend.is_huge() {
        for order in IN_THREAD {
            others.push(Ours::in_thread(order, placement)?);
        }
    }
    if let Backend::File(..) = backend {
        for order in TWO_READERS.into_iter().filter(|_| threads > 1 && !visit.is_timed) {
            others.push(Ours::two_readers(order, placement)?);
        }
        if run.has_huge {
            others.push(huge::transparent(placement)?);
        }
    }
    ways.extend(others.into_iter().map(|ours| (None, ours)));
    Ok(ways)
}

/// Adds a row of ours.
fn add_ours<'s, 'a>(
    suite: &'s mut Suite<'a>,
    backend: &'a Backend<'_>,
    visit: Visit<'a>,
    (engine, len): (&'a Engine, ByteLen),
    Ours { row, name, options }: Ours,
    lacking: &'a Cell<u64>,
) -> &'s mut RowSpec {
    let is_transparent = row == huge::ROW;
    suite.faults(Role::Ours, &row, name, move |row| {
        let memory = visit.placement.by_handler(|| backend.lazy(engine, len, &options))?;
        let found = visit.lazy(row, &memory)?;
        if is_transparent {
            // Each pattern touches each of them.
            let huge = memory.stats().huge_pages;
            lacking.set(lacking.get() + (len.get() >> 21).saturating_sub(huge));
        }
        Ok(found)
    })
}

/// Adds the kernel's own mapping, and the limit: the same populated at once.
fn add_kernel<'a>(suite: &mut Suite<'a>, backend: &'a Backend<'_>, visit: Visit<'a>, len: ByteLen) {
    suite.faults(Role::Peer, "kernel", "the kernel's own mapping", move |row| {
        visit.kernel(row, &backend.plain(len)?)
    });
    suite.faults(Role::Limit, "populate", "limit, populated by the kernel", move |row| {
        let memory = backend.plain(len)?;
        let begun = Instant::now();
        memory.populate(0..len.get())?;
        let populated = begun.elapsed();
        Ok(visit.kernel(row, &memory)?.after(populated))
    });
}

/// Seconds for 16 GiB in order, by order of the window, one thread.
const IN_ORDER_S: [f64; 7] = [7.25, 6.46, 5.49, 5.49, 5.71, 5.90, 5.11];
/// Seconds for a page of each table of 16 GiB, by order of the window, one thread.
const SPARSE_S: [f64; 7] = [0.0399, 0.0454, 0.0518, 0.0637, 0.0791, 0.1765, 0.5412];
pub(super) const SHUTEMOV: &str = "Kirill A. Shutemov, fault-around, February 2014: the kernel's own faults on a \
     file of 16 GiB, a machine with 4 sockets; scaled to as many touches as here. \
     The published random rows touch each page often";

/// Returns the published time for as many touches.
fn published(pattern: Pattern, order: u8, touched: u64) -> Option<Published> {
    let index = ORDERS.iter().position(|known| *known == order)?;
    let (seconds, pages) = match pattern {
        Pattern::InOrder => (IN_ORDER_S[index], 16_u64 << (30 - 12)),
        Pattern::OnePerTable => (SPARSE_S[index], 16_u64 << (30 - 21)),
        Pattern::Random => return None,
    };
    let ns = Duration::from_secs_f64(seconds).as_nanos() * u128::from(touched) / u128::from(pages);
    Some(Published { ns: u64::try_from(ns).ok().filter(|ns| *ns > 0)?, source: SHUTEMOV.into() })
}

//! Cases that are measured together, and the rows that they become: [`Suite`].

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use uzone_os::uffd::{OpenError, RegisterError};
use uzone_os::{FixedBuffersError, MapError, MappingError, SysError};
use uzone_pages::{ByteLen, Payload, Pfn, Template, Word};
use uzone_zone::{
    AccessError, BindFailure, BindOptions, ClearError, Init, Limit, ListTooShort, NotAGuard,
    NotPopulated, Pagemap, PinError, Pinned, Region, RegionError, Source, TakeFailure,
    TooManyRawGuards, Zone,
};
use zerocopy::Immutable;

use crate::group::{self, Case, Watch};
use crate::report::{Role, Row, RowSpec};

/// Every so many pages one is compared with the slow path before a row is timed.
const CHECK_EVERY: usize = 31;

/// A benchmark that could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The memory to describe could not be reserved.
    #[error("cannot reserve the region to describe: {0}")]
    Region(#[from] RegionError),
    /// A bind failed.
    #[error("a bind failed: {0}")]
    Bind(#[source] BindFailure),
    /// Pages could not be held.
    #[error("cannot hold the pages of the region: {0}")]
    Hold(#[source] PinError),
    /// A list had no room for the pages of a guard. A defect of the benchmark.
    #[error("cannot list the pages of a guard: {0}")]
    List(#[from] ListTooShort),
    /// There were too many raw guards. A defect of the benchmark.
    #[error("cannot turn a guard into bits: {0}")]
    Park(#[from] Box<TooManyRawGuards<Pinned>>),
    /// A guard was not had again from its bits. A defect of uzone.
    #[error("cannot redeem a guard: {0}")]
    Redeem(#[from] NotAGuard),
    /// The kernel did not pin memory that it had pinned before.
    #[error("the kernel did not pin memory: {0}")]
    FixedBuffers(#[from] FixedBuffersError),
    /// A region could not be unbound although no guard holds it: a defect of uzone.
    #[error("cannot unbind: {0}")]
    Unbind(String),
    /// Memory could not be mapped.
    #[error("cannot map memory for the limit: {0}")]
    Map(#[from] MapError),
    /// Memory could not be made present, given back or counted.
    #[error("cannot use mapped memory: {0}")]
    Mapping(#[from] MappingError),
    /// The kernel does not say what this process has.
    #[error("cannot measure what this process has: {0}")]
    Sys(#[from] SysError),
    /// There is not enough memory to measure with.
    #[error(
        "{needed:.1} of memory are needed and {available:.1} can be had, limited by {limited_by}: raise \
         that limit, or describe less with --size, at least 1G"
    )]
    TooLittleMemory {
        /// For descriptors, and as much for the limit.
        needed: ByteLen,
        /// What this process may still take.
        available: ByteLen,
        /// What the limit is.
        limited_by: Limit,
    },
    /// Not as many threads could be started as the rows should have.
    #[error("cannot start {threads} threads: ask for fewer with --threads, or raise `ulimit -u`")]
    Threads {
        /// How many were asked for.
        threads: usize,
    },
    /// The size is no multiple of the largest folio.
    #[error(
        "{size} cannot be measured: a size is a multiple of 1 GiB, the largest folio, such as 1G"
    )]
    Size {
        /// What was asked for.
        size: ByteLen,
    },
    /// The largest extent is none of those that are measured.
    #[error(
        "extents up to {size} cannot be measured: the largest is one of 4K, 16K, 64K, 256K, 1M, 2M, 8M, 32M, 128M and 1G"
    )]
    Extent {
        /// What was asked for.
        size: ByteLen,
    },
    /// The size is none that faults are measured on.
    #[error("{size} cannot be measured: a size is a multiple of 2 MiB, at least 4M, such as 2G")]
    FaultSize {
        /// What was asked for.
        size: ByteLen,
    },
    /// No table was asked for that there is.
    #[error("no table begins with {asked}: leave --table out to see which there are")]
    NoTable {
        /// What was asked for.
        asked: String,
    },
    /// The file to map could not be made.
    #[error(
        "cannot make a file of {size} in {}: free space there, or name another directory with --dir",
        directory.display()
    )]
    File {
        /// How large it was to be.
        size: ByteLen,
        /// Where.
        directory: PathBuf,
        /// What the system said.
        #[source]
        cause: io::Error,
    },
    /// The page cache cannot be asked, or a descriptor cannot be shared.
    #[error("cannot {what} the file that is measured: {cause}")]
    UseFile {
        /// What was to be done.
        what: &'static str,
        /// What the system said.
        #[source]
        cause: io::Error,
    },
    /// Memory could not be mapped lazily.
    #[error("cannot map memory lazily: {0}")]
    Lazy(#[from] uzone_fault::MapError),
    /// A request on lazily mapped memory failed.
    #[error("cannot use lazily mapped memory: {0}")]
    LazyUse(#[from] uzone_fault::LazyError),
    /// There is no userfaultfd for the yardstick.
    #[error("no userfaultfd for the one-page handler: {0}")]
    Uffd(#[from] OpenError),
    /// Memory of the yardstick does not tell of its faults.
    #[error("no faults for the one-page handler: {0}")]
    Register(#[from] RegisterError),
    /// A handler that the rows are compared with got no answer from the kernel.
    #[error("the handler of the row {row} failed: {cause}")]
    Handler {
        /// The row.
        row: String,
        /// What it met.
        #[source]
        cause: io::Error,
    },
    /// Mapped memory could not be read or written.
    #[error("cannot reach mapped memory: {0}")]
    Access(#[from] AccessError),
    /// A range of a region could not be cleared or copied.
    #[error("cannot clear or copy the memory of a region: {0}")]
    Clear(#[from] ClearError),
    /// A region could not be made present.
    #[error("cannot make a region present: {0}")]
    NotPopulated(#[from] NotPopulated),
    /// No folio of a pool could be had.
    #[error("cannot take a folio of a pool: {0}")]
    Take(#[from] TakeFailure),
    /// The worker of a pool was not let run: it has the lowest priority.
    #[error("the worker of a pool did not clear its folios in {waited:?}: leave it a CPU")]
    Worker {
        /// How long it was waited for.
        waited: Duration,
    },
    /// What a caller of this library has compared failed.
    #[error("what is compared could not be done: {0}")]
    Caller(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A row left bytes that are not what they should be. A defect of uzone, or of its rival.
    #[error("the row {row} left a wrong byte at {offset:#x}")]
    WrongByte {
        /// The row.
        row: String,
        /// Where in the extent.
        offset: usize,
    },
    /// A row wrote something else than the slow path. A defect of uzone.
    #[error("the row {row} wrote a wrong descriptor for page {pfn}")]
    Wrong {
        /// The row.
        row: String,
        /// The page.
        pfn: Pfn,
    },
}

/// Refuses names of tables that do not exist: `found` is whether any table was run or skipped.
pub(crate) fn check_found(tables: &[String], found: bool) -> Result<(), BenchError> {
    if found { Ok(()) } else { Err(BenchError::NoTable { asked: tables.join(",") }) }
}

impl BenchError {
    /// Returns whether this host lacks what a benchmark needs. Otherwise an argument is not valid, or a
    /// row found something wrong.
    #[must_use]
    pub fn is_of_this_host(&self) -> bool {
        matches!(
            self,
            Self::Region(_)
                | Self::FixedBuffers(_)
                | Self::Map(_)
                | Self::Mapping(_)
                | Self::NotPopulated(_)
                | Self::Sys(_)
                | Self::TooLittleMemory { .. }
                | Self::Threads { .. }
                | Self::FaultSize { .. }
                | Self::File { .. }
                | Self::UseFile { .. }
                | Self::Lazy(_)
                | Self::Uffd(_)
                | Self::Register(_)
                | Self::Worker { .. }
        )
    }
}

impl From<BindFailure> for BenchError {
    fn from(failure: BindFailure) -> Self {
        Self::Bind(failure)
    }
}

impl From<PinError> for BenchError {
    fn from(failure: PinError) -> Self {
        Self::Hold(failure)
    }
}

/// Cases that are measured together, and the rows that they will be.
pub(crate) struct Suite<'a> {
    /// How much memory the next row describes.
    pub(crate) size: ByteLen,
    cases: Vec<Case<'a, BenchError>>,
    specs: Vec<RowSpec>,
}

impl<'a> Suite<'a> {
    pub(crate) fn new(size: ByteLen) -> Self {
        Self { size, cases: Vec::new(), specs: Vec::new() }
    }

    fn pages(&self) -> u64 {
        self.size.get() >> 12
    }

    /// Adds a case that does anything.
    pub(crate) fn add(
        &mut self,
        role: Role,
        id: &str,
        name: impl Into<String>,
        bytes: u64,
        threads: usize,
        run: impl FnMut() -> Result<Duration, BenchError> + 'a,
    ) -> &mut RowSpec {
        self.cases.push(Case { name: id.to_owned(), run: Box::new(run) });
        self.specs.push(RowSpec {
            id: id.to_owned(),
            name: name.into(),
            role,
            headline: None,
            bytes,
            pages: self.pages(),
            calls: None,
            folios: None,
            threads,
            naive: None,
            limit: None,
            cold: false,
            published: None,
            metadata_resident_bytes_per_tib: None,
            is_rival: false,
            pauses: None,
            latencies: None,
            faults: None,
        });
        let last = self.specs.len() - 1;
        &mut self.specs[last]
    }

    /// Adds a case that binds a region and unbinds it, after it was checked once. `before` runs
    /// before each bind and is not timed.
    pub(crate) fn bind_after<P: Payload + Immutable>(
        &mut self,
        role: Role,
        id: &str,
        name: impl Into<String>,
        zone: &'a Zone,
        options: BindOptions<P>,
        before: impl Fn() -> Result<(), BenchError> + 'a,
    ) -> Result<&mut RowSpec, BenchError> {
        let pagemap = zone.bind(Region::anonymous(self.size)?, options.clone())?;
        check_descriptors(&pagemap, id)?;
        let resident = u128::from(pagemap.metadata_resident()?.get());
        let per_tib = u64::try_from((resident << 40) / u128::from(self.size.get())).ok();
        // Twice: what a row finds kept, the first bind had to take fresh.
        let pagemap = zone.bind(unbind(pagemap)?, options.clone())?;
        let report = pagemap.report();
        let is_written = report.init == Init::Eager;
        let bytes = if is_written { report.metadata.get() } else { 0 };
        let is_cold = is_written && report.source == Source::Fresh;
        let threads = report.threads;
        let mut region = Some(unbind(pagemap)?);
        let spec = self.add(role, id, name, bytes, threads, move || {
            // It is back at the end of every round that did not fail.
            let Some(mine) = region.take() else { return Ok(Duration::ZERO) };
            let options = options.clone();
            before()?;
            let started = Instant::now();
            let pagemap = zone.bind(mine, options)?;
            let elapsed = started.elapsed();
            region = Some(unbind(pagemap)?);
            Ok(elapsed)
        });
        spec.metadata_resident_bytes_per_tib = per_tib;
        spec.cold = is_cold;
        Ok(spec)
    }

    /// Adds a case that binds a region and unbinds it, again and again.
    pub(crate) fn bind<P: Payload + Immutable>(
        &mut self,
        role: Role,
        id: &str,
        name: impl Into<String>,
        zone: &'a Zone,
        options: BindOptions<P>,
    ) -> Result<&mut RowSpec, BenchError> {
        self.bind_after(role, id, name, zone, options, || Ok(()))
    }

    /// Adds a case that binds another region each time: a first bind of it, into memory that the
    /// zone has kept.
    pub(crate) fn bind_another<P: Payload + Immutable>(
        &mut self,
        id: &str,
        name: impl Into<String>,
        zone: &'a Zone,
        options: BindOptions<P>,
    ) -> &mut RowSpec {
        let size = self.size;
        let bytes = self.pages() * Template::<P>::DESCRIPTOR_BYTES as u64;
        self.add(Role::Ours, id, name, bytes, 1, move || {
            let region = Region::anonymous(size)?;
            let options = options.clone();
            let started = Instant::now();
            let pagemap = zone.bind(region, options)?;
            let elapsed = started.elapsed();
            drop(pagemap);
            Ok(elapsed)
        })
    }

    /// Returns what is known of a row that was added.
    pub(crate) fn spec(&mut self, id: &str) -> Option<&mut RowSpec> {
        self.specs.iter_mut().find(|spec| spec.id == id)
    }

    /// Calls `say` with every row that was added.
    pub(crate) fn each_spec(&mut self, say: impl FnMut(&mut RowSpec)) {
        self.specs.iter_mut().for_each(say);
    }

    pub(crate) fn run(
        mut self,
        what: &str,
        rounds: u32,
        watch: Watch<'_>,
        results: &mut Vec<Row>,
    ) -> Result<(), BenchError> {
        let samples = group::run(what, rounds, &mut self.cases, watch)?;
        let median = |spec: &&RowSpec| group::median(&samples.sorted(&spec.id));
        let best = self.specs.iter().filter(|spec| spec.is_rival).min_by_key(median);
        let best = best.map(|spec| spec.id.clone());
        results.extend(self.specs.into_iter().map(|spec| spec.row(&samples, best.as_deref())));
        Ok(())
    }
}

/// Returns the innermost cause of an error.
pub(crate) fn cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

pub(crate) fn unbind<P: Payload>(pagemap: Pagemap<P>) -> Result<Region, BenchError> {
    pagemap.unbind().map_err(|busy| BenchError::Unbind(busy.to_string()))
}

/// Compares descriptors with the slow path.
fn check_descriptors<P: Payload + Immutable>(
    pagemap: &Pagemap<P>,
    row: &str,
) -> Result<(), BenchError> {
    let is_on_touch = pagemap.report().init == Init::OnTouch;
    check_every(pagemap, row, if is_on_touch { 1 << 20 } else { CHECK_EVERY })
}

/// Compares the descriptor of every so many pages with the slow path.
pub(crate) fn check_every<P: Payload + Immutable>(
    pagemap: &Pagemap<P>,
    row: &str,
    every: usize,
) -> Result<(), BenchError> {
    let range = pagemap.range();
    let pfns = (range.start().get()..range.end().get()).step_by(every);
    for page in pfns.filter_map(|pfn| pagemap.page(Pfn::new(pfn))) {
        let is_right = match (page.payload(), page.fresh_payload()) {
            (Some(written), Some(fresh)) => written.as_bytes() == fresh.as_bytes(),
            (None, Some(_)) => page.is_tail(),
            (_, None) => false,
        };
        if !is_right || page.word() != Word::initial(pagemap.kind()) {
            return Err(BenchError::Wrong { row: row.to_owned(), pfn: page.pfn() });
        }
    }
    Ok(())
}

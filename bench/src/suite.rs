//! Cases that are measured together, and the rows that they become: [`Suite`].

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use uzone_os::uffd::UffdError;
use uzone_os::{MapError, Mapping, MappingError, Rejected, SysError, SystemRoot, memory};
use uzone_pages::{ByteLen, ErrorKind, Payload, Pfn, Template, Word};
use uzone_stream::Streaming;
use uzone_zone::{
    AccessError, BindError, BindFailure, BindOptions, Init, Limit, NotPopulated, Pagemap, PinError,
    Pinned, PoolError, Region, Source, TooManyRawGuards, WriteError, Zone,
};
use zerocopy::Immutable;

use crate::group::{self, Case, Watch};
use crate::machine;
use crate::report::{Bench, FaultSpec, Found, Log, Role, Row, RowSpec, SCHEMA, Skipped, Table};
use crate::settings::Part;
use crate::summary::headlines;

/// Every so many pages one is compared with the slow path before a row is timed.
const CHECK_EVERY: usize = 31;

/// A benchmark that could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A library refused something.
    #[error("cannot {what}: {cause}")]
    Failed {
        /// What was to be done.
        what: &'static str,
        /// Whether this host lacks what it takes; otherwise it is a defect.
        is_of_this_host: bool,
        /// Why.
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
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
    /// The size is none that an image is made of.
    #[error("{size} cannot be measured: an image is a multiple of 2 MiB, at least 4M, such as 1G")]
    SnapshotSize {
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
        /// What the system answered.
        #[source]
        cause: io::Error,
    },
    /// The page cache cannot be asked, or a descriptor cannot be shared.
    #[error("cannot {what} the file that is measured: {cause}")]
    UseFile {
        /// What was to be done.
        what: &'static str,
        /// What the system answered.
        #[source]
        cause: io::Error,
    },
    /// A handler that the rows are compared with got no answer from the kernel.
    #[error("the handler of the row {row} failed: {cause}")]
    Handler {
        /// The row.
        row: String,
        /// What it met.
        #[source]
        cause: io::Error,
    },
    /// The worker of a pool was not let run: it has the lowest priority.
    #[error("the worker of a pool did not clear its folios in {waited:?}: leave it a CPU")]
    Worker {
        /// How long it was waited for.
        waited: Duration,
    },
    /// A row left bytes that are not what they should be. A defect of uzone, or of its rival.
    #[error("the row {row} left a wrong byte at {offset:#x}")]
    WrongByte {
        /// The row.
        row: String,
        /// Where in the extent.
        offset: u64,
    },
    /// A program answered something else from mapped memory than without it. A defect of uzone, or of its
    /// rival.
    #[error("the row {row} answered wrongly: {question}")]
    WrongAnswer {
        /// The row.
        row: String,
        /// What the program was asked.
        question: &'static str,
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

impl BenchError {
    /// Returns what kind of error this is; [`ErrorKind::Other`] where its cause determines that.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Size { .. }
            | Self::Extent { .. }
            | Self::FaultSize { .. }
            | Self::SnapshotSize { .. }
            | Self::NoTable { .. } => ErrorKind::InvalidInput,
            Self::TooLittleMemory { .. } | Self::Threads { .. } => ErrorKind::OutOfMemory,
            _ => ErrorKind::Other,
        }
    }

    /// Returns whether this host lacks what a benchmark needs. Otherwise an argument is not valid, or a
    /// row found something wrong.
    #[must_use]
    pub fn is_of_this_host(&self) -> bool {
        match self {
            Self::Failed { is_of_this_host, .. } => *is_of_this_host,
            Self::TooLittleMemory { .. }
            | Self::Threads { .. }
            | Self::FaultSize { .. }
            | Self::File { .. }
            | Self::UseFile { .. }
            | Self::Worker { .. } => true,
            _ => false,
        }
    }

    /// A row left a wrong byte at `offset`.
    pub(crate) fn wrong_byte(row: &str, offset: u64) -> Self {
        Self::WrongByte { row: row.to_owned(), offset }
    }
}

/// What cannot be done where a library returns an error, and whether that is for this host's sake.
macro_rules! failures {
    ($($error:ty: $what:literal, $is_of_this_host:literal;)*) => {$(
        impl From<$error> for BenchError {
            fn from(error: $error) -> Self {
                let (what, is_of_this_host) = ($what, $is_of_this_host);
                Self::Failed { what, is_of_this_host, cause: Box::new(error) }
            }
        }
    )*};
}

failures! {
    BindFailure: "bind", false;
    BindError: "reserve the region to describe", true;
    PinError: "hold the pages of the region", false;
    Box<TooManyRawGuards<Pinned>>: "turn a guard into bits", false;
    MapError: "map memory", true;
    MappingError: "use mapped memory", true;
    SysError: "measure what this process has", true;
    uzone_fault::MapError: "map memory lazily", true;
    uzone_fault::LazyError: "use lazily mapped memory", false;
    UffdError: "open a userfaultfd", true;
    Rejected<Mapping, UffdError>: "register memory with a userfaultfd", true;
    AccessError: "reach mapped memory", false;
    WriteError: "clear or copy the memory of a region", false;
    NotPopulated: "make a region present", true;
    PoolError: "take a folio of a pool", false;
    uzone_snapshot::SnapshotError: "pack or read an image", false;
    rusqlite::Error: "query a database", false;
    sqlite_vfs::RegisterError: "add a file system to SQLite", false;
    grep_regex::Error: "make a regular expression", false;
}

/// Returns an error unless so much memory can be had.
pub(crate) fn check_memory(needed: ByteLen) -> Result<(), BenchError> {
    match memory::available(&SystemRoot::host()) {
        Ok(available) if available.bytes < needed => Err(BenchError::TooLittleMemory {
            needed,
            available: available.bytes,
            limited_by: available.limited_by,
        }),
        _ => Ok(()),
    }
}

/// A benchmark under way: what was asked for, and what was found so far.
pub(crate) struct Session<'a> {
    tables: Vec<String>,
    pub(crate) rounds: u32,
    pub(crate) watch: Watch<'a>,
    pub(crate) bench: Bench,
}

impl<'a> Session<'a> {
    /// Begins one; `settings` is a sentence.
    pub(crate) fn new(settings: String, part: &Part, rounds: u32, watch: Watch<'a>) -> Self {
        let bench = Bench {
            schema: SCHEMA.to_owned(),
            benchmark: part.name().to_owned(),
            machine: machine::here(),
            settings,
            parameters: vec![part.to_json()],
            ..Bench::default()
        };
        Self { tables: part.tables().to_vec(), rounds, watch, bench }
    }

    /// Returns whether a table was asked for: its id begins as one that was named, or none was named.
    pub(crate) fn wants(&self, table: &str) -> bool {
        self.tables.is_empty() || self.tables.iter().any(|start| table.starts_with(start.as_str()))
    }

    /// As [`Self::wants`], for tables that are measured together.
    pub(crate) fn wants_any(&self, tables: &[&str]) -> bool {
        tables.iter().any(|table| self.wants(table))
    }

    /// Records that a row or a table is left out.
    pub(crate) fn skip(&mut self, id: impl Into<String>, reason: impl Into<String>) {
        self.bench.skipped.push(Skipped { id: id.into(), reason: reason.into() });
    }

    /// Adds a table.
    pub(crate) fn table(
        &mut self,
        id: impl Into<String>,
        title: impl Into<String>,
        note: impl Into<String>,
    ) {
        self.bench.tables.push(Table { id: id.into(), title: title.into(), note: note.into() });
    }

    /// Measures a suite in as many rounds as were asked for.
    pub(crate) fn run(&mut self, suite: Suite<'_>, what: &str) -> Result<(), BenchError> {
        suite.run(what, self.rounds, self.watch, &mut self.bench.results)
    }

    /// Ends it: the rows that have a headline become the summary.
    ///
    /// # Errors
    /// [`BenchError::NoTable`] if no table was run or skipped.
    pub(crate) fn finish(mut self) -> Result<Bench, BenchError> {
        if self.bench.tables.is_empty() && self.bench.skipped.is_empty() {
            return Err(BenchError::NoTable { asked: self.tables.join(",") });
        }
        self.bench.summary = headlines(&self.bench.results);
        Ok(self.bench)
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
            role: Some(role),
            bytes,
            pages: self.pages(),
            threads,
            ..RowSpec::default()
        });
        let last = self.specs.len() - 1;
        &mut self.specs[last]
    }

    /// Adds a case that takes page faults; `run` gets the id of its row.
    pub(crate) fn faults(
        &mut self,
        role: Role,
        id: &str,
        name: impl Into<String>,
        threads: usize,
        mut run: impl FnMut(&str) -> Result<Found, BenchError> + 'a,
    ) -> &mut RowSpec {
        let (log, row) = (Log::default(), id.to_owned());
        let faults = FaultSpec { log: log.clone(), ..FaultSpec::default() };
        let spec = self.add(role, id, name, 0, threads, move || {
            let (cpu, read) = (process_cpu(), device_reads());
            let mut found = run(&row)?;
            let elapsed = found.elapsed;
            found.read_bytes += device_reads().saturating_sub(read);
            log.borrow_mut().push(found, process_cpu().saturating_sub(cpu));
            Ok(elapsed)
        });
        spec.faults = faults;
        spec.takes_faults = true;
        spec
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

    /// Has `before` called before each case that was added, in every round; it is not measured.
    pub(crate) fn before_each(&mut self, before: impl Fn() -> Result<(), BenchError> + 'a) {
        let before = Rc::new(before);
        let cases = std::mem::take(&mut self.cases).into_iter().map(|Case { name, mut run }| {
            let before = before.clone();
            let run = Box::new(move || {
                before()?;
                run()
            });
            Case { name, run }
        });
        self.cases = cases.collect();
    }

    /// Calls `set` with every row that was added.
    pub(crate) fn each_spec(&mut self, set: impl FnMut(&mut RowSpec)) {
        self.specs.iter_mut().for_each(set);
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

/// Fills memory by `write`, split among threads.
pub(crate) fn fill(
    bytes: &mut [u8],
    threads: usize,
    write: impl Fn(&mut [u8]) + Sync,
) -> Result<Duration, BenchError> {
    let share = bytes.len().div_ceil(threads).next_multiple_of(4096);
    let write = &write;
    let mut is_whole = true;
    let started = Instant::now();
    std::thread::scope(|scope| {
        let mut parts = bytes.chunks_mut(share);
        let mine = parts.next();
        for part in parts {
            let thread = std::thread::Builder::new().name("fill".to_owned());
            // Without its thread a part stays unwritten, and the row would be wrong.
            is_whole &= thread.spawn_scoped(scope, || write(part)).is_ok();
        }
        mine.map(write);
    });
    let elapsed = started.elapsed();
    if is_whole { Ok(elapsed) } else { Err(BenchError::Threads { threads }) }
}

/// Fills memory with zeroes past the cache, split among threads.
pub(crate) fn fill_zeroes(dst: &mut [u8], threads: usize) -> Result<Duration, BenchError> {
    fill(dst, threads, |part| {
        Streaming::scope(uzone_stream::best(), |stream| stream.zero(part));
    })
}

/// A length of memory of ours as a number of bytes.
pub(crate) fn bytes(len: usize) -> ByteLen {
    ByteLen::new(u64::try_from(len).unwrap_or(u64::MAX))
}

/// Returns a time as a number; more than five centuries would not fit.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns an error on one line, with those of its causes that the text before does not contain.
#[must_use]
pub fn sentence(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| {
        let cause = cause.to_string();
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    })
}

/// Returns the innermost cause of an error.
pub(crate) fn cause(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

pub(crate) fn unbind<P: Payload>(pagemap: Pagemap<P>) -> Result<Region, BenchError> {
    pagemap.unbind().map_err(|busy| BenchError::Failed {
        what: "unbind",
        is_of_this_host: false,
        cause: busy.to_string().into(),
    })
}

/// Compares descriptors with the slow path.
pub(crate) fn check_descriptors<P: Payload + Immutable>(
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

/// Returns how many bytes devices have read for this process; none where the kernel does not count them.
fn device_reads() -> u64 {
    let counts = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let read = counts.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    read.and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}

/// Returns how much time of a CPU this process has had.
fn process_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

//! Cases that are measured together, and the rows that they become: [`Suite`]. With what is re-exported here, this
//! is what every table is made of.

use std::rc::Rc;
use std::time::{Duration, Instant};

use uzone_os::{SystemRoot, memory};
use uzone_pages::{ByteLen, ErrorKind, Payload, Pfn, Template, Word};
use uzone_stream::Streaming;
use uzone_zone::{BindOptions, Init, Pagemap, Region, Source, Zone};
use zerocopy::Immutable;

pub(crate) use crate::harness::error::{BenchError, cause, sentence};
use crate::harness::group::{self, Case, Watch};
use crate::harness::machine;
pub(crate) use crate::harness::report::{Bench, Found, Published, Role};
use crate::harness::report::{Log, Row, RowSpec, SCHEMA, Skipped, Table};
use crate::harness::settings::Part;
use crate::harness::summary::headlines;

/// Every so many pages one is compared with the slow path before a row is timed.
const CHECK_EVERY: usize = 31;

/// Returns an error unless so much memory can be had.
pub(crate) fn check_memory(needed: ByteLen) -> Result<(), BenchError> {
    match memory::available(&SystemRoot::host()) {
        Ok(available) if available.bytes < needed => {
            let text = format!(
                "{needed:.1} of memory are needed and {:.1} can be had, limited by {}: raise that limit, or \
                 describe less with --size, at least 1G",
                available.bytes, available.limited_by
            );
            Err(BenchError::host(ErrorKind::OutOfMemory, text))
        }
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
        Self { tables: part.tables.clone(), rounds, watch, bench }
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
        self.bench.results.extend(suite.run(what, self.rounds, self.watch)?);
        Ok(())
    }

    /// Measures a suite, and adds its table.
    pub(crate) fn measure(
        &mut self,
        suite: Suite<'_>,
        what: &str,
        title: impl Into<String>,
        note: impl Into<String>,
    ) -> Result<(), BenchError> {
        let table = suite.table.clone();
        self.run(suite, what)?;
        self.table(table, title, note);
        Ok(())
    }

    /// Takes what came of a table. Where this host lacks what it takes, that table alone is left out.
    pub(crate) fn or_skip(
        &mut self,
        table: &str,
        measured: Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        match measured {
            Err(error) if error.is_of_this_host() => self.skip(table, sentence(&error)),
            done => done?,
        }
        Ok(())
    }

    /// Ends it: the rows that have a headline become the summary.
    ///
    /// # Errors
    /// If no table was run or skipped.
    pub(crate) fn finish(mut self) -> Result<Bench, BenchError> {
        if self.bench.tables.is_empty() && self.bench.skipped.is_empty() {
            return Err(BenchError::no_table(&self.tables));
        }
        self.bench.summary = headlines(&self.bench.results);
        Ok(self.bench)
    }
}

/// Cases that are measured together, and the rows that they will be: of one table, or of several.
pub(crate) struct Suite<'a> {
    /// What the ids of rows begin with.
    table: String,
    /// How much memory the next row describes.
    pub(crate) size: ByteLen,
    /// How many bytes the next row writes, by how many threads.
    pub(crate) bytes: u64,
    pub(crate) threads: usize,
    /// How many rounds there are at most.
    pub(crate) rounds: u32,
    cases: Vec<Case<'a, BenchError>>,
    specs: Vec<RowSpec>,
}

impl<'a> Suite<'a> {
    pub(crate) fn new(table: impl Into<String>, size: ByteLen) -> Self {
        let (cases, specs) = (Vec::new(), Vec::new());
        Self { table: table.into(), size, bytes: 0, threads: 1, rounds: u32::MAX, cases, specs }
    }

    /// The same, and its rows write so many bytes.
    pub(crate) fn writing(self, bytes: u64) -> Self {
        Self { bytes, ..self }
    }

    /// The same, and its rows have so many threads.
    pub(crate) fn threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    fn pages(&self) -> u64 {
        self.size.get() >> 12
    }

    /// Returns the id of a row. One with a slash is of another table, and is its own id.
    pub(crate) fn id(&self, row: &str) -> String {
        if row.contains('/') { row.to_owned() } else { format!("{}/{row}", self.table) }
    }

    /// Adds a case that does anything; `run` gets the id of its row.
    pub(crate) fn add(
        &mut self,
        role: Role,
        row: &str,
        name: impl Into<String>,
        mut run: impl FnMut(&str) -> Result<Duration, BenchError> + 'a,
    ) -> &mut RowSpec {
        let (id, own) = (self.id(row), self.id(row));
        self.cases.push(Case { name: id.clone(), run: Box::new(move || run(&own)) });
        let (bytes, items, threads) = (self.bytes, self.pages(), self.threads);
        let (name, role) = (name.into(), Some(role));
        let row = Row { id, name, role, bytes, items, threads, ..Row::default() };
        self.specs.push(RowSpec { row, ..RowSpec::default() });
        let last = self.specs.len() - 1;
        &mut self.specs[last]
    }

    /// Adds a case that takes page faults.
    pub(crate) fn faults(
        &mut self,
        role: Role,
        row: &str,
        name: impl Into<String>,
        mut run: impl FnMut(&str) -> Result<Found, BenchError> + 'a,
    ) -> &mut RowSpec {
        let log = Log::default();
        let own = log.clone();
        let spec = self.add(role, row, name, move |row| {
            let (cpu, read) = (process_cpu(), device_reads());
            let mut found = run(row)?;
            let elapsed = found.elapsed;
            found.read_bytes += device_reads().saturating_sub(read);
            own.borrow_mut().push(found, process_cpu().saturating_sub(cpu));
            Ok(elapsed)
        });
        spec.faults.log = log;
        spec.takes_faults = true;
        spec
    }

    /// Adds a case that binds a region and unbinds it, after it was checked once. `before` runs
    /// before each bind and is not timed.
    pub(crate) fn bind_after<P: Payload + Immutable>(
        &mut self,
        role: Role,
        row: &str,
        name: impl Into<String>,
        zone: &'a Zone,
        options: BindOptions<P>,
        before: impl Fn() -> Result<(), BenchError> + 'a,
    ) -> Result<&mut RowSpec, BenchError> {
        let pagemap = zone.bind(Region::anonymous(self.size)?, options.clone())?;
        check_descriptors(&pagemap, &self.id(row))?;
        let resident = u128::from(pagemap.metadata_resident()?.get());
        let per_tib = u64::try_from((resident << 40) / u128::from(self.size.get())).ok();
        // Twice: what a row finds kept, the first bind had to take fresh.
        let pagemap = zone.bind(unbind(pagemap)?, options.clone())?;
        let report = pagemap.report();
        let is_written = report.init == Init::Eager;
        let bytes = if is_written { report.metadata.get() } else { 0 };
        let cold = is_written && report.source == Source::Fresh;
        let threads = report.threads;
        let mut region = Some(unbind(pagemap)?);
        let spec = self.add(role, row, name, move |_| {
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
        spec.row.metadata_resident_bytes_per_tib = per_tib;
        (spec.row.bytes, spec.row.threads, spec.row.cold) = (bytes, threads, cold);
        Ok(spec)
    }

    /// Adds a case that binds a region and unbinds it, again and again.
    pub(crate) fn bind<P: Payload + Immutable>(
        &mut self,
        role: Role,
        row: &str,
        name: impl Into<String>,
        zone: &'a Zone,
        options: BindOptions<P>,
    ) -> Result<&mut RowSpec, BenchError> {
        self.bind_after(role, row, name, zone, options, || Ok(()))
    }

    /// Adds a case that binds another region each time: a first bind of it, into memory that the
    /// zone has kept.
    pub(crate) fn bind_another<P: Payload + Immutable>(
        &mut self,
        row: &str,
        name: impl Into<String>,
        zone: &'a Zone,
        options: BindOptions<P>,
    ) -> &mut RowSpec {
        let size = self.size;
        let bytes = self.pages() * Template::<P>::DESCRIPTOR_BYTES as u64;
        let spec = self.add(Role::Ours, row, name, move |_| {
            let (region, options) = (Region::anonymous(size)?, options.clone());
            timed(|| Ok(zone.bind(region, options)?))
        });
        (spec.row.bytes, spec.row.threads) = (bytes, 1);
        spec
    }

    /// Returns what is known of a row that was added.
    pub(crate) fn spec(&mut self, row: &str) -> Option<&mut RowSpec> {
        let id = self.id(row);
        self.specs.iter_mut().find(|spec| spec.row.id == id)
    }

    /// Compares all rows that were added with a naive one.
    pub(crate) fn naive(&mut self, row: &str) -> &mut Self {
        self.each_spec(|spec| _ = spec.naive(row));
        self
    }

    /// Compares all rows that were added with a limit.
    pub(crate) fn limit(&mut self, row: &str) -> &mut Self {
        self.each_spec(|spec| _ = spec.limit(row));
        self
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

    /// Returns what the note of a table has to state where it has fewer rounds than were asked for.
    pub(crate) fn fewer(&self, asked: u32) -> String {
        match self.rounds {
            rounds if rounds < asked => format!("; {rounds} rounds, because each takes long"),
            _ => String::new(),
        }
    }

    /// Measures all rows.
    pub(crate) fn run(
        mut self,
        what: &str,
        rounds: u32,
        watch: Watch<'_>,
    ) -> Result<Vec<Row>, BenchError> {
        let samples = group::run(what, rounds.min(self.rounds), &mut self.cases, watch)?;
        let median = |spec: &&RowSpec| group::median(&samples.sorted(&spec.row.id));
        let best = self.specs.iter().filter(|spec| spec.is_rival).min_by_key(median);
        let best = best.map(|spec| spec.row.id.clone());
        let bytes: Vec<(String, u64)> =
            self.specs.iter().map(|spec| (spec.row.id.clone(), spec.row.bytes)).collect();
        let written = |id: &str| bytes.iter().find(|row| row.0 == id).map_or(0, |row| row.1);
        let rows = self.specs.into_iter();
        Ok(rows.map(|spec| spec.row(&samples, best.as_deref(), written)).collect())
    }
}

/// Runs `work`; what it returns is dropped when the clock has stopped.
pub(crate) fn timed<T>(
    work: impl FnOnce() -> Result<T, BenchError>,
) -> Result<Duration, BenchError> {
    let started = Instant::now();
    let done = work()?;
    let elapsed = started.elapsed();
    drop(done);
    Ok(elapsed)
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
    if is_whole { Ok(elapsed) } else { Err(BenchError::threads(threads)) }
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

/// Returns a length as one of memory of ours; what does not fit is not mapped either.
pub(crate) fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

pub(crate) fn unbind<P: Payload>(pagemap: Pagemap<P>) -> Result<Region, BenchError> {
    pagemap.unbind().map_err(|busy| BenchError::failed("unbind", false, busy.to_string()))
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
        let is_right = match (page.payload(), pagemap.fresh_payload(page.pfn())) {
            (Some(written), Some(fresh)) => written.as_bytes() == fresh.as_bytes(),
            (None, Some(_)) => page.is_tail(),
            (_, None) => false,
        };
        if !is_right || page.word() != Word::initial(pagemap.kind()) {
            return Err(BenchError::wrong_page(row, page.pfn()));
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

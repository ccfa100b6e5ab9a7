//! Cases that are measured together, and the rows that they become: [`Suite`].

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use uzone_pages::ByteLen;
use uzone_report::float;
use uzone_report::results::{Noise, Role, Row};

use super::error::Result;
use super::found::{Found, Log, faults, latency};
use super::rounds::{Case, Samples, Watch, median, spread};

/// The largest share of a limit: one that passes 1 by the noise of the host. A faster row does less work than the
/// limit, and gets none.
const MOST_SHARE: f64 = 1.15;

/// Cases that are measured together, and their rows: of one table, or of several.
pub struct Suite<'a> {
    /// The table of the next row: the first part of its id.
    pub table: String,
    /// The memory that the next row describes.
    pub size: ByteLen,
    /// The number of bytes that the next row writes.
    pub bytes: u64,
    /// The number of threads of the next row.
    pub threads: usize,
    cases: Vec<Case<'a>>,
    specs: Vec<RowSpec>,
}

impl<'a> Suite<'a> {
    /// Returns an empty suite whose rows describe `size` of memory.
    pub fn new(table: impl Into<String>, size: ByteLen) -> Self {
        let (cases, specs) = (Vec::new(), Vec::new());
        Self { table: table.into(), size, bytes: 0, threads: 1, cases, specs }
    }

    /// Sets the number of bytes that each row writes.
    pub fn writing(self, bytes: u64) -> Self {
        Self { bytes, ..self }
    }

    /// Sets the number of threads of each row.
    pub fn threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    /// Returns the number of base pages that the next row describes.
    pub fn pages(&self) -> u64 {
        self.size.get() >> 12
    }

    /// Returns the id of a row.
    pub fn id(&self, row: &str) -> String {
        id(&self.table, row)
    }

    /// Adds a case; `run` takes the id of its row.
    pub fn add(
        &mut self,
        role: Role,
        row: &str,
        name: impl Into<String>,
        mut run: impl FnMut(&str) -> Result<Duration> + 'a,
    ) -> &mut RowSpec {
        let (id, own) = (self.id(row), self.id(row));
        self.cases.push(Case { name: id.clone(), run: Box::new(move || run(&own)) });
        let (bytes, items, threads) = (self.bytes, self.pages(), self.threads);
        let name = name.into();
        let row = Row { id, name, role, bytes, items, threads, ..Row::default() };
        self.specs.push(RowSpec { row, ..RowSpec::default() });
        let last = self.specs.len() - 1;
        &mut self.specs[last]
    }

    /// Adds a case that takes page faults.
    pub fn faults(
        &mut self,
        role: Role,
        row: &str,
        name: impl Into<String>,
        mut run: impl FnMut(&str) -> Result<Found> + 'a,
    ) -> &mut RowSpec {
        let log = Log::default();
        let own = log.clone();
        let spec = self.add(role, row, name, move |row| {
            let (cpu, read) = (process_cpu(), device_reads());
            let mut found = run(row)?;
            let elapsed = found.elapsed;
            found.read_bytes += device_reads().saturating_sub(read);
            found.cpu = process_cpu().saturating_sub(cpu);
            own.borrow_mut().push(found);
            Ok(elapsed)
        });
        spec.faults = Some(log);
        spec
    }

    /// Returns a row that was added.
    pub fn spec(&mut self, row: &str) -> Option<&mut RowSpec> {
        let id = self.id(row);
        self.specs.iter_mut().find(|spec| spec.row.id == id)
    }

    /// Compares all rows that were added with a naive one.
    pub fn naive(&mut self, row: &str) -> &mut Self {
        self.each_spec(|spec| _ = spec.naive(row));
        self
    }

    /// Compares all rows that were added with a limit.
    pub fn limit(&mut self, row: &str) -> &mut Self {
        self.each_spec(|spec| _ = spec.limit(row));
        self
    }

    /// Calls `before`, which is not measured, ahead of each case that was added, in every round.
    pub fn before_each(&mut self, before: impl Fn() -> Result + 'a) {
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
    pub fn each_spec(&mut self, set: impl FnMut(&mut RowSpec)) {
        self.specs.iter_mut().for_each(set);
    }

    /// Measures all rows.
    pub fn run(mut self, title: &str, rounds: u32, watch: Watch<'_>) -> Result<Vec<Row>> {
        let samples = super::rounds::run(title, rounds, &mut self.cases, watch)?;
        let median = |spec: &&RowSpec| median(&samples.sorted(&spec.row.id));
        let best = self.specs.iter().filter(|spec| spec.is_rival).min_by_key(median);
        let best = best.map(|spec| &*spec.row.id);
        Ok(self.specs.iter().map(|spec| spec.row(&samples, best, &self.specs)).collect())
    }
}

/// Returns the id of a row of a table. A name with a slash is an id of another table.
fn id(table: &str, row: &str) -> String {
    if row.contains('/') { row.to_owned() } else { format!("{table}/{row}") }
}

/// The times of a case's steps.
pub type Times = Rc<RefCell<Vec<u64>>>;

/// A row before its case runs.
#[derive(Default)]
pub struct RowSpec {
    /// The fields that are known before.
    pub row: Row,
    /// Whether it does the same work as the other rivals of its suite.
    pub is_rival: bool,
    /// The times of its calls, where the case measures them.
    pub latencies: Option<Times>,
    /// The samples of each round, if the case takes page faults.
    faults: Option<Log>,
}

impl RowSpec {
    /// Returns the id of a row of the same table, or the id itself.
    pub fn of_table(&self, row: &str) -> String {
        id(self.row.id.split_once('/').unwrap_or_default().0, row)
    }

    /// Sets the naive row.
    pub fn naive(&mut self, row: &str) -> &mut Self {
        self.row.naive_id = Some(self.of_table(row));
        self
    }

    /// Sets the limit.
    pub fn limit(&mut self, row: &str) -> &mut Self {
        self.row.limit_id = Some(self.of_table(row));
        self
    }

    /// Sets the line of the summary that the row stands for.
    pub fn headline(&mut self, line: impl Into<String>) -> &mut Self {
        self.row.headline = Some(line.into());
        self
    }

    /// Sets the number of calls, and the number of folios of the pages.
    pub fn counts(&mut self, calls: Option<u64>, folios: Option<u64>) -> &mut Self {
        (self.row.calls, self.row.folios) = (calls, folios);
        self
    }

    /// Returns the row. `best` is the id of the fastest rival, and `all` are the rows of the suite.
    fn row(&self, samples: &Samples, best: Option<&str>, all: &[Self]) -> Row {
        let row = &self.row;
        let times = samples.sorted(&row.id);
        let median_ns = median(&times);
        let spec = |id: &String| all.iter().find(|spec| spec.row.id == *id);
        let ratio_spread =
            |other: Option<&String>| other.and_then(|other| samples.ratio_spread(other, &row.id));
        let share_of_limit = row.limit_id.as_ref().and_then(|limit| {
            let times = samples.ratio(limit, &row.id)?;
            match spec(limit).map_or(0, |limit| limit.row.bytes) {
                // Both do the same work.
                0 => Some(times),
                bytes => Some(times * float(row.bytes) / float(bytes)),
            }
        });
        // A row that is faster than its limit does other work: it has no limit.
        let share_of_limit = share_of_limit.filter(|share| *share <= MOST_SHARE);
        let limit_id = row.limit_id.clone().filter(|_| share_of_limit.is_some());
        let naive = row.naive_id.as_ref();
        let per = |count: Option<u64>| count.map(|count| float(median_ns) / float(count.max(1)));
        let ratio_naive = naive.and_then(|naive| samples.ratio(naive, &row.id));
        let noise = Noise {
            median: spread(&times.iter().map(|time| float(*time)).collect::<Vec<_>>()),
            ratio_naive: ratio_spread(naive),
            share_of_limit: ratio_spread(limit_id.as_ref()),
        };
        Row {
            faults: self.faults.as_ref().map(|own| faults(own, median_ns, row.threads)),
            within_noise: naive.is_some_and(|naive| *naive != row.id) && noise.hides(ratio_naive),
            noise,
            median_ns,
            min_ns: times.first().copied().unwrap_or(0),
            worst_ns: times.last().copied().unwrap_or(0),
            rounds: times.len(),
            gib_per_s: float(row.bytes) / (float(median_ns.max(1)) / 1e9) / float(1 << 30),
            ns_per_page: float(median_ns) / float(row.items.max(1)),
            ns_per_call: per(row.calls),
            ns_per_folio: per(row.folios),
            ratio_naive,
            ratio_best: best
                .filter(|_| self.is_rival)
                .and_then(|best| samples.ratio(&row.id, best)),
            share_of_limit,
            limit_id,
            latency: self.latencies.as_ref().and_then(|times| latency(times.take())),
            ..row.clone()
        }
    }
}

/// Times `work`. Its result is dropped after the clock has stopped.
pub fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<Duration> {
    let started = Instant::now();
    let done = work()?;
    let elapsed = started.elapsed();
    drop(done);
    Ok(elapsed)
}

/// Returns the number of bytes that devices have read for this process, or 0 where the kernel does not count them.
fn device_reads() -> u64 {
    let counts = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let read = counts.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    read.and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}

/// Returns the CPU time of this process.
fn process_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

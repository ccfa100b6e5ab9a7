//! What a benchmark found, in the shape that `uzone bench --json` prints.

mod faults;
pub mod metadata;

use std::cell::RefCell;
use std::rc::Rc;

use serde::{Deserialize, Serialize};

pub(crate) use self::faults::{FaultSpec, Log};
pub use self::faults::{Faults, Pauses, Quantiles};

use self::faults::sorted;
use self::metadata::Metadata;
use crate::group::{Samples, float, median, spread};
use crate::machine::Machine;
use crate::settings::Part;
use crate::summary::{Headline, headlines};

/// The schema of [`Bench`]: raised when a field changes its meaning.
pub const SCHEMA: &str = "uzone.bench/1";

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct Bench {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Which benchmark: `all` if there were several.
    pub benchmark: &'static str,
    /// What it was measured on.
    pub machine: Machine,
    /// Whether its sizes and rounds are those of `--quick`, whose figures say nothing.
    pub quick: bool,
    /// Its settings, as a sentence.
    pub settings: String,
    /// The same for a program: one benchmark after the other.
    pub parameters: Vec<Part>,
    /// What matters most of the results.
    pub summary: Vec<Headline>,
    /// The tables, in the order of the results.
    pub tables: Vec<Table>,
    /// All rows of all tables.
    pub results: Vec<Row>,
    /// What was left out, and why.
    pub skipped: Vec<Skipped>,
    /// What descriptors take, in a run of all.
    pub metadata: Option<Metadata>,
}

impl Bench {
    /// Begins a document of one benchmark.
    pub(crate) fn new(settings: String, parameters: Part) -> Self {
        Self {
            schema: SCHEMA,
            benchmark: parameters.name(),
            machine: Machine::here(),
            quick: false,
            settings,
            parameters: vec![parameters],
            summary: Vec::new(),
            tables: Vec::new(),
            results: Vec::new(),
            skipped: Vec::new(),
            metadata: None,
        }
    }

    /// Ends it: what its rows say that they stand for becomes the summary.
    pub(crate) fn summed_up(mut self) -> Self {
        self.summary = headlines(&self.results);
        self
    }
}

/// What a row is beside the others of its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The way that one would write first, which the others are compared with.
    Naive,
    /// What a caller of uzone gets.
    Ours,
    /// What this machine can do at most.
    Limit,
    /// Somebody else's way: the kernel, the C library, another library.
    Peer,
    /// A way of uzone's that has to be asked for, beside the default.
    Variant,
}

impl Role {
    /// Returns whether a change of such a row is a change of uzone.
    #[must_use]
    pub fn is_of_uzone(self) -> bool {
        matches!(self, Self::Ours | Self::Variant)
    }
}

/// How far the rounds of a row were from each other: half of what the middle half of them spans, as a
/// part of the median (of all of them, if they are fewer than four).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Noise {
    /// Of the times.
    pub median: f64,
    /// Of the ratios to the naive row.
    pub ratio_naive: Option<f64>,
    /// Of the ratios to the limit.
    pub share_of_limit: Option<f64>,
}

/// Rows that are compared with each other.
#[derive(Clone, Debug, Serialize)]
pub struct Table {
    /// The first part of the rows' ids.
    pub id: String,
    /// A heading.
    pub title: String,
    /// What has to be known to read it: which row is the yardstick and which the limit.
    pub note: String,
}

/// Something that could not be measured here.
#[derive(Clone, Debug, Serialize)]
pub struct Skipped {
    /// The id that its row would have had.
    pub id: String,
    /// Why.
    pub reason: String,
}

/// A published figure to compare with.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Published {
    /// The time that was published.
    pub ns: u64,
    /// Who measured what.
    pub source: &'static str,
}

/// One case.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `table/case/row`; it stays the same from run to run.
    pub id: String,
    /// The name of the row, for people.
    pub name: String,
    /// What it is beside the others.
    pub role: Role,
    /// The id of the naive row, if it is compared with one.
    pub naive_id: Option<String>,
    /// The id of its limit, if it has one.
    pub limit_id: Option<String>,
    /// The median of the rounds.
    pub median_ns: u64,
    /// The fastest round.
    pub min_ns: u64,
    /// The slowest round.
    pub worst_ns: u64,
    /// How many rounds.
    pub rounds: usize,
    /// How far they were from each other.
    pub noise: Noise,
    /// How many bytes were written.
    pub bytes: u64,
    /// How many pages were described, or held; over all passes.
    pub items: u64,
    /// Bytes by the median.
    pub gib_per_s: f64,
    /// Nanoseconds for each page described, by the median.
    pub ns_per_page: f64,
    /// How many calls did it, where the row counts them.
    pub calls: Option<u64>,
    /// Nanoseconds for each call, by the median.
    pub ns_per_call: Option<f64>,
    /// How many folios the pages are in, where the row counts them.
    pub folios: Option<u64>,
    /// Nanoseconds for each folio, by the median.
    pub ns_per_folio: Option<f64>,
    /// How many times the naive row took this one's time; the median of the rounds' ratios.
    pub ratio_naive: Option<f64>,
    /// The limit's rate divides this one's, or where neither writes bytes, this one's time the
    /// limit's; the median of the rounds' ratios. It may pass 1 by
    /// what the machine varies.
    pub share_of_limit: Option<f64>,
    /// Whether the memory had never been touched.
    pub cold: bool,
    /// What was published.
    pub published: Option<Published>,
    /// How many threads wrote.
    pub threads: usize,
    /// What the descriptors of one TiB take by the kernel's count, scaled from those of this row.
    pub metadata_resident_bytes_per_tib: Option<u64>,
    /// This row's time divided by that of the fastest row that does the same work; the median of the
    /// rounds' ratios. 1 for the fastest, and below by what the machine varies.
    pub ratio_best: Option<f64>,
    /// How long others had to wait, where the row lets them run now and then.
    pub pauses: Option<Pauses>,
    /// How long its calls took one by one, where the row measures them.
    pub latency: Option<Quantiles>,
    /// What became of page faults, where the row takes them.
    pub faults: Option<Faults>,
    /// What the row stands for in the summary.
    #[serde(skip)]
    pub(crate) headline: Option<String>,
}

/// A row may pass its limit by this much, which is what the machine varies. What passes it by more has
/// no limit.
const MOST_SHARE: f64 = 1.15;

/// What is known of a row before its case runs.
pub(crate) struct RowSpec {
    /// The id, which is the name of the case as well.
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) role: Role,
    /// What it stands for in the summary, if it is one of its lines.
    pub(crate) headline: Option<String>,
    pub(crate) bytes: u64,
    pub(crate) pages: u64,
    pub(crate) calls: Option<u64>,
    pub(crate) folios: Option<u64>,
    pub(crate) threads: usize,
    /// The id of the naive row.
    pub(crate) naive: Option<String>,
    /// The id of the limit, and how many bytes that writes; none if both do the same work.
    pub(crate) limit: Option<(String, u64)>,
    pub(crate) cold: bool,
    pub(crate) published: Option<Published>,
    pub(crate) metadata_resident_bytes_per_tib: Option<u64>,
    /// Whether it does the same work as the other rivals of its suite.
    pub(crate) is_rival: bool,
    /// Where the case puts its pauses.
    pub(crate) pauses: Option<Rc<RefCell<Vec<u64>>>>,
    /// Where the case puts the times of its calls.
    pub(crate) latencies: Option<Rc<RefCell<Vec<u64>>>>,
    pub(crate) faults: Option<FaultSpec>,
}

impl RowSpec {
    /// `best` is the id of the fastest rival.
    pub(crate) fn row(self, samples: &Samples, best: Option<&str>) -> Row {
        let times = samples.sorted(&self.id);
        let median_ns = median(&times);
        let ratio_spread =
            |other: Option<&String>| other.and_then(|other| samples.ratio_spread(other, &self.id));
        let share_of_limit = self.limit.as_ref().and_then(|(limit, limit_bytes)| {
            let times = samples.ratio(limit, &self.id)?;
            match limit_bytes {
                0 => Some(times),
                _ => Some(times * float(self.bytes) / float(*limit_bytes)),
            }
        });
        // What is faster than its limit does something else: there is no limit to show.
        let share_of_limit = share_of_limit.filter(|share| *share <= MOST_SHARE);
        let limit = self.limit.filter(|_| share_of_limit.is_some());
        let noise = Noise {
            median: spread(&times.iter().map(|time| float(*time)).collect::<Vec<_>>()),
            ratio_naive: ratio_spread(self.naive.as_ref()),
            share_of_limit: ratio_spread(limit.as_ref().map(|(id, _)| id)),
        };
        let seconds = float(median_ns.max(1)) / 1e9;
        let per = |count: Option<u64>| count.map(|count| float(median_ns) / float(count.max(1)));
        let faults =
            self.faults.map(|spec| spec.faults(&self.id, median_ns, self.threads, samples));
        Row {
            faults,
            noise,
            name: self.name,
            role: self.role,
            headline: self.headline,
            naive_id: self.naive.clone(),
            limit_id: limit.map(|(id, _)| id),
            median_ns,
            min_ns: times.first().copied().unwrap_or(0),
            worst_ns: times.last().copied().unwrap_or(0),
            rounds: times.len(),
            bytes: self.bytes,
            items: self.pages,
            gib_per_s: float(self.bytes) / seconds / float(1 << 30),
            ns_per_page: float(median_ns) / float(self.pages.max(1)),
            calls: self.calls,
            ns_per_call: per(self.calls),
            folios: self.folios,
            ns_per_folio: per(self.folios),
            ratio_naive: self.naive.and_then(|naive| samples.ratio(&naive, &self.id)),
            share_of_limit,
            cold: self.cold,
            published: self.published,
            threads: self.threads,
            metadata_resident_bytes_per_tib: self.metadata_resident_bytes_per_tib,
            ratio_best: best
                .filter(|_| self.is_rival)
                .and_then(|best| samples.ratio(&self.id, best)),
            pauses: self.pauses.and_then(|pauses| Pauses::of(pauses.take())),
            latency: self.latencies.and_then(|times| Quantiles::of(&sorted(times.take()))),
            id: self.id,
        }
    }
}

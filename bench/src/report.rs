//! What a benchmark found, in the shape that `uzone bench --json` prints.

use serde::Serialize;

use crate::group::{Samples, float, median};
use crate::machine::Machine;

/// The schema of [`Bench`]: raised when a field changes its meaning.
pub const SCHEMA: &str = "uzone.bench/1";

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct Bench {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Which benchmark.
    pub benchmark: &'static str,
    /// What it was measured on.
    pub machine: Machine,
    /// What it was told, as a sentence.
    pub settings: String,
    /// The tables, in the order of the results.
    pub tables: Vec<Table>,
    /// All rows of all tables.
    pub results: Vec<Row>,
    /// What was left out, and why.
    pub skipped: Vec<Skipped>,
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
    /// The median of the rounds.
    pub median_ns: u64,
    /// The fastest round.
    pub min_ns: u64,
    /// The slowest round.
    pub worst_ns: u64,
    /// How many rounds.
    pub rounds: usize,
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
    /// What the kernel says that the descriptors of one TiB take, from what those of this row do.
    pub metadata_resident_bytes_per_tib: Option<u64>,
}

/// What is known of a row before its case runs.
pub(crate) struct RowSpec {
    /// The id, which is the name of the case as well.
    pub(crate) id: String,
    pub(crate) name: String,
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
}

impl RowSpec {
    pub(crate) fn row(self, samples: &Samples) -> Row {
        let times = samples.sorted(&self.id);
        let median_ns = median(&times);
        let seconds = float(median_ns.max(1)) / 1e9;
        let per = |count: Option<u64>| count.map(|count| float(median_ns) / float(count.max(1)));
        Row {
            name: self.name,
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
            share_of_limit: self.limit.and_then(|(limit, limit_bytes)| {
                let times = samples.ratio(&limit, &self.id)?;
                match limit_bytes {
                    0 => Some(times),
                    _ => Some(times * float(self.bytes) / float(limit_bytes)),
                }
            }),
            cold: self.cold,
            published: self.published,
            threads: self.threads,
            metadata_resident_bytes_per_tib: self.metadata_resident_bytes_per_tib,
            id: self.id,
        }
    }
}

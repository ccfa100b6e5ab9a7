//! What a benchmark found, in the shape that `uzone bench --json` prints.

use std::cell::RefCell;
use std::rc::Rc;

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
    /// This row's time divided by that of the fastest row that does the same work; the median of the
    /// rounds' ratios. 1 for the fastest, and below by what the machine varies.
    pub ratio_best: Option<f64>,
    /// How long others had to wait, where the row lets them run now and then.
    pub pauses: Option<Pauses>,
    /// How long its calls took one by one, where the row measures them.
    pub latency: Option<Latency>,
}

/// How long calls took, of all rounds together.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latency {
    /// The median.
    pub p50_ns: u64,
    /// What one in a hundred exceeds.
    pub p99_ns: u64,
    /// The longest.
    pub worst_ns: u64,
    /// How many there were.
    pub count: usize,
}

impl Latency {
    /// Takes times in any order; `None` if there was none.
    pub(crate) fn of(mut ns: Vec<u64>) -> Option<Self> {
        ns.sort_unstable();
        let (count, worst_ns) = (ns.len(), *ns.last()?);
        Some(Self { p50_ns: median(&ns), p99_ns: not_exceeded(&ns, 990), worst_ns, count })
    }
}

/// Returns the smallest of times in ascending order that at least so many of 1000 do not exceed.
fn not_exceeded(sorted: &[u64], of_1000: usize) -> u64 {
    let rank = (sorted.len() * of_1000).div_ceil(1000).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

/// The times between two yield points, of all rounds together.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Pauses {
    /// The median.
    pub p50_ns: u64,
    /// What one in a thousand exceeds.
    pub p999_ns: u64,
    /// The longest.
    pub worst_ns: u64,
    /// How many there were.
    pub count: usize,
}

impl Pauses {
    /// Takes pauses in any order; `None` if there was none.
    pub(crate) fn of(mut ns: Vec<u64>) -> Option<Self> {
        ns.sort_unstable();
        let (count, worst_ns) = (ns.len(), *ns.last()?);
        let (p50_ns, p999_ns) = (median(&ns), not_exceeded(&ns, 999));
        Some(Self { p50_ns, p999_ns, worst_ns, count })
    }
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
    /// Whether it does the same work as the other rivals of its suite.
    pub(crate) is_rival: bool,
    /// Where the case puts its pauses.
    pub(crate) pauses: Option<Rc<RefCell<Vec<u64>>>>,
    /// Where the case puts the times of its calls.
    pub(crate) latencies: Option<Rc<RefCell<Vec<u64>>>>,
}

impl RowSpec {
    /// `best` is the id of the fastest rival.
    pub(crate) fn row(self, samples: &Samples, best: Option<&str>) -> Row {
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
            ratio_best: best
                .filter(|_| self.is_rival)
                .and_then(|best| samples.ratio(&self.id, best)),
            pauses: self.pauses.and_then(|pauses| Pauses::of(pauses.take())),
            latency: self.latencies.and_then(|times| Latency::of(times.take())),
            id: self.id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_told_by_their_quantiles() {
        assert!(Pauses::of(Vec::new()).is_none());
        let pauses = Pauses::of((1..=1000).rev().collect()).expect("some");
        assert_eq!(
            (pauses.p50_ns, pauses.p999_ns, pauses.worst_ns, pauses.count),
            (501, 999, 1000, 1000)
        );
        let one = Pauses::of(vec![7]).expect("one");
        assert_eq!((one.p50_ns, one.p999_ns, one.worst_ns), (7, 7, 7));
        let latency = Latency::of((1..=1000).rev().collect()).expect("some");
        assert_eq!(
            (latency.p50_ns, latency.p99_ns, latency.worst_ns, latency.count),
            (501, 990, 1000, 1000)
        );
        assert!(Latency::of(Vec::new()).is_none());
    }
}

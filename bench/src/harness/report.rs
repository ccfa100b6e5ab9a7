//! From the samples of a row to what `uzone bench --json` prints of it.

mod faults;

use std::cell::RefCell;
use std::rc::Rc;

pub use uzone_report::results::{
    BENCH_SCHEMA as SCHEMA, Bench, Faults, Headline, METADATA_SCHEMA, Metadata, MetadataRow, Noise,
    Published, Role, Row, Skipped, Spread, Table,
};

pub(crate) use self::faults::{FaultSpec, Found, Log};

use self::faults::{latency, pauses};
use crate::harness::group::{Samples, float, median, spread};

/// A row may pass its limit by this much, which is what the machine varies. What passes it by more has
/// no limit.
const MOST_SHARE: f64 = 1.15;

/// What is known of a row before its case runs.
#[derive(Default)]
pub(crate) struct RowSpec {
    /// As far as it is known.
    pub(crate) row: Row,
    /// Whether it does the same work as the other rivals of its suite.
    pub(crate) is_rival: bool,
    /// Where the case puts its pauses.
    pub(crate) pauses: Option<Rc<RefCell<Vec<u64>>>>,
    /// Where the case puts the times of its calls.
    pub(crate) latencies: Option<Rc<RefCell<Vec<u64>>>>,
    /// Whether the case takes page faults, and what is known of them.
    pub(crate) takes_faults: bool,
    pub(crate) faults: FaultSpec,
}

impl RowSpec {
    /// Returns the id of a row of the same table; one with a slash is of another, and is its own id.
    fn of_table(&self, row: &str) -> String {
        let (table, _) = self.row.id.split_once('/').unwrap_or_default();
        if row.contains('/') { row.to_owned() } else { format!("{table}/{row}") }
    }

    /// Sets the naive row.
    pub(crate) fn naive(&mut self, row: &str) -> &mut Self {
        self.row.naive_id = Some(self.of_table(row));
        self
    }

    /// Sets the limit.
    pub(crate) fn limit(&mut self, row: &str) -> &mut Self {
        self.row.limit_id = Some(self.of_table(row));
        self
    }

    /// Sets the line of the summary that the row stands for.
    pub(crate) fn headline(&mut self, line: impl Into<String>) -> &mut Self {
        self.row.headline = Some(line.into());
        self
    }

    /// Sets how many calls do it, and how many folios the pages are in.
    pub(crate) fn counts(&mut self, calls: Option<u64>, folios: Option<u64>) -> &mut Self {
        (self.row.calls, self.row.folios) = (calls, folios);
        self
    }

    /// `best` is the id of the fastest rival, and `written` returns how many bytes a row writes.
    pub(crate) fn row(
        self,
        samples: &Samples,
        best: Option<&str>,
        written: impl Fn(&str) -> u64,
    ) -> Row {
        let Self { row, is_rival, .. } = self;
        let times = samples.sorted(&row.id);
        let median_ns = median(&times);
        let ratio_spread =
            |other: Option<&String>| other.and_then(|other| samples.ratio_spread(other, &row.id));
        let share_of_limit = row.limit_id.as_ref().and_then(|limit| {
            let times = samples.ratio(limit, &row.id)?;
            match written(limit) {
                // Both do the same work.
                0 => Some(times),
                bytes => Some(times * float(row.bytes) / float(bytes)),
            }
        });
        // What is faster than its limit does something else: there is no limit to show.
        let share_of_limit = share_of_limit.filter(|share| *share <= MOST_SHARE);
        let limit_id = row.limit_id.clone().filter(|_| share_of_limit.is_some());
        let naive = row.naive_id.as_ref();
        let per = |count: Option<u64>| count.map(|count| float(median_ns) / float(count.max(1)));
        let faults = self.faults;
        Row {
            faults: self
                .takes_faults
                .then(|| faults.faults(&row.id, median_ns, row.threads, samples)),
            noise: Noise {
                median: spread(&times.iter().map(|time| float(*time)).collect::<Vec<_>>()),
                ratio_naive: ratio_spread(naive),
                share_of_limit: ratio_spread(limit_id.as_ref()),
            },
            median_ns,
            min_ns: times.first().copied().unwrap_or(0),
            worst_ns: times.last().copied().unwrap_or(0),
            rounds: times.len(),
            gib_per_s: float(row.bytes) / (float(median_ns.max(1)) / 1e9) / float(1 << 30),
            ns_per_page: float(median_ns) / float(row.items.max(1)),
            ns_per_call: per(row.calls),
            ns_per_folio: per(row.folios),
            ratio_naive: naive.and_then(|naive| samples.ratio(naive, &row.id)),
            ratio_best: best.filter(|_| is_rival).and_then(|best| samples.ratio(&row.id, best)),
            share_of_limit,
            limit_id,
            pauses: self.pauses.and_then(|times| pauses(times.take())),
            latency: self.latencies.and_then(|times| latency(times.take())),
            ..row
        }
    }
}

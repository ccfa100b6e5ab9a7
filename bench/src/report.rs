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
use crate::group::{Samples, float, median, spread};

/// A row may pass its limit by this much, which is what the machine varies. What passes it by more has
/// no limit.
const MOST_SHARE: f64 = 1.15;

/// What is known of a row before its case runs.
#[derive(Default)]
pub(crate) struct RowSpec {
    /// The id, which is the name of the case as well.
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) role: Option<Role>,
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
    /// Whether the case takes page faults, and what is known of them.
    pub(crate) takes_faults: bool,
    pub(crate) faults: FaultSpec,
}

impl RowSpec {
    /// Sets the naive row.
    pub(crate) fn naive(&mut self, id: impl Into<String>) -> &mut Self {
        self.naive = Some(id.into());
        self
    }

    /// Sets the limit, and how many bytes that writes; none if both do the same work.
    pub(crate) fn limit(&mut self, id: impl Into<String>, bytes: u64) -> &mut Self {
        self.limit = Some((id.into(), bytes));
        self
    }

    /// Sets the line of the summary that the row stands for.
    pub(crate) fn headline(&mut self, line: impl Into<String>) -> &mut Self {
        self.headline = Some(line.into());
        self
    }

    /// Sets how many calls do it, and how many folios the pages are in.
    pub(crate) fn counts(&mut self, calls: Option<u64>, folios: Option<u64>) -> &mut Self {
        (self.calls, self.folios) = (calls, folios);
        self
    }

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
        let faults = self
            .takes_faults
            .then(|| self.faults.faults(&self.id, median_ns, self.threads, samples));
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
            pauses: self.pauses.and_then(|times| pauses(times.take())),
            latency: self.latencies.and_then(|times| latency(times.take())),
            id: self.id,
        }
    }
}

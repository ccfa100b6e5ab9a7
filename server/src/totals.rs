//! The work of a server since its first process started: [`Totals`]. Workers count what they do for machines, and
//! keepers the rest; each hands its counts to the next one.

use std::fmt::Write as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uzone_fault::{FaultStats, Latency};

use crate::status::nanoseconds;

/// The upper bounds of the steps of [`Totals::fault_counts`], in nanoseconds; the last step has none.
const BOUNDS_NS: [u64; 12] = [
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    5_000_000,
    20_000_000,
    100_000_000,
    1_000_000_000,
    10_000_000_000,
];

/// The work that a server has done. It outlives the processes of the server, but for what a worker that was killed did in its
/// last second.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
#[non_exhaustive]
pub struct Totals {
    /// Machines that were served.
    pub sessions: u64,
    /// Connections that were refused.
    pub refused: u64,
    /// Pages that could not be produced.
    pub failed: u64,
    /// Workers that died.
    pub worker_deaths: u64,
    /// Faults that were read.
    pub faults: u64,
    /// Pages that were installed because a thread waited for them.
    pub demand_pages: u64,
    /// Pages that came along.
    pub around_pages: u64,
    /// Pages that were installed before a thread touched them.
    pub prefetched_pages: u64,
    /// Pages of those that are zero.
    pub zero_pages: u64,
    /// How often a frame of a packed image was needed that the cache had.
    pub cache_hits: u64,
    /// Frames that were read from a packed image.
    pub decoded_frames: u64,
    /// How many bytes they have, decoded.
    pub decoded_bytes: u64,
    /// How many faults took at most 10, 20, 50, 100, 200 and 500 microseconds, 1, 5, 20 and 100 milliseconds, 1 and 10
    /// seconds, or longer: each in the first step that holds it.
    pub fault_counts: Vec<u64>,
    /// How long all of them took, in nanoseconds.
    pub fault_ns: u64,
}

impl Totals {
    /// Returns what was done for one machine.
    pub(crate) fn of_machine(stats: &FaultStats, latencies: &[Latency]) -> Self {
        let mut totals = Self {
            faults: stats.faults,
            demand_pages: stats.demand,
            around_pages: stats.around,
            prefetched_pages: stats.populated,
            zero_pages: stats.zeroes,
            fault_counts: vec![0; BOUNDS_NS.len() + 1],
            ..Self::default()
        };
        for (time, count) in latencies.iter().flat_map(|latency| &latency.buckets) {
            let time = nanoseconds(*time);
            totals.fault_counts[BOUNDS_NS.partition_point(|bound| *bound < time)] += count;
            totals.fault_ns = totals.fault_ns.saturating_add(time.saturating_mul(*count));
        }
        totals
    }

    /// Adds what was done elsewhere, or before.
    pub(crate) fn add(&mut self, other: &Self) {
        self.sessions += other.sessions;
        self.refused += other.refused;
        self.failed += other.failed;
        self.worker_deaths += other.worker_deaths;
        self.faults += other.faults;
        self.demand_pages += other.demand_pages;
        self.around_pages += other.around_pages;
        self.prefetched_pages += other.prefetched_pages;
        self.zero_pages += other.zero_pages;
        self.cache_hits += other.cache_hits;
        self.decoded_frames += other.decoded_frames;
        self.decoded_bytes += other.decoded_bytes;
        self.fault_ns = self.fault_ns.saturating_add(other.fault_ns);
        let len = self.fault_counts.len().max(other.fault_counts.len());
        self.fault_counts.resize(len, 0);
        for (count, more) in self.fault_counts.iter_mut().zip(&other.fault_counts) {
            *count += more;
        }
    }

    /// Adds them in the text format of Prometheus.
    pub(crate) fn add_metrics(&self, text: &mut String) {
        let all: [(&str, &str, u64); 10] = [
            ("refused", "Connections that were refused.", self.refused),
            ("failed_pages", "Pages that could not be produced.", self.failed),
            ("faults", "Faults that were read.", self.faults),
            ("demand_pages", "Pages for waiting threads.", self.demand_pages),
            ("around_pages", "Pages that came along.", self.around_pages),
            ("prefetched_pages", "Pages ahead of a touch.", self.prefetched_pages),
            ("zero_pages", "Zero pages.", self.zero_pages),
            ("cache_hits", "Frames that were in the cache.", self.cache_hits),
            ("decoded_frames", "Frames that were read.", self.decoded_frames),
            ("decoded_bytes", "Bytes of them, decoded.", self.decoded_bytes),
        ];
        for (name, help, value) in all {
            // Memory takes it all.
            let _ = writeln!(
                text,
                "# HELP uzone_{name}_total {help}\n# TYPE uzone_{name}_total counter\nuzone_{name}_total {value}"
            );
        }
        let name = "uzone_fault_seconds";
        let _ = writeln!(text, "# HELP {name} How long faults took.\n# TYPE {name} histogram");
        let mut count = 0;
        for (at, bound) in BOUNDS_NS.iter().enumerate() {
            count += self.fault_counts.get(at).unwrap_or(&0);
            let bound = Duration::from_nanos(*bound).as_secs_f64();
            let _ = writeln!(text, "{name}_bucket{{le=\"{bound}\"}} {count}");
        }
        count += self.fault_counts.get(BOUNDS_NS.len()).unwrap_or(&0);
        let sum = Duration::from_nanos(self.fault_ns).as_secs_f64();
        let _ = writeln!(
            text,
            "{name}_bucket{{le=\"+Inf\"}} {count}\n{name}_sum {sum}\n{name}_count {count}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_added_and_a_histogram_counts_each_fault_up_to_its_bound() {
        let mut stats = FaultStats::default();
        (stats.faults, stats.demand) = (3, 2);
        let mut one = Totals::of_machine(&stats, &[]);
        one.fault_counts[0] = 2;
        one.fault_counts[12] = 1;
        one.fault_ns = 1_500_000_000;
        let mut all = Totals { sessions: 1, ..Totals::default() };
        all.add(&one);
        all.add(&one);
        assert_eq!((all.sessions, all.faults, all.demand_pages), (1, 6, 4));
        let mut text = String::new();
        all.add_metrics(&mut text);
        for line in [
            "uzone_faults_total 6",
            "uzone_fault_seconds_bucket{le=\"0.00001\"} 4",
            "uzone_fault_seconds_bucket{le=\"10\"} 4",
            "uzone_fault_seconds_bucket{le=\"+Inf\"} 6",
            "uzone_fault_seconds_sum 3",
            "uzone_fault_seconds_count 6",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}: {text}");
        }
    }
}

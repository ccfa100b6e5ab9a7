//! The work of a server in numbers: [`Totals`], and the text format of Prometheus.

use std::fmt::Write as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uzone_fault::{FaultStats, Latency};

use crate::status::{SessionStats, Status, nanoseconds};

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

/// The work of a server. The totals outlive the processes of the server, but for the last second of a worker that was
/// killed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Totals {
    /// VMs that were served.
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
    /// Zero pages among them.
    pub zero_pages: u64,
    /// Frames of a packed image that were needed and in the cache.
    pub cache_hits: u64,
    /// Frames that were read from a packed image.
    pub decoded_frames: u64,
    /// The bytes of those frames, decoded.
    pub decoded_bytes: u64,
    /// Faults that took at most 10, 20, 50, 100, 200 and 500 microseconds, 1, 5, 20 and 100 milliseconds, 1 and 10
    /// seconds, or longer: each is counted in the first step that holds it.
    pub fault_counts: Vec<u64>,
    /// The time that all of them took, in nanoseconds.
    pub fault_ns: u64,
}

impl Totals {
    /// Returns the totals of one VM.
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

    /// Adds the totals of another worker, or of an earlier time.
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
        let _ = writeln!(text, "# HELP {name} The time of a fault.\n# TYPE {name} histogram");
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

impl Status {
    /// Returns it in the text format of Prometheus.
    #[must_use]
    pub fn metrics(&self) -> String {
        let mut text = String::new();
        let sessions = self.sessions.len() as u64;
        let all: [(&str, &str, u64); 6] = [
            ("uzone_sessions", "VMs that are served.", sessions),
            ("uzone_sessions_total", "VMs that were served.", self.totals.sessions),
            ("uzone_greetings", "Connections without a whole message.", self.greetings as u64),
            ("uzone_draining", "Whether no VM is accepted.", self.is_draining.into()),
            ("uzone_worker_up", "Whether there is a worker.", self.worker.is_some().into()),
            ("uzone_worker_deaths_total", "Workers that died.", self.totals.worker_deaths),
        ];
        for (name, help, value) in all {
            let kind = kind(name);
            // Memory takes it all.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        }
        self.totals.add_metrics(&mut text);
        self.add_metrics_of_sessions(&mut text);
        text
    }

    fn add_metrics_of_sessions(&self, text: &mut String) {
        type Get = fn(&SessionStats) -> u64;
        let each: [(&str, &str, Get); 12] = [
            ("faults_total", "Faults that were read.", |stats| stats.faults),
            ("demand_pages_total", "Pages for waiting threads.", |stats| stats.demand_pages),
            ("around_pages_total", "Pages that came along.", |stats| stats.around_pages),
            ("prefetched_pages_total", "Pages ahead of a touch.", |stats| stats.prefetched_pages),
            ("zero_pages_total", "Zero pages.", |stats| stats.zero_pages),
            ("bad_pages_total", "Pages that are bad.", |stats| stats.bad_pages),
            ("huge_pages_total", "Huge pages that were made.", |stats| stats.huge_pages),
            ("not_huge_total", "Filled blocks that were not.", |stats| stats.not_huge),
            ("held_total", "Times that its budget was used up.", |stats| stats.held),
            ("shares_cpu", "Whether faults are answered on its CPU.", |stats| {
                stats.shares_cpu.into()
            }),
            ("pending_pages", "Pages that are being produced.", |stats| stats.pending_pages),
            ("oldest_pending_ns", "Age of the oldest of them.", |stats| stats.oldest_pending_ns),
        ];
        for (name, help, get) in each {
            let kind = kind(name);
            let _ = writeln!(
                text,
                "# HELP uzone_session_{name} {help}\n# TYPE uzone_session_{name} {kind}"
            );
            for one in &self.sessions {
                let Some(stats) = &one.stats else { continue };
                let (session, pid, value) = (one.session, one.pid, get(stats));
                let _ = writeln!(
                    text,
                    "uzone_session_{name}{{session=\"{session}\",pid=\"{pid}\"}} {value}"
                );
            }
        }
    }
}

/// Returns the type of a metric by its name: a counter ends in `_total`.
fn kind(name: &str) -> &'static str {
    if name.ends_with("_total") { "counter" } else { "gauge" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Sandbox;
    use crate::status::SessionStatus;

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

    #[test]
    fn metrics_have_a_type_and_a_line_for_each_machine() {
        let stats = SessionStats { faults: 7, ..SessionStats::default() };
        let session = |session, stats| SessionStatus {
            session,
            pid: 9,
            uid: 0,
            can_be_killed: true,
            can_be_read: true,
            len_bytes: 4096,
            page_bytes: 4096,
            connected_ns: 1,
            stats,
        };
        let status = Status {
            socket: "/run/s".into(),
            image: "/run/image".into(),
            keeper: 1,
            identity: "root".into(),
            store: None,
            worker: Some(2),
            sandbox: Sandbox::default(),
            worker_deaths: 3,
            is_draining: false,
            sessions_served: 5,
            greetings: 0,
            totals: Totals { worker_deaths: 3, ..Totals::default() },
            sessions: vec![session(4, Some(stats)), session(5, None)],
        };
        let text = status.metrics();
        assert!(
            text.contains(
                "# TYPE uzone_worker_deaths_total counter\nuzone_worker_deaths_total 3\n"
            )
        );
        assert!(text.contains("uzone_session_faults_total{session=\"4\",pid=\"9\"} 7\n"));
        assert!(!text.contains("session=\"5\""));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert!(line.rsplit_once(' ').unwrap().1.parse::<f64>().is_ok(), "{line}");
        }
    }
}

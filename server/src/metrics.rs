//! The work of a server in numbers: [`Totals`], and the text format of Prometheus.

use std::fmt::{self, Write as _};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uzone_fault::{FaultStats, Latency};

use crate::event::FailedKind;
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
    /// Pages that could not be produced, by kind.
    pub failed: FailedPages,
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
    /// The bytes of the image in the other pages.
    pub image_bytes: u64,
    /// Frames of a packed image that were needed and in the cache.
    pub cache_hits: u64,
    /// Frames that were read from a packed image.
    pub decoded_frames: u64,
    /// The bytes of those frames, decoded.
    pub decoded_bytes: u64,
    /// The bytes that were read for them, as they are stored; bytes that the folder of the cache had are none.
    pub stored_bytes: u64,
    /// Faults that took at most 10, 20, 50, 100, 200 and 500 microseconds, 1, 5, 20 and 100 milliseconds, 1 and 10
    /// seconds, or longer: each is counted in the first step that holds it.
    pub fault_counts: Vec<u64>,
    /// The time that all of them took, in nanoseconds.
    pub fault_ns: u64,
}

/// The pages that could not be produced: each is counted once, by its [`FailedKind`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct FailedPages {
    /// Pages of a damaged or cut image.
    pub damaged: u64,
    /// Pages that a device or the network answered for with an error.
    pub io: u64,
    /// Pages that took too long.
    pub late: u64,
    /// Pages of any other kind.
    pub other: u64,
}

impl FailedPages {
    /// Returns the count of a kind.
    pub(crate) fn of(&mut self, kind: FailedKind) -> &mut u64 {
        match kind {
            FailedKind::Damaged => &mut self.damaged,
            FailedKind::Io => &mut self.io,
            FailedKind::Late => &mut self.late,
            FailedKind::Other => &mut self.other,
        }
    }
}

/// A count of all VMs: its name, its help, and its field. Counts of one name differ in a label, and follow each other.
type Count = (&'static str, &'static str, fn(&mut Totals) -> &mut u64);

const COUNTS: [Count; 17] = [
    ("sessions", "VMs that were served.", |all| &mut all.sessions),
    ("worker_deaths", "Workers that died.", |all| &mut all.worker_deaths),
    ("refused", "Connections that were refused.", |all| &mut all.refused),
    ("failed_pages{kind=\"damaged\"}", FAILED, |all| &mut all.failed.damaged),
    ("failed_pages{kind=\"io\"}", FAILED, |all| &mut all.failed.io),
    ("failed_pages{kind=\"late\"}", FAILED, |all| &mut all.failed.late),
    ("failed_pages{kind=\"other\"}", FAILED, |all| &mut all.failed.other),
    ("faults", "Faults that were read.", |all| &mut all.faults),
    ("demand_pages", "Pages for waiting threads.", |all| &mut all.demand_pages),
    ("around_pages", "Pages that came along.", |all| &mut all.around_pages),
    ("prefetched_pages", "Pages ahead of a touch.", |all| &mut all.prefetched_pages),
    ("zero_pages", "Zero pages.", |all| &mut all.zero_pages),
    ("image_bytes", "Bytes of the image in these pages.", |all| &mut all.image_bytes),
    ("cache_hits", "Frames that were in the cache.", |all| &mut all.cache_hits),
    ("decoded_frames", "Frames that were read.", |all| &mut all.decoded_frames),
    ("decoded_bytes", "Bytes of them, decoded.", |all| &mut all.decoded_bytes),
    ("stored_bytes", "Bytes that were read for them, as stored.", |all| &mut all.stored_bytes),
];
const FAILED: &str = "Pages that could not be produced.";

impl Totals {
    /// Returns the totals of one VM, whose pages have so many bytes.
    pub(crate) fn of_machine(stats: &FaultStats, page_bytes: u64, latencies: &[Latency]) -> Self {
        let pages = stats.demand + stats.around + stats.populated;
        let mut totals = Self {
            faults: stats.faults,
            demand_pages: stats.demand,
            around_pages: stats.around,
            prefetched_pages: stats.populated,
            zero_pages: stats.zeroes,
            image_bytes: pages.saturating_sub(stats.zeroes).saturating_mul(page_bytes),
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
    pub(crate) fn add(&mut self, mut other: Self) {
        for (_, _, field) in COUNTS {
            *field(self) += *field(&mut other);
        }
        self.fault_ns = self.fault_ns.saturating_add(other.fault_ns);
        let len = self.fault_counts.len().max(other.fault_counts.len());
        self.fault_counts.resize(len, 0);
        for (count, more) in self.fault_counts.iter_mut().zip(&other.fault_counts) {
            *count += more;
        }
    }

    /// Adds them in the text format of Prometheus.
    fn add_metrics(mut self, text: &mut String) {
        let mut last = "";
        for (name, help, field) in COUNTS {
            let (name, labels) = name.split_at(name.find('{').unwrap_or(name.len()));
            if name != std::mem::replace(&mut last, name) {
                add_head(text, &format!("uzone_{name}_total"), help);
            }
            add_line(text, format_args!("uzone_{name}_total{labels} {}", field(&mut self)));
        }
        let name = "uzone_fault_seconds";
        add_line(text, format_args!("# HELP {name} The time of a fault.\n# TYPE {name} histogram"));
        let bounds = BOUNDS_NS.map(|bound| Duration::from_nanos(bound).as_secs_f64().to_string());
        let mut count = 0;
        for (at, bound) in bounds.iter().map(String::as_str).chain(["+Inf"]).enumerate() {
            count += self.fault_counts.get(at).unwrap_or(&0);
            add_line(text, format_args!("{name}_bucket{{le=\"{bound}\"}} {count}"));
        }
        let sum = Duration::from_nanos(self.fault_ns).as_secs_f64();
        add_line(text, format_args!("{name}_sum {sum}\n{name}_count {count}"));
    }
}

fn add_line(text: &mut String, line: fmt::Arguments<'_>) {
    // Memory takes it all.
    let _ = writeln!(text, "{line}");
}

/// Adds the description of a metric. A counter has a name that ends in `_total`.
fn add_head(text: &mut String, name: &str, help: &str) {
    let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
    add_line(text, format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
}

impl Status {
    /// Returns it in the text format of Prometheus. No metric has a label for a VM.
    #[must_use]
    pub fn metrics(&self) -> String {
        let stats = || self.sessions.iter().filter_map(|session| session.stats);
        let sum = |get: fn(SessionStats) -> u64| stats().map(get).sum();
        let oldest = stats().map(|one| one.oldest_pending_ns).max().unwrap_or(0);
        let mut text = String::new();
        for (name, help, value) in [
            ("sessions", "VMs that are served.", self.sessions.len() as u64),
            ("greetings", "Connections without a whole message.", self.greetings as u64),
            ("draining", "Whether no VM is accepted.", self.is_draining.into()),
            ("worker_up", "Whether there is a worker.", self.worker.is_some().into()),
            ("pending_pages", "Pages that are being produced.", sum(|one| one.pending_pages)),
            ("oldest_pending_ns", "Age of the oldest of them.", oldest),
            ("held", "Times that a budget of these VMs was used up.", sum(|one| one.held)),
            ("huge_pages", "Huge pages made for these VMs.", sum(|one| one.huge_pages)),
            ("not_huge", "Filled blocks of theirs that were not.", sum(|one| one.not_huge)),
        ] {
            let name = format!("uzone_{name}");
            add_head(&mut text, &name, help);
            add_line(&mut text, format_args!("{name} {value}"));
        }
        self.totals.clone().add_metrics(&mut text);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Sandbox;
    use crate::status::SessionStatus;

    #[test]
    fn counts_are_added_and_a_histogram_counts_each_fault_up_to_its_bound() {
        let mut stats = FaultStats::default();
        (stats.faults, stats.demand, stats.around, stats.zeroes) = (3, 2, 4, 1);
        let mut one = Totals::of_machine(&stats, 4096, &[]);
        one.fault_counts[0] = 2;
        one.fault_counts[12] = 1;
        one.fault_ns = 1_500_000_000;
        let mut all = Totals { sessions: 1, ..Totals::default() };
        for kind in [FailedKind::Damaged, FailedKind::Late, FailedKind::Late] {
            *all.failed.of(kind) += 1;
        }
        all.add(one.clone());
        all.add(one);
        assert_eq!((all.sessions, all.faults, all.demand_pages), (1, 6, 4));
        assert_eq!(all.image_bytes, 2 * 5 * 4096, "a zero page has none");
        let mut text = String::new();
        all.add_metrics(&mut text);
        for line in [
            "uzone_sessions_total 1",
            "uzone_faults_total 6",
            "uzone_image_bytes_total 40960",
            "uzone_failed_pages_total{kind=\"damaged\"} 1",
            "uzone_failed_pages_total{kind=\"io\"} 0",
            "uzone_failed_pages_total{kind=\"late\"} 2",
            "uzone_fault_seconds_bucket{le=\"0.00001\"} 4",
            "uzone_fault_seconds_bucket{le=\"10\"} 4",
            "uzone_fault_seconds_bucket{le=\"+Inf\"} 6",
            "uzone_fault_seconds_sum 3",
            "uzone_fault_seconds_count 6",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}: {text}");
        }
        assert_eq!(text.matches("# TYPE uzone_failed_pages_total counter\n").count(), 1);
    }

    #[test]
    fn metrics_have_a_type_and_count_each_once_without_a_line_for_a_machine() {
        let stats = SessionStats { pending_pages: 7, held: 1, ..SessionStats::default() };
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
            sessions: vec![session(4, Some(stats)), session(5, None), session(6, Some(stats))],
        };
        let text = status.metrics();
        let deaths = "# TYPE uzone_worker_deaths_total counter\nuzone_worker_deaths_total 3\n";
        assert!(text.contains(deaths) && text.contains("\nuzone_pending_pages 14\n"), "{text}");
        let mut names = std::collections::HashSet::new();
        for (name, value) in text.lines().filter_map(|line| line.rsplit_once(' ')) {
            if !name.starts_with('#') {
                assert!(value.parse::<f64>().is_ok() && names.insert(name), "{name} {value}");
                assert!(!name.contains("session=") && !name.contains("pid="), "{name}");
            }
        }
    }
}

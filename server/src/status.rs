//! What a server is doing: [`Status`], as `uzone status` prints it and as metrics for Prometheus.

use std::fmt::Write as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::sandbox::Sandbox;
use crate::totals::Totals;

/// What a server is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Status {
    /// Where monitors connect.
    pub socket: String,
    /// The image: the path of its file, or its URL.
    pub image: String,
    /// The process of the keeper.
    pub keeper: u32,
    /// Whether the keeper was the worker of one that died: it has the rights of a worker. A server that takes
    /// over from it has all again.
    #[serde(default)]
    pub is_confined: bool,
    /// The process of the worker, if there is one.
    pub worker: Option<u32>,
    /// How the latest worker is confined.
    pub sandbox: Sandbox,
    /// How many workers died.
    pub worker_deaths: u64,
    /// Whether no machine is accepted any more.
    pub is_draining: bool,
    /// How many machines were served so far.
    pub sessions_served: u64,
    /// How many connections have sent no whole message yet.
    pub greetings: usize,
    /// The totals for all machines, with those of processes of this server that have ended.
    #[serde(default)]
    pub totals: Totals,
    /// The machines.
    pub sessions: Vec<SessionStatus>,
}

/// What is known of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct SessionStatus {
    /// Its number.
    pub session: u64,
    /// The process of its monitor.
    pub pid: u32,
    /// The user of that process.
    pub uid: u32,
    /// Whether the server may kill it.
    pub can_be_killed: bool,
    /// Whether the server may read its memory, which a diff and recovering take.
    pub can_be_read: bool,
    /// How many bytes of memory it has.
    pub len_bytes: u64,
    /// How many bytes its smallest pages have.
    pub page_bytes: u64,
    /// For how long it has been connected, in nanoseconds.
    pub connected_ns: u64,
    /// What its worker has done for it; nothing while there is none.
    pub stats: Option<SessionStats>,
}

/// What a worker has done for a machine, since it took it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct SessionStats {
    /// Faults that were read.
    pub faults: u64,
    /// Pages that were installed because a thread waited for them.
    pub demand_pages: u64,
    /// Pages that came along.
    pub around_pages: u64,
    /// Pages that were installed before a thread touched them.
    pub prefetched_pages: u64,
    /// Pages of those that are zero, and take no memory until they are written.
    pub zero_pages: u64,
    /// Pages that could not be produced, and are bad.
    pub bad_pages: u64,
    /// Blocks of 2 MiB that the keeper had made huge pages, since it has the machine
    /// ([`ServerOptions::huge`](crate::ServerOptions::huge)).
    #[serde(default)]
    pub huge_pages: u64,
    /// Blocks that are filled, and that the kernel made no huge pages.
    #[serde(default)]
    pub not_huge: u64,
    /// How often its budget was used up ([`ServerOptions::budget`](crate::ServerOptions::budget)).
    pub held: u64,
    /// Whether faults are answered on the one CPU that the monitor is kept to.
    #[serde(default)]
    pub shares_cpu: bool,
    /// Pages that are being produced now.
    pub pending_pages: u64,
    /// For how long the oldest of them has been, in nanoseconds.
    pub oldest_pending_ns: u64,
}

impl Status {
    /// Returns it in the text format of Prometheus.
    #[must_use]
    pub fn metrics(&self) -> String {
        let mut text = String::new();
        let sessions = self.sessions.len() as u64;
        let all: [(&str, &str, u64); 6] = [
            ("uzone_sessions", "Machines that are served.", sessions),
            ("uzone_sessions_total", "Machines that were served.", self.totals.sessions),
            ("uzone_greetings", "Connections without a whole message.", self.greetings as u64),
            ("uzone_draining", "Whether no machine is accepted.", self.is_draining.into()),
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
            ("held_total", "How often its budget was used up.", |stats| stats.held),
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

/// Returns the type of a metric, by its name: those that only grow end in `_total`.
fn kind(name: &str) -> &'static str {
    if name.ends_with("_total") { "counter" } else { "gauge" }
}

/// Returns a time as a number of nanoseconds.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

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
            is_confined: false,
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

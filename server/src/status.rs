//! The state of a server: [`Status`], as `uzone status` prints it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::metrics::Totals;
use crate::sandbox::Sandbox;

/// The state of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Status {
    /// Where monitors connect.
    pub socket: String,
    /// The image: the path of its file, or its URL.
    pub image: String,
    /// The identity of the image: its root hash, or file id and mtime.
    pub identity: String,
    /// The place of the records that outlive both processes: a folder, or `systemd`.
    pub store: Option<String>,
    /// The process of the keeper.
    pub keeper: u32,
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
    pub totals: Totals,
    /// The machines.
    pub sessions: Vec<SessionStatus>,
}

/// The state of a VM.
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

/// The work of a worker for a VM, since it took the VM.
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
    pub huge_pages: u64,
    /// Blocks that are filled, and that the kernel made no huge pages.
    pub not_huge: u64,
    /// How often its budget was used up ([`ServerOptions::budget`](crate::ServerOptions::budget)).
    pub held: u64,
    /// Whether faults are answered on the one CPU that the monitor is kept to.
    pub shares_cpu: bool,
    /// Pages that are being produced now.
    pub pending_pages: u64,
    /// For how long the oldest of them has been, in nanoseconds.
    pub oldest_pending_ns: u64,
}

/// Returns a time as a number of nanoseconds.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

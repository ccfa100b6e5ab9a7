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
    /// The socket that monitors connect to.
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
    /// The restrictions of the latest worker.
    pub sandbox: Sandbox,
    /// Workers that died.
    pub worker_deaths: u64,
    /// Whether the server accepts no further VM.
    pub is_draining: bool,
    /// VMs that were served so far.
    pub sessions_served: u64,
    /// Connections without a whole message.
    pub greetings: usize,
    /// The totals of all VMs, with the totals of processes of this server that have ended.
    pub totals: Totals,
    /// The VMs.
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
    /// The bytes of its memory.
    pub len_bytes: u64,
    /// The bytes of a page of it.
    pub page_bytes: u64,
    /// The time since it connected, in nanoseconds.
    pub connected_ns: u64,
    /// The work of its worker; `None` while there is none.
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
    /// Zero pages among them, which take no memory until they are written.
    pub zero_pages: u64,
    /// Pages that could not be produced, and are bad.
    pub bad_pages: u64,
    /// Blocks of 2 MiB that were made huge pages, since the keeper has the VM
    /// ([`ServerOptions::huge`](crate::ServerOptions::huge)).
    pub huge_pages: u64,
    /// Filled blocks that the kernel made no huge pages of.
    pub not_huge: u64,
    /// The number of times that its budget was used up ([`ServerOptions::budget`](crate::ServerOptions::budget)).
    pub held: u64,
    /// Whether faults are answered on the one CPU of the monitor.
    pub shares_cpu: bool,
    /// Pages that are being produced.
    pub pending_pages: u64,
    /// The time for which the oldest of them has been, in nanoseconds.
    pub oldest_pending_ns: u64,
}

/// Returns a time as a number of nanoseconds.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

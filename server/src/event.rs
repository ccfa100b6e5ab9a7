//! The events of a server: [`ServeEvent`], for a log.

use serde::{Deserialize, Serialize};

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum ServeEvent {
    /// A machine is served from now on.
    Connected {
        /// Its number, from 1 on: that of its connection.
        session: u64,
        /// The process of its monitor.
        pid: u32,
        /// The user of that process.
        uid: u32,
        /// Whether the server may kill it.
        can_be_killed: bool,
        /// Whether the server may read its memory, which a diff and recovering take.
        can_be_read: bool,
        /// How many regions of memory it has.
        regions: usize,
        /// How many bytes those are.
        len_bytes: u64,
        /// How many bytes its smallest pages have.
        page_bytes: u64,
    },
    /// A connection was closed that no machine came of.
    Refused {
        /// The number of the connection.
        session: u64,
        /// The process that connected; 0 if it is of a PID namespace that the server cannot see into.
        pid: u32,
        /// Why.
        reason: String,
        /// Whether the process was killed: its memory was handed over, and its faults would wait for ever.
        was_killed: bool,
    },
    /// A page cannot be produced, or no worker can be started.
    Failed {
        /// Which session.
        session: u64,
        /// The process of its monitor.
        pid: u32,
        /// Where the page is in the image, in bytes.
        offset: u64,
        /// Why.
        reason: String,
        /// Whether the process was killed for it.
        was_killed: bool,
    },
    /// The worker ended; machines that lack a page wait until the next one has taken over.
    WorkerEnded {
        /// How it ended.
        status: String,
        /// How many machines it served.
        sessions: usize,
    },
    /// Another worker serves a machine from now on.
    TakenOver {
        /// Which session.
        session: u64,
        /// The process of its monitor.
        pid: u32,
        /// For how long it was not served, in nanoseconds.
        after_ns: u64,
    },
    /// The next server serves all VMs from now on.
    HandedOver {
        /// How many there are.
        sessions: usize,
    },
    /// Blocks of a machine's memory are no huge pages, which [`ServerOptions::huge`](crate::ServerOptions::huge)
    /// asks for: once for each session.
    NotHuge {
        /// Which session.
        session: u64,
        /// The process of its monitor.
        pid: u32,
        /// Why the first of them is not.
        reason: String,
    },
    /// A monitor ended.
    Ended {
        /// Which session.
        session: u64,
        /// The process of its monitor.
        pid: u32,
        /// For how long the last worker served it, in nanoseconds.
        served_ns: u64,
        /// How many faults the last worker answered.
        faults: u64,
        /// How many pages were put in place for them.
        demand_pages: u64,
        /// How many came along.
        around_pages: u64,
    },
}

//! The events of a server: [`ServeEvent`], for a log.

use serde::{Deserialize, Serialize};

/// The kind of the failure of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FailedKind {
    /// The image is damaged or cut.
    Damaged,
    /// A device or the network answered with an error.
    Io,
    /// Its time is over.
    Late,
    /// Any other kind.
    Other,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum ServeEvent {
    /// A VM is served.
    Connected {
        /// Its number, which is the number of its connection, from 1 on.
        session: u64,
        /// The process of its monitor.
        pid: u32,
        /// The user of that process.
        uid: u32,
        /// Whether the server may kill it.
        can_be_killed: bool,
        /// Whether the server may read its memory, which a diff and recovering take.
        can_be_read: bool,
        /// The number of its memory regions.
        regions: usize,
        /// The bytes of those regions.
        len_bytes: u64,
        /// The bytes of a page of it.
        page_bytes: u64,
    },
    /// A connection was closed, and is no VM.
    Refused {
        /// The number of the connection.
        session: u64,
        /// The process that connected; 0 if it is of a PID namespace that the server cannot see into.
        pid: u32,
        /// The reason.
        reason: String,
        /// Whether the process was killed: its memory was handed over, and its faults would wait for ever. If it cannot be
        /// killed, its pages raise SIGBUS, and the reason ends with that.
        was_killed: bool,
    },
    /// A page cannot be produced, or no worker can be started.
    Failed {
        /// The number of the session.
        session: u64,
        /// The process of its monitor.
        pid: u32,
        /// The offset of the page in the image, in bytes.
        offset: u64,
        /// The kind of the failure.
        kind: FailedKind,
        /// The reason.
        reason: String,
        /// Whether the process was killed for it.
        was_killed: bool,
    },
    /// The worker ended; VMs that lack a page wait until the next one has taken over.
    WorkerEnded {
        /// The exit status, or the signal.
        status: String,
        /// The number of VMs that it served.
        sessions: usize,
    },
    /// Another worker serves a VM.
    TakenOver {
        /// The number of the session.
        session: u64,
        /// The process of its monitor.
        pid: u32,
        /// The time without a worker, in nanoseconds.
        after_ns: u64,
    },
    /// The next server serves all VMs.
    HandedOver {
        /// The number of VMs.
        sessions: usize,
    },
    /// Blocks of a VM's memory are no huge pages, which [`ServerOptions::huge`](crate::ServerOptions::huge) asks for:
    /// once a session.
    NotHuge {
        /// The number of the session.
        session: u64,
        /// The process of its monitor.
        pid: u32,
        /// The reason for the first such block.
        reason: String,
    },
    /// A monitor ended.
    Ended {
        /// The number of the session.
        session: u64,
        /// The process of its monitor.
        pid: u32,
        /// The time for which the last worker served it, in nanoseconds.
        served_ns: u64,
        /// Faults that the last worker answered.
        faults: u64,
        /// Pages that were installed for those faults.
        demand_pages: u64,
        /// Pages that were installed along with them.
        around_pages: u64,
    },
}

//! One virtual machine: [`Session`], its memory, and what becomes of it if a page cannot be produced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use uzone_fault::{
    AdoptedMemory, Backing, Engine, FaultStats, LazyOptions, PageSize, Refusal, Remote,
    RemoteRegion,
};
use uzone_os::peer::Peer;

/// What becomes of a machine that touches a page which cannot be produced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnFailure {
    /// Its monitor is killed. No other choice is safe for a machine: where the monitor or the kernel
    /// emulates an access, a bad page reads as zero.
    #[default]
    Kill,
    /// The page is bad: an access that is not emulated raises `SIGBUS` in the monitor.
    Poison,
    /// The machine waits until it is ended.
    Hold,
}

/// What happened to a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum SessionEvent {
    /// A machine is served from now on.
    Connected {
        /// Its number in this server.
        session: u64,
        /// The process of its monitor.
        pid: u32,
        /// The user of that.
        uid: u32,
        /// How many regions of memory it has.
        regions: usize,
        /// How many bytes those are.
        len_bytes: u64,
        /// How many bytes a page of it has.
        page_bytes: u64,
    },
    /// A connection was closed that no machine came of.
    Refused {
        /// The process that connected, if that is known.
        pid: Option<u32>,
        /// Why.
        reason: String,
        /// Whether the process was killed: its memory was handed over, and its faults would wait for ever.
        was_killed: bool,
    },
    /// A page cannot be produced.
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
    /// A monitor ended.
    Ended {
        /// Which session.
        session: u64,
        /// The process of its monitor.
        pid: u32,
        /// For how long it was served, in nanoseconds.
        served_ns: u64,
        /// How many faults it took.
        faults: u64,
        /// How many pages were put in place for them.
        demand_pages: u64,
        /// How many came along.
        around_pages: u64,
    },
}

/// Takes events: by any thread, also by those that answer faults.
pub(crate) type Log = Arc<dyn Fn(&SessionEvent) + Send + Sync>;

/// What a session is made of.
pub(crate) struct SessionParts<'a> {
    pub(crate) number: u64,
    pub(crate) peer: Arc<Peer>,
    pub(crate) remote: Remote,
    pub(crate) regions: Vec<RemoteRegion>,
    pub(crate) page: PageSize,
    pub(crate) backing: Arc<dyn Backing>,
    pub(crate) engine: &'a Engine,
    pub(crate) on_failure: OnFailure,
    pub(crate) deadline: Duration,
    pub(crate) log: Log,
}

/// A machine that is served.
pub(crate) struct Session {
    number: u64,
    peer: Arc<Peer>,
    memory: AdoptedMemory,
    /// Another descriptor of the same, to learn whether the memory is gone.
    remote: Remote,
    since: Instant,
}

impl Session {
    /// Serves a machine from now on.
    pub(crate) fn start(parts: SessionParts<'_>) -> Result<Self, String> {
        let SessionParts { number, peer, remote, regions, page, backing, .. } = parts;
        let watched = remote.try_clone().map_err(|error| error.to_string())?;
        let connected = SessionEvent::Connected {
            session: number,
            pid: peer.pid(),
            uid: peer.uid(),
            regions: regions.len(),
            len_bytes: regions.iter().map(|region| region.len.get()).fold(0, u64::saturating_add),
            page_bytes: page.bytes(),
        };
        let options = LazyOptions::default().deadline(parts.deadline);
        let options = on_failure(options, number, peer.clone(), parts.on_failure, &parts.log);
        let memory = parts.engine.adopt(remote, regions, page, backing, &options);
        let memory = memory.map_err(|error| error.to_string())?;
        (parts.log)(&connected);
        Ok(Self { number, peer, memory, remote: watched, since: Instant::now() })
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Returns whether its memory is gone: the process that connected may have ended before the one whose
    /// memory it is.
    pub(crate) fn is_gone(&self) -> bool {
        self.remote.is_gone()
    }

    /// Returns what happened, for the log.
    pub(crate) fn ended(&self) -> SessionEvent {
        let FaultStats { faults, demand, around, .. } = self.memory.stats();
        SessionEvent::Ended {
            session: self.number,
            pid: self.peer.pid(),
            served_ns: u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX),
            faults,
            demand_pages: demand,
            around_pages: around,
        }
    }
}

/// Sets what becomes of a machine whose page fails.
fn on_failure(
    options: LazyOptions,
    session: u64,
    peer: Arc<Peer>,
    policy: OnFailure,
    log: &Log,
) -> LazyOptions {
    let log = log.clone();
    let is_killed = AtomicBool::new(false);
    options.on_failure(move |failure| {
        // Relaxed: it only keeps a second signal and a second line away.
        let is_first = !is_killed.swap(policy == OnFailure::Kill, Ordering::Relaxed);
        if is_first {
            // A refusal means that the process has ended.
            let was_killed = policy == OnFailure::Kill && peer.kill().is_ok();
            let (pid, offset, reason) = (peer.pid(), failure.offset, failure.reason.clone());
            log(&SessionEvent::Failed { session, pid, offset, reason, was_killed });
        }
        match policy {
            OnFailure::Kill | OnFailure::Hold => Refusal::Hold,
            OnFailure::Poison => Refusal::Poison,
        }
    })
}

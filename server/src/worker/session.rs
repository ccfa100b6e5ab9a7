//! One virtual machine: [`Session`], its memory, and its end if a page cannot be produced.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::message_socket::MessageSocket;
use crate::process;
use uzone_attach::protocol::Reply;
use uzone_fault::{
    AdoptedMemory, Backing, FaultStats, KeptPages, LazyError, LazyOptions, Refusal, WriteTracking,
};
use uzone_os::peer::Peer;
use uzone_os::uffd::{EventLog, Remote};
use uzone_pages::{Advice, ErrorKind};

use super::Worker;
use super::protocol::{self, Memory};
use crate::event::{FailedKind, ServeEvent};
use crate::machine::Machine;
use crate::messages::{self, CaptureReply, Report};
use crate::metrics::Totals;
use crate::options::OnFailure;
use crate::status::{SessionStats, nanoseconds};

/// The most faults that are recorded between two looks at them, of 48 bytes each.
const TRACED: usize = 1 << 18;

/// Takes events, also by threads that answer faults. Returns whether another process has them.
pub(crate) type Log = Arc<dyn Fn(ServeEvent) -> bool + Send + Sync>;

/// A VM that is served.
pub(crate) struct Session {
    number: u64,
    pub(crate) memory: AdoptedMemory,
    machine: Machine,
    /// Another descriptor of the same, to learn whether the memory is gone.
    remote: Remote,
    is_shared: bool,
    since: Instant,
    /// The number of pages that were filled at the last look.
    filled: u64,
}

impl Session {
    /// Starts to serve a VM.
    pub(crate) fn start(
        worker: &Worker,
        keeper: &Arc<MessageSocket>,
        number: u64,
        machine: Machine,
        (memory, backing, remote): (Memory, Arc<dyn Backing>, Remote),
        removals: EventLog,
    ) -> Result<Self, String> {
        let (is_shared, is_tracked) = (memory.is_shared(), memory.is_tracked());
        let regions = memory.regions;
        let link = keeper.clone();
        let log: Log =
            Arc::new(move |event| messages::send(&link, &Report::Event(event), &[]).is_ok());
        let peer = machine.peer.clone();
        let watched = remote.try_clone().map_err(|error| uzone_os::with_causes(&error))?;
        let connected = ServeEvent::Connected {
            session: number,
            pid: peer.pid(),
            uid: peer.uid(),
            can_be_killed: machine.can_be_killed,
            can_be_read: machine.can_be_read,
            regions: regions.len(),
            len_bytes: regions.iter().map(|region| region.len.get()).fold(0, u64::saturating_add),
            page_bytes: regions.first().map_or(0, |region| region.page.bytes()),
        };
        let (server, opened) = (&worker.options, &worker.opened);
        let mut options = LazyOptions::default().deadline(server.deadline);
        options = options.budget(server.budget).process(peer.pid());
        if server.record.is_some() {
            // A page at a time, so that each one that is touched is seen.
            options = options.advice(Advice::Random).trace(TRACED);
        } else if server.huge && !is_shared && !is_tracked {
            options = options.advice(Advice::Blocks);
        }
        options = options.track_writes(is_tracked.then_some(WriteTracking::Async));
        let options = on_failure(options, number, peer, server.on_failure, &log);
        let memory = opened.engine.adopt(remote, regions, backing, &options, Some(removals));
        let memory = memory.map_err(|error| uzone_os::with_causes(&error))?;
        memory.prefetch_from_first_fault(&opened.prefetch);
        log(connected);
        if machine.is_program() {
            // A program that takes no answer has its memory filled all the same.
            let log = machine.log.as_ref().map(AsFd::as_fd);
            let _ = protocol::reply(&machine.stream, &Reply::Served, log);
        }
        let (remote, since, filled) = (watched, Instant::now(), 0);
        Ok(Self { number, memory, machine, remote, is_shared, since, filled })
    }

    /// Has the pages that a client wants kept before they change; `client` is where it is asked to hurry.
    pub(crate) fn capture(
        &self,
        memory: File,
        kept: OwnedFd,
        pending: File,
        client: Arc<MessageSocket>,
    ) -> Result<(), LazyError> {
        // A client that has gone is found by its socket.
        let hurry = move || drop(messages::send(&client, &CaptureReply::Hurry, &[]));
        let kept = KeptPages::from_fd(kept, self.memory.regions());
        self.memory.capture(memory, kept, pending, self.is_shared, hurry)
    }

    /// Returns the descriptors that become ready when it may have ended.
    pub(crate) fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let stream = self.machine.is_program().then(|| self.machine.stream.as_fd());
        [self.machine.peer.as_fd()].into_iter().chain(stream)
    }

    /// Returns whether pages were filled since the last call.
    pub(crate) fn was_filled(&mut self) -> bool {
        let stats = self.memory.stats();
        let filled = stats.demand + stats.around + stats.populated;
        std::mem::replace(&mut self.filled, filled) != filled
    }

    /// Returns whether its memory is gone: the process that connected may have ended before the one whose
    /// memory it is.
    pub(crate) fn is_gone(&self) -> bool {
        self.remote.is_gone() || self.machine.is_program() && self.machine.is_closed()
    }

    /// Returns the counts so far.
    pub(crate) fn stats(&self) -> SessionStats {
        let stats = self.memory.stats();
        SessionStats {
            faults: stats.faults,
            demand_pages: stats.demand,
            around_pages: stats.around,
            prefetched_pages: stats.populated,
            zero_pages: stats.zeroes,
            bad_pages: stats.poisoned,
            // The keeper knows.
            huge_pages: 0,
            not_huge: 0,
            held: stats.held,
            shares_cpu: stats.shares_cpu,
            pending_pages: stats.pending,
            oldest_pending_ns: stats.oldest_pending.map_or(0, nanoseconds),
        }
    }

    /// Returns the totals so far, to be added to the totals of others.
    pub(crate) fn totals(&self) -> Totals {
        Totals::of_machine(&self.memory.stats(), self.page_bytes(), &self.memory.latencies())
    }

    /// Returns the bytes of a page.
    fn page_bytes(&self) -> u64 {
        self.memory.regions().first().map_or(0, |region| region.page.bytes())
    }

    /// Returns the event of its end, for the log.
    pub(crate) fn ended(&self) -> ServeEvent {
        let FaultStats { faults, demand, around, .. } = self.memory.stats();
        ServeEvent::Ended {
            session: self.number,
            pid: self.machine.peer.pid(),
            served_ns: nanoseconds(self.since.elapsed()),
            faults,
            demand_pages: demand,
            around_pages: around,
        }
    }
}

/// Sets the policy for a VM whose page fails. The keeper kills it; without a keeper, this process does.
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
            let kind = match failure.kind {
                ErrorKind::InvalidData => FailedKind::Damaged,
                ErrorKind::Io => FailedKind::Io,
                ErrorKind::TimedOut => FailedKind::Late,
                _ => FailedKind::Other,
            };
            let (pid, offset, reason) = (peer.pid(), failure.offset, failure.reason.clone());
            let failed =
                ServeEvent::Failed { session, pid, offset, kind, reason, was_killed: false };
            if !log(failed) && policy == OnFailure::Kill {
                // A refusal means that the process has ended.
                let _ = process::kill(&*peer);
            }
        }
        match policy {
            OnFailure::Kill | OnFailure::Hold => Refusal::Hold,
            OnFailure::Poison => Refusal::Poison,
        }
    })
}

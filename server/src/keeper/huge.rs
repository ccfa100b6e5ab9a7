//! Huge pages of blocks that a worker found filled ([`Collapser`]): the keeper has the right to have the kernel make them.
//! A thread of low priority does it, one block after the other; the keeper accepts and hands over meanwhile.
//!
//! No byte changes, whatever happens to the VM meanwhile: `collapse.rs` of the package `fault` states why. A process
//! that has ended is known by its pidfd.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use uzone_os::peer::Peer;
use uzone_os::uffd::Doorbell;
use uzone_os::{SystemRoot, Vaddr, hugepages, lock};
use uzone_pages::FaultAround;

/// The most pending messages of a worker; the blocks of further messages count as refused.
const WAITING: usize = 1024;

/// The outcome for blocks of a session.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Blocks that are huge pages.
    pub(crate) made: u64,
    /// Blocks that are not.
    pub(crate) refused: u64,
    /// The reason for the last such block.
    pub(crate) reason: Option<String>,
}

/// Some blocks of a session.
type Batch = (u64, Arc<Peer>, Vec<Vaddr>);

struct Shared {
    outcomes: Mutex<BTreeMap<u64, Outcome>>,
    is_stopped: AtomicBool,
    bell: Doorbell,
}

impl Shared {
    /// Adds the outcome for blocks of a session.
    fn add(&self, session: u64, outcome: Outcome) {
        let mut all = lock(&self.outcomes);
        let all = all.entry(session).or_default();
        (all.made, all.refused) = (all.made + outcome.made, all.refused + outcome.refused);
        all.reason = outcome.reason.or(all.reason.take());
    }
}

/// A thread that makes huge pages of the memory of other processes, until this is dropped.
pub(crate) struct Collapser {
    shared: Arc<Shared>,
    /// The pending batches. The thread ends when this is dropped.
    waiting: Option<SyncSender<Batch>>,
    thread: Option<JoinHandle<()>>,
}

impl Collapser {
    /// Starts the thread.
    pub(crate) fn start() -> io::Result<Self> {
        let thp = hugepages::thp(&SystemRoot::host()).map_err(io::Error::other)?;
        if thp.is_none_or(|thp| thp.pmd_size != FaultAround::MAX.len()) {
            let reason = "this kernel has no transparent huge pages of 2 MiB";
            return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
        }
        let (outcomes, is_stopped) = (Mutex::default(), AtomicBool::new(false));
        let shared = Arc::new(Shared { outcomes, is_stopped, bell: Doorbell::new()? });
        let (waiting, batches) = sync_channel(WAITING);
        let theirs = shared.clone();
        let thread = Builder::new().name("uzone-huge".into());
        let thread = thread.spawn(move || collapse(&theirs, &batches))?;
        Ok(Self { shared, waiting: Some(waiting), thread: Some(thread) })
    }

    /// Has huge pages made of blocks of a session.
    pub(crate) fn add(&self, session: u64, peer: Arc<Peer>, blocks: Vec<Vaddr>) {
        let refused = blocks.len() as u64;
        let sent = self.waiting.as_ref().map(|waiting| waiting.try_send((session, peer, blocks)));
        let reason = match sent {
            Some(Ok(())) => return,
            // A worker of this version is far from that.
            Some(Err(TrySendError::Full(_))) => "too many blocks wait",
            _ => "the thread that makes huge pages has ended",
        };
        let reason = Some(reason.to_owned());
        self.shared.add(session, Outcome { refused, reason, ..Outcome::default() });
    }

    /// Returns the outcomes since the last call.
    pub(crate) fn take(&self) -> io::Result<BTreeMap<u64, Outcome>> {
        self.shared.bell.silence()?;
        let mut outcomes = lock(&self.shared.outcomes);
        Ok(std::mem::take(&mut *outcomes))
    }
}

/// It can be waited for: something was done.
impl AsFd for Collapser {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }
}

impl Drop for Collapser {
    fn drop(&mut self) {
        // Relaxed: it only has the thread end sooner.
        self.shared.is_stopped.store(true, Ordering::Relaxed);
        self.waiting = None;
        if let Some(thread) = self.thread.take() {
            // It ends with the block that it has. A panic of it was printed when it happened.
            let _ = thread.join();
        }
    }
}

fn collapse(shared: &Shared, batches: &Receiver<Batch>) {
    // The system may forbid it; then the thread is as important as others.
    let _ = uzone_os::thread::low();
    for (session, peer, blocks) in batches {
        let mut outcome = Outcome::default();
        for block in blocks {
            if shared.is_stopped.load(Ordering::Relaxed) {
                return;
            }
            match problem(peer.collapse(block, FaultAround::MAX.len())) {
                None => outcome.made += 1,
                reason => {
                    outcome.refused += 1;
                    outcome.reason = reason;
                }
            }
        }
        shared.add(session, outcome);
        // Its counter is never full.
        let _ = shared.bell.ring();
    }
}

/// Returns the reason why a block is no huge page, with the remedy, or `None` if it is one.
fn problem(answer: io::Result<Option<io::Error>>) -> Option<String> {
    Some(match answer {
        Ok(None) => return None,
        Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied => format!(
            "the keeper may not make huge pages of its memory ({cause}): run the server as root, or as the \
             user of the monitor with CAP_SYS_NICE"
        ),
        Err(cause) => format!(
            "the kernel makes no huge pages of its memory ({cause}): they take private memory \
             that is not advised against huge pages"
        ),
        Ok(Some(cause)) => format!(
            "the kernel made no huge page of a block of it ({cause}): its pages were given back or are in use, \
             or no huge page is free"
        ),
    })
}

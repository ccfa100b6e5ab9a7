//! Huge pages of blocks that a worker found filled ([`Collapser`]): the keeper has the right to have the kernel make them.
//! A thread of low priority does it, one block after the other; the keeper accepts and hands over meanwhile.
//!
//! No byte changes, whatever happens to the VM meanwhile: `collapse.rs` of the package `fault` states why. A process
//! that has ended is known by its pidfd.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::thread::Builder;

use uzone_os::peer::Peer;
use uzone_os::uffd::Doorbell;
use uzone_os::{SystemRoot, Vaddr, hugepages};
use uzone_pages::FaultAround;

/// The most pending messages of a worker; the blocks of further messages count as refused.
const WAITING: usize = 1024;

/// The outcome for blocks of a session.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) session: u64,
    /// Blocks that are huge pages.
    pub(crate) made: u64,
    /// Blocks that are not.
    pub(crate) refused: u64,
    /// The reason for the last such block.
    pub(crate) reason: Option<String>,
}

/// Some blocks of a session.
pub(crate) type Batch = (u64, Arc<Peer>, Vec<Vaddr>);

/// A thread that makes huge pages of the memory of other processes.
pub(crate) struct Collapser {
    /// The pending batches. The thread ends behind the last of them when this is dropped, or with the process.
    waiting: SyncSender<Batch>,
    outcomes: Receiver<Outcome>,
    bell: Arc<Doorbell>,
}

impl Collapser {
    /// Starts the thread.
    pub(crate) fn start() -> io::Result<Self> {
        let thp = hugepages::thp(&SystemRoot::host()).map_err(io::Error::other)?;
        if thp.is_none_or(|thp| thp.pmd_size != FaultAround::MAX.len()) {
            let reason = "this kernel has no transparent huge pages of 2 MiB";
            return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
        }
        let bell = Arc::new(Doorbell::new()?);
        let ((waiting, batches), (done, outcomes)) = (sync_channel(WAITING), channel());
        let rung = bell.clone();
        let thread = Builder::new().name("uzone-huge".into());
        thread.spawn(move || collapse(&batches, &done, &rung))?;
        Ok(Self { waiting, outcomes, bell })
    }

    /// Has huge pages made of blocks of a session, or returns the reason why not.
    pub(crate) fn add(&self, batch: Batch) -> Result<(), String> {
        self.waiting.try_send(batch).map_err(|error| match error {
            // A worker is far from that.
            TrySendError::Full(_) => "too many blocks wait".to_owned(),
            TrySendError::Disconnected(_) => {
                "the thread that makes huge pages has ended".to_owned()
            }
        })
    }

    /// Returns the outcomes since the last call.
    pub(crate) fn take(&self) -> io::Result<Vec<Outcome>> {
        self.bell.silence()?;
        Ok(self.outcomes.try_iter().collect())
    }
}

/// It can be waited for: something was done.
impl AsFd for Collapser {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

fn collapse(batches: &Receiver<Batch>, done: &Sender<Outcome>, bell: &Doorbell) {
    // The system may forbid it; then the thread is as important as others.
    let _ = uzone_os::thread::low();
    for (session, peer, blocks) in batches {
        let mut outcome = Outcome { session, ..Outcome::default() };
        for block in blocks {
            match problem(peer.collapse(block, FaultAround::MAX.len())) {
                None => outcome.made += 1,
                reason => {
                    outcome.refused += 1;
                    outcome.reason = reason;
                }
            }
        }
        if done.send(outcome).is_err() {
            // The keeper has no VM any more.
            return;
        }
        // The counter of the bell is never full.
        let _ = bell.ring();
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

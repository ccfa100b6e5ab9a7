//! Huge pages of blocks that a worker found filled ([`Collapser`]): the keeper has the right to have the kernel make them.
//! A thread of low priority does it, one block after the other; the keeper accepts and hands over meanwhile.
//!
//! No byte changes, whatever becomes of the machine meanwhile: `blocks.rs` of the package `fault` states why. A process
//! that has ended is known by its pidfd.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use uzone_os::peer::Peer;
use uzone_os::uffd::Doorbell;
use uzone_os::{Collapsed, SystemRoot, Vaddr, hugepages, priority};
use uzone_pages::FaultAround;

/// How many messages of a worker may wait; what comes beyond counts as refused.
const WAITING: usize = 1024;

/// What became of the blocks of a session.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// How many are huge pages.
    pub(crate) made: u64,
    /// How many are not.
    pub(crate) refused: u64,
    /// Why the last of those is not.
    pub(crate) reason: Option<String>,
}

/// Some blocks of a session.
struct Batch {
    session: u64,
    peer: Arc<Peer>,
    blocks: Vec<Vaddr>,
}

#[derive(Default)]
struct Work {
    waiting: VecDeque<Batch>,
    outcomes: BTreeMap<u64, Outcome>,
    is_stopped: bool,
}

struct Shared {
    work: Mutex<Work>,
    changed: Condvar,
    bell: Doorbell,
}

impl Shared {
    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that makes huge pages of the memory of other processes, until this is dropped.
pub(crate) struct Collapser {
    shared: Arc<Shared>,
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
        let (work, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { work, changed, bell: Doorbell::new()? });
        let theirs = shared.clone();
        let thread = Builder::new().name("uzone-huge".into()).spawn(move || collapse(&theirs))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Has huge pages made of blocks of a session.
    pub(crate) fn add(&self, session: u64, peer: Arc<Peer>, blocks: Vec<Vaddr>) {
        let mut work = self.shared.work();
        if work.waiting.len() < WAITING {
            work.waiting.push_back(Batch { session, peer, blocks });
            self.shared.changed.notify_one();
        } else {
            // A worker of this version is far from that.
            let outcome = work.outcomes.entry(session).or_default();
            outcome.refused += blocks.len() as u64;
            outcome.reason = Some("too many blocks wait".to_owned());
        }
    }

    /// Returns what was done since the last call.
    pub(crate) fn take(&self) -> io::Result<BTreeMap<u64, Outcome>> {
        self.shared.bell.silence()?;
        Ok(std::mem::take(&mut self.shared.work().outcomes))
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
        self.shared.work().is_stopped = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It ends with the block that it has. A panic of it was printed when it happened.
            let _ = thread.join();
        }
    }
}

fn collapse(shared: &Shared) {
    // The system may forbid it; then the thread is as important as others.
    let _ = priority::low();
    loop {
        let work = shared.work();
        let is_idle = |work: &mut Work| work.waiting.is_empty() && !work.is_stopped;
        let waited = shared.changed.wait_while(work, is_idle);
        let mut work = waited.unwrap_or_else(PoisonError::into_inner);
        if work.is_stopped {
            return;
        }
        let Some(Batch { session, peer, blocks }) = work.waiting.pop_front() else { continue };
        drop(work);
        let mut outcome = Outcome::default();
        for block in blocks {
            if shared.work().is_stopped {
                return;
            }
            match peer.collapse(block, FaultAround::MAX.len()) {
                Ok(Collapsed::Whole { .. }) => outcome.made += 1,
                answer => {
                    outcome.refused += 1;
                    outcome.reason = Some(reason(answer));
                }
            }
        }
        let mut work = shared.work();
        let all = work.outcomes.entry(session).or_default();
        (all.made, all.refused) = (all.made + outcome.made, all.refused + outcome.refused);
        all.reason = outcome.reason.or(all.reason.take());
        drop(work);
        // Its counter is never full.
        let _ = shared.bell.ring();
    }
}

/// Returns why a block is no huge page, and what helps.
fn reason(answer: io::Result<Collapsed>) -> String {
    match answer {
        Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied => format!(
            "the keeper may not make huge pages of its memory ({cause}): run the server as root, or as the \
             user of the monitor with CAP_SYS_NICE"
        ),
        Err(cause) => format!(
            "the kernel makes no huge pages of its memory ({cause}): that takes Linux 6.1, and private memory \
             that is not advised against huge pages"
        ),
        Ok(Collapsed::NotNow { cause }) => format!(
            "the kernel made no huge page of a block of it ({cause}): its pages were given back or are in use, \
             or no huge page is free"
        ),
        Ok(_) => "a block has no whole huge page".to_owned(),
    }
}

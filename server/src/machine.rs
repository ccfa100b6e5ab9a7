//! A client of the server, from its first byte to its end: [`Machine`], a VM or a program that attaches, and its [`State`].
//! The keeper has one for each connection, stores it, and offers it to one worker after the other.
//!
//! | event | Arriving | Offered | Served |
//! |---|---|---|---|
//! | its message may be whole | Offered | – | – |
//! | the worker wants more of the message | – | Arriving | – |
//! | the worker serves it | – | Served | – |
//! | the worker dies | – | –, refused after the third time | Offered |
//! | the worker or the keeper refuses it | gone | gone | gone |
//! | no whole message came in time | gone | – | – |
//! | its memory is gone | – | gone | gone |
//!
//! A dash is no change. A VM that was Served and is Offered again goes on with its log.

use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use uzone_os::peer::{self, Peer};
use uzone_os::uffd::{EventLog, Remote, UffdError};

use crate::process;
use crate::status::{SessionStats, SessionStatus, nanoseconds};

/// The most regions that a message has.
pub(crate) const REGIONS: usize = 1024;
/// The longest message.
pub(crate) const MESSAGE_BYTES: usize = 64 << 10;
/// The longest part of a message that a worker gets: more than a message may have, so that the worker refuses it.
pub(crate) const TAKEN_BYTES: usize = MESSAGE_BYTES + 1;
/// The most descriptors that are kept of a client: its userfaultfd, and the log of an earlier server.
const TAKEN_FDS: usize = 2;
/// The most offers of a message that may be whole and is not: one in parts ends as a whole one does a few times.
const OFFERS: u32 = 16;

/// The state of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// A part of its message has come.
    Arriving,
    /// It waits for a worker, or the worker looks at its message.
    Offered,
    /// A worker answers its faults.
    Served,
}

/// An event that changes the state of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Its message may be whole.
    Whole,
    /// The worker wants more of its message.
    Part,
    /// The worker serves it.
    Served,
    /// The worker died.
    WorkerDied,
    /// The worker or the keeper refuses it.
    Refused,
    /// No whole message came in time.
    Late,
    /// Its memory is gone.
    Ended,
}

impl State {
    /// Returns the state after an event, or `None` if the client is gone.
    pub(crate) fn after(self, step: Step) -> Option<Self> {
        match (self, step) {
            (_, Step::Refused)
            | (Self::Arriving, Step::Late)
            | (Self::Offered | Self::Served, Step::Ended) => None,
            (Self::Arriving, Step::Whole) | (Self::Served, Step::WorkerDied) => Some(Self::Offered),
            (Self::Offered, Step::Part) => Some(Self::Arriving),
            (Self::Offered, Step::Served) => Some(Self::Served),
            (state, _) => Some(state),
        }
    }
}

/// A client: its stream, its process, and everything that came from it.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) stream: UnixStream,
    pub(crate) peer: Arc<Peer>,
    pub(crate) state: State,
    /// A random number, the client's name in a store.
    pub(crate) id: u64,
    /// Whether this process may end the peer.
    pub(crate) can_be_killed: bool,
    /// Whether this process may read the peer's memory.
    pub(crate) can_be_read: bool,
    pub(crate) bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// The number of descriptors that came and were not kept.
    other_fds: usize,
    /// Whether reading its stream has stopped.
    pub(crate) is_ended: bool,
    pub(crate) since: Instant,
    /// The bytes of its memory and of a page of it, once a worker has served it.
    pub(crate) memory: Option<(u64, u64)>,
    /// The log of the pages that it gave back: of a VM, the file that its workers write one after the other; of a
    /// program, the sealed log of its latest worker.
    pub(crate) log: Option<OwnedFd>,
    /// The record of a VM in the store, and the number of bytes of its message there.
    pub(crate) record: Option<File>,
    pub(crate) recorded: usize,
    /// The image that an earlier server served it from.
    pub(crate) image: Option<String>,
    pub(crate) stats: Option<SessionStats>,
    /// The number of its blocks that were made huge pages, and of blocks that were not.
    pub(crate) huge_pages: u64,
    pub(crate) not_huge: u64,
    /// The number of workers that died while they looked at its message.
    pub(crate) deaths: u32,
    offers: u32,
}

/// The facts about a client that a worker gets, beside its bytes and descriptors.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Offer {
    pub(crate) session: u64,
    pub(crate) pid: u32,
    uid: u32,
    can_be_killed: bool,
    can_be_read: bool,
    memory: Option<(u64, u64)>,
    is_ended: bool,
    other_fds: usize,
    has_log: bool,
}

impl Machine {
    /// Takes a client that has connected, and asks for the rights of this process.
    pub(crate) fn new(stream: UnixStream, peer: Peer) -> Self {
        let (can_be_killed, can_be_read) =
            (process::can_be_killed(&peer), process::open_memory(&peer).is_ok());
        Self { can_be_killed, can_be_read, ..Self::of(stream, peer) }
    }

    fn of(stream: UnixStream, peer: Peer) -> Self {
        Self {
            can_be_killed: false,
            can_be_read: false,
            stream,
            peer: Arc::new(peer),
            state: State::Arriving,
            id: RandomState::new().build_hasher().finish(),
            bytes: Vec::new(),
            fds: Vec::new(),
            other_fds: 0,
            is_ended: false,
            since: Instant::now(),
            memory: None,
            log: None,
            record: None,
            recorded: 0,
            image: None,
            stats: None,
            huge_pages: 0,
            not_huge: 0,
            deaths: 0,
            offers: 0,
        }
    }

    /// Takes a VM of an earlier server: with a log in its file, a worker had served it.
    pub(crate) fn recovered(
        stream: UnixStream,
        peer: Peer,
        userfaultfd: OwnedFd,
        log: File,
        bytes: &[u8],
    ) -> io::Result<Self> {
        let was_served = EventLog::is_in_file(&log)?;
        Ok(Self {
            state: if was_served { State::Offered } else { State::Arriving },
            bytes: bytes.to_vec(),
            fds: vec![userfaultfd],
            is_ended: was_served,
            memory: was_served.then_some((0, 0)),
            log: Some(log.into()),
            recorded: bytes.len(),
            ..Self::new(stream, peer)
        })
    }

    /// Returns the facts for a worker.
    pub(crate) fn offer(&self, session: u64) -> Offer {
        Offer {
            session,
            pid: self.peer.pid(),
            uid: self.peer.uid(),
            can_be_killed: self.can_be_killed,
            can_be_read: self.can_be_read,
            memory: self.memory,
            is_ended: self.is_ended,
            other_fds: self.other_fds,
            has_log: self.log.is_some(),
        }
    }

    /// Returns its descriptors for a worker: the stream, the pidfd, the log if there is one, and the descriptors that it
    /// sent.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let own = [self.stream.as_fd(), self.peer.as_fd()].into_iter();
        own.chain(self.log.iter().chain(&self.fds).map(AsFd::as_fd)).collect()
    }

    /// Takes a client from an offer. `None` if a descriptor is missing.
    pub(crate) fn of_offer(offer: Offer, fds: Vec<OwnedFd>, bytes: Vec<u8>) -> Option<Self> {
        let mut fds = fds.into_iter();
        let stream = UnixStream::from(fds.next()?);
        let peer = Peer::from_parts(offer.pid, offer.uid, fds.next()?)?;
        let log = if offer.has_log { Some(fds.next()?) } else { None };
        Some(Self {
            can_be_killed: offer.can_be_killed,
            can_be_read: offer.can_be_read,
            bytes,
            fds: fds.collect(),
            other_fds: offer.other_fds,
            is_ended: offer.is_ended,
            memory: offer.memory,
            log,
            ..Self::of(stream, peer)
        })
    }

    /// Changes its state. Returns whether it is gone.
    pub(crate) fn step(&mut self, step: Step) -> bool {
        let after = self.state.after(step);
        self.state = after.unwrap_or(self.state);
        after.is_none()
    }

    /// Returns whether no worker has served it.
    pub(crate) fn is_new(&self) -> bool {
        self.memory.is_none()
    }

    /// Returns whether descriptors came: the VM may wait for an answer.
    pub(crate) fn has_descriptors(&self) -> bool {
        !self.fds.is_empty()
    }

    /// Returns the number of descriptors that came.
    pub(crate) fn count_descriptors(&self) -> usize {
        self.fds.len() + self.other_fds
    }

    /// Returns the userfaultfd that came.
    pub(crate) fn userfaultfd(&self) -> Option<&OwnedFd> {
        self.fds.first()
    }

    /// Returns the log of another server, which a program that attaches again has sent.
    pub(crate) fn earlier_log(&self) -> Option<&OwnedFd> {
        self.fds.get(1)
    }

    /// Reads the bytes and descriptors that have come.
    pub(crate) fn read(&mut self) {
        let mut part = [0; 4096];
        while !self.is_ended {
            match peer::receive(&self.stream, &mut part, &mut self.fds) {
                Ok(len) if len > 0 => self.bytes.extend_from_slice(&part[..len]),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return,
                Err(cause) if cause.kind() == io::ErrorKind::InvalidData => self.other_fds += 1,
                Ok(_) | Err(_) => self.is_ended = true,
            }
            self.other_fds += self.fds.len().saturating_sub(TAKEN_FDS);
            self.fds.truncate(TAKEN_FDS);
            self.is_ended |= self.bytes.len() >= TAKEN_BYTES || self.other_fds > 0;
        }
    }

    /// Returns whether a worker has to look at it: its bytes may be a whole message, or no message. So a monitor that
    /// sends one byte at a time costs no offer for each.
    pub(crate) fn may_be_whole(&self) -> bool {
        let bytes = self.bytes.trim_ascii();
        match bytes.first() {
            Some(b'[') => self.is_ended || bytes.last() == Some(&b']'),
            // Of a program that attaches.
            Some(b'{') => self.is_ended || matches!(bytes.last(), Some(b'}' | b']')),
            Some(_) => true,
            None => self.is_ended && self.count_descriptors() > 0,
        }
    }

    /// Returns whether it connected and left without a byte, as a probe for a server does.
    pub(crate) fn is_probe(&self) -> bool {
        self.is_ended && self.bytes.is_empty() && self.count_descriptors() == 0
    }

    /// Counts an offer. Returns whether it may be offered: a message without end is not looked at for each part.
    pub(crate) fn may_be_offered(&mut self) -> bool {
        self.offers += 1;
        self.offers <= OFFERS
    }

    /// Returns whether the other side of the stream has closed it, or broken the protocol.
    pub(crate) fn is_closed(&self) -> bool {
        let answer = peer::receive(&self.stream, &mut [0; 64], &mut Vec::new());
        !matches!(answer, Err(cause) if cause.kind() == io::ErrorKind::WouldBlock)
    }

    /// Takes the memory that it handed over, or the reason why no fault of that can be answered. A program that attaches
    /// notices the end of the stream, and goes on.
    pub(crate) fn take_memory(&mut self) -> Option<Result<Remote, UffdError>> {
        let is_program = self.is_program();
        let mut fds = std::mem::take(&mut self.fds).into_iter();
        fds.find_map(memory_of).filter(|_| !is_program)
    }

    /// Returns whether it is a program that attaches, which goes on to the next server by itself.
    pub(crate) fn is_program(&self) -> bool {
        is_of_program(&self.bytes)
    }

    /// Returns whether it may be a VM, which a store keeps.
    pub(crate) fn may_be_a_vm(&self) -> bool {
        self.count_descriptors() == 1 && !self.bytes.is_empty() && !self.is_program()
    }

    /// Returns its part of the status, once a worker has served it.
    pub(crate) fn status(&self, session: u64) -> Option<SessionStatus> {
        let (len_bytes, page_bytes) = self.memory?;
        Some(SessionStatus {
            session,
            pid: self.peer.pid(),
            uid: self.peer.uid(),
            can_be_killed: self.can_be_killed,
            can_be_read: self.can_be_read,
            len_bytes,
            page_bytes,
            connected_ns: nanoseconds(self.since.elapsed()),
            stats: self.stats.map(|stats| SessionStats {
                huge_pages: self.huge_pages,
                not_huge: self.not_huge,
                ..stats
            }),
        })
    }
}

/// Returns the memory of a userfaultfd, or the reason why no fault of it can be answered. `None` for another descriptor.
pub(crate) fn memory_of(fd: OwnedFd) -> Option<Result<Remote, UffdError>> {
    Some(Remote::adopt(fd)).filter(|memory| !matches!(memory, Err(UffdError::NotUffd(_))))
}

/// Returns whether a message is of a program that attaches.
pub(crate) fn is_of_program(bytes: &[u8]) -> bool {
    bytes.trim_ascii_start().starts_with(b"{")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::State::{Arriving, Offered, Served};
    use super::*;

    #[test]
    fn each_event_leads_from_each_state_to_the_one_of_the_table() {
        let table = [
            (Step::Whole, [Some(Offered), Some(Offered), Some(Served)]),
            (Step::Part, [Some(Arriving), Some(Arriving), Some(Served)]),
            (Step::Served, [Some(Arriving), Some(Served), Some(Served)]),
            (Step::WorkerDied, [Some(Arriving), Some(Offered), Some(Offered)]),
            (Step::Refused, [None, None, None]),
            (Step::Late, [None, Some(Offered), Some(Served)]),
            (Step::Ended, [Some(Arriving), None, None]),
        ];
        for (step, expected) in table {
            for (state, expected) in [Arriving, Offered, Served].into_iter().zip(expected) {
                assert_eq!(state.after(step), expected, "{state:?} after {step:?}");
            }
        }
    }

    #[test]
    fn a_vm_is_offered_when_its_message_may_be_whole() {
        let (near, _far) = UnixStream::pair().unwrap();
        let peer = Peer::of(&near).unwrap();
        let mut machine = Machine::new(near, peer);
        for (bytes, is_whole) in [
            ("", false),
            (" [", false),
            ("[{}]", true),
            ("[{}] ", true),
            ("{\"a\":1", false),
            ("{\"a\":1}", true),
            ("x", true),
        ] {
            machine.bytes = bytes.into();
            assert_eq!(machine.may_be_whole(), is_whole, "{bytes}");
            assert!(!machine.is_probe());
        }
        machine.is_ended = true;
        assert!(machine.may_be_whole());
        machine.bytes.clear();
        assert!(!machine.may_be_whole() && machine.is_probe());
    }
}

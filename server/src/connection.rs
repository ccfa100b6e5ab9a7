//! A connection of a monitor, and all that came by it: [`Connection`]. It is what a worker gets, and what one
//! keeper hands to the next.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use uzone_os::peer::{self, Peer};
use uzone_os::uffd::Remote;

use crate::link::{Header, TAKEN_BYTES, TAKEN_FDS};
use crate::session::nanoseconds;
use crate::status::{SessionStats, SessionStatus};

/// A connection, and all that came by it.
pub(crate) struct Connection {
    pub(crate) stream: UnixStream,
    pub(crate) peer: Peer,
    /// Whether this process may end the peer; asked when it connected, since it may have ended by now.
    can_be_killed: bool,
    pub(crate) bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// Whether more descriptors came than were taken.
    has_more_fds: bool,
    /// Whether nothing more is read.
    pub(crate) is_ended: bool,
    pub(crate) since: Instant,
    /// What its worker reads is logged there. A machine comes of a connection that has one.
    pub(crate) log: Option<OwnedFd>,
    /// How many bytes of memory the machine has, and how many a page of it; known once it is connected.
    pub(crate) memory: Option<(u64, u64)>,
    pub(crate) stats: Option<SessionStats>,
    /// How many workers died of taking it.
    pub(crate) deaths: u32,
}

/// What the next keeper needs to know of a connection, beside its bytes and descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Kept {
    header: Header,
    has_more_fds: bool,
    memory: Option<(u64, u64)>,
    age_ns: u64,
}

impl Connection {
    pub(crate) fn new(stream: UnixStream, peer: Peer) -> Self {
        Self {
            stream,
            can_be_killed: peer.can_be_killed(),
            peer,
            bytes: Vec::new(),
            fds: Vec::new(),
            has_more_fds: false,
            is_ended: false,
            since: Instant::now(),
            log: None,
            memory: None,
            stats: None,
            deaths: 0,
        }
    }

    /// Returns whether no machine has come of it yet.
    pub(crate) fn is_greeting(&self) -> bool {
        self.log.is_none()
    }

    /// Returns whether descriptors came by it: the machine may wait for an answer.
    pub(crate) fn has_descriptors(&self) -> bool {
        !self.fds.is_empty()
    }

    /// Reads what there is. Afterwards it is ended, or more may come.
    pub(crate) fn read(&mut self) {
        let mut part = [0; 4096];
        while !self.is_ended {
            match peer::receive(&self.stream, &mut part, &mut self.fds) {
                Ok(len) if len > 0 => self.bytes.extend_from_slice(&part[..len]),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return,
                Err(cause) if cause.kind() == io::ErrorKind::InvalidData => {
                    self.has_more_fds = true;
                }
                Ok(_) | Err(_) => self.is_ended = true,
            }
            self.has_more_fds |= self.fds.len() > TAKEN_FDS;
            self.fds.truncate(TAKEN_FDS);
            self.is_ended |= self.bytes.len() >= TAKEN_BYTES || self.has_more_fds;
        }
    }

    /// Returns what a worker gets, with [`Connection::descriptors`] and the bytes.
    pub(crate) fn header(&self, session: u64) -> Header {
        Header {
            session,
            pid: self.peer.pid(),
            uid: self.peer.uid(),
            can_be_killed: self.can_be_killed,
            is_ended: self.is_ended,
            descriptors: self.fds.len() + usize::from(self.has_more_fds),
            has_log: self.log.is_some(),
        }
    }

    /// Returns its descriptors: the pidfd, the log if there is one, and what the monitor sent.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let sent = self.fds.iter().map(AsFd::as_fd);
        [self.peer.as_fd()]
            .into_iter()
            .chain(self.log.iter().map(AsFd::as_fd))
            .chain(sent)
            .collect()
    }

    /// Returns what the next keeper gets, with the stream and [`Connection::descriptors`] and the bytes.
    pub(crate) fn kept(&self, session: u64) -> Kept {
        Kept {
            header: self.header(session),
            has_more_fds: self.has_more_fds,
            memory: self.memory,
            age_ns: nanoseconds(self.since.elapsed()),
        }
    }

    /// Makes the connection that another keeper had, and its number. `None` if a descriptor is missing.
    pub(crate) fn from_kept(kept: &Kept, fds: Vec<OwnedFd>, bytes: Vec<u8>) -> Option<(u64, Self)> {
        let Kept { header, has_more_fds, memory, age_ns } = kept;
        let mut fds = fds.into_iter();
        let stream = UnixStream::from(fds.next()?);
        let peer = Peer::from_parts(header.pid, header.uid, fds.next()?)?;
        let log = if header.has_log { Some(fds.next()?) } else { None };
        let age = Duration::from_nanos(*age_ns);
        let connection = Self {
            stream,
            peer,
            can_be_killed: header.can_be_killed,
            bytes,
            fds: fds.collect(),
            has_more_fds: *has_more_fds,
            is_ended: header.is_ended,
            since: Instant::now().checked_sub(age).unwrap_or_else(Instant::now),
            log,
            memory: *memory,
            stats: None,
            deaths: 0,
        };
        Some((header.session, connection))
    }

    /// Ends the process if it handed memory over: its faults would wait for ever. Returns whether that was
    /// done.
    pub(crate) fn end_if_it_has_memory(self) -> bool {
        let has_memory = self.fds.into_iter().any(|fd| Remote::adopt(fd).is_ok());
        has_memory && self.peer.kill().is_ok()
    }

    /// Returns what is known of the machine, if there is one.
    pub(crate) fn status(&self, session: u64) -> Option<SessionStatus> {
        let (len_bytes, page_bytes) = self.memory?;
        Some(SessionStatus {
            session,
            pid: self.peer.pid(),
            uid: self.peer.uid(),
            len_bytes,
            page_bytes,
            connected_ns: nanoseconds(self.since.elapsed()),
            stats: self.stats,
        })
    }
}

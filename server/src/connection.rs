//! A connection of a monitor, and all that came by it: [`Connection`]. Keepers and workers have the same, so
//! that each can hand it to the next process.

use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use uzone_os::peer::{self, Peer};
use uzone_os::uffd::{EventLog, Remote};

use crate::status::{SessionStats, SessionStatus, nanoseconds};

/// How many regions a message has at most.
pub(crate) const REGIONS: usize = 1024;
/// How long a message is at most.
pub(crate) const MESSAGE_BYTES: usize = 64 << 10;
/// How much of a monitor's message is handed over: more than it may have, so that the worker refuses it.
pub(crate) const TAKEN_BYTES: usize = MESSAGE_BYTES + 1;
/// How often the service manager keeps what a monitor has sent in parts.
const TIMES_KEPT: u32 = 8;
/// How many descriptors of a client are kept: its userfaultfd, and the log of an earlier server.
const TAKEN_FDS: usize = 2;
/// How often a worker looks at a message that may be whole and was not: one in parts ends as a whole one does a few
/// times.
const LOOKS: u32 = 16;

/// A connection, and all that came by it.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: UnixStream,
    pub(crate) peer: Arc<Peer>,
    pub(crate) known: Known,
    pub(crate) bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    pub(crate) since: Instant,
    /// The log of the events that its worker reads. A connection with a log is a machine.
    pub(crate) log: Option<OwnedFd>,
    /// The file for the log of a machine, which its workers write one after the other; another process may keep it.
    pub(crate) log_file: Option<OwnedFd>,
    pub(crate) stats: Option<SessionStats>,
    /// How many of its blocks were made huge pages, and how many were not.
    pub(crate) huge_pages: u64,
    pub(crate) not_huge: u64,
    /// How many workers died of taking it.
    pub(crate) deaths: u32,
    /// How often a worker was to look at it.
    looks: u32,
    /// What it was served from by a server that has died.
    pub(crate) image: Option<String>,
    /// How many bytes of it the service manager keeps, and how often it was asked to keep more of them. A process that
    /// hands over may keep one more part before it dies; the part with the highest number is the latest.
    pub(crate) kept_bytes: Option<usize>,
    pub(crate) times_kept: u32,
}

/// The facts about a connection that are passed from process to process.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Known {
    /// Its number, which no other connection has, also none of another process.
    pub(crate) id: u64,
    /// Whether the keeper may end the peer, and read its memory.
    pub(crate) can_be_killed: bool,
    #[serde(default)]
    pub(crate) can_be_read: bool,
    /// Whether the peer does not have the userfaultfd, and was named by a process that is not trusted: this process
    /// uses no rights over it.
    #[serde(default)]
    pub(crate) is_foreign: bool,
    /// Whether it is served although its process may not be ended: this keeper lacks rights that the next keeper
    /// will have.
    #[serde(default)]
    pub(crate) must_be_served: bool,
    /// How many descriptors came beside those that were kept.
    #[serde(default)]
    other_fds: usize,
    /// Whether nothing more is read.
    pub(crate) is_ended: bool,
    /// How many bytes of memory the machine has, and how many a page of it; known once it is connected.
    pub(crate) memory: Option<(u64, u64)>,
}

/// What another process needs to know of a connection, beside its bytes and descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Kept {
    session: u64,
    pid: u32,
    uid: u32,
    #[serde(flatten)]
    known: Known,
    has_log: bool,
    has_log_file: bool,
    age_ns: u64,
}

impl Kept {
    /// Returns the number of the connection.
    pub(crate) fn session(&self) -> u64 {
        self.session
    }

    /// Returns the number and the user of the process.
    pub(crate) fn process(&self) -> (u32, u32) {
        (self.pid, self.uid)
    }
}

impl Connection {
    pub(crate) fn new(stream: UnixStream, peer: Peer) -> Self {
        let known = Known {
            id: RandomState::new().build_hasher().finish(),
            can_be_killed: peer.can_be_killed(),
            can_be_read: peer.open_memory().is_ok(),
            ..Known::default()
        };
        Self::known(stream, peer, known)
    }

    fn known(stream: UnixStream, peer: Peer, known: Known) -> Self {
        Self {
            stream,
            peer: Arc::new(peer),
            known,
            bytes: Vec::new(),
            fds: Vec::new(),
            since: Instant::now(),
            log: None,
            log_file: None,
            stats: None,
            huge_pages: 0,
            not_huge: 0,
            deaths: 0,
            looks: 0,
            image: None,
            kept_bytes: None,
            times_kept: 0,
        }
    }

    /// Learns which rights this process has over the peer.
    pub(crate) fn ask_for_rights(&mut self) {
        self.known.can_be_killed = !self.known.is_foreign && self.peer.can_be_killed();
        self.known.can_be_read = self.open_memory().is_ok();
    }

    /// Has this process use no rights over the peer unless that has the userfaultfd. The process that named the
    /// peer may be a worker in the place of its keeper, and is not trusted: it could have a keeper end or read
    /// processes that the worker may not.
    pub(crate) fn check_peer(&mut self) {
        let number = self.userfaultfd().map(|userfaultfd| self.peer.number_of(userfaultfd.as_fd()));
        // Another error is of a process that this one may not read.
        self.known.is_foreign =
            matches!(number, Some(Err(cause)) if cause.kind() == io::ErrorKind::NotFound);
    }

    /// Ends the peer. Returns whether that was done: a refusal means that it has ended, or is not a machine's.
    pub(crate) fn kill(&self) -> bool {
        !self.known.is_foreign && self.peer.kill().is_ok()
    }

    /// Opens the memory of the peer and its page table.
    pub(crate) fn open_memory(&self) -> io::Result<(File, File)> {
        if self.known.is_foreign {
            let reason = "the process was named by a worker, and does not have the userfaultfd";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        self.peer.open_memory()
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
        let (mut part, known) = ([0; 4096], &mut self.known);
        while !known.is_ended {
            match peer::receive(&self.stream, &mut part, &mut self.fds) {
                Ok(len) if len > 0 => self.bytes.extend_from_slice(&part[..len]),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return,
                Err(cause) if cause.kind() == io::ErrorKind::InvalidData => {
                    known.other_fds += 1;
                }
                Ok(_) | Err(_) => known.is_ended = true,
            }
            known.other_fds += self.fds.len().saturating_sub(TAKEN_FDS);
            self.fds.truncate(TAKEN_FDS);
            known.is_ended |= self.bytes.len() >= TAKEN_BYTES || known.other_fds > 0;
        }
    }

    /// Returns whether a worker has to look at it: what came may be a whole message, or none. So a monitor
    /// that sends one byte at a time costs no look for each.
    pub(crate) fn may_be_whole(&self) -> bool {
        let bytes = self.bytes.trim_ascii();
        match bytes.first() {
            Some(b'[') => self.known.is_ended || bytes.last() == Some(&b']'),
            // Of a program that attaches.
            Some(b'{') => self.known.is_ended || matches!(bytes.last(), Some(b'}' | b']')),
            Some(_) => true,
            None => self.known.is_ended,
        }
    }

    /// Notes that a worker is to look at it. Returns whether it may: none looks at each part of a message without end.
    pub(crate) fn may_look(&mut self) -> bool {
        self.looks += 1;
        self.looks <= LOOKS
    }

    /// Returns how many descriptors came by it.
    pub(crate) fn count_descriptors(&self) -> usize {
        self.fds.len() + self.known.other_fds
    }

    /// Returns the userfaultfd that came by it.
    pub(crate) fn userfaultfd(&self) -> Option<&OwnedFd> {
        self.fds.first()
    }

    /// Returns the log of another server, which a program that attaches again has sent.
    pub(crate) fn earlier_log(&self) -> Option<&OwnedFd> {
        self.fds.get(1)
    }

    /// Returns whether the other side of the stream has closed it, or broken the protocol: nothing more is
    /// to come.
    pub(crate) fn is_closed(&self) -> bool {
        let answer = peer::receive(&self.stream, &mut [0; 64], &mut Vec::new());
        !matches!(answer, Err(cause) if cause.kind() == io::ErrorKind::WouldBlock)
    }

    /// Returns what another process gets, with [`Connection::descriptors`] and the bytes.
    pub(crate) fn kept(&self, session: u64) -> Kept {
        Kept {
            session,
            pid: self.peer.pid(),
            uid: self.peer.uid(),
            known: self.known,
            has_log: self.log.is_some(),
            has_log_file: self.log_file.is_some(),
            age_ns: nanoseconds(self.since.elapsed()),
        }
    }

    /// Returns its descriptors: the stream, the pidfd, the log and the file for the next one if there
    /// are any, and what the monitor sent.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let own = [self.stream.as_fd(), self.peer.as_fd()].into_iter();
        own.chain(self.log.iter().map(AsFd::as_fd))
            .chain(self.log_file.iter().map(AsFd::as_fd))
            .chain(self.fds.iter().map(AsFd::as_fd))
            .collect()
    }

    /// Makes the connection that another process had, and its number. `None` if a descriptor is missing.
    pub(crate) fn from_kept(kept: &Kept, fds: Vec<OwnedFd>, bytes: Vec<u8>) -> Option<(u64, Self)> {
        let mut fds = fds.into_iter();
        let stream = UnixStream::from(fds.next()?);
        let peer = Peer::from_parts(kept.pid, kept.uid, fds.next()?)?;
        let log = if kept.has_log { Some(fds.next()?) } else { None };
        let log_file = if kept.has_log_file { Some(fds.next()?) } else { None };
        let age = Duration::from_nanos(kept.age_ns);
        let connection = Self {
            bytes,
            fds: fds.collect(),
            since: Instant::now().checked_sub(age).unwrap_or_else(Instant::now),
            log,
            log_file,
            ..Self::known(stream, peer, kept.known)
        };
        Some((kept.session, connection))
    }

    /// Makes the connection of a machine whose server has died, and the number of its session, of what was kept of it: the
    /// stream, the process, the file for its log and the userfaultfd. With a log in its file, it is a machine.
    pub(crate) fn of_the_dead(
        kept: &Kept,
        image: String,
        [stream, process, log_file, userfaultfd]: [OwnedFd; 4],
        sent: &[u8],
    ) -> io::Result<(u64, Self)> {
        let log_file = File::from(log_file);
        // A worker that was killed before it read anything has left no log in it.
        let has_log = EventLog::is_in_file(&log_file)?;
        let log = has_log.then(|| log_file.try_clone()).transpose()?.map(OwnedFd::from);
        let memory = if has_log { kept.known.memory.or(Some((0, 0))) } else { None };
        let is_ended = kept.known.is_ended || has_log;
        let known = Known { memory, is_ended, ..kept.known };
        let kept = Kept { known, has_log, has_log_file: false, ..*kept };
        let fds = [Some(stream), Some(process), log, Some(userfaultfd)];
        let fds = fds.into_iter().flatten().collect();
        let (session, mut connection) =
            Self::from_kept(&kept, fds, sent.to_vec()).ok_or(io::ErrorKind::InvalidData)?;
        (connection.image, connection.log_file) = (Some(image), Some(log_file.into()));
        Ok((session, connection))
    }

    /// Ends the process if it handed memory over: its faults would wait for ever. A program that attaches
    /// notices the end of the stream, and is not ended. Returns whether that was done.
    pub(crate) fn end_if_it_has_memory(&mut self) -> bool {
        let is_program = self.is_program();
        let has_memory =
            std::mem::take(&mut self.fds).into_iter().any(|fd| Remote::adopt(fd).is_ok());
        has_memory && !is_program && self.kill()
    }

    /// Returns whether it is of a program that attaches, which goes on to the next server by itself.
    pub(crate) fn is_program(&self) -> bool {
        is_of_program(&self.bytes)
    }

    /// Returns whether the service manager is to keep what came: a machine may come of it that waits if its
    /// server dies, and it is the first part, or it may be whole and is more than before.
    pub(crate) fn is_worth_keeping(&self) -> bool {
        let is_news = match self.kept_bytes {
            None => true,
            Some(len) => {
                self.may_be_whole() && self.bytes.len() > len && self.times_kept < TIMES_KEPT
            }
        };
        is_news && self.may_be_a_machine()
    }

    /// Returns whether what it gives back is logged in the file for it.
    pub(crate) fn is_logged_in_its_file(&self) -> bool {
        let number = |fd: &OwnedFd| {
            let of = File::from(fd.try_clone()?).metadata()?;
            io::Result::Ok((of.dev(), of.ino()))
        };
        let numbers = [&self.log, &self.log_file].map(|fd| fd.as_ref().map(number));
        matches!(numbers, [Some(Ok(log)), Some(Ok(file))] if log == file)
    }

    /// Returns whether it may be kept: what is kept states what the machine gave back.
    pub(crate) fn may_be_kept(&self) -> bool {
        self.log.is_none() || self.is_logged_in_its_file()
    }

    /// Returns whether a machine may come of it, and not a program that attaches.
    pub(crate) fn may_be_a_machine(&self) -> bool {
        self.count_descriptors() == 1 && !self.is_program()
    }

    /// Returns what is known of the machine, if there is one.
    pub(crate) fn status(&self, session: u64) -> Option<SessionStatus> {
        let (len_bytes, page_bytes) = self.known.memory?;
        Some(SessionStatus {
            session,
            pid: self.peer.pid(),
            uid: self.peer.uid(),
            can_be_killed: self.known.can_be_killed,
            can_be_read: self.known.can_be_read,
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

/// Returns whether a message is of a program that attaches.
pub(crate) fn is_of_program(bytes: &[u8]) -> bool {
    bytes.trim_ascii_start().starts_with(b"{")
}

#[cfg(test)]
pub(crate) mod tests {
    use std::process::{Child, Command};

    use rustix::process::{Pid, PidfdFlags};

    use super::*;

    /// Starts a process that has a descriptor.
    pub(crate) fn process_with(fd: &impl AsFd) -> (Child, Peer) {
        let stdin = fd.as_fd().try_clone_to_owned().unwrap();
        let process = Command::new("/bin/cat").stdin(stdin).spawn().unwrap();
        let pidfd = rustix::process::pidfd_open(Pid::from_child(&process), PidfdFlags::empty());
        let peer = Peer::from_parts(process.id(), 0, pidfd.unwrap()).unwrap();
        (process, peer)
    }

    /// Makes the connection of a process by which a descriptor has come.
    pub(crate) fn connection_with(peer: Peer, fd: OwnedFd) -> Connection {
        let (stream, _far) = UnixStream::pair().unwrap();
        Connection { fds: vec![fd], ..Connection::new(stream, peer) }
    }

    #[test]
    fn a_process_that_has_not_the_userfaultfd_is_neither_ended_nor_read() {
        // What is compared are open files: here those of pipes.
        let ((known, _near), (other, _far)) = (io::pipe().unwrap(), io::pipe().unwrap());
        let (mut process, peer) = process_with(&known);
        let (stream, _far) = UnixStream::pair().unwrap();
        let mut connection = Connection::new(stream, peer);
        let may = |connection: &mut Connection, fd: OwnedFd| {
            connection.fds = vec![fd];
            connection.check_peer();
            connection.ask_for_rights();
            (connection.known.can_be_killed, connection.known.can_be_read)
        };
        assert_eq!(may(&mut connection, known.into()), (true, true));
        assert_eq!(may(&mut connection, other.into()), (false, false));
        assert!(!connection.kill());
        assert!(process.try_wait().unwrap().is_none(), "it runs");
        assert!(connection.kept(1).known.is_foreign, "the next keeper knows");
        process.kill().unwrap();
        process.wait().unwrap();
    }
}

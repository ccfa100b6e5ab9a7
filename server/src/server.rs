//! Accepting monitors, and the end of machines: [`Server`]. One thread waits for all of it and never for
//! one client; faults are answered by the threads of an [`Engine`].

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_fault::{Backing, Engine, EngineOptions, FileBacking, PageSize, Remote, RemoteRegion};
use uzone_os::peer::{self, Peer};
use uzone_os::uffd::{Doorbell, EventSet, ReadyKeys};
use uzone_snapshot::{Image, OpenOptions, SnapshotBacking, SnapshotError};

use crate::error::ServeError;
use crate::handshake::{self, HandshakeError, MESSAGE_BYTES};
use crate::session::{Log, OnFailure, Session, SessionEvent, SessionParts};
use crate::socket::ListeningSocket;

/// The keys of what is waited for beside connections, which count from 2 on.
const LISTENER: u64 = 0;
const STOP: u64 = 1;

/// How long a monitor may take for its message.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// How many connections may be without a whole message; further ones wait.
const GREETINGS: usize = 64;
/// How long to wait after a connection that could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(10);
/// How often a machine is probed whose monitor ended before it did.
const PROBE: Duration = Duration::from_millis(200);

/// How a packed image starts: a frame of zstd, or one that is skipped. RFC 8878.
const ZSTD_FRAME: u32 = 0xfd2f_b528;
const FIRST_SKIPPABLE: u32 = 0x184d_2a50;
const LAST_SKIPPABLE: u32 = 0x184d_2a5f;
/// What the length of raw memory is a multiple of.
const RAW_PAGE: u64 = 4096;

/// How machines are served.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    mode: u32,
    on_failure: OnFailure,
    deadline: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        let (mode, on_failure) = (0o600, OnFailure::default());
        Self { mode, on_failure, deadline: Duration::from_secs(30) }
    }
}

impl ServerOptions {
    /// Sets who may connect, as the mode of a file: its owner alone by default.
    #[must_use]
    pub fn mode(mut self, mode: u32) -> Self {
        self.mode = mode;
        self
    }

    /// Sets what becomes of a machine whose page cannot be produced: its monitor is killed by default.
    #[must_use]
    pub fn on_failure(mut self, on_failure: OnFailure) -> Self {
        self.on_failure = on_failure;
        self
    }

    /// Sets how long a page may take to be produced: 30 seconds by default.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
}

/// What a server did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Served {
    /// How many machines it served.
    pub sessions: u64,
    /// How many of them it left: their faults wait until another server answers, or they are ended.
    pub left: usize,
}

/// A connection.
enum Connection {
    /// Whose message is not whole.
    Greeting { stream: UnixStream, bytes: Vec<u8>, fds: Vec<OwnedFd>, since: Instant },
    /// Of a machine that is served. The stream stays open: a monitor may take its end for ours.
    Serving { session: Session, _stream: UnixStream },
}

/// Serves each machine that connects to a socket from one image.
pub struct Server {
    socket: Option<ListeningSocket>,
    backing: Arc<dyn Backing>,
    engine: Engine,
    options: ServerOptions,
    log: Log,
    set: EventSet,
    connections: HashMap<u64, Connection>,
    /// Sessions whose monitor has ended.
    orphans: Vec<u64>,
    next: u64,
    is_accepting: bool,
    served: Served,
}

impl Server {
    /// Listens on `socket`, and answers from `image`, a packed image or the raw bytes of memory. `log` is
    /// called with all that happens.
    ///
    /// # Errors
    /// [`ServeError`]: the image cannot be read, or the socket cannot be made.
    pub fn bind(
        socket: &Path,
        image: &Path,
        options: ServerOptions,
        log: impl Fn(&SessionEvent) + Send + Sync + 'static,
    ) -> Result<Self, ServeError> {
        let backing = open(image)?;
        let engine = Engine::with(EngineOptions::default())?;
        let set = EventSet::new().map_err(ServeError::Wait)?;
        let socket = ListeningSocket::bind(socket, options.mode)?;
        set.add(&socket.listener, LISTENER).map_err(ServeError::Wait)?;
        Ok(Self {
            socket: Some(socket),
            backing,
            engine,
            options,
            log: Arc::new(log),
            set,
            connections: HashMap::new(),
            orphans: Vec::new(),
            next: STOP + 1,
            is_accepting: true,
            served: Served::default(),
        })
    }

    /// Serves until `stop` rings. Then no machine is accepted any more, and it returns when the last one
    /// has ended, or when `stop` rings again.
    ///
    /// # Errors
    /// [`ServeError::Wait`] if the system refuses to wait.
    pub fn run(&mut self, stop: &Doorbell) -> Result<Served, ServeError> {
        self.set.add(stop, STOP).map_err(ServeError::Wait)?;
        let mut ready = ReadyKeys::new();
        loop {
            if self.socket.is_none() && self.connections.is_empty() {
                return Ok(self.served);
            }
            let timeout = (!self.orphans.is_empty() || self.greetings() > 0).then_some(PROBE);
            self.set.wait(&mut ready, timeout).map_err(ServeError::Wait)?;
            for &key in ready.keys() {
                match key {
                    LISTENER => self.accept(),
                    STOP => {
                        stop.silence().map_err(ServeError::Wait)?;
                        if self.is_stopped_again() {
                            self.served.left = self.connections.len();
                            return Ok(self.served);
                        }
                    }
                    key => self.ready(key),
                }
            }
            self.see_to_time();
        }
    }

    /// Stops accepting. Returns whether that was done before.
    fn is_stopped_again(&mut self) -> bool {
        let Some(socket) = self.socket.take() else { return true };
        if self.is_accepting {
            // It was waited for.
            let _ = self.set.remove(&socket.listener);
        }
        let is_greeting =
            |connection: &Connection| matches!(connection, Connection::Greeting { .. });
        self.connections.retain(|_, connection| !is_greeting(connection));
        false
    }

    fn greetings(&self) -> usize {
        let is_greeting = |one: &&Connection| matches!(one, Connection::Greeting { .. });
        self.connections.values().filter(is_greeting).count()
    }

    fn accept(&mut self) {
        while let Some(socket) = &self.socket {
            if self.greetings() >= GREETINGS {
                // Those that wait are taken when there is room.
                self.is_accepting = self.set.remove(&socket.listener).is_err();
                return;
            }
            let stream = match socket.listener.accept() {
                Ok((stream, _)) => stream,
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return,
                // One that went again, or no descriptor is free: the next wait tries again, a little later.
                Err(_) => return std::thread::sleep(ACCEPT_AGAIN),
            };
            let key = self.next;
            self.next += 1;
            if stream.set_nonblocking(true).and_then(|()| self.set.add(&stream, key)).is_err() {
                continue;
            }
            let (bytes, fds, since) = (Vec::new(), Vec::new(), Instant::now());
            self.connections.insert(key, Connection::Greeting { stream, bytes, fds, since });
        }
    }

    /// Goes on with a connection: more of its message is there, or its monitor ended.
    fn ready(&mut self, key: u64) {
        match self.connections.remove(&key) {
            Some(Connection::Greeting { stream, mut bytes, mut fds, since }) => {
                match read(&stream, &mut bytes, &mut fds) {
                    Ok(None) => {
                        let greeting = Connection::Greeting { stream, bytes, fds, since };
                        self.connections.insert(key, greeting);
                    }
                    Ok(Some(message)) => self.start(key, stream, message, fds),
                    // A probe of whether there is a server.
                    Err(HandshakeError::Ended(0)) if fds.is_empty() => {}
                    Err(error) => self.refuse(&stream, fds, error.to_string()),
                }
            }
            Some(Connection::Serving { session, _stream }) => {
                // A pidfd stays ready: the memory is looked at by the clock from now on.
                let _ = self.set.remove(session.peer());
                self.connections.insert(key, Connection::Serving { session, _stream });
                self.orphans.push(key);
            }
            None => {}
        }
    }

    fn start(
        &mut self,
        key: u64,
        stream: UnixStream,
        (regions, page): (Vec<RemoteRegion>, PageSize),
        mut fds: Vec<OwnedFd>,
    ) {
        // It is waited for no longer: of older monitors it ends at once, and means nothing.
        let _ = self.set.remove(&stream);
        if fds.len() != 1 {
            let error = HandshakeError::Descriptors(fds.len());
            return self.refuse(&stream, fds, error.to_string());
        }
        let Some(fd) = fds.pop() else { return };
        let kept = fd.try_clone();
        let started = self.session(&stream, fd, regions, page).and_then(|session| {
            let watched = self.set.add(session.peer(), key);
            watched.map(|()| session).map_err(|cause| cause.to_string())
        });
        match started {
            Ok(session) => {
                self.served.sessions += 1;
                self.connections.insert(key, Connection::Serving { session, _stream: stream });
            }
            Err(reason) => self.refuse(&stream, kept.into_iter().collect(), reason),
        }
    }

    fn session(
        &self,
        stream: &UnixStream,
        fd: OwnedFd,
        regions: Vec<RemoteRegion>,
        page: PageSize,
    ) -> Result<Session, String> {
        let peer = Peer::of(stream).map_err(|cause| format!("the monitor is unknown: {cause}"))?;
        if self.options.on_failure == OnFailure::Kill && !peer.can_be_killed() {
            return Err(format!(
                "process {} of user {} may not be killed by this server: run it as that user, or serve \
                 with --on-failure poison or hold",
                peer.pid(),
                peer.uid()
            ));
        }
        let remote = Remote::adopt(fd).map_err(|error| error.to_string())?;
        Session::start(SessionParts {
            number: self.served.sessions + 1,
            peer: Arc::new(peer),
            remote,
            regions,
            page,
            backing: self.backing.clone(),
            engine: &self.engine,
            on_failure: self.options.on_failure,
            deadline: self.options.deadline,
            log: self.log.clone(),
        })
    }

    /// Closes a connection that no machine comes of. If a userfaultfd came with it, the process is killed
    /// where failures are: its faults would wait for ever.
    fn refuse(&self, stream: &UnixStream, fds: Vec<OwnedFd>, reason: String) {
        let peer = Peer::of(stream).ok();
        let has_memory = fds.into_iter().any(|fd| Remote::adopt(fd).is_ok());
        let is_ended = has_memory && self.options.on_failure == OnFailure::Kill;
        let was_killed = is_ended && peer.as_ref().is_some_and(|peer| peer.kill().is_ok());
        let pid = peer.map(|peer| peer.pid());
        (self.log)(&SessionEvent::Refused { pid, reason, was_killed });
    }

    /// Ends sessions whose memory is gone, and connections without a message; accepts again.
    fn see_to_time(&mut self) {
        let mut orphans = std::mem::take(&mut self.orphans);
        orphans.retain(|key| {
            let Some(Connection::Serving { session, .. }) = self.connections.get(key) else {
                return false;
            };
            if !session.is_gone() {
                return true;
            }
            (self.log)(&session.ended());
            self.connections.remove(key);
            false
        });
        self.orphans = orphans;
        let is_late = |connection: &Connection| match connection {
            Connection::Greeting { since, .. } => since.elapsed() >= HANDSHAKE_WITHIN,
            Connection::Serving { .. } => false,
        };
        let late: Vec<u64> =
            self.connections.iter().filter(|(_, one)| is_late(one)).map(|(key, _)| *key).collect();
        for key in late {
            if let Some(Connection::Greeting { stream, fds, .. }) = self.connections.remove(&key) {
                let reason = format!("no whole message came within {HANDSHAKE_WITHIN:?}");
                self.refuse(&stream, fds, reason);
            }
        }
        if let Some(socket) = &self.socket
            && !self.is_accepting
            && self.greetings() < GREETINGS
        {
            self.is_accepting = self.set.add(&socket.listener, LISTENER).is_ok();
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("socket", &self.socket)
            .field("options", &self.options)
            .field("served", &self.served)
            .finish_non_exhaustive()
    }
}

/// Reads what is there of a message. Returns it when it is whole.
fn read(
    stream: &UnixStream,
    bytes: &mut Vec<u8>,
    fds: &mut Vec<OwnedFd>,
) -> Result<Option<(Vec<RemoteRegion>, PageSize)>, HandshakeError> {
    let mut part = [0; 4096];
    loop {
        match peer::receive(stream, &mut part, fds) {
            Ok(0) => return Err(HandshakeError::Ended(bytes.len())),
            Ok(len) => bytes.extend_from_slice(&part[..len]),
            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(cause) if cause.kind() == io::ErrorKind::InvalidData => {
                return Err(HandshakeError::Descriptors(fds.len() + 1));
            }
            Err(_) => return Err(HandshakeError::Ended(bytes.len())),
        }
        if bytes.len() > MESSAGE_BYTES {
            return Err(HandshakeError::TooLong);
        }
        if let Some(message) = handshake::regions(bytes)? {
            return Ok(Some(message));
        }
    }
}

/// Opens a packed image, or the raw bytes of memory. A packed image that lost its end would look like raw
/// bytes, and a machine would get what is compressed for its memory: so a file that starts as a packed image
/// does, or is not whole pages, is not taken for raw.
fn open(path: &Path) -> Result<Arc<dyn Backing>, ServeError> {
    let not_packed = match Image::open(path, &OpenOptions::default()) {
        Ok(image) => return Ok(Arc::new(SnapshotBacking::new(Arc::new(image)))),
        Err(error @ SnapshotError::NotAnImage { .. }) => error,
        Err(error) => return Err(error.into()),
    };
    let failed = |cause| {
        let name = path.display().to_string();
        SnapshotError::Read { name, offset: 0, len_bytes: 0, cause }
    };
    let file = File::open(path).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    let mut start = [0; 4];
    let is_packed = match file.read_exact_at(&mut start, 0) {
        Ok(()) => {
            matches!(u32::from_le_bytes(start), ZSTD_FRAME | FIRST_SKIPPABLE..=LAST_SKIPPABLE)
        }
        Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => true,
        Err(cause) => return Err(failed(cause).into()),
    };
    if is_packed || len % RAW_PAGE != 0 {
        return Err(not_packed.into());
    }
    Ok(Arc::new(FileBacking::new(file).map_err(failed)?))
}

//! Answering the faults of machines: [`Worker`]. One thread waits for connections, which a keeper hands
//! over, and for the end of machines; faults are answered by the threads of an [`Engine`].

pub(crate) mod dialect;
mod huge;
mod session;
mod working_set;

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::iter;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uzone_attach::protocol::{Reply, Request, VERSION};
use uzone_fault::{
    AdoptedMemory, Backing, Engine, EngineOptions, EventLog, FileBacking, LoggedEvents, MapError,
    Memory as Pages, ReaderPlacement, Remote, RemoteRegion, SharedBacking, Zone,
};
use uzone_os::uffd::{EventSet, PendingFaults};
use uzone_os::{MessageSocket, Vaddr};
use uzone_pages::{ByteLen, ErrorKind};
use uzone_snapshot::{FrameCache, Image, OpenOptions, Root, SnapshotBacking, SnapshotError};

use self::dialect::{Dialect, Memory, Said};
use self::huge::Finder;
use self::session::{Session, SessionParts};
use self::working_set::Recording;
use crate::capture::{CaptureReply, CaptureRequest};
use crate::connection::Connection;
use crate::error::ServeError;
use crate::event::ServeEvent;
use crate::keeper::estate::Estate;
use crate::link::{self, Heirlooms, Order, Report, Titled};
use crate::options::{OnFailure, Prefetch, ServerOptions};
use crate::sandbox::{Beside, Files, Sandbox};

/// The key of the keeper; sessions have their numbers, which start at 1, and clients that read the memory of a
/// session numbers with this bit.
const KEEPER: u64 = 0;
const CLIENT: u64 = 1 << 63;
/// How often a machine is probed whose monitor ended before it did.
const PROBE: Duration = Duration::from_millis(200);

/// How long a service manager may take to end what is left of a server.
const MANAGER_WITHIN: Duration = Duration::from_secs(2);
/// How often it is written down which pages machines touch.
const RECORD_EVERY: Duration = Duration::from_secs(2);

/// What a keeper sends to a worker before all else.
#[derive(Debug)]
pub struct WorkerStart {
    keeper: MessageSocket,
    files: Vec<(String, File)>,
    has_machines: bool,
}

impl WorkerStart {
    /// Receives it by the descriptor that the keeper's start of this process was given.
    ///
    /// # Errors
    /// [`ServeError::Wait`] if that is no such descriptor, or the keeper has ended.
    pub fn receive(keeper: OwnedFd) -> Result<Self, ServeError> {
        let keeper = MessageSocket::from_fd(keeper).map_err(ServeError::Wait)?;
        let received = link::receive_files(&keeper, &mut link::room());
        let (files, has_machines) = received.map_err(ServeError::Wait)?;
        Ok(Self { keeper, files, has_machines })
    }

    /// Returns whether machines may wait for the worker: it is better to serve them without what costs time alone.
    #[must_use]
    pub fn has_machines(&self) -> bool {
        self.has_machines
    }
}

/// Answers the faults of machines from one image, in a process of its own.
pub struct Worker {
    backing: Arc<dyn Backing>,
    /// The pages that attached programs share, if any of them asked for that.
    shared: Option<Arc<SharedBacking>>,
    /// What tells the image from others.
    image: String,
    /// Where it is, and its files.
    path: String,
    files: Vec<(String, File)>,
    /// The keeper, if this process is a worker of one.
    keeper: Option<Arc<MessageSocket>>,
    engine: Engine,
    options: ServerOptions,
    set: EventSet,
    sessions: HashMap<u64, Session>,
    /// The clients that read the memory of a session, by their keys.
    clients: HashMap<u64, Client>,
    next_client: u64,
    /// What the next keeper needs, should this one die.
    heirlooms: Option<Heirlooms>,
    /// How this process is confined.
    sandbox: Sandbox,
    /// Sessions whose monitor has ended.
    orphans: Vec<u64>,
    /// The bytes of the image to install before they are touched.
    prefetch: Vec<u64>,
    recording: Option<Recording>,
    recorded: Instant,
    huge: Finder,
}

/// A client that reads the memory of a session.
struct Client {
    session: u64,
    socket: Arc<MessageSocket>,
    /// The count of pending faults, until it asks that pages are kept.
    pending: Option<PendingFaults>,
    /// Whether pages are kept for it.
    captures: bool,
}

impl Worker {
    /// Opens `image`, a packed image or the raw bytes of memory.
    ///
    /// Unless [`ServerOptions::sandbox`] turns that off, this thread and those that it starts are confined
    /// from then on, for good: so this is for a process of its own, before it has other threads.
    ///
    /// # Errors
    /// [`ServeError`]: the image cannot be read, or a thread is refused.
    pub fn open(image: &Path, options: ServerOptions) -> Result<Self, ServeError> {
        Self::open_by(image, options, Vec::new(), false)
    }

    /// Opens `image` for a keeper. If the image was open in an earlier worker, it is the same, although its files may
    /// have been replaced since. Where machines wait, a list of pages that cannot be read or written is a warning.
    ///
    /// # Errors
    /// As of [`Worker::open`].
    pub fn open_for(
        start: WorkerStart,
        image: &Path,
        options: ServerOptions,
    ) -> Result<Self, ServeError> {
        let WorkerStart { keeper, files, has_machines } = start;
        let worker = Self::open_by(image, options, files, has_machines)?;
        Ok(Self { keeper: Some(Arc::new(keeper)), ..worker })
    }

    fn open_by(
        image: &Path,
        options: ServerOptions,
        files: Vec<(String, File)>,
        has_machines: bool,
    ) -> Result<Self, ServeError> {
        // Once this thread is confined, it makes no userfaultfd.
        let _ = ReaderPlacement::of_this_process();
        let sandbox =
            if options.sandbox { Sandbox::without_capabilities() } else { Sandbox::off() };
        let mut sandbox = sandbox.map_err(ServeError::Capabilities)?;
        // Both read files of the kernel: how many CPUs there are, and how much memory.
        let threads = EngineOptions::default().zone(Zone::default()).own_threads();
        let is_remote = uzone_snapshot::is_url(image);
        if is_remote && options.sandbox {
            // Opening it starts the threads that fetch.
            confine(&mut sandbox, &options, Files::remote());
        }
        let opened = open(image, &options, files).map_err(|error| match error {
            ServeError::Image(cause)
                if cause.kind() == ErrorKind::PermissionDenied && !is_remote =>
            {
                ServeError::Unreadable { path: image.to_owned(), user: sandbox.user, cause }
            }
            error => error,
        });
        let Opened { backing, image: identity, root, opened, files, working_set, page_bytes } =
            opened?;
        let pages = pages_ahead(&options.prefetch, working_set, root);
        let recording = options.record.clone().map(|path| {
            let recording = Recording::open(working_set::file_of(&path, root), page_bytes);
            recording.map_err(|cause| ServeError::WorkingSet { path, cause })
        });
        // Both cost time alone.
        let pages = unless_machines_wait(has_machines, pages.map(Some))?.unwrap_or_default();
        let recording = unless_machines_wait(has_machines, recording.transpose())?;
        // As another process finds it, which runs elsewhere.
        let absolute = std::path::absolute(image).ok().filter(|_| !is_remote);
        let path = absolute.as_deref().unwrap_or(image).display().to_string();
        let engine = engine(threads, &mut sandbox, &options, files)?;
        Ok(Self {
            backing,
            shared: None,
            image: identity,
            path,
            files: opened,
            keeper: None,
            engine,
            sandbox,
            options,
            set: EventSet::new().map_err(ServeError::Wait)?,
            sessions: HashMap::new(),
            clients: HashMap::new(),
            next_client: CLIENT,
            heirlooms: None,
            orphans: Vec::new(),
            prefetch: pages.into_iter().map(|page| page.saturating_mul(page_bytes)).collect(),
            recording,
            recorded: Instant::now(),
            huge: Finder::new(),
        })
    }

    /// Returns how this process is confined.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Serves the machines that the keeper hands over. Returns when that has ended: [`Worker::into_estate`] is what
    /// it leaves. Without a keeper it returns at once.
    ///
    /// # Errors
    /// [`ServeError::Wait`] if the system refuses to wait.
    pub fn run(&mut self) -> Result<(), ServeError> {
        let Some(keeper) = self.keeper.clone() else { return Ok(()) };
        self.set.add(&*keeper, KEEPER).map_err(ServeError::Wait)?;
        let (mut room, mut ready) = (link::room(), Vec::new());
        let (names, files): (Vec<_>, Vec<_>) =
            self.files.iter().map(|(name, file)| (name.clone(), file.as_fd())).unzip();
        let image = Report::Image(self.image.clone(), self.path.clone(), names);
        let mut is_kept = link::report(&keeper, &image, &files)
            .and_then(|()| link::report(&keeper, &Report::Sandbox(self.sandbox.clone()), &[]))
            .and_then(|()| link::report(&keeper, &Report::Next, &[]))
            .is_ok();
        while is_kept {
            self.wait(&mut ready)?;
            for &key in &ready {
                if key & CLIENT != 0 {
                    if !self.hear(key, &mut room) {
                        self.forget_client(key);
                    }
                    continue;
                }
                if key != KEEPER {
                    self.monitor_ended(key);
                    continue;
                }
                // A message that is none is of no keeper of this version.
                let order = link::receive(&keeper, &mut room).unwrap_or_default();
                is_kept = order.is_some_and(|order| self.obey(&keeper, order));
            }
            self.end_slow_captures();
            for (number, blocks) in self.huge.find(&mut self.sessions) {
                let blocks = blocks.into_iter().map(Vaddr::get).collect();
                // Without a keeper there is no right to it either.
                let _ = link::report(&keeper, &Report::Blocks(number, blocks), &[]);
            }
            self.end_the_gone(|event| {
                // Without a keeper there is no log.
                let _ = link::report(&keeper, &Report::Event(event), &[]);
            });
        }
        Ok(())
    }

    /// Stops answering, and returns everything for a keeper that takes the place of the one that has ended
    /// ([`Keeper::inherit`](crate::Keeper::inherit)).
    ///
    /// Under a service manager it answers faults for two seconds more before that: a manager that ends what
    /// is left of a server, and starts it again, does so by then.
    #[must_use]
    pub fn into_estate(self) -> Option<Estate> {
        if self.heirlooms.as_ref().is_some_and(|heirlooms| heirlooms.manager.is_some()) {
            std::thread::sleep(MANAGER_WITHIN);
        }
        let next = self.sessions.keys().max().map_or(1, |last| last + 1);
        let sessions = self.sessions.into_iter();
        // Each stops reading events before its log goes on.
        let connections = sessions.map(|(number, session)| {
            let mut connection = session.into_connection();
            // A worker of the next keeper may find another one.
            connection.image.get_or_insert(self.image.clone());
            (number, connection)
        });
        let connections = connections.collect();
        let Heirlooms { socket, control, metrics, manager, folder } = self.heirlooms?;
        let (is_confined, files) = (true, self.files);
        let estate = Estate::new(socket, connections, next);
        Some(Estate { is_confined, control, metrics, manager, folder, files, ..estate })
    }

    fn wait(&self, ready: &mut Vec<u64>) -> Result<(), ServeError> {
        let orphans = (!self.orphans.is_empty()).then_some(PROBE);
        let records = self.recording.is_some() && !self.sessions.is_empty();
        let looks = orphans.or((!self.clients.is_empty()).then_some(PROBE));
        let timeout = looks.or(records.then_some(RECORD_EVERY));
        let timeout = [timeout, self.huge.timeout(&self.sessions)].into_iter().flatten().min();
        self.set.wait(ready, timeout).map_err(ServeError::Wait)
    }

    /// Writes down which pages were touched, if it is time.
    fn record(&mut self, is_time: bool) {
        let Some(recording) = &mut self.recording else { return };
        if !is_time && self.recorded.elapsed() < RECORD_EVERY {
            return;
        }
        for session in self.sessions.values() {
            recording.add(&session.take_trace());
        }
        if let Err(cause) = recording.write() {
            tracing::warn!(%cause, "the pages that machines touch cannot be recorded");
        }
        self.recorded = Instant::now();
    }

    /// Looks at a session by the clock from now on: what has ended stays ready.
    fn monitor_ended(&mut self, number: u64) {
        if let Some(session) = self.sessions.get(&number) {
            for fd in session.watched() {
                let _ = self.set.remove(fd);
            }
            self.orphans.push(number);
        }
    }

    /// Ends sessions whose memory is gone.
    fn end_the_gone(&mut self, mut ended: impl FnMut(ServeEvent)) {
        // Before a session goes.
        self.record(!self.orphans.is_empty());
        let had_sessions = !self.sessions.is_empty();
        let sessions = &mut self.sessions;
        self.orphans.retain(|number| {
            let Some(session) = sessions.get(number) else { return false };
            if session.is_gone() {
                ended(session.ended());
                sessions.remove(number);
            }
            sessions.contains_key(number)
        });
        if had_sessions && self.sessions.is_empty() {
            // The pages take memory; a program that comes later has the file made anew.
            self.shared = None;
        }
    }

    /// Does what a client asks for that reads the memory of a session. Returns whether more may come.
    fn hear(&mut self, key: u64, room: &mut [u8]) -> bool {
        let Some(client) = self.clients.get_mut(&key) else { return false };
        let message = link::receive_titled(&client.socket, room);
        let (Ok(Some(Titled { title, fds, .. })), Some(session)) =
            (message, self.sessions.get(&client.session))
        else {
            return false;
        };
        let mut fds = fds.into_iter();
        let reply = match (title, client.pending.take()) {
            (CaptureRequest::Protect, Some(pending)) => {
                let (Some(memory), Some(kept)) = (fds.next(), fds.next()) else { return false };
                match session.capture(memory.into(), kept, pending, client.socket.clone()) {
                    Ok(()) => {
                        client.captures = true;
                        CaptureReply::Protected
                    }
                    Err(error) => CaptureReply::Refused { reason: error.to_string() },
                }
            }
            (CaptureRequest::Read(until), None) if client.captures => {
                session.memory.captured_until(until);
                return true;
            }
            (CaptureRequest::End, None) if client.captures => {
                client.captures = false;
                let Some(captured) = session.memory.end_capture() else { return false };
                CaptureReply::ended(captured)
            }
            // Of a client that does not keep to the order.
            _ => return false,
        };
        link::send_titled(&client.socket, &reply, &[], &[]).is_ok() && client.captures
    }

    /// Closes the socket of a client, and ends what it captured.
    fn forget_client(&mut self, key: u64) {
        let Some(client) = self.clients.remove(&key) else { return };
        let _ = self.set.remove(&client.socket);
        if let Some(session) = self.sessions.get(&client.session).filter(|_| client.captures) {
            session.memory.end_capture();
        }
    }

    /// Ends captures for which a machine has waited too long, and those of machines that have ended.
    fn end_slow_captures(&mut self) {
        let deadline = self.options.deadline;
        let is_slow = |client: &Client| match self.sessions.get(&client.session) {
            Some(session) => {
                client.captures
                    && session
                        .memory
                        .capture_waits()
                        .is_some_and(|since| since.elapsed() >= deadline)
            }
            None => true,
        };
        let slow = self.clients.iter().filter(|(_, client)| is_slow(client)).map(|(key, _)| *key);
        for key in slow.collect::<Vec<_>>() {
            self.forget_client(key);
        }
    }

    /// Does what the keeper asks for, and asks for more. Returns whether the keeper is there.
    fn obey(&mut self, keeper: &Arc<MessageSocket>, order: Order) -> bool {
        match order {
            Order::Keep(heirlooms) => self.heirlooms = Some(heirlooms),
            Order::Take(number, connection) => {
                if !self.sessions.contains_key(&number) {
                    self.take(keeper, number, *connection);
                }
            }
            Order::Capture(session, socket, pending) => {
                let (key, socket) = (self.next_client, Arc::new(socket));
                // If it cannot be waited for, its socket is closed.
                if self.set.add(&socket, key).is_ok() {
                    self.next_client += 1;
                    let pending = Some(pending);
                    let client = Client { session, socket, pending, captures: false };
                    self.clients.insert(key, client);
                }
            }
            // It comes after a report that was waited for.
            Order::LogIsKept => return true,
            Order::Stats => {
                for (number, session) in &self.sessions {
                    let stats = Report::Stats(*number, session.stats());
                    if link::report(keeper, &stats, &[]).is_err() {
                        return false;
                    }
                }
            }
        }
        link::report(keeper, &Report::Next, &[]).is_ok()
    }

    /// Takes a connection, whose message may not be whole yet.
    fn take(&mut self, keeper: &Arc<MessageSocket>, number: u64, connection: Connection) {
        let pid = connection.peer.pid();
        let stream = connection.stream.try_clone();
        let said = dialect::read(&connection);
        let dialect = dialect::of(&connection.bytes);
        let reason = match (said, dialect) {
            (Ok(Said::Part), _) | (Ok(_), None) => return,
            (Ok(Said::Asks(request)), Some(dialect)) => self.answer(&connection, dialect, &request),
            (Ok(Said::Memory(memory)), Some(dialect)) => {
                self.serve(keeper, number, connection, dialect, memory)
            }
            // A probe of whether there is a server.
            (Err(ServeError::MessageEnded(0)), _) if !connection.has_descriptors() => {
                let _ = link::report(keeper, &Report::Probe(number), &[]);
                return;
            }
            (Err(error), _) => Err(error.to_string()),
        };
        let Err(reason) = reason else { return };
        if let (Some(dialect), Ok(stream)) = (dialect, stream) {
            // A client that has gone is not interested.
            let _ = dialect.reply(&stream, &Reply::Refused { reason: reason.clone() }, None);
        }
        // If it was not sent, the keeper has ended, which the next receive finds.
        let _ = link::report(keeper, &refused(number, pid, reason), &[]);
    }

    /// Answers a program that asks for the image.
    fn answer(
        &mut self,
        connection: &Connection,
        dialect: &dyn Dialect,
        request: &Request,
    ) -> Result<(), String> {
        let text = |error: &dyn fmt::Display| error.to_string();
        let Request::Attach { version, share, image, .. } = request;
        if *version != VERSION {
            return Err(format!("it asks by version {version}: this server has {VERSION}"));
        }
        if image.as_ref().is_some_and(|image| *image != self.image) {
            return Err(format!("its memory is of another image: this server has {}", self.image));
        }
        let len = self.backing.byte_len().ok_or("the image has no length")?;
        let file = if *share {
            match self
                .shared()
                .map_err(|error| text(&error))?
                .memory()
                .map_err(|error| text(&error))?
            {
                Pages::File { fd, .. } => Some(fd),
                _ => None,
            }
        } else {
            None
        };
        let (image, shares) = (self.image.clone(), file.is_some());
        let reply = Reply::Image { image, len_bytes: len.get(), shares };
        dialect
            .reply(&connection.stream, &reply, file.as_ref().map(AsFd::as_fd))
            .map_err(|cause| format!("it does not take the answer: {cause}"))
    }

    /// Returns the pages that attached programs share.
    fn shared(&mut self) -> Result<Arc<SharedBacking>, MapError> {
        if let Some(shared) = &self.shared {
            return Ok(shared.clone());
        }
        let keep = self.options.share.or(self.backing.byte_len()).unwrap_or(ByteLen::ZERO);
        let shared = Arc::new(SharedBacking::new(self.backing.clone(), keep)?);
        self.shared = Some(shared.clone());
        Ok(shared)
    }

    fn serve(
        &mut self,
        keeper: &Arc<MessageSocket>,
        number: u64,
        mut connection: Connection,
        dialect: &'static dyn Dialect,
        memory: Memory,
    ) -> Result<(), String> {
        let text = |error: &dyn fmt::Display| error.to_string();
        let (is_shared, is_tracked) = (memory.is_shared(), memory.is_tracked());
        let regions = memory.regions;
        let peer = &connection.peer;
        // A machine that another process served is better off with faults that are answered.
        let is_new = connection.is_greeting() && !connection.must_be_served;
        if self.options.on_failure == OnFailure::Kill && is_new && !connection.can_be_killed() {
            return Err(format!(
                "process {} of user {} may not be killed by this server: run it as that user, or serve \
                 with --on-failure poison or hold",
                peer.pid(),
                peer.uid()
            ));
        }
        let backing = match is_shared {
            true => self.shared().map_err(|error| text(&error))? as Arc<dyn Backing>,
            false => self.backing.clone(),
        };
        // Before there is a log as long as they say.
        let has = backing.byte_len().ok_or("the image has no length")?;
        dialect::check(&regions, has).map_err(|error| text(&error))?;
        let fd = connection.userfaultfd().ok_or("the userfaultfd is lost")?;
        let fd = fd.try_clone().map_err(|cause| text(&cause))?;
        let remote = Remote::adopt(fd).map_err(|error| text(&error))?;
        let removals = begin_log(keeper, number, &mut connection, &regions)?;
        let link = keeper.clone();
        let session = Session::start(SessionParts {
            number,
            connection,
            remote,
            regions,
            removals,
            backing,
            dialect,
            is_shared,
            is_tracked,
            engine: &self.engine,
            options: &self.options,
            prefetch: &self.prefetch,
            log: Arc::new(move |event| link::report(&link, &Report::Event(event), &[]).is_ok()),
        })?;
        for fd in session.watched() {
            self.set.add(fd, number).map_err(|cause| text(&cause))?;
        }
        self.sessions.insert(number, session);
        Ok(())
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("options", &self.options)
            .field("sessions", &self.sessions.len())
            .finish_non_exhaustive()
    }
}

/// Returns what was opened. Where machines wait, it is a warning if that failed.
fn unless_machines_wait<T>(
    has_machines: bool,
    opened: Result<Option<T>, ServeError>,
) -> Result<Option<T>, ServeError> {
    match opened {
        Err(error) if has_machines => {
            tracing::warn!(%error, "machines are served without it");
            Ok(None)
        }
        opened => opened,
    }
}

/// Returns the numbers of the pages that are installed before a machine touches them.
fn pages_ahead(
    prefetch: &Prefetch,
    of_image: Vec<u64>,
    root: Root,
) -> Result<Vec<u64>, ServeError> {
    let path = match prefetch {
        Prefetch::OfImage => return Ok(of_image),
        Prefetch::No => return Ok(Vec::new()),
        Prefetch::File(path) => path,
    };
    match working_set::read(&working_set::file_of(path, root)) {
        // What was recorded costs time alone, and is not there before the first run has ended.
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), "there is no list of pages to install ahead");
            Ok(Vec::new())
        }
        Err(cause) => Err(ServeError::WorkingSet { path: path.clone(), cause }),
        Ok(pages) => Ok(pages),
    }
}

/// Makes the log of a session, and has the keeper keep it before the first event is read.
fn begin_log(
    keeper: &MessageSocket,
    number: u64,
    connection: &mut Connection,
    regions: &[RemoteRegion],
) -> Result<EventLog, String> {
    let removals = make_log(connection, regions)?;
    let log = removals.fd().ok_or("the log has no descriptor")?;
    connection.log = Some(log.try_clone_to_owned().map_err(|cause| cause.to_string())?);
    link::report(keeper, &Report::Reading(number), &[log])
        .and_then(|()| link::receive(keeper, &mut link::room()))
        .map_err(|cause| format!("the keeper does not answer: {cause}"))?;
    // More of the stream means nothing.
    connection.is_ended = true;
    Ok(removals)
}

/// Makes the log of what a machine gives back, which goes on with that of the process that served it before.
fn make_log(connection: &mut Connection, regions: &[RemoteRegion]) -> Result<EventLog, String> {
    let before = match (connection.log.take(), connection.earlier_log()) {
        (Some(ours), _) => Some(LoggedEvents::read_trusted(ours)),
        (None, Some(theirs)) => Some(theirs.try_clone().and_then(LoggedEvents::read)),
        (None, None) => None,
    };
    let before = before.transpose().map_err(|cause| cause.to_string())?;
    let make = |file| AdoptedMemory::log(regions, before.as_ref(), file);
    if let Some(file) = connection.log_file.take() {
        match file.try_clone().map_err(MapError::MemoryFile).and_then(|file| make(Some(file))) {
            Ok(log) => {
                connection.log_file = Some(file);
                return Ok(log);
            }
            Err(error) => tracing::warn!(
                %error,
                "process {} is served, and not recovered if both processes of this server are killed: what it gives \
                 back cannot be logged in the folder of --recover",
                connection.peer.pid()
            ),
        }
    }
    make(None).map_err(|error| error.to_string())
}

/// Starts the threads that answer faults, and confines this process to what it needs from then on.
fn engine(
    threads: EngineOptions,
    sandbox: &mut Sandbox,
    options: &ServerOptions,
    files: Files,
) -> Result<Engine, ServeError> {
    if !options.sandbox {
        return Ok(Engine::with(threads)?);
    }
    let is_confined = files.is_remote;
    if !is_confined {
        confine_files(sandbox, options, files);
    }
    let beside = options.disk_cache.as_ref().map_or(Beside::Nothing, |_| Beside::Cache);
    let engine = sandbox.confine_threads(beside, || Engine::with(threads));
    let engine = engine.map_err(|cause| ServeError::Engine(MapError::Thread(cause)))?;
    if !is_confined {
        sandbox.confine_calls(false);
    }
    Ok(engine?)
}

/// Confines this process to what it needs, before it has other threads.
fn confine(sandbox: &mut Sandbox, options: &ServerOptions, files: Files) {
    let is_remote = files.is_remote;
    confine_files(sandbox, options, files);
    sandbox.confine_calls(is_remote);
}

fn confine_files(sandbox: &mut Sandbox, options: &ServerOptions, mut files: Files) {
    if let Prefetch::File(path) = &options.prefetch {
        files.read.push(path.clone());
    }
    if let Some(path) = &options.record {
        let parent = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = if path.is_dir() { Some(&**path) } else { parent };
        files.written.push(folder.unwrap_or(Path::new(".")).to_owned());
    }
    files.written.extend(options.disk_cache.iter().map(|disk| disk.directory().to_owned()));
    sandbox.confine_files(&files);
}

fn refused(session: u64, pid: u32, reason: String) -> Report {
    Report::Event(ServeEvent::Refused { session, pid, reason, was_killed: false })
}

/// An image.
struct Opened {
    backing: Arc<dyn Backing>,
    /// What tells it from others: its root hash, or which file it is.
    image: String,
    root: Root,
    /// Its files, with their names.
    opened: Vec<(String, File)>,
    /// What it is read from.
    files: Files,
    /// The pages that an earlier run touched.
    working_set: Vec<u64>,
    page_bytes: u64,
}

/// Opens a packed image, or the raw bytes of memory.
fn open(
    path: &Path,
    options: &ServerOptions,
    files: Vec<(String, File)>,
) -> Result<Opened, ServeError> {
    let cache = FrameCache::new(options.cache.get());
    let mut how = OpenOptions::default().cache(cache).requests(options.requests).files(files);
    if let Some(disk) = &options.disk_cache {
        how = how.disk_cache(disk.clone());
    }
    if let Some(root) = options.root {
        how = how.root(root);
    }
    let image = Image::open_or_raw(path, &how)?;
    let (working_set, page_bytes) = (image.working_set().to_vec(), image.page_bytes());
    let (name, root) = (image.identity(), image.root());
    let others = image.sources().into_iter().skip(1).map(PathBuf::from);
    let read = iter::once(path.to_owned()).chain(others).collect();
    let is_remote = uzone_snapshot::is_url(path);
    let files = Files { read, is_remote, ..Files::default() };
    let shared = |(name, file): (String, &File)| Some((name, file.try_clone().ok()?));
    // By a part of them an image cannot be opened again: then it is by its name.
    let opened = image.files().into_iter().map(shared).collect::<Option<_>>().unwrap_or_default();
    let backing: Arc<dyn Backing> = match image.raw_file() {
        Some(file) => {
            let backing = file.try_clone().and_then(FileBacking::new);
            let failed = |cause| {
                let name = image.name();
                SnapshotError::Read { name, offset: 0, len_bytes: 0, cause }
            };
            Arc::new(backing.map_err(failed)?)
        }
        None => Arc::new(SnapshotBacking::new(Arc::new(image))),
    };
    Ok(Opened { backing, image: name, root, opened, files, working_set, page_bytes })
}

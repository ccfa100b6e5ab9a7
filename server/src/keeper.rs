//! Keeping machines alive: [`Keeper`]. It owns the socket, receives and stores what monitors send, and hands
//! it to a worker, another process that parses it and answers faults. When a worker dies, the next one
//! gets everything again. The keeper parses nothing of a monitor's, and waits for no monitor and no worker.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::fs::File;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use uzone_os::peer::Peer;
use uzone_os::uffd::{Doorbell, EventSet, PendingFaults};
use uzone_os::{MessageSocket, Vaddr, privilege};

use crate::capture;
use crate::connection::Connection;
use crate::control::{self, Asked, Control, Request};
use crate::error::ServeError;
use crate::estate::Estate;
use crate::event::ServeEvent;
use crate::held_folder::HeldFolder;
use crate::huge::{AT_ONCE, Collapser, Outcome};
use crate::link::{self, Report};
use crate::manager::ServiceManager;
use crate::options::{OnFailure, ServerOptions};
use crate::recovery::Recovery;
use crate::sandbox::Sandbox;
use crate::socket::ListeningSocket;
use crate::status::{Status, nanoseconds};
use crate::takeover;

/// The keys of what is waited for beside connections, which count from 1 on.
const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;
const WORKER: u64 = u64::MAX - 2;
const CONTROL: u64 = u64::MAX - 3;
const HUGE: u64 = u64::MAX - 4;

/// How long a monitor may take for its message.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// How many connections may be without a whole message; further ones wait.
const GREETINGS: usize = 64;
/// After how long a connection that sent no descriptor makes room for another one, if there is none.
const SILENT: Duration = Duration::from_millis(500);
/// How long to wait after a connection that could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(10);
/// How often the clock is looked at while something is due.
const TICK: Duration = Duration::from_millis(200);
/// After how long the death of a worker is no repetition.
const STEADY: Duration = Duration::from_secs(1);
/// How long to wait for the next start after the second death in a row; doubled with each, up to the limit.
const BACKOFF: Duration = Duration::from_millis(5);
const BACKOFF_MOST: Duration = Duration::from_millis(50);
/// How many workers may die of taking one connection.
const DEATHS: u32 = 3;
/// `SIGKILL`, as the status of a process has it.
const KILL: i32 = 9;
/// `SIGSYS`, by which a process ends that makes a system call which its sandbox denies.
const DENIED: i32 = 31;

/// What a keeper did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Served {
    /// How many machines were served.
    pub sessions: u64,
    /// How many of them it left: their faults wait until they are ended.
    pub left: usize,
    /// How many workers died.
    pub deaths: u64,
}

struct RunningWorker {
    child: Child,
    socket: MessageSocket,
    since: Instant,
    is_ready: bool,
    /// Whether it has what the next keeper needs, in case that this process dies.
    has_heirlooms: bool,
    /// Whether it waits for an order.
    asks: bool,
    /// Whether it was asked for its counts, and has not reported all.
    is_counting: bool,
    /// The connection that it was handed last, until it asks for the next.
    taking: Option<u64>,
}

impl Drop for RunningWorker {
    /// Ends the process. When this returns, none of its threads answers a fault any more. If this process
    /// dies of a bug, the worker takes its place.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

type Start = Box<dyn FnMut(OwnedFd) -> io::Result<Child> + Send>;

/// Lets a worker process serve each machine that connects to a socket, and another one when it dies.
pub struct Keeper {
    socket: Option<ListeningSocket>,
    control: Option<Control>,
    /// Where the status goes that was asked for, when the worker has reported its counts.
    asking: Vec<SyncSender<Status>>,
    path: PathBuf,
    /// The user of this process.
    user: u32,
    /// What tells the image from others.
    image: String,
    /// Where it is.
    image_path: String,
    /// Its files, by which each worker opens it: other files may have their names by then.
    files: Vec<(String, File)>,
    /// How the latest worker is confined.
    sandbox: Sandbox,
    /// Whether this process was a worker, and has the rights of one.
    is_confined: bool,
    manager: Option<ServiceManager>,
    recovery: Option<Recovery>,
    /// The folder of the keeper before, where this process may not write in it.
    folder: Option<HeldFolder>,
    /// What makes huge pages, once there is something to do.
    collapser: Option<Collapser>,
    options: ServerOptions,
    log: Box<dyn Fn(&ServeEvent) + Send>,
    start: Start,
    worker: Option<RunningWorker>,
    /// How often a worker died soon after its start.
    failures: u32,
    /// Since when there has been no worker that asks for work.
    down_since: Option<Instant>,
    start_at: Option<Instant>,
    set: EventSet,
    room: Vec<u8>,
    connections: BTreeMap<u64, Connection>,
    /// Those that are to be handed over.
    news: VecDeque<u64>,
    /// The clients that read the memory of a session and are to be passed on.
    captures: VecDeque<(u64, MessageSocket, PendingFaults)>,
    next: u64,
    is_accepting: bool,
    served: Served,
}

impl Keeper {
    /// Starts a worker and listens on `socket`. `start` starts a process, which calls
    /// [`Worker::run`](crate::Worker::run) with the descriptor; it is called again when a worker has
    /// died. `log` is called with all that happens.
    ///
    /// # Errors
    /// [`ServeError`]: the worker cannot be started or ended at once, or the socket cannot be made.
    pub fn bind(
        socket: &Path,
        options: ServerOptions,
        log: impl Fn(&ServeEvent) + Send + 'static,
        start: impl FnMut(OwnedFd) -> io::Result<Child> + Send + 'static,
    ) -> Result<Self, ServeError> {
        let mut keeper = Self::started(socket, options, log, start, Vec::new(), false)?;
        let socket = ListeningSocket::bind(socket, keeper.options.mode, keeper.options.group)?;
        keeper.set.add(&socket.listener, LISTENER).map_err(ServeError::Wait)?;
        keeper.socket = Some(socket);
        keeper.open_recovery()?;
        keeper.bind_control()?;
        keeper.hand_over();
        Ok(keeper)
    }

    /// Starts a worker, and goes on with the socket and the machines of the keeper that listens on
    /// `socket`, which ends. A machine notices a pause of a few milliseconds.
    ///
    /// # Errors
    /// As of [`Keeper::bind`]; [`ServeError::Ask`] if there is no such keeper, or it serves another image:
    /// it goes on then.
    pub fn take_over(
        socket: &Path,
        options: ServerOptions,
        log: impl Fn(&ServeEvent) + Send + 'static,
        start: impl FnMut(OwnedFd) -> io::Result<Child> + Send + 'static,
    ) -> Result<Self, ServeError> {
        let mut keeper = Self::started(socket, options, log, start, Vec::new(), false)?;
        keeper.down_since = Some(Instant::now());
        keeper.open_recovery()?;
        let mut estate = control::take_over(socket, &keeper.image, |folder| {
            keeper.recovery.as_ref().map_or(Ok(()), |recovery| recovery.will_absorb(folder))
        })?;
        // The other one may be a worker in the place of its keeper, and would not admit that if it were hostile.
        estate.connections.values_mut().for_each(Connection::check_peer);
        keeper.take_what_is_kept(&mut estate);
        keeper.enter(estate);
        // If the other one still has the port for metrics, it is tried again by the clock.
        let control = Control::replace(&keeper.path, keeper.options.metrics);
        let _ = control.and_then(|control| keeper.listen_to(control));
        Ok(keeper)
    }

    /// Takes the place of the keeper of `socket`, which has died: its worker does that
    /// ([`Worker::into_estate`](crate::Worker::into_estate)), or another server ([`Recovery::estate`]).
    ///
    /// # Errors
    /// As of [`Keeper::bind`]; [`ServeError::InUse`] if another server has the socket and no machine is of this image.
    pub fn inherit(
        mut estate: Estate,
        socket: &Path,
        options: ServerOptions,
        log: impl Fn(&ServeEvent) + Send + 'static,
        start: impl FnMut(OwnedFd) -> io::Result<Child> + Send + 'static,
    ) -> Result<Self, ServeError> {
        let (files, has_machines) =
            (std::mem::take(&mut estate.files), !estate.connections.is_empty());
        let mut keeper = Self::started(socket, options, log, start, files, has_machines)?;
        keeper.is_confined = estate.is_confined;
        keeper.recovery = estate.recovery.take();
        if keeper.recovery.is_some() && estate.socket.is_none() {
            // Those of another image wait for a server of that.
            let is_other = |image: &String| *image != keeper.image;
            estate.connections.retain(|_, one| !one.image.as_ref().is_some_and(is_other));
            if estate.connections.is_empty() {
                return Err(ServeError::InUse { path: socket.to_owned() });
            }
        }
        if keeper.recovery.is_none() {
            if !keeper.is_confined {
                keeper.open_recovery()?;
            }
            keeper.take_what_is_kept(&mut estate);
        }
        keeper.enter(estate);
        Ok(keeper)
    }

    /// Goes on with the socket and the connections of another keeper.
    fn enter(&mut self, estate: Estate) {
        let listening = estate
            .socket
            .map(|socket| ListeningSocket::inherit(&self.path, socket, estate.is_named))
            // By one without a file no machine comes: the keeper before had begun to drain.
            .filter(ListeningSocket::has_file);
        if let Some(control) = estate.control {
            // If that fails, it is tried again by the clock.
            let control = Control::inherit(&self.path, control, estate.metrics);
            let _ = control.and_then(|control| self.listen_to(control));
        }
        self.manager = estate.manager.map(ServiceManager::from_fd);
        // If one cannot be waited for, it counts as late after a while, or is served without an end.
        self.is_accepting = listening
            .as_ref()
            .is_some_and(|socket| self.set.add(&socket.listener, LISTENER).is_ok());
        for (key, connection) in &estate.connections {
            if !connection.is_ended {
                let _ = self.set.add(&connection.stream, *key);
            }
        }
        (self.socket, self.connections) = (listening, estate.connections);
        // This process may have other rights than the one before.
        self.connections.values_mut().for_each(Connection::ask_for_rights);
        (self.next, self.down_since) =
            (estate.next, Some(self.down_since.unwrap_or_else(Instant::now)));
        self.refuse_other_images();
        self.renew();
        self.hand_over();
    }

    /// Takes what the keeper before has kept of machines, and the machines which that did not know of.
    fn take_what_is_kept(&mut self, estate: &mut Estate) {
        match (&self.recovery, estate.folder.take()) {
            (Some(recovery), folder) => {
                let connections = estate.connections.values_mut();
                if let Some(before) = folder {
                    let absorbed = recovery.absorb(&before);
                    // Also the notes on it, and on what an earlier server had to take here.
                    if let Err(cause) =
                        absorbed.and_then(|()| recovery.absorb_noted(&recovery.held().path))
                    {
                        let path = before.path.display();
                        tracing::warn!(%cause, %path, "what is kept of machines is kept anew elsewhere");
                    }
                    connections.for_each(|connection| recovery.find_log(connection, Some(&before)));
                    before.remove();
                } else if estate.manager.is_none() {
                    // What a service manager keeps has its own log.
                    connections.for_each(|connection| recovery.find_log(connection, None));
                }
                recovery.complete(&mut estate.connections);
                let last = estate.connections.keys().max().copied().unwrap_or(0);
                estate.next = estate.next.max(last + 1);
            }
            (None, folder) => self.folder = folder,
        }
    }

    /// Returns the folder with what is kept of machines.
    fn folder(&self) -> Option<&HeldFolder> {
        self.recovery.as_ref().map(Recovery::held).or(self.folder.as_ref())
    }

    /// Refuses machines that were served from another image by a server that has died.
    fn refuse_other_images(&mut self) {
        let is_other = |connection: &Connection| {
            connection.image.as_ref().is_some_and(|image| *image != self.image)
        };
        let others = self.connections.iter().filter(|(_, connection)| is_other(connection));
        for key in others.map(|(key, _)| *key).collect::<Vec<_>>() {
            self.refuse(key, format!("it was served from another image than {}", self.image));
        }
    }

    fn started(
        socket: &Path,
        options: ServerOptions,
        log: impl Fn(&ServeEvent) + Send + 'static,
        start: impl FnMut(OwnedFd) -> io::Result<Child> + Send + 'static,
        files: Vec<(String, File)>,
        has_machines: bool,
    ) -> Result<Self, ServeError> {
        let mut keeper = Self {
            socket: None,
            control: None,
            asking: Vec::new(),
            path: socket.to_owned(),
            user: privilege::user(),
            image: String::new(),
            image_path: String::new(),
            files,
            sandbox: Sandbox::default(),
            is_confined: false,
            manager: None,
            recovery: None,
            folder: None,
            collapser: None,
            options,
            log: Box::new(log),
            start: Box::new(start),
            worker: None,
            failures: 0,
            down_since: Some(Instant::now()),
            start_at: None,
            set: EventSet::new().map_err(ServeError::Wait)?,
            room: link::room(),
            connections: BTreeMap::new(),
            news: VecDeque::new(),
            captures: VecDeque::new(),
            next: 1,
            is_accepting: true,
            served: Served::default(),
        };
        keeper.start_worker(has_machines).map_err(ServeError::Start)?;
        while keeper.worker.as_ref().is_some_and(|worker| !worker.is_ready) {
            keeper.first_words()?;
        }
        Ok(keeper)
    }

    fn open_recovery(&mut self) -> Result<(), ServeError> {
        if let Some(folder) = &self.options.recover {
            self.recovery = Some(Recovery::open(folder, &self.path)?);
        }
        Ok(())
    }

    fn bind_control(&mut self) -> Result<(), ServeError> {
        let control = Control::bind(&self.path, self.options.metrics)?;
        self.listen_to(control)
    }

    fn listen_to(&mut self, control: Control) -> Result<(), ServeError> {
        self.set.add(&control, CONTROL).map_err(ServeError::Wait)?;
        self.control = Some(control);
        self.heirlooms_changed();
        Ok(())
    }

    /// Has the worker get what the next keeper needs, once more.
    fn heirlooms_changed(&mut self) {
        if let Some(worker) = &mut self.worker {
            worker.has_heirlooms = false;
        }
    }

    /// Has a service manager keep the socket and the descriptors of all machines from now on, for a server
    /// that it starts when both processes of this one have died: [`Passed`](crate::Passed).
    pub fn kept_by(&mut self, manager: ServiceManager) {
        if let Some(socket) = self.socket.as_ref().filter(|socket| socket.is_named()) {
            manager.keep_socket(&self.path, socket.listener.as_fd());
        }
        self.manager = Some(manager);
        for key in self.connections.keys().copied().collect::<Vec<_>>() {
            if self.connections.get(&key).is_some_and(|one| one.kept_bytes.is_none()) {
                self.keep_machine(key);
            }
        }
        self.heirlooms_changed();
    }

    /// Has a machine kept, as far as its message has come.
    fn keep_machine(&mut self, key: u64) {
        let (manager, connection) = (self.manager.as_ref(), self.connections.get_mut(&key));
        let Some(connection) = connection.filter(|one| one.is_worth_keeping() && one.may_be_kept())
        else {
            return;
        };
        if let Some(recovery) = &self.recovery {
            recovery.keep_machine(&self.image, key, connection);
        }
        if let Some(manager) = manager {
            // Without it, a warning was printed, or there is no memory for it.
            let _ = make_log(self.recovery.as_ref(), connection);
            manager.keep_machine(&self.path, &self.image, key, connection);
        }
        if manager.is_some() || self.recovery.is_some() {
            connection.kept_bytes = Some(connection.bytes.len());
            connection.times_kept += 1;
        }
    }

    /// Keeps a machine whose worker begins to read what it gives back, if that is logged in the file for it. Otherwise
    /// what is kept of the machine is given up.
    fn keep_logged(&mut self, key: u64) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        if !connection.may_be_a_machine() {
            return;
        }
        if connection.is_logged_in_its_file() {
            match &self.recovery {
                _ if connection.kept_bytes.is_none() => self.keep_machine(key),
                Some(recovery) if !recovery.has_machine(connection.id) => {
                    recovery.keep_machine(&self.image, key, connection);
                }
                _ => {}
            }
            return;
        }
        connection.log_file = None;
        if let Some(recovery) = &self.recovery {
            recovery.discard(connection.id);
        }
        if let (Some(manager), Some(_)) = (&self.manager, connection.kept_bytes.take()) {
            manager.discard_machine(&self.path, connection);
        }
    }

    /// Removes a connection, also from what is kept.
    fn forget(&mut self, key: u64) -> Option<Connection> {
        let connection = self.connections.remove(&key)?;
        if let Some(recovery) = self.recovery.as_ref().filter(|_| connection.may_be_a_machine()) {
            recovery.discard(connection.id);
        }
        if let (Some(manager), Some(_)) = (&self.manager, connection.kept_bytes) {
            manager.discard_machine(&self.path, &connection);
        }
        Some(connection)
    }

    /// Returns how the worker is confined.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Returns whether machines can connect.
    #[must_use]
    pub fn is_listening(&self) -> bool {
        self.socket.is_some()
    }

    /// Returns where metrics are served by HTTP, if [`ServerOptions::metrics`] asked for a port.
    #[must_use]
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.control.as_ref()?.metrics()
    }

    /// Waits for a report of the first worker.
    fn first_words(&mut self) -> Result<(), ServeError> {
        let Some(worker) = &mut self.worker else { return Ok(()) };
        match link::receive_report(&worker.socket, &mut self.room) {
            Ok(Some((report, fds))) => self.handle(report, fds),
            Ok(None) | Err(_) => {
                let status = worker.child.wait().map_err(ServeError::Start)?;
                return Err(ServeError::Worker { status });
            }
        }
        Ok(())
    }

    /// Serves until `stop` rings. Then no machine is accepted any more, and it returns when the last one
    /// has ended, or when `stop` rings again. The worker has ended then.
    ///
    /// # Errors
    /// [`ServeError::Wait`] if the system refuses to wait.
    pub fn run(&mut self, stop: &Doorbell) -> Result<Served, ServeError> {
        self.set.add(stop, STOP).map_err(ServeError::Wait)?;
        let mut ready = Vec::new();
        while self.socket.is_some() || !self.connections.is_empty() {
            self.set.wait(&mut ready, self.timeout()).map_err(ServeError::Wait)?;
            for &key in &ready {
                match key {
                    LISTENER => self.accept(),
                    WORKER => self.hear(),
                    CONTROL => self.answer()?,
                    HUGE => self.note_huge()?,
                    STOP => {
                        stop.silence().map_err(ServeError::Wait)?;
                        if self.is_stopped_again() {
                            self.served.left = self.connections.len();
                            return Ok(self.end());
                        }
                    }
                    key => self.read(key),
                }
            }
            self.see_to_time();
            self.hand_over();
            self.ask_for_stats();
        }
        Ok(self.end())
    }

    /// Ends the worker.
    fn end(&mut self) -> Served {
        self.answer_all();
        self.worker = None;
        self.served
    }

    /// Answers those that asked for the status.
    fn answer_all(&mut self) {
        if !self.asking.is_empty() {
            let status = self.status();
            for answer in self.asking.drain(..) {
                // The client may have gone.
                let _ = answer.try_send(status.clone());
            }
        }
    }

    /// Returns after how long the clock has to be looked at.
    fn timeout(&self) -> Option<Duration> {
        let start = self.start_at.map(|at| at.saturating_duration_since(Instant::now()));
        let is_due = self.control.is_none()
            || self.greetings() > 0
            || self.down_since.is_some() && !self.connections.is_empty();
        [start, is_due.then_some(TICK)].into_iter().flatten().min()
    }

    /// Stops accepting. Returns whether that was done before.
    fn is_stopped_again(&mut self) -> bool {
        let Some(socket) = self.socket.take() else { return true };
        if let Some(manager) = &self.manager {
            manager.discard_socket(&self.path);
        }
        // Those of a service manager connect to the next server.
        if socket.is_named() || self.is_confined && self.manager.is_none() {
            socket.close();
            while let Ok((stream, _)) = socket.listener.accept() {
                self.admit(stream);
            }
        }
        // A worker that takes the place of this process accepts none either.
        self.heirlooms_changed();
        if self.is_accepting {
            // It was waited for.
            let _ = self.set.remove(&socket.listener);
        }
        // A machine that has handed its memory over is served.
        let silent = self.connections.iter().filter(|(_, one)| !one.has_descriptors());
        for key in silent.map(|(key, _)| *key).collect::<Vec<_>>() {
            if self.is_silent_to_the_end(key) {
                self.forget(key);
            }
        }
        false
    }

    /// Returns how many connections have sent no whole message.
    fn greetings(&self) -> usize {
        self.connections.values().filter(|connection| connection.is_greeting()).count()
    }

    /// Refuses the oldest connection that has been silent for a while: a monitor sends its message at once. Returns
    /// whether there was one.
    fn make_room(&mut self) -> bool {
        let is_silent =
            |connection: &Connection| connection.is_greeting() && !connection.has_descriptors();
        loop {
            let silent = self.connections.iter().filter(|(_, connection)| is_silent(connection));
            // A program that attaches has asked for the image, and maps memory before it hands that over.
            let oldest = silent.min_by_key(|(_, one)| (!one.bytes.is_empty(), one.since));
            let oldest = oldest.filter(|(_, connection)| connection.since.elapsed() >= SILENT);
            let Some(key) = oldest.map(|(key, _)| *key) else { return false };
            if self.is_silent_to_the_end(key) {
                let reason = format!(
                    "it sent no whole message, and {GREETINGS} connections are waited for at most"
                );
                self.refuse(key, reason);
                return true;
            }
        }
    }

    /// Lets nothing more come by a connection, and reads what has come since it was read last: a machine that has
    /// handed its memory over waits for its pages, and is not forgotten. Returns whether there is no descriptor.
    fn is_silent_to_the_end(&mut self, key: u64) -> bool {
        let is_silent = |keeper: &Self| {
            keeper.connections.get(&key).is_some_and(|connection| !connection.has_descriptors())
        };
        self.read(key);
        if is_silent(self)
            && let Some(connection) = self.connections.get_mut(&key)
            && connection.stream.shutdown(Shutdown::Both).is_ok()
        {
            connection.read();
            if connection.has_descriptors() {
                self.read(key);
            }
        }
        is_silent(self)
    }

    fn accept(&mut self) {
        loop {
            let has_room = self.greetings() < GREETINGS || self.make_room();
            let Some(socket) = &self.socket else { return };
            if !has_room {
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
            self.admit(stream);
        }
    }

    /// Takes a connection of a user that may connect.
    fn admit(&mut self, stream: UnixStream) {
        let key = self.next;
        let peer = match Peer::of(&stream) {
            Ok(peer) => peer,
            Err(cause) if cause.kind() == io::ErrorKind::Unsupported => {
                self.next += 1;
                let (pid, reason) = (0, cause.to_string());
                (self.log)(&ServeEvent::Refused { session: key, pid, reason, was_killed: false });
                return;
            }
            // A process that has ended is not waited for.
            Err(_) => return,
        };
        if !self.options.admits(peer.uid(), self.user) {
            self.next += 1;
            return self.turn_away(key, Connection::new(stream, peer));
        }
        if stream.set_nonblocking(true).and_then(|()| self.set.add(&stream, key)).is_err() {
            return;
        }
        self.next += 1;
        let mut connection = Connection::new(stream, peer);
        connection.must_be_served = self.is_confined;
        self.connections.insert(key, connection);
        // At once: what has been accepted is lost if this process is killed, unless it is kept.
        self.read(key);
    }

    /// Refuses a connection of a user that may not connect.
    fn turn_away(&mut self, key: u64, mut connection: Connection) {
        // A monitor that sends its memory from now on gets an error, and one that has sent it is ended as any
        // that is not served: neither waits for a page for ever.
        let ended = connection.stream.shutdown(Shutdown::Both);
        if ended.and_then(|()| connection.stream.set_nonblocking(true)).is_ok() {
            connection.read();
        }
        let reason = format!(
            "user {} may not connect to this server: name it with --allow-uid",
            connection.peer.uid()
        );
        self.connections.insert(key, connection);
        self.refuse(key, reason);
    }

    /// Reads what a monitor has sent.
    fn read(&mut self, key: u64) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        connection.read();
        if connection.is_ended {
            let _ = self.set.remove(&connection.stream);
        }
        if connection.may_be_whole() && !self.news.contains(&key) {
            self.news.push_back(key);
        }
        self.keep_machine(key);
    }

    /// Hands a connection over, if the worker waits for one.
    fn hand_over(&mut self) {
        while let Some(worker) = self.worker.as_mut().filter(|worker| worker.asks) {
            if !worker.has_heirlooms {
                (worker.asks, worker.has_heirlooms) = (false, true);
                let listener = self.socket.as_ref().map(|socket| socket.listener.as_fd());
                let control = self.control.as_ref().map_or((None, None), Control::sockets);
                let manager = self.manager.as_ref().map(AsFd::as_fd);
                let held = self.recovery.as_ref().map(Recovery::held);
                let folder = held.or(self.folder.as_ref());
                let handed =
                    link::hand_heirlooms_over(&worker.socket, listener, control, manager, folder);
                if handed.is_err() {
                    return self.worker_ended();
                }
                continue;
            }
            if let Some((session, client, pending)) = self.captures.pop_front() {
                worker.asks = false;
                if link::pass_on(&worker.socket, session, &client, &pending).is_err() {
                    return self.worker_ended();
                }
                continue;
            }
            let Some(key) = self.news.pop_front() else { return };
            let Some(connection) = self.connections.get_mut(&key) else { continue };
            (worker.asks, worker.taking) = (false, Some(key));
            if connection.may_be_a_machine() {
                // If it fails, so it does when the machine is kept, which warns.
                let _ = make_log(self.recovery.as_ref(), connection);
            }
            if link::hand_over(&worker.socket, key, connection).is_err() {
                return self.worker_ended();
            }
        }
    }

    /// Does what was asked for at the control socket.
    fn answer(&mut self) -> Result<(), ServeError> {
        let Some(control) = &self.control else { return Ok(()) };
        for Asked { request, answer } in control.take().map_err(ServeError::Wait)? {
            self.asking.push(answer);
            match request {
                Request::Status => {}
                Request::Drain => drop(self.is_stopped_again()),
                Request::TakeOver(to) => self.give(&to),
                Request::Memory(session, to) => {
                    let connection = self.connections.get(&session);
                    let userfaultfd = connection.and_then(Connection::userfaultfd);
                    // The client may have gone.
                    let shown = capture::show(&to, &self.image, session, connection);
                    // Without the count, which a worker in the place of its keeper may not open, the client
                    // learns by the end of its socket that no pages are kept.
                    if let Some(Ok(pending)) = userfaultfd.map(PendingFaults::open)
                        && shown.is_ok()
                    {
                        self.captures.push_back((session, to, pending));
                    }
                }
            }
        }
        Ok(())
    }

    /// Hands everything to another keeper, or goes on if that fails.
    fn give(&mut self, to: &MessageSocket) {
        let Some(socket) = self.socket.take() else { return };
        // It has ended when this returns, so its logs are final.
        self.worker = None;
        let (connections, listener) = (&self.connections, socket.listener.as_fd());
        let given =
            takeover::give(to, &self.image, listener, connections, self.next, self.folder());
        match given {
            Ok(()) => {
                socket.leave();
                if let Some(control) = &self.control {
                    control.leave();
                }
                let sessions = self.connections.len() - self.greetings();
                self.connections.clear();
                self.happened(ServeEvent::HandedOver { sessions });
            }
            Err(cause) => {
                self.socket = Some(socket);
                self.down_since.get_or_insert_with(Instant::now);
                self.renew();
                self.start_at = Some(Instant::now());
                tracing::warn!(%cause, "a keeper that was to take over did not");
            }
        }
    }

    /// Asks the worker for its counts, if they were asked for, and it waits for an order.
    fn ask_for_stats(&mut self) {
        if self.asking.is_empty() {
            return;
        }
        if let Some(worker) = self.worker.as_mut().filter(|worker| worker.asks) {
            (worker.asks, worker.is_counting) = (false, true);
            if link::ask_for_stats(&worker.socket).is_err() {
                self.worker_ended();
            }
        }
    }

    fn status(&self) -> Status {
        let machines =
            self.connections.iter().filter_map(|(number, connection)| connection.status(*number));
        Status {
            socket: self.path.display().to_string(),
            image: self.image_path.clone(),
            keeper: std::process::id(),
            is_confined: self.is_confined,
            worker: self.worker.as_ref().map(|worker| worker.child.id()),
            sandbox: self.sandbox.clone(),
            worker_deaths: self.served.deaths,
            is_draining: self.socket.is_none(),
            sessions_served: self.served.sessions,
            greetings: self.greetings(),
            sessions: machines.collect(),
        }
    }

    /// Receives what the worker reports.
    fn hear(&mut self) {
        let Some(worker) = &self.worker else { return };
        match link::receive_report(&worker.socket, &mut self.room) {
            Ok(Some((report, fds))) => self.handle(report, fds),
            Ok(None) | Err(_) => self.worker_ended(),
        }
    }

    fn handle(&mut self, report: Report, fds: Vec<OwnedFd>) {
        match report {
            Report::Image(image, path, names) => {
                let before = std::mem::replace(&mut self.image, image);
                if !before.is_empty() && before != self.image {
                    // It was opened by its name again, or changed in place: no machine gets bytes of both.
                    for connection in self.connections.values_mut().filter(|it| !it.is_greeting()) {
                        connection.image.get_or_insert(before.clone());
                    }
                    self.refuse_other_images();
                }
                self.image_path = path;
                self.files = names.into_iter().zip(fds.into_iter().map(File::from)).collect();
            }
            Report::Sandbox(sandbox) => self.sandbox = sandbox,
            Report::Next => {
                let Some(worker) = &mut self.worker else { return };
                (worker.is_ready, worker.asks, worker.taking) = (true, true, None);
                if std::mem::take(&mut worker.is_counting) {
                    self.answer_all();
                }
                if self.news.is_empty() {
                    self.down_since = None;
                }
            }
            Report::Reading(key) => {
                if let Some(connection) = self.connections.get_mut(&key) {
                    // More of it means nothing, and nor does its end: of older monitors it comes at once.
                    if connection.is_greeting() && !connection.is_ended {
                        let _ = self.set.remove(&connection.stream);
                    }
                    connection.is_ended = true;
                    connection.log = fds.into_iter().next();
                }
                // If it is of another keeper: its file has all of the log before only now.
                self.keep_logged(key);
                if let Some(worker) = &self.worker {
                    // It has died otherwise, which the next wait reports.
                    let _ = link::log_is_kept(&worker.socket);
                }
            }
            Report::Stats(key, stats) => {
                if let Some(connection) = self.connections.get_mut(&key) {
                    connection.stats = Some(stats);
                }
            }
            Report::Blocks(key, blocks) => self.make_huge(key, blocks),
            Report::Probe(key) => drop(self.forget(key)),
            Report::Event(event) => self.happened(event),
        }
    }

    /// Acts on what happened in the worker, and logs it.
    fn happened(&mut self, mut event: ServeEvent) {
        // A connection is closed when this is logged.
        let mut _closed = None;
        match &mut event {
            ServeEvent::Connected { session, pid, len_bytes, page_bytes, .. } => {
                let Some(connection) = self.connections.get_mut(session) else { return };
                if connection.memory.replace((*len_bytes, *page_bytes)).is_some() {
                    let after_ns = self.down_since.map_or(0, |since| nanoseconds(since.elapsed()));
                    event = ServeEvent::TakenOver { session: *session, pid: *pid, after_ns };
                } else {
                    self.served.sessions += 1;
                }
            }
            ServeEvent::Refused { session, was_killed, .. } => {
                let Some(mut connection) = self.forget(*session) else { return };
                *was_killed = self.kills() && connection.end_if_it_has_memory();
                _closed = Some(connection);
            }
            ServeEvent::Failed { session, was_killed, .. } => {
                let Some(connection) = self.connections.get(session) else { return };
                *was_killed = self.kills() && connection.kill();
            }
            ServeEvent::Ended { session, .. } => drop(self.forget(*session)),
            ServeEvent::NotHuge { .. }
            | ServeEvent::WorkerEnded { .. }
            | ServeEvent::TakenOver { .. }
            | ServeEvent::HandedOver { .. } => {}
        }
        (self.log)(&event);
    }

    /// Has huge pages made of blocks that a worker found filled.
    fn make_huge(&mut self, key: u64, mut blocks: Vec<u64>) {
        let Some(connection) = self.connections.get(&key) else { return };
        blocks.truncate(AT_ONCE);
        let peer = connection.peer.clone();
        let refusal = if self.is_confined {
            Some("this keeper was a worker, and has its rights: start the server again".to_owned())
        } else if connection.is_foreign() {
            Some("the process was named by a worker, and has not the userfaultfd".to_owned())
        } else {
            self.start_collapser().err().map(|cause| cause.to_string())
        };
        match (refusal, &self.collapser) {
            (None, Some(collapser)) => {
                collapser.add(key, peer, blocks.into_iter().map(Vaddr::new).collect());
            }
            (reason, _) => {
                let refused = blocks.len() as u64;
                self.count_huge(key, Outcome { refused, reason, ..Outcome::default() });
            }
        }
    }

    fn start_collapser(&mut self) -> io::Result<()> {
        if self.collapser.is_none() {
            let collapser = Collapser::start()?;
            self.set.add(&collapser, HUGE)?;
            self.collapser = Some(collapser);
        }
        Ok(())
    }

    /// Notes which huge pages were made.
    fn note_huge(&mut self) -> Result<(), ServeError> {
        let Some(collapser) = &self.collapser else { return Ok(()) };
        for (key, outcome) in collapser.take().map_err(ServeError::Wait)? {
            self.count_huge(key, outcome);
        }
        Ok(())
    }

    fn count_huge(&mut self, session: u64, outcome: Outcome) {
        // It may have ended.
        let Some(connection) = self.connections.get_mut(&session) else { return };
        let (pid, is_first) = (connection.peer.pid(), connection.not_huge == 0);
        connection.huge_pages += outcome.made;
        connection.not_huge += outcome.refused;
        if let Some(reason) = outcome.reason.filter(|_| is_first) {
            self.happened(ServeEvent::NotHuge { session, pid, reason });
        }
    }

    fn kills(&self) -> bool {
        self.options.on_failure == OnFailure::Kill
    }

    /// Refuses a connection that no worker refused.
    fn refuse(&mut self, session: u64, reason: String) {
        if let Some(connection) = self.connections.get(&session) {
            let pid = connection.peer.pid();
            self.happened(ServeEvent::Refused { session, pid, reason, was_killed: false });
        }
    }

    /// Does what is due by the clock.
    fn see_to_time(&mut self) {
        let is_late = |connection: &Connection| {
            connection.is_greeting() && connection.since.elapsed() >= HANDSHAKE_WITHIN
        };
        let late = self.connections.iter().filter(|(_, one)| is_late(one));
        let late: Vec<_> = late.map(|(key, one)| (*key, one.has_descriptors())).collect();
        for (key, had_memory) in late {
            let taking = self.worker.as_ref().and_then(|worker| worker.taking);
            let is_late = match had_memory {
                true => !self.news.contains(&key) && taking != Some(key),
                false => self.is_silent_to_the_end(key),
            };
            if is_late {
                self.refuse(key, format!("no whole message came within {HANDSHAKE_WITHIN:?}"));
            }
        }
        if !self.is_accepting
            && (self.greetings() < GREETINGS || self.make_room())
            && let Some(socket) = &self.socket
        {
            self.is_accepting = self.set.add(&socket.listener, LISTENER).is_ok();
        }
        if self.control.is_none() && self.socket.is_some() {
            // The keeper before this one may have it still.
            let _ = self.bind_control();
        }
        if self.start_at.is_some_and(|at| at <= Instant::now()) {
            self.start_at = None;
            if self.start_worker(true).is_err() {
                self.start_later();
            }
        }
        let is_down = self.worker.as_ref().is_none_or(|worker| !worker.is_ready);
        let since = self.down_since.filter(|_| is_down);
        if since.is_some_and(|since| since.elapsed() >= self.options.deadline) && self.kills() {
            self.end_the_waiting();
        }
    }

    /// Ends the machines that no worker could be started for.
    fn end_the_waiting(&mut self) {
        for session in self.connections.keys().copied().collect::<Vec<_>>() {
            let Some(mut connection) = self.forget(session) else { continue };
            let reason = format!("no worker could be started within {:?}", self.options.deadline);
            let pid = connection.peer.pid();
            let was_killed = connection.end_if_it_has_memory();
            (self.log)(&ServeEvent::Refused { session, pid, reason, was_killed });
        }
    }

    /// Starts a worker. Where machines may wait for it, it goes on without what they can do without.
    fn start_worker(&mut self, has_machines: bool) -> io::Result<()> {
        let (socket, other) = MessageSocket::pair()?;
        self.set.add(&socket, WORKER)?;
        let child = (self.start)(other.into_fd())?;
        // If it has ended, it reports nothing either.
        let _ = link::hand_files_over(&socket, &self.files, has_machines);
        let since = Instant::now();
        self.worker = Some(RunningWorker {
            child,
            socket,
            since,
            is_ready: false,
            has_heirlooms: false,
            asks: false,
            is_counting: false,
            taking: None,
        });
        Ok(())
    }

    fn start_later(&mut self) {
        self.failures += 1;
        let doubled = BACKOFF * 2_u32.saturating_pow(self.failures.saturating_sub(2));
        let delay = if self.failures < 2 { Duration::ZERO } else { doubled.min(BACKOFF_MOST) };
        self.start_at = Some(Instant::now() + delay);
    }

    /// Starts the next worker, which gets all connections, those of machines first.
    fn worker_ended(&mut self) {
        let Some(mut worker) = self.worker.take() else { return };
        let had_all = self.down_since.is_none();
        self.down_since.get_or_insert_with(Instant::now);
        let _ = self.set.remove(&worker.socket);
        let _ = worker.child.kill();
        let status = worker.child.wait();
        let was_killed = status.as_ref().is_ok_and(|status| status.signal() == Some(KILL));
        let was_denied = status.as_ref().is_ok_and(|status| status.signal() == Some(DENIED));
        let mut status = status.map_or_else(|cause| cause.to_string(), |status| status.to_string());
        if was_denied {
            status.push_str(": it made a system call that its sandbox denies");
        }
        let (taking, ran) = (worker.taking, worker.since.elapsed());
        drop(worker);
        self.served.deaths += 1;
        let sessions = self.connections.len() - self.greetings();
        self.happened(ServeEvent::WorkerEnded { status, sessions });
        // One that served all machines and was killed from outside is no repetition, however soon that was. A kernel
        // that kills for want of memory is outside too: the machines get on between two deaths. The pause after one
        // that was killed before does not grow.
        if ran >= STEADY || (was_killed && had_all) {
            self.failures = 0;
        } else if was_killed {
            self.failures = self.failures.min(1);
        }
        // A process that was killed from outside did not die of what it did.
        if let Some(key) = taking.filter(|_| !was_killed)
            && let Some(connection) = self.connections.get_mut(&key)
        {
            connection.deaths += 1;
            if connection.deaths >= DEATHS {
                self.refuse(key, format!("{DEATHS} workers died of taking it"));
            }
        }
        self.renew();
        self.start_later();
    }

    /// Has all connections handed over again, those of machines first.
    fn renew(&mut self) {
        // The counts of the next worker start anew.
        self.connections.values_mut().for_each(|connection| connection.stats = None);
        let (machines, greetings): (Vec<_>, Vec<_>) =
            self.connections.iter().partition(|(_, connection)| !connection.is_greeting());
        self.news = machines.iter().chain(&greetings).map(|(key, _)| **key).collect();
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper")
            .field("socket", &self.socket)
            .field("options", &self.options)
            .field("served", &self.served)
            .finish_non_exhaustive()
    }
}

/// Makes the file for the log of a machine, in the folder for recovery if there is one.
fn make_log(recovery: Option<&Recovery>, connection: &mut Connection) -> io::Result<()> {
    match recovery {
        Some(recovery) => recovery.make_log(connection),
        None => {
            if connection.log_file.is_none() {
                connection.log_file = Some(uzone_os::memory_file("uzone-events", &[])?.into());
            }
            Ok(())
        }
    }
}

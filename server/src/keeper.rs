//! Keeping machines alive: [`Keeper`]. It owns the socket, receives and stores what monitors send, and hands
//! it to a worker, another process that parses it and answers faults. When a worker dies, the next one
//! gets everything again. The keeper parses nothing of a monitor's, and waits for no monitor and no worker.

mod arrivals;
pub(crate) mod estate;
pub(crate) mod held_folder;
mod huge;
mod kept;
pub(crate) mod manager;
pub(crate) mod recovery;
mod room;
pub(crate) mod takeover;
mod workers;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use uzone_attach::protocol::Reply;
use uzone_os::privilege;
use uzone_os::uffd::{Doorbell, EventSet, open_pending_faults};
use uzone_os::unix_socket::MessageSocket;

use self::estate::{Estate, Heirlooms};
use self::held_folder::HeldFolder;
use self::huge::Collapser;
use self::manager::ServiceManager;
use self::recovery::Recovery;
use self::workers::{RunningWorker, Start};
use crate::capture;
use crate::connection::Connection;
use crate::control::{self, Asked, Control, Request};
use crate::error::ServeError;
use crate::event::ServeEvent;
use crate::options::{OnFailure, ServerOptions};
use crate::sandbox::Sandbox;
use crate::socket::ListeningSocket;
use crate::status::{Status, nanoseconds};
use crate::totals::Totals;
use crate::worker::dialect;

/// The keys of what is waited for beside connections, which count from 1 on.
const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;
const WORKER: u64 = u64::MAX - 2;
const CONTROL: u64 = u64::MAX - 3;
const HUGE: u64 = u64::MAX - 4;

/// How long a monitor may take for its message.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// How often the clock is looked at while something is due.
const TICK: Duration = Duration::from_millis(200);

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
    connections: BTreeMap<u64, Connection>,
    /// Those that are to be handed over.
    news: VecDeque<u64>,
    /// The clients that read the memory of a session and are to be passed on.
    captures: VecDeque<(u64, MessageSocket, File)>,
    next: u64,
    is_accepting: bool,
    /// Whether the system lacked something that an order needs, which is sent again.
    is_short: bool,
    served: Served,
    /// The totals of all processes of this server but its worker, and those of the worker.
    totals: Totals,
    counted: Totals,
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
        if keeper.recovery.is_some() && estate.heirlooms.socket.is_none() {
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
        let Heirlooms { socket, control, metrics, manager, totals, .. } = estate.heirlooms;
        self.totals.add(&totals);
        let listening = socket
            .map(|socket| ListeningSocket::inherit(&self.path, socket, estate.is_named))
            // By one without a file no machine comes: the keeper before had begun to drain.
            .filter(ListeningSocket::has_file);
        if let Some(control) = control {
            // If that fails, it is tried again by the clock.
            let control = Control::inherit(&self.path, control, metrics);
            let _ = control.and_then(|control| self.listen_to(control));
        }
        self.manager = manager.map(ServiceManager::from_fd);
        // If one cannot be waited for, it counts as late after a while, or is served without an end.
        self.is_accepting = listening
            .as_ref()
            .is_some_and(|socket| self.set.add(&socket.listener, LISTENER).is_ok());
        for (key, connection) in &estate.connections {
            if !connection.known.is_ended {
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
            connections: BTreeMap::new(),
            news: VecDeque::new(),
            captures: VecDeque::new(),
            next: 1,
            is_accepting: true,
            is_short: false,
            served: Served::default(),
            totals: Totals::default(),
            counted: Totals::default(),
        };
        keeper.start_worker(has_machines).map_err(ServeError::Start)?;
        while keeper.worker.as_ref().is_some_and(|worker| !worker.is_ready) {
            keeper.first_words()?;
        }
        Ok(keeper)
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

    /// Removes a connection, also from what is kept.
    fn forget(&mut self, key: u64) -> Option<Connection> {
        let connection = self.connections.remove(&key)?;
        if let Some(recovery) = self.recovery.as_ref().filter(|_| connection.may_be_a_machine()) {
            recovery.discard(connection.known.id);
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
        }
        Ok(self.end())
    }

    /// Ends the worker.
    fn end(&mut self) -> Served {
        self.answer_all();
        self.worker = None;
        self.served
    }

    /// Answers all pending requests for the status.
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
            || self.is_short
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
                    if let Some(Ok(pending)) = userfaultfd.map(open_pending_faults)
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
        self.totals.add(&std::mem::take(&mut self.counted));
        let (connections, listener) = (&self.connections, socket.listener.as_fd());
        let totals = self.totals.clone();
        let given = takeover::give(
            to,
            &self.image,
            listener,
            connections,
            self.next,
            self.folder(),
            totals,
        );
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

    fn status(&self) -> Status {
        let machines =
            self.connections.iter().filter_map(|(number, connection)| connection.status(*number));
        let mut totals = self.totals.clone();
        totals.add(&self.counted);
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
            totals,
            sessions: machines.collect(),
        }
    }

    /// Acts on what happened in the worker, and logs it.
    fn happened(&mut self, mut event: ServeEvent) {
        // A connection is closed when this is logged.
        let mut _closed = None;
        match &mut event {
            ServeEvent::Connected { session, pid, len_bytes, page_bytes, .. } => {
                let Some(connection) = self.connections.get_mut(session) else { return };
                // A keeper that was a worker keeps none of those that connect to it.
                let must_be_kept = connection.known.must_be_served;
                if connection.known.memory.replace((*len_bytes, *page_bytes)).is_some() {
                    let after_ns = self.down_since.map_or(0, |since| nanoseconds(since.elapsed()));
                    event = ServeEvent::TakenOver { session: *session, pid: *pid, after_ns };
                } else {
                    self.served.sessions += 1;
                    // A worker in the place of its keeper learns of the machines of that in another way.
                    if must_be_kept || !self.is_confined {
                        self.count(|totals| &mut totals.sessions);
                    }
                    if must_be_kept && self.folder.is_some() {
                        tracing::warn!(
                            "session {session}: process {pid} is served, and not recovered if both processes of this \
                             server are killed: its keeper has died; start the server again, which keeps it"
                        );
                    }
                }
            }
            ServeEvent::Refused { session, was_killed, .. } => {
                let Some(mut connection) = self.forget(*session) else { return };
                *was_killed = self.kills() && connection.end_if_it_has_memory();
                _closed = Some(connection);
                self.count(|totals| &mut totals.refused);
            }
            ServeEvent::Failed { session, was_killed, .. } => {
                self.count(|totals| &mut totals.failed);
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

    /// Counts something that a worker in the place of this process has to know.
    fn count(&mut self, of: impl FnOnce(&mut Totals) -> &mut u64) {
        *of(&mut self.totals) += 1;
        self.heirlooms_changed();
    }

    fn kills(&self) -> bool {
        self.options.on_failure == OnFailure::Kill
    }

    /// Refuses a connection that no worker refused.
    fn refuse(&mut self, session: u64, reason: String) {
        if let Some(connection) = self.connections.get(&session) {
            let pid = connection.peer.pid();
            if connection.is_program() {
                // A program that has gone is not interested.
                let reply = Reply::Refused { reason: reason.clone() };
                let _ = dialect::reply(&connection.stream, &reply, None);
            }
            self.happened(ServeEvent::Refused { session, pid, reason, was_killed: false });
        }
    }

    /// Does what is due by the clock.
    fn see_to_time(&mut self) {
        self.is_short = false;
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
            && self.has_room()
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
}

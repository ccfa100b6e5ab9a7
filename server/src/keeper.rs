//! Keeping VMs alive: [`Keeper`]. It owns the socket, receives the messages of monitors, stores them, and hands them to a
//! worker, another process that parses them and answers faults. When a worker dies, the next one gets everything again. The
//! keeper parses no message of a monitor, and waits for no monitor and no worker.
//!
//! There is one way in, [`Keeper::start`]: end a worker that an earlier keeper left, listen, take all that the store has,
//! serve. An upgrade, and the death of the keeper or of both processes, are starts. When the keeper dies, its worker answers
//! for the VMs that it has, and nothing else.

mod accept;
mod huge;
mod poison;
mod room;
pub(crate) mod store;
mod worker;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use crate::message_socket::MessageSocket;
use crate::privilege;
use crate::process;
use uzone_attach::protocol::Reply;
use uzone_os::uffd::{Doorbell, EventSet, Remote, open_pending_faults};

use self::huge::Collapser;
use self::store::systemd::{ServiceManager, Systemd, SystemdDescriptors};
use self::store::{Left, Store, folder::Folder};
use self::worker::{RunningWorker, Start};
use crate::control::{self, Answer, Control, ControlRequest, Request};
use crate::error::ServeError;
use crate::event::ServeEvent;
use crate::live_diff::session::show;
use crate::machine::{Machine, State, Step};
use crate::metrics::Totals;
use crate::options::{OnFailure, Recover, ServerOptions};
use crate::sandbox::Sandbox;
use crate::socket::ListeningSocket;
use crate::status::{Status, nanoseconds};
use crate::worker::protocol;

/// Epoll keys. Clients are numbered from 1.
const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;
const WORKER: u64 = u64::MAX - 2;
const CONTROL: u64 = u64::MAX - 3;
const HUGE: u64 = u64::MAX - 4;

/// The longest time that a monitor takes for its message.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// The longest time that a server waits for connected monitors to send their memory, before it hands over to the next one.
const STOPS_WITHIN: Duration = Duration::from_millis(200);
/// The pause between two looks at the clock while a timer runs.
const TICK: Duration = Duration::from_millis(200);
/// The pause between two looks while the server waits to hand over.
const SHORT_TICK: Duration = Duration::from_millis(5);

/// Totals of a keeper's run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Served {
    /// VMs that were served.
    pub sessions: u64,
    /// VMs that are left: their faults wait until the next server starts, or they are ended.
    pub left: usize,
    /// Workers that died.
    pub deaths: u64,
}

/// The image as the latest worker has opened it.
#[derive(Default)]
struct Opened {
    /// Its identity: the root hash, or file id and mtime.
    image: String,
    path: String,
    /// Open files of the image; a path may point to a new file by the time a worker restarts.
    files: Vec<(String, File)>,
    sandbox: Sandbox,
}

/// Lets a worker process serve each VM that connects to a socket, and another one when it dies.
pub struct Keeper {
    path: PathBuf,
    options: ServerOptions,
    /// The user of this process.
    user: u32,
    log: Box<dyn Fn(&ServeEvent) + Send>,
    socket: Option<ListeningSocket>,
    is_accepting: bool,
    control: Option<Control>,
    /// Clients waiting for a status reply.
    asking: Vec<SyncSender<Answer>>,
    /// The server that waits for this one to hand over, and the end of the waiting.
    stopping: Option<(SyncSender<Answer>, Instant)>,
    start: Start,
    // Before the store: without a worker, it is the next server's.
    worker: Option<RunningWorker>,
    opened: Opened,
    /// The number of workers that died soon after their start.
    failures: u32,
    /// The time since which no worker has asked for work.
    down_since: Option<Instant>,
    start_at: Option<Instant>,
    store: Store,
    set: EventSet,
    machines: BTreeMap<u64, Machine>,
    /// The clients that are offered to the worker next.
    news: VecDeque<u64>,
    /// The clients that read the memory of a session, and are passed to the worker next.
    captures: VecDeque<(u64, MessageSocket, File)>,
    /// The memory of refused VMs whose process was not killed.
    poisoned: BTreeMap<u64, Remote>,
    next: u64,
    /// Whether the system lacked a resource for an order, which is sent again.
    is_short: bool,
    /// The thread that makes huge pages, once it is needed.
    collapser: Option<Collapser>,
    served: Served,
    /// The totals of all processes of this server but its worker, and of the worker.
    totals: Totals,
    counted: Totals,
}

impl Keeper {
    /// Starts a server on `socket`. It goes on with the VMs of earlier servers of the same socket that have ended, if the
    /// options have a place for their records ([`ServerOptions::recover`]). `passed` are the descriptors that a service
    /// manager kept. `start` starts a process, which calls [`Worker::run`](crate::Worker::run) with the descriptor; it is
    /// called again when a worker has died. `log` is called with all events.
    ///
    /// # Errors
    /// [`ServeError`]: the worker cannot be started or ended at once, the socket or the records cannot be used, or another
    /// server has the socket and there is no VM of this image that it left.
    pub fn start(
        socket: &Path,
        options: ServerOptions,
        passed: &mut SystemdDescriptors,
        log: impl Fn(&ServeEvent) + Send + 'static,
        start: impl FnMut(OwnedFd) -> io::Result<Child> + Send + 'static,
    ) -> Result<Self, ServeError> {
        let store = Self::open_store(socket, &options, passed)?;
        let before = if options.take_over { control::server_at(socket)? } else { None };
        let has_machines = store.has_machines() || before.is_some();
        let mut keeper = Self {
            path: socket.to_owned(),
            options,
            user: privilege::user(),
            log: Box::new(log),
            socket: None,
            is_accepting: true,
            control: None,
            asking: Vec::new(),
            stopping: None,
            start: Box::new(start),
            worker: None,
            opened: Opened::default(),
            failures: 0,
            down_since: Some(Instant::now()),
            start_at: None,
            store,
            set: EventSet::new().map_err(ServeError::Wait)?,
            machines: BTreeMap::new(),
            poisoned: BTreeMap::new(),
            news: VecDeque::new(),
            captures: VecDeque::new(),
            next: 1,
            is_short: false,
            collapser: None,
            served: Served::default(),
            totals: Totals::default(),
            counted: Totals::default(),
        };
        keeper.start_first_worker(has_machines)?;
        if let Some(before) = &before {
            keeper.check_same(before)?;
        }
        keeper.listen(passed, before.is_some())?;
        if before.is_some() {
            control::stop(socket)?;
        }
        keeper.take_all()?;
        if keeper.socket.is_some() {
            keeper.control = Some(Control::bind(socket, keeper.options.metrics)?);
        } else if keeper.machines.is_empty() {
            return Err(ServeError::InUse { path: socket.to_owned() });
        }
        if let Some(control) = &keeper.control {
            keeper.set.add(control, CONTROL).map_err(ServeError::Wait)?;
        }
        keeper.hand_over();
        Ok(keeper)
    }

    fn open_store(
        socket: &Path,
        options: &ServerOptions,
        passed: &mut SystemdDescriptors,
    ) -> Result<Store, ServeError> {
        Ok(match &options.recover {
            Recover::No => Store::None,
            Recover::Folder(root) => {
                let opened = Folder::open(root, socket);
                Store::Folder(opened.map_err(ServeError::at("store VMs in", root))?)
            }
            Recover::ServiceManager => match ServiceManager::of_environment() {
                Some(manager) => {
                    let kills = options.on_failure == OnFailure::Kill;
                    let opened = Systemd::open(manager, socket, passed, kills);
                    Store::Systemd(opened.map_err(ServeError::Wait)?)
                }
                None => Store::None,
            },
        })
    }

    /// Fails if a server that this one takes over from has another image, or its VMs are in another store.
    fn check_same(&self, before: &Status) -> Result<(), ServeError> {
        let reason = if before.identity != self.opened.image {
            "it serves another image, or its file was replaced".to_owned()
        } else if before.store != self.store.name() && !before.sessions.is_empty() {
            let name = |store: &Option<String>| store.clone().unwrap_or_else(|| "none".to_owned());
            format!(
                "its VMs are stored in {}, and this server stores VMs in {}: name the same folder by --recover",
                name(&before.store),
                name(&self.store.name())
            )
        } else if self.store.name().is_none() && !before.sessions.is_empty() {
            "its VMs are stored nowhere (--recover none): drain it".to_owned()
        } else if matches!(self.store, Store::Systemd(_)) && !before.sessions.is_empty() {
            "systemd has its VMs: kill that service, and systemd starts the new one".to_owned()
        } else {
            return Ok(());
        };
        let path = control::control_path(&self.path);
        Err(ServeError::Ask { path, cause: io::Error::other(reason) })
    }

    /// Listens on the socket that the service manager passed, or on one that takes its name. Without one, another server
    /// has the name.
    fn listen(
        &mut self,
        passed: &mut SystemdDescriptors,
        replaces: bool,
    ) -> Result<(), ServeError> {
        let (path, mode, group) = (&self.path, self.options.mode, self.options.group);
        let bound = match passed.take_socket(path) {
            Some((fd, is_named)) => ListeningSocket::passed(path, fd, is_named),
            None if replaces => ListeningSocket::replace(path, mode, group),
            None => ListeningSocket::bind(path, mode, group),
        };
        let socket = match bound {
            Err(ServeError::InUse { .. }) => return Ok(()),
            bound => bound?,
        };
        self.set.add(&socket.listener, LISTENER).map_err(ServeError::Wait)?;
        if let Store::Systemd(systemd) = &self.store
            && socket.is_named()
        {
            systemd.put_socket(socket.listener.as_fd());
        }
        self.socket = Some(socket);
        Ok(())
    }

    /// Takes the VMs of earlier servers.
    fn take_all(&mut self) -> Result<(), ServeError> {
        let taken = self.store.take_all(&self.opened.image, self.socket.is_some());
        let Left { machines, totals } =
            taken.map_err(ServeError::at("take the VMs of", &self.path))?;
        self.totals.add(totals);
        self.store.put_totals(&self.totals);
        for (session, machine) in machines {
            let is_free = session > 0 && !self.machines.contains_key(&session);
            let session = if is_free { session } else { self.next };
            self.next = self.next.max(session + 1);
            if !machine.is_ended {
                // If it cannot be waited for, it counts as late after a while.
                let _ = self.set.add(&machine.stream, session);
            }
            if machine.state == State::Offered {
                self.news.push_back(session);
            }
            self.machines.insert(session, machine);
        }
        self.refuse_other_images();
        for key in self.machines.keys().copied().collect::<Vec<_>>() {
            self.read(key);
        }
        Ok(())
    }

    /// Rejects recovered VMs whose image differs from ours.
    fn refuse_other_images(&mut self) {
        let ours = &self.opened.image;
        let others = self.machines.iter().filter_map(|(key, machine)| {
            let image = machine.image.as_ref().filter(|image| *image != ours)?;
            Some((*key, format!("image mismatch: the VM was started from another image, {image}")))
        });
        for (key, reason) in others.collect::<Vec<_>>() {
            self.refuse(key, reason);
        }
    }

    /// Returns the restrictions of the worker.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.opened.sandbox
    }

    /// Returns whether VMs can connect.
    #[must_use]
    pub fn is_listening(&self) -> bool {
        self.socket.is_some()
    }

    /// Returns the address of metrics by HTTP, if [`ServerOptions::metrics`] asked for a port.
    #[must_use]
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.control.as_ref()?.metrics()
    }

    /// Serves until `stop` rings. Then it accepts no further VM, and returns when the last one has ended, or when
    /// `stop` rings again. The worker has ended then.
    ///
    /// # Errors
    /// [`ServeError::Wait`] if the system refuses to wait.
    pub fn run(&mut self, stop: &Doorbell) -> Result<Served, ServeError> {
        self.set.add(stop, STOP).map_err(ServeError::Wait)?;
        let mut ready = Vec::new();
        while self.socket.is_some() || !self.machines.is_empty() || self.stopping.is_some() {
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
                            self.served.left = self.machines.len();
                            return Ok(self.end());
                        }
                    }
                    key if self.answer_poisoned(key) => {}
                    key => self.read(key),
                }
            }
            self.run_timers();
            if self.has_handed_over() {
                return Ok(self.served);
            }
            self.hand_over();
        }
        Ok(self.end())
    }

    /// Ends the worker.
    fn end(&mut self) -> Served {
        self.answer_all();
        self.worker = None;
        self.totals.add(std::mem::take(&mut self.counted));
        self.store.put_totals(&self.totals);
        self.served
    }

    /// Hands everything over to the server that waits for it, once connected monitors have sent their memory. Returns
    /// whether it did.
    fn has_handed_over(&mut self) -> bool {
        let is_silent = |machine: &Machine| machine.is_new() && !machine.has_descriptors();
        let waits = self.machines.values().any(is_silent);
        let is_due =
            |stopping: &mut (SyncSender<Answer>, Instant)| !waits || stopping.1 <= Instant::now();
        let Some((answer, _)) = self.stopping.take_if(is_due) else { return false };
        let sessions = self.machines.len() - self.greetings();
        let mut status = self.status();
        self.end();
        self.machines.clear();
        // The next server finds no owner.
        self.store = Store::None;
        self.happened(ServeEvent::HandedOver { sessions });
        status.worker = None;
        if let Some(control) = &self.control {
            control.close_metrics();
            control.leave();
        }
        // The client may have gone.
        let _ = answer.try_send(Ok(status));
        true
    }

    /// Answers all pending requests for the status.
    fn answer_all(&mut self) {
        if !self.asking.is_empty() {
            let status = self.status();
            for answer in self.asking.drain(..) {
                // The client may have gone.
                let _ = answer.try_send(Ok(status.clone()));
            }
        }
    }

    /// Returns the time until the next timer.
    fn timeout(&self) -> Option<Duration> {
        let start = self.start_at.map(|at| at.saturating_duration_since(Instant::now()));
        let is_due = self.is_short
            || self.greetings() > 0
            || !self.poisoned.is_empty()
            || self.down_since.is_some() && !self.machines.is_empty();
        let stops = self.stopping.as_ref().map(|_| SHORT_TICK);
        [start, stops, is_due.then_some(TICK)].into_iter().flatten().min()
    }

    /// Stops accepting. Returns whether it had stopped before.
    fn is_stopped_again(&mut self) -> bool {
        if self.socket.is_none() {
            return true;
        }
        if let Some(control) = &self.control {
            control.close_metrics();
        }
        self.stop_accepting();
        // A VM that has handed its memory over is served.
        let silent = self.machines.iter().filter(|(_, one)| !one.has_descriptors());
        for key in silent.map(|(key, _)| *key).collect::<Vec<_>>() {
            if self.is_silent_to_the_end(key) {
                self.forget(key);
            }
        }
        false
    }

    /// Closes the socket, and takes the connections that wait there.
    fn stop_accepting(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        if let Store::Systemd(systemd) = &self.store {
            systemd.remove_socket();
        }
        if self.is_accepting {
            // It was waited for.
            let _ = self.set.remove(&socket.listener);
        }
        // The clients of a socket that a service manager made connect to the next server.
        if socket.is_named() {
            socket.close();
            while let Ok((stream, _)) = socket.listener.accept() {
                self.admit(stream);
            }
        }
    }

    /// Obeys the requests of the control socket.
    fn answer(&mut self) -> Result<(), ServeError> {
        let Some(control) = &self.control else { return Ok(()) };
        for ControlRequest { request, answer } in control.take().map_err(ServeError::Wait)? {
            match request {
                Request::Status => self.asking.push(answer),
                Request::Drain => {
                    self.is_stopped_again();
                    self.asking.push(answer);
                }
                Request::Stop => {
                    // The name is the next server's.
                    self.stop_accepting();
                    self.stopping = Some((answer, Instant::now() + STOPS_WITHIN));
                }
                Request::Memory(session, to) => {
                    self.asking.push(answer);
                    let machine = self.machines.get(&session);
                    let userfaultfd = machine.and_then(Machine::userfaultfd);
                    // The client may have gone.
                    let shown = show(&to, &self.opened.image, session, machine);
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

    fn status(&self) -> Status {
        let sessions = self.machines.iter().filter_map(|(number, one)| one.status(*number));
        let mut totals = self.totals.clone();
        totals.add(self.counted.clone());
        Status {
            socket: self.path.display().to_string(),
            image: self.opened.path.clone(),
            identity: self.opened.image.clone(),
            store: self.store.name(),
            keeper: std::process::id(),
            worker: self.worker.as_ref().map(|worker| worker.child.id()),
            sandbox: self.opened.sandbox.clone(),
            worker_deaths: self.served.deaths,
            is_draining: self.socket.is_none(),
            sessions_served: self.served.sessions,
            greetings: self.greetings(),
            totals,
            sessions: sessions.collect(),
        }
    }

    /// Removes a client, also from the store.
    fn forget(&mut self, key: u64) -> Option<Machine> {
        let machine = self.machines.remove(&key)?;
        self.store.remove(&machine);
        Some(machine)
    }

    /// Removes a client that is gone after this step.
    fn step(&mut self, key: u64, step: Step) -> Option<Machine> {
        let is_gone = self.machines.get_mut(&key)?.step(step);
        if is_gone { self.forget(key) } else { None }
    }

    /// Acts on an event of the worker, and logs it.
    fn happened(&mut self, mut event: ServeEvent) {
        // A connection is closed when this is logged.
        let mut _closed = None;
        match &mut event {
            ServeEvent::Connected { session, pid, len_bytes, page_bytes, .. } => {
                self.stop_reading(*session);
                let Some(machine) = self.machines.get_mut(session) else { return };
                machine.step(Step::Served);
                if machine.memory.replace((*len_bytes, *page_bytes)).is_some() {
                    let after_ns = self.down_since.map_or(0, |since| nanoseconds(since.elapsed()));
                    event = ServeEvent::TakenOver { session: *session, pid: *pid, after_ns };
                } else {
                    self.served.sessions += 1;
                    self.totals.sessions += 1;
                }
            }
            ServeEvent::Refused { session, was_killed, reason, .. } => {
                let Some(mut machine) = self.step(*session, Step::Refused) else { return };
                *was_killed = self.end_refused(*session, &mut machine, reason);
                _closed = Some(machine);
                self.totals.refused += 1;
            }
            ServeEvent::Failed { session, kind, was_killed, .. } => {
                *self.totals.failed.of(*kind) += 1;
                let Some(machine) = self.machines.get(session) else { return };
                *was_killed = self.kills() && process::kill(&machine.peer).is_ok();
            }
            ServeEvent::Ended { session, .. } => drop(self.step(*session, Step::Ended)),
            ServeEvent::NotHuge { .. }
            | ServeEvent::WorkerEnded { .. }
            | ServeEvent::TakenOver { .. }
            | ServeEvent::HandedOver { .. } => {}
        }
        (self.log)(&event);
    }

    fn kills(&self) -> bool {
        self.options.on_failure == OnFailure::Kill
    }

    /// Refuses a client that no worker refused.
    fn refuse(&mut self, session: u64, reason: String) {
        if let Some(machine) = self.machines.get(&session) {
            let pid = machine.peer.pid();
            if machine.is_program() {
                // A program that has gone is not interested.
                let reply = Reply::Refused { reason: reason.clone() };
                let _ = protocol::reply(&machine.stream, &reply, None);
            }
            self.happened(ServeEvent::Refused { session, pid, reason, was_killed: false });
        }
    }

    /// Runs expired timers.
    fn run_timers(&mut self) {
        self.is_short = false;
        self.forget_poisoned();
        let is_late = |machine: &Machine| {
            machine.state == State::Arriving && machine.since.elapsed() >= HANDSHAKE_WITHIN
        };
        let late = self.machines.iter().filter(|(_, one)| is_late(one));
        for key in late.map(|(key, _)| *key).collect::<Vec<_>>() {
            // Bytes that have just come may make its message whole.
            self.is_silent_to_the_end(key);
            let is_gone = |machine: &Machine| machine.state.after(Step::Late).is_none();
            if self.machines.get(&key).is_some_and(is_gone) {
                self.refuse(key, format!("handshake timed out after {HANDSHAKE_WITHIN:?}"));
            }
        }
        if !self.is_accepting
            && self.has_room()
            && let Some(socket) = &self.socket
        {
            self.is_accepting = self.set.add(&socket.listener, LISTENER).is_ok();
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

    /// Ends the VMs that no worker could be started for.
    fn end_the_waiting(&mut self) {
        for session in self.machines.keys().copied().collect::<Vec<_>>() {
            let Some(mut machine) = self.forget(session) else { continue };
            let deadline = self.options.deadline;
            let mut reason = format!("no worker could be started within {deadline:?}");
            let pid = machine.peer.pid();
            let was_killed = self.end_refused(session, &mut machine, &mut reason);
            (self.log)(&ServeEvent::Refused { session, pid, reason, was_killed });
        }
    }
}

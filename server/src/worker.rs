//! Answering the faults of machines: [`Worker`]. One thread waits for connections, which a keeper hands
//! over, and for the end of machines; faults are answered by the threads of an [`uzone_fault::Engine`].

mod captures;
pub(crate) mod dialect;
mod huge;
mod opening;
mod session;
mod working_set;

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use uzone_attach::protocol::{Reply, Request, VERSION};
use uzone_fault::{AdoptedMemory, Backing, MapError, RemoteRegion, SharedBacking};
use uzone_os::Vaddr;
use uzone_os::descriptors::is_shortage;
use uzone_os::uffd::{EventLog, EventSet, LoggedEvents, Remote};
use uzone_os::unix_socket::MessageSocket;
use uzone_pages::ByteLen;

use self::captures::Client;
use self::dialect::{Memory, Said};
use self::huge::Finder;
use self::opening::Opened;
use self::session::Session;
use crate::connection::Connection;
use crate::error::ServeError;
use crate::event::ServeEvent;
use crate::keeper::estate::{Estate, Heirlooms};
use crate::link::{self, Order, Report, SHORTAGE, Titled};
use crate::options::{OnFailure, ServerOptions};
use crate::sandbox::Sandbox;
use crate::totals::Totals;

/// The key of the keeper; sessions have their numbers, which start at 1, and clients that read the memory of a
/// session numbers with this bit.
const KEEPER: u64 = 0;
const CLIENT: u64 = 1 << 63;
/// How often a machine is probed whose monitor ended before it did.
const PROBE: Duration = Duration::from_millis(200);

/// How long a service manager may take to end what is left of a server.
const MANAGER_WITHIN: Duration = Duration::from_secs(2);
/// Why a machine is not served.
const NO_DESCRIPTORS: &str = "a process of this server has as many descriptors as it may, or the system has: raise \
                              the hard limit (LimitNOFILE= of a unit, or `ulimit -Hn`)";
/// How often the worker reports its totals to the keeper.
const TELL_EVERY: Duration = Duration::from_secs(1);
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
        let Titled { title, fds, .. } = link::receive(&keeper).map_err(ServeError::Wait)?;
        let Order::Start { names, has_machines } = title else {
            return Err(ServeError::Wait(io::ErrorKind::InvalidData.into()));
        };
        let files = names.into_iter().zip(fds.into_iter().map(File::from)).collect();
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
    opened: Opened,
    /// The pages that attached programs share, if any of them asked for that.
    shared: Option<Arc<SharedBacking>>,
    /// The keeper, if this process is a worker of one.
    keeper: Option<Arc<MessageSocket>>,
    options: ServerOptions,
    set: EventSet,
    sessions: HashMap<u64, Session>,
    /// The clients that read the memory of a session, by their keys.
    clients: HashMap<u64, Client>,
    next_client: u64,
    /// What the next keeper needs, should this one die.
    heirlooms: Option<Heirlooms>,
    /// Sessions whose monitor has ended.
    orphans: Vec<u64>,
    recorded: Instant,
    huge: Finder,
    /// The totals of sessions that have ended, and the time of the last report to the keeper.
    ended: Totals,
    told: Instant,
}

impl Worker {
    /// Opens `image`, a packed image or the raw bytes of memory. With the `start` of a keeper, an
    /// image that was open in an earlier worker is the same, although its files may have been
    /// replaced since; and where machines wait, a list of pages that cannot be read or written is a
    /// warning.
    ///
    /// Unless [`ServerOptions::sandbox`] turns that off, this thread and those that it starts are confined
    /// from then on, for good: so this is for a process of its own, before it has other threads.
    ///
    /// # Errors
    /// [`ServeError`]: the image cannot be read, or a thread is refused.
    pub fn open(
        image: &Path,
        options: ServerOptions,
        start: Option<WorkerStart>,
    ) -> Result<Self, ServeError> {
        let (keeper, files, has_machines) = match start {
            Some(start) => (Some(Arc::new(start.keeper)), start.files, start.has_machines),
            None => (None, Vec::new(), false),
        };
        let opened = Opened::new(image, &options, files, has_machines)?;
        Ok(Self {
            opened,
            shared: None,
            keeper,
            options,
            set: EventSet::new().map_err(ServeError::Wait)?,
            sessions: HashMap::new(),
            clients: HashMap::new(),
            next_client: CLIENT,
            heirlooms: None,
            orphans: Vec::new(),
            recorded: Instant::now(),
            huge: Finder::new(),
            ended: Totals::default(),
            told: Instant::now(),
        })
    }

    /// Returns how this process is confined.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.opened.sandbox
    }

    /// Serves the machines that the keeper hands over. Returns when that has ended: [`Worker::into_estate`] is what
    /// it leaves. Without a keeper it returns at once.
    ///
    /// # Errors
    /// [`ServeError::Wait`] if the system refuses to wait.
    pub fn run(&mut self) -> Result<(), ServeError> {
        let Some(keeper) = self.keeper.clone() else { return Ok(()) };
        self.set.add(&*keeper, KEEPER).map_err(ServeError::Wait)?;
        let mut ready = Vec::new();
        let (names, files): (Vec<_>, Vec<_>) =
            self.opened.files.iter().map(|(name, file)| (name.clone(), file.as_fd())).unzip();
        let (image, path, sandbox) =
            (self.opened.image.clone(), self.opened.path.clone(), self.opened.sandbox.clone());
        let opened = Report::Opened { image, path, names, sandbox };
        let mut is_kept = link::send_patiently(&keeper, &opened, &files)
            .and_then(|()| link::send(&keeper, &Report::Next, &[]))
            .is_ok();
        while is_kept {
            self.wait(&mut ready)?;
            for &key in &ready {
                if key & CLIENT != 0 {
                    if !self.hear(key) {
                        self.forget_client(key);
                    }
                    continue;
                }
                if key != KEEPER {
                    self.monitor_ended(key);
                    continue;
                }
                // A malformed message comes from a keeper of another version.
                is_kept = match link::receive_any(&keeper) {
                    Ok(order) if order.lacks_fds => decline(&keeper, &order.title),
                    Ok(order) => self.obey(&keeper, order),
                    Err(cause) if is_shortage(&cause) => {
                        thread::sleep(SHORTAGE);
                        true
                    }
                    Err(_) => false,
                };
            }
            self.end_slow_captures();
            if !self.sessions.is_empty() && self.told.elapsed() >= TELL_EVERY {
                self.tell(&keeper);
            }
            for (number, blocks) in self.huge.find(&mut self.sessions) {
                let blocks = blocks.into_iter().map(Vaddr::get).collect();
                // Without a keeper there is no right to it either.
                let _ = link::send(&keeper, &Report::Blocks(number, blocks), &[]);
            }
            self.end_the_gone(|event| {
                // Without a keeper there is no log.
                let _ = link::send(&keeper, &Report::Event(event), &[]);
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
            thread::sleep(MANAGER_WITHIN);
        }
        let totals = self.totals();
        let mut heirlooms = self.heirlooms?;
        heirlooms.totals.add(&totals);
        let sessions = self.sessions.into_iter();
        // Each stops reading events before its log goes on.
        let connections = sessions.map(|(number, session)| {
            let mut connection = session.into_connection();
            // A worker of the next keeper may find another one.
            connection.image.get_or_insert(self.opened.image.clone());
            (number, connection)
        });
        let connections = connections.collect();
        let (is_confined, files) = (true, self.opened.files);
        Some(Estate { is_confined, files, ..Estate::new(heirlooms, connections) })
    }

    /// Returns what this process has done.
    fn totals(&self) -> Totals {
        let mut totals = self.ended.clone();
        let cache = self.opened.cache.counts();
        totals.cache_hits = cache.hits;
        totals.decoded_frames = cache.decoded_frames;
        totals.decoded_bytes = cache.decoded_bytes;
        self.sessions.values().for_each(|session| totals.add(&session.totals()));
        totals
    }

    /// Tells the keeper what this process has done.
    fn tell(&mut self, keeper: &MessageSocket) {
        self.told = Instant::now();
        // Without a keeper, it is in what this process leaves.
        let _ = link::send(keeper, &Report::Totals(self.totals()), &[]);
    }

    fn wait(&self, ready: &mut Vec<u64>) -> Result<(), ServeError> {
        let orphans = (!self.orphans.is_empty()).then_some(PROBE);
        let records = self.opened.recording.is_some() && !self.sessions.is_empty();
        let looks = orphans.or((!self.clients.is_empty()).then_some(PROBE));
        let timeout = looks.or(records.then_some(RECORD_EVERY));
        let tells = (!self.sessions.is_empty()).then_some(TELL_EVERY);
        let times = [timeout, tells, self.huge.timeout(&self.sessions)];
        let timeout = times.into_iter().flatten().min();
        self.set.wait(ready, timeout).map_err(ServeError::Wait)
    }

    /// Writes down which pages were touched, if it is time.
    fn record(&mut self, is_time: bool) {
        let Some(recording) = &mut self.opened.recording else { return };
        if !is_time && self.recorded.elapsed() < RECORD_EVERY {
            return;
        }
        for session in self.sessions.values() {
            recording.add(&session.memory.take_trace().0);
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
        let (sessions, counted) = (&mut self.sessions, &mut self.ended);
        self.orphans.retain(|number| {
            let Some(session) = sessions.get(number) else { return false };
            if session.is_gone() {
                counted.add(&session.totals());
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

    /// Does what the keeper asks for, and asks for more. Returns whether the keeper is there.
    fn obey(&mut self, keeper: &Arc<MessageSocket>, order: Titled<Order>) -> bool {
        match order.title {
            Order::Keep { .. } => match Heirlooms::take(order) {
                Some(heirlooms) => self.heirlooms = Some(heirlooms),
                None => return false,
            },
            Order::Take(kept) => match Connection::from_kept(&kept, order.fds, order.bytes) {
                Some((number, _)) if self.sessions.contains_key(&number) => {}
                Some((number, connection)) => self.take(keeper, number, connection),
                None => return false,
            },
            Order::Capture(session) => {
                let mut fds = order.fds.into_iter();
                let parts = fds.next().zip(fds.next());
                let Some((Ok(socket), pending)) =
                    parts.map(|(socket, pending)| (MessageSocket::from_fd(socket), pending))
                else {
                    return false;
                };
                let (key, socket) = (self.next_client, Arc::new(socket));
                // If it cannot be waited for, its socket is closed.
                if self.set.add(&socket, key).is_ok() {
                    self.next_client += 1;
                    let pending = Some(pending.into());
                    let client = Client { session, socket, pending, captures: false };
                    self.clients.insert(key, client);
                }
            }
            // It comes before all else.
            Order::Start { .. } => return false,
            // It comes after a report that was waited for.
            Order::Log { .. } => return true,
            Order::Stats => {
                self.tell(keeper);
                for (number, session) in &self.sessions {
                    let stats = Report::Stats(*number, session.stats());
                    if link::send(keeper, &stats, &[]).is_err() {
                        return false;
                    }
                }
            }
        }
        link::send(keeper, &Report::Next, &[]).is_ok()
    }

    /// Takes a connection, whose message may not be whole yet.
    fn take(&mut self, keeper: &Arc<MessageSocket>, number: u64, connection: Connection) {
        let pid = connection.peer.pid();
        let stream = connection.stream.try_clone();
        let is_program = connection.is_program();
        let reason = match dialect::read(&connection) {
            Ok(Said::Part) => return,
            Ok(Said::Asks(request)) => self.answer(&connection, &request),
            Ok(Said::Memory(memory)) => self.serve(keeper, number, connection, memory),
            // A probe of whether there is a server.
            Err(_) if connection.bytes.is_empty() && !connection.has_descriptors() => {
                let _ = link::send(keeper, &Report::Probe(number), &[]);
                return;
            }
            Err(error) => Err(error.to_string()),
        };
        let Err(reason) = reason else { return };
        if let (true, Ok(stream)) = (is_program, stream) {
            // A program that has gone is not interested.
            let _ = dialect::reply(&stream, &Reply::Refused { reason: reason.clone() }, None);
        }
        // If it was not sent, the keeper has ended, which the next receive finds.
        let _ = link::send(keeper, &refused(number, pid, reason), &[]);
    }

    /// Answers a program that asks for the image.
    fn answer(&mut self, connection: &Connection, request: &Request) -> Result<(), String> {
        let Request::Attach { version, share, image, .. } = request;
        if *version != VERSION {
            return Err(format!("it asks by version {version}: this server has {VERSION}"));
        }
        if image.as_ref().is_some_and(|image| *image != self.opened.image) {
            return Err(format!(
                "its memory is of another image: this server has {}",
                self.opened.image
            ));
        }
        let len = self.opened.backing.byte_len().ok_or("the image has no length")?;
        let file = if *share {
            let shared = self.shared().map_err(text)?;
            shared.memory_file().map_err(text)?.map(|(fd, _)| fd)
        } else {
            None
        };
        let (image, shares) = (self.opened.image.clone(), file.is_some());
        let reply = Reply::Image { image, len_bytes: len.get(), shares };
        dialect::reply(&connection.stream, &reply, file.as_ref().map(AsFd::as_fd))
            .map_err(|cause| format!("it does not take the answer: {cause}"))
    }

    /// Returns the pages that attached programs share.
    fn shared(&mut self) -> Result<Arc<SharedBacking>, MapError> {
        if let Some(shared) = &self.shared {
            return Ok(shared.clone());
        }
        let keep = self.options.share.or(self.opened.backing.byte_len()).unwrap_or(ByteLen::ZERO);
        let shared = Arc::new(SharedBacking::new(self.opened.backing.clone(), keep)?);
        self.shared = Some(shared.clone());
        Ok(shared)
    }

    fn serve(
        &mut self,
        keeper: &Arc<MessageSocket>,
        number: u64,
        connection: Connection,
        memory: Memory,
    ) -> Result<(), String> {
        let peer = &connection.peer;
        // A machine that another process served is better off with faults that are answered.
        let is_new = connection.is_greeting() && !connection.known.must_be_served;
        if self.options.on_failure == OnFailure::Kill && is_new && !connection.known.can_be_killed {
            return Err(format!(
                "process {} of user {} may not be killed by this server: run it as that user, or serve \
                 with --on-failure poison or hold",
                peer.pid(),
                peer.uid()
            ));
        }
        let backing = match memory.is_shared() {
            true => self.shared().map_err(text)? as Arc<dyn Backing>,
            false => self.opened.backing.clone(),
        };
        // Before there is a log as long as they say.
        let has = backing.byte_len().ok_or("the image has no length")?;
        dialect::check(&memory.regions, has).map_err(text)?;
        let fd = connection.userfaultfd().ok_or("the userfaultfd is lost")?;
        let fd = fd.try_clone().map_err(text)?;
        let remote = Remote::adopt(fd).map_err(text)?;
        let session = Session::start(self, keeper, number, connection, memory, backing, remote)?;
        for fd in session.watched() {
            self.set.add(fd, number).map_err(text)?;
        }
        self.sessions.insert(number, session);
        Ok(())
    }
}

/// Answers an order whose descriptors this process had no room for. Returns whether the keeper is there.
fn decline(keeper: &MessageSocket, order: &Order) -> bool {
    if let Order::Take(kept) = order {
        let (number, pid) = (kept.session(), kept.process().0);
        let refused = refused(number, pid, NO_DESCRIPTORS.to_owned());
        if link::send(keeper, &refused, &[]).is_err() {
            return false;
        }
    } else {
        tracing::warn!("an order of the keeper is not obeyed: {NO_DESCRIPTORS}");
    }
    link::send(keeper, &Report::Next, &[]).is_ok()
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
    connection.log = Some(log.try_clone_to_owned().map_err(text)?);
    let answer = link::send_patiently(keeper, &Report::Reading(number), &[log])
        .and_then(|()| link::receive::<Order>(keeper));
    match answer {
        // This process takes the place of a keeper that has died.
        Err(cause) if cause.kind() != io::ErrorKind::UnexpectedEof => {
            return Err(format!("the keeper does not answer: {cause}"));
        }
        Ok(Titled { title: Order::Log { is_kept: false }, .. }) => {
            return Err(NO_DESCRIPTORS.to_owned());
        }
        _ => {}
    }
    // More of the stream means nothing.
    connection.known.is_ended = true;
    Ok(removals)
}

/// Makes the log of what a machine gives back, which goes on with that of the process that served it before.
fn make_log(connection: &mut Connection, regions: &[RemoteRegion]) -> Result<EventLog, String> {
    let marks = AdoptedMemory::marks(regions).map_err(text)?;
    let before = match (connection.log.take(), connection.earlier_log()) {
        (Some(ours), _) => Some(LoggedEvents::read_trusted(ours, marks)),
        (None, Some(theirs)) => {
            Some(theirs.try_clone().and_then(|theirs| LoggedEvents::read(theirs, marks)))
        }
        (None, None) => None,
    };
    let before = before.transpose().map_err(text)?;
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
    make(None).map_err(text)
}

/// Returns an error as the reason why a client is refused.
fn text(error: impl fmt::Display) -> String {
    error.to_string()
}

fn refused(session: u64, pid: u32, reason: String) -> Report {
    Report::Event(ServeEvent::Refused { session, pid, reason, was_killed: false })
}

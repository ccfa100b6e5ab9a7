//! Answering the faults of VMs: [`Worker`]. One thread waits for clients, which the keeper offers, and for the end of VMs;
//! faults are answered by the threads of an [`uzone_fault::Engine`]. When the keeper dies, the worker answers on for the VMs
//! that it has, takes no other, and ends with the last one, or when the next keeper ends it.

pub(crate) mod firecracker;
mod huge;
mod live_diff;
mod open_image;
pub(crate) mod protocol;
mod session;
mod working_set;

use std::collections::HashMap;
use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::descriptors::is_shortage;
use crate::message_socket::MessageSocket;
use uzone_attach::protocol::{Reply, Request, VERSION};
use uzone_fault::{AdoptedMemory, Backing, MapError, SharedBacking};
use uzone_os::Vaddr;
use uzone_os::uffd::{EventLog, EventSet, LoggedEvents, Remote};
use uzone_pages::ByteLen;

use self::huge::Finder;
use self::live_diff::Client;
use self::open_image::Opened;
use self::protocol::{Memory, Message};
use self::session::Session;
use crate::error::ServeError;
use crate::event::ServeEvent;
use crate::machine::Machine;
use crate::messages::{self, Order, Report, SESSIONS, SHORTAGE, Titled};
use crate::metrics::Totals;
use crate::options::{OnFailure, ServerOptions};
use crate::sandbox::Sandbox;

/// The key of the keeper; sessions have their numbers, which start at 1, and clients that read the memory of a
/// session numbers with this bit.
const KEEPER: u64 = 0;
const CLIENT: u64 = 1 << 63;
/// The pause between two probes of a VM whose monitor has ended.
const PROBE: Duration = Duration::from_millis(200);

/// The reason for refusing a VM.
const NO_DESCRIPTORS: &str = "a process of this server has as many descriptors as it may, or the system has: raise \
                              the hard limit (LimitNOFILE= of a unit, or `ulimit -Hn`)";
/// The pause between two reports of the totals to the keeper.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// The pause between two writes of the recorded pages.
const RECORD_EVERY: Duration = Duration::from_secs(2);

/// The first message of a keeper to a worker.
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
        let Titled { title, fds, .. } = messages::receive(&keeper).map_err(ServeError::Wait)?;
        let Order::Start { names, has_machines } = title else {
            return Err(ServeError::Wait(io::ErrorKind::InvalidData.into()));
        };
        let files = names.into_iter().zip(fds.into_iter().map(File::from)).collect();
        Ok(Self { keeper, files, has_machines })
    }

    /// Returns whether VMs may wait for the worker: it is better to serve them without files that save time alone.
    #[must_use]
    pub fn has_machines(&self) -> bool {
        self.has_machines
    }
}

/// Answers the faults of VMs from one image, in a process of its own.
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
    /// replaced since; and where VMs wait, a list of pages that cannot be read or written is a
    /// warning.
    ///
    /// Unless [`ServerOptions::sandbox`] turns that off, this thread and the threads that it starts are confined for
    /// good. So this is for a process of its own, before it has other threads.
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
            orphans: Vec::new(),
            recorded: Instant::now(),
            huge: Finder::new(),
            ended: Totals::default(),
            told: Instant::now(),
        })
    }

    /// Returns the restrictions of this process.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.opened.sandbox
    }

    /// Serves the VMs that the keeper offers. Returns when the keeper and all VMs have ended. Without a keeper it returns
    /// at once.
    ///
    /// # Errors
    /// [`ServeError::Wait`] if the system refuses to wait.
    pub fn run(&mut self) -> Result<(), ServeError> {
        let Some(keeper) = self.keeper.clone() else { return Ok(()) };
        self.set.add(&*keeper, KEEPER).map_err(ServeError::Wait)?;
        let (names, files): (Vec<_>, Vec<_>) =
            self.opened.files.iter().map(|(name, file)| (name.clone(), file.as_fd())).unzip();
        let (image, path, sandbox) =
            (self.opened.image.clone(), self.opened.path.clone(), self.opened.sandbox.clone());
        let opened = Report::Opened { image, path, names, sandbox };
        let mut has_keeper = messages::send_patiently(&keeper, &opened, &files)
            .and_then(|()| messages::send(&keeper, &READY, &[]))
            .is_ok();
        let mut ready = Vec::new();
        while has_keeper || !self.sessions.is_empty() {
            self.wait(&mut ready)?;
            for &key in &ready {
                if key & CLIENT != 0 {
                    if !self.hear(key) {
                        self.forget_client(key);
                    }
                } else if key != KEEPER {
                    self.monitor_ended(key);
                } else if has_keeper {
                    has_keeper = self.hear_keeper(&keeper);
                    if !has_keeper {
                        // It stays ready.
                        let _ = self.set.remove(&*keeper);
                    }
                }
            }
            self.end_slow_captures();
            if !self.sessions.is_empty() && self.told.elapsed() >= TELL_EVERY {
                self.tell(&keeper, false);
            }
            for (number, blocks) in self.huge.find(&mut self.sessions) {
                let blocks = blocks.into_iter().map(Vaddr::get).collect();
                // Without a keeper there is no right to it either.
                let _ = messages::send(&keeper, &Report::Blocks(number, blocks), &[]);
            }
            self.end_the_gone(|event| {
                // Without a keeper there is no log.
                let _ = messages::send(&keeper, &Report::Event(event), &[]);
            });
        }
        Ok(())
    }

    /// Obeys the next order of the keeper. Returns whether it is there.
    fn hear_keeper(&mut self, keeper: &Arc<MessageSocket>) -> bool {
        match messages::receive_any(keeper) {
            Ok(order) if order.lacks_fds => decline(keeper, &order.title),
            Ok(order) => self.obey(keeper, order),
            Err(cause) if is_shortage(&cause) => {
                thread::sleep(SHORTAGE);
                true
            }
            Err(_) => false,
        }
    }

    /// Returns the totals of this process.
    fn totals(&self) -> Totals {
        let mut totals = self.ended.clone();
        let cache = self.opened.cache.counts();
        totals.cache_hits = cache.hits;
        totals.decoded_frames = cache.decoded_frames;
        totals.decoded_bytes = cache.decoded_bytes;
        totals.stored_bytes = cache.stored_bytes;
        self.sessions.values().for_each(|session| totals.add(session.totals()));
        totals
    }

    /// Tells the keeper the totals of this process, and the counts of all sessions. Returns whether it is there.
    fn tell(&mut self, keeper: &MessageSocket, with_sessions: bool) -> bool {
        self.told = Instant::now();
        let totals = self.totals();
        let of_each = self.sessions.iter().filter(|_| with_sessions);
        let all: Vec<_> = of_each.map(|(number, session)| (*number, session.stats())).collect();
        let parts = all.chunks(SESSIONS).map(<[_]>::to_vec);
        let mut parts = parts.chain(all.is_empty().then(Vec::new));
        parts.all(|sessions| {
            let stats = Report::Stats { totals: totals.clone(), sessions };
            messages::send(keeper, &stats, &[]).is_ok()
        })
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
            tracing::warn!(%cause, "cannot record the pages that VMs touch");
        }
        self.recorded = Instant::now();
    }

    /// Checks a session by the clock from then on: the descriptor of an ended process stays ready.
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
                counted.add(session.totals());
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

    /// Obeys an order of the keeper, and asks for more. Returns whether the keeper is there.
    fn obey(&mut self, keeper: &Arc<MessageSocket>, order: Titled<Order>) -> bool {
        let mut no_room = None;
        match order.title {
            Order::Serve(offer) => {
                let number = offer.session;
                match Machine::of_offer(offer, order.fds, order.bytes) {
                    Some(_) if self.sessions.contains_key(&number) => {}
                    Some(machine) => no_room = self.take(keeper, number, machine),
                    None => return false,
                }
            }
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
            Order::Stats => {
                if !self.tell(keeper, true) {
                    return false;
                }
            }
        }
        messages::send(keeper, &Report::Ready { no_room }, &[]).is_ok()
    }

    /// Takes a client, whose message may not be whole yet. Returns its number if there is no room for its log.
    fn take(
        &mut self,
        keeper: &Arc<MessageSocket>,
        number: u64,
        mut machine: Machine,
    ) -> Option<u64> {
        let pid = machine.peer.pid();
        let stream = machine.stream.try_clone();
        let is_program = machine.is_program();
        let reason = match protocol::read(&machine) {
            Ok(Message::Part) => return None,
            Ok(Message::Asks(request)) => self.answer(&machine, &request),
            Ok(Message::Memory(memory)) => match self.check(&machine, &memory) {
                Ok((backing, remote)) => match begin_log(keeper, number, &mut machine, &memory) {
                    Ok(Some(log)) => {
                        self.serve(keeper, number, machine, (memory, backing, remote), log)
                    }
                    Ok(None) => return Some(number),
                    Err(reason) => Err(reason),
                },
                Err(reason) => Err(reason),
            },
            Err(error) => Err(text(error)),
        };
        let reason = reason.err()?;
        if let (true, Ok(stream)) = (is_program, stream) {
            // A program that has gone is not interested.
            let _ = protocol::reply(&stream, &Reply::Refused { reason: reason.clone() }, None);
        }
        // If it was not sent, the keeper has ended, which the next receive finds.
        let _ = messages::send(keeper, &refused(number, pid, reason), &[]);
        None
    }

    /// Answers a program that asks for the image.
    fn answer(&mut self, machine: &Machine, request: &Request) -> Result<(), String> {
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
        protocol::reply(&machine.stream, &reply, file.as_ref().map(AsFd::as_fd))
            .map_err(|cause| format!("it does not read the answer: {cause}"))
    }

    /// Returns the pages that attached programs share.
    fn shared(&mut self) -> Result<Arc<SharedBacking>, MapError> {
        if let Some(shared) = &self.shared {
            return Ok(shared.clone());
        }
        let keep = self.opened.backing.byte_len().unwrap_or(ByteLen::ZERO);
        let shared = Arc::new(SharedBacking::new(self.opened.backing.clone(), keep)?);
        self.shared = Some(shared.clone());
        Ok(shared)
    }

    /// Checks that a client can be served. Returns its bytes and its userfaultfd.
    fn check(
        &mut self,
        machine: &Machine,
        memory: &Memory,
    ) -> Result<(Arc<dyn Backing>, Remote), String> {
        let peer = &machine.peer;
        // A VM that another process served is better off with faults that are answered.
        let kills = self.options.on_failure == OnFailure::Kill;
        if kills && machine.is_new() && !machine.can_be_killed {
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
        protocol::check(&memory.regions, has).map_err(text)?;
        let fd = machine.userfaultfd().ok_or("the userfaultfd is lost")?;
        let fd = fd.try_clone().map_err(text)?;
        Ok((backing, Remote::adopt(fd).map_err(text)?))
    }

    fn serve(
        &mut self,
        keeper: &Arc<MessageSocket>,
        number: u64,
        machine: Machine,
        (memory, backing, remote): (Memory, Arc<dyn Backing>, Remote),
        log: EventLog,
    ) -> Result<(), String> {
        let session =
            Session::start(self, keeper, number, machine, (memory, backing, remote), log)?;
        for fd in session.watched() {
            self.set.add(fd, number).map_err(text)?;
        }
        self.sessions.insert(number, session);
        Ok(())
    }
}

/// The report of a worker that takes an order.
const READY: Report = Report::Ready { no_room: None };

/// Answers an order whose descriptors this process had no room for. Returns whether the keeper is there.
fn decline(keeper: &MessageSocket, order: &Order) -> bool {
    if let Order::Serve(offer) = order {
        let refused = refused(offer.session, offer.pid, NO_DESCRIPTORS.to_owned());
        if messages::send(keeper, &refused, &[]).is_err() {
            return false;
        }
    } else {
        tracing::warn!("cannot obey an order of the keeper: {NO_DESCRIPTORS}");
    }
    messages::send(keeper, &READY, &[]).is_ok()
}

/// Makes the log of a session, which goes on with the one of the process that served it before. The log of a VM lies in the
/// file that the keeper made: `None` if that has no room. The log of a program is sealed, since the program gets it too, and
/// the keeper gets it before the first event is read.
fn begin_log(
    keeper: &MessageSocket,
    number: u64,
    machine: &mut Machine,
    memory: &Memory,
) -> Result<Option<EventLog>, String> {
    let regions = &memory.regions;
    let marks = AdoptedMemory::marks(regions).map_err(text)?;
    let own = machine.log.take();
    if !machine.is_program() {
        let file = own.ok_or(NO_DESCRIPTORS)?;
        let is_log = EventLog::is_in_file(&File::from(file.try_clone().map_err(text)?));
        let before = match is_log.map_err(text)? {
            true => Some(file.try_clone().and_then(|file| LoggedEvents::read_trusted(file, marks))),
            false => None,
        };
        let before = before.transpose().map_err(text)?;
        return match AdoptedMemory::log(regions, before.as_ref(), Some(file)) {
            Err(MapError::MemoryFile(cause)) if is_full(&cause) => Ok(None),
            made => made.map(Some).map_err(text),
        };
    }
    let before = match (own, machine.earlier_log()) {
        (Some(ours), _) => Some(LoggedEvents::read_trusted(ours, marks)),
        (None, Some(theirs)) => {
            Some(theirs.try_clone().and_then(|theirs| LoggedEvents::read(theirs, marks)))
        }
        (None, None) => None,
    };
    let before = before.transpose().map_err(text)?;
    let log = AdoptedMemory::log(regions, before.as_ref(), None).map_err(text)?;
    let fd = log.fd().ok_or("the log has no descriptor")?;
    machine.log = Some(fd.try_clone_to_owned().map_err(text)?);
    // The keeper has it by the time that it learns of the end of this process.
    messages::send_patiently(keeper, &Report::Log(number), &[fd]).map_err(text)?;
    Ok(Some(log))
}

/// Returns whether a file has no room for more bytes.
fn is_full(cause: &io::Error) -> bool {
    matches!(cause.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

/// Returns an error as the reason why a client is refused.
fn text(error: impl Error) -> String {
    uzone_os::with_causes(&error)
}

fn refused(session: u64, pid: u32, reason: String) -> Report {
    Report::Event(ServeEvent::Refused { session, pid, reason, was_killed: false })
}

//! Questions and orders to a server: [`Control`], a socket beside the one that monitors connect to, and the
//! other side of it ([`status`], [`drain`], [`take_over`]).
//!
//! A client sends one line, `status`, `drain`, `leave-metrics`, `take-over` or `memory` with the number of a session,
//! and gets one line of JSON. With the last two comes a socket by which the keeper hands everything to the client
//! ([`take_over`]), or the memory of a machine (`capture.rs`). `GET` gets metrics by HTTP,
//! from here or from a TCP port. Clients are served side by side, each by a thread, and each has to send a whole request
//! and to take its answer within a short time. The keeper waits for none of them, also at its end.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use serde::Deserialize;
use uzone_os::uffd::{Doorbell, EventSet};
use uzone_os::unix_socket::MessageSocket;
use uzone_os::{lock, peer};

use crate::error::ServeError;
use crate::keeper::estate::Estate;
use crate::keeper::takeover;
use crate::socket::ListeningSocket;
use crate::status::Status;

/// How long a client may take to send its line and to take its answer.
const CLIENT: Duration = Duration::from_secs(2);
/// How long the keeper may take for an answer: a worker may have to be started.
const ANSWER: Duration = Duration::from_secs(5);
/// How many clients of a socket are served at once. Another one takes the place of the oldest that has sent no whole
/// request.
const CLIENTS: usize = 16;
/// How long to wait after a client that could not be accepted.
const AGAIN: Duration = Duration::from_millis(100);
/// How long a request may be.
const REQUEST: usize = 8 << 10;
/// What a server asks of one that accepts no more machines: to leave it the port for metrics.
const LEAVE_METRICS: &str = "leave-metrics\n";
/// Who may ask: the owner, whatever group the other socket has and which users may connect to that.
const MODE: u32 = 0o600;

/// What a client asks for.
#[derive(Debug)]
pub(crate) enum Request {
    Status,
    Drain,
    TakeOver(MessageSocket),
    /// The memory of a session.
    Memory(u64, MessageSocket),
}

/// A request, and where its answer goes.
pub(crate) struct Asked {
    pub(crate) request: Request,
    pub(crate) answer: SyncSender<Status>,
}

struct Shared {
    /// Descriptors of the sockets for questions and for metrics, for the next keeper.
    sockets: [Option<OwnedFd>; 2],
    /// `None` once the server ends.
    asked: Mutex<Option<Vec<Asked>>>,
    bell: Doorbell,
    /// Rings when the threads are to end.
    stop: Doorbell,
    /// Whether the name of the socket is another keeper's by then.
    is_left: AtomicBool,
}

/// The socket for questions, and its threads.
pub(crate) struct Control {
    shared: Arc<Shared>,
    metrics: Option<SocketAddr>,
    threads: Vec<JoinHandle<()>>,
}

/// Returns where the server that listens on `socket` is asked.
#[must_use]
pub fn control_path(socket: &Path) -> PathBuf {
    socket.with_added_extension("control")
}

impl Control {
    /// Listens beside `socket`, and for HTTP on `metrics`. A server that accepts no more machines loses both.
    pub(crate) fn bind(socket: &Path, metrics: Option<SocketAddr>) -> Result<Self, ServeError> {
        let is_draining = || status(socket).is_ok_and(|status| status.is_draining);
        let metrics = match listen_for_metrics(metrics) {
            Err(ServeError::Metrics { cause, .. })
                if cause.kind() == io::ErrorKind::AddrInUse && is_draining() =>
            {
                // If it does not, the port is still in use.
                let _ = ask(socket, LEAVE_METRICS);
                listen_for_metrics(metrics)
            }
            bound => bound,
        };
        let metrics = metrics?;
        let path = control_path(socket);
        let listening = match ListeningSocket::bind(&path, MODE, None) {
            Err(ServeError::InUse { .. }) if is_draining() => {
                ListeningSocket::replace(&path, MODE, None)
            }
            bound => bound,
        };
        Self::listen(listening?, metrics)
    }

    /// Listens as [`Control::bind`] does, in the place of a keeper that has handed everything over and leaves
    /// the name. It fails while that has the port for metrics.
    pub(crate) fn replace(socket: &Path, metrics: Option<SocketAddr>) -> Result<Self, ServeError> {
        let metrics = listen_for_metrics(metrics)?;
        Self::listen(ListeningSocket::replace(&control_path(socket), MODE, None)?, metrics)
    }

    /// Leaves the name of the socket to another keeper.
    pub(crate) fn leave(&self) {
        // Relaxed: the thread that reads it is joined by a doorbell.
        self.shared.is_left.store(true, Ordering::Relaxed);
    }

    /// Goes on with the sockets of a keeper that has died.
    pub(crate) fn inherit(
        socket: &Path,
        control: OwnedFd,
        metrics: Option<OwnedFd>,
    ) -> Result<Self, ServeError> {
        let listening = ListeningSocket::inherit(&control_path(socket), control, true);
        Self::listen(listening, metrics.map(TcpListener::from))
    }

    fn listen(
        listening: ListeningSocket,
        metrics: Option<TcpListener>,
    ) -> Result<Self, ServeError> {
        let wait = ServeError::Wait;
        let (bell, stop) = (Doorbell::new().map_err(wait)?, Doorbell::new().map_err(wait)?);
        let is_left = AtomicBool::new(false);
        let clone = |socket: BorrowedFd<'_>| socket.try_clone_to_owned().map_err(wait);
        let sockets = [
            Some(clone(listening.listener.as_fd())?),
            metrics.as_ref().map(|listener| clone(listener.as_fd())).transpose()?,
        ];
        let asked = Mutex::new(Some(Vec::new()));
        let shared = Arc::new(Shared { sockets, asked, bell, stop, is_left });
        let mut control = Self { shared, metrics: None, threads: Vec::new() };
        let (shared, set) = (control.shared.clone(), control.waits_for(&listening.listener)?);
        control.start(move || {
            shared.serve_all(&set, true, || Ok(listening.listener.accept()?.0));
            if shared.is_left.load(Ordering::Relaxed) {
                listening.leave();
            }
        })?;
        let Some(listener) = metrics else { return Ok(control) };
        listener.set_nonblocking(true).map_err(wait)?;
        control.metrics = Some(listener.local_addr().map_err(wait)?);
        let (shared, set) = (control.shared.clone(), control.waits_for(&listener)?);
        // What is done with a client is the same for a stream of either kind.
        let accept = move || Ok(UnixStream::from(OwnedFd::from(listener.accept()?.0)));
        control.start(move || shared.serve_all(&set, false, accept))?;
        Ok(control)
    }

    /// Returns what waits for clients of a socket, and for the end.
    fn waits_for(&self, listener: &impl AsFd) -> Result<EventSet, ServeError> {
        let set = EventSet::new().map_err(ServeError::Wait)?;
        set.add(listener, 0)
            .and_then(|()| set.add(&self.shared.stop, 1))
            .map_err(ServeError::Wait)?;
        Ok(set)
    }

    /// Returns the sockets for questions and for metrics.
    pub(crate) fn sockets(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.shared.sockets.each_ref().map(|socket| socket.as_ref().map(AsFd::as_fd))
    }

    fn start(&mut self, work: impl FnOnce() + Send + 'static) -> Result<(), ServeError> {
        let thread = Builder::new().name("uzone-control".into()).spawn(work);
        self.threads.push(thread.map_err(ServeError::Wait)?);
        Ok(())
    }

    /// Takes what was asked since the last call.
    pub(crate) fn take(&self) -> io::Result<Vec<Asked>> {
        self.shared.bell.silence()?;
        Ok(lock(&self.shared.asked).as_mut().map(std::mem::take).unwrap_or_default())
    }

    /// Returns where metrics are, if there is a port for them.
    pub(crate) fn metrics(&self) -> Option<SocketAddr> {
        self.metrics
    }
}

fn listen_for_metrics(address: Option<SocketAddr>) -> Result<Option<TcpListener>, ServeError> {
    let bind = |address| {
        TcpListener::bind(address).map_err(|cause| ServeError::Metrics { address, cause })
    };
    address.map(bind).transpose()
}

/// It can be waited for: something was asked.
impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Clients that wait for an answer get none.
        lock(&self.shared.asked).take();
        // Each of the two threads waits for a client, and closes those that it has.
        let is_woken = self.shared.stop.ring().is_ok();
        for thread in self.threads.drain(..).filter(|_| is_woken) {
            // A panic of it was printed when it happened.
            let _ = thread.join();
        }
    }
}

/// Returns how much of the time of a client is left.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Returns whether a request is whole: its line, and of HTTP its head.
fn is_whole(request: &[u8]) -> bool {
    let has = |end: &[u8]| request.windows(end.len()).any(|part| part == end);
    match request.starts_with(b"GET ") {
        true => has(b"\r\n\r\n") || has(b"\n\n"),
        false => has(b"\n"),
    }
}

/// Reads the request of a client, and the descriptors that come along.
fn read_request(stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let until = Instant::now() + CLIENT;
    let (mut request, mut fds, mut part) = (Vec::new(), Vec::new(), [0; 1024]);
    while !is_whole(&request) && request.len() < REQUEST {
        stream.set_read_timeout(Some(left(until)?))?;
        match peer::receive(stream, &mut part, &mut fds)? {
            0 => break,
            len => request.extend_from_slice(&part[..len]),
        }
        // One order has one socket.
        fds.truncate(1);
    }
    Ok((request, fds))
}

/// Sends an answer.
fn answer(mut stream: &UnixStream, text: &str) -> io::Result<()> {
    let (until, mut rest) = (Instant::now() + CLIENT, text.as_bytes());
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(until)?))?;
        match stream.write(rest)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            sent => rest = &rest[sent..],
        }
    }
    Ok(())
}

/// A client that is served by a thread.
struct Client {
    stream: Arc<UnixStream>,
    /// Whether it has sent its whole request.
    is_heard: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Client {
    /// Ends its thread.
    fn close(self) {
        // It may have closed it.
        let _ = self.stream.shutdown(Shutdown::Both);
        // A panic of it was printed when it happened.
        let _ = self.thread.join();
    }
}

/// Returns whether one client more can be served, for which a silent one may make room.
fn has_room(clients: &mut Vec<Client>) -> bool {
    clients.retain(|client| !client.thread.is_finished());
    if clients.len() < CLIENTS {
        return true;
    }
    // Relaxed: one that is heard meanwhile asks again.
    let silent = |client: &Client| !client.is_heard.load(Ordering::Relaxed);
    let Some(oldest) = clients.iter().position(silent) else { return false };
    clients.remove(oldest).close();
    true
}

impl Shared {
    /// Serves clients side by side, until the server ends. `is_near` is whether they come by the control
    /// socket: only those may give orders.
    fn serve_all(
        self: &Arc<Self>,
        set: &EventSet,
        is_near: bool,
        accept: impl Fn() -> io::Result<UnixStream>,
    ) {
        let (mut ready, mut clients) = (Vec::new(), Vec::new());
        loop {
            let waited = set.wait(&mut ready, None);
            if ready.contains(&1) {
                break;
            }
            if !has_room(&mut clients) {
                thread::sleep(AGAIN);
                continue;
            }
            match waited.and_then(|()| accept()).and_then(|stream| self.begin(stream, is_near)) {
                Ok(client) => clients.push(client),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {}
                // It listens no more: the port is the next server's.
                Err(cause) if cause.kind() == io::ErrorKind::InvalidInput => break,
                // No descriptor is free, for instance.
                Err(_) => thread::sleep(AGAIN),
            }
        }
        // Those whose answer is there take it.
        let until = Instant::now() + AGAIN;
        let is_answered = |client: &Client| {
            client.is_heard.load(Ordering::Relaxed) && !client.thread.is_finished()
        };
        while clients.iter().any(is_answered) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        clients.into_iter().for_each(Client::close);
    }

    /// Serves a client by a thread of its own.
    fn begin(self: &Arc<Self>, stream: UnixStream, is_near: bool) -> io::Result<Client> {
        let (stream, is_heard) = (Arc::new(stream), Arc::new(AtomicBool::new(false)));
        let (shared, of, heard) = (self.clone(), stream.clone(), is_heard.clone());
        let thread = Builder::new().name("uzone-client".into()).spawn(move || {
            // A client that goes, or is too slow, is not answered.
            if let Ok((request, fds)) = read_request(&of) {
                heard.store(true, Ordering::Relaxed);
                let _ = shared.serve(&of, &request, fds, is_near);
            }
            // The other thread may have the stream for longer.
            let _ = of.shutdown(Shutdown::Both);
        });
        Ok(Client { stream, is_heard, thread: thread? })
    }

    /// Answers a request.
    fn serve(
        &self,
        stream: &UnixStream,
        request: &[u8],
        fds: Vec<OwnedFd>,
        is_near: bool,
    ) -> io::Result<()> {
        let line = request.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let socket = fds.into_iter().next().and_then(|fd| MessageSocket::from_fd(fd).ok());
        let asked = match (line.trim_ascii(), socket) {
            (line, _) if line.starts_with(b"GET ") => return self.serve_metrics(stream, line),
            (b"status", _) if is_near => Request::Status,
            (b"drain", _) if is_near => Request::Drain,
            (line, _) if is_near && line == LEAVE_METRICS.as_bytes().trim_ascii() => {
                self.leave_metrics();
                Request::Status
            }
            (b"take-over", Some(socket)) if is_near => Request::TakeOver(socket),
            (line, Some(socket)) if is_near && let Some(session) = session_of(line) => {
                Request::Memory(session, socket)
            }
            _ => {
                let text = "{\"error\":\"the server knows `status`, `drain`, `take-over` and `memory`\"}\n";
                return answer(stream, text);
            }
        };
        let mut text = match self.ask(asked) {
            Some(status) => serde_json::to_string(&status)?,
            None => "{\"error\":\"the keeper does not answer\"}".to_owned(),
        };
        text.push('\n');
        answer(stream, &text)
    }

    /// Leaves the port for metrics to the next server, though another process may have a descriptor of it too.
    fn leave_metrics(&self) {
        if let Some(listener) = self.sockets[1].as_ref().and_then(|fd| fd.try_clone().ok()) {
            // std has shutdown(2) for streams alone. It fails if that is done already.
            let _ = TcpStream::from(listener).shutdown(Shutdown::Both);
        }
    }

    fn serve_metrics(&self, stream: &UnixStream, line: &[u8]) -> io::Result<()> {
        let is_known = line.split(|byte| *byte == b' ').nth(1) == Some(b"/metrics");
        let (state, body) = match is_known.then(|| self.ask(Request::Status)) {
            Some(Some(status)) => ("200 OK", status.metrics()),
            Some(None) => ("503 Service Unavailable", "the keeper does not answer\n".to_owned()),
            None => ("404 Not Found", "metrics are at /metrics\n".to_owned()),
        };
        let len = body.len();
        let text = format!(
            "HTTP/1.1 {state}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len}\r\n\
             Connection: close\r\n\r\n{body}"
        );
        answer(stream, &text)
    }

    fn ask(&self, request: Request) -> Option<Status> {
        let (answer, answered) = sync_channel(1);
        lock(&self.asked).as_mut()?.push(Asked { request, answer });
        self.bell.ring().ok()?;
        answered.recv_timeout(ANSWER).ok()
    }
}

/// Returns the session whose memory a line asks for.
fn session_of(line: &[u8]) -> Option<u64> {
    str::from_utf8(line.strip_prefix(b"memory ")?).ok()?.parse().ok()
}

/// An answer that is no status.
#[derive(Deserialize)]
struct Refused {
    error: String,
}

fn ask(socket: &Path, line: &str) -> Result<Status, ServeError> {
    let path = control_path(socket);
    let failed = |cause| ServeError::Ask { path: path.clone(), cause };
    let mut stream = UnixStream::connect(&path).map_err(failed)?;
    let mut answer = String::new();
    stream
        .set_read_timeout(Some(ANSWER + CLIENT))
        .and_then(|()| stream.write_all(line.as_bytes()))
        .and_then(|()| stream.read_to_string(&mut answer))
        .map_err(failed)?;
    serde_json::from_str(&answer).map_err(|_| {
        let answer = serde_json::from_str::<Refused>(&answer).map_or(answer, |it| it.error);
        failed(io::Error::other(answer.trim().to_owned()))
    })
}

/// Returns what the server that listens on `socket` is doing.
///
/// # Errors
/// [`ServeError::Ask`] if there is none, it does not answer, or this user may not ask.
pub fn status(socket: &Path) -> Result<Status, ServeError> {
    ask(socket, "status\n")
}

/// Lets the server that listens on `socket` accept no machine any more, and end when the last one has.
/// Returns what it was doing then.
///
/// # Errors
/// As of [`status`].
pub fn drain(socket: &Path) -> Result<Status, ServeError> {
    ask(socket, "drain\n")
}

/// Takes everything over from the keeper that listens on `socket`, if it serves the same image. `will_absorb` is called
/// before with the folder where that keeps its machines.
pub(crate) fn take_over(
    socket: &Path,
    image: &str,
    will_absorb: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<Estate, ServeError> {
    let path = control_path(socket);
    connect(&path, "take-over\n")
        .and_then(|keeper| takeover::take(&keeper, image, will_absorb))
        .map_err(|cause| ServeError::Ask { path, cause })
}

/// Asks the keeper at a control socket for what it sends by a socket of its own. Returns that.
pub(crate) fn connect(path: &Path, line: &str) -> io::Result<MessageSocket> {
    let (here, there) = MessageSocket::pair()?;
    peer::send(UnixStream::connect(path)?, line.as_bytes(), &[there.as_fd()])?;
    Ok(here)
}

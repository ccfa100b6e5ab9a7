//! Questions and orders to a server: [`Control`], a socket beside the one that monitors connect to, and the other side of it
//! ([`status`], [`drain`], [`stop`]).
//!
//! | line of a client | effect |
//! |---|---|
//! | `status` | none |
//! | `drain` | the server accepts no further VM, and ends with the last one |
//! | `stop` | the server ends, and leaves its VMs to the next one, which sends this |
//! | `memory SESSION` | the memory of a VM comes by the socket that comes along (`live_diff/session.rs`) |
//! | `GET /metrics` | none; by HTTP, from here or from a TCP port |
//!
//! The answer is the status as one line of JSON, or an error. Clients are served side by side, each by a thread, and each has
//! to send a whole request and to take its answer within a short time. The keeper waits for none of them, also at its end.

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

use crate::message_socket::MessageSocket;
use serde::{Deserialize, Serialize};
use uzone_os::uffd::{Doorbell, EventSet};
use uzone_os::{lock, peer};
use uzone_pages::ErrorKind;

use crate::error::ServeError;
use crate::socket::ListeningSocket;
use crate::status::Status;

/// The longest time that a client takes to send its line and to take its answer.
const CLIENT: Duration = Duration::from_secs(2);
/// The longest time that the keeper takes for an answer: a worker may have to be started.
const ANSWER: Duration = Duration::from_secs(5);
/// The most clients of a socket at once. Another one takes the place of the oldest whose request is not whole.
const CLIENTS: usize = 16;
/// The pause after a client that could not be accepted.
const AGAIN: Duration = Duration::from_millis(100);
/// The longest request.
const REQUEST: usize = 8 << 10;
/// The mode of the control socket: its owner may ask, whatever the mode and group of the other socket.
const MODE: u32 = 0o600;

/// A request.
#[derive(Debug)]
pub(crate) enum Request {
    Status,
    Drain,
    Stop,
    /// The memory of a session.
    Memory(u64, MessageSocket),
}

/// The answer to a request, or the reason why there is none.
pub(crate) type Answer = Result<Status, String>;

/// A request, and the way of its answer.
pub(crate) struct ControlRequest {
    pub(crate) request: Request,
    pub(crate) answer: SyncSender<Answer>,
}

struct Shared {
    /// Another descriptor of the socket for metrics.
    metrics: Option<TcpListener>,
    /// `None` once the server ends.
    asked: Mutex<Option<Vec<ControlRequest>>>,
    bell: Doorbell,
    /// Rings when the threads are to end.
    stop: Doorbell,
    /// Whether another keeper has the name of the socket.
    is_left: AtomicBool,
}

/// The socket for questions, and its threads.
pub(crate) struct Control {
    shared: Arc<Shared>,
    metrics: Option<SocketAddr>,
    threads: Vec<JoinHandle<()>>,
}

/// Returns the path of the control socket of the server that listens on `socket`.
#[must_use]
pub fn control_path(socket: &Path) -> PathBuf {
    socket.with_added_extension("control")
}

impl Control {
    /// Listens beside `socket`, which is this server's, and for HTTP on `metrics`. A server that drains loses both.
    pub(crate) fn bind(socket: &Path, metrics: Option<SocketAddr>) -> Result<Self, ServeError> {
        let listen = |address| {
            TcpListener::bind(address).map_err(|cause| ServeError::Metrics { address, cause })
        };
        let metrics = metrics.map(listen).transpose()?;
        Self::listen(ListeningSocket::replace(&control_path(socket), MODE, None)?, metrics)
    }

    /// Leaves the name of the socket to another keeper.
    pub(crate) fn leave(&self) {
        // Relaxed: the thread that reads it is joined by a doorbell.
        self.shared.is_left.store(true, Ordering::Relaxed);
    }

    fn listen(
        listening: ListeningSocket,
        metrics: Option<TcpListener>,
    ) -> Result<Self, ServeError> {
        let wait = ServeError::Wait;
        let (bell, stop) = (Doorbell::new().map_err(wait)?, Doorbell::new().map_err(wait)?);
        let is_left = AtomicBool::new(false);
        let other = metrics.as_ref().map(TcpListener::try_clone).transpose().map_err(wait)?;
        let asked = Mutex::new(Some(Vec::new()));
        let shared = Arc::new(Shared { metrics: other, asked, bell, stop, is_left });
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
        // A client of either kind of stream is served in the same way.
        let accept = move || Ok(UnixStream::from(OwnedFd::from(listener.accept()?.0)));
        control.start(move || shared.serve_all(&set, false, accept))?;
        Ok(control)
    }

    /// Returns a set that waits for clients of a socket, and for the end.
    fn waits_for(&self, listener: &impl AsFd) -> Result<EventSet, ServeError> {
        let set = EventSet::new().map_err(ServeError::Wait)?;
        set.add(listener, 0)
            .and_then(|()| set.add(&self.shared.stop, 1))
            .map_err(ServeError::Wait)?;
        Ok(set)
    }

    /// Leaves the port for metrics to the next server.
    pub(crate) fn close_metrics(&self) {
        if let Some(listener) = self.shared.metrics.as_ref().and_then(|it| it.try_clone().ok()) {
            // std has shutdown(2) for streams alone. It fails if that is done already.
            let _ = TcpStream::from(OwnedFd::from(listener)).shutdown(Shutdown::Both);
        }
    }

    fn start(&mut self, work: impl FnOnce() + Send + 'static) -> Result<(), ServeError> {
        let thread = Builder::new().name("uzone-control".into()).spawn(work);
        self.threads.push(thread.map_err(ServeError::Wait)?);
        Ok(())
    }

    /// Takes the requests that came since the last call.
    pub(crate) fn take(&self) -> io::Result<Vec<ControlRequest>> {
        self.shared.bell.silence()?;
        Ok(lock(&self.shared.asked).as_mut().map(std::mem::take).unwrap_or_default())
    }

    /// Returns the address of metrics, if there is a port for them.
    pub(crate) fn metrics(&self) -> Option<SocketAddr> {
        self.metrics
    }
}

/// It can be waited for: a request came.
impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Clients that wait for an answer get none.
        lock(&self.shared.asked).take();
        // Each of the two threads waits for a client, and closes its clients.
        let is_woken = self.shared.stop.ring().is_ok();
        for thread in self.threads.drain(..).filter(|_| is_woken) {
            // A panic of it was printed when it happened.
            let _ = thread.join();
        }
    }
}

/// Returns the rest of a client's time.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Returns whether a request is whole: a line, or the head of HTTP.
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

/// Returns whether one client more can be served. A silent one may make room for it.
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
    /// Serves clients side by side, until the server ends. Only clients of the control socket (`is_near`) may give
    /// orders.
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
                // It has stopped listening: the port is the next server's.
                Err(cause) if cause.kind() == io::ErrorKind::InvalidInput => break,
                // No descriptor is free, for instance.
                Err(_) => thread::sleep(AGAIN),
            }
        }
        // A client whose answer is there takes it.
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
            (b"status", _) if is_near => Some(Request::Status),
            (b"drain", _) if is_near => Some(Request::Drain),
            (b"stop", _) if is_near => Some(Request::Stop),
            (line, Some(socket)) if is_near => {
                session_of(line).map(|session| Request::Memory(session, socket))
            }
            _ => None,
        };
        let unknown = "the server knows `status`, `drain`, `stop` and `memory`";
        let answered = asked.map_or(Some(Err(unknown.to_owned())), |asked| self.ask(asked));
        let answered = answered.unwrap_or_else(|| Err("the keeper does not answer".to_owned()));
        let mut text = match answered {
            Ok(status) => serde_json::to_string(&status)?,
            Err(error) => serde_json::to_string(&Refused { error })?,
        };
        text.push('\n');
        answer(stream, &text)
    }

    fn serve_metrics(&self, stream: &UnixStream, line: &[u8]) -> io::Result<()> {
        let is_known = line.split(|byte| *byte == b' ').nth(1) == Some(b"/metrics");
        let (state, body) = match is_known.then(|| self.ask(Request::Status)) {
            Some(Some(Ok(status))) => ("200 OK", status.metrics()),
            Some(_) => ("503 Service Unavailable", "the keeper does not answer\n".to_owned()),
            None => ("404 Not Found", "metrics are at /metrics\n".to_owned()),
        };
        let len = body.len();
        let text = format!(
            "HTTP/1.1 {state}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len}\r\n\
             Connection: close\r\n\r\n{body}"
        );
        answer(stream, &text)
    }

    fn ask(&self, request: Request) -> Option<Answer> {
        let (answer, answered) = sync_channel(1);
        lock(&self.asked).as_mut()?.push(ControlRequest { request, answer });
        self.bell.ring().ok()?;
        answered.recv_timeout(ANSWER).ok()
    }
}

/// Returns the session whose memory a line asks for.
fn session_of(line: &[u8]) -> Option<u64> {
    str::from_utf8(line.strip_prefix(b"memory ")?).ok()?.parse().ok()
}

/// An answer that is no status.
#[derive(Serialize, Deserialize)]
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
    if answer.is_empty() {
        return Err(failed(io::ErrorKind::UnexpectedEof.into()));
    }
    serde_json::from_str(&answer).map_err(|_| {
        let answer = serde_json::from_str::<Refused>(&answer).map_or(answer, |it| it.error);
        failed(io::Error::other(answer.trim().to_owned()))
    })
}

/// Returns the status of the server that listens on `socket`.
///
/// # Errors
/// [`ServeError::Ask`] if there is none, it does not answer, or this user may not ask.
pub fn status(socket: &Path) -> Result<Status, ServeError> {
    ask(socket, "status\n")
}

/// Lets the server that listens on `socket` accept no further VM, and end with the last one. Returns its status.
///
/// # Errors
/// As for [`status`].
pub fn drain(socket: &Path) -> Result<Status, ServeError> {
    ask(socket, "drain\n")
}

/// Returns the status of a server that has a socket, unless it drains.
pub(crate) fn server_at(socket: &Path) -> Result<Option<Status>, ServeError> {
    match status(socket) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        status => Ok(Some(status?).filter(|status| !status.is_draining)),
    }
}

/// Ends the server that had `socket` before, and waits until its VMs are this one's.
pub(crate) fn stop(socket: &Path) -> Result<(), ServeError> {
    match ask(socket, "stop\n") {
        // It has ended meanwhile.
        Err(ServeError::Ask { cause, .. }) if is_end(&cause) => Ok(()),
        stopped => stopped.map(drop),
    }
}

/// Returns whether there is no answer because the server has ended.
fn is_end(cause: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof};
    matches!(cause.kind(), ConnectionRefused | ConnectionReset | NotFound | UnexpectedEof)
}

/// Sends a request with a socket for the answer, and returns the other end.
pub(crate) fn connect(path: &Path, line: &str) -> io::Result<MessageSocket> {
    let (here, there) = MessageSocket::pair()?;
    peer::send(UnixStream::connect(path)?, line.as_bytes(), &[there.as_fd()])?;
    Ok(here)
}

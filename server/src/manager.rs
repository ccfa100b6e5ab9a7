//! The service manager that started this process, by systemd's protocol: [`ServiceManager`] takes
//! notifications, and keeps the descriptors of machines while neither process of a server lives; [`Passed`]
//! is what it passes to the next one, and to one that it starts when a machine connects.
//!
//! A machine is kept as one message with four descriptors of one name: the stream, the process, the
//! userfaultfd, and a file in memory with what its monitor sent; if it sends more, another file follows. They
//! come back in any order and are told apart by what they are, and files by their lengths. The log of what its worker reads follows under a name with a number: the next
//! one is kept before the last is discarded.
//!
//! Source: sd_notify(3), sd_pid_notify_with_fds(3), sd_listen_fds(3).

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uzone_os::{memory_file, passed_descriptors, peer};

use crate::connection::{Connection, Kept};
use crate::error::ServeError;
use crate::estate::Estate;
use crate::link;
use crate::options::ServerOptions;
use crate::socket::ListeningSocket;

/// How long the manager may take to take a message.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the name of a descriptor may be.
const NAME_BYTES: usize = 255;
/// How much of a file of a machine is read.
const STATE_BYTES: usize = 128 << 10;

/// A socket to the service manager.
#[derive(Debug)]
pub struct ServiceManager(UnixDatagram);

impl Estate {
    /// Returns the service manager of the keeper before, if it had one.
    #[must_use]
    pub fn manager(&self) -> Option<ServiceManager> {
        Some(ServiceManager::from_fd(self.manager.as_ref()?.try_clone().ok()?))
    }
}

/// What a machine is, beside its descriptors.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    /// What it is served from.
    image: String,
    kept: Kept,
}

impl ServiceManager {
    /// Returns the service manager that the environment names. `None` if there is none.
    #[must_use]
    pub fn of_environment() -> Option<Self> {
        let name = env::var_os("NOTIFY_SOCKET")?;
        let address = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
            _ => SocketAddr::from_pathname(&name),
        };
        let socket = UnixDatagram::unbound().ok()?;
        socket.connect_addr(&address.ok()?).ok()?;
        socket.set_write_timeout(Some(PATIENCE)).ok()?;
        Some(Self(socket))
    }

    pub(crate) fn from_fd(fd: OwnedFd) -> Self {
        Self(UnixDatagram::from(fd))
    }

    /// Returns another descriptor of the same socket.
    ///
    /// # Errors
    /// That the process has as many as it may.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }

    /// Sends a notification, lines of `NAME=VALUE`. A manager that takes none within a second is not waited
    /// for.
    pub fn notify(&self, lines: &str) {
        let _ = self.0.send(lines.as_bytes());
    }

    /// Has descriptors kept under a name until they are discarded.
    fn keep(&self, name: &str, fds: &[BorrowedFd<'_>]) {
        // A descriptor that has ended is kept as well: that says nothing about its machine.
        let lines = format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0\n");
        let sent = match name.len() {
            0..=NAME_BYTES => peer::send(&self.0, lines.as_bytes(), fds).map(drop),
            _ => Err(io::Error::other("the path of the socket is too long")),
        };
        if let Err(cause) = sent {
            tracing::warn!(%cause, name, "the service manager does not keep a descriptor");
        }
    }

    fn discard(&self, name: &str) {
        self.notify(&format!("FDSTOREREMOVE=1\nFDNAME={name}\n"));
    }

    /// Has the socket of a server kept.
    pub(crate) fn keep_socket(&self, path: &Path, socket: BorrowedFd<'_>) {
        self.keep(&name("socket", path), &[socket]);
    }

    pub(crate) fn discard_socket(&self, path: &Path) {
        self.discard(&name("socket", path));
    }

    /// Has a machine kept, with what its monitor sent so far.
    pub(crate) fn keep_machine(
        &self,
        path: &Path,
        image: &str,
        session: u64,
        connection: &Connection,
    ) {
        let Some(userfaultfd) = connection.userfaultfd() else { return };
        let state = State { image: image.to_owned(), kept: connection.kept(session) };
        let file = link::titled(&state, &connection.bytes)
            .and_then(|bytes| memory_file("uzone-machine", &bytes));
        match file {
            Ok(file) => {
                let fds = [connection.stream.as_fd(), connection.peer.as_fd(), userfaultfd.as_fd()];
                self.keep(&machine(connection.id, path), &[&fds[..], &[file.as_fd()]].concat());
            }
            Err(cause) => {
                tracing::warn!(%cause, "a machine is not kept by the service manager");
            }
        }
    }

    /// Has the latest log of a machine kept.
    pub(crate) fn keep_log(&self, path: &Path, connection: &Connection) {
        if let Some(log) = &connection.log {
            self.keep(&log_of(connection.id, connection.logs, path), &[log.as_fd()]);
        }
    }

    /// Gives up the logs before the latest one, which is another file: what is kept already is not kept
    /// under a second name.
    pub(crate) fn discard_logs(&self, path: &Path, connection: &Connection) {
        // A keeper that followed on another has left numbers out.
        for number in connection.logs.saturating_sub(3)..connection.logs {
            self.discard(&log_of(connection.id, number, path));
        }
    }

    /// Gives up a machine and its log.
    pub(crate) fn discard_machine(&self, path: &Path, connection: &Connection) {
        self.discard(&machine(connection.id, path));
        self.discard_logs(path, connection);
    }
}

impl From<ServiceManager> for OwnedFd {
    fn from(manager: ServiceManager) -> Self {
        manager.0.into()
    }
}

impl AsFd for ServiceManager {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns the name of a descriptor of the server with this socket. A colon would end it in a list.
fn name(what: &str, path: &Path) -> String {
    let mut name = format!("uzone.{what}.");
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => {
                name.push(char::from(*byte));
            }
            // Writing to a text does not fail.
            _ => drop(write!(name, "%{byte:02X}")),
        }
    }
    name
}

fn machine(id: u64, path: &Path) -> String {
    name(&format!("machine.{id:x}"), path)
}

fn log_of(id: u64, number: u64, path: &Path) -> String {
    name(&format!("log.{id:x}.{number}"), path)
}

/// The descriptors that the service manager passed to this process.
#[derive(Debug, Default)]
pub struct Passed(Vec<(String, OwnedFd)>);

impl Passed {
    /// Takes them, once a process. There are none without such a manager.
    #[must_use]
    pub fn of_environment() -> Self {
        Self(passed_descriptors())
    }

    /// Returns where the socket listens that the manager made, if it made one.
    #[must_use]
    pub fn socket(&self) -> Option<PathBuf> {
        self.0.iter().find_map(|(name, fd)| if is_kept(name) { None } else { path_of(fd) })
    }

    /// Takes what belongs to the server of `socket`: the socket, if the manager made it or kept it, and the
    /// machines of the processes before. `None` if there is nothing of it.
    ///
    /// # Errors
    /// [`ServeError::Listen`] or [`ServeError::Group`] if there are machines and no socket, and it cannot be made
    /// with the mode and the group of `options`.
    pub fn estate(
        &mut self,
        socket: &Path,
        options: &ServerOptions,
    ) -> Result<Option<Estate>, ServeError> {
        let listener = name("socket", socket);
        let is_made =
            |name: &str, fd: &OwnedFd| !is_kept(name) && path_of(fd).as_deref() == Some(socket);
        let made = self.take(|name, fd| is_made(name, fd)).pop();
        let kept = self.take(|name, _| name == listener).pop();
        let is_named = made.is_none();
        let manager = ServiceManager::of_environment();
        let connections = self.machines(socket, manager.as_ref());
        let fd = match made.or(kept) {
            Some((_, fd)) => {
                let listener = UnixListener::from(fd);
                // One that the manager made may wait.
                let never_waits = listener.set_nonblocking(true).map(|()| listener.into());
                never_waits
                    .map_err(|cause| ServeError::Listen { path: socket.to_owned(), cause })?
            }
            None if connections.is_empty() => return Ok(None),
            None => {
                let bound = ListeningSocket::bind(socket, options.mode, options.group)?.into_fd();
                bound.map_err(|cause| ServeError::Listen { path: socket.to_owned(), cause })?
            }
        };
        let next = connections.keys().max().map_or(1, |last| last + 1);
        let manager = manager.map(OwnedFd::from);
        Ok(Some(Estate { is_named, manager, ..Estate::new(Some(fd), connections, next) }))
    }

    /// Takes the machines of the server of `socket`. What is left of others is discarded.
    fn machines(
        &mut self,
        socket: &Path,
        manager: Option<&ServiceManager>,
    ) -> BTreeMap<u64, Connection> {
        let mut machines = BTreeMap::<u64, Machine>::new();
        for (name, fd) in self.take(|name, _| machine_of(name, socket).is_some()) {
            if let Some((id, log)) = machine_of(&name, socket) {
                machines.entry(id).or_default().add(log, name, fd);
            }
        }
        let mut connections = BTreeMap::new();
        for (id, mut machine) in machines {
            // A process that was killed may have left a part of it.
            let names = std::mem::take(&mut machine.names);
            match machine.into_connection().filter(|(_, connection)| connection.id == id) {
                Some((session, connection)) => {
                    let is_taken = connections.contains_key(&session);
                    let free = connections.keys().max().map_or(1, |last: &u64| last + 1);
                    connections.insert(if is_taken { free } else { session }, connection);
                }
                None => names.iter().for_each(|name| {
                    tracing::warn!(name, "what is kept of a machine is not whole");
                    manager.iter().for_each(|manager| manager.discard(name));
                }),
            }
        }
        connections
    }

    fn take(&mut self, is_it: impl Fn(&str, &OwnedFd) -> bool) -> Vec<(String, OwnedFd)> {
        self.0.extract_if(.., |(name, fd)| is_it(name, fd)).collect()
    }
}

/// Returns whether a descriptor was kept for a server, and not made by the manager.
fn is_kept(name: &str) -> bool {
    name.starts_with("uzone.")
}

/// Returns where a socket listens.
fn path_of(fd: &OwnedFd) -> Option<PathBuf> {
    let listener = UnixListener::from(fd.try_clone().ok()?);
    Some(listener.local_addr().ok()?.as_pathname()?.to_owned())
}

/// Returns of which machine of a server a descriptor is, and the number of the log if it is one.
fn machine_of(given: &str, path: &Path) -> Option<(u64, Option<u64>)> {
    let mut parts = given.strip_prefix("uzone.")?.splitn(4, '.');
    let (what, id) = (parts.next()?, u64::from_str_radix(parts.next()?, 16).ok()?);
    let log = match what {
        "machine" => None,
        "log" => Some(parts.next()?.parse().ok()?),
        _ => return None,
    };
    let named = log.map_or_else(|| machine(id, path), |log| log_of(id, log, path));
    (named == given).then_some((id, log))
}

/// What was kept of a machine.
#[derive(Debug, Default)]
struct Machine {
    names: Vec<String>,
    parts: Vec<OwnedFd>,
    /// The latest log, and its number.
    log: Option<(u64, OwnedFd)>,
}

impl Machine {
    fn add(&mut self, log: Option<u64>, name: String, fd: OwnedFd) {
        self.names.push(name);
        match (log, &self.log) {
            (None, _) => self.parts.push(fd),
            (Some(number), Some((last, _))) if number < *last => {}
            (Some(number), _) => self.log = Some((number, fd)),
        }
    }

    /// Returns the connection and the number of its session, if all of it is there.
    fn into_connection(self) -> Option<(u64, Connection)> {
        let (mut stream, mut process, mut userfaultfd) = (None, None, None);
        let mut files = Vec::new();
        for fd in self.parts {
            let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
            let link = link.to_string_lossy();
            if link.starts_with("socket:") {
                stream = Some(fd);
            } else if link.contains("userfaultfd") {
                userfaultfd = Some(fd);
            } else if link.contains("pidfd") {
                process = Some(fd);
            } else {
                let file = File::from(fd);
                files.push((file.metadata().ok()?.len(), file));
            }
        }
        let (len, file) = files.into_iter().max_by_key(|(len, _)| *len)?;
        let mut bytes = vec![0; usize::try_from(len).ok()?.min(STATE_BYTES)];
        file.read_exact_at(&mut bytes, 0).ok()?;
        let (State { image, kept }, rest) = link::parse_titled::<State>(&bytes).ok()?;
        let (number, log) = self.log.unzip();
        let kept = kept.of_the_dead(log.is_some());
        let fds = [Some(stream?), Some(process?), log, Some(userfaultfd?)];
        let fds = fds.into_iter().flatten().collect();
        let (session, mut connection) = Connection::from_kept(&kept, fds, rest.to_vec())?;
        connection.image = Some(image);
        connection.kept_bytes = Some(connection.bytes.len());
        connection.logs = number.map_or(0, |number| number + 1);
        Some((session, connection))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_of_one_server_and_one_machine() {
        let path = Path::new("/run/a b:c.sock");
        let (one, other) = (machine(0xab, path), log_of(0xab, 3, path));
        assert_eq!(one, "uzone.machine.ab./run/a%20b%3Ac.sock");
        assert_eq!(machine_of(&one, path), Some((0xab, None)));
        assert_eq!(machine_of(&other, path), Some((0xab, Some(3))));
        for given in [
            "uzone.socket./run/a%20b%3Ac.sock",
            "uzone.machine.x./run/a%20b%3Ac.sock",
            "uzone.machine.0ab./run/a%20b%3Ac.sock",
            "uzone.machine.7",
            "uzone.log.7",
            "connection",
            "",
        ] {
            assert_eq!(machine_of(given, path), None, "{given}");
        }
        assert_eq!(machine_of(&one, Path::new("/run/other.sock")), None);
    }

    #[test]
    fn a_machine_that_is_not_whole_is_none() {
        let mut machine = Machine::default();
        machine.add(None, String::new(), memory_file("test", b"{}\n").unwrap().into());
        machine.add(Some(3), String::new(), memory_file("test", b"new").unwrap().into());
        machine.add(Some(2), String::new(), memory_file("test", b"old").unwrap().into());
        assert_eq!(machine.log.as_ref().map(|(number, _)| *number), Some(3));
        assert!(machine.into_connection().is_none());
    }
}

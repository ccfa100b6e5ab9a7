//! The service manager that started this process, by systemd's protocol: [`ServiceManager`] takes
//! notifications, and keeps the descriptors of machines while neither process of a server lives; [`Passed`]
//! is what it passes to the next one, and to one that it starts when a machine connects.
//!
//! A machine is kept as one message with five descriptors of one name: the stream, the process, the
//! userfaultfd, a file in memory with what its monitor sent, and the file for the log of what it gives back, which its
//! workers write one after the other; if the monitor sends more, another file follows. They come back in any order: the
//! kind of a descriptor shows which it is, and of the files with what was sent the longest counts. The service manager
//! drops a descriptor without an answer if it has no room, so a machine of which a part is missing is not served:
//! without its log, nothing states what it gave back.
//!
//! Source: sd_notify(3), sd_pid_notify_with_fds(3), sd_listen_fds(3).

use std::collections::BTreeMap;
use std::env;
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

use super::estate::{self, Estate, Heirlooms};
use crate::connection::{Connection, Kept};
use crate::error::ServeError;
use crate::link;
use crate::options::{OnFailure, ServerOptions};
use crate::socket::{ListeningSocket, escaped};

/// How long the manager may take to take a message.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the name of a descriptor may be.
const NAME_BYTES: usize = 255;
/// The name of a file in memory with what a monitor sent.
const STATE_FILE: &str = "uzone-machine";
/// How much of it is read.
const STATE_BYTES: usize = 128 << 10;

/// A socket to the service manager.
#[derive(Debug)]
pub struct ServiceManager(UnixDatagram);

impl Estate {
    /// Returns the service manager of the keeper before, if it had one.
    #[must_use]
    pub fn manager(&self) -> Option<ServiceManager> {
        Some(ServiceManager::from_fd(self.heirlooms.manager.as_ref()?.try_clone().ok()?))
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
        // A descriptor whose other end is closed is kept as well: its machine may still run.
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

    /// Has a machine kept, with what its monitor sent so far and the file for its log.
    pub(crate) fn keep_machine(
        &self,
        path: &Path,
        image: &str,
        session: u64,
        connection: &Connection,
    ) {
        let (Some(userfaultfd), Some(log)) = (connection.userfaultfd(), &connection.log_file)
        else {
            return;
        };
        let state = State { image: image.to_owned(), kept: connection.kept(session) };
        let file = link::titled(&state, &connection.bytes)
            .and_then(|bytes| memory_file(STATE_FILE, &bytes));
        match file {
            Ok(file) => {
                let (stream, peer) = (connection.stream.as_fd(), connection.peer.as_fd());
                let fds = [stream, peer, userfaultfd.as_fd(), log.as_fd(), file.as_fd()];
                self.keep(&machine(connection.known.id, path), &fds);
            }
            Err(cause) => {
                tracing::warn!(%cause, "a machine is not kept by the service manager");
            }
        }
    }

    /// Gives up a machine and its log.
    pub(crate) fn discard_machine(&self, path: &Path, connection: &Connection) {
        self.discard(&machine(connection.known.id, path));
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
    format!("uzone.{what}.{}", escaped(path.as_os_str().as_bytes(), b"/.-_"))
}

fn machine(id: u64, path: &Path) -> String {
    name(&format!("machine.{id:x}"), path)
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
    /// [`ServeError::At`] or [`ServeError::Group`] if there are machines and no socket, and it
    /// cannot be made with the mode and the group of `options`.
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
        let kills = options.on_failure == OnFailure::Kill;
        let connections = self.machines(socket, manager.as_ref(), kills);
        let failed = ServeError::at("listen on", socket);
        let fd = match made.or(kept) {
            Some((_, fd)) => {
                let listener = UnixListener::from(fd);
                // One that the manager made may wait.
                let never_waits = listener.set_nonblocking(true).map(|()| listener.into());
                never_waits.map_err(failed)?
            }
            None if connections.is_empty() => return Ok(None),
            None => {
                let bound = ListeningSocket::bind(socket, options.mode, options.group)?;
                bound.into_fd().map_err(failed)?
            }
        };
        let (socket, manager) = (Some(fd), manager.map(OwnedFd::from));
        let heirlooms = Heirlooms { socket, manager, ..Heirlooms::default() };
        Ok(Some(Estate { is_named, ..Estate::new(heirlooms, connections) }))
    }

    /// Takes the machines of the server of `socket`. What is left of others is discarded, and their processes are ended
    /// if it `kills`: they would wait for ever.
    fn machines(
        &mut self,
        socket: &Path,
        manager: Option<&ServiceManager>,
        kills: bool,
    ) -> BTreeMap<u64, Connection> {
        let mut machines = BTreeMap::<u64, Vec<_>>::new();
        for (name, fd) in self.take(|name, _| machine_of(name, socket).is_some()) {
            if let Some(id) = machine_of(&name, socket) {
                machines.entry(id).or_default().push(fd);
            }
        }
        let mut connections = BTreeMap::new();
        for (id, parts) in machines {
            match connection_of(parts) {
                Ok(found) if found.1.known.id == id => estate::add(&mut connections, found),
                parts => {
                    let process = parts.err().flatten();
                    let was_killed =
                        kills && process.is_some_and(|process| peer::kill(process).is_ok());
                    tracing::warn!(
                        was_killed,
                        "a part of what is kept of a machine is missing, so it is not served: FileDescriptorStoreMax \
                         is to be five for each machine, and one"
                    );
                    manager.iter().for_each(|manager| manager.discard(&machine(id, socket)));
                }
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

/// Returns of which machine of a server a descriptor is.
fn machine_of(given: &str, path: &Path) -> Option<u64> {
    let id = given.strip_prefix("uzone.machine.")?.split('.').next()?;
    let id = u64::from_str_radix(id, 16).ok()?;
    (machine(id, path) == given).then_some(id)
}

/// Returns the connection that was kept and the number of its session, or its process if a part is missing.
fn connection_of(parts: Vec<OwnedFd>) -> Result<(u64, Connection), Option<OwnedFd>> {
    let (mut stream, mut process, mut userfaultfd, mut log_file) = (None, None, None, None);
    let mut sent = Vec::new();
    for fd in parts {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        let link = link.unwrap_or_default();
        let link = link.to_string_lossy();
        if link.starts_with("socket:") {
            stream = Some(fd);
        } else if link.contains("userfaultfd") {
            userfaultfd = Some(fd);
        } else if link.contains("pidfd") {
            process = Some(fd);
        } else if link.contains(STATE_FILE) {
            sent.push(File::from(fd));
        } else {
            log_file = Some(fd);
        }
    }
    let parts = stream.zip(userfaultfd).zip(log_file).zip(latest(sent));
    let (Some(process), Some((((stream, userfaultfd), log_file), bytes))) = (&process, parts)
    else {
        return Err(process);
    };
    let found = (|| {
        let (State { image, kept }, sent) = link::parse_titled::<State>(&bytes)?;
        let parts = [stream, process.try_clone()?, log_file, userfaultfd];
        let (session, mut connection) = Connection::of_the_dead(&kept, image, parts, sent)?;
        connection.kept_bytes = Some(connection.bytes.len());
        io::Result::Ok((session, connection))
    })();
    found.map_err(|_| process.try_clone().ok())
}

/// Returns the bytes of the longest file: a monitor had sent the most by then.
fn latest(sent: Vec<File>) -> Option<Vec<u8>> {
    let len = |file: &File| file.metadata().map_or(0, |metadata| metadata.len());
    let file = sent.into_iter().max_by_key(len)?;
    let mut bytes = vec![0; usize::try_from(len(&file)).ok()?.min(STATE_BYTES)];
    file.read_exact_at(&mut bytes, 0).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_name_is_of_one_server_and_one_machine() {
        let path = Path::new("/run/a b:c.sock");
        let one = machine(0xab, path);
        assert_eq!(one, "uzone.machine.ab./run/a%20b%3Ac.sock");
        assert_eq!(machine_of(&one, path), Some(0xab));
        for given in [
            "uzone.socket./run/a%20b%3Ac.sock",
            "uzone.machine.x./run/a%20b%3Ac.sock",
            "uzone.machine.0ab./run/a%20b%3Ac.sock",
            "uzone.machine.7",
            "connection",
            "",
        ] {
            assert_eq!(machine_of(given, path), None, "{given}");
        }
        assert_eq!(machine_of(&one, Path::new("/run/other.sock")), None);
    }

    #[test]
    fn a_machine_of_which_a_part_is_missing_is_none_and_its_process_is_known() {
        let (stream, _far) = UnixStream::pair().unwrap();
        let peer = peer::Peer::of(&stream).unwrap();
        let parts = || {
            let state = memory_file(STATE_FILE, b"{}\n").unwrap();
            let pidfd = peer.as_fd().try_clone_to_owned().unwrap();
            vec![state.into(), stream.try_clone().unwrap().into(), pidfd]
        };
        assert!(connection_of(parts()).unwrap_err().is_some());
        assert!(
            connection_of(parts()[..2].iter().map(|fd| fd.try_clone().unwrap()).collect())
                .unwrap_err()
                .is_none()
        );
    }
}

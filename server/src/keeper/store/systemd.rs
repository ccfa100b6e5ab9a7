//! The service manager that started this process, by systemd's protocol: [`ServiceManager`] takes notifications and keeps
//! descriptors while no process of a server lives; it passes [`SystemdDescriptors`] to the next one.
//!
//! A VM is one message with five descriptors of one name: its stream, process, userfaultfd, log and record. They come back in
//! any order: the kind of a descriptor shows which it is. The service manager drops a descriptor without an answer if it has
//! no room. A VM of which a part is missing is not served: without its log, nothing states which pages it gave back. The
//! worker is kept by its process, and the totals by a file in memory.
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
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use uzone_os::peer::{self, Peer};
use uzone_os::{memory_file, passed_descriptors};

use super::{Left, Record, end, new_log};
use crate::machine::Machine;
use crate::messages;
use crate::metrics::Totals;
use crate::process;
use crate::socket::escaped;

/// The longest time that the manager takes for a message.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest name of a descriptor.
const NAME_BYTES: usize = 255;
/// The names of files in memory: the record of a VM, and the totals.
const RECORD: &str = "uzone-machine";
const TOTALS: &str = "uzone-totals";
/// The longest record.
const RECORD_BYTES: usize = 128 << 10;

/// A socket to the service manager.
#[derive(Debug)]
pub struct ServiceManager(UnixDatagram);

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

    /// Sends a notification, lines of `NAME=VALUE`. A manager that takes none within a second is not waited for.
    pub fn notify(&self, lines: &str) {
        let _ = self.0.send(lines.as_bytes());
    }

    /// Has descriptors kept under a name until they are discarded.
    fn keep(&self, name: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        // A descriptor whose other end is closed is kept as well: its VM may still run.
        let lines = format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0\n");
        match name.len() {
            0..=NAME_BYTES => peer::send(&self.0, lines.as_bytes(), fds).map(drop),
            _ => Err(io::Error::other("the path of the socket is too long")),
        }
    }

    fn discard(&self, name: &str) {
        self.notify(&format!("FDSTOREREMOVE=1\nFDNAME={name}\n"));
    }
}

/// The descriptors that the service manager passed to this process.
#[derive(Debug, Default)]
pub struct SystemdDescriptors(Vec<(String, OwnedFd)>);

impl SystemdDescriptors {
    /// Takes them, once a process. There are none without such a manager.
    #[must_use]
    pub fn of_environment() -> Self {
        Self(passed_descriptors())
    }

    /// Returns the path of the socket that the manager made, if it made one.
    #[must_use]
    pub fn socket(&self) -> Option<PathBuf> {
        self.0.iter().find_map(|(name, fd)| if is_kept(name) { None } else { path_of(fd) })
    }

    /// Takes the socket of a server, and whether an earlier server made it: its name is this one's to remove then.
    pub(crate) fn take_socket(&mut self, path: &Path) -> Option<(OwnedFd, bool)> {
        let of_server = name("socket", path);
        let is_made =
            |name: &str, fd: &OwnedFd| !is_kept(name) && path_of(fd).as_deref() == Some(path);
        let made = self.take(is_made).pop();
        let kept = self.take(|name, _| name == of_server).pop();
        let is_kept = made.is_none();
        made.or(kept).map(|(_, fd)| (fd, is_kept))
    }

    fn take(&mut self, is_it: impl Fn(&str, &OwnedFd) -> bool) -> Vec<(String, OwnedFd)> {
        self.0.extract_if(.., |(name, fd)| is_it(name, fd)).collect()
    }
}

/// The descriptor store of the service manager, for one server.
#[derive(Debug)]
pub(crate) struct Systemd {
    manager: ServiceManager,
    path: PathBuf,
    totals: File,
    /// The descriptors of earlier processes of this server.
    left: SystemdDescriptors,
    /// Whether VMs that are not served are ended.
    kills: bool,
}

impl Systemd {
    /// Takes the descriptors of the server of `path`.
    pub(crate) fn open(
        manager: ServiceManager,
        path: &Path,
        passed: &mut SystemdDescriptors,
        kills: bool,
    ) -> io::Result<Self> {
        let (of_worker, of_totals) = (name("worker", path), name("totals", path));
        let is_its =
            |name: &str| name == of_worker || name == of_totals || vm_of(name, path).is_some();
        let left = passed.take(|name, _| is_its(name));
        let totals = memory_file(TOTALS, &[])?;
        Ok(Self { manager, path: path.to_owned(), totals, left: SystemdDescriptors(left), kills })
    }

    /// Has the socket of the server kept.
    pub(crate) fn put_socket(&self, socket: BorrowedFd<'_>) {
        self.keep("socket", &[socket]);
    }

    pub(crate) fn remove_socket(&self) {
        self.manager.discard(&name("socket", &self.path));
    }

    fn keep(&self, what: &str, fds: &[BorrowedFd<'_>]) {
        let name = name(what, &self.path);
        if let Err(cause) = self.manager.keep(&name, fds) {
            tracing::warn!(%cause, name, "systemd does not keep a descriptor");
        }
    }

    pub(super) fn put(&self, image: &str, session: u64, machine: &mut Machine) -> io::Result<()> {
        let log = new_log()?;
        let bytes = Record::new(image, session, machine, None).bytes(machine)?;
        let record = memory_file(RECORD, &bytes)?;
        let userfaultfd = machine.userfaultfd().ok_or(io::ErrorKind::InvalidData)?;
        let (stream, peer) = (machine.stream.as_fd(), machine.peer.as_fd());
        let fds = [stream, peer, userfaultfd.as_fd(), log.as_fd(), record.as_fd()];
        self.manager.keep(&vm(machine.id, &self.path), &fds)?;
        (machine.log, machine.record) = (Some(log.into()), Some(record));
        Ok(())
    }

    pub(super) fn remove(&self, id: u64) {
        self.manager.discard(&vm(id, &self.path));
    }

    pub(super) fn put_worker(&self, worker: &Peer) {
        self.manager.discard(&name("worker", &self.path));
        self.keep("worker", &[worker.as_fd()]);
    }

    pub(super) fn put_totals(&self, totals: &Totals) {
        // In its place: a part that is cut off by a kill is no JSON, and costs the totals alone.
        let _ = serde_json::to_vec(totals).map_err(io::Error::from).and_then(|bytes| {
            self.totals.write_all_at(&bytes, 0)?;
            self.totals.set_len(bytes.len() as u64)
        });
    }

    pub(super) fn has_machines(&self) -> bool {
        self.left.0.iter().any(|(name, _)| vm_of(name, &self.path).is_some())
    }

    pub(super) fn take_all(&mut self) -> io::Result<Left> {
        let (of_worker, of_totals) = (name("worker", &self.path), name("totals", &self.path));
        for (_, worker) in self.left.take(|name, _| name == of_worker) {
            // The manager has usually ended it, and the number is for messages alone.
            if let Some(worker) = Peer::from_parts(std::process::id(), 0, worker) {
                match end(&worker) {
                    Err(cause) if cause.raw_os_error() == Some(libc::ESRCH) => {}
                    ended => ended?,
                }
            }
        }
        let mut all = Left::default();
        for (_, totals) in self.left.take(|name, _| name == of_totals) {
            let totals = read(&File::from(totals)).unwrap_or_default();
            all.totals.add(serde_json::from_slice(&totals).unwrap_or_default());
        }
        self.manager.discard(&of_totals);
        self.keep("totals", &[self.totals.as_fd()]);
        let mut vms = BTreeMap::<u64, Vec<_>>::new();
        for (name, fd) in std::mem::take(&mut self.left.0) {
            if let Some(id) = vm_of(&name, &self.path) {
                vms.entry(id).or_default().push(fd);
            }
        }
        for (id, parts) in vms {
            match recover(parts) {
                Ok(found) if found.1.id == id => all.machines.push(found),
                parts => {
                    // Its faults would wait for ever.
                    let process = parts.err().flatten();
                    let was_killed =
                        self.kills && process.is_some_and(|process| process::kill(process).is_ok());
                    tracing::warn!(
                        was_killed,
                        "incomplete VM record in systemd's descriptor store; raise FileDescriptorStoreMax to 5 per VM + 3"
                    );
                    self.remove(id);
                }
            }
        }
        Ok(all)
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The worker goes on without this process.
            return;
        }
        for what in ["worker", "totals"] {
            self.manager.discard(&name(what, &self.path));
        }
    }
}

/// Returns the name of a descriptor of the server with this socket. A colon would end it in a list.
fn name(what: &str, path: &Path) -> String {
    format!("uzone.{what}.{}", escaped(path))
}

fn vm(id: u64, path: &Path) -> String {
    name(&format!("machine.{id:x}"), path)
}

/// Returns the VM of a server that a descriptor belongs to.
fn vm_of(given: &str, path: &Path) -> Option<u64> {
    let id = given.strip_prefix("uzone.machine.")?.split('.').next()?;
    let id = u64::from_str_radix(id, 16).ok()?;
    (vm(id, path) == given).then_some(id)
}

/// Returns whether a descriptor was kept for a server, and not made by the manager.
fn is_kept(name: &str) -> bool {
    name.starts_with("uzone.")
}

/// Returns the path of a socket that listens.
fn path_of(fd: &OwnedFd) -> Option<PathBuf> {
    let listener = UnixListener::from(fd.try_clone().ok()?);
    Some(listener.local_addr().ok()?.as_pathname()?.to_owned())
}

/// Reads a file in memory.
fn read(file: &File) -> io::Result<Vec<u8>> {
    let len = usize::try_from(file.metadata()?.len()).map_or(RECORD_BYTES, |len| len);
    let mut bytes = vec![0; len.min(RECORD_BYTES)];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Returns the VM of its descriptors and the number of its session, or its process if one is missing.
fn recover(parts: Vec<OwnedFd>) -> Result<(u64, Machine), Option<OwnedFd>> {
    let [mut stream, mut process, mut userfaultfd, mut log, mut record] = [const { None }; 5];
    for fd in parts {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        let link = link.unwrap_or_default().to_string_lossy().into_owned();
        let part = match &link[..] {
            link if link.starts_with("socket:") => &mut stream,
            link if link.contains("userfaultfd") => &mut userfaultfd,
            link if link.contains("pidfd") => &mut process,
            link if link.contains(RECORD) => &mut record,
            _ => &mut log,
        };
        *part = Some(fd);
    }
    let (Some(stream), Some(userfaultfd), Some(log), Some(record), Some(pidfd)) =
        (stream, userfaultfd, log, record, &process)
    else {
        return Err(process);
    };
    let found = (|| {
        let record = File::from(record);
        let bytes = read(&record)?;
        let (title, sent) = messages::parse_titled::<Record>(&bytes)?;
        let peer = Peer::from_parts(title.pid, title.uid, pidfd.try_clone()?);
        let (stream, peer) = (UnixStream::from(stream), peer.ok_or(io::ErrorKind::InvalidData)?);
        let mut machine = Machine::recovered(stream, peer, userfaultfd, log.into(), sent)?;
        let session = title.session;
        title.complete(&mut machine, record);
        io::Result::Ok((session, machine))
    })();
    found.map_err(|_| process)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_of_one_server_and_one_vm() {
        let path = Path::new("/run/a b:c.sock");
        let one = vm(0xab, path);
        assert_eq!(one, "uzone.machine.ab./run/a%20b%3Ac.sock");
        assert_eq!(vm_of(&one, path), Some(0xab));
        for given in [
            "uzone.socket./run/a%20b%3Ac.sock",
            "uzone.machine.x./run/a%20b%3Ac.sock",
            "uzone.machine.0ab./run/a%20b%3Ac.sock",
            "uzone.machine.7",
            "connection",
            "",
        ] {
            assert_eq!(vm_of(given, path), None, "{given}");
        }
        assert_eq!(vm_of(&one, Path::new("/run/other.sock")), None);
    }

    #[test]
    fn a_vm_of_which_a_part_is_missing_is_none_and_its_process_is_known() {
        let (stream, _far) = UnixStream::pair().unwrap();
        let peer = Peer::of(&stream).unwrap();
        let parts = || {
            let record = memory_file(RECORD, b"{}\n").unwrap();
            let pidfd = peer.as_fd().try_clone_to_owned().unwrap();
            vec![record.into(), stream.try_clone().unwrap().into(), pidfd]
        };
        assert!(recover(parts()).unwrap_err().is_some());
        let two = parts()[..2].iter().map(|fd| fd.try_clone().unwrap()).collect();
        assert!(recover(two).unwrap_err().is_none());
    }
}

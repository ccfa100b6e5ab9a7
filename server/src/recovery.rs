//! What is kept of machines in a folder, for a server that starts when both processes of one were killed and
//! no service manager has their descriptors: [`Recovery`].
//!
//! A machine is a file with what its monitor sent and where its userfaultfd is: a number of the process that
//! it came from, which has it still. When that process started tells it from later ones of its number. The
//! log of what the machine gave back is a file too, one for each worker after the other. A worker cannot write
//! in the folder, nor can one that takes the place of its keeper: what the log states stays true. A keeper that
//! takes over from that one keeps the machines which have connected to it meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uzone_fault::EventLog;
use uzone_os::peer::Peer;

use crate::connection::{Connection, Kept};
use crate::error::ServeError;
use crate::link;
use crate::options::ServerOptions;
use crate::socket::ListeningSocket;
use crate::takeover::Estate;

/// What tells one start of the system from others.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// The folder of the server with one socket.
#[derive(Debug)]
pub struct Recovery {
    folder: PathBuf,
    boot: String,
}

/// What a machine is, beside what its monitor sent.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    image: String,
    kept: Kept,
    /// The number of the userfaultfd in the process that it came from.
    number: u32,
    /// When that process started, and when the system did.
    started: u64,
    boot: String,
}

impl Recovery {
    /// Opens the part of `folder` that belongs to the server of `socket`, and makes it if it is not there.
    /// Only its owner may read it.
    ///
    /// # Errors
    /// [`ServeError::Recovery`] if it cannot be made, or other users can write in it.
    pub fn open(folder: &Path, socket: &Path) -> Result<Self, ServeError> {
        let failed = |cause| ServeError::Recovery { path: folder.to_owned(), cause };
        let mut name = String::new();
        for byte in std::path::absolute(socket).map_err(failed)?.as_os_str().as_bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => {
                    name.push(char::from(*byte));
                }
                // Writing to a text does not fail.
                _ => drop(write!(name, "%{byte:02X}")),
            }
        }
        let folder = folder.join(name);
        DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(failed)?;
        // What another user could write there would have this process take any descriptor of any process.
        let (own, of) = (fs::metadata("/proc/self"), fs::metadata(&folder));
        let (own, of) = (own.map_err(failed)?, of.map_err(failed)?);
        if of.uid() != own.uid() || of.mode() & 0o077 != 0 {
            let reason = "it is open to other users: it must be this one's, with mode 700";
            return Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, reason)));
        }
        // Not all file systems can promise room for a log.
        let probe = folder.join("probe.part");
        let options = OpenOptions::new().read(true).write(true).create(true).mode(0o600).to_owned();
        let made = options.open(&probe).and_then(|file| EventLog::in_file(file.into(), 1, 1));
        // If it stays, the next server overwrites it.
        let _ = fs::remove_file(&probe);
        made.map_err(failed)?;
        let boot = fs::read_to_string(BOOT).map_err(failed)?.trim().to_owned();
        Ok(Self { folder, boot })
    }

    fn machine(&self, id: u64) -> PathBuf {
        self.folder.join(format!("{id:x}.machine"))
    }

    fn log(&self, id: u64) -> PathBuf {
        self.folder.join(format!("{id:x}.log"))
    }

    /// Keeps a machine, with what its monitor sent so far.
    pub(crate) fn keep_machine(&self, image: &str, session: u64, connection: &mut Connection) {
        let path = self.machine(connection.id);
        let made = self.make_log(connection);
        if let Err(cause) =
            made.and_then(|()| self.write_machine(&path, image, session, connection))
            && !path.exists()
        {
            let pid = connection.peer.pid();
            tracing::warn!(
                %cause,
                "session {session}: process {pid} is served, and not recovered if both processes of this \
                 server are killed; that takes the same user, or CAP_SYS_PTRACE"
            );
        }
    }

    fn write_machine(
        &self,
        path: &Path,
        image: &str,
        session: u64,
        connection: &Connection,
    ) -> io::Result<()> {
        let userfaultfd = connection.userfaultfd().ok_or(io::ErrorKind::InvalidData)?;
        let state = State {
            image: image.to_owned(),
            kept: connection.kept(session),
            number: connection.peer.number_of(userfaultfd.as_fd())?,
            started: connection.peer.started()?,
            boot: self.boot.clone(),
        };
        let part = path.with_extension("part");
        fs::write(&part, link::titled(&state, &connection.bytes)?)?;
        fs::rename(part, path)
    }

    /// Returns whether a machine is kept.
    pub(crate) fn has_machine(&self, id: u64) -> bool {
        self.machine(id).exists()
    }

    /// Makes the file for the log of a machine. A connection has one for good, also in the next processes.
    pub(crate) fn make_log(&self, connection: &mut Connection) -> io::Result<()> {
        if connection.log_file.is_none() {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600);
            connection.log_file = Some(options.open(self.log(connection.id))?.into());
        }
        Ok(())
    }

    /// Gives up a machine and its log.
    pub(crate) fn discard(&self, id: u64) {
        // The machine first, since it is one that gave nothing back without its log.
        for path in [self.machine(id), self.machine(id).with_extension("part"), self.log(id)] {
            match fs::remove_file(&path) {
                Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(%cause, path = %path.display(), "what is kept of a machine stays");
                }
                _ => {}
            }
        }
    }

    /// Gives up all machines but these.
    pub(crate) fn discard_others(&self, kept: &BTreeSet<u64>) {
        match self.machines() {
            Ok(machines) => machines.difference(kept).for_each(|id| self.discard(*id)),
            Err(cause) => {
                tracing::warn!(%cause, path = %self.folder.display(), "what is kept of machines stays");
            }
        }
    }

    /// Returns the machines that are kept, also those of which a server that was killed has left a part.
    fn machines(&self) -> io::Result<BTreeSet<u64>> {
        let mut ids = BTreeSet::new();
        for entry in fs::read_dir(&self.folder)? {
            let name = entry?.file_name();
            let id = name.to_str().and_then(|name| name.split('.').next());
            ids.extend(id.and_then(|id| u64::from_str_radix(id, 16).ok()));
        }
        Ok(ids)
    }

    /// Takes the machines of a server that was killed, and listens on `socket` with the mode and the group of
    /// `options`. `None` if there are none.
    ///
    /// # Errors
    /// [`ServeError`]: the folder cannot be read, or the socket cannot be made, since another server has it
    /// for instance.
    pub fn estate(
        &self,
        socket: &Path,
        options: &ServerOptions,
    ) -> Result<Option<Estate>, ServeError> {
        let failed = |cause| ServeError::Recovery { path: self.folder.clone(), cause };
        let ids = self.machines().map_err(failed)?;
        if ids.is_empty() {
            return Ok(None);
        }
        // First, so that no other server has these machines.
        let listener = ListeningSocket::bind(socket, options.mode, options.group)?;
        let mut connections = BTreeMap::new();
        for id in ids {
            match self.recover(id) {
                Ok((session, connection)) => {
                    let free = connections.keys().max().map_or(1, |last: &u64| last + 1);
                    let is_taken = connections.contains_key(&session);
                    connections.insert(if is_taken { free } else { session }, connection);
                }
                Err(cause) => {
                    tracing::warn!(%cause, "a machine of the server before is not recovered");
                    self.discard(id);
                }
            }
        }
        let next = connections.keys().max().map_or(1, |last| last + 1);
        let listen = |cause| ServeError::Listen { path: socket.to_owned(), cause };
        let socket = Some(listener.into_fd().map_err(listen)?);
        let (control, metrics, manager) = (None, None, None);
        Ok(Some(Estate {
            socket,
            is_named: true,
            is_confined: false,
            control,
            metrics,
            manager,
            connections,
            next,
        }))
    }

    /// Takes a machine whose process has its userfaultfd still.
    fn recover(&self, id: u64) -> io::Result<(u64, Connection)> {
        let bytes = fs::read(self.machine(id))?;
        let (state, sent) = link::parse_titled::<State>(&bytes)?;
        let State { image, kept, number, started, boot } = state;
        if boot != self.boot {
            return Err(io::Error::other("the system was started again"));
        }
        let (pid, uid) = kept.process();
        let peer = Peer::of_number(pid, uid, started)?;
        let userfaultfd = peer.descriptor(number)?;
        let log = OpenOptions::new().read(true).write(true).open(self.log(id));
        let log_file = match log {
            Ok(file) => Some(file),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => None,
            Err(cause) => return Err(cause),
        };
        // A worker that was killed before it read anything has left no log in its file.
        let is_log = log_file.as_ref().map(EventLog::is_in_file).transpose()?.unwrap_or(false);
        let log = log_file.as_ref().filter(|_| is_log).map(File::try_clone).transpose()?;
        // The stream went with the server, and nothing comes by it any more.
        let (stream, _) = UnixStream::pair()?;
        stream.set_nonblocking(true)?;
        let kept = kept.of_the_dead(log.is_some());
        let fds =
            [Some(stream.into()), Some(peer.into()), log.map(OwnedFd::from), Some(userfaultfd)];
        let fds = fds.into_iter().flatten().collect();
        let (session, mut connection) = Connection::from_kept(&kept, fds, sent.to_vec())
            .filter(|(_, connection)| connection.id == id)
            .ok_or(io::ErrorKind::InvalidData)?;
        connection.image = Some(image);
        connection.log_file = log_file.map(OwnedFd::from);
        Ok((session, connection))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_of_machines_that_have_ended_is_discarded_and_the_rest_stays() {
        let folder = std::env::temp_dir().join(format!("uzone-recovery-{}", std::process::id()));
        let recovery = Recovery::open(&folder, Path::new("/run/s")).unwrap();
        let names = ["a1.machine", "a1.log", "b2.machine", "b2.part", "b2.log", "c3.log", "other"];
        for name in names {
            fs::write(recovery.folder.join(name), "").unwrap();
        }
        recovery.discard_others(&BTreeSet::from([0xa1, 0xff]));
        let left = fs::read_dir(&recovery.folder).unwrap();
        let left: BTreeSet<_> = left.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["a1.log", "a1.machine", "other"].map(Into::into).into());
        fs::remove_dir_all(folder).unwrap();
    }
}

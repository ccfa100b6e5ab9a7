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

impl Drop for Recovery {
    /// Removes the folder, unless it has machines, which the next server of that socket goes on with.
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder);
    }
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
    /// [`ServeError::Recovery`] if it cannot be made, or other users can write in it or rename it.
    pub fn open(folder: &Path, socket: &Path) -> Result<Self, ServeError> {
        Self::open_part(folder, socket)
            .map_err(|cause| ServeError::Recovery { path: folder.to_owned(), cause })
    }

    fn open_part(folder: &Path, socket: &Path) -> io::Result<Self> {
        let part = folder.join(name_of(socket)?);
        DirBuilder::new().recursive(true).mode(0o700).create(&part)?;
        // What another user could write there would have this process take any descriptor of any process.
        let own = fs::metadata("/proc/self")?.uid();
        let (of, outer) = (fs::metadata(&part)?, fs::metadata(folder)?);
        let is_private = of.uid() == own && of.mode() & 0o077 == 0;
        // In a folder that others write to, the sticky bit keeps them from renaming what is not theirs.
        let is_kept = [0, own].contains(&outer.uid())
            && (outer.mode() & 0o022 == 0 || outer.mode() & 0o1000 != 0);
        if !is_private || !is_kept {
            let reason = "it is open to other users: it must be this one's, with mode 700";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        // Not all file systems can promise room for a log.
        let probe = part.join("probe.part");
        let options = OpenOptions::new().read(true).write(true).create(true).mode(0o600).to_owned();
        let made = options.open(&probe).and_then(|file| EventLog::in_file(file.into(), 1, 1));
        // If it stays, the next server overwrites it.
        let _ = fs::remove_file(&probe);
        made?;
        let boot = fs::read_to_string(BOOT)?.trim().to_owned();
        Ok(Self { folder: part, boot })
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
                 server are killed; that takes the same user, or CAP_SYS_PTRACE and \
                 CAP_DAC_READ_SEARCH"
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
            // An empty folder was removed by the server before, or one that could not have this socket.
            match DirBuilder::new().mode(0o700).create(&self.folder) {
                Err(cause) if cause.kind() != io::ErrorKind::AlreadyExists => return Err(cause),
                _ => {}
            }
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

/// Returns the name of the folder of the server with a socket. The same path may be another socket's, in another
/// mount namespace or after its folder was made anew.
fn name_of(socket: &Path) -> io::Result<String> {
    let socket = std::path::absolute(socket)?;
    let file = socket.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let folder = socket.parent().unwrap_or(Path::new("/"));
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
    // The number of the folder, below, identifies it. Its path shows the operator which server this is.
    let of_folder = folder.as_os_str().as_bytes().iter().skip(1);
    let mut name: String =
        of_folder.map(|byte| if is_plain(byte) { char::from(*byte) } else { '-' }).collect();
    name.push('.');
    for byte in file.as_bytes() {
        match byte {
            plain if is_plain(plain) => name.push(char::from(*plain)),
            // Writing to a text does not fail.
            _ => drop(write!(name, "%{byte:02X}")),
        }
    }
    let metadata = fs::metadata(folder)?;
    let _ = write!(name, ".{:x}.{:x}", metadata.dev(), metadata.ino());
    Ok(name)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_is_kept_of_machines_that_have_ended_is_discarded_and_the_rest_stays() {
        let folder = std::env::temp_dir().join(format!("uzone-recovery-{}", std::process::id()));
        let recovery = Recovery::open(&folder, Path::new("/tmp/s")).unwrap();
        let names = ["a1.machine", "a1.log", "b2.machine", "b2.part", "b2.log", "c3.log", "other"];
        for name in names {
            fs::write(recovery.folder.join(name), "").unwrap();
        }
        recovery.discard_others(&BTreeSet::from([0xa1, 0xff]));
        let left = fs::read_dir(&recovery.folder).unwrap();
        let left: BTreeSet<_> = left.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["a1.log", "a1.machine", "other"].map(Into::into).into());
        // A folder with machines stays for the next server, and an empty one goes.
        let again = Recovery::open(&folder, Path::new("/tmp/s")).unwrap();
        let part = recovery.folder.clone();
        drop(recovery);
        assert!(part.exists());
        for entry in fs::read_dir(&part).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        drop(again);
        assert!(!part.exists());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_folder_that_another_user_could_rename_is_refused() {
        let folder = std::env::temp_dir().join(format!("uzone-shared-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for (mode, is_taken) in [(0o777, false), (0o1777, true), (0o755, true), (0o775, false)] {
            fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
            let opened = Recovery::open(&folder, Path::new("/tmp/s"));
            assert_eq!(opened.is_ok(), is_taken, "{mode:o}: {opened:?}");
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_socket_of_another_folder_has_another_name() {
        let folder = std::env::temp_dir();
        let names = [&folder, Path::new("/")].map(|at| name_of(&at.join("a b.sock")).unwrap());
        assert!(names[0].contains(".a%20b%2Esock."), "{names:?}");
        assert_ne!(names[0], names[1]);
        assert_eq!(name_of(&folder.join("a b.sock")).unwrap(), names[0]);
    }
}

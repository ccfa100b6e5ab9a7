//! What is kept of machines in a folder, for a server that starts when both processes of one were killed and
//! no service manager has their descriptors: [`Recovery`].
//!
//! A machine is a file with what its monitor sent and where its userfaultfd is: a number of the process that
//! it came from, which has it still. The start time distinguishes that process from a later one with the same
//! number. The log of what the machine gave back is a file too, one for each worker after the other. A worker cannot
//! write in the folder, nor can one that takes the place of its keeper: what the log states stays true. A keeper that
//! takes over from that one keeps the machines which have connected to it meanwhile.
//!
//! A folder is one server's as long as a process of it lives ([`HeldFolder`]). A server that accepts no more machines
//! keeps its folder until its last machine has ended, and the next server of that socket has another one meanwhile.
//! What is in folders that no server has is taken by the one that starts. A server that takes over by another
//! `--recover` notes where the machines are before it has them ([`Recovery::will_absorb`]), so that each kill
//! meanwhile leaves them to the next one.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use uzone_os::peer::Peer;
use uzone_os::uffd::EventLog;

use super::estate::{self, Estate, Heirlooms};
use super::held_folder::HeldFolder;
use crate::connection::{Connection, Kept};
use crate::error::ServeError;
use crate::link;
use crate::options::ServerOptions;
use crate::socket::{ListeningSocket, escaped};

/// The file with the identity of this start of the system.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// The prefix of a note, before the numbers of a folder: a file with the path of a folder whose machines belong here.
const ABSORBS: &str = "absorbs.";

/// How many servers of one socket may live at a time, all but one of which accept no more machines.
const SERVERS: u32 = 64;

/// How long to wait for machines that another server has taken from one that was killed: it may not start after all, and
/// end. One that accepts no more machines has its own for longer.
const STARTS: Duration = Duration::from_millis(300);
const PAUSE: Duration = Duration::from_millis(5);
/// What a server does with a folder for recovery.
const KEEP: &str = "keep what recovery takes in";

/// The folder of the server with one socket.
#[derive(Debug)]
pub struct Recovery {
    held: HeldFolder,
    /// The folders of other servers of that socket, if they are there.
    others: Vec<PathBuf>,
    boot: String,
}

impl Drop for Recovery {
    /// Removes the folder, unless it has machines, which the next server of that socket goes on with.
    fn drop(&mut self) {
        self.held.remove();
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
    /// Opens the part of `folder` that belongs to the server of `socket`, and makes it if it is not there. It is
    /// another part while an earlier server of that socket lives. Only its owner may read it.
    ///
    /// # Errors
    /// [`ServeError::At`] if it cannot be made, other users can write in it or rename it, or the
    /// folder of the socket is not there.
    pub fn open(folder: &Path, socket: &Path) -> Result<Self, ServeError> {
        let name = name_of(socket).map_err(ServeError::at("listen on", socket))?;
        Self::open_part(folder, &name).map_err(ServeError::at(KEEP, folder))
    }

    fn open_part(folder: &Path, name: &str) -> io::Result<Self> {
        let folder = &std::path::absolute(folder)?;
        let part_of = |number| match number {
            1 => folder.join(name),
            number => folder.join(format!("{name}.{number}")),
        };
        let mut held = None;
        for part in (1..=SERVERS).map(part_of) {
            DirBuilder::new().recursive(true).mode(0o700).create(&part)?;
            held = HeldFolder::hold(part)?;
            if held.is_some() {
                break;
            }
        }
        let reason =
            || io::Error::new(io::ErrorKind::ResourceBusy, "servers of this socket have it");
        let held = held.ok_or_else(reason)?;
        let part = &held.path;
        // What another user could write there would have this process take any descriptor of any process.
        let own = fs::metadata("/proc/self")?.uid();
        let outer = fs::metadata(folder)?;
        // In a folder that others write to, the sticky bit keeps them from renaming what is not theirs.
        let is_kept = [0, own].contains(&outer.uid())
            && (outer.mode() & 0o022 == 0 || outer.mode() & 0o1000 != 0);
        if !is_private(part)? || !is_kept {
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
        remove_the_empty(folder);
        let others = (1..=SERVERS).map(part_of).filter(|other| *other != held.path).collect();
        Ok(Self { held, others, boot })
    }

    /// Returns the folder.
    pub(crate) fn held(&self) -> &HeldFolder {
        &self.held
    }

    fn machine(&self, id: u64) -> PathBuf {
        self.held.path.join(machine_name(id))
    }

    fn log(&self, id: u64) -> PathBuf {
        self.held.path.join(log_name(id))
    }

    /// Notes that the machines of a server which ends will be taken from its folder, before they are. The note stays until
    /// that folder is gone; one on the folder of a server that lives on has no effect.
    pub(crate) fn will_absorb(&self, other: &Path) -> io::Result<()> {
        if other.parent() == self.held.path.parent() {
            // Found without a note.
            return Ok(());
        }
        let of = fs::metadata(other)?;
        let note = self.held.path.join(format!("{ABSORBS}{:x}.{:x}", of.dev(), of.ino()));
        fs::write(note, other.as_os_str().as_bytes())
    }

    /// Takes the machines from the folder of a server which has ended, and removes that. A process that is killed
    /// meanwhile leaves each machine to the next call; never two folders have both a machine and its log.
    pub(crate) fn absorb(&self, other: &HeldFolder) -> io::Result<()> {
        if !other.is_there() {
            // It had no machine, and its server has removed it.
            return Ok(());
        }
        self.absorb_noted(&other.path)?;
        let mut answer = Ok(());
        for id in machines_in(&other.path)? {
            answer = answer.and(self.absorb_machine(other, id));
        }
        other.remove();
        answer
    }

    fn absorb_machine(&self, other: &HeldFolder, id: u64) -> io::Result<()> {
        // The log first: where the machine is without one, it is not recovered.
        let (log, machine) = (other.path.join(log_name(id)), other.path.join(machine_name(id)));
        // The server before has ended, so a copy is all of it.
        // The machine file beside the log is current; one that was moved earlier may be out of date.
        if move_file(&log, &self.log(id))? || !self.has_machine(id) {
            move_file(&machine, &self.machine(id))?;
        }
        discard_in(&other.path, id);
        Ok(())
    }

    /// Takes the machines on whose folders there are notes, and removes the notes on those that are gone.
    pub(crate) fn absorb_noted(&self, folder: &Path) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let note = entry?;
            if !note.file_name().as_bytes().starts_with(ABSORBS.as_bytes()) {
                continue;
            }
            let path = PathBuf::from(OsString::from_vec(fs::read(note.path())?));
            match HeldFolder::hold(path.clone())? {
                Some(other) if is_private(&other.path)? => self.absorb(&other)?,
                // It is gone, or its server lives.
                _ => {}
            }
            if !path.exists() {
                fs::remove_file(note.path())?;
            }
        }
        Ok(())
    }

    /// Goes on with the log of a machine that was taken from another folder, if it was there. What is kept of another one
    /// is kept anew; in that folder it is given up in any case, since it would be taken later for all that the machine
    /// gave back.
    pub(crate) fn find_log(&self, connection: &mut Connection, before: Option<&HeldFolder>) {
        if connection.log_file.is_some() {
            let log = OpenOptions::new().read(true).write(true).open(self.log(connection.known.id));
            connection.log_file = log.ok().map(OwnedFd::from);
        }
        if let Some(before) = before {
            discard_in(&before.path, connection.known.id);
        }
    }

    /// Takes all that is in the folders of servers which have ended.
    fn absorb_the_dead(&self) -> io::Result<()> {
        self.absorb_noted(&self.held.path)?;
        for path in &self.others {
            if let Some(other) = HeldFolder::hold(path.clone())? {
                self.absorb(&other)?;
            }
        }
        Ok(())
    }

    /// Keeps a machine, with what its monitor sent so far.
    pub(crate) fn keep_machine(&self, image: &str, session: u64, connection: &mut Connection) {
        let path = self.machine(connection.known.id);
        let made = self.make_log(connection);
        if let Err(cause) =
            made.and_then(|()| self.write_machine(&path, image, session, connection))
            && !path.exists()
        {
            let pid = connection.peer.pid();
            let takes = match cause.kind() {
                io::ErrorKind::PermissionDenied => {
                    "; that takes the same user, or CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
                }
                _ => "",
            };
            tracing::warn!(
                %cause,
                "session {session}: process {pid} is served, and not recovered if both processes of this \
                 server are killed{takes}"
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

    /// Makes the file for the log of a machine. A connection has it also in the next processes.
    pub(crate) fn make_log(&self, connection: &mut Connection) -> io::Result<()> {
        if connection.log_file.is_none() {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600);
            connection.log_file = Some(options.open(self.log(connection.known.id))?.into());
        }
        Ok(())
    }

    /// Gives up a machine and its log.
    pub(crate) fn discard(&self, id: u64) {
        discard_in(&self.held.path, id);
    }

    /// Takes the machines that are kept and are not among `connections`: a worker in the place of its keeper lacks
    /// those that it had not been handed. What is kept of machines that have ended goes, and what is kept of those
    /// whose log is elsewhere, which is old.
    pub(crate) fn complete(&self, connections: &mut BTreeMap<u64, Connection>) {
        let ids = match machines_in(&self.held.path) {
            Ok(ids) => ids,
            Err(cause) => {
                let path = self.held.path.display();
                return tracing::warn!(%cause, %path, "what is kept of machines stays");
            }
        };
        let known: BTreeMap<u64, bool> = connections
            .values()
            .map(|connection| (connection.known.id, connection.log_file.is_some()))
            .collect();
        for id in ids {
            match known.get(&id) {
                Some(true) => {}
                Some(false) => self.discard(id),
                None => self.add(id, connections),
            }
        }
    }

    /// Adds a machine that is kept, unless it has ended.
    fn add(&self, id: u64, connections: &mut BTreeMap<u64, Connection>) {
        match self.recover(id) {
            Ok(Some(recovered)) => estate::add(connections, recovered),
            // It has ended, and waits for nothing.
            Ok(None) => self.discard(id),
            Err(cause) if may_pass(&cause) => {
                let path = self.held.path.display();
                tracing::warn!(
                    %cause, %path,
                    "a machine of the server before is not recovered: it waits for the next start"
                );
            }
            Err(cause) => {
                tracing::warn!(%cause, "a machine of the server before is not recovered");
                self.discard(id);
            }
        }
    }

    /// Takes the machines of servers that were killed, and listens on `socket` with the mode and the group of
    /// `options`. `None` if there are none. If another server has the socket, which was started while the one that
    /// was killed accepted no more machines, this is a server without one: [`Keeper::inherit`](crate::Keeper::inherit)
    /// takes the machines of its own image.
    ///
    /// # Errors
    /// [`ServeError`]: the folder cannot be read, or the socket cannot be made.
    pub fn estate(
        self,
        socket: &Path,
        options: &ServerOptions,
    ) -> Result<Option<Estate>, ServeError> {
        let begun = Instant::now();
        let ids = loop {
            let ids = self.absorb_the_dead().and_then(|()| machines_in(&self.held.path));
            let ids = ids.map_err(ServeError::at(KEEP, &self.held.path))?;
            let has_machines = |path: &PathBuf| machines_in(path).is_ok_and(|ids| !ids.is_empty());
            if !ids.is_empty() || begun.elapsed() >= STARTS || !self.others.iter().any(has_machines)
            {
                break ids;
            }
            thread::sleep(PAUSE);
        };
        if ids.is_empty() {
            return Ok(None);
        }
        let listener = match ListeningSocket::bind(socket, options.mode, options.group) {
            Err(ServeError::InUse { .. }) => None,
            bound => Some(bound?),
        };
        let mut connections = BTreeMap::new();
        ids.into_iter().for_each(|id| self.add(id, &mut connections));
        let fd = listener.map(ListeningSocket::into_fd).transpose();
        let socket = fd.map_err(ServeError::at("listen on", socket))?;
        let heirlooms = Heirlooms { socket, ..Heirlooms::default() };
        Ok(Some(Estate { recovery: Some(self), ..Estate::new(heirlooms, connections) }))
    }

    /// Takes a machine whose process has its userfaultfd still. `None` if the process has ended.
    fn recover(&self, id: u64) -> io::Result<Option<(u64, Connection)>> {
        let bytes = fs::read(self.machine(id))?;
        let (state, sent) = link::parse_titled::<State>(&bytes)?;
        let State { image, kept, number, started, boot } = state;
        if boot != self.boot {
            return Err(io::Error::other("the system was started again"));
        }
        let (pid, uid) = kept.process();
        let peer = match Peer::of_number(pid, uid, started) {
            Err(cause) if has_ended(&cause) => return Ok(None),
            peer => peer?,
        };
        let userfaultfd = match peer.descriptor(number) {
            Err(cause) if has_ended(&cause) => return Ok(None),
            userfaultfd => userfaultfd?,
        };
        // Without its file, nothing states what the machine gave back.
        let log_file = OpenOptions::new().read(true).write(true).open(self.log(id))?;
        // The stream went with the server, and nothing comes by it any more.
        let (stream, _) = UnixStream::pair()?;
        stream.set_nonblocking(true)?;
        let parts = [stream.into(), peer.into(), log_file.into(), userfaultfd];
        let found = Connection::of_the_dead(&kept, image, parts, sent)?;
        if found.1.known.id == id {
            Ok(Some(found))
        } else {
            Err(io::ErrorKind::InvalidData.into())
        }
    }
}

/// Removes what servers that were killed have left of folders without a machine, whatever their sockets were. One with a
/// machine is not even locked: the server that it belongs to may start just now.
fn remove_the_empty(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_none())
            && let Ok(Some(held)) = HeldFolder::hold(path)
        {
            held.remove();
        }
    }
}

/// Returns whether an error is that of a process which has ended.
fn has_ended(cause: &io::Error) -> bool {
    cause.kind() == io::ErrorKind::NotFound || cause.raw_os_error() == Some(libc::ESRCH)
}

/// Returns whether a machine that cannot be recovered for this reason may still be there, and be recovered later.
fn may_pass(cause: &io::Error) -> bool {
    let of_system =
        [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EPERM, libc::EACCES, libc::EIO];
    cause.raw_os_error().is_some_and(|error| of_system.contains(&error))
}

/// Returns whether a folder is this user's alone.
fn is_private(folder: &Path) -> io::Result<bool> {
    let (own, of) = (fs::metadata("/proc/self")?.uid(), fs::metadata(folder)?);
    Ok(of.uid() == own && of.mode() & 0o077 == 0)
}

/// Moves a file, also to another file system: at no time is a part of it at `to`. Returns whether it was there.
fn move_file(from: &Path, to: &Path) -> io::Result<bool> {
    let part = to.with_extension("part");
    let moved = fs::rename(from, to).or_else(|cause| match cause.kind() {
        io::ErrorKind::CrossesDevices => {
            let copied = fs::copy(from, &part).and_then(|_| fs::rename(&part, to));
            if copied.is_err() {
                // It takes room that may be what was missing.
                let _ = fs::remove_file(&part);
            }
            copied.and_then(|()| fs::remove_file(from))
        }
        _ => Err(cause),
    });
    match moved {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(false),
        moved => moved.map(|()| true),
    }
}

fn machine_name(id: u64) -> String {
    format!("{id:x}.machine")
}

fn log_name(id: u64) -> String {
    format!("{id:x}.log")
}

/// Returns the machines that are kept in a folder, also those of which a server that was killed has left a part.
fn machines_in(folder: &Path) -> io::Result<BTreeSet<u64>> {
    let mut ids = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let id = name.to_str().and_then(|name| name.split('.').next());
        ids.extend(id.and_then(|id| u64::from_str_radix(id, 16).ok()));
    }
    Ok(ids)
}

/// Gives up a machine that is kept in a folder, and its log.
fn discard_in(folder: &Path, id: u64) {
    let machine = folder.join(machine_name(id));
    // The machine first: with a log alone nothing is done.
    for path in [&machine, &machine.with_extension("part"), &folder.join(log_name(id))] {
        match fs::remove_file(path) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%cause, path = %path.display(), "what is kept of a machine stays");
            }
            _ => {}
        }
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
    let name: String =
        of_folder.map(|byte| if is_plain(byte) { char::from(*byte) } else { '-' }).collect();
    let (file, metadata) = (escaped(file.as_bytes(), b"-_"), fs::metadata(folder)?);
    Ok(format!("{name}.{file}.{:x}.{:x}", metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::connection::tests::{connection_with, process_with};

    /// Waits for a folder that no server has. A child that another test forked has its lock until it executes its program.
    fn until<T>(mut found: impl FnMut() -> Option<T>) -> T {
        let give_up = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(found) = found() {
                return found;
            }
            assert!(Instant::now() < give_up, "the folder stays locked");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn connection(id: u64) -> Connection {
        let (near, _far) = UnixStream::pair().unwrap();
        let peer = Peer::of(&near).unwrap();
        let mut connection = Connection::new(near, peer);
        connection.known.id = id;
        connection
    }

    fn connection_with_a_log(id: u64) -> Connection {
        let mut connection = connection(id);
        connection.log_file = Some(fs::File::open("/dev/null").unwrap().into());
        connection
    }

    #[test]
    fn what_is_kept_of_machines_that_have_ended_is_discarded_and_the_rest_stays() {
        let folder = std::env::temp_dir().join(format!("uzone-recovery-{}", std::process::id()));
        let recovery = Recovery::open(&folder, Path::new("/tmp/s")).unwrap();
        let names = ["a1.machine", "a1.log", "b2.machine", "b2.part", "b2.log", "c3.log", "other"];
        for name in names {
            fs::write(recovery.held.path.join(name), "").unwrap();
        }
        let mut connections = BTreeMap::from([(1, connection_with_a_log(0xa1))]);
        recovery.complete(&mut connections);
        assert_eq!(connections.len(), 1, "nothing was recovered");
        let left = fs::read_dir(&recovery.held.path).unwrap();
        let left: BTreeSet<_> = left.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["a1.log", "a1.machine", "other"].map(Into::into).into());
        // A folder with machines stays for the next server, and an empty one goes.
        let part = recovery.held.path.clone();
        drop(recovery);
        assert!(part.exists());
        let again = until(|| {
            let again = Recovery::open(&folder, Path::new("/tmp/s")).unwrap();
            Some(again).filter(|again| again.held.path == part)
        });
        for entry in fs::read_dir(&part).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        drop(again);
        assert!(!part.exists());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_machine_that_has_ended_is_given_up_without_an_error() {
        let folder = std::env::temp_dir().join(format!("uzone-ended-{}", std::process::id()));
        let recovery = Recovery::open(&folder, Path::new("/tmp/s")).unwrap();
        // Open files are compared: here a pipe.
        let (known, _near) = io::pipe().unwrap();
        let (mut process, peer) = process_with(&known);
        let mut connection = connection_with(peer, known.into());
        recovery.keep_machine("image", 1, &mut connection);
        let id = connection.known.id;
        assert!(recovery.recover(id).unwrap().is_some(), "it runs");
        process.kill().unwrap();
        // Before and after its parent has waited for it.
        for _ in 0..2 {
            until(|| recovery.recover(id).unwrap().is_none().then_some(()));
            process.wait().unwrap();
        }
        drop(recovery);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_server_has_its_folder_alone_and_gets_what_dead_ones_have_left() {
        let folder = std::env::temp_dir().join(format!("uzone-held-{}", std::process::id()));
        let open = || Recovery::open(&folder, Path::new("/tmp/s")).unwrap();
        let (first, second) = (open(), open());
        assert_ne!(first.held.path, second.held.path, "the first lives");
        let keeps = |recovery: &Recovery, id: u64| {
            let mut connection = connection(id);
            recovery.make_log(&mut connection).unwrap();
            fs::write(recovery.machine(id), "").unwrap();
        };
        keeps(&first, 1);
        keeps(&second, 2);
        // A worker has the lock as well, and goes on after its keeper.
        let lock = first.held.as_fd().try_clone_to_owned().unwrap();
        let worker = HeldFolder::of(first.held.path.clone(), lock);
        drop(first);
        let third = open();
        third.absorb_the_dead().unwrap();
        assert_eq!(machines_in(&third.held.path).unwrap(), BTreeSet::new(), "both live");
        drop((worker, second));
        until(|| {
            third.absorb_the_dead().unwrap();
            (machines_in(&third.held.path).unwrap() == BTreeSet::from([1, 2])).then_some(())
        });
        assert!(third.log(1).exists() && third.machine(2).exists());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "the folders of the others are gone");
        // What a killed server of another socket has left goes, unless it has a machine.
        for (name, is_empty) in [("other", true), ("another", false)] {
            fs::create_dir(folder.join(name)).unwrap();
            if !is_empty {
                fs::write(folder.join(name).join("3.machine"), "").unwrap();
            }
        }
        drop(open());
        assert!(!folder.join("other").exists() && folder.join("another").exists());
        // The next one has a folder that no server has, and goes on there.
        drop(third);
        let first = folder.join(name_of(Path::new("/tmp/s")).unwrap());
        until(|| (open().held.path == first).then_some(()));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn machines_are_taken_from_another_folder_wherever_the_server_before_was_killed_in_that() {
        let folders = ["/dev/shm", "/var/tmp"]
            .map(|root| Path::new(root).join(format!("uzone-absorbed-{}", std::process::id())));
        let open = |folder: &Path| Recovery::open(folder, Path::new("/tmp/s")).unwrap();
        // In the same folder, in another one, and on another file system: what has been moved.
        let [from, to] = &folders;
        let other = from.with_extension("other");
        for (from, to) in [(from, from), (from, &other), (from, to)] {
            for moved in 0..5 {
                let before = open(from);
                let is_apart = before.held.path.parent() != Some(to);
                fs::write(before.log(1), "log").unwrap();
                fs::write(before.machine(1), "machine").unwrap();
                let next = open(to);
                next.will_absorb(&before.held.path).unwrap();
                let copied = next.machine(1).with_extension("part");
                match moved {
                    0 => {}
                    1 => fs::write(&copied, "lo").unwrap(),
                    2 => fs::write(next.log(1), "log").unwrap(),
                    _ => assert!(move_file(&before.log(1), &next.log(1)).unwrap()),
                }
                match moved {
                    3 => fs::write(&copied, "mach").unwrap(),
                    // What was kept of it since is newer.
                    4 => fs::write(next.machine(1), "newer").unwrap(),
                    _ => {}
                }
                drop((before, next));
                // A child that another test forked may have a lock.
                until(|| {
                    let last = open(to);
                    last.absorb_the_dead().unwrap();
                    let machine = fs::read_to_string(last.machine(1)).ok()?;
                    assert_eq!(machine, if moved == 4 { "newer" } else { "machine" }, "{moved}");
                    assert_eq!(fs::read_to_string(last.log(1)).unwrap(), "log", "{moved}");
                    last.discard(1);
                    (fs::read_dir(&last.held.path).unwrap().count() == 0).then_some(())
                });
                assert_eq!(fs::read_dir(to).unwrap().count(), 0, "{moved}");
                assert!(!is_apart || fs::read_dir(from).unwrap().count() == 0, "{moved}");
            }
        }
        for folder in [from, to, &other] {
            fs::remove_dir(folder).unwrap();
        }
    }

    #[test]
    fn machines_that_a_server_has_which_does_not_start_after_all_are_taken_by_another() {
        let folder = std::env::temp_dir().join(format!("uzone-starts-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let socket = folder.join("s");
        let (kept, options) = (folder.join("kept"), ServerOptions::default());
        // A child that another test forked may have the lock for longer.
        until(|| {
            let first = Recovery::open(&kept, &socket).unwrap();
            fs::write(first.log(1), "").unwrap();
            fs::write(first.machine(1), "").unwrap();
            let second = Recovery::open(&kept, &socket).unwrap();
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(50));
                    drop(first);
                });
                second.estate(&socket, &options).unwrap()
            })
        });
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

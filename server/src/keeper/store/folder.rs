//! Records of VMs in a folder, for a server without a service manager: [`Folder`].
//!
//! ```text
//! uzone-recover/                 of one user; several servers may share it
//!     4f3a…/                     of one server, with a random name
//!         server                 its socket, image, keeper and worker
//!         totals
//!         ID.machine, ID.log     of each VM
//! ```
//!
//! The file `server` names the owner of a folder. A server that starts claims the folders of its socket whose keeper has
//! ended: it ends their worker, and writes its own number into `server`. No file is moved, so a server that is killed
//! meanwhile leaves everything to the next one. A keeper that lives has its VMs, also if it drains and another server has
//! the socket.
//!
//! The monitor has its userfaultfd still: the server finds it there by its inode. The start time of a process distinguishes
//! it from a later one with the same number. A worker cannot write in the folder.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uzone_os::peer::Peer;
use uzone_os::uffd::EventLog;

use super::{Left, Origin, Record, end};
use crate::machine::Machine;
use crate::messages;
use crate::metrics::Totals;
use crate::process;
use crate::socket::{escaped, turn_in};

/// The file with the identity of this start of the system.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";
const SERVER: &str = "server";
const TOTALS: &str = "totals";
const PAGE: usize = 4096;

/// The folders of a server: its own, and the ones that it has claimed.
#[derive(Debug)]
pub(crate) struct Folder {
    root: PathBuf,
    /// Never empty; new records go to the first.
    own: Vec<PathBuf>,
    server: Server,
}

/// A process, by its number and its start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    pid: u32,
    started: u64,
}

/// The owner of a folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Server {
    socket: String,
    image: String,
    boot: String,
    /// `None` once it has ended by itself.
    keeper: Option<Process>,
    worker: Option<Process>,
}

impl Process {
    fn of(peer: &Peer) -> io::Result<Self> {
        Ok(Self { pid: peer.pid(), started: process::started(peer)? })
    }

    /// Returns the process, or `None` if it has ended.
    fn open(self) -> io::Result<Option<Peer>> {
        unless_ended(process::of_number(self.pid, 0, self.started))
    }
}

impl Server {
    fn read(folder: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&fs::read(folder.join(SERVER))?)?)
    }

    /// Writes it in its place, which takes no room on a full disk. A page is written as a whole, also if the writer is
    /// killed.
    fn write(&self, folder: &Path) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(self)?;
        bytes.resize(bytes.len().max(PAGE), b' ');
        let path = folder.join(SERVER);
        match OpenOptions::new().write(true).open(&path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => replace(&path, &bytes),
            file => file?.write_all_at(&bytes, 0),
        }
    }
}

impl Drop for Folder {
    /// Removes the folders, unless they have VMs, which the next server of the socket takes.
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The worker goes on without this process.
            return;
        }
        (self.server.keeper, self.server.worker) = (None, None);
        let has_any = self.own.iter().any(|folder| has_vms(folder));
        for folder in &self.own {
            if has_any {
                // The process ends, which tells the same.
                let _ = self.server.write(folder);
            } else {
                discard(folder);
            }
        }
    }
}

impl Folder {
    /// Makes a folder for the server of `socket` in `root`. Only its owner may read it.
    pub(crate) fn open(root: &Path, socket: &Path) -> io::Result<Self> {
        let root = std::path::absolute(root)?;
        DirBuilder::new().recursive(true).mode(0o700).create(&root)?;
        // A VM is recovered by any descriptor of any process that a record names.
        let own = fs::metadata("/proc/self")?.uid();
        let outer = fs::metadata(&root)?;
        // In a folder that others write to, the sticky bit keeps them from renaming it.
        let is_kept = [0, own].contains(&outer.uid())
            && (outer.mode() & 0o022 == 0 || outer.mode() & 0o1000 != 0);
        if !is_kept {
            let reason =
                "other users can write to it: it must be this user's or root's, with mode 700";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        let keeper = Process::of(&Peer::of_number_now(std::process::id())?)?;
        let socket = std::path::absolute(socket)?;
        let server = Server {
            socket: escaped(&socket),
            image: String::new(),
            boot: fs::read_to_string(BOOT)?.trim().to_owned(),
            keeper: Some(keeper),
            worker: None,
        };
        // Another server takes a folder without an owner for one of a server that was killed.
        let _turn = turn_in(Some(&root));
        let folder = root.join(format!("{:016x}", RandomState::new().build_hasher().finish()));
        DirBuilder::new().mode(0o700).create(&folder)?;
        let made = Self { root, own: vec![folder.clone()], server };
        made.server.write(&folder)?;
        // Not all file systems can promise room for a log.
        let log = made.new_file(&folder.join("probe.part"))?;
        EventLog::in_file(log.into(), 1, 1)?;
        fs::remove_file(folder.join("probe.part"))?;
        Ok(made)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    fn new_file(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).append(true).create_new(true).mode(0o600).open(path)
    }

    fn folder(&self) -> io::Result<&Path> {
        Ok(self.own.first().ok_or(io::ErrorKind::NotFound)?)
    }

    pub(super) fn put(&self, image: &str, session: u64, machine: &mut Machine) -> io::Result<()> {
        let userfaultfd = machine.userfaultfd().ok_or(io::ErrorKind::InvalidData)?;
        let origin = Origin {
            inode: process::inode_of(userfaultfd)?,
            started: process::started(&machine.peer)?,
        };
        // A server without the right to take it states so at the start of the VM.
        drop(process::userfaultfd(&machine.peer, origin.inode)?);
        let folder = self.folder()?;
        let [log, path] = files_of(folder, machine.id);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        machine.log = Some(options.open(log)?.into());
        let part = path.with_extension("part");
        let mut record = self.new_file(&part)?;
        record.write_all(&Record::new(image, session, machine, Some(origin)).bytes(machine)?)?;
        fs::rename(part, path)?;
        machine.record = Some(record);
        Ok(())
    }

    pub(super) fn remove(&self, id: u64) {
        self.own.iter().for_each(|folder| discard_in(folder, id));
    }

    pub(super) fn put_worker(&mut self, worker: &Peer) -> io::Result<()> {
        self.server.worker = Some(Process::of(worker)?);
        self.own.iter().try_for_each(|folder| self.server.write(folder))
    }

    pub(super) fn put_totals(&self, totals: &Totals) {
        let written = self.folder().and_then(|folder| {
            replace(&folder.join(TOTALS), &serde_json::to_vec(totals)?)?;
            // The totals of the other folders are in it.
            self.own[1..].iter().try_for_each(|folder| remove(&folder.join(TOTALS)))
        });
        if let Err(cause) = written {
            tracing::debug!(%cause, "cannot store the totals");
        }
    }

    /// Returns the folders of this socket whose keeper has ended, and their owners.
    fn left(&self) -> io::Result<Vec<(PathBuf, Server)>> {
        let mut left = Vec::new();
        for entry in fs::read_dir(&self.root)? {
            let path = entry?.path();
            if self.own.contains(&path) {
                continue;
            }
            let server = match Server::read(&path) {
                Ok(server) => server,
                // Another user's, or it has just been made.
                Err(_) => continue,
            };
            let lives = |keeper: Process| keeper.open().map(|keeper| keeper.is_some());
            let is_alive = server.boot == self.server.boot
                && server.keeper.map(lives).transpose()?.unwrap_or(false);
            if server.socket == self.server.socket && !is_alive {
                left.push((path, server));
            }
        }
        Ok(left)
    }

    /// Removes the folders that servers had just made when they were killed.
    fn remove_the_empty(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.root)? {
            // It fails for all others.
            let _ = fs::remove_dir(entry?.path());
        }
        Ok(())
    }

    pub(super) fn has_machines(&self) -> bool {
        self.left().is_ok_and(|left| left.iter().any(|(path, _)| has_vms(path)))
    }

    pub(super) fn take_all(&mut self, image: &str, has_socket: bool) -> io::Result<Left> {
        self.server.image = image.to_owned();
        let turn = turn_in(Some(&self.root));
        let mut all = Left::default();
        self.remove_the_empty()?;
        let left = self.left()?;
        for (path, server) in left {
            if !has_socket && server.image != image {
                continue;
            }
            if !is_private(&path)? {
                let reason = "other users can write to it: it must be this user's, with mode 700";
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
            }
            if server.boot != self.server.boot {
                discard(&path);
                continue;
            }
            if let Some(worker) = server.worker.map(Process::open).transpose()?.flatten() {
                end(&worker)?;
            }
            self.server.write(&path)?;
            if let Ok(totals) = fs::read(path.join(TOTALS)) {
                all.totals.add(serde_json::from_slice(&totals).unwrap_or_default());
            }
            self.own.push(path);
        }
        self.own.iter().try_for_each(|folder| self.server.write(folder))?;
        drop(turn);
        for folder in self.own.clone() {
            for id in machines_in(&folder)? {
                all.machines.extend(self.recover(&folder, id));
            }
        }
        let all_own = std::mem::take(&mut self.own).into_iter();
        let (with_vms, mut empty): (Vec<_>, Vec<_>) = all_own.partition(|folder| has_vms(folder));
        // The new one goes if it is not needed.
        self.own = if with_vms.is_empty() { vec![empty.remove(0)] } else { with_vms };
        empty.iter().for_each(|folder| discard(folder));
        Ok(all)
    }

    /// Returns a VM, unless it has ended, or waits for the next start.
    fn recover(&self, folder: &Path, id: u64) -> Option<(u64, Machine)> {
        match try_recover(folder, id) {
            Ok(Some(recovered)) => return Some(recovered),
            // It has ended, and waits for nothing.
            Ok(None) => discard_in(folder, id),
            Err(cause) if may_pass(&cause) => {
                let path = folder.display();
                tracing::warn!(
                    %cause, %path,
                    "cannot resume a VM of the previous server now; will retry at the next start"
                );
            }
            Err(cause) => {
                tracing::warn!(%cause, "cannot resume a VM of the previous server");
                discard_in(folder, id);
            }
        }
        None
    }
}

/// Takes a VM whose process has its userfaultfd still. `None` if the process has ended.
fn try_recover(folder: &Path, id: u64) -> io::Result<Option<(u64, Machine)>> {
    let [log, path] = files_of(folder, id);
    let bytes = fs::read(&path)?;
    let (record, sent) = messages::parse_titled::<Record>(&bytes)?;
    let Some(Origin { inode, started }) = record.origin else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    if record.id != id {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let Some(peer) = unless_ended(process::of_number(record.pid, record.uid, started))? else {
        return Ok(None);
    };
    // A process that has closed it waits for nothing either.
    let Some(userfaultfd) = unless_ended(process::userfaultfd(&peer, inode))? else {
        return Ok(None);
    };
    // Without its file, nothing states which pages the VM gave back.
    let log = OpenOptions::new().read(true).write(true).open(log)?;
    // The stream ended with the earlier server.
    let (stream, _) = UnixStream::pair()?;
    stream.set_nonblocking(true)?;
    let mut machine = Machine::recovered(stream, peer, userfaultfd, log, sent)?;
    let session = record.session;
    record.complete(&mut machine, OpenOptions::new().append(true).open(path)?);
    Ok(Some((session, machine)))
}

/// Returns a process or a descriptor of it, or `None` if the process has ended.
fn unless_ended<T>(opened: io::Result<T>) -> io::Result<Option<T>> {
    match opened {
        Err(cause)
            if cause.kind() == io::ErrorKind::NotFound
                || cause.raw_os_error() == Some(libc::ESRCH) =>
        {
            Ok(None)
        }
        opened => opened.map(Some),
    }
}

/// Returns whether a VM that cannot be recovered for this reason may still be there, and be recovered later.
fn may_pass(cause: &io::Error) -> bool {
    let of_system =
        [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EPERM, libc::EACCES, libc::EIO];
    cause.raw_os_error().is_some_and(|error| of_system.contains(&error))
}

/// Returns whether only this user has rights to a folder.
fn is_private(folder: &Path) -> io::Result<bool> {
    let (own, of) = (fs::metadata("/proc/self")?.uid(), fs::metadata(folder)?);
    Ok(of.uid() == own && of.mode() & 0o077 == 0)
}

/// Writes a file in the place of another one: at no time is a part of it there.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let part = path.with_extension("part");
    fs::write(&part, bytes)?;
    fs::rename(part, path)
}

/// Removes a file that need not be there.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Returns the log and the record of a VM.
fn files_of(folder: &Path, id: u64) -> [PathBuf; 2] {
    ["log", "machine"].map(|kind| folder.join(format!("{id:x}.{kind}")))
}

/// Returns the VMs in a folder, also one of which a server that was killed has left a part.
fn machines_in(folder: &Path) -> io::Result<Vec<u64>> {
    let mut ids = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let id = name.to_str().and_then(|name| name.split_once('.')).map(|(id, _)| id);
        ids.extend(id.and_then(|id| u64::from_str_radix(id, 16).ok()));
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// Returns whether a folder has a VM, or cannot be read.
fn has_vms(folder: &Path) -> bool {
    machines_in(folder).map_or(true, |ids| !ids.is_empty())
}

/// Removes a VM from a folder, the record first: a log alone means nothing.
fn discard_in(folder: &Path, id: u64) {
    let [log, machine] = files_of(folder, id);
    for path in [&machine, &machine.with_extension("part"), &log] {
        if let Err(cause) = remove(path) {
            tracing::warn!(%cause, path = %path.display(), "cannot delete the recovery record of a VM");
        }
    }
}

/// Removes a folder with all that servers have put there. If that fails, the next server does it.
fn discard(folder: &Path) {
    for id in machines_in(folder).unwrap_or_default() {
        discard_in(folder, id);
    }
    for name in [TOTALS, "totals.part", "server.part", SERVER] {
        let _ = fs::remove_file(folder.join(name));
    }
    let _ = fs::remove_dir(folder);
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use uzone_os::uffd::{Features, KernelFaults, Uffd};

    use super::*;

    #[test]
    fn a_process_is_recovered_by_any_descriptor_of_its_userfaultfd_and_not_without_one() {
        let opened = Uffd::open(Features::NONE, Features::NONE, KernelFaults::IfAllowed);
        let Ok(uffd) = opened.map(|uffd| uffd.as_fd().try_clone_to_owned().unwrap()) else {
            println!("skipped: recovery by any descriptor: this user may have no userfaultfd");
            return;
        };
        let root = std::env::temp_dir().join(format!("uzone-folder-{}", std::process::id()));
        let folder = Folder::open(&root, Path::new("/run/s")).unwrap();
        let (stream, _far) = UnixStream::pair().unwrap();
        let peer = Peer::of(&stream).unwrap();
        let pidfd = peer.as_fd().try_clone_to_owned().unwrap();
        let offer = Machine::new(stream.try_clone().unwrap(), peer).offer(1);
        let other = uffd.try_clone().unwrap();
        let fds = vec![stream.into(), pidfd, uffd];
        let mut machine = Machine::of_offer(offer, fds, b"[]".to_vec()).unwrap();
        folder.put("image", 1, &mut machine).unwrap();
        let (own, id) = (folder.folder().unwrap().to_owned(), machine.id);
        // The number that it had when it was sent is free, or another file's.
        drop(machine);
        let is_recovered = || try_recover(&own, id).unwrap().is_some();
        let by_another_number = is_recovered();
        drop(other);
        let without = is_recovered();
        folder.remove(id);
        drop(folder);
        fs::remove_dir(&root).unwrap();
        assert_eq!((by_another_number, without), (true, false));
    }
}

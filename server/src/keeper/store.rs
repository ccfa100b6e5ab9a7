//! Records of VMs that outlive both processes of a server: [`Store`]. The next server takes all of them when it starts.
//!
//! The record of a VM is a file: a line of JSON ([`Record`]), and behind it the message of its monitor as far as it came. It
//! is only ever appended to, so a keeper that is killed leaves a beginning of the message. The log of what the VM gave back
//! is another file, which its workers write one after the other. In a folder, the files have names and the next server takes
//! the userfaultfd from the monitor ([`folder`]); a service manager keeps all descriptors ([`systemd`]).

pub(crate) mod folder;
pub(crate) mod systemd;

use std::fs::File;
use std::io::{self, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use uzone_os::memory_file;
use uzone_os::peer::Peer;
use uzone_os::uffd::EventSet;

use self::folder::Folder;
use self::systemd::Systemd;
use crate::machine::Machine;
use crate::messages;
use crate::metrics::Totals;
use crate::process;
use crate::status::nanoseconds;

/// The longest time that a process takes to end by a signal that it cannot catch.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// The records of VMs of a server.
pub(crate) enum Store {
    /// None: VMs wait for ever if both processes are killed.
    None,
    Folder(Folder),
    Systemd(Systemd),
}

/// Everything that earlier servers have left.
#[derive(Default)]
pub(crate) struct Left {
    /// The VMs, by the numbers of their sessions.
    pub(crate) machines: Vec<(u64, Machine)>,
    pub(crate) totals: Totals,
}

/// The first line of a record.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// The identity of the image.
    image: String,
    session: u64,
    pid: u32,
    uid: u32,
    id: u64,
    /// The time of its connection, in nanoseconds since 1970.
    connected_ns: u64,
    /// The userfaultfd in the process, for a folder.
    origin: Option<Origin>,
}

/// A userfaultfd that a process has.
#[derive(Debug, Serialize, Deserialize)]
struct Origin {
    /// Its inode, which no other userfaultfd has.
    inode: u64,
    /// The start time of the process.
    started: u64,
}

impl Record {
    fn new(image: &str, session: u64, machine: &Machine, origin: Option<Origin>) -> Self {
        Self {
            image: image.to_owned(),
            session,
            pid: machine.peer.pid(),
            uid: machine.peer.uid(),
            id: machine.id,
            connected_ns: now_ns().saturating_sub(nanoseconds(machine.since.elapsed())),
            origin,
        }
    }

    /// Returns the bytes of a new record.
    fn bytes(&self, machine: &Machine) -> io::Result<Vec<u8>> {
        messages::titled(self, &machine.bytes)
    }

    /// Gives a recovered VM the facts of its record.
    fn complete(self, machine: &mut Machine, record: File) {
        let age = Duration::from_nanos(now_ns().saturating_sub(self.connected_ns));
        machine.since = Instant::now().checked_sub(age).unwrap_or_else(Instant::now);
        (machine.id, machine.image, machine.record) = (self.id, Some(self.image), Some(record));
    }
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, nanoseconds)
}

impl Store {
    /// Returns the name of the store, by which two servers know that they have the same one.
    pub(crate) fn name(&self) -> Option<String> {
        match self {
            Self::None => None,
            Self::Folder(folder) => Some(folder.root().display().to_string()),
            Self::Systemd(_) => Some("systemd".to_owned()),
        }
    }

    /// Makes the log and the record of a VM, and adds the bytes that came since the last call. A VM without room is served
    /// without a record.
    pub(crate) fn put(&self, image: &str, session: u64, machine: &mut Machine) {
        if !machine.may_be_a_vm() || machine.log.is_some() && machine.record.is_none() {
            return;
        }
        if let Err(cause) = self.try_put(image, session, machine) {
            self.serve_without_record(session, machine, &cause);
        }
    }

    fn try_put(&self, image: &str, session: u64, machine: &mut Machine) -> io::Result<()> {
        if let Some(record) = &mut machine.record {
            record.write_all(&machine.bytes[machine.recorded..])?;
            machine.recorded = machine.bytes.len();
            return Ok(());
        }
        match self {
            Self::None => machine.log = Some(new_log()?.into()),
            Self::Folder(folder) => folder.put(image, session, machine)?,
            Self::Systemd(systemd) => systemd.put(image, session, machine)?,
        }
        machine.recorded = machine.bytes.len();
        Ok(())
    }

    /// Gives a VM up that is served on: its log has no room, or its record cannot be made.
    pub(crate) fn serve_without_record(
        &self,
        session: u64,
        machine: &mut Machine,
        cause: &io::Error,
    ) {
        self.remove(machine);
        machine.record = None;
        // Without a descriptor for it, the worker makes a log that ends with it.
        machine.log = new_log().ok().map(Into::into);
        if !matches!(self, Self::None) {
            let help = match cause.kind() {
                io::ErrorKind::PermissionDenied => {
                    "; run the server as the VM's user, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
                }
                _ => "",
            };
            let pid = machine.peer.pid();
            tracing::warn!(%cause, "session {session} (pid {pid}): serving without crash recovery{help}");
        }
    }

    /// Removes a VM.
    pub(crate) fn remove(&self, machine: &Machine) {
        match self {
            Self::Folder(folder) => folder.remove(machine.id),
            Self::Systemd(systemd) if machine.record.is_some() => systemd.remove(machine.id),
            Self::None | Self::Systemd(_) => {}
        }
    }

    /// Stores the worker, which the next server ends.
    pub(crate) fn put_worker(&mut self, worker: &Peer) -> io::Result<()> {
        match self {
            Self::None => Ok(()),
            Self::Folder(folder) => folder.put_worker(worker),
            Self::Systemd(systemd) => {
                systemd.put_worker(worker);
                Ok(())
            }
        }
    }

    /// Stores the totals of the server.
    pub(crate) fn put_totals(&self, totals: &Totals) {
        match self {
            Self::None => {}
            Self::Folder(folder) => folder.put_totals(totals),
            Self::Systemd(systemd) => systemd.put_totals(totals),
        }
    }

    /// Takes everything from servers of the same socket that have ended, and ends their workers first. A server without
    /// the socket takes the VMs of its own image alone.
    pub(crate) fn take_all(&mut self, image: &str, has_socket: bool) -> io::Result<Left> {
        match self {
            Self::None => Ok(Left::default()),
            Self::Folder(folder) => folder.take_all(image, has_socket),
            Self::Systemd(systemd) => systemd.take_all(),
        }
    }

    /// Returns whether VMs may wait for a server.
    pub(crate) fn has_machines(&self) -> bool {
        match self {
            Self::None => false,
            Self::Folder(folder) => folder.has_machines(),
            Self::Systemd(systemd) => systemd.has_machines(),
        }
    }
}

/// Makes a log in memory.
fn new_log() -> io::Result<File> {
    memory_file("uzone-events", &[])
}

/// Ends a process, and waits until none of its threads runs.
fn end(process: &Peer) -> io::Result<()> {
    process::kill(process)?;
    let (set, mut ready) = (EventSet::new()?, Vec::new());
    set.add(process, 0)?;
    set.wait(&mut ready, Some(ENDS_WITHIN))?;
    match ready.is_empty() {
        true => Err(io::ErrorKind::TimedOut.into()),
        false => Ok(()),
    }
}

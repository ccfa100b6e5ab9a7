//! The memory of a running VM, for an image of it: [`SessionMemory`], which the keeper opens.
//!
//! The caller pauses the VM. [`SessionMemory::protect`] has the worker protect all of its memory against writing; then
//! the VM may go on, and its pages are read while the worker keeps a page before the VM writes to it
//! ([`AdoptedMemory::capture`]). [`SessionMemory::copy`] copies the pages first, for a server that cannot do that. Both
//! give [`CapturedPages`].
//!
//! The kernel's page table states which pages are present; the log of the session states which pages were given back. All
//! others are pages of the image, and are not read.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use crate::message_socket::MessageSocket;
use crate::process;
use uzone_fault::{AdoptedMemory, KeptPages, RemoteRegion};
use uzone_os::pagemap_scan;
use uzone_os::uffd::LoggedEvents;

use super::pages::{CapturedPages, PIECE, Run};
use crate::control::{self, control_path};
use crate::error::ServeError;
use crate::machine::Machine;
use crate::messages::{self, CaptureReply, CaptureRequest, Titled};
use crate::worker::protocol;

/// The longest time in which a worker protects the memory: another one may have to be started.
const PROTECT_WITHIN: Duration = Duration::from_secs(10);

/// The answer of a keeper: the identity of the image, with which the memory, its page table and its log come along; or the
/// number and the text of an error.
type Shown = Result<String, (Option<i32>, String)>;

/// Hands the memory of a VM to a client that asked for it.
pub(crate) fn show(
    to: &MessageSocket,
    image: &str,
    session: u64,
    machine: Option<&Machine>,
) -> io::Result<()> {
    let refuse = |errno, reason| messages::send(to, &Shown::Err((errno, reason)), &[]);
    let Some(machine) = machine.filter(|machine| !machine.is_new()) else {
        return refuse(None, format!("there is no session {session}"));
    };
    let (memory, pagemap) = match process::open_memory(&machine.peer) {
        Ok(opened) => opened,
        Err(cause) => {
            let pid = machine.peer.pid();
            let reason = format!(
                "the keeper may not read the memory of process {pid} ({cause}): run the server as its user, or with \
                 CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
            );
            return refuse(cause.raw_os_error(), reason);
        }
    };
    let log = machine.log.as_ref().map(AsFd::as_fd);
    let fds: Vec<_> = [memory.as_fd(), pagemap.as_fd()].into_iter().chain(log).collect();
    messages::send_with(to, &Shown::Ok(image.to_owned()), &fds, &machine.bytes)
}

/// The memory of a VM that is served.
#[derive(Debug)]
pub struct SessionMemory {
    image: String,
    regions: Vec<RemoteRegion>,
    /// Whether a page of a file is a page of the image that was not written.
    is_shared: bool,
    /// Whether the kernel notes written pages.
    is_tracked: bool,
    /// The pages that it gave back, by their bytes of the image.
    removed: Vec<Range<u64>>,
    memory: File,
    pagemap: File,
    /// The way to the worker, if the keeper passes it on.
    worker: MessageSocket,
}

impl SessionMemory {
    /// Asks the server that listens on `socket` for the memory of a session. The VM must be paused before this call, and
    /// until [`SessionMemory::protect`] or [`SessionMemory::copy`] has returned.
    ///
    /// # Errors
    /// [`ServeError::Ask`] if there is no such server or session, or the keeper may not read the memory.
    pub fn open(socket: &Path, session: u64) -> Result<Self, ServeError> {
        let path = control_path(socket);
        Self::ask(&path, session).map_err(|cause| ServeError::Ask { path, cause })
    }

    fn ask(path: &Path, session: u64) -> io::Result<Self> {
        let keeper = control::connect(path, &format!("memory {session}\n"))?;
        let Titled { title, fds, bytes, .. } = messages::receive::<Shown>(&keeper)?;
        let image = title.map_err(|(errno, reason)| {
            let kind = errno.map(|errno| io::Error::from_raw_os_error(errno).kind());
            io::Error::new(kind.unwrap_or(io::ErrorKind::Other), reason)
        })?;
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or(io::ErrorKind::InvalidData);
        let (memory, pagemap) = (next()?.into(), next()?.into());
        let of = protocol::memory_of(&bytes).ok_or(io::ErrorKind::InvalidData)?;
        let marks = AdoptedMemory::marks(&of.regions).map_err(io::Error::other)?;
        let log = fds.next().map(|log| LoggedEvents::read_trusted(log, marks)).transpose()?;
        let removed = log.map(|log| AdoptedMemory::given_back(&of.regions, &log)).transpose();
        let removed = removed.map_err(io::Error::other)?.unwrap_or_default();
        let (is_shared, is_tracked) = (of.is_shared(), of.is_tracked());
        // Further messages are for the worker, if the keeper passes the socket on.
        let (regions, worker) = (of.regions, keeper);
        Ok(Self { image, regions, is_shared, is_tracked, removed, memory, pagemap, worker })
    }

    /// Returns the identity of the image that serves it: the root hash of a packed image.
    #[must_use]
    pub fn image(&self) -> &str {
        &self.image
    }

    /// Returns whether the kernel notes written pages: only these are in the image, and [`SessionMemory::copy`] copies
    /// them.
    #[must_use]
    pub fn is_tracked(&self) -> bool {
        self.is_tracked
    }

    /// Has the worker keep the present pages before they are written to. When it returns, the VM may go on; its pages are
    /// read as they were at that moment, until [`CapturedPages::finish`].
    ///
    /// # Errors
    /// The reason why the server cannot do that, and the memory, to be copied.
    pub fn protect(self) -> Result<CapturedPages, (Box<Self>, String)> {
        match self.try_protect() {
            Ok((kept, runs)) => {
                let Self { memory, removed, worker, .. } = self;
                Ok(CapturedPages::live(memory, removed, runs, kept, worker))
            }
            Err(cause) => {
                let reason = match cause.kind() {
                    io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe => {
                        "its worker has ended".to_owned()
                    }
                    _ => uzone_os::with_causes(&cause),
                };
                Err((Box::new(self), reason))
            }
        }
    }

    fn try_protect(&self) -> io::Result<(KeptPages, Vec<Run>)> {
        // First: a page that comes while the memory is being protected is a page of the image.
        let runs = self.runs()?;
        let kept = KeptPages::new(&self.regions)?;
        runs.iter().try_for_each(|run| kept.want(run.bytes.clone()))?;
        let fds = [self.memory.as_fd(), kept.as_fd()];
        messages::send(&self.worker, &CaptureRequest::Protect, &fds)?;
        let reply = messages::receive_within(&self.worker, PROTECT_WITHIN);
        let reply = reply.map_err(|cause| match cause.kind() {
            io::ErrorKind::TimedOut => {
                let reason =
                    format!("no worker has protected its memory within {PROTECT_WITHIN:?}");
                io::Error::new(cause.kind(), reason)
            }
            _ => cause,
        });
        match reply?.title {
            CaptureReply::Begun(Ok(())) => Ok((kept, runs)),
            CaptureReply::Begun(Err(reason)) => Err(io::Error::other(reason)),
            CaptureReply::Hurry | CaptureReply::Ended(_) => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Copies the pages that there are, on as many threads. When it returns, the VM may go on.
    ///
    /// # Errors
    /// The error of the system: the process has ended, a page of it is bad, or there is no memory for the
    /// copy.
    pub fn copy(self, threads: usize) -> io::Result<CapturedPages> {
        let runs = self.runs()?;
        CapturedPages::copied(self.memory, self.removed, runs, threads)
    }

    /// Returns the runs of the pages that are read, by their bytes of the image: the present pages, or the written ones
    /// where these are noted.
    fn runs(&self) -> io::Result<Vec<Run>> {
        let (mut runs, mut found, mut at) = (Vec::new(), Vec::new(), 0);
        for region in &self.regions {
            let start = region.start.get();
            let addresses = start..start + region.len.get();
            match self.is_tracked {
                true => pagemap_scan::written_at(&self.pagemap, addresses, &mut found)?,
                // A page of the server's file was not written to.
                false => {
                    let no_files = self.is_shared;
                    pagemap_scan::present_at(&self.pagemap, addresses, no_files, &mut found)?;
                }
            }
            for pages in found.drain(..) {
                let mut address = pages.start;
                while address < pages.end {
                    let len = (pages.end - address).min(PIECE);
                    let offset = region.offset + (address - start);
                    runs.push(Run { bytes: offset..offset + len, address, at });
                    (address, at) = (address + len, at + len);
                }
            }
        }
        runs.sort_unstable_by_key(|run| run.bytes.start);
        Ok(runs)
    }
}

//! The memory of a machine as it is now, for an image of it: [`SessionMemory`], opened through the keeper. A
//! keeper that may not open it names the process instead, and the client opens it by rights of its own.
//!
//! The machine is paused by the caller. [`SessionMemory::protect`] has the worker protect all of it against
//! writing; then the machine may go on, and its pages are read while the worker keeps those that it writes to
//! ([`uzone_fault::WriteCapture`]). [`SessionMemory::copy`] copies them first, for a server that cannot do that.
//! Both give [`CapturedPages`].
//!
//! The kernel's page table states which pages there are; the log of its session states which were given
//! back. All others are those of the image, and are not read.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uzone_fault::{AdoptedMemory, KeptPages, LoggedEvents, RemoteRegion};
use uzone_os::peer::Peer;
use uzone_os::{Anonymous, Exclusive, HugeAdvice, MessageSocket, WriteScan};
use uzone_pages::ByteLen;
use uzone_snapshot::Source;

use crate::connection::Connection;
use crate::control::{self, control_path};
use crate::error::ServeError;
use crate::link::{self, Titled};
use crate::worker::dialect;

/// What `/proc/PID/pagemap` has of a page that is in memory, that is in swap, and that is of a file.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;
/// The host's page, of which that file has an entry each.
const PAGE: u64 = 4096;
/// How many entries are read at once.
const ENTRIES: usize = 64 << 10;
/// How many bytes a thread copies at once.
const PIECE: u64 = 4 << 20;
/// How long the worker may take to protect the memory: another one may have to be started.
const PROTECT_WITHIN: Duration = Duration::from_secs(10);
/// After how many bytes the worker learns what has been read, so that writes to that go on.
const READ_EVERY: u64 = 32 << 20;

/// Why there is no answer of a worker.
const GONE: &str = "the process that kept its pages has ended, or the machine has";

/// What the client asks a worker for, by the socket that its keeper passed on.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum CaptureRequest {
    /// Protect the memory, and keep pages before they change: the memory and the file for them come along.
    Protect,
    /// What is before this byte of the image has been read.
    Read(u64),
    /// All has been read.
    End,
}

/// What a worker answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum CaptureReply {
    Protected,
    Refused {
        reason: String,
    },
    /// The machine waits for the end.
    Hurry,
    Ended {
        kept_pages: u64,
        lost: Option<String>,
    },
}

/// What a keeper answers.
#[derive(Debug, Serialize, Deserialize)]
enum Shown {
    /// The memory, its page table and its log come along, and what the monitor sent.
    Memory { image: String },
    /// The keeper may not read the memory: a pidfd, the userfaultfd and the log come along instead, for a
    /// client that may.
    Process { image: String, pid: u32, uid: u32, cause: String },
    /// Nothing comes along.
    Refused { reason: String },
}

/// Hands the memory of a machine to a client that asked for it, or the process that has it.
pub(crate) fn show(
    to: &MessageSocket,
    image: &str,
    session: u64,
    connection: Option<&Connection>,
) -> io::Result<()> {
    let connection = connection.filter(|connection| !connection.is_greeting());
    let Some((connection, userfaultfd)) =
        connection.and_then(|one| Some((one, one.userfaultfd()?)))
    else {
        let reason = format!("there is no session {session}");
        return link::send(to, &Shown::Refused { reason }, &[]);
    };
    let (peer, image) = (&connection.peer, image.to_owned());
    let opened = connection.open_memory();
    let (title, [first, second]) = match &opened {
        Ok((memory, pagemap)) => (Shown::Memory { image }, [memory.as_fd(), pagemap.as_fd()]),
        Err(cause) => {
            let (pid, uid, cause) = (peer.pid(), peer.uid(), cause.to_string());
            (Shown::Process { image, pid, uid, cause }, [peer.as_fd(), userfaultfd.as_fd()])
        }
    };
    let log = connection.log.as_ref().map(AsFd::as_fd);
    let fds: Vec<_> = [first, second].into_iter().chain(log).collect();
    link::send_with(to, &title, &fds, &connection.bytes)
}

/// Opens the memory of a process, by the rights of this one, for a keeper that may not.
///
/// A keeper that was a worker has parsed what monitors send, so it is not trusted with which process that is:
/// the process must have the userfaultfd, as no other than a monitor of that keeper does.
fn open_for_keeper(peer: &Peer, userfaultfd: BorrowedFd<'_>) -> io::Result<(File, File)> {
    match peer.number_of(userfaultfd) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
            let reason = "it has ended, or closed its userfaultfd, by which it is known";
            Err(io::Error::new(cause.kind(), reason))
        }
        known => known.and_then(|_| peer.open_memory()),
    }
}

/// The memory of a machine that is served.
#[derive(Debug)]
pub struct SessionMemory {
    image: String,
    regions: Vec<RemoteRegion>,
    /// Whether a page of a file is one of the image that was not written.
    is_shared: bool,
    /// Whether the kernel notes which pages are written to.
    is_tracked: bool,
    /// The pages that it gave back, by their bytes of the image.
    removed: Vec<Range<u64>>,
    memory: File,
    pagemap: File,
    /// The way to the worker, if the keeper passes it on.
    worker: MessageSocket,
}

impl SessionMemory {
    /// Asks the server that listens on `socket` for the memory of a session. The machine must be paused from
    /// before this call until [`SessionMemory::protect`] or [`SessionMemory::copy`] has returned.
    ///
    /// # Errors
    /// [`ServeError::Ask`] if there is no such server or session, or neither the keeper nor this process may
    /// read the memory.
    pub fn open(socket: &Path, session: u64) -> Result<Self, ServeError> {
        let path = control_path(socket);
        Self::ask(&path, session).map_err(|cause| ServeError::Ask { path, cause })
    }

    fn ask(path: &Path, session: u64) -> io::Result<Self> {
        let keeper = control::connect(path, &format!("memory {session}\n"))?;
        let Titled { title, fds, bytes } = link::receive(&keeper, &mut link::room())?;
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or(io::ErrorKind::InvalidData);
        let (image, (memory, pagemap)) = match title {
            Shown::Memory { image } => (image, (next()?.into(), next()?.into())),
            Shown::Process { image, pid, uid, cause: of_keeper } => {
                let peer = Peer::from_parts(pid, uid, next()?).ok_or(io::ErrorKind::InvalidData)?;
                let opened = open_for_keeper(&peer, next()?.as_fd()).map_err(|cause| {
                    let text = format!(
                        "neither the keeper ({of_keeper}) nor this command ({cause}) may read the memory of \
                         process {pid}; run one of them as its user, or with CAP_SYS_PTRACE and \
                         CAP_DAC_READ_SEARCH"
                    );
                    io::Error::new(cause.kind(), text)
                });
                (image, opened?)
            }
            Shown::Refused { reason } => return Err(io::Error::other(reason)),
        };
        let of = dialect::memory_of(&bytes).ok_or(io::ErrorKind::InvalidData)?;
        // Of the keeper. One that was a worker, and is not trusted, could have this command wait by it.
        let log = fds.next().map(LoggedEvents::read_trusted).transpose()?;
        let removed = log.map(|log| AdoptedMemory::given_back(&of.regions, &log)).transpose();
        let removed = removed.map_err(io::Error::other)?.unwrap_or_default();
        let (is_shared, is_tracked) = (of.is_shared(), of.is_tracked());
        // What follows is for the worker, if the keeper passes it on.
        let (regions, worker) = (of.regions, keeper);
        Ok(Self { image, regions, is_shared, is_tracked, removed, memory, pagemap, worker })
    }

    /// Returns what tells the image that it is served from from others: the root hash of a packed image.
    #[must_use]
    pub fn image(&self) -> &str {
        &self.image
    }

    /// Returns whether the kernel notes which pages are written to: those alone are in the image, and
    /// [`SessionMemory::copy`] copies them.
    #[must_use]
    pub fn is_tracked(&self) -> bool {
        self.is_tracked
    }

    /// Has the worker keep the pages that there are before they are written to. When it returns, the machine
    /// may go on; what is read of it is as it is now, until [`CapturedPages::finish`].
    ///
    /// # Errors
    /// Why the server cannot do that, and the memory, to be copied.
    pub fn protect(self) -> Result<CapturedPages, (Box<Self>, String)> {
        match self.try_protect() {
            Ok((kept, runs)) => Ok(CapturedPages::live(self, kept, runs)),
            Err(cause) => {
                let reason = match cause.kind() {
                    io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe => {
                        "it is an older one, or a worker in the place of its keeper".to_owned()
                    }
                    _ => cause.to_string(),
                };
                Err((Box::new(self), reason))
            }
        }
    }

    fn try_protect(&self) -> io::Result<(KeptPages, Vec<Run>)> {
        // First: a page that comes while the memory is being protected is one of the image.
        let runs = self.runs()?;
        let kept = KeptPages::new(&self.regions)?;
        runs.iter().try_for_each(|run| kept.want(run.bytes.clone()))?;
        let fds = [self.memory.as_fd(), kept.as_fd()];
        link::send(&self.worker, &CaptureRequest::Protect, &fds)?;
        let reply = link::receive_within(&self.worker, &mut link::room(), PROTECT_WITHIN);
        let reply = reply.map_err(|cause| match cause.kind() {
            io::ErrorKind::TimedOut => {
                let reason =
                    format!("no worker has protected its memory within {PROTECT_WITHIN:?}");
                io::Error::new(cause.kind(), reason)
            }
            _ => cause,
        });
        match reply?.title {
            CaptureReply::Protected => Ok((kept, runs)),
            CaptureReply::Refused { reason } => Err(io::Error::other(reason)),
            CaptureReply::Hurry | CaptureReply::Ended { .. } => {
                Err(io::ErrorKind::InvalidData.into())
            }
        }
    }

    /// Copies the pages that there are, on as many threads. When it returns, the machine may go on.
    ///
    /// # Errors
    /// The error of the system: the process has ended, a page of it is bad, or there is no memory for the
    /// copy.
    pub fn copy(self, threads: usize) -> io::Result<CapturedPages> {
        let runs = self.runs()?;
        let copy = copy(&runs, threads, |run, piece| read(&self.memory, run, piece))?;
        let held = Arc::new(Held { memory: self.memory, kept: None, copy: RwLock::new(copy) });
        Ok(CapturedPages { runs: runs.into(), removed: self.removed, held, worker: None })
    }

    /// Returns the runs of pages that there are, by their place in the image.
    fn runs(&self) -> io::Result<Vec<Run>> {
        let mut runs = Vec::new();
        for region in &self.regions {
            match self.is_tracked {
                true => self.written(region, &mut runs)?,
                false => self.present(region, &mut runs)?,
            }
        }
        runs.sort_unstable_by_key(|run| run.bytes.start);
        Ok(runs)
    }

    /// Adds the runs of pages of a region that were written to.
    fn written(&self, region: &RemoteRegion, runs: &mut Vec<Run>) -> io::Result<()> {
        let (start, end) = (region.start.get(), region.start.get() + region.len.get());
        let mut found = Vec::new();
        WriteScan::of(self.pagemap.try_clone()?).written_at(start..end, &mut found)?;
        let mut at = runs.last().map_or(0, |run| run.at + (run.bytes.end - run.bytes.start));
        for written in found {
            let mut address = written.start;
            while address < written.end {
                let len = (written.end - address).min(PIECE);
                let offset = region.offset + (address - start);
                runs.push(Run { bytes: offset..offset + len, address, at });
                (address, at) = (address + len, at + len);
            }
        }
        Ok(())
    }

    /// Adds the runs of pages of a region that there are.
    fn present(&self, region: &RemoteRegion, runs: &mut Vec<Run>) -> io::Result<()> {
        let pages = region.len.get() / PAGE;
        let mut part = vec![0; ENTRIES * 8];
        let mut next = runs.last().map_or(0, |run| run.at + (run.bytes.end - run.bytes.start));
        let mut at = 0;
        while at < pages {
            let count = (pages - at).min(ENTRIES as u64);
            let entries = &mut part[..usize::try_from(count * 8).unwrap_or(ENTRIES * 8)];
            self.pagemap.read_exact_at(entries, (region.start.get() / PAGE + at) * 8)?;
            for (page, entry) in (at..).zip(entries.as_chunks::<8>().0) {
                let entry = u64::from_ne_bytes(*entry);
                let is_own = !self.is_shared || entry & OF_FILE == 0;
                if entry & SWAPPED == 0 && !(entry & PRESENT != 0 && is_own) {
                    continue;
                }
                let offset = region.offset + page * PAGE;
                let address = region.start.get() + page * PAGE;
                match runs.last_mut() {
                    Some(run)
                        if run.bytes.end == offset
                            && run.address + (offset - run.bytes.start) == address
                            && offset - run.bytes.start < PIECE =>
                    {
                        run.bytes.end += PAGE;
                    }
                    _ => runs.push(Run { bytes: offset..offset + PAGE, address, at: next }),
                }
                next += PAGE;
            }
            at += count;
        }
        Ok(())
    }
}

/// Reads the first bytes of a run, as many as there is room for.
fn read(memory: &File, run: &Run, out: &mut [u8]) -> io::Result<()> {
    memory.read_exact_at(out, run.address).map_err(|cause| {
        let text = format!("the memory at {:#x} cannot be read: {cause}", run.address);
        io::Error::new(cause.kind(), text)
    })
}

/// Copies runs by `read`, on as many threads.
fn copy(
    runs: &[Run],
    threads: usize,
    read: impl Fn(&Run, &mut [u8]) -> io::Result<()> + Sync,
) -> io::Result<Option<Exclusive>> {
    let bytes = len_of(runs);
    if bytes == 0 {
        return Ok(None);
    }
    // Huge pages take fewer faults of this process, while the machine waits.
    let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
    let mut copy = Exclusive::anonymous(ByteLen::new(bytes), how).map_err(io::Error::other)?;
    let mut pieces = Vec::with_capacity(runs.len());
    let mut rest = copy.as_bytes_mut();
    // Runs are numbered in the order of their copies.
    let mut in_order: Vec<_> = runs.iter().collect();
    in_order.sort_unstable_by_key(|run| run.at);
    for run in in_order {
        let len = usize::try_from(run.bytes.end - run.bytes.start).map_err(io::Error::other)?;
        let (piece, behind) = rest.split_at_mut(len);
        pieces.push((run, piece));
        rest = behind;
    }
    let pieces = Mutex::new(pieces.into_iter());
    let work = || loop {
        let next = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some((run, piece)) = next else { return Ok(()) };
        read(run, piece)?;
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut answers = vec![work()];
        answers.extend(threads.into_iter().map(|thread| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
        }));
        answers.into_iter().collect::<io::Result<()>>()
    })?;
    Ok(Some(copy))
}

fn len_of(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.bytes.end - run.bytes.start).sum()
}

/// Pages that there are, one behind the other.
#[derive(Clone, Debug)]
struct Run {
    /// Which bytes of the image they started as.
    bytes: Range<u64>,
    address: u64,
    /// Where their copy starts.
    at: u64,
}

/// Where the bytes of the pages are.
#[derive(Debug)]
struct Held {
    memory: File,
    /// The pages that the worker keeps before they change; `None` if all are copied.
    kept: Option<KeptPages>,
    /// The copy. While it is made, pages are read from the memory; the worker ends the capture after that.
    copy: RwLock<Option<Exclusive>>,
}

impl Held {
    /// Reads bytes of a run, from `from` on.
    fn read(&self, run: &Run, from: u64, out: &mut [u8]) -> io::Result<()> {
        // Held while the memory is read, so that no copy takes its place meanwhile.
        let copy = self.copy.read().unwrap_or_else(PoisonError::into_inner);
        match (&*copy, &self.kept) {
            (Some(copy), _) => {
                let start = usize::try_from(run.at + from).map_err(io::Error::other)?;
                out.copy_from_slice(&copy.as_bytes()[start..start + out.len()]);
                Ok(())
            }
            (None, Some(kept)) => self.read_memory(kept, run, from, out),
            (None, None) => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn read_memory(
        &self,
        kept: &KeptPages,
        run: &Run,
        from: u64,
        out: &mut [u8],
    ) -> io::Result<()> {
        let (bytes, address) = (run.bytes.start + from..run.bytes.end, run.address + from);
        let start = bytes.start;
        // In this order: a page that was written to before it was read has been kept by then.
        read(&self.memory, &Run { bytes, address, at: 0 }, out)?;
        kept.read_over(start, out)
    }
}

/// The worker, and the end that it announced.
struct WorkerLink {
    socket: Arc<MessageSocket>,
    ended: Receiver<io::Result<u64>>,
    /// What it was, once it was looked at.
    end: Option<Result<u64, String>>,
}

/// Pages of a machine, as they were when it was paused.
pub struct CapturedPages {
    /// By their place in the image.
    runs: Arc<[Run]>,
    removed: Vec<Range<u64>>,
    held: Arc<Held>,
    /// `None` if all are copied.
    worker: Option<Mutex<WorkerLink>>,
}

impl CapturedPages {
    /// Pages that the worker keeps before they change.
    fn live(of: SessionMemory, kept: KeptPages, runs: Vec<Run>) -> Self {
        let held = Arc::new(Held { memory: of.memory, kept: Some(kept), copy: RwLock::default() });
        let (socket, runs): (_, Arc<[Run]>) = (Arc::new(of.worker), runs.into());
        let (answer, ended) = sync_channel(1);
        let listens = {
            let (socket, held, runs) = (socket.clone(), held.clone(), runs.clone());
            move || drop(answer.try_send(listen(&socket, &held, &runs)))
        };
        // Without that thread there is no answer, which the end finds.
        let _ = thread::Builder::new().name("uzone-capture".into()).spawn(listens);
        Self {
            runs,
            removed: of.removed,
            held,
            worker: Some(Mutex::new(WorkerLink { socket, ended, end: None })),
        }
    }

    /// Returns how many bytes there are of these pages.
    #[must_use]
    pub fn present(&self) -> ByteLen {
        ByteLen::new(len_of(&self.runs))
    }

    /// Ends the capture, when all has been read. Returns how many pages the machine wrote to meanwhile.
    ///
    /// # Errors
    /// What was read is not the memory of one moment: a worker that kept pages has died, or the machine gave
    /// memory back before it could be read. Capture it again.
    pub fn finish(&self) -> io::Result<u64> {
        let Some(worker) = &self.worker else { return Ok(0) };
        let mut worker = worker.lock().unwrap_or_else(PoisonError::into_inner);
        if worker.end.is_none() {
            // It may have ended before, by an end that is there already.
            let _ = link::send(&worker.socket, &CaptureRequest::End, &[]);
            let end = match worker.ended.recv() {
                Ok(answer) => answer.map_err(|cause| match cause.kind() {
                    io::ErrorKind::UnexpectedEof => GONE.to_owned(),
                    _ => cause.to_string(),
                }),
                Err(_) => Err(GONE.to_owned()),
            };
            worker.end = Some(end);
        }
        worker.end.clone().unwrap_or(Ok(0)).map_err(io::Error::other)
    }

    /// Returns the whole memory: these pages, zeroes where pages were given back, and elsewhere the image. It is
    /// read in order, and what was read is not read again.
    #[must_use]
    pub fn over<'a>(&'a self, image: &'a dyn Source) -> impl Read + Send + 'a {
        Memory { pages: self, image, at: 0, noted: 0 }
    }

    fn has_read(&self, until: u64) {
        if let Some(worker) = &self.worker {
            let worker = worker.lock().unwrap_or_else(PoisonError::into_inner);
            // A worker that has gone is found at the end.
            let _ = link::send(&worker.socket, &CaptureRequest::Read(until), &[]);
        }
    }

    /// Returns what is at `at`: how far it goes, and where it comes from.
    fn part(&self, at: u64) -> (u64, Origin) {
        let index = self.runs.partition_point(|run| run.bytes.end <= at);
        let run = self.runs.get(index);
        if let Some(run) = run.filter(|run| run.bytes.start <= at) {
            return (run.bytes.end, Origin::Run(index, at - run.bytes.start));
        }
        let until = run.map_or(u64::MAX, |run| run.bytes.start);
        let index = self.removed.partition_point(|removed| removed.end <= at);
        match self.removed.get(index) {
            Some(removed) if removed.start <= at => (removed.end.min(until), Origin::Zeroes),
            removed => (removed.map_or(until, |removed| removed.start.min(until)), Origin::Image),
        }
    }
}

impl std::fmt::Debug for CapturedPages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CapturedPages").field("present", &self.present()).finish_non_exhaustive()
    }
}

/// Waits for the end of a capture. If the machine waits for that, all its pages are copied first.
fn listen(worker: &MessageSocket, held: &Held, runs: &[Run]) -> io::Result<u64> {
    let mut copied = Ok(());
    loop {
        match link::receive(worker, &mut link::room())?.title {
            CaptureReply::Hurry => {
                let Some(kept) = &held.kept else { continue };
                let threads = thread::available_parallelism().map_or(1, Into::into);
                copied = copy(runs, threads, |run, piece| held.read_memory(kept, run, 0, piece))
                    .map(|copy| *held.copy.write().unwrap_or_else(PoisonError::into_inner) = copy);
                link::send(worker, &CaptureRequest::End, &[])?;
            }
            // What was given back before it was read cannot be copied: the worker states that reason.
            CaptureReply::Ended { lost: Some(reason), .. } => return Err(io::Error::other(reason)),
            CaptureReply::Ended { kept_pages, lost: None } => return copied.map(|()| kept_pages),
            CaptureReply::Protected | CaptureReply::Refused { .. } => {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
    }
}

/// Where bytes come from.
#[derive(Debug, PartialEq, Eq)]
enum Origin {
    /// A run with this number, from this byte of it on.
    Run(usize, u64),
    Zeroes,
    Image,
}

struct Memory<'a> {
    pages: &'a CapturedPages,
    image: &'a dyn Source,
    at: u64,
    /// What the worker knows to be read.
    noted: u64,
}

impl Read for Memory<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.at - self.noted >= READ_EVERY {
            self.pages.has_read(self.at);
            self.noted = self.at;
        }
        let left = self.image.byte_len() - self.at;
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(out.len());
        if most == 0 {
            // The end of the input is where an image is completed: not of what may be of several moments.
            return if out.is_empty() { Ok(0) } else { self.pages.finish().map(|_| 0) };
        }
        let (end, from) = self.pages.part(self.at);
        let len = usize::try_from(end - self.at).unwrap_or(usize::MAX).min(most);
        let now = &mut out[..len];
        match from {
            Origin::Run(index, from) => {
                if let Err(cause) = self.pages.held.read(&self.pages.runs[index], from, now) {
                    // The worker knows of memory that was given back.
                    return Err(self.pages.finish().err().unwrap_or(cause));
                }
            }
            Origin::Zeroes => now.fill(0),
            Origin::Image => self.image.read_at(self.at, now)?,
        }
        self.at += len as u64;
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{Pid, PidfdFlags};

    use super::*;

    #[test]
    fn a_process_whose_memory_a_client_opens_must_have_the_userfaultfd() {
        // What is compared are open files: here those of pipes.
        let ((known, _near), (other, _far)) = (io::pipe().unwrap(), io::pipe().unwrap());
        let mut command = Command::new("/bin/cat");
        let mut process = command.stdin(known.try_clone().unwrap()).spawn().unwrap();
        let pid = Pid::from_child(&process);
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let peer = Peer::from_parts(process.id(), 0, pidfd).unwrap();
        let opened = open_for_keeper(&peer, known.as_fd()).map(drop);
        let refused = open_for_keeper(&peer, other.as_fd()).map(drop).map_err(|cause| cause.kind());
        process.kill().unwrap();
        process.wait().unwrap();
        opened.unwrap();
        assert_eq!(refused, Err(io::ErrorKind::NotFound));
        assert!(open_for_keeper(&peer, known.as_fd()).is_err(), "it has ended");
    }

    #[test]
    fn memory_that_was_given_back_is_the_reason_why_a_page_cannot_be_read() {
        for (lost, reason) in [(Some("given back".to_owned()), "given back"), (None, GONE)] {
            let (here, worker) = MessageSocket::pair().unwrap();
            let regions = [RemoteRegion {
                start: uzone_os::Vaddr::new(0),
                len: ByteLen::new(PAGE),
                offset: 0,
                page: uzone_os::probe::page_size(),
            }];
            let kept = KeptPages::new(&regions).unwrap();
            // There are no bytes any more, as of a process that has ended.
            let memory = uzone_os::memory_file("memory", &[]).unwrap();
            let of = SessionMemory {
                image: String::new(),
                regions: regions.to_vec(),
                is_shared: false,
                is_tracked: true,
                removed: Vec::new(),
                pagemap: memory.try_clone().unwrap(),
                memory,
                worker: here,
            };
            let run = Run { bytes: 0..PAGE, address: 0, at: 0 };
            let pages = CapturedPages::live(of, kept, vec![run]);
            link::send(&worker, &CaptureReply::Hurry, &[]).unwrap();
            let end = CaptureReply::Ended { kept_pages: 0, lost };
            link::send(&worker, &end, &[]).unwrap();
            let image: Vec<u8> = vec![0; usize::try_from(PAGE).unwrap()];
            let error = pages.over(&image).read_to_end(&mut Vec::new()).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
    }

    #[test]
    fn what_is_copied_comes_before_what_was_given_back_and_that_before_the_image() {
        let run = |bytes: Range<u64>, at| Run { bytes, address: 0, at };
        let mut copy = Exclusive::anonymous(ByteLen::new(8), Anonymous::default()).unwrap();
        (1..).zip(&mut copy.as_bytes_mut()[..8]).for_each(|(number, byte)| *byte = number);
        let memory = uzone_os::memory_file("memory", &[]).unwrap();
        let held = Held { memory, kept: None, copy: RwLock::new(Some(copy)) };
        let pages = CapturedPages {
            runs: vec![run(2..6, 4), run(10..14, 0)].into(),
            removed: vec![0..3, 5..9, 14..15],
            held: Arc::new(held),
            worker: None,
        };
        let image: Vec<u8> = vec![99; 16];
        let expected = [0, 0, 5, 6, 7, 8, 0, 0, 0, 99, 1, 2, 3, 4, 0, 99];
        for most in 1..=17 {
            let mut memory = pages.over(&image);
            let (mut seen, mut part) = (Vec::new(), vec![1; most]);
            while let len @ 1.. = memory.read(&mut part).unwrap() {
                seen.extend_from_slice(&part[..len]);
            }
            assert_eq!(seen, expected, "{most} at once");
        }
        assert_eq!((pages.present().get(), pages.finish().unwrap()), (8, 0));
    }
}

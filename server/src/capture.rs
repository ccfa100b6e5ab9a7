//! The memory of a machine as it is now, for an image of it: [`SessionMemory`], opened through the keeper,
//! and [`CapturedPages`], copied while the machine is paused. A keeper that may not open it names the process
//! instead, and the client opens it by rights of its own.
//!
//! The kernel's page table states which pages there are; the log of its session states which were given
//! back. All others are those of the image, and are not read.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Mutex;
use std::sync::PoisonError;

use serde::{Deserialize, Serialize};
use uzone_fault::{AdoptedMemory, LoggedEvents, RemoteRegion};
use uzone_os::peer::{self, Peer};
use uzone_os::{Anonymous, Exclusive, HugeAdvice, MessageSocket};
use uzone_pages::ByteLen;
use uzone_snapshot::Source;

use crate::connection::Connection;
use crate::control::control_path;
use crate::dialect;
use crate::error::ServeError;
use crate::link::{self, Titled};

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
        return link::send_titled(to, &Shown::Refused { reason }, &[], &[]);
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
    link::send_titled(to, &title, &fds, &connection.bytes)
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
    /// The pages that it gave back, by their bytes of the image.
    removed: Vec<Range<u64>>,
    memory: File,
    pagemap: File,
}

impl SessionMemory {
    /// Asks the server that listens on `socket` for the memory of a session. The machine must be paused from
    /// before this call until [`SessionMemory::capture`] has returned.
    ///
    /// # Errors
    /// [`ServeError::Ask`] if there is no such server or session, or neither the keeper nor this process may
    /// read the memory.
    pub fn open(socket: &Path, session: u64) -> Result<Self, ServeError> {
        let path = control_path(socket);
        Self::ask(&path, session).map_err(|cause| ServeError::Ask { path, cause })
    }

    fn ask(path: &Path, session: u64) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        let (here, there) = MessageSocket::pair()?;
        peer::send(&stream, format!("memory {session}\n").as_bytes(), &[there.as_fd()])?;
        drop(there);
        let answer = link::receive_titled(&here, &mut link::room())?;
        let Titled { title, fds, bytes } = answer.ok_or(io::ErrorKind::UnexpectedEof)?;
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or(io::ErrorKind::InvalidData);
        let (image, (memory, pagemap)) = match title {
            Shown::Memory { image } => (image, (next()?.into(), next()?.into())),
            Shown::Process { image, pid, uid, cause: of_keeper } => {
                let peer = Peer::from_parts(pid, uid, next()?).ok_or(io::ErrorKind::InvalidData)?;
                let opened = open_for_keeper(&peer, next()?.as_fd()).map_err(|cause| {
                    let text = format!(
                        "neither the keeper ({of_keeper}) nor this command ({cause}) may read the memory of \
                         process {pid}; run one of them as its user, or with CAP_SYS_PTRACE"
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
        let is_shared = of.is_shared();
        Ok(Self { image, regions: of.regions, is_shared, removed, memory, pagemap })
    }

    /// Returns what tells the image that it is served from from others: the root hash of a packed image.
    #[must_use]
    pub fn image(&self) -> &str {
        &self.image
    }

    /// Copies the pages that there are, on as many threads. When it returns, the machine may go on.
    ///
    /// # Errors
    /// The error of the system: the process has ended, a page of it is bad, or there is no memory for the
    /// copy.
    pub fn capture(&self, threads: usize) -> io::Result<CapturedPages> {
        let mut runs = Vec::new();
        for region in &self.regions {
            self.present(region, &mut runs)?;
        }
        let bytes = runs.iter().map(|run: &Run| run.bytes.end - run.bytes.start).sum::<u64>();
        // Huge pages take fewer faults of this process, while the machine waits.
        let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
        let mut copy = match bytes {
            0 => None,
            _ => Some(Exclusive::anonymous(ByteLen::new(bytes), how).map_err(io::Error::other)?),
        };
        if let Some(copy) = &mut copy {
            self.copy(&runs, copy.as_bytes_mut(), threads)?;
        }
        runs.sort_unstable_by_key(|run| run.bytes.start);
        Ok(CapturedPages { runs, copy, copied: ByteLen::new(bytes), removed: self.removed.clone() })
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

    fn copy(&self, runs: &[Run], mut copy: &mut [u8], threads: usize) -> io::Result<()> {
        let mut pieces = Vec::with_capacity(runs.len());
        for run in runs {
            let len = usize::try_from(run.bytes.end - run.bytes.start).map_err(io::Error::other)?;
            let (piece, rest) = std::mem::take(&mut copy).split_at_mut(len);
            pieces.push((run.address, piece));
            copy = rest;
        }
        let pieces = Mutex::new(pieces.into_iter());
        let work = || loop {
            let next = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((address, piece)) = next else { return Ok(()) };
            self.memory.read_exact_at(piece, address).map_err(|cause| {
                let text = format!("the memory at {address:#x} cannot be read: {cause}");
                io::Error::new(cause.kind(), text)
            })?;
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut answers = vec![work()];
            answers.extend(threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
            }));
            answers.into_iter().collect()
        })
    }
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

/// Pages of a machine, as they were when they were copied.
pub struct CapturedPages {
    /// By their place in the image.
    runs: Vec<Run>,
    copy: Option<Exclusive>,
    copied: ByteLen,
    removed: Vec<Range<u64>>,
}

impl CapturedPages {
    /// Returns how many bytes were copied.
    #[must_use]
    pub fn copied(&self) -> ByteLen {
        self.copied
    }

    /// Returns the whole memory: these pages, zeroes where pages were given back, and elsewhere the image.
    #[must_use]
    pub fn over<'a>(&'a self, image: &'a dyn Source) -> impl Source + 'a {
        Memory { pages: self, image }
    }

    /// Returns what is at `at`: how far it goes, and where it comes from.
    fn part(&self, at: u64) -> (u64, Origin) {
        let index = self.runs.partition_point(|run| run.bytes.end <= at);
        let run = self.runs.get(index);
        if let Some(run) = run.filter(|run| run.bytes.start <= at) {
            return (run.bytes.end, Origin::Copy(run.at + (at - run.bytes.start)));
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
        f.debug_struct("CapturedPages").field("copied", &self.copied()).finish_non_exhaustive()
    }
}

/// Where bytes come from.
#[derive(Debug, PartialEq, Eq)]
enum Origin {
    /// The copy, from this byte on.
    Copy(u64),
    Zeroes,
    Image,
}

struct Memory<'a> {
    pages: &'a CapturedPages,
    image: &'a dyn Source,
}

impl Source for Memory<'_> {
    fn name(&self) -> String {
        format!("memory that started as {}", self.image.name())
    }

    fn byte_len(&self) -> u64 {
        self.image.byte_len()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let (mut at, mut left) = (offset, out);
        while !left.is_empty() {
            let (end, from) = self.pages.part(at);
            let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(left.len());
            let (now, rest) = left.split_at_mut(len);
            match from {
                Origin::Copy(start) => {
                    let start = usize::try_from(start).map_err(io::Error::other)?;
                    let copy = self.pages.copy.as_ref().map_or(&[][..], Exclusive::as_bytes);
                    now.copy_from_slice(&copy[start..start + len]);
                }
                Origin::Zeroes => now.fill(0),
                Origin::Image => self.image.read_at(at, now)?,
            }
            (at, left) = (at + len as u64, rest);
        }
        Ok(())
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
    fn what_is_copied_comes_before_what_was_given_back_and_that_before_the_image() {
        let run = |bytes: Range<u64>, at| Run { bytes, address: 0, at };
        let mut copy = Exclusive::anonymous(ByteLen::new(8), Anonymous::default()).unwrap();
        (1..).zip(&mut copy.as_bytes_mut()[..8]).for_each(|(number, byte)| *byte = number);
        let removed = vec![0..3, 5..9, 14..15];
        let pages = CapturedPages {
            runs: vec![run(2..6, 4), run(10..14, 0)],
            copy: Some(copy),
            copied: ByteLen::new(8),
            removed,
        };
        let image: Vec<u8> = vec![99; 16];
        let memory = pages.over(&image);
        let expected = [0, 0, 5, 6, 7, 8, 0, 0, 0, 99, 1, 2, 3, 4, 0, 99];
        for start in 0..16 {
            for end in start..=16 {
                let mut seen = vec![1; end - start];
                memory.read_at(start as u64, &mut seen).unwrap();
                assert_eq!(seen, expected[start..end], "{start}..{end}");
            }
        }
    }
}

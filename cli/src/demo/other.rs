//! The other process, as the demo sees it ([`Other`]): starting it, asking it to touch memory, and
//! answering the faults of that.
//!
//! It is killed when this is dropped, and by the kernel when this process ends. If it ends first, its
//! socket does, so nothing here waits for it in vain.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uzone_fault::{AdoptedMemory, Engine, FileBacking, LazyOptions, RemoteRegion};
use uzone_os::uffd::{Answered, Doorbell, Event, EventBuffer, Install, NotUffd, Remote, wait};
use uzone_os::{Mapping, MessageSocket, Vaddr, probe};
use uzone_pages::ByteLen;

use super::protocol::{self, Reply, Request, Touched};

/// A page that its device does not bring in this time is given up.
const DEADLINE: Duration = Duration::from_secs(60);
/// What is noted of a fault comes after its answer, at most by so much.
const NOTED_WITHIN: Duration = Duration::from_secs(1);

/// What can go wrong with the other process and its memory.
#[derive(Debug, thiserror::Error)]
pub(super) enum OtherError {
    #[error("cannot start this program again, as the process that touches the image: {cause}")]
    Start {
        #[source]
        cause: io::Error,
    },
    #[error("the process that touches the image ended while {what}: {status}; {}", fix(*status, failure.as_deref()))]
    Ended { what: &'static str, status: ExitStatus, failure: Option<String> },
    #[error("the process that touches the image cannot go on: {error}")]
    Failed { error: String },
    #[error("the process that touches the image said something that was not asked for")]
    Confused,
    #[error("cannot talk to the process that touches the image: {cause}")]
    Talk {
        #[source]
        cause: io::Error,
    },
    #[error("the process that touches the image handed over something else: {0}")]
    Handed(#[from] NotUffd),
    #[error("cannot answer for the memory of the process that touches the image: {0}")]
    Answer(#[from] uzone_fault::MapError),
    #[error("cannot answer page by page: {cause}")]
    Naive {
        #[source]
        cause: io::Error,
    },
}

impl From<OtherError> for uzone_bench::BenchError {
    fn from(error: OtherError) -> Self {
        Self::Caller(Box::new(error))
    }
}

/// What helps when the other process was ended by somebody else.
fn fix(status: ExitStatus, failure: Option<&str>) -> String {
    const KILLED: i32 = 9;
    const BUS: i32 = 7;
    match (status.signal(), failure) {
        (Some(BUS), Some(failure)) => format!("a page could not be had: {failure}"),
        (Some(KILLED), _) => {
            "if nobody killed it, memory ran out: ask for less with --size".to_owned()
        }
        _ => "run the demo again".to_owned(),
    }
}

/// The process that touches memory.
pub(super) struct Other {
    child: Child,
    socket: MessageSocket,
}

/// Memory of the other process that nobody answers for yet.
pub(super) struct Unanswered {
    start: Vaddr,
    len: ByteLen,
    uffd: OwnedFd,
}

/// The hash of all bytes, and how long reading and hashing took.
pub(super) struct Whole {
    pub(super) hash: String,
    pub(super) elapsed_ns: u64,
}

impl Other {
    /// Starts it.
    ///
    /// # Errors
    /// [`OtherError::Start`], or [`OtherError::Talk`] without descriptors for a socket.
    pub(super) fn start() -> Result<Self, OtherError> {
        let (ours, theirs) = MessageSocket::pair().map_err(|cause| OtherError::Talk { cause })?;
        // By the link of the kernel, so that it is this very program, whatever became of its file.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("uzone").args(["demo", "--touch"]);
        command.stdin(theirs.into_fd()).stdout(Stdio::null());
        let child = command.spawn().map_err(|cause| OtherError::Start { cause })?;
        // The command has our copy of the other end, without which the socket ends with the process.
        drop(command);
        Ok(Self { child, socket: ours })
    }

    /// Has it make memory that is mapped lazily.
    ///
    /// # Errors
    /// [`OtherError`] if it cannot, or has ended.
    pub(super) fn map_lazily(&mut self, len: ByteLen) -> Result<Unanswered, OtherError> {
        match self.map(len, None)? {
            (start, Some(uffd)) => Ok(Unanswered { start, len, uffd }),
            _ => Err(OtherError::Confused),
        }
    }

    /// Has it map the image as anyone would.
    ///
    /// # Errors
    /// [`OtherError`] if it cannot, or has ended.
    pub(super) fn map_plainly(&mut self, len: ByteLen, image: &File) -> Result<(), OtherError> {
        self.map(len, Some(image.as_fd())).map(drop)
    }

    fn map(
        &mut self,
        len: ByteLen,
        image: Option<BorrowedFd<'_>>,
    ) -> Result<(Vaddr, Option<OwnedFd>), OtherError> {
        const WHAT: &str = "mapping memory";
        self.ask(WHAT, Request::Map { len_bytes: len.get() }, image)?;
        match self.hear(WHAT, None)? {
            (Reply::Mapped { start }, fd) => Ok((Vaddr::new(start), fd)),
            _ => Err(OtherError::Confused),
        }
    }

    /// Has it touch every page once, and says from time to time how many it has touched.
    ///
    /// # Errors
    /// [`OtherError`] if it cannot, or has ended; then `answering` tells which page could not be had.
    pub(super) fn touch(
        &mut self,
        in_order: ByteLen,
        answering: Option<&AdoptedMemory>,
        mut progress: impl FnMut(u64),
    ) -> Result<Touched, OtherError> {
        self.begin(in_order, false)?;
        self.touched(answering, &mut progress)
    }

    /// As [`Other::touch`], and has it read and hash all bytes afterwards: says where each chunk starts,
    /// and its hash.
    ///
    /// # Errors
    /// As for that.
    pub(super) fn touch_and_hash(
        &mut self,
        in_order: ByteLen,
        answering: &AdoptedMemory,
        mut progress: impl FnMut(u64),
        mut hashed: impl FnMut(u64, &str),
    ) -> Result<(Touched, Whole), OtherError> {
        self.begin(in_order, true)?;
        let touched = self.touched(Some(answering), &mut progress)?;
        loop {
            match self.hear("hashing what it reads", Some(answering))?.0 {
                Reply::Hashed { offset, hash } => hashed(offset, &hash),
                Reply::Whole { hash, elapsed_ns } => {
                    return Ok((touched, Whole { hash, elapsed_ns }));
                }
                _ => return Err(OtherError::Confused),
            }
        }
    }

    fn begin(&mut self, in_order: ByteLen, is_hashed: bool) -> Result<(), OtherError> {
        let request = Request::Touch { in_order_bytes: in_order.get(), is_hashed };
        self.ask("touching the image", request, None)
    }

    fn touched(
        &mut self,
        answering: Option<&AdoptedMemory>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Touched, OtherError> {
        loop {
            match self.hear("touching the image", answering)?.0 {
                Reply::Progress { pages } => progress(pages),
                Reply::Touched(touched) => return Ok(touched),
                _ => return Err(OtherError::Confused),
            }
        }
    }

    fn ask(
        &mut self,
        what: &'static str,
        request: Request,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), OtherError> {
        match protocol::send(&self.socket, &request, fd) {
            Err(cause) if cause.kind() == io::ErrorKind::BrokenPipe => Err(self.ended(what, None)),
            answer => answer.map_err(|cause| OtherError::Talk { cause }),
        }
    }

    fn hear(
        &mut self,
        what: &'static str,
        answering: Option<&AdoptedMemory>,
    ) -> Result<(Reply, Option<OwnedFd>), OtherError> {
        match protocol::receive(&self.socket) {
            Ok(Some((Reply::Failed { error }, _))) => Err(OtherError::Failed { error }),
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(self.ended(what, answering)),
            Err(cause) => Err(OtherError::Talk { cause }),
        }
    }

    /// Says how it ended: its socket is closed, so it has, or is about to.
    fn ended(&mut self, what: &'static str, answering: Option<&AdoptedMemory>) -> OtherError {
        let _ = self.child.kill(); // it changes nothing for one that has ended
        match self.child.wait() {
            Ok(status) => {
                let failure = answering.and_then(AdoptedMemory::last_failure);
                OtherError::Ended { what, status, failure: failure.map(|failure| failure.reason) }
            }
            Err(cause) => OtherError::Talk { cause },
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended, and waiting finds out either way.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Unanswered {
    /// Lets uzone answer, from the image, with windows around each fault.
    ///
    /// # Errors
    /// [`OtherError`] if what was handed over is no userfaultfd, or a thread is refused.
    pub(super) fn by_uzone(
        self,
        engine: &Engine,
        image: &File,
        trace: usize,
    ) -> Result<AdoptedMemory, OtherError> {
        let remote = Remote::adopt(self.uffd)?;
        let region = RemoteRegion { start: self.start, len: self.len, offset: 0 };
        let talk = |cause| OtherError::Talk { cause };
        let backing = FileBacking::new(image.try_clone().map_err(talk)?).map_err(talk)?;
        let options = LazyOptions::default().trace(trace).deadline(DEADLINE);
        Ok(engine.adopt(remote, vec![region], probe::page_size(), Arc::new(backing), &options)?)
    }

    /// Answers one page for each fault while `work` runs, as published examples do: poll(2), read one
    /// event, copy its page. Returns how many faults there were.
    ///
    /// # Errors
    /// What `work` says, or [`OtherError::Naive`] if the kernel refused an answer.
    pub(super) fn page_by_page<T>(
        self,
        image: &Mapping,
        work: impl FnOnce() -> Result<T, OtherError>,
    ) -> Result<(T, u64), OtherError> {
        let Self { start, len, uffd } = self;
        let remote = Remote::adopt(uffd)?;
        let naive = |cause| OtherError::Naive { cause };
        let bell = Doorbell::new().map_err(naive)?;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let handler = std::thread::Builder::new().name("naive".to_owned());
            let handler = handler.spawn_scoped(scope, || {
                let answered = answer(&remote, start, image, &bell, &stop);
                if answered.is_err() {
                    // Whoever waits reads zeroes, and sees that they are wrong.
                    let _ = remote.unregister(start, len);
                }
                answered
            });
            let handler = handler.map_err(naive)?;
            let done = work();
            stop.store(true, Ordering::Release); // pairs with the handler's Acquire
            // A bell always rings: the counter behind it cannot be full.
            bell.ring().map_err(naive)?;
            let stopped = io::Error::other("its thread ended early");
            let faults = handler.join().unwrap_or(Err(stopped)).map_err(naive)?;
            Ok((done?, faults))
        })
    }
}

/// Answers until it is told to stop.
fn answer(
    remote: &Remote,
    start: Vaddr,
    image: &Mapping,
    bell: &Doorbell,
    stop: &AtomicBool,
) -> io::Result<u64> {
    let mut buffer = EventBuffer::new(1);
    let page = ByteLen::new(probe::page_size().bytes());
    let mut faults = 0;
    loop {
        wait(remote, bell, None)?;
        if stop.load(Ordering::Acquire) {
            return Ok(faults);
        }
        remote.read(&mut buffer)?;
        for event in &mut buffer {
            let Event::PageFault(fault) = event else { continue };
            faults += 1;
            let address = Vaddr::new(fault.address.get() & !(page.get() - 1));
            let offset = address.get() - start.get();
            loop {
                let answered = remote.copy_from(address, image, offset, page, Install::default());
                match answered.map_err(io::Error::other)? {
                    Answered::LayoutChanging => {}
                    Answered::All | Answered::Gone => break,
                    Answered::Present => {
                        let _ = remote.wake(address, page).map_err(io::Error::other)?;
                        break;
                    }
                    other => return Err(io::Error::other(format!("the kernel said {other:?}"))),
                }
            }
        }
    }
}

/// Starts what answers for uzone: one thread that answers, and two that wait for the disk.
///
/// # Errors
/// [`OtherError::Answer`] if a thread is refused.
pub(super) fn engine() -> Result<Engine, OtherError> {
    Ok(Engine::new(NonZeroUsize::MIN.saturating_add(1))?)
}

/// Waits a moment until what is known about faults is noted.
pub(super) fn settle(memory: &AdoptedMemory) {
    let until = Instant::now() + NOTED_WITHIN;
    let noted = || memory.latencies().iter().map(|latency| latency.count).sum::<u64>();
    while noted() < memory.stats().faults && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

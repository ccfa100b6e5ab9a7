//! Memory that a page server fills: [`AttachedMemory`], and the thread that attaches it to the next server
//! if this one ends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use uzone_os::uffd::{
    self, Doorbell, Event, EventBuffer, Features, Fill, Install, KernelFaults, Modes, Registered,
    Uffd,
};
use uzone_os::{Access, Anonymous, Mapping, Sharing, lock};
use uzone_pages::ByteLen;

use crate::error::AttachError;
use crate::protocol::{Region, Reply, Request, VERSION};
use crate::wire::Wire;

/// How long a server may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// How long to wait before a server is looked for again.
const RETRY: Duration = Duration::from_millis(20);
/// The alignment of the memory, so that windows end where page tables do.
const ALIGN: ByteLen = ByteLen::mib(2);

/// How memory is attached.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    share: bool,
    tracks: bool,
    deadline: Duration,
    kernel_faults: KernelFaults,
    dumps: bool,
}

impl Default for AttachOptions {
    fn default() -> Self {
        let (deadline, kernel_faults) = (Duration::from_secs(30), KernelFaults::IfAllowed);
        Self { share: false, tracks: false, deadline, kernel_faults, dumps: false }
    }
}

impl AttachOptions {
    /// Sets whether pages that are only read are shared with other programs that attach to the same server:
    /// not by default.
    #[must_use]
    pub fn share(mut self, share: bool) -> Self {
        self.share = share;
        self
    }

    /// Sets whether the kernel notes which pages are written to (Linux 6.7), so that a diff of the memory copies
    /// those alone, while the program is paused. By default it does not: a diff protects the memory then, and
    /// the program goes on while it is read.
    #[must_use]
    pub fn track_writes(mut self, track_writes: bool) -> Self {
        self.tracks = track_writes;
        self
    }

    /// Sets whether core dumps include the memory. They leave it out by default, as they do a mapping of a file.
    #[must_use]
    pub fn dumps(mut self, dumps: bool) -> Self {
        self.dumps = dumps;
        self
    }

    /// Sets how long there may be no server: 30 seconds by default. Afterwards each page that is missing is
    /// bad: an access raises `SIGBUS` (Linux 6.6; before, it waits for ever).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets whether system calls may be given pages that are missing, which takes a permission: if it is
    /// allowed by default. Otherwise such a call fails with `EFAULT`.
    #[must_use]
    pub fn kernel_faults(mut self, kernel_faults: KernelFaults) -> Self {
        self.kernel_faults = kernel_faults;
        self
    }
}

/// Whether a server fills the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServedBy {
    /// A server does.
    Server,
    /// The server has ended; the next one is looked for.
    Waiting,
    /// There was no server in time. Pages that are missing are bad.
    Lost {
        /// The error of the last attempt.
        reason: String,
    },
}

/// Private memory that starts as a server's image. Dropping it unmaps it, and ends the session.
///
/// # Examples
///
/// With a server started by `uzone serve --socket /run/uzone/model.sock model.uz`:
///
/// ```no_run
/// use std::path::Path;
/// use uzone_attach::{AttachOptions, AttachedMemory};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let memory = AttachedMemory::attach(Path::new("/run/uzone/model.sock"), &AttachOptions::default())?;
/// println!("{} of {}", memory.mapping().len(), memory.image());
///
/// let mut bytes = [0; 64];
/// memory.mapping().read_at(1 << 20, &mut bytes)?; // the server sends the page
/// memory.mapping().write_at(1 << 20, b"stays in this process")?;
/// # Ok(())
/// # }
/// ```
///
/// A range that is given back ([`Mapping::discard`]) is zero from then on; that call waits for the server.
/// Forked processes do not inherit the memory.
#[derive(Debug)]
pub struct AttachedMemory {
    memory: Arc<Registered>,
    state: Arc<Mutex<ServedBy>>,
    bell: Arc<Doorbell>,
    follower: Option<JoinHandle<()>>,
    image: String,
    shares: bool,
    /// The process that has the thread.
    process: u32,
}

impl AttachedMemory {
    /// Maps as much memory as the image of the server has that listens on `socket`, and has it filled when
    /// it is touched.
    ///
    /// # Errors
    /// [`AttachError`]: there is no server, it refuses, or page faults cannot be handed over.
    pub fn attach(socket: &Path, options: &AttachOptions) -> Result<Self, AttachError> {
        let mut link = Link::open(socket, options.share, options.tracks, None)?;
        let memory = Arc::new(link.map(options)?);
        link.hand_over(&memory, None)?;
        let (image, shares) = (link.image.clone(), link.file.take().is_some());
        let bell = Arc::new(Doorbell::new().map_err(AttachError::Follow)?);
        let state = Arc::new(Mutex::new(ServedBy::Server));
        let follower = Follower {
            memory: memory.clone(),
            state: state.clone(),
            bell: bell.clone(),
            deadline: options.deadline,
            tracks: options.tracks,
            link,
        };
        let thread = thread::Builder::new().name("uzone-attach".into());
        let thread = thread.spawn(move || follower.run()).map_err(AttachError::Follow)?;
        let (follower, process) = (Some(thread), std::process::id());
        Ok(Self { memory, state, bell, follower, image, shares, process })
    }

    /// Returns the memory.
    #[must_use]
    pub fn mapping(&self) -> &Mapping {
        self.memory.mapping()
    }

    /// Returns the identity of the image: the root hash of a packed image.
    #[must_use]
    pub fn image(&self) -> &str {
        &self.image
    }

    /// Returns whether pages are shared with other programs: if that was asked for, and the server does it.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shares
    }

    /// Returns whether a server fills the memory at the moment.
    #[must_use]
    pub fn served_by(&self) -> ServedBy {
        lock(&self.state).clone()
    }
}

impl Drop for AttachedMemory {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A child that was forked off: the bell is its parent's, and so is the thread that hears it.
            std::mem::forget(self.follower.take());
            return;
        }
        // The counter of a bell is never full.
        let _ = self.bell.ring();
        if let Some(follower) = self.follower.take() {
            let _ = follower.join();
        }
    }
}

/// A server that was asked for its image.
struct Link {
    wire: Wire,
    path: PathBuf,
    image: String,
    len: ByteLen,
    file: Option<OwnedFd>,
    log: Option<OwnedFd>,
}

impl Link {
    /// Asks a server for its image, which has to be `image` if one is given.
    fn open(
        path: &Path,
        share: bool,
        tracks: bool,
        image: Option<&str>,
    ) -> Result<Self, AttachError> {
        let failed = |cause| unreachable_at(path, cause);
        let mut wire = Wire::connect(path, ANSWER_WITHIN).map_err(failed)?;
        let image = image.map(str::to_owned);
        let request = Request::Attach { version: VERSION, share, image, tracks };
        wire.send(&request, &[]).map_err(failed)?;
        match wire.receive().map_err(failed)? {
            (Reply::Image { image, len_bytes, .. }, file) => {
                let len = ByteLen::new(len_bytes).align_up(uzone_os::probe::page_size().bytes())?;
                Ok(Self { wire, path: path.to_owned(), image, len, file, log: None })
            }
            (Reply::Refused { reason }, _) => {
                Err(AttachError::Refused { path: path.to_owned(), reason })
            }
            (Reply::Served, _) => Err(AttachError::NotAServer { path: path.to_owned() }),
        }
    }

    /// Maps memory for the image.
    fn map(&self, options: &AttachOptions) -> Result<Registered, AttachError> {
        let mut required = Features::EVENT_REMOVE;
        let (mapping, minor) = match &self.file {
            Some(file) => {
                required |= Features::MISSING_SHMEM | Features::MINOR_SHMEM;
                let file = file.try_clone().map_err(AttachError::Follow)?;
                let (access, sharing) = (Access::ReadWrite, Sharing::Private);
                (Mapping::file_aligned(file, 0, self.len, access, sharing, ALIGN)?, true)
            }
            None => {
                let how = Anonymous { align: Some(ALIGN), ..Anonymous::default() };
                (Mapping::anonymous(self.len, how)?, false)
            }
        };
        let to_follow = |error| AttachError::Follow(io::Error::other(error));
        mapping.keep_from_children().map_err(to_follow)?;
        if !options.dumps {
            // Where the kernel refuses, a dump has more than it needs.
            let _ = mapping.leave_out_of_dumps();
        }
        // Where the process locks all that it maps (mlockall(2)), the kernel has put pages in place by now, which
        // would never be missing.
        mapping.discard(0..self.len.get()).map_err(to_follow)?;
        if options.tracks {
            required |= Features::WRITE_PROTECT | Features::WRITE_PROTECT_ASYNC;
            // Installing pages of a memory file protected came with the latter.
            if minor {
                let shared = Features::WRITE_PROTECT_SHARED | Features::WRITE_PROTECT_ABSENT;
                required |= shared;
            }
        }
        let uffd = Uffd::open(required, Features::POISON, options.kernel_faults)?;
        let mut modes = Modes::MISSING;
        modes.set(Modes::MINOR, minor);
        modes.set(Modes::WRITE_PROTECT, options.tracks);
        Ok(Registered::new(Arc::new(uffd), mapping, modes)?)
    }

    /// Hands the faults of the memory over, with the log of an earlier server.
    fn hand_over(&mut self, memory: &Registered, log: Option<&OwnedFd>) -> Result<(), AttachError> {
        let region = Region {
            base_host_virt_addr: memory.mapping().addr().get() as u64,
            size: memory.mapping().len().get(),
            offset: 0,
            page_size: uzone_os::probe::page_size().bytes(),
        };
        let uffd = memory.uffd().as_fd();
        let fds: Vec<BorrowedFd<'_>> = [uffd].into_iter().chain(log.map(AsFd::as_fd)).collect();
        let failed = |cause| unreachable_at(&self.path, cause);
        self.wire.send(&[region], &fds).map_err(failed)?;
        match self.wire.receive().map_err(failed)? {
            (Reply::Served, log) => self.log = log,
            (Reply::Refused { reason }, _) => {
                return Err(AttachError::Refused { path: self.path.clone(), reason });
            }
            (Reply::Image { .. }, _) => {
                return Err(AttachError::NotAServer { path: self.path.clone() });
            }
        }
        Ok(())
    }
}

fn unreachable_at(path: &Path, cause: io::Error) -> AttachError {
    let path = path.to_owned();
    match cause.kind() {
        io::ErrorKind::InvalidData => AttachError::NotAServer { path },
        _ => AttachError::Unreachable { path, cause },
    }
}

/// Follows the server: attaches the memory to the next one when it ends.
struct Follower {
    memory: Arc<Registered>,
    state: Arc<Mutex<ServedBy>>,
    bell: Arc<Doorbell>,
    deadline: Duration,
    tracks: bool,
    link: Link,
}

impl Follower {
    fn run(mut self) {
        loop {
            match uffd::wait(&self.link.wire.stream, &self.bell, None) {
                Ok((_, true)) => return,
                Ok((false, _)) => continue,
                Ok(_) | Err(_) => {}
            }
            match self.link.wire.receive() {
                // Another process of the server answers from now on, and keeps another log.
                Ok((Reply::Served, log)) => self.link.log = log,
                Ok((Reply::Image { .. }, _)) => {}
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {}
                Ok((Reply::Refused { .. }, _)) | Err(_) => {
                    if !self.attach_again() {
                        return;
                    }
                }
            }
        }
    }

    /// Looks for the next server. Returns whether there is one; otherwise the memory is dropped, or was
    /// lost and is dropped by now.
    fn attach_again(&mut self) -> bool {
        *lock(&self.state) = ServedBy::Waiting;
        tracing::warn!(socket = %self.link.path.display(), "the page server has ended; the next one is awaited");
        let since = Instant::now();
        loop {
            let error = match self.attach_once() {
                Ok(()) => {
                    *lock(&self.state) = ServedBy::Server;
                    return true;
                }
                Err(error) => error,
            };
            if since.elapsed() >= self.deadline {
                self.lose(uzone_os::with_causes(&error));
                return false;
            }
            // The stream has ended, so only the bell is waited for.
            let ready = uffd::wait(self.bell.as_fd(), &self.bell, Some(RETRY));
            if ready.is_ok_and(|(_, is_rung)| is_rung) {
                return false;
            }
        }
    }

    fn attach_once(&mut self) -> Result<(), AttachError> {
        // The memory file of another server has none of the pages that are mapped here.
        let Link { path, image, log, .. } = &self.link;
        let mut link = Link::open(path, false, self.tracks, Some(image))?;
        link.hand_over(&self.memory, log.as_ref())?;
        self.link = link;
        Ok(())
    }

    /// Makes each page bad that is touched from now on and is missing, until the memory is dropped.
    fn lose(&self, reason: String) {
        tracing::error!(%reason, "there is no page server; memory that is missing is bad now");
        *lock(&self.state) = ServedBy::Lost { reason };
        let page = uzone_os::probe::page_size().bytes();
        let mut buffer = EventBuffer::new(64);
        // Faults that a server has read are reported again. Memory that is mapped is not refused.
        let _ = self.memory.wake(0..self.memory.mapping().len().get());
        loop {
            if let Ok((_, true)) = uffd::wait(self.memory.uffd().as_fd(), &self.bell, None) {
                return;
            }
            // An error leaves no event.
            let _ = self.memory.uffd().read(&mut buffer);
            for event in &mut buffer {
                let Event::PageFault(fault) = event else { continue };
                if let Some(offset) = self.memory.offset_of(fault.address) {
                    let start = offset / page * page;
                    // It is there, or the kernel has no such mark, and the thread waits on.
                    let bad = start..start + page;
                    let _ = self.memory.install(bad.clone(), Fill::Poison, Install::default());
                    let _ = self.memory.wake(bad);
                }
            }
        }
    }
}

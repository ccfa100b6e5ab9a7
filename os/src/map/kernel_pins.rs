//! Memory that the kernel itself keeps in place: [`KernelPins`], the fixed buffers of an io_uring.
//!
//! The kernel pins a fixed buffer for long (`FOLL_LONGTERM`): it moves none of its pages, swaps none out, and
//! copies none for a child that was forked off. That needs no privilege. The ring has no queue that is mapped and does
//! no I/O; only its table of buffers is used. Pages that are not present become so, and pages of a CMA area or a movable
//! zone are moved out of it first.
//!
//! The kernel walks the page tables, takes a reference for each page or, where pages are neighbours in a large
//! folio, for each run of them. So the cost follows the folios that the memory has and not its length. A buffer is
//! at most 1 GiB; longer memory takes several. A ring has 64, and there are as many rings as were needed at once.
//!
//! Without `CAP_IPC_LOCK`, pinned memory counts against `RLIMIT_MEMLOCK`, with all that the user has pinned for
//! any io_uring. A child that was forked off has the descriptors of its parent's rings as well: memory that the parent
//! has not unpinned when it ends stays pinned until the child ends or calls execve(2). The child itself unpins nothing of its
//! parent's, and its own pins have rings of their own.
//!
//! Locks: one for the list of rings, held while one is made, and not while the kernel pins.
//! Unsafe: calls of io_uring_setup(2) and io_uring_register(2).
//! Source: io_uring_setup(2), io_uring_register(2), getrlimit(2), "`pin_user_pages()` and related calls" in the Linux
//! documentation.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use std::io;
use std::os::fd::OwnedFd;
use std::process;
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use rustix::io_uring::{
    IoringRegisterOp, IoringRsrcFlags, io_uring_params, io_uring_ptr, io_uring_register,
    io_uring_rsrc_register, io_uring_rsrc_update2, io_uring_setup, iovec,
};
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use uzone_pages::{ByteLen, ErrorKind};

use crate::lock;
use crate::map::bytes::AccessError;
use crate::map::mapping::Mapping;
use crate::map::pagemap_scan::PAGEMAP;

/// The longest buffer of an io_uring that the kernel takes.
const MAX_BUFFER: usize = 1 << 30;
/// How many buffers a ring has room for. For each large folio that it pins, the kernel looks at all of them, so with the
/// most that it allows, 16,384, pinning 1 GiB of 2 MiB folios takes four times as long.
const BUFFERS: u32 = u64::BITS;

/// The reason why the kernel did not pin memory, or does not show its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelPinError {
    /// The range is not inside the mapping.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// There is no io_uring to pin memory with: the kernel has none, or this process may not use it.
    #[error("{}", no_ring(*errno))]
    NoRing {
        /// The number of the kernel's error.
        errno: i32,
    },
    /// The user may not pin as much.
    #[error(
        "cannot pin {len}: RLIMIT_MEMLOCK is {limit} for all that the user has pinned; raise it with `ulimit -l`, or give the process CAP_IPC_LOCK"
    )]
    Limit {
        /// The length that was asked for.
        len: ByteLen,
        /// How much the user may pin.
        limit: ByteLen,
    },
    /// The kernel refused the memory: a page cannot be written or made present, memory is short, or the memory is
    /// of a kind that is not pinned for long.
    #[error("cannot pin {len}: {}", refused(*errno))]
    Refused {
        /// The length that was asked for.
        len: ByteLen,
        /// The number of the kernel's error.
        errno: i32,
    },
    /// The place of pages could not be read.
    #[error("cannot read {PAGEMAP}: {}", io::Error::from_raw_os_error(*errno))]
    Unreadable {
        /// The number of the kernel's error.
        errno: i32,
    },
    /// The kernel shows no numbers of frames to this process.
    #[error(
        "{PAGEMAP} shows no page frames to this process: give it CAP_SYS_ADMIN, or let a driver look them up"
    )]
    Hidden,
    /// A page is not present, so it has no place.
    #[error(
        "the page at byte {offset:#x} of the mapping is not present: it has no place in memory"
    )]
    NotPresent {
        /// The first byte of the page, counted from the start of the mapping.
        offset: u64,
    },
}

impl KernelPinError {
    /// Returns the kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Access(error) => error.kind(),
            Self::Limit { .. } => ErrorKind::OutOfMemory,
            Self::Unreadable { .. } => ErrorKind::Io,
            Self::Hidden => ErrorKind::PermissionDenied,
            Self::NotPresent { .. } => ErrorKind::NotFound,
            Self::NoRing { errno } => match Errno::from_raw_os_error(*errno) {
                Errno::PERM | Errno::ACCESS => ErrorKind::PermissionDenied,
                Errno::NOSYS => ErrorKind::NotSupported,
                _ => ErrorKind::Io,
            },
            Self::Refused { errno, .. } => match Errno::from_raw_os_error(*errno) {
                Errno::FAULT | Errno::OPNOTSUPP => ErrorKind::InvalidInput,
                Errno::NOMEM => ErrorKind::OutOfMemory,
                _ => ErrorKind::Io,
            },
        }
    }
}

/// Returns why there is no io_uring, and the remedy.
fn no_ring(errno: i32) -> String {
    match Errno::from_raw_os_error(errno) {
        Errno::PERM | Errno::ACCESS => "the kernel's pins need io_uring, which this process may not use: as root, `sysctl kernel.io_uring_disabled=0`, and let the filter of the container pass io_uring_setup(2)".to_owned(),
        Errno::NOSYS => "the kernel's pins need io_uring, and this kernel was built without it".to_owned(),
        Errno::MFILE | Errno::NFILE => "the kernel's pins need one more descriptor for an io_uring: raise `ulimit -n`".to_owned(),
        _ => format!("cannot make an io_uring: {}", io::Error::from_raw_os_error(errno)),
    }
}

/// Returns why memory was refused, and the remedy.
fn refused(errno: i32) -> String {
    match Errno::from_raw_os_error(errno) {
        Errno::FAULT | Errno::OPNOTSUPP => "a page of it cannot be written or made present, or it is of a file whose writes the kernel tracks; take private memory, a memory file or huge pages of a pool, map it writable, and a file as long as the mapping".to_owned(),
        Errno::NOMEM => "the kernel has no memory for its pages, or for the list of them".to_owned(),
        _ => io::Error::from_raw_os_error(errno).to_string(),
    }
}

/// Pins that the kernel itself takes, of io_urings that are made when they are needed.
#[derive(Debug, Default)]
pub struct KernelPins {
    /// All of one process.
    rings: Mutex<Vec<Arc<Ring>>>,
}

impl KernelPins {
    /// Has the kernel pin a range of a mapping, widened to whole pages, until the result is dropped. Pages that
    /// were not present become so.
    ///
    /// The mapping may be dropped before: its pages then lie nowhere in this process, and stay pinned.
    ///
    /// # Errors
    /// [`KernelPinError`]; then nothing is pinned.
    pub fn pin(&self, mapping: &Mapping, range: Range<u64>) -> Result<KernelPin, KernelPinError> {
        let part = mapping.widen(&range)?;
        let len = ByteLen::new((part.end - part.start) as u64); // at most 64 bits
        // Dropped after an error, it unpins the parts before.
        let mut buffers = Vec::with_capacity(part.len().div_ceil(MAX_BUFFER));
        for offset in part.clone().step_by(MAX_BUFFER) {
            let memory = iovec {
                iov_base: mapping.at(offset).as_ptr().cast(),
                iov_len: MAX_BUFFER.min(part.end - offset),
            };
            let buffer = self.buffer()?;
            buffer.set(&memory).map_err(|cause| failure(len, cause))?;
            buffers.push(buffer);
        }
        Ok(KernelPin { _buffers: buffers })
    }

    /// Returns a buffer that is not in use, of a new ring if there is none.
    fn buffer(&self) -> Result<Buffer, KernelPinError> {
        let mut rings = lock(&self.rings);
        // A child that was forked off has the descriptors of its parent's rings, and lets go of them here.
        let process = process::id();
        rings.retain(|ring| ring.process == process);
        if let Some(buffer) = rings.iter().rev().find_map(Buffer::take) {
            return Ok(buffer);
        }
        let made = Ring::new().map_err(|cause| KernelPinError::NoRing { errno: errno(cause) })?;
        let ring = rings.push_mut(Arc::new(made));
        match Buffer::take(ring) {
            Some(buffer) => Ok(buffer),
            None => unreachable!("a new ring has no buffer in use"),
        }
    }
}

/// Memory that the kernel has pinned; dropping this unpins it.
#[derive(Debug)]
#[must_use = "dropping it unpins the memory"]
pub struct KernelPin {
    _buffers: Vec<Buffer>,
}

/// An io_uring whose table has room for [`BUFFERS`], and whose queues are not mapped.
#[derive(Debug)]
struct Ring {
    fd: OwnedFd,
    /// The process that made it.
    process: u32,
    /// A bit for each buffer that is in use.
    used: AtomicU64,
}

impl Ring {
    fn new() -> rustix::io::Result<Self> {
        let mut params = io_uring_params::default();
        // SAFETY: io_uring_setup(2) reads and writes `params`, which is borrowed mutably; its flags
        // are zero, so that none of the descriptors in it is looked at.
        let fd = unsafe { io_uring_setup(1, &mut params) }?;
        let mut table = io_uring_rsrc_register::default();
        table.nr = BUFFERS;
        table.flags = IoringRsrcFlags::REGISTER_SPARSE;
        // SAFETY: io_uring_register(2) with this operation reads as many bytes at the argument as the last number
        // states, which are all of `table`. A sparse table has pointers to no buffers and no tags.
        unsafe {
            let (table, len) = ((&raw const table).cast(), TABLE_BYTES);
            io_uring_register(&fd, IoringRegisterOp::RegisterBuffers2, table, len)
        }?;
        Ok(Self { fd, process: process::id(), used: AtomicU64::new(0) })
    }

    fn is_ours(&self) -> bool {
        self.process == process::id()
    }
}

/// A place in the table of a ring. Dropped, it is emptied, and the next pin may have it.
#[derive(Debug)]
struct Buffer {
    ring: Arc<Ring>,
    number: u32,
}

impl Buffer {
    /// Takes a buffer of a ring that is not in use.
    fn take(ring: &Arc<Ring>) -> Option<Self> {
        // Relaxed, as in the drop: the kernel's own lock orders the calls that change a place.
        let taken = ring.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            (used != u64::MAX).then(|| used | (used + 1))
        });
        Some(Self { ring: ring.clone(), number: taken.ok()?.trailing_ones() })
    }

    /// Has the kernel pin memory and puts it in the place. Memory of no length empties the place.
    fn set(&self, memory: &iovec) -> rustix::io::Result<()> {
        let mut update = io_uring_rsrc_update2::default();
        update.offset = self.number;
        update.data = io_uring_ptr::new((&raw const *memory).cast_mut().cast());
        update.nr = 1;
        // SAFETY: io_uring_register(2) with this operation reads an `io_uring_rsrc_update2` at the argument, whose
        // size is the last number, and one `iovec` at its `data`, which is `memory`. There are no tags. The kernel
        // pins the pages that the `iovec` names, and reads or writes them for requests of this ring alone. There are
        // none: its queues are not mapped, and its descriptor stays here.
        let updated = unsafe {
            let (update, len) = ((&raw const update).cast(), UPDATE_BYTES);
            io_uring_register(&self.ring.fd, IoringRegisterOp::RegisterBuffersUpdate, update, len)
        }?;
        // It counts the places that it has changed.
        if updated == 1 { Ok(()) } else { Err(Errno::IO) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // In a child, it is a number of the parent's, whose memory stays pinned.
        if !self.ring.is_ours() {
            return;
        }
        match self.set(&iovec { iov_base: core::ptr::null_mut(), iov_len: 0 }) {
            Ok(()) => {
                self.ring.used.fetch_and(!(1 << self.number), Ordering::Relaxed);
            }
            // The number stays in use. The memory is unpinned when the ring is closed.
            Err(cause) => tracing::error!("memory stays pinned by the kernel: {cause}"),
        }
    }
}

const TABLE_BYTES: u32 = 32;
const _: () = assert!(size_of::<io_uring_rsrc_register>() == 32);
const UPDATE_BYTES: u32 = 32;
const _: () = assert!(size_of::<io_uring_rsrc_update2>() == 32);

fn errno(cause: Errno) -> i32 {
    cause.raw_os_error()
}

/// Returns the error for memory that the kernel refused.
fn failure(len: ByteLen, cause: Errno) -> KernelPinError {
    match lock_limit().filter(|_| cause == Errno::NOMEM) {
        Some(limit) => KernelPinError::Limit { len, limit },
        None => KernelPinError::Refused { len, errno: errno(cause) },
    }
}

/// Returns how much this process may lock, if anything keeps it from locking more.
fn lock_limit() -> Option<ByteLen> {
    // A process whose capabilities cannot be read is taken to have none.
    let is_free =
        capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    getrlimit(Resource::Memlock).current.filter(|_| !is_free).map(ByteLen::new)
}

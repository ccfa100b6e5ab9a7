//! Fixed buffers of an io_uring: memory that the kernel itself has pinned, for I/O that should not pin it
//! for each request. [`FixedBuffers`] has no queue and does no I/O: it exists to use, and to measure, the
//! kernel's own pins.
//!
//! The kernel walks the page tables of registered memory, makes missing pages present, takes a
//! reference for each page or, where pages are neighbours in a large folio, for each run of them, and
//! keeps a list of the runs. So the cost follows the folios that the memory has and not its length.
//! Without `CAP_IPC_LOCK`, pinned memory counts against `RLIMIT_MEMLOCK` of the user.
//!
//! Unsafe: calls of io_uring_setup(2) and io_uring_register(2).
//! Source: io_uring_setup(2), io_uring_register(2), getrlimit(2).

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::io_uring::{
    IoringRegisterOp, io_uring_params, io_uring_register, io_uring_setup, iovec,
};
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use uzone_pages::ByteLen;

use crate::map::mapping::Mapping;
use crate::map::mapping::error::{MAX_BUFFER, MAX_BUFFERS, MappingError};

/// An io_uring whose queues are not mapped, good for registering memory only.
#[derive(Debug)]
pub struct FixedBuffers {
    ring: OwnedFd,
}

impl FixedBuffers {
    /// Makes a ring.
    ///
    /// # Errors
    /// [`MappingError::Ring`] where there is no io_uring for this process.
    pub fn new() -> Result<Self, MappingError> {
        let mut params = io_uring_params::default();
        // SAFETY: io_uring_setup(2) reads and writes `params`, which is borrowed mutably; its flags
        // are zero, so that none of the descriptors in it is looked at.
        let ring = unsafe { io_uring_setup(1, &mut params) };
        ring.map(|ring| Self { ring }).map_err(|cause| MappingError::Ring(cause.into()))
    }

    /// Has the kernel pin a mapping, all of its pages, until the result is dropped. Pages that were
    /// not present become so.
    ///
    /// # Errors
    /// [`MappingError::PinTooLong`] or [`MappingError::Pin`]; then nothing is pinned.
    pub fn register<'a>(
        &'a mut self,
        mapping: &'a Mapping,
    ) -> Result<Registered<'a>, MappingError> {
        let mapped_len = mapping.mapped_len();
        let len = ByteLen::new(mapped_len as u64);
        let parts = mapped_len.div_ceil(MAX_BUFFER);
        let count = u32::try_from(parts)
            .ok()
            .filter(|_| parts <= MAX_BUFFERS)
            .ok_or(MappingError::PinTooLong { len })?;
        let buffers: Vec<iovec> = (0..mapped_len)
            .step_by(MAX_BUFFER)
            .map(|offset| iovec {
                iov_base: mapping.at(offset).as_ptr().cast(),
                iov_len: MAX_BUFFER.min(mapped_len - offset),
            })
            .collect();
        // SAFETY: io_uring_register(2) reads `count` iovecs, as many as `buffers` has, and pins the memory
        // that they name, all of `mapping`. It is read or written only by requests of this ring, and there
        // are none: its queues are not mapped, and its descriptor stays here.
        let answer = unsafe {
            io_uring_register(
                &self.ring,
                IoringRegisterOp::RegisterBuffers,
                buffers.as_ptr().cast(),
                count,
            )
        };
        match answer {
            Ok(_) => Ok(Registered { ring: self, _mapping: mapping }),
            Err(cause) => {
                let limit = if cause == Errno::NOMEM { lock_limit() } else { None };
                Err(MappingError::Pin { len, limit, cause: cause.into() })
            }
        }
    }
}

/// Returns the most memory that this process may lock, if there is a limit.
fn lock_limit() -> Option<ByteLen> {
    // A process whose capabilities cannot be read is taken to have none.
    let is_free =
        capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    getrlimit(Resource::Memlock).current.filter(|_| !is_free).map(ByteLen::new)
}

/// A mapping that the kernel has pinned; dropping this lets it go.
#[derive(Debug)]
#[must_use = "dropping it unpins the memory"]
pub struct Registered<'a> {
    ring: &'a mut FixedBuffers,
    _mapping: &'a Mapping,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        // SAFETY: io_uring_register(2) with this operation takes no argument; it ends the kernel's own hold on the
        // memory, and touches no memory of Rust's.
        let answer = unsafe {
            io_uring_register(
                &self.ring.ring,
                IoringRegisterOp::UnregisterBuffers,
                core::ptr::null(),
                0,
            )
        };
        // There are buffers, so that it cannot fail; if it did, closing the ring would let them go.
        debug_assert!(answer.is_ok(), "buffers that were registered are unregistered: {answer:?}");
    }
}

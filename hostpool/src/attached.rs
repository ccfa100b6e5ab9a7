//! A pool in another process: [`AttachedPool`].
//!
//! A pool that is shared lies in a memory file. Its owner hands blocks out, and tells another process their numbers by
//! whatever connects the two. That process maps the file, registers its own view, and reads and writes the blocks that it
//! was told. Only the owner knows which blocks are whose.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use uzone_os::Addr;
use uzone_os::peer::Peer;
use uzone_pages::ByteLen;

use crate::error::HostPoolError;
use crate::options::HostPoolOptions;
use crate::pool::HostPool;
use crate::report::HostPoolReport;

/// The pool of another process, with the memory that both share.
///
/// Dropping it unregisters and unmaps this process's view; the memory is the owner's until all views are gone.
#[derive(Debug)]
pub struct AttachedPool {
    pool: HostPool,
    owner: Peer,
}

impl AttachedPool {
    /// Attaches to the pool with this name ([`HostPool::shared_name`]), as a process of the same user and the same PID
    /// namespace can. The options have the block of the owner; their pages, place, zeroing and budget have no effect.
    ///
    /// Memory that the owner has not populated yet is populated by threads of this process, so attach when the owner is
    /// ready. Returns in milliseconds; [`AttachedPool::wait_ready`] waits for the registration.
    ///
    /// # Errors
    /// [`HostPoolError::Attach`] if there is no such process or file, and otherwise as [`HostPool::open`].
    pub fn open(name: &str, options: HostPoolOptions) -> Result<Self, HostPoolError> {
        let why = |why: String| HostPoolError::Attach { why };
        let owner = name.strip_prefix("/proc/").and_then(|name| name.split('/').next());
        let owner = owner.and_then(|owner| owner.parse::<u32>().ok());
        let owner = owner.ok_or_else(|| why(format!("{name} is no name of a shared pool")))?;
        // First the process, so that its number is not another's when the file is opened.
        let peer = Peer::of_number_now(owner);
        let peer = peer.map_err(|error| why(format!("process {owner}: {error}")))?;
        let file = File::options().read(true).write(true).open(name);
        let file = file.map_err(|error| why(format!("{name}: {error}")))?;
        Self::attach(file, peer, options)
    }

    /// Attaches to the pool in this memory file ([`HostPool::shared_file`]), of which a descriptor was passed, with the
    /// process that owns it, as the other end of the socket ([`Peer::of`]).
    ///
    /// # Errors
    /// As [`AttachedPool::open`].
    pub fn attach(
        file: impl Into<OwnedFd>,
        owner: Peer,
        options: HostPoolOptions,
    ) -> Result<Self, HostPoolError> {
        let file: OwnedFd = file.into();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let size = std::fs::metadata(&path).map(|file| ByteLen::new(file.len()));
        let size = size.map_err(|error| HostPoolError::Attach { why: format!("{error}") })?;
        let pool = HostPool::open_file(Path::new(&path), size, options)?;
        let attached = Self { pool, owner };
        if attached.is_owner_alive() {
            Ok(attached)
        } else {
            Err(HostPoolError::Attach { why: "its owner has ended".to_owned() })
        }
    }

    /// Returns whether the owner's process is alive. When it has ended, no block is anybody's any more.
    #[must_use]
    pub fn is_owner_alive(&self) -> bool {
        self.owner.is_alive()
    }

    /// As [`HostPool::wait_ready`], of this process's view.
    ///
    /// # Errors
    /// As there.
    pub fn wait_ready(&self, bytes: ByteLen, within: Duration) -> Result<ByteLen, HostPoolError> {
        self.pool.wait_ready(bytes, within)
    }

    /// As [`HostPool::report`], of this process's view.
    #[must_use]
    pub fn report(&self) -> HostPoolReport {
        self.pool.report()
    }

    /// As [`HostPool::ready`], of this process's view.
    #[must_use]
    pub fn ready(&self) -> ByteLen {
        self.pool.ready()
    }

    /// Returns the address of the pool in this process: block `n` starts `n` times the length of a block behind it.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.pool.addr()
    }

    /// Returns how long the pool is; never zero.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        self.pool.len()
    }

    /// Returns how long a block is.
    #[must_use]
    pub fn block_len(&self) -> ByteLen {
        self.pool.block_len()
    }

    /// Returns how many blocks the pool has.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.pool.blocks()
    }

    /// Copies bytes out of a block, from byte `offset_bytes` of the pool on.
    ///
    /// # Errors
    /// [`HostPoolError::Access`] unless all bytes are inside; then none is copied.
    pub fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), HostPoolError> {
        Ok(self.pool.region().read_at(offset_bytes, out)?)
    }

    /// Copies bytes into a block, from byte `offset_bytes` of the pool on.
    ///
    /// # Errors
    /// As [`AttachedPool::read_at`].
    pub fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), HostPoolError> {
        Ok(self.pool.region().write_at(offset_bytes, bytes)?)
    }
}

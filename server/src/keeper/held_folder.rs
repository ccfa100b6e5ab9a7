//! The folder that keeps the machines of one server, for as long as a process of it lives: [`HeldFolder`].

use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// The folder of one server. Only that uses it, as long as one of its processes lives: each has a descriptor
/// of the folder, which is locked, and the lock goes with the last of them.
#[derive(Debug)]
pub(crate) struct HeldFolder {
    pub(crate) path: PathBuf,
    lock: File,
}

impl HeldFolder {
    /// Goes on with the folder of another process, which had locked it.
    pub(crate) fn of(path: PathBuf, lock: OwnedFd) -> Self {
        Self { path, lock: lock.into() }
    }

    /// Locks a folder. `None` if another server has it, or it is not there.
    pub(crate) fn hold(path: PathBuf) -> io::Result<Option<Self>> {
        let lock = match File::open(&path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(cause)) => return Err(cause),
        }
        // The server that had it may have removed it meanwhile.
        let held = Self { path, lock };
        Ok(held.is_there().then_some(held))
    }

    /// Returns whether the folder has its name still.
    pub(crate) fn is_there(&self) -> bool {
        let (held, there) = (self.lock.metadata(), fs::metadata(&self.path));
        let file = |metadata: Metadata| (metadata.dev(), metadata.ino());
        held.is_ok_and(|held| there.is_ok_and(|there| file(held) == file(there)))
    }

    /// Removes the folder if it is empty.
    pub(crate) fn remove(&self) {
        if self.is_there() {
            let _ = fs::remove_dir(&self.path);
        }
    }
}

impl AsFd for HeldFolder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }
}

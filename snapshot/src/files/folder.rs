//! Files of a directory that others may write to as well: [`Folder`], [`lock_within`].
//!
//! A name there may be a symbolic link to anywhere, a FIFO that no one reads, or another name of a file elsewhere.
//! None of them is followed, waited for or written to: only a regular file below the directory, with one name, is opened.
//! A lock is waited for until a limit, because any process may hold it.
//!
//! Source: openat2(2) "RESOLVE_BENEATH", "RESOLVE_NO_SYMLINKS", fifo(7), flock(2).

use std::ffi::OsString;
use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// The pause before a thread tries a lock again.
const TRY_AGAIN: Duration = Duration::from_millis(5);

/// A directory.
#[derive(Debug)]
pub struct Folder(OwnedFd);

impl Folder {
    /// Opens a directory.
    ///
    /// # Errors
    /// The error of open(2).
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(Self(rustix::fs::open(path, flags, Mode::empty())?))
    }

    /// Opens a file of the directory for reading and writing. With `is_made`, one that is not there is made, for its
    /// owner alone.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the name is not that of a regular file, or the file has other names as
    /// well, and the error of openat2(2).
    pub fn open_file(&self, name: &str, is_made: bool) -> io::Result<File> {
        let refused = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        // To open a FIFO does not wait then; a regular file does not differ.
        let mut flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        flags.set(OFlags::CREATE, is_made);
        let mode = if is_made { Mode::RUSR | Mode::WUSR } else { Mode::empty() };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let file: File = match rustix::fs::openat2(&self.0, name, flags, mode, resolve) {
            Ok(fd) => fd.into(),
            Err(Errno::LOOP) => return refused("it is a symbolic link"),
            Err(cause) => return Err(cause.into()),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return refused("it is not a regular file");
        }
        if metadata.nlink() > 1 {
            return refused("it has another name as well");
        }
        Ok(file)
    }

    /// Removes a name.
    ///
    /// # Errors
    /// The error of unlink(2).
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::empty())?)
    }

    /// Returns the regular files of the directory: their names, the times of their last change, and the numbers of their blocks of 512
    /// bytes they take. A file that is gone meanwhile is left out.
    ///
    /// # Errors
    /// The error of getdents(2).
    pub fn files(&self) -> io::Result<Vec<(OsString, Duration, u64)>> {
        let mut files = Vec::new();
        for entry in Dir::read_from(&self.0)? {
            let name = entry?.file_name().to_owned();
            let found = rustix::fs::statat(&self.0, &name, AtFlags::SYMLINK_NOFOLLOW);
            let is_file = |stat: &Stat| FileType::from_raw_mode(stat.st_mode).is_file();
            if let Some(stat) = found.ok().filter(is_file) {
                let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
                let parts = u32::try_from(stat.st_mtime_nsec).unwrap_or(0);
                let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
                let name = OsString::from_vec(name.into_bytes());
                files.push((name, Duration::new(seconds, parts), blocks));
            }
        }
        Ok(files)
    }
}

/// Locks a file as flock(2) does, for all that share it or for this process alone.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] if another process holds the lock for longer than `limit`, and the error of
/// flock(2).
pub fn lock_within(file: &File, is_shared: bool, limit: Duration) -> io::Result<()> {
    let started = Instant::now();
    loop {
        match if is_shared { file.try_lock_shared() } else { file.try_lock() } {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(cause)) => return Err(cause),
            Err(TryLockError::WouldBlock) if started.elapsed() >= limit => {
                let text = format!("another process has held its lock for {limit:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Err(TryLockError::WouldBlock) => thread::sleep(TRY_AGAIN),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn nothing_but_a_regular_file_below_the_directory_is_opened() {
        let path = std::env::temp_dir().join(format!("uzone-folder-{}", std::process::id()));
        fs::create_dir_all(path.join("in")).unwrap();
        let folder = Folder::open(&path.join("in")).unwrap();
        fs::write(path.join("out"), "kept").unwrap();
        symlink("../out", path.join("in/link")).unwrap();
        fs::hard_link(path.join("out"), path.join("in/second")).unwrap();
        let fifo = path.join("in/fifo");
        rustix::fs::mknodat(rustix::fs::CWD, fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
            .unwrap();
        for (name, why) in [
            ("link", "a symbolic link"),
            ("second", "another name"),
            ("fifo", "not a regular file"),
        ] {
            let error = folder.open_file(name, true).unwrap_err();
            assert!(error.to_string().contains(why), "{name}: {error}");
        }
        assert!(folder.open_file("../out", true).is_err() && folder.open_file("/", true).is_err());
        assert_eq!(folder.open_file("new", false).unwrap_err().kind(), io::ErrorKind::NotFound);
        let file = folder.open_file("new", true).unwrap();
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
        let mut names: Vec<_> = folder.files().unwrap().into_iter().map(|file| file.0).collect();
        names.sort();
        assert_eq!(names, ["new", "second"]);
        let other = folder.open_file("new", false).unwrap();
        other.lock().unwrap();
        let error = lock_within(&file, true, Duration::from_millis(1)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(other);
        lock_within(&file, false, Duration::ZERO).unwrap();
        folder.remove("new").unwrap();
        assert_eq!(fs::read(path.join("out")).unwrap(), b"kept");
        fs::remove_dir_all(&path).unwrap();
    }
}

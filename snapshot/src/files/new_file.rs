//! A file that appears as a whole or not at all: [`NewFile`]. Where a command writes: such a file, or a stream
//! ([`OutFile`]).
//!
//! A new file is written without a name (`O_TMPFILE`), so nothing of it is left however the process ends. Where
//! the file system has no such files it has a hidden name until it is finished.

use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

/// The most symbolic links that lead to a file, by path_resolution(7).
const MOST_LINKS: usize = 40;

/// The output of a command: a file that appears as a whole, or a stream, which has each byte at once.
#[derive(Debug)]
pub enum OutFile {
    /// A regular file.
    New(NewFile),
    /// Standard output, a pipe, or a device.
    Stream(File),
}

impl OutFile {
    /// Opens an output at `path`: a stream if one is there, or else a new file as
    /// [`NewFile::with_mode`] makes it. The path `-` is standard output, and `./-` a file of that name.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if it is a directory or a socket, and the errors of open(2). To open a
    /// FIFO waits for its reader.
    pub fn create(path: &Path, mode: impl Fn(u32) -> u32) -> io::Result<Self> {
        if is_stdout(path) {
            return Ok(Self::Stream(io::stdout().as_fd().try_clone_to_owned()?.into()));
        }
        match fs::metadata(path) {
            Ok(found) if is_stream(&found) => {
                File::options().write(true).open(path).map(Self::Stream)
            }
            Ok(found) if found.is_file() && !is_at(&found, path) => {
                File::options().write(true).truncate(true).open(path).map(Self::Stream)
            }
            _ => NewFile::with_mode(path, mode).map(Self::New),
        }
    }

    /// Checks that a file can be made at `path`, or that a stream is there, before the bytes are known.
    ///
    /// # Errors
    /// The errors of [`OutFile::create`], except that a stream is not opened.
    pub fn check(path: &Path) -> io::Result<()> {
        if is_stdout(path) || fs::metadata(path).is_ok_and(|found| is_stream(&found)) {
            return Ok(());
        }
        NewFile::create(path).map(drop)
    }

    /// Returns the file, to be written from its start to its end.
    #[must_use]
    pub fn file(&self) -> &File {
        match self {
            Self::New(new) => new.file(),
            Self::Stream(file) => file,
        }
    }

    /// Ends the writing: a new file gets its name as by [`NewFile::finish`].
    ///
    /// # Errors
    /// The error of the system.
    pub fn finish(self) -> io::Result<()> {
        match self {
            Self::New(new) => new.finish(),
            Self::Stream(file) => match file.sync_all() {
                // A pipe, a terminal and many devices keep nothing.
                Err(cause) if cause.kind() == io::ErrorKind::InvalidInput => Ok(()),
                synced => synced,
            },
        }
    }
}

fn is_stream(found: &Metadata) -> bool {
    let kind = found.file_type();
    kind.is_fifo() || kind.is_char_device() || kind.is_block_device()
}

/// Returns whether a file is the one that its path leads to by names: a link of procfs leads to files without one.
fn is_at(found: &Metadata, path: &Path) -> bool {
    let named = behind_links(path.to_owned()).and_then(fs::symlink_metadata);
    named.is_ok_and(|named| (named.dev(), named.ino()) == (found.dev(), found.ino()))
}

/// Returns whether output to a path goes to standard output: the path is `-`, or names the same pipe or file.
#[must_use]
pub fn is_stdout(path: &Path) -> bool {
    let is_ours = || {
        let (own, found) = (rustix::fs::fstat(io::stdout()).ok()?, fs::metadata(path).ok()?);
        let is_one = (own.st_dev, own.st_ino) == (found.dev(), found.ino());
        Some(is_one && (found.is_file() || found.file_type().is_fifo()))
    };
    path == Path::new("-") || is_ours().unwrap_or(false)
}

/// A file that is being written. If it is dropped unfinished, the old file stays at its path.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    path: PathBuf,
    /// The hidden name, while it has that.
    hidden: Option<PathBuf>,
}

impl NewFile {
    /// Makes a file that is to be at `path`, open for reading and writing. Where that is a symbolic link, the file is to
    /// be at its target.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if there is something else than a file, and the error of open(2): there
    /// is no such directory, or it may not be written.
    pub fn create(path: impl Into<PathBuf>) -> io::Result<Self> {
        Self::with_mode(path, |_| 0o666)
    }

    /// Makes a file as [`NewFile::create`] does, with the permissions that `mode` returns for its group. The umask
    /// takes from them, and its owner may read and write it.
    ///
    /// # Errors
    /// The errors of [`NewFile::create`].
    pub fn with_mode(path: impl Into<PathBuf>, mode: impl Fn(u32) -> u32) -> io::Result<Self> {
        let path = behind_links(path.into())?;
        let own = rustix::process::getegid().as_raw();
        let bits = Mode::from_bits_truncate(mode(own) | 0o600);
        // A file without a name gets one by procfs alone.
        let nameless = match Path::new("/proc/self/fd").exists() {
            true => open_nameless(directory_of(&path), bits)?,
            false => None,
        };
        let new = match nameless {
            Some(file) => Self { file, path, hidden: None },
            None => Self::create_hidden(path, bits)?,
        };
        // A directory may give its files a group.
        let made = new.file.metadata()?;
        let narrower = made.mode() & (mode(made.gid()) | 0o600);
        if narrower != made.mode() & 0o777 {
            new.file.set_permissions(Permissions::from_mode(narrower))?;
        }
        Ok(new)
    }

    fn create_hidden(path: PathBuf, mode: Mode) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let (hidden, file) =
            with_hidden_name(&path, |hidden| Ok(rustix::fs::open(hidden, flags, mode)?.into()))?;
        Ok(Self { file, path, hidden: Some(hidden) })
    }

    /// Returns the file, to be written.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns its later path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the file at its path, in place of the old one, once its bytes are on the device.
    ///
    /// # Errors
    /// The error of the system; then the path is as before.
    pub fn finish(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        let hidden = match &self.hidden {
            Some(hidden) => hidden.clone(),
            None => {
                let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                let (hidden, ()) = with_hidden_name(&self.path, |hidden| {
                    Ok(rustix::fs::linkat(CWD, &own, CWD, hidden, AtFlags::SYMLINK_FOLLOW)?)
                })?;
                self.hidden = Some(hidden.clone());
                hidden
            }
        };
        fs::rename(hidden, &self.path)?;
        self.hidden = None;
        // A directory that may be written and not read cannot be synced.
        match File::open(directory_of(&self.path)) {
            Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            directory => directory?.sync_all(),
        }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(hidden) = &self.hidden {
            // If it cannot be removed, it has a name that no reader takes for a finished file.
            let _ = fs::remove_file(hidden);
        }
    }
}

/// Makes a file without a name, or returns `None` where the file system has none: it refuses them, or it or the
/// kernel ignores the flag and opens the directory.
fn open_nameless(directory: &Path, mode: Mode) -> io::Result<Option<File>> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(directory, flags, mode) {
        Ok(fd) => Ok(Some(fd.into())),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => Ok(None),
        Err(cause) => Err(cause.into()),
    }
}

/// Returns the path of the file that symbolic links lead to, or of the one that is free behind them.
fn behind_links(mut path: PathBuf) -> io::Result<PathBuf> {
    let refused = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    for _ in 0..=MOST_LINKS {
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_symlink() => {
                path = directory_of(&path).join(fs::read_link(&path)?);
            }
            Ok(found) if found.is_file() => return Ok(path),
            Ok(found) if found.is_dir() => return refused("it is a directory"),
            Ok(found) if found.file_type().is_socket() => return refused("it is a socket"),
            Ok(_) => return refused("it is not a regular file"),
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(cause),
            Err(_) if path.as_os_str().as_bytes().ends_with(b"/") => {
                return refused("it is the name of a directory");
            }
            Err(cause) if path.file_name().is_none() => return Err(cause),
            Err(_) => return Ok(path),
        }
    }
    Err(Errno::LOOP.into())
}

/// Returns the permissions that a file of the group `group` may have whose bytes are those of another file: no user may
/// read or write it that may not do the same with the other.
#[must_use]
pub fn mode_for(other: &Metadata, group: u32) -> u32 {
    let mode = other.mode() & 0o666;
    if other.gid() == group {
        return mode;
    }
    // A member of one group alone has the rights that the other file gives both its group and all others.
    let common = mode & mode >> 3 & 0o006;
    mode & 0o600 | common << 3 | common
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(directory) if directory != Path::new("") => directory,
        _ => Path::new("."),
    }
}

/// Calls `make` with hidden names until one is free: a run that was killed may have left some.
fn with_hidden_name<T>(
    path: &Path,
    make: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(PathBuf, T)> {
    for _ in 0..100 {
        let hidden = hidden_name(path);
        match make(&hidden) {
            Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|made| (hidden, made)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

fn hidden_name(path: &Path) -> PathBuf {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    // Relaxed: a number that no other file of this process has.
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    // A long name must not become too long by its suffix.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let short: String = name.chars().take(40).collect();
    path.with_file_name(format!(".{short}.{}-{number}.part", std::process::id()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_is_there_when_it_is_finished_and_not_before() {
        let directory = std::env::temp_dir().join(format!("uzone-new-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let path = directory.join("file");
        let count = || fs::read_dir(&directory).unwrap().count();
        let ways: [fn(PathBuf) -> io::Result<NewFile>; 2] =
            [|path| NewFile::create(path), |path| NewFile::create_hidden(path, Mode::from(0o644))];
        for make in ways {
            fs::write(&path, "before").unwrap();
            let new = make(path.clone()).unwrap();
            new.file().write_all(b"after").unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"before");
            drop(new);
            assert_eq!((fs::read(&path).unwrap(), count()), (b"before".to_vec(), 1));
            let new = make(path.clone()).unwrap();
            new.file().write_all(b"after").unwrap();
            new.finish().unwrap();
            assert_eq!((fs::read(&path).unwrap(), count()), (b"after".to_vec(), 1));
        }
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(NewFile::create(path).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_file_of_another_group_is_for_no_one_who_could_not_read_the_first() {
        let directory = std::env::temp_dir().join(format!("uzone-mode-{}", std::process::id()));
        fs::write(&directory, "").unwrap();
        let own = fs::metadata(&directory).unwrap().gid();
        // The mode of a file, and that of one with its bytes in the same group and in another one.
        for (mode, same, other) in [
            (0o600, 0o600, 0o600),
            (0o755, 0o644, 0o644),
            (0o640, 0o640, 0o600),
            (0o604, 0o604, 0o600),
            (0o664, 0o664, 0o644),
            (0o666, 0o666, 0o666),
        ] {
            fs::set_permissions(&directory, Permissions::from_mode(mode)).unwrap();
            let found = fs::metadata(&directory).unwrap();
            assert_eq!(mode_for(&found, own), same, "{mode:o}");
            assert_eq!(mode_for(&found, own + 1), other, "{mode:o}");
        }
        fs::remove_file(&directory).unwrap();
    }
}

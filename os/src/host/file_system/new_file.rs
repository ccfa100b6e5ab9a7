//! A file that appears as a whole or not at all: [`NewFile`].
//!
//! It is written without a name (`O_TMPFILE`), so nothing of it is left however the process ends. Where the
//! file system has no such files it has a hidden name until it is finished.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode};

/// A file that is being written. Dropping it unfinished leaves what was at its path before.
#[derive(Debug)]
pub struct NewFile {
    pub(super) file: File,
    path: PathBuf,
    /// The hidden name, while it has that.
    pub(super) hidden: Option<PathBuf>,
}

impl NewFile {
    /// Makes a file that is to be at `path`, open for reading and writing.
    ///
    /// # Errors
    /// The error of open(2): there is no such directory, or it may not be written.
    pub fn create(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        let mode = Mode::from_bits_truncate(0o666); // the umask takes from it
        match super::open_nameless(directory_of(&path), mode)? {
            Some(file) => Ok(Self { file, path, hidden: None }),
            None => Self::create_hidden(path),
        }
    }

    pub(super) fn create_hidden(path: PathBuf) -> io::Result<Self> {
        let (hidden, file) = with_hidden_name(&path, |hidden| {
            File::options().read(true).write(true).create_new(true).open(hidden)
        })?;
        Ok(Self { file, path, hidden: Some(hidden) })
    }

    /// Returns the file, to be written.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns where it will be.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the file at its path, in place of what is there, once its bytes are on the device.
    ///
    /// # Errors
    /// The error of the system; then what is at the path is as before.
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
    // A long name must not become too long by what is added to it.
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
            [|path| NewFile::create(path), NewFile::create_hidden];
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
}

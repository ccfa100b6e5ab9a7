//! Where the bytes of an image come from: [`Source`], [`FileSource`].

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use uzone_os::page_cache::{self, CachedRead};

/// Bytes that do not change, read from any offset by several threads at once.
pub trait Source: Send + Sync {
    /// Returns what errors call it: a path or an address.
    fn name(&self) -> String;

    /// Returns how many bytes there are.
    fn byte_len(&self) -> u64;

    /// Reads bytes from `offset` on until `out` is full. It may block.
    ///
    /// # Errors
    /// The error of the system, [`io::ErrorKind::UnexpectedEof`] if there are not as many.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Reads bytes as [`Source::read_at`] does if that takes no device and no network. Returns whether it
    /// did; by default it never does.
    ///
    /// # Errors
    /// As for [`Source::read_at`].
    fn read_ready(&self, offset: u64, out: &mut [u8]) -> io::Result<bool> {
        let _ = (offset, out);
        Ok(false)
    }

    /// Returns the source that `name` means beside this one: how an image names its parent.
    ///
    /// # Errors
    /// The error of the system, [`io::ErrorKind::Unsupported`] if this source has no neighbours.
    fn neighbour(&self, name: &str) -> io::Result<Box<dyn Source>> {
        let _ = name;
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// A file as a source.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    path: PathBuf,
    len: u64,
}

impl FileSource {
    /// Opens a regular file.
    ///
    /// # Errors
    /// The error of the system, [`io::ErrorKind::InvalidInput`] if it is another kind of file.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        // Before it is opened: opening a FIFO waits for a writer, and an image can name one as its parent.
        let is_file = std::fs::metadata(&path)?.is_file();
        let file = is_file.then(|| File::open(&path)).transpose()?;
        let file = file.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")
        })?;
        Self::from_file(file, path)
    }

    /// Takes a file that is open for reading, as long as it is now. Errors call it by `path`, in whose
    /// directory its neighbours are.
    ///
    /// # Errors
    /// The error of the system that its length was queried with.
    pub fn from_file(file: File, path: impl Into<PathBuf>) -> io::Result<Self> {
        let len = file.metadata()?.len();
        Ok(Self { file, path: path.into(), len })
    }
}

impl Source for FileSource {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn byte_len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }

    fn read_ready(&self, offset: u64, out: &mut [u8]) -> io::Result<bool> {
        let read = page_cache::read_cached(&self.file, offset, out)?;
        Ok(matches!(read, CachedRead::Read { bytes } if bytes == out.len()))
    }

    fn neighbour(&self, name: &str) -> io::Result<Box<dyn Source>> {
        let directory = self.path.parent().unwrap_or(Path::new(""));
        Ok(Box::new(Self::open(directory.join(name))?))
    }
}

/// Bytes in memory as a source.
impl Source for Vec<u8> {
    fn name(&self) -> String {
        format!("{} bytes in memory", self.len())
    }

    fn byte_len(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).ok();
        let bytes = start.and_then(|start| self.get(start..)?.get(..out.len()));
        out.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn read_ready(&self, offset: u64, out: &mut [u8]) -> io::Result<bool> {
        self.read_at(offset, out).map(|()| true)
    }
}

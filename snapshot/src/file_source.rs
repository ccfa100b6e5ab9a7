//! A file as a source of bytes, and the source that a path names: [`FileSource`], [`open_source`].

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use uzone_os::page_cache;

use crate::files::next_data;
use crate::source::{Address, RequestOptions, Source, address, joined};

/// Files that are open already, by their names. They stay the same although the names may be other
/// files' by now.
pub(crate) type OpenFiles = Arc<[(String, File)]>;

/// Opens the file at a path, or, with the feature `object-storage`, the object that a URL names, such as
/// `s3://BUCKET/KEY`, by requests as `requests` has them.
///
/// # Errors
/// As for [`FileSource::open`], and those of the store.
pub fn open_source(path: &Path, requests: &RequestOptions) -> io::Result<Box<dyn Source>> {
    open_by(path, requests, &Arc::default())
}

/// Opens a source as [`open_source`] does; a file and its neighbours by `files`, if it is one of them.
pub(crate) fn open_by(
    path: &Path,
    requests: &RequestOptions,
    files: &OpenFiles,
) -> io::Result<Box<dyn Source>> {
    match address(path) {
        Address::File if files.iter().any(|(name, _)| *name == path.display().to_string()) => {
            Ok(Box::new(FileSource::open_by(path.to_owned(), files.clone())?))
        }
        Address::File => Ok(Box::new(FileSource::open(path)?)),
        #[cfg(feature = "object-storage")]
        Address::Url { url, .. } => Ok(Box::new(crate::object::ObjectSource::open(url, requests)?)),
        #[cfg(not(feature = "object-storage"))]
        Address::Url { .. } => {
            let _ = requests;
            Err(without_object_storage())
        }
    }
}

#[cfg(not(feature = "object-storage"))]
pub(crate) fn without_object_storage() -> io::Error {
    let why =
        "this program reads and writes files alone: build it with the feature `object-storage`";
    io::Error::new(io::ErrorKind::Unsupported, why)
}

/// Returns the identity of the bytes of a file, which changes with them. A program that sets the
/// time of the last change hides it.
pub(crate) fn identity(file: &File) -> io::Result<String> {
    let metadata = file.metadata()?;
    Ok(format!(
        "file {}:{} of {} bytes, changed {}.{:09}",
        metadata.dev(),
        metadata.ino(),
        metadata.len(),
        metadata.mtime(),
        metadata.mtime_nsec()
    ))
}

/// A file as a source.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    path: PathBuf,
    len: u64,
    identity: String,
    /// The files by which its neighbours are opened, unless there are none.
    files: OpenFiles,
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
        let (len, identity) = (file.metadata()?.len(), identity(&file)?);
        let files = OpenFiles::default();
        Ok(Self { file, path: path.into(), len, identity, files })
    }

    /// Opens one of `files`, which its neighbours are opened by as well.
    fn open_by(path: PathBuf, files: OpenFiles) -> io::Result<Self> {
        let name = path.display().to_string();
        let file = files.iter().find_map(|(other, file)| (*other == name).then_some(file));
        let file = file.ok_or(io::ErrorKind::NotFound)?.try_clone()?;
        Ok(Self { files, ..Self::from_file(file, path)? })
    }

    /// Returns where `name` is looked for: beside the file itself, and if a symbolic link leads to it, beside that.
    fn places(&self, name: &str) -> Vec<PathBuf> {
        let beside = |path: &Path| path.parent().unwrap_or(Path::new("")).join(name);
        let is_link = std::fs::symlink_metadata(&self.path).is_ok_and(|found| found.is_symlink());
        let real = is_link.then(|| self.path.canonicalize().ok()).flatten();
        real.iter().map(|real| beside(real)).chain([beside(&self.path)]).collect()
    }
}

impl Source for FileSource {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn byte_len(&self) -> u64 {
        self.len
    }

    fn identity(&self) -> Option<String> {
        Some(self.identity.clone())
    }

    fn file(&self) -> Option<&File> {
        Some(&self.file)
    }

    fn data_at(&self, offset: u64) -> io::Result<Range<u64>> {
        let data = match next_data(&self.file, offset) {
            Ok(data) => data.unwrap_or(self.len..self.len),
            // A file system that has no holes may not know the question.
            Err(cause) if cause.kind() == io::ErrorKind::InvalidInput => offset..self.len,
            Err(cause) => return Err(cause),
        };
        // A part that was cut off looks like a hole.
        if self.file.metadata()?.len() < self.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(data.start.min(self.len)..data.end.min(self.len))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        uzone_os::read_exact_at(&self.file, out, offset)
    }

    fn read_ready(&self, offset: u64, out: &mut [u8]) -> io::Result<bool> {
        Ok(page_cache::read_cached(&self.file, offset, out)? == Some(out.len()))
    }

    fn will_need(&self, ranges: &[Range<u64>]) {
        fetch(&self.file, ranges);
    }

    fn neighbour(&self, name: &str) -> io::Result<Box<dyn Source>> {
        let places = self.places(name);
        let names = |cause: io::Error| {
            io::Error::new(cause.kind(), format!("{}: {cause}", places[0].display()))
        };
        let mut failed = None;
        for path in &places {
            let opened = match self.files.is_empty() {
                true => Self::open(path),
                false => Self::open_by(path.clone(), self.files.clone()),
            };
            match opened {
                Ok(source) => return Ok(Box::new(source)),
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                    failed.get_or_insert(cause);
                }
                Err(cause) => return Err(names(cause)),
            }
        }
        // A user who has the files may not see the links that led to them.
        let ends_so = |other: &&(String, File)| Path::new(&other.0).ends_with(name);
        if let Some((found, _)) = self.files.iter().find(ends_so) {
            return Ok(Box::new(Self::open_by(found.into(), self.files.clone())?));
        }
        Err(names(failed.unwrap_or_else(|| io::ErrorKind::NotFound.into())))
    }
}

/// Has the kernel read ranges of a file, many at once. Two that share a page are one.
pub(crate) fn fetch(file: &File, ranges: &[Range<u64>]) {
    const PAGE: u64 = 4096;
    for range in joined(ranges, PAGE) {
        if let Some(len) = NonZeroU64::new(range.end.saturating_sub(range.start)) {
            // It is a hint; an error of the file shows when it is read.
            let _ = page_cache::read_ahead(file, range.start, len);
        }
    }
}

//! Where an image or its raw bytes are written: [`OutputFile`]. A file and an object have their name when they
//! are whole; a stream has each byte at once.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
#[cfg(feature = "object-storage")]
use std::sync::{Mutex, PoisonError};

use crate::error::SnapshotError;
use crate::files::OutFile;
#[cfg(feature = "object-storage")]
use crate::object::Upload;
use crate::source::{self, Address};

/// A file, an object or a stream that is being written. Dropping a file or an object leaves nothing.
pub(crate) struct OutputFile {
    path: PathBuf,
    kind: Kind,
}

enum Kind {
    File(OutFile),
    #[cfg(feature = "object-storage")]
    Object(Box<Mutex<Upload>>),
}

impl OutputFile {
    /// Opens the file at `path`, or makes one with the permissions that `mode` returns for its group.
    pub(crate) fn create(path: &Path, mode: impl Fn(u32) -> u32) -> Result<Self, SnapshotError> {
        let kind = match source::address(path) {
            Address::File => OutFile::create(path, mode).map(Kind::File),
            #[cfg(feature = "object-storage")]
            Address::Url { url, fragment: None } => {
                Upload::create(url).map(|upload| Kind::Object(Box::new(Mutex::new(upload))))
            }
            #[cfg(feature = "object-storage")]
            Address::Url { .. } => {
                let why = "the URL of what is written has no #";
                Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why))
            }
            #[cfg(not(feature = "object-storage"))]
            Address::Url { .. } => Err(crate::file_source::without_object_storage()),
        };
        let kind = kind.map_err(SnapshotError::write(path, "create"))?;
        Ok(Self { path: path.to_owned(), kind })
    }

    /// Opens or makes the file that an image is written to: it is opened by the end of its file, and on a block device no one
    /// knows where that is.
    pub(crate) fn of_image(path: &Path, mode: impl Fn(u32) -> u32) -> Result<Self, SnapshotError> {
        let made = Self::create(path, mode)?;
        let is_block = |file: &File| Ok(file.metadata()?.file_type().is_block_device());
        match &made.kind {
            Kind::File(OutFile::Stream(file))
                if is_block(file).map_err(SnapshotError::write(path, "look at"))? =>
            {
                let why = "an image on a block device cannot be opened: write it to a file";
                Err(SnapshotError::Options { why })
            }
            _ => Ok(made),
        }
    }

    /// Returns the file, which can be written in any order; `None` if it is an object or a stream.
    pub(crate) fn file(&self) -> Option<&File> {
        match &self.kind {
            Kind::File(OutFile::New(new)) => Some(new.file()),
            _ => None,
        }
    }

    /// Returns the directory in which a file will be.
    pub(crate) fn directory(&self) -> Option<&Path> {
        match &self.kind {
            Kind::File(OutFile::New(new)) => match new.path().parent() {
                Some(directory) if directory != Path::new("") => Some(directory),
                _ => Some(Path::new(".")),
            },
            _ => None,
        }
    }

    /// Writes bytes behind those that are there. One thread writes at a time.
    pub(crate) fn append(&self, bytes: &[u8]) -> Result<(), SnapshotError> {
        let written = match &self.kind {
            Kind::File(out) => out.file().write_all(bytes),
            #[cfg(feature = "object-storage")]
            Kind::Object(upload) => uzone_os::lock(upload).append(bytes),
        };
        written.map_err(SnapshotError::write(&self.path, "write"))
    }

    /// Gives a file or an object its name, with all that was written on the device.
    pub(crate) fn finish(self) -> Result<(), SnapshotError> {
        let finished = match self.kind {
            Kind::File(out) => out.finish(),
            #[cfg(feature = "object-storage")]
            Kind::Object(upload) => {
                upload.into_inner().unwrap_or_else(PoisonError::into_inner).finish()
            }
        };
        finished.map_err(SnapshotError::write(&self.path, "finish"))
    }
}

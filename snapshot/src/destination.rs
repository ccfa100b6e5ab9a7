//! Where an image or its raw bytes are written: [`Destination`]. It has its name when it is whole.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
#[cfg(feature = "object-storage")]
use std::sync::{Mutex, PoisonError};

use uzone_os::file_system::NewFile;

use crate::error::SnapshotError;
#[cfg(feature = "object-storage")]
use crate::object::Upload;
use crate::source::{self, Address};

/// A file or an object that is being written. Dropping it leaves nothing.
pub(crate) struct Destination {
    path: PathBuf,
    kind: Kind,
}

enum Kind {
    File(NewFile),
    #[cfg(feature = "object-storage")]
    Object(Box<Mutex<Upload>>),
}

impl Destination {
    pub(crate) fn create(path: &Path) -> Result<Self, SnapshotError> {
        let kind = match source::address(path) {
            Address::File => NewFile::create(path).map(Kind::File),
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

    /// Returns the file, which can be written in any order; `None` if it is an object.
    pub(crate) fn file(&self) -> Option<&File> {
        match &self.kind {
            Kind::File(new) => Some(new.file()),
            #[cfg(feature = "object-storage")]
            Kind::Object(_) => None,
        }
    }

    /// Writes bytes behind those that are there. One thread writes at a time.
    pub(crate) fn append(&self, bytes: &[u8]) -> Result<(), SnapshotError> {
        let written = match &self.kind {
            Kind::File(new) => new.file().write_all(bytes),
            #[cfg(feature = "object-storage")]
            Kind::Object(upload) => uzone_os::lock(upload).append(bytes),
        };
        written.map_err(SnapshotError::write(&self.path, "write"))
    }

    /// Gives it its name, with all that was written on the device.
    pub(crate) fn finish(self) -> Result<(), SnapshotError> {
        let finished = match self.kind {
            Kind::File(new) => new.finish(),
            #[cfg(feature = "object-storage")]
            Kind::Object(upload) => {
                upload.into_inner().unwrap_or_else(PoisonError::into_inner).finish()
            }
        };
        finished.map_err(SnapshotError::write(&self.path, "finish"))
    }
}

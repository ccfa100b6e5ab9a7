//! Where an image or its raw bytes are written, in order: [`Destination`]. It has its name when it is whole.

use std::io::{self, Write};
use std::path::Path;
#[cfg(feature = "object-storage")]
use std::sync::{Mutex, PoisonError};

use uzone_os::file_system::NewFile;

#[cfg(feature = "object-storage")]
use crate::object::Upload;
use crate::source::{self, Address};

/// A file or an object that is being written. Dropping it leaves nothing.
pub(crate) enum Destination {
    File(NewFile),
    #[cfg(feature = "object-storage")]
    Object(Box<Mutex<Upload>>),
}

impl Destination {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        match source::address(path) {
            Address::File => Ok(Self::File(NewFile::create(path)?)),
            #[cfg(feature = "object-storage")]
            Address::Url { url, fragment: None } => {
                Ok(Self::Object(Box::new(Mutex::new(Upload::create(url)?))))
            }
            #[cfg(feature = "object-storage")]
            Address::Url { .. } => {
                let why = "the URL of what is written has no #";
                Err(io::Error::new(io::ErrorKind::InvalidInput, why))
            }
            #[cfg(not(feature = "object-storage"))]
            Address::Url { .. } => Err(crate::file_source::without_object_storage()),
        }
    }

    /// Writes bytes behind those that are there. One thread writes at a time.
    pub(crate) fn append(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::File(new) => new.file().write_all(bytes),
            #[cfg(feature = "object-storage")]
            Self::Object(upload) => {
                upload.lock().unwrap_or_else(PoisonError::into_inner).append(bytes)
            }
        }
    }

    /// Gives it its name, with all that was written on the device.
    pub(crate) fn finish(self) -> io::Result<()> {
        match self {
            Self::File(new) => new.finish(),
            #[cfg(feature = "object-storage")]
            Self::Object(upload) => {
                upload.into_inner().unwrap_or_else(PoisonError::into_inner).finish()
            }
        }
    }
}

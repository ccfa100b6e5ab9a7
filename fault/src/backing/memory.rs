//! Memory of a memory file: [`MemoryBacking`]. Its pages are mapped where they are missing, and
//! never copied.
//!
//! Several mappings of one file share its pages; private ones copy the pages that they write. A hole of
//! the file is zero, as it is in read(2).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use uzone_os::uffd::in_thread::Source;
use uzone_os::{Mapping, Sharing};
use uzone_pages::{ByteLen, FaultAround};

use crate::backing::hooks::Backing;
use crate::backing::window::{Filled, Window};
use crate::error::{BackingError, MapError};

/// The pages of a memory file, of the host's size or huge.
#[derive(Debug)]
pub struct MemoryBacking {
    file: Arc<Mapping>,
    sharing: Sharing,
}

impl MemoryBacking {
    /// Takes a memory file by a mapping of it ([`Mapping::memfd`]), and whether writes reach it.
    ///
    /// # Errors
    /// [`MapError::Backing`] if it is anonymous memory, or does not start at the file's start.
    pub fn new(file: Arc<Mapping>, sharing: Sharing) -> Result<Self, MapError> {
        match file.file_offset() {
            Some(0) => Ok(Self { file, sharing }),
            Some(_) => Err(MapError::Backing { reason: "it starts inside of its file" }),
            None => Err(MapError::Backing { reason: "it is no memory file" }),
        }
    }
}

/// Maps the pages of a window that the page cache has; those that it does not have are zero.
pub(crate) fn continue_or_zero(window: &mut Window<'_>) -> Result<(), BackingError> {
    let range = window.range();
    if window.continue_mapping(range.clone())? == Filled::Hole {
        let _ = window.zero(range)?;
    }
    Ok(())
}

impl Backing for MemoryBacking {
    fn map_pages(&self, window: &mut Window<'_>) {
        while let Some(run) = window.next_run() {
            // A hole stays open; if a thread waits for it, `fault` fills it with zeroes.
            if window.continue_mapping(run).is_err() {
                return;
            }
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        continue_or_zero(window)
    }

    fn byte_len(&self) -> Option<ByteLen> {
        Some(self.file.len())
    }

    fn memory_file(&self) -> io::Result<Option<(OwnedFd, Sharing)>> {
        let fd = self.file.fd().ok_or(io::ErrorKind::Unsupported)?;
        Ok(Some((fd.as_fd().try_clone_to_owned()?, self.sharing)))
    }

    fn in_thread(&self) -> Option<Source> {
        Some(Source::Cached)
    }

    fn largest_window(&self) -> FaultAround {
        FaultAround::MAX
    }
}

//! A memory file and the diffs of it as one input: [`Layers`].
//!
//! Firecracker writes a diff as a sparse file as long as the memory: the pages that were written since the
//! snapshot before it are data, all others are holes. So each page is that of the last diff which has it, or
//! that of the memory file. A hole is known from zeroes by lseek(2) alone, which is right only on the file
//! that Firecracker wrote: see [`uzone_os::file_system::hole_problem`] for what is refused. A copy cannot be
//! known: it may have other holes.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use uzone_os::file_system::{hole_problem, next_data};

use crate::error::SnapshotError;

/// The page of the guest, which a diff has or has not.
const PAGE_BYTES: u64 = 4096;

/// A memory file with diffs on top, read in order.
#[derive(Debug)]
pub struct Layers {
    base: File,
    /// The diffs, the oldest first.
    diffs: Vec<Diff>,
    at: u64,
    len: u64,
}

#[derive(Debug)]
struct Diff {
    file: File,
    takes_all: bool,
    /// The data that ends behind the position, or nothing behind the end.
    data: Range<u64>,
}

impl Layers {
    /// Opens a memory file and its diffs, the oldest first. With `takes_all`, every byte of a diff is taken,
    /// and its holes are zeroes.
    ///
    /// # Errors
    /// [`SnapshotError::Holes`] if a diff does not show which pages it has, [`SnapshotError::OtherLength`] if
    /// it is not one of this memory, [`SnapshotError::Read`] if a file cannot be opened.
    pub fn open(base: &Path, diffs: &[PathBuf], takes_all: bool) -> Result<Self, SnapshotError> {
        let (base, len) = open(base)?;
        let diffs = diffs.iter().map(|path| {
            let (file, len_bytes) = open(path)?;
            if len_bytes != len {
                return Err(SnapshotError::OtherLength {
                    path: path.clone(),
                    len_bytes,
                    below_bytes: len,
                });
            }
            let problem = hole_problem(&file, PAGE_BYTES).map_err(|cause| failed(path, cause))?;
            match problem.filter(|_| !takes_all) {
                Some(why) => Err(SnapshotError::Holes { path: path.clone(), why }),
                None => Ok(Diff { file, takes_all, data: 0..0 }),
            }
        });
        let diffs = diffs.collect::<Result<_, _>>()?;
        Ok(Self { base, diffs, at: 0, len })
    }

    /// Returns how many bytes there are.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.len
    }
}

fn failed(path: &Path, cause: io::Error) -> SnapshotError {
    let name = path.display().to_string();
    SnapshotError::Read { name, offset: 0, len_bytes: 0, cause }
}

fn open(path: &Path) -> Result<(File, u64), SnapshotError> {
    let open = || {
        // Before it is opened: opening a FIFO waits for a writer.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        Ok((file, len))
    };
    open().map_err(|cause| failed(path, cause))
}

impl Diff {
    /// Returns the next data that ends behind `at`; it is empty if there is none.
    fn data_at(&mut self, at: u64, len: u64) -> io::Result<Range<u64>> {
        if self.takes_all {
            return Ok(at..len);
        }
        if self.data.end <= at {
            self.data = next_data(&self.file, at)?.unwrap_or(len..u64::MAX);
        }
        Ok(self.data.clone())
    }
}

impl Read for Layers {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let at = self.at;
        let mut end = self.len.min(at.saturating_add(out.len() as u64));
        if at >= end {
            return Ok(0);
        }
        let mut from = &self.base;
        // The newest first: what it has hides the others.
        for diff in self.diffs.iter_mut().rev() {
            let data = diff.data_at(at, self.len)?;
            if data.start <= at {
                end = end.min(data.end);
                from = &diff.file;
                break;
            }
            end = end.min(data.start);
        }
        let len = usize::try_from(end - at).unwrap_or(usize::MAX);
        let read = from.read_at(&mut out[..len], at)?;
        if read == 0 {
            // Not an end: the image would be shorter than the memory, and look whole.
            let why = "a file became shorter while it was read";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
        }
        self.at += read as u64;
        Ok(read)
    }
}

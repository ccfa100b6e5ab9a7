//! The mapped files: a file and a memory file with the same bytes, and the right words.

use std::fs::File;
use std::io::{self, Write};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use uzone_fault::FileBacking;
use uzone_harness::{BenchError, Result, index};
use uzone_os::{Access, Mapping, Sharing, page_cache};
use uzone_pages::ByteLen;

/// The page that the tables count in; a host with another one is refused.
pub(super) const PAGE: u64 = 4096;

/// The length of one write.
const PIECE: usize = 1 << 20;

/// Returns the 8 bytes that stand at a multiple of 8.
pub(super) fn word(offset: u64) -> u64 {
    (offset / 8 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn fill(offset: u64, out: &mut [u8]) {
    for (at, chunk) in (offset..).step_by(8).zip(out.chunks_exact_mut(8)) {
        chunk.copy_from_slice(&word(at).to_ne_bytes());
    }
}

/// Calls `write` with all bytes in order.
fn each_piece<E>(
    len: ByteLen,
    mut write: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut bytes = vec![0; PIECE];
    for offset in (0..len.get()).step_by(PIECE) {
        let bytes = &mut bytes[..index(len.get() - offset).min(PIECE)];
        fill(offset, bytes);
        write(offset, bytes)?;
    }
    Ok(())
}

/// A file without a name, in a directory of the caller's.
pub(super) struct Source {
    pub(super) file: File,
    pub(super) len: ByteLen,
    directory: PathBuf,
}

impl Source {
    pub(super) fn new(directory: &Path, len: ByteLen) -> Result<Self> {
        let make = || {
            let mut file = tempfile::tempfile_in(directory)?;
            each_piece(len, |_, bytes| file.write_all(bytes))?;
            // The page cache does not drop dirty pages.
            file.sync_all()?;
            Ok(Self { file, len, directory: directory.to_owned() })
        };
        make().map_err(|cause| BenchError::no_file(len, directory, cause))
    }

    /// Returns the file once more.
    pub(super) fn again(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Returns a backing of the file's bytes.
    pub(super) fn backing(&self) -> Result<Arc<FileBacking>> {
        Ok(Arc::new(FileBacking::new(self.again()?)?))
    }

    /// Brings the first `len` bytes into the page cache.
    pub(super) fn warm(&self, len: ByteLen) -> Result {
        use std::os::unix::fs::FileExt;
        let mut bytes = vec![0; PIECE];
        for offset in (0..len.get()).step_by(PIECE) {
            let bytes = &mut bytes[..index(len.get() - offset).min(PIECE)];
            self.file.read_exact_at(bytes, offset)?;
        }
        Ok(())
    }

    /// Drops the file from the page cache. Returns the number of pages that stay.
    pub(super) fn chill(&self) -> Result<u64> {
        let Some(len) = NonZeroU64::new(self.len.get()) else { return Ok(0) };
        page_cache::forget(&self.file, 0, len)?;
        Ok(page_cache::cached(&self.file, 0, len)?.unwrap_or(0))
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Maps the first `len` bytes without uzone.
    pub(super) fn map(&self, len: ByteLen) -> Result<Mapping> {
        Ok(Mapping::file(self.again()?, 0, len, Access::ReadOnly, Sharing::Private)?)
    }

    /// Maps the first `len` bytes, all of them present.
    pub(super) fn mapped(&self, len: ByteLen) -> Result<Arc<Mapping>> {
        let mapped = self.map(len)?;
        mapped.populate(0..len.get())?;
        Ok(Arc::new(mapped))
    }
}

/// Makes a memory file with all pages present.
pub(super) fn memory_file(len: ByteLen) -> Result<Arc<Mapping>> {
    let memory = Mapping::memfd("uzone-bench", len, None)?;
    each_piece(len, |offset, bytes| memory.write_at(offset, bytes))?;
    Ok(Arc::new(memory))
}

/// Maps the first `len` bytes of a memory file. For answering its faults, `access` is read-write.
pub(super) fn map_memory_file(memory: &Mapping, len: ByteLen, access: Access) -> Result<Mapping> {
    let fd = memory.fd().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
    Ok(Mapping::file(fd.try_clone_to_owned()?, 0, len, access, Sharing::Private)?)
}

//! Memory to be managed: [`Region`], an owned range of anonymous memory, a memory file, huge pages
//! or a file.
//!
//! A region is bytes; what is known about its pages is a [`Pagemap`](crate::Pagemap), which takes
//! the region in and gives it back at unbind. Its bytes may change under us (a device writes them,
//! another process maps the file), so they are copied in and out and never lent as a slice.
//!
//! Units: lengths are bytes; pages are the host's base pages, whatever is behind the region.
//! Cost: making a region reserves addresses. Memory is taken when a page is first touched, except
//! from a hugetlb pool, which promises its pages at once.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use uzone_os::{
    Access, AccessError, Anonymous, FileId, HugeAdvice, HugeSize, MapError, Mapping, Sharing,
};
use uzone_pages::{AddrError, ByteLen, PageCount, PageSize};

/// A region that could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The length is no multiple of the page size.
    #[error("a region of {len_bytes} bytes ends inside a page: its length is a multiple of {page}")]
    EndsInsidePage {
        /// What was asked for.
        len_bytes: u64,
        /// The size of a page of the backing.
        page: PageSize,
    },
    /// The memory could not be mapped.
    #[error("cannot make a region of {len} of {backing}")]
    Map {
        /// What was asked for.
        len: ByteLen,
        /// What should have been behind it.
        backing: Backing,
        /// Which limit or check forbade it, and what would help.
        #[source]
        cause: MapError,
    },
    /// A file could not be opened or read.
    #[error("cannot open {path} for reading and writing", path = path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the kernel answered.
        #[source]
        cause: io::Error,
    },
}

/// What is behind a region.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backing {
    /// Private memory of no file.
    Anonymous,
    /// A memory file, whose descriptor can be handed to others.
    Memfd,
    /// Pages of a hugetlb pool.
    Hugetlb(HugeSize),
    /// A file, from an offset on.
    File {
        /// Where it was opened.
        path: PathBuf,
        /// The first byte of the region in it.
        offset_bytes: u64,
    },
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => f.write_str("anonymous memory"),
            Self::Memfd => f.write_str("a memory file"),
            Self::Hugetlb(size) => write!(f, "huge pages of {size}"),
            Self::File { path, offset_bytes } => {
                write!(f, "{} from byte {offset_bytes} on", path.display())
            }
        }
    }
}

/// The bytes of a file that are behind a region, as far as two regions may have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileExtent {
    file: FileId,
    start: u64,
    end: u64,
}

impl FileExtent {
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.file == other.file && self.start < other.end && other.start < self.end
    }
}

/// An owned range of memory, unmapped when dropped.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
    backing: Backing,
    page_size: PageSize,
    pages: PageCount,
}

impl Region {
    /// Reserves private memory of no file, all zero. Nothing is taken before a page is touched, so
    /// `len` may be larger than the memory of the machine.
    ///
    /// # Errors
    /// [`RegionError`] if `len` cuts a page, or names the limit that forbids the mapping.
    pub fn anonymous(len: ByteLen) -> Result<Self, RegionError> {
        let how = Anonymous { huge: HugeAdvice::Advise, ..Anonymous::default() };
        Self::mapped(len, Backing::Anonymous, || Mapping::anonymous(len, how))
    }

    /// Makes a memory file that [`Region::mapping`] can hand to other processes.
    ///
    /// # Errors
    /// [`RegionError`] if `len` cuts a page, or names the limit that forbids it.
    pub fn memfd(name: &str, len: ByteLen) -> Result<Self, RegionError> {
        Self::mapped(len, Backing::Memfd, || Mapping::memfd(name, len, None))
    }

    /// Takes huge pages from the pool of `size`; they are promised at once.
    ///
    /// # Errors
    /// [`RegionError`] if `len` cuts a huge page, or with the numbers of the pool if it is too
    /// small.
    pub fn hugetlb(len: ByteLen, size: HugeSize) -> Result<Self, RegionError> {
        let page = size.page_size();
        if !len.get().is_multiple_of(page.bytes()) {
            return Err(RegionError::EndsInsidePage { len_bytes: len.get(), page });
        }
        Self::mapped(len, Backing::Hugetlb(size), || Mapping::hugetlb(len, size))
    }

    /// Maps `len` bytes of a file from `offset_bytes` on, shared with whoever else maps it: what
    /// is written to the region is written to the file.
    ///
    /// # Errors
    /// [`RegionError`] if the file cannot be opened for reading and writing, or is too short, or
    /// `offset_bytes` or `len` cut a page.
    pub fn file(path: &Path, offset_bytes: u64, len: ByteLen) -> Result<Self, RegionError> {
        let open = |cause| RegionError::Open { path: path.to_owned(), cause };
        let file: File = OpenOptions::new().read(true).write(true).open(path).map_err(open)?;
        let backing = Backing::File { path: path.to_owned(), offset_bytes };
        Self::mapped(len, backing, || {
            Mapping::file(file, offset_bytes, len, Access::ReadWrite, Sharing::Shared)
        })
    }

    fn mapped(
        len: ByteLen,
        backing: Backing,
        map: impl FnOnce() -> Result<Mapping, MapError>,
    ) -> Result<Self, RegionError> {
        let page_size = uzone_os::probe::page_size();
        let pages = page_size.pages_in(len).map_err(|_: AddrError| {
            RegionError::EndsInsidePage { len_bytes: len.get(), page: page_size }
        })?;
        match map() {
            Ok(mapping) => Ok(Self { mapping, backing, page_size, pages }),
            Err(cause) => Err(RegionError::Map { len, backing, cause }),
        }
    }

    /// Returns what is behind the region.
    #[must_use]
    pub fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Returns the memory, for its address, its descriptor and its kernel accounting.
    #[must_use]
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Returns how long the region is; never zero.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        self.mapping.len()
    }

    /// Returns whether the region has no byte, which never holds.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the size of a base page.
    #[must_use]
    pub fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// Returns how many base pages the region has; never zero.
    #[must_use]
    pub fn pages(&self) -> PageCount {
        self.pages
    }

    /// Returns the bytes of a file that are behind the region, if there is one.
    pub(crate) fn extent(&self) -> Option<FileExtent> {
        let start = match self.backing {
            Backing::File { offset_bytes, .. } => offset_bytes,
            _ => 0,
        };
        // The range was mapped, so it has an end.
        let end = start.saturating_add(self.len().get());
        Some(FileExtent { file: self.mapping.file_id()?, start, end })
    }

    /// Copies bytes out of the region, from byte `offset_bytes` on. What a file was truncated of
    /// raises `SIGBUS`.
    ///
    /// # Errors
    /// [`AccessError`] unless all bytes are inside; then none is copied.
    pub fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.mapping.read_at(offset_bytes, out)
    }

    /// Copies bytes into the region, from byte `offset_bytes` on. What a file was truncated of
    /// raises `SIGBUS`.
    ///
    /// # Errors
    /// [`AccessError`] unless all bytes are inside; then none is copied.
    pub fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.mapping.write_at(offset_bytes, bytes)
    }
}

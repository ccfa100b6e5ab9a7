//! The source of a region's memory: [`RegionSource`].

use std::fmt;
use std::path::PathBuf;

use uzone_pages::PageSize;

/// The source of a region's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionSource {
    /// Private memory of no file.
    Anonymous,
    /// A memory file, whose descriptor can be handed to others.
    Memfd,
    /// Pages of a hugetlb pool.
    Hugetlb(PageSize),
    /// A file, from an offset on.
    File {
        /// Where it was opened.
        path: PathBuf,
        /// The first byte of the region in it.
        offset_bytes: u64,
    },
    /// A DAX device, all of it.
    Devdax {
        /// Where it was opened.
        path: PathBuf,
    },
    /// A file on a DAX mount, from an offset on, without a page cache between.
    Fsdax {
        /// Where it was opened.
        path: PathBuf,
        /// The first byte of the region in it.
        offset_bytes: u64,
    },
    /// A mapping that the caller made.
    Adopted,
}

impl RegionSource {
    /// Returns the source of another part of the same file.
    pub(crate) fn moved(self, offset: impl FnOnce(u64) -> u64) -> Self {
        match self {
            Self::File { path, offset_bytes } => {
                Self::File { path, offset_bytes: offset(offset_bytes) }
            }
            Self::Fsdax { path, offset_bytes } => {
                Self::Fsdax { path, offset_bytes: offset(offset_bytes) }
            }
            other => other,
        }
    }
}

impl fmt::Display for RegionSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => f.write_str("anonymous memory"),
            Self::Memfd => f.write_str("a memory file"),
            Self::Hugetlb(size) => write!(f, "huge pages of {size}"),
            Self::File { path, offset_bytes } => {
                write!(f, "{} from byte {offset_bytes} on", path.display())
            }
            Self::Devdax { path } => write!(f, "the DAX device {}", path.display()),
            Self::Fsdax { path, offset_bytes } => {
                write!(f, "{} from byte {offset_bytes} on, by DAX", path.display())
            }
            Self::Adopted => f.write_str("adopted memory"),
        }
    }
}

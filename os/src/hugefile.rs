//! Huge pages that outlive their mapping: [`HugeFile`].
//!
//! Memory given back to the kernel is cleared before it comes again, and that clearing costs more
//! than anything a bind does. A hugetlb file that is kept open costs half a millisecond per GiB to
//! map again, and the bytes are those that were there.
//!
//! The descriptor never leaves this file, and only one mapping exists at a time; so the mapping is
//! an [`Exclusive`] and has slices.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uzone_pages::ByteLen;

use crate::create;
use crate::exclusive::Exclusive;
use crate::hugepages::HugeSize;
use crate::mapping::Mapping;
use crate::shortage::MapError;

/// A file of huge pages that is kept open and mapped for each use.
///
/// Dropping it gives the pages back to the pool once its mapping is gone too.
///
/// # Invariants
/// `is_mapped` is true exactly while a `Lease` of this file exists, and a lease is released only
/// after its mapping is unmapped; so at most one mapping of the file exists. `fd` is in no other
/// hands: no method lends it, and it is closed on exec.
#[derive(Debug)]
pub struct HugeFile {
    fd: OwnedFd,
    len: ByteLen,
    size: HugeSize,
    is_mapped: Arc<AtomicBool>,
}

/// The right to have the one mapping of a [`HugeFile`].
#[derive(Debug)]
pub(crate) struct Lease {
    is_mapped: Option<Arc<AtomicBool>>,
}

impl Lease {
    fn try_new(is_mapped: &Arc<AtomicBool>) -> Option<Self> {
        // Acquire pairs with the Release in `drop`: who maps the file next sees it after the last
        // mapping is gone. A failure publishes nothing, so Relaxed is enough for it.
        is_mapped
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Self { is_mapped: Some(Arc::clone(is_mapped)) })
    }

    /// Keeps the file from ever being mapped again, because its mapping could not be removed.
    pub(crate) fn never_return(&mut self) {
        self.is_mapped = None;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(is_mapped) = &self.is_mapped {
            // Release pairs with the Acquire in `try_new`.
            is_mapped.store(false, Ordering::Release);
        }
    }
}

impl HugeFile {
    /// Makes a file of `len` bytes, up to the next huge page, all zero. The pool promises the pages
    /// when the file is first mapped.
    ///
    /// # Errors
    /// [`MapError`] if the length is zero or the kernel has no such pages.
    pub fn create(len: ByteLen, size: HugeSize) -> Result<Self, MapError> {
        Ok(Self {
            fd: create::create_memfd("uzone-kept", len, Some(size))?,
            len,
            size,
            is_mapped: Arc::new(AtomicBool::new(false)),
        })
    }

    /// Maps the file. The bytes are those that the last mapping left; dropping the mapping keeps
    /// them.
    ///
    /// # Errors
    /// [`MapError::AlreadyMapped`] while another mapping of it exists, [`MapError::HugePool`] with
    /// the numbers of the pool if it is too small.
    pub fn map(&self) -> Result<Exclusive, MapError> {
        let lease =
            Lease::try_new(&self.is_mapped).ok_or(MapError::AlreadyMapped { len: self.len })?;
        let mapping = Mapping::kept(self.fd.as_fd(), self.len, self.size, lease)?;
        Ok(Exclusive::from_kept(mapping))
    }

    /// Returns how long the file is, as it was asked for.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        self.len
    }

    /// Returns whether the file has no byte, which never holds.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the size of its pages.
    #[must_use]
    pub fn size(&self) -> HugeSize {
        self.size
    }

    /// Returns whether it is mapped now.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        // Relaxed: the answer may be old by the time it is read, and nothing is done with it here.
        self.is_mapped.load(Ordering::Relaxed)
    }

    /// Returns how many bytes of it have pages, mapped or not.
    ///
    /// # Errors
    /// [`MapError::Inspect`] if the kernel does not say.
    pub fn allocated(&self) -> Result<ByteLen, MapError> {
        let stat = rustix::fs::fstat(&self.fd)
            .map_err(|cause| MapError::Inspect { cause: cause.into() })?;
        // stat(2) counts blocks of 512 bytes; a negative count does not exist.
        Ok(ByteLen::new(u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512)))
    }
}

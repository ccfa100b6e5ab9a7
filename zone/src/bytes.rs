//! Bytes written to a bound region: under a pin, or to pages that are being filled.
//!
//! A pin keeps pages where they are; it does not say who may write to them. So every call that writes
//! under pins has a name of its own: a guard's own [`Pinned::write_at`], and [`Pagemap::pin_and_write`],
//! which pins for the time of the write. Pages that are not there are written by the thread that fills
//! them ([`Pagemap::fill_at`]). Nothing else writes to a bound region, but for clearing and copying whole
//! folios, which pins forbid.

use std::ops::Range;
use std::sync::atomic::AtomicU64;

use uzone_os::AccessError;
use uzone_pages::{AddrError, ByteLen, Content, Payload, Pfn};

use crate::error::PinError;
use crate::hold::Pinned;
use crate::inner::Inner;
use crate::pagemap::Pagemap;

/// Bytes that were not written to a bound region.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteFailure {
    /// The bytes are not all inside the region.
    #[error("cannot write {len_bytes} bytes at byte {offset_bytes:#x}: {cause}")]
    NotHere {
        /// Where the first byte should have gone.
        offset_bytes: u64,
        /// How many bytes were given.
        len_bytes: usize,
        /// Why there are no such pages.
        #[source]
        cause: AddrError,
    },
    /// The pages could not be pinned.
    #[error("cannot write bytes: {0}")]
    Pin(#[source] PinError),
    /// A page is not being filled.
    #[error(
        "cannot fill page {pfn}: its content is {content}; advance it from absent to filling first"
    )]
    NotFilling {
        /// The first such page.
        pfn: Pfn,
        /// What is known about its bytes.
        content: Content,
    },
    /// The memory cannot be written.
    #[error(transparent)]
    Access(#[from] AccessError),
}

impl<P: Payload> Inner<P> {
    /// Writes to the region for a caller who may.
    pub(crate) fn write(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.region.memory().write_at(offset_bytes, bytes)
    }
}

impl Pinned {
    /// Copies bytes out of the pages that are pinned, from byte `offset_bytes` of the first of them on.
    ///
    /// # Errors
    /// [`AccessError`] unless all bytes are pinned by this guard; then none is copied. Offsets in the
    /// error are those of the region where the memory itself is at fault.
    pub fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.0.read_at(offset_bytes, out)
    }

    /// Copies bytes into the pages that are pinned, from byte `offset_bytes` of the first of them on.
    ///
    /// Other threads and devices may have pinned the same pages. They see each aligned 8 bytes change
    /// at once, and the whole in any order.
    ///
    /// # Errors
    /// As [`Pinned::read_at`].
    pub fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.0.write_at(offset_bytes, bytes)
    }

    /// Returns the words of a range of the bytes that are pinned, counted from the first, to be read and
    /// written in place. Other threads and devices may do so meanwhile. A touch behind the end of a file
    /// that was truncated raises `SIGBUS`.
    ///
    /// # Errors
    /// [`AccessError`] unless all bytes are pinned by this guard, start and end at multiples of 8, and
    /// may be written.
    pub fn as_words(&self, range: Range<u64>) -> Result<&[AtomicU64], AccessError> {
        self.0.words(range)
    }
}

impl<P: Payload> Pagemap<P> {
    /// Pins the pages that `bytes` go to, copies them in from byte `offset_bytes` of the region on, and
    /// gives the pins back. Pages that others have pinned are written as well: a pin keeps a page in
    /// place and does not make its bytes the holder's alone.
    ///
    /// # Errors
    /// [`WriteFailure`] if a page cannot be pinned ([`Pagemap::pin`]) or the memory cannot be written.
    #[track_caller]
    pub fn pin_and_write(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), WriteFailure> {
        if bytes.is_empty() {
            return Ok(());
        }
        let range = self.range_of(offset_bytes, bytes.len())?;
        let pinned = self.pin(range).map_err(WriteFailure::Pin)?;
        self.inner.write(offset_bytes, bytes)?;
        drop(pinned);
        Ok(())
    }

    /// Copies bytes into pages that the caller is filling, from byte `offset_bytes` of the region on. The
    /// caller has advanced their content to *filling*, so that no other thread can pin them, and
    /// advances it to *present* afterwards ([`Pagemap::advance`]).
    ///
    /// # Errors
    /// [`WriteFailure::NotFilling`] if a page is in another state; then no byte is copied.
    pub fn fill_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), WriteFailure> {
        if bytes.is_empty() {
            return Ok(());
        }
        let range = self.range_of(offset_bytes, bytes.len())?;
        for pfn in range.iter() {
            match self.content(pfn) {
                Some(Content::Filling) => {}
                Some(content) => return Err(WriteFailure::NotFilling { pfn, content }),
                None => {
                    let failure = crate::pin_target::not_here(&*self.inner, range);
                    return Err(WriteFailure::Pin(failure));
                }
            }
        }
        Ok(self.inner.write(offset_bytes, bytes)?)
    }

    /// Returns the pages that bytes go to.
    fn range_of(
        &self,
        offset_bytes: u64,
        len_bytes: usize,
    ) -> Result<uzone_pages::PfnRange, WriteFailure> {
        self.range_at(offset_bytes, ByteLen::new(len_bytes as u64)) // at most 64 bits
            .map_err(|cause| WriteFailure::NotHere { offset_bytes, len_bytes, cause })
    }
}

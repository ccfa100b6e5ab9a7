//! Bytes written to a bound region: under a pin, or to pages that are being filled.
//!
//! A pin keeps pages where they are; it does not say who may write to them. So every call that writes
//! under pins has a name of its own: a guard's own [`Pinned::write_at`](crate::Pinned::write_at), and [`Pagemap::pin_and_write`],
//! which pins for the time of the write. Pages that are not there are written by the thread that fills
//! them ([`Pagemap::fill_at`]). Nothing else writes to a bound region, but for clearing and copying whole
//! folios, which pins forbid.

use uzone_pages::{ByteLen, Content, Payload};

use crate::error::WriteError;
use crate::pagemap::Pagemap;
use crate::pin::pin_target::{PinTarget, not_here};

impl<P: Payload> Pagemap<P> {
    /// Pins the pages that `bytes` go to, copies them in from byte `offset_bytes` of the region on, and
    /// gives the pins back. Pages that others have pinned are written as well: a pin keeps a page in
    /// place and does not make its bytes the holder's alone.
    ///
    /// # Errors
    /// [`WriteError::Outside`] if the bytes are not all inside the region, [`WriteError::Pin`] if a page
    /// cannot be pinned ([`Pagemap::pin`](crate::PagemapView::pin)), and [`WriteError::Access`] if the memory cannot be written.
    #[track_caller]
    pub fn pin_and_write(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), WriteError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let range = self.range_of(offset_bytes, bytes.len())?;
        let pinned = self.pin(range)?;
        self.inner.write(offset_bytes, bytes)?;
        drop(pinned);
        Ok(())
    }

    /// Copies bytes into pages that the caller is filling, from byte `offset_bytes` of the region on. The
    /// caller has advanced their content to *filling*, so that no other thread can pin them, and
    /// advances it to *present* afterwards ([`Pagemap::advance`]).
    ///
    /// # Errors
    /// [`WriteError::NotFilling`] if a page is in another state; then no byte is copied. Else as
    /// [`Pagemap::pin_and_write`].
    pub fn fill_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), WriteError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let range = self.range_of(offset_bytes, bytes.len())?;
        for pfn in range.iter() {
            match self.content(pfn) {
                Some(Content::Filling) => {}
                Some(content) => return Err(WriteError::NotFilling { pfn, content }),
                None => return Err(not_here(&*self.inner, range).into()),
            }
        }
        Ok(self.inner.write(offset_bytes, bytes)?)
    }

    /// Returns the pages that bytes go to.
    fn range_of(
        &self,
        offset_bytes: u64,
        len_bytes: usize,
    ) -> Result<uzone_pages::PfnRange, WriteError> {
        self.range_at(offset_bytes, ByteLen::new(len_bytes as u64)) // at most 64 bits
            .map_err(|cause| WriteError::Outside { offset_bytes, len_bytes, cause })
    }
}

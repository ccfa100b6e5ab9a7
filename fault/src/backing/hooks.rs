//! The hooks of a back end: [`Backing`].

use std::os::fd::OwnedFd;

use uzone_os::Sharing;
use uzone_os::uffd::in_thread::Source;
use uzone_pages::{ByteLen, FaultAround};

use crate::backing::window::Window;
use crate::error::BackingError;

/// The producer of the pages of a mapping.
///
/// Its hooks are called by several threads at once: `map_pages` by the reader and by threads that populate
/// or pin, `fault` by the I/O threads and by threads that populate or pin. One backing may serve several
/// mappings.
///
/// A hook that panics does not end its thread. A panic in `fault` makes the page bad, as an error does, and
/// [`LazyMapping::last_failure`](crate::LazyMapping::last_failure) reports that the backing panicked; after
/// one in `map_pages` the unfilled pages stay open, and one in `read_ahead` changes nothing.
pub trait Backing: Send + Sync {
    /// Fills the pages of `window` that are ready. It never blocks, and may do nothing, as by
    /// default. Pages that it skips or fails to fill stay open; for a page that a thread waits for,
    /// [`Backing::fault`] is called.
    ///
    /// It must not touch this mapping nor any other that is mapped lazily: the calling thread may be the
    /// one that answers their faults.
    fn map_pages(&self, window: &mut Window<'_>) {
        let _ = window;
    }

    /// Fills the one page of `window`. It may block; while it does, one thread of
    /// [`EngineOptions::producers`](crate::EngineOptions::producers) does nothing else. It may read other
    /// memory of the same engine: while it waits for a page of that, another thread takes the place of
    /// its own, up to 64; a page that would need one more, where all of those wait as well, is bad. Two
    /// backings that wait for the same two pages the other way round wait for ever, unless there is a
    /// deadline.
    ///
    /// # Errors
    /// [`BackingError`] if the page cannot be produced: then a thread that touches it gets `SIGBUS`.
    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError>;

    /// Starts reading the bytes of `range` from a device, because they will be wanted soon. This is a hint,
    /// called by an I/O thread: it may do nothing, and should not take long.
    fn read_ahead(&self, range: std::ops::Range<u64>) {
        let _ = range;
    }

    /// Starts to fetch the bytes of several ranges that will be wanted later than the ranges that `read_ahead` is
    /// called with: where each request takes long, many of them are under way at once. This is a hint,
    /// called by an I/O thread: it may do nothing, and does not wait.
    fn will_need(&self, ranges: &[std::ops::Range<u64>]) {
        let _ = ranges;
    }

    /// Returns where a byte is in the order in which the bytes are stored. Those of the same 64 KiB there are
    /// read together, so pages that are installed ahead of a touch
    /// ([`AdoptedMemory::prefetch`](crate::AdoptedMemory::prefetch)) come together.
    fn stored_at(&self, offset: u64) -> u64 {
        offset
    }

    /// Returns the bytes that are ready as soon as the one at `offset` is: a backing that decodes has a frame of
    /// them. Where faults are not in order, each brings those pages along ([`Advice::Auto`]), and no others.
    /// `None` if the page is made alone.
    ///
    /// [`Advice::Auto`]: uzone_pages::Advice::Auto
    fn made_with(&self, offset: u64) -> Option<std::ops::Range<u64>> {
        let _ = offset;
        None
    }

    /// Notes that all bytes of a range that [`Backing::made_with`] returned are kept elsewhere, so that no copy
    /// need be kept here. This is a hint.
    fn forget(&self, range: std::ops::Range<u64>) {
        let _ = range;
    }

    /// Returns how many bytes there are, or `None`, the default, for as many as are asked for.
    fn byte_len(&self) -> Option<ByteLen> {
        None
    }

    /// Returns the memory file whose pages, from its start on, are mapped and not copied, and whether writes
    /// reach it. `None` if the mapping has pages of its own, or of a pool of huge pages, into which bytes are
    /// copied.
    ///
    /// # Errors
    /// The error of the system if the descriptor of the file cannot be duplicated.
    fn memory_file(&self) -> std::io::Result<Option<(OwnedFd, Sharing)>> {
        Ok(None)
    }

    /// Takes bytes that were written to the mapping, whole pages from `offset` on. It is called by the
    /// thread that writes back, and may block. Bytes behind the end of the backing are left out.
    ///
    /// It must not touch the mapping itself.
    ///
    /// # Errors
    /// [`BackingError`] if the bytes are not all taken. Then all of them are offered again later.
    fn write_back(&self, offset: u64, bytes: &[u8]) -> Result<(), BackingError> {
        let reason = "this backing takes no bytes";
        Err(BackingError::ReadOnly { offset, len_bytes: bytes.len() as u64, reason })
    }

    /// Returns the source from which a handler of a signal can fill pages, for the backings of this package.
    #[doc(hidden)]
    fn in_thread(&self) -> Option<Source> {
        None
    }

    /// Returns how large windows may grow: where a page costs a copy, longer windows than 512 KiB
    /// gain nothing and hold the page tables longer.
    fn largest_window(&self) -> FaultAround {
        LARGEST_COPY
    }
}

/// 512 KiB.
const LARGEST_COPY: FaultAround = match FaultAround::try_new(ByteLen::kib(512)) {
    Ok(size) => size,
    Err(_) => FaultAround::DEFAULT,
};

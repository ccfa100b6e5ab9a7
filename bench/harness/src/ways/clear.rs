//! Memory of which extents are taken in turn ([`Arena`]), so that each is out of cache when its turn comes.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use uzone_os::Exclusive;
use uzone_pages::ByteLen;
use uzone_stream::{CopyMethod, Streaming, copy_bytes, zero_bytes};

use crate::{Result, check_memory, index, present, timed};

/// The bytes that the naive way clears or copies at a time.
pub const PAGE: usize = 4096;

/// Memory of which extents are taken in turn.
#[derive(Debug)]
pub struct Arena {
    dst: RefCell<Exclusive>,
    src: Option<Exclusive>,
    /// The length in bytes.
    pub len: usize,
    at: Cell<usize>,
}

impl Arena {
    /// Takes `len` bytes, present, and as many to copy from if `is_copy`; in huge pages where the host has them.
    pub fn new(is_copy: bool, len: ByteLen) -> Result<Self> {
        let parts = if is_copy { 2 } else { 1 };
        check_memory(ByteLen::new(len.get().saturating_mul(parts) / 10 * 11))?;
        let memory = |byte| -> Result<Exclusive> {
            let mut memory = present(len)?;
            memory.as_bytes_mut().fill(byte);
            Ok(memory)
        };
        Ok(Self {
            dst: RefCell::new(memory(1)?),
            src: if is_copy { Some(memory(2)?) } else { None },
            len: index(len.get()),
            at: Cell::new(0),
        })
    }

    /// Returns the offset of the next `bytes`: another place than the last one.
    pub fn next(&self, bytes: usize) -> usize {
        let at = if self.at.get() + bytes > self.len { 0 } else { self.at.get() };
        // Not the next byte, so that the prefetchers do not know it already.
        self.at.set(at + bytes + PAGE);
        at
    }

    /// Calls `f` with the next bytes of the destination, and of the source if there is one.
    pub fn with_next<R>(&self, bytes: usize, f: impl FnOnce(&mut [u8], &[u8]) -> R) -> R {
        let at = self.next(bytes);
        let src = self.src.as_ref().map_or(&[][..], |src| &src.as_bytes()[at..][..bytes]);
        f(&mut self.dst.borrow_mut().as_bytes_mut()[at..][..bytes], src)
    }

    /// Times a bare stream of zeroes over the next bytes: the limit.
    pub fn limit(&self, bytes: usize) -> Result<Duration> {
        self.with_next(bytes, |dst, _| {
            timed(|| {
                Streaming::scope(uzone_stream::best(), |stream| stream.zero(dst));
                Ok(())
            })
        })
    }
}

/// Copies `src` to `dst` by one method, or clears `dst` if there is no source.
pub fn by(method: CopyMethod, dst: &mut [u8], src: &[u8]) {
    if src.is_empty() { zero_bytes(method, dst) } else { copy_bytes(method, dst, src) }
}

/// Clears or copies a page at a time by the CPU's own loop: the naive way.
pub fn by_pages(dst: &mut [u8], src: &[u8]) {
    for (number, page) in dst.chunks_mut(PAGE).enumerate() {
        let src = src.get(number * PAGE..).map_or(src, |rest| &rest[..rest.len().min(PAGE)]);
        by(CopyMethod::String, page, src);
    }
}

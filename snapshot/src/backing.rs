//! An image as the backing of memory that is mapped lazily: [`SnapshotBacking`].

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use uzone_fault::{Backing, BackingError, Window};
use uzone_pages::{ByteLen, PageSize};

use crate::image::{Image, Origin};

/// The pages of a packed image, decoded when they are touched.
///
/// A page becomes memory only after the frame it is in was verified. A frame that is damaged makes its
/// pages bad: a thread that touches them gets `SIGBUS`.
#[derive(Clone, Debug)]
pub struct SnapshotBacking {
    image: Arc<Image>,
}

impl SnapshotBacking {
    /// Takes an image; several mappings can share it, and then they share decoded frames.
    #[must_use]
    pub fn new(image: Arc<Image>) -> Self {
        Self { image }
    }

    /// Installs `range`, whole pages of one frame, from the bytes of that. Behind the end of the image they
    /// are zero.
    fn copy(
        &self,
        window: &mut Window<'_>,
        range: Range<u64>,
        frame: u64,
        bytes: &[u8],
    ) -> Result<(), BackingError> {
        let start =
            usize::try_from(range.start - frame * self.image.frame_bytes()).unwrap_or(usize::MAX);
        let end =
            start.saturating_add(usize::try_from(range.end - range.start).unwrap_or(usize::MAX));
        if let Some(whole) = bytes.get(start..end) {
            let _ = window.copy(range.start, whole)?;
            return Ok(());
        }
        // The last page of the image.
        let bytes = bytes.get(start..).unwrap_or_default();
        let _ = window.copy_with(range, |out| {
            let len = bytes.len().min(out.len());
            out[..len].copy_from_slice(&bytes[..len]);
            out[len..].fill(0);
            Ok::<_, BackingError>(out.len())
        })?;
        Ok(())
    }

    /// Returns where the run of pages from `range.start` on ends that can be filled in the same way: within a
    /// frame, and either zero or not.
    fn end_of_run(&self, range: &Range<u64>, page: u64) -> (u64, bool) {
        let frame_end = (range.start / self.image.frame_bytes() + 1) * self.image.frame_bytes();
        let end = range.end.min(frame_end);
        let is_zero = |at: u64| self.is_zero(at, page);
        let first = is_zero(range.start);
        let mut at = range.start + page;
        while at < end && is_zero(at) == first {
            at += page;
        }
        (at.min(end), first)
    }

    /// Returns whether `len_bytes` bytes from `at` on are zero. What is behind the end of the image is.
    fn is_zero(&self, at: u64, len_bytes: u64) -> bool {
        let page = self.image.page_bytes();
        let end = (at + len_bytes).min(self.image.byte_len());
        (at / page..end.div_ceil(page)).all(|page| self.image.is_zero_page(page))
    }

    fn fill_ready(&self, window: &mut Window<'_>, run: Range<u64>) -> Result<(), BackingError> {
        let page = window.page_size().bytes();
        let mut at = run.start;
        while at < run.end {
            let (end, is_zero) = self.end_of_run(&(at..run.end), page);
            let frame = at / self.image.frame_bytes();
            if is_zero {
                let _ = window.zero(at..end)?;
            } else if let Some(bytes) = self.image.ready_frame(frame) {
                self.copy(window, at..end, frame, &bytes)?;
            }
            at = end;
        }
        Ok(())
    }
}

impl Backing for SnapshotBacking {
    fn map_pages(&self, window: &mut Window<'_>) {
        while let Some(run) = window.next_run() {
            // A page that fails and that a thread waits for fails again in `fault`, which reports it.
            if self.fill_ready(window, run).is_err() {
                return;
            }
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        let range = window.range();
        if self.is_zero(range.start, range.end - range.start) {
            let _ = window.zero(range)?;
            return Ok(());
        }
        let frame = range.start / self.image.frame_bytes();
        let bytes =
            self.image.frame(frame).map_err(|error| BackingError::Other(Box::new(error)))?;
        self.copy(window, range, frame, &bytes)
    }

    fn read_ahead(&self, range: Range<u64>) {
        let size = self.image.frame_bytes();
        let end = range.end.min(self.image.byte_len());
        for frame in range.start / size..end.div_ceil(size) {
            if matches!(self.image.origin(frame), Origin::Zero) {
                continue;
            }
            // It is a hint; an error shows when the page is touched.
            let _ = self.image.frame(frame);
        }
    }

    fn byte_len(&self) -> Option<ByteLen> {
        Some(ByteLen::new(self.image.byte_len()))
    }

    fn takes_pages_of(&self, page: PageSize) -> bool {
        page.bytes() <= self.image.frame_bytes()
    }
}

impl fmt::Display for SnapshotBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.image.name())
    }
}

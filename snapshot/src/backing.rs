//! An image as the backing of memory that is mapped lazily: [`SnapshotBacking`].

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use uzone_fault::{Backing, BackingError, Window};
use uzone_pages::{ByteLen, ErrorKind};

use crate::decode_ahead::DecodeAhead;
use crate::error::SnapshotError;
use crate::frame_cache::Ready;
use crate::frame_memory::Frame;
use crate::image::{Image, StoredPart};

/// The pages of a packed image, decoded when they are touched.
///
/// A page becomes memory only after the frame it is in was verified. A frame that is damaged makes its
/// pages bad: a thread that touches them gets `SIGBUS`.
///
/// The thread that answers faults decodes frames itself, if their stored bytes are in the page cache; a frame
/// that has to be read from a device, or has more than 256 KiB, is left to the engine's I/O threads. For a
/// reader in order, up to three threads of this backing decode the frames that come next.
#[derive(Clone, Debug)]
pub struct SnapshotBacking {
    image: Arc<Image>,
    ahead: Arc<DecodeAhead>,
}

/// A fault on a page of zeroes brings those along that are around it in so many bytes.
const ZEROES: u64 = 512 << 10;

/// How many bytes are announced ahead for each of a window.
const TIMES: u64 = 16;

/// For which pages of a window frames are decoded.
#[derive(Clone, Copy)]
enum Wanted {
    /// Those from an offset on.
    From(u64),
    /// Those of one frame, or none: the neighbours of a page may be in as many frames.
    Frame(Option<u64>),
}

impl SnapshotBacking {
    /// Takes an image; several mappings can share it, and then they share decoded frames.
    #[must_use]
    pub fn new(image: Arc<Image>) -> Self {
        let ahead = Arc::new(DecodeAhead::new(image.clone()));
        Self { image, ahead }
    }

    /// Installs pages from `at` on with `bytes`, behind which their last page is zero.
    fn copy(window: &mut Window<'_>, range: Range<u64>, bytes: &[u8]) -> Result<(), BackingError> {
        if bytes.len() as u64 == range.end - range.start {
            let _ = window.copy(range.start, bytes)?;
            return Ok(());
        }
        // The last page of the image.
        let _ = window.copy_with(range, |out| {
            let len = bytes.len().min(out.len());
            out[..len].copy_from_slice(&bytes[..len]);
            out[len..].fill(0);
            Ok::<_, BackingError>(out.len())
        })?;
        Ok(())
    }

    /// Installs those of the pages of `range` that are each in one frame which is ready. What is not `wanted`
    /// is if it is decoded already.
    fn copy_ready(
        &self,
        window: &mut Window<'_>,
        range: Range<u64>,
        wanted: Wanted,
    ) -> Result<(), BackingError> {
        let page = window.page_size().bytes();
        let inside = range.end.min(self.image.byte_len());
        let mut at = range.start;
        while at < inside {
            let extent = self.image.extent(at, inside);
            let is_last = extent.end == inside;
            // Whole pages; the last page of the image may be shorter.
            let end = if is_last { range.end } else { extent.end / page * page };
            if end <= at {
                at += page;
                continue;
            }
            let bytes = extent.end.min(end) - at;
            if let Some(stored) = &extent.stored
                && let Some(frame) =
                    self.frame(stored, self.decodes(at, wanted), end..window.range().end)
            {
                let len = usize::try_from(bytes).unwrap_or(usize::MAX);
                Self::copy(window, at..end, &frame[stored.start..stored.start + len])?;
            }
            at = end;
        }
        Ok(())
    }

    /// Returns a frame if it is ready; if `decodes`, it is decoded if that takes no device. While another
    /// thread does so, this one decodes the frame after it, which starts `next`.
    fn frame(&self, stored: &StoredPart<'_>, decodes: bool, next: Range<u64>) -> Option<Frame> {
        if !decodes {
            return stored.kept();
        }
        match stored.ready() {
            Ready::Bytes(bytes) => Some(bytes),
            Ready::No => None,
            Ready::Soon => {
                let end = next.end.min(self.image.byte_len());
                if next.start < end
                    && let Some(after) = self.image.extent(next.start, end).stored
                {
                    let _ = after.ready();
                }
                stored.soon()
            }
        }
    }

    /// Returns whether a frame may be decoded for the page at `offset`.
    fn decodes(&self, offset: u64, wanted: Wanted) -> bool {
        match wanted {
            Wanted::From(start) => offset >= start,
            Wanted::Frame(frame) => {
                frame == Some(self.image.packed_at(offset) / self.image.frame_bytes())
            }
        }
    }

    /// Has the frames behind a page decoded that is touched by a reader in order, whose windows have several
    /// frames. Returns for which pages of the window frames are decoded.
    fn look_ahead(&self, window: &Window<'_>) -> Wanted {
        let (range, frame) = (window.range(), self.image.frame_bytes());
        let wanted = window.wanted();
        let len_bytes = range.end - range.start;
        if self.image.has_order() && (wanted.is_none() || len_bytes <= frame) {
            return Wanted::Frame(wanted.map(|page| self.image.packed_at(page.start) / frame));
        }
        let Some(wanted) = wanted else { return Wanted::From(0) };
        let first = wanted.start / frame * frame;
        if len_bytes > frame {
            let end = (range.end + len_bytes).min(self.image.byte_len());
            self.ahead.decode((first + frame).min(end)..end);
            self.image.announce(range.end, TIMES * len_bytes);
        }
        Wanted::From(first)
    }

    /// Returns where the run of pages from `range.start` on ends that can be filled in the same way, and whether
    /// it is zero. Other bytes end with their frame.
    fn end_of_run(&self, range: &Range<u64>, page: u64) -> (u64, bool) {
        // A page may have several frames.
        let unit = self.image.frame_bytes().max(page);
        let is_zero = |at: u64| self.is_zero(at, page);
        let first = is_zero(range.start);
        let end = if first { range.end } else { range.end.min((range.start / unit + 1) * unit) };
        let mut at = range.start + page;
        while at < end && is_zero(at) == first {
            at += page;
        }
        (at.min(end), first)
    }

    /// Returns whether `len_bytes` bytes from `at` on are zero. Bytes behind the end of the image are.
    fn is_zero(&self, at: u64, len_bytes: u64) -> bool {
        let page = self.image.page_bytes();
        let end = (at + len_bytes).min(self.image.byte_len());
        (at / page..end.div_ceil(page)).all(|page| self.image.is_zero_page(page))
    }

    fn fill_ready(
        &self,
        window: &mut Window<'_>,
        run: Range<u64>,
        wanted: Wanted,
    ) -> Result<(), BackingError> {
        let page = window.page_size().bytes();
        let mut at = run.start;
        while at < run.end {
            let (end, is_zero) = self.end_of_run(&(at..run.end), page);
            if is_zero {
                let _ = window.zero(at..end)?;
            } else {
                self.copy_ready(window, at..end, wanted)?;
            }
            at = end;
        }
        Ok(())
    }
}

impl Backing for SnapshotBacking {
    fn map_pages(&self, window: &mut Window<'_>) {
        let wanted = self.look_ahead(window);
        while let Some(run) = window.next_run() {
            // A page that fails and that a thread waits for fails again in `fault`, which reports it.
            if self.fill_ready(window, run, wanted).is_err() {
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
        // With its kind: damage, or an error of the system.
        let failed = |error: SnapshotError| {
            let kind = match error.kind() {
                ErrorKind::InvalidData => io::ErrorKind::InvalidData,
                _ => io::ErrorKind::Other,
            };
            BackingError::Other(Box::new(io::Error::new(kind, error)))
        };
        let inside = range.end.min(self.image.byte_len());
        let extent = self.image.extent(range.start, inside);
        if let Some(stored) = &extent.stored
            && extent.end == inside
        {
            let frame = stored.get().map_err(failed)?;
            let len = usize::try_from(inside - range.start).unwrap_or(usize::MAX);
            return Self::copy(window, range, &frame[stored.start..stored.start + len]);
        }
        // The page has several frames.
        let mut bytes = vec![0; usize::try_from(inside - range.start).unwrap_or(0)];
        self.image.read_at(range.start, &mut bytes).map_err(failed)?;
        Self::copy(window, range, &bytes)
    }

    fn read_ahead(&self, range: Range<u64>) {
        // It is a hint; an error shows when the page is touched.
        self.image.stored_in(&range).for_each(|stored| drop(stored.get()));
    }

    fn will_need(&self, ranges: &[Range<u64>]) {
        self.image.will_need(ranges);
    }

    fn stored_at(&self, offset: u64) -> u64 {
        self.image.packed_at(offset)
    }

    fn made_with(&self, offset: u64) -> Option<Range<u64>> {
        let (page, len) = (self.image.page_bytes(), self.image.byte_len());
        let (from, to) = (offset / ZEROES * ZEROES, (offset / ZEROES + 1) * ZEROES);
        if let (end, true) = self.end_of_run(&(offset..to.min(len)), page) {
            // No frame has them, and the kernel has them at once.
            let mut start = offset;
            while start > from && self.is_zero(start - page, page) {
                start -= page;
            }
            return Some(start..end);
        }
        let frame = self.image.frame_bytes();
        let start = offset / frame * frame;
        // With an order, each page of a frame is elsewhere.
        (!self.image.has_order()).then(|| start..(start + frame).min(len))
    }

    fn forget(&self, range: Range<u64>) {
        self.image.stored_in(&range).for_each(|stored| stored.forget());
    }

    fn byte_len(&self) -> Option<ByteLen> {
        Some(ByteLen::new(self.image.byte_len()))
    }
}

impl fmt::Display for SnapshotBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.image.name())
    }
}

#[cfg(test)]
mod tests {
    use crate::{OpenOptions, Packer};

    use super::*;

    #[test]
    fn zero_pages_are_one_run_over_all_frames_and_others_end_with_theirs() {
        const PAGE: u64 = 4096;
        let mut bytes = vec![0_u8; 512 << 12];
        bytes[300 << 12..340 << 12].fill(7);
        let path = std::env::temp_dir().join(format!("uzone-snapshot-runs-{}", std::process::id()));
        Packer::default().pack(&mut &*bytes, &path, None, &|_| true).unwrap();
        let image = Image::open(&path, &OpenOptions::default()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let backing = SnapshotBacking::new(Arc::new(image));
        let frame = backing.image.frame_bytes();
        let mut at = 0;
        let mut runs = Vec::new();
        while at < 512 * PAGE {
            let (end, is_zero) = backing.end_of_run(&(at..512 * PAGE), PAGE);
            assert!(is_zero || at / frame == (end - 1) / frame, "{at:#x}..{end:#x}");
            runs.push((end, is_zero));
            at = end;
        }
        assert_eq!(runs[0], (300 * PAGE, true));
        assert_eq!(runs[runs.len() - 1], (512 * PAGE, true));
        assert!(runs[1..runs.len() - 1].iter().all(|(_, is_zero)| !is_zero), "{runs:?}");
    }
}

//! What was written, and bringing it back to the backing: [`LazyMapping::dirty`],
//! [`LazyMapping::take_dirty`], [`LazyMapping::write_back`].
//!
//! A page is made clean *before* its bytes are read, so a write that comes meanwhile leaves it dirty and is
//! brought back the next time; what the backing got of it may be torn, and will be overwritten. If the
//! backing fails, the pages are dirty again before the lock is released, so that nothing is evicted that
//! was not written back.

use std::ops::Range;

use uzone_pages::Content;

use crate::dirty::Tracker;
use crate::dirty::states::collect;
use crate::error::LazyError;
use crate::lazy::LazyMapping;

impl LazyMapping {
    /// Returns the ranges of bytes whose pages were written since they were filled, taken or written
    /// back, in order. Where writes are tracked by events, pages next to them may be among them.
    ///
    /// # Errors
    /// [`LazyError::NotTracked`] without [`LazyOptions::track_writes`](crate::LazyOptions), and
    /// [`LazyError`] if the range is not inside, cuts a page, or the kernel refuses.
    pub fn dirty(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, LazyError> {
        let pages = self.pages(&range)?;
        let tracker = self.tracker()?;
        let _turn = tracker.turn();
        Ok(self.offsets(&self.readable(&tracker.dirty(pages)?)))
    }

    /// Returns what [`LazyMapping::dirty`] does, and makes those pages clean in the same step: a write is
    /// in this answer or in the next, and a page that is not written again is in one. From then on
    /// [`LazyMapping::evict`] takes them for unchanged: what is to be kept of them is the caller's to
    /// read before. A page that is pinned stays dirty, since a device may write to it at any time.
    ///
    /// # Errors
    /// As for [`LazyMapping::dirty`]; then all are as dirty as they were.
    pub fn take_dirty(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, LazyError> {
        let pages = self.pages(&range)?;
        let tracker = self.tracker()?;
        let _turn = tracker.turn();
        Ok(self.offsets(&self.taken(tracker, pages)?))
    }

    /// Brings what was written in a range back to the backing
    /// ([`Backing::write_back`](crate::Backing::write_back)), in the calling thread and in runs of up
    /// to 256 KiB. Returns how many pages were.
    ///
    /// What was written before the call is in the backing afterwards. Pages that are written
    /// meanwhile stay dirty, and so do those that are pinned.
    ///
    /// # Errors
    /// [`LazyError::WriteBack`] at the first run that the backing did not take: it and what comes
    /// behind it are as dirty as before. Otherwise as for [`LazyMapping::dirty`].
    pub fn write_back(&self, range: Range<u64>) -> Result<u64, LazyError> {
        let pages = self.pages(&range)?;
        let tracker = self.tracker()?;
        let found = {
            let _turn = tracker.turn();
            tracker.dirty(pages)?
        };
        let shift = self.page_size().shift();
        let step = (self.room() as u64 >> shift).max(1);
        let mut buffer = vec![0; self.room()];
        let mut written = 0;
        for run in found {
            for start in (run.start..run.end).step_by(usize::try_from(step).unwrap_or(1)) {
                let part = start..run.end.min(start + step);
                written += self.write_back_some(tracker, part, &mut buffer)?;
            }
        }
        Ok(written)
    }

    /// Brings those of some pages back that are dirty, as many as the buffer has room for.
    fn write_back_some(
        &self,
        tracker: &Tracker,
        pages: Range<u64>,
        buffer: &mut [u8],
    ) -> Result<u64, LazyError> {
        let shift = self.page_size().shift();
        // From here on no thread evicts pages that are clean already and not in the backing yet.
        let _turn = tracker.turn();
        let taken = self.taken(tracker, pages)?;
        let mut left = Taken { tracker, runs: &taken };
        let mut written = 0;
        while let Some(run) = left.runs.first() {
            let offset = run.start << shift;
            let len = usize::try_from((run.end - run.start) << shift).unwrap_or(buffer.len());
            let bytes = &mut buffer[..len];
            let answer = self.read_at(offset, bytes).and_then(|()| {
                self.core()
                    .backing()
                    .write_back(offset, bytes)
                    .map_err(|cause| LazyError::WriteBack { offset, cause })
            });
            if let Err(error) = answer {
                left.put_back()?;
                return Err(error);
            }
            written += run.end - run.start;
            left.runs = &left.runs[1..];
        }
        Ok(written)
    }

    /// Takes the runs of dirty pages that can be read. Pinned pages are dirty again at once: a device may
    /// write to them without an event.
    fn taken(&self, tracker: &Tracker, pages: Range<u64>) -> Result<Vec<Range<u64>>, LazyError> {
        let taken = self.readable(&tracker.take(pages)?);
        // After they are protected, so that the first write after a later pin raises an event; and before
        // they are read, so that what was written until an unpin is seen.
        let contents = self.core().contents();
        let pinned =
            taken.iter().flat_map(|run| collect(run.clone(), |page| contents.maybe_pinned(page)));
        if let Err(error) = tracker.put_back(&pinned.collect::<Vec<_>>()) {
            // Then all are as dirty as they were, as far as the kernel allows it.
            let _ = tracker.put_back(&taken);
            return Err(error);
        }
        Ok(taken)
    }

    /// Leaves out of some runs what cannot be read: a page that is bad has no bytes.
    fn readable(&self, runs: &[Range<u64>]) -> Vec<Range<u64>> {
        let contents = self.core().contents();
        let runs = runs
            .iter()
            .map(|run| collect(run.clone(), |page| contents.get(page) != Content::Poisoned));
        runs.flatten().collect()
    }

    fn offsets(&self, runs: &[Range<u64>]) -> Vec<Range<u64>> {
        runs.iter().map(|run| self.core().bytes(run.clone())).collect()
    }

    pub(crate) fn tracker(&self) -> Result<&Tracker, LazyError> {
        self.tracking().ok_or(LazyError::NotTracked)
    }
}

/// Pages that are clean and not in the backing yet.
struct Taken<'a> {
    tracker: &'a Tracker,
    runs: &'a [Range<u64>],
}

impl Taken<'_> {
    fn put_back(&mut self) -> Result<(), LazyError> {
        self.tracker.put_back(self.runs)?;
        self.runs = &[];
        Ok(())
    }
}

impl Drop for Taken<'_> {
    /// Whatever ended the write-back, a panic of the backing among it, nothing is lost.
    fn drop(&mut self) {
        // The kernel refuses only for memory that is gone.
        let _ = self.put_back();
    }
}

//! Pages that will be touched, installed before they are: [`Prefetch`]. An I/O thread makes a chunk of them
//! ready, the reader installs it while no fault is pending, and asks for the next. Two chunks are on their
//! way, so that both work. A list that is wrong costs time: pages that are there already are passed over.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use uzone_pages::PageSize;

use crate::core::Core;
use crate::error::discard;
use crate::event_loop::LoopHandle;

/// How many chunks of a mapping are on their way.
pub(crate) const CHUNKS: usize = 2;
/// How many bytes a chunk has, but at least a page.
const CHUNK_BYTES: u64 = 1 << 20;
/// How many bytes are installed before faults are polled for again, but at least a page.
const STEP_BYTES: u64 = 64 << 10;

/// The pages of a mapping that will be touched, in that order.
pub(crate) struct Prefetch {
    pages: Vec<u64>,
    next: AtomicUsize,
    chunk: usize,
}

impl Prefetch {
    /// Takes the offsets of pages in the backing.
    pub(crate) fn new(offsets: &[u64], page: PageSize) -> Arc<Self> {
        let mut pages: Vec<u64> = offsets.iter().map(|offset| offset >> page.shift()).collect();
        pages.dedup();
        Arc::new(Self { pages, next: AtomicUsize::new(0), chunk: of_bytes(CHUNK_BYTES, page) })
    }

    /// Returns the next pages, in ascending runs.
    fn take(&self) -> Option<Vec<Range<u64>>> {
        // Relaxed: each chunk is taken once, and the list does not change.
        let start = self.next.fetch_add(self.chunk, Ordering::Relaxed);
        let rest = self.pages.get(start..).filter(|rest| !rest.is_empty())?;
        let mut pages = rest[..rest.len().min(self.chunk)].to_vec();
        pages.sort_unstable();
        pages.dedup();
        let runs = pages.chunk_by(|one, next| one + 1 == *next);
        Some(runs.map(|run| run[0]..run[run.len() - 1] + 1).collect())
    }
}

fn of_bytes(bytes: u64, page: PageSize) -> usize {
    usize::try_from((bytes / page.bytes()).max(1)).unwrap_or(usize::MAX)
}

/// A chunk that is made ready by an I/O thread.
pub(crate) struct PrefetchJob {
    pub(crate) core: Arc<Core>,
    pub(crate) prefetch: Arc<Prefetch>,
    /// The thread that installs it.
    pub(crate) filler: LoopHandle,
    pub(crate) key: u64,
}

impl PrefetchJob {
    /// Makes the next chunk ready and hands it over, unless there is none.
    pub(crate) fn run(self) {
        let Some(runs) = self.prefetch.take() else { return };
        let contents = self.core.contents();
        let end = contents.area().end().get();
        let mut open = Vec::new();
        for run in runs {
            let mut rest = run.start..run.end.min(end);
            while let Some(run) = contents.open_run(rest.clone(), None) {
                self.core.read_ahead(run.clone());
                rest.start = run.end;
                open.push(run);
            }
        }
        open.reverse();
        self.filler.prefetch(self.key, Chunk { runs: open, prefetch: self.prefetch });
        discard(self.core);
    }
}

/// Pages that are ready.
pub(crate) struct Chunk {
    /// The first run is the last one.
    runs: Vec<Range<u64>>,
    /// Where the next chunk comes from.
    pub(crate) prefetch: Arc<Prefetch>,
}

impl Chunk {
    /// A chunk without pages, after which the first one comes.
    pub(crate) fn before_the_first(prefetch: Arc<Prefetch>) -> Self {
        Self { runs: Vec::new(), prefetch }
    }

    /// Takes some pages off; `None` if all are taken.
    pub(crate) fn take(&mut self, page: PageSize) -> Option<Range<u64>> {
        let run = self.runs.last_mut()?;
        let end = run.end.min(run.start + of_bytes(STEP_BYTES, page) as u64);
        let taken = run.start..end;
        run.start = end;
        if run.is_empty() {
            self.runs.pop();
        }
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_runs_of_the_order_that_was_recorded() {
        let page = PageSize::try_from_bytes(512 << 10).unwrap();
        let offsets: Vec<u64> = [9, 8, 8, 3, 3, 4, 1].map(|page| page * (512 << 10) + 5).to_vec();
        let prefetch = Prefetch::new(&offsets, page);
        for run in [8..10, 3..5, 1..2] {
            assert_eq!(prefetch.take(), Some([run].to_vec()));
        }
        assert_eq!(prefetch.take(), None);
        assert_eq!(prefetch.take(), None);
    }
}

//! Pages that will be touched, installed before they are: [`Prefetch`]. An I/O thread makes a chunk of them
//! ready, the reader installs it while no fault is pending, and asks for the next. Two chunks are on their
//! way, so that both work. A list that is wrong costs time: pages that are there already are passed over.

use std::collections::HashMap;
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
const CHUNK_BYTES: u64 = 256 << 10;
/// Pages in the same so many bytes come together, where the first of them does: a backing that decodes has
/// frames of that length, and reads each once.
const GROUP_BYTES: u64 = 64 << 10;
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
        let group = |page_number: &u64| page_number / of_bytes(GROUP_BYTES, page) as u64;
        let mut pages: Vec<u64> = offsets.iter().map(|offset| offset >> page.shift()).collect();
        let mut firsts = HashMap::new();
        for (at, page) in pages.iter().enumerate() {
            firsts.entry(group(page)).or_insert(at);
        }
        pages.sort_unstable_by_key(|page| (firsts[&group(page)], *page));
        pages.dedup();
        Arc::new(Self { pages, next: AtomicUsize::new(0), chunk: of_bytes(CHUNK_BYTES, page) })
    }

    /// Returns the next pages, in ascending runs.
    fn take(&self) -> Option<Vec<Range<u64>>> {
        // Relaxed: each chunk is taken once, and the list does not change.
        let start = self.next.fetch_add(self.chunk, Ordering::Relaxed);
        let rest = self.pages.get(start..).filter(|rest| !rest.is_empty())?;
        let pages = &rest[..rest.len().min(self.chunk)];
        let runs = pages.chunk_by(|one, next| one + 1 == *next);
        Some(runs.map(|run| run[0]..run[run.len() - 1] + 1).collect())
    }
}

/// Returns the pages that come together with one of them, as far as they are in `area`.
pub(crate) fn group(fault: u64, area: Range<u64>, page: PageSize) -> Range<u64> {
    let pages = of_bytes(GROUP_BYTES, page) as u64;
    let start = fault / pages * pages;
    start.max(area.start)..(start + pages).min(area.end)
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
    /// Makes the next chunk ready and hands it over, or notes that there is none.
    pub(crate) fn run(self) {
        let runs = self.prefetch.take();
        let is_last = runs.is_none();
        let contents = self.core.contents();
        let end = contents.area().end().get();
        let mut open = Vec::new();
        for run in runs.into_iter().flatten() {
            let mut rest = run.start..run.end.min(end);
            while let Some(run) = contents.open_run(rest.clone(), None) {
                self.core.read_ahead(run.clone());
                rest.start = run.end;
                open.push(run);
            }
        }
        open.reverse();
        self.filler.prefetch(
            self.key,
            Chunk { runs: open, prefetch: self.prefetch, is_first: false, is_last },
        );
        discard(self.core);
    }
}

/// Pages that are ready.
pub(crate) struct Chunk {
    /// The first run is the last one.
    runs: Vec<Range<u64>>,
    /// Where the next chunk comes from.
    pub(crate) prefetch: Arc<Prefetch>,
    /// Whether it is the one before all others, without a page.
    is_first: bool,
    /// Whether none comes.
    pub(crate) is_last: bool,
}

impl Chunk {
    /// A chunk without pages, after which the first one comes.
    pub(crate) fn before_the_first(prefetch: Arc<Prefetch>) -> Self {
        Self { runs: Vec::new(), prefetch, is_first: true, is_last: false }
    }

    pub(crate) fn is_first(&self) -> bool {
        self.is_first
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
    fn pages_come_in_the_order_that_was_recorded_and_those_of_a_group_together() {
        let page = PageSize::try_from_bytes(16 << 10).unwrap();
        let offsets = [9, 20, 8, 8, 3, 21, 4, 1, 2].map(|page| page * (16 << 10) + 5);
        let prefetch = Prefetch::new(&offsets, page);
        assert_eq!(prefetch.take(), Some([8..10, 20..22, 1..5].to_vec()));
        assert_eq!((prefetch.take(), prefetch.take()), (None, None));
        let huge = PageSize::try_from_bytes(2 << 20).unwrap();
        let prefetch = Prefetch::new(&[5 << 21, 4 << 21, (5 << 21) + 4096], huge);
        for run in [5..6, 4..5] {
            assert_eq!(prefetch.take(), Some([run].to_vec()));
        }
        assert_eq!(prefetch.take(), None);
    }
}

//! Pages that will be touched, installed before they are: [`Prefetch`]. An I/O thread makes a chunk of them
//! ready, the reader installs it while no fault is pending, and asks for the next. Two chunks are on their
//! way, so that both work; the backing knows in advance which pages come after those. A list that is wrong
//! costs time: pages that are there already are passed over.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use uzone_pages::PageSize;

use crate::core::Core;
use crate::error::discard;
use crate::event_loop::{LoopHandle, PagerKey};

/// How many chunks of a mapping are on their way.
pub(crate) const CHUNKS: usize = 2;
/// How many bytes a chunk has, but at least a page.
const CHUNK_BYTES: u64 = 256 << 10;
/// How many bytes the backing fetches before their chunk is made ready, but at least a page.
const AHEAD_BYTES: u64 = 8 << 20;
/// Pages that are stored in the same so many bytes come together, where the first of them does: a backing that
/// decodes has frames of that length, and reads each once.
const GROUP_BYTES: u64 = 64 << 10;
/// How many bytes are installed before faults are polled for again, but at least a page.
const STEP_BYTES: u64 = 64 << 10;

/// The pages of a mapping that will be touched, in that order.
pub(crate) struct Prefetch {
    pages: Vec<u64>,
    next: AtomicUsize,
    chunk: usize,
    /// How many of the pages the backing was asked to fetch, and how far that goes ahead.
    announced: AtomicUsize,
    ahead: usize,
}

impl Prefetch {
    /// Takes the offsets of pages in the backing. `stored_at` returns where a byte of it is stored.
    pub(crate) fn new(
        offsets: &[u64],
        page: PageSize,
        stored_at: impl Fn(u64) -> u64,
    ) -> Arc<Self> {
        let unit = GROUP_BYTES.max(page.bytes());
        let mut firsts = HashMap::new();
        let mut pages = Vec::with_capacity(offsets.len());
        for (at, offset) in offsets.iter().enumerate() {
            let number = offset >> page.shift();
            let first = firsts.entry(stored_at(number << page.shift()) / unit).or_insert(at);
            pages.push((*first, number));
        }
        pages.sort_unstable();
        pages.dedup();
        let pages: Vec<u64> = pages.into_iter().map(|(_, number)| number).collect();
        Arc::new(Self {
            pages,
            next: AtomicUsize::new(0),
            chunk: of_bytes(CHUNK_BYTES, page),
            announced: AtomicUsize::new(0),
            ahead: of_bytes(AHEAD_BYTES, page),
        })
    }

    /// Returns the next pages, in ascending runs.
    fn take(&self) -> Option<Vec<Range<u64>>> {
        // Relaxed: each chunk is taken once, and the list does not change.
        let start = self.next.fetch_add(self.chunk, Ordering::Relaxed);
        let rest = self.pages.get(start..).filter(|rest| !rest.is_empty())?;
        Some(runs_of(&rest[..rest.len().min(self.chunk)]))
    }

    /// Returns the pages that the backing shall fetch by now, each once, in ascending runs. There are some
    /// when half of those before were taken.
    fn announce(&self) -> Vec<Range<u64>> {
        let next = self.next.load(Ordering::Relaxed);
        let end = (next + self.ahead).min(self.pages.len());
        // Relaxed: as for `next`.
        let announced = self.announced.load(Ordering::Relaxed);
        if announced >= end || announced > next + self.ahead / 2 {
            return Vec::new();
        }
        let start = self.announced.fetch_max(end, Ordering::Relaxed);
        self.pages.get(start..end).map_or(Vec::new(), runs_of)
    }
}

fn runs_of(pages: &[u64]) -> Vec<Range<u64>> {
    let runs = pages.chunk_by(|one, next| one + 1 == *next);
    runs.map(|run| run[0]..run[run.len() - 1] + 1).collect()
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
    pub(crate) key: PagerKey,
}

impl PrefetchJob {
    /// Makes the next chunk ready and hands it over, or notes that there is none.
    pub(crate) fn run(self) {
        let end = self.core.contents().area().end().get();
        let mut announced = self.prefetch.announce();
        announced.retain_mut(|run| {
            run.end = run.end.min(end);
            !run.is_empty()
        });
        if !announced.is_empty() {
            self.core.will_need(&announced);
        }
        let runs = self.prefetch.take();
        let is_last = runs.is_none();
        let contents = self.core.contents();
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
        let prefetch = Prefetch::new(&offsets, page, |offset| offset);
        assert_eq!(prefetch.take(), Some([8..10, 20..22, 1..5].to_vec()));
        assert_eq!((prefetch.take(), prefetch.take()), (None, None));
        let huge = PageSize::try_from_bytes(2 << 20).unwrap();
        let prefetch = Prefetch::new(&[5 << 21, 4 << 21, (5 << 21) + 4096], huge, |offset| offset);
        for run in [5..6, 4..5] {
            assert_eq!(prefetch.take(), Some([run].to_vec()));
        }
        assert_eq!(prefetch.take(), None);
        // Stored the other way round, and so that other pages are neighbours: 4 and 5, 2 and 3, 0 and 1.
        let stored_at = |offset: u64| (8 * (16 << 10) - 1) - offset;
        let prefetch = Prefetch::new(&[6, 1, 5, 2].map(|page| page * (16 << 10)), page, stored_at);
        assert_eq!(prefetch.take(), Some([5..7, 1..3].to_vec()));
    }

    #[test]
    fn each_page_is_announced_once_and_long_before_it_is_taken() {
        const PAGES: u64 = 600;
        // Two chunks have 8 pages, and 128 are announced.
        let page = PageSize::try_from_bytes(64 << 10).unwrap();
        let prefetch = Prefetch::new(
            &(0..PAGES).map(|at| at * 2 * (64 << 10)).collect::<Vec<_>>(),
            page,
            |at| at,
        );
        let (mut announced, mut steps, mut taken) = (Vec::new(), 0, 0);
        loop {
            let runs = prefetch.announce();
            steps += u32::from(!runs.is_empty());
            announced.extend(runs.into_iter().flatten());
            assert!(announced.len() as u64 >= PAGES.min(taken + 64), "{taken}");
            let Some(runs) = prefetch.take() else { break };
            taken += runs.into_iter().flatten().count() as u64;
        }
        assert!(announced.into_iter().eq((0..PAGES).map(|at| at * 2)));
        assert!(steps <= 10, "{steps}");
    }
}

//! Pages that will be touched, installed before they are: [`Prefetch`]. They are grouped by where they are stored:
//! an I/O thread makes a group of them ready, the reader installs it, and asks for another. Several groups are on
//! their way, so that all work at once; the backing knows in advance which pages come after those. A fault brings
//! the group of its page with it. A list that is wrong costs time: pages that are there already are passed over.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use uzone_pages::PageSize;

/// How many bytes of a mapping are on their way, but at least two groups.
const UNDERWAY_BYTES: u64 = 2 << 20;
/// How many bytes the backing fetches before their group is made ready, but at least a page.
const AHEAD_BYTES: u64 = 8 << 20;
/// Pages that are stored in the same so many bytes come together, where the first of them does: a backing that
/// decodes has frames of that length, and reads each once.
const GROUP_BYTES: u64 = 64 << 10;

/// The pages of a mapping that will be touched, in that order.
pub(crate) struct Prefetch {
    pages: Vec<u64>,
    /// Where the groups start in `pages`, and where the last one ends.
    starts: Vec<usize>,
    /// The pages in ascending order, with the number of their group.
    group_of: Vec<(u64, usize)>,
    /// The next group.
    next: AtomicUsize,
    /// How many groups are on their way at most.
    underway: usize,
    /// Whether it starts with the first fault: before that, a process that is about to run needs the CPUs itself.
    waits_for_fault: bool,
    /// How many of the pages the backing was asked to fetch, and how far that goes ahead.
    announced: AtomicUsize,
    ahead: usize,
}

impl Prefetch {
    /// Takes the offsets of pages in the backing. `stored_at` returns where a byte of it is stored.
    pub(crate) fn new(
        offsets: &[u64],
        page: PageSize,
        waits_for_fault: bool,
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
        let (mut starts, mut group_of) = (Vec::new(), Vec::with_capacity(pages.len()));
        for group in pages.chunk_by(|one, next| one.0 == next.0) {
            group_of.extend(group.iter().map(|(_, number)| (*number, starts.len())));
            starts.push(group_of.len() - group.len());
        }
        starts.push(pages.len());
        group_of.sort_unstable();
        Arc::new(Self {
            pages: pages.into_iter().map(|(_, number)| number).collect(),
            starts,
            group_of,
            next: AtomicUsize::new(0),
            waits_for_fault,
            underway: usize::try_from(UNDERWAY_BYTES / unit).unwrap_or(0).max(2),
            announced: AtomicUsize::new(0),
            ahead: of_bytes(AHEAD_BYTES, page),
        })
    }

    /// Returns whether it starts with the first fault.
    pub(crate) fn waits_for_fault(&self) -> bool {
        self.waits_for_fault
    }

    /// Returns how many groups are on their way at most.
    pub(crate) fn underway(&self) -> usize {
        self.underway
    }

    /// Returns the pages of the group that a page is in, in ascending runs; none if it is not in the list.
    pub(crate) fn group_of(&self, page: u64) -> impl Iterator<Item = Range<u64>> + use<'_> {
        let found = self.group_of.binary_search_by_key(&page, |(page, _)| *page).ok();
        let pages = found.and_then(|at| self.group(self.group_of[at].1)).unwrap_or_default();
        runs_of(pages)
    }

    fn group(&self, number: usize) -> Option<&[u64]> {
        let (start, end) = (self.starts.get(number)?, self.starts.get(number.checked_add(1)?)?);
        self.pages.get(*start..*end)
    }

    /// Returns the pages of the next group, in ascending runs.
    pub(crate) fn take(&self) -> Option<impl Iterator<Item = Range<u64>> + use<'_>> {
        // Relaxed: each group is taken once, and the list does not change.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.group(number).map(runs_of)
    }

    /// Returns the pages that the backing shall fetch by now, each once, in ascending runs. There are some
    /// when half of those before were taken.
    pub(crate) fn announce(&self) -> Vec<Range<u64>> {
        let next = self.starts.get(self.next.load(Ordering::Relaxed));
        let next = next.copied().unwrap_or(self.pages.len());
        let end = (next + self.ahead).min(self.pages.len());
        // Relaxed: as for `next`.
        let announced = self.announced.load(Ordering::Relaxed);
        if announced >= end || announced > next + self.ahead / 2 {
            return Vec::new();
        }
        let start = self.announced.fetch_max(end, Ordering::Relaxed);
        self.pages.get(start..end).map_or(Vec::new(), |pages| runs_of(pages).collect())
    }
}

fn runs_of(pages: &[u64]) -> impl Iterator<Item = Range<u64>> + use<'_> {
    let runs = pages.chunk_by(|one, next| one + 1 == *next);
    runs.map(|run| run[0]..run[run.len() - 1] + 1)
}

fn of_bytes(bytes: u64, page: PageSize) -> usize {
    usize::try_from((bytes / page.bytes()).max(1)).unwrap_or(usize::MAX)
}

/// Pages that are ready.
pub(crate) struct Group {
    pub(crate) runs: Vec<Range<u64>>,
    /// Where the next one comes from.
    pub(crate) prefetch: Arc<Prefetch>,
    /// Whether it is the one before all others, without a page.
    pub(crate) is_first: bool,
    /// Whether none comes.
    pub(crate) is_last: bool,
}

impl Group {
    /// A group without pages, after which the first one comes.
    pub(crate) fn before_the_first(prefetch: Arc<Prefetch>) -> Self {
        Self { runs: Vec::new(), prefetch, is_first: true, is_last: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pages of all groups.
    fn taken(prefetch: &Prefetch) -> Vec<Vec<u64>> {
        std::iter::from_fn(|| Some(prefetch.take()?.flatten().collect())).collect()
    }

    #[test]
    fn pages_come_in_the_order_that_was_recorded_and_those_of_a_group_together() {
        let page = PageSize::try_from_bytes(16 << 10).unwrap();
        let offsets = [9, 20, 8, 8, 3, 21, 4, 1, 2].map(|page| page * (16 << 10) + 5);
        let prefetch = Prefetch::new(&offsets, page, false, |offset| offset);
        let groups = [vec![8, 9], vec![20, 21], vec![1, 2, 3], vec![4]];
        assert_eq!(taken(&prefetch), groups);
        assert!(prefetch.take().is_none(), "as often as it is asked");
        for (page, group) in [(8, 0), (21, 1), (2, 2), (4, 3)] {
            assert!(prefetch.group_of(page).flatten().eq(groups[group].iter().copied()));
        }
        assert_eq!(prefetch.group_of(10).count(), 0, "it is not in the list");
        let huge = PageSize::try_from_bytes(2 << 20).unwrap();
        let prefetch =
            Prefetch::new(&[5 << 21, 4 << 21, (5 << 21) + 4096], huge, false, |offset| offset);
        assert_eq!(taken(&prefetch), [[5], [4]]);
        // Stored the other way round, and so that other pages are neighbours: 4 to 7, 0 to 3.
        let stored_at = |offset: u64| (8 * (16 << 10) - 1) - offset;
        let offsets = [6, 1, 4, 2].map(|page| page * (16 << 10));
        let prefetch = Prefetch::new(&offsets, page, false, stored_at);
        assert_eq!(taken(&prefetch), [[4, 6], [1, 2]]);
        assert!(prefetch.group_of(4).eq([4..5, 6..7]));
    }

    #[test]
    fn each_page_is_announced_once_and_long_before_it_is_taken() {
        const PAGES: u64 = 600;
        // A group is a page, and 128 are announced.
        let page = PageSize::try_from_bytes(64 << 10).unwrap();
        let prefetch = Prefetch::new(
            &(0..PAGES).map(|at| at * 2 * (64 << 10)).collect::<Vec<_>>(),
            page,
            false,
            |at| at,
        );
        let (mut announced, mut steps, mut taken) = (Vec::new(), 0, 0);
        loop {
            let runs = prefetch.announce();
            steps += u32::from(!runs.is_empty());
            announced.extend(runs.into_iter().flatten());
            assert!(announced.len() as u64 >= PAGES.min(taken + 64), "{taken}");
            let Some(runs) = prefetch.take() else { break };
            taken += runs.flatten().count() as u64;
        }
        assert!(announced.into_iter().eq((0..PAGES).map(|at| at * 2)));
        assert!(steps <= 10, "{steps}");
    }
}

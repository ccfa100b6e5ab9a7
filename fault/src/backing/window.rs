//! The pages that a backing is offered: [`Window`], through which it installs them.
//!
//! A window knows which of its pages are still open, hands the kernel's answers over, and notes in
//! the pages' words the outcome. A backing reads runs of open pages from it and fills them;
//! a page that it skips stays as it was. Pages are claimed for the time in which the kernel installs them
//! ([`Claimed`]).
//!
//! Every reply of the kernel ends here: progress is noted and the rest asked for again, a page that was
//! there already is noted and its waiters are woken, a layout that changes and a lack of memory end the
//! window until the next attempt.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use uzone_os::uffd::{Answered, UffdError};
use uzone_os::{AccessError, Mapping};
use uzone_pages::{Content, PageSize};

use crate::engine::staged::StagingFiller;
use crate::memory::kernel::Fill;
use crate::pages::Pages;
use crate::pages::claimed::{Claimed, Words};
use crate::stats::Counters;

/// Pages of a mapping, offered to its backing.
///
/// Offsets are bytes from where the backing starts.
pub struct Window<'a> {
    memory: &'a Pages,
    pages: Range<u64>,
    /// The page that a thread waits for.
    wanted: Option<u64>,
    owner: Owner<'a>,
    staging: &'a mut [u8],
    /// The page at which the next run is looked for.
    next: u64,
    /// How often pages had been given back when it was made, where that matters.
    seen: Option<u64>,
    pub(crate) state: Progress,
}

/// The owner of the page that a thread waits for.
#[derive(Clone, Copy, Debug)]
enum Owner<'a> {
    /// The window claims it for the time of a call of the kernel, as its neighbours.
    Window,
    /// The thread that made the window owns it for longer.
    Caller,
    /// The same, and the page is noted and not installed: another thread installs and counts it.
    Notes(&'a StagingFiller),
}

/// The outcome of a window so far.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// How many pages were installed.
    pub(crate) filled: u64,
    /// Whether the page that a thread waits for is present.
    pub(crate) wanted_is_done: bool,
    /// Whether the kernel deferred its answer.
    pub(crate) deferred: bool,
    /// Whether the kernel had no memory for a page.
    pub(crate) lacks_memory: bool,
    /// Whether there is nothing to fill any more.
    pub(crate) gone: bool,
    /// Whether the bytes that were read for it may be too old.
    pub(crate) is_stale: bool,
}

/// The outcome of pages that were offered to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Filled {
    /// All are present.
    All,
    /// All are present, except pages that the page cache does not have: holes of a memory file, where pages
    /// were to be continued.
    Hole,
    /// Some are not, for now or for good: they are bad, or the kernel cannot fill them at the moment.
    /// This window does no more with them. They may hold bytes that a hole does not have.
    Some,
}

impl<'a> Window<'a> {
    pub(crate) fn new(
        memory: &'a Pages,
        pages: Range<u64>,
        wanted: Option<u64>,
        staging: &'a mut [u8],
    ) -> Self {
        let (next, state) = (pages.start, Progress::default());
        let seen = memory.evictions_seen();
        Self { memory, pages, wanted, owner: Owner::Window, staging, next, seen, state }
    }

    /// Makes a window of one page that the caller owns.
    pub(crate) fn owned(memory: &'a Pages, page: u64, staging: &'a mut [u8]) -> Self {
        // An owned page is not given back.
        Self {
            owner: Owner::Caller,
            seen: None,
            ..Self::new(memory, page..page + 1, Some(page), staging)
        }
    }

    /// Makes a window of one owned page that is not installed: `notes` has it afterwards.
    pub(crate) fn noted(
        memory: &'a Pages,
        page: u64,
        notes: &'a StagingFiller,
        staging: &'a mut [u8],
    ) -> Self {
        Self { owner: Owner::Notes(notes), ..Self::owned(memory, page, staging) }
    }

    /// Returns the offsets of the pages.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.bytes(&self.pages)
    }

    /// Returns the size of a page.
    #[must_use]
    pub fn page_size(&self) -> PageSize {
        self.memory.page
    }

    /// Returns the offsets of the page that a thread waits for, if it is one of these and is not present
    /// yet.
    #[must_use]
    pub fn wanted(&self) -> Option<Range<u64>> {
        let page = self.wanted.filter(|page| self.pages.contains(page))?;
        (!self.state.wanted_is_done).then(|| self.bytes(&(page..page + 1)))
    }

    /// Returns how many bytes [`Window::copy_with`] takes at once.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.staging.len() as u64
    }

    fn bytes(&self, pages: &Range<u64>) -> Range<u64> {
        let shift = self.page_size().shift();
        pages.start << shift..pages.end << shift
    }

    /// Offers `pages` of the window alone, until `offered` returns.
    pub(crate) fn part(&mut self, pages: Range<u64>, offered: impl FnOnce(&mut Window<'_>)) {
        let first = pages.start;
        // If `offered` panics, this window is restored too: its progress is read afterwards.
        let whole = (std::mem::replace(&mut self.pages, pages), self.next);
        self.next = first;
        let answer = catch_unwind(AssertUnwindSafe(|| offered(self)));
        (self.pages, self.next) = whole;
        answer.unwrap_or_else(|panic| resume_unwind(panic));
    }

    /// Returns whether `range` is whole pages of the window.
    fn check(&self, range: &Range<u64>) -> Result<(), AccessError> {
        let &Range { start, end } = range;
        let (inside, page) = (self.range(), self.page_size());
        if start < inside.start || end > inside.end {
            return Err(AccessError::Beyond { start, end, len_bytes: inside.end });
        }
        if start >= end || (start | end) & (page.bytes() - 1) != 0 {
            return Err(AccessError::CutsPage { start, end, page });
        }
        Ok(())
    }

    /// Returns whether the caller owns the page that a thread waits for.
    fn is_owned(&self) -> bool {
        !matches!(self.owner, Owner::Window)
    }

    /// Returns whether no page can be installed any more.
    fn has_ended(&self) -> bool {
        let state = &self.state;
        state.gone || state.deferred || state.lacks_memory || state.is_stale
    }

    /// Returns the offsets of the next run of pages that are open: they are neither filled nor being
    /// filled. Each page is in one run.
    #[must_use]
    pub fn next_run(&mut self) -> Option<Range<u64>> {
        if self.has_ended() {
            return None;
        }
        let owned = self.wanted.filter(|_| self.is_owned() && !self.state.wanted_is_done);
        let run = self.memory.contents.open_run(self.next..self.pages.end, owned)?;
        self.next = run.end;
        Some(self.bytes(&run))
    }

    /// Fills pages from `offset` on with `bytes`, which are whole pages.
    ///
    /// # Errors
    /// [`UffdError`] if they are not all in the window, or the kernel refuses.
    pub fn copy(&mut self, offset: u64, bytes: &[u8]) -> Result<Filled, UffdError> {
        let range = offset..offset.saturating_add(bytes.len() as u64);
        self.install(range, Fill::Bytes(bytes))
    }

    /// Fills pages of `range` with bytes of another mapping, from its byte `source_offset` on, without
    /// a buffer in between. Missing pages there are made present first, which may block: a
    /// [`Backing::map_pages`](crate::Backing::map_pages) gives only pages that are known to be present.
    ///
    /// # Errors
    /// As for [`Window::copy`]; also if the source is not inside of its mapping, or was behind the
    /// end of a file that became shorter.
    pub fn copy_from(
        &mut self,
        range: Range<u64>,
        source: &Mapping,
        source_offset: u64,
    ) -> Result<Filled, UffdError> {
        self.install(range, Fill::From { source, offset: source_offset })
    }

    /// Fills pages of `range` with the bytes that `produce` writes into a buffer of that length, or of
    /// [`Window::room`] if that is less. It returns how many of those bytes it wrote; the whole pages among
    /// them are installed.
    ///
    /// # Errors
    /// The error of `produce`, or [`UffdError`] as for [`Window::copy`].
    pub fn copy_with<E: From<UffdError>>(
        &mut self,
        range: Range<u64>,
        produce: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<Filled, E> {
        let len = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
        let page = self.page_size().bytes();
        // Taken out, so that the window can be changed while the bytes are in it.
        let staging = std::mem::take(&mut self.staging);
        let lent = Lent { window: self, staging };
        let room = len.min(lent.staging.len());
        let written = produce(&mut lent.staging[..room])?;
        let whole = (written.min(room) as u64) / page * page;
        if whole == 0 {
            return Ok(Filled::Some);
        }
        let whole = usize::try_from(whole).unwrap_or(room);
        let filled = lent.window.copy(range.start, &lent.staging[..whole])?;
        Ok(if whole == len { filled } else { Filled::Some })
    }

    /// Fills pages with zeroes.
    ///
    /// # Errors
    /// As for [`Window::copy`].
    pub fn zero(&mut self, range: Range<u64>) -> Result<Filled, UffdError> {
        self.check(&range)?;
        if self.memory.policy.zeroes_by_copy {
            let mut at = range.start;
            let mut all = Filled::All;
            let room = self.room();
            if room == 0 {
                return Ok(Filled::Some);
            }
            while at < range.end {
                let end = range.end.min(at + room);
                let filled = self.copy_with(at..end, |bytes| {
                    bytes.fill(0);
                    Ok::<_, UffdError>(bytes.len())
                })?;
                if filled != Filled::All {
                    all = filled;
                }
                at = end;
            }
            return Ok(all);
        }
        let before = self.state.filled;
        let answer = self.install(range, Fill::Zero);
        Counters::add(&self.memory.counters.zeroes, self.state.filled - before);
        answer
    }

    /// Maps pages that the page cache has: of a memory file. Other pages stay open.
    ///
    /// # Errors
    /// As for [`Window::copy`].
    pub fn continue_mapping(&mut self, range: Range<u64>) -> Result<Filled, UffdError> {
        self.install(range, Fill::Cached)
    }

    /// Asks the kernel for the pages of `range` that are still open, and for the rest of them as long as it
    /// makes progress.
    fn install(&mut self, range: Range<u64>, fill: Fill<'_>) -> Result<Filled, UffdError> {
        self.check(&range)?;
        let (memory, owner, shift) = (self.memory, self.owner, self.page_size().shift());
        let start = range.start;
        let ask = |part: Range<u64>| {
            let fill = fill.part(part.start - start..part.end - start);
            match owner {
                Owner::Notes(notes) => Ok(notes.note(fill)),
                Owner::Window | Owner::Caller => memory.kernel.install(part, fill),
            }
        };
        // From here on pages are the mapping's.
        let first = start >> shift;
        let mut pages = first..first + ((range.end - range.start) >> shift);
        let mut all = Filled::All;
        while !pages.is_empty() {
            if self.is_owned() && self.wanted == Some(pages.start) {
                self.install_owned(pages.start, ask, &mut all)?;
                pages.start += 1;
            } else {
                let claimed = Claimed::claim(memory, pages.clone());
                pages.start = claimed.left().end;
                if claimed.left().is_empty() {
                    if !self.is_there(pages.start) {
                        all = Filled::Some;
                    }
                    pages.start += 1;
                } else {
                    self.install_claimed(claimed, ask, &mut all)?;
                }
            }
            if self.has_ended() {
                return Ok(Filled::Some);
            }
        }
        Ok(all)
    }

    /// Returns whether a page that cannot be claimed is present.
    fn is_there(&mut self, page: u64) -> bool {
        let is_there = self.memory.contents.get(page) == Content::Present;
        if is_there && self.wanted == Some(page) {
            // A waiter may have come between its eviction and its return.
            self.memory.wake(page..page + 1);
            self.state.wanted_is_done = true;
        }
        is_there
    }

    /// Installs the page that the caller owns, which stays its own if that fails.
    fn install_owned(
        &mut self,
        page: u64,
        ask: impl Fn(Range<u64>) -> Result<Answered, UffdError>,
        all: &mut Filled,
    ) -> Result<(), UffdError> {
        let answer = self.note_shortage(ask(self.memory.bytes(page..page + 1)))?;
        let Some((count, is_placed)) = self.step(page..page + 1, answer, all) else {
            return Ok(());
        };
        if count == 0 {
            return Ok(());
        }
        // The thread that installs a page which is only noted here counts it.
        self.state.wanted_is_done = true;
        if !matches!(self.owner, Owner::Notes(_)) {
            self.state.filled += u64::from(is_placed);
            // A thread may have given the page up meanwhile. If the page is a bad one, the kernel has the
            // mark that raises the signal.
            self.state.wanted_is_done = self.memory.note_owned_filled(page, is_placed);
        }
        Ok(())
    }

    /// Installs pages that were absent. The rest is given up when the kernel fills no more.
    fn install_claimed(
        &mut self,
        mut claimed: Claimed<'_, Pages>,
        ask: impl Fn(Range<u64>) -> Result<Answered, UffdError>,
        all: &mut Filled,
    ) -> Result<(), UffdError> {
        if self.seen != self.seen.and(self.memory.evictions_seen()) {
            self.state.is_stale = true;
            return Ok(());
        }
        // It ends: every round but the last goes at least a page further.
        while !claimed.left().is_empty() {
            let left = claimed.left();
            let answer = self.note_shortage(ask(self.memory.bytes(left.clone())))?;
            match self.step(left.clone(), answer, all) {
                None => return Ok(()),
                Some((0, _)) => claimed.give_up(1),
                Some((count, is_placed)) => {
                    let filled = left.start..left.start + count;
                    claimed.filled(count, is_placed);
                    self.state.filled += if is_placed { count } else { 0 };
                    self.state.wanted_is_done |=
                        self.wanted.is_some_and(|wanted| filled.contains(&wanted));
                }
            }
        }
        Ok(())
    }

    /// Notes whether the kernel had no memory.
    fn note_shortage<T>(&mut self, answer: Result<T, UffdError>) -> Result<T, UffdError> {
        self.state.lacks_memory |= answer.as_ref().is_err_and(UffdError::is_no_memory);
        answer
    }

    /// Returns how many of the first of some pages are present by an answer of the kernel, none where the
    /// first is a hole, and whether they were installed by it; `None` if the window has ended.
    #[inline]
    fn step(
        &mut self,
        pages: Range<u64>,
        answer: Answered,
        all: &mut Filled,
    ) -> Option<(u64, bool)> {
        let shift = self.page_size().shift();
        match answer {
            Answered::All => Some((pages.end - pages.start, true)),
            Answered::Part { bytes } if bytes >> shift > 0 => Some((bytes >> shift, true)),
            Answered::Present => {
                // No waiter was woken, and one may have come between our look and this.
                self.memory.wake(pages.start..pages.start + 1);
                Some((1, false))
            }
            Answered::Hole => {
                if *all == Filled::All {
                    *all = Filled::Hole;
                }
                Some((0, false))
            }
            Answered::NotRegistered | Answered::Gone => {
                self.state.gone = true;
                None
            }
            // Part of a page is no progress: as if nothing was done.
            Answered::LayoutChanging | Answered::Busy | Answered::Part { .. } => {
                self.state.deferred = true;
                None
            }
        }
    }
}

/// The staging memory of a window while a backing writes to it: put back when this is dropped, also
/// where the backing panics.
struct Lent<'w, 'a> {
    window: &'w mut Window<'a>,
    staging: &'a mut [u8],
}

impl Drop for Lent<'_, '_> {
    fn drop(&mut self) {
        self.window.staging = std::mem::take(&mut self.staging);
    }
}

impl std::fmt::Debug for Window<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window")
            .field("range", &self.range())
            .field("wanted", &self.wanted)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

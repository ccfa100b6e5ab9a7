//! Huge pages for what is filled: [`LazyMapping::collapse`](crate::LazyMapping::collapse), and a thread that
//! collapses a mapping in which no page was filled for a while.
//!
//! A huge page is made of 2 MiB that are filled wholly; a page that is missing there has to raise an event
//! when it is touched, so the kernel makes none of them. Zeroes that take no memory are given some first.
//! No byte changes, and threads may use the memory meanwhile: a thread that touches those 2 MiB waits for a
//! moment.
//!
//! | memory | |
//! |---|---|
//! | anonymous | made huge |
//! | of a pool | huge from the start |
//! | a memory file | not: its bytes would have to start at a multiple of a huge page, in the file and in memory alike, which mappings of it do not; one that is made of huge pages has them |
//! | whose writes are tracked | not: a huge page is protected as a whole |
//!
//! Cost: one to four milliseconds for each huge page, for which the kernel holds the layout of the process.
//! The thread therefore has a low priority and not the lowest: one that hardly ever ran would hold up every
//! faulting thread. Source: madvise(2) `MADV_COLLAPSE`, Linux 6.1.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use uzone_os::signals::Held;
use uzone_os::uffd::Registered;
use uzone_os::{SystemRoot, hugepages, signals};
use uzone_pages::Content;

use crate::engine::core::Core;
use crate::error::LazyError;
use crate::stats::Counters;

/// Why a part of a range is not a huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Uncollapsed {
    /// Not all of it is filled.
    NotFilled,
    /// Writes to it are tracked.
    WritesTracked,
    /// It is of a memory file.
    MemoryFile,
    /// There was no free huge page, or pages are pinned or in use. It may work later.
    NotNow,
    /// The kernel does not do that with this memory.
    Refused,
}

/// What collapsing did to the whole huge pages in a range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Collapsed {
    /// How many are huge now.
    pub huge_pages: u64,
    /// How many of them were made so.
    pub made: u64,
    /// How many are not.
    pub skipped: u64,
    /// Why those are not, and how many for each reason.
    pub reasons: BTreeMap<Uncollapsed, u64>,
}

/// What collapses the pages of one mapping.
pub(crate) struct Collapser {
    pub(crate) core: Arc<Core>,
    pub(crate) memory: Arc<Registered>,
    pub(crate) is_tracked: bool,
}

impl Collapser {
    /// Collapses what it can of a range of pages, until `goes_on`, called before each, returns `false`.
    pub(crate) fn collapse(
        &self,
        pages: Range<u64>,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Collapsed, LazyError> {
        let mut done = Collapsed::default();
        let shift = self.core.page_size().shift();
        let is_there = |pages: Range<u64>| {
            pages.into_iter().all(|page| self.core.contents().get(page) == Content::Present)
        };
        if self.memory.mapping().page_size() != uzone_os::probe::page_size() {
            done.huge_pages = pages.filter(|&page| is_there(page..page + 1)).count() as u64;
            return Ok(done);
        }
        let bytes = self.core.bytes(pages);
        // Without transparent huge pages nothing fits.
        let thp = hugepages::thp(&SystemRoot::host()).map_err(uzone_os::MappingError::from)?;
        let Some(huge) = thp.map(|thp| thp.pmd_size.get()) else { return Ok(done) };
        // Huge pages start at multiples of their size by address.
        let start = self.memory.mapping().addr().get() as u64;
        let first = (start + bytes.start).next_multiple_of(huge) - start;
        for at in (first..bytes.end).step_by(usize::try_from(huge).unwrap_or(usize::MAX)) {
            if at + huge > bytes.end || !goes_on() {
                break;
            }
            let reason = if !is_there(at >> shift..(at + huge) >> shift) {
                Uncollapsed::NotFilled
            } else if self.memory.mapping().huge_backed_in(at..at + huge)?.get() == huge {
                done.huge_pages += 1;
                continue;
            } else {
                match self.make(at..at + huge) {
                    Ok(()) => {
                        done.huge_pages += 1;
                        done.made += 1;
                        continue;
                    }
                    Err(reason) => reason,
                }
            };
            done.skipped += 1;
            *done.reasons.entry(reason).or_default() += 1;
        }
        Counters::add(&self.core.counters().collapsed, done.made);
        Ok(done)
    }

    /// Makes one huge page.
    fn make(&self, bytes: Range<u64>) -> Result<(), Uncollapsed> {
        if self.is_tracked {
            return Err(Uncollapsed::WritesTracked);
        }
        let mapping = self.memory.mapping();
        if !mapping.is_private() {
            return Err(Uncollapsed::MemoryFile);
        }
        // Where missing pages raise events, the kernel takes the zero page for a missing one.
        if mapping.populate(bytes.clone()).is_err() {
            return Err(Uncollapsed::NotNow);
        }
        let shift = self.core.page_size().shift();
        let Some(_closed) = Closed::new(&self.core, bytes.start >> shift..bytes.end >> shift)
        else {
            return Err(Uncollapsed::NotNow);
        };
        match mapping.collapse(bytes) {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(Uncollapsed::NotNow),
            Err(_) => Err(Uncollapsed::Refused),
        }
    }
}

/// Pages that no thread can pin until this is dropped: they are moved meanwhile. Their bytes stay where a
/// touch finds them.
struct Closed<'a> {
    core: &'a Core,
    pages: Range<u64>,
    // A signal handler that touches one of the pages would wait for this thread.
    _held: Held,
}

impl<'a> Closed<'a> {
    /// Returns `None` if one of the pages is pinned, or not there any more.
    fn new(core: &'a Core, pages: Range<u64>) -> Option<Self> {
        let _held = Held::hold();
        let mut closed = Self { core, pages: pages.start..pages.start, _held };
        for page in pages {
            if !core.contents().advance(page, Content::Present, Content::Removed) {
                return None;
            }
            closed.pages.end = page + 1;
        }
        Some(closed)
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let contents = self.core.contents();
        for page in self.pages.clone() {
            // A page that went bad meanwhile stays bad.
            if contents.advance(page, Content::Removed, Content::Filling) {
                let _ = contents.advance(page, Content::Filling, Content::Present);
            }
        }
        // A thread that faulted meanwhile was left waiting.
        if !self.pages.is_empty() {
            self.core.kernel().wake(self.core.bytes(self.pages.clone()));
        }
    }
}

/// A thread that collapses a mapping after a time without a filled page, until this is dropped.
pub(crate) struct QuietCollapser {
    /// Dropped to stop the thread.
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl QuietCollapser {
    /// Starts one that acts when no page was filled for `quiet`.
    pub(crate) fn start(collapser: Collapser, quiet: Duration) -> io::Result<Self> {
        let (stop, stopped) = sync_channel(0);
        let work = move || collapse_when_quiet(&collapser, &stopped, quiet);
        let thread = signals::spawn("uzone-collapse", work)?;
        Ok(Self { stop: Some(stop), thread: Some(thread), process: std::process::id() })
    }
}

fn collapse_when_quiet(collapser: &Collapser, stopped: &Receiver<()>, quiet: Duration) {
    // A filter may forbid it; then the thread is as important as others.
    let _ = uzone_os::thread::low();
    let is_stopped = || stopped.try_recv() == Err(TryRecvError::Disconnected);
    let filled = || collapser.core.filled();
    let (mut last, mut done) = (filled(), 0);
    // No message comes: the owner drops its end.
    while stopped.recv_timeout(quiet) == Err(RecvTimeoutError::Timeout) {
        let now = filled();
        if now == last && now != done {
            let area = collapser.core.contents().area();
            let pages = area.start().get()..area.end().get();
            // A new fault restarts the time.
            let answer = collapser.collapse(pages, || !is_stopped() && filled() == now);
            if answer.is_ok() && filled() == now {
                done = now;
            }
        }
        last = now;
    }
}

impl Drop for QuietCollapser {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The C library has taken what the thread had.
            std::mem::forget((self.stop.take(), self.thread.take()));
            return;
        }
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It was printed when it happened.
            let _ = thread.join();
        }
    }
}

//! Faults answered by the threads that take them: [`InThread`], for memory of a userfaultfd with
//! [`Features::SIGBUS`](crate::uffd::Features::SIGBUS).
//!
//! Such a userfaultfd reports nothing. The kernel raises `SIGBUS` in the thread that touches a missing page,
//! and the one handler of this process ([`bus`]) fills the page and its neighbours and returns; the access is
//! repeated. No other thread is woken, which is most of what a fault costs on a virtual machine.
//!
//! What runs in the handler takes no lock, allocates nothing and touches no memory that is mapped lazily:
//! bytes of a file are the source of a copy that the kernel makes. A page that is not in the page cache is
//! waited for in that copy.
//!
//! No thread can end such a wait. Where a page has a deadline ([`Answers::without_waiting`]), the handler fills what is
//! ready alone: it reads what the page cache has into a room that was made beforehand, and copies it from there. What
//! is not ready, or cannot be filled at all, is handed over ([`Handover`]), if there is another thread for it.
//!
//! A system call that is given a missing page fails with `EFAULT`. A thread that blocks `SIGBUS` dies of a
//! fault.
//!
//! # Which pages
//!
//! [`Window::Fixed`] maps the aligned window around the page. [`Window::Growing`] knows up to eight readers
//! in order, whose windows double; of other faults it maps one page, until a block of 2 MiB has had so many
//! that they have cost as much as mapping all of it, and then that. One bit a page states whether it was
//! filled; it is a hint, and the kernel decides.
//!
//! # Writes
//!
//! Where writes are tracked ([`Writes`]), pages are filled protected. If each first write is an event, the
//! thread that writes notes it and lets itself in; while another thread makes the page clean, it tries again.
//! A page that is given back may come again with other bytes, those that were written back, so
//! [`InThread::drain`] waits for the handlers that may have read the old ones.
//!
//! Unsafe: a pointer that the handler follows.
//! Source: ioctl_userfaultfd(2), `UFFD_FEATURE_SIGBUS`; signal-safety(7).

use core::ops::Range;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use core::time::Duration;
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use uzone_pages::{ByteLen, FaultAround, PageCount, PageSize, Pfn, PfnRange};

use crate::bus;
use crate::mapping::Mapping;
use crate::options::{Anonymous, Vaddr};
use crate::page_cache::{self, CachedRead};
use crate::uffd::answer::{AnswerError, Install};
use crate::uffd::descriptor::UffdError;
use crate::uffd::gate::Gate;
use crate::uffd::handover::{self, Handover};
use crate::uffd::pace::Paced;
use crate::uffd::registered::Registered;
use crate::uffd::reply::{Answered, Refusal};
use crate::uffd::ring::Ring;
use crate::uffd::rooms::Rooms;
use crate::uffd::write_states::WriteStates;

pub use crate::uffd::pace::Pace;

/// How many mappings can be answered for so at a time.
pub const SLOTS: usize = 64;
/// How many pages have a count of faults.
const BLOCK: u64 = 512;
/// How many readers in order are distinguished.
const STREAMS: usize = 8;
/// How many shares the counts of the threads have.
const SHARES: usize = 8;
/// How long to wait for handlers at the end; if one is stopped inside, its memory is kept for good.
const PATIENCE: Duration = Duration::from_secs(2);

/// What is noted of a fault, in the lowest bits of a word whose others are nanoseconds.
const WRITE: u64 = 1;
const PRESENT: u64 = 2;
const ANSWERED: u64 = 4;
const FLAGS: u32 = 3;

/// Where pages come from.
#[derive(Debug)]
pub enum Source {
    /// The memory file that the memory is a mapping of. Its holes are zero.
    Cached,
    /// Files and zeroes, in order and without a gap.
    Parts(Vec<SourcePart>),
}

impl Source {
    /// Returns a source of nothing but zeroes.
    #[must_use]
    pub fn zero() -> Self {
        Self::Parts(vec![SourcePart { range: 0..u64::MAX, file: None }])
    }

    /// Returns a source of a file alone.
    #[must_use]
    pub fn file(file: FileSource) -> Self {
        Self::Parts(vec![SourcePart { range: 0..u64::MAX, file: Some((file, 0)) }])
    }
}

/// A file, and all of it mapped.
#[derive(Clone, Debug)]
pub struct FileSource {
    /// The file, whose length is looked at.
    pub file: Arc<File>,
    /// The file, mapped from its start on.
    pub mapped: Arc<Mapping>,
    /// How many bytes it had when it was taken. What is behind is zero, up to the end of that page.
    pub len: ByteLen,
}

/// Some bytes of a memory, in whole pages.
#[derive(Debug)]
pub struct SourcePart {
    /// Where it is in the memory.
    pub range: Range<u64>,
    /// The file, and where the part starts in it; without one it is zero.
    pub file: Option<(FileSource, u64)>,
}

/// How writes are tracked.
#[derive(Debug, Default)]
pub enum Writes {
    /// They are not.
    #[default]
    Free,
    /// The kernel records them, and lets writers in.
    Recorded,
    /// Each first write of a page is an event.
    Awaited(Arc<WriteStates>),
}

/// What a thread did that took a fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    /// Whether there was a page, which it may not access so.
    pub(crate) is_present: bool,
    /// Whether it wrote.
    pub(crate) is_write: bool,
}

/// Which pages a fault maps.
#[derive(Clone, Copy, Debug)]
pub enum Window {
    /// The aligned window of that size.
    Fixed(FaultAround),
    /// Windows that grow up to a size.
    Growing {
        /// The size of the second window of a reader in order.
        first: FaultAround,
        /// The largest window of such a reader.
        most: FaultAround,
        /// After so many faults of other threads in a block of 512 pages, all of it is mapped.
        block_after: u8,
    },
}

#[cfg(not(loom))]
static TABLE: [Gate<Answerer>; SLOTS] = [const { Gate::new() }; SLOTS];
// Gates of the model checker are not made by constants.
#[cfg(loom)]
static TABLE: std::sync::LazyLock<[Gate<Answerer>; SLOTS]> =
    std::sync::LazyLock::new(|| core::array::from_fn(|_| Gate::new()));

/// How faults are answered.
#[derive(Debug)]
pub struct Answers {
    source: Source,
    window: Window,
    writes: Writes,
    records: usize,
    handover: Option<Arc<Handover>>,
    waits: bool,
    pace: Option<Pace>,
}

impl Answers {
    /// Fills pages from `source`, as many at a time as `window` has.
    #[must_use]
    pub fn new(source: Source, window: Window) -> Self {
        let (writes, handover, pace) = (Writes::Free, None, None);
        Self { source, window, writes, records: 0, handover, waits: true, pace }
    }

    /// Hands faults over that cannot be answered here.
    #[must_use]
    pub fn hands_over(mut self, to: Arc<Handover>) -> Self {
        self.handover = Some(to);
        self
    }

    /// Hands over what would have to be waited for, too.
    #[must_use]
    pub fn without_waiting(mut self) -> Self {
        self.waits = false;
        self
    }

    /// Lets threads wait that take more faults, or have more filled, than that.
    #[must_use]
    pub fn pace(mut self, pace: Pace) -> Self {
        self.pace = Some(pace);
        self
    }

    /// Tracks writes.
    #[must_use]
    pub fn writes(mut self, writes: Writes) -> Self {
        self.writes = writes;
        self
    }

    /// Keeps records of the last faults.
    #[must_use]
    pub fn records(mut self, keeps: usize) -> Self {
        self.records = keeps;
        self
    }
}

/// A fault that was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// When the handler was called.
    pub at: Instant,
    /// The page.
    pub page: u64,
    /// Whether it was a write.
    pub is_write: bool,
    /// Whether the page was there before.
    pub was_present: bool,
    /// Whether the page was one of a memory file.
    pub is_minor: bool,
    /// Whether the access was repeated.
    pub is_answered: bool,
    /// How long the handler took.
    pub latency: Duration,
}

/// What was done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// How many faults there were of pages that were not there.
    pub faults: u64,
    /// How many pages were filled for them.
    pub filled: u64,
    /// How many faults there were of writes to pages that were there.
    pub writes: u64,
    /// How often a thread waited because of [`Answers::pace`].
    pub held: u64,
}

/// What answers for one mapping.
struct Answerer {
    memory: Arc<Registered>,
    answers: Answers,
    /// Zeroes to copy, where the kernel's zero page is not what a page is filled with.
    zeroes: Option<Mapping>,
    /// Rooms to read to, where no file is waited for.
    rooms: Option<Rooms>,
    paced: Option<Paced>,
    started: Instant,
    records: Ring,
    page: PageSize,
    pages: u64,
    /// The process; a child that was forked off has none of this.
    process: u32,
    /// A bit for each page that was filled.
    filled: Box<[AtomicU64]>,
    /// A bit for each page that is bad.
    bad: Box<[AtomicU64]>,
    /// The faults of each block, up to 255.
    block_faults: Box<[AtomicU8]>,
    /// The page behind the last window of a reader in order, and the order of its next window in the upper
    /// byte.
    streams: [AtomicU64; STREAMS],
    oldest: AtomicU64,
    shares: [Share; SHARES],
}

/// Counts of some of the threads. They have lines of the cache of their own: threads that fault at once wait neither
/// for each other's counts nor for what all of them read.
#[repr(align(128))]
#[derive(Default)]
struct Share {
    faults: AtomicU64,
    filled: AtomicU64,
    writes: AtomicU64,
}

/// What became of the page that a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// It was filled, or the access is repeated and may fault again.
    Now,
    /// It was there before.
    Before,
    /// It would have to be waited for.
    Later,
    /// It cannot be filled.
    Never,
    /// It is no page of the memory any more.
    Gone,
}

/// A mapping whose faults are answered by the threads that take them, until this is dropped.
///
/// # Invariants
/// `slot` is this value's alone, and its pointer is what `answerer` was made of.
pub struct InThread {
    slot: usize,
    answerer: *mut Answerer,
}

// SAFETY: `Send` and `Sync` want that the answerer may be used from any thread: handlers of all threads do,
// and its fields are shared types and atomics. It is freed by the one owner of this value.
unsafe impl Send for InThread {}
// SAFETY: as above.
unsafe impl Sync for InThread {}

/// A place among those that the handler looks at.
///
/// # Invariants
/// The slot is this value's alone, and not active.
#[derive(Debug)]
pub struct Place(usize);

impl Place {
    /// Takes a place, and installs the handler of `SIGBUS` if that is not done.
    ///
    /// # Errors
    /// [`UffdError::AnotherHandler`] if the handler cannot be installed, and [`UffdError::TooMany`] if all
    /// places are taken: the handler is installed then.
    pub fn take() -> Result<Self, UffdError> {
        if !matches!(bus::install(), Ok(bus::Installed::New | bus::Installed::Already)) {
            return Err(UffdError::AnotherHandler);
        }
        TABLE.iter().position(Gate::take).map(Self).ok_or(UffdError::TooMany)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        TABLE[self.0].give_back();
    }
}

impl InThread {
    /// Answers for memory from now on, whose userfaultfd has
    /// [`Features::SIGBUS`](crate::uffd::Features::SIGBUS).
    ///
    /// # Errors
    /// [`UffdError::NoSigbus`] if it has not, and [`UffdError::NoMemory`] without memory for it.
    pub fn start(
        place: Place,
        memory: Arc<Registered>,
        answers: Answers,
    ) -> Result<Self, UffdError> {
        if !memory.uffd().features().contains(crate::uffd::Features::SIGBUS) {
            return Err(UffdError::NoSigbus);
        }
        let page = memory.mapping().page_size();
        let copies_zeroes = match answers.writes {
            Writes::Free => false,
            Writes::Recorded => !memory.mapping().is_private(),
            Writes::Awaited(_) => true,
        };
        let zeroes =
            || Mapping::anonymous(ByteLen::new(BLOCK << page.shift()), Anonymous::default());
        let zeroes = copies_zeroes.then(zeroes).transpose();
        let rooms = (!answers.waits).then(|| Rooms::new(page)).transpose();
        let pages = memory.mapping().mapped_len() as u64 / page.bytes();
        let count = |per: u64| usize::try_from(pages.div_ceil(per)).unwrap_or(usize::MAX);
        let first = memory.mapping().addr().get() as u64;
        let answerer = Answerer {
            zeroes: zeroes.map_err(|_| UffdError::NoMemory)?,
            rooms: rooms.map_err(|_| UffdError::NoMemory)?,
            paced: answers.pace.map(Paced::new),
            started: Instant::now(),
            records: Ring::new(answers.records),
            answers,
            page,
            pages,
            process: std::process::id(),
            filled: (0..count(64)).map(|_| AtomicU64::new(0)).collect(),
            bad: (0..count(64)).map(|_| AtomicU64::new(0)).collect(),
            block_faults: (0..count(BLOCK)).map(|_| AtomicU8::new(0)).collect(),
            streams: [const { AtomicU64::new(u64::MAX) }; STREAMS],
            oldest: AtomicU64::new(0),
            shares: Default::default(),
            memory,
        };
        let last = first + (pages << page.shift()) - 1;
        let index = place.0;
        // The slot is this value's from here on.
        core::mem::forget(place);
        let answerer = Box::into_raw(Box::new(answerer));
        TABLE[index].open(first, last, answerer);
        Ok(Self { slot: index, answerer })
    }

    fn answerer(&self) -> &Answerer {
        // SAFETY: `as_ref` wants a value that lives as long as the reference: it is freed when this value is
        // dropped (the invariant), and handlers change atomics alone.
        unsafe { &*self.answerer }
    }

    /// Returns what was done so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let answerer = self.answerer();
        // Relaxed: statistics.
        let get = |count: fn(&Share) -> &AtomicU64| -> u64 {
            answerer.shares.iter().map(|share| count(share).load(Ordering::Relaxed)).sum()
        };
        Counts {
            faults: get(|share| &share.faults),
            filled: get(|share| &share.filled),
            writes: get(|share| &share.writes),
            held: answerer.paced.as_ref().map_or(0, Paced::held),
        }
    }

    /// Takes the records out that were made since the last call, in the order in which they were finished
    /// or nearly so. Returns how many were lost. One thread at a time calls it.
    pub fn take_records(&self, mut found: impl FnMut(Record)) -> u64 {
        let answerer = self.answerer();
        answerer.records.take(|[at, page, rest]| {
            found(Record {
                at: answerer.started + Duration::from_nanos(at),
                page,
                is_write: rest & WRITE != 0,
                was_present: rest & PRESENT != 0,
                is_minor: matches!(answerer.answers.source, Source::Cached),
                is_answered: rest & ANSWERED != 0,
                latency: Duration::from_nanos(rest >> FLAGS),
            });
        })
    }

    /// Waits until each handler has left that may have read bytes for a page and not filled it yet: from then
    /// on pages are filled with what the source has now. Returns whether they have; a handler that waits for
    /// a device may take longer than this waits, which is two seconds. One thread at a time calls it.
    #[must_use]
    pub fn drain(&self) -> bool {
        let give_up = Instant::now() + PATIENCE;
        TABLE[self.slot].drain(|| {
            std::thread::yield_now();
            Instant::now() < give_up
        })
    }

    /// Returns whether a page may have been filled here.
    #[must_use]
    pub fn may_have_filled(&self, page: u64) -> bool {
        page < self.answerer().pages && self.answerer().is_filled(page)
    }

    /// Notes that pages were filled elsewhere: a window leaves them out, and a writer that goes on page by
    /// page is let in there too.
    pub fn filled_elsewhere(&self, pages: Range<u64>) {
        let answerer = self.answerer();
        answerer.mark_filled(pages.start..pages.end.min(answerer.pages));
    }

    /// Notes that a page is bad: the kernel has a mark for it. A thread that touches it gets the signal, which does
    /// not always distinguish a mark from a missing page, and windows leave it out: a copy would take the place of
    /// the mark.
    pub fn made_bad(&self, page: u64) {
        let answerer = self.answerer();
        if page < answerer.pages {
            let (index, bit) = place(page);
            // Relaxed: a handler that does not see it yet hands the fault over, and sees it the next time.
            answerer.bad[index].fetch_or(bit, Ordering::Relaxed);
            answerer.mark_filled(page..page + 1);
        }
    }

    /// Wakes the threads that wait for one of some pages that they handed over.
    pub fn wake(&self, pages: Range<u64>) {
        if let Some(handover) = &self.answerer().answers.handover {
            handover.wake_pages(pages);
        }
    }

    /// Notes that pages are being given back. Called before they are.
    pub fn gives_back(&self, pages: Range<u64>) {
        let answerer = self.answerer();
        for page in pages.start..pages.end.min(answerer.pages) {
            let (index, bit) = place(page);
            // Relaxed: a hint, and what is given back is not bad.
            answerer.filled[index].fetch_and(!bit, Ordering::Relaxed);
            if answerer.bad[index].load(Ordering::Relaxed) & bit != 0 {
                answerer.bad[index].fetch_and(!bit, Ordering::Relaxed);
            }
        }
    }
}

impl Drop for InThread {
    fn drop(&mut self) {
        let slot = &TABLE[self.slot];
        slot.close();
        let give_up = Instant::now() + PATIENCE;
        while !slot.is_empty() {
            if let Some(handover) = &self.answerer().answers.handover {
                handover.wake_all();
            }
            if Instant::now() >= give_up {
                // A handler waits for a device, or is stopped; or this is a child of a process whose handler
                // was inside when it forked. The slot is not used again.
                return;
            }
            std::thread::yield_now();
        }
        // SAFETY: `from_raw` wants what `into_raw` returned, once: the invariant. No handler is inside, and
        // none enters a slot that is closed.
        drop(unsafe { Box::from_raw(self.answerer) });
        slot.give_back();
    }
}

impl core::fmt::Debug for InThread {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("InThread").field("counts", &self.counts()).finish_non_exhaustive()
    }
}

/// Fills the page of an address, if it is of a mapping that is answered for here, or lets a writer in. Returns
/// whether the access is to be repeated. Called by the handler of `SIGBUS`, with what the thread did if that
/// is known.
pub(crate) fn answer(address: u64, access: Option<Access>) -> bool {
    TABLE.iter().any(|slot| {
        slot.answer(address, |answerer| {
            // SAFETY: `&*` wants a value that lives as long as the reference. The slot is open to this
            // handler, so the pointer is that of `start`; it is freed only after the handler has left.
            unsafe { &*answerer }.answer(address, access)
        })
    })
}

/// Returns where the bit of a page is. The caller has compared the page with their number.
fn place(page: u64) -> (usize, u64) {
    (usize::try_from(page / 64).unwrap_or(0), 1 << (page % 64))
}

impl Answerer {
    fn is_filled(&self, page: u64) -> bool {
        let (index, bit) = place(page);
        // Relaxed: a hint.
        self.filled[index].load(Ordering::Relaxed) & bit != 0
    }

    fn is_bad(&self, page: u64) -> bool {
        let (index, bit) = place(page);
        // Relaxed: see `InThread::made_bad`.
        self.bad[index].load(Ordering::Relaxed) & bit != 0
    }

    /// Returns where the calling thread counts: stacks are far apart, so that most threads have different shares.
    fn share(&self) -> &Share {
        let here = 0_u8;
        &self.shares[(core::ptr::from_ref(&here).addr() >> 20) % SHARES]
    }

    fn note_filled(&self, pages: Range<u64>) {
        // Relaxed: a statistic.
        self.share().filled.fetch_add(pages.end - pages.start, Ordering::Relaxed);
        if let Some(paced) = &self.paced {
            let bytes = (pages.end - pages.start) << self.page.shift();
            paced.filled(self.started.elapsed(), bytes);
        }
        self.mark_filled(pages);
    }

    fn mark_filled(&self, pages: Range<u64>) {
        let mut page = pages.start;
        while page < pages.end {
            let end = pages.end.min((page / 64 + 1) * 64);
            let bits = u64::MAX >> (64 - (end - page)) << (page % 64);
            // Relaxed: hints.
            self.filled[place(page).0].fetch_or(bits, Ordering::Relaxed);
            page = end;
        }
    }

    fn answer(&self, address: u64, access: Option<Access>) -> bool {
        let Some(offset) = self.memory.offset_of(Vaddr::new(address)) else { return false };
        let page = offset >> self.page.shift();
        if page >= self.pages {
            return false;
        }
        // Not one that is there after all, and protected.
        if access.is_some_and(|access| !access.is_present) && self.is_bad(page) {
            return false;
        }
        let is_timed = self.answers.records > 0 || self.paced.is_some();
        let begun = is_timed.then(|| self.started.elapsed());
        if let (Some(paced), Some(begun)) = (&self.paced, begun)
            && let Err(left) = paced.admit(begun, handover::MOMENT)
        {
            // The access is repeated, after signals that came meanwhile.
            handover::sleep(left);
            return true;
        }
        let states = match &self.answers.writes {
            Writes::Awaited(states) => Some(states),
            Writes::Free | Writes::Recorded => None,
        };
        let wanted = match access {
            Some(access) if access.is_present && states.is_some() => Wanted::Before,
            _ => self.fill_window(self.plan(page), page),
        };
        // In a child that was forked off, the userfaultfd fills the memory of its parent, which is none of its own: a
        // page that is there already is no end of the fault. Asking is a system call, and no other fault needs one.
        if wanted != Wanted::Now && std::process::id() != self.process {
            return false;
        }
        if matches!(wanted, Wanted::Later | Wanted::Never)
            && !self.is_bad(page)
            && let Some(handover) = &self.answers.handover
        {
            // Counted and recorded by the thread that reads it.
            handover.wait(page, access.is_some_and(|access| access.is_write));
            return true;
        }
        let was_there = wanted == Wanted::Before;
        let share = self.share();
        let count = if was_there && states.is_some() { &share.writes } else { &share.faults };
        count.fetch_add(1, Ordering::Relaxed); // a statistic
        // A fault of a page that was there was one of a write, if that is all that is known.
        let is_write = access.map_or(was_there, |access| access.is_write);
        let is_answered = matches!(wanted, Wanted::Now | Wanted::Before)
            && states.is_none_or(|states| !is_write || self.let_write(states, page));
        if let Some(begun) = begun.filter(|_| self.answers.records > 0) {
            self.record(begun, page, [is_write, was_there, is_answered]);
        }
        is_answered
    }

    /// Lets a thread write to a page, and perhaps to pages behind it. Returns whether the access is to be
    /// repeated: the kernel did so, or not yet, or another thread is about to.
    fn let_write(&self, states: &WriteStates, page: u64) -> bool {
        let is_there = |page| page < self.pages && self.is_filled(page);
        match states.open(page, is_there) {
            Some(run) => {
                let bytes = run.start << self.page.shift()..run.end << self.page.shift();
                let answer = self.memory.write_protect(bytes, false);
                // If the kernel defers it, a page is dirty and protected, and its next write faults again.
                states.opened(run);
                answer.is_ok()
            }
            // Another thread lets writers in, or makes it clean.
            None => {
                std::thread::yield_now();
                true
            }
        }
    }

    fn record(&self, begun: Duration, page: u64, flags: [bool; 3]) {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let latency = self.started.elapsed().saturating_sub(begun);
        let bits = flags.iter().zip([WRITE, PRESENT, ANSWERED]).filter(|(is_set, _)| **is_set);
        let bits = bits.fold(0, |bits, (_, bit)| bits | bit);
        let latency = nanoseconds(latency).min(u64::MAX >> FLAGS) << FLAGS;
        self.records.push([nanoseconds(begun), page, latency | bits]);
    }

    /// Returns what the pages from `at` on are filled with, and up to which one before `end`. `None` where
    /// the source has no such page: a file may have become shorter.
    fn bytes(&self, at: u64, end: u64) -> Option<(Bytes<'_>, u64)> {
        let Source::Parts(parts) = &self.answers.source else { return Some((Bytes::Shared, end)) };
        let (start, shift) = (at << self.page.shift(), self.page.shift());
        let part = parts.get(parts.partition_point(|part| part.range.end <= start))?;
        let end = end.min(part.range.end >> shift);
        let Some((file, offset)) = &part.file else { return Some(self.zeroes(at, end)) };
        let end = self.rooms.as_ref().map_or(end, |rooms| end.min(at + rooms.pages()));
        let from = offset + (start - part.range.start);
        let now = file.file.metadata().map_or(0, |metadata| metadata.len());
        // Of a file that was cut, only whole pages are left.
        let left = (now >> shift).saturating_sub(from >> shift);
        let end = if now >= file.len.get() { end } else { end.min(at + left) };
        let bytes = match &self.rooms {
            Some(rooms) => Bytes::Cached { file, from, rooms },
            None => Bytes::Mapped(&file.mapped, from),
        };
        (end > at).then_some((bytes, end))
    }

    /// Returns zeroes for pages from `at` on, up to one before `end`.
    fn zeroes(&self, at: u64, end: u64) -> (Bytes<'_>, u64) {
        match &self.zeroes {
            Some(zeroes) => (Bytes::Mapped(zeroes, 0), end.min(at + BLOCK)),
            None => (Bytes::Zero, end),
        }
    }

    /// Returns which pages to map for a fault.
    fn plan(&self, page: u64) -> Range<u64> {
        match self.answers.window {
            Window::Fixed(size) => self.around(size, page),
            Window::Growing { first, most, block_after } => {
                if let Some(window) = self.grown(page, first, most) {
                    return window;
                }
                let block = usize::try_from(page / BLOCK).unwrap_or(0);
                // Relaxed: a count that is a hint. It wraps after a block was mapped whole.
                let faults = self.block_faults[block].fetch_add(1, Ordering::Relaxed);
                let window = if faults >= block_after {
                    self.around(FaultAround::MAX, page)
                } else {
                    page..page + 1
                };
                self.start_stream(window.end);
                window
            }
        }
    }

    fn around(&self, size: FaultAround, page: u64) -> Range<u64> {
        let area = PfnRange::try_new(Pfn::new(0), PageCount::new(self.pages));
        let window = area.ok().and_then(|area| size.window(Pfn::new(page), area, self.page));
        window.map_or(page..page + 1, |window| window.start().get()..window.end().get())
    }

    /// Returns the next window of a reader in order whose last one ended before `page`.
    fn grown(&self, page: u64, first: FaultAround, most: FaultAround) -> Option<Range<u64>> {
        const NEXT: u64 = (1 << 56) - 1;
        let (first, most) = (first.pages(self.page).get(), most.pages(self.page).get());
        for stream in &self.streams {
            // Relaxed: hints.
            let seen = stream.load(Ordering::Relaxed);
            if seen & NEXT != page {
                continue;
            }
            let size = (first << (seen >> 56)).min(most);
            let size = FaultAround::try_new(ByteLen::new(size << self.page.shift())).ok()?;
            let window = self.around(size, page);
            let order = ((seen >> 56) + 1).min(9);
            let next = window.end & NEXT | order << 56;
            let _ = stream.compare_exchange(seen, next, Ordering::Relaxed, Ordering::Relaxed);
            return Some(window);
        }
        None
    }

    fn start_stream(&self, next: u64) {
        // Relaxed: hints.
        let oldest = self.oldest.fetch_add(1, Ordering::Relaxed);
        let index = usize::try_from(oldest % STREAMS as u64).unwrap_or(0);
        self.streams[index].store(next, Ordering::Relaxed);
    }

    /// Fills what is missing of a window, or, where no page is waited for, what is ready: first the page itself, so
    /// that its neighbours are no reason to ask a device for anything if it is not.
    fn fill_window(&self, window: Range<u64>, wanted: u64) -> Wanted {
        if self.answers.waits {
            return self.fill(window, wanted);
        }
        let found = self.fill(wanted..window.end, wanted);
        if matches!(found, Wanted::Now | Wanted::Before) {
            let _ = self.fill(window.start..wanted, wanted);
        }
        found
    }

    /// Fills what is missing of a window.
    fn fill(&self, window: Range<u64>, wanted: u64) -> Wanted {
        let (mut at, mut found) = (window.start, Wanted::Now);
        while at < window.end {
            if at != wanted && self.is_filled(at) {
                at += 1;
                continue;
            }
            let is_there = |page: &u64| *page != wanted && self.is_filled(*page);
            let end = (at + 1..window.end).find(is_there).unwrap_or(window.end);
            let Some((bytes, end)) = self.bytes(at, end) else {
                if at < wanted {
                    at = wanted;
                    continue;
                }
                return if at == wanted { Wanted::Never } else { found };
            };
            let Some(answer) = self.ask(at..end, &bytes) else {
                if at < wanted {
                    at = wanted;
                    continue;
                }
                return if at == wanted { Wanted::Later } else { found };
            };
            match answer {
                Ok(Answered::All) => {
                    self.note_filled(at..end);
                    at = end;
                }
                Ok(Answered::Part { bytes }) if bytes >= self.page.bytes() => {
                    let done = bytes >> self.page.shift();
                    self.note_filled(at..at + done);
                    at += done;
                }
                Ok(Answered::Present) => {
                    self.mark_filled(at..at + 1);
                    found = if at == wanted { Wanted::Before } else { found };
                    at += 1;
                }
                // Only of a memory file.
                Ok(Answered::Hole) => {
                    if at == wanted && !self.fill_hole(wanted) {
                        return Wanted::Never;
                    }
                    at += 1;
                }
                // The access is repeated.
                Ok(Answered::LayoutChanging | Answered::Busy | Answered::Part { .. }) => {
                    return Wanted::Now;
                }
                Ok(Answered::NotRegistered | Answered::Gone) => return Wanted::Gone,
                Err(_) if at > wanted => return found,
                Err(_) if at < wanted => at = wanted,
                Err(AnswerError::Refused { refusal: Refusal::Unreadable, .. }) if end > at + 1 => {
                    return self.fill_alone(at, &bytes);
                }
                // The signal is an error, and so is that of the next touch.
                Err(_) => return Wanted::Never,
            }
        }
        found
    }

    /// Fills a page where one behind it may be the one that cannot be read.
    fn fill_alone(&self, page: u64, bytes: &Bytes<'_>) -> Wanted {
        match self.ask(page..page + 1, bytes) {
            None => Wanted::Later,
            Some(Ok(Answered::NotRegistered | Answered::Gone)) => Wanted::Gone,
            Some(Err(_)) => Wanted::Never,
            // It is there, or the access is repeated.
            Some(Ok(_)) => Wanted::Now,
        }
    }

    /// Fills pages with bytes. Returns `None` if the first of them is not ready.
    fn ask(&self, pages: Range<u64>, bytes: &Bytes<'_>) -> Option<Result<Answered, AnswerError>> {
        let start = pages.start << self.page.shift();
        let range = start..pages.end << self.page.shift();
        let len = ByteLen::new(range.end - start);
        let write_protect = !matches!(self.answers.writes, Writes::Free);
        let how = Install { write_protect, ..Install::default() };
        Some(match *bytes {
            Bytes::Mapped(mapped, from) => self.memory.copy_from(start, mapped, from, len, how),
            Bytes::Cached { file, from, rooms } => {
                let room = rooms.take()?;
                let Ok(CachedRead::Read { bytes }) = page_cache::read_cached_into(
                    &*file.file,
                    from,
                    rooms.mapping(),
                    room.bytes(len),
                ) else {
                    return None;
                };
                // The page at the end of a file is not whole, and is produced by another thread.
                let whole = bytes as u64 >> self.page.shift() << self.page.shift();
                if whole == 0 {
                    return None;
                }
                let at = room.bytes(len).start as u64;
                self.memory.copy_from(start, rooms.mapping(), at, ByteLen::new(whole), how)
            }
            Bytes::Shared => self.memory.continue_mapping(range, how),
            Bytes::Zero => self.memory.zero(range, Install::default()),
        })
    }

    /// Fills a hole of a memory file. Returns whether the page is there.
    fn fill_hole(&self, page: u64) -> bool {
        let (zeroes, end) = self.zeroes(page, page + 1);
        match self.ask(page..end, &zeroes) {
            Some(Ok(Answered::All)) => {
                self.note_filled(page..end);
                true
            }
            Some(Ok(Answered::Present | Answered::LayoutChanging)) => true,
            _ => false,
        }
    }
}

/// What pages are filled with.
enum Bytes<'a> {
    /// Bytes of a mapping, from one of them on.
    Mapped(&'a Mapping, u64),
    /// Bytes of a file, from one of them on, as far as the page cache has them.
    Cached { file: &'a FileSource, from: u64, rooms: &'a Rooms },
    /// What the memory file has that the memory is a mapping of.
    Shared,
    /// The kernel's zero page.
    Zero,
}

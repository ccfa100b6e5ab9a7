//! The code in the handler of `SIGBUS` for memory whose faults are answered by the threads that take them: [`answer`],
//! and the [`Answerer`] of each mapping. It takes no lock and allocates nothing.
//!
//! Unsafe: a pointer that the handler follows.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use uzone_pages::{ByteLen, PageSize, Pfn, Touch};

use crate::host::thread::PAUSE;
use crate::map::mapping::Mapping;
use crate::map::options::{Anonymous, Vaddr};
use crate::map::page_cache;
use crate::sigbus::gate::Gate;
use crate::sigbus::index::Index;
use crate::uffd::error::UffdError;
use crate::uffd::handover;
use crate::uffd::in_thread::SLOTS;
use crate::uffd::in_thread::answers::{Answers, FileSource, Source};
use crate::uffd::install::{Fill, Install};
use crate::uffd::pace::Paced;
use crate::uffd::registered::Registered;
use crate::uffd::reply::Answered;
use crate::uffd::ring::Ring;
use crate::uffd::rooms::{Room, Rooms};
use crate::uffd::write_states::WriteStates;

/// The most pages that are filled with copied zeroes at a time.
const BLOCK: u64 = 512;
/// One of so many faults of one page is timed.
const TIMED: u64 = 8;
/// The time of a fault outside of this handler: the kernel delivers the signal and returns from it.
const SIGNAL: Duration = Duration::from_micros(2);
/// The most shares of the threads' counts.
const MOST_SHARES: usize = 64;

/// The kinds of a recorded fault, in the lowest bits of a word whose others are nanoseconds.
pub(super) const WRITE: u64 = 1;
pub(super) const PRESENT: u64 = 2;
pub(super) const ANSWERED: u64 = 4;
pub(super) const FLAGS: u32 = 3;

/// The access of a thread that took a fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    /// Whether there was a page, which it may not access so.
    pub(crate) is_present: bool,
    /// Whether it wrote.
    pub(crate) is_write: bool,
}

#[cfg(not(loom))]
pub(super) static TABLE: [Gate<Answerer>; SLOTS] = [const { Gate::new() }; SLOTS];
// Gates of the model checker are not made by constants.
#[cfg(loom)]
pub(super) static TABLE: std::sync::LazyLock<[Gate<Answerer>; SLOTS]> =
    std::sync::LazyLock::new(|| core::array::from_fn(|_| Gate::new()));

/// The open gates by their addresses.
#[cfg(not(loom))]
pub(super) static INDEX: Index<SLOTS> = Index::new();
#[cfg(loom)]
pub(super) static INDEX: std::sync::LazyLock<Index<SLOTS>> = std::sync::LazyLock::new(Index::new);

/// The answers for one mapping.
pub(super) struct Answerer {
    pub(super) memory: Arc<Registered>,
    pub(super) answers: Answers,
    /// The limit of the threads, if there is one.
    pub(super) paced: Option<Paced>,
    /// Zeroes to copy, where pages are not filled with the kernel's zero page.
    pub(super) zeroes: Option<Mapping>,
    /// Rooms to read to, where no file is waited for, and for single pages of a file: reading costs less than the faults
    /// of a copy from the file's mapping, and the kernel looks at the length of the file.
    pub(super) rooms: Option<Rooms>,
    pub(super) started: Instant,
    pub(super) records: Ring,
    pub(super) page: PageSize,
    pub(super) pages: u64,
    /// The process; a child that was forked off has none of this.
    pub(super) process: u32,
    /// A bit for each page that was filled.
    pub(super) filled: Box<[AtomicU64]>,
    /// A bit for each page that is bad.
    pub(super) bad: Box<[AtomicU64]>,
    /// A power of two.
    pub(super) shares: Box<[Share]>,
}

/// Counts of some of the threads. They have lines of the cache of their own: threads that fault at once wait neither for
/// each other's counts nor for the fields that all of them read.
#[repr(align(128))]
#[derive(Default)]
pub(super) struct Share {
    pub(super) faults: AtomicU64,
    pub(super) filled: AtomicU64,
    pub(super) writes: AtomicU64,
}

/// Returns the number of shares: one for each CPU or more, so that threads that run at once have different ones.
fn share_count() -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, core::num::NonZero::get);
    cpus.min(MOST_SHARES).next_power_of_two()
}

thread_local! {
    // Without a destructor and made by a constant, so a handler may take its address.
    static HERE: u8 = const { 0 };
}

/// The outcome for the page that a thread waits for.
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
    /// It has stopped being a page of the memory.
    Gone,
}

/// Fills the page of an address, if it is of a mapping that is answered for here, or lets a writer in. Returns whether
/// the access is to be repeated. Called by the handler of `SIGBUS`, with the thread's access if that is known.
pub(crate) fn answer(address: u64, access: Option<Access>) -> bool {
    INDEX.ask(address, |slot| {
        TABLE[slot].answer(address, address, |answerer| {
            // SAFETY: `&*` wants a value that lives as long as the reference. The slot is open to this
            // handler, so the pointer is that of `start`; it is freed only after the handler has left.
            unsafe { &*answerer }.answer(address, access)
        })
    })
}

/// Returns the place of the bit of a page. The caller has compared the page with their number.
pub(super) fn place(page: u64) -> (usize, u64) {
    (usize::try_from(page / 64).unwrap_or(0), 1 << (page % 64))
}

/// Goes on at the wanted page if that is behind the page that cannot be had. Otherwise returns its outcome: `why` it was
/// not filled, or the outcome that was `found` before.
fn skip_to(wanted: u64, at: &mut u64, why: Wanted, found: Wanted) -> Option<Wanted> {
    if *at < wanted {
        *at = wanted;
        return None;
    }
    Some(if *at == wanted { why } else { found })
}

impl Answerer {
    /// Makes the answers for memory.
    pub(super) fn new(memory: Arc<Registered>, answers: Answers) -> Result<Self, UffdError> {
        let page = memory.mapping().page_size();
        let copies_zeroes =
            answers.tracks_writes && (answers.states.is_some() || !memory.mapping().is_private());
        let zeroes =
            || Mapping::anonymous(ByteLen::new(BLOCK << page.shift()), Anonymous::default());
        let zeroes = copies_zeroes.then(zeroes).transpose();
        let reads = !answers.waits || matches!(answers.source, Source::File(_));
        let rooms = reads.then(|| Rooms::new(page)).transpose();
        let pages = memory.mapping().mapped_len() as u64 / page.bytes();
        let count = |per: u64| usize::try_from(pages.div_ceil(per)).unwrap_or(usize::MAX);
        Ok(Self {
            zeroes: zeroes.map_err(|_| UffdError::NoMemory)?,
            rooms: rooms.map_err(|_| UffdError::NoMemory)?,
            started: Instant::now(),
            records: Ring::new(answers.records),
            paced: (answers.pace != (None, None)).then(|| Paced::new(answers.pace)),
            answers,
            page,
            pages,
            process: std::process::id(),
            filled: (0..count(64)).map(|_| AtomicU64::new(0)).collect(),
            bad: (0..count(64)).map(|_| AtomicU64::new(0)).collect(),
            shares: (0..share_count()).map(|_| Share::default()).collect(),
            memory,
        })
    }

    pub(super) fn is_filled(&self, page: u64) -> bool {
        let (index, bit) = place(page);
        // Relaxed: a hint.
        self.filled[index].load(Ordering::Relaxed) & bit != 0
    }

    fn is_bad(&self, page: u64) -> bool {
        let (index, bit) = place(page);
        // Relaxed: see `InThread::made_bad`.
        self.bad[index].load(Ordering::Relaxed) & bit != 0
    }

    /// Returns the counts of the calling thread.
    fn share(&self) -> &Share {
        // The address of a thread's own variable, whose upper bits are mixed: most threads have different shares.
        let own = HERE.with(|here| core::ptr::from_ref(here).addr()) as u64;
        let mixed = own.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        &self.shares[usize::try_from(mixed).unwrap_or(0) & (self.shares.len() - 1)]
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

    pub(super) fn mark_filled(&self, pages: Range<u64>) {
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
        let states = self.answers.states.as_ref();
        let wanted = match access {
            Some(access) if access.is_present && states.is_some() => Wanted::Before,
            _ => self.fill_planned(page),
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
            // Another thread lets writers in, or makes it clean. It may have a lower priority and this CPU, so that it
            // runs only while this thread sleeps.
            None => {
                std::thread::yield_now();
                if states.is_owned(page) {
                    handover::sleep(PAUSE);
                }
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

    /// Returns the bytes of the pages from `at` on, and the end of their run before `end`. `None` where the source has no
    /// such page: a file may have become shorter.
    fn bytes(&self, at: u64, end: u64) -> Option<(Bytes<'_>, u64)> {
        let file = match &self.answers.source {
            Source::Cached => return Some((Bytes::Shared, end)),
            Source::Zero => return Some(self.zeroes(at, end)),
            Source::File(file) => file,
        };
        let (from, shift) = (at << self.page.shift(), self.page.shift());
        let whole = (file.len.get() >> shift).saturating_sub(from >> shift);
        let waits = self.answers.waits;
        if let Some(rooms) = &self.rooms
            && (!waits || end == at + 1 && whole > 0)
            && let Some(room) = rooms.take()
        {
            let end = end.min(at + rooms.pages());
            return Some((Bytes::Read { file, from, rooms, room, waits }, end));
        }
        if !waits {
            return None;
        }
        let now = file.file.metadata().map_or(0, |metadata| metadata.len());
        // Of a file that was cut, only whole pages are left.
        let left = (now >> shift).saturating_sub(from >> shift);
        let end = if now >= file.len.get() { end } else { end.min(at + left) };
        let (bytes, end) = match whole {
            0 => (Bytes::Tail { file, from }, end.min(at + 1)),
            _ => (Bytes::Mapped(&file.mapped, from), end.min(at + whole)),
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

    /// Fills the window of a page. The planner learns how long that takes.
    fn fill_planned(&self, page: u64) -> Wanted {
        let planner = &self.answers.planner;
        let plan = planner.plan(Pfn::new(page), Touch::Read, false);
        let window =
            plan.map_or(page..page + 1, |plan| plan.window.start().get()..plan.window.end().get());
        let pages = window.end - window.start;
        // A clock costs little beside many pages, and beside one where it is rarely read.
        let is_timed =
            pages > 1 || self.share().faults.load(Ordering::Relaxed).is_multiple_of(TIMED);
        let begun = is_timed.then(Instant::now);
        let before = self.filled_pages();
        let found = self.fill_window(window, page);
        if let Some(begun) = begun.filter(|_| found == Wanted::Now) {
            if pages == 1 {
                planner.fault_took(begun.elapsed() + SIGNAL);
            } else {
                planner.pages_took(self.filled_pages() - before, begun.elapsed());
            }
        }
        found
    }

    /// Returns the number of pages that the threads with the counts of the calling one have filled.
    fn filled_pages(&self) -> u64 {
        self.share().filled.load(Ordering::Relaxed) // a statistic
    }

    /// Fills the missing pages of a window, or, where no page is waited for, the ready ones: first the page itself, so
    /// that its neighbours are no reason to ask a device for anything if it is not ready.
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

    /// Fills the missing pages of a window.
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
                match skip_to(wanted, &mut at, Wanted::Never, found) {
                    Some(found) => return found,
                    None => continue,
                }
            };
            let Some(answer) = self.ask(at..end, &bytes) else {
                match skip_to(wanted, &mut at, Wanted::Later, found) {
                    Some(found) => return found,
                    None => continue,
                }
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
                Err(error) if error.is_unreadable() && end > at + 1 => {
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

    /// Fills pages with bytes. Returns `None` if the first of them is not ready, or was cut off.
    fn ask(&self, pages: Range<u64>, bytes: &Bytes<'_>) -> Option<Result<Answered, UffdError>> {
        let start = pages.start << self.page.shift();
        let mut range = start..pages.end << self.page.shift();
        let write_protect = self.answers.tracks_writes;
        let how = Install { write_protect, ..Install::default() };
        let fill = match *bytes {
            Bytes::Mapped(source, offset) => Fill::From { source, offset },
            Bytes::Read { file, from, rooms, ref room, waits } => {
                let to = room.bytes(ByteLen::new(range.end - start));
                let offset = to.start as u64;
                let read = page_cache::read_into(&*file.file, from, rooms.mapping(), to, waits);
                // The page at the end of a file is not whole, and is produced by another thread.
                let whole = read.ok()?? as u64 >> self.page.shift() << self.page.shift();
                if whole == 0 {
                    return None;
                }
                range.end = start + whole;
                Fill::From { source: rooms.mapping(), offset }
            }
            Bytes::Tail { file, from } => {
                let tail = file.tail.as_deref()?;
                let bytes = usize::try_from(file.len.get().checked_sub(from)?).ok()?;
                // The bytes behind were never written.
                let read = page_cache::read_into(&*file.file, from, tail, 0..bytes, true);
                if read.ok()? != Some(bytes) {
                    return None;
                }
                range.end = start + self.page.bytes();
                Fill::From { source: tail, offset: 0 }
            }
            Bytes::Shared => Fill::Cached,
            Bytes::Zero => Fill::Zero,
        };
        Some(self.memory.install(range, fill, how))
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

/// The bytes of pages.
enum Bytes<'a> {
    /// Bytes of a mapping, from one of them on.
    Mapped(&'a Mapping, u64),
    /// Bytes of a file, from one of them on, to be read to a room, as far as the page cache has them or with a wait.
    Read { file: &'a FileSource, from: u64, rooms: &'a Rooms, room: Room<'a>, waits: bool },
    /// The page in which a file ends.
    Tail { file: &'a FileSource, from: u64 },
    /// The bytes of the memory file that is mapped.
    Shared,
    /// The kernel's zero page.
    Zero,
}

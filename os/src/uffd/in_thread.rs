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
use crate::options::Vaddr;
use crate::uffd::answer::{AnswerError, Install};
use crate::uffd::gate::Gate;
use crate::uffd::registered::Registered;
use crate::uffd::reply::{Answered, Refusal};

/// How many mappings can be answered for so at a time.
pub const SLOTS: usize = 64;
/// How many pages have a count of faults.
const BLOCK: u64 = 512;
/// How many readers in order are distinguished.
const STREAMS: usize = 8;
/// How long to wait for handlers at the end; if one is stopped inside, its memory is kept for good.
const PATIENCE: Duration = Duration::from_secs(2);

/// Where pages come from.
#[derive(Debug)]
pub enum Source {
    /// A file, and all of it mapped.
    File {
        /// The file, whose length is looked at.
        file: File,
        /// The file, mapped from its start on.
        mapped: Arc<Mapping>,
        /// How many bytes it had when it was taken. What is behind is zero, up to the end of that page.
        len: ByteLen,
    },
    /// The memory file that the memory is a mapping of. Its holes are zero.
    Cached,
    /// Zeroes.
    Zero,
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

/// What answers for one mapping.
struct Answerer {
    memory: Arc<Registered>,
    source: Source,
    window: Window,
    page: PageSize,
    pages: u64,
    /// The process; a child that was forked off has none of this.
    process: u32,
    /// A bit for each page that was filled.
    filled: Box<[AtomicU64]>,
    /// The faults of each block, up to 255.
    block_faults: Box<[AtomicU8]>,
    /// The page behind the last window of a reader in order, and the order of its next window in the upper
    /// byte.
    streams: [AtomicU64; STREAMS],
    oldest: AtomicU64,
    faults: AtomicU64,
    filled_pages: AtomicU64,
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

/// Why faults cannot be answered by the threads that take them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InThreadError {
    /// The handler of `SIGBUS` is not the one of this package, or cannot be.
    #[error("the process has another handler of SIGBUS")]
    Handler,
    /// The userfaultfd reports faults.
    #[error("the userfaultfd was opened without the feature SIGBUS")]
    Feature,
    /// All slots are in use.
    #[error("{SLOTS} mappings are answered for in their threads already")]
    Full,
}

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
    /// [`InThreadError`]: the handler may be installed then.
    pub fn take() -> Result<Self, InThreadError> {
        if !matches!(bus::install(), Ok(bus::Installed::New | bus::Installed::Already)) {
            return Err(InThreadError::Handler);
        }
        TABLE.iter().position(Gate::take).map(Self).ok_or(InThreadError::Full)
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
    /// [`InThreadError::Feature`] if it has not.
    pub fn start(
        place: Place,
        memory: Arc<Registered>,
        source: Source,
        window: Window,
    ) -> Result<Self, InThreadError> {
        if !memory.uffd().features().contains(crate::uffd::Features::SIGBUS) {
            return Err(InThreadError::Feature);
        }
        let page = memory.mapping().page_size();
        let pages = memory.mapping().mapped_len() as u64 / page.bytes();
        let count = |per: u64| usize::try_from(pages.div_ceil(per)).unwrap_or(usize::MAX);
        let first = memory.mapping().addr().get() as u64;
        let answerer = Answerer {
            source,
            window,
            page,
            pages,
            process: std::process::id(),
            filled: (0..count(64)).map(|_| AtomicU64::new(0)).collect(),
            block_faults: (0..count(BLOCK)).map(|_| AtomicU8::new(0)).collect(),
            streams: [const { AtomicU64::new(u64::MAX) }; STREAMS],
            oldest: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            filled_pages: AtomicU64::new(0),
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

    /// Returns how many faults were answered, and how many pages were filled for them.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        let answerer = self.answerer();
        // Relaxed: statistics.
        (answerer.faults.load(Ordering::Relaxed), answerer.filled_pages.load(Ordering::Relaxed))
    }

    /// Returns whether a page may have been filled here.
    #[must_use]
    pub fn may_have_filled(&self, page: u64) -> bool {
        page < self.answerer().pages && self.answerer().is_filled(page)
    }

    /// Notes that pages are being given back. Called before they are.
    pub fn gives_back(&self, pages: Range<u64>) {
        let answerer = self.answerer();
        for page in pages.start..pages.end.min(answerer.pages) {
            let (word, bit) = answerer.place(page);
            // Relaxed: a hint.
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

impl Drop for InThread {
    fn drop(&mut self) {
        let slot = &TABLE[self.slot];
        slot.close();
        let give_up = Instant::now() + PATIENCE;
        while !slot.is_empty() {
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
        let (faults, pages) = self.counts();
        f.debug_struct("InThread")
            .field("faults", &faults)
            .field("pages", &pages)
            .finish_non_exhaustive()
    }
}

/// Fills the page of an address, if it is of a mapping that is answered for here. Returns whether the access
/// is to be repeated. Called by the handler of `SIGBUS`.
pub(crate) fn answer(address: u64) -> bool {
    TABLE.iter().any(|slot| {
        slot.answer(address, |answerer| {
            // SAFETY: `&*` wants a value that lives as long as the reference. The slot is open to this
            // handler, so the pointer is that of `start`; it is freed only after the handler has left.
            unsafe { &*answerer }.answer(address)
        })
    })
}

impl Answerer {
    fn place(&self, page: u64) -> (&AtomicU64, u64) {
        // The caller has compared the page with their number.
        (&self.filled[usize::try_from(page / 64).unwrap_or(0)], 1 << (page % 64))
    }

    fn is_filled(&self, page: u64) -> bool {
        let (word, bit) = self.place(page);
        // Relaxed: a hint.
        word.load(Ordering::Relaxed) & bit != 0
    }

    fn note_filled(&self, pages: Range<u64>) {
        // Relaxed: a statistic, and hints.
        self.filled_pages.fetch_add(pages.end - pages.start, Ordering::Relaxed);
        let mut page = pages.start;
        while page < pages.end {
            let end = pages.end.min((page / 64 + 1) * 64);
            let bits = u64::MAX >> (64 - (end - page)) << (page % 64);
            self.place(page).0.fetch_or(bits, Ordering::Relaxed);
            page = end;
        }
    }

    fn answer(&self, address: u64) -> bool {
        let Some(offset) = self.memory.offset_of(Vaddr::new(address)) else { return false };
        let page = offset >> self.page.shift();
        if page >= self.pages || std::process::id() != self.process {
            return false;
        }
        self.faults.fetch_add(1, Ordering::Relaxed); // a statistic
        let whole = self.whole_pages();
        if page >= whole {
            return false;
        }
        let window = self.plan(page);
        self.fill(window.start..window.end.min(whole), page)
    }

    /// Returns how many pages the source has from the first on: a file may have become shorter.
    fn whole_pages(&self) -> u64 {
        let Source::File { file, len, .. } = &self.source else { return self.pages };
        let now = file.metadata().map_or(0, |metadata| metadata.len());
        if now >= len.get() { self.pages } else { now >> self.page.shift() }
    }

    /// Returns which pages to map for a fault.
    fn plan(&self, page: u64) -> Range<u64> {
        match self.window {
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

    /// Fills what is missing of a window. Returns whether the page `wanted` is there.
    fn fill(&self, window: Range<u64>, wanted: u64) -> bool {
        let mut at = window.start;
        while at < window.end {
            if at != wanted && self.is_filled(at) {
                at += 1;
                continue;
            }
            let mut end = at + 1;
            while end < window.end && (end == wanted || !self.is_filled(end)) {
                end += 1;
            }
            match self.ask(at..end) {
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
                    let (word, bit) = self.place(at);
                    word.fetch_or(bit, Ordering::Relaxed); // a hint
                    at += 1;
                }
                // Only of a memory file.
                Ok(Answered::Hole) => {
                    if at == wanted && !self.zero(wanted) {
                        return false;
                    }
                    at += 1;
                }
                // The access is repeated.
                Ok(Answered::LayoutChanging | Answered::Busy | Answered::Part { .. }) => {
                    return true;
                }
                Ok(Answered::NotRegistered | Answered::Gone) => return false,
                Err(_) if at > wanted => return true,
                Err(_) if at < wanted => at = wanted,
                Err(AnswerError::Refused { refusal: Refusal::Unreadable, .. }) if end > at + 1 => {
                    // Perhaps a page behind it is the one that cannot be read.
                    return match self.ask(at..at + 1) {
                        Ok(Answered::NotRegistered | Answered::Gone) | Err(_) => false,
                        // It is there, or the access is repeated.
                        Ok(_) => true,
                    };
                }
                // The signal is an error, and so is that of the next touch.
                Err(_) => return false,
            }
        }
        true
    }

    fn ask(&self, pages: Range<u64>) -> Result<Answered, AnswerError> {
        let (start, how) = (pages.start << self.page.shift(), Install::default());
        let range = start..pages.end << self.page.shift();
        match &self.source {
            Source::File { mapped, .. } => {
                let len = ByteLen::new(range.end - start);
                self.memory.copy_from(start, mapped, start, len, how)
            }
            Source::Cached => self.memory.continue_mapping(range, how),
            Source::Zero => self.memory.zero(range, how),
        }
    }

    /// Fills a hole of a memory file. Returns whether the page is there.
    fn zero(&self, page: u64) -> bool {
        let start = page << self.page.shift();
        let answer = self.memory.zero(start..start + self.page.bytes(), Install::default());
        matches!(answer, Ok(Answered::All | Answered::Present | Answered::LayoutChanging))
    }
}

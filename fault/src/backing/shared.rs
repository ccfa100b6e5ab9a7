//! Pages that mappings share: [`SharedBacking`]. Pages of another backing are kept in a memory file,
//! which each mapping maps privately: a page is produced once, and is one page of memory until a mapping
//! writes to it.
//!
//! The file is filled through a userfaultfd of its own, whose copies appear whole or not at all, so that
//! threads which fill the same page agree by the kernel's reply. It is sealed: the descriptor can be handed
//! to other processes, which read the pages and never change them.
//!
//! A process that touches a page of the file which is missing, past the userfaultfd of its mapping (in a mapping of its own,
//! in a child that was forked off, or because it locks all that it maps), leaves a page of zeroes there. So a page
//! that exists is taken only if it was filled here, and is written in place otherwise, before any mapping has it.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use uzone_os::signals::lock_uninterrupted;
use uzone_os::thread::pause;
use uzone_os::uffd::{Answered, Features, KernelFaults, Modes, Registered, Uffd, UffdError};
use uzone_os::{Mapping, Sharing};
use uzone_pages::{ByteLen, Content, FaultAround, PageCount, PageSize};

use crate::backing::hooks::Backing;
use crate::backing::window::{Filled, Window};
use crate::engine::core::produce::Produced;
use crate::engine::core::{Core, ReaderState};
use crate::error::{BackingError, MapError};
use crate::memory::kernel::{Fill, Kernel};
use crate::options::LazyOptions;
use crate::pages::states::PageStates;

/// Pages of another backing, produced once for all mappings of this one.
///
/// A mapping is private: a page that it writes is its own. Zero pages take no memory. Pages that are
/// kept stay until the backing is dropped; beyond the number that is kept, each mapping has copies of its
/// own.
pub struct SharedBacking {
    inner: Arc<dyn Backing>,
    /// The pages of the file, which the inner backing fills.
    core: Core,
    file: Arc<File>,
    len: ByteLen,
    /// How many pages are kept at most.
    most: u64,
    /// The states by which threads fill pages, while none does.
    spare: Mutex<Vec<ReaderState>>,
}

/// The file, whose pages are filled through its mapping here.
struct File {
    memory: Registered,
    /// The pages that are zero, a bit each: they stay holes.
    zeroes: Bits,
    /// The pages that were filled here.
    filled: Bits,
    kept: AtomicU64,
    page: PageSize,
}

/// A bit for each page.
struct Bits(Box<[AtomicU64]>);

impl Bits {
    fn new(pages: PageCount) -> Self {
        Self((0..pages.get().div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    fn has(&self, page: u64) -> bool {
        let word = usize::try_from(page / 64).ok().and_then(|at| self.0.get(at));
        // Relaxed: it was set before the page became present, which the caller has seen, or it is a hint.
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (page % 64) & 1 != 0)
    }

    /// Returns how many of the pages did not have it before.
    fn set(&self, pages: Range<u64>) -> u64 {
        let mut new = 0;
        for page in pages {
            if let Some(word) = usize::try_from(page / 64).ok().and_then(|at| self.0.get(at)) {
                let bit = 1 << (page % 64);
                // Relaxed: the page becomes present afterwards.
                new += u64::from(word.fetch_or(bit, Ordering::Relaxed) & bit == 0);
            }
        }
        new
    }
}

impl File {
    /// Notes that pages were filled.
    fn note_filled(&self, range: Range<u64>) {
        let pages = range.start >> self.page.shift()..range.end >> self.page.shift();
        // Relaxed: a count.
        self.kept.fetch_add(self.filled.set(pages), Ordering::Relaxed);
    }

    /// Answers for pages of which the first exists already.
    fn replace(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError> {
        let bytes = self.page.bytes();
        let first = range.start..range.start + bytes;
        if self.filled.has(first.start >> self.page.shift()) {
            return Ok(Answered::Present);
        }
        // Another thread may have filled it a moment ago: the bytes are the same.
        let Fill::Bytes(page) = fill.part(0..bytes) else {
            // The page is produced alone.
            return Ok(Answered::Hole);
        };
        self.memory.mapping().write_at(first.start, page)?;
        let is_last = first.end == range.end;
        self.note_filled(first);
        Ok(if is_last { Answered::All } else { Answered::Part { bytes } })
    }
}

impl Kernel for File {
    fn install(&self, range: Range<u64>, fill: Fill<'_>) -> Result<Answered, UffdError> {
        match fill {
            Fill::Zero => {
                let shift = self.page.shift();
                let _ = self.zeroes.set(range.start >> shift..range.end >> shift);
                return Ok(Answered::All);
            }
            // It is filled from a backing that has no file.
            Fill::Cached => return Ok(Answered::Hole),
            Fill::Bytes(_) | Fill::From { .. } | Fill::Poison => {}
        }
        let answer = self.memory.install(range.clone(), fill, fill.how())?;
        match answer {
            Answered::All => self.note_filled(range),
            Answered::Part { bytes } => self.note_filled(range.start..range.start + bytes),
            Answered::Present => return self.replace(range, fill),
            _ => {}
        }
        Ok(answer)
    }

    fn wake(&self, _: Range<u64>) {
        // No thread touches the mapping of the file before its pages are there.
    }
}

impl SharedBacking {
    /// Takes the backing that produces the pages, and the number of bytes that are kept: at most so many, and for a
    /// moment a window of each filling thread more.
    ///
    /// # Errors
    /// [`MapError`]: `inner` has no length or is a memory file already, userfaultfd cannot be had, or there
    /// is no memory for the states of the pages.
    pub fn new(inner: Arc<dyn Backing>, keep: ByteLen) -> Result<Self, MapError> {
        let page = uzone_os::probe::page_size();
        let refused = |reason| Err(MapError::Backing { reason });
        let Some(len) = inner.byte_len() else { return refused("it has no length to share") };
        if matches!(inner.memory_file(), Ok(Some(_))) {
            return refused("it is a memory file, whose mappings share its pages in any case");
        }
        let len = len.align_up(page.bytes())?;
        let mapping = Mapping::memfd("uzone-shared", len, None)?;
        mapping.keep_from_children().map_err(MapError::Children)?;
        // Its bytes are the backing's. Where the kernel refuses, a dump has more than it needs.
        let _ = mapping.leave_out_of_dumps();
        // The pages that the kernel has put there already, where the process locks all that it maps.
        mapping.punch(0..len.get()).map_err(MapError::Present)?;
        mapping.seal_for_readers().map_err(MapError::MemoryFile)?;
        // No thread touches a page that is missing, so none of a kind is to be seen.
        let uffd = Uffd::open(Features::MISSING_SHMEM, Features::NONE, KernelFaults::Never)?;
        let memory = Registered::new(Arc::new(uffd), mapping, Modes::MISSING)
            .map_err(|refused| refused.cause)?;
        let pages = page.pages_in(len)?;
        let (zeroes, filled, kept) = (Bits::new(pages), Bits::new(pages), AtomicU64::new(0));
        let file = Arc::new(File { memory, zeroes, filled, kept, page });
        let contents = PageStates::reserve(pages, page)?;
        let options = LazyOptions::default();
        let areas = [contents.fault_area(0)];
        let core = Core::new(file.clone(), inner.clone(), contents, &areas, &options);
        let most = keep.get() >> page.shift();
        Ok(Self { inner, core, file, len, most, spare: Mutex::default() })
    }

    /// Returns how many bytes of pages are kept.
    #[must_use]
    pub fn kept(&self) -> ByteLen {
        // Relaxed: a count.
        ByteLen::new(self.file.kept.load(Ordering::Relaxed) << self.file.page.shift())
    }

    fn has_room(&self) -> bool {
        // Relaxed: a count.
        self.file.kept.load(Ordering::Relaxed) < self.most
    }

    fn with_state<R>(&self, use_it: impl FnOnce(&mut ReaderState) -> R) -> R {
        let spare = lock_uninterrupted(&self.spare).pop();
        let mut state = spare.unwrap_or_else(|| ReaderState::new(self.core.room()));
        let result = use_it(&mut state);
        lock_uninterrupted(&self.spare).push(state);
        result
    }

    /// Has the inner backing forget the pages that it made with some others, as far as the file has all of them.
    fn forget_what_came(&self, pages: Range<u64>) {
        let (shift, mut at) = (self.file.page.shift(), pages.start);
        while at < pages.end
            && let Some(bytes) = self.inner.made_with(at << shift)
        {
            let made = bytes.start >> shift..bytes.end.div_ceil(1 << shift);
            at = made.end.max(at + 1);
            if self.run(made.clone()) == (made, true) {
                self.inner.forget(bytes);
            }
        }
    }

    /// Returns the first pages of `pages`, one after the other, that are all filled or all not.
    fn run(&self, pages: Range<u64>) -> (Range<u64>, bool) {
        let is_filled = |page: u64| self.core.contents().get(page) == Content::Present;
        let first = is_filled(pages.start);
        let end = (pages.start + 1..pages.end).find(|&page| is_filled(page) != first);
        (pages.start..end.unwrap_or(pages.end), first)
    }

    /// Installs pages that the file has.
    fn place(&self, window: &mut Window<'_>, pages: Range<u64>) -> Result<(), UffdError> {
        let mut at = pages.start;
        while at < pages.end {
            let is_zero = self.file.zeroes.has(at);
            let end = (at + 1..pages.end).find(|&page| self.file.zeroes.has(page) != is_zero);
            let run = at..end.unwrap_or(pages.end);
            at = run.end;
            let bytes = self.core.bytes(run.clone());
            if is_zero {
                let _ = window.zero(bytes)?;
            } else if window.continue_mapping(bytes)? == Filled::Hole {
                self.copy(window, run)?;
            }
        }
        Ok(())
    }

    /// Copies pages of the file to memory that is not a mapping of it: a process maps the file of another
    /// backing, which was dropped.
    fn copy(&self, window: &mut Window<'_>, pages: Range<u64>) -> Result<(), UffdError> {
        for page in pages {
            let range = self.core.bytes(page..page + 1);
            let start = range.start;
            let _ = window.copy_with(range, |bytes| {
                // A page of a sealed file that is present is read.
                let read = self.file.memory.mapping().read_at(start, bytes);
                Ok::<_, UffdError>(read.map_or(0, |()| bytes.len()))
            })?;
        }
        Ok(())
    }

    /// Has a page of the file filled, however long that takes. Returns whether it is.
    fn fill(&self, page: u64) -> Result<bool, BackingError> {
        let mut round = 0;
        loop {
            match self.core.contents().get(page) {
                Content::Present => return Ok(true),
                _ if !self.has_room() => return Ok(false),
                Content::Absent if self.core.contents().claim(page) => {
                    match self.with_state(|state| self.core.try_produce(page, state)) {
                        Produced::Done => return Ok(true),
                        Produced::Failed(error) => {
                            // Another attempt may succeed, by this mapping or another.
                            self.core.release(page);
                            return Err(error);
                        }
                        Produced::Deferred(why) => {
                            self.core.release(page);
                            if is_short(&why) {
                                // The memory of the mapping may have room where the file has none.
                                return Ok(false);
                            }
                        }
                    }
                }
                // Another thread produces it.
                _ => {}
            }
            pause(&mut round);
        }
    }
}

/// Returns whether there was no memory for a page.
fn is_short(error: &BackingError) -> bool {
    matches!(error, BackingError::Answer(error) if error.is_no_memory())
}

impl Backing for SharedBacking {
    fn map_pages(&self, window: &mut Window<'_>) {
        let shift = self.file.page.shift();
        let wanted = window.wanted().map(|bytes| bytes.start >> shift);
        while let Some(bytes) = window.next_run() {
            let open = bytes.start >> shift..bytes.end >> shift;
            if self.has_room() && self.run(open.clone()) != (open.clone(), true) {
                let wanted = wanted.filter(|page| open.contains(page));
                self.with_state(|state| self.core.offer(open.clone(), wanted, state));
                self.forget_what_came(open.clone());
            }
            let mut at = open.start;
            while at < open.end {
                let (run, is_filled) = self.run(at..open.end);
                at = run.end;
                let placed = if is_filled {
                    self.place(window, run).is_ok()
                } else if self.has_room() {
                    // It is not ready.
                    true
                } else {
                    window.part(run, |part| self.inner.map_pages(part));
                    true
                };
                // If a thread waits for a page that fails, it fails again in `fault`.
                if !placed {
                    return;
                }
            }
        }
    }

    fn fault(&self, window: &mut Window<'_>) -> Result<(), BackingError> {
        let page = window.range().start >> self.file.page.shift();
        if self.fill(page)? {
            Ok(self.place(window, page..page + 1)?)
        } else {
            self.inner.fault(window)
        }
    }

    fn read_ahead(&self, range: Range<u64>) {
        self.inner.read_ahead(range);
    }

    fn will_need(&self, ranges: &[Range<u64>]) {
        self.inner.will_need(ranges);
    }

    fn stored_at(&self, offset: u64) -> u64 {
        self.inner.stored_at(offset)
    }

    fn made_with(&self, offset: u64) -> Option<Range<u64>> {
        self.inner.made_with(offset)
    }

    fn byte_len(&self) -> Option<ByteLen> {
        Some(self.len)
    }

    fn memory_file(&self) -> io::Result<Option<(OwnedFd, Sharing)>> {
        let fd = self.file.memory.mapping().fd().ok_or(io::ErrorKind::Unsupported)?;
        Ok(Some((fd.as_fd().try_clone_to_owned()?, Sharing::Private)))
    }

    fn largest_window(&self) -> FaultAround {
        FaultAround::MAX
    }
}

impl fmt::Debug for SharedBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBacking")
            .field("len", &self.len)
            .field("kept", &self.kept())
            .finish_non_exhaustive()
    }
}

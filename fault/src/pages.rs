//! The states of the pages of one mapping, and the steps that change them: [`Pages`], as a window fills them, with the
//! kernel that installs them.

pub(crate) mod bad;
pub(crate) mod capture;
pub(crate) mod claimed;
pub(crate) mod dirty;
pub(crate) mod states;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use uzone_os::uffd::Answered;
use uzone_pages::{Content, PageSize};

use crate::memory::kernel::{Fill, Kernel};
use crate::pages::bad::{BadPages, Marked, PageTable};
use crate::pages::claimed::Words;
use crate::pages::states::PageStates;
use crate::stats::Counters;

/// The differences between memories.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Policy {
    /// Whether the kernel has no zero page for this memory.
    pub(crate) zeroes_by_copy: bool,
    /// Whether the memory is another process's. Then a removed page is zero, since that process gave it back, and the
    /// thread that reads the removals installs all pages. In memory of this process a removed page was evicted, and is
    /// produced anew.
    pub(crate) is_remote: bool,
    /// Whether writes are tracked, so that a page which was given back can come again with other
    /// bytes: the bytes that were written back.
    pub(crate) is_tracked: bool,
}

/// The pages of one mapping.
pub(crate) struct Pages {
    pub(crate) kernel: Arc<dyn Kernel>,
    pub(crate) contents: PageStates,
    pub(crate) page: PageSize,
    pub(crate) policy: Policy,
    pub(crate) counters: Counters,
    pub(crate) bad_pages: BadPages,
    /// How often pages were given back.
    evictions: AtomicU64,
}

impl Pages {
    pub(crate) fn new(kernel: Arc<dyn Kernel>, contents: PageStates) -> Self {
        let (page, policy) = (contents.page_size(), kernel.policy());
        let (counters, bad_pages) = (Counters::default(), BadPages::default());
        Self { kernel, contents, page, policy, counters, bad_pages, evictions: AtomicU64::new(0) }
    }

    pub(crate) fn bytes(&self, pages: Range<u64>) -> Range<u64> {
        pages.start << self.page.shift()..pages.end << self.page.shift()
    }

    /// Returns how often pages were given back, for a caller that is about to read bytes for absent pages.
    /// `None` where a page has the same bytes at any time.
    pub(crate) fn evictions_seen(&self) -> Option<u64> {
        // Acquire pairs with the Release in `note_eviction`: bytes that are read after this are as new as the
        // evictions that it counts.
        self.policy.is_tracked.then(|| self.evictions.load(Ordering::Acquire))
    }

    /// Notes that pages are being given back. The caller owns them, and has not made them absent yet: a thread
    /// that claims one of them afterwards learns by the count that bytes it read before may be old.
    pub(crate) fn note_eviction(&self) {
        self.evictions.fetch_add(1, Ordering::Release);
    }

    /// Notes that the kernel has a page that the caller owned. Returns whether the page is good.
    pub(crate) fn note_owned_filled(&self, page: u64, is_placed: bool) -> bool {
        self.bad_pages.note_filled(page, is_placed, self)
    }
}

impl Words for Pages {
    fn claim(&self, pages: Range<u64>) -> (u64, u64) {
        self.contents.claim_run(pages)
    }

    fn release(&self, page: u64) {
        let _ = self.contents.advance(page, Content::Filling, Content::Absent);
    }

    fn note_filled(&self, pages: Range<u64>, is_placed: bool) {
        if self.contents.set_present(pages.clone()) {
            return;
        }
        for page in pages {
            // A page that went bad meanwhile is good if it was installed: a copy replaces a mark.
            if self.contents.get(page) == Content::Poisoned {
                let _ = self.bad_pages.note_filled(page, is_placed, self);
            }
        }
    }

    fn wake(&self, pages: Range<u64>) {
        self.kernel.wake(self.bytes(pages));
    }
}

impl PageTable for Pages {
    fn content(&self, page: u64) -> Content {
        self.contents.get(page)
    }

    fn poison_word(&self, page: u64) -> bool {
        self.contents.poison(page)
    }

    fn unpoison_word(&self, page: u64) {
        self.contents.unpoison(page);
    }

    fn set_present(&self, page: u64) -> bool {
        self.contents.advance(page, Content::Filling, Content::Present)
    }

    fn mark(&self, page: u64) -> Marked {
        match self.kernel.install(self.bytes(page..page + 1), Fill::Poison) {
            Ok(Answered::Present) => Marked::Exists,
            Ok(Answered::All | Answered::NotRegistered | Answered::Gone) | Err(_) => Marked::Yes,
            Ok(_) => Marked::Later,
        }
    }
}

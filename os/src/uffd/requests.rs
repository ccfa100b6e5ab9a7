//! Pages that handlers of signals ask another thread for, and the words that they wait at: [`Requests`].
//!
//! A handler allocates nothing and takes no lock, so a request is a word in one of a fixed number of places. If all
//! are taken, the handler asks again a little later. It reads the word of its page before it asks, and sleeps only
//! while that word is unchanged: a thread that fills the page changes the word afterwards.
//! `tests/loom.rs` searches the interleavings.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// The bit of a word that a handler waits at. The others count the wake-ups of its handlers.
const WAITED: u32 = 1;

/// The bits of a request: one more than the page, whether it is written to, and the thread.
const PAGE: u32 = 40;
const WRITE: u64 = 1 << PAGE;
const THREAD: u32 = PAGE + 1;

/// A page that a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Less than 2^40 - 1: no address space has as many.
    pub(crate) page: u64,
    pub(crate) is_write: bool,
    /// By the number that the kernel gives it, which is less than 2^22.
    pub(crate) thread: u32,
}

impl Request {
    fn to_bits(self) -> u64 {
        let write = if self.is_write { WRITE } else { 0 };
        ((self.page + 1) & (WRITE - 1)) | write | u64::from(self.thread) << THREAD
    }

    fn of_bits(bits: u64) -> Option<Self> {
        let page = (bits & (WRITE - 1)).checked_sub(1)?;
        // No bit is lost: 23 are left.
        let thread = u32::try_from(bits >> THREAD).unwrap_or(0);
        Some(Self { page, is_write: bits & WRITE != 0, thread })
    }
}

/// Room for so many requests, and so many words, which the pages share.
pub(crate) struct Requests<const PLACES: usize, const WORDS: usize> {
    /// Zero, or a request.
    places: [AtomicU64; PLACES],
    words: [AtomicU32; WORDS],
}

impl<const PLACES: usize, const WORDS: usize> Requests<PLACES, WORDS> {
    pub(crate) fn new() -> Self {
        let places = core::array::from_fn(|_| AtomicU64::new(0));
        Self { places, words: core::array::from_fn(|_| AtomicU32::new(0)) }
    }

    /// Asks for a page. Returns whether there was room.
    pub(crate) fn ask(&self, request: Request) -> bool {
        self.places.iter().any(|place| {
            // Release pairs with the Acquire of `take`: the reader that takes it sees that a handler
            // waits at the word.
            // Relaxed otherwise: a place that is taken is none for this request.
            place
                .compare_exchange(0, request.to_bits(), Ordering::Release, Ordering::Relaxed)
                .is_ok()
        })
    }

    /// Takes the requests out.
    pub(crate) fn take(&self, mut found: impl FnMut(Request)) {
        for place in &self.places {
            // Relaxed: a hint, which spares most places a write. The handler rings a bell afterwards.
            if place.load(Ordering::Relaxed) != 0
                // Acquire pairs with the Release of `ask`.
                && let Some(request) = Request::of_bits(place.swap(0, Ordering::Acquire))
            {
                found(request);
            }
        }
    }

    /// Notes that a handler is about to wait for a page. Returns the word to wait at and its value: it waits only while
    /// the word has that.
    pub(crate) fn waits(&self, page: u64) -> (&AtomicU32, u32) {
        let word = self.word(page);
        // Relaxed: the request, which is made afterwards, publishes it.
        (word, word.fetch_or(WAITED, Ordering::Relaxed) | WAITED)
    }

    /// Notes that a page was filled, or may be now. Returns the word whose handlers are to be woken, if there
    /// may be any.
    pub(crate) fn wakes(&self, page: u64) -> Option<&AtomicU32> {
        let word = self.word(page);
        // Relaxed: a thread that fills the page for a request has taken that, and sees the bit. Another one that
        // does not see it wakes no handler: the thread that takes the request finds the page filled and does.
        let mut seen = word.load(Ordering::Relaxed);
        while seen & WAITED != 0 {
            let next = (seen & !WAITED).wrapping_add(WAITED << 1);
            // It ends: each time another thread has waited or woken. Relaxed: a handler that does not wait
            // repeats its access, and the kernel orders that behind the filled page.
            match word.compare_exchange(seen, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(word),
                Err(found) => seen = found,
            }
        }
        None
    }

    fn word(&self, page: u64) -> &AtomicU32 {
        &self.words[usize::try_from(page % WORDS as u64).unwrap_or(0)]
    }
}

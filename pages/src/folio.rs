//! The steps on a page's word by several threads at once: [`Folio`].
//!
//! A hold counts once a folio, whatever number of its pages it covers. Takers add first and look
//! afterwards (one `lock xadd`). Givers compare first (`lock cmpxchg`), so a count never goes below
//! zero, not even for a moment.
//!
//! *Free* is a flag of its own and not "no reference", because takers add before they look: two of
//! them on a page without a reference would see each other's. Giving the last hold back sets
//! the flag in the same step, or puts back the base reference where memory of the kind has one. A
//! taker that must take its addition back looks again in that very step: if there is no reason any
//! more, because the page was handed out or cleared meanwhile, the addition is in the count that
//! others see, and the taker keeps it as its hold. (Taking it back blindly could remove the last
//! hold of a page without setting the flag.)
//!
//! Pins and content exclude each other in the same word: a page that is pinned does not become
//! unpinnable ([`Content::is_pinnable`]), and one that is unpinnable gives no pin. Memory that fails
//! is the exception: a pin does not prevent it. A folio of which some pages are bad is still pinned:
//! its word has a flag for that ([`Word::is_partly_poisoned`]); the pinning thread then looks up which
//! pages are bad, and gives the pin back if it was for one of them.
//!
//! A base page whose memmap has blocks is held by two words: see `block.rs`.
//!
//! Orderings are argued where they are used and searched in `tests/loom.rs`.

use core::fmt;

use crate::addr::Pfn;
use crate::block::BlockRef;
use crate::content::Content;
use crate::page::Page;
use crate::sync::Ordering;
use crate::word::{
    COUNT_MASK, FREE, HoldKind, MAX_HOLDS, PARTLY_POISONED, PINS_SHIFT, POISON_PENDING, Word,
};

/// Returns why a taker is refused whose addition makes the count `total`, if it is.
#[inline]
const fn refusal(word: Word, sort: HoldKind, total: u64) -> Option<HoldError> {
    if word.is_free() {
        Some(HoldError::Free)
    } else if matches!(sort, HoldKind::Pin) && !word.content().is_pinnable() {
        Some(HoldError::Content(word.content()))
    } else if total > MAX_HOLDS as u64 {
        Some(HoldError::Overflow)
    } else {
        None
    }
}

/// Returns why a hold of `sort` would be refused by the page's word, if it would.
// A call from the loop over folios costs a sixth of a pin.
#[inline]
pub(crate) const fn obstacle(word: Word, sort: HoldKind) -> Option<HoldError> {
    refusal(word, sort, sort.raw_count(word) + 1)
}

/// Why a hold was not given, on a page or on a whole pagemap.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HoldError {
    /// The page is free: only its owner may take the first reference.
    #[error("the page is free: its owner has to hand it out first")]
    Free,
    /// There are as many holders as can be counted: [`MAX_HOLDS`], or 2^22 - 1 on a whole block of
    /// base pages.
    #[error("the page has as many holders already as can be counted")]
    Overflow,
    /// The page's bytes are not there, being replaced, or lost: no pin.
    #[error("the page's content is {0}")]
    Content(Content),
    /// Another thread is changing a page of the same block, and did not get on with it meanwhile.
    #[error("another thread is changing a page of the same block: try again")]
    Busy,
    /// The pagemap is being unbound.
    #[error("the pagemap is being unbound")]
    Closing,
    /// The pagemap has been unbound or dropped.
    #[error("the pagemap is gone")]
    Gone,
    /// The pagemap has as many guards as its count admits.
    #[error("the pagemap has as many guards of that sort as it can count")]
    Full,
}

// Pins return it by value.
const _: () = assert!(size_of::<HoldError>() == 1);

/// Why a page's content could not be advanced, or a hold not be given back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdvanceError {
    /// The page is in another state than the caller thought: another thread was first.
    #[error("the content is {found:?}, not {expected:?}")]
    Found {
        /// The state the caller expected.
        expected: Content,
        /// The state the page is in.
        found: Content,
    },
    /// The page is pinned: its bytes stay.
    #[error("the page has {pins} pins: its bytes stay until those are given back")]
    Pinned {
        /// How many pins there were.
        pins: u32,
    },
    /// There is no such step. A bug of the caller's, whatever state the page is in.
    #[error("the content may not go from {from:?} to {to:?}")]
    Illegal {
        /// The state the caller would leave.
        from: Content,
        /// The state the caller asked for.
        to: Content,
    },
    /// The page does not belong to the region.
    #[error("page {pfn} does not belong to the region")]
    NotHere {
        /// The page.
        pfn: Pfn,
    },
    /// There is no hold of that sort to give back.
    #[error("cannot give back a hold: the folio has no {}", what.name())]
    NotHeld {
        /// Which.
        what: HoldKind,
    },
}

/// A folio: the word that its pages share, read through its memmap's template.
///
/// It is `Copy` and borrows the memmap; it is not a hold. Its answers may be out of date by
/// the time the caller looks, unless the caller holds the folio.
pub struct Folio<'a, P = ()> {
    page: &'a Page<P>,
    template: Word,
    /// The block that the page belongs to, if it is a base page of a memmap with blocks.
    block: Option<BlockRef<'a>>,
}

impl<P> Clone for Folio<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Folio<'_, P> {}

impl<'a, P> Folio<'a, P> {
    /// Takes the descriptor of a head and the template of the memmap that it belongs to.
    #[inline]
    #[must_use]
    pub fn new(page: &'a Page<P>, template: Word) -> Self {
        Self { page, template, block: None }
    }

    /// Takes the block that a base page belongs to.
    #[inline]
    pub(crate) fn with_block(self, block: Option<BlockRef<'a>>) -> Self {
        Self { block, ..self }
    }

    /// Returns the caller's part of the head's descriptor.
    #[must_use]
    pub fn payload(self) -> &'a P {
        self.page.payload()
    }

    #[inline]
    const fn decode(self, stored: u64) -> Word {
        Word(stored.wrapping_add(self.template.0))
    }

    #[inline]
    const fn encode(self, word: Word) -> u64 {
        word.0.wrapping_sub(self.template.0)
    }

    /// Returns the word as it is now, with the holds that lie on the block of a base page.
    #[must_use]
    pub fn word(self) -> Word {
        let word = self.own_word();
        match self.block.map(BlockRef::holds) {
            None | Some((0, 0)) => word,
            Some((references, pins)) => word.with_more(references, pins),
        }
    }

    /// Returns the state of the bytes, as it is now: one load.
    #[must_use]
    #[inline]
    pub fn content(self) -> Content {
        self.own_word().content()
    }

    /// Returns the word as it is now, without the holds on the block.
    #[inline]
    pub(crate) fn own_word(self) -> Word {
        // Relaxed: a report of one word, by which nothing else is published. A caller that acts on it
        // takes a hold or advances the content, and those have their own orderings.
        self.decode(self.page.stored.load(Ordering::Relaxed))
    }

    /// Takes one more hold of `sort` for a thread that has one already. It does not look at the content, which may
    /// have changed since.
    ///
    /// # Errors
    /// [`HoldError::Overflow`], or [`HoldError::Free`] for a caller that has none; then nothing has
    /// changed.
    pub fn hold_again(self, sort: HoldKind) -> Result<(), HoldError> {
        // Relaxed: the caller's own hold has acquired all that there is to see.
        self.update(Ordering::Relaxed, |word| {
            let total = sort.raw_count(word) + 1;
            match refusal(word, HoldKind::Reference, total) {
                None => Ok(Word(word.0 + sort.one(PINS_SHIFT))),
                Some(refusal) => Err(refusal),
            }
        })
        .map(|_| ())
    }

    /// Takes a hold of `sort`: a reference, or a pin, until whose return the page's bytes are not moved,
    /// cleared or taken away. It costs one locked addition. Returns the word before it, by which the caller
    /// of a pin sees whether some page of the folio is bad.
    ///
    /// # Errors
    /// The page is free or at [`MAX_HOLDS`], or its bytes are not there to be pinned; then nothing has
    /// changed.
    #[inline]
    pub fn try_hold(self, sort: HoldKind) -> Result<Word, HoldError> {
        // Acquire pairs with the Release in `release` and `take_first`: a new holder
        // sees the writes of the last holder, or of the owner that handed the page out.
        let before =
            self.decode(self.page.stored.fetch_add(sort.one(PINS_SHIFT), Ordering::Acquire));
        if obstacle(before, sort).is_none() {
            return Ok(before);
        }
        Self::take_back(self.page, self.template, sort)
    }

    /// Takes the addition of a refused taker back, or keeps it if there is no reason any more.
    // By its parts: were it passed as a whole, takers would have to build it in memory first.
    #[cold]
    fn take_back(page: &Page<P>, template: Word, sort: HoldKind) -> Result<Word, HoldError> {
        let folio = Folio::new(page, template);
        // Acquire as in `try_hold`, for the case that the addition is kept.
        let mut stored = page.stored.load(Ordering::Acquire);
        loop {
            let word = folio.decode(stored);
            let Some(refusal) = refusal(word, sort, sort.raw_count(word)) else {
                return Ok(word);
            };
            // Relaxed: nothing was learnt or published by an addition that is taken back.
            match page.stored.compare_exchange_weak(
                stored,
                folio.encode(Word(word.0 - sort.one(PINS_SHIFT))),
                Ordering::Relaxed,
                Ordering::Acquire,
            ) {
                Ok(_) => return Err(refusal),
                // It ends: each round fails only because another thread's step succeeded.
                Err(found) => stored = found,
            }
        }
    }

    /// Gives a hold of `sort` back. Returns whether that was the last hold; exactly one caller is given this
    /// answer. The page is free then, or where memory of its kind has a base reference, has that again.
    ///
    /// # Errors
    /// [`AdvanceError::NotHeld`] if there is none; then nothing has changed.
    #[inline]
    pub fn release(self, sort: HoldKind) -> Result<bool, AdvanceError> {
        let mut is_last = false;
        // Release pairs with the Acquire of the next taker, which sees the writes of this holder; the
        // last one out acquires as well, because it goes on to reuse the memory of the others.
        self.update(Ordering::AcqRel, |word| {
            if sort.count(word) == 0 {
                return Err(AdvanceError::NotHeld { what: sort });
            }
            let after = Word(word.0 - sort.one(PINS_SHIFT));
            is_last = after.references() == 0 && after.pins() == 0;
            if !is_last {
                return Ok(after);
            }
            // In the same step the page becomes as it was before its first use, so that there
            // is no moment in which it has neither a hold nor a sign that it has none.
            let fresh = self.template.0 & (FREE | COUNT_MASK);
            Ok(Word(after.0 | fresh))
        })?;
        Ok(is_last)
    }

    /// Takes the first reference of a free page, as its owner does to hand it out.
    /// Returns whether the page was free; of several callers, one succeeds.
    #[must_use = "it may not have happened"]
    pub fn take_first(self) -> bool {
        // Release pairs with the Acquire in `try_hold`: the thread that takes the second reference sees
        // the owner's writes. Acquire pairs with the last `release`.
        self.update(Ordering::AcqRel, |word| {
            // A bad page is of no use and is not handed out.
            if !word.is_free() || word.content() == Content::Poisoned {
                return Err(());
            }
            // Takers that will be refused may be in the count; they subtract their own holds.
            Ok(Word((word.0 & !FREE) + HoldKind::Reference.one(PINS_SHIFT)))
        })
        .is_ok()
    }

    fn uninhibit(self) {
        if let Some(block) = self.block {
            block.uninhibit(1);
        }
    }

    /// Puts the content from state `from` to state `to`. Of several callers, one succeeds. A page
    /// that is pinned is not made unpinnable, except by poison. Beside a taker whose pin is about to
    /// be refused it may be called pinned although it is not.
    ///
    /// # Errors
    /// [`AdvanceError::Found`] if the page is in another state, or went bad before its owner had done
    /// and is poisoned now; [`AdvanceError::Pinned`] if pins keep its bytes in place,
    /// [`AdvanceError::Illegal`] if [`Content::may_become`] knows no such step; then nothing has
    /// changed.
    pub fn advance(self, from: Content, to: Content) -> Result<(), AdvanceError> {
        if !from.may_become(to) {
            return Err(AdvanceError::Illegal { from, to });
        }
        let is_leaving = from.is_pinnable() && !to.is_pinnable();
        if is_leaving && let Some(block) = self.block {
            match to {
                Content::Poisoned => block.inhibit_more(1),
                _ => block.inhibit().map_err(|pins| AdvanceError::Pinned { pins })?,
            }
        }
        let advanced = self.advance_inhibited(from, to);
        let is_arriving = !from.is_pinnable() && to.is_pinnable();
        if is_leaving && advanced.is_err() || is_arriving && advanced.is_ok() {
            self.uninhibit();
        }
        advanced
    }

    /// Advances the content as [`Folio::advance`] does, along a legal step, while the caller answers
    /// for the inhibitors of the block: there is one from before a page becomes unpinnable until after it
    /// is pinnable again.
    pub(crate) fn advance_inhibited(self, from: Content, to: Content) -> Result<(), AdvanceError> {
        let needs_no_pins = from.is_pinnable() && !to.is_pinnable() && to != Content::Poisoned;
        // Acquire and Release: a thread that sees the new state sees the bytes behind it, and this thread
        // has seen the bytes behind the old one.
        let advanced = self.update(Ordering::AcqRel, |word| {
            let found = word.content();
            if found != from {
                Err(AdvanceError::Found { expected: from, found })
            } else if word.is_poison_pending() {
                Ok(Word(word.0 & !POISON_PENDING).with_content(Content::Poisoned))
            } else if needs_no_pins && word.pins() != 0 {
                Err(AdvanceError::Pinned { pins: word.pins() })
            } else {
                Ok(word.with_content(to))
            }
        });
        match advanced {
            // Only an owned page is poison_pending, and that was unpinnable before as it is now.
            Ok((before, _)) if before.is_poison_pending() => {
                Err(AdvanceError::Found { expected: from, found: Content::Poisoned })
            }
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Hands out a folio whose bytes are all zero: puts its content from *zero* to *present*,
    /// if no page of it is bad. Returns whether it did; of several who try, one succeeds.
    ///
    /// Both are looked at in the step itself: a bad page is left out when its folio is cleared, and may
    /// be unpoisoned between two reads.
    #[must_use = "it may not have happened"]
    pub fn take_zero(self) -> bool {
        // Acquire and Release: as in `advance_inhibited`.
        let is_taken = self
            .update(Ordering::AcqRel, |word| {
                if word.content() != Content::Zero || word.is_partly_poisoned() {
                    return Err(());
                }
                Ok(word.with_content(Content::Present))
            })
            .is_ok();
        if is_taken {
            self.uninhibit();
        }
        is_taken
    }

    /// Records that the page's bytes are lost, in any state and under any holds. A thread that is
    /// replacing the bytes stays the owner until its next step, which makes the page poisoned instead
    /// of the state that was asked for. Returns the word afterwards, with the holders that must be warned, or
    /// `None` if the page was poisoned before.
    #[must_use = "its holders must be warned"]
    pub fn poison(self) -> Option<Word> {
        loop {
            let before = self.own_word();
            let from = before.content();
            if from == Content::Poisoned || before.is_poison_pending() {
                return None;
            }
            let is_done = if from.is_owned() {
                // Relaxed: the owner's next step gives the order.
                self.update(Ordering::Relaxed, |word| {
                    let is_same = word.content() == from && !word.is_poison_pending();
                    if is_same { Ok(Word(word.0 | POISON_PENDING)) } else { Err(()) }
                })
                .is_ok()
            } else {
                self.advance(from, Content::Poisoned).is_ok()
            };
            // It ends: a step fails only because another thread's step succeeded.
            if is_done {
                return Some(self.word());
            }
        }
    }

    /// Records whether some page of the folio is bad. Returns the word before: holders counted there
    /// were not warned, and later pins are.
    #[expect(clippy::must_use_candidate, reason = "it is called for its effect")]
    pub fn set_partly_poisoned(self, is_poisoned: bool) -> Word {
        // Release pairs with the Acquire in `try_hold`: a thread that sees the flag finds the bad page
        // listed.
        // Acquire pairs with `release`, as `advance` does.
        let flagged = self.update(Ordering::AcqRel, |word| {
            let flag = if is_poisoned { PARTLY_POISONED } else { 0 };
            Ok::<_, core::convert::Infallible>(Word(word.0 & !PARTLY_POISONED | flag))
        });
        match flagged {
            Ok((before, _)) => before,
            Err(never) => match never {},
        }
    }

    /// Replaces the word by the result of `next`; returns the word before and after.
    #[inline]
    fn update<E>(
        self,
        success: Ordering,
        mut next: impl FnMut(Word) -> Result<Word, E>,
    ) -> Result<(Word, Word), E> {
        // Relaxed: this value is only a guess that the exchange below confirms.
        let mut stored = self.page.stored.load(Ordering::Relaxed);
        loop {
            let before = self.decode(stored);
            let after = next(before)?;
            match self.page.stored.compare_exchange_weak(
                stored,
                self.encode(after),
                success,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok((before, after)),
                // It ends: each round fails only because another thread's step succeeded.
                Err(found) => stored = found,
            }
        }
    }
}

impl<P> fmt::Debug for Folio<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Folio").field(&self.word()).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::kind::MemoryKind;

    const GET: HoldKind = HoldKind::Reference;
    const PIN: HoldKind = HoldKind::Pin;

    fn with_folio(kind: MemoryKind, check: impl FnOnce(Folio<'_>)) {
        let page = Page::new(());
        check(Folio::new(&page, Word::initial(kind)));
    }

    fn hold(folio: Folio<'_>, sort: HoldKind) -> Result<(), HoldError> {
        folio.try_hold(sort).map(|_| ())
    }

    #[test]
    fn holds_beyond_the_most_are_refused_and_change_nothing() {
        for kind in MemoryKind::ALL {
            with_folio(kind, |folio| holds_end_at_the_most(folio, kind));
        }
    }

    fn holds_end_at_the_most(folio: Folio<'_>, kind: MemoryKind) {
        let is_free = folio.word().is_free();
        assert_eq!(folio.take_first(), is_free, "the one hold that it has");
        let before = u64::from(MAX_HOLDS) - 2;
        let held = GET.one(PINS_SHIFT) * before + PIN.one(PINS_SHIFT) * (before + 1);
        folio.page.stored.fetch_add(held, Ordering::Relaxed);
        for sort in [GET, PIN] {
            assert_eq!(hold(folio, sort), Ok(()));
            let full = folio.word();
            assert_eq!(sort.count(full), MAX_HOLDS);
            assert_eq!(hold(folio, sort), Err(HoldError::Overflow));
            assert_eq!(folio.hold_again(sort), Err(HoldError::Overflow));
            assert_eq!(folio.word(), full);
        }
        let full = folio.word();
        assert_eq!((full.references(), full.pins()), (MAX_HOLDS, MAX_HOLDS));
        assert_eq!(full.content(), Content::Unknown);
        folio.page.stored.fetch_sub(held, Ordering::Relaxed);
        assert_eq!(folio.release(PIN), Ok(false));
        assert_eq!(folio.release(GET), Ok(false));
        assert_eq!(folio.release(GET), Ok(true));
        assert_eq!(folio.word(), Word::initial(kind), "free, or its base reference");
    }

    #[test]
    fn a_pinned_page_keeps_its_bytes_and_one_without_bytes_gives_no_pin() {
        with_folio(MemoryKind::Generic, |folio| {
            assert_eq!(hold(folio, PIN), Ok(()));
            for to in [Content::Zeroing, Content::Absent] {
                assert_eq!(
                    folio.advance(Content::Unknown, to),
                    Err(AdvanceError::Pinned { pins: 1 })
                );
            }
            assert_eq!(folio.advance(Content::Unknown, Content::Present), Ok(()));
            assert_eq!(folio.release(PIN), Ok(false));
            assert_eq!(folio.advance(Content::Present, Content::Zeroing), Ok(()));
            let before = folio.word();
            assert_eq!(hold(folio, PIN), Err(HoldError::Content(Content::Zeroing)));
            assert_eq!(folio.word(), before);
            assert_eq!(hold(folio, GET), Ok(()), "its descriptor means what it meant");
            assert_eq!(folio.advance(Content::Zeroing, Content::Zero), Ok(()));
            assert_eq!(
                hold(folio, PIN),
                Err(HoldError::Content(Content::Zero)),
                "it may be written"
            );
            assert_eq!(folio.advance(Content::Zero, Content::Present), Ok(()));
            assert_eq!(hold(folio, PIN), Ok(()));
        });
    }

    #[test]
    fn poison_does_not_wait_and_counts_the_pins_that_were_earlier() {
        with_folio(MemoryKind::Generic, |folio| {
            for _ in 0..3 {
                assert_eq!(hold(folio, PIN), Ok(()));
            }
            assert_eq!(folio.poison().map(Word::pins), Some(3));
            assert_eq!(folio.poison(), None);
            assert_eq!(hold(folio, PIN), Err(HoldError::Content(Content::Poisoned)));
            assert_eq!(folio.hold_again(PIN), Ok(()));
            for _ in 0..4 {
                assert_eq!(folio.release(PIN), Ok(false));
            }
            assert_eq!(folio.advance(Content::Poisoned, Content::Unknown), Ok(()));
            assert_eq!(folio.word(), Word::initial(MemoryKind::Generic));
        });
    }

    #[test]
    fn a_page_that_goes_bad_under_its_owner_is_poisoned_when_that_has_done() {
        with_folio(MemoryKind::Generic, |folio| {
            assert_eq!(folio.advance(Content::Unknown, Content::Zeroing), Ok(()));
            assert!(folio.poison().is_some_and(Word::is_poison_pending));
            assert_eq!(folio.poison(), None);
            assert_eq!(folio.word().content(), Content::Zeroing, "it has an owner");
            let poisoned =
                AdvanceError::Found { expected: Content::Zeroing, found: Content::Poisoned };
            assert_eq!(folio.advance(Content::Zeroing, Content::Zero), Err(poisoned));
            assert_eq!(folio.word().content(), Content::Poisoned);
            assert!(!folio.word().is_poison_pending());
        });
    }

    #[test]
    fn a_folio_with_a_bad_page_is_pinned_with_a_warning() {
        with_folio(MemoryKind::Generic, |folio| {
            assert_eq!(folio.set_partly_poisoned(true), Word::initial(MemoryKind::Generic));
            let before = folio.try_hold(PIN).unwrap();
            assert!(before.is_partly_poisoned() && before.pins() == 0);
            assert_eq!(folio.set_partly_poisoned(false).pins(), 1);
            assert_eq!(folio.release(PIN), Ok(false));
            assert_eq!(folio.word(), Word::initial(MemoryKind::Generic));
        });
    }
}

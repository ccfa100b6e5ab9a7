//! The descriptor of a page: [`Page`], one 64-bit word and what the caller adds to it.
//!
//! The word holds all that can change about a page while several threads use it:
//!
//! ```text
//!  63        60 59    56 55                     28 27                      0
//! ┌────────────┬────────┬─────────────────────────┬─────────────────────────┐
//! │   flags    │content │          pins           │       references        │
//! └────────────┴────────┴─────────────────────────┴─────────────────────────┘
//!   60 reserved   61 frozen   62 free   63 not used
//! ```
//!
//! What is stored is not that word but its difference to a *template*, which is one number for a
//! whole memmap: `decoded = stored + template`, wrapping. A descriptor that was never written is
//! zero, and so it *is* the template: an initialised descriptor. Counting needs no decoding,
//! because adding to the difference adds to the word.
//!
//! | references or pins | meaning |
//! |---|---|
//! | 0 | nobody holds the page in this way |
//! | 1 to [`MAX_HOLDS`] | so many holders |
//! | above, to 2^28 - 1 | the overflow band: a taker who lands here gives it back and is refused |
//!
//! A hold counts once a folio, whatever number of its pages it covers. Takers add first and look
//! afterwards (one `lock xadd`), so a count may be too high for a moment by as many as there are
//! threads in the middle of that; the band is wider than the number of threads Linux can run
//! (2^22), and a taker that adds more than [`MAX_OPTIMISTIC`] at once compares first. Givers
//! compare first (`lock cmpxchg`), so a count never goes below zero, not even for a moment.
//!
//! *Free* is a flag of its own and not "no reference", because takers add before they look: two of
//! them on a page without a reference would see each other's. Who gives the last hold back sets
//! the flag in the same step, or puts back the base reference where memory of the kind has one. A taker that must take its addition back looks again in that very
//! step: if the page was handed out meanwhile, the addition is in the count that its holders see,
//! and the taker keeps it as its hold. (Taking it back blindly could remove the last hold of a
//! page without anybody setting the flag.)
//!
//! A pin does not look at the content, for a folio may be good but for one page: take the pin
//! first, then look, and give it back if the bytes are lost.
//!
//! This file is not about where descriptors lie: see `memmap.rs`. Orderings are argued where they
//! are used and searched in `tests/loom.rs`.

use core::fmt;

use crate::content::Content;
use crate::kind::MemoryKind;
use crate::sync::{AtomicU64, Ordering};

const COUNT_BITS: u32 = 28;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
const PINS_SHIFT: u32 = COUNT_BITS;
const CONTENT_SHIFT: u32 = 2 * COUNT_BITS;
const CONTENT_MASK: u64 = 0xf;

const ONE_REFERENCE: u64 = 1;
const ONE_PIN: u64 = 1 << PINS_SHIFT;
const RESERVED: u64 = 1 << 60;
const FROZEN: u64 = 1 << 61;
const FREE: u64 = 1 << 62;

/// The most references, and the most pins, that a folio may have.
pub const MAX_HOLDS: u32 = (1 << (COUNT_BITS - 1)) - 1;

/// The most holds that one taker adds before it looks: 2^22 threads of 2^5 stay inside the band.
pub const MAX_OPTIMISTIC: u32 = 1 << 5;

const _: () = assert!(CONTENT_SHIFT + 4 == 60);
const _: () = assert!((1_u64 << 22) * (MAX_OPTIMISTIC as u64) <= COUNT_MASK - MAX_HOLDS as u64);

/// A page's word as it was at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Word(u64);

impl Word {
    /// Returns the word that a page of `kind` has before anybody used it: reserved, its content
    /// unknown, and free or with its base reference.
    #[must_use]
    pub const fn initial(kind: MemoryKind) -> Self {
        match kind.initial_references() {
            0 => Self(RESERVED | FREE),
            references => Self(RESERVED | references as u64),
        }
    }

    /// Returns the word of a tail, which nobody holds: holds are its head's.
    #[must_use]
    pub const fn tail() -> Self {
        Self(RESERVED | FREE)
    }

    /// Takes a decoded word.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the decoded word.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// Returns how many references there are. Of a page that is frozen or has the most it may
    /// have, takers that are about to be refused are counted for a moment.
    #[must_use]
    pub const fn references(self) -> u32 {
        if self.is_free() { 0 } else { (self.0 & COUNT_MASK) as u32 }
    }

    /// Returns how many pins there are. Of a page that is frozen or has the most it may have, takers
    /// that are about to be refused are counted for a moment.
    #[must_use]
    pub const fn pins(self) -> u32 {
        if self.is_free() { 0 } else { ((self.0 >> PINS_SHIFT) & COUNT_MASK) as u32 }
    }

    /// Returns what is known about the page's bytes.
    #[must_use]
    pub const fn content(self) -> Content {
        Content::from_bits(self.0 >> CONTENT_SHIFT)
    }

    /// Returns whether the page is nobody's business but its owner's, as every device page is.
    #[must_use]
    pub const fn is_reserved(self) -> bool {
        self.0 & RESERVED != 0
    }

    /// Returns whether nobody may take a hold because the page is being torn down.
    #[must_use]
    pub const fn is_frozen(self) -> bool {
        self.0 & FROZEN != 0
    }

    /// Returns whether the page waits for its first reference.
    #[must_use]
    pub const fn is_free(self) -> bool {
        self.0 & FREE != 0
    }

    const fn with_content(self, content: Content) -> Self {
        Self(self.0 & !(CONTENT_MASK << CONTENT_SHIFT) | content.to_bits() << CONTENT_SHIFT)
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Word")
            .field("references", &self.references())
            .field("pins", &self.pins())
            .field("content", &self.content())
            .field("reserved", &self.is_reserved())
            .field("frozen", &self.is_frozen())
            .field("free", &self.is_free())
            .finish()
    }
}

/// The descriptor of one page: what the caller adds, then the word.
///
/// The word comes last because Linux's 64-byte descriptor has room there: with
/// [`LinuxPage`](crate::LinuxPage) as the payload, a fresh descriptor is byte for byte Linux's.
///
/// # Invariants
/// Its size is the payload's plus eight bytes, without padding; [`Payload`](crate::Payload) asks
/// for that, and [`Layout`](crate::Layout) refuses what does not fit.
#[cfg_attr(not(loom), derive(zerocopy::FromBytes))]
#[repr(C)]
pub struct Page<P = ()> {
    payload: P,
    stored: AtomicU64,
}

impl<P> Page<P> {
    /// Takes the caller's part of a descriptor that nobody has used.
    #[must_use]
    pub fn new(payload: P) -> Self {
        Self { payload, stored: AtomicU64::new(0) }
    }

    /// Returns what the caller added.
    #[must_use]
    pub fn payload(&self) -> &P {
        &self.payload
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Page>() == 8);

/// Why a hold was not given.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HoldError {
    /// The page is free: only its owner may take the first reference.
    #[error("the page is free: its owner has to hand it out first")]
    Free,
    /// The page is being torn down.
    #[error("the page is frozen: it is being torn down")]
    Frozen,
    /// There are [`MAX_HOLDS`] already.
    #[error("the page has {MAX_HOLDS} holders already")]
    Overflow,
}

/// Why a hold could not be given back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReleaseError {
    /// There are not so many holds of that sort.
    #[error("gave back {given} {what}, where {held} are held")]
    NotHeld {
        /// "references" or "pins".
        what: &'static str,
        /// How many were given back.
        given: u32,
        /// How many there were.
        held: u32,
    },
    /// The page is frozen: whoever froze it has all the holds, and thaws it before giving any back.
    #[error("the page is frozen, and whoever froze it has all its holds")]
    Frozen,
}

/// What giving a hold back did.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub enum Released {
    /// Others still hold the page.
    Held,
    /// That was the last hold, and whoever sees this is the only one who does. The page is free, or
    /// where memory of its kind has a base reference, has that again.
    Last,
}

/// Why a page's content could not be advanced.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdvanceError {
    /// The page is in another state than the caller thought: somebody else was first.
    #[error("the content is {found:?}, not {expected:?}")]
    Found {
        /// The state the caller expected.
        expected: Content,
        /// The state the page is in.
        found: Content,
    },
    /// There is no such step. A bug of the caller's, whatever state the page is in.
    #[error("the content may not go from {from:?} to {to:?}")]
    Illegal {
        /// The state the caller would leave.
        from: Content,
        /// The state the caller asked for.
        to: Content,
    },
}

/// The two sorts of hold: a reference keeps a descriptor's meaning, a pin keeps a page in place.
#[derive(Clone, Copy)]
enum Sort {
    Reference,
    Pin,
}

impl Sort {
    const fn one(self) -> u64 {
        match self {
            Self::Reference => ONE_REFERENCE,
            Self::Pin => ONE_PIN,
        }
    }

    const fn shift(self) -> u32 {
        match self {
            Self::Reference => 0,
            Self::Pin => PINS_SHIFT,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Reference => "references",
            Self::Pin => "pins",
        }
    }

    const fn count(self, word: Word) -> u32 {
        match self {
            Self::Reference => word.references(),
            Self::Pin => word.pins(),
        }
    }

    /// Returns the count as it stands in the word, with takers that will be refused.
    const fn raw_count(self, word: Word) -> u64 {
        (word.0 >> self.shift()) & COUNT_MASK
    }

    /// Returns why a taker is refused whose addition makes the count `total`, if it is.
    const fn refusal(word: Word, total: u64) -> Option<HoldError> {
        if word.is_free() {
            Some(HoldError::Free)
        } else if word.is_frozen() {
            Some(HoldError::Frozen)
        } else if total > MAX_HOLDS as u64 {
            Some(HoldError::Overflow)
        } else {
            None
        }
    }
}

/// A folio: the word that its pages share, read through its memmap's template.
///
/// It is `Copy` and borrows the memmap; it is not a hold. What it returns may be out of date by
/// the time the caller looks, unless the caller holds the folio.
pub struct Folio<'a, P = ()> {
    page: &'a Page<P>,
    template: Word,
}

impl<P> Clone for Folio<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Folio<'_, P> {}

impl<'a, P> Folio<'a, P> {
    /// Takes the descriptor of a head and the template of the memmap that it belongs to.
    #[must_use]
    pub fn new(page: &'a Page<P>, template: Word) -> Self {
        Self { page, template }
    }

    /// Returns the caller's part of the head's descriptor.
    #[must_use]
    pub fn payload(self) -> &'a P {
        self.page.payload()
    }

    const fn decode(self, stored: u64) -> Word {
        Word(stored.wrapping_add(self.template.0))
    }

    const fn encode(self, word: Word) -> u64 {
        word.0.wrapping_sub(self.template.0)
    }

    /// Returns the word as it is now.
    #[must_use]
    pub fn word(self) -> Word {
        // Relaxed: a report of one word, by which nothing else is published. Who acts on it takes
        // a hold or advances the content, and those have their own orderings.
        self.decode(self.page.stored.load(Ordering::Relaxed))
    }

    /// Takes a reference. It costs one locked addition.
    ///
    /// # Errors
    /// The page is free, frozen or at [`MAX_HOLDS`]; then nothing has changed.
    pub fn try_get(self) -> Result<(), HoldError> {
        self.take(Sort::Reference, 1)
    }

    /// Takes `count` references at once, for as many holders.
    ///
    /// # Errors
    /// The page is free, frozen or would have more than [`MAX_HOLDS`]; then nothing has changed.
    pub fn try_get_many(self, count: u32) -> Result<(), HoldError> {
        self.take(Sort::Reference, count)
    }

    /// Takes a pin: until it is given back, nobody may move, clear or take away the page's bytes.
    /// It costs one locked addition.
    ///
    /// # Errors
    /// The page is free, frozen or at [`MAX_HOLDS`]; then nothing has changed.
    pub fn try_pin(self) -> Result<(), HoldError> {
        self.take(Sort::Pin, 1)
    }

    /// Takes `count` pins at once, for as many holders.
    ///
    /// # Errors
    /// The page is free, frozen or would have more than [`MAX_HOLDS`]; then nothing has changed.
    pub fn try_pin_many(self, count: u32) -> Result<(), HoldError> {
        self.take(Sort::Pin, count)
    }

    fn take(self, sort: Sort, count: u32) -> Result<(), HoldError> {
        if count > MAX_OPTIMISTIC {
            return self.take_compared(sort, count);
        }
        let delta = sort.one() * u64::from(count);
        // Acquire pairs with the Release in `give_back`, `take_first` and `thaw`: who takes a hold
        // sees what the last holder, or whoever handed the page out, wrote.
        let before = self.decode(self.page.stored.fetch_add(delta, Ordering::Acquire));
        if Sort::refusal(before, sort.raw_count(before) + u64::from(count)).is_none() {
            return Ok(());
        }
        self.take_back(sort, delta)
    }

    /// Takes the addition of a refused taker back, or keeps it if there is no reason any more.
    #[cold]
    fn take_back(self, sort: Sort, delta: u64) -> Result<(), HoldError> {
        // Acquire as in `take`, for the case that the addition is kept.
        let mut stored = self.page.stored.load(Ordering::Acquire);
        loop {
            let word = self.decode(stored);
            let Some(refusal) = Sort::refusal(word, sort.raw_count(word)) else {
                return Ok(());
            };
            // Relaxed: nothing was learnt or published by an addition that is taken back.
            match self.page.stored.compare_exchange_weak(
                stored,
                self.encode(Word(word.0 - delta)),
                Ordering::Relaxed,
                Ordering::Acquire,
            ) {
                Ok(_) => return Err(refusal),
                // It ends: each round fails only because another thread's step succeeded.
                Err(found) => stored = found,
            }
        }
    }

    fn take_compared(self, sort: Sort, count: u32) -> Result<(), HoldError> {
        self.update(Ordering::Acquire, |word| {
            let total = sort.raw_count(word) + u64::from(count);
            match Sort::refusal(word, total) {
                None => Ok(Word(word.0 + sort.one() * u64::from(count))),
                Some(refusal) => Err(refusal),
            }
        })
        .map(|_| ())
    }

    /// Gives a reference back.
    ///
    /// # Errors
    /// [`ReleaseError`] if there is none; then nothing has changed.
    pub fn put(self) -> Result<Released, ReleaseError> {
        self.give_back(Sort::Reference, 1)
    }

    /// Gives `count` references back at once.
    ///
    /// # Errors
    /// [`ReleaseError`] if there are fewer; then nothing has changed.
    pub fn put_many(self, count: u32) -> Result<Released, ReleaseError> {
        self.give_back(Sort::Reference, count)
    }

    /// Gives a pin back.
    ///
    /// # Errors
    /// [`ReleaseError`] if there is none; then nothing has changed.
    pub fn unpin(self) -> Result<Released, ReleaseError> {
        self.give_back(Sort::Pin, 1)
    }

    /// Gives `count` pins back at once.
    ///
    /// # Errors
    /// [`ReleaseError`] if there are fewer; then nothing has changed.
    pub fn unpin_many(self, count: u32) -> Result<Released, ReleaseError> {
        self.give_back(Sort::Pin, count)
    }

    fn give_back(self, sort: Sort, count: u32) -> Result<Released, ReleaseError> {
        if count == 0 {
            return Ok(Released::Held);
        }
        let delta = sort.one() * u64::from(count);
        let mut released = Released::Held;
        // Release pairs with the Acquire of the next taker, who sees what this holder wrote; the
        // last one out acquires as well, because it goes on to reuse what the others wrote.
        self.update(Ordering::AcqRel, |word| {
            if word.is_frozen() {
                return Err(ReleaseError::Frozen);
            }
            let held = sort.count(word);
            if held < count {
                return Err(ReleaseError::NotHeld { what: sort.name(), given: count, held });
            }
            let after = Word(word.0 - delta);
            if after.references() != 0 || after.pins() != 0 {
                released = Released::Held;
                return Ok(after);
            }
            // In the same step the page becomes what it was before anybody used it, so that there
            // is no moment in which it has neither a hold nor a sign that it has none.
            released = Released::Last;
            let fresh = self.template.0 & (FREE | COUNT_MASK);
            Ok(Word(after.0 | fresh))
        })?;
        Ok(released)
    }

    /// Takes the first reference of a free page, as its owner does who hands it out.
    /// Returns whether the page was free; of several who try, one succeeds.
    #[must_use = "it may not have happened"]
    pub fn take_first(self) -> bool {
        // Release pairs with the Acquire in `take`: who takes the second reference sees what the
        // owner prepared. Acquire pairs with the last `give_back`.
        self.update(Ordering::AcqRel, |word| {
            // A frozen page is being torn down: it is not handed out either.
            if !word.is_free() || word.is_frozen() {
                return Err(());
            }
            // Takers that will be refused may be in the count; they take back what they added.
            Ok(Word((word.0 & !FREE) + ONE_REFERENCE))
        })
        .is_ok()
    }

    /// Stops new holds, if there are exactly `references` of them and no pin.
    /// Returns whether it did; of several who try, one succeeds. Beside a taker that is about to be
    /// refused because of [`MAX_HOLDS`] it may fail although the numbers are right.
    #[must_use = "it may not have happened"]
    pub fn freeze(self, references: u32) -> bool {
        // Acquire pairs with the Release in `give_back`: who tears down sees all that holders did.
        self.update(Ordering::Acquire, |word| {
            if word.is_frozen() || word.references() != references || word.pins() != 0 {
                return Err(());
            }
            Ok(Word(word.0 | FROZEN))
        })
        .is_ok()
    }

    /// Lets holds be taken again. Returns whether the page was frozen.
    #[must_use = "it may not have happened"]
    pub fn thaw(self) -> bool {
        // Release pairs with the Acquire in `take`: the next holder sees what was done meanwhile.
        self.update(Ordering::Release, |word| {
            if !word.is_frozen() {
                return Err(());
            }
            Ok(Word(word.0 & !FROZEN))
        })
        .is_ok()
    }

    /// Puts the content from state `from` to state `to`. Of several who try, one succeeds.
    ///
    /// # Errors
    /// [`AdvanceError::Found`] if the page is in another state, [`AdvanceError::Illegal`] if
    /// [`Content::may_become`] knows no such step; then nothing has changed.
    pub fn advance(self, from: Content, to: Content) -> Result<(), AdvanceError> {
        if !from.may_become(to) {
            return Err(AdvanceError::Illegal { from, to });
        }
        // Acquire and Release: who sees the new state sees the bytes behind it, and who leaves the
        // old one has seen the bytes behind that.
        self.update(Ordering::AcqRel, |word| {
            let found = word.content();
            if found == from {
                Ok(word.with_content(to))
            } else {
                Err(AdvanceError::Found { expected: from, found })
            }
        })
        .map(|_| ())
    }

    /// Replaces the word by what `next` makes of it; returns the word before and after.
    fn update<E>(
        self,
        success: Ordering,
        mut next: impl FnMut(Word) -> Result<Word, E>,
    ) -> Result<(Word, Word), E> {
        // Relaxed: what is read here is only a guess that the exchange below confirms.
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

    fn with_folio(kind: MemoryKind, check: impl FnOnce(Folio<'_>)) {
        let page = Page::new(());
        check(Folio::new(&page, Word::initial(kind)));
    }

    #[test]
    fn memory_that_was_never_written_is_an_initialised_descriptor() {
        for kind in MemoryKind::ALL {
            with_folio(kind, |folio| {
                let word = folio.word();
                assert_eq!(word, Word::initial(kind));
                assert_eq!(word.references(), kind.initial_references());
                assert_eq!(word.pins(), 0);
                assert_eq!(word.content(), Content::Unknown);
                assert!(word.is_reserved() && !word.is_frozen());
                assert_eq!(word.is_free(), kind != MemoryKind::Generic);
            });
        }
    }

    #[test]
    fn a_free_page_gives_no_hold_until_its_owner_takes_the_first() {
        with_folio(MemoryKind::Private, |folio| {
            assert_eq!(folio.try_get(), Err(HoldError::Free));
            assert_eq!(folio.try_pin(), Err(HoldError::Free));
            assert_eq!(folio.try_get_many(MAX_HOLDS), Err(HoldError::Free));
            assert!(folio.take_first());
            assert!(!folio.take_first());
            assert_eq!(folio.try_get(), Ok(()));
            assert_eq!(folio.word().references(), 2);
            assert_eq!(folio.put(), Ok(Released::Held));
            assert_eq!(folio.put(), Ok(Released::Last));
            assert_eq!(folio.word(), Word::initial(MemoryKind::Private));
        });
    }

    #[test]
    fn a_pin_outlives_the_last_reference_and_frees_the_page_when_it_goes() {
        with_folio(MemoryKind::FsDax, |folio| {
            assert!(folio.take_first());
            assert_eq!(folio.try_pin(), Ok(()));
            assert_eq!(folio.put(), Ok(Released::Held));
            assert!(!folio.word().is_free());
            assert_eq!(folio.unpin(), Ok(Released::Last));
            assert!(folio.word().is_free());
        });
    }

    #[test]
    fn holds_beyond_the_most_are_refused_and_change_nothing() {
        with_folio(MemoryKind::Generic, |folio| {
            assert_eq!(folio.try_get_many(MAX_HOLDS), Err(HoldError::Overflow));
            assert_eq!(folio.try_get_many(u32::MAX), Err(HoldError::Overflow));
            assert_eq!(folio.try_get_many(MAX_HOLDS - 1), Ok(()));
            let full = folio.word();
            assert_eq!(full.references(), MAX_HOLDS);
            assert_eq!(folio.try_get(), Err(HoldError::Overflow));
            assert_eq!(folio.try_get_many(MAX_OPTIMISTIC), Err(HoldError::Overflow));
            assert_eq!(folio.word(), full);
            assert_eq!(folio.try_pin_many(MAX_HOLDS), Ok(()));
            assert_eq!(folio.try_pin(), Err(HoldError::Overflow));
            assert_eq!(folio.word().pins(), MAX_HOLDS);
            assert_eq!(folio.word().references(), MAX_HOLDS);
            assert_eq!(folio.word().content(), Content::Unknown);
            assert_eq!(folio.unpin_many(MAX_HOLDS), Ok(Released::Held));
            assert_eq!(folio.put_many(MAX_HOLDS), Ok(Released::Last));
            assert_eq!(folio.word(), Word::initial(MemoryKind::Generic), "its base reference");
        });
    }

    #[test]
    fn giving_back_what_is_not_held_is_an_error_and_changes_nothing() {
        with_folio(MemoryKind::Generic, |folio| {
            let before = folio.word();
            assert_eq!(
                folio.unpin(),
                Err(ReleaseError::NotHeld { what: "pins", given: 1, held: 0 })
            );
            assert_eq!(
                folio.put_many(2),
                Err(ReleaseError::NotHeld { what: "references", given: 2, held: 1 })
            );
            assert_eq!(folio.word(), before);
        });
        with_folio(MemoryKind::Coherent, |folio| {
            assert_eq!(
                folio.put(),
                Err(ReleaseError::NotHeld { what: "references", given: 1, held: 0 })
            );
            assert!(folio.word().is_free());
        });
    }

    #[test]
    fn a_frozen_page_gives_no_hold_and_thaws_as_it_was() {
        with_folio(MemoryKind::Generic, |folio| {
            let before = folio.word();
            assert!(!folio.freeze(0));
            assert!(folio.freeze(1));
            assert!(!folio.freeze(1));
            assert_eq!(folio.try_get(), Err(HoldError::Frozen));
            assert_eq!(folio.try_pin(), Err(HoldError::Frozen));
            assert_eq!(folio.try_get_many(1000), Err(HoldError::Frozen));
            assert_eq!(folio.put(), Err(ReleaseError::Frozen), "the freezer has the holds");
            assert!(folio.thaw());
            assert!(!folio.thaw());
            assert_eq!(folio.word(), before);
            assert_eq!(folio.try_pin(), Ok(()));
            assert!(!folio.freeze(1), "a pinned page does not freeze");
        });
        with_folio(MemoryKind::Private, |folio| {
            assert!(folio.freeze(0), "a free page freezes");
            assert!(!folio.take_first(), "and is not handed out while it is frozen");
            assert!(folio.thaw());
            assert!(folio.take_first());
        });
    }

    #[test]
    fn a_content_step_succeeds_once_and_only_along_the_table() {
        with_folio(MemoryKind::Generic, |folio| {
            assert_eq!(
                folio.advance(Content::Unknown, Content::Filling),
                Err(AdvanceError::Illegal { from: Content::Unknown, to: Content::Filling })
            );
            assert_eq!(folio.advance(Content::Unknown, Content::Zeroing), Ok(()));
            assert_eq!(
                folio.advance(Content::Unknown, Content::Zeroing),
                Err(AdvanceError::Found { expected: Content::Unknown, found: Content::Zeroing })
            );
            assert_eq!(folio.advance(Content::Zeroing, Content::Zero), Ok(()));
            assert_eq!(folio.word().content(), Content::Zero);
            assert_eq!(folio.word().references(), 1);
        });
    }

    #[test]
    fn taking_or_giving_back_nothing_changes_nothing() {
        with_folio(MemoryKind::Generic, |folio| {
            let before = folio.word();
            assert_eq!(folio.try_get_many(0), Ok(()));
            assert_eq!(folio.put_many(0), Ok(Released::Held));
            assert_eq!(folio.word(), before);
        });
    }
}

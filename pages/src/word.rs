//! The state of a page that changes while several threads use it: [`Word`], 64 bits.
//!
//! ```text
//!  63         59 58    56 55                     28 27                      0
//! ┌─────────────┬────────┬─────────────────────────┬─────────────────────────┐
//! │    flags    │content │          pins           │       references        │
//! └─────────────┴────────┴─────────────────────────┴─────────────────────────┘
//!   59 poison_pending   60 reserved   61 unused   62 free   63 partly poisoned
//! ```
//!
//! | references or pins | meaning |
//! |---|---|
//! | 0 | no hold of this kind |
//! | 1 to [`MAX_HOLDS`] | so many holders |
//! | above, to 2^28 - 1 | the overflow band: a taker who lands here gives it back and is refused |
//!
//! Takers add first and look afterwards, so a count may be too high for a moment by as many as there
//! are threads in the middle of that; the band is wider than the number of threads Linux can run
//! (2^22).
//!
//! This file is the bits; the atomic steps are in `folio.rs`.

use core::fmt;

use crate::content::Content;
use crate::kind::MemoryKind;

const COUNT_BITS: u32 = 28;
pub(crate) const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
pub(crate) const PINS_SHIFT: u32 = COUNT_BITS;
const CONTENT_SHIFT: u32 = 2 * COUNT_BITS;
const CONTENT_MASK: u64 = 0x7;

pub(crate) const POISON_PENDING: u64 = 1 << 59;
const RESERVED: u64 = 1 << 60;
pub(crate) const FREE: u64 = 1 << 62;
pub(crate) const PARTLY_POISONED: u64 = 1 << 63;

/// The most references, and the most pins, that a folio may have.
pub const MAX_HOLDS: u32 = (1 << (COUNT_BITS - 1)) - 1;

const _: () = assert!(CONTENT_SHIFT + CONTENT_MASK.count_ones() == POISON_PENDING.trailing_zeros());
// 2^22 threads that add a hold before they look stay inside the band.
const _: () = assert!(1_u64 << 22 <= COUNT_MASK - MAX_HOLDS as u64);

/// The two sorts of hold.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum HoldKind {
    /// It keeps a descriptor's meaning.
    Reference,
    /// It keeps a page in place, so that a device may read and write its bytes.
    Pin,
}

impl HoldKind {
    /// Returns one hold of this sort, as it is added to a word whose pins begin at bit
    /// `pins_shift`.
    pub(crate) const fn one(self, pins_shift: u32) -> u64 {
        match self {
            Self::Reference => 1,
            Self::Pin => 1 << pins_shift,
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Reference => "references",
            Self::Pin => "pins",
        }
    }

    pub(crate) const fn count(self, word: Word) -> u32 {
        match self {
            Self::Reference => word.references(),
            Self::Pin => word.pins(),
        }
    }

    /// Returns the count as it stands in the word, with takers that will be refused.
    pub(crate) const fn raw_count(self, word: Word) -> u64 {
        match self {
            Self::Reference => word.0 & COUNT_MASK,
            Self::Pin => (word.0 >> PINS_SHIFT) & COUNT_MASK,
        }
    }
}

/// A page's word as it was at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Word(pub(crate) u64);

impl Word {
    /// Returns the word that a page of `kind` has before its first use: reserved, its content
    /// unknown, and free or with its base reference.
    #[must_use]
    pub const fn initial(kind: MemoryKind) -> Self {
        match kind.initial_references() {
            0 => Self(RESERVED | FREE),
            references => Self(RESERVED | references as u64),
        }
    }

    /// Returns the word of a tail, which has no holds: they are on its head.
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

    /// Returns how many references there are. Of a page that has the most it may
    /// have, takers that are about to be refused are counted for a moment.
    #[must_use]
    pub const fn references(self) -> u32 {
        if self.is_free() { 0 } else { (self.0 & COUNT_MASK) as u32 }
    }

    /// Returns how many pins there are. Of a page that has the most it may have, takers
    /// that are about to be refused are counted for a moment.
    #[must_use]
    pub const fn pins(self) -> u32 {
        if self.is_free() { 0 } else { ((self.0 >> PINS_SHIFT) & COUNT_MASK) as u32 }
    }

    /// Returns the state of the page's bytes.
    #[must_use]
    pub const fn content(self) -> Content {
        Content::from_bits(self.0 >> CONTENT_SHIFT)
    }

    /// Returns whether the page waits for its first reference.
    #[must_use]
    pub const fn is_free(self) -> bool {
        self.0 & FREE != 0
    }

    /// Returns whether the page went bad while a thread was replacing its bytes: it becomes poisoned
    /// when that thread has done.
    #[must_use]
    pub const fn is_poison_pending(self) -> bool {
        self.0 & POISON_PENDING != 0
    }

    /// Returns whether some page of the folio is bad, and which, has to be looked up.
    #[must_use]
    pub const fn is_partly_poisoned(self) -> bool {
        self.0 & PARTLY_POISONED != 0
    }

    /// Returns the word with the holds that lie on the block of a base page, up to the most that the
    /// counts take.
    pub(crate) const fn with_more(self, references: u32, pins: u32) -> Self {
        if self.is_free() {
            return self;
        }
        let references = sum(HoldKind::Reference.raw_count(self), references);
        let pins = sum(HoldKind::Pin.raw_count(self), pins);
        let others = self.0 & !(COUNT_MASK | COUNT_MASK << PINS_SHIFT);
        Self(others | references | pins << PINS_SHIFT)
    }

    pub(crate) const fn with_content(self, content: Content) -> Self {
        Self(self.0 & !(CONTENT_MASK << CONTENT_SHIFT) | content.to_bits() << CONTENT_SHIFT)
    }
}

const fn sum(count: u64, more: u32) -> u64 {
    let sum = count + more as u64;
    if sum > COUNT_MASK { COUNT_MASK } else { sum }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Word")
            .field("references", &self.references())
            .field("pins", &self.pins())
            .field("content", &self.content())
            .field("reserved", &(self.0 & RESERVED != 0))
            .field("free", &self.is_free())
            .field("poison_pending", &self.is_poison_pending())
            .field("partly_poisoned", &self.is_partly_poisoned())
            .finish()
    }
}

//! The state of the bytes of a page: [`Content`], and which state may follow which.
//!
//! There is one state per page, in the page's own word, and everything that cares about bytes asks
//! it: zeroing, hand-out, faults, poison and unbind. This file is the table; the atomic step that
//! takes it is [`Folio::advance`](crate::Folio::advance).
//!
//! ```text
//!   Unknown ──► Zeroing ──► Zero ──► Present ──► Zeroing …        memory that is handed out
//!   Absent  ──► Filling ──► Present ──► Removed ──► Absent …      memory that is mapped lazily
//!   any     ──► Poisoned ──► Unknown, Absent                      memory that went bad
//! ```

use core::fmt;

/// The state of the bytes of a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Content {
    /// Nothing is known: bytes of an earlier owner may be there. It must not be handed out.
    Unknown = 0,
    /// There is no page yet: a fault has to produce it.
    Absent = 1,
    /// One owner is producing the bytes; readers wait.
    Filling = 2,
    /// The bytes are there and belong to the holder of the page.
    Present = 3,
    /// One owner is clearing the bytes; they are neither old nor zero.
    Zeroing = 4,
    /// Every byte is zero. The only state from which a page is handed out.
    Zero = 5,
    /// The page was given back to the kernel: it reads as zeroes until it is filled again.
    Removed = 6,
    /// The bytes are lost. They are never read and never handed out.
    Poisoned = 7,
}

impl Content {
    /// Every state.
    pub const ALL: [Self; 8] = [
        Self::Unknown,
        Self::Absent,
        Self::Filling,
        Self::Present,
        Self::Zeroing,
        Self::Zero,
        Self::Removed,
        Self::Poisoned,
    ];

    /// Returns the number of this state, 0 to 7, as it stands in the page's word.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        self as u64
    }

    /// Takes the number of a state from the low three bits.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        match bits & 7 {
            0 => Self::Unknown,
            1 => Self::Absent,
            2 => Self::Filling,
            3 => Self::Present,
            4 => Self::Zeroing,
            5 => Self::Zero,
            6 => Self::Removed,
            _ => Self::Poisoned,
        }
    }

    /// Returns whether a page in this state may be pinned: its bytes are there, readable by any holder, and
    /// no thread is about to replace them. A page that is pinned does not leave these states, except by
    /// going bad.
    ///
    /// A page that is known to be zero is not among them: the holder of a pin may write to it, so
    /// it is *present* from before the first pin on.
    #[must_use]
    pub const fn is_pinnable(self) -> bool {
        matches!(self, Self::Unknown | Self::Present)
    }

    /// Returns whether one owner is at work on the bytes of a page in this state; no other thread
    /// changes the state until the owner has finished.
    #[must_use]
    pub const fn is_owned(self) -> bool {
        matches!(self, Self::Filling | Self::Zeroing)
    }

    /// Returns whether a page in this state may be put in state `next`.
    ///
    /// A state never follows itself: a step has one owner, and the second who tries must see that
    /// it came too late.
    #[must_use]
    pub const fn may_become(self, next: Self) -> bool {
        use Content::{Absent, Filling, Poisoned, Present, Removed, Unknown, Zero, Zeroing};
        match (self, next) {
            // Memory that was just bound: clear it, take it as it is, or learn that it is empty.
            (Unknown, Absent | Present | Zeroing | Zero) => true,
            // A fault begins, or the kernel had the bytes without a fault; or the kernel is known to
            // supply zeroes.
            (Absent, Filling | Present | Zero) => true,
            // A fault ends: bytes, zeroes, or a failure that leaves the page absent.
            (Filling, Present | Zero | Absent) => true,
            // Released, evicted, or given back by its user.
            (Present, Zeroing | Absent | Removed | Unknown) => true,
            // Cleared, or cancelled half-way: then nothing is known about the bytes.
            (Zeroing, Zero | Unknown) => true,
            // Handed out, evicted, or given back.
            (Zero, Present | Absent | Removed) => true,
            // Touched again, as zeroes or through a fault.
            (Removed, Absent | Filling | Zero) => true,
            // Unpoisoned: its bytes are unknown, or have to be produced anew.
            (Poisoned, Unknown | Absent) => true,
            (Poisoned, _) => false,
            (_, Poisoned) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "unknown",
            Self::Absent => "absent",
            Self::Filling => "being filled",
            Self::Present => "present",
            Self::Zeroing => "being cleared",
            Self::Zero => "zero",
            Self::Removed => "removed",
            Self::Poisoned => "poisoned",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Content::{Absent, Filling, Poisoned, Present, Removed, Unknown, Zero, Zeroing};
    use super::*;

    #[test]
    fn every_state_survives_the_way_through_its_bits() {
        for content in Content::ALL {
            assert_eq!(Content::from_bits(content.to_bits()), content);
        }
    }

    // Old bytes reach a new owner only through Zero or a fill: nothing that is being cleared,
    // removed or poisoned becomes Present at once.
    #[test]
    fn the_legal_steps_are_exactly_the_table() {
        let rows: [(Content, &[Content]); 8] = [
            (Unknown, &[Absent, Present, Zeroing, Zero, Poisoned]),
            (Absent, &[Filling, Present, Zero, Poisoned]),
            (Filling, &[Present, Zero, Absent, Poisoned]),
            (Present, &[Zeroing, Absent, Removed, Unknown, Poisoned]),
            (Zeroing, &[Zero, Unknown, Poisoned]),
            (Zero, &[Present, Absent, Removed, Poisoned]),
            (Removed, &[Absent, Filling, Zero, Poisoned]),
            (Poisoned, &[Unknown, Absent]),
        ];
        for (from, followers) in rows {
            for next in Content::ALL {
                let is_legal = followers.contains(&next);
                assert_eq!(from.may_become(next), is_legal, "{from:?} to {next:?}");
            }
        }
    }
}

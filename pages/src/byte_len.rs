//! Lengths in bytes, and how they are written: `4096`, `4K`, `2M`, `1G`.
//!
//! Units: bytes, in powers of two.
//! Cost: one instruction; reading and writing as text allocates nothing.

use core::fmt;
use core::num::ParseIntError;
use core::str::FromStr;

use crate::addr::AddrError;

/// A length in bytes.
///
/// It is written and read in powers of two: `4096`, `4K`, `4KiB`, `2M`, `1G`, `16T`. Display gives
/// IEC units, exact where the number is a whole multiple and with one decimal where it is not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct ByteLen(u64);

impl ByteLen {
    /// No byte.
    pub const ZERO: Self = Self(0);

    /// Takes a number of bytes.
    #[must_use]
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Takes a number of KiB.
    ///
    /// # Panics
    /// If that is not a 64-bit number of bytes.
    #[must_use]
    pub const fn kib(kib: u64) -> Self {
        Self::scaled(kib, 10)
    }

    /// Takes a number of MiB.
    ///
    /// # Panics
    /// If that is not a 64-bit number of bytes.
    #[must_use]
    pub const fn mib(mib: u64) -> Self {
        Self::scaled(mib, 20)
    }

    /// Takes a number of GiB.
    ///
    /// # Panics
    /// If that is not a 64-bit number of bytes.
    #[must_use]
    pub const fn gib(gib: u64) -> Self {
        Self::scaled(gib, 30)
    }

    /// Takes a number of TiB.
    ///
    /// # Panics
    /// If that is not a 64-bit number of bytes.
    #[must_use]
    pub const fn tib(tib: u64) -> Self {
        Self::scaled(tib, 40)
    }

    const fn scaled(number: u64, shift: u32) -> Self {
        assert!(number <= u64::MAX >> shift, "a length beyond 64 bits");
        Self(number << shift)
    }

    /// Returns the number of bytes.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns whether this is no byte at all.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Returns this length as an index into memory of this process.
    ///
    /// # Errors
    /// [`AddrError::Overflow`] where `usize` is too small for it.
    pub fn to_usize(self) -> Result<usize, AddrError> {
        usize::try_from(self.0).map_err(|_| AddrError::Overflow {
            value: self.0,
            operation: "as usize, at most",
            operand: usize::MAX as u64,
        })
    }

    /// Returns the sum of two lengths.
    ///
    /// # Errors
    /// [`AddrError::Overflow`] beyond 64 bits.
    pub const fn checked_add(self, other: Self) -> Result<Self, AddrError> {
        match self.0.checked_add(other.0) {
            Some(sum) => Ok(Self(sum)),
            None => Err(AddrError::Overflow { value: self.0, operation: "+", operand: other.0 }),
        }
    }

    /// Returns the smallest multiple of `align` that is at least this length.
    ///
    /// # Errors
    /// [`AddrError::Overflow`] beyond 64 bits.
    ///
    /// # Panics
    /// If `align` is no power of two.
    pub const fn align_up(self, align: u64) -> Result<Self, AddrError> {
        assert!(align.is_power_of_two(), "an alignment that is no power of two");
        match self.checked_add(Self(align - 1)) {
            Ok(sum) => Ok(Self(sum.0 & !(align - 1))),
            Err(error) => Err(error),
        }
    }
}

/// A unit of bytes: its power of two, and its names.
const UNITS: [(u32, char, &str); 6] = [
    (60, 'E', "EiB"),
    (50, 'P', "PiB"),
    (40, 'T', "TiB"),
    (30, 'G', "GiB"),
    (20, 'M', "MiB"),
    (10, 'K', "KiB"),
];

impl fmt::Display for ByteLen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, _, name) in UNITS {
            if self.0 >> shift == 0 {
                continue;
            }
            let whole = self.0 >> shift;
            let rest = self.0 & ((1 << shift) - 1);
            // The first decimal, rounded down: a length is never shown larger than it is.
            let tenths = (u128::from(rest) * 10) >> shift;
            return if tenths == 0 {
                write!(f, "{whole} {name}")
            } else {
                write!(f, "{whole}.{tenths} {name}")
            };
        }
        write!(f, "{} B", self.0)
    }
}

/// A text that is no length in bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseByteLenError {
    /// There is no number in front of the unit.
    #[error("a size is a whole number of bytes with an optional unit, such as 4096, 4K, 2M or 1G")]
    Number(#[source] ParseIntError),
    /// The unit is none of K, M, G, T, P, E, each also written as KiB and so on.
    #[error("the unit of a size is one of K, M, G, T, P, E (powers of two)")]
    Unit,
    /// The number of bytes does not fit in 64 bits.
    #[error("the size does not fit in 64 bits")]
    TooLarge,
}

impl FromStr for ByteLen {
    type Err = ParseByteLenError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(ParseByteLenError::Number)?;
        let shift = if unit.is_empty() || unit == "B" {
            0
        } else {
            UNITS
                .iter()
                .find(|(_, letter, name)| {
                    let mut chars = unit.chars();
                    let is_letter = chars.next().is_some_and(|c| c.eq_ignore_ascii_case(letter))
                        && chars.next().is_none();
                    is_letter || unit == *name
                })
                .map(|(shift, ..)| *shift)
                .ok_or(ParseByteLenError::Unit)?
        };
        if number > u64::MAX >> shift {
            return Err(ParseByteLenError::TooLarge);
        }
        Ok(Self(number << shift))
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::string::ToString;

    #[test]
    fn a_size_is_read_in_powers_of_two_and_written_in_iec_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4K", 4096),
            ("4k", 4096),
            ("4KiB", 4096),
            ("2M", 2 << 20),
            ("1G", 1 << 30),
            ("16T", 16 << 40),
            ("15E", 15 << 60),
            ("7B", 7),
        ] {
            assert_eq!(text.parse(), Ok(ByteLen::new(bytes)), "{text}");
        }
        for text in ["", "K", "-1", "1.5G", "1X", "1KB", "1KiBs", "99999999999999999999", "16E"] {
            assert!(text.parse::<ByteLen>().is_err(), "{text}");
        }
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1 << 30, "1 GiB"),
            ((1 << 30) + (1 << 29), "1.5 GiB"),
            ((1 << 30) - 1, "1023.9 MiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(ByteLen::new(bytes).to_string(), text);
        }
        assert!(ByteLen::new(u64::MAX).align_up(4096).is_err());
        assert_eq!(ByteLen::new(1).align_up(4096), Ok(ByteLen::new(4096)));
    }
}

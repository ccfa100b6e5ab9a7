//! Lengths in bytes, and how they are written: `4096`, `4K`, `2M`, `1.5G`.
//!
//! Units: bytes, in powers of two.
//! Cost: one instruction; reading a rounded length as text allocates a few bytes; nothing else allocates.

use alloc::format;
use core::fmt;
use core::num::{IntErrorKind, ParseIntError};
use core::str::FromStr;

use crate::addr::AddrError;

/// A length in bytes.
///
/// It is read in powers of two: `4096`, `4K`, `4KiB`, `2M`, `1.5G`, `16T`.
///
/// Display gives exactly this length in IEC units, and its text is read back as the same length:
/// `4 KiB`, `1.5 GiB`, `4097 B`, and `23.4 GiB (25203896321 B)` where no short number is exact. With
/// a precision it gives one decimal, rounded: `format!("{len:.1}")` is `23.4 GiB`.
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

/// A unit of bytes: its power of two, and its name.
const UNITS: [(u32, &str); 6] =
    [(60, "EiB"), (50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];

/// A whole number of at most this is shown in a smaller unit, rather than rounded in a larger one.
const SHORT: u64 = 99_999;

impl fmt::Display for ByteLen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Tenths of a unit, rounded. A length that rounds up to 1024 units is one of the next.
        let tenths = |shift: u32| (u128::from(self.0) * 10 + (1 << shift >> 1)) >> shift;
        let unit = UNITS.into_iter().find(|(shift, _)| tenths(shift - 10) >= 10 * 1024);
        let Some((shift, name)) = unit else {
            return write!(f, "{} B", self.0);
        };
        let tenths = tenths(shift);
        let is_exact = tenths << shift == u128::from(self.0) * 10;
        let (whole, tenth) = (tenths / 10, tenths % 10);
        if !is_exact && f.precision().is_none() {
            let short = UNITS
                .into_iter()
                .chain([(0, "B")])
                .find(|(shift, _)| (self.0 >> shift) << shift == self.0)
                .filter(|(shift, _)| self.0 >> shift <= SHORT);
            return match short {
                Some((shift, name)) => write!(f, "{} {name}", self.0 >> shift),
                None => write!(f, "{whole}.{tenth} {name} ({} B)", self.0),
            };
        }
        if tenth == 0 && is_exact {
            write!(f, "{whole} {name}")
        } else {
            write!(f, "{whole}.{tenth} {name}")
        }
    }
}

impl FromStr for ByteLen {
    type Err = AddrError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some((rounded, bytes)) =
            text.strip_suffix(')').and_then(|text| text.split_once(" ("))
        {
            let exact: Self = bytes.parse()?;
            let is_same = format!("{exact:.1}") == rounded;
            return if is_same { Ok(exact) } else { Err(AddrError::SizesDiffer) };
        }
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let (digits, fraction) = match number.split_once('.') {
            Some((digits, fraction)) => (digits, Some(fraction)),
            None => (number, None),
        };
        let whole: u64 = digits.parse().map_err(|error: ParseIntError| match error.kind() {
            IntErrorKind::PosOverflow => AddrError::SizeTooLarge,
            _ => AddrError::NoNumber,
        })?;
        let unit = unit.strip_prefix(' ').unwrap_or(unit);
        let shift = if unit.is_empty() || unit == "B" {
            0
        } else {
            UNITS
                .iter()
                .find(|(_, name)| unit == *name || unit.eq_ignore_ascii_case(&name[..1]))
                .map(|(shift, _)| *shift)
                .ok_or(AddrError::BadUnit)?
        };
        let fraction = fraction.map_or(Ok(0), |digits| fraction_bytes(digits, shift))?;
        if whole > u64::MAX >> shift {
            return Err(AddrError::SizeTooLarge);
        }
        // The fraction is less than one unit, so it lies in the bits that the shift left free.
        Ok(Self((whole << shift) + fraction))
    }
}

/// Returns how many bytes the digits behind the point are, of a unit of `1 << shift` bytes.
fn fraction_bytes(digits: &str, shift: u32) -> Result<u64, AddrError> {
    let digits = match digits.trim_end_matches('0') {
        "" if !digits.is_empty() => "0",
        digits => digits,
    };
    // `parse` takes a sign, which stands nowhere but in front of a number.
    let number: u64 = match digits.parse() {
        Ok(number) if !digits.contains('.') => number,
        Ok(_) => return Err(AddrError::Fraction),
        Err(_) => return Err(AddrError::NoNumber),
    };
    // A number of more digits has more binary places than any unit.
    let power = u32::try_from(digits.len()).ok().filter(|digits| *digits <= 18);
    let divisor = u128::from(10_u64.pow(power.ok_or(AddrError::Fraction)?));
    let bytes = u128::from(number) << shift;
    if !bytes.is_multiple_of(divisor) {
        return Err(AddrError::Fraction);
    }
    // Less than one unit, which is at most 2^60 bytes.
    u64::try_from(bytes / divisor).map_err(|_| AddrError::SizeTooLarge)
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::string::ToString;

    const MIB: u64 = 1 << 20;

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
            ("1.5G", 3 << 29),
            ("1.50GiB", 3 << 29),
            ("0.25 M", 256 << 10),
            ("2.0K", 2048),
            ("7.0", 7),
            ("4097 B", 4097),
            ("1.0 GiB (1073741823 B)", (1 << 30) - 1),
        ] {
            assert_eq!(text.parse(), Ok(ByteLen::new(bytes)), "{text}");
        }
        for text in [
            "",
            "K",
            "-1",
            "1X",
            "1KB",
            "1KiBs",
            "99999999999999999999",
            "16E",
            "1.",
            ".5G",
            "1.5",
            "0.3G",
            "1.5.5G",
            "1.+5G",
            "1.0000000000000000000001G",
            "1  K",
            "4 KiB (4097 B)",
            "4.0 KiB (4 KiB",
            "()",
            "15.99999999999999999999E",
        ] {
            assert!(text.parse::<ByteLen>().is_err(), "{text}");
        }
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1 << 30, "1 GiB"),
            ((1 << 30) + (1 << 29), "1.5 GiB"),
            (4097, "4097 B"),
            (5 << 28, "1280 MiB"),
            ((1 << 30) - 1, "1.0 GiB (1073741823 B)"),
            (1_000_000, "976.6 KiB (1000000 B)"),
            (u64::MAX, "16.0 EiB (18446744073709551615 B)"),
        ] {
            assert_eq!(ByteLen::new(bytes).to_string(), text);
        }
        for (bytes, text) in [
            (1023, "1023 B"),
            (4096, "4 KiB"),
            (4097, "4.0 KiB"),
            (2 * MIB - 1, "2.0 MiB"),
            (1024 * MIB - 1, "1.0 GiB"),
            (1024 * MIB - 51 * 1024, "1.0 GiB"),
            (1024 * MIB - 52 * 1024, "1023.9 MiB"),
            (MIB - 1, "1.0 MiB"),
        ] {
            assert_eq!(std::format!("{:.1}", ByteLen::new(bytes)), text);
        }
        assert!(ByteLen::new(u64::MAX).align_up(4096).is_err());
        assert_eq!(ByteLen::new(1).align_up(4096), Ok(ByteLen::new(4096)));
    }
}

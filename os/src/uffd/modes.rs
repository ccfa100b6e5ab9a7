//! Which faults of memory are reported: [`Modes`].

use core::fmt;

use crate::uffd::abi;

/// Which faults of a range are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Modes {
    /// Pages that are missing.
    pub missing: bool,
    /// Pages that the page cache has and that are not mapped.
    pub minor: bool,
    /// Writes to pages that are protected.
    pub write_protect: bool,
}

impl Modes {
    /// Missing pages alone.
    pub const MISSING: Self = Self { missing: true, minor: false, write_protect: false };
    /// Pages of the page cache that are not mapped, alone.
    pub const MINOR: Self = Self { missing: false, minor: true, write_protect: false };

    pub(crate) const fn bits(self) -> u64 {
        let mut bits = 0;
        if self.missing {
            bits |= abi::MODE_MISSING;
        }
        if self.minor {
            bits |= abi::MODE_MINOR;
        }
        if self.write_protect {
            bits |= abi::MODE_WP;
        }
        bits
    }
}

impl fmt::Display for Modes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (self.missing, "missing"),
            (self.minor, "minor"),
            (self.write_protect, "write-protect"),
        ];
        let names: Vec<_> =
            names.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name).collect();
        f.write_str(if names.is_empty() { "no" } else { "" })?;
        f.write_str(&names.join(" and "))
    }
}

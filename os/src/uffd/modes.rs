//! The faults of memory that are reported: [`Modes`].

use core::fmt;

use bitflags::bitflags;

bitflags! {
    /// The faults of a range that are reported: `UFFDIO_REGISTER_MODE_*`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct Modes: u8 {
        /// Pages that are missing.
        const MISSING = 1;
        /// Pages that the page cache has and that are not mapped.
        const MINOR = 1 << 2;
        /// Writes to pages that are protected.
        const WRITE_PROTECT = 1 << 1;
    }
}

impl fmt::Display for Modes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (Self::MISSING, "missing"),
            (Self::MINOR, "minor"),
            (Self::WRITE_PROTECT, "write-protect"),
        ];
        let names: Vec<_> = names
            .into_iter()
            .filter(|(mode, _)| self.contains(*mode))
            .map(|(_, name)| name)
            .collect();
        f.write_str(if names.is_empty() { "no" } else { "" })?;
        f.write_str(&names.join(" and "))
    }
}

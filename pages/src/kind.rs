//! The kinds of memory a pagemap may describe, and how many references their pages start with.
//!
//! Source: the `MEMORY_DEVICE_*` types of Linux's `memremap.h` and the refcount policy of its
//! device pages: since about 6.15 an unused device page has no reference, except for the
//! generic kind, whose base reference never goes away.

use core::fmt;
use core::str::FromStr;

use crate::addr::AddrError;

/// The kind of memory that a pagemap describes, after Linux's `MEMORY_DEVICE_*`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MemoryKind {
    /// Memory the CPU cannot reach, such as a device's own.
    Private,
    /// Device memory that the CPU reaches coherently.
    Coherent,
    /// Memory behind a file system with direct access.
    FsDax,
    /// A peer device's memory on the bus.
    PciP2pdma,
    /// Memory without an allocator of its own: devdax, and plain memory of this process.
    Generic,
}

impl MemoryKind {
    /// Every kind.
    pub const ALL: [Self; 5] =
        [Self::Private, Self::Coherent, Self::FsDax, Self::PciP2pdma, Self::Generic];

    /// Returns how many references a page of this kind has before the first is taken.
    ///
    /// Zero means that a page is free: its owner gives it the first reference when it hands the
    /// page out. One means a base reference, which comes back when the last user has gone.
    #[must_use]
    pub const fn initial_references(self) -> u32 {
        match self {
            Self::Private | Self::Coherent | Self::FsDax | Self::PciP2pdma => 0,
            Self::Generic => 1,
        }
    }

    /// Returns the name used on command lines and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Coherent => "coherent",
            Self::FsDax => "fsdax",
            Self::PciP2pdma => "p2pdma",
            Self::Generic => "generic",
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for MemoryKind {
    type Err = AddrError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or(AddrError::UnknownKind)
    }
}

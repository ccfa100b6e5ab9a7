//! The words of a mapping: [`Addr`], [`Vaddr`], [`Access`], [`Sharing`], [`Anonymous`].
//!
//! Plain values, without a system call.

use core::fmt;

use uzone_pages::ByteLen;

/// The largest alignment that can be asked for: four times the reach of one entry of a page upper directory.
pub(crate) const MAX_ALIGN: u64 = 4 << 30;

/// An address in this process, for messages and for system calls. It gives no access.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Addr(usize);

impl Addr {
    /// Returns `address` as an address. Nothing need be there.
    #[must_use]
    pub const fn new(address: usize) -> Self {
        Self(address)
    }

    /// Returns the number of the address.
    #[must_use]
    pub const fn get(self) -> usize {
        self.0
    }

    /// Returns whether the address is a multiple of `align`; of zero there is none.
    #[must_use]
    pub const fn is_aligned(self, align: ByteLen) -> bool {
        // A `usize` is 64 bits here: the crate compiles for nothing else.
        !align.is_zero() && (self.0 as u64).is_multiple_of(align.get())
    }
}

impl fmt::Debug for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Addr({:#x})", self.0)
    }
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// An address as the kernel tells it, in this process or another: a number, and no access.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Vaddr(u64);

impl Vaddr {
    /// Takes the number of an address.
    #[must_use]
    pub const fn new(address: u64) -> Self {
        Self(address)
    }

    /// Returns the number of the address.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl From<Addr> for Vaddr {
    fn from(address: Addr) -> Self {
        Self(address.0 as u64)
    }
}

impl fmt::Debug for Vaddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vaddr({:#x})", self.0)
    }
}

impl fmt::Display for Vaddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The advice on huge pages for an anonymous mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum HugeAdvice {
    /// Nothing: the host's setting decides.
    #[default]
    Default,
    /// Never use them (`MADV_NOHUGEPAGE`).
    Never,
    /// Use them (`MADV_HUGEPAGE`). Whether that has an effect is a setting of the host, which
    /// [`hugepages::thp`](crate::host::hugepages::thp) tells.
    Advise,
}

/// Options of an anonymous mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Anonymous {
    /// The advice on huge pages.
    pub huge: HugeAdvice,
    /// Whether the kernel counts the memory when it is mapped, so that a host with strict accounting
    /// refuses then, and not when a page is touched (`MAP_NORESERVE`): then terabytes can be laid out.
    pub is_accounted: bool,
    /// The alignment of the address: a power of two up to 4 GiB. `None` is a host page, or
    /// 2 MiB for a mapping of at least that with [`HugeAdvice::Advise`].
    pub align: Option<ByteLen>,
}

/// The access that a mapping of a file allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reading.
    ReadOnly,
    /// Reading and writing.
    ReadWrite,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReadOnly => "read-only",
            Self::ReadWrite => "writable",
        })
    }
}

/// The destination of writes to a mapping of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sharing {
    /// The file, and its other mappings.
    Shared,
    /// This mapping only: the first write to a page makes a copy of it.
    Private,
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shared => "shared",
            Self::Private => "private",
        })
    }
}

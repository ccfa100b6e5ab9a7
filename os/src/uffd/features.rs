//! What a userfaultfd can do beyond the least: [`Features`], a set of bits with names.

use core::fmt;
use core::ops::BitOr;

/// The names of the feature bits, from bit 0 on, without `UFFD_FEATURE_`, and the release of Linux that
/// brought each (major, minor).
const NAMES: [(&str, (u32, u32)); 17] = [
    ("PAGEFAULT_FLAG_WP", (5, 7)),
    ("EVENT_FORK", (4, 11)),
    ("EVENT_REMAP", (4, 11)),
    ("EVENT_REMOVE", (4, 11)),
    ("MISSING_HUGETLBFS", (4, 11)),
    ("MISSING_SHMEM", (4, 11)),
    ("EVENT_UNMAP", (4, 11)),
    ("SIGBUS", (4, 14)),
    ("THREAD_ID", (4, 14)),
    ("MINOR_HUGETLBFS", (5, 13)),
    ("MINOR_SHMEM", (5, 14)),
    ("EXACT_ADDRESS", (5, 18)),
    ("WP_HUGETLBFS_SHMEM", (5, 19)),
    ("WP_UNPOPULATED", (6, 4)),
    ("POISON", (6, 6)),
    ("WP_ASYNC", (6, 7)),
    ("MOVE", (6, 8)),
];
const _: () = assert!(1 << (NAMES.len() - 1) == linux_raw_sys::general::UFFD_FEATURE_MOVE);

/// A set of features of a userfaultfd, `UFFD_FEATURE_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Features(u64);

impl Features {
    /// All that have a name here.
    pub const NAMED: Self = Self((1 << NAMES.len()) - 1);
    /// No feature: missing pages of anonymous memory alone.
    pub const NONE: Self = Self(0);
    /// Writes to protected pages of anonymous memory raise events.
    pub const WRITE_PROTECT: Self = Self(1);
    /// A child made by fork(2) comes with a userfaultfd of its own. Needs `CAP_SYS_PTRACE`.
    pub const EVENT_FORK: Self = Self(1 << 1);
    /// Moving memory by mremap(2) raises an event.
    pub const EVENT_REMAP: Self = Self(1 << 2);
    /// Giving pages back by madvise(2) raises an event.
    pub const EVENT_REMOVE: Self = Self(1 << 3);
    /// Missing pages of hugetlb memory.
    pub const MISSING_HUGETLB: Self = Self(1 << 4);
    /// Missing pages of shared memory and memory files.
    pub const MISSING_SHMEM: Self = Self(1 << 5);
    /// Unmapping memory raises an event.
    pub const EVENT_UNMAP: Self = Self(1 << 6);
    /// A fault raises `SIGBUS` in its thread, and no event.
    pub const SIGBUS: Self = Self(1 << 7);
    /// A fault carries the id of the waiting thread.
    pub const THREAD_ID: Self = Self(1 << 8);
    /// Minor faults of hugetlb files: pages that exist and are not mapped.
    pub const MINOR_HUGETLB: Self = Self(1 << 9);
    /// Minor faults of memory files: pages that exist and are not mapped.
    pub const MINOR_SHMEM: Self = Self(1 << 10);
    /// A fault carries the address of the byte that was touched, not of its page.
    pub const EXACT_ADDRESS: Self = Self(1 << 11);
    /// Writes to protected pages of hugetlb and shared memory raise events.
    pub const WRITE_PROTECT_SHARED: Self = Self(1 << 12);
    /// Protection covers pages that are not there yet.
    pub const WRITE_PROTECT_ABSENT: Self = Self(1 << 13);
    /// Pages can be made to raise `SIGBUS`.
    pub const POISON: Self = Self(1 << 14);
    /// Writes to protected pages are noted in the page tables, without an event.
    pub const WRITE_PROTECT_ASYNC: Self = Self(1 << 15);
    /// Pages can be moved from elsewhere in the process.
    pub const MOVE: Self = Self(1 << 16);

    /// Takes bits of `UFFD_FEATURE_*`.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the bits.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns whether there is none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns whether all of `others` are among these.
    #[must_use]
    pub const fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// Returns these and `others`.
    #[must_use]
    pub const fn with(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// Returns these without `others`.
    #[must_use]
    pub const fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// Returns the names, without `UFFD_FEATURE_`.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        self.releases().map(|(name, _)| name)
    }

    /// Returns the names, each with the release of Linux that brought it (major, minor).
    pub fn releases(self) -> impl Iterator<Item = (&'static str, (u32, u32))> {
        let bits = self.0;
        let has = move |(bit, _): &(usize, _)| bits & (1 << bit) != 0;
        NAMES.into_iter().enumerate().filter(has).map(|(_, named)| named)
    }

    /// Returns the release of Linux from which on all of these are there (major, minor), where the
    /// architecture supports them; `None` if there is none, or one that has no name here.
    #[must_use]
    pub fn since(self) -> Option<(u32, u32)> {
        let newest = self.releases().map(|(_, release)| release).max();
        newest.filter(|_| self.unnamed().is_empty())
    }

    /// Returns those that have no name here: features of a newer kernel.
    #[must_use]
    pub const fn unnamed(self) -> Self {
        self.without(Self::NAMED)
    }
}

impl BitOr for Features {
    type Output = Self;

    fn bitor(self, others: Self) -> Self {
        self.with(others)
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut is_first = true;
        for name in self.names() {
            let separator = if is_first { "" } else { ", " };
            write!(f, "{separator}{name}")?;
            is_first = false;
        }
        let unnamed = self.unnamed();
        if !unnamed.is_empty() {
            let separator = if is_first { "" } else { ", " };
            write!(f, "{separator}{:#x}", unnamed.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux_raw_sys::general as kernel;

    #[test]
    fn every_feature_has_the_kernels_bit_and_name() {
        for (feature, bit, name) in [
            (Features::WRITE_PROTECT, kernel::UFFD_FEATURE_PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP"),
            (Features::EVENT_FORK, kernel::UFFD_FEATURE_EVENT_FORK, "EVENT_FORK"),
            (Features::EVENT_REMAP, kernel::UFFD_FEATURE_EVENT_REMAP, "EVENT_REMAP"),
            (Features::EVENT_REMOVE, kernel::UFFD_FEATURE_EVENT_REMOVE, "EVENT_REMOVE"),
            (
                Features::MISSING_HUGETLB,
                kernel::UFFD_FEATURE_MISSING_HUGETLBFS,
                "MISSING_HUGETLBFS",
            ),
            (Features::MISSING_SHMEM, kernel::UFFD_FEATURE_MISSING_SHMEM, "MISSING_SHMEM"),
            (Features::EVENT_UNMAP, kernel::UFFD_FEATURE_EVENT_UNMAP, "EVENT_UNMAP"),
            (Features::SIGBUS, kernel::UFFD_FEATURE_SIGBUS, "SIGBUS"),
            (Features::THREAD_ID, kernel::UFFD_FEATURE_THREAD_ID, "THREAD_ID"),
            (Features::MINOR_HUGETLB, kernel::UFFD_FEATURE_MINOR_HUGETLBFS, "MINOR_HUGETLBFS"),
            (Features::MINOR_SHMEM, kernel::UFFD_FEATURE_MINOR_SHMEM, "MINOR_SHMEM"),
            (Features::EXACT_ADDRESS, kernel::UFFD_FEATURE_EXACT_ADDRESS, "EXACT_ADDRESS"),
            (
                Features::WRITE_PROTECT_SHARED,
                kernel::UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
                "WP_HUGETLBFS_SHMEM",
            ),
            (Features::WRITE_PROTECT_ABSENT, kernel::UFFD_FEATURE_WP_UNPOPULATED, "WP_UNPOPULATED"),
            (Features::POISON, kernel::UFFD_FEATURE_POISON, "POISON"),
            (Features::WRITE_PROTECT_ASYNC, kernel::UFFD_FEATURE_WP_ASYNC, "WP_ASYNC"),
            (Features::MOVE, kernel::UFFD_FEATURE_MOVE, "MOVE"),
        ] {
            assert_eq!(feature.bits(), u64::from(bit), "{name}");
            assert_eq!(feature.to_string(), name);
        }
    }

    #[test]
    fn a_set_is_shown_by_names_and_what_has_none_by_its_bits() {
        let set = Features::POISON | Features::EVENT_FORK | Features::from_bits(1 << 40);
        assert_eq!(set.to_string(), "EVENT_FORK, POISON, 0x10000000000");
        assert_eq!(set.unnamed(), Features::from_bits(1 << 40));
        assert!(set.contains(Features::POISON) && !set.contains(Features::POISON | Features::MOVE));
        assert_eq!(set.without(set), Features::NONE);
        assert_eq!(Features::NONE.to_string(), "");
    }

    #[test]
    fn a_set_is_as_new_as_its_newest_feature() {
        let set = Features::POISON | Features::EVENT_FORK;
        assert_eq!(set.since(), Some((6, 6)));
        assert_eq!((set | Features::from_bits(1 << 40)).since(), None);
        assert_eq!((Features::NONE.since(), Features::NAMED.since()), (None, Some((6, 8))));
    }
}

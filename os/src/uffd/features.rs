//! The abilities of a userfaultfd beyond the least: [`Features`], a set of bits with names.

use core::fmt;

use bitflags::bitflags;
use linux_raw_sys::general as kernel;

/// The features, each with its name without `UFFD_FEATURE_` and the release of Linux that brought
/// it (major, minor).
const NAMES: [(u32, &str, (u32, u32)); 17] = [
    (kernel::UFFD_FEATURE_PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP", (5, 7)),
    (kernel::UFFD_FEATURE_EVENT_FORK, "EVENT_FORK", (4, 11)),
    (kernel::UFFD_FEATURE_EVENT_REMAP, "EVENT_REMAP", (4, 11)),
    (kernel::UFFD_FEATURE_EVENT_REMOVE, "EVENT_REMOVE", (4, 11)),
    (kernel::UFFD_FEATURE_MISSING_HUGETLBFS, "MISSING_HUGETLBFS", (4, 11)),
    (kernel::UFFD_FEATURE_MISSING_SHMEM, "MISSING_SHMEM", (4, 11)),
    (kernel::UFFD_FEATURE_EVENT_UNMAP, "EVENT_UNMAP", (4, 11)),
    (kernel::UFFD_FEATURE_SIGBUS, "SIGBUS", (4, 14)),
    (kernel::UFFD_FEATURE_THREAD_ID, "THREAD_ID", (4, 14)),
    (kernel::UFFD_FEATURE_MINOR_HUGETLBFS, "MINOR_HUGETLBFS", (5, 13)),
    (kernel::UFFD_FEATURE_MINOR_SHMEM, "MINOR_SHMEM", (5, 14)),
    (kernel::UFFD_FEATURE_EXACT_ADDRESS, "EXACT_ADDRESS", (5, 18)),
    (kernel::UFFD_FEATURE_WP_HUGETLBFS_SHMEM, "WP_HUGETLBFS_SHMEM", (5, 19)),
    (kernel::UFFD_FEATURE_WP_UNPOPULATED, "WP_UNPOPULATED", (6, 4)),
    (kernel::UFFD_FEATURE_POISON, "POISON", (6, 6)),
    (kernel::UFFD_FEATURE_WP_ASYNC, "WP_ASYNC", (6, 7)),
    (kernel::UFFD_FEATURE_MOVE, "MOVE", (6, 8)),
];
const _: () = assert!(1 << (NAMES.len() - 1) == kernel::UFFD_FEATURE_MOVE);

bitflags! {
    /// A set of features of a userfaultfd, `UFFD_FEATURE_*`. Bits of a newer kernel, which have no name
    /// here, are kept.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct Features: u64 {
        /// Writes to protected pages of anonymous memory raise events.
        const WRITE_PROTECT = kernel::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64;
        /// A child made by fork(2) comes with a userfaultfd of its own. Needs `CAP_SYS_PTRACE`.
        const EVENT_FORK = kernel::UFFD_FEATURE_EVENT_FORK as u64;
        /// Giving pages back by madvise(2) raises an event.
        const EVENT_REMOVE = kernel::UFFD_FEATURE_EVENT_REMOVE as u64;
        /// Missing pages of hugetlb memory.
        const MISSING_HUGETLB = kernel::UFFD_FEATURE_MISSING_HUGETLBFS as u64;
        /// Missing pages of shared memory and memory files.
        const MISSING_SHMEM = kernel::UFFD_FEATURE_MISSING_SHMEM as u64;
        /// Unmapping memory raises an event.
        const EVENT_UNMAP = kernel::UFFD_FEATURE_EVENT_UNMAP as u64;
        /// A fault raises `SIGBUS` in its thread, and no event.
        const SIGBUS = kernel::UFFD_FEATURE_SIGBUS as u64;
        /// A fault carries the id of the waiting thread.
        const THREAD_ID = kernel::UFFD_FEATURE_THREAD_ID as u64;
        /// Minor faults of hugetlb files: pages that exist and are not mapped.
        const MINOR_HUGETLB = kernel::UFFD_FEATURE_MINOR_HUGETLBFS as u64;
        /// Minor faults of memory files: pages that exist and are not mapped.
        const MINOR_SHMEM = kernel::UFFD_FEATURE_MINOR_SHMEM as u64;
        /// Writes to protected pages of hugetlb and shared memory raise events.
        const WRITE_PROTECT_SHARED = kernel::UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64;
        /// Protection covers pages that are not there yet.
        const WRITE_PROTECT_ABSENT = kernel::UFFD_FEATURE_WP_UNPOPULATED as u64;
        /// Pages can be made to raise `SIGBUS`.
        const POISON = kernel::UFFD_FEATURE_POISON as u64;
        /// Writes to protected pages are noted in the page tables, without an event.
        const WRITE_PROTECT_ASYNC = kernel::UFFD_FEATURE_WP_ASYNC as u64;
        /// Pages can be moved from elsewhere in the process.
        const MOVE = kernel::UFFD_FEATURE_MOVE as u64;
    }
}

impl Features {
    /// All that have a name here.
    pub const NAMED: Self = Self::from_bits_retain((1 << NAMES.len()) - 1);
    /// No feature: missing pages of anonymous memory alone.
    pub const NONE: Self = Self::empty();

    fn named(self) -> impl Iterator<Item = (u32, &'static str, (u32, u32))> {
        NAMES.into_iter().filter(move |(bit, ..)| self.bits() & u64::from(*bit) != 0)
    }

    /// Returns the names, without `UFFD_FEATURE_`.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        self.named().map(|(_, name, _)| name)
    }

    /// Returns the release of Linux from which on all of these are there (major, minor), where the
    /// architecture supports them; `None` if there is none, or one that has no name here.
    #[must_use]
    pub fn since(self) -> Option<(u32, u32)> {
        let newest = self.named().map(|(.., release)| release).max();
        newest.filter(|_| self.unnamed().is_empty())
    }

    /// Returns those that have no name here: features of a newer kernel.
    #[must_use]
    pub const fn unnamed(self) -> Self {
        self.difference(Self::NAMED)
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names: Vec<_> = self.names().map(str::to_owned).collect();
        let unnamed = self.unnamed();
        if !unnamed.is_empty() {
            names.push(format!("{:#x}", unnamed.bits()));
        }
        f.write_str(&names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_shown_by_names_and_what_has_none_by_its_bits() {
        let set = Features::POISON | Features::EVENT_FORK | Features::from_bits_retain(1 << 40);
        assert_eq!(set.to_string(), "EVENT_FORK, POISON, 0x10000000000");
        assert_eq!(set.unnamed(), Features::from_bits_retain(1 << 40));
        assert!(set.contains(Features::POISON) && !set.contains(Features::POISON | Features::MOVE));
        assert_eq!(set - set, Features::NONE);
        assert_eq!(Features::NONE.to_string(), "");
    }

    #[test]
    fn a_set_is_as_new_as_its_newest_feature() {
        let set = Features::POISON | Features::EVENT_FORK;
        assert_eq!(set.since(), Some((6, 6)));
        assert_eq!((set | Features::from_bits_retain(1 << 40)).since(), None);
        assert_eq!((Features::NONE.since(), Features::NAMED.since()), (None, Some((6, 8))));
    }
}

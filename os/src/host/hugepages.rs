//! Transparent huge pages and the pools of hugetlb pages: the settings of the host, and its counts.
//!
//! Everything is read from `/sys`, through a [`SystemRoot`]; the parsers are pure. Nothing here
//! changes a setting: that is for the administrator, and the errors of this package say how.
//! Source: "Transparent Hugepage Support" and "HugeTLB Pages" in the Linux administrator's guide.

use uzone_pages::{ByteLen, PageSize};

use crate::host::root::{SysError, SystemRoot, if_there};

const THP: &str = "sys/kernel/mm/transparent_hugepage";
const POOLS: &str = "sys/kernel/mm/hugepages";

/// Returns a size of huge pages as `MAP_HUGE_*` and `MFD_HUGE_*` write it: log2, from bit 26 on.
pub(crate) const fn encoded_in_flags(size: PageSize) -> u32 {
    size.shift() << linux_raw_sys::general::MAP_HUGE_SHIFT
}

const _: () = assert!(encoded_in_flags(PageSize::MIB_2) == linux_raw_sys::general::MAP_HUGE_2MB);
const _: () = assert!(encoded_in_flags(PageSize::MIB_2) == linux_raw_sys::general::MFD_HUGE_2MB);
const _: () = assert!(encoded_in_flags(PageSize::GIB_1) == linux_raw_sys::general::MAP_HUGE_1GB);
const _: () = assert!(encoded_in_flags(PageSize::GIB_1) == linux_raw_sys::general::MFD_HUGE_1GB);

/// Returns the name of the directory of a pool.
fn pool_name(size: PageSize) -> String {
    format!("hugepages-{}kB", size.bytes() >> 10)
}

/// Returns the file that holds, and sets, the number of pages of a pool.
#[must_use]
pub fn nr_path(size: PageSize) -> String {
    format!("/{POOLS}/{}/nr_hugepages", pool_name(size))
}

/// The choices that the kernel offers for transparent huge pages; each file has some of them.
const CHOICES: [&str; 9] = [
    "always",
    "defer",
    "defer+madvise",
    "madvise",
    "within_size",
    "advise",
    "never",
    "deny",
    "force",
];

/// Takes a line such as `always [madvise] never`, and returns the choice in brackets.
fn parse_choice(text: &str) -> Option<&'static str> {
    let mut words = text.split_whitespace();
    let chosen = words.find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))?;
    CHOICES.into_iter().find(|word| *word == chosen)
}

/// The host's setting for transparent huge pages, in the kernel's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Thp {
    /// For anonymous memory: `always`, `madvise` or `never`.
    pub enabled: &'static str,
    /// Whether a fault waits for one: `always`, `defer`, `defer+madvise`, `madvise` or `never`.
    pub defrag: &'static str,
    /// For memory files: `always`, `within_size`, `advise`, `never`, `deny` or `force`.
    pub shmem: &'static str,
    /// The length of a huge page.
    pub pmd_size: ByteLen,
}

/// Returns the host's setting for transparent huge pages, or `None` if its kernel has none.
///
/// # Errors
/// [`SysError`] names the file that could not be read or understood.
pub fn thp(root: &SystemRoot) -> Result<Option<Thp>, SysError> {
    const WANTED: &str = "a choice in brackets that is known";
    let enabled = root.parse(format!("{THP}/enabled"), WANTED, parse_choice);
    let Some(enabled) = if_there(enabled)? else { return Ok(None) };
    Ok(Some(Thp {
        enabled,
        defrag: root.parse(format!("{THP}/defrag"), WANTED, parse_choice)?,
        shmem: root.parse(format!("{THP}/shmem_enabled"), WANTED, parse_choice)?,
        pmd_size: ByteLen::new(root.number(format!("{THP}/hpage_pmd_size"))?),
    }))
}

/// A hugetlb pool of the host. Counts are pages of its size.
///
/// `free` includes the `reserved` pages, which are promised to mappings that have not touched them yet:
/// a new mapping can have `free - reserved`, and `overcommit - surplus` more from the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pool {
    /// The size of its pages.
    pub size: PageSize,
    /// The pages of the pool.
    pub total: u64,
    /// The pages that are not in use.
    pub free: u64,
    /// The promised pages among them.
    pub reserved: u64,
    /// The pages beyond its setting.
    pub surplus: u64,
    /// The most pages beyond its setting.
    pub overcommit: u64,
}

/// Returns the size that is in the name of a pool's directory.
fn parse_directory(name: &str) -> Option<PageSize> {
    let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
    PageSize::try_from_bytes(kib.checked_mul(1024)?).ok()
}

/// Returns the pools of the host, smallest pages first; none if its kernel has no hugetlb.
///
/// # Errors
/// [`SysError`] names the file that could not be read or understood.
pub fn pools(root: &SystemRoot) -> Result<Vec<Pool>, SysError> {
    let names = if_there(root.names(POOLS))?.unwrap_or_default();
    let mut pools = names
        .iter()
        .filter_map(|name| parse_directory(name))
        .map(|size| read_pool(root, size))
        .collect::<Result<Vec<_>, _>>()?;
    pools.sort_by_key(|pool| pool.size);
    Ok(pools)
}

/// Returns the pool of pages of `size`, or `None` if the host has no such pages.
///
/// # Errors
/// [`SysError`] names the file that could not be read or understood.
pub fn pool(root: &SystemRoot, size: PageSize) -> Result<Option<Pool>, SysError> {
    if_there(read_pool(root, size))
}

fn read_pool(root: &SystemRoot, size: PageSize) -> Result<Pool, SysError> {
    let number = |file| root.number(format!("{POOLS}/{}/{file}", pool_name(size)));
    Ok(Pool {
        size,
        total: number("nr_hugepages")?,
        free: number("free_hugepages")?,
        reserved: number("resv_hugepages")?,
        surplus: number("surplus_hugepages")?,
        overcommit: number("nr_overcommit_hugepages")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::root::MadeUp;

    #[test]
    fn the_word_in_brackets_is_the_setting() {
        for (text, enabled) in [
            ("always [madvise] never\n", Some("madvise")),
            ("[always] madvise never\n", Some("always")),
            ("always madvise [never]", Some("never")),
            ("always madvise never", None),
            ("[sometimes]", None),
            ("[always", None),
            ("", None),
        ] {
            assert_eq!(parse_choice(text), enabled, "{text:?}");
        }
        assert_eq!(
            parse_choice("always defer [defer+madvise] madvise never"),
            Some("defer+madvise")
        );
        assert_eq!(parse_choice("always within_size advise never [deny] force"), Some("deny"));
    }

    #[test]
    fn a_pool_is_known_by_the_name_of_its_directory() {
        for (name, size) in [
            ("hugepages-2048kB", Some(PageSize::MIB_2)),
            ("hugepages-1048576kB", Some(PageSize::GIB_1)),
            ("hugepages-3kB", None),
            ("hugepages-kB", None),
            ("hugepages-99999999999999999999kB", None),
            ("hugepages-18446744073709551615kB", None),
            ("2048kB", None),
        ] {
            assert_eq!(parse_directory(name), size, "{name}");
        }
    }

    #[test]
    fn a_host_without_huge_pages_has_no_settings_and_no_pools() {
        let tree = MadeUp::new(&[("proc/version", "")]);
        assert_eq!(thp(&tree.root()).unwrap(), None);
        assert_eq!(pools(&tree.root()).unwrap(), []);
        assert_eq!(pool(&tree.root(), PageSize::MIB_2).unwrap(), None);
    }

    #[test]
    fn a_made_up_host_is_read_as_it_stands_there() {
        let tree = MadeUp::new(&[
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            (
                "sys/kernel/mm/transparent_hugepage/defrag",
                "always defer defer+madvise [madvise] never\n",
            ),
            (
                "sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "always within_size advise [never] deny force\n",
            ),
            ("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n"),
            ("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n"),
            ("sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "0\n"),
            ("sys/kernel/mm/hugepages/hugepages-1048576kB/resv_hugepages", "0\n"),
            ("sys/kernel/mm/hugepages/hugepages-1048576kB/surplus_hugepages", "0\n"),
            ("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_overcommit_hugepages", "0\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "500\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "7\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages", "2\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages", "64\n"),
        ]);
        let root = tree.root();
        assert_eq!(
            thp(&root).unwrap(),
            Some(Thp {
                enabled: "madvise",
                defrag: "madvise",
                shmem: "never",
                pmd_size: ByteLen::mib(2),
            })
        );
        let pools = pools(&root).unwrap();
        assert_eq!(pools.len(), 2);
        let small = Pool {
            size: PageSize::MIB_2,
            total: 512,
            free: 500,
            reserved: 7,
            surplus: 2,
            overcommit: 64,
        };
        assert_eq!(pools[0], small);
        assert_eq!(pool(&root, PageSize::MIB_2).unwrap(), Some(small));
    }
}

//! Reasons for a refused mapping, with remedies: [`MapError`]. mmap(2) returns `ENOMEM` for half a dozen limits. The
//! limit is found afterwards by comparing the request with the memory that the process has and may have; [`shortage`]
//! does that as a pure function of [`Facts`]. The facts are
//! read after the refusal, so under concurrent mappings the answer is the likely one, not a proof.

use std::io;

use rustix::process::{Resource, getrlimit};
use uzone_pages::{ByteLen, ErrorKind, PageSize};

use crate::host::hugepages;
use crate::host::root::{SysError, SystemRoot, kib_field};
use crate::map::options::{Access, Addr, Sharing};

/// A range of memory that could not be mapped, or a DAX device that cannot be used as one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// No byte was asked for.
    #[error("the length is zero: a mapping has at least one byte")]
    Empty,
    /// The kernel is older than uzone needs.
    #[error("Linux 6.7 or newer is needed; this is {release}")]
    TooOld {
        /// The release of this kernel.
        release: &'static str,
    },
    /// The length does not fit the address space of this process.
    #[error("{len_bytes} bytes cannot be mapped: a mapping has at most {max_bytes}", max_bytes = isize::MAX)]
    TooLong {
        /// The length that was asked for.
        len_bytes: u64,
    },
    /// An alignment that is no power of two.
    #[error("a mapping cannot start at a multiple of {align_bytes} bytes: an alignment is a power of two of at most {max}", max = crate::map::options::MAX_ALIGN)]
    BadAlign {
        /// The alignment that was asked for.
        align_bytes: u64,
    },
    /// A range that cuts a page: of a file, of a DAX device, or of memory to be adopted.
    #[error(
        "{len} at {start:#x} do not start and end at page boundaries: the start must be a multiple of {page}, the page size of the file, device or memory, and so must the length of adopted memory or of a DAX device's"
    )]
    CutsPage {
        /// The offset in the file at which the mapping should have started, or where the memory starts.
        start: u64,
        /// The length that it should have had.
        len: ByteLen,
        /// The size of the pages.
        page: PageSize,
    },
    /// The range reaches past the end of the file.
    #[error("bytes {offset:#x} to {end:#x} are not all inside the file, which ends at {file_len:#x}", end = u128::from(*offset) + u128::from(*len_bytes))]
    BeyondEnd {
        /// The offset in the file at which the mapping should have started.
        offset: u64,
        /// The length that it should have had.
        len_bytes: u64,
        /// The length of the file.
        file_len: u64,
    },
    /// A file of a kind that has no memory to map.
    #[error("{kind} cannot be mapped: pass a regular file or a device")]
    NotMappable {
        /// The kind of file.
        kind: &'static str,
        /// The kernel's error, where it was asked.
        #[source]
        cause: Option<io::Error>,
    },
    /// The descriptor is not open for the access of the mapping.
    #[error("the file is not open for a {sharing} {access} mapping: open it for reading{and_writing}", and_writing = if *access == Access::ReadWrite && *sharing == Sharing::Shared { " and writing" } else { "" })]
    NotOpenFor {
        /// The access that was asked for.
        access: Access,
        /// Whether its writes should have reached the file.
        sharing: Sharing,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The pool of huge pages is too small.
    #[error("asked for {pages} pages of {size}, the pool has {free} free of {total}: `sysctl vm.nr_hugepages={wanted}` as root for the default size, or write {wanted} to {path}", path = hugepages::nr_path(*size))]
    HugePool {
        /// The size of the pages.
        size: PageSize,
        /// The number of pages that was asked for.
        pages: u64,
        /// The pages that are neither in use nor promised.
        free: u64,
        /// The pages of the pool.
        total: u64,
        /// The pages that the pool should have for this to work.
        wanted: u64,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The kernel has no huge pages of that size.
    #[error(
        "this kernel has no huge pages of {size}: `ls /sys/kernel/mm/hugepages` shows the sizes that it has"
    )]
    HugeSize {
        /// The size that was asked for.
        size: PageSize,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// There is not enough of something.
    #[error("cannot map {len}: {shortage}")]
    Memory {
        /// The length that was asked for.
        len: ByteLen,
        /// The limit that it most likely was, and the remedy.
        shortage: String,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// A memory file could not be made.
    #[error("cannot create the memory file {name:?} of {len}")]
    Create {
        /// The name it was to have.
        name: String,
        /// The length it was to have.
        len: ByteLen,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// A file could not be asked for its kind and length.
    #[error("cannot inspect the file to be mapped")]
    Inspect(#[source] io::Error),
    /// The kernel refused the advice that the mapping should have been made with.
    #[error("the new mapping of {len} was refused {advice}")]
    Advice {
        /// The length of the mapping.
        len: ByteLen,
        /// The kernel's name of the advice.
        advice: &'static str,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
    /// The file is of a kind that no DAX device is.
    #[error(
        "the file is no character device, which a DAX device such as /dev/dax0.0 is: `daxctl list` shows those of this host, and a file on a DAX mount is mapped as fsdax"
    )]
    NotDaxDevice,
    /// A device is no DAX device, or none that can be mapped, by its files in sysfs.
    #[error("{problem}")]
    DaxDevice {
        /// The problem, and a remedy.
        problem: String,
        /// The file that could not be read, or the value that was expected there, if that is the reason.
        #[source]
        cause: Option<Box<SysError>>,
    },
    /// A range that ends behind a DAX device.
    #[error("bytes {offset:#x} to {end:#x} are not all inside the DAX device, which has {size_bytes:#x}", end = u128::from(*offset) + u128::from(*len_bytes))]
    BeyondDax {
        /// The offset in the device at which the mapping should have started.
        offset: u64,
        /// The length that it should have had.
        len_bytes: u64,
        /// The number of bytes that the device has.
        size_bytes: u64,
    },
    /// A file of which only a copy in the page cache can be mapped.
    #[error(
        "the file system offers no synchronous DAX mapping of the file: on persistent memory, mount it with `-o dax=always`, or with `-o dax=inode` and `chattr +x` on the file while it is not open; or map it as an ordinary file"
    )]
    NoDax(#[source] io::Error),
    /// A device where a file of a file system was asked for.
    #[error("only a regular file has a file system to offer DAX: map a device as devdax")]
    NotRegular,
    /// Memory to be adopted whose pages are said to be smaller than the host's.
    #[error("memory with pages of {page} cannot be adopted: a page of this host has {host}")]
    AdoptedPage {
        /// The page size that was stated.
        page: PageSize,
        /// The size of a page of the host.
        host: PageSize,
    },
    /// Memory to be adopted that ends behind the last address.
    #[error("{len} at {addr} cannot be adopted: they do not end inside of the address space")]
    AdoptedWraps {
        /// The start of the memory.
        addr: Addr,
        /// The length.
        len: ByteLen,
    },
    /// The kernel refused for a reason that has no case of its own.
    #[error("the kernel refused a mapping of {len}")]
    Refused {
        /// The length that was asked for.
        len: ByteLen,
        /// The kernel's error.
        #[source]
        cause: io::Error,
    },
}

impl MapError {
    /// Returns the kind of failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Memory { .. } | Self::HugePool { .. } | Self::Create { .. } => {
                ErrorKind::OutOfMemory
            }
            Self::NotOpenFor { .. } => ErrorKind::PermissionDenied,
            Self::TooOld { .. }
            | Self::HugeSize { .. }
            | Self::Advice { .. }
            | Self::DaxDevice { cause: Some(_), .. }
            | Self::NoDax { .. } => ErrorKind::NotSupported,
            Self::Inspect { .. } => ErrorKind::Io,
            Self::Refused { .. } => ErrorKind::Other,
            _ => ErrorKind::InvalidInput,
        }
    }

    /// Returns the error for `len` bytes of huge pages that the kernel had no memory for: the pool
    /// is too small, or, if it is not, another limit forbids it.
    pub(crate) fn huge_pool(
        root: &SystemRoot,
        size: PageSize,
        len: ByteLen,
        cause: io::Error,
    ) -> Self {
        let pages = len.get().div_ceil(size.bytes());
        // A pool that cannot be read is shown as empty: the refusal is a fact either way.
        let pool = hugepages::pool(root, size).ok().flatten();
        let (total, free) =
            pool.map_or((0, 0), |pool| (pool.total, pool.free.saturating_sub(pool.reserved)));
        if pages <= free {
            return Self::memory(root, len, false, cause);
        }
        Self::HugePool {
            size,
            pages,
            free,
            total,
            wanted: total.saturating_add(pages.saturating_sub(free)),
            cause,
        }
    }

    /// Returns the error for memory that would have been locked at once.
    pub(crate) fn locked(len: ByteLen, cause: io::Error) -> Self {
        // Without a limit this refusal does not happen, so the number is there.
        let limit = ByteLen::new(getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX));
        let shortage = format!(
            "the process locks what it maps and RLIMIT_MEMLOCK is {limit}: raise it with `ulimit -l`"
        );
        Self::Memory { len, shortage, cause }
    }

    /// Returns the error for a mapping that the kernel had no memory for.
    pub(crate) fn memory(
        root: &SystemRoot,
        len: ByteLen,
        writable_private: bool,
        cause: io::Error,
    ) -> Self {
        let shortage = shortage(len, writable_private, &Facts::read(root));
        Self::Memory { len, shortage, cause }
    }
}

/// The shortage that is left when each limit allows the mapping: the CPU's addresses do not reach
/// as far, no gap among them is as long, or the kernel cannot allocate for itself.
const NO_GAP: &str = "the address space has no such gap, or the kernel itself is out of memory";

/// The facts that explain a refusal. `None` is unlimited, or unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) address_limit: Option<u64>,
    pub(crate) address_used: u64,
    pub(crate) data_limit: Option<u64>,
    pub(crate) data_used: u64,
    pub(crate) map_limit: Option<u64>,
    pub(crate) map_used: u64,
    pub(crate) overcommit_mode: Option<u64>,
    pub(crate) commit_limit: u64,
    pub(crate) committed: u64,
    pub(crate) memory_and_swap: u64,
}

impl Facts {
    /// Reads the facts. A fact that cannot be read is left out, for the refusal has to be reported in any case.
    fn read(root: &SystemRoot) -> Self {
        let text = |path| root.read(path).unwrap_or_default();
        let (status, meminfo) = (text("proc/self/status"), text("proc/meminfo"));
        let of = |text: &str, name| kib_field(text, name).unwrap_or(0);
        let maps = text("proc/self/maps");
        Self {
            address_limit: getrlimit(Resource::As).current,
            address_used: of(&status, "VmSize"),
            data_limit: getrlimit(Resource::Data).current,
            data_used: of(&status, "VmData"),
            map_limit: root.number("proc/sys/vm/max_map_count").ok(),
            map_used: u64::try_from(maps.lines().count()).unwrap_or(u64::MAX),
            overcommit_mode: root.number("proc/sys/vm/overcommit_memory").ok(),
            commit_limit: of(&meminfo, "CommitLimit"),
            committed: of(&meminfo, "Committed_AS"),
            memory_and_swap: of(&meminfo, "MemTotal").saturating_add(of(&meminfo, "SwapTotal")),
        }
    }
}

/// Returns the limit that most likely forbids `len` more bytes, and the remedy.
fn shortage(len: ByteLen, writable_private: bool, facts: &Facts) -> String {
    let (len, bytes) = (len.get(), ByteLen::new);
    let passes = |limit: u64, used: u64| used.saturating_add(len) <= limit;
    if let Some(limit) = facts.map_limit
        && facts.map_used >= limit
    {
        let used = facts.map_used;
        return format!("the process has {used} mappings of {limit}: raise vm.max_map_count");
    }
    if let Some(limit) = facts.address_limit
        && !passes(limit, facts.address_used)
    {
        let (limit, used) = (bytes(limit), bytes(facts.address_used));
        return format!("RLIMIT_AS is {limit} and {used} are mapped: raise it with `ulimit -v`");
    }
    if let Some(limit) = facts.data_limit
        && writable_private
        && !passes(limit, facts.data_used)
    {
        let (limit, used) = (bytes(limit), bytes(facts.data_used));
        return format!("RLIMIT_DATA is {limit} and {used} are in use: raise it with `ulimit -d`");
    }
    match facts.overcommit_mode {
        Some(2) if !passes(facts.commit_limit, facts.committed) => format!(
            "vm.overcommit_memory is 2 and {used} of {limit} are promised: set it to 0 or 1, or raise vm.overcommit_ratio",
            used = bytes(facts.committed),
            limit = bytes(facts.commit_limit)
        ),
        Some(0) if len > facts.memory_and_swap && len < 1 << 46 => format!(
            "the host has {total} with swap: reserve lazily, or set vm.overcommit_memory to 1",
            total = bytes(facts.memory_and_swap)
        ),
        _ => NO_GAP.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_first_limit_that_forbids_it() {
        let free = Facts {
            address_used: 100,
            data_used: 50,
            map_limit: Some(65530),
            map_used: 20,
            overcommit_mode: Some(1),
            commit_limit: 1000,
            committed: 900,
            memory_and_swap: 2000,
            ..Facts::default()
        };
        let address = |limit| Facts { address_limit: Some(limit), ..free };
        let mode = |mode| Facts { overcommit_mode: Some(mode), ..free };
        let data = Facts { data_limit: Some(55), ..free };
        let exhausted = Facts { map_used: 65530, ..free };
        for (what, facts, asked, text) in [
            ("nothing", free, 10, NO_GAP),
            ("maps", exhausted, 10, "the process has 65530 mappings of 65530: raise vm.max"),
            ("one past", address(109), 10, "RLIMIT_AS is 109 B and 100 B are mapped"),
            ("exactly", address(110), 10, NO_GAP),
            (
                "overflow",
                address(u64::MAX - 1),
                u64::MAX,
                "RLIMIT_AS is 16.0 EiB (18446744073709551614 B) and 100 B",
            ),
            ("data", data, 10, "RLIMIT_DATA is 55 B and 50 B are in use"),
            ("strict", mode(2), 101, "vm.overcommit_memory is 2 and 900 B of 1000 B are promised"),
            ("heuristic", mode(0), 2001, "the host has 2000 B with swap"),
            ("beyond the CPU's addresses", mode(0), 1 << 48, NO_GAP),
        ] {
            let found = shortage(ByteLen::new(asked), true, &facts);
            assert!(found.starts_with(text), "{what}: {found}");
        }
        // Data does not count for shared memory.
        assert_eq!(shortage(ByteLen::new(10), false, &data), NO_GAP);
    }

    #[test]
    fn an_empty_pool_is_reported_with_its_numbers_and_the_fix() {
        let tree = crate::host::root::MadeUp::new(&[
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "10\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "4\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "3\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages", "0\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages", "0\n"),
        ]);
        let cause = || io::Error::from(io::ErrorKind::OutOfMemory);
        let text = MapError::huge_pool(&tree.root(), PageSize::MIB_2, ByteLen::mib(1600), cause())
            .to_string();
        assert!(
            text.starts_with("asked for 800 pages of 2 MiB, the pool has 1 free of 10: `sysctl vm.nr_hugepages=809` as root"),
            "{text}"
        );
        let text = MapError::huge_pool(
            &SystemRoot::at("/nowhere"),
            PageSize::GIB_1,
            ByteLen::gib(2),
            cause(),
        )
        .to_string();
        assert!(text.starts_with("asked for 2 pages of 1 GiB, the pool has 0 free of 0"), "{text}");
        assert!(text.ends_with("hugepages-1048576kB/nr_hugepages"), "{text}");
    }
}

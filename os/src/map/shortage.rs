//! Why a mapping was refused, and what would help: [`MapError`], [`Shortage`]. mmap(2) returns `ENOMEM` for
//! half a dozen limits. Which one it was is found afterwards by comparing what was asked with what the
//! process has and may have; [`Shortage::of`] does that as a pure function of [`Facts`]. The facts are read
//! after the refusal, so under concurrent mappings the answer is the likely one, not a proof.

use std::fmt;
use std::io;
use std::path::PathBuf;

use rustix::process::{Resource, getrlimit};
use uzone_pages::{ByteLen, ErrorKind, PageSize};

use crate::host::hugepages::{self, HugeSize};
use crate::host::root::{SysError, SystemRoot, kib_field};
use crate::map::options::{Access, Addr, Sharing};

/// A range of memory that could not be mapped, or a DAX device that cannot be used as one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// No byte was asked for.
    #[error("a mapping of no byte describes nothing")]
    Empty,
    /// The length does not fit the address space of this process.
    #[error("{len_bytes} bytes cannot be mapped: a mapping has at most {max_bytes}", max_bytes = isize::MAX)]
    TooLong {
        /// What was asked for.
        len_bytes: u64,
    },
    /// An alignment that is no power of two.
    #[error("a mapping cannot start at a multiple of {align_bytes} bytes: an alignment is a power of two of at most {max}", max = crate::map::options::MAX_ALIGN)]
    BadAlign {
        /// What was asked for.
        align_bytes: u64,
    },
    /// An offset into a file that is no multiple of its page.
    #[error("offset {offset:#x} is not a multiple of {page}, the page size of the file")]
    UnalignedOffset {
        /// Where the mapping should have started in the file.
        offset: u64,
        /// The page size of the file's memory.
        page: ByteLen,
    },
    /// The range reaches past the end of the file.
    #[error("bytes {offset:#x} to {end:#x} are not all inside the file, which ends at {file_len:#x}", end = u128::from(*offset) + u128::from(*len_bytes))]
    BeyondEnd {
        /// Where the mapping should have started in the file.
        offset: u64,
        /// How long it should have been.
        len_bytes: u64,
        /// How long the file is.
        file_len: u64,
    },
    /// A file of a kind that has no memory to map.
    #[error("{kind} cannot be mapped: pass a regular file or a device")]
    NotMappable {
        /// What kind of file it is.
        kind: &'static str,
        /// What the kernel answered, where it was asked.
        #[source]
        cause: Option<io::Error>,
    },
    /// The descriptor is not open for what the mapping should allow.
    #[error("the file is not open for a {sharing} {access} mapping: open it for reading{and_writing}", and_writing = if *access == Access::ReadWrite && *sharing == Sharing::Shared { " and writing" } else { "" })]
    NotOpenFor {
        /// What the mapping should have allowed.
        access: Access,
        /// Whether its writes should have reached the file.
        sharing: Sharing,
        /// What the kernel answered.
        #[source]
        cause: io::Error,
    },
    /// The pool of huge pages is too small.
    #[error("asked for {pages} pages of {size}, the pool has {free} free of {total}: `sysctl vm.nr_hugepages={wanted}` as root for the default size, or write {wanted} to {path}", path = size.nr_path())]
    HugePool {
        /// The size of the pages.
        size: HugeSize,
        /// How many were asked for.
        pages: u64,
        /// How many are neither in use nor promised.
        free: u64,
        /// How many the pool has.
        total: u64,
        /// How many the pool should have for this to work.
        wanted: u64,
        /// What the kernel answered.
        #[source]
        cause: io::Error,
    },
    /// The kernel has no huge pages of that size.
    #[error(
        "this kernel has no huge pages of {size}: `ls /sys/kernel/mm/hugepages` shows the sizes that it has"
    )]
    HugeSize {
        /// The size that was asked for.
        size: HugeSize,
        /// What the kernel answered.
        #[source]
        cause: io::Error,
    },
    /// There is not enough of something.
    #[error("cannot map {len}: {shortage}")]
    Memory {
        /// What was asked for.
        len: ByteLen,
        /// Which limit it most likely was.
        shortage: Shortage,
        /// What the kernel answered.
        #[source]
        cause: io::Error,
    },
    /// A memory file could not be made.
    #[error("cannot create the memory file {name:?} of {len}: {cause}")]
    Create {
        /// The name it was to have.
        name: String,
        /// The length it was to have.
        len: ByteLen,
        /// What the kernel answered.
        #[source]
        cause: io::Error,
    },
    /// A file could not be asked for its kind and length.
    #[error("cannot inspect the file to be mapped: {0}")]
    Inspect(#[source] io::Error),
    /// The kernel refused the advice that the mapping should have been made with.
    #[error("the new mapping of {len} was refused {advice}: {cause}")]
    Advice {
        /// How long the mapping is.
        len: ByteLen,
        /// The kernel's name of the advice.
        advice: &'static str,
        /// What the kernel answered.
        #[source]
        cause: io::Error,
    },
    /// The file is of a kind that no DAX device is.
    #[error(
        "the file is no character device, which a DAX device such as /dev/dax0.0 is: `daxctl list` shows those of this host, and a file on a DAX mount is mapped as fsdax"
    )]
    NotDaxDevice,
    /// A device that should be a DAX device belongs to another subsystem.
    #[error("{path} is a device of {found:?}, expected \"dax\": `daxctl list` shows the DAX devices; one is made by `ndctl create-namespace --mode=devdax` of persistent memory, or by `daxctl reconfigure-device --mode=devdax` of system RAM", path = path.display())]
    OtherSubsystem {
        /// The device in sysfs.
        path: PathBuf,
        /// The subsystem that it has.
        found: String,
    },
    /// The kernel has no entry for a device of this number.
    #[error("{path} should lead to the subsystem of the device, and cannot be read: mount sysfs at /sys", path = path.display())]
    UnknownDevice {
        /// The link in sysfs.
        path: PathBuf,
        /// What the kernel answered.
        #[source]
        cause: io::Error,
    },
    /// A DAX device does not say how large it is, or what its pages are.
    #[error("the DAX device {path} does not say its {what}: this needs Linux 5.10 or newer, and a device that `daxctl reconfigure-device --mode=devdax` has set up", path = path.display())]
    DaxAttribute {
        /// The device in sysfs.
        path: PathBuf,
        /// Which of its properties.
        what: &'static str,
        /// Which file was read, and what was expected there.
        #[source]
        cause: Box<SysError>,
    },
    /// A DAX device has no memory.
    #[error("the DAX device {path} has no byte: give it memory with `daxctl create-device` or `daxctl reconfigure-device --size`", path = path.display())]
    DaxEmpty {
        /// The device in sysfs.
        path: PathBuf,
    },
    /// A DAX device ends inside one of its pages.
    #[error("the DAX device {path} has {size_bytes} bytes, which is no multiple of its alignment, {align}: make it anew with `ndctl create-namespace --mode=devdax --align={align_bytes}` or `daxctl reconfigure-device --align={align_bytes}`", path = path.display(), align_bytes = align.bytes())]
    DaxEndsInsidePage {
        /// The device in sysfs.
        path: PathBuf,
        /// Its size.
        size_bytes: u64,
        /// The size of its pages.
        align: PageSize,
    },
    /// A range that cuts a page of a DAX device.
    #[error(
        "bytes {offset:#x} and {len_bytes:#x} more cut a page of the DAX device: both have to be multiples of its alignment, {align}"
    )]
    CutsDaxPage {
        /// Where the mapping should have started in the device.
        offset: u64,
        /// How long it should have been.
        len_bytes: u64,
        /// The size of the device's pages.
        align: PageSize,
    },
    /// A range that ends behind a DAX device.
    #[error("bytes {offset:#x} to {end:#x} are not all inside the DAX device, which has {size_bytes:#x}", end = u128::from(*offset) + u128::from(*len_bytes))]
    BeyondDax {
        /// Where the mapping should have started in the device.
        offset: u64,
        /// How long it should have been.
        len_bytes: u64,
        /// How many bytes the device has.
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
        /// What was said.
        page: PageSize,
        /// The size of a page of the host.
        host: PageSize,
    },
    /// Memory to be adopted that cuts a page.
    #[error(
        "{len} at {addr} cannot be adopted with pages of {page}: the start and the length have to be multiples of that"
    )]
    AdoptedCut {
        /// Where the memory starts.
        addr: Addr,
        /// How long it is.
        len: ByteLen,
        /// The size of its pages.
        page: PageSize,
    },
    /// Memory to be adopted that ends behind the last address.
    #[error("{len} at {addr} cannot be adopted: they do not end inside of the address space")]
    AdoptedWraps {
        /// Where the memory starts.
        addr: Addr,
        /// How long it is.
        len: ByteLen,
    },
    /// The kernel refused for a reason that has no case of its own.
    #[error("the kernel refused a mapping of {len}: {cause}")]
    Refused {
        /// What was asked for.
        len: ByteLen,
        /// What the kernel answered.
        #[source]
        cause: io::Error,
    },
}

impl MapError {
    /// Returns what kind of failure this is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Memory { .. } | Self::HugePool { .. } | Self::Create { .. } => {
                ErrorKind::OutOfMemory
            }
            Self::NotOpenFor { .. } => ErrorKind::PermissionDenied,
            Self::HugeSize { .. }
            | Self::Advice { .. }
            | Self::UnknownDevice { .. }
            | Self::DaxAttribute { .. }
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
        size: HugeSize,
        len: ByteLen,
        cause: io::Error,
    ) -> Self {
        let pages = len.get().div_ceil(size.page_size().bytes());
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
        let limit = getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX);
        Self::Memory { len, shortage: Shortage::Locked { limit: ByteLen::new(limit) }, cause }
    }

    /// Returns the error for a mapping that the kernel had no memory for.
    pub(crate) fn memory(
        root: &SystemRoot,
        len: ByteLen,
        writable_private: bool,
        cause: io::Error,
    ) -> Self {
        Self::Memory {
            len,
            shortage: Shortage::of(len, writable_private, &Facts::read(root)),
            cause,
        }
    }
}

/// Which limit a refused mapping most likely met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shortage {
    /// The address space limit of the process, `RLIMIT_AS`.
    AddressSpace {
        /// The limit.
        limit: ByteLen,
        /// How much is mapped.
        used: ByteLen,
    },
    /// The limit on private writable memory, `RLIMIT_DATA`.
    Data {
        /// The limit.
        limit: ByteLen,
        /// How much is mapped.
        used: ByteLen,
    },
    /// The number of mappings of the process, `vm.max_map_count`.
    MapCount {
        /// The limit.
        limit: u64,
        /// How many there are.
        used: u64,
    },
    /// The limit on locked memory, `RLIMIT_MEMLOCK`, of a process that locks all that it maps.
    Locked {
        /// The limit.
        limit: ByteLen,
    },
    /// The kernel promises no more than it has, `vm.overcommit_memory=2`.
    StrictOvercommit {
        /// The limit of the host.
        limit: ByteLen,
        /// How much of it is promised.
        used: ByteLen,
    },
    /// More than the host has was asked for with accounting, under `vm.overcommit_memory=0`.
    Overcommit {
        /// What the host has, with swap.
        total: ByteLen,
    },
    /// The CPU's addresses do not reach as far, or no gap among them is as long.
    Addresses,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddressSpace { limit, used } => {
                write!(f, "RLIMIT_AS is {limit} and {used} are mapped: raise it with `ulimit -v`")
            }
            Self::Data { limit, used } => {
                write!(f, "RLIMIT_DATA is {limit} and {used} are in use: raise it with `ulimit -d`")
            }
            Self::MapCount { limit, used } => {
                write!(f, "the process has {used} mappings of {limit}: raise vm.max_map_count")
            }
            Self::Locked { limit } => write!(
                f,
                "the process locks what it maps and RLIMIT_MEMLOCK is {limit}: raise it with `ulimit -l`"
            ),
            Self::StrictOvercommit { limit, used } => write!(
                f,
                "vm.overcommit_memory is 2 and {used} of {limit} are promised: set it to 0 or 1, or raise vm.overcommit_ratio"
            ),
            Self::Overcommit { total } => write!(
                f,
                "the host has {total} with swap: reserve lazily, or set vm.overcommit_memory to 1"
            ),
            Self::Addresses => f.write_str(
                "there is no such gap in the address space, or the kernel itself is out of memory",
            ),
        }
    }
}

/// What a refusal is explained by. `None` is unlimited, or unknown.
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
    /// Reads what can be read. A fact that cannot is left out, for the refusal has to be reported
    /// in any case.
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

impl Shortage {
    /// Returns which limit forbids `len` more bytes.
    pub(crate) fn of(len: ByteLen, writable_private: bool, facts: &Facts) -> Self {
        let len = len.get();
        let passes = |limit: u64, used: u64| used.saturating_add(len) <= limit;
        if let Some(limit) = facts.map_limit
            && facts.map_used >= limit
        {
            return Self::MapCount { limit, used: facts.map_used };
        }
        if let Some(limit) = facts.address_limit
            && !passes(limit, facts.address_used)
        {
            return Self::AddressSpace {
                limit: ByteLen::new(limit),
                used: ByteLen::new(facts.address_used),
            };
        }
        if let Some(limit) = facts.data_limit
            && writable_private
            && !passes(limit, facts.data_used)
        {
            return Self::Data { limit: ByteLen::new(limit), used: ByteLen::new(facts.data_used) };
        }
        match facts.overcommit_mode {
            Some(2) if !passes(facts.commit_limit, facts.committed) => Self::StrictOvercommit {
                limit: ByteLen::new(facts.commit_limit),
                used: ByteLen::new(facts.committed),
            },
            Some(0) if len > facts.memory_and_swap && len < 1 << 46 => {
                Self::Overcommit { total: ByteLen::new(facts.memory_and_swap) }
            }
            _ => Self::Addresses,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_first_limit_that_forbids_it() {
        use Shortage::{AddressSpace, Addresses, Data, MapCount, Overcommit, StrictOvercommit};
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
        let len = ByteLen::new;
        let address = |limit| Facts { address_limit: Some(limit), ..free };
        let mode = |mode| Facts { overcommit_mode: Some(mode), ..free };
        let data = Facts { data_limit: Some(55), ..free };
        for (what, facts, asked, shortage) in [
            ("nothing", free, 10, Addresses),
            ("maps", Facts { map_used: 65530, ..free }, 10, MapCount { limit: 65530, used: 65530 }),
            ("one past", address(109), 10, AddressSpace { limit: len(109), used: len(100) }),
            ("exactly", address(110), 10, Addresses),
            (
                "overflow",
                address(u64::MAX - 1),
                u64::MAX,
                AddressSpace { limit: len(u64::MAX - 1), used: len(100) },
            ),
            ("data", data, 10, Data { limit: len(55), used: len(50) }),
            ("strict", mode(2), 101, StrictOvercommit { limit: len(1000), used: len(900) }),
            ("heuristic", mode(0), 2001, Overcommit { total: len(2000) }),
            ("beyond the CPU's addresses", mode(0), 1 << 48, Addresses),
        ] {
            assert_eq!(Shortage::of(len(asked), true, &facts), shortage, "{what}");
        }
        // Data does not count for shared memory.
        assert_eq!(Shortage::of(len(10), false, &data), Addresses);
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
        let text = MapError::huge_pool(&tree.root(), HugeSize::MIB_2, ByteLen::mib(1600), cause())
            .to_string();
        assert!(
            text.starts_with("asked for 800 pages of 2 MiB, the pool has 1 free of 10: `sysctl vm.nr_hugepages=809` as root"),
            "{text}"
        );
        let text = MapError::huge_pool(
            &SystemRoot::at("/nowhere"),
            HugeSize::GIB_1,
            ByteLen::gib(2),
            cause(),
        )
        .to_string();
        assert!(text.starts_with("asked for 2 pages of 1 GiB, the pool has 0 free of 0"), "{text}");
        assert!(text.ends_with("hugepages-1048576kB/nr_hugepages"), "{text}");
    }
}

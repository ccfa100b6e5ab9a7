//! What this kernel and host offer: one function for each fact.
//!
//! Each returns a typed value or the reason why not, and none changes anything. A caller asks once
//! and passes the answer on as a value.
//! Unsafe: advice on no memory at all, to learn its name.
//! Source: uname(2), userfaultfd(2), ioctl_userfaultfd(2), madvise(2), getrlimit(2).

use std::io;
use std::os::fd::AsFd;
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::mm::Advice;
use rustix::process::{Resource, getrlimit};
use uzone_pages::{ByteLen, PageSize};

use crate::errno::{self, UffdRefusal};
use crate::resident;
use crate::root::{SysError, SystemRoot};
use crate::uffd::{Features, abi, open};

/// A fact that could not be read from the kernel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// A file of `/proc` or `/sys` could not be read or understood.
    #[error(transparent)]
    Sys(#[from] SysError),
    /// No userfaultfd could be had, so its features are not known.
    #[error(
        "no userfaultfd to be had: run as root, give access to {device}, or set vm.unprivileged_userfaultfd to 1; in a container, a seccomp profile may forbid it (see `uzone doctor`)",
        device = open::DEVICE
    )]
    NoUserfaultfd {
        /// What userfaultfd(2) answered.
        #[source]
        cause: io::Error,
    },
    /// The kernel refused the handshake.
    #[error("the kernel refused UFFDIO_API: {cause}")]
    Handshake {
        /// What it answered.
        #[source]
        cause: io::Error,
    },
}

/// Returns the kernel's release, such as `6.18.44`.
#[must_use]
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Returns whether memory that is mapped with `MAP_STACK` gets no transparent huge page, as after
/// `MADV_NOHUGEPAGE`: since Linux 6.7 (mmap(2)); before, the flag does nothing.
pub(crate) fn stacks_are_never_huge() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| is_at_least(&kernel_release(), (6, 7)))
}

/// Returns whether a kernel's release is `least` or later; no, if it has no such numbers.
fn is_at_least(release: &str, least: (u32, u32)) -> bool {
    let mut numbers = release.split(|byte: char| !byte.is_ascii_digit()).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= least,
        _ => false,
    }
}

/// Returns the size of a host page.
///
/// # Panics
/// If the kernel reports a size that no page has.
#[must_use]
pub fn page_size() -> PageSize {
    static SIZE: OnceLock<PageSize> = OnceLock::new();
    *SIZE.get_or_init(|| {
        PageSize::try_from_bytes(rustix::param::page_size() as u64)
            .expect("the kernel's page size is a power of two of at least 4096")
    })
}

/// Returns the model name of the CPU as `/proc/cpuinfo` has it, or `None` where it has none, as on
/// AArch64.
///
/// # Errors
/// [`SysError`] if the file cannot be read.
pub fn cpu_model(root: &SystemRoot) -> Result<Option<String>, SysError> {
    let text = root.read("proc/cpuinfo")?;
    Ok(text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == "model name").then(|| value.trim().to_owned())
    }))
}

/// Returns how many mappings a process may have (`vm.max_map_count`).
///
/// # Errors
/// [`SysError`] if the file cannot be read or understood.
pub fn max_map_count(root: &SystemRoot) -> Result<u64, SysError> {
    root.number("proc/sys/vm/max_map_count")
}

/// How the kernel promises memory (`vm.overcommit_memory`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Overcommit {
    /// It refuses what is obviously too much.
    Heuristic,
    /// It refuses nothing.
    Always,
    /// It refuses what it could not give all at once; lazy reservation counts too.
    Never,
}

/// Returns how the kernel promises memory.
///
/// # Errors
/// [`SysError`] if the file cannot be read or understood.
pub fn overcommit(root: &SystemRoot) -> Result<Overcommit, SysError> {
    root.parse("proc/sys/vm/overcommit_memory", "0, 1 or 2", |text| {
        Some(match text.trim() {
            "0" => Overcommit::Heuristic,
            "1" => Overcommit::Always,
            "2" => Overcommit::Never,
            _ => return None,
        })
    })
}

/// Returns how much memory this process may lock, or `None` if there is no limit. A process with
/// `CAP_IPC_LOCK` is not bound by it.
#[must_use]
pub fn memlock_limit() -> Option<ByteLen> {
    getrlimit(Resource::Memlock).current.map(ByteLen::new)
}

/// Returns whether the kernel knows an advice, by giving it for no memory.
fn advice_is_known(advice: libc::c_int) -> bool {
    // SAFETY: madvise(2) acts on the bytes from an address on; here they are none, so nothing is
    // read or written. The kernel checks the advice first and answers EINVAL if it is unknown.
    let answer = unsafe { libc::madvise(core::ptr::null_mut(), 0, advice) };
    answer == 0
}

/// Returns whether the kernel knows `MADV_POPULATE_READ` and `MADV_POPULATE_WRITE` (Linux 5.14).
#[must_use]
pub fn madvise_populate_is_known() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        // The two came together.
        advice_is_known(Advice::LinuxPopulateWrite as libc::c_int)
    })
}

/// Returns whether the kernel knows `MADV_COLLAPSE` (Linux 6.1, with transparent huge pages).
#[must_use]
pub fn madvise_collapse_is_known() -> bool {
    advice_is_known(crate::advise::MADV_COLLAPSE)
}

/// Returns whether the procfs pagemap can be scanned in runs (`PAGEMAP_SCAN`, Linux 6.7).
///
/// # Errors
/// [`SysError`] if `/proc/self/pagemap` cannot be opened or read.
pub fn pagemap_scan_is_known() -> Result<bool, SysError> {
    resident::scan_is_known()
}

/// What userfaultfd(2), or its device, gives this process.
#[derive(Debug)]
#[non_exhaustive]
pub enum UffdAccess {
    /// Faults of user code and of the kernel, as a page server needs.
    Full,
    /// Faults of user code alone: a system call that touches missing memory fails.
    UserModeOnly,
    /// Nothing, for want of permission.
    Denied {
        /// What the kernel answered.
        cause: io::Error,
    },
    /// Nothing: this kernel does not have it, or a filter hides it.
    Absent {
        /// What the kernel answered.
        cause: io::Error,
    },
    /// Nothing, for another reason.
    Failed {
        /// What the kernel answered.
        cause: io::Error,
    },
}

impl UffdAccess {
    fn refused(errno: Errno) -> Self {
        let cause = errno.into();
        match errno::uffd_refusal(errno) {
            UffdRefusal::Permission => Self::Denied { cause },
            UffdRefusal::Absent => Self::Absent { cause },
            UffdRefusal::Other => Self::Failed { cause },
        }
    }
}

/// Returns what the system call gives this process.
#[must_use]
pub fn uffd_syscall() -> UffdAccess {
    match open::by_syscall() {
        Ok(_) => UffdAccess::Full,
        Err(refused) if errno::uffd_refusal(refused) == UffdRefusal::Permission => {
            match open::user_mode_only() {
                Ok(_) => UffdAccess::UserModeOnly,
                Err(_) => UffdAccess::refused(refused),
            }
        }
        Err(refused) => UffdAccess::refused(refused),
    }
}

/// Returns what the device gives this process: full access, if it may open the device.
#[must_use]
pub fn uffd_device() -> UffdAccess {
    match open::by_device() {
        Ok(_) => UffdAccess::Full,
        Err(refused) => UffdAccess::refused(refused),
    }
}

/// Returns whether a process without privilege gets full access by the system call
/// (`vm.unprivileged_userfaultfd`).
///
/// # Errors
/// [`SysError`] if the file cannot be read or understood; it is absent without userfaultfd.
pub fn uffd_is_unprivileged(root: &SystemRoot) -> Result<bool, SysError> {
    root.parse("proc/sys/vm/unprivileged_userfaultfd", "0 or 1", |text| match text.trim() {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    })
}

/// The names of the bits of the ioctls, without `UFFDIO_`.
const IOCTLS: [(u32, &str); 10] = [
    (0, "REGISTER"),
    (1, "UNREGISTER"),
    (2, "WAKE"),
    (3, "COPY"),
    (4, "ZEROPAGE"),
    (5, "MOVE"),
    (6, "WRITEPROTECT"),
    (7, "CONTINUE"),
    (8, "POISON"),
    (63, "API"),
];

/// What a userfaultfd of this kernel can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UffdFeatures {
    /// The bits of `UFFD_FEATURE_*`.
    pub raw: u64,
    /// The bits of the ioctls that every userfaultfd has. Those of a range are returned when it is
    /// registered.
    pub ioctls: u64,
}

impl UffdFeatures {
    /// Returns the features as a set.
    #[must_use]
    pub const fn features(&self) -> Features {
        Features::from_bits(self.raw)
    }

    /// Returns whether a feature is offered, by its name without `UFFD_FEATURE_`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.names().any(|known| known == name)
    }

    /// Returns the names of the features that are offered, without `UFFD_FEATURE_`.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.features().names()
    }

    /// Returns the bits that have no name here: features of a newer kernel.
    #[must_use]
    pub fn unnamed(&self) -> u64 {
        self.features().unnamed().bits()
    }

    /// Returns the names of the ioctls that are offered, without `UFFDIO_`.
    pub fn ioctl_names(&self) -> impl Iterator<Item = &'static str> {
        let ioctls = self.ioctls;
        IOCTLS.into_iter().filter(move |(bit, _)| ioctls & (1 << bit) != 0).map(|(_, name)| name)
    }
}

/// Returns what a userfaultfd of this kernel can do, asked of a new one.
///
/// # Errors
/// [`ProbeError`] if none can be had, by the system call or the device, or the kernel refuses.
pub fn uffd_features() -> Result<UffdFeatures, ProbeError> {
    let uffd = open::full()
        .or_else(|refused| open::user_mode_only().map_err(|_| refused))
        .map_err(|cause| ProbeError::NoUserfaultfd { cause: cause.into() })?;
    let (raw, ioctls) = abi::handshake(uffd.as_fd(), 0)
        .map_err(|cause| ProbeError::Handshake { cause: cause.into() })?;
    Ok(UffdFeatures { raw, ioctls })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::MadeUp;

    #[test]
    fn features_have_names_and_new_ones_stay_bits() {
        let features = UffdFeatures { raw: 1 | 1 << 16 | 1 << 40, ioctls: 1 << 63 | 0b11 };
        assert_eq!(features.names().collect::<Vec<_>>(), ["PAGEFAULT_FLAG_WP", "MOVE"]);
        assert!(features.has("MOVE"));
        assert!(!features.has("POISON"));
        assert_eq!(features.unnamed(), 1 << 40);
        assert_eq!(features.ioctl_names().collect::<Vec<_>>(), ["REGISTER", "UNREGISTER", "API"]);
    }

    #[test]
    fn settings_of_a_made_up_host_are_read_as_they_stand_there() {
        let tree = MadeUp::new(&[
            ("proc/cpuinfo", "processor\t: 0\nmodel\t\t: 2\nmodel name\t: A CPU: fast\n"),
            ("proc/sys/vm/max_map_count", "65530\n"),
            ("proc/sys/vm/overcommit_memory", "2\n"),
            ("proc/sys/vm/unprivileged_userfaultfd", "1\n"),
        ]);
        let root = tree.root();
        assert_eq!(cpu_model(&root).unwrap().as_deref(), Some("A CPU: fast"));
        assert_eq!(max_map_count(&root).unwrap(), 65530);
        assert_eq!(overcommit(&root).unwrap(), Overcommit::Never);
        assert!(uffd_is_unprivileged(&root).unwrap());
        let odd = MadeUp::new(&[
            ("proc/cpuinfo", "CPU implementer : 0x41\n"),
            ("proc/sys/vm/overcommit_memory", "3\n"),
        ]);
        assert_eq!(cpu_model(&odd.root()).unwrap(), None);
        assert!(overcommit(&odd.root()).is_err());
        assert!(max_map_count(&odd.root()).unwrap_err().is_absent());
    }

    #[test]
    fn a_release_is_compared_by_its_first_two_numbers() {
        for (release, is_late) in [
            ("6.7.0", true),
            ("6.6.99", false),
            ("6.18.44-fc-v669", true),
            ("7.0-rc1", true),
            ("5.15.167.4-microsoft-standard", false),
            ("6.10", true),
            ("10.1.2", true),
            ("6", false),
            ("6.x", false),
            ("", false),
            ("99999999999999999999.1", false),
        ] {
            assert_eq!(is_at_least(release, (6, 7)), is_late, "{release}");
        }
    }

    #[test]
    fn an_advice_that_no_kernel_has_is_not_known() {
        assert!(!advice_is_known(9999));
        assert!(advice_is_known(Advice::Normal as libc::c_int));
    }
}

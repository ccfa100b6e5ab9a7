//! Facts about this kernel and host: one function for each.
//!
//! Each returns a typed value or the reason why not, and none changes anything. A caller asks once
//! and passes the answer on as a value.
//! Source: uname(2), userfaultfd(2), ioctl_userfaultfd(2), madvise(2), getrlimit(2).

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use uzone_pages::ByteLen;

pub use crate::host::kernel::{
    kernel_release, madvise_collapse_is_known, page_size, thp_is_switched_off,
};
use crate::host::root::{SysError, SystemRoot};
use crate::uffd::open;
pub use crate::uffd::open::uffd_features;

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

/// Returns the number of mappings that a process may have (`vm.max_map_count`).
///
/// # Errors
/// [`SysError`] if the file cannot be read or understood.
pub fn max_map_count(root: &SystemRoot) -> Result<u64, SysError> {
    root.number("proc/sys/vm/max_map_count")
}

/// Returns the kernel's policy for promising memory (`vm.overcommit_memory`): with 0 it refuses an obvious excess, with 1
/// nothing, and with 2 all that it could not give at once; lazy
/// reservation counts too.
///
/// # Errors
/// [`SysError`] if the file cannot be read or understood.
pub fn overcommit(root: &SystemRoot) -> Result<u64, SysError> {
    root.parse("proc/sys/vm/overcommit_memory", "0, 1 or 2", |text| {
        text.trim().parse().ok().filter(|mode| *mode <= 2)
    })
}

/// Returns the memory that this process may lock, or `None` if there is no limit. A process with
/// `CAP_IPC_LOCK` is not bound by it.
#[must_use]
pub fn memlock_limit() -> Option<ByteLen> {
    getrlimit(Resource::Memlock).current.map(ByteLen::new)
}

/// Returns whether the system call gives this process faults of the kernel too, as a page server needs, or those of
/// user code alone: then a system call that touches missing memory fails.
///
/// # Errors
/// The kernel's error, if it gives nothing: a want of permission, an error of [`uffd_is_absent`], or another one.
pub fn uffd_syscall() -> io::Result<bool> {
    match open::by_syscall() {
        Err(Errno::PERM | Errno::ACCESS) if open::user_mode_only().is_ok() => Ok(false),
        answer => Ok(answer.map(|_| true)?),
    }
}

/// Returns whether the device gives this process faults of the kernel too: it does, if the process may open it.
///
/// # Errors
/// Like [`uffd_syscall`].
pub fn uffd_device() -> io::Result<bool> {
    Ok(open::by_device().map(|_| true)?)
}

/// Returns whether this answer means that the kernel does not have userfaultfd, or that a filter hides it.
#[must_use]
pub fn uffd_is_absent(answer: &io::Error) -> bool {
    Errno::from_io_error(answer).is_some_and(open::is_absent)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::root::MadeUp;

    #[test]
    fn every_documented_answer_has_its_meaning() {
        let (denied, other) = (io::ErrorKind::PermissionDenied, io::Error::from(Errno::MFILE));
        for errno in [Errno::PERM, Errno::ACCESS] {
            let answer = io::Error::from(errno);
            assert!(answer.kind() == denied && !uffd_is_absent(&answer), "{errno:?}");
        }
        for errno in [Errno::NOSYS, Errno::NOENT] {
            let answer = io::Error::from(errno);
            assert!(answer.kind() != denied && uffd_is_absent(&answer), "{errno:?}");
        }
        assert!(other.kind() != denied && !uffd_is_absent(&other));
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
        assert_eq!(overcommit(&root).unwrap(), 2);
        assert!(uffd_is_unprivileged(&root).unwrap());
        let odd = MadeUp::new(&[
            ("proc/cpuinfo", "CPU implementer : 0x41\n"),
            ("proc/sys/vm/overcommit_memory", "3\n"),
        ]);
        assert_eq!(cpu_model(&odd.root()).unwrap(), None);
        assert!(overcommit(&odd.root()).is_err());
        assert!(max_map_count(&odd.root()).unwrap_err().is_absent());
    }
}

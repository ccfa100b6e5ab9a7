//! Getting a userfaultfd: the device, the system call, and the handshake; and the abilities of this kernel's:
//! [`uffd_features`].
//!
//! Unsafe: the system call that makes one, and the ioctl of its device.
//! Source: userfaultfd(2), "Userfaultfd" in the Linux administrator's guide.

use std::fs::File;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::mm::UserfaultfdFlags;

use crate::host::kernel::ioctl;
use crate::uffd::abi;
use crate::uffd::error::UffdError;
use crate::uffd::features::Features;
use crate::uffd::reply::CALLS;

/// The device that gives userfaultfds.
pub(crate) const DEVICE: &str = "/dev/userfaultfd";

/// `UFFD_USER_MODE_ONLY`.
const USER_MODE_ONLY: u32 = 1;
const _: () = assert!(USER_MODE_ONLY == linux_raw_sys::general::UFFD_USER_MODE_ONLY);

const FLAGS: UserfaultfdFlags = UserfaultfdFlags::CLOEXEC.union(UserfaultfdFlags::NONBLOCK);

/// Returns a new userfaultfd by the system call, for faults of user code and of the kernel.
pub(crate) fn by_syscall() -> rustix::io::Result<OwnedFd> {
    syscall(FLAGS)
}

/// Returns a new userfaultfd by the system call, for faults of user code alone.
pub(crate) fn user_mode_only() -> rustix::io::Result<OwnedFd> {
    syscall(FLAGS | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY))
}

fn syscall(flags: UserfaultfdFlags) -> rustix::io::Result<OwnedFd> {
    // SAFETY: the effects of the descriptor are magical, and are had by ioctls alone, each of which argues for itself.
    unsafe { rustix::mm::userfaultfd(flags) }
}

/// Returns a new userfaultfd from the device, for all faults.
pub(crate) fn by_device() -> rustix::io::Result<OwnedFd> {
    let device = File::options().read(true).write(true).open(DEVICE);
    let device = device.map_err(|cause| Errno::from_io_error(&cause).unwrap_or(Errno::IO))?;
    let flags = core::ptr::without_provenance_mut(FLAGS.bits() as usize);
    // SAFETY: the argument is a number and no pointer: the kernel reads and writes no memory of ours.
    let uffd = unsafe { ioctl(device.as_fd(), abi::NEW, flags) }?;
    // SAFETY: `from_raw_fd` wants an open descriptor that nothing else closes: the kernel made it by this
    // call, which did not fail.
    Ok(unsafe { OwnedFd::from_raw_fd(uffd) })
}

/// Returns a new userfaultfd for all faults, by the device or the system call. If both are refused, the
/// more specific error.
pub(crate) fn full() -> rustix::io::Result<OwnedFd> {
    by_device().or_else(|at_device| {
        // A filter may hide the call, and the device be there and closed to us.
        by_syscall().map_err(|by_call| if is_absent(by_call) { at_device } else { by_call })
    })
}

/// Returns whether userfaultfd(2), or opening its device, failed because the kernel was built without it, or a filter
/// hides it.
pub(crate) fn is_absent(errno: Errno) -> bool {
    matches!(errno, Errno::NOSYS | Errno::NOENT | Errno::NODEV | Errno::NXIO)
}

/// The bit of the handshake, which has no number among the answers.
const API: u32 = 63;

/// Returns the names of the ioctls that have a bit.
fn ioctl_names(bits: u64) -> Vec<&'static str> {
    let calls = CALLS.into_iter().zip(0..).chain([("API", API)]);
    calls.filter(|(_, bit)| bits & (1 << bit) != 0).map(|(name, _)| name).collect()
}

/// Returns the features of a userfaultfd of this kernel, and the names without `UFFDIO_` of the
/// ioctls that every one has, asked of a new one. The ioctls of a range are returned when it is
/// registered.
///
/// # Errors
/// [`UffdError::NoUserfaultfd`] if none can be had, by the system call or the device,
/// [`UffdError::NoDescriptor`] if the process has as many as it may, and [`UffdError::Probe`] if
/// the kernel refuses.
pub fn uffd_features() -> Result<(Features, Vec<&'static str>), UffdError> {
    // One for faults of user code has the same features, and needs no right.
    let uffd = user_mode_only()
        .or_else(|_| full())
        .map_err(|cause| UffdError::not_opened(cause, false))?;
    let (raw, ioctls) =
        abi::handshake(uffd.as_fd(), 0).map_err(|cause| UffdError::Probe(cause.into()))?;
    Ok((Features::from_bits_retain(raw), ioctl_names(ioctls)))
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_ioctl_has_its_name_by_its_bit() {
        assert_eq!(super::ioctl_names(1 << 63 | 0b11), ["REGISTER", "UNREGISTER", "API"]);
    }
}

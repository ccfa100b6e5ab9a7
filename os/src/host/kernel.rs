//! The page size and the release of this kernel, which advices it knows, and an ioctl whose answer is a number.
//!
//! Unsafe: an advice for no memory, to learn whether the kernel knows it; the ioctl, for which its callers argue; a
//! prctl that `rustix` has without the bits of its answer.
//! Source: uname(2), madvise(2), mmap(2), ioctl(2), prctl(2).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::ioctl::Opcode;
use uzone_pages::PageSize;

/// `MADV_COLLAPSE`, Linux 6.1.
pub(crate) const MADV_COLLAPSE: libc::c_int = 25;
const _: () = assert!(MADV_COLLAPSE.cast_unsigned() == linux_raw_sys::general::MADV_COLLAPSE);

/// Calls a driver, and returns its answer, which is not negative. `rustix` drops it where it updates an argument.
///
/// # Safety
/// The caller may access all memory of this process that the kernel reads or writes because of this number and
/// this argument.
pub(crate) unsafe fn ioctl(
    fd: BorrowedFd<'_>,
    number: Opcode,
    argument: *mut libc::c_void,
) -> Result<libc::c_int, Errno> {
    let (fd, number) = (fd.as_raw_fd(), libc::c_ulong::from(number));
    // SAFETY: the descriptor is open for the call; the rest is the caller's promise.
    let answer = unsafe { libc::syscall(libc::SYS_ioctl, fd, number, argument) };
    match libc::c_int::try_from(answer) {
        Ok(answer) if answer >= 0 => Ok(answer),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// Returns the kernel's release, such as `6.18.44`.
#[must_use]
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// The oldest kernel that uzone works on.
const FLOOR: (u32, u32) = (6, 7);

/// Returns the release of this kernel if it is older than uzone needs.
pub(crate) fn too_old() -> Option<&'static str> {
    static RELEASE: OnceLock<Option<String>> = OnceLock::new();
    let release = || Some(kernel_release()).filter(|release| !is_at_least(release, FLOOR));
    RELEASE.get_or_init(release).as_deref()
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

/// Returns whether the kernel knows an advice, by giving it for no memory.
fn advice_is_known(advice: libc::c_int) -> bool {
    // SAFETY: madvise(2) acts on the bytes from an address on; here they are none, so nothing is
    // read or written. The kernel checks the advice first and answers EINVAL if it is unknown.
    let answer = unsafe { libc::madvise(core::ptr::null_mut(), 0, advice) };
    answer == 0
}

/// Returns whether the kernel knows `MADV_COLLAPSE` (Linux 6.1, with transparent huge pages).
#[must_use]
pub fn madvise_collapse_is_known() -> bool {
    advice_is_known(MADV_COLLAPSE)
}

/// Returns whether this process gets no transparent huge page, however the host is set: it or a parent has switched them
/// off (`PR_SET_THP_DISABLE`), which children inherit. Where only memory that is not advised was left out (Linux 6.18),
/// they are not switched off.
#[must_use]
pub fn thp_is_switched_off() -> bool {
    const EXCEPT_ADVISED: libc::c_int = 1 << 1;
    const NONE: libc::c_ulong = 0;
    // SAFETY: prctl(2) reads and writes no memory for this option, whose other arguments are zero, as it demands.
    let flags = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, NONE, NONE, NONE, NONE) };
    // A kernel or a filter without the option answers below zero.
    flags > 0 && flags & EXCEPT_ADVISED == 0
}

#[cfg(test)]
mod tests {
    use rustix::mm::Advice;

    use super::*;

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
            assert_eq!(is_at_least(release, FLOOR), is_late, "{release}");
        }
    }

    #[test]
    fn an_advice_that_no_kernel_has_is_not_known() {
        assert!(!advice_is_known(9999));
        assert!(advice_is_known(Advice::Normal as libc::c_int));
    }
}

//! The ioctls of a userfaultfd: their numbers, which the compiler checks, and the calls. The structures are the
//! kernel's. The meaning of a reply is decided in `reply`.
//!
//! Unsafe: every call hands the kernel a structure, and some of them let it write memory that the
//! structure names. The calls here and in `install` name that memory; `registered` and `remote` argue whose it is.
//! Source: ioctl_userfaultfd(2) and its pages UFFDIO_*(2const).

use std::os::fd::BorrowedFd;

use linux_raw_sys::general::{
    uffdio_api, uffdio_continue, uffdio_copy, uffdio_poison, uffdio_range, uffdio_register,
    uffdio_writeprotect, uffdio_zeropage,
};
use rustix::io::Errno;
use rustix::ioctl::{self, Opcode};

/// `UFFD_API`, the one version of the interface there is.
const UFFD_API: u64 = 0xaa;
const TYPE: u8 = 0xaa;

/// `USERFAULTFD_IOC_NEW`: a new userfaultfd, from the device. Its argument is the flags.
pub(crate) const NEW: Opcode = ioctl::opcode::none(TYPE, 0);
const API: Opcode = ioctl::opcode::read_write::<uffdio_api>(TYPE, 0x3f);
const REGISTER: Opcode = ioctl::opcode::read_write::<uffdio_register>(TYPE, 0);
const UNREGISTER: Opcode = ioctl::opcode::read::<uffdio_range>(TYPE, 1);
const WAKE: Opcode = ioctl::opcode::read::<uffdio_range>(TYPE, 2);
pub(crate) const COPY: Opcode = ioctl::opcode::read_write::<uffdio_copy>(TYPE, 3);
pub(crate) const ZEROPAGE: Opcode = ioctl::opcode::read_write::<uffdio_zeropage>(TYPE, 4);
const WRITEPROTECT: Opcode = ioctl::opcode::read_write::<uffdio_writeprotect>(TYPE, 6);
pub(crate) const CONTINUE: Opcode = ioctl::opcode::read_write::<uffdio_continue>(TYPE, 7);
pub(crate) const POISON: Opcode = ioctl::opcode::read_write::<uffdio_poison>(TYPE, 8);

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const _: () = {
    assert!(NEW == 0xaa00);
    assert!(API == 0xc018_aa3f);
    assert!(REGISTER == 0xc020_aa00);
    assert!(UNREGISTER == 0x8010_aa01);
    assert!(WAKE == 0x8010_aa02);
    assert!(COPY == 0xc028_aa03);
    assert!(ZEROPAGE == 0xc020_aa04);
    assert!(WRITEPROTECT == 0xc018_aa06);
    assert!(CONTINUE == 0xc020_aa07);
    assert!(POISON == 0xc020_aa08);
};

/// `UFFDIO_*_MODE_DONTWAKE` of every answer but write-protect, of which waking is the point.
pub(crate) const DONTWAKE: u64 = 1;
/// `UFFDIO_COPY_MODE_WP` and `UFFDIO_CONTINUE_MODE_WP`.
pub(crate) const INSTALL_WP: u64 = 1 << 1;
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
pub(crate) const PROTECT: u64 = 1;

/// Gives the kernel the structure of an ioctl, and takes the kernel's values in it.
///
/// # Safety
/// `NUMBER` is of a userfaultfd's ioctl on a `T`. The caller may access all other memory of this process
/// that the kernel reads or writes because of `value`.
pub(crate) unsafe fn call<const NUMBER: Opcode, T>(
    fd: BorrowedFd<'_>,
    value: &mut T,
) -> Result<(), Errno> {
    // SAFETY: `Updater::new` wants the number to be of an ioctl that reads and writes a `T`: the
    // caller's first point. Those that only read it leave it as it is.
    let request = unsafe { ioctl::Updater::<NUMBER, T>::new(value) };
    // SAFETY: the kernel reads and writes the structure, which is borrowed for the call. On a
    // descriptor that is no userfaultfd the number is unknown. The rest is the caller's second point.
    unsafe { ioctl::ioctl(fd, request) }
}

/// Asks for `features` (bits of `UFFD_FEATURE_*`). Returns the features and the ioctls that a
/// userfaultfd of this kernel offers.
pub(crate) fn handshake(fd: BorrowedFd<'_>, features: u64) -> Result<(u64, u64), Errno> {
    let mut api = uffdio_api { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: `API` is on an `uffdio_api`, and names no memory.
    unsafe { call::<API, _>(fd, &mut api) }?;
    Ok((api.features, api.ioctls))
}

/// Starts to tell of faults. Returns the bits of the ioctls that the range takes.
///
/// # Safety
/// Of memory of this process: a thread that touches a missing page waits, and the holder of the descriptor decides the
/// contents of the page. No code may rely on such pages being zero, or on reaching them at once.
pub(crate) unsafe fn register(
    fd: BorrowedFd<'_>,
    start: u64,
    len: u64,
    mode: u64,
) -> Result<u64, Errno> {
    let mut value = uffdio_register { range: uffdio_range { start, len }, mode, ioctls: 0 };
    // SAFETY: `REGISTER` is on a `uffdio_register`; it reads and writes no memory, and the caller agreed to its effect
    // on later touches.
    unsafe { call::<REGISTER, _>(fd, &mut value) }?;
    Ok(value.ioctls)
}

/// Stops reporting faults, and wakes the waiting threads: the kernel fills missing pages again.
pub(crate) fn unregister(fd: BorrowedFd<'_>, start: u64, len: u64) -> Result<(), Errno> {
    let mut value = uffdio_range { start, len };
    // SAFETY: `UNREGISTER` is on an `uffdio_range`; it changes no byte that could be read.
    unsafe { call::<UNREGISTER, _>(fd, &mut value) }
}

/// Wakes the threads that wait for pages of the range; they retry.
pub(crate) fn wake(fd: BorrowedFd<'_>, start: u64, len: u64) -> Result<(), Errno> {
    let mut value = uffdio_range { start, len };
    // SAFETY: `WAKE` is on an `uffdio_range`; it changes no memory.
    unsafe { call::<WAKE, _>(fd, &mut value) }
}

/// Starts or stops to tell of writes. No byte changes.
pub(crate) fn write_protect(
    fd: BorrowedFd<'_>,
    start: u64,
    len: u64,
    mode: u64,
) -> Result<(), Errno> {
    let mut value = uffdio_writeprotect { range: uffdio_range { start, len }, mode };
    // SAFETY: `WRITEPROTECT` is on a `uffdio_writeprotect`; it changes how pages may be reached, no byte.
    unsafe { call::<WRITEPROTECT, _>(fd, &mut value) }
}

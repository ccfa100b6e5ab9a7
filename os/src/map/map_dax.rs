//! Mapping DAX devices and files on DAX mounts: [`Mapping::devdax`], [`Mapping::fsdax`].

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::mm::MapFlags;
use uzone_pages::{ByteLen, PageSize};

use crate::host::dax::device;
use crate::host::root::SystemRoot;
use crate::map::create;
use crate::map::mapping::{Mapping, Request};
use crate::map::options::{Access, Sharing};
use crate::map::shortage::MapError;

impl Mapping {
    /// Maps `len` bytes of a DAX device, from `offset` on, shared and writable. Both are multiples of
    /// the device's alignment, which is the [`Mapping::page_size`], and so is the address: the
    /// driver chooses one, and maps nothing elsewhere.
    ///
    /// Stores reach persistent memory when their cache lines are flushed; there is no msync(2) to
    /// wait for. A page is mapped when it is first touched. Costs one mmap(2) and what [`device`]
    /// does.
    ///
    /// # Errors
    /// As [`device`] if `file` is no DAX device; [`MapError::CutsDaxPage`] or [`MapError::BeyondDax`] if the
    /// range cuts a page of it or ends behind it; [`MapError::NotOpenFor`] unless it is open for reading and
    /// writing; another [`MapError`] names the limit that forbids it.
    pub fn devdax(file: impl Into<OwnedFd>, offset: u64, len: ByteLen) -> Result<Self, MapError> {
        let fd = file.into();
        if len.is_zero() {
            return Err(MapError::Empty);
        }
        let device = device(&SystemRoot::host(), &fd)?;
        device.check(offset, len)?;
        map_shared(fd, offset, len, device.align, MapFlags::SHARED, |cause| {
            create::explain_file(len, Access::ReadWrite, Sharing::Shared, cause)
        })
    }

    /// Maps `len` bytes of a file on a DAX mount, from `offset` on, shared and writable, so that the
    /// memory of the file is what is mapped and no copy of it (`MAP_SYNC`): a store lasts once its
    /// cache lines are flushed, without fsync(2).
    ///
    /// As for [`Mapping::file`], another process may truncate the file. Costs three system calls.
    ///
    /// # Errors
    /// [`MapError::NoDax`] if the file system does not offer that for this file; the file can still
    /// be mapped by [`Mapping::file`], and then fsync(2) makes stores last. Otherwise as
    /// [`Mapping::file`]; a DAX device is [`MapError::NotRegular`].
    pub fn fsdax(file: impl Into<OwnedFd>, offset: u64, len: ByteLen) -> Result<Self, MapError> {
        let fd = file.into();
        if len.is_zero() {
            return Err(MapError::Empty);
        }
        let page = create::inspect(fd.as_fd(), offset, len)?;
        if !is_regular(fd.as_fd())? {
            return Err(MapError::NotRegular);
        }
        let flags = MapFlags::SHARED_VALIDATE | MapFlags::SYNC;
        map_shared(fd, offset, len, page, flags, |cause| match cause {
            // A kernel before 4.15 does not know `MAP_SHARED_VALIDATE` either, and calls the request invalid.
            Errno::OPNOTSUPP | Errno::INVAL => MapError::NoDax(cause.into()),
            _ => create::explain_file(len, Access::ReadWrite, Sharing::Shared, cause),
        })
    }
}

/// Maps a file where the kernel likes to have it, readable and writable.
fn map_shared(
    fd: OwnedFd,
    offset: u64,
    len: ByteLen,
    page: PageSize,
    flags: MapFlags,
    explain: impl FnOnce(Errno) -> MapError,
) -> Result<Mapping, MapError> {
    let request = Request {
        page,
        // No more is asked for than a page: the driver of a DAX device starts a mapping at a
        // multiple of the device's alignment or refuses it, and a file system starts one where it
        // can use huge pages.
        align: page.bytes(),
        access: Access::ReadWrite,
        flags,
        fd: Some((fd.as_fd(), offset)),
    };
    let mapping = Mapping::map(len, &request, explain)?;
    Ok(mapping.backed_by(fd, offset, Sharing::Shared))
}

fn is_regular(fd: BorrowedFd<'_>) -> Result<bool, MapError> {
    let inspect = |cause: Errno| MapError::Inspect(cause.into());
    let stat = rustix::fs::fstat(fd).map_err(inspect)?;
    Ok(FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}

//! Making a mapping: anonymous memory, huge pages of a pool, memory files, files and devices, also
//! DAX devices and files on DAX mounts ([`Mapping::devdax`], [`Mapping::fsdax`]).
//!
//! Here a request is turned into flags, a file is inspected before it is mapped, and a refusal is
//! explained. The one call that maps is in `mapping`.
//!
//! Cost: one mmap(2), 1 to 10 us at any length, because no page is touched; an advice on huge pages
//! is one call more, but for *never*; a memory file costs three more, a file two.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags};
use uzone_pages::{ByteLen, PageSize};

use crate::host::dax::device;
use crate::host::hugepages;
use crate::host::kernel;
use crate::host::root::SystemRoot;
use crate::map::mapping::{Mapping, Request};
use crate::map::options::{Access, Anonymous, HugeAdvice, MAX_ALIGN, Sharing};
use crate::map::shortage::MapError;

/// The start of memory that should be huge, unless something else is asked for: a multiple of the reach of one entry on
/// x86-64 and on AArch64 with 4 KiB pages.
const HUGE_ALIGN: u64 = 2 << 20;

/// `HUGETLBFS_MAGIC`, from statfs(2).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

impl Mapping {
    /// Maps private pages of no file, all zero.
    ///
    /// # Errors
    /// [`MapError`] names the limit that forbids it.
    pub fn anonymous(len: ByteLen, how: Anonymous) -> Result<Self, MapError> {
        let page = kernel::page_size();
        let wanted_align = match (how.align, how.huge) {
            (Some(align), _) => align.get(),
            (None, HugeAdvice::Advise) if len.get() >= HUGE_ALIGN => HUGE_ALIGN,
            (None, _) => page.bytes(),
        };
        if !wanted_align.is_power_of_two() || wanted_align > MAX_ALIGN {
            return Err(MapError::BadAlign { align_bytes: wanted_align });
        }
        let mut flags = MapFlags::PRIVATE;
        if !how.is_accounted {
            flags |= MapFlags::NORESERVE;
        }
        if how.huge == HugeAdvice::Never {
            // In place of an advice, which is a call of its own and cuts a kernel mapping in two.
            flags |= MapFlags::STACK;
        }
        let mapping = Self::map(
            len,
            &Request {
                page,
                align: wanted_align.max(page.bytes()),
                access: Access::ReadWrite,
                flags,
                fd: None,
            },
            |cause| explain(len, true, cause),
        )?;
        if how.huge != HugeAdvice::Advise {
            return Ok(mapping);
        }
        match mapping.ask(&(0..mapping.mapped_len()), Advice::LinuxHugepage) {
            // A kernel without transparent huge pages, or a filter that denies the call: it is only
            // advice, and the memory is the same without it.
            Ok(()) | Err(Errno::INVAL | Errno::PERM | Errno::ACCESS) => Ok(mapping),
            Err(cause) => {
                Err(MapError::Advice { len, advice: "MADV_HUGEPAGE", cause: cause.into() })
            }
        }
    }

    /// Maps private huge pages of the pool of `size`, all zero. The pool promises them at once, so
    /// no later touch fails; each is taken from it when touched.
    ///
    /// # Errors
    /// [`MapError::HugePool`] with the numbers of the pool if it is too small.
    pub fn hugetlb(len: ByteLen, size: PageSize) -> Result<Self, MapError> {
        let flags = MapFlags::PRIVATE
            | MapFlags::HUGETLB
            | MapFlags::from_bits_retain(hugepages::encoded_in_flags(size));
        Self::map(
            len,
            &Request {
                page: size,
                align: size.bytes(),
                access: Access::ReadWrite,
                flags,
                fd: None,
            },
            |cause| explain_huge(len, size, cause),
        )
    }

    /// Makes a memory file and maps it shared, so that it can be handed to other processes by
    /// [`Mapping::fd`]. With `huge`, it is made of huge pages of the pool.
    ///
    /// The file is sealed against shrinking and growing: no holder of the descriptor can take pages away by
    /// truncation. `name` shows in `/proc/self/maps`.
    ///
    /// # Errors
    /// [`MapError`] names the limit that forbids it.
    pub fn memfd(name: &str, len: ByteLen, huge: Option<PageSize>) -> Result<Self, MapError> {
        let fd = create_memfd(name, len, huge)?;
        let page = huge.unwrap_or_else(kernel::page_size);
        map_shared(fd, 0, len, page, MapFlags::SHARED, |cause| match huge {
            Some(size) => explain_huge(len, size, cause),
            None => explain(len, false, cause),
        })
    }

    /// Seals the memory file behind this mapping for good: only mappings that exist already write
    /// to it. Other processes that get its descriptor can read it, and map it privately.
    ///
    /// # Errors
    /// The error of the system: this is no memory file.
    pub fn seal_for_readers(&self) -> io::Result<()> {
        let fd = self.fd().ok_or(io::ErrorKind::Unsupported)?;
        Ok(rustix::fs::fcntl_add_seals(fd, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?)
    }

    /// Maps `len` bytes of a file or device, from `offset` on. A process that may truncate the file can
    /// make a later access raise `SIGBUS`: the kernel has no page to show for bytes behind the end of a
    /// file. A caller that maps files of others has to keep them from shrinking (a sealed memory file, a
    /// lease, its own directory).
    ///
    /// # Errors
    /// [`MapError`]: the offset cuts a page of the file ([`MapError::CutsPage`]), the range
    /// ends behind the file ([`MapError::BeyondEnd`]), it is a directory or another kind without
    /// memory ([`MapError::NotMappable`]), or it is not open for `access`
    /// ([`MapError::NotOpenFor`]).
    pub fn file(
        file: impl Into<OwnedFd>,
        offset: u64,
        len: ByteLen,
        access: Access,
        sharing: Sharing,
    ) -> Result<Self, MapError> {
        Self::file_aligned(file, offset, len, access, sharing, ByteLen::new(1))
    }

    /// Maps a file as [`Mapping::file`] does, at an address that is as far behind a multiple of `align` as
    /// `offset` is. Page tables then end where those of other such mappings of the file end.
    ///
    /// # Errors
    /// The errors of [`Mapping::file`], and [`MapError::BadAlign`] unless `align` is a power of two of at most
    /// 4 GiB.
    pub fn file_aligned(
        file: impl Into<OwnedFd>,
        offset: u64,
        len: ByteLen,
        access: Access,
        sharing: Sharing,
        align: ByteLen,
    ) -> Result<Self, MapError> {
        let align = align.get();
        if !align.is_power_of_two() || align > MAX_ALIGN {
            return Err(MapError::BadAlign { align_bytes: align });
        }
        let fd = file.into();
        if len.is_zero() {
            return Err(MapError::Empty);
        }
        let (page, _) = inspect(fd.as_fd(), offset, len)?;
        let flags = match sharing {
            Sharing::Shared => MapFlags::SHARED,
            Sharing::Private => MapFlags::PRIVATE,
        };
        let mapping = Self::map(
            len,
            &Request {
                page,
                align: align.max(page.bytes()),
                access,
                flags,
                fd: Some((fd.as_fd(), offset)),
            },
            |cause| explain_file(len, access, sharing, cause),
        )?;
        Ok(mapping.backed_by(fd, offset, sharing))
    }

    /// Maps `len` bytes of a DAX device, from `offset` on, shared and writable. Both are multiples
    /// of the device's alignment, which is the [`Mapping::page_size`], and so is the address: the
    /// driver chooses one, and maps nothing elsewhere.
    ///
    /// Stores reach persistent memory when their cache lines are flushed; there is no msync(2) to
    /// wait for. A page is mapped when it is first touched. Costs one mmap(2) and the cost of [`device`].
    ///
    /// # Errors
    /// As [`device`] if `file` is no DAX device; [`MapError::CutsPage`] or [`MapError::BeyondDax`]
    /// if the range cuts a page of it or ends behind it; [`MapError::NotOpenFor`] unless it is open
    /// for reading and writing; another [`MapError`] names the limit that forbids it.
    pub fn devdax(file: impl Into<OwnedFd>, offset: u64, len: ByteLen) -> Result<Self, MapError> {
        let fd = file.into();
        if len.is_zero() {
            return Err(MapError::Empty);
        }
        let device = device(&SystemRoot::host(), &fd)?;
        device.check(offset, len)?;
        map_shared(fd, offset, len, device.align, MapFlags::SHARED, |cause| {
            explain_file(len, Access::ReadWrite, Sharing::Shared, cause)
        })
    }

    /// Maps `len` bytes of a file on a DAX mount, from `offset` on, shared and writable. The mapping is the memory of the
    /// file itself and no copy of it (`MAP_SYNC`): a store lasts once its cache lines are flushed, without fsync(2).
    ///
    /// Another process may truncate the file, as with [`Mapping::file`]. Costs three system calls.
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
        let (page, is_regular) = inspect(fd.as_fd(), offset, len)?;
        if !is_regular {
            return Err(MapError::NotRegular);
        }
        let flags = MapFlags::SHARED_VALIDATE | MapFlags::SYNC;
        map_shared(fd, offset, len, page, flags, |cause| match cause {
            Errno::OPNOTSUPP | Errno::INVAL => MapError::NoDax(cause.into()),
            _ => explain_file(len, Access::ReadWrite, Sharing::Shared, cause),
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

/// Explains why the kernel did not map memory. `counted` is whether strict overcommit accounting counts it.
fn explain(len: ByteLen, counted: bool, cause: Errno) -> MapError {
    match cause {
        Errno::NOMEM => MapError::memory(&SystemRoot::host(), len, counted, cause.into()),
        // The process locks all that it maps, and may not lock as much.
        Errno::AGAIN => MapError::locked(len, cause.into()),
        _ => MapError::Refused { len, cause: cause.into() },
    }
}

/// Explains why a file or device was not mapped.
fn explain_file(len: ByteLen, access: Access, sharing: Sharing, cause: Errno) -> MapError {
    match cause {
        Errno::ACCESS => MapError::NotOpenFor { access, sharing, cause: cause.into() },
        Errno::NODEV => MapError::NotMappable {
            kind: "a file whose file system does not support it",
            cause: Some(cause.into()),
        },
        _ => explain(len, access == Access::ReadWrite && sharing == Sharing::Private, cause),
    }
}

/// Explains why huge pages of a pool were not mapped.
fn explain_huge(len: ByteLen, size: PageSize, cause: Errno) -> MapError {
    match cause {
        Errno::NOMEM => MapError::huge_pool(&SystemRoot::host(), size, len, cause.into()),
        Errno::NODEV | Errno::INVAL => MapError::HugeSize { size, cause: cause.into() },
        _ => explain(len, false, cause),
    }
}

/// Makes a memory file of `len` bytes, up to the next page, that can neither shrink nor grow.
fn create_memfd(name: &str, len: ByteLen, huge: Option<PageSize>) -> Result<OwnedFd, MapError> {
    if len.is_zero() {
        return Err(MapError::Empty);
    }
    let failed = |cause: Errno| match (huge, cause) {
        (Some(size), Errno::NODEV | Errno::INVAL) => {
            MapError::HugeSize { size, cause: cause.into() }
        }
        _ => MapError::Create { name: name.to_owned(), len, cause: cause.into() },
    };
    let page = huge.unwrap_or_else(kernel::page_size);
    let too_long = MapError::TooLong { len_bytes: len.get() };
    let Ok(whole) = len.align_up(page.bytes()) else {
        return Err(too_long);
    };
    if i64::try_from(whole.get()).is_err() {
        return Err(too_long);
    }
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    if let Some(size) = huge {
        flags |=
            MemfdFlags::HUGETLB | MemfdFlags::from_bits_retain(hugepages::encoded_in_flags(size));
    }
    let fd = memfd(name, flags).map_err(failed)?;
    rustix::fs::ftruncate(&fd, whole.get()).map_err(failed)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).map_err(failed)?;
    Ok(fd)
}

/// Makes an empty memory file, of which nothing is executed.
pub(crate) fn memfd(name: &str, flags: MemfdFlags) -> Result<OwnedFd, Errno> {
    // The kernel warns about memory files without this flag.
    rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
}

/// Returns the page size of a file's memory, and whether it is a regular file, if the range can be
/// mapped as far as its kind, its length and its alignment go.
fn inspect(fd: BorrowedFd<'_>, offset: u64, len: ByteLen) -> Result<(PageSize, bool), MapError> {
    let inspected = |cause: Errno| MapError::Inspect(cause.into());
    let stat = rustix::fs::fstat(fd).map_err(inspected)?;
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::CharacterDevice | FileType::BlockDevice => None,
        FileType::Directory => Some("a directory"),
        FileType::Fifo => Some("a pipe"),
        FileType::Socket => Some("a socket"),
        FileType::Symlink => Some("a symbolic link"),
        FileType::Unknown => Some("a descriptor of this kind"),
    };
    if let Some(kind) = kind {
        return Err(MapError::NotMappable { kind, cause: None });
    }
    let is_regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let mut page = kernel::page_size();
    if is_regular {
        let system = rustix::fs::fstatfs(fd).map_err(inspected)?;
        // The width and sign of these fields differ between architectures; both are small.
        let magic = u64::try_from(system.f_type).unwrap_or(0);
        let block = u64::try_from(system.f_bsize).unwrap_or(0);
        if magic == HUGETLBFS_MAGIC
            && let Ok(huge) = PageSize::try_from_bytes(block)
        {
            page = huge;
        }
    }
    if !offset.is_multiple_of(page.bytes()) {
        return Err(MapError::CutsPage { start: offset, len, page });
    }
    // A device has no length here; its driver refuses a range that it lacks.
    let file_len = u64::try_from(stat.st_size).unwrap_or(0);
    let is_inside = offset.checked_add(len.get()).is_some_and(|end| end <= file_len);
    if is_regular && !is_inside {
        return Err(MapError::BeyondEnd { offset, len_bytes: len.get(), file_len });
    }
    Ok((page, is_regular))
}

/// Makes a file in memory with these bytes, which lives as long as a descriptor of it does.
///
/// # Errors
/// The error of the system: no memory, or as many descriptors as the process may have.
pub fn memory_file(name: &str, bytes: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd(name, MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file)
}

//! An owned range of memory of this process: [`Mapping`].
//!
//! A `Mapping` is memory and where it comes from: anonymous pages, a memory file, a file or a
//! device; `create` makes them, and they are unmapped when dropped. Memory that the caller
//! mapped is adopted ([`Mapping::adopt`]) and stays mapped. Its bytes may change under us (another
//! process, a page server, another thread of ours), so it lends no slice of bytes, but one of atomic
//! words ([`Mapping::as_words`]); [`Mapping::read_at`] and [`Mapping::write_at`] copy. Memory of which we
//! are the only user is an [`Exclusive`](crate::Exclusive), and that has slices of bytes.
//!
//! Units: offsets and lengths are bytes from the start of the mapping; addresses are [`Addr`].
//! Sharing: every method takes `&self`, from any thread.
//! Copies: `access` below it, without `unsafe` of its own.
//! Unsafe: this is the file that turns an address into memory. The proof of everything in
//! `exclusive`, `populate`, `advise` and `resident` rests on the invariants of `Mapping`,
//! whose fields only this file and `cut` below it set.

use core::any::Any;
use core::fmt;
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use uzone_pages::{ByteLen, PageSize};

use crate::host::kernel;
use crate::map::bytes::AccessError;
use crate::map::options::{Access, Addr, Sharing};
use crate::map::shortage::MapError;

mod access;
mod cut;
pub(crate) mod error;

pub use error::{MappingError, Rejected};

/// The number of the next mapping: no two of them have the same, so memory that was cut is known
/// again.
static NEXT_ORIGIN: AtomicU64 = AtomicU64::new(0);

fn next_origin() -> u64 {
    // Relaxed: the number is only compared, and every call gets another.
    NEXT_ORIGIN.fetch_add(1, Ordering::Relaxed)
}

/// The memory behind a mapping, which decides whether dropping it unmaps it.
#[derive(Debug)]
enum Behind {
    /// Private pages of no file, of the host's size or huge. Ours to unmap.
    Anonymous,
    /// A file or device, from byte `offset` on. Ours to unmap. Parts of one mapping share the
    /// descriptor.
    File { fd: Arc<OwnedFd>, offset: u64, sharing: Sharing },
    /// Memory that the caller mapped, and unmaps.
    Adopted,
    /// The mapping of another value, which unmaps it when this and all parts are dropped.
    Lent { owner: Arc<dyn Any + Send + Sync> },
}

/// A range of memory of this process, unmapped when dropped unless it was adopted.
///
/// # Invariants
/// 1. `start` is the address that mmap(2) returned, or an address inside of that memory with the rest unmapped or in
///    other parts that were cut from it, or the address that the caller of `adopt`
///    vouched for; it is a multiple of `page`.
/// 2. The `mapped_len` bytes from `start` are mapped, readable, and writable unless `access` is
///    read-only, until this value is dropped. They are one mapping of ours unless `behind` is
///    `Adopted` or `Lent`. `mapped_len` is a multiple of `page` and at most `isize::MAX`. No other `Mapping`
///    with the same `origin` has any of them.
/// 3. `0 < len <= mapped_len`.
/// 4. No reference to the bytes exists but those that a method of this crate lends, and a plain
///    `&[u8]`, `&mut [u8]` or `[T]` is lent by `Mapped` alone, for the time of
///    their borrow. They hold private memory of no file, or memory that the caller vouched for with an `Exclusivity`.
/// 5. Two values have the same `origin` only if they were cut from one, whose `start` was good for
///    the bytes of both.
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    mapped_len: usize,
    page: PageSize,
    access: Access,
    behind: Behind,
    origin: u64,
}

// SAFETY: `Send` wants the value to be usable, and dropped, by another thread than its maker's.
// A mapping belongs to the process, not to a thread; mmap, munmap and madvise take any thread.
unsafe impl Send for Mapping {}

// SAFETY: `Sync` wants that no two calls with `&self` race in a way that is undefined. `&self`
// reaches the bytes only through the atomic words of `Mapping::words` and through the kernel.
unsafe impl Sync for Mapping {}

/// The arguments of one mmap(2), besides the length. A file is mapped as far behind a multiple of `align` as its offset
/// is.
pub(crate) struct Request<'fd> {
    pub(crate) page: PageSize,
    pub(crate) align: u64,
    pub(crate) access: Access,
    pub(crate) flags: MapFlags,
    pub(crate) fd: Option<(BorrowedFd<'fd>, u64)>,
}

impl Mapping {
    /// Takes `len` bytes from `start` on that the caller mapped and keeps. Dropping the `Mapping` does not
    /// unmap them. It is never exclusive, so it lends no slice of bytes: other owners may change the bytes
    /// meanwhile, as described below.
    ///
    /// `page` is the size of the pages behind the memory, the host's or that of huge pages. The
    /// start and the length are multiples of it. Costs no system call.
    ///
    /// # Errors
    /// [`MapError::Empty`], [`MapError::TooLong`], [`MapError::AdoptedPage`] for a page smaller
    /// than the host's, [`MapError::CutsPage`] if the range cuts a page, or
    /// [`MapError::AdoptedWraps`] if it does not end before the last address.
    ///
    /// # Safety
    /// From this call until the `Mapping`, or every part that was cut from it, is dropped, all of
    /// the following holds for the `len` bytes from `start`:
    /// 1. They are mapped, readable and writable, and stay so: they are not unmapped, moved or protected,
    ///    and a file behind them is not truncated below them. They may consist of several mappings. `start`
    ///    was derived from the pointer that mapped them and may be used for all of them.
    /// 2. They hold bytes that were initialised: memory that the kernel mapped does, and so does memory into which only
    ///    bytes without padding were written.
    /// 3. No reference to any of them exists in this process, but to
    ///    [`UnsafeCell`](core::cell::UnsafeCell) or to atomics.
    /// 4. Nothing in this process reads or writes them but through mappings of this crate, through
    ///    atomics of 8 aligned bytes, or through system calls. Another process and a device may
    ///    write them at any time.
    /// 5. The caller accepts the work of the safe methods of a `Mapping` on its own memory: bytes are written, pages are
    ///    made present, and [`Mapping::discard`] gives them back to the
    ///    kernel, after which private pages read as zero.
    pub unsafe fn adopt(
        start: NonNull<u8>,
        len: ByteLen,
        page: PageSize,
    ) -> Result<Self, MapError> {
        let addr = Addr::new(start.addr().get());
        let host = kernel::page_size();
        if len.is_zero() {
            return Err(MapError::Empty);
        }
        let len_usize = fits(len).ok_or(MapError::TooLong { len_bytes: len.get() })?;
        if page < host {
            return Err(MapError::AdoptedPage { page, host });
        }
        let page_len = ByteLen::new(page.bytes());
        if !addr.is_aligned(page_len) || !len.get().is_multiple_of(page.bytes()) {
            return Err(MapError::CutsPage { start: addr.get() as u64, len, page });
        }
        if addr.get().checked_add(len_usize).is_none() {
            return Err(MapError::AdoptedWraps { addr, len });
        }
        // The invariants: 1 and 3 were checked, and the caller vouches for 2 and 4.
        Ok(Self {
            start,
            len: len_usize,
            mapped_len: len_usize,
            page,
            access: Access::ReadWrite,
            behind: Behind::Adopted,
            origin: next_origin(),
        })
    }

    /// Takes the mapping `of` of `owner` once more, which gives it away only where it is consumed. It
    /// stays mapped until this value and all others that have a part of it are dropped.
    pub(crate) fn lent_by<T: Any + Send + Sync>(owner: Arc<T>, of: fn(&T) -> &Self) -> Self {
        let of = of(&owner);
        // The invariants: the owner's mapping has 1 to 3 by its own, for as long as the owner lives.
        // 4: only private memory lends plain slices, and this is not private.
        Self {
            start: of.start,
            len: of.len,
            mapped_len: of.mapped_len,
            page: of.page,
            access: of.access,
            behind: Behind::Lent { owner },
            origin: next_origin(),
        }
    }

    /// Sets the file behind a new mapping, from byte `offset` on. It counts as anonymous until then, so
    /// this is called before the mapping is handed out.
    pub(crate) fn backed_by(self, fd: OwnedFd, offset: u64, sharing: Sharing) -> Self {
        let mut backed = self;
        backed.behind = Behind::File { fd: Arc::new(fd), offset, sharing };
        backed
    }

    /// Returns the length of the mapping, as it was asked for; never zero.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        ByteLen::new(self.len as u64)
    }

    /// Returns the start of the mapping.
    #[must_use]
    pub fn addr(&self) -> Addr {
        Addr::new(self.start.addr().get())
    }

    /// Returns a pointer to the first byte, for foreign code and for `unsafe` code of the caller, which has to know that
    /// others may change the bytes meanwhile. It is good for all bytes of the mapping, until that is dropped.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the size of the pages behind the mapping: the host's, of huge pages of a pool, the alignment
    /// of a DAX device, or the size given to [`Mapping::adopt`]. Transparent huge pages do not count,
    /// because they come and go.
    #[must_use]
    pub fn page_size(&self) -> PageSize {
        self.page
    }

    /// Returns the access of the mapping.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the file behind the mapping, or `None` for anonymous and adopted memory.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.behind {
            Behind::File { fd, .. } => Some(fd.as_fd()),
            Behind::Anonymous | Behind::Adopted | Behind::Lent { .. } => None,
        }
    }

    /// Returns at which byte of its file the mapping starts, or `None` where [`Mapping::fd`] is.
    #[must_use]
    pub fn file_offset(&self) -> Option<u64> {
        match self.behind {
            Behind::File { offset, .. } => Some(offset),
            Behind::Anonymous | Behind::Adopted | Behind::Lent { .. } => None,
        }
    }

    /// Returns whether writes reach the file behind the mapping, or `None` where [`Mapping::fd`] is.
    #[must_use]
    pub fn sharing(&self) -> Option<Sharing> {
        match self.behind {
            Behind::File { sharing, .. } => Some(sharing),
            Behind::Anonymous | Behind::Adopted | Behind::Lent { .. } => None,
        }
    }

    /// Returns whether the memory has another owner, so that it stays mapped when this value is dropped: the caller of
    /// [`Mapping::adopt`], or the lender ([`Mapping::lent`]).
    #[must_use]
    pub fn is_adopted(&self) -> bool {
        matches!(self.behind, Behind::Adopted | Behind::Lent { .. })
    }

    /// Returns the file behind the mapping, or `None` for anonymous and adopted memory, or if
    /// the kernel does not report it: the number of the device that the file is on, or that it is,
    /// and that of the file on it, `None` for a device itself. Two mappings with the same numbers
    /// share their bytes, by whatever path their files were opened.
    #[must_use]
    pub fn file_id(&self) -> Option<(u64, Option<u64>)> {
        let stat = rustix::fs::fstat(self.fd()?).ok()?;
        Some(match FileType::from_raw_mode(stat.st_mode) {
            // Several nodes may name one device: the device counts, not the node.
            FileType::CharacterDevice | FileType::BlockDevice => (stat.st_rdev, None),
            _ => (stat.st_dev, Some(stat.st_ino)),
        })
    }

    /// Returns the number that only parts of the same mapping share.
    pub(crate) fn origin(&self) -> u64 {
        self.origin
    }

    /// Returns whether these pages have no other user: they are private and anonymous. A file may have
    /// others, also one that this process made, and adopted memory has its owner.
    #[must_use]
    pub fn is_private(&self) -> bool {
        matches!(self.behind, Behind::Anonymous)
    }

    /// Returns `range` widened to whole pages of `page`, as indices into the mapping.
    pub(crate) fn widen(&self, range: &Range<u64>) -> Result<Range<usize>, AccessError> {
        let &Range { start, end } = range;
        if start >= end {
            return Err(AccessError::Empty { start, end });
        }
        let beyond = AccessError::Beyond { start, end, len_bytes: self.len as u64 };
        if end > self.len as u64 {
            return Err(beyond);
        }
        let (Ok(start), Ok(end), Ok(page)) =
            (usize::try_from(start), usize::try_from(end), usize::try_from(self.page.bytes()))
        else {
            return Err(beyond);
        };
        // No overflow: `end` is at most `mapped_len`, which is a multiple of the page.
        Ok(start & !(page - 1)..end.next_multiple_of(page))
    }

    /// Returns the whole mapping as a range of offsets.
    pub(crate) fn whole(&self) -> Range<u64> {
        0..self.len as u64
    }

    /// Returns the pointer to the byte at `offset` of the mapped pages.
    ///
    /// # Panics
    /// If it is not one of them.
    pub(crate) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.mapped_len, "an offset behind the mapping");
        // SAFETY: `add` wants the result to be in the same allocation and the offset to fit an
        // `isize`. Invariant 2: the mapping has `mapped_len` bytes, at most `isize::MAX`, and
        // `offset` is less.
        unsafe { self.start.add(offset) }
    }

    /// Returns the mapped pages as atomic words. They may be written only where `access` allows it.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        let words = self.start.cast::<AtomicU64>();
        let count = self.mapped_len / size_of::<AtomicU64>();
        // SAFETY: `from_raw_parts` wants `count` initialised words, aligned, in one allocation, that change
        // for the time of the borrow only through the atomics.
        // 1. In bounds and aligned: invariants 1 and 2; a page is a multiple of 8.
        // 2. Initialised: the kernel fills every page before it shows it, and all numbers are
        //    words. Padding of values written through `Mapped` is settled before this is called.
        //    Of adopted memory the caller of `adopt` guarantees it.
        // 3. Changes: by invariant 4 this process has no plain access while `&self` lives: `Mapped` owns its `Mapping`
        //    and calls this from `&mut self` alone, through `populate`, lending nothing meanwhile. Other processes
        //    and the kernel change memory as atomics do, and so do other users of adopted memory, by the contract
        //    of `adopt`. Where the same bytes are lent through another mapping of a file, the `Exclusivity` keeps
        //    this process away from them here. Loads of 64-bit atomics are loads on read-only pages too.
        unsafe { core::slice::from_raw_parts(words.as_ptr(), count) }
    }

    /// Returns the place of the bytes. Only `Mapped` makes references of it.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the number of bytes that are mapped: `len`, up to the next page.
    pub(crate) fn mapped_len(&self) -> usize {
        self.mapped_len
    }

    /// Maps memory for a request. `request` is for new memory or for a file that is open, and `explain` returns the
    /// reason for the kernel's refusal.
    pub(crate) fn map(
        len: ByteLen,
        request: &Request<'_>,
        explain: impl FnOnce(Errno) -> MapError,
    ) -> Result<Self, MapError> {
        if len.is_zero() {
            return Err(MapError::Empty);
        }
        if let Some(release) = kernel::too_old() {
            return Err(MapError::TooOld { release });
        }
        let too_long = || MapError::TooLong { len_bytes: len.get() };
        let fits = |bytes| fits(bytes).ok_or_else(too_long);
        let page = request.page.bytes();
        let mapped = len.align_up(page).map_err(|_| too_long())?;
        let slack = ByteLen::new(request.align - page);
        let asked_len = fits(mapped.checked_add(slack).map_err(|_| too_long())?)?;
        let (len_usize, mapped_len) = (fits(len)?, fits(mapped)?);
        let align = fits(ByteLen::new(request.align))?;
        let start =
            map_aligned(mapped_len, asked_len - mapped_len, align, request).map_err(explain)?;
        Ok(Self {
            start,
            len: len_usize,
            mapped_len,
            page: request.page,
            access: request.access,
            // `backed_by` sets the file next, if there is one.
            behind: Behind::Anonymous,
            origin: next_origin(),
        })
    }
}

/// Returns a length as one that a mapping can have.
fn fits(len: ByteLen) -> Option<usize> {
    len.to_usize().ok().filter(|&len| isize::try_from(len).is_ok())
}

/// Maps `len` bytes at an address that is as far behind a multiple of `align` as the file offset is.
/// `slack` is the excess that is mapped to find one, and unmapped again.
fn map_aligned(
    len: usize,
    slack: usize,
    align: usize,
    request: &Request<'_>,
) -> Result<NonNull<u8>, Errno> {
    // Of a file the addresses are reserved first, since its bytes cannot be moved in them.
    let is_moved_file = request.fd.is_some() && slack != 0;
    let first = if is_moved_file {
        // A file that cannot be mapped is refused here, before any address is replaced.
        let tried = mmap(len, request)?;
        // SAFETY: the `len` bytes from `tried` were mapped above and no value has them.
        unsafe { unmap(tried.as_ptr(), len) }?;
        reserve(len + slack)?
    } else {
        mmap(len + slack, request)?
    };
    let offset = request.fd.map_or(0, |(_, offset)| offset & (align as u64 - 1));
    let offset = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
    let skipped = offset.wrapping_sub(first.addr().get()) & (align - 1);
    if skipped > slack {
        // The kernel did not start pages of a pool or device where it promises.
        // SAFETY: these bytes were mapped above and no value has them.
        unsafe { unmap(first.as_ptr(), len + slack) }?;
        return Err(Errno::INVAL);
    }
    // SAFETY: `add` wants to stay inside of the mapped memory: `skipped` is at most `slack`, and `len + slack` bytes
    // were mapped.
    let start = unsafe { first.add(skipped) };
    // SAFETY: `map_over` replaces `len` bytes from `start`, which were reserved above and no value has
    // them.
    let mapped = if is_moved_file { unsafe { map_over(start, len, request) } } else { Ok(()) };
    // SAFETY: the `skipped` bytes before `start` were mapped above and no value has them.
    let before = unsafe { unmap(first.as_ptr(), skipped) };
    let end = start.as_ptr().wrapping_add(len);
    // SAFETY: as above, of the rest behind the `len` bytes.
    let behind = unsafe { unmap(end, slack - skipped) };
    if let Err(cause) = mapped {
        // Kernels before 6.12 may have unmapped those bytes before they refused, and another thread may
        // have mapped memory there since. So they are not unmapped.
        note_leak(start.addr().get(), len, cause);
        return Err(cause);
    }
    if let Err(cause) = before.and(behind) {
        // SAFETY: the `len` bytes from `start` were mapped above and no value has them.
        let _ = unsafe { unmap(start.as_ptr(), len) };
        return Err(cause);
    }
    Ok(start)
}

/// Unmaps addresses. A refusal is logged.
///
/// # Safety
/// The `len` bytes from `start` are mapped and no value has them.
unsafe fn unmap(start: *mut u8, len: usize) -> Result<(), Errno> {
    if len == 0 {
        return Ok(());
    }
    // SAFETY: munmap(2) ends the life of `len` bytes from `start`, which the caller vouches for.
    let answer = unsafe { rustix::mm::munmap(start.cast(), len) };
    answer.inspect_err(|&cause| note_leak(start.addr(), len, cause))
}

/// Maps memory for a request, at an address of the kernel's choice.
fn mmap(len: usize, request: &Request<'_>) -> Result<NonNull<u8>, Errno> {
    let prot = protection(request.access);
    let nowhere = core::ptr::null_mut();
    let address = match request.fd {
        // SAFETY: mmap(2) with an address of null and without `MAP_FIXED` makes new addresses
        // ours and touches no memory that exists. The flags are those of
        // `create`, which never has that one.
        None => unsafe { rustix::mm::mmap_anonymous(nowhere, len, prot, request.flags) }?,
        Some((fd, offset)) => {
            // SAFETY: as above; the descriptor is open for the time of the call.
            unsafe { rustix::mm::mmap(nowhere, len, prot, request.flags, fd, offset) }?
        }
    };
    // The kernel gives no mapping at address zero unless asked for it.
    NonNull::new(address.cast()).ok_or(Errno::NOMEM)
}

/// The bytes of addresses that could not be unmapped.
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Returns the bytes of addresses that this process has lost: memory that was dropped and that the kernel
/// refused to unmap, which it does when that needs one more mapping than `vm.max_map_count` allows. Each
/// refusal is also logged as an error.
#[must_use]
pub fn leaked() -> ByteLen {
    // Relaxed: a statistic, by which nothing is published.
    ByteLen::new(LEAKED.load(Ordering::Relaxed))
}

/// Counts addresses that stay mapped, and logs them.
fn note_leak(start: usize, len: usize, cause: Errno) {
    // Relaxed: as above.
    LEAKED.fetch_add(len as u64, Ordering::Relaxed);
    tracing::error!(
        "{} at {start:#x} cannot be unmapped ({cause}) and are lost to this process: raise vm.max_map_count",
        ByteLen::new(len as u64)
    );
}

/// Takes addresses that nothing can be read from or written to.
fn reserve(len: usize) -> Result<NonNull<u8>, Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: mmap(2) with an address of null and without `MAP_FIXED` makes new addresses ours and touches
    // no memory that exists.
    let address = unsafe {
        rustix::mm::mmap_anonymous(core::ptr::null_mut(), len, ProtFlags::empty(), flags)
    }?;
    NonNull::new(address.cast()).ok_or(Errno::NOMEM)
}

/// Maps a file in place of reserved addresses.
///
/// # Safety
/// The `len` bytes from `start` are mapped and no value has them.
unsafe fn map_over(start: NonNull<u8>, len: usize, request: &Request<'_>) -> Result<(), Errno> {
    let Some((fd, offset)) = request.fd else { return Err(Errno::INVAL) };
    let (prot, flags) = (protection(request.access), request.flags | MapFlags::FIXED);
    // SAFETY: mmap(2) with `MAP_FIXED` replaces the mapping of `len` bytes from `start`, which the caller vouches for;
    // the descriptor is open for the time of the call.
    unsafe { rustix::mm::mmap(start.as_ptr().cast(), len, prot, flags, fd, offset) }.map(drop)
}

fn protection(access: Access) -> ProtFlags {
    match access {
        Access::ReadOnly => ProtFlags::READ,
        Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.is_adopted() {
            return;
        }
        // SAFETY: munmap(2) ends the life of `mapped_len` bytes from `start`. They are ours (invariant 2,
        // and not adopted), and nothing can reach them: references borrow from this value
        // (invariant 4), and it is being dropped.
        let answer = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.mapped_len) };
        let Err(cause) = answer else { return };
        note_leak(self.start.addr().get(), self.mapped_len, cause);
        // The kernel refuses to split a merged mapping when the process has as many as it may.
        // The addresses are then lost; the memory is not.
        // SAFETY: madvise(2) drops the pages of the same bytes, for which the same holds.
        let _ = unsafe {
            rustix::mm::madvise(self.start.as_ptr().cast(), self.mapped_len, Advice::LinuxDontNeed)
        };
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("addr", &self.addr())
            .field("len", &self.len())
            .field("page_size", &self.page)
            .field("access", &self.access)
            .field("behind", &self.behind)
            .finish_non_exhaustive()
    }
}

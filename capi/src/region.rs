//! Regions: memory that is populated, cleared, and described by a zone.

use std::ffi::{c_char, c_int, c_void};
use std::mem::{self, MaybeUninit};
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use uzone_rust::os::{Mapping, MappingError};
use uzone_rust::{
    BindOptions, ByteLen, Cleared, MemoryKind, PageSize, Pagemap, PopulateOptions, Region,
    RegionView, ZeroOptions,
};

use crate::argument::{Structure, answer, given, options, path, timeout};
use crate::error::{EBUSY, EEXIST, EIO, Failure, call};
use crate::pin::uzone_zone;
use crate::progress::{Progress, threads, uzone_progress_function};

/// From so many bytes on, several threads clear.
const SHARED_FROM: u64 = 64 << 20;
/// A time that has an end, unlike `Duration::MAX`.
const FOR_EVER: Duration = Duration::from_secs(1 << 32);

/// Memory. It is bound to a zone for as long as its pages are to be pinned.
pub struct uzone_region(State);

enum State {
    Plain(Region),
    Bound(Pagemap),
    /// For the time of a call.
    Moving,
}

impl uzone_region {
    fn view(&self) -> Option<&RegionView> {
        match &self.0 {
            State::Plain(region) => Some(region),
            State::Bound(pagemap) => Some(pagemap.region()),
            State::Moving => None,
        }
    }
}

/// How a region is bound.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct uzone_bind_options {
    /// The size of this structure.
    pub size: usize,
    /// The bytes of a folio, which is pinned and cleared as one: a power of two from a page on; 0 is a page.
    pub folio_bytes: u64,
}

// SAFETY: Numbers of 8 bytes, the first of them the size.
unsafe impl Structure for uzone_bind_options {}

/// Numbers of a region.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct uzone_region_stats {
    /// The size of this structure, which the caller sets.
    pub size: usize,
    /// The bytes that have memory of the kernel now.
    pub resident_bytes: u64,
    /// The part of `resident_bytes` in huge pages.
    pub huge_bytes: u64,
    /// The bytes of a page.
    pub page_bytes: u64,
    /// The bytes of the descriptors of its pages; 0 for a region that is not bound.
    pub descriptor_bytes: u64,
}

// SAFETY: Numbers of 8 bytes, the first of them the size.
unsafe impl Structure for uzone_region_stats {}

fn store(out: &mut MaybeUninit<Option<Box<uzone_region>>>, region: Region) {
    out.write(Some(Box::new(uzone_region(State::Plain(region)))));
}

/// Reserves private memory, all zero. No memory is taken before a page is touched or populated, so `len_bytes` may be more
/// than the host has.
///
/// `page_bytes`: 0 for small pages, and huge ones as far as the host makes them; otherwise pages of the host's hugetlb pool
/// of this size, which are reserved now.
///
/// Errors: -ENOMEM if the pool or a limit is too small, -EINVAL if `len_bytes` is not a multiple of a page.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_region_open(
    len_bytes: u64,
    page_bytes: u64,
    region: Option<&mut MaybeUninit<Option<Box<uzone_region>>>>,
) -> c_int {
    call("uzone_region_open", || {
        let out = given("region", region)?;
        let len = ByteLen::new(len_bytes);
        let region = match page_bytes {
            0 => Region::anonymous(len)?,
            bytes => {
                let page = PageSize::try_from_bytes(bytes);
                Region::hugetlb(len, page.map_err(|error| Failure::input(error.to_string()))?)?
            }
        };
        store(out, region);
        Ok(())
    })
}

/// Maps `len_bytes` of a file from `offset_bytes` on. A write to the region is a write to the file.
///
/// Errors: the errors of open(2); -EINVAL if the file is too short, or `offset_bytes` or `len_bytes` cut a page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_region_open_file(
    file: *const c_char,
    offset_bytes: u64,
    len_bytes: u64,
    region: Option<&mut MaybeUninit<Option<Box<uzone_region>>>>,
) -> c_int {
    call("uzone_region_open_file", || {
        let out = given("region", region)?;
        // SAFETY: The head of the header demands it.
        let file = unsafe { path("file", file) }?;
        store(out, Region::file(file, offset_bytes, ByteLen::new(len_bytes))?);
        Ok(())
    })
}

/// Takes memory that the caller has mapped, readable and writable. It stays mapped until the region is closed, and is the
/// caller's to unmap afterwards.
///
/// Errors: -EINVAL if `address` or `len_bytes` cut a page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_region_adopt(
    address: *mut c_void,
    len_bytes: u64,
    region: Option<&mut MaybeUninit<Option<Box<uzone_region>>>>,
) -> c_int {
    call("uzone_region_adopt", || {
        let out = given("region", region)?;
        let start = given("address", NonNull::new(address.cast::<u8>()))?;
        let page = uzone_os::probe::page_size();
        // SAFETY: `adopt` wants memory that is mapped, readable and writable until the mapping is dropped, and the caller
        // vouches for that.
        let mapping = unsafe { Mapping::adopt(start, ByteLen::new(len_bytes), page) };
        let mapping = mapping.map_err(|error| Failure::input(error.to_string()))?;
        store(out, Region::adopt(mapping).map_err(|refused| refused.cause)?);
        Ok(())
    })
}

/// Closes a region and unmaps its memory, unless that was adopted. While pages of it are pinned, the memory stays mapped,
/// until the last of them is given back. NULL is no region.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_region_close(region: Option<Box<uzone_region>>) {
    call("uzone_region_close", || {
        drop(region);
        Ok(())
    });
}

/// Returns the address of the first byte; NULL for no region. It does not change.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_region_address(region: Option<&uzone_region>) -> *mut c_void {
    let address = region.and_then(uzone_region::view).map_or(0, |view| view.addr().get());
    std::ptr::with_exposed_provenance_mut(address)
}

/// Returns the bytes of a region; 0 for no region.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_region_len_bytes(region: Option<&uzone_region>) -> u64 {
    region.and_then(uzone_region::view).map_or(0, |view| view.len().get())
}

/// Binds a region to a zone: each page has a descriptor, and can be pinned. Costs a few microseconds at any size.
///
/// `options` may be NULL. No other call uses the region meanwhile.
///
/// Errors: -EEXIST if the memory is bound already, -EINVAL if a folio does not fit. Then the region is as it was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_region_bind(
    region: Option<&mut uzone_region>,
    zone: Option<&uzone_zone>,
    options: *const uzone_bind_options,
) -> c_int {
    call("uzone_region_bind", || {
        let (region, zone) = (given("region", region)?, given("zone", zone)?);
        // SAFETY: The head of the header demands it.
        let uzone_bind_options { folio_bytes, .. } = unsafe { self::options(options) }?;
        let mut how = BindOptions::new(MemoryKind::Generic);
        if folio_bytes != 0 {
            let order = uzone_os::probe::page_size().order_of(folio_bytes);
            how =
                how.order(order.map_err(|error| Failure::input(format!("folio_bytes: {error}")))?);
        }
        let (state, outcome) = match mem::replace(&mut region.0, State::Moving) {
            State::Plain(plain) => match zone.0.bind(plain, how) {
                Ok(pagemap) => (State::Bound(pagemap), Ok(())),
                Err(refused) => (State::Plain(*refused.region), Err(refused.cause.into())),
            },
            other => {
                (other, Err(Failure::new(EEXIST, "the region is bound already: unbind it first")))
            }
        };
        region.0 = state;
        outcome
    })
}

/// Ends the binding of a region, if no page of it is pinned; waits for pins up to `timeout_ms` milliseconds, without end
/// if that is negative. Meanwhile no page of it is pinned anew.
///
/// No other call uses the region meanwhile; uzone_unpin() may be called.
///
/// Errors: -EBUSY if pages are pinned still, with their number in the text; then the region is bound as it was. -EINVAL if
/// it is not bound.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_region_unbind(
    region: Option<&mut uzone_region>,
    timeout_ms: c_int,
) -> c_int {
    call("uzone_region_unbind", || {
        let region = given("region", region)?;
        let deadline = Instant::now() + timeout(timeout_ms).min(FOR_EVER);
        let (state, outcome) = match mem::replace(&mut region.0, State::Moving) {
            State::Bound(pagemap) => match pagemap.unbind_by(deadline) {
                Ok(plain) => (State::Plain(plain), Ok(())),
                Err(busy) => {
                    let failure = Failure::new(EBUSY, busy.to_string());
                    (State::Bound(*busy.pagemap), Err(failure))
                }
            },
            other => (other, Err(Failure::input("the region is not bound"))),
        };
        region.0 = state;
        outcome
    })
}

/// Makes a range of bytes present, in whole pages, by a thread for each CPU, and in huge pages as far as the host has them.
/// No byte changes. `progress` may be NULL; see uzone_progress_function.
///
/// Errors: -ENOMEM with the numbers if the host has less memory, before any is taken where that is known; -EINVAL if the
/// range is not inside the region; the error that `progress` returned.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_region_populate(
    region: Option<&uzone_region>,
    offset_bytes: u64,
    len_bytes: u64,
    progress: uzone_progress_function,
    user: *mut c_void,
) -> c_int {
    call("uzone_region_populate", || {
        let region = given("region", region)?;
        if len_bytes == 0 {
            return Ok(());
        }
        let end = offset_bytes.checked_add(len_bytes);
        let end = end.ok_or_else(|| Failure::input("the range has no end"))?;
        Progress { function: progress, user }.watched(len_bytes, |watch| {
            let shown = watch.clone();
            let how = PopulateOptions::default().cancel(watch.flag());
            let how = how.on_progress(move |done, _| {
                shown.set(done.get());
            });
            // The report has the bytes of a cancelled call, which `progress` received as well.
            let _ = match &region.0 {
                State::Plain(region) => region.populate(offset_bytes..end, &how)?,
                State::Bound(pagemap) => {
                    let range = pagemap.range_at(offset_bytes, ByteLen::new(len_bytes));
                    let range = range.map_err(|error| Failure::input(error.to_string()))?;
                    pagemap.populate(range, &how)?
                }
                State::Moving => return Err(moving()),
            };
            Ok(())
        })
    })
}

/// Clears a range of bytes at the bandwidth of memory. In a region that is bound, the range is whole folios; folios
/// that are known to be zero or are pinned are left alone.
///
/// `cleared_bytes` becomes the bytes that were written; it may be NULL.
///
/// Errors: -EBUSY if pages are pinned, -EHWPOISON if one is bad; the others are cleared. -EINVAL if the range is not inside
/// the region or cuts a folio; then no byte is.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_region_clear(
    region: Option<&uzone_region>,
    offset_bytes: u64,
    len_bytes: u64,
    cleared_bytes: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    call("uzone_region_clear", || {
        let region = given("region", region)?;
        let len = ByteLen::new(len_bytes);
        let threads = if len_bytes < SHARED_FROM { 1 } else { threads() };
        let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
        let how = ZeroOptions::default().threads(threads);
        let cleared: Cleared = match &region.0 {
            State::Plain(region) => region.zero_range(offset_bytes, len, &how)?,
            State::Bound(pagemap) => {
                let range = pagemap.range_at(offset_bytes, len);
                pagemap.zero(range.map_err(|error| Failure::input(error.to_string()))?, &how)?
            }
            State::Moving => return Err(moving()),
        };
        if let Some(out) = cleared_bytes {
            out.write(cleared.done_bytes().get());
        }
        match cleared.left.first() {
            None => Ok(()),
            Some((_, cause)) => Err((*cause).into()),
        }
    })
}

/// Fills in the numbers of a region. The caller sets `stats->size`. Costs a walk over the page tables of the region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_region_read_stats(
    region: Option<&uzone_region>,
    stats: *mut uzone_region_stats,
) -> c_int {
    call("uzone_region_read_stats", || {
        let region = given("region", region)?;
        let view = region.view().ok_or_else(moving)?;
        let failed = |error: MappingError| Failure::new(error.kind().errno(), error.to_string());
        let now = uzone_region_stats {
            size: 0,
            resident_bytes: view.resident().map_err(failed)?.get(),
            huge_bytes: view.huge_backed().map_err(failed)?.get(),
            page_bytes: view.page_size().bytes(),
            descriptor_bytes: match &region.0 {
                State::Bound(pagemap) => pagemap.report().bytes.get(),
                _ => 0,
            },
        };
        // SAFETY: The head of the header demands it.
        unsafe { answer(stats, &now) }
    })
}

/// Returns the error of a region that a call left half way, by a defect.
fn moving() -> Failure {
    Failure::new(EIO, "the region was lost in a call that failed by a defect: close it")
}

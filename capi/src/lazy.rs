//! Lazily mapped memory: of an image, of a file, or of a function of the caller's.

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::File;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use uzone_rust::lazy::{
    Backing, BackingError, Engine, EngineOptions, FileBacking, FunctionBacking, LazyMapping,
    LazyOptions,
};
use uzone_rust::snapshot::{Image, OpenOptions, Root, SnapshotBacking, Source};
use uzone_rust::{ByteLen, sigbus};

use crate::argument::{Structure, answer, given, options, path, text};
use crate::error::{CallerError, ENOTSUP, Failure, call};
use crate::pin::uzone_zone;
use crate::progress::{Progress, share, uzone_progress_function};

/// How much one thread populates or verifies at once.
const STEP: u64 = 4 << 20;

/// Memory whose pages are read when they are touched first.
pub struct uzone_lazy {
    memory: LazyMapping,
    /// The bytes of the source, which may end inside the last page.
    len_bytes: u64,
    image: Option<(Arc<Image>, CString)>,
}

/// How memory is mapped lazily.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct uzone_lazy_options {
    /// The size of this structure.
    pub size: usize,
    /// The zone in which pages of the memory are pinned by address; NULL for none.
    pub zone: *const uzone_zone,
    /// Of images alone: the root hash that it must have, 64 hexadecimal digits; NULL for any. It makes the bytes authentic:
    /// without it, damage is found and forgery is not.
    pub root: *const c_char,
    /// The most milliseconds that reading a page may take, after which the page is bad; 0 for no limit.
    pub deadline_ms: u32,
    /// Of functions alone: UZONE_READ_IS_QUICK or 0.
    pub flags: u32,
}

// SAFETY: A `usize`, two pointers, of which NULL is a value, and two numbers of 4 bytes.
unsafe impl Structure for uzone_lazy_options {}

/// The function never waits: the thread that answers faults calls it for many pages at a time. Without this flag, threads
/// that may wait call it for a page at a time.
pub const UZONE_READ_IS_QUICK: u32 = 1;

/// A function that fills `len_bytes` at `bytes`, whole pages, with the content from `offset_bytes` on. Several threads of
/// the library call it, until the memory is closed. It must not touch lazily mapped memory, nor wait for a thread that does.
/// It returns 0 or a negative errno; then the page is bad.
pub type uzone_read_function = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        offset_bytes: u64,
        bytes: *mut c_void,
        len_bytes: usize,
    ) -> c_int,
>;

/// Numbers of lazily mapped memory, from its start. Pages are counted, not bytes.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct uzone_lazy_stats {
    /// The size of this structure, which the caller sets.
    pub size: usize,
    /// The bytes of a page.
    pub page_bytes: u64,
    /// Page faults that were answered.
    pub faults: u64,
    /// Pages that a thread waited for.
    pub on_demand: u64,
    /// Pages that came along with those.
    pub around: u64,
    /// Pages that uzone_lazy_populate() made present.
    pub populated: u64,
    /// Pages that were given back.
    pub evicted: u64,
    /// Pages that are bad.
    pub bad: u64,
}

// SAFETY: Numbers of 8 bytes, the first of them the size.
unsafe impl Structure for uzone_lazy_stats {}

/// The caller's function, and the pointer that it wants.
struct Reader {
    read: unsafe extern "C" fn(*mut c_void, u64, *mut c_void, usize) -> c_int,
    user: *mut c_void,
}

// SAFETY: The caller vouches that several threads may call the function with the pointer.
unsafe impl Send for Reader {}
// SAFETY: As above.
unsafe impl Sync for Reader {}

impl Reader {
    fn fill(&self, offset: u64, bytes: &mut [u8]) -> Result<(), BackingError> {
        // SAFETY: The caller vouches for its function until the memory is closed, and the bytes are writable.
        let code =
            unsafe { (self.read)(self.user, offset, bytes.as_mut_ptr().cast(), bytes.len()) };
        CallerError::check(code).map_err(|error| BackingError::Other(Box::new(error)))
    }
}

/// Options of the caller's, as values.
struct How<'a> {
    zone: Option<&'a uzone_zone>,
    root: Option<Root>,
    options: LazyOptions,
    is_quick: bool,
}

/// # Safety
/// As `options`, and their pointers are valid.
unsafe fn read_options<'a>(from: *const uzone_lazy_options) -> Result<How<'a>, Failure> {
    // SAFETY: The caller of this vouches for it.
    let uzone_lazy_options { zone, root, deadline_ms, flags, .. } = unsafe { options(from) }?;
    // SAFETY: As above.
    let zone = unsafe { zone.as_ref() };
    // SAFETY: As above.
    let root = unsafe { text("root", root) }?;
    let root = root.map(|root| root.strip_prefix("blake3:").unwrap_or(root).parse()).transpose()?;
    if flags & !UZONE_READ_IS_QUICK != 0 {
        return Err(Failure::input(format!("flags {flags:#x}: there are no such flags")));
    }
    let deadline = (deadline_ms != 0).then(|| Duration::from_millis(deadline_ms.into()));
    let options = LazyOptions::default().deadline(deadline);
    Ok(How { zone, root, options, is_quick: flags & UZONE_READ_IS_QUICK != 0 })
}

/// Maps the bytes of a backing, in whole pages.
fn map(
    len_bytes: u64,
    backing: Arc<dyn Backing>,
    zone: Option<&uzone_zone>,
    options: &LazyOptions,
) -> Result<LazyMapping, Failure> {
    // It writes the line about a page that is bad.
    sigbus::install().map_err(|error| Failure::new(error.kind().errno(), error.to_string()))?;
    let page = uzone_os::probe::page_size().bytes();
    let len = len_bytes.checked_next_multiple_of(page).filter(|len| *len != 0);
    let len = len.ok_or_else(|| Failure::input(format!("{len_bytes} bytes cannot be mapped")))?;
    let mut engine = EngineOptions::default();
    if let Some(zone) = zone {
        engine = engine.zone(zone.0.clone());
    }
    Ok(Engine::with(engine)?.map(ByteLen::new(len), backing, options)?)
}

impl uzone_lazy {
    /// Returns the bytes of a range, if they are inside.
    fn range(&self, offset: u64, len: u64) -> Result<Range<u64>, Failure> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len_bytes => Ok(offset..end),
            _ => Err(Failure::input(format!(
                "{len} bytes at {offset:#x} are not all inside the memory, which has {} bytes",
                self.len_bytes
            ))),
        }
    }
}

/// Opens an image, packed or raw, and maps it lazily: only its index is read. Each page is read, decoded and verified
/// when it is touched. A file that is no image is mapped as raw memory, unless `options` has a root hash.
///
/// The memory may be written to; writes stay in this process. A page that cannot be read, or does not match its hash,
/// raises SIGBUS in the thread that touches it, and a line on standard error names the file and the place;
/// uzone_lazy_populate() and uzone_image_verify() return an error instead. The first call installs a handler of SIGBUS,
/// which passes other signals on to the handler before it. A process that is forked off does not have the memory.
///
/// `options` may be NULL.
///
/// Errors: the errors of open(2); -EBADMSG if it is damaged or has another root hash; -EPERM or -ENOTSUP if this host has no
/// userfaultfd.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_image_open(
    file: *const c_char,
    options: *const uzone_lazy_options,
    memory: Option<&mut MaybeUninit<Option<Box<uzone_lazy>>>>,
) -> c_int {
    call("uzone_image_open", || {
        let out = given("memory", memory)?;
        // SAFETY: The head of the header demands it.
        let file = unsafe { path("file", file) }?;
        // SAFETY: As above.
        let How { zone, root, options, .. } = unsafe { read_options(options) }?;
        let mut open = OpenOptions::default();
        if let Some(root) = root {
            open = open.root(root);
        }
        let image = Arc::new(Image::open_or_raw(file, &open)?);
        let len_bytes = image.byte_len();
        let backing = Arc::new(SnapshotBacking::new(image.clone()));
        let memory = map(len_bytes, backing, zone, &options)?;
        let root = CString::new(image.root().to_string()).unwrap_or_default();
        out.write(Some(Box::new(uzone_lazy { memory, len_bytes, image: Some((image, root)) })));
        Ok(())
    })
}

/// Maps a file lazily, as long as it is now. Its bytes are copied when they are touched; writes stay in this process.
/// Faults, signals and processes are as for uzone_image_open(). `options` may be NULL.
///
/// Errors: the errors of open(2); -EPERM or -ENOTSUP if this host has no userfaultfd.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_lazy_open_file(
    file: *const c_char,
    options: *const uzone_lazy_options,
    memory: Option<&mut MaybeUninit<Option<Box<uzone_lazy>>>>,
) -> c_int {
    call("uzone_lazy_open_file", || {
        let out = given("memory", memory)?;
        // SAFETY: The head of the header demands it.
        let path = unsafe { path("file", file) }?;
        // SAFETY: As above.
        let How { zone, options, .. } = unsafe { read_options(options) }?;
        let named = |error: std::io::Error| Failure::from(error).about(&path.display());
        let file = File::open(path).map_err(named)?;
        let len_bytes = file.metadata().map_err(named)?.len();
        let backing = FileBacking::new(file).map_err(named)?.named(path);
        let memory = map(len_bytes, Arc::new(backing), zone, &options)?;
        out.write(Some(Box::new(uzone_lazy { memory, len_bytes, image: None })));
        Ok(())
    })
}

/// Maps `len_bytes`, whole pages, of which `read` makes the content when they are touched; see uzone_read_function. `user`
/// is passed to it. Faults, signals and processes are as for uzone_image_open(). `options` may be NULL.
///
/// Errors: -EINVAL if `len_bytes` cuts a page; -EPERM or -ENOTSUP if this host has no userfaultfd.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_lazy_open_function(
    len_bytes: u64,
    read: uzone_read_function,
    user: *mut c_void,
    options: *const uzone_lazy_options,
    memory: Option<&mut MaybeUninit<Option<Box<uzone_lazy>>>>,
) -> c_int {
    call("uzone_lazy_open_function", || {
        let out = given("memory", memory)?;
        let reader = Reader { read: given("read", read)?, user };
        // SAFETY: The head of the header demands it.
        let How { zone, options, is_quick, .. } = unsafe { read_options(options) }?;
        if !len_bytes.is_multiple_of(uzone_os::probe::page_size().bytes()) {
            return Err(Failure::input(format!("{len_bytes} bytes are not whole pages")));
        }
        let fill = move |offset, bytes: &mut [u8]| reader.fill(offset, bytes);
        let backing: Arc<dyn Backing> = if is_quick {
            Arc::new(FunctionBacking::quick(fill))
        } else {
            Arc::new(FunctionBacking::slow(fill))
        };
        let memory = map(len_bytes, backing, zone, &options)?;
        out.write(Some(Box::new(uzone_lazy { memory, len_bytes, image: None })));
        Ok(())
    })
}

/// Closes lazily mapped memory and unmaps it. Pages that are pinned keep it mapped, until the last pin is given back. No
/// thread may touch it. NULL is no memory.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_lazy_close(memory: Option<Box<uzone_lazy>>) {
    call("uzone_lazy_close", || {
        drop(memory);
        Ok(())
    });
}

/// Returns the address of the first byte; NULL for no memory. It does not change.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_lazy_address(memory: Option<&uzone_lazy>) -> *mut c_void {
    let address = memory.map_or(0, |memory| memory.memory.addr().get());
    std::ptr::with_exposed_provenance_mut(address)
}

/// Returns the bytes of the image, file or function; 0 for no memory.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_lazy_len_bytes(memory: Option<&uzone_lazy>) -> u64 {
    memory.map_or(0, |memory| memory.len_bytes)
}

/// Makes a range of bytes present before it is touched, in whole pages: several threads read, decode and verify it.
/// `progress` may be NULL; see uzone_progress_function.
///
/// Errors: -EBADMSG if bytes do not match their hash, the errors of read(2), the error that the read function or `progress`
/// returned, -EHWPOISON if a page is bad, -EINVAL if the range is not inside.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_lazy_populate(
    memory: Option<&uzone_lazy>,
    offset_bytes: u64,
    len_bytes: u64,
    progress: uzone_progress_function,
    user: *mut c_void,
) -> c_int {
    call("uzone_lazy_populate", || {
        let memory = given("memory", memory)?;
        let range = memory.range(offset_bytes, len_bytes)?;
        let page = memory.memory.page_size().bytes();
        let pages = range.start / page * page..range.end.next_multiple_of(page);
        Progress { function: progress, user }.watched(len_bytes, |watch| {
            share(watch, &pages, STEP, |part| {
                if let Some((image, _)) = &memory.image {
                    Source::will_need(&**image, std::slice::from_ref(&part));
                }
                memory.memory.populate(part)?;
                Ok(())
            })
        })
    })
}

/// Gives the memory of a range of bytes back; its pages are read again when they are touched. Writes to them are lost. Only
/// pages that are inside as a whole are given back, and none that is pinned.
///
/// `evicted_bytes` becomes the bytes that were given back; it may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_lazy_evict(
    memory: Option<&uzone_lazy>,
    offset_bytes: u64,
    len_bytes: u64,
    evicted_bytes: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    call("uzone_lazy_evict", || {
        let memory = given("memory", memory)?;
        let range = memory.range(offset_bytes, len_bytes)?;
        let page = memory.memory.page_size().bytes();
        let start = range.start.next_multiple_of(page);
        // The last page is whole.
        let is_end = range.end == memory.len_bytes;
        let end = if is_end { range.end.next_multiple_of(page) } else { range.end / page * page };
        let evicted = if start < end { memory.memory.evict(start..end)? * page } else { 0 };
        if let Some(out) = evicted_bytes {
            out.write(evicted);
        }
        Ok(())
    })
}

/// Fills in the numbers of lazily mapped memory. The caller sets `stats->size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uzone_lazy_read_stats(
    memory: Option<&uzone_lazy>,
    stats: *mut uzone_lazy_stats,
) -> c_int {
    call("uzone_lazy_read_stats", || {
        let memory = &given("memory", memory)?.memory;
        let now = memory.stats();
        let now = uzone_lazy_stats {
            size: 0,
            page_bytes: memory.page_size().bytes(),
            faults: now.faults,
            on_demand: now.demand,
            around: now.around,
            populated: now.populated,
            evicted: now.evicted,
            bad: now.poisoned,
        };
        // SAFETY: The head of the header demands it.
        unsafe { answer(stats, &now) }
    })
}

/// Returns the root hash of an image, 64 hexadecimal digits; NULL for other memory. It is valid until the memory is closed.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_image_root(memory: Option<&uzone_lazy>) -> *const c_char {
    let image = memory.and_then(|memory| memory.image.as_ref());
    image.map_or(std::ptr::null(), |(_, root)| root.as_ptr())
}

/// Reads bytes of an image and checks them against their hashes, by several threads. No page becomes present.
/// `progress` may be NULL; see uzone_progress_function.
///
/// Errors: -EBADMSG if bytes do not match their hash, the errors of read(2), the error that `progress` returned, -ENOTSUP for
/// memory without hashes, -EINVAL if the range is not inside.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_image_verify(
    memory: Option<&uzone_lazy>,
    offset_bytes: u64,
    len_bytes: u64,
    progress: uzone_progress_function,
    user: *mut c_void,
) -> c_int {
    call("uzone_image_verify", || {
        let memory = given("memory", memory)?;
        let range = memory.range(offset_bytes, len_bytes)?;
        let image = memory.image.as_ref().map(|(image, _)| image).filter(|image| !image.is_raw());
        let none =
            || Failure::new(ENOTSUP, "the memory has no hashes: uzone_pack() makes an image");
        let image = image.ok_or_else(none)?;
        Progress { function: progress, user }.watched(len_bytes, |watch| {
            share(watch, &range, STEP, |part| {
                Source::will_need(&**image, std::slice::from_ref(&part));
                let mut bytes =
                    vec![0; usize::try_from(part.end - part.start).unwrap_or(usize::MAX)];
                Ok(image.read_at(part.start, &mut bytes)?)
            })
        })
    })
}

//! Images of memory as buffers: [`open`], [`Image`].

use std::ffi::c_int;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use uzone::lazy::{Engine, EngineOptions, LazyMapping, LazyOptions};
use uzone::snapshot::{DiskCache, OpenOptions, Root, SnapshotBacking, Source};
use uzone::{ByteLen, ErrorKind, sigbus, snapshot};

use crate::buffer;
use crate::error::Failure;
use crate::exit::{self, Ends};
use crate::lend::Lent;
use crate::range::bytes_of;
use crate::watch::{drop_detached, share, watched};

/// How much one thread populates or verifies at once: an object is requested in so large parts.
const STEP: u64 = 4 << 20;
/// How much of an image in object storage is kept in a folder by default.
const DISK_CACHE: ByteLen = ByteLen::gib(64);

/// The memory of an image.
type Memory = Lent<Arc<LazyMapping>>;

impl Ends for Memory {
    fn end(&self) {
        // A buffer that has it keeps it.
        drop(self.take());
    }
}

/// An image of memory, mapped lazily.
///
/// `open` makes it. It has the buffer protocol, so ``numpy.frombuffer(image, dtype)``, ``torch.frombuffer(image,
/// dtype=...)`` and ``memoryview(image)`` use its bytes without a copy. A page is read, decoded and verified when it is
/// touched.
///
/// Attributes
/// ----------
/// name : str
///     The path or the URL.
/// root : str
///     The root hash in hexadecimal digits. It names every byte of a packed image.
/// nbytes : int
///     The number of bytes, as ``len(image)``.
/// mode : str
///     ``"r"`` or ``"c"``.
/// is_raw : bool
///     Whether it is raw memory without hashes.
/// closed : bool
///     Whether it was closed.
///
/// Notes
/// -----
/// A page that cannot be read, or does not match its hash, raises the signal SIGBUS in the thread that touches it, and a
/// line on standard error names the file and the place. `populate` and `verify` raise `DamageError` or `IoError` instead.
///
/// A process that was forked off does not have the memory: open the image there, or start workers by ``"spawn"``.
///
/// Examples
/// --------
/// >>> with uzone.open("weights.uz") as image:
/// ...     image.populate()
/// ...     total = int(numpy.frombuffer(image, dtype=numpy.uint8).sum(dtype=numpy.uint64))
#[pyclass(frozen, module = "uzone", weakref)]
pub(crate) struct Image {
    image: Arc<snapshot::Image>,
    memory: Arc<Memory>,
    is_private: bool,
    /// The process that has the memory.
    process: u32,
}

impl Image {
    fn mapping(&self) -> Result<Arc<LazyMapping>, Failure> {
        if self.process != std::process::id() {
            let why =
                "the memory is of the process that opened the image: open it in this process too";
            return Err(Failure::input(why));
        }
        self.memory.look(Arc::clone).ok_or_else(closed)
    }

    /// Returns the pages that have bytes of a range.
    fn pages_of(mapping: &LazyMapping, range: &Range<u64>) -> Range<u64> {
        let page = mapping.page_size().bytes();
        range.start / page * page..range.end.next_multiple_of(page)
    }
}

#[pymethods]
impl Image {
    #[getter]
    fn name(&self) -> String {
        self.image.name()
    }

    #[getter]
    fn root(&self) -> String {
        self.image.root().to_string()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.image.byte_len()
    }

    #[getter]
    fn mode(&self) -> &'static str {
        if self.is_private { "c" } else { "r" }
    }

    #[getter]
    fn is_raw(&self) -> bool {
        self.image.is_raw()
    }

    #[getter]
    fn closed(&self) -> bool {
        self.memory.look(|_| ()).is_none()
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.image.byte_len()).unwrap_or(usize::MAX)
    }

    fn __repr__(&self) -> String {
        let Self { image, .. } = self;
        let closed = if self.closed() { ", closed" } else { "" };
        format!(
            "<uzone.Image {:?}, {} bytes, mode {:?}{closed}>",
            image.name(),
            image.byte_len(),
            self.mode()
        )
    }

    /// Read bytes and check them against their hashes.
    ///
    /// Nothing becomes memory: the file or the object is read, by several threads.
    ///
    /// Parameters
    /// ----------
    /// range : slice or range, optional
    ///     The bytes to check; all of them by default. Whole frames are checked.
    /// progress : callable, optional
    ///     Called as ``progress(done, total)`` with numbers of bytes, by the calling thread, some times a second. An
    ///     exception that it raises ends the call.
    ///
    /// Raises
    /// ------
    /// DamageError
    ///     If bytes do not match their hash.
    /// NotSupportedError
    ///     If it is raw memory without hashes.
    /// IoError
    ///     If bytes cannot be read.
    #[pyo3(signature = (range=None, progress=None))]
    fn verify(
        &self,
        py: Python<'_>,
        range: Option<&Bound<'_, PyAny>>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let range = bytes_of(range, self.image.byte_len())?;
        if self.image.is_raw() {
            let text =
                format!("{} is raw memory without hashes: pack it to have them", self.image.name());
            return Err(Failure::new(ErrorKind::NotSupported, text).into());
        }
        let step = STEP.max(self.image.frame_bytes());
        watched(py, progress, range.end - range.start, |watch| {
            share(watch, &range, step, |part| {
                let mut bytes =
                    vec![0; usize::try_from(part.end - part.start).unwrap_or(usize::MAX)];
                Source::will_need(&*self.image, std::slice::from_ref(&part));
                Source::read_at(&*self.image, part.start, &mut bytes).map_err(Failure::from)
            })
        })
    }

    /// Make bytes present before they are touched.
    ///
    /// Several threads read, decode and verify them. Afterwards a touch of these bytes is a touch of memory.
    ///
    /// Parameters
    /// ----------
    /// range : slice or range, optional
    ///     The bytes to make present; all of them by default. Whole pages become present.
    /// progress : callable, optional
    ///     Called as ``progress(done, total)`` with numbers of bytes, by the calling thread, some times a second. An
    ///     exception that it raises ends the call.
    ///
    /// Raises
    /// ------
    /// DamageError
    ///     If bytes do not match their hash.
    /// IoError
    ///     If bytes cannot be read.
    #[pyo3(signature = (range=None, progress=None))]
    fn populate(
        &self,
        py: Python<'_>,
        range: Option<&Bound<'_, PyAny>>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let range = bytes_of(range, self.image.byte_len())?;
        let mapping = self.mapping()?;
        let pages = Self::pages_of(&mapping, &range);
        watched(py, progress, range.end - range.start, |watch| {
            share(watch, &pages, STEP, |part| {
                Source::will_need(&*self.image, std::slice::from_ref(&part));
                mapping.populate(part).map(drop).map_err(Failure::from)
            })
        })
    }

    /// Give the memory of pages back.
    ///
    /// They are read again when they are touched. In mode ``"c"``, the bytes of the image return: writes to these pages
    /// are lost.
    ///
    /// Parameters
    /// ----------
    /// range : slice or range, optional
    ///     The bytes to give back; all of them by default. Only pages that are inside as a whole are given back.
    ///
    /// Returns
    /// -------
    /// int
    ///     The number of bytes that were given back.
    #[pyo3(signature = (range=None))]
    fn evict(&self, py: Python<'_>, range: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let len = self.image.byte_len();
        let range = bytes_of(range, len)?;
        let mapping = self.mapping()?;
        let page = mapping.page_size().bytes();
        let start = range.start.next_multiple_of(page);
        // The last page of the image is whole.
        let end =
            if range.end == len { len.next_multiple_of(page) } else { range.end / page * page };
        if start >= end {
            return Ok(0);
        }
        let evicted = py.detach(|| mapping.evict(start..end)).map_err(Failure::from)?;
        Ok(evicted * page)
    }

    /// Return counts of the pages and of their faults, from the start.
    ///
    /// Returns
    /// -------
    /// dict
    ///     ``faults``: page faults that were answered. ``populated``, ``evicted``, ``bad``: pages. ``on_demand``: pages
    ///     that a thread waited for. ``around``: pages that came along with those.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.mapping()?.stats();
        let dict = PyDict::new(py);
        dict.set_item("faults", stats.faults)?;
        dict.set_item("on_demand", stats.demand)?;
        dict.set_item("around", stats.around)?;
        dict.set_item("populated", stats.populated)?;
        dict.set_item("evicted", stats.evicted)?;
        dict.set_item("bad", stats.poisoned)?;
        Ok(dict)
    }

    /// Give all memory back.
    ///
    /// Raises
    /// ------
    /// BufferError
    ///     If an array or another buffer still has the memory.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let mapping = self.memory.take()?;
        py.detach(|| drop(mapping));
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let image = slf.get();
        drop(image.mapping()?);
        let addr = image.memory.lend(|mapping| mapping.addr().get()).ok_or_else(closed)?;
        let (len, is_read_only) = (image.image.byte_len(), !image.is_private);
        // SAFETY: `fill` wants the view of this call, its owner, and bytes that stay mapped until the view is released.
        // The mapping has at least `len` bytes, and is lent until then.
        let filled = unsafe { buffer::fill(&slf, view, addr, len, is_read_only, flags) };
        if filled.is_err() {
            image.memory.put_back();
        }
        filled
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.memory.put_back();
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // No buffer has the memory: each refers to this object.
        if let Ok(Some(mapping)) = self.memory.take() {
            // It waits for the thread that answers faults.
            drop_detached(mapping);
        }
    }
}

fn closed() -> Failure {
    Failure::input("the image is closed")
}

/// Returns the root hash in a text: hexadecimal digits, after `blake3:` or alone.
fn root_of(text: &str) -> Result<Root, Failure> {
    Ok(text.strip_prefix("blake3:").unwrap_or(text).parse::<Root>()?)
}

/// Opens an image by its path, which may be a URL.
pub(crate) fn open_image(
    path: &Path,
    root: Option<&str>,
    disk_cache: Option<PathBuf>,
) -> Result<snapshot::Image, Failure> {
    let mut options = OpenOptions::default();
    if let Some(root) = root {
        options = options.root(root_of(root)?);
    }
    if let Some(folder) = disk_cache {
        options = options.disk_cache(DiskCache::open(folder, DISK_CACHE.get())?);
    }
    Ok(snapshot::Image::open_or_raw(path, &options)?)
}

/// Maps the bytes of an image.
fn map(image: &Arc<snapshot::Image>) -> Result<LazyMapping, Failure> {
    exit::check_open()?;
    // It writes the line about a page that is bad.
    sigbus::install().map_err(|error| Failure::new(error.kind(), error.to_string()))?;
    let page = uzone_os::probe::page_size().bytes();
    let len = image.byte_len().next_multiple_of(page);
    if len == 0 {
        return Err(Failure::input(format!("{} has no bytes", image.name())));
    }
    let engine = Engine::with(EngineOptions::default())?;
    let backing = Arc::new(SnapshotBacking::new(image.clone()));
    Ok(engine.map(ByteLen::new(len), backing, &LazyOptions::default())?)
}

/// Open an image of memory, packed or raw, and map it lazily.
///
/// Only its index is read. Each page is read, decoded and verified when it is touched.
///
/// Parameters
/// ----------
/// path : path-like or str
///     A file, or a URL: ``s3://bucket/key``, ``gs://bucket/key``, ``az://container/key``, ``http://`` or
///     ``https://``. Credentials come from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT``, ...).
/// root : str, optional
///     The root hash that the image must have. It makes the bytes authentic; without it, damage is found and forgery is
///     not.
/// mode : {"r", "c"}, optional
///     ``"r"``: buffers are read-only. ``"c"``: buffers are writable, and writes stay in this process, as with
///     ``numpy.memmap``.
/// disk_cache : path-like, optional
///     A folder that keeps up to 64 GiB of what was fetched from object storage.
///
/// Returns
/// -------
/// Image
///
/// Raises
/// ------
/// NotFoundError, PermissionDeniedError, IoError
///     If it cannot be read.
/// DamageError
///     If it is no image, is damaged, or has another root hash.
/// NotSupportedError
///     If this host has no userfaultfd.
///
/// Examples
/// --------
/// >>> image = uzone.open("s3://bucket/model.uz", root="blake3:...")
/// >>> weights = numpy.frombuffer(image, dtype=numpy.float16)
#[pyfunction]
#[pyo3(signature = (path, root=None, mode="r", *, disk_cache=None))]
pub(crate) fn open(
    py: Python<'_>,
    path: PathBuf,
    root: Option<String>,
    mode: &str,
    disk_cache: Option<PathBuf>,
) -> PyResult<Image> {
    let is_private = match mode {
        "r" => false,
        "c" => true,
        _ => {
            return Err(
                Failure::input(format!("the mode is \"r\" or \"c\", and not {mode:?}")).into()
            );
        }
    };
    let opened = py.detach(|| {
        let image = Arc::new(open_image(&path, root.as_deref(), disk_cache)?);
        let memory = Arc::new(Memory::new(Arc::new(map(&image)?)));
        Ok::<_, Failure>((image, memory))
    });
    let (image, memory) = opened?;
    exit::add(&memory);
    Ok(Image { image, memory, is_private, process: std::process::id() })
}

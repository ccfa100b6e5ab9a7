//! Pools of another process: [`AttachedPool`].

use std::ffi::c_int;
use std::os::fd::BorrowedFd;

use pyo3::ffi;
use pyo3::prelude::*;
use uzone::ByteLen;
use uzone::hostpool::{self, HostPoolOptions, Peer};

use crate::error::Failure;
use crate::exit;
use crate::options::{self, registration};
use crate::range::Size;
use crate::whole::{Whole, pool_methods};

/// The shared pool of another process, whose memory both have.
///
/// It has the buffer protocol and DLPack: block ``n`` of the owner starts at byte ``n * block_bytes``. The owner takes and
/// frees the blocks, and tells this process their numbers. This process registers its own view of the memory.
///
/// Parameters
/// ----------
/// pool : str or int
///     The ``name`` of the owner's pool, or a descriptor that the owner sent, of its ``fileno()``, with `owner`.
/// block : int or str, optional
///     The bytes of a block, as the owner has them.
/// register, context, piece, pause, progress : optional
///     As for `HostPool`, for the view of this process.
/// owner : int, optional
///     The number of the owner's process, with a descriptor.
///
/// Attributes
/// ----------
/// nbytes, block_bytes, block_count : int
///     The bytes of the pool and of a block, and the number of blocks.
/// ready : int
///     The bytes that this process has registered.
/// owner_alive : bool
///     Whether the owner's process is alive. After its end, no block has an owner.
/// closed : bool
///     Whether it was closed.
///
/// Raises
/// ------
/// Error
///     If there is no such pool, or its owner has ended.
///
/// Examples
/// --------
/// >>> pool = uzone.AttachedPool(name, register="cuda")  # of pool.name of the owner
/// >>> keys = numpy.frombuffer(pool, numpy.uint8, pool.block_bytes, number * pool.block_bytes)
#[pyclass(frozen, module = "uzone", weakref)]
pub(crate) struct AttachedPool {
    whole: Whole<hostpool::AttachedPool>,
}

/// A name, or a descriptor.
#[derive(FromPyObject)]
enum Named {
    Name(String),
    File(i32),
}

pool_methods!(AttachedPool);

#[pymethods]
impl AttachedPool {
    #[new]
    #[pyo3(signature = (pool, block=Size(ByteLen::mib(2)), register=None, *, owner=None, context=None,
                        piece=Size(ByteLen::mib(64)), pause=None, progress=None),
           text_signature = "(pool, block='2M', register=None, *, owner=None, context=None, piece='64M', \
                             pause=None, progress=None)")]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        pool: Named,
        block: Size,
        register: Option<&Bound<'_, PyAny>>,
        owner: Option<u32>,
        context: Option<usize>,
        piece: Size,
        pause: Option<f64>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        exit::check_open()?;
        let (registration, device) = registration(register, context)?;
        let mut options = HostPoolOptions::default()
            .block(block.0)
            .register(registration)
            .piece(piece.0)
            .pause(options::pause(pause)?);
        if let Some(progress) = progress {
            options = options.on_progress(options::progress(progress));
        }
        // On this thread, which has the context of the driver.
        let attached = match (pool, owner) {
            (Named::Name(name), None) => py.detach(|| hostpool::AttachedPool::open(&name, options)),
            (Named::File(file @ 0..), Some(owner)) => {
                // SAFETY: `borrow_raw` wants an open descriptor: dup(2) refuses a number that is none. It is used for
                // this call alone.
                let file = unsafe { BorrowedFd::borrow_raw(file) };
                let file = file.try_clone_to_owned().map_err(Failure::from)?;
                let owner = Peer::of_number_now(owner).map_err(Failure::from)?;
                py.detach(|| hostpool::AttachedPool::attach(file, owner, options))
            }
            _ => {
                let why = "a pool is named by text, or by a descriptor and the number of its owner";
                return Err(Failure::input(why).into());
            }
        };
        Ok(Self { whole: Whole::new(attached.map_err(Failure::from)?, device) })
    }

    #[getter]
    fn owner_alive(&self) -> PyResult<bool> {
        Ok(self.whole.look(hostpool::AttachedPool::is_owner_alive)?)
    }

    /// Unregister and unmap the view of this process. The memory is the owner's until all views are gone.
    ///
    /// Raises
    /// ------
    /// BufferError
    ///     If an array or another buffer has the memory.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.whole.close(py)
    }

    fn __repr__(&self) -> String {
        let shown = self.whole.look(|pool| format!("{} blocks, {}", pool.blocks(), pool.len()));
        format!("<uzone.AttachedPool, {}>", shown.unwrap_or_else(|_| "closed".to_owned()))
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        // SAFETY: `lend` wants the view and the owner of this call. `__releasebuffer__` below ends the loan.
        unsafe { slf.get().whole.lend(&slf, view, flags) }
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.whole.release();
    }
}

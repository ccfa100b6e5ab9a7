//! Pools of registered host memory: [`HostPool`].

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMemoryView};
use uzone::hostpool::{self, HostPoolError, HostPoolOptions, HostPoolReport};
use uzone::{ByteLen, ErrorKind};

use crate::block::Block;
use crate::error::Failure;
use crate::exit;
use crate::options::{self, registration, seconds};
use crate::range::Size;
use crate::whole::{Whole, pool_methods};

/// How long a call waits before it handles signals.
const LOOK: Duration = Duration::from_millis(100);

/// A pool of host memory that an accelerator reads and writes directly.
///
/// It is usable at once at any size: threads make the memory present ahead, and one registers it with the driver behind
/// them, piece by piece, with pauses in which other threads use the driver.
///
/// The pool itself has the buffer protocol and DLPack: all of its memory, in which block ``n`` starts at byte
/// ``n * block_bytes``.
///
/// Parameters
/// ----------
/// size : int or str
///     The bytes of the pool, such as ``"300G"``; as many whole blocks as fit.
/// block : int or str, optional
///     The bytes of a block, a multiple of the host's page.
/// register : {None, "cuda", "hip", "mlock"} or pair of callables, optional
///     Who registers the memory. A driver does so in the context that is current on the calling thread: make one before,
///     as by ``torch.cuda.init()`` and a first tensor. A pair ``(register, unregister)`` is called as
///     ``register(address, nbytes)`` and ``unregister(address)`` by a thread of the pool.
/// pages : {"huge", "small"} or int or str, optional
///     ``"huge"``: transparent huge pages as far as the host has them. A size such as ``"2M"``: pages of the host's
///     hugetlb pool, which are reserved before.
/// node : int or "interleaved", optional
///     The NUMA node of the memory; by default, that of the threads that make it present.
/// clear : {"ahead", "take", "release", "never"} or int, optional
///     When a block is cleared that had an owner before. A number is ``"ahead"`` within that share of one CPU, in percent,
///     which is 50 otherwise: clearing takes memory bandwidth from copies of the device.
/// start : {"background", "eager", "demand"}, optional
///     When memory is made present and registered: behind the call, before it returns, or by each first `take`.
/// piece : int or str, optional
///     The most bytes that are registered at a time.
/// pause : float, optional
///     The seconds between two pieces; by default, a tenth of the time that the last piece took.
/// all_or_nothing : bool, optional
///     Hand out no block before all are registered, and none if one cannot be.
/// context : int, optional
///     The address of the ``CUcontext`` or ``hipCtx_t`` to register in, instead of the current one; it outlives the pool.
/// spare_cpus : int, optional
///     The share of the CPUs, in percent, that making memory present leaves alone.
/// shared : bool, optional
///     Make a pool that another process opens by `AttachedPool`.
/// progress : callable, optional
///     Called as ``progress(ready, nbytes)`` by a thread of the pool after each piece; it takes no block. An exception is
///     printed and ends nothing. With ``start="demand"`` it is not called.
///
/// Attributes
/// ----------
/// nbytes, block_bytes, block_count : int
///     The bytes of the pool and of a block, and the number of blocks.
/// ready : int
///     The bytes that are present and registered, handed out or not.
/// buffer : memoryview
///     All memory of the pool.
/// name : str or None
///     The name by which another process of this user attaches to a shared pool.
/// closed : bool
///     Whether it was closed.
///
/// Raises
/// ------
/// NotSupportedError
///     If there is no driver or no context of it.
/// OutOfMemoryError
///     If the host has less memory.
///
/// Notes
/// -----
/// A process that was forked off does not have the memory.
///
/// Examples
/// --------
/// >>> pool = uzone.HostPool("300G", block="2M", register="cuda")
/// >>> block = pool.take()
/// >>> keys = torch.frombuffer(block, dtype=torch.bfloat16)
/// >>> keys.is_pinned()
/// True
#[pyclass(frozen, module = "uzone", weakref)]
pub(crate) struct HostPool {
    whole: Whole<hostpool::HostPool>,
}

/// Calls `wait` with short times, and handles signals in between, until the time is up.
pub(crate) fn waited<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    wait: impl Fn(Duration) -> Result<T, HostPoolError> + Sync,
) -> PyResult<T> {
    let started = Instant::now();
    loop {
        let asked = started.elapsed();
        let within = timeout.map_or(LOOK, |timeout| timeout.saturating_sub(asked)).min(LOOK);
        match py.detach(|| wait(within)) {
            // A pool that is filled on demand does not wait.
            Err(HostPoolError::NotReady { .. })
                if !within.is_zero() && started.elapsed() - asked >= within =>
            {
                py.check_signals()?;
            }
            answer => return Ok(answer.map_err(Failure::from)?),
        }
    }
}

pool_methods!(HostPool);

#[pymethods]
impl HostPool {
    #[new]
    #[pyo3(signature = (size, block=Size(ByteLen::mib(2)), register=None, *, pages=None, node=None, clear=None,
                        start="background", piece=Size(ByteLen::mib(64)), pause=None, all_or_nothing=false,
                        context=None, spare_cpus=12, shared=false, progress=None),
           text_signature = "(size, block='2M', register=None, *, pages='huge', node=None, clear='ahead', \
                             start='background', piece='64M', pause=None, all_or_nothing=False, context=None, \
                             spare_cpus=12, shared=False, progress=None)")]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        size: Size,
        block: Size,
        register: Option<&Bound<'_, PyAny>>,
        pages: Option<&Bound<'_, PyAny>>,
        node: Option<&Bound<'_, PyAny>>,
        clear: Option<&Bound<'_, PyAny>>,
        start: &str,
        piece: Size,
        pause: Option<f64>,
        all_or_nothing: bool,
        context: Option<usize>,
        spare_cpus: u8,
        shared: bool,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        exit::check_open()?;
        let (registration, device) = registration(register, context)?;
        let mut options = HostPoolOptions::default()
            .block(block.0)
            .register(registration)
            .pages(options::pages(pages)?)
            .place(options::place(node)?)
            .zeroing(options::zeroing(clear)?)
            .budget(options::budget(start)?)
            .piece(piece.0)
            .pause(options::pause(pause)?)
            .spare_cpus(spare_cpus);
        if all_or_nothing {
            options = options.all_or_nothing();
        }
        if shared {
            options = options.shared();
        }
        if let Some(progress) = progress {
            options = options.on_progress(options::progress(progress));
        }
        // On this thread, which has the context of the driver.
        let pool =
            py.detach(|| hostpool::HostPool::open(size.0, options)).map_err(Failure::from)?;
        Ok(Self { whole: Whole::new(pool, device) })
    }

    /// Take a block that is ready, every byte of it zero.
    ///
    /// Waits until a block is ready, and not until one is given back.
    ///
    /// Parameters
    /// ----------
    /// timeout : float, optional
    ///     The most seconds to wait; without end by default.
    ///
    /// Returns
    /// -------
    /// Block
    ///
    /// Raises
    /// ------
    /// TimedOutError
    ///     If no block became ready in time.
    /// OutOfMemoryError
    ///     If all blocks are handed out.
    #[pyo3(signature = (timeout=None))]
    fn take(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Block> {
        self.blocks(py, 1, timeout)
    }

    /// Take a block that is ready, or return None.
    ///
    /// Returns
    /// -------
    /// Block or None
    fn try_take(&self, py: Python<'_>) -> PyResult<Option<Block>> {
        let taken =
            self.whole.with(|pool| Ok(py.detach(|| pool.try_take()).map_err(Failure::from)?))?;
        Ok(taken.map(|block| Block::new(block, self.whole.device)))
    }

    /// Take several blocks in a row, as one contiguous buffer.
    ///
    /// Parameters
    /// ----------
    /// count : int
    ///     The number of blocks; ``pool.block_count`` takes the whole pool.
    /// timeout : float, optional
    ///     The most seconds to wait; without end by default.
    ///
    /// Returns
    /// -------
    /// Block
    ///
    /// Raises
    /// ------
    /// TimedOutError
    ///     If not as many became ready in time.
    /// OutOfMemoryError
    ///     If there are not as many free blocks in a row.
    #[pyo3(signature = (count, timeout=None))]
    fn blocks(&self, py: Python<'_>, count: usize, timeout: Option<f64>) -> PyResult<Block> {
        let timeout = seconds("timeout", timeout)?;
        let take =
            |pool: &hostpool::HostPool| waited(py, timeout, |within| pool.take_run(count, within));
        Ok(Block::new(self.whole.with(take)?, self.whole.device))
    }

    /// Return counts of the blocks.
    ///
    /// Returns
    /// -------
    /// dict
    ///     ``blocks``, of which ``used`` are handed out, ``zero`` are free, ``dirty`` have to be cleared first, ``in_work``
    ///     are not ready yet or being cleared, and ``bad`` are never handed out. ``cleared_ahead``, ``cleared_on_demand``
    ///     and ``cleared_on_release``: blocks that were cleared so.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.whole.look(hostpool::HostPool::stats)?;
        let dict = PyDict::new(py);
        dict.set_item("blocks", stats.blocks)?;
        dict.set_item("used", stats.used)?;
        dict.set_item("zero", stats.zero)?;
        dict.set_item("dirty", stats.dirty)?;
        dict.set_item("in_work", stats.in_work)?;
        dict.set_item("bad", stats.bad)?;
        dict.set_item("cleared_ahead", stats.cleared_ahead)?;
        dict.set_item("cleared_on_demand", stats.cleared_on_demand)?;
        dict.set_item("cleared_on_release", stats.cleared_on_release)?;
        Ok(dict)
    }

    #[getter]
    fn name(&self) -> PyResult<Option<String>> {
        Ok(self.whole.look(hostpool::HostPool::shared_name)?)
    }

    /// Return the descriptor of the memory of a shared pool, for ``socket.send_fds``. The pool keeps it.
    ///
    /// Returns
    /// -------
    /// int
    ///
    /// Raises
    /// ------
    /// NotSupportedError
    ///     If the pool is not shared.
    fn fileno(&self) -> PyResult<i32> {
        let file = self.whole.look(|pool| pool.shared_file().map(|file| file.as_raw_fd()))?;
        let why = "the pool is not shared: open it with shared=True";
        Ok(file.ok_or_else(|| Failure::new(ErrorKind::NotSupported, why))?)
    }

    #[getter]
    fn buffer<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf.as_any())
    }

    /// Stop the threads of the pool, and give its memory back when no block has it.
    ///
    /// Raises
    /// ------
    /// BufferError
    ///     If an array or another buffer has the memory of the pool as a whole.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.whole.close(py)
    }

    fn __repr__(&self) -> String {
        let shown = self.whole.look(|pool| {
            let (count, block) = (pool.blocks(), pool.block_len());
            format!("{count} blocks of {block}, {} of {} ready", pool.ready(), pool.len())
        });
        format!("<uzone.HostPool, {}>", shown.unwrap_or_else(|_| "closed".to_owned()))
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

/// Returns a report as a dictionary.
pub(crate) fn report_of(py: Python<'_>, report: HostPoolReport) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("nbytes", report.len.get())?;
    dict.set_item("block_bytes", report.block.get())?;
    dict.set_item("ready", report.ready.get())?;
    dict.set_item("huge", report.huge.map(ByteLen::get))?;
    dict.set_item("small", report.small.map(ByteLen::get))?;
    dict.set_item("node", report.node)?;
    dict.set_item("registered_by", report.registered_by)?;
    dict.set_item("pieces", report.pieces)?;
    dict.set_item("populating", report.populating.as_secs_f64())?;
    dict.set_item("registering", report.registering.as_secs_f64())?;
    dict.set_item("longest_piece", report.longest_piece.as_secs_f64())?;
    dict.set_item("first_ready", report.first_ready.map(|time| time.as_secs_f64()))?;
    dict.set_item("all_ready", report.all_ready.map(|time| time.as_secs_f64()))?;
    dict.set_item("notes", report.notes)?;
    Ok(dict)
}

//! A pool as Python has it: [`Whole`], the memory of all of its blocks, lent to buffers and tensors, and the methods of both
//! kinds of pools (`pool_methods`).

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use uzone::hostpool::{AttachedPool, HostPool};

use crate::block::{Loan, check_process, device, is_versioned};
use crate::error::Failure;
use crate::exit::{self, Ends};
use crate::lend::Lent;
use crate::watch::drop_detached;
use crate::{buffer, dlpack};

/// A pool that has its memory in one piece.
pub(crate) trait Memory: Send + Sync + 'static {
    /// Returns the address of the memory, and its length in bytes.
    fn range(&self) -> (usize, u64);
}

impl Memory for HostPool {
    fn range(&self) -> (usize, u64) {
        (self.addr().get(), self.len().get())
    }
}

impl Memory for AttachedPool {
    fn range(&self) -> (usize, u64) {
        (self.addr().get(), self.len().get())
    }
}

impl<P: Memory> Ends for Lent<Arc<P>> {
    fn end(&self) {
        // The library stops the threads of a pool whose memory a buffer has.
        drop(self.take());
    }
}

/// A pool, until it is closed.
pub(crate) struct Whole<P: Memory> {
    pool: Arc<Lent<Arc<P>>>,
    /// The kind of device of DLPack that sees the memory.
    pub(crate) device: i32,
    /// The process that has the memory.
    process: u32,
}

impl<P: Memory> Whole<P> {
    /// Takes a pool, which ends with the interpreter.
    pub(crate) fn new(pool: P, device: i32) -> Self {
        let pool = Arc::new(Lent::new(Arc::new(pool)));
        exit::add(&pool);
        Self { pool, device, process: std::process::id() }
    }

    pub(crate) fn look<R>(&self, look: impl FnOnce(&P) -> R) -> Result<R, Failure> {
        self.pool.look(|pool| look(pool)).ok_or_else(closed)
    }

    /// Calls `with` with the pool, if this process has it.
    pub(crate) fn with<R>(&self, with: impl FnOnce(&P) -> PyResult<R>) -> PyResult<R> {
        check_process(self.process)?;
        let pool = self.pool.look(Arc::clone).ok_or_else(closed)?;
        let result = with(&pool);
        // Another thread may have closed it meanwhile. The drop waits for threads that may call Python.
        if let Some(pool) = Arc::into_inner(pool) {
            drop_detached(pool);
        }
        result
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.pool.look(|_| ()).is_none()
    }

    /// Gives the pool up, unless a buffer has its memory.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        let pool = self.pool.take()?;
        py.detach(|| drop(pool));
        Ok(())
    }

    /// Returns all memory as a DLPack capsule.
    pub(crate) fn tensor<'py>(
        &self,
        py: Python<'py>,
        max_version: Option<(u32, u32)>,
        wanted: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let device = device(self.device, wanted, copy)?;
        check_process(self.process)?;
        let ((addr, len), loan) = Loan::of(&self.pool, |pool| pool.range()).ok_or_else(closed)?;
        dlpack::tensor(py, addr, len, device, is_versioned(max_version), loan)
    }

    /// Lends all memory to a view, until [`Whole::release`].
    ///
    /// # Safety
    /// `view` is one that the interpreter passed to `__getbuffer__`, and `owner` is the object whose buffer that is; it has
    /// this value, and calls [`Whole::release`] in `__releasebuffer__` alone.
    pub(crate) unsafe fn lend<T>(
        &self,
        owner: &Bound<'_, T>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        check_process(self.process)?;
        let (addr, len) = self.pool.lend(|pool| pool.range()).ok_or_else(closed)?;
        // SAFETY: `fill` wants the view of this call, its owner, and bytes that stay mapped until the view is released:
        // as the caller promises, and the pool is lent until then.
        let filled = unsafe { buffer::fill(owner, view, addr, len, false, flags) };
        if filled.is_err() {
            self.pool.put_back();
        }
        filled
    }

    /// Ends the loan to a view.
    pub(crate) fn release(&self) {
        self.pool.put_back();
    }
}

impl<P: Memory> Drop for Whole<P> {
    fn drop(&mut self) {
        if let Ok(Some(pool)) = self.pool.take() {
            // It waits for the threads of the pool.
            drop_detached(pool);
        }
    }
}

fn closed() -> Failure {
    Failure::input("the pool is closed")
}

/// Adds the methods that both kinds of pools have to a class with a field `whole`.
macro_rules! pool_methods {
    ($pool:ident) => {
        const _: () = {
            use pyo3::prelude::*;
            use pyo3::types::PyDict;

            use $crate::options::seconds;
            use $crate::pool::{report_of, waited};
            use $crate::range::Size;

            #[pymethods]
            impl $pool {
                /// Wait until memory is ready.
                ///
                /// Parameters
                /// ----------
                /// nbytes : int or str, optional
                ///     The bytes to wait for; all by default.
                /// timeout : float, optional
                ///     The most seconds to wait; without end by default.
                ///
                /// Returns
                /// -------
                /// int
                ///     The bytes that are ready.
                ///
                /// Raises
                /// ------
                /// TimedOutError
                ///     If they were not ready in time.
                #[pyo3(signature = (nbytes=None, timeout=None))]
                fn wait_ready(
                    &self,
                    py: Python<'_>,
                    nbytes: Option<Size>,
                    timeout: Option<f64>,
                ) -> PyResult<u64> {
                    let timeout = seconds("timeout", timeout)?;
                    self.whole.with(|pool| {
                        let bytes = nbytes.map_or(pool.len(), |size| size.0);
                        Ok(waited(py, timeout, |within| pool.wait_ready(bytes, within))?.get())
                    })
                }

                /// Return how the pool was made, and why it is not better.
                ///
                /// Returns
                /// -------
                /// dict
                ///     Bytes: ``nbytes``, ``block_bytes``, ``ready``, ``huge``, ``small``. Seconds: ``populating``, ``registering``,
                ///     ``longest_piece``, ``first_ready``, ``all_ready``. Others: ``node``, ``registered_by``, ``pieces``, and
                ///     ``notes``, a list of sentences. A value that is not known yet is None.
                fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
                    report_of(py, self.whole.with(|pool| Ok(py.detach(|| pool.report())))?)
                }

                #[getter]
                fn nbytes(&self) -> PyResult<u64> {
                    Ok(self.whole.look(|pool| pool.len().get())?)
                }

                #[getter]
                fn block_bytes(&self) -> PyResult<u64> {
                    Ok(self.whole.look(|pool| pool.block_len().get())?)
                }

                #[getter]
                fn block_count(&self) -> PyResult<usize> {
                    Ok(self.whole.look(|pool| pool.blocks())?)
                }

                #[getter]
                fn ready(&self) -> PyResult<u64> {
                    Ok(self.whole.look(|pool| pool.ready().get())?)
                }

                #[getter]
                fn closed(&self) -> bool {
                    self.whole.is_closed()
                }

                fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
                    slf
                }

                #[pyo3(signature = (*_exception))]
                fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
                    self.close(py)
                }

                /// Return all memory of the pool as a DLPack capsule.
                #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
                fn __dlpack__<'py>(
                    &self,
                    py: Python<'py>,
                    stream: Option<&Bound<'py, PyAny>>,
                    max_version: Option<(u32, u32)>,
                    dl_device: Option<(i32, i32)>,
                    copy: Option<bool>,
                ) -> PyResult<Bound<'py, PyAny>> {
                    let _ = stream; // no work of the pool is in a stream
                    self.whole.tensor(py, max_version, dl_device, copy)
                }

                /// Return the kind and the number of the device of `__dlpack__`.
                fn __dlpack_device__(&self) -> (i32, i32) {
                    (self.whole.device, 0)
                }
            }
        };
    };
}
pub(crate) use pool_methods;

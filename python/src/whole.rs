//! A pool as Python has it: [`Whole`], the memory of all of its blocks, lent to buffers and tensors.

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

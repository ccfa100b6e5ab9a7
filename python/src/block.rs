//! Blocks of a pool as buffers and tensors: [`Block`].

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyRange;
use uzone::hostpool::{self, HostPoolError};

use crate::error::Failure;
use crate::lend::Lent;
use crate::watch::drop_detached;
use crate::{buffer, dlpack};

/// One or more blocks of a pool in a row, zero when they are handed out.
///
/// `HostPool.take` and `HostPool.blocks` return it. It has the buffer protocol and DLPack, so
/// ``torch.frombuffer(block, dtype=...)`` and ``numpy.frombuffer(block, dtype)`` use its memory without a copy. It goes
/// back to the pool by `free`, at the end of a ``with`` statement, or when it and all its arrays are garbage.
///
/// Attributes
/// ----------
/// number : int
///     The number of the block in the pool; of several, the first one.
/// numbers : range
///     The numbers of all its blocks.
/// nbytes : int
///     The bytes, as ``len(block)``.
/// address : int
///     The address of the first byte, for calls that take pointers.
#[pyclass(frozen, module = "uzone", weakref)]
pub(crate) struct Block {
    block: Arc<Lent<hostpool::Block>>,
    first: usize,
    count: usize,
    addr: usize,
    len: u64,
    device: i32,
    process: u32,
}

impl Block {
    /// Takes blocks of a pool that the kind of device sees.
    pub(crate) fn new(block: hostpool::Block, device: i32) -> Self {
        let numbers = block.numbers();
        Self {
            first: numbers.start,
            count: numbers.len(),
            addr: block.addr().get(),
            len: block.len().get(),
            device,
            process: std::process::id(),
            block: Arc::new(Lent::new(block)),
        }
    }
}

#[pymethods]
impl Block {
    #[getter]
    fn number(&self) -> usize {
        self.first
    }

    #[getter]
    fn numbers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyRange>> {
        let number = |number| isize::try_from(number).unwrap_or(isize::MAX);
        PyRange::new(py, number(self.first), number(self.first + self.count))
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.len
    }

    #[getter]
    fn address(&self) -> usize {
        self.addr
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.len).unwrap_or(usize::MAX)
    }

    fn __repr__(&self) -> String {
        let Self { first, count, len, .. } = self;
        let freed = if self.block.look(|_| ()).is_none() { ", freed" } else { "" };
        format!("<uzone.Block {first}..{}, {len} bytes{freed}>", first + count)
    }

    /// Give the memory back to the pool.
    ///
    /// Raises
    /// ------
    /// BufferError
    ///     If an array or another buffer still has the memory.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        let block = self.block.take()?;
        // It may clear the block.
        py.detach(|| drop(block));
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.free(py)
    }

    /// Return the memory as a DLPack capsule, a tensor of unsigned bytes.
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
        let device = device(self.device, dl_device, copy)?;
        check_process(self.process)?;
        let ((), loan) = Loan::of(&self.block, |_| ()).ok_or_else(freed)?;
        dlpack::tensor(py, self.addr, self.len, device, is_versioned(max_version), loan)
    }

    /// Return the kind and the number of the device of `__dlpack__`.
    fn __dlpack_device__(&self) -> (i32, i32) {
        (self.device, 0)
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let block = slf.get();
        check_process(block.process)?;
        block.block.lend(|_| ()).ok_or_else(freed)?;
        // SAFETY: `fill` wants the view of this call, its owner, and bytes that stay mapped until the view is released.
        // The block, which keeps them mapped, is lent until then.
        let filled = unsafe { buffer::fill(&slf, view, block.addr, block.len, false, flags) };
        if filled.is_err() {
            block.block.put_back();
        }
        filled
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.block.put_back();
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Ok(Some(block)) = self.block.take() {
            drop_detached(block);
        }
    }
}

/// The memory of a value, lent to a tensor of another library.
pub(crate) struct Loan<T>(Arc<Lent<T>>);

impl<T> Loan<T> {
    pub(crate) fn of<R>(lent: &Arc<Lent<T>>, look: impl FnOnce(&T) -> R) -> Option<(R, Self)> {
        lent.lend(look).map(|found| (found, Self(lent.clone())))
    }
}

impl<T> Drop for Loan<T> {
    fn drop(&mut self) {
        self.0.put_back();
    }
}

/// Returns the kind of device of a tensor, by the wish of its consumer.
pub(crate) fn device(own: i32, wanted: Option<(i32, i32)>, copy: Option<bool>) -> PyResult<i32> {
    if copy == Some(true) {
        return Err(PyBufferError::new_err("a block is not copied: copy the tensor"));
    }
    match wanted {
        None => Ok(own),
        // The CPU reads and writes all of it.
        Some((kind, 0)) if kind == own || kind == dlpack::CPU => Ok(kind),
        Some(_) => Err(PyBufferError::new_err("the memory is of the host")),
    }
}

/// Returns whether a consumer knows tensors with a version.
pub(crate) fn is_versioned(most: Option<(u32, u32)>) -> bool {
    most.is_some_and(|(major, _)| major >= 1)
}

/// Refuses memory of the process that this one was forked off.
pub(crate) fn check_process(process: u32) -> Result<(), Failure> {
    if process == std::process::id() { Ok(()) } else { Err(HostPoolError::Forked.into()) }
}

fn freed() -> Failure {
    Failure::input("the block was given back")
}

//! The buffer protocol: memory of this package as the bytes of another object ([`fill`]), and bytes of another
//! object as an input ([`Bytes`]).
//!
//! Unsafe: a `Py_buffer` is a structure of C.

use std::ffi::{c_int, c_void};
use std::io::{self, Read};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyOverflowError;
use pyo3::{Bound, PyErr, PyResult, ffi};

/// Fills a view with `len` bytes at `addr`, and makes it a holder of `owner`.
///
/// # Safety
/// `view` is one that the interpreter passed to `__getbuffer__`, and `owner` is the object whose buffer that is. The
/// bytes stay mapped until the owner's `__releasebuffer__` was called for the view.
pub(crate) unsafe fn fill<T>(
    owner: &Bound<'_, T>,
    view: *mut ffi::Py_buffer,
    addr: usize,
    len: u64,
    is_read_only: bool,
    flags: c_int,
) -> PyResult<()> {
    let too_long = |_| PyOverflowError::new_err("more bytes than a buffer can have");
    let len = isize::try_from(len).map_err(too_long)?;
    let bytes = std::ptr::with_exposed_provenance_mut::<c_void>(addr);
    // SAFETY: `PyBuffer_FillInfo` writes to the view, which is valid, and takes a reference to the owner. It stores
    // the address and the length, and reads none of the bytes; they stay mapped, as the caller promises.
    let answer = unsafe {
        ffi::PyBuffer_FillInfo(view, owner.as_ptr(), bytes, len, is_read_only.into(), flags)
    };
    if answer == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}

/// The bytes of an object, read in order.
pub(crate) struct Bytes {
    buffer: PyBuffer<u8>,
    at: usize,
}

impl Bytes {
    /// Takes a buffer of bytes that follow each other; `None` if they do not.
    pub(crate) fn new(buffer: PyBuffer<u8>) -> Option<Self> {
        buffer.is_c_contiguous().then_some(Self { buffer, at: 0 })
    }

    pub(crate) fn len(&self) -> usize {
        self.buffer.len_bytes()
    }
}

impl Read for Bytes {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = out.len().min(self.len() - self.at);
        let from = self.buffer.buf_ptr().cast::<u8>().wrapping_add(self.at);
        // SAFETY: `copy_nonoverlapping` wants `len` readable bytes, and as many that can be written elsewhere.
        // 1. The buffer has `len` bytes from `at` on, which follow each other, and its holder keeps them there.
        // 2. `out` is borrowed mutably, so it is no part of the buffer unless the caller of Python lent it twice,
        //    and this value is read into vectors of the packer alone.
        // A thread of Python may write to them meanwhile, as to those of any call that releases the interpreter's
        // lock; the bytes are copied once, and only the copy is looked at.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), len) };
        self.at += len;
        Ok(len)
    }
}

//! DLPack: memory of this package as a tensor of bytes of another library ([`tensor`]).
//!
//! Source: the header `dlpack.h`, version 1.0, and "Python Specification for DLPack".
//!
//! Unsafe: a tensor travels as a structure of C in a capsule, with a function that frees it.

use std::ffi::{CStr, c_void};

use pyo3::prelude::*;
use pyo3::{PyErr, ffi};

/// The kinds of devices that see the memory.
pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA_HOST: i32 = 3;
pub(crate) const ROCM_HOST: i32 = 11;

const NAME: &CStr = c"dltensor";
const NAME_VERSIONED: &CStr = c"dltensor_versioned";
/// The number of unsigned integers among the types of elements.
const UINT: u8 = 1;

#[repr(C)]
struct Device {
    kind: i32,
    number: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    data_type: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Tensor,
}

const _: () = assert!(size_of::<Tensor>() == 48 && size_of::<Managed>() == 64);
const _: () = assert!(size_of::<Versioned>() == 80);

/// The data that a tensor refers to: its lengths, and the holder of its memory.
struct Context<T> {
    shape: [i64; 1],
    strides: [i64; 1],
    _owner: T,
}

/// A managed tensor of either kind.
trait Form: Sized {
    const NAME: &'static CStr;
    fn new(tensor: Tensor, context: *mut c_void, deleter: unsafe extern "C" fn(*mut Self)) -> Self;
    fn context(&self) -> *mut c_void;
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)>;
}

impl Form for Managed {
    const NAME: &'static CStr = NAME;

    fn new(tensor: Tensor, context: *mut c_void, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        Self { tensor, context, deleter: Some(deleter) }
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }
}

impl Form for Versioned {
    const NAME: &'static CStr = NAME_VERSIONED;

    fn new(tensor: Tensor, context: *mut c_void, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        Self { version: [1, 0], context, deleter: Some(deleter), flags: 0, tensor }
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }
}

/// Returns a capsule with `len` bytes at `addr` as a tensor of one dimension, which `owner` keeps there. The owner may be
/// dropped by any thread, with or without the lock of the interpreter.
pub(crate) fn tensor<'py, T: Send + 'static>(
    py: Python<'py>,
    addr: usize,
    len: u64,
    device: i32,
    is_versioned: bool,
    owner: T,
) -> PyResult<Bound<'py, PyAny>> {
    if is_versioned {
        capsule::<Versioned, T>(py, addr, len, device, owner)
    } else {
        capsule::<Managed, T>(py, addr, len, device, owner)
    }
}

fn capsule<'py, F: Form, T: Send + 'static>(
    py: Python<'py>,
    addr: usize,
    len: u64,
    device: i32,
    owner: T,
) -> PyResult<Bound<'py, PyAny>> {
    let len = i64::try_from(len).unwrap_or(i64::MAX);
    let context = Box::into_raw(Box::new(Context { shape: [len], strides: [1], _owner: owner }));
    let tensor = Tensor {
        data: std::ptr::with_exposed_provenance_mut(addr),
        device: Device { kind: device, number: 0 },
        dimensions: 1,
        data_type: DataType { code: UINT, bits: 8, lanes: 1 },
        // SAFETY: `context` is a box that was made above.
        shape: unsafe { &raw mut (*context).shape }.cast(),
        // SAFETY: as above.
        strides: unsafe { &raw mut (*context).strides }.cast(),
        byte_offset: 0,
    };
    let form = Box::into_raw(Box::new(F::new(tensor, context.cast(), free::<F, T>)));
    // SAFETY: `PyCapsule_New` stores the pointer and the name, which lives for ever, and calls the destructor with the
    // capsule alone.
    let made = unsafe { ffi::PyCapsule_New(form.cast(), F::NAME.as_ptr(), Some(unused::<F>)) };
    if made.is_null() {
        // SAFETY: `free` wants a tensor of this form that no one else frees; no capsule has it.
        unsafe { free::<F, T>(form) };
        return Err(PyErr::fetch(py));
    }
    // SAFETY: `made` is a new reference to an object.
    Ok(unsafe { Bound::from_owned_ptr(py, made) })
}

/// Frees a tensor and drops the owner of its memory. A consumer calls it once.
///
/// # Safety
/// `form` was made by [`capsule`] with these types, and is not used afterwards.
unsafe extern "C" fn free<F: Form, T>(form: *mut F) {
    // SAFETY: `form` is a box of `capsule`, and this is its only end.
    let form = unsafe { Box::from_raw(form) };
    // SAFETY: as above, for the context that the form was made with.
    drop(unsafe { Box::from_raw(form.context().cast::<Context<T>>()) });
}

/// The destructor of a capsule: frees the tensor unless a consumer has taken it, which renames the capsule.
///
/// # Safety
/// `capsule` was made by [`capsule`] with this form.
unsafe extern "C" fn unused<F: Form>(capsule: *mut ffi::PyObject) {
    // SAFETY: `PyCapsule_IsValid` takes any object and a name.
    if unsafe { ffi::PyCapsule_IsValid(capsule, F::NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: the capsule has this name, as `PyCapsule_GetPointer` wants.
    let form = unsafe { ffi::PyCapsule_GetPointer(capsule, F::NAME.as_ptr()) }.cast::<F>();
    // SAFETY: the pointer of such a capsule is a form that no consumer has taken.
    if let Some(deleter) = unsafe { &*form }.deleter() {
        // SAFETY: as above; the deleter is `free` with the types of the form.
        unsafe { deleter(form) };
    }
}

//! The Python package `uzone`: images of memory as buffers, and pools of registered host memory.
//!
//! Memory is offered by the buffer protocol, so NumPy, PyTorch and `memoryview` use it without a copy. No code of
//! Python answers a page fault, so a thread that holds the lock of the interpreter may touch any page. Each call that
//! waits releases that lock. The package is built by maturin (`pyproject.toml`); `uzone/__init__.pyi` has its types.
//!
//! Unsafe: the tables of the buffer protocol and of DLPack (`buffer`, `dlpack`), which are structures of C, and numbers of
//! descriptors and contexts as arguments.
#![allow(clippy::needless_pass_by_value, reason = "arguments of Python are extracted by value")]

mod attached;
mod block;
mod buffer;
mod dlpack;
mod error;
mod exit;
mod image;
mod lend;
mod options;
mod pack;
mod pool;
mod range;
mod watch;
mod whole;

use pyo3::prelude::*;

/// The compiled part of the package `uzone`.
#[pymodule]
mod _uzone {
    #[pymodule_export]
    use crate::attached::AttachedPool;
    #[pymodule_export]
    use crate::block::Block;
    #[pymodule_export]
    use crate::image::{Image, open};
    #[pymodule_export]
    use crate::pack::{Packed, pack, unpack};
    #[pymodule_export]
    use crate::pool::HostPool;

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        crate::error::add_to(module)?;
        crate::exit::register(module.py())
    }
}

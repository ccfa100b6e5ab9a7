//! The C library `libuzone`: pools of registered host memory, images and lazily mapped memory, regions and pins.
//!
//! The header `include/uzone.h` is generated of the items here and documents each (`tests/it/header.rs`). A handle is a
//! box whose pointer C keeps; an absent pointer is `None`. A call returns 0 or a negative errno, and leaves its text to
//! `uzone_last_error` (`error`). A panic ends in [`error::call`]. Functions of the caller run on threads of the library
//! or on the calling thread, never under a lock of it.
//!
//! Unsafe: pointers of C become references, strings and structures (`argument`), functions of C are called (`progress`,
//! `pool`, `lazy`), and guards wait in a table for their token (`token`).
#![allow(
    clippy::missing_safety_doc,
    reason = "the head of the header states the contract of pointers once"
)]
#![allow(non_camel_case_types, reason = "types have their names in C")]
#![allow(clippy::missing_errors_doc, reason = "errors are listed as errno, in the terms of C")]

mod argument;
mod error;
mod lazy;
mod pack;
mod pin;
mod pool;
mod progress;
mod region;
mod token;

pub use error::uzone_last_error;
pub use lazy::*;
pub use pack::*;
pub use pin::*;
pub use pool::*;
pub use progress::uzone_progress_function;
pub use region::*;

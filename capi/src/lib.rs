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
pub use lazy::{
    UZONE_READ_IS_QUICK, uzone_image_open, uzone_image_root, uzone_image_verify, uzone_lazy,
    uzone_lazy_address, uzone_lazy_close, uzone_lazy_evict, uzone_lazy_len_bytes,
    uzone_lazy_open_file, uzone_lazy_open_function, uzone_lazy_options, uzone_lazy_populate,
    uzone_lazy_read_stats, uzone_lazy_stats, uzone_read_function,
};
pub use pack::{
    UZONE_CODEC_LZ4, UZONE_CODEC_NONE, UZONE_CODEC_ZSTD, uzone_pack, uzone_pack_memory,
    uzone_pack_options, uzone_packed, uzone_unpack,
};
pub use pin::{uzone_pin, uzone_unpin, uzone_zone, uzone_zone_close, uzone_zone_open};
pub use pool::*;
pub use progress::uzone_progress_function;
pub use region::{
    uzone_bind_options, uzone_region, uzone_region_address, uzone_region_adopt, uzone_region_bind,
    uzone_region_clear, uzone_region_close, uzone_region_len_bytes, uzone_region_open,
    uzone_region_open_file, uzone_region_populate, uzone_region_read_stats, uzone_region_stats,
    uzone_region_unbind,
};

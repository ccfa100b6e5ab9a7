//! The tests of images. `corpus.rs` beside this folder counts allocated bytes, and is a program of its own.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "helpers of tests fail by panicking, as tests do"
)]

mod common;
mod damage;
#[cfg(feature = "object-storage")]
mod faults;
mod format;
mod hashes;
mod image;
mod layers;
mod lazy;
mod order;
#[cfg(feature = "object-storage")]
mod remote;
#[cfg(feature = "object-storage")]
#[path = "../s3/mod.rs"]
mod s3;
mod share;
#[path = "../targets/mod.rs"]
mod targets;

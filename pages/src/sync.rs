//! The atomics of this package, in one place so that a model checker can stand in for them.
//!
//! Built with `--cfg loom`, every atomic of the model is one of loom's, and the tests in
//! `tests/loom.rs` search the interleavings.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

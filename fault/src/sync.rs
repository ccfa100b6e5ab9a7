//! The lock of `bad.rs`, in one place so that a model checker can stand in for it:
//! `tests/loom.rs` compiles that file beside loom's.

pub(crate) use std::sync::{Mutex, PoisonError};

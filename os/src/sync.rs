//! The atomics and waits of `live.rs`, `live_ref.rs`, `sigbus/gate.rs`, `sigbus/index.rs`, `sigbus/table.rs`, `uffd/ring.rs` and
//! `uffd/requests.rs`, in one place so that a model checker can stand in for it: `tests/loom.rs`
//! compiles those files beside loom's.

pub(crate) use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
pub(crate) use std::sync::{Arc, Condvar, Mutex};

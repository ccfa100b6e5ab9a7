//! The atomics of the table, in one place so that a model checker can stand in for them: the test
//! `tests/loom.rs` compiles `table.rs` beside loom's.

pub(crate) use core::sync::atomic::{AtomicU64, Ordering};

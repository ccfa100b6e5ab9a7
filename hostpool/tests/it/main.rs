//! The tests of the package, as one program.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod attached;
mod driver;
mod pool;
mod process;

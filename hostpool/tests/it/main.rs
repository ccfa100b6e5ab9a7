//! The tests of the package, as one program.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "../../../os/tests/common/needs.rs"]
mod needs;

mod attached;
mod driver;
mod pages;
mod pool;
mod process;

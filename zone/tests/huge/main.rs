//! Tests that raise the host's pool of huge pages, in turn: other binds would take pages of it.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod altmap;
mod populate;

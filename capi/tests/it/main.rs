//! The tests of the package, as one program: the header, programs of C and C++ that are compiled and run with the library,
//! and the symbols that it exports.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod build;
mod errors;
mod header;
mod programs;
mod speed;
mod symbols;

//! Shared parts of uzone's programs: exit codes and errors, output as text or JSON, and progress.
//!
//! The program `uzone` is in this package, and the program `uzone-bench` in the package of that name.
#![forbid(unsafe_code)]
#![expect(
    clippy::missing_errors_doc,
    clippy::must_use_candidate,
    reason = "each error is a `Failure` with its exit code, or the error of the caller's closure"
)]

pub mod exit;
pub mod output;
pub mod progress;
#[cfg(feature = "schema")]
pub mod schema;

//! The face of uzone's programs: exit codes and errors, output as text or JSON, and progress.
//!
//! The commands of `uzone` are in its program, and those of `uzone-bench` in the package of that name.
#![forbid(unsafe_code)]
#![expect(
    clippy::missing_errors_doc,
    clippy::must_use_candidate,
    reason = "each error is a `Failure` with its exit code, or that of the caller's closure"
)]

pub mod exit;
pub mod output;
pub mod progress;
#[cfg(feature = "schema")]
pub mod schema;

//! What was done, step by step ([`Steps`]), and how it is put.

use std::time::Instant;

use serde::Serialize;
use uzone_os::AccessError;
use uzone_report::nanoseconds;

use crate::exit::{Exit, Failure};

/// What was done, step by step.
#[derive(Debug, Default)]
pub(super) struct Steps(pub(super) Vec<Step>);

impl Steps {
    /// Notes a step that is over now.
    pub(super) fn done(&mut self, name: &'static str, started: Instant, what: impl Into<String>) {
        self.took(name, nanoseconds(started.elapsed()), what);
    }

    /// Notes a step whose time was measured.
    pub(super) fn took(&mut self, name: &'static str, elapsed_ns: u64, what: impl Into<String>) {
        self.0.push(Step { name, elapsed_ns, what: what.into() });
    }
}

/// One thing that was done.
#[derive(Debug, Serialize)]
pub(super) struct Step {
    pub(super) name: &'static str,
    pub(super) elapsed_ns: u64,
    pub(super) what: String,
}

/// Returns that a page of the image cannot be had.
pub(super) fn no_page(reason: &str, cause: AccessError) -> Failure {
    Failure::of(format!("a page could not be had: {reason}"), cause).with(Exit::Os)
}

/// Returns a length in the steps of a progress bar, which are MiB.
pub(super) const fn units(bytes: u64) -> u64 {
    bytes >> 20
}

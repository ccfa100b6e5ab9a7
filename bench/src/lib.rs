//! Every benchmark of uzone, as a library that the command and the checks call.
//!
//! A benchmark is a *group* of cases that do the same work in different ways. Each round runs
//! every case once, in a fresh random order, so that whatever the machine does meanwhile hits all
//! of them; ratios are formed within a round, and the median of those is what is reported. The
//! naive way and the limit of the machine are cases like the others. What a case wrote is checked
//! before it is timed.
//!
//! `harness` runs cases and makes rows of them; `tables` holds what is measured.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod harness;
mod tables;

pub use harness::adopted::Adopted;
pub use harness::error::{BenchError, sentence};
pub use harness::group::{Phase, Watch};
pub use harness::{check, machine, settings};
pub use tables::{all, brief, metadata};

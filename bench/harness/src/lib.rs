//! Interleaved measurements of uzone, for the program `uzone-bench` and the demo of the command `uzone`.
//!
//! A benchmark is a [`Suite`] of cases that do the same work in different ways. Each round runs
//! every case once, in a fresh random order, so that all cases meet the same load of the machine. Ratios
//! follow from the medians of one run. The naive way and the limit of the machine are cases like the others,
//! and each case checks its result.
//!
//! | file | holds |
//! |---|---|
//! | `rounds`, `suite` | interleaved rounds, and the rows that they become |
//! | `session` | a run: its tables, rows and skipped rows |
//! | `check` | the comparison with an earlier run |
//! | `memory`, `adopted`, `found` | memory that cases work on, and the faults that they count |
//! | `stores` | whether another streaming store is faster here than the default |
//! | `ways` | naive ways, limits and ours, as far as demo and benchmark share them |
//! | `demo` | the four tables of the demo |
#![forbid(unsafe_code)]
#![expect(
    clippy::missing_errors_doc,
    clippy::must_use_candidate,
    reason = "each error is a `BenchError`, which tells a missing part of this host from a wrong result"
)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod adopted;
pub mod check;
pub mod demo;
mod error;
mod found;
pub mod machine;
mod memory;
mod rounds;
mod session;
pub mod stores;
mod suite;
pub mod ways;

pub use uzone_report::results::{Bench, Published, Role, Row, Skipped, Table};

pub use self::adopted::{Adopted, anonymous, registered};
pub use self::error::{BenchError, Result};
pub use self::found::Found;
pub use self::memory::{
    Counted, Reads, bytes, check_memory, check_word, counted, fill, fill_lines, fill_zeroes, index,
    place, present,
};
pub use self::rounds::{Phase, Watch};
pub use self::session::{Measure, Session};
pub use self::suite::{RowSpec, Suite, Times, timed};
pub use uzone_report::nanoseconds;

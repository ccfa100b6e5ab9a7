//! What every table is measured with: interleaved rounds, the rows that come of them, and what a run is of.

pub(crate) mod adopted;
pub mod check;
pub(crate) mod error;
mod found;
pub(crate) mod group;
pub mod machine;
mod memory;
pub(crate) mod put_back;
mod session;
pub mod settings;
mod suite;

pub(crate) use uzone_report::results::{Bench, Published, Role, Row, Skipped, Table};

pub(crate) use self::adopted::{Adopted, anonymous, registered};
pub(crate) use self::error::{BenchError, Result, sentence};
pub(crate) use self::found::Found;
pub(crate) use self::group::{Phase, Watch, nanoseconds};
pub(crate) use self::memory::{
    Counted, Reads, bytes, check_memory, check_word, counted, fill, fill_zeroes, index, place,
    present,
};
pub(crate) use self::session::Session;
pub(crate) use self::settings::{
    Benchmark, BindSettings, CopySettings, FaultSettings, Part, PinSettings, SnapshotSettings,
    WholeSettings, ZeroSettings,
};
pub(crate) use self::suite::{RowSpec, Suite, Times, timed};

//! `uzone bench copy`: copying extents of every size, in every way there is.
//!
//! The rows are those of `extents.rs`. Source and destination are different memory; in the cases that
//! are out of cache, both are.

use uzone::ByteLen;

use crate::extents::{self, Arena, Work};
use crate::group::Watch;
use crate::machine::Machine;
use crate::report::{Bench, SCHEMA};
use crate::suite::BenchError;

/// What `uzone bench copy` is told.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The largest extent.
    pub size: ByteLen,
    /// How many rounds.
    pub rounds: u32,
}

/// Runs the tables.
///
/// # Errors
/// [`BenchError`] if memory is short, or a row left a wrong byte.
pub fn run(settings: Settings, watch: Watch<'_>) -> Result<Bench, BenchError> {
    let Settings { size, rounds } = settings;
    extents::check_size(size)?;
    let mut bench = Bench {
        schema: SCHEMA,
        benchmark: "copy",
        machine: Machine::here(),
        settings: format!("extents up to {size}, {rounds} rounds"),
        tables: Vec::new(),
        results: Vec::new(),
        skipped: Vec::new(),
    };
    let arena = Arena::new(Work::Copy, size)?;
    extents::run(Work::Copy, size, rounds, &arena, watch, &mut bench)?;
    Ok(bench)
}

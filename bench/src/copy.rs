//! `uzone bench copy`: copying extents of every size, in every way there is.
//!
//! The rows are those of `extents.rs`. Source and destination are different memory; in the cases that
//! are out of cache, both are.

use crate::extents::{self, Arena, Work};
use crate::group::Watch;
use crate::report::{Bench, document, summed_up};
pub use crate::settings::CopySettings as Settings;
use crate::settings::Part;
use crate::suite::{BenchError, check_found};

/// Runs the tables.
///
/// # Errors
/// [`BenchError`] if memory is short, or a row left a wrong byte.
pub fn run(settings: &Settings, watch: Watch<'_>) -> Result<Bench, BenchError> {
    let &Settings { size, rounds, tables: ref asked } = settings;
    extents::check_size(size)?;
    let sentence = format!("extents up to {size}, {rounds} rounds");
    let mut bench = document(sentence, &Part::Copy(settings.clone()));
    let arena = Arena::new(Work::Copy, size)?;
    extents::run(Work::Copy, size, rounds, asked, &arena, watch, &mut bench)?;
    check_found(asked, !bench.tables.is_empty())?;
    Ok(summed_up(bench))
}

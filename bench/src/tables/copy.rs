//! `uzone bench copy`: copying extents of every size, in every way there is.
//!
//! The rows are those of `extents.rs`. Source and destination are different memory; in the cases that
//! are out of cache, both are.

use crate::harness::group::Watch;
pub(crate) use crate::harness::settings::CopySettings as Settings;
use crate::harness::settings::Part;
use crate::harness::suite::{Bench, BenchError, Session};
use crate::tables::extents::{self, Arena, Work};

/// Runs the tables.
///
/// # Errors
/// [`BenchError`] if memory is short, or a row left a wrong byte.
pub(crate) fn run(settings: &Settings, part: &Part, watch: Watch<'_>) -> Result<Bench, BenchError> {
    let &Settings { size, rounds } = settings;
    extents::check_size(size)?;
    let sentence = format!("extents up to {size}, {rounds} rounds");
    let mut session = Session::new(sentence, part, rounds, watch);
    let arena = Arena::new(Work::Copy, size)?;
    extents::run(Work::Copy, size, &arena, &mut session)?;
    session.finish()
}

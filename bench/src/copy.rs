//! `uzone bench copy`: copying extents of every size, in every way there is.
//!
//! The rows are those of `extents.rs`. Source and destination are different memory; in the cases that
//! are out of cache, both are.

use crate::extents::{self, Arena, Work};
use crate::group::Watch;
pub use crate::settings::CopySettings as Settings;
use crate::settings::Part;
use crate::suite::{Bench, BenchError, Session};

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

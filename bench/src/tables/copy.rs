//! `uzone-bench copy`: copying extents of every size, in every way there is.
//!
//! The rows are those of `extents.rs`. Source and destination are different memory; in the cases that
//! are out of cache, both are.

use uzone_stream::Work;

use crate::settings::{CopySettings, Part};
use crate::tables::extents::{self, Arena};
use uzone_harness::{Bench, Result, Watch};

/// Runs the tables.
pub(crate) fn run(settings: &CopySettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let &CopySettings { size, rounds } = settings;
    extents::check_size(size)?;
    let sentence = format!("extents up to {size}, {rounds} rounds");
    let mut session = part.session(sentence, rounds, watch);
    let arena = Arena::new(Work::Copy, size)?;
    extents::run(Work::Copy, size, &arena, &mut session)?;
    session.finish()
}

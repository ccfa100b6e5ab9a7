//! `uzone bench copy`: copying extents of every size, in every way there is.
//!
//! The rows are those of `extents.rs`. Source and destination are different memory; in the cases that
//! are out of cache, both are.

use uzone_stream::Work;

use crate::harness::{Bench, CopySettings, Part, Result, Session, Watch};
use crate::tables::extents::{self, Arena};

/// Runs the tables.
pub(crate) fn run(settings: &CopySettings, part: &Part, watch: Watch<'_>) -> Result<Bench> {
    let &CopySettings { size, rounds } = settings;
    extents::check_size(size)?;
    let sentence = format!("extents up to {size}, {rounds} rounds");
    let mut session = Session::new(sentence, part, rounds, watch);
    let arena = Arena::new(Work::Copy, size)?;
    extents::run(Work::Copy, size, &arena, &mut session)?;
    session.finish()
}

//! The plain way and the limit, measured in the same run as ours ([`run`]).

use uzone_fault::Engine;
use uzone_harness::demo::{self, NumberedFile};
use uzone_harness::{BenchError, Phase, Watch};
use uzone_pages::ByteLen;
use uzone_report::Bench;

use super::image::Image;
use super::plan::Plan;
use crate::exit::Failure;
use crate::output::Output;
use crate::progress::with_progress;

/// The number of times that each way reads the image.
const READINGS: u32 = 5;
/// The number of rounds of the other parts, which take little time.
const ROUNDS: u32 = 9;

/// Measures all parts. A wrong page of the image is an error if the image was right before.
pub(super) fn run(
    plan: &Plan,
    image: Image,
    is_right: bool,
    engine: &Engine,
    out: &Output,
) -> Result<Bench, Failure> {
    let len = ByteLen::new(plan.size.get() / 4);
    let numbered = NumberedFile { file: &image.file, len, is_right };
    let mut all = with_progress(out, |watch| demo::map(numbered, engine, READINGS, watch))?;
    // Its memory may be needed below.
    drop(image);
    for part in [
        measured(out, "describing memory in several ways", |watch| {
            demo::bind(plan.described, ROUNDS, watch)
        })?,
        measured(out, "clearing memory in several ways", |watch| {
            demo::zero(plan.arena, ROUNDS, watch)
        })?,
        measured(out, "pinning memory in several ways", |watch| {
            demo::pin(plan.described, ROUNDS, watch)
        })?,
    ]
    .into_iter()
    .flatten()
    {
        all.tables.extend(part.tables);
        all.summary.extend(part.summary);
        all.results.extend(part.results);
    }
    Ok(all)
}

/// Measures a part under a progress bar with a plainer name than its table has. A part for which this host lacks memory
/// is left out with a warning.
fn measured(
    out: &Output,
    step: &str,
    part: impl FnOnce(Watch<'_>) -> Result<Bench, BenchError>,
) -> Result<Option<Bench>, BenchError> {
    match with_progress(out, |watch| part(&|phase| watch(Phase { step, ..phase }))) {
        Ok(part) => Ok(Some(part)),
        Err(error) if error.is_of_this_host() => {
            out.warn(format_args!("left out: {step}: {}", uzone_os::with_causes(&error)));
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

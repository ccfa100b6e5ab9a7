//! The plain way and the limit, measured in the same run as ours ([`run`]).

use uzone_fault::Engine;
use uzone_harness::demo::{self, NumberedFile};
use uzone_harness::{BenchError, Watch};
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

/// Measures a part.
type Part<'p> = &'p dyn Fn(Watch<'_>) -> Result<Bench, BenchError>;

/// Measures all parts. A wrong page of the image is an error if the image was right before. A part for which this host
/// lacks memory is left out with a warning.
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
    let parts: [Part<'_>; 3] = [
        &|watch| demo::bind(plan.described, ROUNDS, watch),
        &|watch| demo::zero(plan.arena, ROUNDS, watch),
        &|watch| demo::pin(plan.described, ROUNDS, watch),
    ];
    for (part, name) in parts.into_iter().zip(["describing", "clearing", "pinning"]) {
        match with_progress(out, part) {
            Ok(part) => {
                all.tables.extend(part.tables);
                all.summary.extend(part.summary);
                all.results.extend(part.results);
            }
            Err(error) if error.is_of_this_host() => {
                out.warn(format_args!(
                    "left out: {name} memory: {}",
                    uzone_os::with_causes(&error)
                ));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(all)
}

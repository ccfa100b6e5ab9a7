//! The plain way and the limit, measured in the same run as ours ([`run`]).

use std::cell::RefCell;
use std::fs::File;
use std::time::Duration;

use uzone_bench::brief::{self, Part, Readers, Reading};
use uzone_bench::report::{Row, Table};
use uzone_bench::{BenchError, Phase, Watch};
use uzone_fault::{AdoptedMemory, Engine};
use uzone_os::{Access, Mapping, Sharing};
use uzone_pages::ByteLen;

use super::image::Image;
use super::other::{Other, OtherError, settle};
use super::protocol::Touched;
use super::{DemoError, Plan};
use crate::bench::with_progress;
use crate::exit::Failure;
use crate::output::Output;

/// How often the image is read again in each way.
const READINGS: u32 = 5;
/// Rounds of the others, which take little.
const ROUNDS: u32 = 9;

/// Measures all parts, and ends the other process. If the image was read right before, a page that is
/// wrong now is an error; if not, that is known already.
///
/// # Errors
/// If memory is refused, the other process ends, or one of the ways left a wrong byte.
pub(super) fn run(
    plan: &Plan,
    image: Image,
    is_right: bool,
    other: Other,
    engine: &Engine,
    out: &Output,
) -> Result<(Vec<Table>, Vec<Row>), Failure> {
    let quarter = ByteLen::new(plan.size.get() / 4);
    let map =
        with_progress(out, |watch| readings(quarter, &image.file, is_right, other, engine, watch))?;
    // What it takes, the others may need.
    drop(image);
    let (mut tables, mut rows) = (vec![map.table], map.rows);
    for part in [
        measured(out, "describing memory in several ways", |watch| {
            brief::bind(plan.described, ROUNDS, watch)
        })?,
        measured(out, "clearing memory in several ways", |watch| {
            brief::zero(plan.arena, ROUNDS, watch)
        })?,
        measured(out, "pinning memory in several ways", |watch| {
            brief::pin(plan.described, ROUNDS, watch)
        })?,
    ]
    .into_iter()
    .flatten()
    {
        let Part { table, rows: mut more } = part;
        tables.push(table);
        rows.append(&mut more);
    }
    Ok((tables, rows))
}

/// Measures a part under a bar whose name says more to people than that of its table. A part that this
/// host has not the memory for is left out, and the log says why.
fn measured(
    out: &Output,
    what: &str,
    part: impl FnOnce(Watch<'_>) -> Result<Part, BenchError>,
) -> Result<Option<Part>, BenchError> {
    match with_progress(out, |watch| part(&|phase| watch(Phase { what, ..phase }))) {
        Ok(part) => Ok(Some(part)),
        Err(error) if error.is_of_this_host() => {
            out.warn(format_args!("left out: {what}: {}", cause(&error)));
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Returns an error and its causes as a sentence.
fn cause(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Has the other process touch `len` bytes of the image in order, in each way.
fn readings(
    len: ByteLen,
    image: &File,
    is_right: bool,
    other: Other,
    engine: &Engine,
    watch: Watch<'_>,
) -> Result<Part, BenchError> {
    let again = |cause| BenchError::Caller(Box::new(DemoError::Reread { cause }));
    let file = image.try_clone().map_err(again)?;
    let mapped = Mapping::file(file, 0, len, Access::ReadOnly, Sharing::Shared)?;
    mapped.populate(0..len.get())?;
    let other = RefCell::new(other);
    let touch = |answering: Option<&AdoptedMemory>| -> Result<Touched, OtherError> {
        other.borrow_mut().touch(len, answering, |_| ())
    };
    let reading = |row: &str, touched: Touched, faults| match touched.wrong_page {
        Some(page) if is_right => {
            let shift = uzone_os::probe::page_size().shift();
            let offset = usize::try_from(page << shift).unwrap_or(usize::MAX);
            Err(BenchError::WrongByte { row: format!("demo-map/{row}"), offset })
        }
        _ => Ok(Reading { elapsed: Duration::from_nanos(touched.in_order_ns), faults }),
    };
    let readers = Readers {
        naive: Box::new(|| {
            let memory = other.borrow_mut().map_lazily(len)?;
            let (touched, faults) = memory.page_by_page(&mapped, || touch(None))?;
            reading("naive", touched, faults)
        }),
        ours: Box::new(|| {
            let memory = other.borrow_mut().map_lazily(len)?.by_uzone(engine, image, 0)?;
            let touched = touch(Some(&memory))?;
            settle(&memory);
            reading("ours", touched, memory.stats().faults)
        }),
        limit: Box::new(|| {
            other.borrow_mut().map_plainly(len, image)?;
            let touched = touch(None)?;
            reading("limit", touched, touched.kernel_faults)
        }),
    };
    brief::map(len, READINGS, readers, watch)
}

//! `uzone demo`: an image is mapped lazily and compared byte for byte, and a few figures of this machine, in under a
//! minute.
//!
//! | file | mechanism |
//! |---|---|
//! | `plan` | its arguments, and the sizes that fit this machine |
//! | `image` | a file whose bytes are known |
//! | `lazy` | the image is mapped lazily, and every byte compared |
//! | `compare` | the plain way and the limit, measured in the same run |
//! | `text` | the result for people |
//!
//! Two files are left: a page and a trace. The image has no name and is gone with the process.

mod compare;
mod image;
mod lazy;
mod plan;
mod text;

use std::path::PathBuf;
use std::time::Instant;

use rustix::process::{Signal, getpid, kill_process};
use serde::Serialize;
use uzone_harness::machine;
use uzone_os::signals::Held;
use uzone_pages::ByteLen;
use uzone_report::results::{BENCH_SCHEMA, Bench};
use uzone_report::{Document, Trace, grouped, nanoseconds};
use uzone_stream::StorePolicy;

pub(crate) use self::plan::Args;

use self::lazy::Touch;
use self::plan::{Plan, Point};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Runs the demo, writes its two files, and prints the result.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    if let Some(problem) = StorePolicy::problem() {
        return Err(problem.clone().into());
    }
    let (plan, sees_kernel_faults) = Plan::that_fits(args, out)?;
    let begun = Instant::now();
    let image = image::make(&plan, out)?;
    let make_ns = nanoseconds(begun.elapsed());
    plan.stop_at(Point::Made);
    let (touch, trace, engine) = lazy::run(&plan, &image, out)?;
    let is_intact = touch.first_difference_bytes.is_none();
    let bench = compare::run(&plan, image, is_intact, &engine, out)?;
    drop(engine);

    let (schema, benchmark) = (BENCH_SCHEMA.to_owned(), "demo".to_owned());
    let mut demo = Demo {
        size_bytes: plan.size.get(),
        make_ns,
        sees_kernel_faults,
        touch,
        is_intact,
        elapsed_ns: 0,
        bench: Bench { schema, benchmark, machine: machine::here(), ..bench },
        files: Vec::new(),
    };
    demo.bench.settings = demo.summary();
    demo.files = write(&plan, &demo.bench, trace)?;
    demo.elapsed_ns = nanoseconds(begun.elapsed());
    out.print(&demo)?;
    Ok(if is_intact { Exit::Ok } else { Exit::No })
}

/// Writes the page and the trace; both or none, but for a disk that is full in between. Returns their
/// names.
fn write(plan: &Plan, bench: &Bench, trace: Trace) -> Result<Vec<String>, Failure> {
    let mut recorded = Vec::new();
    trace.write_to(&mut recorded)?;
    let documents = [Document::Bench(bench.clone()), Document::Trace(trace)];
    let page = uzone_report::html(&documents);
    // No other thread takes these signals, so Ctrl-C leaves no half of a file.
    let _held = Held::hold();
    uzone_report::replace(&plan.trace_path(), &recorded)?;
    plan.stop_at(Point::HalfWritten);
    uzone_report::replace(&plan.page_path(), page.as_bytes())?;
    let name = |path: PathBuf| path.display().to_string();
    Ok(vec![name(plan.page_path()), name(plan.trace_path())])
}

impl Plan {
    /// Stops this process at a point that a test named, until the test continues it.
    fn stop_at(&self, point: Point) {
        if self.stop_at == Some(point) {
            // A process may stop itself.
            let _ = kill_process(getpid(), Signal::STOP);
        }
    }
}

/// `uzone.demo/1`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Demo {
    /// The length of the image.
    size_bytes: u64,
    /// The time of making it.
    make_ns: u64,
    /// Whether a system call may access memory whose page is missing.
    sees_kernel_faults: bool,
    touch: Touch,
    /// Whether every byte was right.
    is_intact: bool,
    elapsed_ns: u64,
    /// The measured figures.
    bench: Bench,
    /// The page, and the trace.
    files: Vec<String>,
}

impl Demo {
    /// Returns a few sentences for the head of the page.
    fn summary(&self) -> String {
        format!(
            "An image of {} was mapped lazily. A reader touched all {} pages, waited {} times, and {}. \
             Each table below has the plain way (naive), uzone, and the limit of this machine, all measured in this run",
            ByteLen::new(self.size_bytes),
            grouped(self.touch.pages),
            grouped(self.touch.faults),
            if self.is_intact { "found every byte right" } else { "found bytes that are WRONG" },
        )
    }
}

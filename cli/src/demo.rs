//! `uzone demo`: the main jobs on real memory, in under a minute, for readers new to uzone.
//!
//! | file | what it does |
//! |---|---|
//! | `plan` | its arguments, and what follows from them |
//! | `needs` | what has to be there, looked up before anything is made |
//! | `image` | a file made of what is found on any Linux, with its hashes |
//! | `region` | a region is described, held, cleared and given back |
//! | `lazy` | the image is mapped lazily, and every byte compared |
//! | `serve` | another process serves the image, and is killed in between |
//! | `compare` | the plain way and the limit, measured in the same run |
//! | `steps`, `text` | the result for people |
//!
//! Two files are left, which it is for; the image has no name and is gone with the process.

mod compare;
mod image;
mod lazy;
mod needs;
mod plan;
mod region;
mod serve;
mod steps;
mod text;

use std::path::PathBuf;
use std::time::Instant;

use indicatif::HumanCount;
use serde::Serialize;
use uzone_harness::machine;
use uzone_os::probe;
use uzone_os::signals::Held;
use uzone_pages::ByteLen;
use uzone_report::results::{BENCH_SCHEMA, Bench};
use uzone_report::{Document, Trace, nanoseconds};
use uzone_stream::StorePolicy;

pub(crate) use self::plan::Args;

use self::image::ImageFacts;
use self::lazy::TouchFacts;
use self::plan::Plan;
use self::steps::{Step, Steps};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Runs the demo, writes its two files, and prints what it did. What is missing is an error before
/// anything is made.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    if let Some(problem) = StorePolicy::problem() {
        return Err(problem.clone().into());
    }
    let (plan, sees_kernel_faults) = needs::first_that_fits(Plan::all(args)?, out)?;
    let begun = Instant::now();
    let mut steps = Steps::default();

    let started = Instant::now();
    let file = image::create(&plan.directory)?;
    let image = image::make(file, &plan.directory, plan.size, probe::page_size(), out)?;
    let what = format!(
        "an image of {}, of {} files of this machine; no two pages are equal",
        plan.size,
        HumanCount(image.facts.source_files),
    );
    steps.done("make", started, what);
    let is_clear = region::run(plan.reserve, plan.part, &image.file, &mut steps, out)?;
    let lazy = lazy::run(&plan, &image, &mut steps, out)?;
    let facts = image.facts.clone();
    let lazy::Lazy { touch, trace, engine } = lazy;
    let is_right = touch.is_right(&facts);
    let is_served = serve::run(&plan, &image, &mut steps, out)?;
    let bench = compare::run(&plan, image, is_right, &engine, out)?;
    drop(engine);

    let is_intact = is_clear && is_right && is_served;
    let (schema, benchmark) = (BENCH_SCHEMA.to_owned(), "demo".to_owned());
    let mut demo = Demo {
        size_bytes: plan.size.get(),
        reserve_bytes: plan.reserve.get(),
        part_bytes: plan.part.get(),
        mode: Mode::of(sees_kernel_faults),
        image: facts,
        touch,
        is_clear,
        is_intact,
        steps: steps.0,
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
    uzone_report::replace(&plan.page_path(), page.as_bytes())?;
    let name = |path: PathBuf| path.display().to_string();
    Ok(vec![name(plan.page_path()), name(plan.trace_path())])
}

/// `uzone.demo/1`.
#[derive(Debug, Serialize)]
struct Demo {
    size_bytes: u64,
    reserve_bytes: u64,
    part_bytes: u64,
    mode: Mode,
    image: ImageFacts,
    touch: TouchFacts,
    is_clear: bool,
    is_intact: bool,
    steps: Vec<Step>,
    elapsed_ns: u64,
    bench: Bench,
    files: Vec<String>,
}

impl Demo {
    /// Returns what was done in a few sentences, for the head of the page.
    fn summary(&self) -> String {
        let (size, reserve) = (ByteLen::new(self.size_bytes), ByteLen::new(self.reserve_bytes));
        format!(
            "An image of {size} was mapped lazily. A reader touched all {} pages, waited {} times, and \
             {}. A region of {reserve} was described, {} of it pinned and \
             cleared. Each picture below has the plain way (naive), uzone, and the limit of this \
             machine, all measured in this run",
            HumanCount(self.touch.pages),
            HumanCount(self.touch.faults),
            if self.is_intact { "found every byte right" } else { "found bytes that are WRONG" },
            ByteLen::new(self.part_bytes),
        )
    }
}

/// What this user may have.
#[derive(Debug, Serialize)]
struct Mode {
    /// Whether a system call may be given memory that is not there yet.
    sees_kernel_faults: bool,
    /// What cannot be done because of that, and what would help.
    cannot: Vec<String>,
}

/// What userfaultfds for user-mode faults do not report, in lines as the text has them.
const USER_MODE: &str = "a system call that is given a page which is not there yet\n\
    (such as read(2) into lazily mapped memory) is not served: it fails with EFAULT; root, access\n\
    to /dev/userfaultfd, or vm.unprivileged_userfaultfd = 1 (sysctl) changes that";

impl Mode {
    fn of(sees_kernel_faults: bool) -> Self {
        let cannot =
            if sees_kernel_faults { Vec::new() } else { vec![USER_MODE.replace('\n', " ")] };
        Self { sees_kernel_faults, cannot }
    }
}

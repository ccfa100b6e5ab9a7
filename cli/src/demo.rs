//! `uzone demo`: the main jobs on real memory, in under a minute, for readers new to uzone.
//!
//! | file | what it does |
//! |---|---|
//! | `needs` | what has to be there, looked up before anything is made |
//! | `image` | a file made of what is found on any Linux, with its hashes |
//! | `region` | a region is described, held, cleared and given back |
//! | `lazy` | the image is mapped lazily, and every byte compared |
//! | `serve` | another process serves the image, and is killed in between |
//! | `compare` | the plain way and the limit, measured in the same run |
//! | `text` | the result for people |
//!
//! Two files are left, which it is for; the image has no name and is gone with the process.

mod compare;
mod image;
mod lazy;
mod needs;
mod region;
mod serve;
mod text;

use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use uzone_bench::brief;
use uzone_bench::machine;
use uzone_bench::report::{Bench, SCHEMA};
use uzone_os::signals::Held;
use uzone_os::{AccessError, probe};
use uzone_pages::ByteLen;
use uzone_report::{Document, Trace, nanoseconds};
use uzone_stream::StorePolicy;

use crate::exit::{self, Exit, Failure};
use crate::output::Output;

/// Describe a huge region, pin it, clear it, and map a file lazily
///
/// It makes a file of what is found on any Linux, describes a region larger than this machine, pins and
/// clears a part of it, maps the file lazily, touches every page and compares every byte. Then it
/// measures what the same takes the plain way, and how much of the machine's limit is reached. It needs
/// no root and no network, takes under a minute, and leaves two files: a page with charts, and the
/// trace of page faults that they are drawn from.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone demo --size 4G --output /tmp", &EXITS))]
pub(crate) struct Args {
    /// How large the file is that is mapped lazily, in multiples of 8 MiB [default: 1G, or what fits]
    #[arg(long, value_name = "SIZE")]
    size: Option<ByteLen>,
    /// How large the region is that is described, in whole GiB; only a part of it is used [default:
    /// 100G, or what fits]
    #[arg(long, value_name = "SIZE")]
    reserve: Option<ByteLen>,
    /// Where the file is made, without a name [default: where temporary files go]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Where uzone-demo.html and uzone-demo.trace.json are written
    #[arg(short, long, default_value = ".", value_name = "DIR")]
    output: PathBuf,
}

const EXITS: [u8; 8] = [0, 1, 2, 66, 69, 71, 74, 77];

/// As much is written into the pinned part of the region.
const PART: ByteLen = ByteLen::mib(256);
/// The sizes that are tried, until one fits the memory that can be had.
const SIZES: [ByteLen; 5] =
    [ByteLen::gib(1), ByteLen::mib(512), ByteLen::mib(256), ByteLen::mib(128), ByteLen::mib(64)];
/// The same for the region, where its addresses are limited.
const RESERVES: [ByteLen; 4] =
    [ByteLen::gib(100), ByteLen::gib(16), ByteLen::gib(4), ByteLen::gib(1)];
/// As much is described where the plain way is measured as well, which writes 64 bytes a page.
const DESCRIBED: ByteLen = ByteLen::gib(4);

/// The least memory that clearing is compared in.
const LEAST_ARENA: ByteLen = ByteLen::mib(32);

/// The arguments of the demo, and what follows from them.
struct Plan {
    size: ByteLen,
    reserve: ByteLen,
    /// How much of the region is used.
    part: ByteLen,
    /// How much is described where that is compared.
    described: ByteLen,
    /// How much memory clearing is compared in, twice.
    arena: ByteLen,
    /// Where the image is made.
    directory: PathBuf,
    /// Where the results are written.
    output: PathBuf,
}

impl Plan {
    /// Returns every plan that the arguments leave, the one to prefer first.
    fn all(args: &Args) -> Result<Vec<Self>, Failure> {
        let sizes = args.size.map_or(SIZES.to_vec(), |size| vec![size]);
        let reserves = args.reserve.map_or(RESERVES.to_vec(), |reserve| vec![reserve]);
        let pairs =
            sizes.iter().flat_map(|size| reserves.iter().map(move |reserve| (*size, *reserve)));
        pairs.map(|(size, reserve)| Self::of(args, size, reserve)).collect()
    }

    fn of(args: &Args, size: ByteLen, reserve: ByteLen) -> Result<Self, Failure> {
        if size.is_zero() || !size.get().is_multiple_of(8 << 20) {
            return Err(Failure::usage(format!(
                "an image of {size} cannot be made: a size is a multiple of 8 MiB, such as 1G"
            )));
        }
        if reserve.is_zero() || !reserve.get().is_multiple_of(1 << 30) {
            return Err(Failure::usage(format!(
                "{reserve} cannot be described: --reserve is a multiple of 1 GiB, such as 100G"
            )));
        }
        Ok(Self {
            size,
            reserve,
            part: size.min(PART),
            described: reserve.min(DESCRIBED).min(ByteLen::new((size.get() * 4).max(1 << 30))),
            arena: size.min(brief::ARENA).max(LEAST_ARENA),
            directory: args.dir.clone().unwrap_or_else(std::env::temp_dir),
            output: args.output.clone(),
        })
    }

    fn page_path(&self) -> PathBuf {
        self.output.join("uzone-demo.html")
    }

    fn trace_path(&self) -> PathBuf {
        self.output.join("uzone-demo.trace.json")
    }

    /// Returns how much of the image is touched in order; the rest is touched here and there.
    fn in_order(&self) -> ByteLen {
        let scattered = (self.size.get() / 4).min(PART.get());
        ByteLen::new(self.size.get() - scattered)
    }
}

/// Runs the demo, writes its two files, and prints what it did.
///
/// # Errors
/// What is missing, before anything is made; afterwards what the system refused.
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
        grouped(image.facts.source_files),
    );
    steps.done("make", started, what);
    let is_clear = region::run(plan.reserve, plan.part, &image.file, &mut steps, out)?;
    let lazy = lazy::run(&plan, &image, &mut steps, out)?;
    let facts = image.facts.clone();
    let lazy::Lazy { touch, trace, engine } = lazy;
    let is_right = touch.is_right(&facts);
    let is_served = serve::run(&plan, &image, &mut steps, out)?;
    let (tables, results) = compare::run(&plan, image, is_right, &engine, out)?;
    drop(engine);

    let is_intact = is_clear && is_right && is_served;
    let (schema, benchmark) = (SCHEMA.to_owned(), "demo".to_owned());
    let mut demo = Demo {
        schema: "uzone.demo/1",
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
        bench: Bench {
            schema,
            benchmark,
            machine: machine::here(),
            tables,
            results,
            ..Bench::default()
        },
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
    let _held = Held::hold()?;
    uzone_report::replace(&plan.trace_path(), &recorded)?;
    uzone_report::replace(&plan.page_path(), page.as_bytes())?;
    let name = |path: PathBuf| path.display().to_string();
    Ok(vec![name(plan.page_path()), name(plan.trace_path())])
}

/// Returns that a page of the image cannot be had.
fn no_page(reason: &str, cause: AccessError) -> Failure {
    Failure::of(format!("a page could not be had: {reason}"), cause).with(Exit::Os)
}

/// What was done, step by step.
#[derive(Debug, Default)]
struct Steps(Vec<Step>);

impl Steps {
    /// Notes a step that is over now.
    fn done(&mut self, name: &'static str, started: Instant, what: impl Into<String>) {
        self.took(name, nanoseconds(started.elapsed()), what);
    }

    /// Notes a step whose time was measured.
    fn took(&mut self, name: &'static str, elapsed_ns: u64, what: impl Into<String>) {
        self.0.push(Step { name, elapsed_ns, what: what.into() });
    }
}

/// One thing that was done.
#[derive(Debug, Serialize)]
struct Step {
    name: &'static str,
    elapsed_ns: u64,
    what: String,
}

/// `uzone.demo/1`.
#[derive(Debug, Serialize)]
struct Demo {
    schema: &'static str,
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
            grouped(self.touch.pages),
            grouped(self.touch.faults),
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
    cannot: Vec<&'static str>,
}

/// What userfaultfds for user-mode faults do not report.
const USER_MODE: &str = "a system call that is given a page which is not there yet (such as read(2) \
     into lazily mapped memory) is not served: it fails with EFAULT; root, access to \
     /dev/userfaultfd, or vm.unprivileged_userfaultfd = 1 (sysctl) changes that";

impl Mode {
    fn of(sees_kernel_faults: bool) -> Self {
        let cannot = if sees_kernel_faults { Vec::new() } else { vec![USER_MODE] };
        Self { sees_kernel_faults, cannot }
    }
}

/// What the image was made of, and the hash of all of it.
#[derive(Clone, Debug, Serialize)]
struct ImageFacts {
    source_files: u64,
    source_bytes: u64,
    hash: String,
}

/// What came of touching it.
#[derive(Debug, Serialize)]
struct TouchFacts {
    pages: u64,
    /// How often the reader had to wait.
    faults: u64,
    /// Pages that came along with those that were waited for.
    pages_around: u64,
    in_order_bytes: u64,
    in_order_ns: u64,
    scattered_ns: u64,
    hash: String,
    hash_ns: u64,
    first_difference_bytes: Option<u64>,
}

impl TouchFacts {
    fn is_right(&self, image: &ImageFacts) -> bool {
        self.first_difference_bytes.is_none() && self.hash == image.hash
    }
}

/// Returns a length in the steps of a progress bar, which are MiB.
const fn units(bytes: u64) -> u64 {
    bytes >> 20
}

/// Returns a number with commas: `26,214,400`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn long_numbers_have_commas() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (26_214_400, "26,214,400"),
            (u64::MAX, "18,446,744,073,709,551,615"),
        ] {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn a_single_difference_is_not_right() {
        let image =
            |hash: &str| ImageFacts { source_files: 1, source_bytes: 1, hash: hash.to_owned() };
        let touch = |hash: &str, first_difference_bytes| TouchFacts {
            pages: 1,
            faults: 1,
            pages_around: 0,
            in_order_bytes: 0,
            in_order_ns: 1,
            scattered_ns: 1,
            hash: hash.to_owned(),
            hash_ns: 1,
            first_difference_bytes,
        };
        assert!(touch("a", None).is_right(&image("a")));
        assert!(!touch("a", None).is_right(&image("b")));
        assert!(!touch("a", Some(0)).is_right(&image("a")));
    }

    #[test]
    fn arguments_of_the_demo_become_a_plan_or_are_refused() {
        let args = |size, reserve| Args {
            size: Some(size),
            reserve: Some(reserve),
            dir: None,
            output: PathBuf::from("there"),
        };
        let only = |args: &Args| Plan::all(args).map(|mut plans| plans.remove(0));
        let plan = only(&args(ByteLen::gib(1), ByteLen::gib(100))).expect("a plan");
        assert_eq!((plan.part, plan.described), (ByteLen::mib(256), ByteLen::gib(4)));
        assert_eq!(plan.in_order(), ByteLen::mib(768));
        assert_eq!(plan.page_path(), Path::new("there/uzone-demo.html"));
        let plan = only(&args(ByteLen::mib(8), ByteLen::gib(1))).expect("a plan");
        assert_eq!((plan.part, plan.described), (ByteLen::mib(8), ByteLen::gib(1)));
        assert_eq!(plan.in_order(), ByteLen::mib(6));
        for (size, reserve) in [(0, 1 << 30), (4 << 20, 1 << 30), (8 << 20, 0), (8 << 20, 1 << 20)]
        {
            assert!(only(&args(ByteLen::new(size), ByteLen::new(reserve))).is_err());
        }
        // Without arguments the plans follow the machine, the largest first.
        let default = Args { size: None, reserve: None, ..args(ByteLen::ZERO, ByteLen::ZERO) };
        let plans = Plan::all(&default).expect("plans");
        let sizes = |plan: &Plan| (plan.size, plan.reserve);
        assert_eq!(plans.first().map(sizes), Some((ByteLen::gib(1), ByteLen::gib(100))));
        assert_eq!(plans.last().map(sizes), Some((ByteLen::mib(64), ByteLen::gib(1))));
    }
}

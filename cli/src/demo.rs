//! `uzone demo`: the main job on real memory, in under a minute, for somebody who never heard of it.

use std::fmt::Write as _;
use std::time::Instant;

use serde::Serialize;
use uzone::{BindOptions, Limit, MemoryKind, Order, PfnRange, Region, Zone};
use uzone_bench::bind::Settings;
use uzone_bench::report::{Bench, Row};
use uzone_os::{SystemRoot, memory};
use uzone_pages::ByteLen;

use crate::bench::{self, ns, number};
use crate::exit::{self, Exit, Failure};
use crate::output::{Output, Report, Style, Tone, table};

/// Describe a large region of memory, look at a page, and compare with the plain way
///
/// It reserves addresses, writes to a few pages of them, binds them (that is: gives every page a
/// descriptor), looks at one, unbinds, and checks that the bytes are as they were. Then it measures
/// what the same takes without uzone, and how much of the machine's limit is reached. It needs no
/// root and leaves nothing behind.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help(
    "uzone demo --size 16G",
    &[Exit::Ok, Exit::No, Exit::Usage, Exit::Os, Exit::Io],
))]
pub(crate) struct Args {
    /// How much memory to describe, in whole GiB [default: 32G, or what this host has room for]
    #[arg(long, value_name = "SIZE")]
    size: Option<ByteLen>,
}

/// Sizes to describe, if nothing is said: a third of the published experiment, which takes a third
/// of its time, or less on a small host.
const SIZES: [ByteLen; 4] = [ByteLen::gib(32), ByteLen::gib(8), ByteLen::gib(2), ByteLen::gib(1)];

/// How many pages are written to, and looked at again after unbind.
const MARKED: u64 = 64;

/// Runs the demo and prints what it did.
///
/// # Errors
/// If there is too little memory, or the result cannot be written.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    let size = args.size.unwrap_or_else(default_size);
    let settings = Settings {
        size,
        rebinds: 9,
        first_binds: 3,
        growth: ByteLen::ZERO,
        ..Settings::published()
    };
    uzone_bench::bind::check(&settings)?;
    out.log(format_args!("describing {size}"));
    let (steps, is_intact) = steps(size)?;
    let bench = bench::run_bind(&settings, out)?;
    let demo = Demo { schema: "uzone.demo/1", size_bytes: size.get(), steps, is_intact, bench };
    out.print(&demo)?;
    Ok(if is_intact { Exit::Ok } else { Exit::No })
}

/// The largest size whose descriptors, twice, take no more than half of what can be had.
fn default_size() -> ByteLen {
    let Ok(available) = memory::available(&SystemRoot::host()) else { return ByteLen::gib(1) };
    if matches!(available.limited_by, Limit::AddressSpace) {
        return ByteLen::gib(1); // the regions themselves count
    }
    let fits = |size: &ByteLen| size.get() / 64 * 2 <= available.bytes.get() / 2;
    SIZES.into_iter().find(fits).unwrap_or(ByteLen::gib(1))
}

/// `uzone.demo/1`.
#[derive(Debug, Serialize)]
struct Demo {
    schema: &'static str,
    size_bytes: u64,
    steps: Vec<Step>,
    is_intact: bool,
    bench: Bench,
}

/// One thing that was done.
#[derive(Debug, Serialize)]
struct Step {
    name: &'static str,
    elapsed_ns: u64,
    what: String,
}

/// Does the main job once and tells what happened.
fn steps(size: ByteLen) -> Result<(Vec<Step>, bool), Failure> {
    let mut steps = Vec::new();
    let mut step = |name, started: Instant, what: String| {
        let elapsed_ns = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        steps.push(Step { name, elapsed_ns, what });
    };

    let started = Instant::now();
    let region = Region::anonymous(size)?;
    step("reserve", started, format!("{size} of addresses; no memory is taken yet"));

    let started = Instant::now();
    let stride = size.get() / MARKED;
    for mark in 0..MARKED {
        region.write_at(mark * stride, &mark.to_le_bytes())?;
    }
    step("write", started, format!("a mark into each of {MARKED} pages across it"));

    let zone = Zone::new();
    let started = Instant::now();
    let options = BindOptions::new(MemoryKind::Generic).order(Order::PMD);
    let pagemap = zone.bind(region, options)?;
    let report = pagemap.report();
    let what = format!(
        "{} pages described by {} descriptors of {} bytes, one for each 2 MiB",
        report.pages, report.descriptors, report.descriptor_bytes
    );
    step("bind", started, what);

    let started = Instant::now();
    let what = match pagemap.page_at(size.get() / 2 + 12345 * 4096) {
        Some(page) => {
            let held = pagemap.get(PfnRange::try_single(page.pfn())?)?;
            let references = held.word(held.range().start()).references();
            drop(held);
            format!(
                "page {} is {} pages into the 2 MiB folio at {}; {references} references while \
                 held, {} after",
                page.pfn(),
                page.distance(),
                page.head(),
                page.word().references(),
            )
        }
        None => String::from("a page beyond the region"),
    };
    step("look", started, what);

    let started = Instant::now();
    let resident = pagemap.metadata_resident()?;
    step("account", started, format!("{resident} of descriptors are resident, says the kernel"));

    let started = Instant::now();
    let region = pagemap.unbind()?;
    step("unbind", started, String::from("the region is ours again"));

    let started = Instant::now();
    let mut intact = 0;
    for mark in 0..MARKED {
        let mut bytes = [0; 8];
        region.read_at(mark * stride, &mut bytes)?;
        intact += u64::from(u64::from_le_bytes(bytes) == mark);
    }
    step("check", started, format!("{intact} of {MARKED} marks are as they were written"));
    Ok((steps, intact == MARKED))
}

/// The rows that the demo shows, and what it calls them: the row, its plain way, its limit.
const COMPARED: [(&str, &str, &str); 7] = [
    ("bind-first/ours-1", "bind-first/naive", "64-byte descriptors, first time"),
    ("bind-first/ours-1", "bind-first/naive-huge", "the same, the plain way on huge pages too"),
    ("bind-4k/ours-1", "bind-4k/naive", "64-byte descriptors, again (memory kept)"),
    ("bind-2m/ours-1", "bind-2m/naive", "the same, as 2 MiB folios"),
    ("bind-small/eager-8-bytes", "bind-4k/naive", "8-byte descriptors, all written"),
    ("bind-small/derived-2m-8-bytes", "bind-4k/naive", "8 bytes for each 2 MiB folio"),
    ("bind-small/on-touch", "bind-4k/naive", "8-byte descriptors, written when touched"),
];

impl Report for Demo {
    fn text(&self, style: Style) -> String {
        let size = ByteLen::new(self.size_bytes);
        let pages = self.size_bytes >> 12;
        let mut text = format!(
            "Describing {size} of memory: a descriptor for each of {pages} pages of 4 KiB.\n\n"
        );
        let mut done = table(&["step", "took", ""]);
        if let Some(column) = done.column_mut(2) {
            column.set_cell_alignment(comfy_table::CellAlignment::Left);
        }
        for step in &self.steps {
            done.add_row([step.name.to_owned(), ns(step.elapsed_ns), step.what.clone()]);
        }
        // Writing to a String does not fail.
        let _ = writeln!(text, "{}\n", done.trim_fmt());
        let _ = writeln!(text, "The same pages, the plain way (field after field) and by uzone:\n");
        let mut compared = table(&["", "plain", "uzone", "faster", "of the limit"]);
        let find = |id: &str| self.bench.results.iter().find(|row| row.id == id);
        for (ours, plain, name) in COMPARED {
            if let (Some(ours), Some(plain)) = (find(ours), find(plain)) {
                compared.add_row(comparison(name, ours, plain));
            }
        }
        let _ = writeln!(text, "{}\n", compared.trim_fmt());
        let machine = &self.bench.machine;
        let _ = writeln!(
            text,
            "The limit is a bare fill of as many bytes on this machine ({}), or for fresh memory\n\
             the kernel's own clearing of it. Medians of {} rounds, {} of those with fresh\n\
             memory, where the plain way takes 4 KiB pages as they come or, in the second row, huge\n\
             ones as we do. More: uzone bench bind",
            machine.cpu,
            find("bind-4k/ours-1").map_or(0, |row| row.rounds),
            find("bind-first/ours-1").map_or(0, |row| row.rounds),
        );
        let _ = writeln!(
            text,
            "{}",
            if self.is_intact {
                style.paint(Tone::Good, "All is as it should be; nothing is left behind.")
            } else {
                style
                    .paint(Tone::Bad, "The bytes of the region changed: this is a defect of uzone.")
            }
        );
        text
    }
}

fn comparison(name: &str, ours: &Row, plain: &Row) -> Vec<String> {
    let dash = || String::from("-");
    // Of the medians beside it, so that whoever divides finds the same.
    #[expect(
        clippy::cast_precision_loss,
        reason = "nanoseconds of a ratio that shows three digits"
    )]
    let ratio = plain.median_ns as f64 / ours.median_ns.max(1) as f64;
    vec![
        name.to_owned(),
        ns(plain.median_ns),
        ns(ours.median_ns),
        format!("{} x", number(ratio)),
        ours.share_of_limit.map_or_else(dash, |share| format!("{:.0} %", share * 100.0)),
    ]
}

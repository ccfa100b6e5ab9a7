//! `uzone bench`: the published experiments on this machine, each beside its limit.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use clap::Subcommand;
use uzone_bench::bind::{self, Settings};
use uzone_bench::machine::Machine;
use uzone_bench::metadata::{self, Metadata, Origin};
use uzone_bench::report::{Bench, Row, Table};
use uzone_bench::{BenchError, Phase, Watch};
use uzone_bench::{copy, fault, pin, zero};
use uzone_pages::ByteLen;

pub(crate) use uzone_report::number;

use crate::exit::{self, Exit, Failure};
use crate::output::{Output, Report, Style, human_duration, table};
use crate::progress::Progress;

/// Measure this machine: naive, ours, the limit, and the published figure
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone bench bind --size 100G --json", &EXITS))]
pub(crate) struct Args {
    #[command(subcommand)]
    benchmark: Benchmark,
}

const EXITS: [Exit; 4] = [Exit::Ok, Exit::Usage, Exit::Os, Exit::Io];

#[derive(Debug, Subcommand)]
enum Benchmark {
    Bind(BindArgs),
    Pin(PinArgs),
    Zero(ZeroArgs),
    Copy(CopyArgs),
    Fault(FaultArgs),
}

/// Map files lazily: windows of every size, beside a one-page handler and the kernel's own mapping
///
/// A file in the page cache and a memory file, touched in order, at random, and one page per 2 MiB;
/// huge pages of the pool if there are free ones; a file that the page cache has forgotten; what a
/// page does to the others that does not come; and where the time of a fault goes. With everything at
/// its default this takes about an hour; --size 256M takes minutes.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone bench fault --size 256M --threads 1", &FAULT_EXITS))]
struct FaultArgs {
    /// How much is touched in order, and at most 1 GiB of that at random
    #[arg(long, default_value = "2G", value_name = "SIZE")]
    size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// Numbers of threads that touch; each but 1 has tables of its own, and 1 always has
    #[arg(long, default_values_t = [1, 2, 8], value_delimiter = ',', value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: Vec<u16>,
    /// Where the file is made; on a disk, or nothing can be cold [default: where temporary files go]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Run the tables alone whose ids begin so, such as fault-seq or fault-split [default: all]
    #[arg(long, value_delimiter = ',', value_name = "ID")]
    table: Vec<String>,
}

const FAULT_EXITS: [Exit; 6] =
    [Exit::Ok, Exit::Usage, Exit::Feature, Exit::Os, Exit::Io, Exit::Permission];

/// Clear memory: every size, hot and cold, read at once or not, beside the kernel and the C library
///
/// Extents from 4 KiB on, by every store there is; a folio of which one page is read at once; what a
/// bystander loses; batches and pauses; how long a taker waits for a folio of a pool; the kernel's own
/// clearing; and first touch. With root, 256 MiB of huge pages are put into the host's pool for the run. libpmem is measured if it is installed.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone bench zero --size 32M --populate-size 0", &EXITS))]
struct ZeroArgs {
    /// The largest extent
    #[arg(long, default_value = "1G", value_name = "SIZE")]
    size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 11, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// How much memory is touched for the first time; 0 leaves that out
    #[arg(long, default_value = "8G", value_name = "SIZE")]
    populate_size: ByteLen,
    /// Rounds of first touch
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    first_touches: u32,
    /// The threads of the rows that have several [default: as many as there are CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// Copy memory: every size, hot and cold, read at once or not, beside the C library and libpmem
///
/// Extents from 4 KiB on, by every store there is, several pages side by side among them. libpmem is
/// measured if it is installed.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone bench copy --size 32M", &EXITS))]
struct CopyArgs {
    /// The largest extent; the memory taken is four times that, at least 2 GiB
    #[arg(long, default_value = "1G", value_name = "SIZE")]
    size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 11, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
}

/// Pin a region and let it go: 2 MiB folios, lists, base pages, threads, and the kernel
///
/// The region is reserved and described; its bytes are never touched. `naive` is an atomic step for
/// each base page, on 64-byte descriptors as Linux has them; they take 1/64 of the size. The kernel's
/// own pins are measured as buffers of an io_uring, of memory that is present: up to 1 GiB of base
/// pages, of transparent huge pages, and of the pool's if that has as many free.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone bench pin --size 128G", &EXITS))]
struct PinArgs {
    /// How much memory is held, in whole GiB
    #[arg(long, default_value = "16G", value_name = "SIZE")]
    size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 30, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
}

/// Describe every page of a region: first bind, rebinds, and cost against size
///
/// The region is only reserved; what is written are its descriptors, 64 bytes a page. Every row is
/// measured once a round, in a random order, so that they all meet the same machine. `naive` is a
/// call for each page that sets field after field; the limit is a bare fill of as many bytes.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone bench bind --size 100G --rebinds 30", &EXITS))]
struct BindArgs {
    /// How much memory is described, in whole GiB; its descriptors take 1/64 of that, twice
    #[arg(long, default_value = "100G", value_name = "SIZE")]
    size: ByteLen,
    /// Rounds of rebinds
    #[arg(long, default_value_t = 30, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rebinds: u32,
    /// Rounds of first binds, which take fresh memory from the kernel; 0 leaves them out
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=10_000))]
    first_binds: u32,
    /// The most threads of the rows that have several [default: as many as there are CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Leave out cost against size, which takes up to three quarters of the available memory
    #[arg(long)]
    no_growth: bool,
    /// Instead of times, show how many bytes the descriptors of 1 TiB take, Linux's and ours
    #[arg(long, conflicts_with_all = ["size", "rebinds", "first_binds", "threads", "no_growth"])]
    metadata: bool,
    /// With --metadata, the most memory that the descriptors of a row may take [default: half of
    /// what can be had]
    #[arg(long, requires = "metadata", value_name = "SIZE")]
    max_memory: Option<ByteLen>,
}

/// Runs a benchmark and prints what it found.
///
/// # Errors
/// If memory is short, or the result cannot be written.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    let bench = match &args.benchmark {
        Benchmark::Bind(BindArgs { metadata: true, max_memory, .. }) => {
            let settings = metadata::Settings { most: *max_memory };
            out.print(&with_progress(out, |watch| metadata::run(settings, watch))?)?;
            return Ok(Exit::Ok);
        }
        Benchmark::Bind(args) => bind_table(args, out)?,
        Benchmark::Pin(args) => {
            let settings = pin::Settings { size: args.size, rounds: args.rounds };
            with_progress(out, |watch| pin::run(settings, watch))?
        }
        Benchmark::Zero(args) => {
            warn_of_stores(out);
            with_progress(out, |watch| zero::run(zero_settings(args), watch))?
        }
        Benchmark::Copy(args) => {
            warn_of_stores(out);
            let settings = copy::Settings { size: args.size, rounds: args.rounds };
            with_progress(out, |watch| copy::run(settings, watch))?
        }
        Benchmark::Fault(args) => {
            let settings = fault::Settings {
                size: args.size,
                rounds: args.rounds,
                threads: args.threads.iter().copied().map(usize::from).collect(),
                directory: args.dir.clone().unwrap_or_else(std::env::temp_dir),
                tables: args.table.clone(),
            };
            with_progress(out, |watch| fault::run(&settings, watch))?
        }
    };
    out.print(&bench)?;
    Ok(Exit::Ok)
}

fn zero_settings(args: &ZeroArgs) -> zero::Settings {
    let published = zero::Settings::published();
    zero::Settings {
        size: args.size,
        rounds: args.rounds,
        first_touches: args.first_touches,
        populate: args.populate_size,
        threads: args
            .threads
            .and_then(|threads| NonZeroUsize::new(usize::from(threads)))
            .unwrap_or(published.threads),
    }
}

fn bind_table(args: &BindArgs, out: &Output) -> Result<Bench, BenchError> {
    let published = Settings::published();
    let settings = Settings {
        size: args.size,
        rebinds: args.rebinds,
        first_binds: args.first_binds,
        threads: args
            .threads
            .and_then(|threads| NonZeroUsize::new(usize::from(threads)))
            .unwrap_or(published.threads),
        growth: !args.no_growth,
    };
    warn_of_stores(out);
    with_progress(out, |watch| bind::run(settings, watch))
}

/// Says so if the stores that the environment asked for are not taken.
pub(crate) fn warn_of_stores(out: &Output) {
    if let Some(problem) = &uzone_stream::chosen().problem {
        out.warn(format_args!("{problem}; taking {} stores", uzone_stream::best()));
    }
}

/// Runs a benchmark with a progress bar for each of its parts.
pub(crate) fn with_progress<T>(
    out: &Output,
    run: impl FnOnce(Watch<'_>) -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    let shown: RefCell<Option<(String, Progress)>> = RefCell::new(None);
    run(&|phase: Phase<'_>| {
        let mut shown = shown.borrow_mut();
        if shown.as_ref().is_none_or(|(what, _)| what != phase.what) {
            let bar = Progress::new(out, phase.what.to_owned(), phase.total);
            *shown = Some((phase.what.to_owned(), bar));
        }
        if let Some((_, bar)) = shown.as_ref() {
            bar.set(phase.done);
        }
    })
}

impl Report for Bench {
    fn text(&self, _style: Style) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = writeln!(text, "uzone bench {}: {}", self.benchmark, self.settings);
        for table in &self.tables {
            text.push('\n');
            write_table(&mut text, table, &self.results);
        }
        if !self.skipped.is_empty() {
            text.push_str("\nnot measured\n");
            for skipped in &self.skipped {
                let _ = writeln!(text, "  {}: {}", skipped.id, skipped.reason);
            }
        }
        let sources = self.results.iter().filter_map(|row| Some(row.published?.source)).collect();
        let _ = write!(text, "\n{}", foot(&self.machine, sources));
        text
    }
}

impl Report for Metadata {
    fn text(&self, _style: Style) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = writeln!(text, "uzone bench bind --metadata: {}", self.settings);
        for spec in &self.tables {
            let _ = writeln!(text, "\n{}\n({})", spec.title, spec.note);
            let header = [
                "row",
                "bytes each",
                "mapped",
                "resident",
                "page tables",
                "of the region",
                "bind",
                "figures",
            ];
            let mut cells = table(&header);
            let prefix = format!("{}/", spec.id);
            for row in self.results.iter().filter(|row| row.id.starts_with(&prefix)) {
                let bytes = |bytes: u64| ByteLen::new(bytes).to_string();
                cells.add_row(vec![
                    row.name.clone(),
                    row.descriptor_bytes.to_string(),
                    row.virtual_bytes_per_tib.map_or_else(none, bytes),
                    bytes(row.resident_bytes_per_tib),
                    row.page_table_bytes_per_tib.map_or_else(none, bytes),
                    bytes(row.region_bytes_per_tib),
                    row.bind_ns.map_or_else(none, ns),
                    match row.origin {
                        Origin::Measured => "measured",
                        Origin::Published => "published",
                        Origin::Derived => "derived",
                    }
                    .to_owned(),
                ]);
            }
            let _ = writeln!(text, "{}", cells.trim_fmt());
        }
        if !self.skipped.is_empty() {
            text.push_str("\nnot measured\n");
            for skipped in &self.skipped {
                let _ = writeln!(text, "  {}: {}", skipped.id, skipped.reason);
            }
        }
        let sources = self.results.iter().filter_map(|row| row.source).collect();
        let _ = write!(text, "\n{}", foot(&self.machine, sources));
        text
    }
}

fn write_table(text: &mut String, spec: &Table, rows: &[Row]) {
    let _ = writeln!(text, "{}\n({})", spec.title, spec.note);
    let prefix = format!("{}/", spec.id);
    let rows: Vec<&Row> = rows.iter().filter(|row| row.id.starts_with(&prefix)).collect();
    // A column that no row of the table has anything for is not shown; that nothing was published is
    // worth knowing.
    let has_any = |column: &&Column| rows.iter().any(|row| (column.cell)(row).is_some());
    let columns: Vec<&Column> =
        COLUMNS.iter().filter(|column| column.heading == "published" || has_any(column)).collect();
    let mut cells = table(&columns.iter().map(|column| column.heading).collect::<Vec<_>>());
    for row in rows {
        let cell = |column: &&Column| (column.cell)(row).unwrap_or_else(none);
        cells.add_row(columns.iter().map(cell).collect::<Vec<_>>());
    }
    let _ = writeln!(text, "{}", cells.trim_fmt());
}

struct Column {
    heading: &'static str,
    cell: fn(&Row) -> Option<String>,
}

const COLUMNS: [Column; 20] = [
    Column {
        heading: "row",
        cell: |row| Some(if row.cold { format!("{} (cold)", row.name) } else { row.name.clone() }),
    },
    Column { heading: "median", cell: |row| Some(ns(row.median_ns)) },
    Column { heading: "worst", cell: |row| Some(ns(row.worst_ns)) },
    Column { heading: "ns/page", cell: |row| Some(number(row.ns_per_page)) },
    Column { heading: "ns/folio", cell: |row| row.ns_per_folio.map(number) },
    Column {
        // The time of the only call is the median.
        heading: "ns/call",
        cell: |row| row.ns_per_call.filter(|_| row.calls > Some(1)).map(number),
    },
    Column {
        heading: "GB/s",
        cell: |row| {
            let is_rate = row.bytes != 0 && row.threads != 0;
            is_rate.then(|| number(row.gib_per_s * GIB_TO_GB))
        },
    },
    Column {
        heading: "of limit",
        cell: |row| row.share_of_limit.map(|share| format!("{:.0} %", share * 100.0)),
    },
    Column { heading: "x naive", cell: |row| row.ratio_naive.map(number) },
    Column { heading: "x best", cell: |row| row.ratio_best.map(number) },
    Column { heading: "x alike", cell: |row| row.faults?.ratio_waiting_alike.map(number) },
    Column { heading: "faults", cell: |row| Some(row.faults?.count.to_string()) },
    Column { heading: "ns/fault", cell: |row| row.faults?.ns_per_fault.map(number) },
    Column { heading: "wasted pages", cell: |row| Some(row.faults?.wasted_pages.to_string()) },
    Column {
        heading: "touch p50, p99",
        cell: |row| {
            let touch = row.faults?.touch?;
            Some(format!("{}, {}", ns(touch.p50_ns), ns(touch.p99_ns)))
        },
    },
    Column {
        heading: "beyond",
        cell: |row| row.faults?.beyond_ns.map(|ns| format!("{ns:+.0} ns")),
    },
    Column {
        heading: "pause p50, p99.9, worst",
        cell: |row| {
            let pauses = row.pauses?;
            Some(format!("{}, {}, {}", ns(pauses.p50_ns), ns(pauses.p999_ns), ns(pauses.worst_ns)))
        },
    },
    Column {
        heading: "call p50, p99, worst",
        cell: |row| {
            let latency = row.latency?;
            let (p50, p99) = (ns(latency.p50_ns), ns(latency.p99_ns));
            Some(format!("{p50}, {p99}, {}", ns(latency.worst_ns)))
        },
    },
    Column {
        heading: "resident/TiB",
        cell: |row| {
            let bytes = row.metadata_resident_bytes_per_tib?;
            Some(ByteLen::new(bytes).to_string())
        },
    },
    Column { heading: "published", cell: |row| row.published.map(|published| ns(published.ns)) },
];

/// Tables count in powers of ten, as those do that they are compared with.
const GIB_TO_GB: f64 = 1.073_741_824;

fn none() -> String {
    String::from("-")
}

/// Returns a time for a column of them.
pub(crate) fn ns(ns: u64) -> String {
    human_duration(Duration::from_nanos(ns))
}

/// Returns what was measured on, and what was published on what.
fn foot(machine: &Machine, mut sources: Vec<&str>) -> String {
    let mut text = format!(
        "{}: {}, {} CPUs, {}, Linux {}, transparent huge pages {}; {} stores; uzone {}{}\n",
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(machine.unix_seconds)),
        machine.cpu,
        machine.cpus,
        ByteLen::new(machine.memory_bytes),
        machine.kernel,
        machine.transparent_huge_pages,
        machine.stream,
        machine.version,
        machine.commit.map(|commit| format!(" ({commit})")).unwrap_or_default(),
    );
    sources.sort_unstable();
    sources.dedup();
    for source in sources {
        let _ = writeln!(text, "published: {source}");
    }
    text
}

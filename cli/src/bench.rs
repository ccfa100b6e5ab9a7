//! `uzone bench`: the published experiments on this machine, each beside its limit.

mod check;
mod text;

use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use uzone_bench::all::{self, Pace};
use uzone_bench::metadata;
use uzone_bench::settings::{
    self, BindSettings, CopySettings, FaultSettings, Part, PinSettings, SnapshotSettings,
    ZeroSettings,
};
use uzone_bench::{BenchError, Watch};
use uzone_pages::ByteLen;
use uzone_report::{Bench, Document, ReportError};
use uzone_stream::{Basis, STORE_POLICY, StorePolicy};

pub(crate) use self::text::ns;
pub(crate) use uzone_report::number;

use crate::exit::{self, Exit, Failure};
use crate::output::Output;
use crate::progress::Steps;
use crate::report::canonical;

/// Measure this machine: naive, ours, the limit, and the published figure
///
/// Without a benchmark, all of them are run at sizes that fit the machine, in three to four minutes,
/// and what matters most is printed as one table; -v prints all tables, and --json everything.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone bench --json > base.json && uzone bench --check base.json", &EXITS))]
pub(crate) struct Args {
    #[command(subcommand)]
    benchmark: Option<Benchmark>,
    /// See whether it works: sizes and rounds that take half a minute in all, and whose figures mean nothing
    #[arg(long, global = true, conflicts_with = "check")]
    quick: bool,
    /// Repeat the run of FILE, an earlier output with --json, and exit with 1 if a row of ours stands
    /// worse to its limit and to the naive way by more than the noise of both runs.
    /// Tables with such rows are run twice
    #[arg(long, global = true, value_name = "FILE")]
    check: Option<PathBuf>,
    /// Write an HTML page with pictures as well
    #[arg(long, global = true, value_name = "HTML")]
    report: Option<PathBuf>,
}

const EXITS: [u8; 9] = [0, 1, 2, 65, 66, 69, 71, 74, 77];

#[derive(Debug, Subcommand)]
enum Benchmark {
    Bind(BindArgs),
    Pin(PinArgs),
    Zero(ZeroArgs),
    Copy(CopyArgs),
    Fault(FaultArgs),
    Snapshot(SnapshotArgs),
    Restore(RestoreArgs),
    Seeds(SeedsArgs),
}

/// The published experiments: describing memory, pinning it, clearing it, and mapping a file by windows
///
/// Each is a table with the published figures beside the naive way, ours and the limit; SQLite and ripgrep over
/// mapped files take the place of the builds of Linux and the tests of git. Without --full they are
/// scaled, which each table states, and take less than five minutes on 2 CPUs. With it they have the published
/// sizes as far as memory allows, all windows, and 1 to 120 threads.
#[derive(Debug, PartialEq, clap::Args)]
#[command(after_help = exit::help("uzone bench seeds --report seeds.html", &EXITS))]
struct SeedsArgs {
    /// Take the published sizes
    #[arg(long)]
    full: bool,
    /// Where the file is made that is mapped [default: where temporary files go]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    #[command(flatten)]
    tables: Tables,
}

/// Map files lazily: windows of every size, beside a one-page handler and the kernel's own mapping
///
/// A file in the page cache and a memory file, touched in order, at random, and one page per 2 MiB;
/// huge pages of the pool if there are free ones; a file that the page cache has forgotten; what a
/// page does to the others that does not come; where the time of a fault goes; and 0.2 to 100 % of the
/// pages of a larger file at random. This takes less than a minute; the published sizes
/// (--size 2G --threads 1,2,8) take more than an hour.
#[derive(Debug, PartialEq, clap::Args)]
#[command(after_help = exit::help("uzone bench fault --size 256M --threads 1,2", &EXITS))]
struct FaultArgs {
    /// How much is touched in order, and at most 1 GiB of that at random
    #[arg(long, default_value = "8M", value_name = "SIZE")]
    size: ByteLen,
    /// How large the file is of which 0.2 to 100 % of the pages are touched at random; 0 leaves that out
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    density_size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// Numbers of threads that touch; each but 1 has tables of its own, and 1 always has
    #[arg(long, default_values_t = [1], value_delimiter = ',', value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: Vec<u16>,
    /// Where the file is made; on a disk, or nothing can be cold [default: where temporary files go]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    #[command(flatten)]
    tables: Tables,
}

/// Clear memory: every size, hot and cold, read at once or not, beside the kernel and the C library
///
/// Extents from 4 KiB on, by every store there is; a folio of which one page is read at once; what a
/// bystander loses; batches and pauses; how long a taker waits for a folio of a pool; the kernel's own
/// clearing; and first touch. With root, 256 MiB of huge pages are put into the host's pool for the run. libpmem is measured if it is installed.
#[derive(Debug, PartialEq, clap::Args)]
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
    #[command(flatten)]
    threads: Threads,
    #[command(flatten)]
    tables: Tables,
}

/// Copy memory: every size, hot and cold, read at once or not, beside the C library and libpmem
///
/// Extents from 4 KiB on, by every store there is, several pages side by side among them. libpmem is
/// measured if it is installed.
#[derive(Debug, PartialEq, clap::Args)]
#[command(after_help = exit::help("uzone bench copy --size 32M", &EXITS))]
struct CopyArgs {
    /// The largest extent; the memory taken is four times that, at least 2 GiB
    #[arg(long, default_value = "1G", value_name = "SIZE")]
    size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 11, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    #[command(flatten)]
    tables: Tables,
}

/// Pin a region and let it go: 2 MiB folios, lists, base pages, threads, and the kernel
///
/// The region is reserved and described; its bytes are never touched. `naive` is an atomic step for
/// each base page, on 64-byte descriptors as Linux has them; they take 1/64 of the size. The kernel's
/// own pins are measured as buffers of an io_uring, of memory that is present: up to 1 GiB of base
/// pages, of transparent huge pages, and of the pool's if that has as many free.
#[derive(Debug, PartialEq, clap::Args)]
#[command(after_help = exit::help("uzone bench pin --size 128G", &EXITS))]
struct PinArgs {
    /// How much memory is held, in whole GiB
    #[arg(long, default_value = "16G", value_name = "SIZE")]
    size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 30, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    #[command(flatten)]
    tables: Tables,
}

/// Describe every page of a region: first bind, rebinds, and cost against size
///
/// The region is only reserved; what is written are its descriptors, 64 bytes a page. Every row is
/// measured once a round, in a random order, so that they all meet the same machine. `naive` is a
/// call for each page that sets field after field; the limit is a bare fill of as many bytes.
#[derive(Debug, PartialEq, clap::Args)]
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
    /// Describe this DAX device too, or this file on a DAX mount: table bind-dax. Its bytes are not touched
    #[arg(long, value_name = "PATH")]
    dax: Option<PathBuf>,
    /// Instead of times, show how many bytes the descriptors of 1 TiB take, Linux's and ours
    #[arg(long, conflicts_with_all = ["size", "rebinds", "first_binds", "threads", "no_growth", "dax", "table"])]
    metadata: bool,
    /// With --metadata, the most memory that the descriptors of a row may take [default: half of
    /// what can be had]
    #[arg(long, requires = "metadata", value_name = "SIZE")]
    max_memory: Option<ByteLen>,
    #[command(flatten)]
    tables: Tables,
}

/// Pack an image of memory, read and verify it, and map it lazily: beside zstd, BLAKE3 and the raw bytes
///
/// The image is made of the programs and libraries in /usr/bin and /usr/lib, in runs, between which are runs
/// of zero pages; about 30 % of the pages are zero. All files are in the page cache. The command zstd is
/// measured if it is installed.
#[derive(Debug, PartialEq, clap::Args)]
#[command(after_help = exit::help("uzone bench snapshot --size 256M --dir /dev/shm", &EXITS))]
struct SnapshotArgs {
    /// How large the image is; files of twice that are made, and it is read into as much memory
    #[arg(long, default_value = "1G", value_name = "SIZE")]
    size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    #[command(flatten)]
    threads: Threads,
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    tables: Tables,
}

/// Restore a virtual machine from an image lazily, beside a handler of one page a fault and the kernel's mapping
///
/// The image is that of `uzone bench snapshot`, raw and packed, in the page cache. A thread touches memory that is
/// registered as Firecracker registers it: all pages in order, and a tenth of them, in runs, in random order.
#[derive(Debug, PartialEq, clap::Args)]
#[command(after_help = exit::help("uzone bench restore --size 256M --dir /dev/shm", &EXITS))]
struct RestoreArgs {
    /// How large the machine is; files of twice that are made, and its memory is as much
    #[arg(long, default_value = "1G", value_name = "SIZE")]
    size: ByteLen,
    /// Rounds
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    tables: Tables,
}

/// How many threads there are.
#[derive(Debug, PartialEq, clap::Args)]
struct Threads {
    /// The threads of the rows that have several [default: as many as there are CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// Where an image is made.
#[derive(Debug, PartialEq, clap::Args)]
struct Files {
    /// Where the files are made; in memory, the figures are without the disk [default: where temporary
    /// files go]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Which tables of a benchmark are run.
#[derive(Debug, PartialEq, clap::Args)]
struct Tables {
    /// Run the tables alone whose ids begin so, such as fault-seq, and those that are measured together
    /// with them [default: all]
    #[arg(long, value_delimiter = ',', value_name = "ID")]
    table: Vec<String>,
}

/// What the arguments of any benchmark have.
macro_rules! of_any {
    ($benchmark:expr, $args:ident => $of:expr) => {
        match $benchmark {
            Benchmark::Bind($args) => $of,
            Benchmark::Pin($args) => $of,
            Benchmark::Zero($args) => $of,
            Benchmark::Copy($args) => $of,
            Benchmark::Fault($args) => $of,
            Benchmark::Snapshot($args) => $of,
            Benchmark::Restore($args) => $of,
            Benchmark::Seeds($args) => $of,
        }
    };
}

impl Benchmark {
    fn name(&self) -> &'static str {
        match self {
            Self::Bind(_) => "bind",
            Self::Pin(_) => "pin",
            Self::Zero(_) => "zero",
            Self::Copy(_) => "copy",
            Self::Fault(_) => "fault",
            Self::Snapshot(_) => "snapshot",
            Self::Restore(_) => "restore",
            Self::Seeds(_) => all::SEEDS,
        }
    }

    /// Runs it.
    fn run(&self, watch: Watch<'_>) -> Result<Bench, BenchError> {
        match self.parts() {
            Ok(part) => part.run(watch),
            Err(parts) if parts.is_empty() => Err(BenchError::no_table(&self.tables().table)),
            Err(parts) => all::run_seeds(&parts, watch),
        }
    }

    /// Returns the settings of the benchmark, or of the several that it is.
    fn parts(&self) -> Result<Part, Vec<Part>> {
        let benchmark = match self {
            Self::Bind(args) => settings::Benchmark::Bind(args.settings()),
            Self::Pin(args) => {
                let (size, larger, rounds) = (args.size, ByteLen::ZERO, args.rounds);
                settings::Benchmark::Pin(PinSettings { size, larger, rounds })
            }
            Self::Zero(args) => settings::Benchmark::Zero(ZeroSettings {
                size: args.size,
                rounds: args.rounds,
                first_touches: args.first_touches,
                populate: args.populate_size,
                threads: or_all_cpus(args.threads.threads),
            }),
            Self::Copy(args) => {
                settings::Benchmark::Copy(CopySettings { size: args.size, rounds: args.rounds })
            }
            Self::Fault(args) => settings::Benchmark::Fault(FaultSettings {
                size: args.size,
                density: args.density_size,
                whole: None,
                programs: None,
                rounds: args.rounds,
                threads: args.threads.iter().copied().map(usize::from).collect(),
                directory: or_temporary(args.dir.as_deref()),
            }),
            Self::Snapshot(SnapshotArgs { size, rounds, threads, files, .. }) => {
                settings::Benchmark::Snapshot(image(*size, *rounds, threads.threads, files))
            }
            Self::Restore(RestoreArgs { size, rounds, files, .. }) => {
                settings::Benchmark::Restore(image(*size, *rounds, None, files))
            }
            Self::Seeds(args) => {
                let directory = or_temporary(args.dir.as_deref());
                let threads = or_all_cpus(None);
                let parts = all::seeds(all::available(), threads, args.full, &directory);
                return Err(all::with_tables(parts, &args.tables.table));
            }
        };
        Ok(Part::from(benchmark).with_tables(self.tables().table.clone()))
    }

    /// Returns which of its tables are run.
    fn tables(&self) -> &Tables {
        of_any!(self, args => &args.tables)
    }

    /// Returns what of its arguments a quick run takes.
    fn words_of_quick(&self) -> Vec<String> {
        let tables = self.tables().table.iter().map(|table| format!("--table={table}"));
        let dax = match self {
            Self::Bind(args) => args.dax.as_deref(),
            _ => None,
        };
        tables.chain(dax.map(|path| format!("--dax={}", path.display()))).collect()
    }

    /// Returns whether only these arguments were given.
    fn has_only(&self, words: &[String]) -> bool {
        fn is_default<A: clap::Args + clap::FromArgMatches + PartialEq>(
            args: &A,
            words: &[String],
        ) -> bool {
            let command = A::augment_args(clap::Command::new("uzone").no_binary_name(true));
            let matches = command.try_get_matches_from(words);
            matches
                .and_then(|matches| A::from_arg_matches(&matches))
                .is_ok_and(|plain| plain == *args)
        }
        of_any!(self, args => is_default(args, words))
    }
}

impl BindArgs {
    fn settings(&self) -> BindSettings {
        let published = BindSettings::published();
        BindSettings {
            size: self.size,
            rebinds: self.rebinds,
            first_binds: self.first_binds,
            threads: or_all_cpus(self.threads),
            growth: if self.no_growth { ByteLen::ZERO } else { published.growth },
            dax: self.dax.clone(),
        }
    }
}

fn image(size: ByteLen, rounds: u32, threads: Option<u16>, files: &Files) -> SnapshotSettings {
    let (threads, directory) = (or_all_cpus(threads), or_temporary(files.dir.as_deref()));
    SnapshotSettings { size, rounds, threads, directory }
}

/// Returns a directory; that of temporary files unless one is given.
fn or_temporary(directory: Option<&Path>) -> PathBuf {
    directory.map_or_else(std::env::temp_dir, Path::to_owned)
}

/// Returns a number of threads; as many as there are CPUs unless one is given.
fn or_all_cpus(threads: Option<u16>) -> NonZeroUsize {
    let given = threads.and_then(|threads| NonZeroUsize::new(usize::from(threads)));
    given.unwrap_or_else(|| BindSettings::published().threads)
}

/// Runs one benchmark or all, or compares with an earlier run, and prints what came of it.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    args.fit_together()?;
    if let Some(page) = &args.report {
        can_be_written(page)?;
    }
    if let Some(file) = &args.check {
        return check::run(file, args.benchmark.as_ref(), args.report.as_deref(), out);
    }
    match &args.benchmark {
        Some(Benchmark::Bind(BindArgs { metadata: true, max_memory, .. })) => {
            let settings = metadata::Settings { most: *max_memory };
            let found = with_progress(out, |watch| metadata::run(settings, watch))?;
            write_page(args.report.as_deref(), || Document::Metadata(found.clone()), out)?;
            out.print(&found)?;
        }
        benchmark => {
            choose_stores(out)?;
            let mut found = with_progress(out, |watch| match benchmark {
                Some(benchmark) if args.quick => match args.quick_part(benchmark) {
                    Some(part) => part.run(watch),
                    None => {
                        let parts = all::quick_seeds(args.all_parts());
                        let parts = all::with_tables(parts, &benchmark.tables().table);
                        all::run_seeds(&parts, watch)
                    }
                },
                Some(benchmark) => benchmark.run(watch),
                None => all::run(&args.all_parts(), Some(all::metadata()), watch),
            })?;
            found.quick = args.quick;
            write_page(args.report.as_deref(), || Document::Bench(found.clone()), out)?;
            out.print(&found)?;
        }
    }
    Ok(Exit::Ok)
}

impl Args {
    fn all_parts(&self) -> Vec<Part> {
        let pace = if self.quick { Pace::Quick } else { Pace::Full };
        all::parts(all::available(), or_all_cpus(None), pace, &std::env::temp_dir())
    }

    /// Returns one benchmark as a quick run of all has it, if that does.
    fn quick_part(&self, benchmark: &Benchmark) -> Option<Part> {
        let mut part = self.all_parts().into_iter().find(|part| part.name() == benchmark.name())?;
        if let (settings::Benchmark::Bind(settings), Benchmark::Bind(args)) =
            (&mut part.benchmark, benchmark)
        {
            settings.dax.clone_from(&args.dax);
        }
        Some(part.with_tables(benchmark.tables().table.clone()))
    }

    /// Refuses arguments that contradict each other.
    fn fit_together(&self) -> Result<(), Failure> {
        if let (true, Some(benchmark)) = (self.quick, &self.benchmark)
            && !benchmark.has_only(&benchmark.words_of_quick())
        {
            return Err(Failure::usage(format!(
                "--quick has sizes and rounds of its own: leave the arguments of {} out, all but --table and \
                 --dax, or leave --quick out",
                benchmark.name()
            )));
        }
        let Some(file) = &self.check else { return Ok(()) };
        if let Some(Benchmark::Bind(BindArgs { metadata: true, .. })) = &self.benchmark {
            let text = "--metadata counts bytes, which have no noise: leave --check out";
            return Err(Failure::usage(text));
        }
        match &self.report {
            Some(page) if canonical(page) == canonical(file) => Err(Failure::usage(format!(
                "{} is an input, and the page would take its place: name another --report",
                page.display()
            ))),
            _ => Ok(()),
        }
    }
}

/// Refuses a page that could not be written for want of its directory, before minutes are spent.
fn can_be_written(page: &Path) -> Result<(), ReportError> {
    if page.exists() && !page.is_file() {
        return Err(ReportError::not_a_file(page));
    }
    let directory = page.parent().filter(|parent| !parent.as_os_str().is_empty());
    match directory.is_none_or(Path::is_dir) {
        true => Ok(()),
        false => Err(ReportError::write(page, "create", io::ErrorKind::NotFound.into())),
    }
}

/// Writes the page with pictures, if one was asked for.
fn write_page(
    page: Option<&Path>,
    found: impl FnOnce() -> Document,
    out: &Output,
) -> Result<(), Failure> {
    let Some(page) = page else { return Ok(()) };
    uzone_report::replace(page, uzone_report::html(&[found()]).as_bytes())?;
    out.log(format_args!("wrote {}", page.display()));
    Ok(())
}

/// Makes the fastest stores of this machine those of the process, unless the environment names some.
pub(crate) fn choose_stores(out: &Output) -> Result<(), Failure> {
    if std::env::var_os(STORE_POLICY).is_some_and(|text| !text.is_empty()) {
        return match StorePolicy::problem() {
            None => Ok(()),
            Some(problem) => Err(problem.clone().into()),
        };
    }
    let policy = StorePolicy::measure();
    if policy.basis() == Basis::Measured {
        out.log(format_args!("measured: {STORE_POLICY}={policy} is faster here than the default"));
    }
    // It is only refused where something asked for the policy before, which then stays.
    let _ = policy.make_current();
    Ok(())
}

/// Runs benchmarks with a progress bar for each of their parts.
pub(crate) fn with_progress<T>(
    out: &Output,
    run: impl FnOnce(Watch<'_>) -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    let steps = Steps::new(out);
    run(&|phase| steps.show(phase))
}

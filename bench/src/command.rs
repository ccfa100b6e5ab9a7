//! The arguments of `uzone-bench`, and its output.

mod check;
mod text;

use std::iter;
use std::path::{Path, PathBuf};

use clap::{FromArgMatches, Subcommand};
use uzone_cli::exit::{self, Exit, Failure};
use uzone_cli::output::Output;
use uzone_cli::progress::with_progress;
use uzone_harness::{Bench, BenchError, Watch};
use uzone_report::Document;
use uzone_stream::{Basis, STORE_POLICY, StorePolicy};

use self::text::Found;
use crate::parts;
use crate::settings::{
    self, BindSettings, CopySettings, FaultSettings, HostpoolSettings, Part, PinSettings,
    SnapshotSettings, ZeroSettings, all_cpus, temporary,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    benchmark: Option<Benchmark>,
    /// Check that all benchmarks work: small sizes and few rounds that take half a minute, and whose figures mean little
    #[arg(long, global = true, conflicts_with = "check")]
    quick: bool,
    /// Repeat the run of FILE, an earlier output with --json (- is standard input), and exit with 1 if a row of uzone is
    /// slower, against its limit and the naive way, by more than the noise of both runs. Tables with such rows are run
    /// twice
    #[arg(long, global = true, value_name = "FILE")]
    check: Option<PathBuf>,
    /// Write an HTML page with pictures as well
    #[arg(long, global = true, value_name = "HTML")]
    pub(crate) report: Option<PathBuf>,
}

pub(crate) const EXITS: [u8; 9] = [0, 1, 2, 65, 66, 69, 71, 74, 77];

#[derive(Debug, PartialEq, Subcommand)]
enum Benchmark {
    /// Describe every page of a region: rebinds and first binds
    ///
    /// The region is only reserved; its descriptors are written, 64 bytes a page. `naive`
    /// is a call for each page that sets field after field; the limit is a bare fill of as many
    /// bytes.
    #[command(after_help = exit::help("uzone-bench bind --size 100G --rebinds 30", &EXITS))]
    Bind(Asked<BindSettings>),
    /// Pin a region and let it go: 2 MiB folios, lists, base pages, threads
    ///
    /// The region is reserved and described; its bytes are never touched. `naive` is an atomic step
    /// for each base page, on 64-byte descriptors as Linux has them; they take 1/64 of the size.
    #[command(after_help = exit::help("uzone-bench pin --size 128G", &EXITS))]
    Pin(Asked<PinSettings>),
    /// Clear memory: three lengths out of cache, pools, and first touch, beside the kernel and the C
    /// library
    ///
    /// Extents of 4 KiB, 2 MiB and the largest; the wait for a folio of a pool;
    /// the kernel's own clearing; and first touch. With root, 256 MiB of huge pages are put into
    /// the host's pool for the run.
    #[command(after_help = exit::help("uzone-bench zero --size 32M --populate-size 0", &EXITS))]
    Zero(Asked<ZeroSettings>),
    /// Copy memory: three lengths out of cache, beside the C library
    #[command(after_help = exit::help("uzone-bench copy --size 32M", &EXITS))]
    Copy(Asked<CopySettings>),
    /// Map files lazily, beside a one-page handler and the kernel's own mapping
    ///
    /// A file in the page cache and a memory file, touched in order, at random, and one page per 2
    /// MiB; huge pages of the pool if there are free ones; a file that the page cache has
    /// forgotten; tracked writes; and 1 to 100 % of the pages of a larger file at random.
    #[command(after_help = exit::help("uzone-bench fault --size 256M --threads 1,2", &EXITS))]
    Fault(Asked<FaultSettings>),
    /// Pack an image of memory, read and verify it, and map it lazily: beside zstd, BLAKE3 and the
    /// raw bytes
    ///
    /// The image is made of the programs and libraries in /usr/bin and /usr/lib, in runs, between
    /// which are runs of zero pages; about 30 % of the pages are zero. All files are in the page
    /// cache. The command zstd is measured if it is installed.
    #[command(after_help = exit::help("uzone-bench snapshot --size 256M --dir /dev/shm", &EXITS))]
    Snapshot(Asked<SnapshotSettings>),
    /// Restore a VM from an image lazily, beside a handler of one page a fault and the kernel's mapping
    ///
    /// The image is the one of `uzone-bench snapshot`, raw and packed, in the page cache. A thread touches memory that is
    /// registered as Firecracker registers it: all pages in order, and a tenth of them, in runs, in random order.
    #[command(after_help = exit::help("uzone-bench restore --size 256M --dir /dev/shm", &EXITS))]
    Restore(Asked<SnapshotSettings>),
    /// Open pools of host memory for accelerators: time until they are ready, and waits meanwhile
    ///
    /// A driver of our own takes the place of a real one: it registers 30 GB/s with its lock held.
    /// `scripts/gpu.sh` measures a real one.
    #[command(after_help = exit::help("uzone-bench hostpool --size 1G", &EXITS))]
    Hostpool(Asked<HostpoolSettings>),
    /// The published experiments: describing memory, pinning it, clearing it, and mapping a file
    ///
    /// Each is a table with the published figures beside the naive way, ours and the limit.
    /// Without --full they are scaled, which each table states, and take less than five minutes on
    /// 2 CPUs. With it they have the published sizes as far as memory allows, all windows, and 1 to
    /// 120 threads.
    #[command(after_help = exit::help("uzone-bench seeds --report seeds.html", &EXITS))]
    Seeds(Asked<SeedsArgs>),
}

/// The arguments of a benchmark.
#[derive(Debug, PartialEq, clap::Args)]
struct Asked<S: clap::Args> {
    #[command(flatten)]
    of: S,
    /// Run only tables whose ids begin so, such as fault-seq, and tables that are measured together with them [default:
    /// all]
    #[arg(long, value_delimiter = ',', value_name = "ID")]
    table: Vec<String>,
}

#[derive(Debug, PartialEq, clap::Args)]
struct SeedsArgs {
    /// Take the published sizes
    #[arg(long)]
    full: bool,
    /// Folder for the mapped file; by default the folder of temporary files
    #[arg(long, default_value_os_t = temporary(), hide_default_value = true, value_name = "DIR")]
    dir: PathBuf,
}

impl Benchmark {
    fn name(&self) -> &'static str {
        self.parts().map_or(parts::SEEDS, |part| part.name())
    }

    /// Runs it.
    fn run(&self, watch: Watch<'_>) -> Result<Bench, BenchError> {
        match self.parts() {
            Ok(part) => part.run(watch),
            Err(parts) if parts.is_empty() => Err(BenchError::no_table(self.tables())),
            Err(parts) => parts::run_seeds(&parts, watch),
        }
    }

    /// Returns the settings of the benchmark, or of the several that it is.
    fn parts(&self) -> Result<Part, Vec<Part>> {
        let benchmark = match self {
            Self::Bind(args) => settings::Benchmark::Bind(args.of.clone()),
            Self::Pin(args) => settings::Benchmark::Pin(args.of.clone()),
            Self::Zero(args) => settings::Benchmark::Zero(args.of.clone()),
            Self::Copy(args) => settings::Benchmark::Copy(args.of.clone()),
            Self::Fault(args) => settings::Benchmark::Fault(args.of.clone()),
            Self::Snapshot(args) => settings::Benchmark::Snapshot(args.of.clone()),
            Self::Restore(args) => settings::Benchmark::Restore(args.of.clone()),
            Self::Hostpool(args) => settings::Benchmark::Hostpool(args.of.clone()),
            Self::Seeds(args) => {
                let parts =
                    parts::seeds(parts::available(), all_cpus(), args.of.full, &args.of.dir);
                return Err(parts::with_tables(parts, &args.table));
            }
        };
        Ok(Part::from(benchmark).with_tables(self.tables().to_vec()))
    }

    /// Returns the tables that were asked for.
    fn tables(&self) -> &[String] {
        match self {
            Self::Bind(Asked { table, .. })
            | Self::Pin(Asked { table, .. })
            | Self::Zero(Asked { table, .. })
            | Self::Copy(Asked { table, .. })
            | Self::Fault(Asked { table, .. })
            | Self::Snapshot(Asked { table, .. })
            | Self::Restore(Asked { table, .. })
            | Self::Hostpool(Asked { table, .. })
            | Self::Seeds(Asked { table, .. }) => table,
        }
    }

    /// Returns the arguments that a quick run takes.
    fn words_of_quick(&self) -> Vec<String> {
        let tables = self.tables().iter().map(|table| format!("--table={table}"));
        let dax = match self {
            Self::Bind(args) => args.of.dax.as_deref(),
            _ => None,
        };
        tables.chain(dax.map(|path| format!("--dax={}", path.display()))).collect()
    }

    /// Returns whether only these arguments were given.
    fn has_only(&self, words: &[String]) -> bool {
        let command =
            Self::augment_subcommands(clap::Command::new("uzone-bench").no_binary_name(true));
        let words = iter::once(self.name()).chain(words.iter().map(String::as_str));
        let matches = command.try_get_matches_from(words);
        matches
            .and_then(|matches| Self::from_arg_matches(&matches))
            .is_ok_and(|plain| plain == *self)
    }
}

/// Runs one benchmark or all, or compares with an earlier run, and prints the result.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    args.fit_together()?;
    if let Some(page) = &args.report {
        uzone_report::check_replace(page)?;
    }
    if let Some(file) = &args.check {
        return check::run(file, args.benchmark.as_ref(), args.report.as_deref(), out);
    }
    choose_stores(out)?;
    let mut found = with_progress(out, |watch| match &args.benchmark {
        Some(benchmark) if args.quick => match args.quick_part(benchmark) {
            Some(part) => part.run(watch),
            None => {
                let parts = parts::quick_seeds(args.all_parts());
                let parts = parts::with_tables(parts, benchmark.tables());
                parts::run_seeds(&parts, watch)
            }
        },
        Some(benchmark) => benchmark.run(watch),
        None => parts::run(&args.all_parts(), watch),
    })?;
    found.quick = args.quick;
    write_page(args.report.as_deref(), &found, out)?;
    out.print(&Found(found))
}

impl Args {
    fn all_parts(&self) -> Vec<Part> {
        parts::parts(parts::available(), all_cpus(), self.quick, &temporary())
    }

    /// Returns one benchmark as a quick run of all has it, if that does.
    fn quick_part(&self, benchmark: &Benchmark) -> Option<Part> {
        let mut part = self.all_parts().into_iter().find(|part| part.name() == benchmark.name())?;
        if let (settings::Benchmark::Bind(settings), Benchmark::Bind(args)) =
            (&mut part.benchmark, benchmark)
        {
            settings.dax.clone_from(&args.of.dax);
        }
        Some(part.with_tables(benchmark.tables().to_vec()))
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
        match &self.report {
            Some(page) if is_same(page, file) => Err(Failure::usage(format!(
                "{} is an input: name another --report",
                page.display()
            ))),
            _ => Ok(()),
        }
    }
}

/// Returns whether two paths name one file.
fn is_same(one: &Path, other: &Path) -> bool {
    let canonical = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    canonical(one) == canonical(other)
}

/// Writes the page with pictures, if one was asked for.
fn write_page(page: Option<&Path>, found: &Bench, out: &Output) -> Result<(), Failure> {
    let Some(page) = page else { return Ok(()) };
    let documents = [Document::Bench(found.clone())];
    uzone_report::replace(page, uzone_report::html(&documents).as_bytes())?;
    out.log(format_args!("wrote {}", page.display()));
    Ok(())
}

/// Sets the store policy of the process to the fastest one of this host, unless the environment names one.
fn choose_stores(out: &Output) -> Result<(), Failure> {
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
    // Refused only if some code asked for the policy before, which then stays.
    let _ = policy.make_current();
    Ok(())
}

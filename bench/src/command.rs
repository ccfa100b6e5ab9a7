//! The arguments of `uzone-bench`, and its output.

mod check;
mod text;

use std::path::PathBuf;

use clap::{FromArgMatches, Subcommand};
use uzone_cli::exit::{self, Exit, Failure};
use uzone_cli::output::Output;
use uzone_cli::progress::with_progress;
use uzone_harness::BenchError;
use uzone_harness::stores::faster_stores;
use uzone_stream::{STORE_POLICY, StorePolicy};

use self::text::Found;
use crate::parts;
use crate::settings::{Benchmark, Part, all_cpus, temporary};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    benchmark: Option<Asked>,
    /// Check that all benchmarks work: small sizes and few rounds that take half a minute, and whose figures mean little
    #[arg(long, global = true, conflicts_with = "check")]
    quick: bool,
    /// Repeat the run of FILE, an earlier output with --json (- is standard input), and exit with 1 if a row of uzone is
    /// slower, against its limit and the naive way, by more than the noise of both runs. Tables with such rows are run
    /// twice
    #[arg(long, global = true, value_name = "FILE")]
    check: Option<PathBuf>,
    /// Run only tables whose ids begin so, such as fault-seq, and tables that are measured together with them [default:
    /// all]
    #[arg(long, global = true, value_delimiter = ',', value_name = "ID", conflicts_with = "check")]
    table: Vec<String>,
}

pub(crate) const EXITS: [u8; 9] = [0, 1, 2, 65, 66, 69, 71, 74, 77];

/// A benchmark, or the published experiments.
#[derive(Clone, Debug, PartialEq, Subcommand)]
enum Asked {
    #[command(flatten)]
    One(Benchmark),
    /// The published experiments: describing memory, pinning it, clearing it, and mapping a file
    ///
    /// Each is a table with the published figures beside the naive way, ours and the limit.
    /// Without --full they are scaled, which each table states, and take less than five minutes on
    /// 2 CPUs. With it they have the published sizes as far as memory allows, all windows, and 1 to
    /// 120 threads.
    #[command(after_help = exit::help("uzone-bench seeds --json > seeds.json", &EXITS))]
    Seeds(SeedsArgs),
}

#[derive(Clone, Debug, PartialEq, clap::Args)]
struct SeedsArgs {
    /// Take the published sizes
    #[arg(long)]
    full: bool,
    /// Folder for the mapped file; by default the folder of temporary files
    #[arg(long, default_value_os_t = temporary(), hide_default_value = true, value_name = "DIR")]
    dir: PathBuf,
}

impl Asked {
    fn name(&self) -> &'static str {
        match self {
            Self::One(benchmark) => benchmark.name(),
            Self::Seeds(_) => parts::SEEDS,
        }
    }

    /// Returns whether all arguments have their defaults.
    fn is_default(&self) -> bool {
        let command =
            Self::augment_subcommands(clap::Command::new("uzone-bench").no_binary_name(true));
        let matches = command.try_get_matches_from([self.name()]);
        matches
            .and_then(|matches| Self::from_arg_matches(&matches))
            .is_ok_and(|asked| asked == *self)
    }
}

/// Runs one benchmark or all, or compares with an earlier run, and prints the result.
pub(crate) fn run(args: &Args, out: &Output) -> Result<Exit, Failure> {
    args.fit_together()?;
    if let Some(file) = &args.check {
        return check::run(file, args.benchmark.as_ref(), out);
    }
    choose_stores(out)?;
    let parts = args.parts();
    if parts.is_empty() {
        return Err(BenchError::no_table(&args.table).into());
    }
    let name = args.benchmark.as_ref().map_or(parts::ALL, Asked::name);
    let mut found = with_progress(out, |watch| parts::run(name, &parts, watch))?;
    found.quick = args.quick;
    out.print(&Found(found))
}

impl Args {
    /// Returns the benchmarks of the run with the tables that were asked for.
    fn parts(&self) -> Vec<Part> {
        let all = || parts::parts(parts::available(), all_cpus(), self.quick, &temporary());
        let parts = match &self.benchmark {
            None => all(),
            Some(Asked::One(benchmark)) if self.quick => {
                let mut parts = all();
                parts.retain(|part| part.name() == benchmark.name());
                parts
            }
            Some(Asked::One(benchmark)) => vec![Part::from(benchmark.clone())],
            Some(Asked::Seeds(_)) if self.quick => parts::quick_seeds(all()),
            Some(Asked::Seeds(args)) => {
                parts::seeds(parts::available(), all_cpus(), args.full, &args.dir)
            }
        };
        parts::with_tables(parts, &self.table)
    }

    /// Refuses arguments that contradict each other.
    fn fit_together(&self) -> Result<(), Failure> {
        if let (true, Some(benchmark)) = (self.quick, &self.benchmark)
            && !benchmark.is_default()
        {
            return Err(Failure::usage(format!(
                "--quick has sizes and rounds of its own: leave the arguments of {} out, all but --table, or leave \
                 --quick out",
                benchmark.name()
            )));
        }
        Ok(())
    }
}

/// Sets the store policy of the process to the fastest one of this host, unless the environment names one.
fn choose_stores(out: &Output) -> Result<(), Failure> {
    if std::env::var_os(STORE_POLICY).is_some_and(|text| !text.is_empty()) {
        return match StorePolicy::problem() {
            None => Ok(()),
            Some(problem) => Err(problem.clone().into()),
        };
    }
    if let Some(policy) = faster_stores() {
        out.log(format_args!("measured: {STORE_POLICY}={policy} is faster here than the default"));
        // Refused only if some code asked for the policy before, which then stays.
        let _ = policy.make_current();
    }
    Ok(())
}

//! `uzone bench --check`: this machine against an earlier run.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use uzone_bench::all;
use uzone_bench::check::{Compared, Comparison, FACTOR, FLOOR, Measure, SCHEMA, Verdict, compare};
use uzone_bench::report::{Bench, SCHEMA as BENCH_SCHEMA, Skipped};
use uzone_bench::settings::Part;
use uzone_bench::{BenchError, Watch};
use uzone_os::numa;
use uzone_report::{Document, MOST_BYTES, Machine, number};

use super::text::{ALL, foot, none, ns, percent};
use super::{Benchmark, choose_stores, with_progress, write_page};
use crate::exit::{Exit, Failure};
use crate::output::{Output, Report, Style, Tone, Verbosity, table};

/// An earlier run that cannot be compared with.
#[derive(Debug, thiserror::Error)]
enum CheckError {
    #[error("cannot read {}: {cause}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{} is longer than any run: name what `uzone bench --json` printed", path.display())]
    TooLong { path: PathBuf },
    #[error(
        "{} is not one JSON object, or was cut short: name what `uzone bench --json` printed",
        path.display()
    )]
    Json {
        path: PathBuf,
        #[source]
        cause: serde_json::Error,
    },
    #[error(
        "{} is {found}, and a check wants {BENCH_SCHEMA}: measure again with `uzone bench --json`",
        path.display()
    )]
    Schema { path: PathBuf, found: String },
    #[error(
        "{} does not hold all that a check needs of a run: measure again with this version of uzone",
        path.display()
    )]
    Shape {
        path: PathBuf,
        #[source]
        cause: serde_json::Error,
    },
    #[error("{} is a run of `{found}`: check it with `{found} --check`", path.display())]
    Other { path: PathBuf, found: String },
    #[error(
        "{} is a run with --quick, whose figures mean nothing: measure again without --quick",
        path.display()
    )]
    Quick { path: PathBuf },
    #[error(
        "{name} is {then} in {} and {now} here: a check compares equal settings, so leave it out or \
         measure again",
        path.display()
    )]
    Setting { path: PathBuf, name: String, then: String, now: String },
    #[error("no row of {} could be measured here and compared", path.display())]
    NothingInCommon { path: PathBuf },
}

impl CheckError {
    /// Returns the failure, with its exit code.
    fn failure(self) -> Failure {
        let exit = match &self {
            Self::Read { .. } => Exit::of(&self),
            Self::Other { .. } | Self::Quick { .. } | Self::Setting { .. } => Exit::Usage,
            _ => Exit::Data,
        };
        Failure::with(exit, self)
    }
}

#[derive(Deserialize)]
struct Tagged {
    schema: Option<String>,
}

/// The settings of an earlier run, which a check repeats.
#[derive(Deserialize)]
struct Repeatable {
    parameters: Vec<Part>,
}

/// Reads an earlier run, and what it was run with.
fn read(path: &Path) -> Result<(Bench, Vec<Part>), CheckError> {
    let failed = |cause| CheckError::Read { path: path.to_owned(), cause };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MOST_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    let path = || path.to_owned();
    if text.len() as u64 > MOST_BYTES {
        return Err(CheckError::TooLong { path: path() });
    }
    let json = |cause| CheckError::Json { path: path(), cause };
    let tagged: Tagged = serde_json::from_str(&text).map_err(json)?;
    match tagged.schema {
        Some(schema) if schema == BENCH_SCHEMA => {}
        found => {
            let found =
                found.map_or_else(|| "without a schema".to_owned(), |found| format!("{found:?}"));
            return Err(CheckError::Schema { path: path(), found });
        }
    }
    let shape = |cause| CheckError::Shape { path: path(), cause };
    let Repeatable { parameters } = serde_json::from_str(&text).map_err(shape)?;
    Ok((serde_json::from_str(&text).map_err(shape)?, parameters))
}

/// `uzone.bench-check/1`: what came of a comparison.
#[derive(Debug, Serialize)]
struct Checked {
    schema: &'static str,
    file: String,
    benchmark: String,
    /// Whether no row is slower beyond the noise.
    is_ok: bool,
    /// How many times the noise of both runs a row may be slower, and by what part at least.
    factor: f64,
    floor: f64,
    then: Then,
    now: Machine,
    /// What makes the two hard to compare.
    warnings: Vec<String>,
    #[serde(flatten)]
    comparison: Comparison,
    skipped: Vec<Skipped>,
}

/// What a comparison states of the earlier machine.
#[derive(Debug, Serialize)]
struct Then {
    cpu: String,
    cpus: usize,
    kernel: String,
    version: String,
    commit: Option<String>,
    unix_seconds: u64,
}

impl From<Machine> for Then {
    fn from(machine: Machine) -> Self {
        let Machine { cpu, cpus, kernel, version, commit, unix_seconds, .. } = machine;
        Self { cpu, cpus, kernel, version, commit, unix_seconds }
    }
}

/// Runs what an earlier run ran, and compares.
///
/// # Errors
/// If the file is no earlier run, it was another benchmark than `asked`, or it cannot be run here.
pub(super) fn run(
    file: &Path,
    asked: Option<&Benchmark>,
    page: Option<&Path>,
    out: &Output,
) -> Result<Exit, Failure> {
    let (earlier, parameters) = read(file).map_err(CheckError::failure)?;
    let is_all = earlier.benchmark == ALL;
    if earlier.quick {
        return Err(CheckError::Quick { path: file.to_owned() }.failure());
    }
    if asked.is_some_and(|asked| asked.name() != earlier.benchmark) {
        let found = if is_all { String::new() } else { format!(" {}", earlier.benchmark) };
        let found = format!("uzone bench{found}");
        return Err(CheckError::Other { path: file.to_owned(), found }.failure());
    }
    let given =
        asked.filter(|asked| !asked.is_untold_but(&[])).and_then(|asked| asked.parts().ok());
    if let (Some(given), Some(then)) = (given, parameters.first())
        && let Some((name, then, now)) = different_setting(then, &given)?
    {
        let path = file.to_owned();
        return Err(CheckError::Setting { path, name, then, now }.failure());
    }
    let here = numa::current_cpu_count().unwrap_or(1);
    if earlier.machine.cpus != here {
        let (path, name) = (file.to_owned(), "cpus".to_owned());
        let (then, now) = (earlier.machine.cpus.to_string(), here.to_string());
        return Err(CheckError::Setting { path, name, then, now }.failure());
    }
    choose_stores(out)?;
    let bench = with_progress(out, |watch| measure(&parameters, is_all, watch))?;
    write_page(page, || Document::Bench(bench.clone()), out)?;
    let mut comparison = compare(&earlier.results, &bench.results);
    if comparison.rows.is_empty() {
        return Err(CheckError::NothingInCommon { path: file.to_owned() }.failure());
    }
    let worse = comparison.worse_tables();
    if !worse.is_empty() {
        let again = all::with_tables(parameters, &worse);
        out.log(format_args!("once more: {}", worse.join(", ")));
        let bench = with_progress(out, |watch| all::run(&again, None, watch))?;
        comparison.again(&earlier.results, &bench.results);
    }
    let is_ok = comparison.worse().next().is_none();
    let checked = Checked {
        schema: SCHEMA,
        file: file.display().to_string(),
        benchmark: earlier.benchmark,
        is_ok,
        factor: FACTOR,
        floor: FLOOR,
        warnings: warnings(&earlier.machine, &bench.machine),
        then: earlier.machine.into(),
        now: bench.machine,
        comparison,
        skipped: bench.skipped,
    };
    for warning in &checked.warnings {
        out.warn(warning);
    }
    out.print(&checked)?;
    Ok(if is_ok { Exit::Ok } else { Exit::No })
}

/// Returns the first setting in which two benchmarks differ, and both values.
fn different_setting(
    then: &Part,
    now: &Part,
) -> Result<Option<(String, String, String)>, serde_json::Error> {
    let (then, now) = (serde_json::to_value(then)?, serde_json::to_value(now)?);
    let names = then.as_object().map(|settings| settings.keys().cloned()).into_iter().flatten();
    let mut different = names.filter(|name| then[name] != now[name]);
    Ok(different.next().map(|name| {
        let (then, now) = (then[&name].to_string(), now[&name].to_string());
        (name, then, now)
    }))
}

fn measure(parts: &[Part], is_all: bool, watch: Watch<'_>) -> Result<Bench, BenchError> {
    match parts {
        [part] if !is_all => part.run(watch),
        parts => all::run(parts, None, watch),
    }
}

/// Returns what differs between the machines, where it matters.
fn warnings(then: &Machine, now: &Machine) -> Vec<String> {
    let mut warnings = Vec::new();
    if then.cpu != now.cpu {
        warnings.push(format!(
            "the earlier run was on another CPU ({}, this is {}): its caches and stores differ, and so do \
             ratios",
            then.cpu, now.cpu
        ));
    }
    warnings
}

impl Report for Checked {
    fn text(&self, style: Style) -> String {
        let comparison = &self.comparison;
        let is_shown = |row: &&Compared| match row.verdict {
            Verdict::Worse | Verdict::WorseTwice => true,
            Verdict::Better | Verdict::WorseOnce => style.verbosity > Verbosity::Quiet,
            Verdict::Same | Verdict::Yardstick => style.verbosity == Verbosity::Verbose,
        };
        let count =
            |verdict: Verdict| comparison.rows.iter().filter(|row| row.verdict == verdict).count();
        let mut text = String::new();
        let mut cells = table(&["row", "then", "now", "again", "change", "noise", "verdict", "of"]);
        let shown: Vec<&Compared> = comparison.rows.iter().filter(is_shown).collect();
        for row in &shown {
            cells.add_row(vec![
                row.id.clone(),
                value(row.measure, row.then),
                value(row.measure, row.now),
                row.again.map_or_else(none, |again| value(row.measure, again)),
                format!("{:+.0} %", row.change * 100.0),
                percent(row.allowed),
                words(row.verdict).to_owned(),
                match row.measure {
                    Measure::ShareOfLimit => "of its limit",
                    Measure::RatioNaive => "as fast as naive",
                    Measure::MedianNs => "median",
                }
                .to_owned(),
            ]);
        }
        // Writing to a String does not fail.
        if !shown.is_empty() {
            let _ = writeln!(text, "{}\n", cells.trim_fmt());
        }
        if style.verbosity > Verbosity::Quiet {
            for (what, ids) in [("new", &comparison.new), ("gone", &comparison.gone)] {
                if !ids.is_empty() {
                    let _ = writeln!(text, "{what}: {}", ids.join(", "));
                }
            }
            for row in &comparison.not_comparable {
                let _ = writeln!(text, "not comparable: {}: {}", row.id, row.reason);
            }
            for skipped in &self.skipped {
                let _ = writeln!(text, "not measured: {}: {}", skipped.id, skipped.reason);
            }
            let _ = writeln!(
                text,
                "{} rows as before, {} faster, {} slower once and not again; {} yardsticks, which are not \
                 judged",
                count(Verdict::Same),
                count(Verdict::Better),
                count(Verdict::WorseOnce),
                count(Verdict::Yardstick),
            );
            let then = UNIX_EPOCH + Duration::from_secs(self.then.unix_seconds);
            let _ = writeln!(
                text,
                "then: {}, {}, uzone {}{}",
                humantime::format_rfc3339_seconds(then),
                self.then.cpu,
                self.then.version,
                self.then.commit.as_ref().map(|commit| format!(" ({commit})")).unwrap_or_default(),
            );
            let _ = write!(text, "now: {}", foot(&self.now, Vec::new()));
        }
        let verdict = match comparison.worse().count() {
            0 => style.paint(Tone::Good, format_args!("no regression since {}", self.file)),
            rows => {
                let rows = if rows == 1 { "1 row".to_owned() } else { format!("{rows} rows") };
                let slower = format_args!("{rows} slower than in {}, measured twice", self.file);
                style.paint(Tone::Bad, slower)
            }
        };
        let _ = writeln!(text, "{verdict}");
        text
    }
}

fn value(measure: Measure, value: f64) -> String {
    match measure {
        Measure::ShareOfLimit => percent(value),
        Measure::RatioNaive => format!("{} x", number(value)),
        Measure::MedianNs => Duration::try_from_secs_f64(value / 1e9)
            .map_or_else(|_| none(), |time| ns(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))),
    }
}

fn words(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Same => "as before",
        Verdict::Better => "faster",
        Verdict::Worse => "slower",
        Verdict::WorseOnce => "slower once",
        Verdict::WorseTwice => "slower twice",
        Verdict::Yardstick => "yardstick",
    }
}

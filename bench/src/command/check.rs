//! `uzone-bench --check`: the comparison with an earlier run.

use std::fmt::{Display, Write as _};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uzone_cli::exit::{Exit, Failure};
use uzone_cli::output::{Output, Report, Style, Tone, Verbosity, columns, headings, ns};
use uzone_cli::progress::with_progress;
use uzone_harness::check::{
    Compared, Comparison, FACTOR, FLOOR, Measure, SCHEMA, Verdict, compare,
};
use uzone_harness::{Bench, Skipped};
use uzone_os::numa;
use uzone_report::{Document, Machine, number, plain};

use super::text::{none, percent};
use super::{Asked, choose_stores};
use crate::parts::{self, ALL};
use crate::settings::Part;

/// Reads an earlier run and its settings.
fn read(path: &Path) -> Result<(Bench, Vec<Part>), Failure> {
    let refused = |reason: &str| format!("{} {reason}", path.display());
    let Ok([Document::Bench(bench)]) = <[Document; 1]>::try_from(uzone_report::read(path)?) else {
        let text = "is not a uzone.bench/1 document; create one with `uzone-bench --json`";
        return Err(Failure::new(Exit::Data, refused(text)));
    };
    let parts = bench.parameters.iter().map(Part::deserialize).collect::<Result<Vec<_>, _>>();
    let text = "lacks the settings that a check repeats; create a new file with this version's `uzone-bench --json`";
    match parts {
        Ok(parts) if parts.is_empty() => Err(Failure::new(Exit::Data, refused(text))),
        Ok(parts) => Ok((bench, parts)),
        Err(cause) => Err(Failure::of(refused(text), cause).with(Exit::Data)),
    }
}

/// `uzone.bench-check/1`: the result of a comparison.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Checked {
    file: String,
    benchmark: String,
    /// Whether no row is slower beyond the noise.
    is_ok: bool,
    /// The factor by which a row may be slower than the noise of both runs, and the least part.
    factor: f64,
    floor: f64,
    /// The machine of the earlier run, as its file names it.
    then: Machine,
    now: Machine,
    /// Differences that make the two hard to compare.
    warnings: Vec<String>,
    #[serde(flatten)]
    comparison: Comparison,
    skipped: Vec<Skipped>,
}

/// Repeats an earlier run, and compares. Refuses a file of another benchmark than `asked`.
pub(super) fn run(file: &Path, asked: Option<&Asked>, out: &Output) -> Result<Exit, Failure> {
    let (earlier, parameters) = read(file)?;
    can_be_repeated(file, &earlier, &parameters, asked)?;
    choose_stores(out)?;
    let bench = with_progress(out, |watch| parts::run(&earlier.benchmark, &parameters, watch))?;
    let mut comparison = compare(&earlier.results, &bench.results);
    if comparison.rows.is_empty() {
        let text = format!("none of the rows in {} ran on this host", file.display());
        return Err(Failure::new(Exit::Data, text));
    }
    let worse = comparison.worse_tables();
    if !worse.is_empty() {
        let again = parts::with_tables(parameters, &worse);
        out.log(format_args!("once more: {}", worse.join(", ")));
        let bench = with_progress(out, |watch| parts::run(ALL, &again, watch))?;
        comparison.again(&earlier.results, &bench.results);
    }
    let is_ok = comparison.worse().next().is_none();
    let checked = Checked {
        file: file.display().to_string(),
        benchmark: earlier.benchmark,
        is_ok,
        factor: FACTOR,
        floor: FLOOR,
        warnings: of_another_cpu(&earlier.machine, &bench.machine).into_iter().collect(),
        then: earlier.machine,
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

/// Refuses an earlier run that was another benchmark than `asked`, or had other settings or CPUs.
fn can_be_repeated(
    file: &Path,
    earlier: &Bench,
    parameters: &[Part],
    asked: Option<&Asked>,
) -> Result<(), Failure> {
    let path = file.display();
    if earlier.quick {
        return Err(Failure::usage(format!(
            "{path} is a run with --quick, whose figures mean little: measure again without --quick"
        )));
    }
    if asked.is_some_and(|asked| asked.name() != earlier.benchmark) {
        let name = if earlier.benchmark == ALL { "" } else { &earlier.benchmark };
        let found = format!("uzone-bench {name}");
        let found = found.trim_end();
        return Err(Failure::usage(format!(
            "{path} is a run of `{found}`: check it with `{found} --check`"
        )));
    }
    let equal = |name: &str, then: &dyn Display, now: &dyn Display| {
        let (then, now) = (then.to_string(), now.to_string());
        let text = || {
            format!(
                "{name} is {then} in {path} and {now} here: a check compares equal settings, so leave it out or \
                 measure again"
            )
        };
        if then == now { Ok(()) } else { Err(Failure::usage(text())) }
    };
    if let (Some(asked @ Asked::One(given)), Some(then)) = (asked, parameters.first())
        && !asked.is_default()
    {
        let (then, now) = (serde_json::to_value(&then.benchmark)?, serde_json::to_value(given)?);
        for name in then.as_object().into_iter().flat_map(|settings| settings.keys()) {
            equal(name, &then[name], &now[name])?;
        }
    }
    equal("cpus", &earlier.machine.cpus, &numa::current_cpu_count().unwrap_or(1))
}

/// Returns a warning if the runs were on different CPUs.
fn of_another_cpu(then: &Machine, now: &Machine) -> Option<String> {
    (then.cpu != now.cpu).then(|| {
        let (then, now) = (plain(&then.cpu), &now.cpu);
        format!(
            "the earlier run was on another CPU ({then}, this is {now}): its caches and stores differ, and so do \
             ratios"
        )
    })
}

impl Report for Checked {
    const SCHEMA: &'static str = SCHEMA;

    fn text(&self, style: Style) -> String {
        let comparison = &self.comparison;
        let mut text = self.rows(style.verbosity);
        if style.verbosity > Verbosity::Quiet {
            self.write_rest(&mut text);
        }
        let verdict = match comparison.worse().count() {
            0 => style.paint(Tone::Good, format_args!("no regression since {}", self.file)),
            rows => {
                let rows = if rows == 1 { "1 row".to_owned() } else { format!("{rows} rows") };
                let slower = format_args!("{rows} slower than in {}, measured twice", self.file);
                style.paint(Tone::Bad, slower)
            }
        };
        text + &verdict + "\n"
    }
}

impl Checked {
    /// Returns the rows that are shown, as a table.
    fn rows(&self, verbosity: Verbosity) -> String {
        let is_shown = |row: &&Compared| match row.verdict {
            Verdict::Worse | Verdict::WorseTwice => true,
            Verdict::Better | Verdict::WorseOnce => verbosity > Verbosity::Quiet,
            Verdict::Same | Verdict::Yardstick => verbosity == Verbosity::Verbose,
        };
        let names = ["row", "then", "now", "again", "change", "noise", "verdict", "of"];
        let mut cells = vec![headings(&names)];
        for row in self.comparison.rows.iter().filter(is_shown) {
            let of = match row.measure {
                Measure::ShareOfLimit => "of its limit",
                Measure::RatioNaive => "as fast as naive",
                Measure::MedianNs => "median",
            };
            cells.push(vec![
                row.id.clone(),
                value(row.measure, row.then),
                value(row.measure, row.now),
                row.again.map_or_else(none, |again| value(row.measure, again)),
                format!("{:+.0} %", row.change * 100.0),
                percent(row.allowed),
                words(row.verdict).to_owned(),
                of.to_owned(),
            ]);
        }
        if cells.len() == 1 { String::new() } else { columns(&cells) + "\n" }
    }

    /// Writes the rows that only one run has, the number of rows for each verdict, and both hosts.
    fn write_rest(&self, text: &mut String) {
        let comparison = &self.comparison;
        // Writing to a String does not fail.
        for (title, ids) in [("new", &comparison.new), ("gone", &comparison.gone)] {
            if !ids.is_empty() {
                let _ = writeln!(text, "{title}: {}", plain(&ids.join(", ")));
            }
        }
        for (title, rows) in
            [("not comparable", &comparison.not_comparable), ("not measured", &self.skipped)]
        {
            for Skipped { id, reason } in rows {
                let _ = writeln!(text, "{title}: {id}: {reason}");
            }
        }
        let count =
            |verdict: Verdict| comparison.rows.iter().filter(|row| row.verdict == verdict).count();
        let _ = writeln!(
            text,
            "{} rows as before, {} faster, {} slower once and not again; {} yardsticks, which are not judged\n\
             then: {}\nnow: {}",
            count(Verdict::Same),
            count(Verdict::Better),
            count(Verdict::WorseOnce),
            count(Verdict::Yardstick),
            self.then.sentence(),
            self.now.sentence(),
        );
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use uzone_cli::schema::{check, of};
    use uzone_report::results::BENCH_SCHEMA;

    use super::*;

    /// `UZONE_WRITE_SCHEMAS=1 cargo test -p uzone-bench schema` writes them.
    #[test]
    fn each_schema_is_made_of_the_type_that_is_printed() {
        let schemas = [
            of::<Bench>(BENCH_SCHEMA, "The times of a benchmark."),
            of::<Checked>(SCHEMA, "The result of `uzone-bench --check --json`."),
        ];
        check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("schema"), schemas);
    }
}

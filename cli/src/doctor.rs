//! `uzone doctor`: checks of this host, one line each, with fixes.
//!
//! `facts.rs` asks the host, `checks.rs` judges its answers, `figures.rs` has them raw for programs, and this file prints
//! them. Nothing on the host is changed.

mod checks;
mod facts;
mod figures;

use std::fmt::Write as _;

use serde::Serialize;
use uzone_pages::PageSize;

use crate::exit::{self, Exit, Failure};
use crate::output::{Output, Report, Style, Tone, Verbosity, columns, headings, number_list};
use checks::{Check, Status};
use facts::Facts;
use figures::Figures;

/// Check this host for large memory, and print fixes
///
/// Each line is one check: `ok`; `note`, a feature that only some programs need; `warn`, a feature that is slow or fails
/// when it is used; `FAIL`, a requirement of uzone that is missing. Only FAIL makes the exit code 1. A fix follows each
/// line that is not ok. Nothing is changed.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help(
    "uzone doctor --json | jq '.checks[] | select(.status != \"ok\")'",
    &[0, 1, 2, 74],
))]
pub(crate) struct Args {}

/// Asks the host and prints the checks.
pub(crate) fn run(_: &Args, out: &Output) -> Result<Exit, Failure> {
    out.log("asking the kernel, and measuring stores");
    let facts = Facts::of_host();
    let report = Doctor::of(&facts);
    out.print(&report)?;
    Ok(if report.is_ready { Exit::Ok } else { Exit::No })
}

/// The number of checks by status.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
struct Counts {
    ok: usize,
    note: usize,
    warn: usize,
    fail: usize,
}

#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Doctor<'a> {
    uzone_version: &'static str,
    is_ready: bool,
    counts: Counts,
    checks: Vec<Check>,
    #[serde(flatten)]
    figures: Figures,
    #[serde(skip)]
    facts: &'a Facts,
}

impl<'a> Doctor<'a> {
    fn of(facts: &'a Facts) -> Self {
        let checks = checks::checks(facts);
        let count = |status| checks.iter().filter(|check| check.status == status).count();
        let counts = Counts {
            ok: count(Status::Ok),
            note: count(Status::Note),
            warn: count(Status::Warn),
            fail: count(Status::Fail),
        };
        Self {
            uzone_version: env!("CARGO_PKG_VERSION"),
            is_ready: counts.fail == 0,
            counts,
            checks,
            figures: Figures::from(facts),
            facts,
        }
    }
}

/// The width of the status and the gap behind it.
const STATUS_WIDTH: usize = 6;

impl Report for Doctor<'_> {
    const SCHEMA: &'static str = "uzone.doctor/1";

    fn text(&self, style: Style) -> String {
        let mut text = String::new();
        let shown = |check: &&Check| match style.verbosity {
            Verbosity::Quiet => check.status >= Status::Warn,
            Verbosity::Normal | Verbosity::Verbose => true,
        };
        let checks: Vec<_> = self.checks.iter().filter(shown).collect();
        let width = checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
        for check in checks {
            write_check(&mut text, check, width, style);
        }
        let nodes = self.facts.nodes.as_ref().map_or(0, Vec::len);
        let wants_nodes = match style.verbosity {
            Verbosity::Quiet => false,
            Verbosity::Normal => nodes > 1,
            Verbosity::Verbose => nodes > 0,
        };
        if wants_nodes {
            let _ = write!(text, "\n{}\n", node_table(self.facts));
        }
        text.push_str(&self.summary(style));
        text
    }
}

impl Doctor<'_> {
    fn summary(&self, style: Style) -> String {
        let Counts { ok, note, warn, fail } = self.counts;
        let mut parts = vec![format!("{ok} ok")];
        for (count, one, many) in
            [(note, "note", "notes"), (warn, "warning", "warnings"), (fail, "failure", "failures")]
        {
            match count {
                0 => {}
                1 => parts.push(format!("1 {one}")),
                count => parts.push(format!("{count} {many}")),
            }
        }
        let verdict = match (self.is_ready, warn) {
            (true, 0) => style.paint(Tone::Good, "ready"),
            (true, _) => style.paint(Tone::Caution, "ready, with warnings"),
            (false, _) => style.paint(Tone::Bad, "not ready"),
        };
        format!("{verdict}: {}\n", parts.join(", "))
    }
}

/// Writes a check as one line, its fix below it, and with `--verbose` its details below that.
fn write_check(text: &mut String, check: &Check, width: usize, style: Style) {
    let (word, tone) = match check.status {
        Status::Ok => ("ok", Tone::Good),
        Status::Note => ("note", Tone::Hint),
        Status::Warn => ("warn", Tone::Caution),
        Status::Fail => ("FAIL", Tone::Bad),
    };
    // Padded outside of the colour, whose bytes would count.
    let gap = STATUS_WIDTH - word.len();
    let word = style.paint(tone, word);
    // Writing to a String does not fail.
    let _ = writeln!(text, "{word}{:gap$}{:width$}  {}", "", check.name, check.value);
    let mut lead = "fix:";
    for line in check.fix.iter().flat_map(|fix| fix.lines()) {
        let _ = writeln!(text, "{:STATUS_WIDTH$}{lead} {line}", "");
        lead = "    ";
    }
    if style.verbosity == Verbosity::Verbose {
        for line in &check.details {
            let line = style.paint(Tone::Faint, line);
            let _ = writeln!(text, "{:STATUS_WIDTH$}{:width$}  {line}", "", "");
        }
    }
}

/// Returns a table of the NUMA nodes, with their memory and huge pages.
fn node_table(facts: &Facts) -> String {
    let names = ["node", "CPUs", "memory", "free", "2 MiB pages", "1 GiB pages"];
    let mut rows = vec![headings(&names)];
    for node in facts.nodes.iter().flatten() {
        let pages = |size: PageSize| {
            let pools = facts.node_pools.as_deref().unwrap_or_default();
            let pool = pools.iter().find(|(of, pool)| *of == node.number && pool.size == size);
            pool.map_or_else(
                || "-".to_owned(),
                |(_, pool)| format!("{} free of {}", pool.free, pool.total),
            )
        };
        let cpus = if node.cpus.is_empty() { "-".to_owned() } else { number_list(&node.cpus) };
        rows.push(vec![
            node.number.to_string(),
            cpus,
            format!("{:.1}", node.total),
            format!("{:.1}", node.free),
            pages(PageSize::MIB_2),
            pages(PageSize::GIB_1),
        ]);
    }
    columns(&rows)
}

#[cfg(test)]
mod tests;

//! `uzone doctor`: checks of this host, one line each, with fixes.
//!
//! `facts.rs` asks the host, `checks.rs` judges its answers, and this file prints them. Nothing on the host is changed.

mod checks;
mod facts;

use std::fmt::Write as _;

use serde::Serialize;

use crate::exit::{self, Exit, Failure};
use crate::output::{Output, Report, Style, Tone, Verbosity};
use checks::{Check, Status};
use facts::Facts;

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
pub(crate) struct Doctor {
    uzone_version: &'static str,
    is_ready: bool,
    counts: Counts,
    checks: Vec<Check>,
}

impl Doctor {
    fn of(facts: &Facts) -> Self {
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
        }
    }
}

/// The width of the status and the gap behind it.
const STATUS_WIDTH: usize = 6;

impl Report for Doctor {
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
        text.push_str(&self.summary(style));
        text
    }
}

impl Doctor {
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

#[cfg(test)]
mod tests;

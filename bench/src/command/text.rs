//! The results of a benchmark as text: its tables, and the summary of a run of all.

use std::fmt::Write as _;

use serde::Serialize;
use uzone_cli::output::{Report, Style, Verbosity, columns, headings, ns};
use uzone_report::results::{Bench, Headline, NOISE, QUICK, Skipped, Table, noisy};
use uzone_report::{Machine, number};

use crate::parts::ALL;

/// The results of a run, to be printed.
#[derive(Serialize)]
pub(super) struct Found(pub(super) Bench);

impl Report for Found {
    const SCHEMA: &'static str = "";

    fn text(&self, style: Style) -> String {
        let Self(bench) = self;
        let mut text = String::new();
        let is_all = bench.benchmark == ALL;
        // Writing to a String does not fail.
        let _ = match is_all {
            true => writeln!(text, "uzone-bench: {}", bench.settings),
            false => writeln!(text, "uzone-bench {}: {}", bench.benchmark, bench.settings),
        };
        if !is_all || style.verbosity == Verbosity::Verbose {
            for table in &bench.tables {
                let Table { title, note, .. } = table;
                let cells = columns(&bench.cells(table));
                let _ = write!(text, "\n{title}\n({note})\n{cells}");
            }
        }
        write_skipped(&mut text, &bench.skipped);
        if is_all {
            write_summary(&mut text, &bench.summary);
        }
        if text.contains(noisy(true)) {
            let _ = writeln!(text, "\n{NOISE}");
        }
        if bench.quick {
            let _ = writeln!(text, "\n{QUICK}");
        }
        let sources = bench.results.iter().filter_map(|row| Some(&*row.published.as_ref()?.source));
        let sources = sources.collect();
        let _ = write!(text, "\n{}", foot(&bench.machine, sources));
        text
    }
}

/// Writes the rows that were left out, with the reasons.
fn write_skipped(text: &mut String, skipped: &[Skipped]) {
    if !skipped.is_empty() {
        text.push_str("\nnot measured\n");
        for skipped in skipped {
            let _ = writeln!(text, "  {}: {}", skipped.id, skipped.reason);
        }
    }
}

/// Writes a line for each claim.
fn write_summary(text: &mut String, summary: &[Headline]) {
    let names = ["", "published", "naive", "uzone", "limit", "of limit", "x naive"];
    let mut cells = vec![headings(&names)];
    for line in summary {
        let time = |time: Option<u64>| time.map_or_else(none, ns);
        cells.push(vec![
            line.name.clone(),
            match (line.published_naive_ns, line.published_ns) {
                (Some(before), Some(after)) => format!("{} to {}", ns(before), ns(after)),
                (_, published) => time(published),
            },
            time(line.naive_ns),
            ns(line.ours_ns),
            time(line.limit_ns),
            line.share_of_limit.map_or_else(none, percent),
            line.ratio_naive.map_or_else(none, |ratio| number(ratio) + noisy(line.within_noise)),
        ]);
    }
    let _ = write!(text, "\n{}", columns(&cells));
    text.push_str(
        "Published are times on other machines, before and after. Naive, uzone and the limit are\n\
         medians of interleaved rounds on this one; the limit does the same amount of work. All rows: -v.\n",
    );
}

/// Returns a part of a whole.
pub(super) fn percent(part: f64) -> String {
    format!("{:.0} %", part * 100.0)
}

pub(super) fn none() -> String {
    String::from("-")
}

/// Returns the host, and the sources of published times.
fn foot(machine: &Machine, mut sources: Vec<&str>) -> String {
    let mut text = machine.sentence() + "\n";
    sources.sort_unstable();
    sources.dedup();
    for source in sources {
        let _ = writeln!(text, "published: {source}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quick_run_and_a_ratio_within_the_noise_are_said_to_mean_little() {
        let bench = r#"{"benchmark": "bind", "quick": true, "machine": {},
            "tables": [{"id": "bind-4k", "title": "Rebind"}],
            "results": [{"id": "bind-4k/ours", "median_ns": 100, "ratio_naive": 1.04, "within_noise": true}],
            "summary": [{"name": "describe", "ours": "bind-4k/ours", "ours_ns": 100, "ratio_naive": 1.04, "within_noise": true}]}"#;
        let bench: Bench = serde_json::from_str(bench).expect("a run");
        let all = Bench { benchmark: ALL.to_owned(), ..bench.clone() };
        for bench in [bench.clone(), all] {
            let text = Found(bench).text(Style::plain(Verbosity::Normal));
            assert!(text.contains("1.04 (noise)") && text.contains(NOISE), "{text}");
            assert!(text.contains("--quick") && text.contains("mean little"), "{text}");
        }
        let slow = Bench { quick: false, results: Vec::new(), ..bench };
        let text = Found(slow).text(Style::plain(Verbosity::Normal));
        assert!(!text.contains("mean little") && !text.contains("(noise)"), "{text}");
    }

    #[test]
    fn the_text_of_a_run_of_all_is_the_summary_and_no_table() {
        let bench = r#"{"benchmark": "all", "settings": "1 GiB described",
            "machine": {"cpu": "A CPU", "cpus": 2, "kernel": "6.12"},
            "summary": [{"name": "describe 1 GiB", "ours": "bind-4k/ours-1", "ours_ns": 7, "published_ns": 9}],
            "tables": [{"id": "bind-4k", "title": "Rebind"}, {"id": "none", "title": "No row"}],
            "results": [{"id": "bind-4k/slow", "name": "slow path, the oracle", "median_ns": 5}],
            "skipped": [{"id": "fault", "reason": "there is no userfaultfd"}]}"#;
        let bench: Bench = serde_json::from_str(bench).expect("a run");
        let summary = Found(bench.clone()).text(Style::plain(Verbosity::Normal));
        for part in [
            "uzone-bench: 1 GiB described",
            "describe 1 GiB       9 ns",
            "published",
            "of limit",
            "fault: there is no userfaultfd",
            "Linux 6.12",
        ] {
            assert!(summary.contains(part), "{part}: {summary}");
        }
        assert!(!summary.contains("slow path, the oracle"), "{summary}");
        let all = Found(bench).text(Style::plain(Verbosity::Verbose));
        assert!(all.contains("slow path, the oracle"), "{all}");
    }
}

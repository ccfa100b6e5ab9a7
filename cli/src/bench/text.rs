//! What a benchmark found, as text: its tables, and the summary of a run of all.

use std::fmt::Write as _;
use std::time::{Duration, UNIX_EPOCH};

use uzone_pages::ByteLen;
use uzone_report::results::{Bench, Headline, Metadata, Row, Skipped, Spread, Table};
use uzone_report::{Machine, number};

use crate::output::{Report, Style, Verbosity, human_duration, table};

impl Report for Bench {
    const SCHEMA: &'static str = "";

    fn text(&self, style: Style) -> String {
        let mut text = String::new();
        let is_all = self.benchmark == ALL;
        // Writing to a String does not fail.
        let _ = match is_all {
            true => writeln!(text, "uzone bench: {}", self.settings),
            false => writeln!(text, "uzone bench {}: {}", self.benchmark, self.settings),
        };
        if !is_all || style.verbosity == Verbosity::Verbose {
            for table in &self.tables {
                text.push('\n');
                write_table(&mut text, table, &self.results);
            }
            if let Some(metadata) = &self.metadata {
                write_metadata(&mut text, metadata);
            }
        }
        write_skipped(&mut text, &self.skipped);
        if is_all {
            write_summary(&mut text, &self.summary);
            if let Some(metadata) = &self.metadata {
                write_bytes(&mut text, metadata);
            }
        }
        let sources = self.results.iter().filter_map(|row| Some(&*row.published.as_ref()?.source));
        let sources = sources.collect();
        let _ = write!(text, "\n{}", foot(&self.machine, sources));
        text
    }
}

impl Report for Metadata {
    const SCHEMA: &'static str = "";

    fn text(&self, _style: Style) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = writeln!(text, "uzone bench bind --metadata: {}", self.settings);
        write_metadata(&mut text, self);
        let sources = self.results.iter().filter_map(|row| row.source.as_deref()).collect();
        let _ = write!(text, "\n{}", foot(&self.machine, sources));
        text
    }
}

/// Writes the tables of what descriptors take.
fn write_metadata(text: &mut String, metadata: &Metadata) {
    for spec in &metadata.tables {
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
        for row in metadata.results.iter().filter(|row| row.id.starts_with(&prefix)) {
            let bytes = |bytes: u64| format!("{:.1}", ByteLen::new(bytes));
            cells.add_row(vec![
                row.name.clone(),
                row.descriptor_bytes.to_string(),
                row.virtual_bytes_per_tib.map_or_else(none, bytes),
                bytes(row.resident_bytes_per_tib),
                row.page_table_bytes_per_tib.map_or_else(none, bytes),
                bytes(row.region_bytes_per_tib),
                row.bind_ns.map_or_else(none, ns),
                row.origin.to_string(),
            ]);
        }
        let _ = writeln!(text, "{}", cells.trim_fmt());
    }
    write_skipped(text, &metadata.skipped);
}

/// What a run of every benchmark is called.
pub(super) const ALL: &str = "all";

/// Writes what was left out, and why.
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
    let mut cells = table(&["", "published", "naive", "uzone", "limit", "of limit", "x naive"]);
    for line in summary {
        let time = |time: Option<u64>| time.map_or_else(none, ns);
        cells.add_row(vec![
            line.name.clone(),
            match (line.published_naive_ns, line.published_ns) {
                (Some(before), Some(after)) => format!("{} to {}", ns(before), ns(after)),
                (_, published) => time(published),
            },
            time(line.naive_ns),
            ns(line.ours_ns),
            time(line.limit_ns),
            line.share_of_limit.map_or_else(none, percent),
            line.ratio_naive.map_or_else(none, number),
        ]);
    }
    let _ = writeln!(text, "\n{}", cells.trim_fmt());
    text.push_str(
        "Published are times on other machines, before and after. Naive, uzone and the limit are\n\
         medians of interleaved rounds on this one; the limit does the same amount of work. All rows: -v.\n",
    );
}

/// Writes how much memory descriptors take, in a line for each size of folios.
fn write_bytes(text: &mut String, metadata: &Metadata) {
    let rows = ["linux-all", "linux-dedup", "on-touch", "eager"];
    let mut cells =
        table(&["memory for descriptors", "Linux", "shared tails", "uzone, on touch", "eager"]);
    for spec in &metadata.tables {
        let bytes = |row: &str| {
            let id = format!("{}/{row}", spec.id);
            let row = metadata.results.iter().find(|row| row.id == id);
            row.map_or_else(none, |row| format!("{:.1}", ByteLen::new(row.resident_bytes_per_tib)))
        };
        let mut line = vec![spec.title.clone()];
        line.extend(rows.map(bytes));
        cells.add_row(line);
    }
    let _ = writeln!(text, "\n{}", cells.trim_fmt());
}

fn write_table(text: &mut String, spec: &Table, rows: &[Row]) {
    let _ = writeln!(text, "{}\n({})", spec.title, spec.note);
    let prefix = format!("{}/", spec.id);
    let rows: Vec<&Row> = rows.iter().filter(|row| row.id.starts_with(&prefix)).collect();
    // A column that no row of the table has anything for is not shown; that nothing was published is
    // worth knowing.
    let columns: Vec<&Column> = COLUMNS
        .iter()
        .filter(|(heading, cell)| {
            *heading == PUBLISHED || rows.iter().any(|row| cell(row).is_some())
        })
        .collect();
    let mut cells = table(&columns.iter().map(|(heading, _)| *heading).collect::<Vec<_>>());
    for row in rows {
        let of_row = columns.iter().map(|(_, cell)| cell(row).unwrap_or_else(none));
        cells.add_row(of_row.collect::<Vec<_>>());
    }
    let _ = writeln!(text, "{}", cells.trim_fmt());
}

/// A heading, and what a row has under it.
type Column = (&'static str, fn(&Row) -> Option<String>);

const PUBLISHED: &str = "published";

const COLUMNS: [Column; 25] = [
    ("row", |row| Some(row.label())),
    ("median", |row| Some(ns(row.median_ns))),
    ("worst", |row| Some(ns(row.worst_ns))),
    ("ns/page", |row| Some(number(row.ns_per_page))),
    ("ns/folio", |row| row.ns_per_folio.map(number)),
    // The time of the only call is the median.
    ("ns/call", |row| row.ns_per_call.filter(|_| row.calls > Some(1)).map(number)),
    ("GB/s", |row| row.gb_per_s().map(number)),
    ("of limit", |row| row.share_of_limit.map(percent)),
    ("x naive", |row| row.ratio_naive.map(number)),
    ("x best", |row| row.ratio_best.map(number)),
    ("x alike", |row| row.faults?.ratio_waiting_alike.map(number)),
    ("faults", |row| Some(row.faults?.count.to_string())),
    ("ns/fault", |row| row.faults?.ns_per_fault.map(number)),
    ("wasted pages", |row| Some(row.faults?.wasted_pages.to_string())),
    ("first, half", |row| {
        let faults = row.faults?;
        Some(format!("{}, {}", ns(faults.first_ns?), ns(faults.half_ns?)))
    }),
    ("CPU", |row| row.faults.map(|faults| ns(faults.cpu_ns))),
    ("read", |row| {
        let read = row.faults?.read_bytes;
        (read > 0).then(|| ByteLen::new(read).to_string())
    }),
    ("demand p50, p99, p99.9", |row| {
        let demand = row.faults?.demand?;
        Some(format!("{}, {}, {}", ns(demand.p50_ns), ns(demand.p99_ns?), ns(demand.p999_ns?)))
    }),
    ("touch p50, p99, p99.9", |row| {
        let touch = row.faults.filter(|faults| faults.demand.is_none())?.touch?;
        Some(format!("{}, {}, {}", ns(touch.p50_ns), ns(touch.p99_ns?), ns(touch.p999_ns?)))
    }),
    ("a clone", |row| Some(ByteLen::new(row.faults?.clone_resident_bytes?).to_string())),
    ("beyond", |row| Some(format!("{:+.0} ns", row.faults?.beyond_ns?))),
    ("pause p50, p99.9, worst", |row| quantiles(row.pauses?)),
    ("call p50, p99, worst", |row| quantiles(row.latency?)),
    ("resident/TiB", |row| {
        Some(format!("{:.1}", ByteLen::new(row.metadata_resident_bytes_per_tib?)))
    }),
    (PUBLISHED, |row| Some(ns(row.published.as_ref()?.ns))),
];

/// Returns the median, the high quantile that was taken, and the longest.
fn quantiles(spread: Spread) -> Option<String> {
    let high = spread.p99_ns.or(spread.p999_ns)?;
    Some(format!("{}, {}, {}", ns(spread.p50_ns), ns(high), ns(spread.worst_ns)))
}

/// Returns a part of a whole.
pub(super) fn percent(part: f64) -> String {
    format!("{:.0} %", part * 100.0)
}

pub(super) fn none() -> String {
    String::from("-")
}

/// Returns a time for a column of them.
pub(crate) fn ns(ns: u64) -> String {
    human_duration(Duration::from_nanos(ns))
}

/// Returns a time of the calendar.
pub(super) fn time(unix_seconds: u64) -> humantime::Rfc3339Timestamp {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(unix_seconds))
}

/// Returns the commit of a build, if that is known.
pub(super) fn in_brackets(commit: Option<&str>) -> String {
    commit.map(|commit| format!(" ({commit})")).unwrap_or_default()
}

/// Returns what was measured on, and what was published on what.
pub(super) fn foot(machine: &Machine, mut sources: Vec<&str>) -> String {
    let mut text = format!(
        "{}: {}, {} CPUs, {:.1}, Linux {}, transparent huge pages {}; {} stores; uzone {}{}\n",
        time(machine.unix_seconds),
        machine.cpu,
        machine.cpus,
        ByteLen::new(machine.memory_bytes),
        machine.kernel,
        machine.transparent_huge_pages,
        machine.stream,
        machine.version,
        in_brackets(machine.commit.as_deref()),
    );
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
    use crate::output::Style;

    #[test]
    fn the_text_of_a_run_of_all_is_the_summary_and_no_table() {
        let bench = r#"{"benchmark": "all", "settings": "1 GiB described",
            "machine": {"cpu": "A CPU", "cpus": 2, "kernel": "6.12"},
            "summary": [{"name": "describe 1 GiB", "ours": "bind-4k/ours-1", "ours_ns": 7, "published_ns": 9}],
            "tables": [{"id": "bind-4k", "title": "Rebind"}, {"id": "none", "title": "No row"}],
            "results": [{"id": "bind-4k/slow", "name": "slow path, the oracle", "median_ns": 5}],
            "skipped": [{"id": "fault", "reason": "there is no userfaultfd"}],
            "metadata": {"tables": [{"id": "metadata-4k", "title": "Descriptors"}],
                "results": [{"id": "metadata-4k/eager", "resident_bytes_per_tib": 2147483648}]}}"#;
        let bench: Bench = serde_json::from_str(bench).expect("a run");
        let summary = bench.text(Style::plain(Verbosity::Normal));
        for part in [
            "uzone bench: 1 GiB described",
            "describe 1 GiB       9 ns",
            "published",
            "of limit",
            "on touch",
            "shared tails",
            "Descriptors                 -             -                -  2 GiB",
            "fault: there is no userfaultfd",
            "Linux 6.12",
        ] {
            assert!(summary.contains(part), "{part}: {summary}");
        }
        assert!(!summary.contains("slow path, the oracle"), "{summary}");
        let all = bench.text(Style::plain(Verbosity::Verbose));
        assert!(all.contains("slow path, the oracle") && all.contains("bytes each"), "{all}");
    }
}

//! The charts of a benchmark: for each of its tables one that fits what the rows have in common.

use super::Where::{Both, Page, Text};
use super::{Column, PUBLISHED, cells, foot, heading, known, none, numbers, tables};
use crate::chart::{Chart, Lines, Mark, Numbers, Plot, Role, Rows, Section, Series, Unit};
use crate::results::{Bench, NOISE, QUICK, Row, Spread, Table, noisy};
use crate::text::{bytes, float, ns, number, sentences};

/// Of how many times the slowest rate bars can still be seen beside each other.
const MOST_TIMES: f64 = 60.0;

pub(super) fn section(bench: &Bench) -> Section {
    let mut charts = Vec::new();
    for (table, rows) in tables(&bench.tables, &bench.results, |row| &row.id) {
        charts.push(chart(&table, &rows));
        charts.extend(spread(&table, &rows));
    }
    let sources = bench.results.iter().filter_map(|row| Some(&*row.published.as_ref()?.source));
    Section {
        title: match bench.benchmark.as_str() {
            // It measures a little of several benchmarks.
            "demo" => "uzone demo".to_owned(),
            // Every benchmark, one after the other.
            "all" => "uzone bench".to_owned(),
            one => format!("uzone bench {one}"),
        },
        note: sentences(&[&bench.settings, if bench.quick { QUICK } else { "" }]),
        charts,
        skipped: bench.skipped.clone(),
        foot: foot(bench.machine.sentence(), "Published", sources),
    }
}

fn chart(table: &Table, rows: &[&Row]) -> Chart {
    let (plot, hint) = plot(rows);
    let noise = if rows.iter().any(|row| row.within_noise) { NOISE } else { "" };
    let note = [&*table.note, hint, &left_out(rows.len(), &plot), noise];
    Chart::new(
        &table.id,
        heading(&table.title, &table.id),
        &note,
        plot,
        numbers(Page, &COLUMNS, rows),
    )
}

fn left_out(rows: usize, plot: &Plot) -> String {
    let most = crate::draw::MOST_ROWS;
    match plot {
        Plot::Rows(_) if rows > most => {
            format!("the first {most} of {rows} rows are drawn")
        }
        _ => String::new(),
    }
}

fn plot(rows: &[&Row]) -> (Plot, &'static str) {
    if let Some(lines) = windows(rows) {
        return (
            Plot::Lines(lines),
            "lower is better; both axes are logarithmic; level lines do not depend on the window",
        );
    }
    if let Some(lines) = sizes(rows) {
        let hint = if lines.is_log {
            "lower is better; both axes are logarithmic"
        } else {
            "higher is better; sizes are on a logarithmic axis"
        };
        return (Plot::Lines(lines), hint);
    }
    let rates: Option<Vec<f64>> = rows.iter().map(|row| row.gb_per_s()).collect();
    let is_same_work = rows.iter().all(|row| row.bytes == rows[0].bytes);
    match rates {
        Some(rates) if is_same_work && near(&rates) => (
            Plot::Rows(bars(rows, &rates)),
            "higher is better; beside each bar: GB/s, share of its limit, times as fast as naive",
        ),
        _ => (
            Plot::Rows(times(rows)),
            "lower is better, on a logarithmic axis; beside each row: median, share of its limit, times as fast as naive",
        ),
    }
}

fn near(rates: &[f64]) -> bool {
    let (low, high) = rates
        .iter()
        .fold((f64::MAX, 0.0), |(low, high): (f64, f64), rate| (low.min(*rate), high.max(*rate)));
    low > 0.0 && high / low <= MOST_TIMES
}

/// Returns what stands beside a row's mark.
fn beside(row: &Row, first: String) -> String {
    let mut parts = vec![first];
    parts.extend(row.share_of_limit.map(|share| format!("{:.0} %", share * 100.0)));
    let is_naive = look(row) == Role::Naive;
    let ratio = row.ratio_naive.filter(|_| !is_naive);
    parts.extend(ratio.map(|ratio| format!("{} x{}", number(ratio), noisy(row.within_noise))));
    parts.join(" \u{b7} ")
}

fn bars(rows: &[&Row], rates: &[f64]) -> Rows {
    // A limit that the machine's noise has put farther away would squeeze all bars.
    let most = rates.iter().fold(0.0, |most: f64, rate| most.max(*rate)) * 3.0;
    let rows = rows.iter().zip(rates).map(|(row, rate)| {
        let role = look(row);
        let share = row.share_of_limit.filter(|share| *share > 0.0 && role != Role::Limit);
        Mark {
            limit: share.map(|share| rate / share).filter(|limit| *limit <= most),
            // A byte for each nanosecond is a GB for each second.
            published: row
                .published
                .as_ref()
                .map(|published| float(row.bytes) / float(published.ns.max(1))),
            ..Mark::at(row.label(), role, *rate, beside(row, number(*rate)))
        }
    });
    Rows { axis: "GB/s".to_owned(), has_bars: true, rows: rows.collect(), ..Rows::default() }
}

fn times(rows: &[&Row]) -> Rows {
    let rows = rows.iter().map(|row| {
        let (role, text) = (look(row), beside(row, ns(row.median_ns)));
        Mark {
            low: float(known(row.min_ns).unwrap_or(row.median_ns)),
            high: float(known(row.worst_ns).unwrap_or(row.median_ns)),
            published: row.published.as_ref().map(|published| float(published.ns)),
            ..Mark::at(row.label(), role, float(row.median_ns), text)
        }
    });
    Rows {
        axis: "time (logarithmic)".to_owned(),
        unit: Unit::Ns,
        line: "fastest to slowest; mark: median",
        rows: rows.collect(),
        ..Rows::default()
    }
}

/// The published fault-around table: time by window.
fn windows(rows: &[&Row]) -> Option<Lines> {
    let mut ours = Vec::new();
    let mut published = Vec::new();
    let mut levels = Vec::new();
    for row in rows {
        let order = case(row).strip_prefix("order-").and_then(|order| order.parse::<i32>().ok());
        match order.filter(|order| (0..40).contains(order)) {
            Some(order) => {
                let pages = 2.0_f64.powi(order);
                ours.push((pages, float(row.median_ns)));
                let known = row.published.as_ref();
                published.extend(known.map(|known| (pages, float(known.ns))));
            }
            None => levels.push(row),
        }
    }
    if ours.len() < 3 {
        return None;
    }
    let line = |name: &str, role, mut points: Vec<(f64, f64)>| {
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        Series { name: name.to_owned(), role, points }
    };
    let mut series = vec![line("uzone, by window", Role::Ours, ours)];
    if published.len() > 1 {
        series.push(line("published, on another machine", Role::Published, published));
    }
    for row in levels.into_iter().take(6) {
        // What adapts is no point of the sweep: it is a level beside it.
        let role = match look(row) {
            Role::Ours => Role::Peer,
            role => role,
        };
        series.push(line(&row.label(), role, vec![(1.0, float(row.median_ns))]));
    }
    Some(Lines {
        x_axis: "pages mapped at a fault, at most".to_owned(),
        x_unit: Unit::Plain,
        y_axis: "time (logarithmic)".to_owned(),
        y_unit: Unit::Ns,
        is_log: true,
        series,
    })
}

/// Returns how a row is drawn: by its role, or where it has none, by the words of its id.
fn look(row: &Row) -> Role {
    let case = row.id.split_once('/').map_or(&*row.id, |(_, case)| case);
    let has = |word: &str| case.split('-').any(|part| part == word);
    match row.role {
        Some(role) => role.into(),
        None if has("naive") || case.ends_with("page-at-a-time") => Role::Naive,
        None if has("limit") => Role::Limit,
        None if has("ours") => Role::Ours,
        None => Role::Peer,
    }
}

/// Returns a row's id without its table.
fn case(row: &Row) -> &str {
    row.id.split_once('/').map_or("", |(_, case)| case)
}

/// Returns the length that a part of an id names, such as `4K` or `1GiB`.
fn size(part: &str) -> Option<u64> {
    part.parse::<uzone_pages::ByteLen>()
        .ok()
        .filter(|_| part.ends_with(|last: char| last.is_ascii_alphabetic()))
        .map(uzone_pages::ByteLen::get)
}

/// Splits `4K-ours` or `ours-4K` into a length and the rest.
fn sized(case: &str) -> Option<(u64, &str)> {
    let first = case.split_once('-').and_then(|(first, rest)| Some((size(first)?, rest)));
    first.or_else(|| case.rsplit_once('-').and_then(|(rest, last)| Some((size(last)?, rest))))
}

/// A size, and what was measured there.
type Points = Vec<(f64, f64)>;

/// Rows of which each is one way at one size: a line for each way.
fn sizes(rows: &[&Row]) -> Option<Lines> {
    let mut ways: Vec<(&str, &Row, Points)> = Vec::new();
    let is_rate = rows.iter().all(|row| row.gb_per_s().is_some());
    for row in rows {
        let (size, way) = sized(case(row))?;
        let value = row.gb_per_s().filter(|_| is_rate).unwrap_or(float(row.median_ns));
        let point = (float(size), value);
        match ways.iter_mut().find(|(known, ..)| *known == way) {
            Some((.., points)) => points.push(point),
            None => ways.push((way, row, vec![point])),
        }
        if ways.len() > 64 {
            return None;
        }
    }
    if ways.iter().all(|(.., points)| points.len() < 3) {
        return None;
    }
    let series =
        ways.into_iter().filter(|(.., points)| points.len() > 1).map(|(way, row, mut points)| {
            points.sort_by(|one, other| one.0.total_cmp(&other.0));
            points.dedup_by(|one, other| one.0.total_cmp(&other.0).is_eq());
            Series { name: way.replace('-', " "), role: look(row), points }
        });
    let series: Vec<Series> = series.collect();
    Some(Lines {
        x_axis: "size".to_owned(),
        x_unit: Unit::Bytes,
        y_axis: if is_rate { "GB/s" } else { "time (logarithmic)" }.to_owned(),
        y_unit: if is_rate { Unit::Plain } else { Unit::Ns },
        is_log: !is_rate,
        series,
    })
}

/// The distributions that rows of a table have, as a chart of its own.
fn spread(table: &Table, rows: &[&Row]) -> Option<Chart> {
    let (mut spans, mut lines) = (Vec::new(), Vec::new());
    for row in rows {
        let touch = row.faults.and_then(|faults| faults.touch);
        let demand = row.faults.and_then(|faults| faults.demand);
        let kinds = [
            ("one call", row.latency),
            ("pause", row.pauses),
            ("one touch", touch),
            ("one fault", demand),
        ];
        for (kind, spread) in kinds {
            let Some(Spread { p50_ns, p99_ns, p999_ns, worst_ns, count }) = spread else {
                continue;
            };
            let tick = p99_ns.or(p999_ns);
            let text = format!("{} \u{b7} {}", ns(p50_ns), tick.map_or_else(String::new, ns));
            spans.push(Mark {
                high: float(worst_ns),
                tick: tick.map(float),
                ..Mark::at(row.label(), look(row), float(p50_ns), text)
            });
            let cell = |value: Option<u64>| value.map_or_else(none, ns);
            lines.push(vec![
                row.label(),
                kind.to_owned(),
                ns(p50_ns),
                cell(p99_ns),
                cell(p999_ns),
                ns(worst_ns),
                count.to_string(),
            ]);
        }
    }
    if spans.is_empty() {
        return None;
    }
    let plot = Plot::Rows(Rows {
        axis: "time of one (logarithmic)".to_owned(),
        unit: Unit::Ns,
        line: "to the longest; mark: median",
        tick: "99 % (pauses: 99.9 %)",
        rows: spans,
        ..Rows::default()
    });
    let headings = ["row", "of", "half", "99 %", "99.9 %", "longest", "how many"];
    Some(Chart::new(
        &format!("{}-latency", table.id),
        format!("{}: latency", heading(&table.title, &table.id)),
        &["how long single steps took, of all rounds together; lower is better"],
        plot,
        Numbers::new(&headings, lines.into_iter()),
    ))
}

const COLUMNS: [Column<Row>; 34] = [
    ("row", Both, |row| Some(row.label())),
    ("id", Page, |row| Some(row.id.clone())),
    ("median", Both, |row| Some(ns(row.median_ns))),
    ("fastest", Page, |row| known(row.min_ns).map(ns)),
    ("worst", Both, |row| known(row.worst_ns).map(ns)),
    ("ns/page", Both, |row| Some(row.ns_per_page).filter(|ns| *ns != 0.0).map(number)),
    ("ns/folio", Both, |row| row.ns_per_folio.map(number)),
    // The time of the only call is the median.
    ("ns/call", Both, |row| row.ns_per_call.filter(|_| row.calls > Some(1)).map(number)),
    ("GB/s", Both, |row| row.gb_per_s().map(number)),
    ("of limit", Both, |row| Some(format!("{:.0} %", row.share_of_limit? * 100.0))),
    ("x naive", Both, |row| {
        Some(format!("{}{}", number(row.ratio_naive?), noisy(row.within_noise)))
    }),
    ("x best", Both, |row| row.ratio_best.map(number)),
    ("x alike", Both, |row| row.faults?.ratio_waiting_alike.map(number)),
    ("touch x naive", Page, |row| row.faults?.touch_ratio_naive.map(number)),
    ("faults", Both, |row| Some(row.faults?.count.to_string())),
    ("ns/fault", Both, |row| row.faults?.ns_per_fault.map(number)),
    ("wasted pages", Both, |row| Some(row.faults?.wasted_pages.to_string())),
    ("first, half", Both, |row| {
        let faults = row.faults?;
        Some(format!("{}, {}", ns(faults.first_ns?), ns(faults.half_ns?)))
    }),
    ("CPU", Both, |row| known(row.faults?.cpu_ns).map(ns)),
    ("read", Both, |row| known(row.faults?.read_bytes).map(bytes)),
    ("demand p50, p99, p99.9", Text, |row| three(row.faults?.demand?)),
    ("touch p50, p99, p99.9", Text, |row| {
        three(row.faults.filter(|faults| faults.demand.is_none())?.touch?)
    }),
    ("a clone", Both, |row| row.faults?.clone_resident_bytes.map(bytes)),
    ("beyond", Both, |row| Some(format!("{:+.0} ns", row.faults?.beyond_ns?))),
    ("pause p50, p99.9, worst", Text, |row| and_worst(row.pauses?)),
    ("call p50, p99, worst", Text, |row| and_worst(row.latency?)),
    ("pages", Page, |row| known(row.items).map(|items| items.to_string())),
    ("folios", Page, |row| row.folios.map(|folios| folios.to_string())),
    ("calls", Page, |row| row.calls.map(|calls| calls.to_string())),
    ("bytes", Page, |row| known(row.bytes).map(bytes)),
    ("threads", Page, |row| Some(row.threads.to_string())),
    ("rounds", Page, |row| Some(row.rounds.to_string())),
    ("resident/TiB", Both, |row| row.metadata_resident_bytes_per_tib.map(bytes)),
    (PUBLISHED, Both, |row| Some(ns(row.published.as_ref()?.ns))),
];

fn three(Spread { p50_ns, p99_ns, p999_ns, .. }: Spread) -> Option<String> {
    Some(format!("{}, {}, {}", ns(p50_ns), ns(p99_ns?), ns(p999_ns?)))
}

/// Returns the median, the high quantile that was taken, and the longest.
fn and_worst(spread: Spread) -> Option<String> {
    let high = spread.p99_ns.or(spread.p999_ns)?;
    Some(format!("{}, {}, {}", ns(spread.p50_ns), ns(high), ns(spread.worst_ns)))
}

impl Bench {
    /// Returns the headings of a table, and under these what its rows have, as text shows it.
    #[must_use]
    pub fn cells(&self, table: &Table) -> Vec<Vec<String>> {
        cells(table, &COLUMNS, &self.results, |row| &row.id)
    }
}

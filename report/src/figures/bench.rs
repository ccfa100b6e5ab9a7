//! The charts of a benchmark: one for each of its tables, of a kind that fits its rows.

use super::Where::{Both, Page};
use super::{Column, PUBLISHED, cells, foot, heading, known, log_shares, none, numbers, rows_of};
use crate::chart::{Bar, Chapter, Chart, Section, Table as Numbers};
use crate::results::{Bench, Headline, NOISE, QUICK, Role, Row, Spread, Table, noisy};
use crate::text::{bytes, float, ns, number, sentences};

/// The largest ratio of rates whose bars can still be compared by eye.
const MOST_TIMES: f64 = 60.0;

pub(super) fn section(bench: &Bench) -> Section {
    let mut chapters: Vec<Chapter> = Vec::new();
    for table in &bench.tables {
        let rows = rows_of(table, &bench.results, |row| &row.id);
        if rows.is_empty() {
            continue;
        }
        let title = table.id.split('-').next().unwrap_or_default().to_owned();
        let chart = chart(table, &rows);
        match chapters.iter_mut().find(|chapter| chapter.title == title) {
            Some(chapter) => chapter.charts.push(chart),
            None => chapters.push(Chapter { title, charts: vec![chart] }),
        }
    }
    if let [only] = &mut chapters[..] {
        only.title.clear();
    }
    let sources = bench.results.iter().filter_map(|row| Some(&*row.published.as_ref()?.source));
    Section {
        title: match bench.benchmark.as_str() {
            // A small part of several benchmarks.
            "demo" => "uzone demo".to_owned(),
            // Every benchmark, one after the other.
            "all" => "uzone-bench".to_owned(),
            one => format!("uzone-bench {one}"),
        },
        note: sentences(&[&bench.settings, if bench.quick { QUICK } else { "" }]),
        summary: summary(bench),
        chapters,
        skipped: bench.skipped.clone(),
        foot: foot(bench.machine.sentence(), "Published", sources),
    }
}

/// Returns the claims of a run with their verdicts.
fn summary(bench: &Bench) -> Numbers {
    let cell = |time: Option<u64>| time.map_or_else(none, ns);
    let claim = |line: &Headline| {
        let verdict = verdict(line.ratio_naive, line.within_noise, line.share_of_limit);
        let times = [line.naive_ns, Some(line.ours_ns), line.limit_ns, line.published_ns].map(cell);
        [line.name.clone(), verdict].into_iter().chain(times).collect()
    };
    let headings = ["claim", "verdict", "naive", "uzone", "limit", PUBLISHED];
    Numbers::new(&headings, bench.summary.iter().map(claim))
}

/// Returns a result in words.
fn verdict(ratio: Option<f64>, is_noise: bool, share: Option<f64>) -> String {
    let naive = ratio.map(|ratio| match ratio {
        _ if is_noise => "no difference to naive beyond the noise".to_owned(),
        ratio if ratio >= 1.05 => format!("{} times as fast as naive", number(ratio)),
        ratio if ratio < 0.95 => format!("SLOWER than naive ({} times)", number(ratio)),
        _ => "as fast as naive".to_owned(),
    });
    let limit = share.map(|share| match share {
        share if share >= 0.95 => "at the limit".to_owned(),
        share => format!("{:.0} % of the limit", share * 100.0),
    });
    naive.into_iter().chain(limit).collect::<Vec<_>>().join("; ")
}

fn chart(table: &Table, rows: &[&Row]) -> Chart {
    let noise = if rows.iter().any(|row| row.within_noise) { NOISE } else { "" };
    let mut numbers = numbers(false, &COLUMNS, rows);
    let hint = bars(rows, &mut numbers);
    let mut roles: Vec<Role> = rows.iter().map(|row| row.role).collect();
    roles.sort_unstable();
    let mut legend: Vec<_> = roles.into_iter().map(Role::look).collect();
    legend.dedup();
    if numbers.bars.iter().any(|bar| bar.limit.is_some()) {
        legend.push(("ink border", "limit of a row"));
    }
    Chart {
        title: heading(&table.title, &table.id),
        note: sentences(&[&*table.note, hint, noise]),
        picture: None,
        table: numbers,
        legend,
    }
}

/// Adds a bar to each row: its rate, or its time where rates cannot be compared. Returns a note for readers.
fn bars(rows: &[&Row], numbers: &mut Numbers) -> &'static str {
    let rates: Option<Vec<f64>> = rows.iter().map(|row| row.gb_per_s()).collect();
    let is_same_work = rows.iter().all(|row| row.bytes == rows[0].bytes);
    let rates = rates.filter(|rates| is_same_work && near(rates));
    let is_rate = rates.is_some();
    let values = rates.unwrap_or_else(|| rows.iter().map(|row| float(row.median_ns)).collect());
    let most = values.iter().copied().fold(0.0, f64::max);
    let limit = |row: &Row, value: f64| {
        let share = row.share_of_limit.filter(|share| *share > 0.0 && row.role != Role::Limit)?;
        let limit = if is_rate { value / share } else { value * share };
        // A limit that noise has put far away would squeeze all bars.
        Some(limit).filter(|limit| limit.is_finite() && *limit <= most * 3.0)
    };
    let limits: Vec<_> = rows.iter().zip(&values).map(|(row, value)| limit(row, *value)).collect();
    let all = values.iter().copied().chain(limits.iter().flatten().copied());
    let top = all.clone().fold(f64::MIN_POSITIVE, f64::max);
    let log = log_shares(all);
    let share = |value: f64| if is_rate { value / top } else { log(value) };
    numbers.bars = rows
        .iter()
        .zip(&values)
        .zip(&limits)
        .map(|((row, value), limit)| Bar {
            parts: vec![(row.role.look().0, share(*value))],
            limit: limit.map(share),
        })
        .collect();
    numbers.scale = if is_rate { "GB/s" } else { "time (logarithmic)" };
    if is_rate { "longer is better" } else { "shorter is better" }
}

fn near(rates: &[f64]) -> bool {
    let (low, high) = rates
        .iter()
        .fold((f64::MAX, 0.0), |(low, high): (f64, f64), rate| (low.min(*rate), high.max(*rate)));
    low > 0.0 && high / low <= MOST_TIMES
}

const COLUMNS: [Column<Row>; 30] = [
    ("row", Both, |row| Some(row.label())),
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
    ("faults", Both, |row| Some(row.faults?.count.to_string())),
    ("ns/fault", Both, |row| row.faults?.ns_per_fault.map(number)),
    ("wasted pages", Both, |row| Some(row.faults?.wasted_pages.to_string())),
    ("first, half", Both, |row| {
        let faults = row.faults?;
        Some(format!("{}, {}", ns(faults.first_ns?), ns(faults.half_ns?)))
    }),
    ("CPU", Both, |row| known(row.faults?.cpu_ns).map(ns)),
    ("read", Both, |row| known(row.faults?.read_bytes).map(bytes)),
    ("demand p50, p99, p99.9", Both, |row| Some(three(row.faults?.demand?))),
    ("touch p50, p99, p99.9", Both, |row| {
        Some(three(row.faults.filter(|faults| faults.demand.is_none())?.touch?))
    }),
    ("a clone", Both, |row| row.faults?.clone_resident_bytes.map(bytes)),
    ("call p50, p99, worst", Both, |row| {
        let Spread { p50_ns, p99_ns, worst_ns, .. } = row.latency?;
        Some(times([p50_ns, p99_ns, worst_ns]))
    }),
    ("pages", Page, |row| known(row.items).map(|items| items.to_string())),
    ("folios", Page, |row| row.folios.map(|folios| folios.to_string())),
    ("calls", Page, |row| row.calls.map(|calls| calls.to_string())),
    ("bytes", Page, |row| known(row.bytes).map(bytes)),
    ("threads", Page, |row| Some(row.threads.to_string())),
    ("rounds", Page, |row| Some(row.rounds.to_string())),
    ("resident/TiB", Both, |row| row.metadata_resident_bytes_per_tib.map(bytes)),
    (PUBLISHED, Both, |row| Some(ns(row.published.as_ref()?.ns))),
    ("id", Page, |row| Some(row.id.clone())),
];

fn times(ns: [u64; 3]) -> String {
    ns.map(self::ns).join(", ")
}

fn three(Spread { p50_ns, p99_ns, p999_ns, .. }: Spread) -> String {
    times([p50_ns, p99_ns, p999_ns])
}

impl Bench {
    /// Returns the headings of a table and its rows, as text shows them.
    #[must_use]
    pub fn cells(&self, table: &Table) -> Vec<Vec<String>> {
        cells(table, &COLUMNS, &self.results, |row| &row.id)
    }
}

//! The charts of a trace: places, times and latencies of faults.

use super::{edges, log_shares, one_chapter, stacked};
use crate::chart::{Bar, Chart, Heat, Section, Table};
use crate::text::{bytes, cell, float, float_bytes, float_ns, ns, sentences};
use crate::trace::{Outcome, Record, Summary, Trace};

/// Steps of time of the timeline.
const STEPS: usize = 24;
/// Cells of the heat map.
const HEAT: (usize, usize) = (64, 32);

pub(super) fn section(trace: &Trace) -> Section {
    let records = &trace.records;
    let mut charts = Vec::new();
    if !records.is_empty() {
        charts.push(heat(trace));
        charts.push(timeline(records));
    }
    if !trace.latencies.is_empty() {
        charts.push(quantiles(&trace.latencies));
    }
    let kept = format!("{} faults of a mapping of {}", records.len(), bytes(trace.len_bytes));
    let lost = match trace.lost {
        0 => String::new(),
        lost => format!("{lost} before them were dropped: the trace was full"),
    };
    let none = if records.is_empty() { "the trace has no records" } else { "" };
    let page = format!("its pages are of {}", bytes(trace.page_size_bytes));
    Section {
        title: "Trace of page faults".to_owned(),
        note: sentences(&[&kept, &page, &lost, none]),
        chapters: one_chapter(charts),
        foot: vec![trace.machine.sentence()],
        ..Section::default()
    }
}

/// Returns the classes and the words of all outcomes.
fn kinds() -> [(&'static str, &'static str); Outcome::ALL.len()] {
    Outcome::ALL.map(|outcome| {
        let class = match outcome {
            Outcome::AtHand => "ours",
            Outcome::Coalesced => "green",
            Outcome::Produced => "naive",
            Outcome::Failed => "ink",
            Outcome::PutOff => "peer",
            Outcome::Other => "published",
        };
        (class, outcome.words())
    })
}

/// Returns the times of the first and the last fault.
fn times(records: &[Record]) -> (f64, f64) {
    let at = || records.iter().map(|record| record.at_ns);
    let (first, last) = (at().min().unwrap_or(0), at().max().unwrap_or(0));
    (float(first), float(last).max(float(first) + 1000.0))
}

fn share(value: f64, (from, to): (f64, f64)) -> f64 {
    (value - from) / (to - from)
}

fn heat(trace: &Trace) -> Chart {
    let span = times(&trace.records);
    let page = trace.page_size_bytes.max(1);
    let farthest = trace.records.iter().map(|record| record.offset_bytes).max().unwrap_or(0);
    let len = trace.len_bytes.max(farthest.saturating_add(1));
    let columns = HEAT.0;
    let rows = usize::try_from(len.div_ceil(page)).unwrap_or(HEAT.1).clamp(1, HEAT.1);
    let mut counts = vec![0; columns * rows];
    let mut of_rows = vec![(0_u64, u64::MAX, 0_u64, 0_u64); rows];
    for record in &trace.records {
        let column = cell(share(float(record.at_ns), span), columns);
        let row = cell(float(record.offset_bytes) / float(len), rows);
        counts[row * columns + column] += 1;
        let (found, first, last, slowest) = &mut of_rows[row];
        *found += 1;
        *first = record.at_ns.min(*first);
        *last = record.at_ns.max(*last);
        *slowest = record.latency_ns.max(*slowest);
    }
    let ends = edges(rows, (0.0, float(len)));
    let lines = of_rows.iter().zip(ends.windows(2)).filter(|((found, ..), _)| *found > 0);
    let lines = lines.map(|((found, first, last, slowest), ends)| {
        let (from, to) = (float_bytes(ends[0]), float_bytes(ends[1]));
        vec![from, to, found.to_string(), ns(*first), ns(*last), ns(*slowest)]
    });
    let (from_ns, to_ns) = span;
    Chart {
        title: "Where faults were, over time".to_owned(),
        note: sentences(&["the darker a cell, the more faults it had"]),
        picture: Some(Heat { from_ns, to_ns, len_bytes: float(len), columns, counts }),
        table: Table::new(&["from", "to", "faults", "first", "last", "slowest"], lines),
        legend: Vec::new(),
    }
}

fn timeline(records: &[Record]) -> Chart {
    let span = times(records);
    let mut by_step = vec![vec![0_u64; Outcome::ALL.len()]; STEPS];
    for record in records {
        let step = cell(share(float(record.at_ns), span), STEPS);
        by_step[step][place(record.outcome)] += 1;
    }
    Chart {
        title: "When faults were answered".to_owned(),
        note: sentences(&["since the mapping was made, by outcome"]),
        ..stacked(&edges(STEPS, span), &kinds(), &by_step, ("from", "to"), float_ns)
    }
}

fn place(outcome: Outcome) -> usize {
    Outcome::ALL.iter().position(|known| *known == outcome).unwrap_or(Outcome::ALL.len() - 1)
}

fn quantiles(summaries: &[Summary]) -> Chart {
    let times =
        |summary: &Summary| [summary.p50_ns, summary.p99_ns, summary.p999_ns, summary.max_ns];
    let rows = summaries.iter().map(|summary| {
        let label = format!("{}, {}", summary.class.words(), summary.outcome.words());
        let mut row = vec![label, summary.count.to_string()];
        row.extend(times(summary).map(ns));
        row
    });
    let headings = ["faults", "how many", "half", "99 %", "99.9 %", "longest"];
    let share = log_shares(summaries.iter().flat_map(times).map(float));
    let bars = summaries.iter().map(|summary| Bar {
        parts: vec![("ours", share(float(summary.p50_ns)))],
        limit: Some(share(float(summary.p99_ns))),
    });
    Chart {
        title: "How long faults took, by kind".to_owned(),
        note: sentences(&[
            "from when the fault was read to when its page was in place, with the faults that the trace has dropped",
            "the bar is the median, its border the 99th percentile",
        ]),
        table: Table {
            bars: bars.collect(),
            scale: "time (logarithmic)",
            ..Table::new(&headings, rows)
        },
        ..Chart::default()
    }
}

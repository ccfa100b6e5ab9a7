//! The charts of a trace: where, when, how long.

use crate::canvas::{Fill, Ink};
use crate::chart::{Chart, Columns, Heat, Mark, Numbers, Plot, Role, Rows, Section, Unit};
use crate::text::{bytes, cell, count, float, float_bytes, float_ns, ns, sentences};
use crate::trace::{Outcome, Record, Summary, Trace};

/// Steps of time of the timeline.
const STEPS: usize = 60;
/// Cells of the heat map.
const HEAT: (usize, usize) = (64, 32);
/// Columns of the distribution for each power of ten.
const PER_TEN: f64 = 5.0;

pub(super) fn section(trace: &Trace) -> Section {
    let records = &trace.records;
    let mut charts = Vec::new();
    if !records.is_empty() {
        charts.push(heat(trace));
        charts.push(timeline(records));
    }
    let summaries = summaries(trace);
    if !summaries.is_empty() {
        charts.push(distribution(&summaries, records));
        charts.push(quantiles(&summaries));
    }
    let kept = format!("{} faults of a mapping of {}", records.len(), bytes(trace.len_bytes));
    let lost = match trace.lost {
        0 => String::new(),
        lost => format!("{lost} before them were forgotten: the trace had no more room"),
    };
    let none = if records.is_empty() { "the trace has no records" } else { "" };
    let page = format!("its pages are of {}", bytes(trace.page_size_bytes));
    Section {
        title: "Trace of page faults".to_owned(),
        note: sentences(&[&kept, &page, &lost, none]),
        charts,
        skipped: Vec::new(),
        foot: vec![trace.machine.sentence()],
    }
}

const fn ink(outcome: Outcome) -> Ink {
    match outcome {
        Outcome::AtHand => Ink { fill: Fill::Solid, colour: "blue" },
        Outcome::Coalesced => Ink { fill: Fill::Dots, colour: "green" },
        Outcome::Produced => Ink { fill: Fill::Diagonal, colour: "orange" },
        Outcome::Failed => Ink { fill: Fill::Solid, colour: "ink" },
        Outcome::PutOff => Ink { fill: Fill::Horizontal, colour: "grey" },
        Outcome::Other => Ink { fill: Fill::Empty, colour: "pink" },
    }
}

/// When the first and the last fault were.
fn times(records: &[Record]) -> (f64, f64) {
    let at = || records.iter().map(|record| record.at_ns);
    let (first, last) = (at().min().unwrap_or(0), at().max().unwrap_or(0));
    (float(first), float(last).max(float(first) + 1000.0))
}

fn share(value: f64, (from, to): (f64, f64)) -> f64 {
    (value - from) / (to - from)
}

/// Returns the ends of `steps` equal steps.
fn edges(steps: usize, (from, to): (f64, f64)) -> Vec<f64> {
    (0..=steps).map(|step| from + (to - from) * count(step) / count(steps)).collect()
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
    let table = Numbers::new(&["from", "to", "faults", "first", "last", "slowest"], lines);
    let (from_ns, to_ns) = span;
    let plot = Plot::Heat(Heat { from_ns, to_ns, len_bytes: float(len), columns, rows, counts });
    let note = "the more a cell stands out, the more faults it had; each shade begins at a multiple of the one \
         before; where nothing is drawn, there was no fault";
    Chart::new("heat", "Where faults were, over time", &[note], plot, table)
}

fn timeline(records: &[Record]) -> Chart {
    let span = times(records);
    let mut by_step = vec![[0_u64; Outcome::ALL.len()]; STEPS];
    for record in records {
        let step = cell(share(float(record.at_ns), span), STEPS);
        by_step[step][place(record.outcome)] += 1;
    }
    let edges = edges(STEPS, span);
    let (kinds, counts) = present(&by_step);
    let table = stacked(&edges, &kinds, &counts, "from", "to", float_ns);
    let plot = Plot::Columns(Columns {
        x_axis: "time since the mapping was made".to_owned(),
        x_unit: Unit::Ns,
        is_log: false,
        y_axis: format!("faults in each {}", float_ns((span.1 - span.0) / count(STEPS))),
        edges,
        kinds,
        counts,
    });
    Chart::new("timeline", "When faults were answered", &["by what became of them"], plot, table)
}

fn place(outcome: Outcome) -> usize {
    Outcome::ALL.iter().position(|known| *known == outcome).unwrap_or(Outcome::ALL.len() - 1)
}

type Kinds = Vec<(String, Ink)>;

/// Returns the outcomes that there are, and the counts of these.
fn present(steps: &[[u64; Outcome::ALL.len()]]) -> (Kinds, Vec<Vec<u64>>) {
    let is_there = |kind: &usize| steps.iter().any(|counts| counts[*kind] > 0);
    let there: Vec<usize> = (0..Outcome::ALL.len()).filter(is_there).collect();
    let kinds = there.iter().map(|kind| {
        let outcome = Outcome::ALL[*kind];
        (outcome.words().to_owned(), ink(outcome))
    });
    let counts = steps.iter().map(|counts| there.iter().map(|kind| counts[*kind]).collect());
    (kinds.collect(), counts.collect())
}

pub(super) fn stacked(
    edges: &[f64],
    kinds: &[(String, Ink)],
    counts: &[Vec<u64>],
    from: &str,
    to: &str,
    text: impl Fn(f64) -> String,
) -> Numbers {
    let mut headings = vec![from.to_owned(), to.to_owned()];
    headings.extend(kinds.iter().map(|(name, _)| name.clone()));
    let rows =
        edges.windows(2).zip(counts).filter(|(_, counts)| counts.iter().any(|count| *count > 0));
    let rows = rows.map(|(ends, counts)| {
        let mut row = vec![text(ends[0]), text(ends[1])];
        row.extend(counts.iter().map(ToString::to_string));
        row
    });
    Numbers { headings, rows: rows.collect() }
}

/// Returns the latencies that the trace sums up, or else those of its records.
fn summaries(trace: &Trace) -> Vec<Summary> {
    if !trace.latencies.is_empty() {
        return trace.latencies.clone();
    }
    let mut kinds: Vec<_> =
        trace.records.iter().map(|record| (record.class, record.outcome)).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let summary = |(class, outcome)| {
        let of_kind = |record: &&Record| (record.class, record.outcome) == (class, outcome);
        let mut times: Vec<u64> =
            trace.records.iter().filter(of_kind).map(|record| record.latency_ns).collect();
        times.sort_unstable();
        // The smallest that at least so many of 1000 do not exceed.
        let at = |of_1000: usize| times[(times.len() * of_1000).div_ceil(1000).max(1) - 1];
        Summary {
            class,
            outcome,
            count: times.len() as u64,
            p50_ns: at(500),
            p99_ns: at(990),
            p999_ns: at(999),
            max_ns: at(1000),
            buckets: times.iter().map(|time| (*time, 1)).collect(),
        }
    };
    kinds.into_iter().map(summary).collect()
}

fn distribution(summaries: &[Summary], records: &[Record]) -> Chart {
    let step = |ns: u64| (float(ns.max(1)).log10() * PER_TEN).floor();
    let times = || summaries.iter().flat_map(|summary| &summary.buckets).map(|bucket| bucket.0);
    let low = step(times().min().unwrap_or(1));
    let high = step(times().max().unwrap_or(1)) + 1.0;
    let steps = cell((high - low) / 200.0, 200).clamp(1, 200);
    let mut by_step = vec![[0_u64; Outcome::ALL.len()]; steps];
    for summary in summaries {
        for (at_most, count) in &summary.buckets {
            let index = cell((step(*at_most) - low + 0.5) / self::count(steps), steps);
            let found = &mut by_step[index][place(summary.outcome)];
            *found = found.saturating_add(*count);
        }
    }
    let edges: Vec<f64> =
        (0..=steps).map(|index| 10.0_f64.powf((low + count(index)) / PER_TEN)).collect();
    let (kinds, counts) = present(&by_step);
    let table = stacked(&edges, &kinds, &counts, "longer than", "up to", float_ns);
    let plot = Plot::Columns(Columns {
        x_axis: "latency (logarithmic)".to_owned(),
        x_unit: Unit::Ns,
        is_log: true,
        y_axis: "faults".to_owned(),
        edges,
        kinds,
        counts,
    });
    let of_all = if summaries.iter().map(|summary| summary.count).fold(0, u64::saturating_add)
        == records.len() as u64
    {
        "of the faults of the trace"
    } else {
        "of all faults, also those that the trace has forgotten"
    };
    let note = [of_all, "from when the fault was read to when its page was in place"];
    Chart::new("latency", "How long faults took", &note, plot, table)
}

fn quantiles(summaries: &[Summary]) -> Chart {
    let label =
        |summary: &Summary| format!("{}, {}", summary.class.words(), summary.outcome.words());
    let marks = summaries.iter().map(|summary| {
        let text = format!("{} \u{b7} {}", ns(summary.p50_ns), ns(summary.p99_ns));
        Mark {
            high: float(summary.max_ns),
            tick: Some(float(summary.p99_ns)),
            ..Mark::at(label(summary), Role::Ours, float(summary.p50_ns), text)
        }
    });
    let marks = Rows {
        axis: "latency (logarithmic)".to_owned(),
        unit: Unit::Ns,
        line: "to the longest; mark: median",
        tick: "99 %",
        rows: marks.collect(),
        ..Rows::default()
    };
    let rows = summaries.iter().map(|summary| {
        let times = [summary.p50_ns, summary.p99_ns, summary.p999_ns, summary.max_ns].map(ns);
        let mut row = vec![label(summary), summary.count.to_string()];
        row.extend(times);
        row
    });
    let headings = ["faults", "how many", "half", "99 %", "99.9 %", "longest"];
    let note = "beside each row: the median, and what one in a hundred exceeds";
    let (title, table) = ("How long faults took, by what they were", Numbers::new(&headings, rows));
    Chart::new("quantiles", title, &[note], Plot::Rows(marks), table)
}

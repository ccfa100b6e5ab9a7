//! The charts of each kind of document: [`sections`].

mod bench;
mod faults;
mod image;

use std::iter;

use crate::chart::{Chapter, Chart, Section, Table as Numbers};
use crate::input::Document;
use crate::results::Table;
use crate::text::{count, float};

/// Returns a section for each document, in their order.
pub(crate) fn sections(documents: &[Document]) -> Vec<Section> {
    let section = |document: &Document| match document {
        Document::Bench(bench) => bench::section(bench),
        Document::Trace(trace) => faults::section(trace),
        Document::Image(map) => image::section(map),
    };
    documents.iter().map(section).collect()
}

/// Returns the charts of a document with one subject.
fn one_chapter(charts: Vec<Chart>) -> Vec<Chapter> {
    vec![Chapter { title: String::new(), charts }]
}

/// Returns a logarithmic scale: the least value above 0 takes a tenth of the bar, and the largest the whole.
fn log_shares(values: impl Iterator<Item = f64> + Clone) -> impl Fn(f64) -> f64 {
    let is_shown = |value: &f64| value.is_finite() && *value > 0.0;
    let (low, high) = values
        .filter(is_shown)
        .fold((f64::MAX, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
    let span = (high / low).ln();
    move |value: f64| match value {
        value if value <= 0.0 => 0.0,
        _ if span.is_finite() && span > 0.0 => 0.1 + 0.9 * (value / low).ln() / span,
        _ => 1.0,
    }
}

/// Kinds of bars: their classes and names.
type Kinds = [(&'static str, &'static str)];

/// Returns a table of stacked bars: a row for each two edges, with a count of each kind.
fn stacked(
    edges: &[f64],
    kinds: &Kinds,
    counts: &[Vec<u64>],
    (from, to): (&str, &str),
    text: fn(f64) -> String,
) -> Chart {
    let there: Vec<usize> =
        (0..kinds.len()).filter(|kind| counts.iter().any(|counts| counts[*kind] > 0)).collect();
    let total = |counts: &[u64]| counts.iter().copied().map(float).sum::<f64>();
    let most = counts.iter().map(|counts| total(counts)).fold(1.0, f64::max);
    let mut headings = vec![from, to];
    headings.extend(there.iter().map(|kind| kinds[*kind].1));
    let mut table =
        Numbers { scale: "share of the largest row", ..Numbers::new(&headings, iter::empty()) };
    for (ends, counts) in edges.windows(2).zip(counts).filter(|(_, counts)| total(counts) > 0.0) {
        let mut row = vec![text(ends[0]), text(ends[1])];
        row.extend(there.iter().map(|kind| counts[*kind].to_string()));
        table.rows.push(row);
        let part = |kind: &usize| (kinds[*kind].0, float(counts[*kind]) / most);
        let parts = there.iter().map(part).filter(|(_, share)| *share > 0.0).collect();
        table.bars.push(crate::chart::Bar { parts, limit: None });
    }
    let legend = there.iter().map(|kind| kinds[*kind]).collect();
    Chart { table, legend, ..Chart::default() }
}

/// Returns the ends of `steps` equal steps.
fn edges(steps: usize, (from, to): (f64, f64)) -> Vec<f64> {
    (0..=steps).map(|step| from + (to - from) * count(step) / count(steps)).collect()
}

/// Returns the title, or the id if it is empty.
fn heading(title: &str, id: &str) -> String {
    let heading = if title.is_empty() { id } else { title };
    heading.to_owned()
}

/// Returns the rows of a table.
fn rows_of<'a, T>(table: &Table, rows: &'a [T], id: fn(&T) -> &str) -> Vec<&'a T> {
    let is_of = |row: &&T| id(row).split_once('/').is_some_and(|(first, _)| first == table.id);
    rows.iter().filter(is_of).collect()
}

/// Returns the machine, and each source of other figures once.
fn foot<'a>(machine: String, title: &str, sources: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut sources: Vec<&str> = sources.collect();
    sources.sort_unstable();
    sources.dedup();
    iter::once(machine).chain(sources.iter().map(|source| format!("{title}: {source}"))).collect()
}

/// The outputs that show a column.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    Both,
    Page,
}

/// A heading, the outputs that show it, and the cell of a row.
type Column<T> = (&'static str, Where, fn(&T) -> Option<String>);

const PUBLISHED: &str = "published";

/// Returns all rows, in the columns that are not empty. Text always has the column of published times.
fn numbers<T>(is_text: bool, columns: &[Column<T>], rows: &[&T]) -> Numbers {
    let is_shown = |(heading, of, cell): &&Column<T>| {
        (!is_text || *of == Where::Both)
            && (rows.iter().any(|row| cell(row).is_some()) || (is_text && *heading == PUBLISHED))
    };
    let columns: Vec<_> = columns.iter().filter(is_shown).collect();
    let headings: Vec<&str> = columns.iter().map(|(heading, ..)| *heading).collect();
    let none = || if is_text { "-".to_owned() } else { none() };
    let cells =
        |row: &&T| columns.iter().map(|(.., cell)| cell(row).unwrap_or_else(none)).collect();
    Numbers::new(&headings, rows.iter().map(cells))
}

/// Returns the headings of a table, and its rows, for text.
fn cells<T>(
    table: &Table,
    columns: &[Column<T>],
    rows: &[T],
    id: fn(&T) -> &str,
) -> Vec<Vec<String>> {
    let Numbers { headings, rows, .. } = numbers(true, columns, &rows_of(table, rows, id));
    iter::once(headings).chain(rows).collect()
}

/// Returns a number unless it is 0, which stands for a field that the file lacks.
fn known(number: u64) -> Option<u64> {
    Some(number).filter(|number| *number != 0)
}

fn none() -> String {
    "\u{2013}".to_owned()
}

//! Which charts a document has: [`sections`].

mod faults;
mod image;
mod metadata;
mod tables;

use std::collections::BTreeMap;
use std::iter;

use crate::chart::{Numbers, Section};
use crate::input::Document;
use crate::results::Table;

/// Returns what is shown of some documents, in their order.
pub(crate) fn sections(documents: &[Document]) -> Vec<Section> {
    let mut sections: Vec<Section> = documents
        .iter()
        .flat_map(|document| match document {
            Document::Bench(bench) => {
                let metadata = bench.metadata.as_deref().map(metadata::section);
                iter::once(tables::section(bench)).chain(metadata).collect()
            }
            Document::Metadata(metadata) => vec![metadata::section(metadata)],
            Document::Trace(trace) => vec![faults::section(trace)],
            Document::Image(map) => vec![image::section(map)],
        })
        .collect();
    let mut number = 0;
    for chart in sections.iter_mut().flat_map(|section| &mut section.charts) {
        number += 1;
        chart.id = format!("{number:02}-{}", slug(&chart.id));
    }
    sections
}

/// Returns a name as part of an id, and of the name of a file.
fn slug(name: &str) -> String {
    let letters = name.chars().map(|letter| match letter {
        'a'..='z' | '0'..='9' => letter,
        'A'..='Z' => letter.to_ascii_lowercase(),
        _ => '-',
    });
    let slug: String = letters.take(40).collect();
    slug.trim_matches('-').to_owned()
}

/// Returns a heading, or what stands for it where there is none.
fn heading(title: &str, id: &str) -> String {
    let heading = if title.is_empty() { id } else { title };
    heading.to_owned()
}

/// Returns the tables with their rows, and a table for each first part of an id that none has.
fn tables<'a, T>(tables: &[Table], rows: &'a [T], id: fn(&T) -> &str) -> Vec<(Table, Vec<&'a T>)> {
    let mut found: Vec<(Table, Vec<&T>)> = Vec::new();
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    for table in tables {
        if !places.contains_key(table.id.as_str()) {
            places.insert(&table.id, found.len());
            found.push((table.clone(), Vec::new()));
        }
    }
    for row in rows {
        let id = id(row);
        let id = id.split_once('/').map_or(id, |(table, _)| table);
        let place = *places.entry(id).or_insert_with(|| {
            found.push((Table { id: id.to_owned(), ..Table::default() }, Vec::new()));
            found.len() - 1
        });
        found[place].1.push(row);
    }
    found.retain(|(_, rows)| !rows.is_empty());
    found
}

/// Returns what was measured on, and each source of other figures once, behind what these are.
fn foot<'a>(machine: String, what: &str, sources: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut sources: Vec<&str> = sources.collect();
    sources.sort_unstable();
    sources.dedup();
    iter::once(machine).chain(sources.iter().map(|source| format!("{what}: {source}"))).collect()
}

/// Where a column is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    Both,
    Text,
    Page,
}

/// A heading, where it is shown, and what a row has under it.
type Column<T> = (&'static str, Where, fn(&T) -> Option<String>);

const PUBLISHED: &str = "published";

/// Returns all rows, in the columns that any of them has something for. Text states as well that
/// nothing was published.
fn numbers<T>(place: Where, columns: &[Column<T>], rows: &[&T]) -> Numbers {
    let is_shown = |(heading, of, cell): &&Column<T>| {
        (*of == place || *of == Where::Both)
            && (rows.iter().any(|row| cell(row).is_some())
                || (place == Where::Text && *heading == PUBLISHED))
    };
    let columns: Vec<_> = columns.iter().filter(is_shown).collect();
    let headings: Vec<&str> = columns.iter().map(|(heading, ..)| *heading).collect();
    let none = || if place == Where::Text { "-".to_owned() } else { none() };
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
    let is_of = |row: &&T| id(row).split_once('/').is_some_and(|(first, _)| first == table.id);
    let rows: Vec<&T> = rows.iter().filter(is_of).collect();
    let Numbers { headings, rows } = numbers(Where::Text, columns, &rows);
    iter::once(headings).chain(rows).collect()
}

/// Returns a number unless it is 0: a file of another version may lack it.
fn known(number: u64) -> Option<u64> {
    Some(number).filter(|number| *number != 0)
}

fn none() -> String {
    "\u{2013}".to_owned()
}

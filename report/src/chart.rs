//! The parts of a report before they are written: a [`Section`] for each document, with [`Chart`]s by chapter.
//!
//! A bar chart is a table whose rows have a [`Bar`]. A map of faults is a [`Heat`] above its table.

use crate::results;

/// A document.
#[derive(Clone, Debug, Default)]
pub(crate) struct Section {
    pub(crate) title: String,
    pub(crate) note: String,
    /// Claims and their verdicts in words.
    pub(crate) summary: Table,
    pub(crate) chapters: Vec<Chapter>,
    /// Cases that were not measured, and why.
    pub(crate) skipped: Vec<results::Skipped>,
    /// The machine, and the sources of published figures.
    pub(crate) foot: Vec<String>,
}

/// Charts of one subject.
#[derive(Clone, Debug)]
pub(crate) struct Chapter {
    /// Empty where the document has one subject.
    pub(crate) title: String,
    pub(crate) charts: Vec<Chart>,
}

/// A table, and a map where bars do not do.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) note: String,
    pub(crate) picture: Option<Heat>,
    pub(crate) table: Table,
    /// A class of the style sheet for each kind of bar, and its name.
    pub(crate) legend: Vec<(&'static str, &'static str)>,
}

/// Rows of cells under headings.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    pub(crate) headings: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
    /// A bar for each row, or none at all.
    pub(crate) bars: Vec<Bar>,
    /// The meaning of the bars' length.
    pub(crate) scale: &'static str,
}

impl Table {
    pub(crate) fn new(headings: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Self {
        let headings = headings.iter().map(|heading| (*heading).to_owned());
        Self { headings: headings.collect(), rows: rows.collect(), ..Self::default() }
    }
}

/// A bar in a cell. Lengths are shares of the cell's width.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Bar {
    /// Classes of the style sheet, and lengths, one behind the other.
    pub(crate) parts: Vec<(&'static str, f64)>,
    /// The place of a border across the bar.
    pub(crate) limit: Option<f64>,
}

/// Counts by cells of time and address.
#[derive(Clone, Debug)]
pub(crate) struct Heat {
    pub(crate) from_ns: f64,
    pub(crate) to_ns: f64,
    pub(crate) len_bytes: f64,
    pub(crate) columns: usize,
    /// Row after row, the lowest address first.
    pub(crate) counts: Vec<u64>,
}

//! The parts of a report before they are written: a [`Section`] for each document, with [`Chart`]s by chapter.
//!
//! A bar chart is a table whose rows have a [`Bar`]. Lines and heat maps are a [`Picture`] above their table.

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

/// A table, and a picture where bars do not do.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) note: String,
    pub(crate) picture: Option<Picture>,
    pub(crate) table: Table,
    /// A class of the style sheet for each kind of bar or line, and its name.
    pub(crate) legend: Vec<(&'static str, String)>,
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

#[derive(Clone, Debug)]
pub(crate) enum Picture {
    Lines(Lines),
    Heat(Heat),
}

/// Lines over a logarithmic axis of lengths or counts.
#[derive(Clone, Debug)]
pub(crate) struct Lines {
    pub(crate) x_axis: &'static str,
    pub(crate) x_unit: Unit,
    pub(crate) y_axis: &'static str,
    pub(crate) y_unit: Unit,
    pub(crate) is_log: bool,
    pub(crate) series: Vec<Series>,
}

#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) role: Role,
    /// In ascending order of the first number. One point is a level over the whole axis.
    pub(crate) points: Vec<(f64, f64)>,
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

/// The unit of an axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Unit {
    #[default]
    Plain,
    Ns,
    Bytes,
}

impl Unit {
    /// Returns a point of an axis as text.
    pub(crate) fn text(self, value: f64) -> String {
        match self {
            Self::Plain if value == value.round() && value < 1e12 => format!("{value:.0}"),
            Self::Plain => crate::text::number(value),
            Self::Ns => crate::text::float_ns(value),
            Self::Bytes => crate::text::float_bytes(value),
        }
    }
}

/// The part that a row or a line has beside the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    Naive,
    Peer,
    Ours,
    Limit,
    Published,
}

impl From<results::Role> for Role {
    /// Variants of ours are shown as one of the other ways.
    fn from(role: results::Role) -> Self {
        match role {
            results::Role::Naive => Self::Naive,
            results::Role::Ours => Self::Ours,
            results::Role::Limit => Self::Limit,
            results::Role::Variant | results::Role::Peer => Self::Peer,
        }
    }
}

impl Role {
    /// Returns the role in words.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Peer => "other ways",
            Self::Ours => "uzone",
            Self::Limit => "limit",
            Self::Published => "published (another machine)",
        }
    }

    /// Returns the class of its bars and lines.
    pub(crate) const fn class(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Peer => "peer",
            Self::Ours => "ours",
            Self::Limit => "limit",
            Self::Published => "published",
        }
    }
}

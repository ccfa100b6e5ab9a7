//! What is shown, before it is drawn: a [`Section`] for each document, with its [`Chart`]s.
//!
//! A chart has a table with the numbers that it draws, and so loses nothing where it is not seen.

use crate::canvas::{Fill, Ink, Shape};
use crate::results;

/// What is shown of one document.
#[derive(Clone, Debug)]
pub(crate) struct Section {
    pub(crate) title: String,
    pub(crate) note: String,
    pub(crate) charts: Vec<Chart>,
    /// What was not measured, and why.
    pub(crate) skipped: Vec<results::Skipped>,
    /// What was measured on, and whom published figures are of.
    pub(crate) foot: Vec<String>,
}

/// A picture and its numbers.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    /// Lower case letters, digits and hyphens; no other chart of the report has it.
    pub(crate) id: String,
    pub(crate) title: String,
    pub(crate) note: String,
    pub(crate) plot: Plot,
    pub(crate) table: Numbers,
}

impl Chart {
    /// A chart with some sentences.
    pub(crate) fn new(
        id: &str,
        title: impl Into<String>,
        note: &[&str],
        plot: Plot,
        table: Numbers,
    ) -> Self {
        let note = crate::text::sentences(note);
        Self { id: id.to_owned(), title: title.into(), note, plot, table }
    }
}

/// The numbers under a picture.
#[derive(Clone, Debug, Default)]
pub(crate) struct Numbers {
    pub(crate) headings: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl Numbers {
    pub(crate) fn new(headings: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Self {
        let headings = headings.iter().map(|heading| (*heading).to_owned());
        Self { headings: headings.collect(), rows: rows.collect() }
    }
}

/// The kinds of picture.
#[derive(Clone, Debug)]
pub(crate) enum Plot {
    Rows(Rows),
    Lines(Lines),
    Columns(Columns),
    Heat(Heat),
}

/// A mark a row: a bar from 0, or a point on a logarithmic axis and how far it spreads.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows {
    pub(crate) axis: String,
    pub(crate) unit: Unit,
    pub(crate) has_bars: bool,
    /// What the line of a point, and the tick on it, are.
    pub(crate) line: &'static str,
    pub(crate) tick: &'static str,
    pub(crate) rows: Vec<Mark>,
}

#[derive(Clone, Debug)]
pub(crate) struct Mark {
    pub(crate) label: String,
    pub(crate) role: Role,
    pub(crate) low: f64,
    pub(crate) value: f64,
    pub(crate) high: f64,
    pub(crate) tick: Option<f64>,
    /// Where the row's limit is; bars alone have one.
    pub(crate) limit: Option<f64>,
    pub(crate) published: Option<f64>,
    /// What stands beside the mark.
    pub(crate) text: String,
}

impl Mark {
    /// A mark at one value.
    pub(crate) fn at(label: String, role: Role, value: f64, text: String) -> Self {
        let (low, high) = (value, value);
        Self { label, role, low, value, high, tick: None, limit: None, published: None, text }
    }
}

/// Lines over a logarithmic axis of lengths or counts.
#[derive(Clone, Debug)]
pub(crate) struct Lines {
    pub(crate) x_axis: String,
    pub(crate) x_unit: Unit,
    pub(crate) y_axis: String,
    pub(crate) y_unit: Unit,
    pub(crate) is_log: bool,
    pub(crate) series: Vec<Series>,
}

#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) role: Role,
    /// In ascending order of the first number. One point is a level: it holds for all.
    pub(crate) points: Vec<(f64, f64)>,
}

/// Stacked columns: how many of each kind in each step of an axis.
#[derive(Clone, Debug)]
pub(crate) struct Columns {
    pub(crate) x_axis: String,
    pub(crate) x_unit: Unit,
    pub(crate) is_log: bool,
    pub(crate) y_axis: String,
    /// Where the columns begin, and where the last one ends.
    pub(crate) edges: Vec<f64>,
    pub(crate) kinds: Vec<(String, Ink)>,
    /// For each column, a count for each kind.
    pub(crate) counts: Vec<Vec<u64>>,
}

/// How many in each cell of address and time.
#[derive(Clone, Debug)]
pub(crate) struct Heat {
    pub(crate) from_ns: f64,
    pub(crate) to_ns: f64,
    pub(crate) len_bytes: f64,
    pub(crate) columns: usize,
    pub(crate) rows: usize,
    /// Row after row, the lowest address first.
    pub(crate) counts: Vec<u64>,
}

/// What an axis counts in.
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

/// What a row or a line is beside the others, and so how it is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    Naive,
    Peer,
    Ours,
    Limit,
    Published,
}

impl From<results::Role> for Role {
    /// Variants of ours are drawn as one of the other ways.
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

    /// Returns how areas of the role are filled.
    pub(crate) const fn ink(self) -> Ink {
        match self {
            Self::Naive => Ink { fill: Fill::Diagonal, colour: "orange" },
            Self::Peer => Ink { fill: Fill::Dots, colour: "grey" },
            Self::Ours => Ink { fill: Fill::Solid, colour: "blue" },
            Self::Limit => Ink { fill: Fill::Cross, colour: "ink" },
            Self::Published => Ink { fill: Fill::Empty, colour: "pink" },
        }
    }

    /// Returns how points of the role look.
    pub(crate) const fn shape(self) -> Shape {
        match self {
            Self::Naive => Shape::Square,
            Self::Peer => Shape::Ring,
            Self::Ours => Shape::Disc,
            Self::Limit => Shape::Triangle,
            Self::Published => Shape::Diamond,
        }
    }

    /// Returns how lines of the role look: thickness and dashes.
    pub(crate) const fn stroke(self) -> (f64, &'static str) {
        match self {
            Self::Naive => (2.0, "2 3"),
            Self::Peer => (1.2, ""),
            Self::Ours => (3.0, ""),
            Self::Limit => (2.0, "9 4"),
            Self::Published => (2.0, "7 3 2 3"),
        }
    }
}

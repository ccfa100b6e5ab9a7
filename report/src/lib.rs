//! Charts of measurements and traces: one HTML page ([`html()`]) or SVG files ([`svgs`]); and their
//! numbers as tables of text ([`terminal()`]).
//!
//! ```
//! use std::path::Path;
//!
//! let text = br#"{"schema":"uzone.bench/1","benchmark":"pin","results":[
//!     {"id":"pin-2m/naive","name":"naive","median_ns":73800000},
//!     {"id":"pin-2m/ours","name":"ours","median_ns":106000,"ratio_naive":705.0}]}"#;
//! let documents = uzone_report::parse(Path::new("pin.json"), text)?;
//! let page = uzone_report::html(&documents);
//! assert!(page.contains("<svg") && page.contains("705") && !page.contains("<script"));
//! # Ok::<(), uzone_report::ReportError>(())
//! ```
//!
//! The input is what `uzone bench ... --json` prints, and [`Trace`], the faults of a lazily mapped
//! memory. It is not trusted: nothing of it becomes markup or a command to a terminal, lengths are
//! bounded, and what is not understood is refused with what would help.
//!
//! | file | mechanism |
//! |---|---|
//! | `input`, `object` | reading documents |
//! | `results`, `trace`, `machine`, `image_map` | what they hold, as it is written and read |
//! | `figures` | which charts a document has |
//! | `chart` | what is drawn, and its numbers |
//! | `draw` | the layout of each kind of chart |
//! | `canvas` | SVG, and where its texts are |
//! | `html`, `terminal` | charts and tables on a page; tables as text |
//! | `write` | files that are there as a whole or not at all |
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod canvas;
mod chart;
mod draw;
mod error;
mod figures;
mod html;
mod image_map;
mod input;
mod machine;
mod object;
pub mod results;
mod terminal;
mod text;
mod trace;
mod write;

pub use error::ReportError;
pub use image_map::{ImageMap, ImagePart};
pub use input::{Document, MOST_BYTES, parse, read};
pub use machine::Machine;
pub use results::{Bench, Metadata};
pub use text::{float, human_duration, nanoseconds, number, plain};
pub use trace::{Class, Outcome, Record, Summary, TRACE_SCHEMA, Trace};
pub use write::{check_replace, make_directory, replace};

/// Returns all charts as one HTML page that needs nothing else.
///
/// Each chart is drawn for a wide page and for a phone, and its numbers stand in a table below it.
#[must_use]
pub fn html(documents: &[Document]) -> String {
    html::page(&figures::sections(documents))
}

/// Returns the name and the text of an SVG file for each chart, in the order of the page. Names
/// differ; they have lower case letters, digits, hyphens and `.svg`.
#[must_use]
pub fn svgs(documents: &[Document]) -> Vec<(String, String)> {
    let sections = figures::sections(documents);
    let charts = sections.iter().flat_map(|section| &section.charts);
    charts
        .map(|chart| {
            (format!("{}.svg", chart.id), draw::draw(chart, draw::WIDE).alone(&chart.title))
        })
        .collect()
}

/// Returns the numbers of all charts as tables of text.
#[must_use]
pub fn terminal(documents: &[Document]) -> String {
    terminal::text(&figures::sections(documents))
}

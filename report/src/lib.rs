//! Charts of measurements and traces: one HTML page ([`html()`]), or their numbers as tables of text
//! ([`terminal()`]).
//!
//! ```
//! use std::path::Path;
//!
//! let text = br#"{"schema":"uzone.bench/1","benchmark":"pin","tables":[{"id":"pin-2m"}],"results":[
//!     {"id":"pin-2m/naive","name":"naive","median_ns":73800000},
//!     {"id":"pin-2m/ours","name":"ours","median_ns":106000,"ratio_naive":705.0}]}"#;
//! let documents = uzone_report::parse(Path::new("pin.json"), text)?;
//! let page = uzone_report::html(&documents);
//! assert!(page.contains("class=\"bar\"") && page.contains("705") && !page.contains("<script"));
//! # Ok::<(), uzone_report::ReportError>(())
//! ```
//!
//! The input is the output of `uzone-bench ... --json`, or a [`Trace`] of the faults of lazily mapped memory. It is not
//! trusted: no part of it becomes markup or a command to a terminal, lengths are bounded, and an error names the fix.
//!
//! | file | mechanism |
//! |---|---|
//! | `input` | reading documents |
//! | `results`, `trace`, `machine`, `image_map` | the documents, as they are written and read |
//! | `figures` | the charts of each kind of document |
//! | `chart` | tables with bars, maps |
//! | `svg` | maps as pictures |
//! | `html`, `terminal` | a page; tables as text |
//! | `write` | atomic replacement of files |
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod chart;
mod error;
mod figures;
mod html;
mod image_map;
mod input;
mod machine;
pub mod results;
mod svg;
mod terminal;
mod text;
mod trace;
mod write;

pub use error::ReportError;
pub use image_map::{ImageMap, ImagePart};
pub use input::{Document, MOST_BYTES, parse, read};
pub use machine::Machine;
pub use results::Bench;
pub use text::{columns, float, grouped, human_duration, nanoseconds, number, plain};
pub use trace::{Class, Outcome, Record, Summary, TRACE_SCHEMA, Trace};
pub use write::{check_replace, make_directory, replace};

/// Returns all charts as one HTML page that needs nothing else.
#[must_use]
pub fn html(documents: &[Document]) -> String {
    html::page(&figures::sections(documents))
}

/// Returns the numbers of all charts as tables of text.
#[must_use]
pub fn terminal(documents: &[Document]) -> String {
    terminal::text(&figures::sections(documents))
}

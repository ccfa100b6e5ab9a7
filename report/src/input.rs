//! Reading what a report is made of ([`read`]).
//!
//! An input holds one JSON object after the other, each with its `schema`; so the outputs of several
//! commands can be kept in one file. It is read as a whole, up to [`MOST_BYTES`].

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::ReportError;
use crate::image_map::ImageMap;
use crate::object::{Misfit, from_json, object};
use crate::results::{BENCH_SCHEMA, Bench, METADATA_SCHEMA, Metadata};
use crate::trace::{TRACE_SCHEMA, Trace};

/// How long an input may be.
pub const MOST_BYTES: u64 = 256 << 20;

/// What reports are made of.
pub(crate) const SCHEMAS: [&str; 4] = [BENCH_SCHEMA, METADATA_SCHEMA, "uzone.demo/1", TRACE_SCHEMA];

/// One object of an input.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Document {
    /// What a benchmark measured.
    Bench(Bench),
    /// What descriptors take.
    Metadata(Metadata),
    /// The faults of a mapping.
    Trace(Trace),
    /// Where the pages of a packed image are. It is made by the program, and is in no input.
    Image(ImageMap),
}

#[derive(Deserialize)]
struct Tagged {
    schema: Option<String>,
}

#[derive(Deserialize)]
struct Demo {
    #[serde(deserialize_with = "object")]
    bench: Bench,
}

/// Reads the objects of a file, or of standard input if its name is `-`.
///
/// # Errors
/// [`ReportError`] if it cannot be read, is too long, or holds something else.
pub fn read(path: &Path) -> Result<Vec<Document>, ReportError> {
    let mut text = Vec::new();
    let failed = |cause| ReportError::Read { path: path.to_owned(), cause };
    let mut take = |from: &mut dyn Read| from.take(MOST_BYTES + 1).read_to_end(&mut text);
    if path == Path::new("-") {
        take(&mut std::io::stdin().lock()).map_err(failed)?;
        return parse(Path::new("standard input"), &text);
    }
    take(&mut File::open(path).map_err(failed)?).map_err(failed)?;
    parse(path, &text)
}

/// Takes the objects of a text; `path` is what errors call it.
///
/// # Errors
/// [`ReportError`] if it is too long, or holds something else.
pub fn parse(path: &Path, text: &[u8]) -> Result<Vec<Document>, ReportError> {
    let path = || path.to_owned();
    if text.len() as u64 > MOST_BYTES {
        return Err(ReportError::TooLong { path: path() });
    }
    let json = |cause| ReportError::Json { path: path(), cause };
    let mut documents = Vec::new();
    for object in serde_json::Deserializer::from_slice(text).into_iter::<&RawValue>() {
        let object = object.map_err(json)?.get();
        let schema = match from_json(object) {
            Ok(Tagged { schema: Some(schema) }) => schema,
            Ok(Tagged { schema: None }) => return Err(ReportError::NoSchema { path: path() }),
            Err(Misfit { field, cause }) => {
                return Err(ReportError::Tag { path: path(), field, cause });
            }
        };
        let Some(schema) = SCHEMAS.into_iter().find(|known| *known == schema) else {
            return Err(ReportError::Schema { path: path(), schema });
        };
        let document = match schema {
            BENCH_SCHEMA => from_json(object).map(Document::Bench),
            METADATA_SCHEMA => from_json(object).map(Document::Metadata),
            "uzone.demo/1" => from_json(object).map(|Demo { bench }| Document::Bench(bench)),
            _ => from_json(object).map(Document::Trace),
        };
        documents.push(document.map_err(|Misfit { field, cause }| ReportError::Shape {
            path: path(),
            schema,
            field,
            cause,
        })?);
    }
    if documents.is_empty() {
        return Err(ReportError::Empty { path: path() });
    }
    Ok(documents)
}

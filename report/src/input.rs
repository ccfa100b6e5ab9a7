//! The inputs of a report ([`read`]).
//!
//! An input holds one JSON object after the other, each with its `schema`, so that one file can hold the outputs of
//! several commands. It is read as a whole, up to [`MOST_BYTES`].

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::ReportError;
use crate::image_map::ImageMap;
use crate::results::{BENCH_SCHEMA, Bench};
use crate::text::bytes;
use crate::trace::{TRACE_SCHEMA, Trace};

/// The largest length of an input.
pub const MOST_BYTES: u64 = 256 << 20;

/// The schema of `uzone demo --json`.
const DEMO_SCHEMA: &str = "uzone.demo/1";

/// One object of an input.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Document {
    /// The results of a benchmark.
    Bench(Bench),
    /// The faults of a mapping.
    Trace(Trace),
    /// The map of a packed image. The program makes it; no input holds one.
    Image(ImageMap),
}

#[derive(Deserialize)]
struct Tagged {
    schema: Option<String>,
}

#[derive(Deserialize)]
struct Demo {
    bench: Bench,
}

/// Reads the objects of a file, or of standard input if its name is `-`.
///
/// # Errors
/// [`ReportError`] if it cannot be read, is too long, or is no such document.
pub fn read(path: &Path) -> Result<Vec<Document>, ReportError> {
    let mut text = Vec::new();
    let failed = |cause| ReportError::unread(path, cause);
    let mut take = |from: &mut dyn Read| from.take(MOST_BYTES + 1).read_to_end(&mut text);
    if path == Path::new("-") {
        take(&mut std::io::stdin().lock()).map_err(failed)?;
        return parse(Path::new("standard input"), &text);
    }
    take(&mut File::open(path).map_err(failed)?).map_err(failed)?;
    parse(path, &text)
}

/// The accepted inputs.
const WANTED: &str = "give the output of `uzone-bench ... --json`, or a trace";

/// Reads the objects of a text; errors name it `path`.
///
/// # Errors
/// [`ReportError`] if it is too long, or is no such document.
pub fn parse(path: &Path, text: &[u8]) -> Result<Vec<Document>, ReportError> {
    let invalid = |problem: &str| ReportError::invalid(path, problem);
    if text.len() as u64 > MOST_BYTES {
        let most = bytes(MOST_BYTES);
        let help = "record a shorter trace, or report fewer results at a time";
        return Err(invalid(&format!("is longer than {most}: {help}")));
    }
    let json = |cause| invalid(&format!("is not JSON or was cut short: {WANTED}")).because(cause);
    let mut documents = Vec::new();
    for object in serde_json::Deserializer::from_slice(text).into_iter::<&RawValue>() {
        let object = object.map_err(json)?.get();
        let Tagged { schema } = serde_json::from_str(object).map_err(|cause| {
            invalid(&format!("is no document of uzone: {cause}: {WANTED}")).because(cause)
        })?;
        let Some(schema) = schema else {
            return Err(invalid(&format!("holds JSON without a \"schema\": {WANTED}")));
        };
        let document = match &*schema {
            BENCH_SCHEMA => serde_json::from_str(object).map(Document::Bench),
            DEMO_SCHEMA => {
                serde_json::from_str(object).map(|Demo { bench }| Document::Bench(bench))
            }
            TRACE_SCHEMA => serde_json::from_str(object).map(Document::Trace),
            _ => {
                let known = [BENCH_SCHEMA, DEMO_SCHEMA, TRACE_SCHEMA].join(", ");
                return Err(invalid(&format!(
                    "is {schema:?}, and reports are made of {known}: measure again with this version of uzone"
                )));
            }
        };
        documents.push(document.map_err(|cause| {
            let help = "run the command that wrote it again";
            let text = format!("is marked as {schema} and does not match it: {cause}: {help}");
            invalid(&text).because(cause)
        })?);
    }
    if documents.is_empty() {
        return Err(invalid("is empty: run the command that wrote it again, with --json"));
    }
    Ok(documents)
}

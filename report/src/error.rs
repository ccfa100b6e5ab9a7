//! What can be wrong with an input or an output, and what helps.

use std::io;
use std::path::PathBuf;

use uzone_pages::ErrorKind;

use crate::input::MOST_BYTES;
use crate::text::bytes;

/// A report that could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// The input could not be read.
    #[error("cannot read {}: {cause}", path.display())]
    Read {
        /// The input.
        path: PathBuf,
        /// Why.
        #[source]
        cause: io::Error,
    },
    /// The input is longer than is read.
    #[error(
        "{} is longer than {}: record a shorter trace, or report fewer results at a time",
        path.display(),
        bytes(MOST_BYTES)
    )]
    TooLong {
        /// The input.
        path: PathBuf,
    },
    /// There is nothing in the input.
    #[error("{} is empty: run the command again that wrote it, with --json", path.display())]
    Empty {
        /// The input.
        path: PathBuf,
    },
    /// The input is no JSON, or it is cut off.
    #[error(
        "{} is not JSON or was cut short: give what `uzone bench ... --json` printed, or a trace",
        path.display()
    )]
    Json {
        /// The input.
        path: PathBuf,
        /// Where.
        #[source]
        cause: serde_json::Error,
    },
    /// The input does not name its schema.
    #[error(
        "{} holds JSON without a \"schema\": give what `uzone bench ... --json` printed, or a trace",
        path.display()
    )]
    NoSchema {
        /// The input.
        path: PathBuf,
    },
    /// The input is something else, or of another version.
    #[error(
        "{} is {schema:?}, and reports are made of {}: measure again with this version of uzone",
        path.display(),
        crate::input::SCHEMAS.join(", ")
    )]
    Schema {
        /// The input.
        path: PathBuf,
        /// The schema that it names.
        schema: String,
    },
    /// The input is no object, or its `schema` is not a string.
    #[error(
        "{} is not what uzone writes: {}: give what `uzone bench ... --json` printed, or a trace",
        path.display(),
        misfit(field, cause)
    )]
    Tag {
        /// The input.
        path: PathBuf,
        /// The field that does not fit: empty if it is the input itself.
        field: String,
        /// What is wrong with it. The message has it, but not its line and column, which count from the
        /// start of one object of the input.
        cause: serde_json::Error,
    },
    /// The input does not keep to its schema.
    #[error(
        "{} is marked as {schema} and does not keep to that: {}: run the command again that wrote it",
        path.display(),
        misfit(field, cause)
    )]
    Shape {
        /// The input.
        path: PathBuf,
        /// The schema that it names.
        schema: &'static str,
        /// The field that does not fit, such as `results[3].median_ns`: empty if it is the document
        /// itself.
        field: String,
        /// What is wrong with it. The message has it, but not its line and column, which count from the
        /// start of one object of the input.
        cause: serde_json::Error,
    },
    /// The output could not be written. What was there before is still there.
    #[error("cannot {step} {}: {}", path.display(), fix(cause))]
    Write {
        /// The file.
        path: PathBuf,
        /// What was about to be done with it.
        step: &'static str,
        /// Why not.
        #[source]
        cause: io::Error,
    },
    /// The output is there and is not a file.
    #[error("cannot replace {}: it is not a regular file; name another one", path.display())]
    NotAFile {
        /// The output.
        path: PathBuf,
    },
}

impl ReportError {
    /// Returns what kind of error this is; [`ErrorKind::Other`] where its cause determines that.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Read { .. } => ErrorKind::Other,
            Self::NotAFile { .. } => ErrorKind::InvalidInput,
            Self::Write { cause, .. } if cause.kind() == io::ErrorKind::PermissionDenied => {
                ErrorKind::PermissionDenied
            }
            // That an output's directory is not there does not mean that an input is missing.
            Self::Write { .. } => ErrorKind::Io,
            _ => ErrorKind::InvalidData,
        }
    }
}

/// Returns what is wrong with which field.
fn misfit(field: &str, cause: &serde_json::Error) -> String {
    let text = cause.to_string();
    let place = format!(" at line {} column {}", cause.line(), cause.column());
    let text = text.strip_suffix(&place).unwrap_or(&text);
    // Keys of the input are a part of the field.
    let field = field.escape_debug();
    if field.clone().next().is_none() { text.to_owned() } else { format!("`{field}`: {text}") }
}

/// Returns what helps.
fn fix(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => "make its directory first",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "name a directory that may be written to"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make room there, or name another file system"
        }
        _ => "name another place",
    }
}

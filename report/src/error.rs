//! What can be wrong with an input or an output, and what helps: [`ReportError`].

use std::error::Error;
use std::io;
use std::path::Path;

use uzone_pages::ErrorKind;

/// A report that could not be made. Its text has the file, and what helps.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct ReportError {
    kind: ErrorKind,
    text: String,
    #[source]
    cause: Option<Box<dyn Error + Send + Sync>>,
}

impl ReportError {
    /// Returns what kind of error this is; [`ErrorKind::Other`] where its cause determines that.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The input could not be read.
    pub(crate) fn unread(path: &Path, cause: io::Error) -> Self {
        let text = format!("cannot read {}: {cause}", path.display());
        Self { kind: ErrorKind::Other, text, cause: Some(cause.into()) }
    }

    /// The input is not what reports are made of: `what` it is, and what helps.
    pub(crate) fn invalid(path: &Path, what: &str) -> Self {
        let text = format!("{} {what}", path.display());
        Self { kind: ErrorKind::InvalidData, text, cause: None }
    }

    /// The same, and why.
    pub(crate) fn because(self, cause: serde_json::Error) -> Self {
        Self { cause: Some(cause.into()), ..self }
    }

    /// The output could not be written: a `step` on the way to that. What was there before is still there.
    #[must_use]
    pub fn write(path: &Path, step: &str, cause: io::Error) -> Self {
        let kind = match cause.kind() {
            // It is something that no file can take the place of, which no system call reports.
            io::ErrorKind::InvalidInput if cause.raw_os_error().is_none() => {
                let text = format!("cannot write {}: {cause}; name another one", path.display());
                return Self { kind: ErrorKind::InvalidInput, text, cause: None };
            }
            io::ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
            // That an output's directory is not there does not mean that an input is missing.
            _ => ErrorKind::Io,
        };
        let text = format!("cannot {step} {}: {}", path.display(), fix(&cause));
        Self { kind, text, cause: Some(cause.into()) }
    }
}

/// Returns what is wrong with which field of an input: none, if it is the input itself. The text of the cause is
/// without its line and column, which count from the start of one object of the input.
pub(crate) fn misfit(field: &str, cause: &serde_json::Error) -> String {
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

//! Errors of inputs and outputs: [`ReportError`].

use std::error::Error;
use std::io;
use std::path::Path;

use uzone_pages::ErrorKind;

/// A report that could not be made. Its text names the file and the fix.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct ReportError {
    kind: ErrorKind,
    text: String,
    #[source]
    cause: Option<Box<dyn Error + Send + Sync>>,
}

impl ReportError {
    /// Returns the kind of the error; [`ErrorKind::Other`] where its cause determines the kind.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The input could not be read.
    pub(crate) fn unread(path: &Path, cause: io::Error) -> Self {
        let text = format!("cannot read {}: {cause}", path.display());
        Self { kind: ErrorKind::Other, text, cause: Some(cause.into()) }
    }

    /// The input is no document of a report: the problem, and the fix.
    pub(crate) fn invalid(path: &Path, problem: &str) -> Self {
        let text = format!("{} {problem}", path.display());
        Self { kind: ErrorKind::InvalidData, text, cause: None }
    }

    /// Adds the cause.
    pub(crate) fn because(self, cause: serde_json::Error) -> Self {
        Self { cause: Some(cause.into()), ..self }
    }

    /// A `step` of writing the output failed. A file that existed before is unchanged.
    pub(crate) fn write(path: &Path, step: &str, cause: io::Error) -> Self {
        let kind = match cause.kind() {
            // The output is a directory or a socket: an error of ours, without an errno.
            io::ErrorKind::InvalidInput if cause.raw_os_error().is_none() => {
                let text = format!("cannot write {}: {cause}; name another one", path.display());
                return Self { kind: ErrorKind::InvalidInput, text, cause: None };
            }
            io::ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
            // A missing directory of an output is no missing input.
            _ => ErrorKind::Io,
        };
        let text = format!("cannot {step} {}: {}", path.display(), fix(&cause));
        Self { kind, text, cause: Some(cause.into()) }
    }
}

/// Returns the fix.
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

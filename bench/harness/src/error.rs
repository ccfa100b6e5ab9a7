//! A benchmark that could not be run: [`BenchError`].

use std::error::Error;
use std::io;
use std::path::Path;

use uzone_os::uffd::UffdError;
use uzone_os::{AccessError, MapError, Mapping, MappingError, Rejected, SysError};
use uzone_pages::{ByteLen, ErrorKind, Pfn};
use uzone_zone::{BindError, BindFailure, PinError, PoolError, WriteError};

/// The result of the functions of this package.
pub type Result<T = (), E = BenchError> = std::result::Result<T, E>;

/// A benchmark that could not be run. Its text has the values and the fix.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct BenchError {
    kind: ErrorKind,
    is_of_this_host: bool,
    text: String,
    #[source]
    cause: Option<Box<dyn Error + Send + Sync>>,
}

impl BenchError {
    /// Returns the kind of the error; [`ErrorKind::Other`] where its cause determines the kind.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns whether this host lacks something that a benchmark needs. Otherwise an argument is not valid, or a row
    /// found something wrong.
    #[must_use]
    pub fn is_of_this_host(&self) -> bool {
        self.is_of_this_host
    }

    /// No table has an id that was asked for.
    #[must_use]
    pub fn no_table(asked: &[String]) -> Self {
        let asked = asked.join(",");
        Self::not_valid(format!(
            "no table begins with {asked}: leave --table out to see all tables"
        ))
    }

    /// An argument is not valid.
    pub fn not_valid(text: String) -> Self {
        Self { kind: ErrorKind::InvalidInput, is_of_this_host: false, text, cause: None }
    }

    /// The size is no multiple of the largest folio.
    pub fn size(size: ByteLen) -> Self {
        Self::not_valid(format!(
            "{size} cannot be measured: a size is a multiple of 1 GiB, the largest folio, such as 1G"
        ))
    }

    /// No image can be made of this size.
    pub fn image_size(size: ByteLen) -> Self {
        Self::not_valid(format!(
            "{size} cannot be measured: an image is a multiple of 2 MiB, at least 4M, such as 1G"
        ))
    }

    /// This host lacks something.
    pub fn host(kind: ErrorKind, text: String) -> Self {
        Self { kind, is_of_this_host: true, text, cause: None }
    }

    /// The system refused to start the threads of a row.
    pub fn threads(threads: usize) -> Self {
        let text = format!(
            "cannot start {threads} threads: ask for fewer with --threads, or raise `ulimit -u`"
        );
        Self::host(ErrorKind::OutOfMemory, text)
    }

    /// A library or the system refused an action, which is named by a verb.
    pub fn failed(
        action: &str,
        is_of_this_host: bool,
        cause: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        let cause = cause.into();
        let text = format!("cannot {action}: {cause}");
        Self { kind: ErrorKind::Other, is_of_this_host, text, cause: Some(cause) }
    }

    /// The file to map could not be made.
    pub fn no_file(size: ByteLen, directory: &Path, cause: io::Error) -> Self {
        let text = format!(
            "cannot make a file of {size} in {}: free space there, or name another directory with --dir",
            directory.display()
        );
        Self { text, ..Self::failed("make a file", true, cause) }
    }

    /// The handler of a row, which the others are compared with, got no answer from the kernel.
    pub fn handler(row: &str, cause: io::Error) -> Self {
        let text = format!("the handler of the row {row} failed: {cause}");
        Self { text, ..Self::failed("answer a fault", false, cause) }
    }

    /// A row found something wrong. A defect of uzone, or of its rival.
    fn of_row(row: &str, defect: &str) -> Self {
        let text = format!("the row {row} {defect}");
        Self { kind: ErrorKind::Other, is_of_this_host: false, text, cause: None }
    }

    /// A row left a wrong byte at `offset` of the extent.
    pub fn wrong_byte(row: &str, offset: u64) -> Self {
        Self::of_row(row, &format!("left a wrong byte at {offset:#x}"))
    }

    /// A row wrote a descriptor that differs from the slow path.
    pub fn wrong_page(row: &str, pfn: Pfn) -> Self {
        Self::of_row(row, &format!("wrote a wrong descriptor for page {pfn}"))
    }
}

/// The action that a library's error ends, and whether this host lacks something that it needs.
macro_rules! failures {
    ($($error:ty: $action:literal, $is_of_this_host:literal;)*) => {$(
        impl From<$error> for BenchError {
            fn from(error: $error) -> Self {
                Self::failed($action, $is_of_this_host, error)
            }
        }
    )*};
}

failures! {
    BindError: "reserve the region to describe", true;
    BindFailure: "bind", false;
    PinError: "hold the pages of the region", false;
    MapError: "map memory", true;
    MappingError: "use mapped memory", true;
    SysError: "measure the memory of this process", true;
    io::Error: "use a file or a socket", true;
    uzone_fault::MapError: "map memory lazily", true;
    uzone_fault::LazyError: "use lazily mapped memory", false;
    UffdError: "open a userfaultfd", true;
    Rejected<Mapping, UffdError>: "register memory with a userfaultfd", true;
    AccessError: "reach mapped memory", false;
    PoolError: "take a folio of a pool", false;
    uzone_snapshot::SnapshotError: "pack or read an image", false;
}

impl From<WriteError> for BenchError {
    fn from(error: WriteError) -> Self {
        let is_of_this_host = matches!(
            error,
            WriteError::TooLittleMemory { .. }
                | WriteError::Thread(_)
                | WriteError::HugePool { .. }
                | WriteError::NoHugePages { .. }
                | WriteError::TooFewHugePages { .. }
                | WriteError::Node { .. }
                | WriteError::Populate(_)
                | WriteError::Sys(_)
        );
        let action = if is_of_this_host {
            "make a region present"
        } else {
            "clear or copy the memory of a region"
        };
        Self::failed(action, is_of_this_host, error)
    }
}

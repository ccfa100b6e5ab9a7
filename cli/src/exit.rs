//! Exit codes, and errors with an exit code: [`Exit`], [`Failure`].
//!
//! The numbers come from sysexits.h where it has one. A script can choose the next step without reading the message: try
//! again, ask the administrator, or look at the data.

use std::error::Error;
use std::fmt::Write as _;
use std::io;
use std::iter;
use std::process::{ExitCode, ExitStatus};

use serde::Serialize;
use uzone_harness::BenchError;
use uzone_os::{MapError, MappingError, SysError};
use uzone_pages::{AddrError, ErrorKind};
use uzone_report::ReportError;
use uzone_server::ServeError;
use uzone_snapshot::SnapshotError;
use uzone_stream::StreamError;
use uzone_zone::BindError;

/// The exit code of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// All is well.
    Ok = 0,
    /// The command did its work, and its check found a problem.
    No = 1,
    /// The arguments are not valid.
    Usage = 2,
    /// The input is not valid (`EX_DATAERR`).
    Data = 65,
    /// The input is missing (`EX_NOINPUT`).
    Input = 66,
    /// The kernel lacks a feature (`EX_UNAVAILABLE`).
    Feature = 69,
    /// The system refused (`EX_OSERR`).
    Os = 71,
    /// Reading or writing failed (`EX_IOERR`).
    Io = 74,
    /// The next try may succeed (`EX_TEMPFAIL`).
    Again = 75,
    /// The user lacks a permission (`EX_NOPERM`).
    Permission = 77,
    /// The host or the command is not set up for it (`EX_CONFIG`).
    Config = 78,
}

/// All codes in ascending order, with their meaning in the help.
const MEANINGS: [(Exit, &str); 11] = [
    (Exit::Ok, "ok"),
    (Exit::No, "the check found a problem"),
    (Exit::Usage, "wrong usage"),
    (Exit::Data, "the input is not valid"),
    (Exit::Input, "the input is missing"),
    (Exit::Feature, "the kernel lacks a feature"),
    (Exit::Os, "the system refused (out of memory, processes, descriptors)"),
    (Exit::Io, "reading or writing failed"),
    (Exit::Again, "try again"),
    (Exit::Permission, "no permission"),
    (Exit::Config, "the host is not set up for it"),
];

impl Exit {
    /// Returns the code of another process of this program, if it ended by itself.
    pub fn of_process(status: ExitStatus) -> Option<Self> {
        let mut all = Self::all();
        all.find(|exit| Some(i32::from(exit.code())) == status.code())
    }

    /// Returns all codes in ascending order.
    pub fn all() -> impl Iterator<Item = Self> {
        MEANINGS.into_iter().map(|(exit, _)| exit)
    }

    /// Returns the number that the shell sees.
    pub const fn code(self) -> u8 {
        // A fieldless enum of u8: the discriminant is the code.
        self as u8
    }

    /// Returns the code for an error. The first error of the chain of causes that has a code of its own determines it, or
    /// else the first that has a kind.
    pub fn of(error: &(dyn Error + 'static)) -> Self {
        let of_kind = || chain(error).find_map(of_link);
        chain(error).find_map(by_itself).or_else(of_kind).unwrap_or(Self::Os)
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// Returns the end of a command's help: an example, and its exit codes.
pub fn help(example: &str, codes: &[u8]) -> String {
    let exits = MEANINGS.iter().map(|(exit, meaning)| (exit.code(), meaning));
    let exits = exits.filter(|(code, _)| codes.contains(code));
    let exits = exits.map(|(code, meaning)| format!("\n  {code:>2}  {meaning}"));
    format!("Example:\n  {example}\n\nExit codes:{}", exits.collect::<String>())
}

/// Returns an error and its causes, outermost first.
fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |&error| error.source())
}

/// Returns the code of an error that has one of its own, more precise than its kind: for a host that is not set up, or an
/// input that is not valid.
fn by_itself(error: &(dyn Error + 'static)) -> Option<Exit> {
    match (error.downcast_ref(), error.downcast_ref(), error.downcast_ref()) {
        (Some(MapError::HugePool { .. }), ..) | (_, Some(BindError::NoStore { .. }), _) => {
            Some(Exit::Config)
        }
        (Some(MapError::BeyondEnd { .. } | MapError::NotMappable { .. }), ..) => Some(Exit::Data),
        // The kernel wrote the file.
        (.., Some(SysError::Format { .. })) => Some(Exit::Os),
        _ if error.is::<StreamError>() => Some(Exit::Config),
        _ => None,
    }
}

/// Returns the code of one error of a chain, or `None` if its cause determines that.
///
/// Each error type of a library has a line. A wrapper with `#[error(transparent)]` hides its inner error from the chain,
/// and has its kind.
fn of_link(error: &(dyn Error + 'static)) -> Option<Exit> {
    // An error of the kernel has an `io::Error` as its cause.
    let is_stated = |kind: &ErrorKind| *kind != ErrorKind::Io;
    let kind = (error.downcast_ref().map(BenchError::kind))
        .or_else(|| error.downcast_ref().map(ReportError::kind))
        .or_else(|| error.downcast_ref().map(SnapshotError::kind))
        .or_else(|| error.downcast_ref().map(ServeError::kind))
        .or_else(|| error.downcast_ref().map(AddrError::kind))
        .or_else(|| error.downcast_ref().map(BindError::kind).filter(is_stated))
        .or_else(|| error.downcast_ref().map(MappingError::kind).filter(is_stated))
        .or_else(|| error.downcast_ref().map(MapError::kind).filter(is_stated))
        .or_else(|| error.downcast_ref().map(SysError::kind).filter(is_stated));
    match kind {
        Some(kind) => of_kind(kind),
        None if error.is::<serde_json::Error>() => Some(Exit::Data),
        None => error.downcast_ref().map(of_io),
    }
}

/// Returns the code for a kind of error, or `None` if its cause determines that.
fn of_kind(kind: ErrorKind) -> Option<Exit> {
    match kind {
        ErrorKind::InvalidInput | ErrorKind::AlreadyExists => Some(Exit::Usage),
        ErrorKind::OutOfMemory => Some(Exit::Os),
        ErrorKind::Busy | ErrorKind::TimedOut | ErrorKind::Cancelled => Some(Exit::Again),
        ErrorKind::NotSupported => Some(Exit::Feature),
        ErrorKind::PermissionDenied => Some(Exit::Permission),
        ErrorKind::Io | ErrorKind::Poisoned | ErrorKind::Gone => Some(Exit::Io),
        ErrorKind::NotFound => Some(Exit::Input),
        ErrorKind::InvalidData => Some(Exit::Data),
        _ => None,
    }
}

fn of_io(error: &io::Error) -> Exit {
    match error.kind() {
        io::ErrorKind::NotFound => Exit::Input,
        io::ErrorKind::PermissionDenied => Exit::Permission,
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => Exit::Data,
        io::ErrorKind::WouldBlock
        | io::ErrorKind::TimedOut
        | io::ErrorKind::Interrupted
        | io::ErrorKind::ResourceBusy => Exit::Again,
        io::ErrorKind::Unsupported => Exit::Feature,
        io::ErrorKind::OutOfMemory => Exit::Os,
        _ => Exit::Io,
    }
}

/// A command that ended with an error.
///
/// Any error becomes one by `?`, with the code that [`Exit::of`] finds for it. It is no [`Error`] itself: `main` prints
/// it and exits with its code.
#[derive(Debug)]
pub struct Failure {
    exit: Exit,
    error: Box<dyn Error + Send + Sync>,
}

/// `uzone.error/1`: a failure as an object.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ErrorObject {
    schema: &'static str,
    error: String,
    causes: Vec<String>,
    exit_code: u8,
}

impl ErrorObject {
    /// Returns the object for a message, its causes and the exit code.
    pub fn new(error: String, causes: Vec<String>, exit: Exit) -> Self {
        Self { schema: "uzone.error/1", error, causes, exit_code: exit.code() }
    }
}

/// A message and its cause.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
struct Caused {
    text: String,
    #[source]
    cause: Box<dyn Error + Send + Sync>,
}

impl Failure {
    /// Returns an error of the command itself with a code. The text names the problem and the fix.
    pub fn new(exit: Exit, text: impl Into<String>) -> Self {
        Self { exit, error: text.into().into() }
    }

    /// Returns an error of arguments.
    pub fn usage(text: impl Into<String>) -> Self {
        Self::new(Exit::Usage, text)
    }

    /// Returns an error of the command itself whose cause determines the code.
    pub fn of(text: impl Into<String>, cause: impl Error + Send + Sync + 'static) -> Self {
        Self::from(Caused { text: text.into(), cause: Box::new(cause) })
    }

    /// Sets the code.
    pub fn with(self, exit: Exit) -> Self {
        Self { exit, ..self }
    }

    /// Returns the code to exit with.
    pub fn exit(&self) -> Exit {
        self.exit
    }

    /// Returns each cause of the error that the message above it does not contain.
    fn causes(&self) -> impl Iterator<Item = String> {
        let error: &(dyn Error + 'static) = self.error.as_ref();
        let mut above = error.to_string();
        chain(error).skip(1).map(ToString::to_string).filter(move |cause| {
            let is_new = !above.contains(cause.as_str());
            if is_new {
                above.clone_from(cause);
            }
            is_new
        })
    }

    /// Returns the failure as `error: ...`, and a line `  caused by: ...` for each cause that adds to
    /// the line above it.
    pub fn text(&self) -> String {
        let mut text = format!("error: {}\n", visible(&self.error.to_string()));
        for cause in self.causes() {
            let _ = writeln!(text, "  caused by: {}", visible(&cause));
        }
        text
    }

    /// Returns the failure as an object.
    pub fn object(&self) -> ErrorObject {
        ErrorObject::new(self.error.to_string(), self.causes().collect(), self.exit)
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { exit: Exit::of(&error), error: Box::new(error) }
    }
}

/// Returns a text for a terminal: escapes characters that would move the cursor, or colour or hide text, except for
/// line breaks.
pub fn visible(text: &str) -> String {
    let mut out = String::new();
    for char in text.chars() {
        // Marks that turn the direction of writing are no control characters.
        let is_hidden = char.is_control()
            || matches!(char, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
        if is_hidden && char != '\n' {
            out.extend(char.escape_default());
        } else {
            out.push(char);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use uzone_os::uffd::UffdError;
    use uzone_pages::PageSize;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot do {action}")]
    struct Outer {
        action: &'static str,
        #[source]
        cause: SysError,
    }

    fn unread(kind: io::ErrorKind) -> SysError {
        SysError::Read { path: PathBuf::from("/proc/made/up"), cause: kind.into() }
    }

    #[test]
    fn codes_are_the_documented_ones_in_ascending_order() {
        let codes: Vec<u8> = Exit::all().map(Exit::code).collect();
        assert_eq!(codes, [0, 1, 2, 65, 66, 69, 71, 74, 75, 77, 78]);
    }

    #[test]
    fn an_error_of_a_library_has_the_code_that_says_what_to_do() {
        let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
        let pool = || MapError::HugePool {
            size: PageSize::MIB_2,
            pages: 1,
            free: 0,
            total: 0,
            wanted: 1,
            cause: io::ErrorKind::OutOfMemory.into(),
        };
        let cut = || BindError::EndsInsidePage { len_bytes: 1, page: PageSize::KIB_4 };
        let unmapped = BindError::Region {
            len: uzone_pages::ByteLen::mib(2),
            backing: uzone_zone::RegionSource::Hugetlb(PageSize::MIB_2),
            cause: pool(),
        };
        let unavailable = BindError::NoStore { path: uzone_stream::Path::Avx512 };
        let cause = io::ErrorKind::NotFound.into();
        let unopened = BindError::Open { path: PathBuf::from("/made/up"), cause };
        let table: [(Box<dyn Error + Send + Sync>, Exit); 20] = [
            (Box::new(unopened), Exit::Input),
            (Box::new(cut()), Exit::Usage),
            (Box::new(unmapped), Exit::Config),
            (Box::new(BindError::NotZero), Exit::Usage),
            (Box::new(AddrError::BadPageSize { bytes: 3 }), Exit::Usage),
            (Box::new(MapError::Empty), Exit::Usage),
            (Box::new(pool()), Exit::Config),
            (Box::new(unavailable), Exit::Config),
            (Box::new(unread(io::ErrorKind::NotFound)), Exit::Feature),
            (Box::new(unread(io::ErrorKind::PermissionDenied)), Exit::Permission),
            (Box::new(unread(io::ErrorKind::WouldBlock)), Exit::Again),
            (Box::new(MapError::Inspect(refused())), Exit::Permission),
            (
                Box::new(Outer { action: "this", cause: unread(io::ErrorKind::NotFound) }),
                Exit::Feature,
            ),
            (Box::new(UffdError::NoUserfaultfd(refused())), Exit::Permission),
            (
                Box::new(StreamError::Malformed { part: "mmx".into(), default: String::new() }),
                Exit::Config,
            ),
            (Box::new(io::Error::from(io::ErrorKind::NotFound)), Exit::Input),
            (Box::new(io::Error::from(io::ErrorKind::WouldBlock)), Exit::Again),
            (Box::new(io::Error::from(io::ErrorKind::UnexpectedEof)), Exit::Data),
            (Box::new(io::Error::from_raw_os_error(28)), Exit::Io),
            (Box::new(std::fmt::Error), Exit::Os),
        ];
        for (error, exit) in table {
            let error: &(dyn Error + 'static) = error.as_ref();
            assert_eq!(Exit::of(error), exit, "{error:?}");
        }
    }

    #[test]
    fn a_failure_shows_every_cause_once_and_in_order() {
        let failure =
            Failure::from(Outer { action: "this", cause: unread(io::ErrorKind::NotFound) });
        assert_eq!(
            failure.text(),
            "error: cannot do this\n  caused by: cannot read /proc/made/up\n  caused by: entity not found\n"
        );
        let object = serde_json::to_value(failure.object()).unwrap();
        assert_eq!(object["schema"], "uzone.error/1");
        assert_eq!(object["error"], "cannot do this");
        assert_eq!(object["causes"].as_array().unwrap().len(), 2);
        assert_eq!(object["exit_code"], 69);
    }

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Link {
        text: &'static str,
        #[source]
        cause: Option<Box<Link>>,
    }

    #[test]
    fn a_cause_that_the_message_above_it_contains_is_not_printed() {
        // The messages from the outermost on, and the causes that are printed.
        let table: [(&[&'static str], &[&str]); 5] = [
            (&["a: b: c", "b: c", "c"], &[]),
            (&["a: b", "b", "c"], &["c"]),
            (&["a", "b: c", "c", "d"], &["b: c", "d"]),
            (&["a: c", "b", "c"], &["b", "c"]),
            (&["a", "b", "a"], &["b", "a"]),
        ];
        for (messages, expected) in table {
            let mut cause = None;
            for text in messages.iter().rev() {
                cause = Some(Box::new(Link { text, cause }));
            }
            let failure = Failure::from(*cause.expect("a message"));
            let causes: Vec<String> = failure.causes().collect();
            assert_eq!(causes, expected, "{messages:?}");
            assert_eq!(failure.text().matches("caused by").count(), expected.len());
        }
    }
}

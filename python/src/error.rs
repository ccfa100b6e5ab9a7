//! The exceptions of the package, by the kind of an error: [`Failure`].

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use uzone::ErrorKind;
use uzone::hostpool::HostPoolError;
use uzone::lazy::{BackingError, LazyError, MapError};
use uzone::snapshot::SnapshotError;

/// An exception: its name, the built-in one that it also derives from, and its documentation.
struct Class(&'static str, &'static str, &'static str);

const BASE: Class =
    Class("Error", "Exception", "The base of every exception that this package raises by itself.");

const CLASSES: [Class; 8] = [
    Class(
        "InputError",
        "ValueError",
        "An argument, a range or a combination of options is invalid.",
    ),
    Class(
        "OutOfMemoryError",
        "MemoryError",
        "Memory, or another resource with a limit, is exhausted.",
    ),
    Class(
        "NotSupportedError",
        "OSError",
        "This host or this kind of memory does not offer the request.",
    ),
    Class(
        "PermissionDeniedError",
        "PermissionError",
        "The system refused for want of a permission.",
    ),
    Class("NotFoundError", "FileNotFoundError", "There is no such file, object or page."),
    Class("TimedOutError", "TimeoutError", "The deadline passed."),
    Class("DamageError", "OSError", "Bytes do not match their hash, or a page is bad."),
    Class("IoError", "OSError", "Reading, writing or another request to the system failed."),
];

/// The classes, in the order of [`CLASSES`].
static TYPES: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();

/// Returns the position in [`CLASSES`] of the exception of a kind.
fn class_of(kind: ErrorKind) -> usize {
    match kind {
        ErrorKind::InvalidInput => 0,
        ErrorKind::OutOfMemory => 1,
        ErrorKind::NotSupported => 2,
        ErrorKind::PermissionDenied => 3,
        ErrorKind::NotFound => 4,
        ErrorKind::TimedOut => 5,
        ErrorKind::Poisoned | ErrorKind::InvalidData => 6,
        _ => 7,
    }
}

/// Makes an exception, and adds it to the module.
fn make<'py>(
    module: &Bound<'py, PyModule>,
    class: &Class,
    bases: Vec<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyType>> {
    let py = module.py();
    let dict = PyDict::new(py);
    dict.set_item("__module__", "uzone")?;
    dict.set_item("__doc__", class.2)?;
    let made = py.get_type::<PyType>().call1((class.0, PyTuple::new(py, bases)?, dict))?;
    module.add(class.0, &made)?;
    Ok(made.cast_into()?)
}

/// Makes the exceptions, and adds them to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let builtins = py.import("builtins")?;
    let base = make(module, &BASE, vec![builtins.getattr(BASE.1)?])?;
    let mut types = Vec::new();
    for class in &CLASSES {
        let bases = vec![base.clone().into_any(), builtins.getattr(class.1)?];
        types.push(make(module, class, bases)?.unbind());
    }
    // A second import into the same process finds the first ones.
    let _ = TYPES.set(py, types);
    Ok(())
}

/// An error that becomes an exception of Python.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    kind: ErrorKind,
    errno: i32,
    message: String,
}

impl Failure {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, errno: kind.errno(), message: message.into() }
    }

    /// Returns an error of an argument.
    pub(crate) fn input(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidInput, message)
    }

    /// Takes an error with its kind, and the number of the system call that it comes from, if there is one.
    fn of(kind: ErrorKind, error: &(dyn std::error::Error + 'static)) -> Self {
        let mut causes = std::iter::successors(Some(error), |error| error.source());
        let errno = causes.find_map(|error| {
            error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error)
        });
        Self { kind, errno: errno.unwrap_or(kind.errno()), message: uzone_os::with_causes(error) }
    }
}

macro_rules! failures {
    ($($error:ty),+) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::of(error.kind(), &error)
            }
        }
    )+};
}

failures!(SnapshotError, MapError, HostPoolError);

impl From<LazyError> for Failure {
    fn from(error: LazyError) -> Self {
        // The image's own error has the kind and the place in the file.
        if let LazyError::Backing { cause: BackingError::Other(cause), .. } = &error
            && let Some(image) = cause.downcast_ref::<SnapshotError>()
        {
            return Self {
                message: uzone_os::with_causes(&error),
                ..Self::of(image.kind(), image)
            };
        }
        Self::of(error.kind(), &error)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        if let Some(image) = error.get_ref().and_then(|inner| inner.downcast_ref::<SnapshotError>())
        {
            return Self::of(image.kind(), image);
        }
        let kind = match error.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            std::io::ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
            std::io::ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
            std::io::ErrorKind::TimedOut => ErrorKind::TimedOut,
            _ => ErrorKind::Io,
        };
        Self::of(kind, &error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        Python::attach(|py| {
            let class = class_of(failure.kind);
            let Some(types) = TYPES.get(py) else {
                return pyo3::exceptions::PyRuntimeError::new_err(failure.message);
            };
            let made = types[class].bind(py).clone();
            match CLASSES[class].1 {
                "ValueError" | "MemoryError" => Self::from_type(made, (failure.message,)),
                // An OSError has its number and its text.
                _ => Self::from_type(made, (failure.errno, failure.message)),
            }
        })
    }
}

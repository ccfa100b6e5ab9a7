//! Errors as numbers and text: [`Failure`], [`call`], and the text of the last one of each thread.

use std::any::Any;
use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CString, c_char, c_int};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use uzone_rust::hostpool::HostPoolError;
use uzone_rust::lazy::{BackingError, LazyError, MapError};
use uzone_rust::snapshot::SnapshotError;
use uzone_rust::{BindError, ErrorKind, PinError, Unclearable, WriteError};

pub(crate) const EIO: i32 = 5;
pub(crate) const E2BIG: i32 = 7;
pub(crate) const ENOMEM: i32 = 12;
pub(crate) const EBUSY: i32 = 16;
pub(crate) const EEXIST: i32 = 17;
pub(crate) const EINVAL: i32 = 22;
pub(crate) const ENOTSUP: i32 = 95;
const MAX_ERRNO: i32 = 4095;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// An error of a call: its number, and a text that names the resource, the cause and the remedy.
#[derive(Debug)]
pub(crate) struct Failure {
    errno: i32,
    text: String,
}

/// The error that a function of the caller returned.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the function of the caller returned {code}: {}", io::Error::from_raw_os_error(self.errno()))]
pub(crate) struct CallerError {
    code: c_int,
}

impl CallerError {
    /// Takes the return value of a function of the caller: 0, or an error.
    pub(crate) fn check(code: c_int) -> Result<(), Self> {
        if code == 0 { Ok(()) } else { Err(Self { code }) }
    }

    /// Returns the errno of a call that fails for this reason; `EIO` for a value that is none.
    fn errno(self) -> i32 {
        let errno = self.code.wrapping_neg();
        if (1..=MAX_ERRNO).contains(&errno) { errno } else { EIO }
    }
}

impl Failure {
    pub(crate) fn new(errno: i32, text: impl Into<String>) -> Self {
        Self { errno, text: text.into() }
    }

    /// Returns an error of an argument.
    pub(crate) fn input(text: impl Into<String>) -> Self {
        Self::new(EINVAL, text)
    }

    /// Puts the name of the resource before the text.
    pub(crate) fn about(self, resource: &dyn std::fmt::Display) -> Self {
        Self { text: format!("{resource}: {}", self.text), ..self }
    }

    /// Takes an error with its kind, and the number of its first cause that has one.
    fn of(kind: ErrorKind, error: &(dyn Error + 'static)) -> Self {
        Self::new(errno_of(error).unwrap_or(kind.errno()), uzone_os::with_causes(error))
    }

    fn of_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Self::new(EIO, format!("a defect of uzone: {}", text.unwrap_or("it panicked")))
    }

    /// Keeps the text for this thread. Returns the number that the call returns.
    fn keep(self, function: &str) -> c_int {
        let text = format!("{function}: {}", self.text).replace('\0', "?");
        let text = CString::new(text).unwrap_or_default();
        // A thread that is ending has no text any more.
        let _ = LAST.try_with(|last| last.replace(text));
        -self.errno
    }
}

/// Returns the number of the first cause that has one.
fn errno_of(error: &(dyn Error + 'static)) -> Option<i32> {
    type Shared = Arc<dyn Error + Send + Sync>;
    let mut next = Some(error);
    let mut kind = None;
    while let Some(error) = next {
        next = error.source();
        if let Some(error) = error.downcast_ref::<CallerError>() {
            return Some(error.errno());
        } else if let Some(error) = error.downcast_ref::<SnapshotError>() {
            kind = Some(error.kind().errno());
        } else if let Some(BackingError::Other(inner)) = error.downcast_ref() {
            next = Some(&**inner); // its own source is the one behind
        } else if let Some(inner) = error.downcast_ref::<Shared>() {
            next = Some(&**inner); // as above
        } else if let Some(error) = error.downcast_ref::<Arc<io::Error>>() {
            next = Some(&**error); // as above
        } else if let Some(error) = error.downcast_ref::<io::Error>() {
            match (error.raw_os_error(), error.get_ref()) {
                (Some(errno), _) => return Some(errno),
                (None, Some(inner)) => next = Some(inner), // as above
                (None, None) => {}
            }
        }
    }
    kind
}

/// Makes each type of error a [`Failure`] by its kind.
macro_rules! failures {
    ($($error:ty),+) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::of(error.kind(), &error)
            }
        }
    )+};
}

failures!(SnapshotError, MapError, LazyError, HostPoolError, BindError, PinError, WriteError);

impl From<CallerError> for Failure {
    fn from(error: CallerError) -> Self {
        Self::new(error.errno(), error.to_string())
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::new(errno_of(&error).unwrap_or(EIO), uzone_os::with_causes(&error))
    }
}

impl From<Unclearable> for Failure {
    fn from(left: Unclearable) -> Self {
        Self::new(left.kind().errno(), format!("some bytes were left: {left}"))
    }
}

/// Runs the body of a function of the interface. Returns 0, or a negative errno whose text this thread keeps.
#[inline(always)]
pub(crate) fn call(function: &str, body: impl FnOnce() -> Result<(), Failure>) -> c_int {
    // A panic leaves no value of the caller's half changed: handles have their own locks, or are dropped.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        other => failed(function, other),
    }
}

#[cold]
fn failed(function: &str, outcome: Result<Result<(), Failure>, Box<dyn Any + Send>>) -> c_int {
    match outcome {
        Ok(Ok(())) => 0,
        Ok(Err(failure)) => failure.keep(function),
        Err(panic) => {
            let code = Failure::of_panic(&*panic).keep(function);
            // The drop of its payload may panic as well.
            std::mem::forget(panic);
            code
        }
    }
}

/// Returns the text of the last error of the calling thread: the function, the resource, the cause, and the remedy where
/// there is one; an empty text before the first. The text is valid until the next call of the thread that fails. Never
/// NULL.
#[unsafe(no_mangle)]
pub extern "C" fn uzone_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]
    use super::*;

    fn last() -> CString {
        // SAFETY: The text is valid until the next failure of this thread.
        unsafe { std::ffi::CStr::from_ptr(uzone_last_error()) }.to_owned()
    }

    #[test]
    fn a_panic_is_an_error_with_its_text() {
        assert_eq!(call("uzone_test", || panic!("it is {}", "odd")), -EIO);
        assert_eq!(last().to_str().unwrap(), "uzone_test: a defect of uzone: it is odd");
        assert_eq!(call("uzone_test", || Ok(())), 0);
    }

    #[test]
    fn a_function_of_the_caller_decides_the_error_of_the_call() {
        for (code, errno) in [(-28, 28), (3, EIO), (-5000, EIO), (c_int::MIN, EIO)] {
            let error = CallerError::check(code).unwrap_err();
            assert_eq!(Failure::from(error).errno, errno);
            let error = BackingError::Other(Box::new(error));
            assert_eq!(Failure::from(LazyError::Backing { offset: 0, cause: error }).errno, errno);
            let cause: Arc<dyn Error + Send + Sync> =
                Arc::new(CallerError::check(code).unwrap_err());
            let len = uzone_rust::ByteLen::mib(1);
            let error = HostPoolError::Register { address: 0, offset_bytes: 0, len, cause };
            assert_eq!(Failure::from(error).errno, errno);
        }
        assert!(CallerError::check(0).is_ok());
    }

    #[test]
    fn the_number_of_the_system_is_kept() {
        let cause = io::Error::from_raw_os_error(28);
        let error = SnapshotError::Open { name: "x".into(), cause };
        assert_eq!(Failure::from(error).errno, 28);
        let damaged = SnapshotError::BadIndex { name: "x".into(), why: "short" };
        assert_eq!(Failure::from(io::Error::other(damaged)).errno, 74);
        let cause = Arc::new(io::Error::from_raw_os_error(11));
        assert_eq!(Failure::from(HostPoolError::Thread(cause)).errno, 11);
    }
}

//! Arguments of C: paths and texts, structures with a size, and pointers for results.
//!
//! Unsafe: the file in which pointers of the caller become values. The head of the header states the duties of the caller.

use std::ffi::{CStr, OsStr, c_char};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::time::Duration;

use crate::error::{E2BIG, Failure};

/// A structure whose first field is its size in bytes.
///
/// # Safety
/// It has no padding, its first field is a `usize`, bytes of zero are a value of it, and so are bytes of another value
/// of it that are followed by zeroes from a multiple of 8 on.
pub(crate) unsafe trait Structure: Copy {}

/// Refuses sizes that no version of a structure has.
fn check_size(size: usize) -> Result<(), Failure> {
    const LARGEST: usize = 4096;
    if size > LARGEST {
        let text = format!("a structure has size {size}: set `size` to `sizeof` of its type");
        return Err(Failure::new(E2BIG, text));
    }
    if size < size_of::<usize>() || !size.is_multiple_of(8) {
        let text = format!("a structure has size {size}: set `size` to `sizeof` of its type");
        return Err(Failure::input(text));
    }
    Ok(())
}

/// Reads options, whose caller may know fewer or more fields than this library. NULL is all defaults.
///
/// # Safety
/// `from` is NULL, or aligned and readable for as many bytes as its first field has.
pub(crate) unsafe fn options<T: Structure>(from: *const T) -> Result<T, Failure> {
    // SAFETY: Bytes of zero are a value of a `Structure`.
    let mut options: T = unsafe { MaybeUninit::zeroed().assume_init() };
    if from.is_null() {
        return Ok(options);
    }
    // SAFETY: The first field of a `Structure` is a `usize`, and the caller of this vouches for it.
    let size = unsafe { from.cast::<usize>().read() };
    check_size(size)?;
    let (from, known) = (from.cast::<u8>(), size.min(size_of::<T>()));
    // SAFETY: `known` bytes are readable, and no more than `options` has. The bytes behind stay zero, and `known` is a
    // multiple of 8, so the result is a value of a `Structure`.
    unsafe { ptr::copy_nonoverlapping(from, (&raw mut options).cast::<u8>(), known) };
    // SAFETY: `size` bytes are readable, and `known` is no more.
    let unknown = unsafe { std::slice::from_raw_parts(from.wrapping_add(known), size - known) };
    if unknown.iter().any(|byte| *byte != 0) {
        let text = format!(
            "a structure of {size} bytes sets a field that this version, with {}, does not have: use a newer libuzone",
            size_of::<T>()
        );
        return Err(Failure::new(E2BIG, text));
    }
    Ok(options)
}

/// Writes the fields of an answer that the caller knows, and zeroes into fields that this library does not know.
///
/// # Safety
/// `to` is NULL, or aligned and writable for as many bytes as its first field has.
pub(crate) unsafe fn answer<T: Structure>(to: *mut T, answer: &T) -> Result<(), Failure> {
    const SIZE: usize = size_of::<usize>();
    if to.is_null() {
        return Err(Failure::input("the structure for the answer is NULL"));
    }
    // SAFETY: As in `options`.
    let size = unsafe { to.cast::<usize>().read() };
    check_size(size)?;
    let (to, known) = (to.cast::<u8>(), size.min(size_of::<T>()));
    let from = (&raw const *answer).cast::<u8>().wrapping_add(SIZE);
    // SAFETY: `known` bytes are no more than either has, and at least `SIZE`, which stays as it is.
    unsafe { ptr::copy_nonoverlapping(from, to.wrapping_add(SIZE), known - SIZE) };
    // SAFETY: `size` bytes are writable.
    unsafe { ptr::write_bytes(to.wrapping_add(known), 0, size - known) };
    Ok(())
}

/// Returns a text of the caller's; NULL is none.
///
/// # Safety
/// `text` is NULL, or ends with a zero and does not change for `'a`.
pub(crate) unsafe fn text<'a>(name: &str, text: *const c_char) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: The caller of this vouches for it.
    let text = unsafe { CStr::from_ptr(text) };
    let utf8 = text.to_str().map_err(|_| Failure::input(format!("{name} is not UTF-8")))?;
    Ok(Some(utf8))
}

/// Returns a path of the caller's.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn path<'a>(name: &str, path: *const c_char) -> Result<&'a Path, Failure> {
    if path.is_null() {
        return Err(null(name));
    }
    // SAFETY: The caller of this vouches for it.
    let path = unsafe { CStr::from_ptr(path) };
    Ok(Path::new(OsStr::from_bytes(path.to_bytes())))
}

/// Returns the value of a handle or of a place for a result, unless the caller passed NULL.
#[inline]
pub(crate) fn given<T>(name: &str, value: Option<T>) -> Result<T, Failure> {
    value.ok_or_else(|| null(name))
}

#[cold]
fn null(name: &str) -> Failure {
    Failure::input(format!("{name} is NULL"))
}

/// Returns a time in milliseconds; a negative one is for ever.
pub(crate) fn timeout(ms: i32) -> Duration {
    u64::try_from(ms).map_or(Duration::MAX, Duration::from_millis)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(C)]
    struct Three {
        size: usize,
        first: u64,
        second: u64,
    }

    // SAFETY: Three numbers of 8 bytes, the first of them a `usize`.
    unsafe impl Structure for Three {}

    /// The caller's structure of another version: as many numbers as it likes.
    fn read(fields: &[u64]) -> Result<Three, Failure> {
        // SAFETY: A slice of `u64` is aligned, and each test gives a size that it has, or one that is refused.
        unsafe { options(fields.as_ptr().cast()) }
    }

    #[test]
    fn an_older_structure_has_defaults_and_a_newer_one_only_zeroes_behind() {
        assert_eq!(read(&[24, 1, 2]).unwrap(), Three { size: 24, first: 1, second: 2 });
        assert_eq!(read(&[16, 1, 2]).unwrap(), Three { size: 16, first: 1, second: 0 });
        assert_eq!(read(&[8]).unwrap(), Three { size: 8, first: 0, second: 0 });
        assert_eq!(read(&[32, 1, 2, 0]).unwrap().second, 2);
        for (fields, errno) in [
            (&[0_u64, 1][..], "Failure { errno: 22"),
            (&[17, 1, 2], "Failure { errno: 22"),
            (&[32, 1, 2, 1], "Failure { errno: 7"),
            (&[1 << 40], "Failure { errno: 7"),
        ] {
            let failure = format!("{:?}", read(fields).unwrap_err());
            assert!(failure.starts_with(errno), "{fields:?}: {failure}");
        }
        // SAFETY: NULL is all defaults.
        let defaults: Three = unsafe { options(ptr::null()) }.unwrap();
        assert_eq!(defaults, Three { size: 0, first: 0, second: 0 });
    }

    #[test]
    fn an_answer_ends_where_the_structure_of_its_caller_does() {
        let all = Three { size: 0, first: 7, second: 8 };
        for (size, expected) in
            [(8, [8, 1, 1, 1]), (16, [16, 7, 1, 1]), (24, [24, 7, 8, 1]), (32, [32, 7, 8, 0])]
        {
            let mut place = [size, 1, 1, 1_u64];
            // SAFETY: The place has 32 bytes, and no size is larger.
            unsafe { answer(place.as_mut_ptr().cast(), &all) }.unwrap();
            assert_eq!(place, expected);
        }
    }
}

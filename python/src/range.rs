//! Ranges of bytes and sizes as arguments.

use std::ops::Range;

use pyo3::prelude::*;
use pyo3::types::{PyRange, PySlice};
use uzone::ByteLen;

use crate::error::Failure;

/// Returns the bytes that an argument names: a `slice`, a `range` of step 1, or `None` for all.
pub(crate) fn bytes_of(range: Option<&Bound<'_, PyAny>>, len: u64) -> PyResult<Range<u64>> {
    let Some(range) = range else { return Ok(0..len) };
    let (start, stop, step) = if let Ok(slice) = range.cast::<PySlice>() {
        let found = slice.indices(isize::try_from(len).unwrap_or(isize::MAX))?;
        (found.start as i128, found.stop as i128, found.step as i128)
    } else if range.is_instance_of::<PyRange>() {
        let part = |name| range.getattr(name)?.extract::<i128>();
        (part("start")?, part("stop")?, part("step")?)
    } else {
        return Err(Failure::input("a range of bytes is a slice, a range, or None for all").into());
    };
    if step != 1 {
        return Err(Failure::input("a range of bytes has step 1").into());
    }
    let (Ok(start), Ok(stop)) = (u64::try_from(start), u64::try_from(stop.max(start))) else {
        return Err(Failure::input("a range of bytes starts at 0 or behind").into());
    };
    if stop > len {
        return Err(
            Failure::input(format!("bytes {start} to {stop} are not all inside {len}")).into()
        );
    }
    Ok(start..stop)
}

/// A number of bytes: an integer, or text such as `"64K"` or `"300G"`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size(pub(crate) ByteLen);

impl FromPyObject<'_, '_> for Size {
    type Error = PyErr;

    fn extract(size: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = size.extract::<u64>() {
            return Ok(Self(ByteLen::new(bytes)));
        }
        let Ok(text) = size.extract::<String>() else {
            return Err(
                Failure::input("a size is a number of bytes, or text such as \"64M\"").into()
            );
        };
        let parsed = text.parse().map(Self);
        parsed.map_err(|error| Failure::input(format!("{text:?} is no size: {error}")).into())
    }
}

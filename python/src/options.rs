//! The options of a pool as arguments of Python.
//!
//! Unsafe: the address of a context, which the caller vouches for.

use std::error::Error;
use std::num::NonZeroU8;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use uzone::hostpool::{
    Budget, Context, Pages, Pause, Place, Register, Registration, Vendor, Zeroing,
};
use uzone::{ByteLen, PageSize};
use uzone_os::Addr;

use crate::error::Failure;
use crate::range::Size;
use crate::{dlpack, exit};

/// Functions of Python that register memory.
struct Callables {
    register: Py<PyAny>,
    unregister: Py<PyAny>,
}

impl Callables {
    fn call(
        &self,
        call: impl FnOnce(Python<'_>) -> PyResult<()>,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        // No thread but the one that ends it may enter an interpreter that ends.
        exit::check_call()?;
        Python::try_attach(call)
            .unwrap_or_else(|| Err(Failure::input("the interpreter has ended").into()))?;
        Ok(())
    }
}

impl Register for Callables {
    fn register(&self, start: Addr, len: ByteLen) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.call(|py| self.register.call1(py, (start.get(), len.get())).map(drop))
    }

    fn unregister(&self, start: Addr) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.call(|py| self.unregister.call1(py, (start.get(),)).map(drop))
    }
}

/// Returns who registers memory, and the kind of device of DLPack that sees it.
pub(crate) fn registration(
    register: Option<&Bound<'_, PyAny>>,
    context: Option<usize>,
) -> PyResult<(Registration, i32)> {
    let found = match register.map(PyAnyMethods::extract::<&str>) {
        Some(Ok("cuda")) => (by(Registration::Cuda, Vendor::Cuda, context), dlpack::CUDA_HOST),
        Some(Ok("hip")) => (by(Registration::Hip, Vendor::Hip, context), dlpack::ROCM_HOST),
        _ if context.is_some() => {
            return Err(Failure::input("a context goes with register=\"cuda\" or \"hip\"").into());
        }
        Some(Ok("mlock")) => (Registration::Locked, dlpack::CPU),
        None => (Registration::None, dlpack::CPU),
        Some(_) => {
            let pair = register.and_then(|register| register.extract().ok());
            let (register, unregister) = pair.ok_or_else(|| {
                Failure::input(
                    "register is \"cuda\", \"hip\", \"mlock\", None, or a pair of callables",
                )
            })?;
            (Registration::With(Arc::new(Callables { register, unregister })), dlpack::CPU)
        }
    };
    Ok(found)
}

/// Returns the registration in a context, or in the current one.
fn by(current: Registration, vendor: Vendor, context: Option<usize>) -> Registration {
    let Some(context) = context else { return current };
    // SAFETY: `from_raw` wants a context of the driver that outlives the pool: the documentation of the argument demands
    // it. The address is never followed here, and the driver refuses one that it does not know.
    let context = unsafe { Context::from_raw(std::ptr::with_exposed_provenance_mut(context)) };
    Registration::In(vendor, context)
}

pub(crate) fn pages(pages: Option<&Bound<'_, PyAny>>) -> PyResult<Pages> {
    let Some(pages) = pages else { return Ok(Pages::default()) };
    match pages.extract::<&str>() {
        Ok("huge") => Ok(Pages::Transparent),
        Ok("small") => Ok(Pages::Small),
        _ => {
            let bytes = pages.extract::<Size>()?.0.get();
            let page = PageSize::try_from_bytes(bytes);
            Ok(Pages::Hugetlb(page.map_err(|error| Failure::input(error.to_string()))?))
        }
    }
}

pub(crate) fn place(node: Option<&Bound<'_, PyAny>>) -> PyResult<Place> {
    let Some(node) = node else { return Ok(Place::Anywhere) };
    match (node.extract::<u32>(), node.extract::<&str>()) {
        (Ok(number), _) => Ok(Place::Node(number)),
        (_, Ok("interleaved")) => Ok(Place::Interleaved),
        _ => Err(Failure::input("node is a number, \"interleaved\" or None").into()),
    }
}

pub(crate) fn zeroing(clear: Option<&Bound<'_, PyAny>>) -> PyResult<Zeroing> {
    let Some(clear) = clear else { return Ok(Zeroing::default()) };
    let percent = clear.extract::<NonZeroU8>().ok().filter(|percent| percent.get() <= 100);
    match (clear.extract::<&str>(), percent) {
        (Ok("ahead"), _) => Ok(Zeroing::default()),
        (Ok("take"), _) => Ok(Zeroing::OnTake),
        (Ok("release"), _) => Ok(Zeroing::OnRelease),
        (Ok("never"), _) => Ok(Zeroing::Never),
        (_, Some(percent)) => Ok(Zeroing::Ahead(percent)),
        _ => {
            let why = "clear is \"ahead\", \"take\", \"release\", \"never\", or percent of a CPU";
            Err(Failure::input(why).into())
        }
    }
}

pub(crate) fn budget(start: &str) -> Result<Budget, Failure> {
    match start {
        "background" => Ok(Budget::Background),
        "eager" => Ok(Budget::Eager),
        "demand" => Ok(Budget::OnDemand),
        _ => Err(Failure::input("start is \"background\", \"eager\" or \"demand\"")),
    }
}

pub(crate) fn pause(pause: Option<f64>) -> Result<Pause, Failure> {
    Ok(seconds("pause", pause)?.map_or(Pause::Adaptive, Pause::Fixed))
}

/// Returns a time in seconds as one; `None` is for ever.
pub(crate) fn seconds(name: &str, seconds: Option<f64>) -> Result<Option<Duration>, Failure> {
    let time = seconds.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)));
    time.transpose().map_err(|_| Failure::input(format!("{name} is a number of seconds")))
}

/// Returns the function that a thread of the pool calls after each piece.
pub(crate) fn progress(progress: Py<PyAny>) -> impl Fn(ByteLen, ByteLen) + Send + Sync {
    move |ready, of| {
        // As in `Callables::call`.
        if exit::check_call().is_err() {
            return;
        }
        let _ = Python::try_attach(|py| {
            if let Err(exception) = progress.call1(py, (ready.get(), of.get())) {
                exception.write_unraisable(py, Some(progress.bind(py)));
            }
        });
    }
}

//! The driver of an accelerator, loaded at run time: [`Driver`] registers host memory with it, so that its devices
//! read and write that memory by DMA.
//!
//! Nothing is linked and no toolkit is needed. The library stays loaded until the process ends, because it has
//! threads and exit handlers of its own. No context is made here: a context belongs to a device, and costs
//! hundreds of megabytes of it, so the caller's is used.
//!
//! Only the driver's own interface is called. A failed call of CUDA's runtime leaves an error that a later, innocent call
//! reports; HIP has one interface, so its pending error is taken back after a failure.
//!
//! Sharing: every method takes `&self`, from any thread. A call makes the context that it was given current on its
//! thread, and puts back the one that was.
//! Unsafe: loading a library, and calling its functions by their documented types.
//! Source: CUDA driver API, sections 6.8 (contexts) and 6.13 (memory); HIP, the functions of the same names.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::fmt;
use core::ptr;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Mutex;

use libloading::Library;
use uzone_pages::ByteLen;

use crate::map::options::Addr;

/// `CU_MEMHOSTREGISTER_PORTABLE`, and `hipHostRegisterPortable`: registered for all contexts.
const PORTABLE: c_uint = 1;
/// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`, and `hipErrorHostMemoryNotRegistered`.
const NOT_REGISTERED: c_int = 713;

type Init = unsafe extern "C" fn(c_uint) -> c_int;
type GetCurrent = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_int;
type HostRegister = unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int;
type HostUnregister = unsafe extern "C" fn(*mut c_void) -> c_int;
type CudaErrorName = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
type HipErrorName = unsafe extern "C" fn(c_int) -> *const c_char;
type HipLastError = unsafe extern "C" fn() -> c_int;

/// Which driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vendor {
    /// NVIDIA's, `libcuda.so.1`, or the library that the variable `UZONE_CUDA_LIBRARY` names.
    Cuda,
    /// AMD's, `libamdhip64.so`, or the library that the variable `UZONE_HIP_LIBRARY` names.
    Hip,
}

impl Vendor {
    /// Returns the library: its name, or the value of the variable that names another.
    fn library(self) -> OsString {
        let (variable, name) = match self {
            Self::Cuda => ("UZONE_CUDA_LIBRARY", "libcuda.so.1"),
            Self::Hip => ("UZONE_HIP_LIBRARY", "libamdhip64.so"),
        };
        std::env::var_os(variable).unwrap_or_else(|| name.into())
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cuda => "CUDA",
            Self::Hip => "HIP",
        })
    }
}

/// A driver that cannot be used, or a call that it refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The library is not there, or has no such function.
    #[error(
        "the driver of {vendor} cannot be loaded from {library}: install it, or name it by UZONE_{vendor}_LIBRARY"
    )]
    Load {
        /// The driver.
        vendor: Vendor,
        /// The library.
        library: String,
        /// The answer of the dynamic loader.
        #[source]
        cause: libloading::Error,
    },
    /// No context is current on the thread.
    #[error(
        "this thread has no current context of {vendor}: make one current first (torch.cuda.init(), cuCtxSetCurrent), or pass one"
    )]
    NoContext {
        /// The driver.
        vendor: Vendor,
    },
    /// The driver refused a call.
    #[error("{call} failed: {name} ({code})")]
    Refused {
        /// The function.
        call: &'static str,
        /// The driver's error.
        code: i32,
        /// Its name.
        name: String,
    },
}

/// A context of a driver.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Context(*mut c_void);

// SAFETY: `Send` wants the value to be usable by another thread. A context belongs to the process, and the driver
// takes it from any thread; the pointer is never followed here.
unsafe impl Send for Context {}
// SAFETY: `Sync`, as above: `&Context` gives no access but to the number.
unsafe impl Sync for Context {}

impl Context {
    /// Takes a `CUcontext` or `hipCtx_t`.
    ///
    /// # Safety
    /// It is a context of the driver that it is used with, and is not destroyed while this value, a copy of it, or a
    /// pool that was given one is used.
    #[must_use]
    pub unsafe fn from_raw(context: *mut c_void) -> Self {
        Self(context)
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({:?})", self.0)
    }
}

/// How a driver names its errors.
#[derive(Clone, Copy)]
enum Names {
    Cuda(CudaErrorName),
    /// The second takes the pending error back.
    Hip(HipErrorName, HipLastError),
}

/// A driver that is loaded and initialised.
///
/// # Invariants
/// The functions are those of the driver with the documented names and types, and stay so: the library is never
/// unloaded.
pub struct Driver {
    vendor: Vendor,
    get_current: GetCurrent,
    set_current: SetCurrent,
    register: HostRegister,
    unregister: HostUnregister,
    names: Names,
}

/// The drivers that were loaded, which stay so, by their libraries.
static LOADED: Mutex<Vec<(OsString, &'static Driver)>> = Mutex::new(Vec::new());

impl Driver {
    /// Loads a driver, from `library` or from where the host has it, and initialises it, unless that was done before. No context is made, and no device memory is
    /// used.
    ///
    /// # Errors
    /// [`DriverError::Load`] if it is not installed, and [`DriverError::Refused`] if it cannot be initialised, as where
    /// there is no device.
    pub fn load(vendor: Vendor, library: Option<&Path>) -> Result<&'static Self, DriverError> {
        let library = library.map_or_else(|| vendor.library(), |path| path.as_os_str().to_owned());
        let mut loaded = crate::lock(&LOADED);
        if let Some((_, driver)) =
            loaded.iter().find(|(name, driver)| *name == library && driver.vendor == vendor)
        {
            return Ok(driver);
        }
        let driver: &'static Self = Box::leak(Box::new(Self::open(vendor, &library)?));
        loaded.push((library, driver));
        Ok(driver)
    }

    fn open(vendor: Vendor, name: &OsString) -> Result<Self, DriverError> {
        let refused = |cause| {
            let library = name.to_string_lossy().into_owned();
            DriverError::Load { vendor, library, cause }
        };
        // SAFETY: the initialisers of a driver set up its own state, and may be run by any thread. The name of
        // the library, or the user who set the variable, vouches that it is a driver; no other code can.
        let library = unsafe { Library::new(name) }.map_err(refused)?;
        // Never unloaded: it has threads and exit handlers.
        let library: &'static Library = Box::leak(Box::new(library));
        let names: [&CStr; 5] = match vendor {
            Vendor::Cuda => [
                c"cuInit",
                c"cuCtxGetCurrent",
                c"cuCtxSetCurrent",
                c"cuMemHostRegister_v2",
                c"cuMemHostUnregister",
            ],
            Vendor::Hip => [
                c"hipInit",
                c"hipCtxGetCurrent",
                c"hipCtxSetCurrent",
                c"hipHostRegister",
                c"hipHostUnregister",
            ],
        };
        // SAFETY: `cuInit` and `hipInit` take a word of flags and return a code.
        let init: Init = unsafe { find(library, names[0]) }.map_err(refused)?;
        let driver = Self {
            vendor,
            // SAFETY: `cuCtxGetCurrent` and `hipCtxGetCurrent` take a pointer that they write a context to.
            get_current: unsafe { find(library, names[1]) }.map_err(refused)?,
            // SAFETY: `cuCtxSetCurrent` and `hipCtxSetCurrent` take a context.
            set_current: unsafe { find(library, names[2]) }.map_err(refused)?,
            // SAFETY: `cuMemHostRegister` and `hipHostRegister` take an address, a length and flags.
            register: unsafe { find(library, names[3]) }.map_err(refused)?,
            // SAFETY: `cuMemHostUnregister` and `hipHostUnregister` take an address.
            unregister: unsafe { find(library, names[4]) }.map_err(refused)?,
            names: match vendor {
                Vendor::Cuda => {
                    // SAFETY: `cuGetErrorName` takes a code and a pointer that it writes a static string to.
                    let name = unsafe { find(library, c"cuGetErrorName") };
                    Names::Cuda(name.map_err(refused)?)
                }
                Vendor::Hip => {
                    // SAFETY: `hipGetErrorName` takes a code and returns a static string.
                    let name = unsafe { find(library, c"hipGetErrorName") };
                    // SAFETY: `hipGetLastError` takes nothing and returns a code.
                    let last = unsafe { find(library, c"hipGetLastError") };
                    Names::Hip(name.map_err(refused)?, last.map_err(refused)?)
                }
            },
        };
        // SAFETY: flags of zero are the only ones, and any thread may call it at any time.
        driver.answer(["cuInit", "hipInit"], unsafe { init(0) })?;
        Ok(driver)
    }

    /// Returns which driver this is.
    #[must_use]
    pub fn vendor(&self) -> Vendor {
        self.vendor
    }

    /// Returns the context that is current on this thread. The context stays current for as long as the caller sees
    /// to it: registering in one that was destroyed is refused by the driver.
    ///
    /// # Errors
    /// [`DriverError::NoContext`] if none is.
    pub fn current_context(&self) -> Result<Context, DriverError> {
        let context = self.current()?;
        if context.is_null() {
            return Err(DriverError::NoContext { vendor: self.vendor });
        }
        Ok(Context(context))
    }

    fn current(&self) -> Result<*mut c_void, DriverError> {
        let mut context = ptr::null_mut();
        // SAFETY: it writes one pointer to `context`, which is a local.
        let code = unsafe { (self.get_current)(&raw mut context) };
        self.answer(["cuCtxGetCurrent", "hipCtxGetCurrent"], code)?;
        Ok(context)
    }

    /// Calls `work` with `context` current on this thread, and puts back the one that was.
    fn with_current<T>(
        &self,
        context: Context,
        work: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let before = self.current()?;
        if before != context.0 {
            self.make_current(context.0)?;
        }
        let answer = work();
        if before != context.0 && !before.is_null() {
            self.make_current(before)?;
        }
        answer
    }

    fn make_current(&self, context: *mut c_void) -> Result<(), DriverError> {
        // SAFETY: the context is one that the driver returned, or its maker vouched for (`Context::from_raw`). One that
        // was destroyed meanwhile is an error.
        let code = unsafe { (self.set_current)(context) };
        self.answer(["cuCtxSetCurrent", "hipCtxSetCurrent"], code)
    }

    /// Registers memory for the devices of all contexts, and keeps its pages where they are. No byte changes.
    ///
    /// A thread without a context has `context` afterwards.
    ///
    /// # Errors
    /// [`DriverError::Refused`]: some of it is registered already, is not mapped, or there is too little memory.
    pub fn register(&self, context: Context, start: Addr, len: ByteLen) -> Result<(), DriverError> {
        let len = usize::try_from(len.get()).unwrap_or(usize::MAX);
        self.with_current(context, || {
            let start = ptr::without_provenance_mut(start.get());
            // SAFETY: the driver pins the pages behind these addresses and touches no byte of them; addresses where
            // nothing is mapped are an error. A device writes there only on behalf of a call that is given the address
            // by code that vouches for it.
            let code = unsafe { (self.register)(start, len, PORTABLE) };
            self.answer(["cuMemHostRegister", "hipHostRegister"], code)
        })
    }

    /// Ends the registration that begins at `start`. Returns whether there was one.
    ///
    /// # Errors
    /// [`DriverError::Refused`]: the context was destroyed, or the driver is gone, as at the end of a process. The pages
    /// may still be in use by a device.
    pub fn unregister(&self, context: Context, start: Addr) -> Result<bool, DriverError> {
        self.with_current(context, || {
            let start = ptr::without_provenance_mut(start.get());
            // SAFETY: it lets go of pages, and touches no byte of them.
            match unsafe { (self.unregister)(start) } {
                NOT_REGISTERED => Ok(false),
                code => {
                    self.answer(["cuMemHostUnregister", "hipHostUnregister"], code).map(|()| true)
                }
            }
        })
    }

    /// Makes an error of a code that is not zero, with the function's name in CUDA and in HIP.
    fn answer(&self, [cuda, hip]: [&'static str; 2], code: c_int) -> Result<(), DriverError> {
        if code == 0 {
            return Ok(());
        }
        let (mut name, mut call) = (ptr::null(), cuda);
        match self.names {
            Names::Cuda(of) => {
                // SAFETY: it writes one pointer to `name`, which is a local: null for a code that it does not know.
                let _ = unsafe { of(code, &raw mut name) };
            }
            Names::Hip(of, take_back) => {
                call = hip;
                // SAFETY: any code will do.
                name = unsafe { of(code) };
                // SAFETY: it takes back the pending error of this thread, which is the one that is returned here.
                let _ = unsafe { take_back() };
            }
        }
        let name = if name.is_null() {
            "an error without a name".to_owned()
        } else {
            // SAFETY: the driver's names are C strings that are never freed.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        Err(DriverError::Refused { call, code, name })
    }
}

/// Finds a function of a library.
///
/// # Safety
/// `T` is the type of a pointer to the function with this name.
unsafe fn find<T: Copy>(library: &Library, name: &CStr) -> Result<T, libloading::Error> {
    // SAFETY: the caller vouches for the type.
    let symbol = unsafe { library.get::<T>(name.to_bytes_with_nul()) }?;
    Ok(*symbol)
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("vendor", &self.vendor).finish_non_exhaustive()
    }
}

/// Makes memory present and keeps it so, mlock(2), until it is unmapped.
///
/// # Errors
/// The error of the system: `RLIMIT_MEMLOCK` is passed (`ENOMEM`), or nothing is mapped there.
pub fn lock_memory(start: Addr, len: ByteLen) -> io::Result<()> {
    let len = usize::try_from(len.get()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: mlock(2) makes pages present, and changes no byte. Addresses where nothing is mapped are an error.
    Ok(unsafe { rustix::mm::mlock(ptr::without_provenance_mut(start.get()), len) }?)
}

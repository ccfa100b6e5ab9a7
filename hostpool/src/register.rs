//! Registering memory: [`Register`], a trait of two calls, and its implementations: [`Registration`].

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use uzone_os::{Addr, Context, Driver, DriverError, Vendor, lock_memory};
use uzone_pages::ByteLen;

/// Why memory was not registered, or is registered still.
pub type RegisterError = Box<dyn Error + Send + Sync>;

/// Makes memory known to a device, which reads and writes it by itself from then on.
///
/// Calls come from threads of the pool and from takers, one at a time but for pools that are filled on demand. The pages
/// are present before they are registered.
pub trait Register: Send + Sync {
    /// Registers memory.
    ///
    /// # Errors
    /// Any; nothing is registered then.
    fn register(&self, start: Addr, len: ByteLen) -> Result<(), RegisterError>;

    /// Ends the registration that [`Register::register`] made at `start`.
    ///
    /// # Errors
    /// Any. The device may still use the memory then, so the pool does not unmap it.
    fn unregister(&self, start: Addr) -> Result<(), RegisterError>;
}

/// The driver, or another means, that registers the memory of a pool.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Registration {
    /// No one.
    #[default]
    None,
    /// The kernel, by mlock(2): the memory stays present.
    Locked,
    /// The driver of CUDA, in the context that is current on the thread that opens the pool.
    Cuda,
    /// The driver of HIP, in the context that is current on the thread that opens the pool.
    Hip,
    /// The driver of CUDA or HIP, in this context.
    In(Vendor, Context),
    /// The driver of CUDA or HIP in this library, in the context that is current on the thread that opens the pool.
    Library(Vendor, PathBuf),
    /// The caller.
    With(Arc<dyn Register>),
}

impl Registration {
    /// Loads the driver and looks the context up, on the thread that opens the pool.
    pub(crate) fn resolve(&self) -> Result<Option<Arc<dyn Register>>, DriverError> {
        let by = |vendor, library: Option<&Path>, context| {
            let driver = Driver::load(vendor, library)?;
            let context = match context {
                Some(context) => context,
                None => driver.current_context()?,
            };
            Ok(Some(Arc::new(InContext { driver, context }) as Arc<dyn Register>))
        };
        match self {
            Self::None => Ok(None),
            Self::Locked => Ok(Some(Arc::new(Locked))),
            Self::Cuda => by(Vendor::Cuda, None, None),
            Self::Hip => by(Vendor::Hip, None, None),
            Self::In(vendor, context) => by(*vendor, None, Some(*context)),
            Self::Library(vendor, library) => by(*vendor, Some(library.as_path()), None),
            Self::With(register) => Ok(Some(register.clone())),
        }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Locked => "mlock",
            Self::Cuda | Self::In(Vendor::Cuda, _) | Self::Library(Vendor::Cuda, _) => "CUDA",
            Self::Hip | Self::In(Vendor::Hip, _) | Self::Library(Vendor::Hip, _) => "HIP",
            Self::With(_) => "the caller",
        })
    }
}

/// A driver with the context that it registers in.
struct InContext {
    driver: &'static Driver,
    context: Context,
}

impl Register for InContext {
    fn register(&self, start: Addr, len: ByteLen) -> Result<(), RegisterError> {
        Ok(self.driver.register(self.context, start, len)?)
    }

    fn unregister(&self, start: Addr) -> Result<(), RegisterError> {
        // That there is no registration is as good: no device uses the memory.
        self.driver.unregister(self.context, start)?;
        Ok(())
    }
}

/// mlock(2).
struct Locked;

impl Register for Locked {
    fn register(&self, start: Addr, len: ByteLen) -> Result<(), RegisterError> {
        Ok(lock_memory(start, len)?)
    }

    /// Does nothing: the lock ends with the mapping.
    fn unregister(&self, _: Addr) -> Result<(), RegisterError> {
        Ok(())
    }
}

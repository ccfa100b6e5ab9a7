//! Opening a userfaultfd: [`Uffd`], with the features that are asked for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::uffd::abi;
use crate::uffd::error::UffdError;
use crate::uffd::event::EventBuffer;
use crate::uffd::features::Features;
use crate::uffd::open;

/// Whether faults of the kernel have to be reported, as of a system call that is given a missing page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KernelFaults {
    /// They have to be, or there is no userfaultfd. That takes a privilege or the device.
    Required,
    /// They are reported if this process may have that.
    #[default]
    IfAllowed,
    /// They are not: such a system call fails with `EFAULT`.
    Never,
}

/// A userfaultfd for memory of this process.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
    features: Features,
    sees_kernel_faults: bool,
}

impl Uffd {
    /// Makes a userfaultfd with all of `required` and as many of `optional` as there are.
    ///
    /// # Errors
    /// [`UffdError::NoUserfaultfd`] or [`UffdError::NotForKernel`] without the permission,
    /// [`UffdError::NoDescriptor`] if the process has as many as it may,
    /// [`UffdError::Missing`] without the features, [`UffdError::Forks`] with [`Features::EVENT_FORK`], and
    /// [`UffdError::Probe`] or [`UffdError::Handshake`] if
    /// the kernel refuses.
    pub fn open(
        required: Features,
        optional: Features,
        kernel_faults: KernelFaults,
    ) -> Result<Self, UffdError> {
        if (required | optional).contains(Features::EVENT_FORK) {
            return Err(UffdError::Forks);
        }
        // A descriptor can be asked for its features once.
        let (offered, _) = open::uffd_features()?;
        let missing = required.difference(offered);
        if !missing.is_empty() {
            return Err(UffdError::Missing { missing });
        }
        let (fd, sees_kernel_faults) = match kernel_faults {
            KernelFaults::Never => (open::user_mode_only(), false),
            KernelFaults::Required => {
                let fd = open::full();
                (Ok(fd.map_err(|cause| UffdError::not_opened(cause, true))?), true)
            }
            KernelFaults::IfAllowed => match open::full() {
                Ok(fd) => (Ok(fd), true),
                Err(_) => (open::user_mode_only(), false),
            },
        };
        let fd = fd.map_err(|cause| UffdError::not_opened(cause, false))?;
        let features = required | (optional & offered);
        match abi::handshake(fd.as_fd(), features.bits()) {
            Ok(_) => Ok(Self { fd, features, sees_kernel_faults }),
            Err(cause) => Err(UffdError::Handshake { features, cause: cause.into() }),
        }
    }

    /// Returns the features that it has, of those that were asked for.
    #[must_use]
    pub fn features(&self) -> Features {
        self.features
    }

    /// Returns whether faults of the kernel are reported, as of a system call that is given a missing page;
    /// otherwise such a call fails with `EFAULT`.
    #[must_use]
    pub fn sees_kernel_faults(&self) -> bool {
        self.sees_kernel_faults
    }

    /// Reads pending events into `buffer`, as many as there is room for. Returns their number;
    /// zero means that nothing was pending.
    ///
    /// # Errors
    /// The error of read(2).
    pub fn read(&self, buffer: &mut EventBuffer) -> io::Result<usize> {
        buffer.fill(self.fd.as_fd(), usize::MAX)
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

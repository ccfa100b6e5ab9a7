//! What a userfaultfd of this kernel can do: [`uffd_features`].

use std::os::fd::AsFd;

use crate::uffd::abi;
use crate::uffd::error::UffdError;
use crate::uffd::features::Features;
use crate::uffd::open;

/// The names of the bits of the ioctls, without `UFFDIO_`.
const IOCTLS: [(u32, &str); 10] = [
    (0, "REGISTER"),
    (1, "UNREGISTER"),
    (2, "WAKE"),
    (3, "COPY"),
    (4, "ZEROPAGE"),
    (5, "MOVE"),
    (6, "WRITEPROTECT"),
    (7, "CONTINUE"),
    (8, "POISON"),
    (63, "API"),
];

/// What a userfaultfd of this kernel can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UffdFeatures {
    /// The bits of `UFFD_FEATURE_*`.
    pub raw: u64,
    /// The bits of the ioctls that every userfaultfd has. Those of a range are returned when it is
    /// registered.
    pub ioctls: u64,
}

impl UffdFeatures {
    /// Returns the features as a set.
    #[must_use]
    pub const fn features(&self) -> Features {
        Features::from_bits(self.raw)
    }

    /// Returns whether a feature is offered, by its name without `UFFD_FEATURE_`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.names().any(|known| known == name)
    }

    /// Returns the names of the features that are offered, without `UFFD_FEATURE_`.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.features().names()
    }

    /// Returns the bits that have no name here: features of a newer kernel.
    #[must_use]
    pub fn unnamed(&self) -> u64 {
        self.features().unnamed().bits()
    }

    /// Returns the names of the ioctls that are offered, without `UFFDIO_`.
    pub fn ioctl_names(&self) -> impl Iterator<Item = &'static str> {
        let ioctls = self.ioctls;
        IOCTLS.into_iter().filter(move |(bit, _)| ioctls & (1 << bit) != 0).map(|(_, name)| name)
    }
}

/// Returns what a userfaultfd of this kernel can do, asked of a new one.
///
/// # Errors
/// [`UffdError::NoUserfaultfd`] if none can be had, by the system call or the device, and
/// [`UffdError::Probe`] if the kernel refuses.
pub fn uffd_features() -> Result<UffdFeatures, UffdError> {
    // One for faults of user code has the same features, and needs no right; kernels before 5.11 have none.
    let uffd = open::user_mode_only()
        .or_else(|_| open::full())
        .map_err(|cause| UffdError::NoUserfaultfd { cause: cause.into() })?;
    let (raw, ioctls) = abi::handshake(uffd.as_fd(), 0)
        .map_err(|cause| UffdError::Probe { cause: cause.into() })?;
    Ok(UffdFeatures { raw, ioctls })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_have_names_and_new_ones_stay_bits() {
        let features = UffdFeatures { raw: 1 | 1 << 16 | 1 << 40, ioctls: 1 << 63 | 0b11 };
        assert_eq!(features.names().collect::<Vec<_>>(), ["PAGEFAULT_FLAG_WP", "MOVE"]);
        assert!(features.has("MOVE"));
        assert!(!features.has("POISON"));
        assert_eq!(features.unnamed(), 1 << 40);
        assert_eq!(features.ioctl_names().collect::<Vec<_>>(), ["REGISTER", "UNREGISTER", "API"]);
    }
}

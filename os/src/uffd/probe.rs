//! What a userfaultfd of this kernel can do: [`uffd_features`].

use std::os::fd::AsFd;

use crate::uffd::abi;
use crate::uffd::error::UffdError;
use crate::uffd::features::Features;
use crate::uffd::open;
use crate::uffd::reply::CALLS;

/// The bit of the handshake, which has no number among the answers.
const API: u32 = 63;

/// Returns the names of the ioctls that have a bit.
fn ioctl_names(bits: u64) -> Vec<&'static str> {
    let calls = CALLS.into_iter().zip(0..).chain([("API", API)]);
    calls.filter(|(_, bit)| bits & (1 << bit) != 0).map(|(name, _)| name).collect()
}

/// Returns the features of a userfaultfd of this kernel, and the names without `UFFDIO_` of the ioctls that
/// every one has, asked of a new one. The ioctls of a range are returned when it is registered.
///
/// # Errors
/// [`UffdError::NoUserfaultfd`] if none can be had, by the system call or the device,
/// [`UffdError::NoDescriptor`] if the process has as many as it may, and [`UffdError::Probe`] if the kernel refuses.
pub fn uffd_features() -> Result<(Features, Vec<&'static str>), UffdError> {
    // One for faults of user code has the same features, and needs no right; kernels before 5.11 have none.
    let uffd = open::user_mode_only()
        .or_else(|_| open::full())
        .map_err(|cause| UffdError::not_opened(cause, false))?;
    let (raw, ioctls) =
        abi::handshake(uffd.as_fd(), 0).map_err(|cause| UffdError::Probe(cause.into()))?;
    Ok((Features::from_bits(raw), ioctl_names(ioctls)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_have_names_and_new_ones_stay_bits() {
        let features = Features::from_bits(1 | 1 << 16 | 1 << 40);
        assert_eq!(features.names().collect::<Vec<_>>(), ["PAGEFAULT_FLAG_WP", "MOVE"]);
        assert!(features.contains(Features::MOVE));
        assert!(!features.contains(Features::POISON));
        assert_eq!(features.unnamed().bits(), 1 << 40);
        assert_eq!(ioctl_names(1 << 63 | 0b11), ["REGISTER", "UNREGISTER", "API"]);
    }
}

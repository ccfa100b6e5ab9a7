//! The problem with memory, and its address: [`BusError`], [`BusKind`]; and the reason why it is not recorded:
//! [`HandlerError`].

use core::fmt;
use std::io;

use uzone_pages::{ByteLen, ErrorKind};

use super::table::{Entry, Extent};
use crate::map::options::Addr;

/// The problem with memory: `si_code` of SIGBUS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BusKind {
    /// A page that the thread has just touched is broken or poisoned (`BUS_MCEERR_AR`). Its bytes are lost.
    ActionRequired,
    /// The hardware found a page broken that no thread has touched (`BUS_MCEERR_AO`). A process gets this
    /// only if it asks for it (prctl(2), `PR_MCE_KILL_EARLY`). Its bytes are lost.
    ActionOptional,
    /// There is no memory behind the address (`BUS_ADRERR`): it is behind the end of a file that was
    /// truncated, the filesystem or the pool of huge pages is full, or the page was poisoned through a
    /// userfaultfd.
    BeyondEnd,
    /// The address is not aligned as this access wants it (`BUS_ADRALN`).
    Alignment,
    /// Another number.
    Other,
}

impl BusKind {
    /// Each kind, by its number.
    const ALL: [Self; 5] =
        [Self::ActionRequired, Self::ActionOptional, Self::BeyondEnd, Self::Alignment, Self::Other];

    /// Takes `si_code` of a SIGBUS that the kernel raised.
    fn of_code(code: i32) -> Self {
        match code {
            libc::BUS_ADRALN => Self::Alignment,
            libc::BUS_ADRERR => Self::BeyondEnd,
            libc::BUS_MCEERR_AR => Self::ActionRequired,
            libc::BUS_MCEERR_AO => Self::ActionOptional,
            _ => Self::Other,
        }
    }

    /// Returns whether the kernel reports the extent of the damage.
    fn has_lsb(self) -> bool {
        matches!(self, Self::ActionRequired | Self::ActionOptional)
    }
}

impl fmt::Display for BusKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ActionRequired => "the page is broken or poisoned, and its bytes are lost",
            Self::ActionOptional => "the page was found broken before anyone touched it",
            Self::BeyondEnd => {
                "no memory is behind the address: the file was truncated, its filesystem or pool is full, or the page was poisoned"
            }
            Self::Alignment => "the address is not aligned as the access wants it",
            Self::Other => "the kernel gave no reason",
        })
    }
}

/// A SIGBUS that the kernel raised for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("bus error at {address}, 2^{lsb} bytes: {kind}")]
#[non_exhaustive]
pub struct BusError {
    /// The address that the kernel names (`si_addr`): the touched byte, or the start of the page.
    pub address: Addr,
    /// The part that is broken, as the number of low bits of the address that do not count
    /// (`si_addr_lsb`): 12 is a page of 4 KiB, 21 one of 2 MiB. Zero where the kernel names the
    /// address alone, that is unless `kind` is [`BusKind::ActionRequired`] or
    /// [`BusKind::ActionOptional`].
    pub lsb: u8,
    /// The problem.
    pub kind: BusKind,
}

impl BusError {
    /// Takes an address and its problem; of `lsb`, at most 63 counts.
    #[must_use]
    pub fn new(address: Addr, lsb: u8, kind: BusKind) -> Self {
        Self { address, lsb: lsb.min(63), kind }
    }

    /// Takes `si_code`, `si_addr` and `si_addr_lsb` of a SIGBUS that the kernel raised.
    pub(super) fn of_signal(code: i32, address: usize, lsb: i16) -> Self {
        let kind = BusKind::of_code(code);
        let lsb = if kind.has_lsb() { u8::try_from(lsb).unwrap_or(0).min(63) } else { 0 };
        Self { address: Addr::new(address), lsb, kind }
    }

    /// Returns the addresses that are broken.
    pub(super) fn extent(self) -> Extent {
        let below = (1_u64 << self.lsb) - 1;
        let address = self.address.get() as u64;
        Extent { first: address & !below, last: address | below }
    }

    /// Returns the kind and `lsb` as a word that is not zero.
    pub(super) fn info(self) -> u64 {
        (self.kind as u64 + 1) << 8 | u64::from(self.lsb)
    }

    /// Takes the bits of [`BusError::info`], with an address.
    pub(crate) fn of_info(address: u64, info: u64) -> Self {
        let kind = usize::try_from((info >> 8).wrapping_sub(1)).ok();
        let kind = kind.and_then(|index| BusKind::ALL.get(index).copied());
        let address = usize::try_from(address).unwrap_or(usize::MAX);
        Self {
            address: Addr::new(address),
            lsb: u8::try_from(info & 0xff).unwrap_or(0),
            kind: kind.unwrap_or(BusKind::Other),
        }
    }

    pub(super) fn entry(self) -> Entry {
        Entry { address: self.address.get() as u64, info: self.info() }
    }
}

/// The reason why the handler is not installed, or addresses are not watched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandlerError {
    /// The handler could not be installed.
    #[error("the kernel refused to {} the action of SIGBUS: let a system call filter admit rt_sigaction", if *set { "set" } else { "tell" })]
    Install {
        /// Whether setting it was refused, and not already asking for it.
        set: bool,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// There is no handler that would record errors.
    #[error("the SIGBUS handler is not installed: call sigbus::install first")]
    NotInstalled,
    /// The range has no address.
    #[error("the range at {start} is empty: nothing to watch")]
    Empty {
        /// The start of the range.
        start: Addr,
    },
    /// The range ends behind the last address.
    #[error("the range of {len} at {start} ends behind the last address")]
    Wraps {
        /// The start of the range.
        start: Addr,
        /// The length.
        len: ByteLen,
    },
    /// There are as many watches as there can be.
    #[error("all {slots} watches are in use: drop one, or watch a longer range at once")]
    Full {
        /// The most watches.
        slots: usize,
    },
}

impl HandlerError {
    /// Returns the kind of failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Install { .. } => ErrorKind::PermissionDenied,
            Self::Full { .. } => ErrorKind::OutOfMemory,
            Self::NotInstalled | Self::Empty { .. } | Self::Wraps { .. } => ErrorKind::InvalidInput,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_survives_the_way_through_a_word() {
        for (code, lsb, kind, kept) in [
            (libc::BUS_ADRALN, 0, BusKind::Alignment, 0),
            (libc::BUS_ADRERR, 0, BusKind::BeyondEnd, 0),
            // The kernel does not write this field here.
            (libc::BUS_ADRERR, 12, BusKind::BeyondEnd, 0),
            (libc::BUS_MCEERR_AR, 12, BusKind::ActionRequired, 12),
            (libc::BUS_MCEERR_AO, 21, BusKind::ActionOptional, 21),
            (libc::BUS_MCEERR_AR, -1, BusKind::ActionRequired, 0),
            (libc::BUS_MCEERR_AR, 300, BusKind::ActionRequired, 0),
            (libc::BUS_MCEERR_AR, 99, BusKind::ActionRequired, 63),
            (libc::BUS_OBJERR, 7, BusKind::Other, 0),
            (0x80, 0, BusKind::Other, 0),
        ] {
            let error = BusError::of_signal(code, 0x7fff_1234_5678, lsb);
            assert_eq!((error.kind, error.lsb), (kind, kept), "{code} {lsb}");
            assert_ne!(error.info(), 0);
            let Entry { address, info } = error.entry();
            assert_eq!(BusError::of_info(address, info), error);
        }
    }

    #[test]
    fn a_broken_page_is_all_of_its_addresses() {
        let extent = |code, address, lsb| {
            let Extent { first, last } = BusError::of_signal(code, address, lsb).extent();
            (first, last)
        };
        assert_eq!(extent(libc::BUS_ADRERR, 0x1234, 0), (0x1234, 0x1234));
        assert_eq!(extent(libc::BUS_MCEERR_AR, 0x1234, 12), (0x1000, 0x1fff));
        assert_eq!(extent(libc::BUS_MCEERR_AO, 0x1234, 21), (0, 0x1f_ffff));
        assert_eq!(extent(libc::BUS_MCEERR_AR, usize::MAX, 12), (u64::MAX - 0xfff, u64::MAX));
        assert_eq!(extent(libc::BUS_MCEERR_AR, usize::MAX, 63), (1 << 63, u64::MAX));
    }
}

//! SIGBUS as something a program survives: a handler, watches of addresses, and the error that a
//! copy returns.
//!
//! Memory that is mapped can turn out not to be there: a file was truncated, a filesystem or a pool of huge
//! pages is full, a page server poisoned a page, the hardware found it broken. A thread that touches it
//! gets SIGBUS, and the process dies. After [`install`]:
//!
//! - [`Mapping::read_at`](crate::Mapping::read_at) and [`write_at`](crate::Mapping::write_at)
//!   return [`AccessError::Bus`](crate::AccessError::Bus) with the address, the kind of error and how
//!   much was copied, and so do [`zero_by`](crate::Mapping::zero_by) and
//!   [`copy_by`](crate::Mapping::copy_by). No watch is needed for that.
//! - A [`Watch`] records every error in a range of addresses: also in code that is not ours, and of a page
//!   that no thread has touched yet ([`BusKind::ActionOptional`]).
//! - Everything else goes to the action that SIGBUS had before, and does what it would have done.
//!
//! ```
//! use uzone_os::{Anonymous, Mapping, bus};
//! use uzone_pages::ByteLen;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! bus::install()?;
//! let memory = Mapping::anonymous(ByteLen::mib(4), Anonymous::default())?;
//! let watch = bus::watch(memory.addr(), memory.len())?;
//! if watch.pending() != 0 {
//!     watch.drain(|error| eprintln!("{error}"));
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # What it cannot do
//! - An error in other code is still an error of that code: reading a slice of such memory (that of an
//!   [`Exclusive`](crate::Exclusive) or a [`Mapped`](crate::Mapped), say) is not a copy of ours. The error
//!   is recorded, and then the previous action has the signal; by default the process dies. So is an error
//!   in the caller's own slice, which a copy reads or writes on its other side.
//! - System calls do not raise SIGBUS: one that is given such memory fails with EFAULT, and no watch
//!   sees it.
//! - A thread that blocks SIGBUS dies of it: the kernel does not wait with an error that it cannot
//!   deliver (sigaction(2), "Undefined").
//! - Without `CONFIG_MEMORY_FAILURE` the kernel calls poison [`BusKind::BeyondEnd`], since it knows
//!   no better name.
//! - Copies are recoverable on x86-64 ([`recovers_copies`]). Elsewhere watches work, and a copy dies
//!   as it would have.
//! - The handler stays: a handler that was set after it may call it.
//!
//! # Cost
//!
//! Nothing while there is no error: [`Watch::pending`] is one load, and a copy is the loop that it
//! was. An error costs the signal (some microseconds) and two loads for each slot that was ever
//! used. The table has [`SLOTS`] slots with [`EVENTS`] events each in zero memory of the
//! program, which takes memory when a slot is used.
//!
//! | file | idea |
//! |---|---|
//! | `table` | watched ranges and their events, without a lock |
//! | `handler` | what the signal handler does, and the action before it |
//! | `sync` | atomics, or loom's |
//!
//! Source: sigaction(2), signal-safety(7), madvise(2) on `MADV_HWPOISON`, `UFFDIO_POISON`(2const),
//! and "HWPOISON" in the Linux documentation of memory management.

pub(crate) mod handler;
mod sync;
mod table;

use core::fmt;

use uzone_pages::ByteLen;

pub use self::handler::{InstallError, Installed, install};

use self::table::{Entry, Extent, Table};
use crate::options::Addr;

/// How many watches there can be at a time.
pub const SLOTS: usize = 256;

/// How many events wait in a watch at most; further ones are counted and lost.
pub const EVENTS: usize = 64;

/// The watches of this process. It is never freed, so the handler may look at it at any time.
#[cfg(not(loom))]
static TABLE: Table<SLOTS, EVENTS> = Table::new();
/// The same, where the table is built for the model checker and this crate only has to compile.
#[cfg(loom)]
static TABLE: std::sync::LazyLock<Table<SLOTS, EVENTS>> = std::sync::LazyLock::new(Table::new);

/// Returns whether [`Mapping::read_at`](crate::Mapping::read_at) and
/// [`write_at`](crate::Mapping::write_at) of this build return an error instead of dying, once the
/// handler is installed: on x86-64, but not with a sanitizer, which does not see such copies.
#[must_use]
pub const fn recovers_copies() -> bool {
    crate::bytes::IS_GUARDED
}

/// What is wrong with memory: `si_code` of SIGBUS.
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

    /// Returns whether the kernel reports how much is broken.
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
    /// The address that the kernel names (`si_addr`): what was touched, or the start of the page.
    pub address: Addr,
    /// How much is broken, as the number of low bits of the address that do not count
    /// (`si_addr_lsb`): 12 is a page of 4 KiB, 21 one of 2 MiB. Zero where the kernel names the
    /// address alone, that is unless `kind` is [`BusKind::ActionRequired`] or
    /// [`BusKind::ActionOptional`].
    pub lsb: u8,
    /// What is wrong.
    pub kind: BusKind,
}

impl BusError {
    /// Takes what is wrong where; of `lsb`, at most 63 counts.
    #[must_use]
    pub fn new(address: Addr, lsb: u8, kind: BusKind) -> Self {
        Self { address, lsb: lsb.min(63), kind }
    }

    /// Takes `si_code`, `si_addr` and `si_addr_lsb` of a SIGBUS that the kernel raised.
    fn of_signal(code: i32, address: usize, lsb: i16) -> Self {
        let kind = BusKind::of_code(code);
        let lsb = if kind.has_lsb() { u8::try_from(lsb).unwrap_or(0).min(63) } else { 0 };
        Self { address: Addr::new(address), lsb, kind }
    }

    /// Returns the addresses that are broken.
    fn extent(self) -> Extent {
        let below = (1_u64 << self.lsb) - 1;
        let address = self.address.get() as u64;
        Extent { first: address & !below, last: address | below }
    }

    /// Returns the kind and `lsb` as a word that is not zero.
    fn info(self) -> u64 {
        let kind = match self.kind {
            BusKind::ActionRequired => 1,
            BusKind::ActionOptional => 2,
            BusKind::BeyondEnd => 3,
            BusKind::Alignment => 4,
            BusKind::Other => 5,
        };
        kind << 8 | u64::from(self.lsb)
    }

    /// Takes what [`BusError::info`] returned, with an address.
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

    fn entry(self) -> Entry {
        Entry { address: self.address.get() as u64, info: self.info() }
    }
}

/// A range of addresses that cannot be watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WatchError {
    /// There is no handler that would record errors.
    #[error("the SIGBUS handler is not installed: call bus::install first")]
    NotInstalled,
    /// The range has no address.
    #[error("no address from {start} on is to be watched")]
    Empty {
        /// Where the range starts.
        start: Addr,
    },
    /// The range ends behind the last address.
    #[error("{len} from {start} on end behind the last address")]
    Wraps {
        /// Where the range starts.
        start: Addr,
        /// How long it is.
        len: ByteLen,
    },
    /// There are as many watches as there can be.
    #[error("all {slots} watches are in use: drop one, or watch a longer range at once")]
    Full {
        /// How many there can be.
        slots: usize,
    },
}

/// Watches `len` bytes from `start` on for bus errors, until what it returns is dropped.
///
/// Ranges may overlap: each watch has every error that concerns it. The memory is not touched, and
/// need not stay mapped. If it is unmapped, what else is mapped there is watched.
///
/// # Errors
/// [`WatchError::NotInstalled`] before [`install`], [`WatchError::Empty`], [`WatchError::Wraps`], or
/// [`WatchError::Full`] if there are [`SLOTS`] watches.
pub fn watch(start: Addr, len: ByteLen) -> Result<Watch, WatchError> {
    if !handler::is_installed() {
        return Err(WatchError::NotInstalled);
    }
    if len.is_zero() {
        return Err(WatchError::Empty { start });
    }
    let first = start.get() as u64;
    let last = first.checked_add(len.get() - 1).ok_or(WatchError::Wraps { start, len })?;
    let slot = TABLE.take(Extent { first, last }).ok_or(WatchError::Full { slots: SLOTS })?;
    Ok(Watch { slot, start, len })
}

/// A range of addresses whose bus errors are recorded, until it is dropped.
///
/// # Invariants
/// `slot` was taken from `TABLE` and is this value's alone.
#[must_use = "dropping a watch ends it"]
pub struct Watch {
    slot: usize,
    start: Addr,
    len: ByteLen,
}

impl Watch {
    /// Returns where the range starts.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.start
    }

    /// Returns how long the range is; never zero.
    #[must_use]
    pub fn len(&self) -> ByteLen {
        self.len
    }

    /// Returns whether the range has no address, which never holds.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns how many events wait, in one load. An event counts a moment before it can be
    /// drained.
    #[must_use]
    pub fn pending(&self) -> usize {
        TABLE.pending(self.slot)
    }

    /// Returns how many events were lost, since the watch began, because [`EVENTS`] others waited. Then
    /// check the whole range: errors in it were not recorded.
    #[must_use]
    pub fn lost(&self) -> u64 {
        TABLE.lost(self.slot)
    }

    /// Takes the events that wait, oldest first, and returns how many there were.
    ///
    /// It ends after what waited when it was called. Several threads may drain one watch: each event
    /// goes to one of them. `each` may do anything, for nothing is locked.
    pub fn drain(&self, mut each: impl FnMut(BusError)) -> usize {
        let waiting = self.pending();
        for done in 0..waiting {
            let Some(Entry { address, info }) = TABLE.pop(self.slot) else {
                return done;
            };
            each(BusError::of_info(address, info));
        }
        waiting
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        TABLE.let_go(self.slot);
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch")
            .field("start", &self.start)
            .field("len", &self.len)
            .field("pending", &self.pending())
            .field("lost", &self.lost())
            .finish_non_exhaustive()
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

    #[test]
    fn a_watch_before_the_handler_says_what_is_missing() {
        // The tests of this crate never install it: `tests/live` does, in processes of its own.
        let error = watch(Addr::new(4096), ByteLen::new(1)).unwrap_err();
        assert_eq!(error, WatchError::NotInstalled);
        assert!(error.to_string().ends_with("call bus::install first"));
    }
}

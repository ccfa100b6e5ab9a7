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
//! - Everything else goes to the action that SIGBUS had before, and has the same effect as without this library.
//!
//! ```
//! use uzone_os::{Anonymous, Mapping, sigbus};
//! use uzone_pages::ByteLen;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! sigbus::install()?;
//! let memory = Mapping::anonymous(ByteLen::mib(4), Anonymous::default())?;
//! let watch = sigbus::watch(memory.addr(), memory.len())?;
//! if watch.pending() != 0 {
//!     watch.drain(|error| eprintln!("{error}"));
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Limits
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
//! | `gate` | a range of addresses, and the number of handlers inside |
//! | `index` | which of many gates has an address |
//! | `table` | watched ranges and their events, without a lock |
//! | `error` | the problem with memory, and its address |
//! | `state` | the watches, and whether the handler is installed |
//! | `handler` | the signal handler, and the action before it |
//! | `last_words` | the line that is written before an error is passed on |
//! | `copier` | how words are touched that may not be there |
//! | `guarded` | words touched by code that the handler knows |
//! | `plain` | words touched by the atomics of the language |
//! | `scope` | calls that the handler can end: the stores of `uzone-stream` |
//!
//! Source: sigaction(2), signal-safety(7), madvise(2) on `MADV_HWPOISON`, `UFFDIO_POISON`(2const),
//! and "HWPOISON" in the Linux documentation of memory management.

pub(crate) mod copier;
pub(crate) mod error;
pub(crate) mod gate;
#[cfg(uzone_asm)]
mod guarded;
pub(crate) mod handler;
pub(crate) mod index;
pub(crate) mod last_words;
#[cfg(any(test, not(uzone_asm)))]
pub(crate) mod plain;
#[cfg(uzone_asm)]
mod scope;
pub(crate) mod state;
mod table;

use core::fmt;

use uzone_pages::ByteLen;

pub(crate) use self::copier::{copy_words, flush_words, zero_words};
pub use self::error::{BusError, BusKind, HandlerError};
pub use self::handler::{install, is_in_place};
pub use self::state::{EVENTS, SLOTS};

#[cfg(uzone_asm)]
pub(crate) use self::guarded::Guarded as Best;
#[cfg(not(uzone_asm))]
pub(crate) use self::plain::{Plain as Best, guarded_call};
#[cfg(uzone_asm)]
pub(crate) use self::scope::guarded_call;

use self::state::TABLE;
use self::table::{Entry, Extent};
use crate::map::options::Addr;

/// Returns whether [`Mapping::read_at`](crate::Mapping::read_at) and
/// [`write_at`](crate::Mapping::write_at) of this build return an error instead of dying, once the
/// handler is installed: on x86-64, but not with a sanitizer, which does not see such copies.
#[must_use]
pub const fn recovers_copies() -> bool {
    cfg!(uzone_asm)
}

/// Watches `len` bytes from `start` on for bus errors, until the returned watch is dropped.
///
/// Ranges may overlap: each watch has every error that concerns it. The memory is not touched, and
/// need not stay mapped. If it is unmapped, the next mapping there is watched.
///
/// # Errors
/// [`HandlerError::NotInstalled`] before [`install`], [`HandlerError::Empty`], [`HandlerError::Wraps`], or
/// [`HandlerError::Full`] if there are [`SLOTS`] watches.
pub fn watch(start: Addr, len: ByteLen) -> Result<Watch, HandlerError> {
    if !state::is_installed() {
        return Err(HandlerError::NotInstalled);
    }
    if len.is_zero() {
        return Err(HandlerError::Empty { start });
    }
    let first = start.get() as u64;
    let last = first.checked_add(len.get() - 1).ok_or(HandlerError::Wraps { start, len })?;
    let slot = TABLE.take(Extent { first, last }).ok_or(HandlerError::Full { slots: SLOTS })?;
    Ok(Watch { slot, start })
}

/// A range of addresses whose bus errors are recorded, until it is dropped.
///
/// # Invariants
/// `slot` was taken from `TABLE` and is this value's alone.
#[must_use = "dropping a watch ends it"]
pub struct Watch {
    slot: usize,
    start: Addr,
}

impl Watch {
    /// Returns the start of the range.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.start
    }

    /// Returns the number of events that wait, in one load. An event counts a moment before it can be
    /// drained.
    #[must_use]
    pub fn pending(&self) -> usize {
        TABLE.pending(self.slot)
    }

    /// Returns the number of events that were lost, since the watch began, because [`EVENTS`] others waited. Then
    /// check the whole range: errors in it were not recorded.
    #[must_use]
    pub fn lost(&self) -> u64 {
        TABLE.lost(self.slot)
    }

    /// Takes the events that wait, oldest first, and returns their number.
    ///
    /// It ends after the events that waited when it was called. Several threads may drain one watch: each event
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
            .field("pending", &self.pending())
            .field("lost", &self.lost())
            .finish_non_exhaustive()
    }
}

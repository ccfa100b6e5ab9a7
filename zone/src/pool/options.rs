//! The options of a pool, its numbers, and its errors: [`PoolOptions`], [`PoolStats`],
//! [`PoolError`].

use std::fmt;
use std::num::NonZeroU8;

use uzone_pages::{ByteLen, ErrorKind, Pfn, PfnRange};

use crate::error::WriteError;
use crate::setters::setters;

/// How a pool is run.
#[derive(Clone, Copy, Debug)]
pub struct PoolOptions {
    pub(super) worker_percent: Option<NonZeroU8>,
    pub(super) clears_on_release: bool,
}

impl Default for PoolOptions {
    /// A worker that takes at most half of an otherwise idle CPU.
    fn default() -> Self {
        Self { worker_percent: NonZeroU8::new(50), clears_on_release: false }
    }
}

impl PoolOptions {
    setters! {
        /// Limits the worker to this share of one CPU, in percent; more than 100 is 100. It runs
        /// when no other thread of the host wants to. On a host with several NUMA nodes, each has a worker
        /// that may take as much of one of its CPUs.
        worker(percent: NonZeroU8) worker_percent = Some(percent);

        /// Has no worker: folios are cleared when they are handed out, or when they come back.
        without_worker() worker_percent = None;

        /// Clears a folio when it comes back, on the thread that gives it back.
        clear_on_release() clears_on_release = true;
    }
}

/// Why no folio was handed out, or folios were not taken back. The owner of the folios has not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// There are not as many free folios in a row.
    #[error(
        "too few free folios in a row, of which {folios} are wanted: {free} of {all} are free, {pinned} of these pinned or not there: give back what is not needed, or make the pool larger"
    )]
    Exhausted {
        /// How many were asked for.
        folios: usize,
        /// How many are free at all.
        free: usize,
        /// How many of the free ones are pinned past the pool, being filled or cleared by another thread, or
        /// elsewhere.
        pinned: usize,
        /// How many the pool has.
        all: usize,
    },
    /// None were asked for.
    #[error("no folio was asked for")]
    Nothing,
    /// The memory cannot be cleared.
    #[error("cannot clear the folio")]
    Clear(#[from] WriteError),
    /// The range that is given back is not of whole folios of the pool.
    #[error("{given} are no whole folios of the pool, which has {pool}")]
    Foreign {
        /// What was given back.
        given: PfnRange,
        /// The pages of the pool.
        pool: PfnRange,
    },
    /// A folio is free already.
    #[error("the folio of page {pfn} is free already")]
    Free {
        /// The first page of the folio.
        pfn: Pfn,
    },
    /// A `Pooled` guard has the folio, and gives it back when it is dropped.
    #[error(
        "the folio of page {pfn} belongs to a Pooled guard: drop that, or take the range out of it by \
         Pooled::into_range first"
    )]
    Guarded {
        /// The first page of the folio.
        pfn: Pfn,
    },
    /// A folio is pinned, and its holder may still write to it.
    #[error("the folio of page {pfn} has {pins} pins: give those back first")]
    Pinned {
        /// The first page of the folio.
        pfn: Pfn,
        /// How many pins.
        pins: u32,
    },
}

impl PoolError {
    /// Returns the kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Exhausted { .. } => ErrorKind::OutOfMemory,
            Self::Clear(error) => error.kind(),
            Self::Pinned { .. } | Self::Guarded { .. } => ErrorKind::Busy,
            Self::Nothing | Self::Foreign { .. } | Self::Free { .. } => ErrorKind::InvalidInput,
        }
    }
}

/// The numbers of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// How many folios it has.
    pub folios: usize,
    /// How many are handed out.
    pub used: usize,
    /// How many are free and zero.
    pub zero: usize,
    /// How many are free and wait to be cleared: the worker's queue.
    pub dirty: usize,
    /// How many are free and pinned past the pool, or not there: set aside until a taker finds no
    /// other.
    pub pinned: usize,
    /// How many are free and bad, and never handed out.
    pub bad: usize,
    /// How many folios the worker has cleared.
    pub cleared_ahead: u64,
    /// How many folios a taker had to clear.
    pub cleared_on_demand: u64,
    /// How many folios were cleared when they came back.
    pub cleared_on_release: u64,
    /// How many bytes all of those have.
    pub cleared: ByteLen,
}

impl fmt::Display for PoolStats {
    /// `512 folios: 3 used, 500 zero, 9 dirty, 0 pinned, 0 bad; 20 cleared ahead, 4 on demand, 0 on release
    /// (48 MiB)`, without an end of line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { folios, used, zero, dirty, pinned, bad, .. } = self;
        let Self { cleared_ahead, cleared_on_demand, cleared_on_release, cleared, .. } = self;
        write!(
            f,
            "{folios} folios: {used} used, {zero} zero, {dirty} dirty, {pinned} pinned, {bad} bad; "
        )?;
        write!(f, "{cleared_ahead} cleared ahead, {cleared_on_demand} on demand, ")?;
        write!(f, "{cleared_on_release} on release ({cleared:.1})")
    }
}

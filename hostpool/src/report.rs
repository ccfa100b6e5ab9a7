//! The outcome of a pool so far: [`HostPoolReport`], [`HostPoolStats`].

use std::fmt;
use std::time::Duration;

use uzone_pages::ByteLen;

/// The outcome of a pool so far, and the reasons why it is not better.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct HostPoolReport {
    /// How long the pool is.
    pub len: ByteLen,
    /// How long a block is.
    pub block: ByteLen,
    /// How many bytes are present and registered.
    pub ready: ByteLen,
    /// How many bytes are in huge pages; `None` before all are populated, and for a pool that is filled on demand.
    pub huge: Option<ByteLen>,
    /// How many bytes are in small pages, as `huge`.
    pub small: Option<ByteLen>,
    /// The node that more than half of a sample of its pages lie on, on a host with several.
    pub node: Option<u32>,
    /// The means of registering: `CUDA`, `HIP`, `mlock`, `the caller` or `none`.
    pub registered_by: String,
    /// How many pieces are registered.
    pub pieces: usize,
    /// For how long memory was populated.
    pub populating: Duration,
    /// How long all registrations took, without the pauses.
    pub registering: Duration,
    /// How long the longest of them took.
    pub longest_piece: Duration,
    /// When the first block was ready, from the opening on.
    pub first_ready: Option<Duration>,
    /// When all blocks were.
    pub all_ready: Option<Duration>,
    /// Why it is not better, a sentence each.
    pub notes: Vec<String>,
}

impl fmt::Display for HostPoolReport {
    /// `4 GiB of 4 GiB ready in 0.18s, registered by CUDA in 69 pieces (0.12s, longest 2.1ms), ...`, and a line for each
    /// note.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { len, ready, registered_by, pieces, registering, longest_piece, .. } = self;
        write!(f, "{ready} of {len} ready")?;
        if let Some(all) = self.all_ready {
            write!(f, " in {all:.1?}")?;
        }
        if let Some(first) = self.first_ready {
            write!(f, ", the first block in {first:.1?}")?;
        }
        write!(f, "; populated in {:.1?}", self.populating)?;
        if let (Some(huge), Some(small)) = (self.huge, self.small) {
            write!(f, ": {huge} in huge pages, {small} in small ones")?;
        }
        write!(f, "; registered by {registered_by} in {pieces} pieces, {registering:.1?}")?;
        write!(f, ", the longest {longest_piece:.1?}")?;
        if let Some(node) = self.node {
            write!(f, "; node {node}")?;
        }
        self.notes.iter().try_for_each(|note| write!(f, "\n  {note}"))
    }
}

/// The number of blocks of a pool in each state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostPoolStats {
    /// How many it has.
    pub blocks: usize,
    /// How many are handed out.
    pub used: usize,
    /// How many are free and zero, or free at all where the pool never clears.
    pub zero: usize,
    /// How many are free and have to be cleared, or populated, first.
    pub dirty: usize,
    /// How many are not ready yet, or being cleared.
    pub in_work: usize,
    /// How many are bad, and never handed out.
    pub bad: usize,
    /// How many were cleared ahead of need.
    pub cleared_ahead: u64,
    /// How many a taker had to clear, or to populate.
    pub cleared_on_demand: u64,
    /// How many were cleared when they came back.
    pub cleared_on_release: u64,
}

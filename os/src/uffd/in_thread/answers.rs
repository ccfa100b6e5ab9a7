//! How faults are answered by the threads that take them: [`Answers`].

use core::ops::Range;
use std::fs::File;
use std::sync::Arc;

use uzone_pages::{ByteLen, FaultAround};

use crate::mapping::Mapping;
use crate::uffd::handover::Handover;
use crate::uffd::pace::Pace;
use crate::uffd::write_states::WriteStates;

/// Where pages come from.
#[derive(Debug)]
pub enum Source {
    /// The memory file that the memory is a mapping of. Its holes are zero.
    Cached,
    /// Files and zeroes, in order and without a gap.
    Parts(Vec<SourcePart>),
}

impl Source {
    /// Returns a source of nothing but zeroes.
    #[must_use]
    pub fn zero() -> Self {
        Self::Parts(vec![SourcePart { range: 0..u64::MAX, file: None }])
    }

    /// Returns a source of a file alone.
    #[must_use]
    pub fn file(file: FileSource) -> Self {
        Self::Parts(vec![SourcePart { range: 0..u64::MAX, file: Some((file, 0)) }])
    }
}

/// A file, and all of it mapped.
#[derive(Clone, Debug)]
pub struct FileSource {
    /// The file, whose length is looked at.
    pub file: Arc<File>,
    /// The file, mapped from its start on.
    pub mapped: Arc<Mapping>,
    /// How many bytes it had when it was taken. What is behind is zero, up to the end of that page.
    pub len: ByteLen,
}

/// Some bytes of a memory, in whole pages.
#[derive(Debug)]
pub struct SourcePart {
    /// Where it is in the memory.
    pub range: Range<u64>,
    /// The file, and where the part starts in it; without one it is zero.
    pub file: Option<(FileSource, u64)>,
}

/// How writes are tracked.
#[derive(Debug, Default)]
pub enum Writes {
    /// They are not.
    #[default]
    Free,
    /// The kernel records them, and lets writers in.
    Recorded,
    /// Each first write of a page is an event.
    Awaited(Arc<WriteStates>),
}

/// Which pages a fault maps.
#[derive(Clone, Copy, Debug)]
pub enum Window {
    /// The aligned window of that size.
    Fixed(FaultAround),
    /// Windows that grow up to a size.
    Growing {
        /// The size of the second window of a reader in order.
        first: FaultAround,
        /// The largest window of such a reader.
        most: FaultAround,
        /// After so many faults of other threads in a block of 512 pages, all of it is mapped.
        block_after: u8,
    },
}

/// How faults are answered.
#[derive(Debug)]
pub struct Answers {
    pub(super) source: Source,
    pub(super) window: Window,
    pub(super) writes: Writes,
    pub(super) records: usize,
    pub(super) handover: Option<Arc<Handover>>,
    pub(super) waits: bool,
    pub(super) pace: Option<Pace>,
}

impl Answers {
    /// Fills pages from `source`, as many at a time as `window` has.
    #[must_use]
    pub fn new(source: Source, window: Window) -> Self {
        let (writes, handover, pace) = (Writes::Free, None, None);
        Self { source, window, writes, records: 0, handover, waits: true, pace }
    }

    /// Hands faults over that cannot be answered here.
    #[must_use]
    pub fn hands_over(mut self, to: Arc<Handover>) -> Self {
        self.handover = Some(to);
        self
    }

    /// Hands over what would have to be waited for, too.
    #[must_use]
    pub fn without_waiting(mut self) -> Self {
        self.waits = false;
        self
    }

    /// Lets threads wait that take more faults, or have more filled, than that.
    #[must_use]
    pub fn pace(mut self, pace: Pace) -> Self {
        self.pace = Some(pace);
        self
    }

    /// Tracks writes.
    #[must_use]
    pub fn writes(mut self, writes: Writes) -> Self {
        self.writes = writes;
        self
    }

    /// Keeps records of the last faults.
    #[must_use]
    pub fn records(mut self, keeps: usize) -> Self {
        self.records = keeps;
        self
    }
}

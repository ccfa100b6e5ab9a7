//! How faults are answered by the threads that take them: [`Answers`].

use core::num::{NonZeroU32, NonZeroU64};
use core::ops::Range;
use std::fs::File;
use std::sync::Arc;

use uzone_pages::{ByteLen, FaultAround};

use crate::map::mapping::Mapping;
use crate::map::options::Anonymous;
use crate::uffd::handover::Handover;
use crate::uffd::pace::Paced;
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
    /// A page for the last one, if the file ends inside of it: in the file's own, others may have written behind the
    /// end.
    pub(super) tail: Option<Arc<Mapping>>,
}

impl FileSource {
    /// Takes a file that has `len` bytes, and all of it mapped.
    #[must_use]
    pub fn new(file: Arc<File>, mapped: Arc<Mapping>, len: ByteLen) -> Self {
        let page = mapped.page_size();
        let cuts = !len.get().is_multiple_of(page.bytes());
        // Without one, the last page is not filled.
        let tail = || Mapping::anonymous(ByteLen::new(page.bytes()), Anonymous::default()).ok();
        let tail = cuts.then(tail).flatten().map(Arc::new);
        Self { file, mapped, len, tail }
    }
}

/// Some bytes of a memory, in whole pages.
#[derive(Debug)]
pub struct SourcePart {
    /// Where it is in the memory.
    pub range: Range<u64>,
    /// The file, and where the part starts in it; without one it is zero.
    pub file: Option<(FileSource, u64)>,
}

/// How faults are answered.
#[derive(Debug)]
pub struct Answers {
    pub(super) source: Source,
    pub(super) around: FaultAround,
    pub(super) growth: Option<(FaultAround, u8)>,
    pub(super) tracks_writes: bool,
    pub(super) states: Option<Arc<WriteStates>>,
    pub(super) records: usize,
    pub(super) handover: Option<Arc<Handover>>,
    pub(super) waits: bool,
    pub(super) paced: Option<Paced>,
}

impl Answers {
    /// Fills pages from `source`, those of the aligned window of that size for each fault.
    #[must_use]
    pub fn new(source: Source, around: FaultAround) -> Self {
        Self {
            source,
            around,
            growth: None,
            tracks_writes: false,
            states: None,
            records: 0,
            handover: None,
            waits: true,
            paced: None,
        }
    }

    /// Lets windows grow: the second one of a reader in order has the size that [`Answers::new`] was given,
    /// and `most` is the largest. After `block_after` faults of other threads in a block of 512 pages, all of
    /// it is mapped.
    #[must_use]
    pub fn growing(mut self, most: FaultAround, block_after: u8) -> Self {
        self.growth = Some((most, block_after));
        self
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

    /// Lets threads wait that take more faults, or have more bytes filled, a second than that.
    #[must_use]
    pub fn pace(mut self, faults: Option<NonZeroU32>, bytes: Option<NonZeroU64>) -> Self {
        self.paced = (faults.is_some() || bytes.is_some()).then(|| Paced::new(faults, bytes));
        self
    }

    /// Tracks writes: with `states`, each first write of a page is an event; without, the kernel records
    /// them, and lets writers in.
    #[must_use]
    pub fn track_writes(mut self, states: Option<Arc<WriteStates>>) -> Self {
        (self.tracks_writes, self.states) = (true, states);
        self
    }

    /// Keeps records of the last faults.
    #[must_use]
    pub fn records(mut self, keeps: usize) -> Self {
        self.records = keeps;
        self
    }
}

//! The answers of threads that take faults: [`Answers`].

use core::num::{NonZeroU32, NonZeroU64};
use std::fs::File;
use std::sync::Arc;

use uzone_pages::{ByteLen, FaultPlanner};

use crate::map::mapping::Mapping;
use crate::map::options::Anonymous;
use crate::uffd::handover::Handover;
use crate::uffd::write_states::WriteStates;

/// The source of pages.
#[derive(Debug)]
pub enum Source {
    /// The memory file that the memory is a mapping of. Its holes are zero.
    Cached,
    /// A file.
    File(FileSource),
    /// Zeroes.
    Zero,
}

/// A file, and all of it mapped.
#[derive(Clone, Debug)]
pub struct FileSource {
    /// The file, whose length is looked at.
    pub file: Arc<File>,
    /// The file, mapped from its start on.
    pub mapped: Arc<Mapping>,
    /// The number of bytes that it had when it was taken. Bytes behind them are zero, up to the end of that page.
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

/// The answers to faults.
#[derive(Debug)]
pub struct Answers {
    /// The source of pages.
    pub source: Source,
    /// The pages that are filled for a fault, by the numbers that they have in the memory.
    pub planner: Arc<FaultPlanner>,
    /// Whether writes are tracked. The kernel records them and lets writers in, unless there are
    /// `states`.
    pub tracks_writes: bool,
    /// With these, each first write of a tracked page is an event.
    pub states: Option<Arc<WriteStates>>,
    /// The number of records that are kept of the last faults.
    pub records: usize,
    /// The way for faults that cannot be answered here.
    pub handover: Option<Arc<Handover>>,
    /// Whether a page is waited for. If not, it is handed over, too.
    pub waits: bool,
    /// The faults that threads take a second, and the bytes that are filled for them, before they
    /// have to wait.
    pub pace: (Option<NonZeroU32>, Option<NonZeroU64>),
}

impl Answers {
    /// Fills the pages of each plan from `source`.
    #[must_use]
    pub fn new(source: Source, planner: Arc<FaultPlanner>) -> Self {
        Self {
            source,
            planner,
            tracks_writes: false,
            states: None,
            records: 0,
            handover: None,
            waits: true,
            pace: (None, None),
        }
    }
}

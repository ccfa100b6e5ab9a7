//! Why a bind, a pin, a write, a fault or a step of poison was refused.

use std::fmt;
use std::io;
use std::path::PathBuf;

use uzone_os::memory::Limit;
use uzone_os::{AccessError, Addr, KernelPinError, MapError, MappingError, SysError, hugepages};
use uzone_pages::{
    AddrError, AdvanceError, ByteLen, Content, ErrorKind, HoldError, Order, PageCount, PageSize,
    Pfn, PfnRange,
};

use crate::source::RegionSource;

/// Why a region could not be made or bound.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The length of the region is no multiple of the page size.
    #[error("a region of {len_bytes} bytes ends inside a page: its length is a multiple of {page}")]
    EndsInsidePage {
        /// The length that was asked for.
        len_bytes: u64,
        /// The size of a page of the backing.
        page: PageSize,
    },
    /// A mapping that was to be adopted does not have whole pages.
    #[error(
        "cannot adopt the mapping of {len_bytes} bytes at {addr}: its length is no multiple of {page}"
    )]
    Adopt {
        /// Where the mapping starts.
        addr: Addr,
        /// Its length.
        len_bytes: u64,
        /// The size of a page.
        page: PageSize,
    },
    /// The memory of the region could not be mapped.
    #[error("cannot make a region of {len} of {backing}")]
    Region {
        /// The length that was asked for.
        len: ByteLen,
        /// The source of its memory.
        backing: RegionSource,
        /// The limit or check that forbade it, and the remedy.
        #[source]
        cause: MapError,
    },
    /// The file is no DAX device, or the kernel does not say enough about it.
    #[error("cannot make a region of {path} as a DAX device", path = path.display())]
    Device {
        /// The file.
        path: PathBuf,
        /// The expectation, and how it is met.
        #[source]
        cause: MapError,
    },
    /// A file could not be opened or read.
    #[error("cannot open {path} for reading and writing", path = path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The answer of the kernel.
        #[source]
        cause: io::Error,
    },
    /// The region starts or ends inside a folio, its descriptors do not fit in it, or a frame number is beyond
    /// 64 bits.
    #[error(transparent)]
    Addr(#[from] AddrError),
    /// A folio is larger than the region.
    #[error("a folio of order {order} has {folio} pages, and the region only {pages}")]
    FolioLargerThanRegion {
        /// The order that was asked for.
        order: Order,
        /// Pages in a folio.
        folio: PageCount,
        /// Pages in the region.
        pages: PageCount,
    },
    /// The frame numbers belong to another region.
    #[error("{range} overlap {bound}, which are bound already")]
    Overlaps {
        /// The frame numbers that were asked for.
        range: PfnRange,
        /// Those that are taken.
        bound: PfnRange,
    },
    /// The bytes of the region's file are described already.
    #[error("the bytes of the region are bound already, as {bound}")]
    SameBytes {
        /// The frame numbers that they have.
        bound: PfnRange,
    },
    /// The region's pages have no frame numbers from there on.
    #[error("the {pages} pages of the region do not fit behind page {base}: choose a smaller base")]
    NoNumbers {
        /// The first frame number that was asked for.
        base: Pfn,
        /// Pages in the region.
        pages: PageCount,
    },
    /// The CPU does not have the store that was asked for.
    #[error("this CPU has no {path} stores: leave the choice to bind, or see `uzone doctor`")]
    NoStore {
        /// The store that was asked for.
        path: uzone_stream::Path,
    },
    /// Descriptors that bind does not write start at zero, and those of this payload do not.
    #[error("a payload with an initial value cannot be initialised on touch: ask for Init::Eager")]
    NotZero,
    /// The descriptors are to lie in the region, and to be initialised on touch, and its first pages
    /// may have old bytes.
    #[error(
        "descriptors in the region itself can be initialised on touch only where its memory is \
         private, of no file and reads as zero: ask for Init::Eager, or leave the choice to bind"
    )]
    OldBytes,
    /// Others may have the memory that the descriptors are to lie in.
    #[error(
        "the descriptors cannot lie in memory that others may change: vouch for it with \
         AltmapOptions::exclusive, or bind without an altmap"
    )]
    NoPromise,
    /// The promise about the memory for the descriptors does not help.
    #[error("the descriptors cannot lie in the region")]
    Promise(#[source] MappingError),
    /// A page that the descriptors are to lie in is known to be bad.
    #[error(
        "page {page} of the region was bad when it was unbound, and would hold descriptors: bind \
         without an altmap, or with another reserve"
    )]
    BadPage {
        /// The page, counted from the region's first.
        page: PageCount,
    },
    /// The region was not cut for its descriptors. A bug of this crate's.
    #[error("the region was not cut for its descriptors")]
    NotCut,
    /// There is not enough memory for descriptors that are all written.
    #[error(
        "the descriptors need {needed:.1} of memory, and {available:.1} can be had ({limited_by}): \
         describe larger folios, initialise on touch, or raise that limit"
    )]
    TooLittleMemory {
        /// Bytes of descriptors.
        needed: ByteLen,
        /// Bytes that this process may still take.
        available: ByteLen,
        /// The limit.
        limited_by: Limit,
    },
    /// The memory for the descriptors could not be mapped.
    #[error("cannot map {len} for the descriptors")]
    Map {
        /// Bytes of descriptors.
        len: ByteLen,
        /// The limit that forbade it, and the remedy.
        #[source]
        cause: MapError,
    },
    /// The memory for the descriptors could not be made present.
    #[error("cannot populate the memory for the descriptors")]
    Populate(#[source] MappingError),
    /// The memory that is to be known as zero may have been written to.
    #[error(
        "the memory is not known to be zero: its address was given out, or it was written to; \
         leave out BindOptions::known_zero, and clear what is handed out"
    )]
    NotZeroMemory,
    /// The caller cancelled.
    #[error("the bind was cancelled after {done} of {total} of descriptors")]
    Cancelled {
        /// Bytes of descriptors that had been written, at least.
        done: ByteLen,
        /// Bytes of descriptors that should have been.
        total: ByteLen,
    },
}

/// Why pages were not held, a guard not turned into bits, redeemed or listed, or a page not marked as bad or as good.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// Not every page belongs to the region.
    #[error("{asked} do not all belong to the region, which has {region}")]
    NotHere {
        /// The pages that were asked for.
        asked: PfnRange,
        /// The pages of the region.
        region: PfnRange,
    },
    /// No region of the zone has this page.
    #[error("no region of the zone has page {pfn}: bind it first")]
    NoPage {
        /// The first page that no region has.
        pfn: Pfn,
    },
    /// No region of the zone has this address.
    #[error("no region of the zone has the address {address:#x}: bind the memory there first")]
    NoAddress {
        /// The first address that no region has.
        address: usize,
    },
    /// A range without a byte, or one that ends beyond every address.
    #[error("{len_bytes} bytes from {address:#x} on are no range of addresses")]
    NoRange {
        /// The first address.
        address: usize,
        /// The length that was asked for.
        len_bytes: u64,
    },
    /// A page is not described: it holds the descriptors of the region, or is kept for its owner.
    #[error(
        "page {pfn} holds the descriptors of the region: the pages {metadata} cannot be held or marked; \
         if one of them is bad, unbind the region, and bind it without that page"
    )]
    Metadata {
        /// The first such page that was asked for.
        pfn: Pfn,
        /// All such pages of the region.
        metadata: PfnRange,
    },
    /// A folio gives no hold. None is held.
    #[error("cannot hold the folio of page {pfn}; the {good} pages before it could be held")]
    Refused {
        /// The first page that could not be held.
        pfn: Pfn,
        /// How many pages from the start of the range could have been.
        good: PageCount,
        /// Why not.
        #[source]
        cause: HoldError,
    },
    /// A page of the range is bad. None is pinned.
    #[error("page {pfn} is bad; of the range, {good} good pieces can be pinned", good = good.len())]
    Poisoned {
        /// The first bad page.
        pfn: Pfn,
        /// The pieces of the range without a bad page, in ascending order.
        good: Vec<PfnRange>,
    },
    /// The page is not there, and producing it failed.
    #[error("cannot pin page {pfn}: it is not there, and could not be produced")]
    Fault {
        /// The page.
        pfn: Pfn,
        /// The answer of the callback of [`PagemapOps::populate`](crate::PagemapOps::populate).
        #[source]
        cause: FaultError,
    },
    /// The memory may be pinned for a moment only.
    #[error(
        "{what} cannot be pinned for long: its owner has to be able to take pages away soon; pin it \
         for the time of one request"
    )]
    NotForLong {
        /// The kind of memory.
        what: &'static str,
    },
    /// The kernel did not pin the pages, or does not show their place in the machine's memory.
    #[error(transparent)]
    Kernel(Box<KernelPinError>),
    /// The place of the pages was asked for, and the kernel may move them.
    #[error(
        "{range} may be moved by the kernel, so they have no lasting place: pin them with PinOptions::kernel"
    )]
    NotKept {
        /// The pages of the guard.
        range: PfnRange,
    },
    /// The folio cannot be handed out: it has been, or its memory is generic.
    #[error(
        "the folio of page {pfn} cannot be handed out: it is not free (references: {references})"
    )]
    NotFree {
        /// The page that was asked for.
        pfn: Pfn,
        /// How many references there were.
        references: u32,
    },
    /// The pagemap admits no guard.
    #[error("cannot hold pages of this region")]
    NotAdmitted(#[source] HoldError),
    /// The page is to be marked as bad, and is already.
    #[error("page {pfn} is known to be bad")]
    AlreadyPoisoned {
        /// The page that was given.
        pfn: Pfn,
    },
    /// The page is to be marked as good, and is not bad.
    #[error("page {pfn} is not bad: there is nothing to unpoison")]
    NotPoisoned {
        /// The page that was given.
        pfn: Pfn,
    },
    /// The page is to be marked as good while a thread clears or fills it, which has not seen yet that it
    /// is bad.
    #[error("page {pfn} is being cleared or filled: unpoison it when that has ended")]
    Owned {
        /// The page that was given.
        pfn: Pfn,
    },
    /// A list is too short for the page frames of a guard. Nothing was written.
    #[error("a list of {given} has no room for {needed} page frame numbers")]
    ListTooShort {
        /// How many there are.
        needed: u64,
        /// How many the list has room for.
        given: usize,
    },
    /// The zone has 2^32 raw guards already.
    #[error("the zone has as many raw guards as there are numbers for: redeem some first")]
    TooManyRawGuards,
    /// Bits are no guard of the zone.
    #[error(
        "{bits:#x} is no guard of this zone: it was redeemed already, or belongs to another, or was \
         never one"
    )]
    NotAGuard {
        /// The bits that were given.
        bits: u64,
    },
}

// It is returned by each pin, so it stays small.
const _: () = assert!(size_of::<PinError>() <= 40);

/// Why bytes of a region were not written, cleared, copied, given back, or made present or
/// persistent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The pages are not all the region's, or they cannot be pinned.
    #[error("cannot use the pages")]
    Pin(#[from] PinError),
    /// The bytes are not all inside the region.
    #[error("cannot write {len_bytes} bytes at byte {offset_bytes:#x}")]
    Outside {
        /// Where the first byte should have gone.
        offset_bytes: u64,
        /// How many bytes were given.
        len_bytes: usize,
        /// Why there are no such pages.
        #[source]
        cause: AddrError,
    },
    /// There is no byte to clear or copy, or the hint is not among them.
    #[error(transparent)]
    Addr(#[from] AddrError),
    /// The memory is read-only, not there, or shorter than the bytes that were asked for.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The range starts or ends inside a folio, whose content is one.
    #[error("{asked} cut a folio of order {order}: content is a folio's, so take whole ones")]
    CutsFolio {
        /// The pages that were asked for.
        asked: PfnRange,
        /// The order of the region's folios.
        order: Order,
    },
    /// A page is not being filled.
    #[error(
        "cannot fill page {pfn}: its content is {content}; advance it from absent to filling first"
    )]
    NotFilling {
        /// The first such page.
        pfn: Pfn,
        /// Its content.
        content: Content,
    },
    /// Source and destination share bytes.
    #[error(
        "cannot copy {len} from {from:#x} to {to:#x}: they overlap; copy in two steps, by way of other memory"
    )]
    Overlap {
        /// The address of the first byte to read.
        from: u64,
        /// The address of the first byte to write.
        to: u64,
        /// How many.
        len: ByteLen,
    },
    /// The kernel does not take the pages back.
    #[error("cannot give pages back")]
    Punch(#[source] MappingError),
    /// A page is bad: the bytes written there are lost.
    #[error("cannot make page {pfn} last: it is bad, and its bytes are lost")]
    Poisoned {
        /// The first such page.
        pfn: Pfn,
    },
    /// The memory ends with the process, or its source is not known.
    #[error(
        "cannot make bytes durable: the region is {backing}, which has no storage; use a file, a file on a DAX mount, or a DAX device"
    )]
    NoStorage {
        /// The source of the memory.
        backing: RegionSource,
    },
    /// The CPU, or this build, has no instruction that writes cache lines back.
    #[error(
        "cannot make bytes durable: this build has no instruction that writes cache lines back"
    )]
    NoInstruction,
    /// The device did not take the pages.
    #[error("cannot make bytes durable")]
    Sync(#[source] MappingError),
    /// Pages were not made present: the range is not inside of the region, or the kernel refused a
    /// part of it. The error states how much is present.
    #[error(transparent)]
    Populate(#[from] MappingError),
    /// There is not enough memory. Nothing was populated.
    #[error(
        "{needed:.1} are needed and {available:.1} can be had, limited by {limited_by}: raise that limit, or populate less"
    )]
    TooLittleMemory {
        /// The bytes of the range that are not present yet.
        needed: ByteLen,
        /// The bytes that this process may still take.
        available: ByteLen,
        /// The limit.
        limited_by: Limit,
    },
    /// The pool of huge pages is too small. Nothing was populated.
    #[error(
        "the pool of {size} pages has {free} free, and {needed} are needed: write a larger number to {path}", path = hugepages::nr_path(*size)
    )]
    HugePool {
        /// The size of its pages.
        size: PageSize,
        /// The bytes of the range that are not present yet.
        needed: ByteLen,
        /// How many bytes its free pages are.
        free: ByteLen,
    },
    /// Huge pages were required, and this memory gets none. Nothing was populated.
    #[error("huge pages are required, and there are none for {backing}: {why}")]
    NoHugePages {
        /// The source of the region.
        backing: RegionSource,
        /// The reason, and the remedy.
        why: &'static str,
    },
    /// Huge pages were required, and there were not enough. Present pages stay so.
    #[error(
        "huge pages are required, and of {wanted} only {huge} are in them: free memory and write 1 to /proc/sys/vm/compact_memory, or use a hugetlb pool"
    )]
    TooFewHugePages {
        /// How many bytes of the range can be in huge pages.
        wanted: ByteLen,
        /// How many are.
        huge: ByteLen,
    },
    /// There is no such node.
    #[error("there is no NUMA node {node} with CPUs: `uzone doctor` lists those that there are")]
    Node {
        /// The node that was asked for.
        node: u32,
    },
    /// A thread of a node could not be started. Nothing was populated.
    #[error(
        "cannot start a thread for a NUMA node; raise `ulimit -u`, or leave out PopulateOptions::node"
    )]
    Thread(#[source] io::Error),
    /// The numbers of the host could not be read.
    #[error("cannot read the numbers of the host")]
    Sys(#[from] SysError),
}

impl BindError {
    /// Returns the kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Region { cause, .. } | Self::Device { cause, .. } | Self::Map { cause, .. } => {
                cause.kind()
            }
            Self::Promise(error) | Self::Populate(error) => error.kind(),
            Self::Open { .. } => ErrorKind::Io,
            Self::Overlaps { .. } | Self::SameBytes { .. } => ErrorKind::AlreadyExists,
            Self::NoStore { .. } => ErrorKind::NotSupported,
            Self::BadPage { .. } => ErrorKind::Poisoned,
            Self::TooLittleMemory { .. } => ErrorKind::OutOfMemory,
            Self::Cancelled { .. } => ErrorKind::Cancelled,
            Self::NotCut => ErrorKind::Other,
            _ => ErrorKind::InvalidInput,
        }
    }
}

impl PinError {
    /// Returns the kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotHere { .. } | Self::NoPage { .. } | Self::NoAddress { .. } => {
                ErrorKind::NotFound
            }
            Self::Refused { cause, .. } | Self::NotAdmitted(cause) => cause.kind(),
            Self::Poisoned { .. } => ErrorKind::Poisoned,
            Self::Fault { .. } => ErrorKind::Io,
            Self::NotForLong { .. } => ErrorKind::NotSupported,
            Self::Kernel(error) => error.kind(),
            Self::TooManyRawGuards => ErrorKind::OutOfMemory,
            Self::NotFree { .. } | Self::Owned { .. } => ErrorKind::Busy,
            Self::NotAGuard { .. } => ErrorKind::NotFound,
            _ => ErrorKind::InvalidInput,
        }
    }
}

impl WriteError {
    /// Returns the kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Pin(error) => error.kind(),
            Self::Access(error) => error.kind(),
            Self::Punch(error) | Self::Sync(error) | Self::Populate(error) => error.kind(),
            Self::Sys(error) => error.kind(),
            Self::NotFilling { .. } => ErrorKind::Busy,
            Self::Poisoned { .. } => ErrorKind::Poisoned,
            Self::NoStorage { .. } | Self::NoInstruction | Self::NoHugePages { .. } => {
                ErrorKind::NotSupported
            }
            Self::TooLittleMemory { .. }
            | Self::HugePool { .. }
            | Self::Thread(_)
            | Self::TooFewHugePages { .. } => ErrorKind::OutOfMemory,
            _ => ErrorKind::InvalidInput,
        }
    }
}

/// Why bytes were not cleared or copied.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unclearable {
    /// It is pinned: a device may be writing to it.
    #[error("it has {pins} pins")]
    Pinned {
        /// How many.
        pins: u32,
    },
    /// Its bytes are lost.
    #[error("it is bad")]
    Poisoned,
    /// It is not there, or a thread is at work on its bytes.
    #[error("its content is {0}")]
    Content(Content),
    /// Touching it raised `SIGBUS`, which a handler that is installed made this of
    /// ([`sigbus::install`](uzone_os::sigbus::install)). Of its bytes nothing is known; if the program watches for
    /// that ([`Pagemap::watch_bus_errors`](crate::PagemapView::watch_bus_errors)), the page is bad from now on.
    #[error("its memory is not there: {0}")]
    Lost(AccessError),
    /// The caller cancelled.
    #[error("it was cancelled")]
    Cancelled,
}

impl Unclearable {
    /// Returns the kind of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Poisoned => ErrorKind::Poisoned,
            Self::Pinned { .. } | Self::Content(_) => ErrorKind::Busy,
            Self::Lost(error) => error.kind(),
            Self::Cancelled => ErrorKind::Cancelled,
        }
    }

    pub(crate) fn of(error: AdvanceError) -> Self {
        match error {
            AdvanceError::Pinned { pins } => Self::Pinned { pins },
            AdvanceError::Found { found: Content::Poisoned, .. } => Self::Poisoned,
            AdvanceError::Found { found, .. } => Self::Content(found),
            AdvanceError::Illegal { from, .. } => Self::Content(from),
            _ => Self::Content(Content::Unknown),
        }
    }
}

/// Why a page could not be produced.
#[derive(Clone)]
pub struct FaultError(std::sync::Arc<dyn std::error::Error + Send + Sync>);

impl FaultError {
    /// Takes the cause.
    #[must_use]
    pub fn new(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(cause.into().into())
    }
}

impl fmt::Debug for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for FaultError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

/// The same failure, not an equal one.
impl PartialEq for FaultError {
    fn eq(&self, other: &Self) -> bool {
        std::sync::Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for FaultError {}
